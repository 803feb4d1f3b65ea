"""The accelerator on Verilator and Icarus: layers through descriptors equal the golden model; errors, aborts."""

from pathlib import Path

import numpy as np
import pytest
import soc_programs as programs

from kvant import config
from kvant.hw.soc.descriptors import ErrorCode
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.linear import golden_outputs, random_case
from kvant.sim.errors import SimulationError
from kvant.sim.soc import bench

pytest.importorskip("cocotbext.axi")

HELPERS = [str(Path(programs.__file__).parent)]
NARROW = ["rows=2", "cols=3", "group=16", "accumulators=8", "activation_words=128"]
"""One accumulator unit, weights of odd widths."""

UNITS = ["rows=4", "cols=4", "group=8", "accumulators=8", "activation_words=64", "quant_lanes=2"]
"""Two accumulator units, and the activations' port narrower than the memory's."""


def make(overrides, **soc):
    chosen = config.load(None, overrides)
    return chosen, TopParameters(chosen.linear, SocParameters(**soc))


WIDE_CHOSEN, WIDE = make(UNITS, port_bits=64, burst_beats=32, weight_words=256, address_bits=40)
CHOSEN, P = make(NARROW, port_bits=64, burst_beats=16, weight_words=64)


def run(program, *, p=P, latency=20, stall=0.0, seed=0, memory="model", cycles=100_000, **arguments):
    options = {"latency": latency, "stall": stall, "seed": seed, "memory": memory, "cycles": cycles}
    return bench.run(p, program, options=options, paths=HELPERS, **arguments)


def case_of(tokens, outputs, inputs, seed=1, chosen=CHOSEN):
    return random_case(chosen, tokens=tokens, outputs=outputs, inputs=inputs, seed=seed)


def golden(case, chosen=CHOSEN):
    return golden_outputs(chosen.linear, case)["y"]


def equal(result, case, chosen=CHOSEN):
    return np.array_equal(result.view(np.uint32), golden(case, chosen).view(np.uint32))


CASE = case_of(3, 7, 40)
RESULT = golden(CASE)


def same(result):
    return np.array_equal(result.view(np.uint32), RESULT.view(np.uint32))


SHAPES = [(1, 1, 1), (1, 30, 16), (3, 7, 40), (9, 4, 33), (2, 100, 70), (1, 5, 256)]
"""Tokens, outputs, inputs: one of each, whole groups, tails, several jobs, weights of more than a page."""


@pytest.mark.parametrize(
    ("stall", "memory", "latency"), [(0.0, "model", 0), (0.3, "model", 50), (0.9, "model", 3), (0.3, "cocotbext", 0)]
)
def test_layers_equal_the_golden_model(stall, memory, latency):
    cases = [case_of(*shape, seed=number) for number, shape in enumerate(SHAPES if stall < 0.9 else SHAPES[:3])]
    results, counters, at_pages = run(programs.layers, stall=stall, memory=memory, latency=latency, cases=cases)
    for result, case, shape in zip(results, cases, SHAPES, strict=False):
        assert equal(result, case), shape
    assert counters["BYTES_READ"] > counters["BYTES_WRITTEN"] > 0
    assert at_pages or memory == "cocotbext" or stall == 0.9


@pytest.mark.long
def test_several_units_and_narrow_activations_equal_the_golden_model():
    chosen, p = WIDE_CHOSEN, WIDE
    shapes = [(2, 11, 19), (5, 3, 8), (1, 24, 30)]
    cases = [case_of(*shape, seed=number, chosen=chosen) for number, shape in enumerate(shapes)]
    results, _, _ = run(programs.layers, p=p, stall=0.2, cases=cases, interleaves=[1, 2, 5])
    for result, case, shape in zip(results, cases, shapes, strict=True):
        assert equal(result, case, chosen), shape


def test_icarus_agrees():
    cases = [case_of(2, 4, 20)]
    results, _, _ = run(programs.layers, simulator="icarus", stall=0.3, cases=cases)
    assert equal(results[0], cases[0])


def test_registers_are_those_of_the_description():
    problems, status, p = run(programs.register_walk, stall=0.4)
    assert problems == [] and not any(status.values())
    assert p.linear.model_dump() | {"quant_lanes": None} == P.linear.model_dump()
    assert (p.soc.port_bits, p.soc.address_bits) == (64, 32)


@pytest.mark.parametrize("stall", [0.0, 0.5])
def test_activations_and_outputs_may_be_streams(stall):
    assert all(same(result) for result in run(programs.streams, stall=stall, case=CASE))


def test_errors_of_the_memory_stop_the_descriptor_they_belong_to():
    reports = run(programs.bus_errors, latency=10, case=CASE)
    codes = [ErrorCode.FETCH, *[ErrorCode.READ_WEIGHTS] * 2, *[ErrorCode.READ_X] * 2, *[ErrorCode.WRITE_Y] * 2]
    untouched = np.frombuffer(b"\xa5" * 4, np.float32)[0]
    for (name, report), code in zip(reports.items(), codes, strict=True):
        assert report is not None, name
        assert (report["code"], report["index"], report["head"]) == (code, 1, 1), name
        assert not report["owed"] and report["quiet"], name
        assert same(report["before"][0]), name
        assert (report["before"][2] == untouched).all(), name
        if code != ErrorCode.WRITE_Y:
            assert (report["before"][1] == untouched).all(), name
        assert all(same(result) for result in report["after"]), name


def test_illegal_descriptors_are_refused_before_anything_is_done_for_them():
    results, _ = run(programs.bad_descriptors, latency=2, case=CASE)
    assert len(results) > 40
    for text, report, expected, touched, read, done in results:
        assert report == expected, text
        assert not touched and not read, text
        stride = len(done) // len(RESULT)
        rows = [np.frombuffer(done[row * stride :][: 4 * RESULT.shape[1]], np.float32) for row in range(len(RESULT))]
        assert same(np.array(rows)), text


def test_weights_of_another_length_are_reported():
    reports, results = run(programs.weight_lengths, case=CASE)
    assert reports == [(ErrorCode.WEIGHT_LENGTH, 48)] * 3
    assert all(same(result) for result in results)


def test_rings_that_are_not_legal_are_refused():
    reports, results, _ = run(programs.rings, case=CASE)
    assert reports == [ErrorCode.RING] * 5
    assert all(same(result) for result in results)


@pytest.mark.parametrize("stall", [0.0, 0.5])
def test_after_an_abort_at_any_time_the_port_is_quiet_and_the_next_run_is_right(stall):
    delays = [1, 10, 20, 30, 45, 60, 80, 100, 130, 170, 220, 300]
    for delay, (stopped, quiet, head, events, results) in zip(
        delays, run(programs.abort, stall=stall, case=CASE, delays=delays), strict=True
    ):
        assert stopped and quiet and events["error"], delay
        assert all(same(result) for result in results), (delay, head)


def test_a_job_that_waits_for_a_stream_can_be_aborted():
    states, result = run(programs.abort_streams, case=CASE)
    idle = {"running": 0, "busy": 0, "draining": 0}
    assert states == [1, idle, 1, idle]
    assert same(result)


def test_stop_finishes_what_is_under_way_and_start_goes_on():
    events, head, between, after, end = run(programs.stop_and_go, case=CASE)
    assert events["idle"] and not events["error"] and 0 < head < 3 and end == 4
    untouched = np.frombuffer(b"\xa5" * 4, np.float32)[0]
    for number, result in enumerate(between):
        assert same(result) if number < head else (result == untouched).all()
    assert all(same(result) for result in after)


def test_interrupts_come_where_they_were_asked_for():
    events, levels, state, results, descriptors = run(programs.interrupts, case=CASE)
    assert events == [{"done": 1, "idle": 0, "error": 0}]
    assert levels == [0, 0, 0, 1]
    assert state["running"] and not state["busy"]
    assert all(same(result) for result in results) and descriptors == 6


def test_the_ring_wraps():
    results, head = run(programs.around_the_ring, case=CASE, rounds=6)
    assert all(same(result) for result in results)
    assert head == 12 % 5


def test_a_reset_in_the_middle_leaves_nothing_behind():
    case = case_of(2, 30, 64)
    results = run(programs.reset_in_the_middle, case=case, latency=5)
    assert equal(results[0], case)


@pytest.mark.long
def test_one_layer_after_the_other_keeps_the_port_busy():
    case = case_of(1, 80, 128, chosen=WIDE_CHOSEN)
    counters = run(programs.back_to_back, p=WIDE, latency=50, case=case, count=8)
    words = counters["BYTES_READ"] / WIDE.soc.port_bytes
    assert words / counters["CYCLES_BUSY"] > 0.85


def test_flags_of_the_data_belong_to_their_descriptor():
    broken = {name: array.copy() for name, array in CASE.items()}
    broken["w_coeff"][0, 0] = 200
    broken["x"][0, 20] = np.nan
    assert run(programs.flags_of_data, case=CASE, broken=broken) == [(1, 1), (0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("original", "faulty"),
    [
        ("assign y__valid = pending[3]", "assign y__valid = 1'h1"),  # a job of outputs that none asked for
        ("assign x__valid = pending[1]", "assign x__valid = 1'h1"),
    ],
)
def test_faults_of_the_sequencer_are_caught(original, faulty):
    def edit(text):
        assert text.count(original) == 1
        return text.replace(original, faulty)

    cases = [case_of(1, 4, 20, seed=seed) for seed in range(2)]
    try:
        results, _, _ = run(programs.layers, simulator="icarus", cycles=2000, cases=cases, edit_verilog=edit)
    except SimulationError:
        return
    assert not all(equal(result, case) for result, case in zip(results, cases, strict=True))
