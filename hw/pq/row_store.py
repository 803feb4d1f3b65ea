"""The memory of fp16 rows of a product-quantised cache: what goes in is finite, and centred if it is a key."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.coefficient import TableEntryWrite
from kvant.hw.kvcache.layouts import Table
from kvant.hw.numeric.centring import Centring
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.numeric.int8_quantizer import FP16_MAX
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.ring_layouts import RingShape


class FiniteElements(wiring.Component):
    """The port rule alone: NaN counts as 0, an infinity as 65504 of its sign. A zero is +0, as behind `Centring`.

    Attributes
    ----------
    latency : int

    Members
    -------
    x, y : in, out
        fp16 elements.
    nonfinite : out
        Of each lane, whether x was NaN or infinite.
    """

    latency = 1

    def __init__(self, lanes: int):
        self.lanes = lanes
        elements = data.ArrayLayout(16, lanes)
        super().__init__({"x": In(elements), "y": Out(elements), "nonfinite": Out(lanes)})

    def elaborate(self, platform):
        m = Module()
        for lane in range(self.lanes):
            x = self.x[lane]
            special = x[10:15].all()
            magnitude = Mux(special, Mux(x[:10].any(), 0, FP16_MAX), x[:15])
            m.d.sync += [
                self.y[lane].eq(Cat(magnitude, x[15] & magnitude.any())),
                self.nonfinite[lane].eq(special),
            ]
        return m


class RowStore(wiring.Component):
    """Rows of all contexts, written as they come and read word by word.

    Rows take the port rule and, if `centred` and keys, lose the means of their head: ``fp16(x - mean)``. Zeros become
    +0. Elements of surplus lanes become 0.

    Parameters
    ----------
    p : PqParameters
    shape : RingShape

    Attributes
    ----------
    latency : int
        Cycles from a transfer at the port to the first cycle in which its word may be read.
    read_latency : int
        Cycles from a read to its word.

    Members
    -------
    write : in
        Changes the means; other kinds are ignored. Not while a row of the head is under way.
    enter, data, row, transfer, row_end, store, head : in
        A transfer goes in, any time.
    nonfinite : out
        One cycle: an element that counts was not finite.
    idle : out
        Nothing is on its way to the memory.
    read, address : in
        Read this word. Never one whose row is on its way.
    word : out
    """

    read_latency = 2

    def __init__(self, p: PqParameters, shape: RingShape):
        self.p = p
        self.shape = shape
        self._rule = Centring(p.lanes) if p.centred else FiniteElements(p.lanes)
        self._to_rule = 3 if p.centred else 1
        # The transfer's register, the means' memory and the register behind it; the rule; the register before the
        # memory of rows, and that itself.
        self.latency = self._to_rule + self._rule.latency + 2
        elements = data.ArrayLayout(16, p.lanes)
        super().__init__(
            {
                "write": In(TableEntryWrite()),
                "enter": In(1),
                "data": In(elements),
                "row": In(range(shape.contexts * shape.context_rows)),
                "transfer": In(range(max(2, p.row_transfers))),
                "row_end": In(1),
                "store": In(1),
                "head": In(8),
                "nonfinite": Out(1),
                "idle": Out(1),
                "read": In(1),
                "address": In(range(max(2, shape.words))),
                "word": Out(elements),
            }
        )

    def elaborate(self, platform):
        p, shape = self.p, self.shape
        m = Module()
        register = Pipeline(m).register
        m.submodules.rule = rule = self._rule
        delay = self._to_rule + rule.latency

        x = register(self.data.as_value(), "x")
        if p.centred:
            m.d.comb += rule.mean.eq(self._mean(m))
            x = register(x, "x_again", cycles=2)
        m.d.comb += rule.x.eq(x)

        # What belongs to the transfer. The address is made on the way.
        entered = Signal(delay)
        m.d.sync += entered.eq(Cat(self.enter, entered))
        row, transfer = register(self.row, "row"), register(self.transfer, "transfer")
        address = Signal(range(max(2, shape.words)))
        m.d.sync += address.eq(row * p.row_transfers + transfer)
        address = register(address, "address", cycles=delay - 2)
        row_end = register(self.row_end, "row_end", cycles=delay)

        # No word is read and written in one cycle: rows are read once they are there, and a slot is filled once its
        # row has been read by all.
        m.submodules.words = words = memory.Memory(
            shape=data.ArrayLayout(16, p.lanes), depth=max(2, shape.words), init=[], attrs={"no_rw_check": 1}
        )
        write, read = words.write_port(), words.read_port()
        enable = Signal()
        m.d.sync += [enable.eq(entered[-1]), write.addr.eq(address)]
        m.d.comb += write.en.eq(enable)
        tail_lanes = p.head_dim - (p.row_transfers - 1) * p.lanes
        special = []
        for lane in range(p.lanes):
            surplus = row_end if lane >= tail_lanes else Const(0)
            m.d.sync += write.data[lane].eq(Mux(surplus, 0, rule.y[lane]))
            special.append(rule.nonfinite[lane] & ~surplus)
        m.d.sync += self.nonfinite.eq(entered[-1] & Cat(special).any())
        m.d.comb += [
            self.idle.eq(~entered.any() & ~enable & ~self.nonfinite),
            read.en.eq(self.read),
            read.addr.eq(self.address),
        ]
        m.d.sync += self.word.eq(read.data)
        return m

    def _mean(self, m: Module):
        """Means of the transfer that came three cycles before; 0 for values."""
        p = self.p
        transfer_bits = (p.row_transfers - 1).bit_length()
        lane_bits = p.lanes.bit_length() - 1
        # Keys of a head and writes of its means are never under way together.
        m.submodules.means = means = memory.Memory(
            shape=data.ArrayLayout(16, p.lanes),
            depth=max(2, p.heads << transfer_bits),
            init=[],
            attrs={"no_rw_check": 1},
        )
        write, read = means.write_port(granularity=1), means.read_port()
        item = self.write.data
        chosen, lane, values = Signal(), Signal(max(1, lane_bits)), Signal(2)
        m.d.sync += [
            chosen.eq(self.write.valid & (item.kind == Table.MEAN) & (item.head < p.heads) & (item.index < p.head_dim)),
            lane.eq(item.index[:lane_bits]),
            write.addr.eq(Cat(item.index[lane_bits:][:transfer_bits], item.head)[: len(write.addr)]),
            *(write.data[k].eq(item.value) for k in range(p.lanes)),
            values.eq(Cat(self.store, values)),
            read.addr.eq(Cat(self.transfer[:transfer_bits], self.head)[: len(read.addr)]),
            read.en.eq(self.enter & ~self.store),
        ]
        m.d.comb += [write.en[k].eq(chosen & (lane == k)) for k in range(p.lanes)]
        mean = Signal(data.ArrayLayout(16, p.lanes))
        m.d.sync += [mean[k].eq(Mux(values[1], 0, read.data[k])) for k in range(p.lanes)]
        return mean
