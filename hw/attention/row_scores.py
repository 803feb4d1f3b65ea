"""Logarithms of INT8 rows: groups of a row, each with a scale of its own, make one logarithm of a weight."""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_shape import INT8_MAGNITUDE, CacheShape
from kvant.hw.attention.layouts import index_range
from kvant.hw.attention.scaler import LOG_WIDTH, ScoreFactor, ScoreScaler
from kvant.hw.linear.parameters import ceil_div, signed_width
from kvant.hw.numeric.floating import Pipeline


class RowScores(wiring.Component):
    """Logarithms of weights from partial dot products: the sum of each group, its scaling, the sum over the groups.

    Parameters
    ----------
    p : CacheShape
    queries : int

    Attributes
    ----------
    latency : int
        Cycles from a row's last partial sum to z.

    Members
    -------
    scale_write, scale_vector, query_scale : in
        Stores the scale of a query.
    valid, vector : in
        A partial sum of a query with a transfer of a row. The sums of a group's transfers of one query follow each
        other in any number of cycles.
    partial : in, signed
    first, last : in
        First and last transfer of its group.
    first_group, last_group : in
        First and last group of its row.
    scale : in
        fp16 scale of the group.
    o_valid, o_vector, z : out
        In the order of the rows' last partial sums.
    """

    _scaled = 1 + ScoreFactor.latency + ScoreScaler.latency  # cycle in which the logarithm of a group is there
    latency = _scaled + 2

    def __init__(self, p: CacheShape, queries: int):
        self.p = p
        self.queries = queries
        self.group = min(p.group, p.head_dim)
        self.sum_width = signed_width(INT8_MAGNITUDE**2 * self.group)
        self.partial_width = signed_width(INT8_MAGNITUDE**2 * min(p.lanes, self.group))
        vector = index_range(queries)
        super().__init__(
            {
                "scale_write": In(1),
                "scale_vector": In(vector),
                "query_scale": In(16),
                "valid": In(1),
                "vector": In(vector),
                "partial": In(signed(self.partial_width)),
                "first": In(1),
                "last": In(1),
                "first_group": In(1),
                "last_group": In(1),
                "scale": In(16),
                "o_valid": Out(1),
                "o_vector": Out(vector),
                "z": Out(signed(LOG_WIDTH)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register
        m.submodules.factor = factor = ScoreFactor(self.p.head_dim)
        m.submodules.scaler = scaler = ScoreScaler(self.sum_width)

        def table(name, shape):
            """A word per query in LUT RAM, read in the cycle in which it is asked for."""
            m.submodules[name] = words = memory.Memory(shape=shape, depth=max(2, self.queries), init=[])
            return words.write_port(), words.read_port(domain="comb")

        # Cycle 0: the sum of the group so far.
        sums_write, sums_read = table("sums", signed(self.sum_width))
        scales_write, scales_read = table("scales", 16)
        r = Signal(signed(self.sum_width))
        m.d.comb += [
            sums_read.addr.eq(self.vector),
            r.eq(Mux(self.first, 0, sums_read.data) + self.partial),
            sums_write.addr.eq(self.vector),
            sums_write.data.eq(r),
            sums_write.en.eq(self.valid),
            scales_write.addr.eq(self.scale_vector),
            scales_write.data.eq(self.query_scale),
            scales_write.en.eq(self.scale_write),
            scales_read.addr.eq(self.vector),
        ]

        # From cycle 1: a complete group, times its factor.
        m.d.comb += [
            factor.query_scale.eq(register(scales_read.data, "query_scale")),
            factor.scale.eq(register(self.scale, "scale")),
            scaler.a.eq(register(r, "r", cycles=1 + factor.latency)),
            scaler.b.eq(factor.factor.mantissa),
            scaler.e.eq(factor.factor.exponent),
        ]

        # The sum of the groups of the row so far, in one cycle: the next group may be right behind.
        width = LOG_WIDTH + (ceil_div(self.p.head_dim, self.p.group) - 1).bit_length()
        rows_write, rows_read = table("rows", signed(width))
        complete = self.valid & self.last
        vector = register(self.vector, "vector", cycles=self._scaled)
        total = Signal(signed(width))
        m.d.comb += [
            rows_read.addr.eq(vector),
            total.eq(Mux(register(self.first_group, "first_group", cycles=self._scaled), 0, rows_read.data) + scaler.z),
            rows_write.addr.eq(vector),
            rows_write.data.eq(total),
            rows_write.en.eq(pipeline.valid(complete, cycles=self._scaled)),
        ]

        # Limited like the logarithm of a group: to the same magnitude on both sides.
        total = register(total, "total")
        sign, low, high = total[-1], total[: LOG_WIDTH - 1], total[LOG_WIDTH - 1 :]
        beyond = (high != sign.replicate(len(high))) | (sign & ~low.any())
        limited = Mux(beyond, Cat(1, (~sign).replicate(LOG_WIDTH - 2), sign), total[:LOG_WIDTH])
        m.d.comb += [
            self.z.eq(register(limited, "z")),
            self.o_valid.eq(pipeline.valid(complete & self.last_group, cycles=self.latency)),
            self.o_vector.eq(register(vector, "o_vector", cycles=self.latency - self._scaled)),
        ]
        return m
