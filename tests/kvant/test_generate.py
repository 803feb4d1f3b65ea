"""`kvant generate`: files that stand alone, written whole or not at all."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from stream_components import Accumulator

from kvant.blocks import BLOCKS, Vectors
from kvant.cli import main
from kvant.manifest import storage
from kvant.sim.streams import Stimulus
from kvant.sim.toolchain import verilator_environment
from kvant.sim.words import pack_words


class Toy:
    """The accumulator as a block, with `rows` lanes."""

    summary = "Sums of packets: a toy"
    fields = ("rows",)
    wrong_result = False

    def build(self, config):
        return Accumulator(config.linear.rows, depth=4)

    def parameters(self, config):
        return {"lanes": config.linear.rows}

    def facts(self, config):
        return {"latency": {"x_to_y": 3}, "widths": {"total": 32}, "streams": {"x": "packet by packet"}}

    def vectors(self, config, seed):
        rng = np.random.default_rng(seed)
        lanes = rng.integers(-128, 128, (20, config.linear.rows))
        last = [int(i % 4 == 3) for i in range(20)]
        results = Accumulator.expected(lanes, last, bias=9)
        if self.wrong_result:
            results[3] ^= 1
        return Vectors(
            Stimulus(
                {"x": {"data": pack_words(lanes, 8), "user": [0] * 20, "last": last}},
                {"y": 5},
                ["packets"],
                {"bias": 9},
            ),
            transfers={"y": {"data": results}},
            status={"packets": 5},
        )


@pytest.fixture
def generate(monkeypatch, capsys):
    """Run ``kvant generate`` with the toy block registered: exit code, text."""
    toy = Toy()
    monkeypatch.setitem(BLOCKS, "toy", "toy_block:BLOCK")
    module = type(sys)("toy_block")
    module.BLOCK = toy
    monkeypatch.setitem(sys.modules, "toy_block", module)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["kvant", "generate", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return exit_info.value.code or 0, captured.out + captured.err

    run.toy = toy
    return run


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_writes_verilog_manifest_and_core(generate, tmp_path):
    code, text = generate("toy", "-o", tmp_path / "out")
    assert code == 0, text
    assert sorted(files_of(tmp_path / "out")) == ["kvant_toy.core", "kvant_toy.sv", "manifest.json"]
    verilog = (tmp_path / "out/kvant_toy.sv").read_text()
    assert re.findall(r"^module (\w+)", verilog, re.MULTILINE)[0] == "kvant_toy"
    assert '// parameters: {"lanes": 8}' in verilog
    core = (tmp_path / "out/kvant_toy.core").read_text()
    assert core.startswith('CAPI=2:\nname: "::kvant_toy:')
    assert "toplevel: kvant_toy" in core


def test_manifest_states_ports_parameters_latency_and_layout(generate, tmp_path):
    generate("toy", "-o", tmp_path / "out", "--set", "rows=2", "--set", "group=32")
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    verilog = (tmp_path / "out/kvant_toy.sv").read_text()
    header = re.search(r"^module kvant_toy\((.*)\);", verilog, re.MULTILINE)[1].split(", ")
    assert [port["name"] for port in manifest["ports"]] == header
    assert manifest["parameters"] == {"lanes": 2}
    assert manifest["configuration"]["rows"] == 2
    assert manifest["latency"] == {"x_to_y": 3}
    assert manifest["widths"] == {"total": 32}
    assert manifest["streams"]["x"] == {
        "direction": "input",
        "valid": "s_axis_x_tvalid",
        "ready": "s_axis_x_tready",
        "fields": {"data": "s_axis_x_tdata", "user": "s_axis_x_tuser", "last": "s_axis_x_tlast"},
        "order": "packet by packet",
    }
    assert manifest["memory"] == storage(32)


@pytest.mark.parametrize(("group", "size"), [(32, 304), (64, 560), (128, 1072), (1, 56)])
def test_storage_planes_fill_the_block(group, size):
    layout = storage(group)
    assert layout["bytes"] == size
    at = 0
    for plane in layout["planes"]:
        assert plane["offset"] == at
        at += plane["bytes"]
    assert at == size


def test_two_generations_are_byte_identical(generate, tmp_path):
    for folder in ("a", "b"):
        assert generate("toy", "-o", tmp_path / folder, "--bench")[0] == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert not any(str(tmp_path).encode() in text for text in files_of(tmp_path / "a").values())


def test_case_44_prefix_separates_two_configurations(generate, tmp_path):
    generate("toy", "-o", tmp_path / "a", "--prefix", "small", "--set", "rows=2")
    generate("toy", "-o", tmp_path / "b", "--prefix", "large", "--set", "rows=4")
    texts = [(tmp_path / "a/small_toy.sv").read_text(), (tmp_path / "b/large_toy.sv").read_text()]
    names = [re.findall(r"^module (\w+)", text, re.MULTILINE) for text in texts]
    assert not set(names[0]) & set(names[1])


def run_bench(folder, simulator):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "run.py", simulator]
    return subprocess.run(command, cwd=folder / "bench", env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("simulator", ["icarus", "verilator"])
def test_bench_passes_outside_kvant(generate, tmp_path, simulator):
    assert generate("toy", "-o", tmp_path / "out", "--bench", "--set", "rows=3")[0] == 0
    result = run_bench(tmp_path / "out", simulator)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"2 of 2 tests passed on {simulator}" in result.stdout
    assert "import kvant" not in (tmp_path / "out/bench/test_kvant_toy.py").read_text()


def test_bench_fails_on_a_wrong_value_and_on_broken_verilog(generate, tmp_path):
    generate.toy.wrong_result = True
    generate("toy", "-o", tmp_path / "value", "--bench")
    result = run_bench(tmp_path / "value", "icarus")
    assert result.returncode != 0
    assert re.search(r"m_axis_y_tdata, transfer 3: 0x\w+ instead of 0x\w+", result.stdout)
    generate.toy.wrong_result = False
    generate("toy", "-o", tmp_path / "rtl", "--bench")
    source = tmp_path / "rtl/kvant_toy.sv"
    text = source.read_text()
    assert "$signed(3'h3)" in text
    source.write_text(text.replace("$signed(3'h3)", "$signed(3'h5)", 1))
    assert run_bench(tmp_path / "rtl", "icarus").returncode != 0


def test_failed_generation_leaves_everything_as_it_was(generate, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert generate("toy", "-o", out)[0] == 0
    (out / "mine.txt").write_text("mine")
    before = files_of(out)

    def fail(config, seed):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generate.toy, "vectors", fail)
    code, text = generate("toy", "-o", out, "--bench", "--set", "rows=2")
    assert code == 2 and "No space left on device" in text
    assert files_of(out) == before
    assert generate("toy", "-o", tmp_path / "new", "--bench")[0] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_new_configuration_replaces_the_old_one_in_the_same_folder(generate, tmp_path):
    """Case 34: nothing stale is left behind."""
    generate("toy", "-o", tmp_path / "out", "--set", "rows=2")
    (tmp_path / "out/mine.txt").write_text("mine")
    generate("toy", "-o", tmp_path / "out", "--set", "rows=3")
    assert "input [23:0] s_axis_x_tdata" in (tmp_path / "out/kvant_toy.sv").read_text()
    assert (tmp_path / "out/mine.txt").read_text() == "mine"


def test_case_34_a_bench_in_the_folder_is_made_anew_with_the_design(generate, tmp_path):
    generate("toy", "-o", tmp_path / "out", "--bench", "--set", "rows=2")
    generate("toy", "-o", tmp_path / "out", "--set", "rows=3")
    generate("toy", "-o", tmp_path / "other", "--bench", "--set", "rows=3")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "other")


def test_nothing_is_replaced_where_one_file_cannot_be(generate, tmp_path):
    out = tmp_path / "out"
    generate("toy", "-o", out)
    (out / "kvant_toy.core").unlink()
    (out / "kvant_toy.core").mkdir()
    before = files_of(out)
    code, text = generate("toy", "-o", out, "--set", "rows=2")
    assert code == 2 and "out/kvant_toy.core: Is a directory" in text
    assert files_of(out) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "BLOCK = 'nothing': legal is one of linear, variance, kcache, vcache, pq, attention, top, toy"),
        (["toy", "--prefix", "1a"], "--prefix '1a': legal is a letter, then letters, digits and underscores"),
        (["toy", "--set", "rows=0"], "rows = 0"),
        (["toy", "--bench", "--seed", "-1"], "--seed -1: legal is an integer from 0"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(generate, tmp_path, arguments, message):
    code, text = generate(*arguments, "-o", tmp_path / "out")
    assert code == 2
    assert text.count("\n") == 1 and message in text
    assert not (tmp_path / "out").exists()


def test_folder_of_another_design_is_refused(generate, tmp_path):
    generate("toy", "-o", tmp_path, "--prefix", "first")
    code, text = generate("toy", "-o", tmp_path, "--prefix", "second")
    assert code == 2 and "holds the design first_toy; choose another folder for second_toy" in text


def test_linear_block_is_clean_and_its_bench_passes(generate, tmp_path):
    code, text = generate("linear", "-o", tmp_path, "--bench", "--set", "rows=3", "--set", "cols=2", "--set", "group=8")
    assert code == 0, text
    command = ["verilator", "--lint-only", "--quiet", "-Wall", "kvant_linear.sv"]
    environment = os.environ | verilator_environment()
    lint = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (lint.returncode, lint.stdout + lint.stderr) == (0, "")
    result = run_bench(tmp_path, "icarus")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("block", "options"),
    [
        ("kcache", ["group=8", "head_dim=8", "lanes=8", "sinks=3", "centred=true"]),
        ("vcache", ["group=8", "head_dim=10", "lanes=4", "sinks=3", "heads=2", "capacity=64"]),
        ("pq", ["group=8", "head_dim=16", "lanes=4", "sinks=2", "recent=5", "nbits=4", "port_bits=64", "batch=4"]),
        ("attention", ["group=8", "head_dim=16", "lanes=4", "sinks=2", "rows=4", "cols=2", "capacity=64"]),
    ],
)
def test_bench_of_a_cache_keeps_the_order_of_its_streams(kvant, tmp_path, block, options):
    settings = [word for option in options for word in ("--set", option)]
    assert kvant("generate", block, "-o", tmp_path / "out", "--bench", *settings).returncode == 0
    result = run_bench(tmp_path / "out", "icarus")
    assert result.returncode == 0, result.stdout + result.stderr
