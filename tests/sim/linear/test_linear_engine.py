"""The linear path in simulators: bit for bit the golden model, whatever the shapes, streams and stalls."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant import config
from kvant.hw.linear.cycles import linear_cycles
from kvant.hw.linear.engine import LinearEngine
from kvant.hw.linear.jobs import plan
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.linear.timing import LinearTiming
from kvant.hw.parameters import ParameterError
from kvant.linear import INT8, golden_outputs, random_case
from kvant.sim.linear import engine
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset

KNOWN_ANSWERS = sorted((Path(__file__).parents[2] / "known_answers").glob("linear_*.npz"))

SMALL = ("rows=4", "cols=2", "group=8", "activation_words=64")


def design(*overrides):
    """Configuration and parameters."""
    chosen = config.load(None, overrides)
    return chosen, chosen.linear


def assert_equal_bits(result, golden):
    for name, expected in golden.items():
        bits = f"u{expected.itemsize}"
        np.testing.assert_array_equal(result[name].view(bits), expected.view(bits), err_msg=name)


def play(p, arrays, **options):
    """Simulate without the cache of designs, on the component as it is now; Amaranth's simulator if not told."""
    return engine.play(p, arrays, **{"simulator": "amaranth"} | options)[0]


def read_known_answer(path):
    with np.load(path) as archive:
        given_arrays = {name[3:]: archive[name] for name in archive.files if name.startswith("in_")}
        right = {name[4:]: archive[name] for name in archive.files if name.startswith("out_")}
    return given_arrays, right


@pytest.mark.parametrize("stall", [0.0, 0.3])
@pytest.mark.parametrize("path", KNOWN_ANSWERS, ids=lambda path: path.stem)
def test_known_answers_on_verilator(path, stall):
    arrays, right = read_known_answer(path)
    p = LinearParameters(group=int(arrays.pop("group", 64)))
    assert_equal_bits(engine.run(p, arrays, stall=stall, seed=11), right)


def test_known_answer_on_icarus():
    path = next(path for path in KNOWN_ANSWERS if path.stem == "linear_odd")
    arrays, right = read_known_answer(path)
    assert_equal_bits(engine.run(LinearParameters(), arrays, simulator="icarus", stall=0.2, seed=3), right)


@pytest.mark.parametrize("stall", [0.0, 0.4])
def test_simulators_agree_on_values_cycles_and_flags(stall):
    chosen, p = design(*SMALL)
    arrays = random_case(chosen, tokens=3, outputs=5, inputs=21, seed=5)
    arrays["x"][1, 2] = np.nan
    golden = golden_outputs(p, arrays)
    results = {
        simulator: engine.run(p, arrays, simulator=simulator, stall=stall, seed=9)
        for simulator in ("amaranth", "icarus", "verilator")
    }
    for result in results.values():
        assert_equal_bits(result, golden)
        assert result["nonfinite"] == 1 and result["error"] == 0
        assert result["cycles"] == results["amaranth"]["cycles"]


SHAPES = [
    # tokens, outputs, inputs, overrides
    (1, 1, 1, ()),
    (2, 5, 70, ("rows=2", "cols=3", "group=16")),
    (5, 11, 45, ("rows=4", "cols=2", "group=10", "accumulators=2")),
    (7, 3, 33, ("rows=8", "cols=1", "group=8")),
    (2, 20, 33, ("rows=8", "cols=2", "group=4", "quant_lanes=2")),
    (3, 7, 50, ("rows=1", "cols=5", "group=3")),
    (9, 4, 40, ("rows=4", "cols=4", "group=8", "activation_words=20", "accumulators=4")),
    (1, 3, 64, ("rows=16", "cols=1", "group=16")),
    (2, 9, 65, ("rows=5", "cols=4", "group=13", "quant_lanes=1")),
    (1, 4, 133, ("rows=8", "cols=4", "group=64")),
    (1, 2, 66, ("rows=4", "cols=2", "group=16")),
    (3, 17, 40, ("rows=2", "cols=8", "group=4")),
    (2, 5, 300, ("rows=4", "cols=2", "group=256")),
    (4, 6, 5, ("rows=1", "cols=1", "group=1")),
    (2, 6, 40, ("rows=4", "cols=4", "group=16", "multiplier=dsp")),
    (2, 6, 40, ("rows=4", "cols=4", "group=16", "multiplier=ecp5_dsp", "adder=kogge_stone")),
    (2, 6, 40, ("rows=4", "cols=4", "group=16", "int8_groups=false", "max_coefficient=0", "coefficients=[0,255]")),
]


@pytest.mark.parametrize("tokens,outputs,inputs,overrides", SHAPES)
def test_any_rectangle_and_tail_is_exact_and_takes_the_modelled_cycles(tokens, outputs, inputs, overrides):
    chosen, p = design(*overrides)
    arrays = random_case(chosen, tokens=tokens, outputs=outputs, inputs=inputs, seed=tokens + outputs + inputs)
    result = engine.run(p, arrays, simulator="amaranth")
    assert_equal_bits(result, golden_outputs(p, arrays))
    model = linear_cycles(p, tokens=tokens, inputs=inputs, outputs=outputs, int8_groups=arrays["w_coeff"] == INT8)
    assert (model.total, model.busy) == (result["cycles"], result["busy_cycles"])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_configurations_are_exact_with_stalls(data):
    rows, cols = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    group = data.draw(st.integers(1, 20))
    chosen, p = design(f"rows={rows}", f"cols={cols}", f"group={group}", f"accumulators={data.draw(st.integers(1, 9))}")
    arrays = random_case(
        chosen,
        tokens=data.draw(st.integers(1, 4)),
        outputs=data.draw(st.integers(1, 9)),
        inputs=data.draw(st.integers(1, 40)),
        seed=data.draw(st.integers(0, 1000)),
    )
    stall = data.draw(st.sampled_from([0.0, 0.1, 0.6]))
    assert_equal_bits(play(p, arrays, stall=stall, seed=data.draw(st.integers(0, 99))), golden_outputs(p, arrays))


@pytest.mark.parametrize(
    "stall",
    [
        {"y": [1] * 1000 + [0] * 1000},
        {"x": [0, 1], "w": [1, 0], "y": [0, 1], "xq": [1, 0]},
        {"y": "after_valid", "xq": "after_valid"},
        {"w": [0] * 5 + [1] * 40},
        {"xq": [0] * 3 + [1] * 50},
    ],
    ids=["first result held", "alternating", "ready after valid", "weights come in bursts", "xq taken in bursts"],
)
def test_case_35_stalls_change_no_result(stall):
    chosen, p = design(*SMALL)
    arrays = random_case(chosen, tokens=4, outputs=7, inputs=27, seed=35)
    assert_equal_bits(play(p, arrays, stall=stall), golden_outputs(p, arrays))


@pytest.mark.parametrize("again_at", [3, 30, 60, 90])
def test_case_36_reset_in_the_middle_equals_a_cold_start(again_at):
    chosen, p = design(*SMALL)
    arrays = random_case(chosen, tokens=3, outputs=5, inputs=21, seed=36)
    cold = play(p, arrays)
    for reset in (Reset(again_at=again_at), Reset(cycles=1, again_at=again_at, hold_valid=True)):
        again = play(p, arrays, reset=reset)
        assert_equal_bits(again, golden_outputs(p, arrays))
        assert again["busy_cycles"] == cold["busy_cycles"]


def test_case_01_zero_groups_are_exactly_zero_and_touch_no_other_output():
    chosen, p = design(*SMALL)
    arrays = random_case(chosen, tokens=2, outputs=4, inputs=24, seed=1)
    before = play(p, arrays)
    arrays["w_scale"][2] = 0
    arrays["x"][1] = 0
    after = play(p, arrays)
    assert_equal_bits(after, golden_outputs(p, arrays))
    others = [0, 1, 3]
    np.testing.assert_array_equal(after["y"][0, others], before["y"][0, others])
    assert not after["y"][:, 2].any() and not after["y"][1].any() and not after["x_scale"][1].any()
    assert not np.signbit(after["y"][:, 2]).any()


@pytest.mark.parametrize(("coefficient", "overrides"), [(128, ()), (253, ()), (INT8, ("int8_groups=false",))])
def test_reserved_coefficients_raise_error_and_count_zero(coefficient, overrides):
    chosen, p = design(*SMALL, *overrides)
    arrays = random_case(chosen, tokens=2, outputs=4, inputs=24, seed=2)
    arrays["w_coeff"][:] = 17
    without = arrays | {"w_scale": arrays["w_scale"].copy(), "w_coeff": arrays["w_coeff"].copy()}
    without["w_scale"][1, 2] = 0
    arrays["w_coeff"][1, 2] = coefficient
    result = play(p, arrays)
    assert_equal_bits({"y": result["y"]}, {"y": golden_outputs(p, without)["y"]})
    assert result["error"] == 1


def test_illegal_jobs_are_dropped_with_an_error_and_the_next_one_runs():
    chosen, p = design(*SMALL)
    arrays = random_case(chosen, tokens=2, outputs=3, inputs=13, seed=4)
    (job,) = plan(p, tokens=2, inputs=13, outputs=3)
    stimulus = engine.stimulus(p, [job], arrays)
    bad = [0, job.descriptor() & ~0xFFFF, job.descriptor() | 0xFF << 16, job.descriptor() | 0xFFFF << 80]
    stimulus.inputs["cmd"]["data"][:0] = bad
    trace = simulate(lambda: LinearEngine(p), "linear", stimulus, simulator="amaranth")
    result = engine.collect(p, [job], trace, tokens=2, inputs=13, outputs=3)
    assert_equal_bits(result, golden_outputs(p, arrays))
    assert result["error"] == 1


def test_a_product_of_more_groups_than_a_descriptor_counts_is_refused():
    p = LinearParameters(rows=1, cols=1, group=1, activation_words=65536)
    (job,) = plan(p, tokens=1, inputs=65535, outputs=1)
    assert job.descriptor() >> 16 & 0xFFFF == 65535 and job.descriptor() >> 32 & 0xFFFF == 1
    with pytest.raises(ParameterError, match="inputs = 65536: legal is 1 to 65535"):
        plan(p, tokens=1, inputs=65536, outputs=1)


def test_expected_transfers_are_those_of_the_rtl():
    chosen, p = design("rows=4", "cols=3", "group=8", "accumulators=2")
    arrays = random_case(chosen, tokens=5, outputs=7, inputs=19, seed=6)
    jobs = plan(p, tokens=5, inputs=19, outputs=7)
    trace = simulate(lambda: LinearEngine(p), "linear", engine.stimulus(p, jobs, arrays), simulator="amaranth")
    golden = golden_outputs(p, arrays)
    right = engine.expected(p, jobs, golden["y"], golden["x_q"], golden["x_scale"])
    assert {name: trace.transfers[name] for name in right} == right


@pytest.mark.parametrize("operand", [-128, 127])
def test_int8_extremes_times_the_largest_levels(operand):
    _, p = design("rows=4", "cols=2", "group=128")
    inputs = 128
    arrays = {
        "x": np.full((1, inputs), 60000 if operand > 0 else -60000, np.float16),
        "w_codes": np.full((4, inputs), 0xF, np.uint8),
        "w_scale": np.full((4, 1), 0.5, np.float16),
        "w_coeff": np.array([[127], [0], [255], [INT8]], np.uint8),
        "w_int8": np.full((4, inputs), operand, np.int8),
    }
    assert_equal_bits(play(p, arrays), golden_outputs(p, arrays))


# Seeded faults: each makes the comparison above fail.


def test_fault_too_little_distance_between_groups_is_seen(monkeypatch):
    chosen, _ = design("rows=8", "cols=4", "group=64")
    p = chosen.linear
    arrays = random_case(chosen, tokens=1, outputs=4, inputs=133, seed=1)
    assert_equal_bits(play(p, arrays), golden_outputs(p, arrays))

    def short(self, p, original=LinearTiming.__init__):
        original(self, p)
        self.spacing = 1

    monkeypatch.setattr(LinearTiming, "__init__", short)
    with pytest.raises(AssertionError):
        assert_equal_bits(play(p, arrays), golden_outputs(p, arrays))


@pytest.mark.parametrize(
    "port,fault",
    [
        ("s_axis_w_tdata", lambda name: f"{{{name}[3:0], {name}[31:4]}}"),
        ("s_axis_x_tdata", lambda name: f"{{{name}[63:16], ~{name}[15], {name}[14:0]}}"),
        ("s_axis_w_tuser", lambda name: f"{{{name}[47:1], 1'b0}}"),
    ],
    ids=["codes rotated by a nibble", "sign of one activation", "last bit of a scale stuck at 0"],
)
def test_fault_in_the_verilog_is_seen(port, fault):
    chosen, p = design(*SMALL)
    arrays = random_case(chosen, tokens=3, outputs=9, inputs=40, seed=8)
    golden = golden_outputs(p, arrays)

    def edit(verilog):
        uses = re.compile(rf"(?<=\()\s*{port}\s*(?=\))")
        changed, count = uses.subn(fault(port), verilog)
        assert count, f"{port} is not connected by name"
        return changed

    assert_equal_bits(play(p, arrays, simulator="icarus"), golden)
    with pytest.raises(AssertionError):
        assert_equal_bits(play(p, arrays, simulator="icarus", edit_verilog=edit), golden)
