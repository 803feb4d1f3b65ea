"""Sums of values that are INT8 rows under their weights: rows with a scale a group, and rows with one a channel."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, enum, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.block_sums import SPACING, BlockSums, sum_width
from kvant.hw.attention.cache_shape import WEIGHT_BITS
from kvant.hw.attention.layouts import index_range
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.attention.row_factor import FACTOR_BITS, RowFactor
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.numeric.delay_line import DelayLine
from kvant.hw.numeric.floating import Pipeline

HALF_WEIGHT = WEIGHT_BITS // 2
"""Bits of each half of a weight that an element of a staged row is multiplied with."""


class RowPart(enum.Enum, shape=2):
    """What a word of sums is of.

    Members
    -------
    GROUPS
        Rows with a scale a group: block floating point.
    LOW, HIGH
        Rows with a scale a channel, exact: under the lower and the upper half of the weights.
    """

    GROUPS = 0
    LOW = 1
    HIGH = 2


def row_port(p: AttentionParameters) -> data.StructLayout:
    """Payload of the rows: `lanes` INT8 elements, the fp16 scale of each (finite, not negative), the end of a row."""
    return data.StructLayout(
        {"data": data.ArrayLayout(signed(8), p.lanes), "user": data.ArrayLayout(16, p.lanes), "last": 1}
    )


class ValueRows(wiring.Component):
    """Adds rows of values up under the weights of all queries, and the weights themselves.

    ::

        row_weights ──> two rows of weights ──┬──> RowFactor ──┬──> multipliers ──> BlockSums ──> look
                                              └──> halves ─────┘        ^
        rows ─────────> row register ─────────────── delay ─────────────┘

    A row with a scale a group adds ``w * s * q`` in block floating point (see `BlockSums`; the product of w and s is
    cut to 17 bits). A row with a scale a channel adds ``w * q``, exact: an element meets the two halves of the weight
    one after the other, and either half has its own sums of one place, which nothing is shifted out of. The scales are
    those of the last such row, and the same in all.

    Parameters
    ----------
    p : AttentionParameters

    Attributes
    ----------
    latency : int
        Cycles from a transfer's last turn until its sums can be read.

    Members
    -------
    start : in
        Begins; the numbers are stable from here on.
    count, group_rows, channel_rows : in
        Queries; rows with a scale a group, which come first, and rows with one a channel. They may be 0.
    row_weights : in stream
        For each row, for each query, the weight; the first one after `start`.
    rows : in stream
        `row_port`; surplus lanes of a row's last transfer are ignored. Of a group's scales the first lane's counts.
    done : out
        All rows are through; low from `start` on.
    look_enable, look_part, look_transfer, look_query : in
        Reads sums, while `done`.
    look, scales : out
        {place, sums} one cycle later, and the scales of the channels; they stay until the next reading.
    total_query, total : in, out
        Sum of the weights of a query, in the same cycle; 0 without rows.
    error : out
        High for one cycle: `last` is not where a row ends.
    """

    _factor_cycle = 1 + RowFactor.latency
    _sum_cycle = _factor_cycle + 2 - BlockSums.product_delay
    latency = 1 + _sum_cycle + BlockSums.latency

    def __init__(self, p: AttentionParameters):
        self.p = p.check_attention()
        self.least_turns = ceil_div(SPACING, p.row_transfers)
        self.sums = BlockSums(p.lanes, self._address(2, p.row_transfers - 1, p.queries - 1) + 1, sum_width(p.tokens))
        rows = range(p.tokens + 1)
        super().__init__(
            {
                "start": In(1),
                "count": In(range(p.queries + 1)),
                "group_rows": In(rows),
                "channel_rows": In(rows),
                "row_weights": In(stream.Signature(WEIGHT_BITS)),
                "rows": In(stream.Signature(row_port(p))),
                "done": Out(1),
                "look_enable": In(1),
                "look_part": In(RowPart),
                "look_transfer": In(index_range(p.row_transfers)),
                "look_query": In(index_range(p.queries)),
                "look": Out(self.sums.word),
                "scales": Out(data.ArrayLayout(16, p.lanes)),
                "total_query": In(index_range(p.queries)),
                "total": Out(p.total_width),
                "error": Out(1),
            }
        )

    def _address(self, part, transfer, query):
        """Word of sums, numbers or values."""
        query_bits, transfer_bits = (self.p.queries - 1).bit_length(), (self.p.row_transfers - 1).bit_length()
        if isinstance(part, int):
            return (part << transfer_bits | transfer) << query_bits | query
        return Cat(query[:query_bits], transfer[:transfer_bits], part)

    def elaborate(self, platform):
        p = self.p
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register
        transfers, query_bits = p.row_transfers, (p.queries - 1).bit_length()
        rows = self.rows.payload

        # Weights of a row, while those of the row before are in use. LUT memory.
        m.submodules.weights = weights = memory.Memory(shape=WEIGHT_BITS, depth=2 << query_bits, init=[])
        weight_write, weight_read = weights.write_port(), weights.read_port(domain="comb")
        filling, number = Signal(), Signal(index_range(p.queries))
        full = Signal(2)
        loads, loaded = Signal(), Signal()
        m.d.comb += [
            self.row_weights.ready.eq(~Mux(filling, full[1], full[0])),
            loads.eq(self.row_weights.valid & self.row_weights.ready),
            loaded.eq(loads & (number + 1 == self.count)),
            weight_write.addr.eq(Cat(number[:query_bits], filling)),
            weight_write.data.eq(self.row_weights.payload),
            weight_write.en.eq(loads),
        ]
        first_weights = Signal()
        with m.If(loads):
            m.d.sync += number.eq(Mux(loaded, 0, number + 1))
        with m.If(self.start):
            m.d.sync += first_weights.eq(1)
        with m.Elif(loaded):
            m.d.sync += first_weights.eq(0)

        # Their sums.
        m.submodules.totals = totals = memory.Memory(shape=p.total_width, depth=max(2, p.queries), init=[])
        total_write, total_read, total_look = (
            totals.write_port(),
            totals.read_port(domain="comb"),
            totals.read_port(domain="comb"),
        )
        any_rows = Signal()
        m.d.comb += [
            total_read.addr.eq(number),
            total_write.addr.eq(number),
            total_write.data.eq(Mux(first_weights, 0, total_read.data) + self.row_weights.payload),
            total_write.en.eq(loads),
            total_look.addr.eq(self.total_query),
            self.total.eq(Mux(any_rows, total_look.data, 0)),
        ]

        # Rows, a transfer at a time. It stays until every query has had its turns.
        group_rows, channel_rows = Signal.like(self.group_rows), Signal.like(self.channel_rows)  # still to come
        of_channels = group_rows == 0
        active = Signal()
        transfer = Signal(index_range(transfers))
        first_row = Signal()
        take, row_end = Signal(), Signal()
        held, held_end, held_final = Signal(), Signal(), Signal()
        using = Signal()  # weights of the row that is held
        m.d.comb += row_end.eq(transfer == transfers - 1)

        layout = data.StructLayout({"transfer": index_range(transfers), "channels": 1, "first": 1})
        now = Signal(layout, reset_less=True)
        x = Signal(data.ArrayLayout(signed(8), p.lanes), reset_less=True)
        scale = Signal(16, reset_less=True)
        turn = Signal(range(2 * max(self.least_turns, p.queries) + 1))
        turns = Mux(now.channels, self.count << 1, self.count)
        passes, goes, row_passes = Signal(), Signal(), Signal()
        m.d.comb += [
            goes.eq(held & (turn < turns)),
            passes.eq(~held | ((turn + 1 >= turns) & (turn + 1 >= self.least_turns))),
            row_passes.eq(held & passes & held_end),
            self.rows.ready.eq(active & passes & Mux(using ^ (held & held_end), full[1], full[0])),
            take.eq(self.rows.valid & self.rows.ready),
            self.error.eq(take & (rows.last != row_end)),
        ]
        for half in range(2):
            with m.If(loaded & (filling == half)):
                m.d.sync += full[half].eq(1)
            with m.Elif(row_passes & (using == half)):
                m.d.sync += full[half].eq(0)
        m.d.sync += [filling.eq(filling ^ loaded), using.eq(using ^ row_passes)]
        with m.If(passes):
            m.d.sync += [held.eq(take), turn.eq(0)]
        with m.Else():
            m.d.sync += turn.eq(turn + 1)
        last_row = (group_rows + channel_rows) == 1
        with m.If(self.start):
            m.d.sync += [
                group_rows.eq(self.group_rows),
                channel_rows.eq(self.channel_rows),
                active.eq((self.group_rows != 0) | (self.channel_rows != 0)),
                any_rows.eq((self.group_rows != 0) | (self.channel_rows != 0)),
                transfer.eq(0),
                first_row.eq(1),
            ]
        with m.Elif(take):
            m.d.sync += transfer.eq(Mux(row_end, 0, transfer + 1))
            with m.If(row_end):
                m.d.sync += [active.eq(~last_row), first_row.eq(group_rows == 1)]
                with m.If(of_channels):
                    m.d.sync += channel_rows.eq(channel_rows - 1)
                with m.Else():
                    m.d.sync += group_rows.eq(group_rows - 1)
        with m.If(take):
            m.d.sync += [
                x.eq(rows.data),
                scale.eq(rows.user[0]),
                now.transfer.eq(transfer),
                now.channels.eq(of_channels),
                now.first.eq(first_row),
                held_end.eq(row_end),
                held_final.eq(row_end & last_row),
            ]
        ended = pipeline.valid(held & passes & held_final, cycles=self.latency - 1)
        with m.If(self.start):
            m.d.sync += self.done.eq((self.group_rows == 0) & (self.channel_rows == 0))
        with m.Elif(ended):
            m.d.sync += self.done.eq(1)

        # Scales of channels; written with rows, read after them.
        m.submodules.scales = scales = memory.Memory(
            shape=16 * p.lanes, depth=max(2, transfers), init=[], attrs={"no_rw_check": 1}
        )
        scale_write, scale_read = scales.write_port(), scales.read_port()
        m.d.comb += [
            scale_write.addr.eq(transfer),
            scale_write.data.eq(rows.user),
            scale_write.en.eq(take & of_channels),
            scale_read.addr.eq(self.look_transfer),
            scale_read.en.eq(self.look_enable),
            self.scales.eq(scale_read.data),
        ]

        # A turn: its weight, cycle 1; the factor.
        query = Mux(now.channels, turn >> 1, turn)[: len(Signal(index_range(p.queries)))]
        high = turn[0]
        m.submodules.factor = factor = RowFactor()
        m.d.comb += [
            weight_read.addr.eq(Cat(query[:query_bits], using)),
            factor.weight.eq(register(weight_read.data, "weight")),
            factor.scale.eq(register(scale, "scale")),
        ]
        halves = Mux(high, weight_read.data[HALF_WEIGHT:], weight_read.data[:HALF_WEIGHT])
        half = register(halves, "half", cycles=self._factor_cycle)
        channels = register(now.channels, "channels", cycles=self._factor_cycle)
        part = Mux(now.channels, Mux(high, RowPart.HIGH.value, RowPart.LOW.value), RowPart.GROUPS.value)
        m.submodules.elements = elements_line = DelayLine(x.shape(), self._factor_cycle)
        m.d.comb += elements_line.i.eq(x)

        # Then the products. Exact sums have place 1, whatever the weight.
        elements = data.View(x.shape(), register(elements_line.o.as_value(), "elements"))
        operand = register(Mux(channels, half, factor.factor)[:FACTOR_BITS], "operand")
        operand = Cat(operand, Const(0, 1)).as_signed()
        m.submodules.sums = sums = self.sums
        m.d.comb += [
            sums.valid.eq(pipeline.valid(goes, cycles=self._sum_cycle)),
            sums.address.eq(register(self._address(part, now.transfer, query), "address", cycles=self._sum_cycle)),
            sums.first.eq(register(now.first, "first", cycles=self._sum_cycle)),
            sums.place.eq(register(Mux(channels, 1, factor.place), "place")),
            *(sums.products[lane].eq(register(elements[lane] * operand, "product")) for lane in range(p.lanes)),
            sums.look_enable.eq(self.look_enable),
            sums.look_address.eq(self._address(self.look_part.as_value(), self.look_transfer, self.look_query)),
            self.look.eq(sums.look),
        ]
        return m
