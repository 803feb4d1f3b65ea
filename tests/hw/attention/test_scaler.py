"""Scores to logarithms: the factor, the product and its one rounding, against fractions and the golden model."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from amaranth.sim import Simulator
from verilog_checks import lint, yosys

from kvant.golden.attention import softmax as golden
from kvant.hw.attention import scaler as hardware
from kvant.hw.attention.scaler import LOG_FRACTION, LOG_LIMIT, ScoreFactor, ScoreScaler, softmax_constant
from kvant.hw.emit import emit
from kvant.hw.parameters import ParameterError

SEED = 20261130
SCALES = [0x0000, 0x0001, 0x0155, 0x03FF, 0x0400, 0x0401, 0x2E66, 0x3C00, 0x5C07, 0x7BFF]


def pipe(unit, inputs, outputs, operands):
    """Results of a pipeline, a new set of operands in every cycle, each taken `latency` cycles after its operands."""
    results = []

    async def bench(ctx):
        for cycle in range(len(operands) + unit.latency):
            if cycle < len(operands):
                for port, value in zip(inputs, operands[cycle], strict=True):
                    ctx.set(port, value)
            if cycle >= unit.latency:
                results.append(tuple(ctx.get(port) for port in outputs))
            await ctx.tick()

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return results


def scale(width, cases):
    unit = ScoreScaler(width)
    return [z for (z,) in pipe(unit, [unit.a, unit.b, unit.e], [unit.z], cases)]


def expected(cases):
    exact = [round(Fraction(a * b) * Fraction(2) ** e) for a, b, e in cases]
    return [max(-LOG_LIMIT, min(LOG_LIMIT, z)) for z in exact]


@pytest.mark.parametrize("width", [8, 9, 22, 25, 26])
def test_random_products_are_rounded_once_or_saturate(width):
    rng = random.Random(SEED)
    largest = (1 << (width - 1)) - 1
    cases = []
    for _ in range(2000):
        a = rng.choice([largest, -largest, rng.randrange(-largest, largest + 1) >> rng.randrange(width)])
        b = rng.choice([(1 << 46) - 1, 1 << 45, rng.randrange(1 << 46), rng.randrange(1 << 46) >> rng.randrange(46)])
        cases.append((max(a, -largest), b, rng.choice([-64, 3, rng.randrange(-64, 4), rng.randrange(-30, 4)])))
    assert scale(width, cases) == expected(cases)


def ties():
    """Products halfway between two integers, odd and even ones, and just beside."""
    cases = []
    for places in range(1, 65):
        for whole in (0, 1, 2, 3):
            for beside in (-1, 0, 1):
                product = ((2 * whole + 1) << (places - 1)) + beside
                for sign in (1, -1):
                    if product < 1 << 46:
                        cases.append((sign, product, -places))
                    elif product % (1 << 20) == 0 and product >> 20 < 1 << 46:
                        cases.append((sign << 20, product >> 20, -places))
    return cases


def test_ties_round_to_even_on_both_sides_of_zero():
    cases = ties()
    assert {-e for a, b, e in cases if a * b % (1 << -e) == 1 << -e - 1} == set(range(1, 65))
    assert scale(25, cases) == expected(cases)
    assert scale(25, [(1, 1, -1), (1, 3, -1), (-1, 1, -1), (-1, 3, -1), (-1, 5, -1)]) == [0, 2, 0, -2, -2]


def test_the_largest_numbers_saturate_and_the_one_below_does_not():
    cases = [(sign << k, 1 << 45, e) for sign in (1, -1) for k in range(24) for e in range(-20, 4)]
    got = scale(25, cases)
    assert got == expected(cases)
    assert {LOG_LIMIT, -LOG_LIMIT, 1 << 54, -(1 << 54)} <= set(got)


def test_the_largest_number_is_not_rounded_up():
    """2^56 - 1 halves: a tie between the largest number and one that is too large."""
    cases = [(sign * a, ((1 << 56) - 1) // a, -1) for sign in (1, -1) for a in (2159, 16383, 32385)]
    assert {abs(a) * b for a, b, _ in cases} == {(1 << 56) - 1}
    assert scale(25, cases) == expected(cases)
    assert set(scale(25, cases)) == {LOG_LIMIT, -LOG_LIMIT}


@pytest.mark.parametrize("head_dim", [1, 64, 1 << 16])
def test_scores_become_the_golden_logarithms(head_dim):
    rng = random.Random(SEED)
    unit = ScoreFactor(head_dim)
    pairs = [(x, w) for x in SCALES for w in SCALES] + [
        (rng.randrange(0x7C00), rng.randrange(0x7C00)) for _ in range(200)
    ]
    outputs = [unit.factor.mantissa, unit.factor.exponent]
    factors = pipe(unit, [unit.query_scale, unit.scale], outputs, pairs)
    bits = np.array(pairs, np.uint16).view(np.float16)
    right = golden.score_factor(torch.from_numpy(bits[:, 0].copy()), torch.from_numpy(bits[:, 1].copy()), head_dim)
    assert factors == list(zip(right.mantissa.tolist(), (right.exponent + LOG_FRACTION).tolist(), strict=True))
    assert all(-63 <= e <= 3 for _, e in factors)
    scores = [rng.choice([1 << 20, -(1 << 20), rng.randrange(-(1 << 20), 1 << 20)]) for _ in pairs]
    cases = [(a, b, e) for a, (b, e) in zip(scores, factors, strict=True)]
    assert scale(22, cases) == golden.logarithms(torch.tensor(scores), right).tolist()


def test_the_constant_is_the_fp32_number_nearest_to_log2_e_over_sqrt_d():
    for head_dim in range(1, 1025):
        mantissa, exponent = softmax_constant(head_dim)
        assert 1 << 23 <= mantissa < 1 << 24
        assert golden.softmax_constant(head_dim).item() == mantissa * 2.0**exponent


@pytest.mark.parametrize("width", [7, 27])
def test_widths_it_is_not_built_for_are_refused(width):
    with pytest.raises(ParameterError, match=rf"^width = {width}: legal is an integer from 8 to 26$"):
        ScoreScaler(width)


class TestSeededFaults:
    """A fault in the RTL makes the comparisons of this file fail."""

    @pytest.mark.parametrize("name", ["lost", "carry"])
    def test_a_register_stuck_at_0_is_seen(self, monkeypatch, name):
        register = hardware.Pipeline.register

        def stuck(self, value, held_name, *, cycles=1):
            return register(self, value & 0 if held_name == name else value, held_name, cycles=cycles)

        monkeypatch.setattr(hardware.Pipeline, "register", stuck)
        assert scale(25, ties()) != expected(ties())


def test_every_tool_is_silent(tmp_path):
    for name, unit in (("scaler", ScoreScaler(25)), ("score_factor", ScoreFactor(64))):
        (tmp_path / f"{name}.sv").write_text(emit(unit, name).verilog)
        assert lint(tmp_path, f"{name}.sv", top=name) == ""
        checked = yosys(tmp_path, f"read_verilog -sv {name}.sv; hierarchy -check -top {name}; proc; check -assert")
        assert checked.returncode == 0, checked.stderr
