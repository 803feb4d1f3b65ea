"""Where an element stands on the grid of a codebook's centroids: ``u = clamp(rne(16 * x / s_cb), -32767, 32767)``.

Source: docs/numerics.md, "Product quantisation".
"""

from amaranth.hdl import Cat, Const, Module, Mux, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.numeric.division import divide_steps
from kvant.hw.numeric.floating import Pipeline, shift_left
from kvant.hw.numeric.int8_quantizer import unpack

FRACTION_BITS = 4
"""Binary places of ``u`` below one step of an INT8 entry."""

POSITION_MAX = 32767
"""Largest magnitude of ``u``."""


class GridPosition(wiring.Component):
    """One lane: an fp16 element divided by the codebook's scale, rounded to the nearest step, ties to even. Exact.

    With mantissas X, S (integers below 2^11) and the difference k of the exponents, four places added, the quotient
    is ``X/S * 2^k``. From k = 16 on x is a normal number and the quotient exceeds 32767 (X >= 2^10, so X/S > 1/2).
    Below k = -1 the scale is a normal number and the quotient is less than a half. Between, division gives the
    sixteen digits of ``2^(k+1) * X/S``: fifteen of an integer and a half. A quotient with more digits exceeds 32767
    as well.

    Attributes
    ----------
    latency : int
        Cycles from x and scale to u. One element per cycle.

    Members
    -------
    x : in
        fp16, finite.
    scale : in
        fp16, finite and not negative (its sign is ignored).
    u : out, signed
        -32767 .. 32767; 0 where the scale is 0.
    """

    STEPS = 16
    STEPS_PER_CYCLE = 2
    DIVISION_CYCLES = STEPS // STEPS_PER_CYCLE
    latency = 4 + DIVISION_CYCLES

    def __init__(self):
        super().__init__({"x": In(16), "scale": In(16), "u": Out(signed(16))})

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register

        # Cycle 0: k + 1.
        x, scale = unpack(self.x[:15]), unpack(self.scale[:15])
        shift = register((x.exponent - scale.exponent + (FRACTION_BITS + 1))[:7].as_signed(), "shift")
        mantissa = register(x.mantissa, "mantissa")
        divisor = register(scale.mantissa, "divisor")
        sign = register(self.x[15], "sign", cycles=self.latency - 1)

        # Cycle 1: the dividend, and the cases that need no division.
        wide = shift_left(m, Cat(mantissa, Const(0, self.STEPS)), Mux(shift[4], self.STEPS, shift[:4])[:5])
        dividend = register(wide, "dividend")
        exceeds = register(shift > self.STEPS, "exceeds")
        vanishes = register((shift < 0) | ~divisor.any(), "vanishes")
        divisor = register(divisor, "divisor")

        # Cycles 2 to 9: sixteen digits. The quotient has more of them if the upper part holds the divisor.
        upper = dividend[self.STEPS :]
        clamps = register((upper >= divisor) | exceeds, "clamps", cycles=self.DIVISION_CYCLES)
        vanishes = register(vanishes, "vanishes", cycles=self.DIVISION_CYCLES)
        remainder, digits = Cat(upper, Const(0, 1)), dividend[: self.STEPS]
        for _ in range(self.DIVISION_CYCLES):
            remainder, digits = divide_steps(m, remainder, digits, divisor, self.STEPS_PER_CYCLE)
            remainder, digits = register(remainder, "remainder"), register(digits, "digits")
            divisor = register(divisor, "divisor")

        # Cycle 10. Whether there is a rest matters only behind a half: then the last remainder is not negative, and
        # nothing need be restored.
        rest = register(remainder.any(), "rest")
        quotient = register(~digits, "quotient")
        clamps, vanishes = register(clamps, "clamps"), register(vanishes, "vanishes")

        # Cycle 11
        half, whole = quotient[0], quotient[1:]
        rounded = whole + (half & (rest | whole[0]))
        magnitude = Mux(vanishes, 0, Mux(clamps | rounded[-1], POSITION_MAX, rounded[:-1]))[:15]
        u = Cat(magnitude, Const(0, 1)) ^ sign.replicate(16)
        m.d.comb += self.u.eq(register((u + sign)[:16].as_signed(), "u"))
        return m
