"""A row of a cache along time as INT8: ``q = clamp(rne(v / s8), -127, 127)`` with one scale per channel, exact.

Source: docs/numerics.md, "The V cache" (first phase); M-ANT (HPCA 2025, section V).
"""

from amaranth.hdl import Cat, Const, Module, Mux, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.parameters import INT8_MAX
from kvant.hw.numeric.division import divide_steps, has_rest
from kvant.hw.numeric.floating import Pipeline, shift_left
from kvant.hw.numeric.int8_quantizer import unpack


class StagingLane(wiring.Component):
    """One channel: an fp16 number divided by the channel's scale, rounded to the nearest integer, ties to even.

    With mantissas V, S and the difference k of the exponents the quotient is ``V/S * 2^k``. From k = 8 on it exceeds
    127, and below k = -1 (the scale is then a normal number) it is less than a half. Between, division gives the eight
    digits of ``2^(k+1) * V/S``: seven of an integer and a half. A quotient with more digits exceeds 127 as well.

    Attributes
    ----------
    latency : int
        Cycles from v and scale to q and clamped. One element per cycle.

    Members
    -------
    v : in
        fp16, finite.
    scale : in
        fp16, finite and not negative.
    q : out, signed
        -127 .. 127; 0 where the scale is 0.
    clamped : out
        The rounded quotient exceeded 127, or v is not 0 and the scale is.
    """

    STEPS = 8
    STEPS_PER_CYCLE = 2
    DIVISION_CYCLES = STEPS // STEPS_PER_CYCLE
    latency = 4 + DIVISION_CYCLES

    def __init__(self):
        super().__init__({"v": In(16), "scale": In(16), "q": Out(signed(8)), "clamped": Out(1)})

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register

        # Cycle 0: the difference of the exponents, plus 1.
        v, scale = unpack(self.v[:15]), unpack(self.scale[:15])
        shift = register((v.exponent - scale.exponent + 1)[:6].as_signed(), "shift")
        mantissa = register(v.mantissa, "mantissa")
        divisor = register(scale.mantissa, "divisor")
        sign = register(self.v[15], "sign", cycles=self.latency - 1)

        # Cycle 1: the dividend, and the two cases that need no division.
        wide = shift_left(m, Cat(mantissa, Const(0, self.STEPS)), Mux(shift[3], self.STEPS, shift[:3])[:4])
        dividend = register(wide, "dividend")
        nonzero = register(mantissa.any(), "nonzero")
        vanishes = register(shift < 0, "vanishes")
        exceeds = register(shift > self.STEPS, "exceeds")
        divisor = register(divisor, "divisor")

        # Cycles 2 to 5: eight digits. The quotient has more of them if the upper part holds the divisor (as it does
        # a zero one).
        upper = dividend[self.STEPS :]
        overflows = register((upper >= divisor) | exceeds, "overflows")
        nonzero, vanishes = register(nonzero, "nonzero"), register(vanishes, "vanishes")
        no_scale = register(~divisor.any(), "no_scale")
        remainder, digits = Cat(upper, Const(0, 1)), dividend[: self.STEPS]
        for _ in range(self.DIVISION_CYCLES):
            remainder, digits = divide_steps(m, remainder, digits, divisor, self.STEPS_PER_CYCLE)
            remainder, digits = register(remainder, "remainder"), register(digits, "digits")
            divisor = register(divisor, "divisor")
        clamps = register(Mux(no_scale, nonzero, overflows & ~vanishes), "clamps", cycles=self.DIVISION_CYCLES)
        is_zero = register(no_scale | vanishes, "is_zero", cycles=self.DIVISION_CYCLES)
        no_scale = register(no_scale, "no_scale", cycles=self.DIVISION_CYCLES)

        # Cycle 6: ties to even.
        rest = register(has_rest(remainder, divisor), "rest")
        quotient = register(~digits, "quotient")

        # Cycle 7
        half, whole = quotient[0], quotient[1:]
        rounded = whole + (half & (rest | whole[0]))
        over = clamps | (rounded[-1] & ~is_zero)
        magnitude = Mux(over & ~no_scale, INT8_MAX, Mux(is_zero, 0, rounded[:-1]))[:7]
        q = Cat(magnitude, Const(0, 1)) ^ sign.replicate(8)
        m.d.comb += [
            self.q.eq(register((q + sign)[:8].as_signed(), "q")),
            self.clamped.eq(register(over, "clamped")),
        ]
        return m
