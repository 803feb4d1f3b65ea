"""The variance unit: exact integers for every length, extreme and stall, without a bubble, and clean Verilog."""

import re

import numpy as np
import pytest
from amaranth.hdl import Shape
from amaranth.lib import data
from hypothesis import given, settings
from hypothesis import strategies as st
from verilog_checks import lint, yosys

from kvant import config
from kvant.hw.emit import emit
from kvant.hw.kvcache import variance as hardware
from kvant.hw.kvcache.variance import VarianceBlock, VariancePipeline, VarianceUnit, nvar_width, variance_input
from kvant.hw.numeric import carry_save
from kvant.hw.numeric.adders import ADDERS
from kvant.hw.parameters import ParameterError
from kvant.sim.kvcache import variance
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus
from kvant.variance import BLOCK, random_groups

# A component whose parameters are refused is never elaborated.
pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20260628


def by_integers(groups):
    """All fields of the results of *groups*, in Python's integers."""
    groups = [[int(value) for value in group] for group in groups]
    results = {
        "sum": [sum(q) for q in groups],
        "sumsq": [sum(value * value for value in q) for q in groups],
        "maximum": [max(q) for q in groups],
        "minimum": [min(q) for q in groups],
        "absmax": [max(map(abs, q)) for q in groups],
        "count": [len(q) for q in groups],
    }
    sums = zip(results["count"], results["sumsq"], results["sum"], strict=True)
    return results | {"nvar": [n * squares - total * total for n, squares, total in sums]}


def play(lanes, group, groups, *, adder="plus", **options):
    """Results of all groups, and the trace; Amaranth's simulator if not told."""
    stimulus = variance.stimulus(groups, lanes=lanes)
    options = {"simulator": "amaranth"} | options
    trace = simulate(lambda: VarianceBlock(lanes, group, adder=adder), "variance", stimulus, **options)
    return variance.fields(trace.transfers["y"]["data"], group=group), trace


def check(lanes, group, groups, **options):
    results, trace = play(lanes, group, groups, **options)
    assert results == by_integers(groups)
    assert trace.status == {"busy_cycles": len(trace.cycles["q"]), "error": 0}
    return trace


def extremes(n):
    """Groups of n elements in which a width, a sign or a rest would show."""
    groups = [np.full(n, value) for value in (-128, 127, 0, 1, -1, -127)]
    for value, one in ((127, 126), (-128, -127), (-1, 0), (0, -128)):
        group = np.full(n, value)
        group[-1] = one
        groups.append(group)
    alternating = np.where(np.arange(n) % 2, -128, 127)
    return [group.astype(np.int8) for group in (*groups, alternating, -1 - alternating)]


def assert_no_bubble(trace, lanes, groups):
    """Every transfer in the cycle after the last, every result in the cycle of its group's last transfer + latency."""
    taken, given = np.array(trace.cycles["q"]), np.array(trace.cycles["y"])
    np.testing.assert_array_equal(np.diff(taken), 1)
    ends = np.cumsum([-(-len(group) // lanes) for group in groups]) - 1
    latency = VarianceBlock(lanes, max(map(len, groups))).latency
    np.testing.assert_array_equal(given - taken[ends], latency)


@pytest.mark.parametrize(("lanes", "n"), [(8, 1), (1, 1), (2, 3), (3, 7), (8, 64), (5, 100), (16, 255), (32, 1000)])
def test_case_28_extremes_are_exact_and_constant_groups_have_no_variance(lanes, n):
    groups = extremes(n)
    trace = check(lanes, n, groups)
    assert not any(by_integers(groups)["nvar"][:6])
    assert_no_bubble(trace, lanes, groups)


def test_case_28_255_equal_values_and_one_that_differs_by_1():
    groups = [np.full(256, value, np.int8) for value in (127, -128, 64)]
    for group, place in zip(groups, (0, 255, 100), strict=True):
        group[place] += 1 if group[place] < 0 else -1
    assert by_integers(groups)["nvar"] == [255] * 3
    check(8, 256, groups)


def test_case_28_the_longest_groups_are_exact():
    groups = [*extremes(65536)[:7], np.random.default_rng(SEED).integers(-128, 128, 65536).astype(np.int8)]
    check(8, 65536, groups, simulator="verilator")


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_groups_of_all_lengths_follow_each_other_without_a_bubble(lanes):
    groups = random_groups(60, 20, seed=SEED)
    groups += [group[:1] for group in groups[:20]]
    trace = check(lanes, 20, groups)
    assert_no_bubble(trace, lanes, groups)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    lanes=st.integers(1, 20), group=st.integers(1, 300), stall=st.sampled_from([0.0, 0.3, 0.9]), seed=st.integers(0, 99)
)
def test_any_shape_is_exact_with_stalls(lanes, group, stall, seed):
    check(lanes, group, random_groups(6, group, seed=seed), stall=stall, seed=seed, timeout_cycles=2000)


@pytest.mark.parametrize(
    "stall",
    [0.3, 0.9, {"y": [1] * 500 + [0] * 500}, {"q": [0, 1], "y": [1, 0]}, {"y": "after_valid"}, {"y": [1] * 40 + [0]}],
    ids=["0.3", "0.9", "first result held", "alternating", "ready after valid", "receiver sleeps"],
)
def test_stalls_change_no_result(stall):
    """Groups of one transfer each, so that every cycle of the pipeline holds a result."""
    groups = random_groups(60, 4, seed=SEED)
    check(4, 4, groups, stall=stall, timeout_cycles=2000)


@pytest.mark.parametrize("again_at", [1, 5, 9, 14, 40])
def test_reset_in_the_middle_equals_a_cold_start(again_at):
    groups = [np.full(16, -128, np.int8), *random_groups(20, 16, seed=SEED)]
    cold = check(4, 16, groups)
    for reset in (Reset(again_at=again_at), Reset(cycles=1, again_at=again_at, hold_valid=True)):
        again = check(4, 16, groups, reset=reset)
        assert np.diff(again.cycles["y"]).tolist() == np.diff(cold.cycles["y"]).tolist()


@pytest.mark.parametrize("adder", ADDERS)
def test_every_adder_gives_the_same(adder):
    check(4, 30, [*extremes(30), *random_groups(20, 30, seed=SEED)], adder=adder)


def test_case_38_simulators_agree_in_every_cycle_and_nothing_is_unknown():
    """The player refuses an unknown valid, ready or payload from the first cycle of reset on."""
    groups = random_groups(30, 21, seed=38)
    traces = [check(4, 21, groups, simulator=name, stall=0.3, seed=38) for name in ("amaranth", "icarus", "verilator")]
    assert traces[0] == traces[1] == traces[2]


def unit_results(unit, words, tags):
    """Play words of the unit's own input; its results as constants of its layout."""
    stimulus = Stimulus(inputs={"i": {"data": words}}, expect={"o": tags})
    trace = simulate(lambda: unit, "unit", stimulus, simulator="amaranth")
    layout = data.StructLayout(unit.o.payload.shape().members)
    return [layout.from_bits(word) for word in trace.transfers["o"]["data"]], trace


@pytest.mark.parametrize("nvar", [True, False])
def test_a_unit_hands_the_tag_of_a_groups_last_transfer_on(nvar):
    groups = random_groups(20, 12, seed=SEED)
    layout = data.StructLayout(variance_input(3, 5).members)
    words = []
    for index, group in enumerate(groups):
        for start in range(0, len(group), 3):
            part = [int(value) for value in group[start : start + 3]]
            last = start + 3 >= len(group)
            fields = {"data": [*part, *[-128] * (3 - len(part))], "keep": len(part), "last": last}
            words.append(layout.const(fields | {"tag": index if last else 31}).as_bits())
    unit = VarianceUnit(3, 12, tag_shape=5, nvar=nvar)
    latency = unit.latency
    results, trace = unit_results(unit, words, len(groups))
    assert [result.tag for result in results] == list(range(len(groups)))
    right = by_integers(groups)
    for name in unit.fields:
        assert [result[name] for result in results] == right[name], name
    assert ("nvar" in unit.fields) == nvar
    assert trace.cycles["o"][-1] - trace.cycles["i"][-1] == latency
    assert nvar or latency < VarianceUnit(3, 12).latency


@pytest.mark.parametrize(
    ("group", "keep", "last"),
    [
        (8, [0b1111, 0b1011], [0, 1]),
        (8, [0b1111, 0b1110], [0, 1]),
        (8, [0b1111, 0], [0, 1]),
        (8, [0, 0b1111], [0, 1]),
        (8, [0b1111, 0b1111, 1], [0, 0, 1]),
        (6, [0b1111, 0b1111], [0, 1]),
        (3, [0b1111], [1]),
        (3, [0b1111] * 20, [0] * 19 + [1]),
    ],
    ids=["gap", "hole", "nothing at the end", "nothing at first", "3 transfers", "7th element", "4th", "counter full"],
)
def test_transfers_that_are_not_legal_raise_error_and_leave_the_next_groups_alone(group, keep, last):
    groups = [one[:group] for one in random_groups(5, 8, seed=SEED)]
    stimulus = variance.stimulus(groups, lanes=4)
    assert simulate(lambda: VarianceBlock(4, group), "v", stimulus, simulator="amaranth").status["error"] == 0
    q = stimulus.inputs["q"]
    bad = {"data": [0x80807F7F] * len(keep), "keep": keep, "last": last}
    together = {name: bad[name] + q[name] for name in q}
    stimulus = Stimulus(inputs={"q": together}, expect={"y": 1 + len(groups)}, status=["error"])
    trace = simulate(lambda: VarianceBlock(4, group), "v", stimulus, simulator="amaranth")
    results = variance.fields(trace.transfers["y"]["data"], group=group)
    assert {name: values[1:] for name, values in results.items()} == by_integers(groups)
    assert trace.status == {"error": 1}


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [("lanes", 0, "1 to 256"), ("lanes", 257, "1 to 256"), ("group", 0, "1 to 65536"), ("group", 65537, "1 to 65536")],
)
def test_parameters_that_are_not_legal_are_refused(name, value, legal):
    with pytest.raises(ParameterError, match=rf"^{name} = {value}: legal is an integer from {legal}$"):
        VarianceUnit(**{"lanes": 4, "group": 16, name: value})


@pytest.mark.parametrize("group", [1, 2, 3, 7, 64, 65535, 65536])
def test_the_width_of_nvar_is_that_of_its_largest_value(group):
    half = group // 2
    largest = max(half * (group - half) * 255**2, 1)
    assert largest.bit_length() <= nvar_width(group) <= largest.bit_length() + (14 if group == 1 else 1)


# The Verilog.


def write(folder, name, lanes, group, adder="plus"):
    """Emit a configuration to ``name.sv``; returns its ports as (name, direction, width)."""
    design = emit(VarianceBlock(lanes, group, adder=adder), name)
    (folder / f"{name}.sv").write_text(design.verilog)
    return [(port.name, port.direction, port.width) for port in design.ports]


@pytest.mark.parametrize(
    ("lanes", "group", "adder"), [(8, 64, "plus"), (1, 1, "plus"), (3, 100, "kogge_stone"), (2, 65536, "plus")]
)
def test_every_tool_is_silent(lanes, group, adder, tmp_path):
    write(tmp_path, "variance", lanes, group, adder)
    assert lint(tmp_path, "variance.sv", top="variance") == ""
    result = yosys(tmp_path, "read_verilog -sv variance.sv; hierarchy -check -top variance; proc; check -assert")
    assert result.returncode == 0, result.stderr


def test_case_40_ports_are_the_documented_ones_and_two_runs_give_the_same_bytes(tmp_path):
    ports = write(tmp_path, "variance", 4, 64)
    wanted = {
        ("clk", "input", 1),
        ("rst", "input", 1),
        ("s_axis_q_tvalid", "input", 1),
        ("s_axis_q_tready", "output", 1),
        ("s_axis_q_tdata", "input", 32),
        ("s_axis_q_tkeep", "input", 4),
        ("s_axis_q_tlast", "input", 1),
        ("m_axis_y_tvalid", "output", 1),
        ("m_axis_y_tready", "input", 1),
        ("m_axis_y_tdata", "output", 15 + 21 + 8 + 8 + 8 + 26 + 7),
        ("busy_cycles", "output", 32),
        ("error", "output", 1),
    }
    assert set(ports) == wanted and len(ports) == len(wanted)
    before = (tmp_path / "variance.sv").read_bytes()
    write(tmp_path, "variance", 4, 64)
    assert (tmp_path / "variance.sv").read_bytes() == before


def test_case_44_two_configurations_live_in_one_design(tmp_path):
    text = "module both(input clk, input rst);\n"
    for name, group in (("short", 4), ("tall", 16)):
        ports = write(tmp_path, name, 2, group)
        shared = {"clk": "clk", "rst": "rst"}
        zero = {port: f"{width}'d0" for port, way, width in ports if way == "input"}
        ties = [f".{port}({shared.get(port, zero.get(port, ''))})" for port, _, _ in ports]
        text += f"  {name} {name}_instance({', '.join(ties)});\n"
    (tmp_path / "both.sv").write_text(text + "endmodule\n")
    files = ("short.sv", "tall.sv", "both.sv")
    complaints = [line for line in lint(tmp_path, *files, top="both").splitlines() if line.startswith("%")]
    assert [line for line in complaints if "both.sv" not in line and "Exiting" not in line] == []
    result = yosys(tmp_path, f"read_verilog -sv {' '.join(files)}; hierarchy -check -top both; proc; check -assert")
    assert result.returncode == 0, result.stderr
    modules = re.findall(r"^module (\w+)", "".join((tmp_path / file).read_text() for file in files), re.MULTILINE)
    assert len(modules) == len(set(modules)) >= 8


# Seeded faults: each makes a comparison above fail.


def differs(groups, lanes=4):
    results, _ = play(lanes, max(map(len, groups)), groups)
    return results != by_integers(groups)


def test_the_sound_unit_does_not_differ():
    assert not differs([*extremes(13), *random_groups(10, 13, seed=SEED)])


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (hardware, "square_rows", lambda sign, y: carry_save.square_rows(sign, y)[:-1]),
        (hardware, "product_rows", lambda a, b: carry_save.product_rows(a[:-1], b)),
        (hardware, "BIAS", 127),
        (hardware, "nvar_width", lambda group: nvar_width(group) - 1),
        (VariancePipeline, "_largest", lambda self, m, name, values: original_largest(self, m, name, values[:2] * 2)),
    ],
    ids=["row of a square", "bit of the count", "bias", "width of nvar", "lanes left out of the extremes"],
)
def test_a_fault_is_seen(where, name, fault, monkeypatch):
    monkeypatch.setattr(where, name, fault)
    assert differs([*extremes(16), *random_groups(10, 16, seed=SEED)])


original_largest = VariancePipeline._largest


def test_sums_that_survive_the_end_of_a_group_are_seen():
    def edit(verilog):
        changed, count = re.subn(r"first <= \w+;", "first <= 1'b0;", verilog)
        assert count
        return changed

    groups = random_groups(6, 8, seed=SEED)
    results, _ = play(4, 8, groups, simulator="icarus", edit_verilog=edit)
    assert results != by_integers(groups)


def test_manifest_facts_are_those_of_the_component():
    chosen = config.load(None, ["lanes=4", "group=32"])
    facts = BLOCK.facts(chosen)
    component = BLOCK.build(chosen)
    assert facts["latency"] == {"last transfer of a group to its result": component.latency}
    assert facts["widths"] == {name: Shape.cast(shape).width for name, shape in component.fields.items()}
    assert set(BLOCK.parameters(chosen)) == set(BLOCK.fields)


def test_vectors_of_a_bench_are_the_transfers_of_the_rtl():
    chosen = config.load(None, ["lanes=4", "group=32"])
    vectors = BLOCK.vectors(chosen, 1)
    trace = simulate(lambda: BLOCK.build(chosen), "variance", vectors.stimulus, simulator="amaranth")
    assert trace.transfers["y"] == vectors.transfers["y"]
