"""Floating-point units of the group accumulation: integer times two fp16 scales to fp32, and the fp32 sum.

Both are complete for the values that occur there and for nothing else. A group's integer result times two fp16
scales is a multiple of 2**-48 below 2**58, and so is every sum of such products: all results are normal fp32 numbers
or +0. No unit handles subnormal, infinite or not-a-number fp32 operands, and none produces -0.

An fp32 number is ``sign`` (bit 31), biased ``exponent`` (30..23) and ``fraction``. An exponent of 0 stands for +0.
"""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer

FP32_BIAS = 127
FP32_MANTISSA = 24
"""Significant bits of an fp32 number, the hidden one included."""

FP16_MANTISSA = 11
"""Significant bits of an fp16 number, the hidden one included."""

FP16_LSB = -25
"""An fp16 number is ``mantissa * 2**(exponent + FP16_LSB)``, its subnormals taken with exponent 1."""


def leading_zeros(m: Module, value: Value) -> Signal:
    """Number of zeros above the most significant one of *value*, by a balanced tree.

    Parameters
    ----------
    m : Module
        Receives the logic.
    value : unsigned
        Not zero; the count of a zero has no meaning.

    Returns
    -------
    Signal
        ``bits(len(value) - 1)`` wide.
    """
    levels = (len(value) - 1).bit_length()
    padded = Cat(Const(0, (1 << levels) - len(value)), value)
    nodes = [(bit, []) for bit in reversed(padded)]  # (any one, count of leading zeros from its low bit up)
    while len(nodes) > 1:
        merged = []
        for (left_any, left_count), (right_any, right_count) in zip(nodes[::2], nodes[1::2], strict=True):
            node_any = Signal()
            node_count = Signal(len(left_count) + 1)
            m.d.comb += [
                node_any.eq(left_any | right_any),
                node_count.eq(Cat(Mux(left_any, Cat(left_count), Cat(right_count)), ~left_any)),
            ]
            merged.append((node_any, list(node_count)))
        nodes = merged
    count = Signal(max(1, levels))
    m.d.comb += count.eq(Cat(nodes[0][1]))
    return count


def shift_left(m: Module, value: Value, amount: Value) -> Signal:
    """*value* shifted left by *amount* within its own width, by a logarithmic shifter."""
    for k in reversed(range(len(amount))):
        stage = Signal(len(value))
        m.d.comb += stage.eq(Mux(amount[k], Cat(Const(0, min(1 << k, len(value))), value)[: len(value)], value))
        value = stage
    return value


def shift_right_sticky(m: Module, value: Value, amount: Value) -> tuple[Signal, Signal]:
    """*value* shifted right by *amount*, and whether a one was shifted out.

    Returns
    -------
    (Signal, Signal)
        The shifted value, as wide as *value*, and the sticky bit.
    """
    sticky = Const(0, 1)
    for k in reversed(range(len(amount))):
        stage, stage_sticky = Signal(len(value)), Signal()
        m.d.comb += [
            stage.eq(Mux(amount[k], value[1 << k :], value)),
            stage_sticky.eq(sticky | (amount[k] & value[: 1 << k].any())),
        ]
        value, sticky = stage, stage_sticky
    return value, sticky


def add_with_carry(a: Value, b: Value, carry: Value) -> Value:
    """``a + b + carry`` of two equally wide unsigned numbers, one bit wider, as a single addition.

    Synthesis builds a second carry chain for a third operand; here the carry comes from one more low bit.
    """
    return (Cat(Const(1, 1), a) + Cat(carry, b))[1:]


def round_to_fp32(normal: Value, exponent: Value, sign: Value, nonzero: Value) -> Value:
    """The fp32 number nearest to a normalised one, ties to even.

    Parameters
    ----------
    normal : unsigned
        Significant bits, the topmost of them set; the last one may stand for any number of bits behind it.
    exponent : 8
        Biased exponent of the result, if rounding does not carry into the next power of two.
    sign : 1
    nonzero : 1
        Otherwise the result is +0.
    """
    padded = Cat(Const(0, max(0, FP32_MANTISSA + 2 - len(normal))), normal)
    fraction = padded[-FP32_MANTISSA:-1]
    half, rest = padded[-FP32_MANTISSA - 1], padded[: -FP32_MANTISSA - 1].any()
    # What a carry out of the fraction adds to the exponent is what it should.
    rounded = Cat(fraction, exponent) + (half & (rest | fraction[0]))
    return Mux(nonzero, Cat(rounded[:31], sign), 0)


class Pipeline:
    """Registers of a data pipeline: they need no reset, since a valid bit that has one travels beside them.

    Parameters
    ----------
    m : Module
        Receives the registers, in its ``sync`` domain.
    enable : Value, optional
        The pipeline moves in this cycle; without it, in every cycle.
    """

    def __init__(self, m: Module, *, enable: Value | None = None):
        self.m = m
        self.enable = Const(1) if enable is None else enable

    def register(self, value: Value, name: str, *, cycles: int = 1) -> Signal:
        """*value* as it was *cycles* cycles ago, in registers named *name*."""
        for _ in range(cycles):
            held = Signal.like(value, name=name, reset_less=True)
            self._hold(held, value)
            value = held
        return value

    def valid(self, value: Value, *, cycles: int) -> Value:
        """A valid bit as it was *cycles* (at least 1) cycles ago; 0 after reset."""
        delayed = Signal(cycles, name="valids")
        self._hold(delayed, Cat(value, delayed))
        return delayed[-1]

    def _hold(self, register: Signal, value: Value):
        if isinstance(self.enable, Const):
            self.m.d.sync += register.eq(value)
        else:
            with self.m.If(self.enable):
                self.m.d.sync += register.eq(value)


class ScaledProduct(wiring.Component):
    """``fp32(r * x_scale * w_scale)``: the exact product, rounded once, ties to even.

    The magnitude of r is multiplied by one scale's mantissa after the other, each in two halves, so that every
    product is one narrow multiplier between two registers; then the product is normalised and rounded.

    Parameters
    ----------
    width : int
        Bits of the signed integer r, 2 .. 26; the most negative number is not a legal r.

    Attributes
    ----------
    latency : int
        Cycles from r to p. One result per cycle.

    Members
    -------
    r : in, signed
        Integer result of a group.
    x_scale, w_scale : in
        fp16, finite and not negative, subnormals and 0 included. (Their signs are ignored.)
    p : out
        fp32 product; +0 where one of the factors is zero.

    Raises
    ------
    ParameterError
        When *width* is outside 2 .. 26.
    """

    latency = 8

    def __init__(self, width: int):
        self.width = check_integer("width", width, 2, 26)
        super().__init__({"r": In(signed(width)), "x_scale": In(16), "w_scale": In(16), "p": Out(32)})

    @staticmethod
    def _halves(pipeline: Pipeline, number: Value, mantissa: Value) -> Signal:
        """``number * mantissa``, exact, two cycles later."""
        split = (len(number) + 1) // 2
        low = pipeline.register(number[:split] * mantissa, "low")
        high = pipeline.register(number[split:] * mantissa, "high")
        upper = (low[split:] + high)[: len(number) + len(mantissa) - split]
        return pipeline.register(Cat(low[:split], upper), "product")

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register

        # Cycle 0: sign and magnitude of r; mantissas and the sum of the exponents. A subnormal has exponent 1.
        magnitude = register(Mux(self.r < 0, -self.r, self.r)[: self.width - 1], "magnitude")
        mantissas, exponents = [], []
        for scale in (self.x_scale, self.w_scale):
            normal = scale[10:15].any()
            mantissas.append(Cat(scale[:10], normal))
            exponents.append(Cat(scale[10] | ~normal, scale[11:15]))
        x_mantissa = register(mantissas[0], "x_mantissa")
        w_mantissa = register(mantissas[1], "w_mantissa", cycles=3)

        # Cycles 1 to 4: the product, below 2**47.
        product = self._halves(pipeline, magnitude, x_mantissa)
        product = self._halves(pipeline, product, w_mantissa)

        # Cycle 5: where its first one stands. The exponent is the one of a product with no leading zero, which the
        # scales alone decide.
        width = len(product)
        zeros = register(leading_zeros(m, product), "zeros")
        nonzero = register(product.any(), "nonzero")
        product = register(product, "product")
        top_exponent = register(exponents[0] + exponents[1], "exponents", cycles=5)
        top_exponent = register((top_exponent + (2 * FP16_LSB + width - 1 + FP32_BIAS))[:8], "top_exponent")

        # Cycle 6: normalised, the first one at the top.
        normal = register(shift_left(m, product, zeros), "normal")
        exponent = register((top_exponent - zeros)[:8], "exponent")
        nonzero = register(nonzero, "nonzero")
        sign = register(self.r < 0, "sign", cycles=7)

        # Cycle 7: rounded.
        m.d.comb += self.p.eq(register(round_to_fp32(normal, exponent, sign, nonzero), "rounded"))
        return m


class FloatAdder(wiring.Component):
    """``fp32(a + b)``, rounded ties to even; exact cancellation gives +0.

    Attributes
    ----------
    latency : int
        Cycles from the operands to the sum. The sum leaves the rounding logic without a register behind it, so that
        a memory takes it in the same cycle. One sum per cycle.

    Members
    -------
    a, b : in
        Operands: normal fp32 numbers or +0.
    y : out
        Their sum. The caller guarantees that it is not subnormal and does not overflow.
    """

    latency = 5

    def __init__(self):
        super().__init__({"a": In(32), "b": In(32), "y": Out(32)})

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register

        # Cycle 0: the larger magnitude first. Both exponent differences are made while the magnitudes are compared.
        a, b = self.a, self.b
        swap = Signal()
        m.d.comb += swap.eq(a[:31] < b[:31])
        # The larger one is kept in parts: in a unit with an enable, Icarus complains of selects of a register.
        large_sign = register(Mux(swap, b[31], a[31]), "large_sign")
        large_exponent = register(Mux(swap, b[23:31], a[23:31]), "large_exponent")
        large_fraction = register(Mux(swap, b[:23], a[:23]), "large_fraction")
        small = register(Mux(swap, a, b), "small")
        distance = register(Mux(swap, b[23:31] - a[23:31], a[23:31] - b[23:31])[:8], "distance")

        # Cycle 1: the smaller one aligned, two guard bits below it and what falls off gathered in a third. A shift by
        # 26 or more leaves only that one.
        subtract = register(large_sign ^ small[31], "subtract")
        sign = register(large_sign, "sign", cycles=4)
        exponent = register(large_exponent, "exponent", cycles=3)
        large_mantissa = register(Cat(large_fraction, large_exponent.any()), "large_mantissa")
        amount = Mux(distance[5:].any(), 31, distance[:5])
        aligned, sticky = shift_right_sticky(m, Cat(Const(0, 2), small[:23], small[23:31].any()), amount)
        aligned = register(Cat(sticky, aligned), "aligned")

        # Cycle 2: the sum, one carry bit above. It is not negative.
        total = add_with_carry(Cat(Const(0, 3), large_mantissa), aligned ^ subtract.replicate(len(aligned)), subtract)
        carry = total[len(aligned)] & ~subtract
        total = register(Cat(total[: len(aligned)], carry), "total")

        # Cycle 3: where its first one stands.
        zeros = register(leading_zeros(m, total), "zeros")
        nonzero = register(total.any(), "nonzero")
        total = register(total, "total")

        # Cycle 4: normalised.
        normal = register(shift_left(m, total, zeros), "normal")
        exponent = register((exponent + 1 - zeros)[:8], "exponent")
        nonzero = register(nonzero, "nonzero")

        # Cycle 5: rounded.
        m.d.comb += self.y.eq(round_to_fp32(normal, exponent, sign, nonzero))
        return m
