"""The register between two ends of a stream: nothing is lost, doubled or changed, whoever waits for whom."""

import itertools
import random
import sys

import pytest

from kvant.hw.emit import emit
from kvant.hw.numeric.stream_register import StreamRegister
from kvant.sim.errors import SimulationError
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus
from tests.helpers.formal import mutant
from tests.helpers.verilog_checks import lint, yosys

WORDS = random.Random(7).sample(range(1 << 9), 60)


def unit():
    return StreamRegister(9)


def play(**options):
    stimulus = Stimulus({"i": {"data": WORDS}}, {"o": len(WORDS)})
    return simulate(unit, "unit", stimulus, **({"simulator": "amaranth"} | options))


@pytest.mark.parametrize("into", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("out", [0.0, 0.3, 0.9])
def test_what_goes_in_comes_out(into, out):
    assert play(stall={"i": into, "o": out}, seed=3).transfers["o"]["data"] == WORDS


def test_a_transfer_takes_a_cycle_and_they_come_every_second_one():
    cycles = play().cycles
    assert cycles["o"][0] == cycles["i"][0] + 1
    assert {after - before for before, after in itertools.pairwise(cycles["o"])} == {2}


@pytest.mark.parametrize("hold_valid", [False, True])
def test_a_reset_empties_it(hold_valid):
    assert play(reset=Reset(again_at=31, hold_valid=hold_valid)).transfers["o"]["data"] == WORDS


def test_two_simulators_agree():
    traces = [play(simulator=simulator, stall=0.3, seed=5) for simulator in ("amaranth", "icarus")]
    assert traces[0].transfers == traces[1].transfers and traces[0].cycles == traces[1].cycles


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("~self.o.valid | self.o.ready", "self.o.ready"),  # never ready again
        ("self.o.valid.eq(1), ready.eq(0)", "self.o.valid.eq(1)"),  # takes while it is full
        ("[self.o.valid.eq(0), ready.eq(1)]", "ready.eq(1)"),  # gives twice
    ],
)
def test_a_fault_is_seen(old, new, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "StreamRegister", mutant(StreamRegister, old, new))
    try:
        trace = play(stall={"o": "after_valid"}, timeout_cycles=500)
    except SimulationError:
        return
    assert trace.transfers["o"]["data"] != WORDS


def test_every_tool_is_silent(tmp_path):
    (tmp_path / "unit.sv").write_text(emit(unit(), "unit").verilog)
    assert lint(tmp_path, "unit.sv", top="unit") == ""
    result = yosys(tmp_path, "read_verilog -sv unit.sv; hierarchy -check -top unit; proc; check -assert")
    assert result.returncode == 0, result.stderr
