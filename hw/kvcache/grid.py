"""The levels of a group: its stored scale and the limits between magnitudes, from one set of exact divisions."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.layouts import GroupGrid
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.result_queue import ResultQueue
from kvant.hw.numeric.codes import MAGNITUDES, decode_coefficient
from kvant.hw.numeric.division import SharedDivisions
from kvant.hw.numeric.floating import FP16_MANTISSA, Pipeline, leading_zeros, shift_left, shift_right_sticky
from kvant.hw.numeric.int8_quantizer import Magnitude, unpack
from kvant.hw.parameters import check_integer

LIMITS = MAGNITUDES - 1

SCALE_DIGITS = 16
"""Digits of the quotient that becomes a scale: at least 13 are significant."""

LIMIT_DIGITS = 8


class GroupPeak(data.StructLayout):
    """What a group's levels follow from.

    Members
    -------
    scale : 16
        ``s8``, fp16, not negative and at most ``fp16(65504 / 127)``.
    peak : 8
        ``m``, the largest magnitude of an element.
    coefficient : 8
    tag
    """

    def __init__(self, tag_shape):
        super().__init__({"scale": 16, "peak": 8, "coefficient": 8, "tag": tag_shape})


class TaggedGrid(data.StructLayout):
    """A group's grid, its coefficient, and what travels along."""

    def __init__(self, tag_shape):
        super().__init__({"grid": GroupGrid(), "coefficient": 8, "tag": tag_shape})


class GridFit(wiring.Component):
    """Stored scale ``fp16(s8 * m / M)`` and limits ``floor(m * (L_k + L_(k+1)) / (2 * M))``, exact.

    ``L`` are the level magnitudes of the coefficient, ``M = L_7`` the largest of them. A linear group's levels
    ``0 .. 7`` are taken 128-fold: then one divisor ``M = 7*a' + (128 or 0)`` with ``a'`` up to 128 serves both types,
    and ``L_k + L_(k+1) = (2*k+1) * a' + (3 * 2^k or 0)``. The eight quotients are made side by side.

    ::

        i ──> products ──> sums, leading one ──> SharedDivisions ──> exponent ──> shift ──> round ──> queue ──> o

    Source: docs/numerics.md, "Encoding".

    Parameters
    ----------
    p : CacheParameters
    tag_shape : shape-like
        Of what travels along.
    interval : int
        Cycles per group that are sustained; the fewer, the more dividers.

    Attributes
    ----------
    latency : int
        Cycles from a transfer of `i` to `o`, when nothing is before it.

    Members
    -------
    i : in stream of `GroupPeak`
        A reserved coefficient, or one above `p.max_coefficient`, gives a grid with `error`, `zero` and scale 0.
    o : out stream of `TaggedGrid`

    Raises
    ------
    ParameterError
        For an interval that is not a positive integer.
    """

    BEFORE, AFTER = 4, 3
    """Cycles before and after the divisions."""

    _to_queue = BEFORE + SharedDivisions.latency + AFTER
    latency = _to_queue + ResultQueue.latency

    def __init__(self, p: CacheParameters, tag_shape, interval: int):
        self.p = p
        self.tag_shape = tag_shape
        self.interval = check_integer("interval", interval, 1)
        super().__init__(
            {
                "i": In(stream.Signature(GroupPeak(tag_shape))),
                "o": Out(stream.Signature(TaggedGrid(tag_shape))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register
        # Each division: dividend and quotient bits. A quotient is less than the peak, or than 2**16.
        limit_sizes = [(LIMIT_DIGITS + 10, LIMIT_DIGITS)] * LIMITS
        scale_size = (FP16_MANTISSA + 8 + 4, SCALE_DIGITS)
        m.submodules.divisions = divisions = SharedDivisions(10, [*limit_sizes, scale_size], self.interval, tag_bits=7)
        tag = data.StructLayout({"coefficient": 8, "linear": 1, "error": 1, "tag": self.tag_shape})
        result = data.StructLayout({"limits": data.ArrayLayout(LIMIT_DIGITS, LIMITS), "scale": 16})
        depth = ResultQueue.depth_for(self._to_queue, divisions.stay)
        m.submodules.queue = queue = ResultQueue(result, tag, depth)

        # Groups enter as far apart as a station of the divider needs.
        take = Signal()
        rest = Signal(range(max(2, divisions.stay)))
        m.d.comb += [
            self.i.ready.eq(queue.room & (rest == 0)),
            take.eq(self.i.valid & self.i.ready),
            queue.enter.eq(take),
        ]
        m.d.sync += rest.eq(Mux(take, divisions.stay - 1, Mux(rest == 0, 0, rest - 1)))
        starts = Signal(self.BEFORE)
        ends = Signal(self.AFTER)
        m.d.sync += [starts.eq(Cat(take, starts)), ends.eq(Cat(divisions.done, ends))]
        item = self.i.payload
        kind = decode_coefficient(item.coefficient, max_coefficient=self.p.max_coefficient, int8_groups=False)
        m.d.comb += [
            queue.tag.coefficient.eq(item.coefficient),
            queue.tag.linear.eq(kind.linear),
            queue.tag.error.eq(kind.illegal),
            Value.cast(queue.tag.tag).eq(Value.cast(item.tag)),
            divisions.start.eq(starts[-1]),
            queue.push.eq(ends[-1]),
        ]

        # Cycle 1. Of a reserved coefficient only the tag is used.
        peak = register(item.peak, "peak")
        step = register(Mux(kind.linear, 128, item.coefficient[:7]), "step")  # a'
        linear = register(kind.linear, "linear")
        s8 = data.View(Magnitude(), register(unpack(item.scale[:15]).as_value(), "s8"))

        # Cycle 2: the products with the peak, and M.
        steps = register(step * peak, "steps")
        triple = register(Mux(linear, 0, peak * 3)[:10], "triple")  # of the powers of two
        product = register(s8.mantissa * peak, "product")
        largest = register(Cat(Const(0, 3), step) - step + Mux(linear, 0, 128), "largest")[:10]
        exponent = register(s8.exponent, "exponent", cycles=2)
        linear = register(linear, "linear", cycles=2)

        # Cycle 3: a multiple that two sums need; where the scale's dividend begins.
        triple_steps = register(steps + (steps << 1), "triple_steps")
        steps, triple = register(steps, "steps"), register(triple, "triple")
        zeros = register(leading_zeros(m, product), "zeros")
        product = register(product, "product")

        # Cycle 4: dividends. The limits' are halves of sums, cut off, as both divisions round down.
        multiples = [
            steps,
            triple_steps,
            (steps << 2) + steps,
            (steps << 3) - steps,
            (steps << 3) + steps,
            (steps << 3) + triple_steps,
            (steps << 4) - triple_steps,
        ]
        for k, multiple in enumerate(multiples):
            m.d.comb += divisions.dividends[k].eq(register((multiple + (triple << k))[1 : LIMIT_DIGITS + 11], "limit"))
        # With its first digit at the top the scale's dividend gives 13 to 16 digits, the last of which weighs
        # 2**(place - 24).
        place = Signal(signed(7))
        m.d.comb += [
            divisions.dividends[LIMITS].eq(Cat(Const(0, 4), register(shift_left(m, product, zeros), "normal"))),
            divisions.divisor.eq(register(largest, "largest", cycles=2)),
            place.eq(register(exponent - zeros - 5 + Mux(linear, 7, 0), "place")),
            divisions.tag.eq(place),
        ]

        # After the divisions, cycle 1: how many digits to drop. A normal result keeps 11, a subnormal one those down to
        # 2**-24; no first digit means 0.
        quotient = divisions.quotients[LIMITS]
        place = divisions.o_tag.as_signed()
        dropped = Mux(quotient[15], 5, Mux(quotient[14], 4, Mux(quotient[13], 3, 2)))
        exponent = dropped + place  # of a normal result, less one
        normal = (exponent >= 0) & quotient[12:].any()
        amount = register(Mux(normal, dropped - 1, ~place)[:5], "amount")  # all dropped digits but one
        exponent = register(Mux(normal, exponent[:5], 0), "exponent", cycles=2)
        quotient, rest = register(quotient, "quotient"), register(divisions.rests[LIMITS], "rest")

        # Cycle 2: drop them. Cycle 3: ties to even; what a carry adds to the exponent is what it should.
        shifted, lost = shift_right_sticky(m, quotient, amount)
        shifted, rest = register(shifted, "shifted"), register(rest | lost, "rest")
        half, whole = shifted[0], shifted[1:]
        scale = (Cat(Const(0, 10), exponent) + whole + (half & (rest | whole[0])))[:15]
        limits = register(Cat(divisions.quotients[:LIMITS]), "limits", cycles=self.AFTER)
        m.d.comb += [
            Value.cast(queue.result.limits).eq(limits),
            queue.result.scale.eq(register(scale, "scale")),
        ]

        grid = self.o.payload.grid
        out = queue.o.payload
        m.d.comb += [
            self.o.valid.eq(queue.o.valid),
            queue.o.ready.eq(self.o.ready),
            Value.cast(grid.limits).eq(Value.cast(out.result.limits)),
            grid.scale.eq(Mux(out.tag.error, 0, out.result.scale)),
            grid.zero.eq(grid.scale == 0),
            grid.linear.eq(out.tag.linear),
            grid.error.eq(out.tag.error),
            self.o.payload.coefficient.eq(out.tag.coefficient),
            Value.cast(self.o.payload.tag).eq(Value.cast(out.tag.tag)),
        ]
        return m
