"""The block `vcache` with a user's rows: known answers on the simulators, vectors, refusals."""

from pathlib import Path

import numpy as np
import pytest

from kvant import config
from kvant.errors import ComparisonError, InputError
from kvant.hw.kvcache.requantizer import Requantizer
from kvant.hw.kvcache.staging import StagingLane
from kvant.sim.kvcache import requantizer
from kvant.sim.simulate import simulate
from kvant.vcache import BLOCK, bench_arrays, golden_outputs, random_values

# A component that only tells its layout or timing is never elaborated.
pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

FOLDER = Path(__file__).parents[2] / "known_answers"
KNOWN_ANSWERS = [*sorted(FOLDER.glob("vcache_*.npz")), FOLDER / "keys_along_time.npz"]

SMALL = ("group=8", "lanes=4")


def read(path):
    with np.load(path) as archive:
        given = {name[3:]: archive[name] for name in archive.files if name.startswith("in_")}
        return given, {name[4:]: archive[name] for name in archive.files if name.startswith("out_")}


def assert_equal(result, right):
    for name, values in right.items():
        assert result[name].dtype == values.dtype, name
        assert result[name].tobytes() == values.tobytes(), name
        assert result[name].shape == values.shape, name


@pytest.mark.parametrize("stall", [0.0, 0.3])
@pytest.mark.parametrize("path", KNOWN_ANSWERS, ids=lambda path: path.stem)
def test_known_answers_on_verilator(path, stall):
    arrays, right = read(path)
    result = BLOCK.simulate(arrays, stall=stall, seed=7)
    assert_equal(result, right)
    assert result["error"] == 0
    if not stall:
        assert result["stall_cycles"] == 0


def test_known_answer_on_icarus():
    arrays, right = read(FOLDER / "vcache_moment_group32.npz")
    result = BLOCK.simulate(arrays, simulator="icarus")
    assert_equal(result, right)
    assert result["stall_cycles"] == 0


def small_case(*overrides, tokens=40, prefill=7, seed=0, head_dim=10):
    """Arrays as a user gives them, and the overrides that fit."""
    chosen = config.load(None, (*SMALL, f"head_dim={head_dim}", *overrides))
    v = random_values(1, tokens, head_dim, seed=seed)[0]
    return bench_arrays(chosen, v, prefill, seed=seed), (*SMALL, *overrides)


def test_simulators_agree_on_tensors_cycles_and_flags():
    arrays, overrides = small_case("sinks=3", "offset=true")
    arrays["v"][9, 2], arrays["v"][9, 3] = np.nan, -np.inf
    results = {
        simulator: BLOCK.simulate(arrays, overrides=overrides, simulator=simulator, stall=0.2, seed=5)
        for simulator in ("amaranth", "icarus", "verilator")
    }
    for result in results.values():
        assert_equal(result, results["amaranth"])
        assert result["nonfinite"] == 1 and result["error"] == 0
        assert result["lanes"] == 4 and result["rows"] == 1 and result["cols"] == 4 and result["group"] == 8


@pytest.mark.parametrize(
    "overrides",
    [("heads=3", "sinks=5", "head_dim=10"), ("centred=true", "offset=true", "shared_coeff=true", "head_dim=24")],
    ids=["heads and sinks", "keys along time"],
)
def test_vectors_of_a_generated_bench_are_what_the_hardware_does(overrides):
    chosen = config.load(None, (*SMALL, *overrides))
    vectors = BLOCK.vectors(chosen, 3)
    trace = simulate(lambda: BLOCK.build(chosen), "vcache", vectors.stimulus, simulator="amaranth", stall=0.2, seed=2)
    for stream, fields in vectors.transfers.items():
        for name, values in fields.items():
            assert trace.transfers[stream][name] == values, f"{stream}.{name}"
    assert {name: trace.status[name] for name in vectors.status} == vectors.status


def test_manifest_describes_pages_streams_and_timing():
    facts = BLOCK.facts(config.load(None, SMALL))
    assert set(facts["streams"]) == {"v", "cfg", "sink", "peek", "staged", "codes", "meta"}
    assert facts["memory"]["page"]["groups"] == 64
    assert facts["throughput"]["stall cycles"] == 0


def test_a_fault_in_a_staging_lane_is_caught(monkeypatch):
    arrays, overrides = small_case()
    original = StagingLane.elaborate

    def gives_zeros(self, platform):
        m = original(self, platform)
        m.d.comb += self.q.eq(0)
        return m

    monkeypatch.setattr(StagingLane, "elaborate", gives_zeros)
    with pytest.raises(ComparisonError, match=r"codes|scale|staged"):
        BLOCK.simulate(arrays, overrides=overrides, simulator="amaranth")


def refused(arrays, *words, overrides=SMALL):
    with pytest.raises(InputError) as error:
        BLOCK.simulate(arrays, overrides=overrides)
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_illegal_arrays_are_refused_in_one_line():
    arrays, _ = small_case()
    tokens = len(arrays["v"])
    refused(arrays | {"calls": np.array([7, 0, 33], np.int32)}, "calls[1] = 0")
    refused(arrays | {"calls": np.array([7, 34], np.int32)}, "sum 41", f"T = {tokens}")
    refused(arrays | {"calls": np.array([], np.int32)}, "calls")
    refused(arrays | {"calls": np.array([tokens])}, "int64", "int32")
    refused(arrays | {"offset": np.array(2)}, "array offset = 2", "0 or 1")
    refused(arrays | {"floor": np.full(10, -1, np.float16)}, "floor[0] = -1.0")
    refused(arrays | {"floor": np.full(10, np.inf, np.float16)}, "floor[0] = inf")
    refused(arrays | {"floor": np.zeros(9, np.float16)}, "floor", "(9,)")
    refused(arrays | {"mean": np.full(10, np.nan, np.float16)}, "mean[0] = nan")
    refused(arrays | {"thresholds": arrays["thresholds"][::-1].copy()}, "thresholds[1]")
    refused({name: arrays[name] for name in arrays if name != "thresholds"}, "coeffs", "thresholds")
    refused(arrays, "lanes = 6", overrides=("group=8", "lanes=6"))
    refused(arrays, "group = 12", overrides=("group=12", "lanes=4"))


def test_capacity_without_eviction_bounds_the_tokens():
    arrays, overrides = small_case(tokens=24, prefill=5)
    overrides = (*overrides, "capacity=16")
    refused(arrays, "24 tokens", "1 to 23", "capacity = 16", overrides=overrides)
    arrays = arrays | {"v": arrays["v"][:23], "calls": np.array([5, 18], np.int32)}
    assert len(BLOCK.simulate(arrays, overrides=overrides, simulator="amaranth")["codes"]) == 16


def test_arrays_replace_the_configuration():
    arrays, overrides = small_case(tokens=20)
    given = arrays | {"offset": np.array(1), "shared_coeff": np.array(1), "sinks": np.array(2), "group": np.array(16)}
    given |= {"statistic": np.array("moment"), "mean": np.zeros(10, np.float16)}
    result = BLOCK.simulate(given, overrides=overrides, simulator="amaranth")
    assert result["coeff"].shape == (1, 1) and result["sink"].shape == (2, 10) and result["group"] == 16


def test_one_token_prefill_and_fewer_tokens_than_a_window():
    arrays, overrides = small_case(tokens=3, prefill=1)
    result = BLOCK.simulate(arrays, overrides=overrides, simulator="amaranth")
    assert result["codes"].shape == (0, 10) and result["staged"].shape == (3, 10)
    assert result["coeff"].shape == (0, 10) and result["sink"].shape == (0, 10)


def test_readers_agree_on_the_parameters_of_the_component():
    chosen = config.load(None, (*SMALL, "heads=2"))
    assert BLOCK.build(chosen).p == chosen.cache
    assert isinstance(BLOCK.build(chosen), Requantizer)
    assert set(BLOCK.parameters(chosen)) == set(BLOCK.own_fields)
    assert requantizer.STATUS[0] == "nonfinite"
    assert golden_outputs(chosen.cache, small_case(head_dim=64)[0])["codes"].shape == (40, 64)
