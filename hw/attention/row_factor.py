"""Weight of a key times the scale of its value, as a short factor for the multipliers of the elements."""

from amaranth.hdl import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_shape import WEIGHT_BITS
from kvant.hw.numeric.floating import FP16_MANTISSA, Pipeline, leading_zeros, shift_left

FACTOR_BITS = 17
"""Bits that are kept of the product of a weight and a scale: signed, it fits a multiplier of 18 bits."""

PLACE_BITS = 7
"""Bits of the place of a factor: 0 for a factor of 0, else the product's length plus the scale's exponent."""


class RowFactor(wiring.Component):
    """Product of a weight and a scale, cut to its first 17 bits.

    Attributes
    ----------
    latency : int
        Cycles from the operands to the factor. One per cycle.

    Members
    -------
    weight : in
        `WEIGHT_BITS` bits.
    scale : in
        fp16, finite; its sign is ignored. Subnormals and 0 included.
    factor : out
        `FACTOR_BITS` bits, the topmost of them set unless the product is 0; what is below is cut off.
    place : out
        Length of the product (weight times mantissa) plus the exponent of the scale, that of a subnormal being 1;
        0 for a product of 0. The product is about ``factor * 2^(place - 42)``.
    """

    latency = 5

    def __init__(self):
        super().__init__({"weight": In(WEIGHT_BITS), "scale": In(16), "factor": Out(FACTOR_BITS), "place": Out(7)})

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register
        normal = self.scale[10:15].any()

        # Cycle 0: parts of the scale.
        weight = register(self.weight, "weight")
        mantissa = register(Cat(self.scale[:10], normal), "mantissa")
        exponent = Cat(self.scale[10] | ~normal, self.scale[11:15])

        # Cycles 1 and 2: the product, of two narrow ones.
        half = WEIGHT_BITS // 2
        width = WEIGHT_BITS + FP16_MANTISSA
        low = register(weight[:half] * mantissa, "low")
        high = register(weight[half:] * mantissa, "high")
        product = register(Cat(low[:half], (low[half:] + high)[: width - half]), "product")
        exponent = register(exponent, "exponent", cycles=3)

        # Cycle 3: where its first one stands. Cycle 4: the bits from there on.
        zeros = register(leading_zeros(m, product), "zeros")
        nonzero = register(product.any(), "nonzero")
        product = register(product, "product")
        top_place = register((exponent + width)[:PLACE_BITS], "top_place")
        factor = register(shift_left(m, product, zeros)[-FACTOR_BITS:], "factor")
        place = register((top_place - zeros)[:PLACE_BITS] & nonzero.replicate(PLACE_BITS), "place")
        m.d.comb += [self.factor.eq(factor), self.place.eq(place)]
        return m
