"""Positions on a codebook's grid against the golden rule and against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from amaranth.hdl import Module, Mux
from amaranth.sim import Simulator
from verilog_checks import lint, yosys

from kvant.golden.pq.encode import grid_position
from kvant.hw.emit import emit
from kvant.hw.numeric.division import divide_steps
from kvant.hw.pq import grid_position as hardware
from kvant.hw.pq.grid_position import GridPosition

SEED = 20261130


def run(x, scale):
    """u of pairs of fp16 bits, one pair per cycle."""
    unit, got = GridPosition(), []
    m = Module()
    m.submodules.unit = unit
    simulator = Simulator(m)
    simulator.add_clock(1e-8)

    async def bench(ctx):
        for cycle in range(len(x) + unit.latency):
            if cycle < len(x):
                ctx.set(unit.x, int(x[cycle]))
                ctx.set(unit.scale, int(scale[cycle]))
            await ctx.tick()
            if cycle + 1 >= unit.latency:
                got.append(ctx.get(unit.u))

    simulator.add_testbench(bench)
    simulator.run()
    return got[: len(x)]


def golden(x, scale):
    as_float = [torch.from_numpy(np.asarray(bits, np.uint16).view(np.float16).copy()) for bits in (x, scale)]
    return [int(u) for u in grid_position(*as_float)]


def exact(x, scale):
    """The rule in fractions."""
    x, scale = (Fraction(float(np.uint16(bits).view(np.float16))) for bits in (x, scale))
    return 0 if scale == 0 else max(-32767, min(32767, round(16 * x / scale)))


def pairs(count=4000):
    """Random pairs of all magnitudes, pairs around the ties and around the limit, and all corners."""
    rng = np.random.default_rng(SEED)
    x = list(rng.integers(0, 0x7C00, count) | rng.integers(0, 2, count) << 15)
    scale = list(rng.integers(0, 0x7C00, count))
    corners = [0, 1, 2, 3, 0x3FE, 0x3FF, 0x400, 0x401, 0x7FF, 0x800, 0x3C00, 0x3C01, 0x4000, 0x77FF, 0x7BFE, 0x7BFF]
    for a in corners:
        for b in corners:
            x += [a, a | 0x8000]
            scale += [b, b]
    for _ in range(count):
        s = np.float16(rng.uniform(1, 2) * 2.0 ** int(rng.integers(-16, 9)))
        n = int(rng.integers(0, 40)) if rng.random() < 0.5 else int(rng.integers(0, 33000))
        near = np.float16(min((n + 0.5) * float(s) / 16, 65504.0)).view(np.uint16)
        x.append(min(max(int(near) + int(rng.integers(-1, 2)), 0), 0x7BFF))
        scale.append(int(s.view(np.uint16)))
    for n in range(200):  # exact ties
        x.append(int(np.float16(n + 0.5).view(np.uint16)))
        scale.append(int(np.float16(16).view(np.uint16)))
    return x, scale


def test_positions_are_those_of_the_golden_model_and_of_fractions():
    x, scale = pairs()
    got = run(x, scale)
    assert got == golden(x, scale)
    assert got[-3000:] == [exact(*pair) for pair in zip(x[-3000:], scale[-3000:], strict=True)]
    assert {0, 1, -1, 32767, -32767} <= set(got) and any(32700 < u < 32767 for u in got)


@pytest.mark.long
def test_every_element_over_scales_of_all_sorts():
    for scale in (0, 1, 3, 0x3FF, 0x400, 0x555, 0x2A3B, 0x3C00, 0x3FFF, 0x5123, 0x7BFF):
        x = list(range(0x7C00))
        assert run(x, [scale] * len(x)) == golden(x, [scale] * len(x))


def lossy_steps(m, remainder, digits, divisor, steps):
    """Steps that lose the lowest bit of the remainder: a tie and what is just above it look the same."""
    remainder, digits = divide_steps(m, remainder, digits, divisor, steps)
    return Mux(remainder[-1], remainder, remainder & ~1), digits


@pytest.mark.parametrize(
    ("name", "fault"),
    [("FRACTION_BITS", 3), ("POSITION_MAX", 32766), ("divide_steps", lossy_steps)],
)
def test_a_fault_is_seen(name, fault, monkeypatch):
    monkeypatch.setattr(hardware, name, fault)
    x, scale = pairs(600)
    assert run(x, scale) != golden(x, scale)


def test_every_tool_is_silent(tmp_path):
    (tmp_path / "position.sv").write_text(emit(GridPosition(), "position").verilog)
    assert lint(tmp_path, "position.sv", top="position") == ""
    result = yosys(tmp_path, "read_verilog -sv position.sv; hierarchy -check -top position; proc; check -assert")
    assert result.returncode == 0, result.stderr
