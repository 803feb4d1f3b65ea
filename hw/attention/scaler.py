"""Scores as base-2 logarithms of attention weights: fixed point of one scale for all keys of a query.

``z = rne(a * b * 2^e)`` counts 2^-16: an integer score (or the mantissa of an fp32 one) times the mantissa of what
turns scores into exponents of two. For a coded key that factor is ``K = fp32(c * s_q * s_cb)``, with ``c`` the fp32
number nearest to ``log2(e) / sqrt(d)``; for an INT8 row, whose fp32 score has the scales in it, it is c.
Source: docs/numerics.md, "Softmax".
"""

from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from typing import NamedTuple

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.floating import wide_product
from kvant.hw.numeric.floating import FP32_BIAS, FP32_MANTISSA, Pipeline, ScaledProduct
from kvant.hw.parameters import check_integer

LOG_WIDTH = 56
"""Bits of a signed logarithm z, and of an unsigned difference of two."""

LOG_FRACTION = 16
"""Fraction bits of a logarithm."""

LOG_LIMIT = (1 << (LOG_WIDTH - 1)) - 1
"""Largest magnitude of a logarithm; what is larger saturates, which only codebook scales beyond fp16's range of values
over 127 can bring about."""

EXPONENT = signed(9)
"""Shape of the exponent ``e``."""


class Factor(data.StructLayout):
    """A positive number ``mantissa * 2^exponent``: `mantissa` of 24 bits, 0 for zero, and `exponent`."""

    def __init__(self):
        super().__init__({"mantissa": FP32_MANTISSA, "exponent": EXPONENT})


class SoftmaxConstant(NamedTuple):
    """``c = mantissa * 2^exponent``, 24 significant bits."""

    mantissa: int
    exponent: int


def softmax_constant(head_dim: int) -> SoftmaxConstant:
    """The fp32 number nearest to ``log2(e) / sqrt(head_dim)``."""
    check_integer("head_dim", head_dim, 1)
    with localcontext() as context:
        context.prec = 60
        value = 1 / (Decimal(2).ln() * Decimal(head_dim).sqrt())
        exponent = 2 - FP32_MANTISSA  # below 2 * 2^23
        while value * Decimal(2) ** -exponent < 1 << (FP32_MANTISSA - 1):
            exponent -= 1
        mantissa = int((value * Decimal(2) ** -exponent).to_integral_value(ROUND_HALF_EVEN))
    if mantissa == 1 << FP32_MANTISSA:
        mantissa, exponent = mantissa >> 1, exponent + 1
    return SoftmaxConstant(mantissa, exponent)


def fp32_factor(number: Value, scale: int) -> tuple[Value, Value]:
    """Mantissa of an fp32 *number* (normal or 0, sign ignored), and exponent of its last place plus *scale*."""
    exponent = number[23:31]
    offset = scale - FP32_BIAS - (FP32_MANTISSA - 1)
    return Cat(number[:23], exponent.any()) & exponent.any().replicate(FP32_MANTISSA), exponent + offset


class ScoreFactor(wiring.Component):
    """``K = fp32(c * s_q * s_cb)`` as the `Factor` that turns scores into z; the exact product, rounded once.

    Parameters
    ----------
    head_dim : int
        d, which c depends on.

    Attributes
    ----------
    latency : int
        Cycles from the scales to the factor. One per cycle.

    Members
    -------
    query_scale, codebook_scale : in
        fp16, finite and not negative.
    factor : out
        `Factor`; mantissa 0 where a scale is 0.
    """

    latency = ScaledProduct.latency

    def __init__(self, head_dim: int):
        self.constant = softmax_constant(head_dim)
        super().__init__({"query_scale": In(16), "codebook_scale": In(16), "factor": Out(Factor())})

    def elaborate(self, platform):
        m = Module()
        m.submodules.product = product = ScaledProduct(FP32_MANTISSA + 1)
        mantissa, exponent = fp32_factor(product.p, self.constant.exponent + LOG_FRACTION)
        m.d.comb += [
            product.r.eq(self.constant.mantissa),
            product.x_scale.eq(self.query_scale),
            product.w_scale.eq(self.codebook_scale),
            self.factor.mantissa.eq(mantissa),
            self.factor.exponent.eq(exponent),
        ]
        return m


class ScoreScaler(wiring.Component):
    """``z = rne(a * b * 2^e)``: the exact product, rounded once to an integer, ties to even.

    The magnitude of the product is shifted right or left by one shifter, which turns the bits round for one of the
    directions. What is larger than `LOG_LIMIT` saturates.

    Parameters
    ----------
    width : int
        Bits of the signed a, 2 .. 26; the most negative number is not a legal a.

    Attributes
    ----------
    latency : int
        Cycles from a, b and e to z. One result per cycle.

    Members
    -------
    a : in, signed
    b : in
        24 bits.
    e : in, `EXPONENT`
        Of the result in units of its last place.
    z : out, signed
        `LOG_WIDTH` bits, a register.

    Raises
    ------
    ParameterError
        When *width* is outside 2 .. 26.
    """

    latency = 9

    def __init__(self, width: int):
        self.width = check_integer("width", width, 2, 26)
        super().__init__(
            {"a": In(signed(width)), "b": In(FP32_MANTISSA), "e": In(EXPONENT), "z": Out(signed(LOG_WIDTH))}
        )

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register

        # Cycle 0: sign and magnitude of a.
        sign = register(self.a < 0, "sign", cycles=self.latency - 2)
        magnitude = register(Mux(self.a < 0, -self.a, self.a)[: self.width - 1], "magnitude")
        b = register(self.b, "b")

        # Cycles 1 to 3: the product.
        product = wide_product(pipeline, magnitude, b)

        # Cycle 4: into the shifter. Its width is that of a result and one more bit: on the way to the left the first
        # bit too many, on the way to the right (turned round) the first bit behind the result.
        size = LOG_WIDTH
        left = register(self.e >= 0, "left", cycles=4)
        distance = Mux(self.e < 0, -self.e, self.e)[: EXPONENT.width]
        far = distance[6:].any()
        amount = register(distance[:6] | far.replicate(6), "amount", cycles=5)
        wide = Signal(size)
        m.d.comb += wide.eq(product)
        word = register(Mux(left, wide, Cat(0, wide[:-1])[::-1]), "word")
        left = register(left, "left")

        # Cycles 5 and 6: shifted, and whether a one fell off.
        lost = Const(0, 1)
        for places in ((5, 4, 3), (2, 1, 0)):
            for k in places:
                step = min(1 << k, size)
                lost = lost | (amount[k] & word[size - step :].any())
                shifted = Signal(size, name=f"shifted_{k}")
                m.d.comb += shifted.eq(Mux(amount[k], Cat(Const(0, step), word[: size - step]), word))
                word = shifted
            word, lost, left = register(word, "word"), register(lost, "lost"), register(left, "left")
            amount = register(amount, "amount")

        # Cycle 7: turned back; too large a number becomes the largest.
        beyond = word[-1]
        saturates = left & (beyond | lost)
        turned = word[::-1][1:]
        number = Mux(left, word[:-1], turned) | saturates.replicate(size - 1)
        increment = ~left & beyond & (lost | turned[0])

        # Cycle 8: rounded and signed by one addition, -(m + i) = ~m + (1 - i).
        number = register(number, "number")
        carry = register(sign ^ increment, "carry")
        sign = register(sign, "sign")
        total = (Cat(number, 0) ^ sign.replicate(size)) + carry
        m.d.comb += self.z.eq(register(total[:size], "total"))
        return m
