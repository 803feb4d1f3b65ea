"""Lane multipliers: an 8-bit activation times a 4-bit code, as the two products of the M-ANT format.

A group's result is ``a * psum1 + psum2``; a lane contributes ``x * (+-i)`` to the first partial sum (*product*) and
``+-(x << i)`` to the second (*shifted*), `i` the magnitude of its code and the sign that of the code. The shift is by
the magnitude and the sign acts on its result. For linear groups only the first sum counts.

An INT8 weight comes as two 4-bit digits, ``w = 16 * high + low``, high digit in -8..7 and low one in 0..15, and takes
two passes. The lane reads a digit as ``+-8 * b3 + i`` with the same bits: the product is ``x * i``, never negated, and
``b3`` puts ``x << 3`` into the shifted product, negated for a high digit. The sum of both partial sums is the result.

Every strategy is a component with this interface:

=========  ======================================  =====================================================
member                                             meaning
=========  ======================================  =====================================================
x          In(signed(8))                           activation, -128..127
code       In(4)                                   code of the weight, or digit of an INT8 weight
int8       In(1)                                   the code is a digit
high       In(1)                                   ... the high one; don't-care when int8 = 0
product    Out(Term(product_width))                x * (+-i)
shifted    Out(Term(shifted_width))                +-(x << i)
=========  ======================================  =====================================================

Both products leave as `kvant.hw.numeric.adders.Term` (value and carry), so that a negation costs no adder.
"""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.numeric.adders import Term, adder_strategy
from kvant.hw.parameters import ParameterError

X_BITS = 8
CODE_BITS = 4
SIGN = 3
"""Place of the sign in a code."""
DIGIT_SHIFT = 3
"""Weight of a digit's top bit, as a shift."""


class LaneMultiplier(wiring.Component):
    """Common part of the lane multipliers; see the module's text for the interface.

    Parameters
    ----------
    int8_groups : bool
        Build the reading of INT8 digits; otherwise `int8` and `high` are ignored.
    adder : str
        Adder strategy of the sums inside the lane.
    """

    product_width = 11
    """Bits of the product's value; its magnitude is at most 128 * 7."""
    shifted_width: int
    """Bits of the shifted product's value; its magnitude is at most 128 << 7."""
    latency: int
    """Cycles from operands to products."""

    def __init__(self, *, int8_groups: bool = True, adder: str = "plus"):
        self.int8_groups = int8_groups
        self.adder = adder_strategy(adder)
        super().__init__(
            {
                "x": In(signed(X_BITS)),
                "code": In(CODE_BITS),
                "int8": In(1),
                "high": In(1),
                "product": Out(Term(self.product_width)),
                "shifted": Out(Term(self.shifted_width)),
            }
        )


class ShiftAddLane(LaneMultiplier):
    """Shift and add in LUTs, one register stage.

    The sign is applied once, to x, as a complement: ``-v = ~v + 1``. Shifting in copies of the sign from below keeps
    the complement exact, ``-(x << i) = ~(x << i) + 1``, so one carry completes the shifted product. Each partial
    product ``+-x * 2**k`` of the other completes with a carry of weight ``2**k``, which is the natural carry in of the
    adder that starts at bit k; that of weight 1 leaves with the product.
    """

    shifted_width = 15
    latency = 1

    def elaborate(self, platform):
        m = Module()
        sign = self.code[SIGN]
        magnitude = self.code[:SIGN]
        int8 = self.int8 if self.int8_groups else Const(0, 1)

        negate_product = Signal()
        negate_shifted = Signal()
        present = Signal()
        shift = Signal(SIGN)
        m.d.comb += [
            negate_product.eq(sign & ~int8),
            negate_shifted.eq(sign & (~int8 | self.high)),
            present.eq(sign | ~int8),
            shift.eq(Mux(int8, DIGIT_SHIFT, magnitude)),
        ]

        # x * (+-i): one partial product per bit of i
        operand = Signal(signed(X_BITS))
        m.d.comb += operand.eq(self.x ^ negate_product.replicate(X_BITS))
        parts = [Signal(signed(X_BITS), name=f"part_{k}") for k in range(SIGN)]
        carries = Signal(SIGN)
        m.d.comb += [part.eq(operand & magnitude[k].replicate(X_BITS)) for k, part in enumerate(parts)]
        m.d.comb += carries.eq(magnitude & negate_product.replicate(SIGN))
        width = self.product_width
        upper_1 = self.adder.add(m, "add_1", parts[0] >> 1, parts[1], carry=carries[1], width=width - 1)
        low_1 = Signal(signed(width - 1))
        m.d.comb += low_1.eq(upper_1)
        upper_2 = self.adder.add(m, "add_2", low_1 >> 1, parts[2], carry=carries[2], width=width - 2)
        product = Cat(parts[0][0], low_1[0], upper_2)

        # +-(x << i): the narrow stages of the shifter first
        shifted = Signal(signed(X_BITS))
        m.d.comb += shifted.eq(self.x ^ negate_shifted.replicate(X_BITS))
        for k in range(SIGN):
            distance = 1 << k
            filled = Cat(negate_shifted.replicate(distance), shifted)
            stage = Signal(signed(len(shifted) + distance), name=f"shift_{distance}")
            m.d.comb += stage.eq(Mux(shift[k], filled.as_signed(), shifted))
            shifted = stage
        shifted = shifted & present.replicate(len(shifted))

        m.d.sync += [
            self.product.value.eq(product),
            self.product.carry.eq(carries[0]),
            self.shifted.value.eq(shifted),
            self.shifted.carry.eq(negate_shifted & present),
        ]
        return m


LANES = {"lut": ShiftAddLane}
"""Lane multipliers by the name that `LinearParameters.multiplier` gives them."""


def lane_multiplier(name: str, *, int8_groups: bool = True, adder: str = "plus") -> LaneMultiplier:
    """A new lane of the strategy called *name*.

    Raises
    ------
    ParameterError
        If there is none of that name.
    """
    if name not in LANES:
        raise ParameterError(f"multiplier = {name!r}: legal is one of {', '.join(map(repr, LANES))}")
    return LANES[name](int8_groups=int8_groups, adder=adder)
