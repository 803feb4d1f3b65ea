"""fp32 units of attention: wide products, fp32 products, integers to fp32.

All values that occur are normal fp32 numbers or +0: nothing handles subnormal, infinite or not-a-number operands, and
no unit produces -0. See `kvant.hw.numeric.floating`, whose adder and helpers serve here too.
"""

from collections.abc import Sequence

from amaranth.hdl import Cat, Const, Module, Mux, Shape, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.numeric.floating import (
    FP16_LSB,
    FP16_MANTISSA,
    FP32_BIAS,
    FP32_MANTISSA,
    Pipeline,
    leading_zeros,
    round_to_fp32,
    shift_left,
    shift_right_sticky,
)
from kvant.hw.parameters import check_integer

FP16_INFINITY = 0x7C00
"""The infinity of fp16; numbers from here on are not finite."""

SHIFT_CYCLES = 2
"""Cycles of `shift_up`."""


def shift_up(m: Module, pipeline: Pipeline, value: Value, amount: Value, *, width: int, name: str) -> Signal:
    """``value << amount`` for an amount of 5 bits, `SHIFT_CYCLES` cycles later; bits from *width* on are cut off."""
    for steps in ((4, 3), (2, 1, 0)):
        for k in steps:
            shape = Shape(min(width, len(value) + (1 << k)), signed=value.shape().signed)
            shifted = Signal(shape, name=f"{name}_shifted_{k}")
            m.d.comb += shifted.eq(Mux(amount[k], value << (1 << k), value))
            value = shifted
        value, amount = pipeline.register(value, name), pipeline.register(amount, f"{name}_shift")
    return value


WIDE_PRODUCT_LATENCY = 4
"""Cycles of `wide_product`."""


def wide_product(pipeline: Pipeline, a: Value, b: Value) -> Signal:
    """``a * b`` of unsigned numbers, exact, `WIDE_PRODUCT_LATENCY` cycles later.

    Both are cut in halves, so that each of four multipliers is narrow and stands between two registers, of which the
    one behind it leads to another register and nothing else: so it can lie where the multiplier does.
    """
    register = pipeline.register
    a_split, b_split = len(a) // 2, len(b) // 2
    a_low, a_high, b_low, b_high = a[:a_split], a[a_split:], b[:b_split], b[b_split:]
    low = register(a_low * b_low, "low", cycles=2)
    high = register(a_high * b_high, "high", cycles=2)
    rising = register(a_high * b_low, "rising", cycles=2)
    falling = register(a_low * b_high, "falling", cycles=2)
    # Lowest and highest part do not overlap; those between are added first.
    outer = register(Cat(low, high), "outer")
    inner = register((rising << a_split) + (falling << b_split), "inner")
    return register((outer + inner)[: len(a) + len(b)], "product")


SPLIT_PRODUCT_LATENCY = 3
"""Cycles of `split_product`."""


def split_product(pipeline: Pipeline, a: Value, b: Value, *, pieces: int) -> Signal:
    """``a * b`` of unsigned numbers, exact, `SPLIT_PRODUCT_LATENCY` cycles later.

    a is cut in two or three pieces, each at least as long as b, so that every multiplier is narrow, and one addition
    joins the products: the first and the third do not overlap. A multiplier stands between two registers, of which the
    one behind it leads to another register and nothing else: so it can lie where the multiplier does.
    """
    size = -(-len(a) // pieces)
    if pieces not in (2, 3) or len(b) > size:
        raise ValueError(f"{len(a)} bits in {pieces} pieces times {len(b)} bits")
    products = [pipeline.register(a[k * size : (k + 1) * size] * b, "piece", cycles=2) for k in range(pieces)]
    outer = Cat(products[0], Const(0, 2 * size - len(products[0])), *products[2:])
    return pipeline.register((outer + (products[1] << size))[: len(a) + len(b)], "split_product")


def chained_latency(pieces: int) -> int:
    """Cycles of `chained_product` for so many products of pieces."""
    return pieces + 1


def chained_product(pipeline: Pipeline, a: Sequence[Value], b: Sequence[Value]) -> Signal:
    """The product of two unsigned numbers in pieces, lowest first, exact, `chained_latency` cycles later.

    Pieces of a number are equally long but for the last. The product of one piece of a and one of b is added in every
    cycle, the one of the lowest weight first, to a sum whose lower bits are complete by then: additions are short, and
    every multiplier has operand registers of its own, since the operands of each come a cycle later than those of the
    one before. As in `split_product`, the register behind a multiplier leads to another one and nothing else.
    """
    register = pipeline.register
    width = sum(map(len, a)) + sum(map(len, b))
    pairs = sorted((i * len(a[0]) + j * len(b[0]), i, j) for i in range(len(a)) for j in range(len(b)))
    a, b = [[piece] for piece in a], [[piece] for piece in b]  # each as it was so many cycles ago

    def earlier(held, cycles):
        while len(held) <= cycles:
            held.append(register(held[-1], "piece"))
        return held[cycles]

    total = None
    for number, (place, i, j) in enumerate(pairs):
        delay = max(0, number - 1)
        product = register(earlier(a[i], delay) * earlier(b[j], delay), "product", cycles=2)
        if total is None:
            total = product
            continue
        total = register(Cat(total[:place], total[place:] + product)[:width], "total")
    return total


def fp16_to_fp32(m: Module, number: Value) -> Value:
    """A finite fp16 number that is not negative (its sign is ignored) as fp32, exact; subnormals become normal."""
    subnormal = ~number[10:15].any()
    zeros = leading_zeros(m, number[:10])
    fraction = Mux(subnormal, Cat(0, shift_left(m, number[:10], zeros)[:9]), number[:10])
    # A subnormal with its first one at the top of the fraction is half of the least normal number.
    exponent = Mux(subnormal, FP32_BIAS + FP16_LSB + 10 - zeros, number[10:15] + (FP32_BIAS - 15))[:8]
    return Mux(number[:15].any(), Cat(Const(0, FP32_MANTISSA - 11), fraction, exponent, Const(0, 1)), 0)


class FloatProduct(wiring.Component):
    """``fp32(a * b)``, rounded once, ties to even; +0 where a factor is 0.

    Attributes
    ----------
    latency : int
        Cycles from the factors to the product, which is a register. One product per cycle.

    Members
    -------
    a, b : in
        Factors: normal fp32 numbers or 0. The caller guarantees a normal product.
    p : out
    """

    latency = WIDE_PRODUCT_LATENCY + 2

    def __init__(self):
        super().__init__({"a": In(32), "b": In(32), "p": Out(32)})

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register
        product = wide_product(pipeline, *(Cat(x[: FP32_MANTISSA - 1], 1) for x in (self.a, self.b)))
        sign = register(self.a[31] ^ self.b[31], "sign", cycles=self.latency - 1)
        nonzero = register(self.a[23:31].any() & self.b[23:31].any(), "nonzero", cycles=self.latency - 1)
        exponent = register((self.a[23:31] + self.b[23:31] - FP32_BIAS)[:8], "exponent", cycles=WIDE_PRODUCT_LATENCY)

        # The product of two numbers below 2 may reach 2.
        top = product[-1]
        normal = register(Mux(top, product, Cat(0, product[:-1])), "normal")
        exponent = register((exponent + top)[:8], "exponent")
        m.d.comb += self.p.eq(register(round_to_fp32(normal, exponent, sign, nonzero), "rounded"))
        return m


class FloatFromInteger(wiring.Component):
    """``fp32(number * 2^exponent)``, rounded to nearest, ties to even, or cut to 24 significant bits.

    Parameters
    ----------
    width : int
        Bits of the signed number, at least 2.
    exponent : Shape
        Of the exponent.

    Attributes
    ----------
    latency : int
        Cycles to the result, which is a register. One result per cycle.

    Members
    -------
    number : in, signed
    exponent : in
        The caller guarantees a normal result.
    truncate : in
        Cut instead of rounding: towards zero.
    y : out
        fp32.

    Raises
    ------
    ParameterError
        When *width* is less than 2.
    """

    latency = 4

    def __init__(self, width: int, exponent: Shape):
        self.width = check_integer("width", width, 2)
        super().__init__({"number": In(signed(width)), "exponent": In(exponent), "truncate": In(1), "y": Out(32)})

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register
        sign = register(self.number < 0, "sign", cycles=3)
        truncate = register(self.truncate, "truncate", cycles=3)
        top_exponent = register((self.exponent + (FP32_BIAS + self.width - 1))[:8], "top_exponent", cycles=2)

        # Cycle 0: magnitude. Cycle 1: where its first one stands. Cycle 2: normalised. Cycle 3: rounded.
        magnitude = register(Mux(self.number < 0, -self.number, self.number)[: self.width], "magnitude")
        zeros = register(leading_zeros(m, magnitude), "zeros")
        nonzero = register(magnitude.any(), "nonzero", cycles=2)
        magnitude = register(magnitude, "magnitude")
        normal = register(shift_left(m, magnitude, zeros), "normal")
        exponent = register((top_exponent - zeros)[:8], "exponent")
        cut = max(0, self.width - FP32_MANTISSA)
        kept = Cat(normal[:cut] & ~truncate.replicate(cut), normal[cut:])
        m.d.comb += self.y.eq(register(round_to_fp32(kept, exponent, sign, nonzero), "rounded"))
        return m


class HalfProduct(wiring.Component):
    """``fp16(a * b)``, rounded once, ties to even; subnormals are taken and kept, overflow becomes +-65504.

    Attributes
    ----------
    latency : int
        Cycles from a and b to the product, a register. One per cycle.

    Members
    -------
    a, b : in
        fp16, finite; the sign of b is ignored.
    product : out
        fp16 with the sign of a.
    """

    latency = 6
    _most_shift = FP16_MANTISSA + 2  # everything is less than half of the least number then

    def __init__(self):
        super().__init__({"a": In(16), "b": In(16), "product": Out(16)})

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register

        # Mantissas and exponents, a subnormal with exponent 1.
        mantissas, exponents = [], []
        for number in (self.a, self.b):
            normal = number[10:15].any()
            mantissas.append(register(Cat(number[:10], normal), "mantissa"))
            exponents.append(Cat(number[10] | ~normal, number[11:15]))
        product = register(mantissas[0] * mantissas[1], "product")
        places = register(exponents[0] + exponents[1], "places", cycles=2)

        # Normalised: its first one is worth 2^(exponent - 15), were there no least exponent.
        width = 2 * FP16_MANTISSA
        zeros = leading_zeros(m, product)
        exponent = Signal(signed(8))
        m.d.comb += exponent.eq(places - 14 - zeros)
        normal = register(shift_left(m, product, zeros), "normal")
        subnormal = exponent < 1
        short = Signal(range(self._most_shift + 1))
        m.d.comb += short.eq(Mux(subnormal, Mux(exponent < 1 - self._most_shift, self._most_shift, 1 - exponent), 0))
        short = register(short, "short")
        exponent = register(Mux(subnormal, 0, exponent)[:6], "exponent")

        # Shifted down where the least exponent is larger.
        shifted, sticky = shift_right_sticky(m, normal, short)
        shifted, sticky = register(shifted, "shifted"), register(sticky, "sticky")
        exponent = register(exponent, "exponent")
        cut = width - FP16_MANTISSA
        kept, half, rest = shifted[cut:], shifted[cut - 1], shifted[: cut - 1].any() | sticky
        rounded = register(Cat(kept[: FP16_MANTISSA - 1], exponent) + (half & (rest | kept[0])), "rounded")
        nonzero = register(product.any(), "nonzero", cycles=3)
        sign = register(self.a[15], "sign", cycles=5)
        magnitude = Mux(nonzero, Mux(rounded >= FP16_INFINITY, FP16_INFINITY - 1, rounded), 0)
        m.d.comb += self.product.eq(register(Cat(magnitude[:15], sign), "half_product"))
        return m
