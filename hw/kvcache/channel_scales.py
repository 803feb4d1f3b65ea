"""Numbers that belong to the channels of a head: tables written at run time, and the INT8 scales of a prefill."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.coefficient import TableEntryWrite
from kvant.hw.kvcache.layouts import Table
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.row_memory import RowMemory
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.numeric.int8_quantizer import Int8Scale, unpack


class ChannelTable(wiring.Component):
    """An fp16 number per channel and head, written one by one and read by transfers.

    At power-up all of them are 0; a reset changes none. They are not to be written while rows of their head are under
    way.

    Parameters
    ----------
    p : CacheParameters
    kind : Table
        Kind of the writes that it takes; other kinds, heads that there are none of and channels beyond the last one
        are ignored.

    Attributes
    ----------
    latency : int
        Cycles from address to numbers.

    Members
    -------
    write : in
    enable, address : in
        Transfer ``head * p.row_transfers + transfer`` to read.
    numbers : out
        Of its channels.
    """

    latency = 2

    def __init__(self, p: CacheParameters, kind: Table):
        self.p = p
        self.kind = kind
        self.words = p.heads * p.row_transfers
        super().__init__(
            {
                "write": In(TableEntryWrite()),
                "enable": In(1),
                "address": In(range(max(2, self.words))),
                "numbers": Out(data.ArrayLayout(16, p.lanes)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        shape = data.ArrayLayout(16, p.lanes)
        m.submodules.table = table = memory.Memory(
            shape=shape, depth=max(2, self.words), init=[], attrs={"no_rw_check": 1}
        )
        write, read = table.write_port(granularity=1), table.read_port()
        item = self.write.data
        lane_bits = p.lanes.bit_length() - 1
        take = Signal()
        lanes = Signal(p.lanes)
        m.d.comb += take.eq(
            self.write.valid & (item.kind == self.kind) & (item.head < p.heads) & (item.index < p.head_dim)
        )
        for lane in range(p.lanes):
            m.d.comb += lanes[lane].eq(take & (item.index[:lane_bits] == lane if lane_bits else 1))
            m.d.sync += write.data[lane].eq(item.value)
        m.d.sync += [write.en.eq(lanes), write.addr.eq(item.head * p.row_transfers + item.index[lane_bits:])]
        m.d.comb += [
            read.addr.eq(self.address),
            read.en.eq(self.enable),
            # A block memory answers late in the cycle.
            self.numbers.eq(Pipeline(m).register(read.data, "numbers")),
        ]
        return m


class ChannelScales(wiring.Component):
    """INT8 scales of the channels: largest magnitude of a scan over the prefill, at least the floor, over 127.

    ``s8 = fp16(max / 127)`` is the largest of ``fp16(|v| / 127)``, because rounding does not change an order: the scan
    takes the maximum of rounded quotients, and the first of its rows begins with the floor's. The scales of a sequence
    that goes on come as a row instead.
    Source: docs/numerics.md, "The V cache".

    Parameters
    ----------
    p : CacheParameters
    looks : int
        Read ports beside the pipeline.

    Attributes
    ----------
    magnitude_delay : int
        Cycles after the address in which magnitudes are read.
    latency : int
        Cycles from address to scales.

    Members
    -------
    write : in
        Changes the floors.
    valid, address, scan, first, loads, skip, tail : in
        A transfer of a row and its place; it belongs to the scan, to the scan's first row, to a row of scales (which is
        one of the scan), to a row that takes no part; it is the last one of its row, whose surplus lanes have scale 0.
    magnitudes : in
        Of its elements, finite, `magnitude_delay` cycles later.
    scales : out
        Of its channels as all earlier transfers left them.
    look_enable, look_address, look : in, in, out
        See `RowMemory`.
    """

    magnitude_delay = ChannelTable.latency
    latency = magnitude_delay + 1 + RowMemory.decision

    def __init__(self, p: CacheParameters, *, looks: int = 1):
        self.p = p
        words = p.heads * p.row_transfers
        self._memory = RowMemory(data.ArrayLayout(16, p.lanes), words, p.row_transfers, looks=looks)
        self._floors = ChannelTable(p, Table.FLOOR)
        flags = ["valid", "scan", "first", "loads", "skip", "tail"]
        super().__init__(
            {
                "write": In(TableEntryWrite()),
                **dict.fromkeys(flags, In(1)),
                "address": In(range(max(2, words))),
                "magnitudes": In(data.ArrayLayout(15, p.lanes)),
                "scales": Out(data.ArrayLayout(16, p.lanes)),
                **{name: self._memory.signature.members[name] for name in ("look_enable", "look_address", "look")},
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        register = Pipeline(m).register
        m.submodules.floors = floors = self._floors
        m.submodules.memory = scales = self._memory
        for name in ("look_enable", "look_address"):
            for port, given in zip(getattr(scales, name), getattr(self, name), strict=True):
                m.d.comb += port.eq(given)
        for seen, port in zip(self.look, scales.look, strict=True):
            m.d.comb += seen.eq(port)
        # What starts an access, and what lets it write, is reset; the rest travels along.
        valid, scan = Signal(self.magnitude_delay + 1), Signal(self.latency)
        m.d.sync += [
            valid.eq((valid << 1) | self.valid),
            scan.eq((scan << 1) | (self.valid & self.scan)),
        ]
        m.d.comb += [
            floors.write.eq(self.write),
            floors.enable.eq(self.valid),
            floors.address.eq(self.address),
            scales.valid.eq(valid[-1]),
            scales.address.eq(register(self.address, "address", cycles=self.magnitude_delay + 1)),
            scales.write.eq(scan[-1]),
        ]

        first = register(self.first, "first", cycles=self.magnitude_delay)
        skip = register(self.skip, "skip", cycles=self.magnitude_delay)
        tail = register(self.tail, "tail", cycles=self.magnitude_delay)
        begins = register(first, "begins", cycles=1 + RowMemory.decision)
        loads = register(self.loads, "loads", cycles=self.latency)
        surplus_from = p.head_dim - (p.row_transfers - 1) * p.lanes
        for lane in range(p.lanes):
            # The floor, in the first row, and the element.
            floor = Mux(first, floors.numbers[lane][:15], 0)
            if lane >= surplus_from:
                floor = Mux(tail, 0, floor)
            magnitude = Mux(skip, 0, self.magnitudes[lane])
            larger = register(Mux(magnitude < floor, floor, magnitude)[:15], "larger")
            m.submodules[f"quotient_{lane}"] = quotient = Int8Scale()
            m.d.comb += quotient.absmax.eq(unpack(larger))
            old = scales.old[lane]
            keeps = ~begins & (quotient.scale < old)
            loaded = register(self.magnitudes[lane], "loaded", cycles=1 + RowMemory.decision)
            m.d.comb += [
                scales.new[lane].eq(Mux(loads, loaded, Mux(keeps, old, quotient.scale))),
                self.scales[lane].eq(old),
            ]
        return m
