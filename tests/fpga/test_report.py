import json

import pytest

from kvant.fpga import report
from kvant.fpga.devices import find_device
from kvant.fpga.errors import ConstraintError

FMAX = {"$glbnet$bridge.clk": {"achieved": 87.5, "constraint": 100.0}}
NETS = {"clock.core_clk": [7], "bridge.clk": [7], "bridge.rst": [8], "not_core_clk": [9]}
NETLIST = {"modules": {"top": {"netnames": {name: {"bits": bits} for name, bits in NETS.items()}}}}
CORE = {"core_clk": (100.0, frozenset({"clock.core_clk", "bridge.clk"}))}
ECP5 = {
    "TRELLIS_COMB": {"used": 100, "available": 24288},
    "TRELLIS_FF": {"used": 50, "available": 24288},
    "DP16KD": {"used": 56, "available": 56},
}
ICE40 = {"ICESTORM_LC": {"used": 1000, "available": 5280}, "ICESTORM_DSP": {"used": 0, "available": 8}}


def test_ecp5_rows_count_carry_cells_from_the_netlist():
    rows = {r.name: (r.used, r.available) for r in report.resources("ecp5", ECP5, {"CCU2C": 7, "LUT4": 80})}
    assert rows == {
        "LUT4": (100, 24288),
        "FF": (50, 24288),
        "carry (CCU2C)": (7, 12144),
        "block RAM (DP16KD)": (56, 56),
    }


def test_ice40_rows_count_every_kind_of_flip_flop():
    cells = {"SB_DFF": 1, "SB_DFFE": 20, "SB_DFFESR": 300, "SB_LUT4": 700, "SB_CARRY": 40, "SB_IO": 9}
    rows = {r.name: (r.used, r.available) for r in report.resources("ice40", ICE40, cells)}
    assert rows == {
        "logic cells": (1000, 5280),
        "LUT4": (700, 5280),
        "FF": (321, 5280),
        "carry (SB_CARRY)": (40, 5280),
        "DSP (SB_MAC16)": (0, 8),
    }


def test_a_clock_is_judged_by_its_own_constraint():
    (clock,) = report.clocks(FMAX, CORE)
    assert (clock.achieved, clock.constraint, clock.met) == (87.5, 100.0, False)
    assert report.Clock("a", "a", 100.0, 100.0).met


def test_a_clock_held_to_another_frequency_is_an_error():
    with pytest.raises(ConstraintError, match="held to 12 MHz instead of 100 MHz: the constraint was ignored"):
        report.clocks({"bridge.clk": {"achieved": 87.5, "constraint": 12.0}}, CORE)


def test_a_clock_without_constraint_is_an_error():
    with pytest.raises(ConstraintError, match="clock other: has no constraint, it was held to the default of 12 MHz"):
        report.clocks({**FMAX, "other": {"achieved": 300.0, "constraint": 12.0}}, CORE)


def test_a_constraint_on_a_net_without_registers_is_an_error():
    with pytest.raises(ConstraintError, match="clock fast: constrained to 200 MHz, but no register"):
        report.clocks(FMAX, {**CORE, "fast": (200.0, frozenset({"fast"}))})


def test_a_clock_is_found_under_any_name_of_its_net():
    assert report.net_aliases(NETLIST, "core_clk") == CORE["core_clk"][1]
    with pytest.raises(ConstraintError, match="clock slow: the netlist has no net of that name"):
        report.net_aliases(NETLIST, "slow")


@pytest.mark.parametrize(
    "net", ["clk", "$glbnet$clk", "$glbnet$clk$TRELLIS_IO_IN", "clk$SB_IO_IN", "clk$SB_IO_IN_$glb_clk", "clk_$glb_clk"]
)
def test_what_nextpnr_adds_to_a_clock_name_is_taken_off(net):
    assert report.undecorated(net) == "clk"


def test_memories_are_listed_with_what_they_became():
    log = (
        "mapping memory top.a via $__DP16KD_\nmapping memory top.b via $__TRELLIS_DPR16X4_\n"
        "using FF mapping for memory top.c\nusing FF mapping for memory $flatten\\x.$auto$rom\n"
        "mapping memory top.d via $__ICE40_SPRAM_\n"
    )
    assert {m.name: m.kind for m in report.memories(log)} == {
        "top.a": "block RAM",
        "top.b": "LUT RAM",
        "top.c": "flip-flops",
        "top.d": "SPRAM",
    }


def test_report_as_json_keeps_the_verdict_and_the_critical_path():
    steps = [
        {"type": "clk-to-q", "delay": 0.5, "from": {"cell": "a", "port": "Q"}},
        {"type": "logic", "delay": 0.0, "from": {"cell": "b", "port": "FCI"}},
        {"type": "setup", "delay": 0.1, "from": {"cell": "c", "port": "D"}},
    ]
    edge = "posedge $glbnet$bridge.clk"
    raw = {"fmax": FMAX, "utilization": ECP5, "critical_paths": [{"from": edge, "to": edge, "path": steps}]}
    result = report.parse(
        json.dumps(raw),
        json.dumps(NETLIST),
        json.dumps({"design": {"num_cells_by_type": {"CCU2C": 1}}}),
        "",
        device=find_device("ecp5-25k"),
        design="d",
        target="t",
        seed=3,
        expected={"core_clk": 100.0},
        harness={},
        parameters={"rows": 8},
    )
    values = json.loads(json.dumps(result.as_dict()))
    assert values["met"] is False
    assert values["seed"] == 3
    assert values["parameters"] == {"rows": 8}
    assert values["resources"][0] == {"name": "LUT4", "used": 100, "available": 24288, "percent": 0.4}
    assert [(step["kind"], step["where"]) for step in values["critical"]] == [("clk-to-q", "a.Q"), ("setup", "c.D")]
    assert result.slack_ratio == 0.875
