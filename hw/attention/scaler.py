"""Scores as base-2 logarithms of attention weights: fixed point of one scale for all keys of a query.

``z = rne(a * b * 2^e)`` counts 2^-16: an integer score times what turns scores into exponents of two, the exact product
``F = c * s_q * s``. There ``c`` is the fp32 number nearest to ``log2(e) / sqrt(d)``, ``s_q`` the scale of the query and
``s`` that of the key: of its codebook, or of a group of an INT8 row. Source: docs/numerics.md, "Softmax".
"""

from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from typing import NamedTuple

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.floating import SPLIT_PRODUCT_LATENCY, chained_latency, chained_product, split_product
from kvant.hw.numeric.floating import FP16_LSB, FP16_MANTISSA, FP32_MANTISSA, Pipeline
from kvant.hw.parameters import check_integer

LOG_WIDTH = 56
"""Bits of a signed logarithm z, and of an unsigned difference of two."""

LOG_FRACTION = 16
"""Fraction bits of a logarithm."""

LOG_LIMIT = (1 << (LOG_WIDTH - 1)) - 1
"""Largest magnitude of a logarithm; what is larger saturates, which only scales beyond fp16's range of values over 127
can bring about."""

LOG_LEAST = -(1 << (LOG_WIDTH - 1))
"""Below every logarithm: the largest one of no keys."""

LEAST_SHIFT = 3
"""Largest legal exponent of a factor."""

EXPONENT = signed(7)
"""Shape of the exponent of a factor: with c, two fp16 scales and the fraction bits of z it lies between -63 and 3."""

FACTOR_WIDTH = FP32_MANTISSA + 2 * FP16_MANTISSA
"""Bits of the mantissa of a factor: c's 24, and 11 of each scale."""


class Factor(data.StructLayout):
    """A number ``mantissa * 2^exponent`` that is not negative, in units of the last place of z: `mantissa` of
    `FACTOR_WIDTH` bits (0 for zero; the first one may stand anywhere), `exponent` at most `LEAST_SHIFT`.
    """

    def __init__(self):
        super().__init__({"mantissa": FACTOR_WIDTH, "exponent": EXPONENT})


class SoftmaxConstant(NamedTuple):
    """``c = mantissa * 2^exponent``, 24 significant bits."""

    mantissa: int
    exponent: int


def softmax_constant(head_dim: int) -> SoftmaxConstant:
    """The fp32 number nearest to ``log2(e) / sqrt(head_dim)``."""
    check_integer("head_dim", head_dim, 1, 1 << 16)  # more would not go into `EXPONENT`
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


class ScoreFactor(wiring.Component):
    """``F = c * s_q * s``, exact, as the `Factor` that turns integer scores into z.

    Nothing is rounded: all keys of a query, whatever their scale, share the one rounding of c.

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
    query_scale, scale : in
        fp16, finite and not negative (their signs are ignored): of the query; of the keys' codebook, or of a group of
        an INT8 row.
    factor : out
        `Factor`; mantissa 0 where a scale is 0.
    """

    latency = 2 + 2 * SPLIT_PRODUCT_LATENCY

    def __init__(self, head_dim: int):
        self.constant = softmax_constant(head_dim)
        super().__init__({"query_scale": In(16), "scale": In(16), "factor": Out(Factor())})

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register

        # Cycle 0: parts of the scales; a subnormal has exponent 1. They wait for a cycle on their way to the
        # multipliers.
        mantissas, exponents = [], []
        for scale in (self.query_scale, self.scale):
            normal = scale[10:15].any()
            mantissas.append(Cat(scale[:10], normal))
            exponents.append(Cat(scale[10] | ~normal, scale[11:15]))
        query_mantissa = register(mantissas[0], "query_mantissa", cycles=2)
        mantissa = register(mantissas[1], "mantissa", cycles=2 + SPLIT_PRODUCT_LATENCY)
        places = register(exponents[0] + exponents[1], "places")
        offset = self.constant.exponent + LOG_FRACTION + 2 * FP16_LSB
        exponent = Signal(EXPONENT)
        m.d.comb += exponent.eq(places + offset)

        # Then the product, in narrow ones.
        product = split_product(pipeline, Const(self.constant.mantissa, FP32_MANTISSA), query_mantissa, pieces=2)
        product = split_product(pipeline, product, mantissa, pieces=2)
        m.d.comb += [
            self.factor.mantissa.eq(product),
            self.factor.exponent.eq(register(exponent, "exponent", cycles=self.latency - 1)),
        ]
        return m


class ScoreScaler(wiring.Component):
    """``z = rne(a * b * 2^e)``: the exact product, rounded once to an integer, ties to even.

    The magnitude of the product, with room for the largest e, is shifted right. What is larger than `LOG_LIMIT`
    saturates.

    Parameters
    ----------
    width : int
        Bits of the signed a, 8 .. 26; the most negative number is not a legal a.
    factor_width : int
        Bits of b, 24 .. 46.
    most_exponent : int
        Largest legal e, 0 .. 15.

    Attributes
    ----------
    latency : int
        Cycles from a, b and e to z. One result per cycle.

    Members
    -------
    a : in, signed
    b : in
        `factor_width` bits.
    e : in, `EXPONENT`
        Of the result in units of its last place, at most `most_exponent`.
    z : out, signed
        `LOG_WIDTH` bits, a register.

    Raises
    ------
    ParameterError
        When an argument is out of range.
    """

    _A_PIECES, _B_PIECES = 2, 3  # of the product: a multiplier of at most 13 by 16 bits for each pair
    _product = chained_latency(_A_PIECES * _B_PIECES)
    latency = 6 + _product

    def __init__(self, width: int, *, factor_width: int = FACTOR_WIDTH, most_exponent: int = LEAST_SHIFT):
        self.width = check_integer("width", width, 8, 26)
        self.factor_width = check_integer("factor_width", factor_width, FP32_MANTISSA, FACTOR_WIDTH)
        self.most_exponent = check_integer("most_exponent", most_exponent, 0, 15)
        super().__init__(
            {"a": In(signed(width)), "b": In(factor_width), "e": In(EXPONENT), "z": Out(signed(LOG_WIDTH))}
        )

    @staticmethod
    def _pieces(number: Value, count: int) -> list[Value]:
        """*number* in so many pieces of equal length, the last one shorter."""
        size = -(-len(number) // count)
        return [number[k * size : (k + 1) * size] for k in range(count)]

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register

        # Cycle 0: sign and magnitude of a.
        sign = register(self.a < 0, "sign", cycles=self.latency - 2)
        magnitude = register(Mux(self.a < 0, -self.a, self.a)[: self.width - 1], "magnitude")
        b = register(self.b, "b")
        amount = Signal(EXPONENT.width)
        m.d.comb += amount.eq(self.most_exponent - self.e)
        amount = register(amount, "amount", cycles=1 + self._product)

        # From cycle 1 on the product.
        halves = self._pieces(magnitude, self._A_PIECES)
        product = chained_product(pipeline, halves, self._pieces(b, self._B_PIECES))

        # Three cycles: shifted, and whether a one fell off. The bit behind the result comes along.
        size = LOG_WIDTH - 1
        word = Cat(Const(0, 1 + self.most_exponent), product)
        lost = Const(0, 1)
        for places in ((6, 5), (4, 3), (2, 1, 0)):
            for k in places:
                step = min(1 << k, len(word))
                lost = lost | (amount[k] & word[:step].any())
                shifted = Signal(len(word), name=f"shifted_{k}")
                m.d.comb += shifted.eq(Mux(amount[k], word[step:], word))
                word = shifted
            word, lost, amount = register(word, "word"), register(lost, "lost"), register(amount, "amount")

        # Too large a number becomes the largest, which is not rounded up.
        number = word[1:][:size]
        saturates = word[1 + size :].any()
        increment = word[0] & (lost | word[1]) & ~saturates & ~number.all()
        number = register(number | saturates.replicate(size), "number")

        # Rounded and signed by one addition, -(m + i) = ~m + (1 - i).
        carry = register(sign ^ increment, "carry")
        sign = register(sign, "sign")
        total = (Cat(number, 0) ^ sign.replicate(LOG_WIDTH)) + carry
        m.d.comb += self.z.eq(register(total[:LOG_WIDTH], "total"))
        return m
