"""What a cache keeps beside its pages, to the record of its sequence."""

from amaranth.hdl import Array, Const, Module, Mux, Signal, Value
from amaranth.lib import enum, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.page import SCALE_BYTES
from kvant.hw.kvcache.parameters import BLOCK_GROUPS, CacheParameters, ceil_div
from kvant.hw.kvcache.sinks import sink_output
from kvant.hw.kvcache.staged_reader import staged_output
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.axi_writer import write_word
from kvant.hw.soc.cache_memory import HALF_BYTES, CacheMemory
from kvant.hw.soc.parameters import SocParameters


class RecordPart(enum.Enum, shape=2):
    """Parts of a `CacheRecord`."""

    KEY_SINKS = 0
    VALUE_SINKS = 1
    VALUE_SCALES = 2
    VALUE_WINDOW = 3


class RecordWriter(wiring.Component):
    """Writes rows one behind the other to a part of a record, piece by piece: a word of a transfer, or a scale.

    Parameters
    ----------
    p : CacheParameters
    soc : SocParameters

    Members
    -------
    start, part, row, record : in
        What comes next are rows of this part, the first of which has this number there; the word address of the
        record. Only while `idle`.
    sink : in stream
        `sink_output`: rows of the two parts of sinks.
    staged : in stream
        `staged_output`: rows of the open window, or, for the scales, any one row, of which they are taken.
    o : out stream
        `write_word`; pieces of a word follow each other.
    idle : out
        Nothing is held or offered.
    """

    def __init__(self, p: CacheParameters, soc: SocParameters):
        self.p = p
        self.soc = soc
        self.record_layout = CacheMemory(p, soc.port_bytes).record
        super().__init__(
            {
                "start": In(1),
                "part": In(RecordPart),
                "row": In(range(max(p.sinks, p.group) + 1)),
                "record": In(word_address_bits(soc)),
                "sink": In(stream.Signature(sink_output(p))),
                "staged": In(stream.Signature(staged_output(p))),
                "o": Out(stream.Signature(write_word(soc))),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform):
        p, layout, port_bytes = self.p, self.record_layout, self.soc.port_bytes
        m = Module()
        part, begun = Signal(RecordPart), Signal()
        of_keys, of_sinks, wide = (Signal() for _ in range(3))
        m.d.comb += [
            of_keys.eq(part == RecordPart.KEY_SINKS),
            of_sinks.eq(of_keys | (part == RecordPart.VALUE_SINKS)),
            wide.eq(part == RecordPart.VALUE_SCALES),
        ]
        # Byte addresses of the next piece: of elements, and of a scale of a sink. No piece lies in two words.
        elements, scales, sink_row = (Signal(self.soc.address_bits) for _ in range(3))
        group = Signal(range(BLOCK_GROUPS))  # of a key, in its block

        # Place of the transfer in its row.
        transfer, group_transfer = Signal(range(max(2, p.row_transfers))), Signal(range(max(2, p.group_transfers)))
        row_end, group_end = Signal(), Signal()
        m.d.comb += [
            row_end.eq(transfer == p.row_transfers - 1),
            group_end.eq(row_end | (group_transfer == p.group_transfers - 1)),
        ]

        # Its words.
        tail = p.head_dim - (p.row_transfers - 1) * p.lanes
        most_words = ceil_div(HALF_BYTES * p.lanes, port_bytes)
        words, step = Signal(range(most_words + 1)), Signal(range(max(2, most_words)))
        with m.If(wide):
            m.d.comb += words.eq(Mux(row_end, ceil_div(HALF_BYTES * tail, port_bytes), most_words))
        with m.Elif(row_end & ~of_keys):
            m.d.comb += words.eq(ceil_div(tail, port_bytes))
        with m.Else():  # a group of a key is written to its end
            m.d.comb += words.eq(ceil_div(p.lanes, port_bytes))
        filling, scale, plane_word = Signal(), Signal(16), Signal(range(BLOCK_GROUPS * SCALE_BYTES // port_bytes + 1))
        sizes = (min(port_bytes, HALF_BYTES * p.lanes), min(port_bytes, p.lanes))
        size, strobes = Mux(wide, *sizes), Mux(wide, *((1 << size) - 1 for size in sizes))
        of_scale, valid, moves, ends = (Signal() for _ in range(4))
        payload = self._payload(m, wide, of_sinks, row_end, filling)
        data = Array(payload.word_select(k, self.soc.port_bits) for k in range(most_words))[step]
        with m.If(~self.o.valid | self.o.ready):
            m.d.comb += moves.eq(valid)
            m.d.sync += self.o.valid.eq(valid)
            with m.If(of_scale):
                self._scale(m, scale, scales, plane_word)
            with m.Else():
                self._elements(m, data, elements, strobes)
        m.d.comb += ends.eq(moves & ~of_scale & (step == words - 1))
        with m.If(moves & ~of_scale):
            m.d.sync += [elements.eq(elements + size), step.eq(Mux(ends, 0, step + 1))]

        fills = p.group_transfers - ceil_div(p.tail, p.lanes)  # transfers that a short last group lacks
        fill = Signal(range(max(2, fills)))
        row_ended = Signal()
        available = Mux(of_sinks, self.sink.valid, self.staged.valid)
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.idle.eq(~self.o.valid & ~(begun & available))
                with m.If(self.start):
                    m.d.sync += [begun.eq(1), part.eq(self.part)]
                    self._offsets(m, elements, scales, group)
                    m.next = "ADDRESS"
                with m.Elif(begun & available):
                    m.next = "TRANSFER"
            with m.State("ADDRESS"):
                record = self.record << self.soc.align_bits
                m.d.sync += [
                    elements.eq(elements + record),
                    scales.eq(scales + record),
                    sink_row.eq(elements + record),
                ]
                m.next = "IDLE"
            with m.State("TRANSFER"):
                m.d.comb += valid.eq(available)
                with m.If(ends):
                    m.d.comb += [self.sink.ready.eq(of_sinks), self.staged.ready.eq(~of_sinks)]
                    m.d.sync += [
                        scale.eq(self.sink.payload.user.scale),
                        row_ended.eq(row_end),
                        transfer.eq(Mux(row_end, 0, transfer + 1)),
                        group_transfer.eq(Mux(group_end, 0, group_transfer + 1)),
                    ]
                    with m.If(of_sinks & group_end):
                        m.next = "SCALE"
                        if fills:
                            with m.If(of_keys & row_end):
                                m.next = "FILL"
                    with m.Elif(row_end):
                        m.next = "ROW"
            if fills:
                with m.State("FILL"):
                    m.d.comb += [valid.eq(1), filling.eq(1)]
                    with m.If(ends):
                        m.d.sync += fill.eq(fill + 1)
                        with m.If(fill == fills - 1):
                            m.d.sync += fill.eq(0)
                            m.next = "SCALE"
            with m.State("SCALE"):
                m.d.comb += [valid.eq(1), of_scale.eq(1)]
                with m.If(moves):
                    # Behind the scale of the first group of a block all others are 0, until their groups come.
                    last_word = plane_word == Mux(group == 0, BLOCK_GROUPS * SCALE_BYTES // port_bytes - 1, 0)
                    with m.If(of_keys & ~last_word):
                        m.d.sync += plane_word.eq(plane_word + 1)
                    with m.Else():
                        m.d.sync += [scales.eq(scales + SCALE_BYTES), plane_word.eq(0)]
                        m.next = "GROUP"
            with m.State("GROUP"):
                m.next = "IDLE"
                with m.If(of_keys):
                    m.d.sync += group.eq(group + 1)
                    with m.If(group == BLOCK_GROUPS - 1):
                        m.d.sync += [
                            elements.eq(elements + BLOCK_GROUPS * SCALE_BYTES),
                            scales.eq(scales + BLOCK_GROUPS * p.group),
                        ]
                with m.Elif(row_ended):
                    following = sink_row + layout.sink_row_bytes
                    m.d.sync += [
                        sink_row.eq(following),
                        elements.eq(following),
                        scales.eq(following + layout.row_bytes),
                    ]
            with m.State("ROW"):  # the next one begins with a word
                m.d.sync += elements.eq((elements + (port_bytes - 1)) & ~(port_bytes - 1))
                m.next = "IDLE"
        return m

    def _offsets(self, m: Module, elements: Signal, scales: Signal, group: Signal) -> None:
        """Where row `row` of the part lies in the record."""
        layout, number = self.record_layout, self.row * self.p.row_groups
        with m.Switch(self.part):
            with m.Case(RecordPart.KEY_SINKS):
                in_block = number[: (BLOCK_GROUPS - 1).bit_length()]
                block = layout.key_sinks.offset + (number >> len(in_block)) * layout.sink_block_bytes
                m.d.sync += [
                    group.eq(in_block),
                    elements.eq(block + in_block * self.p.group),
                    scales.eq(block + layout.sink_scales + in_block * SCALE_BYTES),
                ]
            with m.Case(RecordPart.VALUE_SINKS):
                row = layout.value_sinks.offset + self.row * layout.sink_row_bytes
                m.d.sync += [elements.eq(row), scales.eq(row + layout.row_bytes)]
            with m.Case(RecordPart.VALUE_SCALES):
                m.d.sync += elements.eq(layout.value_scales.offset)
            with m.Case(RecordPart.VALUE_WINDOW):
                m.d.sync += elements.eq(layout.value_window.offset + self.row * layout.row_bytes)

    def _payload(self, m: Module, wide: Value, of_sinks: Value, row_end: Value, filling: Value) -> Signal:
        """Bytes of the transfer, 0 where it has none; whole words."""
        p, bits = self.p, self.soc.port_bits
        payload = Signal(ceil_div(8 * HALF_BYTES * p.lanes, bits) * bits)
        tail = p.head_dim - (p.row_transfers - 1) * p.lanes
        with m.If(wide):
            m.d.comb += payload.eq(self.staged.payload.user.as_value())
        with m.Elif(~filling):
            for lane in range(p.lanes):
                byte = Mux(of_sinks, self.sink.payload.data[lane], self.staged.payload.data[lane])
                surplus = row_end if lane >= tail else 0
                m.d.comb += payload[8 * lane : 8 * lane + 8].eq(Mux(surplus, 0, byte))
        return payload

    def _elements(self, m: Module, data: Value, address: Value, strobes: Value) -> None:
        """The word with the lowest bytes of *data* at their place."""
        word, offset = self.o.payload, address[: self.soc.align_bits]
        m.d.sync += [
            word.address.eq(address >> self.soc.align_bits),
            word.data.eq(data << (offset << 3)),
            word.strobes.eq(strobes << offset),
        ]

    def _scale(self, m: Module, scale: Value, address: Value, further: Value) -> None:
        """The word with the scale, and zeros behind it; then further ones of zeros."""
        word, offset = self.o.payload, address[: self.soc.align_bits]
        first, whole = further == 0, Const((1 << self.soc.port_bytes) - 1, self.soc.port_bytes)
        m.d.sync += [
            word.address.eq((address >> self.soc.align_bits) + further),
            word.data.eq(Mux(first, scale, 0) << (offset << 3)),
            word.strobes.eq(Mux(first, whole << offset, whole)),
        ]
