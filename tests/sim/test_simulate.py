"""The player of streams on all simulators: identical results, and every misbehaviour noticed."""

import os
import random
import re
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from stream_components import Accumulator, Merge, Ram

from kvant.hw.numeric.int8_quantizer import Int8Quantizer
from kvant.hw.parameters import ParameterError
from kvant.sim import toolchain
from kvant.sim.errors import SimulationError, ToolError
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus
from kvant.sim.words import pack_words, unpack_words

EVENT_SIMULATORS = ("verilator", "icarus")
SIMULATORS = (*EVENT_SIMULATORS, "amaranth")

LANES = 4


def packets(count, seed, longest=5):
    """Random packets for the accumulator: a stimulus and the results."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    last = [int(i == n - 1) for n in lengths for i in range(n)]
    values = rng.integers(-128, 128, (len(last), LANES))
    values[:2] = [[-128] * LANES, [127] * LANES][: len(last[:2])]
    users = rng.integers(0, 16, len(last))
    stimulus = Stimulus(
        inputs={"x": {"data": pack_words(values, 8), "user": users.tolist(), "last": last}},
        expect={"y": count},
        status=["packets"],
        constants={"bias": 5},
    )
    results = Accumulator.expected(values, last, bias=5)
    tags = [int(user) for user, is_last in zip(users, last, strict=True) if is_last]
    return stimulus, {"data": results, "user": tags, "last": [1] * count}


STALLS = {
    "none": 0.0,
    "random": 0.4,
    "inputs only": {"x": 0.6},
    "outputs only": {"y": 0.8},
    "output toggles": {"y": [1, 0]},
    "ready only after valid": {"y": "after_valid"},
    "long stall of the first result": {"y": [1] * 1000 + [0] * 100000},
    "gaps inside packets": {"x": [0, 1, 1]},
}


@pytest.mark.parametrize("stall", STALLS.values(), ids=STALLS.keys())
@pytest.mark.parametrize("simulator", SIMULATORS)
def test_case_35_stalls_change_no_result(simulator, stall):
    stimulus, expected = packets(30, seed=1)
    trace = simulate(Accumulator, "acc", stimulus, simulator=simulator, stall=stall, seed=7)
    assert trace.transfers["y"] == expected
    assert trace.status == {"packets": 30}


@pytest.mark.parametrize("stall", [0.0, 0.3, {"x": [0, 0, 1], "y": "after_valid"}], ids=str)
def test_case_47_all_simulators_agree_cycle_by_cycle(stall):
    stimulus, _ = packets(40, seed=2)
    traces = [simulate(Accumulator, "acc", stimulus, simulator=name, stall=stall, seed=3) for name in SIMULATORS]
    assert traces[0] == traces[1] == traces[2]


def test_stalls_depend_on_the_seed_alone():
    stimulus, _ = packets(20, seed=2)
    cycles = [
        simulate(Accumulator, "acc", stimulus, simulator="amaranth", stall=0.3, seed=seed).cycles for seed in (1, 1, 2)
    ]
    assert cycles[0] == cycles[1] != cycles[2]


def test_latency_and_throughput_are_seen_in_the_cycles():
    stimulus = Stimulus(
        {"x": {"data": [1, 2, 3, 4], "user": [0] * 4, "last": [1] * 4}}, {"y": 4}, constants={"bias": 0}
    )
    trace = simulate(lambda: Accumulator(depth=8), "acc", stimulus, simulator="icarus")
    assert trace.cycles == {"x": [0, 1, 2, 3], "y": [3, 4, 5, 6]}


def replaced(pattern, replacement):
    """An edit of Verilog text that must find its place, the first one."""

    def edit(verilog):
        changed, count = re.subn(pattern, replacement, verilog, count=1, flags=re.MULTILINE)
        assert count
        return changed

    return edit


FAULTS = {
    "constant": replaced(r"\$signed\(3'h3\)", "$signed(4'h5)"),
    "sign": replaced(r"\$signed\(3'h3\)", "$signed(3'h5)"),
    "swapped bits": replaced(r"\.i\(x__payload\[7:0\]\)", ".i({x__payload[3:0], x__payload[7:4]})"),
    "valid a cycle late": lambda verilog: replaced(r"\.y__valid\(m_axis_y_tvalid\)", ".y__valid(early)")(
        replaced(
            r"^  wire m_axis_y_tvalid;$",
            "  wire early; reg late = 0; always @(posedge clk) late <= early; wire m_axis_y_tvalid = late;",
        )(verilog)
    ),
}


@pytest.mark.parametrize("simulator", EVENT_SIMULATORS)
@pytest.mark.parametrize("edit", FAULTS.values(), ids=FAULTS.keys())
def test_case_47_broken_verilog_fails_on_every_simulator(simulator, edit):
    """A late valid is no wrong value, but a result doubled or lost, or a payload that changes."""
    stimulus, expected = packets(10, seed=4)
    options = {"simulator": simulator, "stall": {"y": 0.5}, "edit_verilog": edit, "timeout_cycles": 500}
    try:
        trace = simulate(Accumulator, "acc", stimulus, **options)
    except SimulationError:
        return
    assert trace.transfers["y"] != expected


class Misbehaving(wiring.Component):
    """Sends 1, 2, 3, ... and breaks one rule of streams."""

    def __init__(self, fault):
        self.fault = fault
        super().__init__({"y": Out(stream.Signature(8)), "x": In(stream.Signature(8)), "sent": Out(8)})

    def elaborate(self, platform):
        m = Module()
        ticks = Signal(8)
        m.d.sync += ticks.eq(ticks + 1)
        m.d.comb += [self.y.valid.eq(1), self.y.payload.eq(self.sent), self.x.ready.eq(1)]
        with m.If(self.y.valid & self.y.ready):
            m.d.sync += self.sent.eq(self.sent + 1)
        if self.fault == "drops valid":
            m.d.comb += self.y.valid.eq(~ticks[2])
        elif self.fault == "changes payload":
            m.d.comb += self.y.payload.eq(ticks)
        elif self.fault == "never ready":
            m.d.comb += self.x.ready.eq(0)
        return m


@pytest.mark.parametrize("simulator", SIMULATORS)
@pytest.mark.parametrize(
    ("fault", "expect", "message"),
    [
        ("drops valid", 9, r"stream y: valid dropped while it waited at \d+ ns, cycle \d+"),
        ("changes payload", 9, r"stream y: payload changed while it waited at \d+ ns, cycle \d+"),
        ("none", 2, r"stream y: more than the 2 transfers expected at \d+ ns, cycle \d+"),
        (
            "never ready",
            300,
            r"no transfer for 50 cycles: y \d+ of 300 received, x 0 of 2 sent|"
            r"no transfer for 50 cycles: x 0 of 2 sent, y \d+ of 300 received \(at \d+ ns, cycle \d+\)",
        ),
    ],
    ids=["valid", "payload", "surplus", "timeout"],
)
def test_broken_handshake_is_named(simulator, fault, expect, message):
    stall = {"y": [1] * 8 + [0]} if fault in ("drops valid", "changes payload") else {}
    if fault == "never ready":
        stall = {"y": [0] * 10 + [1] * 1000}
    with pytest.raises(SimulationError, match=f"^{message}"):
        simulate(
            lambda: Misbehaving(fault),
            "bad",
            Stimulus({"x": {"data": [1, 2]}}, {"y": expect}),
            simulator=simulator,
            stall=stall,
            timeout_cycles=50,
        )


@pytest.mark.parametrize("hold_valid", [False, True], ids=["valid low", "valid held"])
@pytest.mark.parametrize("cycles", [1, 3])
@pytest.mark.parametrize("again_at", [1, 5, 13, 30])
def test_case_36_run_after_reset_equals_a_cold_start(again_at, cycles, hold_valid):
    stimulus, expected = packets(20, seed=5)
    cold = simulate(Accumulator, "acc", stimulus, simulator="amaranth", stall=0.3, seed=1)
    reset = Reset(cycles=cycles, again_at=again_at, hold_valid=hold_valid)
    warm = simulate(Accumulator, "acc", stimulus, simulator="amaranth", stall=0.3, seed=1, reset=reset)
    assert cold.transfers["y"] == expected
    assert warm == cold


@pytest.mark.parametrize("simulator", EVENT_SIMULATORS)
def test_case_36_reset_while_the_output_is_stalled(simulator):
    stimulus, expected = packets(8, seed=6)
    stall = {"y": [1] * 20 + [0] * 1000}
    reset = Reset(cycles=1, again_at=15, hold_valid=True)
    warm = simulate(Accumulator, "acc", stimulus, simulator=simulator, stall=stall, reset=reset)
    assert warm.transfers["y"] == expected
    assert warm == simulate(Accumulator, "acc", stimulus, simulator=simulator, stall=stall)


def test_case_38_memory_read_before_its_first_write_agrees_with_amaranth():
    rng = random.Random(0)
    commands = [rng.getrandbits(13) for _ in range(100)]
    stimulus = Stimulus({"cmd": {"data": commands}}, {"word": 100})
    traces = [simulate(Ram, "ram", stimulus, simulator=name, stall=0.2) for name in SIMULATORS]
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.parametrize(
    ("port", "bits", "when"),
    [
        ("m_axis_y_tdata", 32, r"at \d+ ns, cycle \d+"),
        ("m_axis_y_tvalid", 1, "at 5 ns, in reset"),
        ("s_axis_x_tready", 1, "at 5 ns, in reset"),
        ("packets", 16, r"at \d+ ns, cycle \d+"),
    ],
)
def test_cases_38_and_45_unknown_value_is_an_error_with_signal_and_time(port, bits, when):
    stimulus, _ = packets(3, seed=8)

    edit = replaced(rf"^(  output (?:\[\d+:0\] )?{port};)$", rf"\1\n  assign {port} = 'x;")
    with pytest.raises(SimulationError, match=rf"^signal {port} is unknown \({bits} of {bits} bits\) {when}$"):
        simulate(Accumulator, "acc", stimulus, simulator="icarus", edit_verilog=edit)


def test_unknown_payload_of_no_transfer_is_no_error():
    """The memory's read register holds x until the first read."""
    stimulus = Stimulus({"cmd": {"data": [0b00000011_0000_1]}}, {"word": 1})
    assert simulate(Ram, "ram", stimulus, simulator="icarus").transfers["word"] == {"data": [0]}


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_case_46_waves_on_and_off(simulator, tmp_path, monkeypatch):
    # A clean tree, but for the compiled runtime library of Verilator, which costs half a minute.
    runtime = toolchain.cache_folder() / "verilator-runtime"
    runtime.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "verilator-runtime").symlink_to(runtime)
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path / "cache"))
    stimulus, expected = packets(3, seed=9)
    suffix = toolchain.wave_suffix(simulator)
    for name in ("first", None, "second"):
        path = None if name is None else tmp_path / "waves" / f"{name}{suffix}"
        trace = simulate(Accumulator, "acc", stimulus, simulator=simulator, waves=path)
        assert trace.transfers["y"] == expected
        if path is not None:
            assert path.stat().st_size > 500
    assert sorted(file.name for file in (tmp_path / "waves").iterdir()) == [f"first{suffix}", f"second{suffix}"]


def test_waves_of_another_format_are_refused(tmp_path):
    stimulus, _ = packets(1, seed=0)
    with pytest.raises(ParameterError, match=r"waves = .*: icarus writes \.fst files"):
        simulate(Accumulator, "acc", stimulus, simulator="icarus", waves=tmp_path / "a.vcd")


@pytest.mark.parametrize("version", ["1.9.2", "2.0.1", "3.0.0"])
def test_case_45_wrong_cocotb_is_named(version, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ToolError, match=rf"^cocotb {re.escape(version)} found, 2\.1 or a later 2\.x is needed: pip"):
        toolchain.check_cocotb()


def test_missing_simulator_says_what_to_install(monkeypatch):
    toolchain.version.cache_clear()
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    with pytest.raises(ToolError, match=r"^Icarus Verilog not found: apt install iverilog$"):
        simulate(Accumulator, "acc", packets(1, seed=0)[0], simulator="icarus")
    with pytest.raises(ToolError, match=r"^perl not found, Verilator needs it: apt install perl$"):
        toolchain.version("verilator")


@pytest.mark.parametrize("simulator", EVENT_SIMULATORS)
def test_verilog_that_does_not_compile_is_one_line(simulator):
    stimulus, _ = packets(1, seed=0)
    with pytest.raises(ToolError, match=f"^{simulator} could not build acc: .*rror") as error_info:
        simulate(Accumulator, "acc", stimulus, simulator=simulator, edit_verilog=lambda text: text + "\nmodule (;\n")
    assert "\n" not in str(error_info.value)


GOOD = {"data": [1], "user": [0], "last": [1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": {"z": GOOD}}, "stream 'z': legal input streams are x"),
        ({"expect": {"x": 1}}, "stream 'x': legal output streams are y"),
        ({"inputs": {"x": {"data": [1]}}}, r"stream x: fields \['data'\] given, legal are \['data', 'last', 'user'\]"),
        ({"inputs": {"x": GOOD | {"user": [0, 1]}}}, "stream x: fields have 1, 2, 1 values"),
        ({"inputs": {"x": GOOD | {"user": [16]}}}, "stream x, field user: 16 does not fit 4 unsigned bits"),
        ({"inputs": {"x": GOOD | {"data": [-1]}}}, "stream x, field data: -1 does not fit 32 unsigned bits"),
        ({"status": ["bias"]}, "status 'bias': no plain output of this name"),
        ({"constants": {"packets": 1}}, "constant 'packets': no plain input of this name"),
        ({"constants": {"bias": 256}}, "bias: 256 does not fit 8 unsigned bits"),
    ],
)
def test_stimulus_that_does_not_fit_is_refused(change, message):
    stimulus = Stimulus(**({"inputs": {"x": GOOD}} | change))
    with pytest.raises(ParameterError, match=f"^{message}$"):
        simulate(Accumulator, "acc", stimulus, simulator="amaranth")


@pytest.mark.parametrize("stall", [1.0, -0.1, {"x": "after_valid"}, {"y": []}, {"y": [1, 1]}, {"z": 0.1}], ids=str)
def test_illegal_stall_is_refused(stall):
    with pytest.raises(ParameterError, match=r"^stall of stream"):
        simulate(Accumulator, "acc", packets(1, seed=0)[0], simulator="amaranth", stall=stall)


def test_run_without_any_transfer_ends():
    trace = simulate(Accumulator, "acc", Stimulus({}, {"y": 0}, ["packets"]), simulator="amaranth")
    assert trace.transfers == {"x": {"data": [], "user": [], "last": []}, "y": {"data": [], "user": [], "last": []}}
    assert trace.status == {"packets": 0}


def test_builds_and_designs_come_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVANT_CACHE", str(tmp_path))
    stimulus = Stimulus({})

    def build(key):
        simulate(lambda: Int8Quantizer(2, 4), "q", stimulus, simulator="icarus", design_key=key)
        return sorted(path.name for path in tmp_path.glob("*/*"))

    first = build(("Int8Quantizer", 2, 4))
    assert len(first) == 2
    monkeypatch.setattr("kvant.sim.simulate.emit", None)
    monkeypatch.setattr("kvant.sim.simulate._run_build", None)
    assert build(("Int8Quantizer", 2, 4)) == first


def test_parallel_builds_do_not_disturb_each_other(tmp_path):
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from stream_components import Ram\n"
        "from kvant.sim.simulate import simulate\n"
        "from kvant.sim.streams import Stimulus\n"
        "print(simulate(Ram, 'ram', Stimulus({'cmd': {'data': [7]}}, {'word': 1}), simulator='icarus').transfers)\n"
    )
    helpers = next(path for path in sys.path if path.endswith("helpers"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, helpers],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"KVANT_CACHE": str(tmp_path)},
        )
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert outputs[0] == outputs[1] != ""
    assert len(list((tmp_path / "builds").iterdir())) == 1


@pytest.mark.parametrize(
    ("n", "width", "signed"), [(1, 1, False), (3, 8, True), (8, 4, False), (2, 33, True), (1, 64, True)]
)
def test_words_pack_and_unpack(n, width, signed):
    rng = np.random.default_rng(width)
    low, high = (-(1 << (width - 1)), 1 << (width - 1)) if signed else (0, 1 << width)
    lanes = rng.integers(low, high, (20, n))
    words = pack_words(lanes, width)
    assert words[3] == sum((int(lane) % (1 << width)) << (width * i) for i, lane in enumerate(lanes[3]))
    assert (unpack_words(words, n, width, signed=signed) == lanes).all()


@pytest.mark.parametrize("simulator", SIMULATORS)
def test_a_held_stream_waits_for_the_transfers_of_another(simulator):
    stimulus = Stimulus(
        inputs={"first": {"data": [1, 2, 3]}, "second": {"data": [4, 5]}},
        expect={"o": 5},
        after={"first": ("second", 1), "second": ("o", 0)},
    )
    trace = simulate(Merge, "merge", stimulus, simulator=simulator, stall={"first": 0.3, "second": 0.3}, seed=2)
    assert trace.cycles["first"][0] > trace.cycles["second"][0]
    assert sorted(trace.transfers["o"]["data"]) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("simulator", SIMULATORS)
@pytest.mark.parametrize("stall", [0.0, 0.4])
def test_an_input_repeats_what_an_output_gave(simulator, stall):
    """As a memory does: transfers in any order, more than once, each after it has been written."""
    stimulus = Stimulus(inputs={"first": {"data": [11, 12, 13]}}, expect={"o": 6}, echo={"second": ("o", [2, 0, 0])})
    trace = simulate(Merge, "merge", stimulus, simulator=simulator, stall=stall, seed=3)
    assert sorted(trace.transfers["o"]["data"]) == sorted([11, 12, 13, *trace.transfers["second"]["data"]])
    assert trace.transfers["second"]["data"] == [trace.transfers["o"]["data"][k] for k in (2, 0, 0)]
    assert trace.cycles["second"][0] > trace.cycles["o"][2]


@pytest.mark.parametrize(
    "stimulus",
    [
        Stimulus(inputs={}, echo={"second": ("first", [0])}),
        Stimulus(inputs={}, echo={"third": ("o", [0])}),
        Stimulus(inputs={"first": {"data": [1]}}, echo={"first": ("o", [0])}),
    ],
)
def test_an_echo_needs_an_output_and_an_idle_input(stimulus):
    with pytest.raises(ParameterError, match="echo of"):
        simulate(Merge, "merge", stimulus, simulator="amaranth")


def test_a_stream_cannot_be_held_by_one_that_does_not_exist():
    stimulus = Stimulus(inputs={"first": {"data": [1]}}, after={"first": ("third", 1)})
    with pytest.raises(ParameterError, match=r"'third'.*first, second, o"):
        simulate(Merge, "merge", stimulus, simulator="amaranth")


def test_a_model_is_built_anew_for_another_installation_of_cocotb(monkeypatch, tmp_path):
    stimulus, expected = packets(3, seed=9)
    monkeypatch.setattr(toolchain, "cache_folder", lambda: tmp_path)
    builds = []
    for origin in ("here", "there", "here"):
        monkeypatch.setattr("kvant.sim.simulate.find_spec", lambda _, origin=origin: SimpleNamespace(origin=origin))
        trace = simulate(lambda: Accumulator(LANES), "accumulator", stimulus, simulator="icarus")
        assert trace.transfers["y"] == expected
        builds.append(len(list((tmp_path / "builds").iterdir())))
    assert builds == [1, 2, 2]


def test_the_makefiles_of_verilator_call_a_python_that_is_there():
    flags = toolchain.verilator_environment()["MAKEFLAGS"].split()
    (program,) = (flag.partition("=")[2] for flag in flags if flag.startswith("PYTHON3="))
    assert subprocess.run([program, "-c", "print(7)"], capture_output=True, text=True, check=True).stdout == "7\n"
