"""Products of fp16 numbers: rounded once, subnormal, saturating, against the golden rounding."""

import numpy as np
import pytest
import torch
from amaranth.sim import Simulator

from kvant.golden.numeric.rounding import FP16_MAX, fp16
from kvant.hw.attention import floating
from kvant.hw.attention.floating import HalfProduct

SEED = 20261201
INFINITY = 0x7C00
ABOVE_HALF = [(1026, 2045), (1027, 2043), (1033, 2031)]


def cases(count=2000):
    """Bits of finite numbers; half of the products near the least exponent, or the largest one."""
    rng = np.random.default_rng(SEED)
    a, b = rng.integers(0, 1 << 16, count), rng.integers(0, INFINITY, count)
    a = np.where(a & INFINITY == INFINITY, a ^ 0x4000, a)
    near = np.clip(15 - (a >> 10 & 31) + rng.integers(-13, 3, count), 0, 30)
    far = np.clip(46 - (a >> 10 & 31) + rng.integers(-2, 2, count), 0, 30)
    b[: count // 3] = (b & 0x3FF | near << 10)[: count // 3]
    b[-count // 6 :] = (b & 0x3FF | far << 10)[-count // 6 :]
    a[:40] &= 0x83FF  # subnormal
    ties = [(0x0001, 0x3800), (0x0003, 0x3800), (0x0001, 0x3801), (0x8000, 0x7BFF), (0x7BFF, 0x7BFF), (0xFBFF, 0x3C01)]
    ties += [(0x7BFF, 0x3C00), (0x0400, 0x3BFF), (0x0001, 0x0001), (0x3C01, 0x3C01), (0x3C01, 0x3C03)]
    # Just above half of the least number: mantissas whose product is 2^21 and less than 2^11 more, exponents 2.
    ties += [(2 << 10 | x & 0x3FF, 2 << 10 | y & 0x3FF) for x, y in ABOVE_HALF]
    return np.concatenate((a, [x for x, _ in ties])), np.concatenate((b, [x for _, x in ties]))


def products(a, b):
    """What the unit gives, bits."""
    unit, out = HalfProduct(), []

    async def bench(ctx):
        for cycle in range(len(a) + unit.latency):
            if cycle < len(a):
                ctx.set(unit.a, int(a[cycle])), ctx.set(unit.b, int(b[cycle]))
            if cycle >= unit.latency:
                out.append(ctx.get(unit.product))
            await ctx.tick()

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return np.array(out)


def expected(a, b):
    numbers = (torch.from_numpy(x.astype(np.uint16).view(np.float16).astype(np.float64)) for x in (a, b))
    left, right = numbers
    return fp16(left * right).clamp(-FP16_MAX, FP16_MAX).numpy().view(np.uint16)


def test_products_are_rounded_once_and_saturate():
    a, b = cases()
    got, right = products(a, b), expected(a, b)
    assert (right & INFINITY == 0).sum() > 100 and (right & 0x7FFF == INFINITY - 1).sum() > 50
    np.testing.assert_array_equal(got, right)


def test_a_fault_is_seen(monkeypatch):
    original = floating.shift_right_sticky

    def without_sticky(m, value, amount):
        return original(m, value, amount)[0], floating.Const(0)

    monkeypatch.setattr(floating, "shift_right_sticky", without_sticky)
    a, b = cases()
    assert (products(a, b) != expected(a, b)).any()


@pytest.mark.parametrize("a,b,right", [(0x3C00, 0x1234, 0x1234), (0xBC00, 0x1234, 0x9234), (0x0000, 0x7BFF, 0)])
def test_one_and_zero(a, b, right):
    assert products(np.array([a]), np.array([b])).tolist() == [right]
