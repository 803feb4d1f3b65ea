"""Weights from logarithms: table and straight lines of the RTL are those of the golden model."""

import random
from fractions import Fraction

import pytest
import torch
from amaranth.sim import Simulator
from verilog_checks import lint, yosys

from kvant.golden.attention import softmax as golden
from kvant.hw.attention import exponential as hardware
from kvant.hw.attention.exponential import Exponential, exponential_table
from kvant.hw.attention.scaler import LOG_WIDTH
from kvant.hw.emit import emit

SEED = 20261130


def exponentials(numbers):
    """Weights, a new x in every cycle."""
    unit, results = Exponential(), []

    async def bench(ctx):
        for cycle in range(len(numbers) + unit.latency):
            if cycle < len(numbers):
                ctx.set(unit.x, numbers[cycle])
            if cycle >= unit.latency:
                results.append(ctx.get(unit.w))
            await ctx.tick()

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return results


def cases():
    """Every border of a segment in some octaves, the ends of all octaves, random and huge numbers."""
    rng = random.Random(SEED)
    numbers = [
        octave << 16 | segment << 10 | rest for octave in (0, 1, 23) for segment in range(64) for rest in (0, 1023)
    ]
    numbers += [(octave << 16) + delta for octave in range(1, 40) for delta in (-1, 0, 1)]
    numbers += [rng.randrange(26 << 16) for _ in range(2000)]
    numbers += [rng.randrange(1 << LOG_WIDTH) >> rng.randrange(LOG_WIDTH) for _ in range(500)]
    return [*numbers, (1 << LOG_WIDTH) - 1, 1 << 21, 1 << (LOG_WIDTH - 1)]


def test_weights_are_those_of_the_golden_model():
    assert exponentials(cases()) == golden.exponential(torch.tensor(cases())).tolist()


@pytest.mark.long
def test_all_weights_of_the_first_and_the_last_octaves_are_those_of_the_golden_model():
    numbers = [*range(1 << 16), *range(22 << 16, 25 << 16)]
    assert exponentials(numbers) == golden.exponential(torch.tensor(numbers)).tolist()


def test_the_table_holds_the_nearest_integers_to_the_powers():
    table = exponential_table()
    assert table[0] == (1 << 24) - 1 and table[-1] == 1 << 23
    for k, base in enumerate(table[1:], 1):
        low, high = (Fraction(2 * base + side, 2) ** 64 for side in (-1, 1))
        assert low < Fraction(2) ** (24 * 64 - k) < high
    assert table == golden._bases()


def test_a_wrong_table_entry_is_caught(monkeypatch):
    table = exponential_table()
    table[17] += 1
    monkeypatch.setattr(hardware, "exponential_table", lambda: table)
    assert exponentials(cases()) != golden.exponential(torch.tensor(cases())).tolist()


def test_weights_that_do_not_vanish_are_caught(monkeypatch):
    register = hardware.Pipeline.register

    def stuck(self, value, name, *, cycles=1):
        return register(self, value & 0 if name == "vanishes" else value, name, cycles=cycles)

    monkeypatch.setattr(hardware.Pipeline, "register", stuck)
    assert exponentials(cases()) != golden.exponential(torch.tensor(cases())).tolist()


def test_every_tool_is_silent(tmp_path):
    (tmp_path / "exponential.sv").write_text(emit(Exponential(), "exponential").verilog)
    assert lint(tmp_path, "exponential.sv", top="exponential") == ""
    script = "read_verilog -sv exponential.sv; hierarchy -check -top exponential; proc; check -assert"
    checked = yosys(tmp_path, script)
    assert checked.returncode == 0, checked.stderr
