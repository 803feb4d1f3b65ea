"""The multipliers of the codebook engine: elements of a slice times the INT8 elements of a centroid."""

from amaranth.hdl import Cat, Module, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.numeric.floating import Pipeline
from kvant.hw.pq.codebook_jobs import PIECE_BITS
from kvant.hw.pq.parameters import PqParameters

OPERAND_BITS = PIECE_BITS + 1
"""Bits of a signed operand: a grid position, an INT8 element or an unsigned piece of a bin."""

PRODUCT_BITS = OPERAND_BITS + 8
"""Bits of a signed product."""


class ProductArray(wiring.Component):
    """`slice_bytes` products per cycle, and their sums over the elements of each sub-space. Never stalls.

    Attributes
    ----------
    product_latency : int
        Cycles from the operands to `products`.
    sum_latency : int
        Cycles from the operands to `sums`: one more for each level of the tree.

    Members
    -------
    operands : in, array of signed
    centroid : in, array of signed(8)
    products : out, array of signed
        ``operands[a] * centroid[a]``.
    sums : out, array of signed
        Of each sub-space.
    """

    product_latency = 3

    def __init__(self, p: PqParameters):
        self.p = p
        self.levels = (p.subspace - 1).bit_length()
        self.sum_latency = self.product_latency + self.levels
        super().__init__(
            {
                "operands": In(data.ArrayLayout(signed(OPERAND_BITS), p.slice_bytes)),
                "centroid": In(data.ArrayLayout(signed(8), p.slice_bytes)),
                "products": Out(data.ArrayLayout(signed(PRODUCT_BITS), p.slice_bytes)),
                "sums": Out(data.ArrayLayout(signed(PRODUCT_BITS + self.levels), p.slice_subspaces)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        register = Pipeline(m).register
        products = []
        for lane in range(p.slice_bytes):
            operand = register(self.operands[lane], "operand")
            element = register(self.centroid[lane], "element")
            # The register behind a multiplier leads to another one and nothing else: it can lie where that does.
            products.append(register(operand * element, "product", cycles=2))
        sums = products
        for _ in range(self.levels):
            sums = [register(low + high, "sum") for low, high in zip(sums[::2], sums[1::2], strict=True)]
        m.d.comb += [self.products.eq(Cat(products)), self.sums.eq(Cat(sums))]
        return m
