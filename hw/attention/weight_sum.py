"""Sum of the weights of windows: of the very INT8 elements and scales that multiply the values."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.floating import shift_up
from kvant.hw.attention.layouts import index_range
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.linear.activation_buffer import quantized_output
from kvant.hw.linear.parameters import signed_width
from kvant.hw.numeric.adder_tree import tree_levels, tree_sum
from kvant.hw.numeric.floating import Pipeline


class WeightSum(wiring.Component):
    """Adds up ``s8 * sum(q)`` of the activation groups of a value job, for each query, in units of 2^-24, exact.

    Parameters
    ----------
    p : AttentionParameters

    Attributes
    ----------
    latency : int
        Cycles from the last transfer of a group until its sum can be read.

    Members
    -------
    start : in
        A value job begins.
    count : in
        Its queries.
    valid, xq : in
        `quantized_output` of the linear path as it is taken. Groups of the queries take turns.
    query : in
    total : out
        Sum of a query, in the same cycle.
    """

    def __init__(self, p: AttentionParameters):
        self.p = p
        self.latency = tree_levels(p.rows) + 6
        super().__init__(
            {
                "start": In(1),
                "count": In(range(p.queries + 1)),
                "valid": In(1),
                "xq": In(quantized_output(p.linear)),
                "query": In(index_range(p.queries)),
                "total": Out(p.denominator_width),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register

        # The sum of a group.
        levels = tree_levels(p.rows)
        word = tree_sum(pipeline, [self.xq.data[k] for k in range(p.rows)], "word")
        valid, last, scale = self.valid, self.xq.last, self.xq.user
        if levels:
            valid = pipeline.valid(valid, cycles=levels)
            last, scale = register(last, "last", cycles=levels), register(scale, "scale", cycles=levels)
        partial = Signal(signed(signed_width(127 * p.group)))
        complete = Signal.like(partial)
        m.d.comb += complete.eq(partial + word)
        with m.If(self.start):
            m.d.sync += partial.eq(0)
        with m.Elif(valid):
            m.d.sync += partial.eq(Mux(last, 0, complete))

        # Times the scale, an integer of units: mantissa, then its place. A subnormal has exponent 1.
        normal = scale[10:15].any()
        sum_ = register(complete, "sum")
        mantissa = register(Cat(scale[:10], normal, Const(0, 1)), "mantissa").as_signed()
        shift = register(Mux(normal, scale[10:15] - 1, 0)[:5], "shift", cycles=2)
        product = register(sum_ * mantissa, "product")
        product = shift_up(m, pipeline, product, shift, width=p.denominator_width, name="product")

        # Into the sum of its query. LUT memory: read, added and written in one cycle.
        m.submodules.totals = totals = memory.Memory(shape=p.denominator_width, depth=max(2, p.queries), init=[])
        write, read, look = totals.write_port(), totals.read_port(domain="comb"), totals.read_port(domain="comb")
        query, first = Signal(index_range(p.queries)), Signal()
        added = pipeline.valid(valid & last, cycles=4)
        end = query + 1 == self.count
        with m.If(self.start):
            m.d.sync += [query.eq(0), first.eq(1)]
        with m.Elif(added):
            m.d.sync += query.eq(Mux(end, 0, query + 1))
            with m.If(end):
                m.d.sync += first.eq(0)
        m.d.comb += [
            read.addr.eq(query),
            write.addr.eq(query),
            write.data.eq(Mux(first, 0, read.data) + product),
            write.en.eq(added),
            look.addr.eq(self.query),
            self.total.eq(look.data),
        ]
        return m
