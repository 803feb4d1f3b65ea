"""The Verilog of the linear path: clean in every tool, the documented ports, several configurations side by side."""

import re

import pytest
from verilog_checks import lint, yosys

from kvant import config
from kvant.hw.emit import emit
from kvant.linear import BLOCK, golden_outputs, random_case
from kvant.sim.linear import engine


def write(folder, name, *overrides):
    """Emit a configuration to ``name.sv``; returns its ports as (name, direction, width)."""
    design = emit(BLOCK.build(config.load(None, overrides)), name)
    (folder / f"{name}.sv").write_text(design.verilog)
    return [(port.name, port.direction, port.width) for port in design.ports]


def assert_clean(folder, *files, top):
    assert lint(folder, *files, top=top) == ""
    result = yosys(folder, f"read_verilog -sv {' '.join(files)}; hierarchy -check -top {top}; proc; check -assert")
    assert result.returncode == 0, result.stderr


CORNERS = [
    (),
    ("rows=1", "cols=1", "group=1", "int8_groups=false", "max_coefficient=0"),
    ("rows=3", "cols=5", "group=10", "multiplier=dsp"),
    ("rows=2", "cols=16", "group=4", "accumulators=1", "quant_lanes=1"),
    ("rows=4", "cols=2", "group=256", "multiplier=ecp5_dsp", "adder=kogge_stone"),
]


@pytest.mark.parametrize("overrides", CORNERS, ids=lambda overrides: " ".join(overrides) or "default")
def test_every_tool_is_silent(overrides, tmp_path):
    write(tmp_path, "linear", *overrides)
    assert_clean(tmp_path, "linear.sv", top="linear")


@pytest.mark.long
@pytest.mark.parametrize("rows", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("cols", [2, 3, 4, 5, 8, 16])
def test_case_34_every_rectangle_is_clean_and_exact(rows, cols, tmp_path):
    overrides = (f"rows={rows}", f"cols={cols}", f"group={8 + 8 * (rows % 3)}")
    write(tmp_path, "linear", *overrides)
    assert_clean(tmp_path, "linear.sv", top="linear")
    chosen = config.load(None, overrides)
    arrays = random_case(chosen, tokens=2, outputs=cols + 1, inputs=43, seed=rows * 100 + cols)
    result = engine.run(chosen.linear, arrays, simulator="icarus", stall=0.2)
    for name, expected in golden_outputs(chosen.linear, arrays).items():
        assert result[name].tobytes() == expected.tobytes(), name


def test_case_40_ports_are_the_documented_ones_and_two_runs_give_the_same_bytes(tmp_path):
    ports = write(tmp_path, "first", "rows=4", "cols=3", "group=4", "quant_lanes=2")
    streams = {
        "s_axis_cmd": {"tdata": 96},
        "s_axis_x": {"tdata": 2 * 16},
        "s_axis_w": {"tdata": 4 * 3 * 4, "tuser": 3 * 24},
        "m_axis_xq": {"tdata": 4 * 8, "tuser": 16, "tlast": 1},
        "m_axis_y": {"tdata": 3 * 32, "tkeep": 3 * 4, "tlast": 1},
    }
    wanted = {("clk", "input", 1), ("rst", "input", 1), ("busy", "output", 1), ("busy_cycles", "output", 32)}
    wanted |= {("nonfinite", "output", 1), ("error", "output", 1)}
    for stream, fields in streams.items():
        forward, backward = ("input", "output") if stream.startswith("s_") else ("output", "input")
        wanted |= {(f"{stream}_tvalid", forward, 1), (f"{stream}_tready", backward, 1)}
        wanted |= {(f"{stream}_{field}", forward, width) for field, width in fields.items()}
    assert set(ports) == wanted and len(ports) == len(wanted)
    before = (tmp_path / "first.sv").read_bytes()
    write(tmp_path, "first", "rows=4", "cols=3", "group=4", "quant_lanes=2")
    assert (tmp_path / "first.sv").read_bytes() == before


def test_case_44_two_configurations_live_in_one_design(tmp_path):
    text = "module both(input clk, input rst);\n"
    for name, group in (("short", 4), ("tall", 16)):
        ports = write(tmp_path, name, "rows=4", "cols=2", f"group={group}")
        # every input but clock and reset is 0, every output open
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
    assert len(modules) == len(set(modules)) > 20
