"""Scaled product and fp32 adder against numpy, whose float32 arithmetic rounds once, ties to even."""

import numpy as np
import pytest
from amaranth.hdl import Cat, Elaboratable, Module, Signal
from amaranth.sim import Simulator

from kvant.hw.numeric import floating
from kvant.hw.numeric.floating import FloatAdder, ScaledProduct, add_with_carry, leading_zeros, shift_left
from kvant.hw.parameters import ParameterError

# A component whose parameters are refused is never elaborated.
pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20260701
SCALES = [0x0000, 0x0001, 0x0002, 0x0155, 0x03FF, 0x0400, 0x0401, 0x2E66, 0x3BFF, 0x3C00, 0x3C01, 0x7BFF]
"""fp16: zero, subnormals, both sides of the normal range's ends, and of one."""


def stream_through(component, inputs, output, operands):
    """Results of a pipeline, a new set of operands in every cycle.

    The result of the operands of cycle n is taken exactly `component.latency` cycles later.
    """
    results = []

    async def bench(ctx):
        for cycle in range(len(operands) + component.latency):
            if cycle < len(operands):
                for port, value in zip(inputs, operands[cycle], strict=True):
                    ctx.set(port, value)
            if cycle >= component.latency:
                results.append(ctx.get(output))
            await ctx.tick()

    simulator = Simulator(component)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return np.array(results)


def multiply(unit, cases):
    """fp32 bits of the products of (r, x_scale, w_scale)."""
    return stream_through(unit, [unit.r, unit.x_scale, unit.w_scale], unit.p, [tuple(map(int, case)) for case in cases])


def expected_products(cases):
    """The exact product has at most 25 + 11 + 11 bits, so float64 holds it; numpy rounds it once to float32."""
    r, x_scale, w_scale = np.array(cases).T
    scales = [scale.astype(np.uint16).view(np.float16).astype(np.float64) for scale in (x_scale, w_scale)]
    exact = r.astype(np.float64) * scales[0] * scales[1]
    return np.where(exact == 0, 0, exact.astype(np.float32).view(np.uint32))


def add(unit, pairs):
    """fp32 bits of the sums of pairs of fp32 bits."""
    return stream_through(unit, [unit.a, unit.b], unit.y, [tuple(map(int, pair)) for pair in pairs])


def expected_sums(pairs):
    a, b = np.array(pairs, np.uint32).T
    return (a.view(np.float32) + b.view(np.float32)).view(np.uint32)


def bits(values):
    return np.asarray(values, np.float32).view(np.uint32)


def random_fp32(rng, count, low=-48, high=74):
    """Bits of random normal numbers of the range of accumulation, often with few significant bits."""
    fraction = rng.integers(0, 1 << 23, count) & -(1 << rng.integers(0, 24, count))
    exponent = rng.integers(low, high + 1, count) + 127
    return rng.integers(0, 2, count) << 31 | exponent << 23 | fraction


@pytest.mark.parametrize("width", [2, 9, 24, 26])
def test_products_of_extremes_are_exact_or_rounded_once(width):
    largest = (1 << (width - 1)) - 1
    magnitudes = sorted({0, 1, largest // 3, largest // 2 + 1, largest - 1, largest} & set(range(largest + 1)))
    cases = [(sign * r, x, w) for r in magnitudes for sign in (1, -1) for x in SCALES for w in SCALES]
    np.testing.assert_array_equal(multiply(ScaledProduct(width), cases), expected_products(cases))


def test_random_products_are_rounded_once():
    rng = np.random.default_rng(SEED)
    r = rng.integers(-(1 << 25) + 1, 1 << 25, 4000) >> rng.integers(0, 25, 4000)
    cases = np.stack([r, rng.integers(0, 0x7C00, 4000), rng.integers(0, 0x7C00, 4000)], axis=1)
    np.testing.assert_array_equal(multiply(ScaledProduct(26), cases), expected_products(cases))


def product_ties(rng, count):
    """Products whose exact value lies halfway between two fp32 numbers: odd integers of 25 bits."""
    cases = []
    while len(cases) < count:
        mantissa = int(rng.integers(1024, 2048)) | 1
        r = int(rng.integers((1 << 24) // mantissa + 1, (1 << 25) // mantissa)) | 1
        if 1 << 24 < r * mantissa < 1 << 25:
            exponents = rng.integers(1, 31, 2)
            scales = [int(exponents[0]) << 10 | mantissa & 1023, int(exponents[1]) << 10]
            cases.append((r if rng.integers(2) else -r, *(scales if rng.integers(2) else scales[::-1])))
    return cases


def test_product_ties_round_to_even_in_both_directions():
    cases = product_ties(np.random.default_rng(SEED), 500)
    expected = expected_products(cases)
    exact = np.array([abs(r) * (x & 1023 | 1024) * (w & 1023 | 1024) >> 10 for r, x, w in cases])
    up = (expected & 1) == 0
    assert up.all(), "a tie rounds to an even number"
    assert {int(e % 4) for e in exact} == {1, 3}, "ties that round down and ties that round up"
    np.testing.assert_array_equal(multiply(ScaledProduct(24), cases), expected)


def test_a_zero_factor_gives_plus_zero():
    cases = [(0, 0x7BFF, 0x7BFF), (-5, 0, 0x3C00), (-5, 0x3C00, 0), (0, 0, 0), (-5, 0x8000, 0x3C00)]
    assert not multiply(ScaledProduct(24), cases).any()


@pytest.mark.parametrize("width", [1, 27, 0, -3])
def test_product_refuses_widths_it_is_not_built_for(width):
    with pytest.raises(ParameterError, match=rf"^width = {width}: legal is an integer from 2 to 26$"):
        ScaledProduct(width)


def test_random_sums_equal_float32():
    rng = np.random.default_rng(SEED)
    a, b = random_fp32(rng, 5000), random_fp32(rng, 5000)
    near = rng.integers(0, 2, 5000) == 1  # half of the pairs so close that they overlap
    b = np.where(near, b & 0x807FFFFF | np.clip((a >> 23 & 255) + rng.integers(-27, 28, 5000), 79, 201) << 23, b)
    pairs = np.stack([a, b], axis=1)
    np.testing.assert_array_equal(add(FloatAdder(), pairs), expected_sums(pairs))


def test_sums_at_every_exponent_difference_and_with_every_guard_pattern():
    """Operands with few and with all bits set, 0 to 40 places apart: ties, stickies, carries and long cancellations."""
    fractions = [0, 1, 2, 3, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF, 0x2AAAAA]
    pairs = []
    for distance in range(41):
        for sign in (0, 1 << 31):
            for large in (0, 1, 0x7FFFFF, 0x400000):
                pairs += [(100 + distance << 23 | large, sign | 100 << 23 | small) for small in fractions]
    pairs += [(b ^ 1 << 31, a ^ 1 << 31) for a, b in pairs]
    np.testing.assert_array_equal(add(FloatAdder(), pairs), expected_sums(pairs))


def sum_ties():
    """Sums halfway between two numbers, and just beside them."""
    ulp = 2.0**-23
    pairs = []
    for large in (1.0, 1.0 + ulp, 1.5, 1.5 + ulp, 2.0 - ulp):
        for small in (ulp / 2, ulp / 2 + ulp * 2.0**-24, ulp / 2 - ulp * 2.0**-25, ulp / 4, 3 * ulp / 2):
            for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
                pairs.append((signs[0] * large, signs[1] * small))
    return bits(pairs)


def test_sum_ties_round_to_even_and_a_sticky_bit_decides_beside_them():
    pairs = sum_ties()
    np.testing.assert_array_equal(add(FloatAdder(), pairs), expected_sums(pairs))


def test_exact_cancellation_gives_plus_zero():
    values = random_fp32(np.random.default_rng(SEED), 200)
    assert not add(FloatAdder(), np.stack([values, values ^ 1 << 31], axis=1)).any()


def test_zero_is_neutral_on_both_sides():
    values = random_fp32(np.random.default_rng(SEED), 100)
    zero = np.zeros_like(values)
    np.testing.assert_array_equal(add(FloatAdder(), np.stack([values, zero], axis=1)), values)
    np.testing.assert_array_equal(add(FloatAdder(), np.stack([zero, values], axis=1)), values)
    assert not add(FloatAdder(), [(0, 0)]).any()


class Helpers(Elaboratable):
    """The shared pieces of logic, side by side."""

    def __init__(self, width):
        self.value, self.other, self.amount, self.carry = Signal(width), Signal(width), Signal(5), Signal()
        self.zeros, self.left, self.right, self.sticky = Signal(6), Signal(width), Signal(width), Signal()
        self.sum = Signal(width + 1)

    def elaborate(self, platform):
        m = Module()
        right, sticky = floating.shift_right_sticky(m, self.value, self.amount)
        m.d.comb += [
            self.zeros.eq(leading_zeros(m, self.value)),
            self.left.eq(shift_left(m, self.value, self.amount)),
            self.right.eq(right),
            self.sticky.eq(sticky),
            self.sum.eq(add_with_carry(self.value, self.other, self.carry)),
        ]
        return m


@pytest.mark.parametrize("width", [1, 2, 5, 8, 27])
def test_shifts_and_counts_equal_integer_arithmetic(width):
    rng = np.random.default_rng(SEED)
    unit = Helpers(width)

    async def bench(ctx):
        for _ in range(200):
            value = int(rng.integers(0, 1 << width) >> rng.integers(0, width + 1))
            other, amount, carry = int(rng.integers(0, 1 << width)), int(rng.integers(0, 32)), int(rng.integers(2))
            ctx.set(Cat(unit.value, unit.other), value | other << width)
            ctx.set(Cat(unit.amount, unit.carry), amount | carry << 5)
            await ctx.delay(1e-6)
            if value:
                assert ctx.get(unit.zeros) == width - value.bit_length()
            assert ctx.get(unit.left) == (value << amount) % (1 << width)
            assert ctx.get(unit.right) == value >> amount
            assert ctx.get(unit.sticky) == (value % (1 << amount) != 0)
            assert ctx.get(unit.sum) == value + other + carry

    simulator = Simulator(unit)
    simulator.add_testbench(bench)
    simulator.run()


class TestSeededFaults:
    """A fault in the RTL makes the comparisons of this file fail."""

    @staticmethod
    def half_up(normal, exponent, sign, nonzero):
        mantissa, half = normal[-floating.FP32_MANTISSA : -1], normal[-floating.FP32_MANTISSA - 1]
        rounded = floating.Cat(mantissa, exponent) + half
        return floating.Mux(nonzero, floating.Cat(rounded[:31], sign), 0)

    @staticmethod
    def without_sticky(m, value, amount):
        return value >> amount, floating.Const(0, 1)

    def test_rounding_ties_up_is_caught_in_products_and_sums(self, monkeypatch):
        monkeypatch.setattr(floating, "round_to_fp32", self.half_up)
        cases, pairs = product_ties(np.random.default_rng(SEED), 50), sum_ties()
        assert (multiply(ScaledProduct(24), cases) != expected_products(cases)).any()
        assert (add(FloatAdder(), pairs) != expected_sums(pairs)).any()

    def test_a_dropped_sticky_bit_is_caught(self, monkeypatch):
        monkeypatch.setattr(floating, "shift_right_sticky", self.without_sticky)
        assert (add(FloatAdder(), sum_ties()) != expected_sums(sum_ties())).any()

    @pytest.mark.parametrize("name", ["sign", "subtract"])
    def test_a_wrong_sign_is_caught(self, monkeypatch, name):
        register = floating.Pipeline.register

        def inverted(self, value, held_name, *, cycles=1):
            return register(self, ~value if held_name == name else value, held_name, cycles=cycles)

        monkeypatch.setattr(floating.Pipeline, "register", inverted)
        assert (add(FloatAdder(), sum_ties()) != expected_sums(sum_ties())).any()
