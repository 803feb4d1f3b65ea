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

from amaranth.hdl import Cat, ClockSignal, Const, Instance, Module, Mux, Signal, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.numeric.adders import Term, adder_strategy
from kvant.hw.numeric.codes import CODE_BITS
from kvant.hw.parameters import ParameterError

X_BITS = 8
"""Bits of an activation."""
SIGN = CODE_BITS - 1
"""Place of the sign in a code."""
DIGIT_SHIFT = CODE_BITS - 1
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
        parts = [Signal(signed(X_BITS), name=f"part_{k}") for k in range(SIGN)]
        carries = Signal(SIGN)
        m.d.comb += [
            operand.eq(Mux(negate_product, ~self.x, self.x)),
            *[part.eq(Mux(magnitude[k], operand, 0)) for k, part in enumerate(parts)],
            carries.eq(Mux(negate_product, magnitude, 0)),
        ]
        width = self.product_width
        from_1 = Signal(signed(width - 1))  # the sum so far from bit 1 on
        from_2 = Signal(signed(width - 2))
        m.d.comb += [
            from_1.eq(self.adder.add(m, "add_1", parts[0] >> 1, parts[1], carry=carries[1], width=len(from_1))),
            from_2.eq(self.adder.add(m, "add_2", from_1 >> 1, parts[2], carry=carries[2], width=len(from_2))),
        ]

        # +-(x << i): the narrow stages of the shifter first
        shifted = Signal(signed(X_BITS), name="shift_0")
        m.d.comb += shifted.eq(Mux(negate_shifted, ~self.x, self.x))
        for k in range(SIGN):
            distance = 1 << k
            stage = Signal(signed(len(shifted) + distance), name=f"shift_{distance}")
            filled = Cat(negate_shifted.replicate(distance), shifted).as_signed()
            m.d.comb += stage.eq(Mux(shift[k], filled, shifted))
            shifted = stage

        product = Signal(Term(self.product_width), name="product_registered", reset_less=True)
        shifted_product = Signal(Term(self.shifted_width), name="shifted_registered", reset_less=True)
        m.d.sync += [
            product.value.eq(Cat(parts[0][0], from_1[0], from_2)),
            product.carry.eq(carries[0]),
            shifted_product.value.eq(Mux(present, shifted, 0)),
            shifted_product.carry.eq(negate_shifted & present),
        ]
        m.d.comb += [
            self.product.value.eq(product.value),
            self.product.carry.eq(product.carry),
            self.shifted.value.eq(shifted_product.value),
            self.shifted.carry.eq(shifted_product.carry),
        ]
        return m


class PackedMultiplierLane(LaneMultiplier):
    """Both products from one multiplier of 8 x 18 signed bits, two register stages.

    The code becomes one packed operand ``B = +-(i + 2**(9 + i))``, so that ``x * B`` is the product plus 512 times the
    shifted product. The low 9 bits are the product's; above them, the shifted product ``X`` has swallowed the rest,
    ``h = X + f`` with ``f = floor(product / 512)``, -2..1. ``X`` is a multiple of ``2**i``, so the low bits of `h` tell
    `f`, and three LUTs part the two:

    =========  ======  ===============  =====================================
    i          f       read from        X as value + carry
    =========  ======  ===============  =====================================
    0          0       nothing          h + 0
    1          -1, 0   h[0]             h + h[0]
    2..7       -2..1   h[1:0], signed   h with both low bits = h[1], + h[1]
    =========  ======  ===============  =====================================

    A digit of an INT8 weight packs alike, its top bit at ``2**(9 + 3)``.

    Compared with decoding to the level ``a * i + 2**i`` before the multiplication, no lane knows the coefficient, and
    the partial sums stay apart.
    """

    SPLIT = 9
    """Weight of the shifted product in the packed one, as a power of two."""
    PACKED_WIDTH = 18
    """Bits of the packed operand, signed."""

    shifted_width = 16
    latency = 2

    @classmethod
    def packed(cls, code: int) -> int:
        """Packed operand of a code."""
        i = code % (1 << SIGN)
        magnitude = i + (1 << (cls.SPLIT + i))
        return -magnitude if code >> SIGN else magnitude

    def elaborate(self, platform):
        m = Module()
        sign = self.code[SIGN]
        magnitude = self.code[:SIGN]

        operand = Signal(signed(self.PACKED_WIDTH))
        remainder = Signal(2)  # low bits of `h` that tell the product's upper bits: none, one or two
        with m.Switch(self.code):
            for code in range(1 << CODE_BITS):
                with m.Case(code):
                    m.d.comb += operand.eq(self.packed(code))
        m.d.comb += remainder.eq(Mux(magnitude >= 2, 2, magnitude))
        if self.int8_groups:
            top = self.SPLIT + DIGIT_SHIFT
            upper = Cat(sign, (sign & self.high).replicate(self.PACKED_WIDTH - top - 1))
            with m.If(self.int8):
                m.d.comb += [operand.eq(Cat(magnitude, Const(0, top - SIGN), upper)), remainder.eq(2)]

        packed = self._multiply(m, platform, operand)
        for stage in range(self.latency):
            delayed = Signal(2, name=f"remainder_{stage}", reset_less=True)
            m.d.sync += delayed.eq(remainder)
            remainder = delayed

        low, h = packed[: self.SPLIT], packed[self.SPLIT :]
        negative = Signal()  # f < 0
        m.d.comb += negative.eq(Mux(remainder[1], h[1], h[0] & remainder[0]))
        m.d.comb += [
            self.product.value.eq(Cat(low, h[0] & remainder.any(), negative)),
            self.product.carry.eq(0),
            self.shifted.value.eq(Cat(Mux(remainder[1], negative, h[0]), h[1 : self.shifted_width])),
            self.shifted.carry.eq(negative),
        ]
        return m

    def _multiply(self, m, platform, operand):
        """``x * operand``, `latency` cycles later."""
        x = Signal(signed(X_BITS), name="x_registered", reset_less=True)
        packed_code = Signal.like(operand, name="operand_registered", reset_less=True)
        result = Signal(signed(X_BITS + self.PACKED_WIDTH), name="packed_product", reset_less=True)
        m.d.sync += [x.eq(self.x), packed_code.eq(operand), result.eq(x * packed_code)]
        for stage in range(self.latency - 2):
            delayed = Signal.like(result, name=f"packed_product_{stage}", reset_less=True)
            m.d.sync += delayed.eq(result)
            result = delayed
        return result


class Ecp5MultiplierLane(PackedMultiplierLane):
    """`PackedMultiplierLane` on one MULT18X18D with its input, pipeline and output registers in use.

    Synthesis leaves those registers empty when the multiplier is inferred. Elaborated for another platform or for none,
    the lane is a behavioural model of the same latency.
    """

    latency = 3

    def _multiply(self, m, platform, operand):
        if not is_ecp5(platform):
            return super()._multiply(m, platform, operand)
        width = 18
        a = Signal(signed(width))
        result = Signal(2 * width)
        m.d.comb += a.eq(self.x)
        registers = {f"p_REG_{name}_CLK": "CLK0" for name in ("INPUTA", "INPUTB", "PIPELINE", "OUTPUT")}
        bits = {f"i_A{k}": a[k] for k in range(width)} | {f"i_B{k}": operand[k] for k in range(width)}
        m.submodules.multiplier = Instance(
            "MULT18X18D",
            **registers,
            p_GSR="DISABLED",
            **bits,
            i_SIGNEDA=Const(1),
            i_SIGNEDB=Const(1),
            i_SOURCEA=Const(0),
            i_SOURCEB=Const(0),
            i_CLK0=ClockSignal(),
            i_CE0=Const(1),
            i_RST0=Const(0),
            **{f"o_P{k}": result[k] for k in range(2 * width)},
        )
        return result[: X_BITS + self.PACKED_WIDTH]


def is_ecp5(platform) -> bool:
    """Whether Amaranth elaborates for a Lattice ECP5, whose devices are called LFE5U..."""
    return getattr(platform, "device", "").upper().startswith("LFE5U")


LANES = {"lut": ShiftAddLane, "dsp": PackedMultiplierLane, "ecp5_dsp": Ecp5MultiplierLane}
"""Lane multipliers by the name that `LinearParameters.multiplier` gives them."""


def lane_multiplier(name: str) -> type[LaneMultiplier]:
    """The lane of the strategy called *name*.

    Raises
    ------
    ParameterError
        If there is none of that name.
    """
    if name not in LANES:
        raise ParameterError(f"multiplier = {name!r}: legal is one of {', '.join(map(repr, LANES))}")
    return LANES[name]
