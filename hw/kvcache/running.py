"""Statistics of the windows of a cache along time, grown row by row."""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.row_memory import RowMemory
from kvant.hw.numeric.adders import adder_strategy
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.parameters import check_integer


class ChannelSums(data.StructLayout):
    """What is known of a channel's rows so far: sum, sum of squares, maximum and minimum."""

    def __init__(self, p: CacheParameters):
        super().__init__(
            {"sum": signed(p.sum_width), "sumsq": p.sumsq_width, "maximum": signed(8), "minimum": signed(8)}
        )


class RunningSums(wiring.Component):
    """Adds staged rows to the sums of their channels; the last row of a window closes them.

    The sums of an open window live in a `RowMemory`. Its last row writes them to another memory instead, which keeps
    them until the window is encoded: a place for each of `slots` windows of a head.

    Parameters
    ----------
    p : CacheParameters
    slots : int
        Closed windows of a head that are kept, a power of two.

    Attributes
    ----------
    latency : int
        Cycles from a transfer's address until its sums may be read, if it closes them.

    Members
    -------
    valid : in
        A transfer of a staged row.
    address : in
        Its place: ``head * p.row_transfers + transfer``.
    first, last : in
        It belongs to the first, the last row of the window.
    slot : in
        Where the window's sums go.
    q : in
        Elements, one cycle after their address; -127 .. 127.
    read_enable, read_address, read_slot : in
        Read closed sums.
    sums : out
        Of `p.lanes` channels, one cycle later; stay until the next reading.
    """

    latency = 4

    def __init__(self, p: CacheParameters, slots: int):
        self.p = p
        self.slots = check_integer("slots", slots, 2)
        self.words = p.heads * p.row_transfers
        address, slot = range(max(2, self.words)), range(slots)
        super().__init__(
            {
                "valid": In(1),
                "address": In(address),
                "first": In(1),
                "last": In(1),
                "slot": In(slot),
                "q": In(data.ArrayLayout(signed(8), p.lanes)),
                "read_enable": In(1),
                "read_address": In(address),
                "read_slot": In(slot),
                "sums": Out(data.ArrayLayout(ChannelSums(p), p.lanes)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        register = Pipeline(m).register
        adder = adder_strategy(p.adder)
        word = data.ArrayLayout(ChannelSums(p), p.lanes)
        m.submodules.open = open_sums = RowMemory(word, self.words, p.row_transfers)
        # A slot is read after its window is closed, and written again only after that window's rows are free.
        m.submodules.closed = closed = memory.Memory(
            shape=word, depth=self.slots * self.words, init=[], attrs={"no_rw_check": 1}
        )
        write, read = closed.write_port(), closed.read_port()

        m.d.comb += [open_sums.valid.eq(self.valid), open_sums.address.eq(self.address)]
        first = register(self.first, "first", cycles=2)
        valid, last = Signal(3), Signal(3)
        m.d.sync += [valid.eq(Cat(self.valid, valid)), last.eq(Cat(self.last, last))]

        # Cycle 1: squares, below 2**14. (A magnitude would need fewer bits, but a carry chain before the product.)
        # Cycle 2: sums.
        new = Signal(word)
        for lane in range(p.lanes):
            q = self.q[lane]
            square = register((q * q)[:14], "square")
            q = register(q, "q")
            old = open_sums.old[lane]
            total = adder.add(m, f"sum_{lane}", Mux(first, 0, old.sum), q, width=p.sum_width)
            squares = adder.add(
                m,
                f"sumsq_{lane}",
                Mux(first, 0, old.sumsq).as_signed(),
                Cat(square, 0).as_signed(),
                width=p.sumsq_width,
            )
            m.d.comb += [
                new[lane].sum.eq(total),
                new[lane].sumsq.eq(squares),
                new[lane].maximum.eq(Mux(first | (q > old.maximum), q, old.maximum)),
                new[lane].minimum.eq(Mux(first | (q < old.minimum), q, old.minimum)),
            ]
        m.d.comb += [
            open_sums.new.eq(new),
            open_sums.write.eq(valid[1] & ~last[1]),
            write.addr.eq(
                register(self.slot, "slot", cycles=3) * self.words + register(self.address, "address", cycles=3)
            ),
            write.data.eq(register(new, "closing")),
            write.en.eq(valid[2] & last[2]),
            read.addr.eq(self.read_slot * self.words + self.read_address),
            read.en.eq(self.read_enable),
            self.sums.eq(read.data),
        ]
        return m
