"""Compiled models of a small component: transfers, pauses, plain ports, and what is refused."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from stream_components import Accumulator

from kvant.hw.emit import emit
from kvant.hw.parameters import ParameterError
from kvant.sim import toolchain
from kvant.sim.compiled import build
from kvant.sim.compiled.build import storage_bytes
from kvant.sim.compiled.model import CompiledModel, records
from kvant.sim.errors import SimulationError

LANES = 4


@pytest.fixture(scope="module")
def design():
    """The accumulator, emitted."""
    return emit(Accumulator(LANES), "accumulator_compiled")


def packets(count: int, seed: int = 0) -> tuple[dict[str, np.ndarray], list[int]]:
    """Random packets as buffers of x, and their results."""
    random = np.random.default_rng(seed)
    lanes = random.integers(-128, 128, (count, LANES)).astype(np.int8)
    last = random.random(count) < 0.4
    last[-1] = True
    buffers = {
        "data": lanes.view(np.uint8).reshape(count, LANES),
        "user": (np.arange(count) % 16).astype(np.uint8)[:, None],
        "last": last.astype(np.uint8)[:, None],
    }
    return buffers, Accumulator.expected(lanes.tolist(), last.tolist())


def results(buffers: dict[str, np.ndarray]) -> list[int]:
    """Values in the buffers of y."""
    return buffers["data"].view("<u4").ravel().tolist()


def test_a_runtime_that_another_build_brings_meanwhile_is_not_linked_twice(design, tmp_path, monkeypatch):
    version = toolchain.version("verilator")
    monkeypatch.setattr(toolchain, "cache_folder", lambda: tmp_path)
    run_all, calls = build._run_all, []

    def other_build_wins(commands, folder, tool, done):
        run_all(commands, folder, tool, done)
        calls.append(tool)
        if len(calls) == 3:  # all is compiled, nothing is linked
            runtime = build._runtime(version)
            runtime.mkdir(parents=True)
            for name in build._RUNTIME:
                shutil.copy((folder / name).with_suffix(".o"), runtime)

    monkeypatch.setattr(build, "_run_all", other_build_wins)
    assert build.library(design).exists()
    assert len(calls) == 4


@pytest.mark.parametrize("stall", [0.0, 0.3, 0.9, {"y": 0.8}])
def test_transfers_are_those_of_the_component_whatever_pauses(design, stall):
    sent, expected = packets(300)
    with CompiledModel(design, stall=stall, seed=3) as model:
        model.check("x", sent)
        model.send("x", sent)
        taken = model.receive("y", len(expected))
        counts = model.run()
        model.step(8)
        assert results(taken) == expected
        assert taken["user"].ravel().tolist() == [n % 16 for n in np.flatnonzero(sent["last"])]
        assert model.read("packets") == len(expected)
    assert (counts["x"].count, counts["y"].count) == (300, len(expected))
    assert counts["y"].last - counts["x"].first >= 300


def test_runs_follow_each_other_without_a_bubble(design):
    sent, _ = packets(64, seed=1)
    half = {name: buffer[:32] for name, buffer in sent.items()}
    rest = {name: buffer[32:] for name, buffer in sent.items()}
    cycles = []
    for parts in ([sent], [half, rest]):
        with CompiledModel(design) as model:
            model.discard("y")
            for part in parts:
                model.send("x", part)
                model.run()
            cycles.append(model.cycle)
    assert cycles[0] == cycles[1]


def test_equal_seeds_pause_in_the_same_cycles(design):
    sent, expected = packets(100)

    def cycles(seed):
        with CompiledModel(design, stall=0.5, seed=seed) as model:
            model.send("x", sent)
            model.receive("y", len(expected))
            model.run()
            return model.cycle

    assert cycles(1) == cycles(1) != cycles(2)


def test_reset_in_the_middle_gives_a_cold_start(design):
    sent, expected = packets(50)
    with CompiledModel(design) as model:
        model.send("x", {name: buffer[:7] for name, buffer in sent.items()})
        model.discard("y")
        model.run()
        model.reset()
        model.discard("y", False)
        assert model.cycle == 0
        model.send("x", sent)
        taken = model.receive("y", len(expected))
        model.run()
        assert results(taken) == expected


def test_plain_inputs_are_held(design):
    sent, _ = packets(20)
    last = sent["last"].ravel().astype(bool)
    expected = Accumulator.expected(sent["data"].view(np.int8).tolist(), last.tolist(), bias=200)
    with CompiledModel(design) as model:
        model.write("bias", 200)
        model.send("x", sent)
        taken = model.receive("y", len(expected))
        model.run()
        assert results(taken) == expected
        with pytest.raises(ParameterError, match="256 does not fit 8"):
            model.write("bias", 256)
        with pytest.raises(ParameterError, match="is an output"):
            model.write("packets", 1)
        with pytest.raises(ParameterError, match="'x'"):
            model.read("x")


def test_a_run_that_cannot_end_names_the_streams_that_wait(design):
    sent, expected = packets(20)
    with CompiledModel(design) as model:
        model.send("x", sent)
        model.receive("y", len(expected) + 1)
        with pytest.raises(SimulationError, match=rf"no transfer for 500 cycles.*y \(output\) {len(expected)} of"):
            model.run(idle=500)
    with CompiledModel(design) as model:
        model.send("x", sent)  # without room for results
        with pytest.raises(SimulationError, match=r"not done after 700 cycles.*x \(input\)"):
            model.run(limit=700)


def test_a_surplus_transfer_is_seen_afterwards(design):
    sent, expected = packets(20)
    with CompiledModel(design) as model:
        model.send("x", sent)
        model.receive("y", len(expected) - 1)
        model.run()
        with pytest.raises(SimulationError, match="stream y: a transfer more than expected"):
            model.step(16)


def test_a_payload_that_changes_while_it_waits_is_caught(design):
    broken = design.verilog.replace("module accumulator_compiled(", "module accumulator_inside(", 1)
    assert broken != design.verilog
    header = ", ".join(f"{port.direction} wire [{port.width - 1}:0] {port.name}" for port in design.ports)
    connections = ", ".join(
        f".{port.name}({'user' if port.name == 'm_axis_y_tuser' else port.name})" for port in design.ports
    )
    broken += (
        f"\nmodule accumulator_compiled({header});\n"
        "reg toggle = 0; wire [3:0] user; always @(posedge clk) toggle <= ~toggle;\n"
        f"assign m_axis_y_tuser = user ^ {{3'b0, toggle}};\naccumulator_inside core({connections});\nendmodule\n"
    )
    sent, expected = packets(300)
    with CompiledModel(replace(design, verilog=broken), stall={"y": 0.8}) as model:
        model.send("x", sent)
        model.receive("y", len(expected))
        with pytest.raises(SimulationError, match="stream y: payload changed while it waited"):
            model.run()


def test_what_does_not_fit_is_refused(design):
    sent, _ = packets(5)
    with CompiledModel(design) as model:
        for fields, match in [
            ({"data": sent["data"]}, "fields"),
            (sent | {"data": sent["data"][:, :2]}, r"legal is uint8 \[transfers, 4\]"),
            (sent | {"user": sent["user"][:3]}, "as many transfers"),
            (sent | {"data": sent["data"].astype(np.int8)}, "int8"),
            (sent | {"data": np.asfortranarray(sent["data"])}, "contiguous"),
        ]:
            with pytest.raises(ParameterError, match=match):
                model.send("x", fields)
        with pytest.raises(ParameterError, match="exceeds 4 bits"):
            model.check("x", sent | {"user": sent["user"] + 16})
        with pytest.raises(ParameterError, match="is an output"):
            model.send("y", sent)
        with pytest.raises(ParameterError, match="'z'"):
            model.receive("z", 1)
    for options, match in [
        ({"stall": 1.0}, "stall of stream x = 1.0"),
        ({"stall": {"z": 0.1}}, "'z'"),
        ({"threads": 0}, "threads = 0"),
    ]:
        with pytest.raises(ParameterError, match=match):
            CompiledModel(design, **options)


@pytest.mark.parametrize(("width", "size"), [(1, 1), (8, 1), (9, 2), (17, 4), (33, 8), (64, 8), (65, 12), (96, 12)])
def test_records_have_the_size_of_the_port(width, size):
    assert storage_bytes(width) == size
    assert records([1, (1 << width) - 1], width).shape == (2, size)
