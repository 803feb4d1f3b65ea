"""What the offsets of keys along time add to scores: integers against the queries folded with the static scales."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_shape import INT8_MAGNITUDE
from kvant.hw.attention.floating import SPLIT_PRODUCT_LATENCY, split_product
from kvant.hw.attention.layouts import index_range
from kvant.hw.attention.normalize import choose
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.attention.scaler import EXPONENT, LOG_FRACTION, softmax_constant
from kvant.hw.linear.activation_buffer import quantized_output
from kvant.hw.linear.parameters import ceil_div, signed_width
from kvant.hw.numeric.adder_tree import tree_levels, tree_sum
from kvant.hw.numeric.floating import FP16_LSB, FP16_MANTISSA, FP32_MANTISSA, Pipeline

WINDOWS_AHEAD = 4
"""Windows whose offsets are known while their scores are not all in."""

OFFSET_FACTOR = FP32_MANTISSA + FP16_MANTISSA
"""Bits of the mantissa of what turns a sum into a logarithm."""


class OffsetTerm(data.StructLayout):
    """The exact sum of a group of the head, and the factor ``mantissa * 2^exponent`` that makes a logarithm of it.

    Members
    -------
    r : signed
    mantissa : `OFFSET_FACTOR`
    exponent : `EXPONENT`
        In units of the last place of z.
    query, window
        Of which query; of which window, modulo `WINDOWS_AHEAD`.
    first : 1
        Of the first group of the head.
    """

    def __init__(self, p: AttentionParameters):
        super().__init__(
            {
                "r": signed(sum_width(p)),
                "mantissa": OFFSET_FACTOR,
                "exponent": EXPONENT,
                "query": index_range(p.queries),
                "window": range(WINDOWS_AHEAD),
                "first": 1,
            }
        )


def sum_width(p: AttentionParameters) -> int:
    """Bits of the signed sum of a group."""
    return signed_width(INT8_MAGNITUDE * INT8_MAGNITUDE * p.group)


class OffsetSums(wiring.Component):
    """Keeps the queries folded with the static scales, and multiplies them with the offsets of windows.

    Parameters
    ----------
    p : AttentionParameters

    Attributes
    ----------
    latency : int
        Cycles of `enable` from the last transfer of a group to its term.

    Members
    -------
    start, count : in
        A command begins; its queries.
    valid, xq : in
        `quantized_output` of the linear path as it is taken. The first group of every query for every group of the head
        is kept.
    kept : out
        They all are; low from `start` on.
    enable : in
        All that follows moves.
    i_valid, query, place, group_last, window : in
        A transfer of a window's folded query enters: see `kvant.hw.attention.query_memory.query_transfer`.
    offsets : in
        The offsets of its channels, two cycles later; 0 in surplus lanes.
    o_valid, o : out
        An `OffsetTerm`, also only while `enable`.
    """

    def __init__(self, p: AttentionParameters):
        self.p = p
        self.levels = tree_levels(p.x_lanes)
        self.latency = 3 + self.levels + 1 + SPLIT_PRODUCT_LATENCY
        super().__init__(
            {
                "start": In(1),
                "count": In(range(p.queries + 1)),
                "valid": In(1),
                "xq": In(quantized_output(p.linear)),
                "kept": Out(1),
                "enable": In(1),
                "i_valid": In(1),
                "query": In(index_range(p.queries)),
                "place": In(index_range(ceil_div(p.head_dim, p.x_lanes))),
                "group_last": In(1),
                "window": In(range(WINDOWS_AHEAD)),
                "offsets": In(data.ArrayLayout(signed(8), p.x_lanes)),
                "o_valid": Out(1),
                "o": Out(OffsetTerm(p)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        beats = p.group // p.rows
        beat_bits, group_bits = (beats - 1).bit_length(), (p.head_groups - 1).bit_length()
        part_bits = (p.rows // p.x_lanes - 1).bit_length()
        query_bits = (p.queries - 1).bit_length()
        # Written before windows are folded, read then.
        m.submodules.elements = elements = memory.Memory(
            shape=8 * p.rows,
            depth=max(2, p.queries << (beat_bits + group_bits)),
            init=[],
            attrs={"no_rw_check": 1},
        )
        m.submodules.scales = scales = memory.Memory(shape=16, depth=max(2, p.queries << group_bits), init=[])
        element_write, element_read = elements.write_port(), elements.read_port()
        scale_write, scale_read = scales.write_port(), scales.read_port(domain="comb")

        # What the queries became.
        number, group = Signal(index_range(p.queries)), Signal(range(max(2, p.head_groups)))
        beat = Signal(range(max(2, beats)))
        round_end = number + 1 == self.count
        keeps = self.valid & ~self.kept
        where = Cat(group[:group_bits], number[:query_bits])
        m.d.comb += [
            element_write.addr.eq(Cat(beat[:beat_bits], where)),
            element_write.data.eq(self.xq.data),
            element_write.en.eq(keeps),
            scale_write.addr.eq(where),
            scale_write.data.eq(self.xq.user),
            scale_write.en.eq(keeps),
        ]
        with m.If(self.start):
            m.d.sync += [self.kept.eq(0), number.eq(0), group.eq(0), beat.eq(0)]
        with m.Elif(keeps):
            m.d.sync += beat.eq(Mux(self.xq.last, 0, beat + 1))
            with m.If(self.xq.last):
                m.d.sync += number.eq(Mux(round_end, 0, number + 1))
                with m.If(round_end):
                    m.d.sync += [group.eq(group + 1), self.kept.eq(group == p.head_groups - 1)]

        # Cycle 1: the memory answers; 2: the part of the word; 3: products; then their sum.
        pipeline = Pipeline(m, enable=self.enable)
        register = pipeline.register
        place = Signal(part_bits + beat_bits + group_bits)
        m.d.comb += [
            place.eq(self.place),
            element_read.addr.eq(Cat(place[part_bits:], self.query)),
            element_read.en.eq(self.enable & self.i_valid),
        ]
        size = 8 * p.x_lanes
        word = Signal(8 * p.rows)
        m.d.comb += word.eq(element_read.data)
        part = register(place[:part_bits], "part") if part_bits else Const(0, 1)
        q = register(choose([word[k * size : (k + 1) * size] for k in range(1 << part_bits)], part), "q")
        products = [
            register(q[8 * lane : 8 * lane + 8].as_signed() * self.offsets[lane], "product")
            for lane in range(p.x_lanes)
        ]
        total = tree_sum(pipeline, products, "total")
        cycles = 3 + self.levels
        summed = pipeline.valid(self.i_valid, cycles=cycles)
        last = register(self.group_last, "last", cycles=cycles)
        partial, complete = Signal(signed(sum_width(p))), Signal(signed(sum_width(p)))
        m.d.comb += complete.eq(partial + total)
        with m.If(self.start):
            m.d.sync += partial.eq(0)
        with m.Elif(self.enable & summed):
            m.d.sync += partial.eq(Mux(last, 0, complete))

        # The scale of the query's group, times the constant of the softmax.
        query = register(self.query, "query", cycles=cycles)
        head_group = place[part_bits + beat_bits :]
        head_group = register(head_group, "head_group", cycles=cycles) if group_bits else head_group
        window = register(self.window, "window", cycles=cycles)
        m.d.comb += scale_read.addr.eq(Cat(head_group, query[:query_bits]))
        scale = register(scale_read.data, "scale")
        normal = scale[10:15].any()
        constant = softmax_constant(p.head_dim)
        exponent = Signal(EXPONENT)
        m.d.comb += exponent.eq(Cat(scale[10] | ~normal, scale[11:15]) + (constant.exponent + LOG_FRACTION + FP16_LSB))
        mantissa = split_product(pipeline, Const(constant.mantissa, FP32_MANTISSA), Cat(scale[:10], normal), pieces=2)
        behind = SPLIT_PRODUCT_LATENCY
        m.d.comb += [
            self.o_valid.eq(self.enable & pipeline.valid(summed & last, cycles=1 + behind)),
            self.o.r.eq(register(complete, "r", cycles=1 + behind)),
            self.o.mantissa.eq(mantissa),
            self.o.exponent.eq(register(exponent, "exponent", cycles=behind)),
            self.o.query.eq(register(query, "query", cycles=1 + behind)),
            self.o.window.eq(register(window, "window", cycles=1 + behind)),
            self.o.first.eq(register(head_group == 0, "first", cycles=1 + behind) if group_bits else 1),
        ]
        return m
