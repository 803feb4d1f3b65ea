"""`kvant generate top` and `kvant simulate top`."""

import json

import numpy as np
import pytest
from verilog_checks import lint, yosys

from kvant import config
from kvant.hw.soc.registers import register_map
from kvant.top import BLOCK, top_parameters

SMALL = ["rows=2", "cols=3", "group=16", "accumulators=8", "activation_words=128"]
PORT = ["port_bits=64", "burst_beats=16", "weight_words=64"]
WIDE = ["rows=4", "cols=4", "group=32", "accumulators=8", "activation_words=64", "int8_groups=false"]
CACHED = ["rows=4", "cols=2", "group=16", "head_dim=16", "lanes=4", "sinks=2", "capacity=64", "attention=true"]


def options(overrides):
    return [word for text in overrides for word in ("--set", text)]


def generate(kvant, folder, overrides):
    result = kvant("generate", "top", "-o", folder, *options(overrides))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "overrides",
    [
        SMALL + PORT,
        [*WIDE, "port_bits=512", "address_bits=64"],
        pytest.param(CACHED + PORT, marks=pytest.mark.long),
    ],
)
def test_the_verilog_is_clean_for_three_tools(kvant, tmp_path, overrides):
    generate(kvant, tmp_path, overrides)
    assert lint(tmp_path, "kvant_top.sv", top="kvant_top") == ""
    script = "read_verilog -sv kvant_top.sv; hierarchy -check -top kvant_top; proc; check -assert"
    result = yosys(tmp_path, script)
    assert result.returncode == 0, result.stderr


def test_a_design_comes_with_its_registers(kvant, tmp_path):
    generate(kvant, tmp_path / "a", SMALL + PORT)
    generate(kvant, tmp_path / "b", SMALL + PORT)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    ends = ("driver.h", "registers.h", "registers.json", "registers.md", "registers.py")
    assert files == sorted(["kvant_top.core", "kvant_top.sv", "manifest.json", *(f"kvant_top_{end}" for end in ends)])
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    registers = register_map(top_parameters(config.load(None, SMALL + PORT)))
    assert json.loads((tmp_path / "a/kvant_top_registers.json").read_text()) == registers.as_dict()
    assert '#include "kvant_top_registers.h"' in (tmp_path / "a/kvant_top_driver.h").read_text()
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    assert manifest["memory"]["weights"]["alignment"] == 8 and manifest["memory"]["descriptors"]["bytes"] == 64
    names = [port["name"] for port in manifest["ports"]]
    assert names[:3] == ["clk", "rst", "s_axil_awaddr"] and names[-1] == "irq"
    prefixes = ("s_axil_", "m_axi_", "s_axis_x_t", "m_axis_y_t")
    assert all(name.startswith(prefixes) for name in names[2:-1])


def test_a_layer_of_the_user_runs_through_descriptors(kvant, tmp_path):
    pytest.importorskip("cocotbext.axi")
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((5, 37)).astype(np.float16), rng.standard_normal((8, 37)).astype(np.float32)
    np.savez(tmp_path / "in.npz", x=x, w=w)
    command = ["--data", tmp_path / "in.npz", "--out", tmp_path / "out.npz", *options(SMALL + PORT), "--stall", "0.2"]
    result = kvant("simulate", "top", *command)
    assert result.returncode == 0, result.stderr
    assert "equal to the golden model" in result.stderr
    out = np.load(tmp_path / "out.npz")
    assert out["y"].shape == (5, 8) and out["y"].dtype == np.float32
    assert 0 < out["busy_cycles"] < out["cycles"] and out["bytes_read"] > out["w_codes"].size // 2


def test_attention_is_a_switch():
    chosen = config.load(None, CACHED + PORT)
    p = top_parameters(chosen)
    assert p.cache == chosen.cache and p.attention == chosen.attention
    memory = BLOCK.facts(chosen)["memory"]
    assert list(memory["descriptors"]["kinds"]) == ["FENCE", "LINEAR", "END", "CACHE", "ATTEND"]
    assert memory["caches"]["record"]["value_window"]["rows"] == 16
    assert BLOCK.parameters(chosen)["queries"] == chosen.attention.queries
    plain = config.load(None, CACHED[:-1] + PORT)
    assert top_parameters(plain).cache is None and "caches" not in BLOCK.facts(plain)["memory"]
    json.dumps([memory, BLOCK.parameters(chosen)])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["generate", "top", "-o", "out", "--set", "attention=true", "--set", "cols=3"], ["cols = 3"]),
        (["generate", "top", "-o", "out", "--set", "attention=true", "--set", "port_bits=256"], ["port_bits = 256"]),
        (["generate", "top", "-o", "out", "--set", "attention=true", "--set", "offset=true"], ["offset = true"]),
        (["generate", "top", "-o", "out", "--set", "group=20"], ["group = 20", "multiples of 8"]),
        (["generate", "top", "-o", "out", "--set", "burst_beats=300"], ["burst_beats = 300", "1 to 256"]),
        (["generate", "top", "-o", "out", "--bench"], ["--bench"]),
        (["synth", "top", "--board", "ulx3s"], ["port s_axil", "bus"]),
    ],
)
def test_what_the_top_cannot_be_is_one_line(kvant, assert_one_line_error, tmp_path, command, words):
    assert_one_line_error(kvant(*command, cwd=tmp_path), *words)
    assert not (tmp_path / "out").exists()


def test_fields_are_fields_of_the_configuration():
    assert set(BLOCK.fields) <= set(config.field_names())
