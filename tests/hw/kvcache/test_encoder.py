"""Encoder against the rule of the golden model and against distances in exact fractions."""

import numpy as np
import pytest
import torch
from amaranth.hdl import Const, Value
from amaranth.lib import data
from amaranth.sim import Simulator

from kvant.golden.numeric.codes import encode_int8
from kvant.hw.kvcache import encoder
from kvant.hw.kvcache.encoder import Encoder
from kvant.hw.kvcache.layouts import GroupGrid
from kvant.hw.numeric.codes import LINEAR, levels
from kvant.hw.parameters import ParameterError

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20261130


def limits(peak, coefficient):
    level = levels(coefficient)
    return [peak * (level[k] + level[k + 1]) // (2 * level[7]) for k in range(7)]


def run(lanes, cases):
    """Codes of *cases* (peak, coefficient, zero, lanes elements), one a cycle; asserts the latency."""
    unit = Encoder(lanes)
    layout = data.Layout.cast(GroupGrid())
    codes = []

    async def bench(ctx):
        for cycle in range(len(cases) + unit.latency):
            if cycle < len(cases):
                peak, coefficient, zero, elements = cases[cycle]
                grid = {"limits": limits(peak, coefficient), "zero": zero, "linear": coefficient == LINEAR}
                ctx.set(Value.cast(unit.grid), layout.const(grid).as_value().value)
                ctx.set(unit.q, elements)
            if cycle >= unit.latency:
                codes.append([ctx.get(unit.codes[lane]) for lane in range(lanes)])
            await ctx.tick()

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return codes


def golden(cases):
    return [
        encode_int8(
            torch.tensor([elements], dtype=torch.int16),
            torch.tensor([0 if zero else peak], dtype=torch.int16),
            coefficient,
        )[0].tolist()
        for peak, coefficient, zero, elements in cases
    ]


@pytest.mark.parametrize("coefficient", [0, 1, 17, 60, 127, LINEAR])
def test_every_element_of_every_peak_has_the_nearest_code(coefficient):
    cases = []
    for peak in [*range(1, 20), 63, 64, 100, 126, 127, 128, 200, 253, 254]:
        elements = np.arange(-peak, peak + 1)
        elements = np.pad(elements, (0, -len(elements) % 8))
        cases += [(peak, coefficient, 0, row.tolist()) for row in elements.reshape(-1, 8)]
    assert run(8, cases) == golden(cases)


def test_codes_are_the_nearest_levels_and_the_smaller_magnitude_on_a_tie():
    for coefficient in (5, 60, LINEAR):
        level, peak = levels(coefficient), 126
        ties = 0
        for q, (code,) in zip(
            range(peak + 1), run(1, [(peak, coefficient, 0, [q]) for q in range(peak + 1)]), strict=True
        ):
            distances = [abs(q * level[7] - peak * one) for one in level]  # exact, in units of 1 / M
            ties += distances.count(min(distances)) > 1
            assert code == distances.index(min(distances))
        assert ties or coefficient != LINEAR  # 126 / 7 = 18: halves occur


def test_groups_of_all_kinds_behind_each_other():
    rng = np.random.default_rng(SEED)
    cases = []
    for _ in range(300):
        peak = int(rng.integers(1, 255))
        coefficient = int(rng.choice([0, 5, 100, 127, LINEAR]))
        cases.append((peak, coefficient, int(rng.random() < 0.1), rng.integers(-peak, peak + 1, 4).tolist()))
    assert run(4, cases) == golden(cases)


def test_an_element_of_zero_is_code_zero_and_a_zero_grid_is_code_zero():
    assert run(2, [(127, 5, 0, [0, -1]), (9, LINEAR, 0, [0, 0]), (9, 5, 1, [9, -9])]) == [[0, 8], [0, 0], [0, 0]]
    assert run(1, [(127, LINEAR, 0, [-9])]) == [[0]], "magnitude 0 of a linear group has no sign"


def test_a_lost_limit_is_caught(monkeypatch):
    register = encoder.Pipeline.register

    def faulty(pipeline, value, name, **options):
        held = register(pipeline, value, name, **options)
        return held | Const(1) if name == "above_0" else held

    monkeypatch.setattr(encoder.Pipeline, "register", faulty)
    cases = [(127, 5, 0, [0])]
    assert run(1, cases) != golden(cases)


def test_no_lanes_are_refused():
    with pytest.raises(ParameterError, match="lanes = 0: legal is an integer from 1"):
        Encoder(0)
