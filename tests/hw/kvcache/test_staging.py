"""Staging lane: the nearest integer of every quotient of fp16 numbers, clamped and counted."""

import numpy as np
import pytest
from amaranth.sim import Simulator

from kvant.hw.kvcache.staging import StagingLane


def stage(v, scale):
    """Elements and flags of a lane that gets one pair of fp16 bit patterns per cycle."""
    lane = StagingLane()
    out = []

    async def bench(ctx):
        for cycle in range(len(v) + lane.latency):
            if cycle < len(v):
                ctx.set(lane.v, int(v[cycle]))
                ctx.set(lane.scale, int(scale[cycle]))
            if cycle >= lane.latency:
                out.append((ctx.get(lane.q), ctx.get(lane.clamped)))
            await ctx.tick()

    simulator = Simulator(lane)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    q, clamped = np.array(out).T
    return q, clamped


def right(v, scale):
    """The rule in float64, whose division is exact enough for fp16 operands."""
    v = np.asarray(v, np.uint16).view(np.float16).astype(np.float64)
    scale = np.asarray(scale, np.uint16).view(np.float16).astype(np.float64)
    quotient = np.round(v / np.where(scale == 0, 1, scale))
    clamped = np.where(scale == 0, v != 0, np.abs(quotient) > 127)
    return np.where(scale == 0, 0, np.clip(quotient, -127, 127)).astype(int), clamped.astype(int)


def check(v, scale):
    q, clamped = stage(v, scale)
    right_q, right_clamped = right(v, scale)
    np.testing.assert_array_equal(q, right_q)
    np.testing.assert_array_equal(clamped, right_clamped)


def test_any_pair_of_numbers():
    rng = np.random.default_rng(1)
    v = rng.integers(0, 0x7C00, 4000) | rng.integers(0, 2, 4000) << 15
    scale = np.where(
        rng.random(4000) < 0.8, (v & 0x7FFF) - rng.integers(0, 0x2800, 4000), rng.integers(0, 0x7C00, 4000)
    )
    check(v, scale.clip(0, 0x7BFF))


def test_ties_go_to_even_and_127_and_a_half_is_clamped():
    # n + 1/2 times a scale, exact in fp16
    halves = np.arange(-130, 131) + 0.5
    for unit in (2.0**-24 * 2, 2.0**-14, 1.0, 3.0, 2.0**8):
        v = (halves * unit).astype(np.float16)
        exact = v.astype(np.float64) == halves * unit
        assert exact.sum() > 40
        v, scale = v.view(np.uint16), np.full(len(v), np.float16(unit).view(np.uint16))
        check(v, scale)
    assert stage([np.float16(127.5).view(np.uint16)], [np.float16(1).view(np.uint16)]) == (127, 1)


@pytest.mark.parametrize("scale", [0x0000, 0x0001, 0x0002, 0x0003, 0x03FF, 0x0400, 0x0401, 0x7BFF])
def test_extreme_scales(scale):
    edges = [0, 1, 2, 0x3FE, 0x3FF, 0x400, 0x401, 0x7FF, 0x800, 0x3C00, 0x7BFE, 0x7BFF]
    v = np.array(edges + list(range(0, 0x7C00, 257)))
    v = np.concatenate([v, v | 0x8000])
    check(v, np.full(len(v), scale))


def test_every_mantissa_against_neighbouring_exponents():
    rng = np.random.default_rng(2)
    v, scale = [], []
    for exponent in range(-3, 10):
        mantissa = rng.integers(0, 1024, (2, 150))
        v.append((15 + exponent) << 10 | mantissa[0])
        scale.append(15 << 10 | mantissa[1])
    check(np.concatenate(v), np.concatenate(scale))
