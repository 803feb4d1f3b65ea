"""Centring: what is left of fp16 elements when a calibrated mean is taken out, ``fp16(x - mu)``."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.numeric.floating import (
    FP16_MANTISSA,
    Pipeline,
    add_with_carry,
    leading_zeros,
    shift_left,
    shift_right_sticky,
)
from kvant.hw.numeric.int8_quantizer import FP16_MAX, unpack
from kvant.hw.parameters import check_integer

_GUARD = 3
"""Bits kept below the mantissa of the larger operand: two exact ones, and one that gathers all further ones."""


class CentringLane(wiring.Component):
    """``fp16(x - mean)`` of one element: the exact difference, rounded once, ties to even, subnormals kept.

    The port rule comes first (a NaN counts as 0, an infinity as 65504 of its sign). A difference that rounds beyond
    65504 is 65504 of its sign. A difference of 0 is +0.

    Attributes
    ----------
    latency : int
        Cycles from x to y. One element per cycle; a plain pipeline, without reset and without enable.

    Members
    -------
    x : in
        fp16, any.
    mean : in
        fp16, finite.
    y : out
        fp16, finite.
    nonfinite : out
        x was NaN or infinite; as late as y.
    """

    latency = 6

    def __init__(self):
        super().__init__({"x": In(16), "mean": In(16), "y": Out(16), "nonfinite": Out(1)})

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register

        # Cycle 0: port rule.
        special = self.x[10:15].all()
        finite = Mux(special, Mux(self.x[:10].any(), 0, FP16_MAX), self.x[:15])
        x = register(Cat(finite, self.x[15]), "x")
        mean = register(Cat(self.mean[:15], ~self.mean[15]), "mean")  # added from here on
        m.d.comb += self.nonfinite.eq(register(special, "nonfinite", cycles=self.latency))

        # Cycle 1: the larger magnitude first. Both differences of the exponents are made while the magnitudes are
        # compared.
        swap = Signal()
        m.d.comb += swap.eq(x[:15] < mean[:15])
        x_magnitude, mean_magnitude = unpack(x[:15]), unpack(mean[:15])
        mantissa = register(Mux(swap, mean_magnitude.mantissa, x_magnitude.mantissa), "large_mantissa")
        small = register(Mux(swap, x_magnitude.mantissa, mean_magnitude.mantissa), "small")
        exponents = x_magnitude.exponent, mean_magnitude.exponent
        exponent = register(Mux(swap, exponents[1], exponents[0]), "large_exponent")
        distance = register(Mux(swap, exponents[1] - exponents[0], exponents[0] - exponents[1])[:5], "distance")
        sign = register(Mux(swap, mean[15], x[15]), "sign")
        subtract = register(x[15] ^ mean[15], "subtract")

        # Cycle 2: the smaller one aligned, and what falls off gathered in its last bit. A shift by 14 or more leaves
        # only that one.
        amount = Mux(distance[4], 15, distance[:4])
        aligned, sticky = shift_right_sticky(m, Cat(Const(0, _GUARD - 1), small), amount)
        aligned = register(Cat(sticky, aligned), "aligned")
        mantissa = register(mantissa, "mantissa")
        subtract = register(subtract, "subtract")

        # Cycle 3: the sum, one carry bit above. It is not negative.
        total = add_with_carry(Cat(Const(0, _GUARD), mantissa), aligned ^ subtract.replicate(len(aligned)), subtract)
        carry = total[len(aligned)] & ~subtract
        total = register(Cat(total[: len(aligned)], carry), "total")
        exponent = register(exponent, "exponent", cycles=2)
        sign = register(sign, "sign", cycles=3)

        # Cycle 4: the first one to the top, but no further than to the exponent 1 of subnormal numbers.
        zeros = leading_zeros(m, total)
        limited = Signal()
        m.d.comb += limited.eq(~total.any() | (zeros > exponent))
        normal = register(shift_left(m, total, Mux(limited, exponent[: len(zeros)], zeros)), "normal")
        exponent = register(Mux(limited, 0, exponent + 1 - zeros)[:6], "exponent")

        # Cycle 5: rounded. What a carry out of the fraction adds to the exponent is what it should.
        fraction, half, rest = normal[-FP16_MANTISSA:-1], normal[-FP16_MANTISSA - 1], normal[: -FP16_MANTISSA - 1]
        rounded = (Cat(fraction, exponent) + (half & (rest.any() | fraction[0])))[:16]
        magnitude = Mux(rounded > FP16_MAX, FP16_MAX, rounded[:15])
        m.d.comb += self.y.eq(register(Cat(magnitude, sign & rounded.any()), "rounded"))
        return m


class Centring(wiring.Component):
    """`CentringLane` for *lanes* elements per cycle.

    Parameters
    ----------
    lanes : int
        Elements per cycle, at least 1.

    Attributes
    ----------
    latency : int
        Cycles from x to y.

    Members
    -------
    x, mean : in
        fp16 elements, and their channels' means.
    y : out
        Differences, *latency* cycles later.
    nonfinite : out
        Of each lane, whether x was NaN or infinite. The caller ignores lanes without an element.

    Raises
    ------
    ParameterError
        When *lanes* is not legal.
    """

    latency = CentringLane.latency

    def __init__(self, lanes: int):
        self.lanes = check_integer("lanes", lanes, 1)
        elements = data.ArrayLayout(16, lanes)
        super().__init__({"x": In(elements), "mean": In(elements), "y": Out(elements), "nonfinite": Out(lanes)})

    def elaborate(self, platform):
        m = Module()
        for k in range(self.lanes):
            m.submodules[f"lane_{k}"] = lane = CentringLane()
            m.d.comb += [
                lane.x.eq(self.x[k]),
                lane.mean.eq(self.mean[k]),
                self.y[k].eq(lane.y),
                self.nonfinite[k].eq(lane.nonfinite),
            ]
        return m
