"""The block `kcache` with a user's keys: known answers, adversarial keys, head sizes, memory, refusals."""

from pathlib import Path

import numpy as np
import pytest

from kvant import config
from kvant.errors import ComparisonError, InputError
from kvant.golden.errors import TensorError
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.spatial import SpatialCache
from kvant.kcache import BLOCK, random_keys
from kvant.sim.kvcache import spatial
from kvant.sim.simulate import simulate

# A component that only tells its latency is never elaborated.
pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20261130
FOLDER = Path(__file__).parents[2] / "known_answers"
ANSWERS = ["kcache_centred_sinks", "kcache_moment_group32", "kcache_odd", "kcache_real"]
OUTPUTS = {"codes": "u1", "scale": "f2", "coeff": "u1", "sink": "i1", "sink_scale": "f2"}
NUMBERS = {"cycles", "busy_cycles", "group", "rows", "cols", "lanes", "nonfinite", "error"}


def known(name):
    with np.load(FOLDER / f"{name}.npz") as archive:
        arrays = {key: archive[key] for key in archive.files}
    given = {key.removeprefix("in_"): value for key, value in arrays.items() if key.startswith("in_")}
    return given, {key.removeprefix("out_"): value for key, value in arrays.items() if key.startswith("out_")}


@pytest.mark.parametrize(
    ("name", "simulator", "stall"),
    [(name, "verilator", stall) for name in ANSWERS for stall in (0.0, 0.3)] + [("kcache_odd", "icarus", 0.3)],
)
def test_known_answers(name, simulator, stall):
    given, answers = known(name)
    result = BLOCK.simulate(given, simulator=simulator, stall=stall, seed=7)
    assert set(result) == {*OUTPUTS, *NUMBERS}
    for output, kind in OUTPUTS.items():
        assert result[output].dtype == np.dtype(kind)
        bits = f"u{result[output].itemsize}"
        np.testing.assert_array_equal(result[output].view(bits), answers[output].view(bits), err_msg=output)
    assert all(result[number].dtype == np.int64 and result[number].shape == () for number in NUMBERS)
    assert int(result["rows"]) == 1 and int(result["cols"]) == int(result["lanes"]) == 8
    tokens, d = given["k"].shape
    assert int(result["busy_cycles"]) == tokens * -(-d // 8) and int(result["error"]) == 0
    assert int(result["nonfinite"]) == (not np.isfinite(given["k"]).all())


def adversarial(d):
    """Rows of every kind that breaks quantisers; f16 [rows, d]."""
    rng = np.random.default_rng(SEED)
    rows = [
        np.zeros(d), np.full(d, 3.5), np.full(d, -1.0), np.full(d, 6e-8), np.full(d, 65504.0),
        np.where(np.arange(d) == d // 2, 1e4, rng.standard_normal(d) / 100),
        np.where(np.arange(d) == d - 1, -np.inf, rng.standard_normal(d)),
        np.where(np.arange(d) % 5 == 0, np.nan, rng.standard_normal(d)),
        np.full(d, np.nan), np.where(np.arange(d) % 2, np.inf, -np.inf),
        rng.standard_normal(d) * 2.0**-22, rng.integers(-63, 64, d) * 2.0**-24, rng.integers(-2, 3, d) * 2.0**-24,
        np.clip(np.arange(d) - d // 2, -127, 127) / 2,
        np.where(np.arange(d) % 64 == 0, 127, np.arange(d) % 253 - 126.5),
        np.sign(rng.standard_normal(d)), rng.standard_cauchy(d).clip(-6e4, 6e4), -np.abs(rng.standard_normal(d)),
        np.where(np.arange(d) < d // 2, 0, rng.standard_normal(d)),
    ]  # fmt: skip
    return np.stack(rows).astype(np.float16)


@pytest.mark.parametrize("statistic", ["variance", "moment"])
@pytest.mark.parametrize("centred", [False, True])
def test_adversarial_keys(statistic, centred):
    k = adversarial(80)
    k[:, 7] = 0  # a dead channel
    arrays = {"k": k, "statistic": np.array(statistic), "sinks": np.array(3)}
    if centred:
        mean = np.random.default_rng(SEED).standard_normal(80) * 100
        mean[:3] = [65504, -65504, 6e-8]
        arrays["mean"] = mean.astype(np.float16)
    result = BLOCK.simulate(arrays, overrides=["lanes=16"], simulator="amaranth")
    assert int(result["nonfinite"]) == 1 and int(result["error"]) == 0
    assert np.isfinite(result["scale"]).all()
    if not centred:
        assert not result["codes"][[0, 8]].any() and (result["scale"][8] == 0).all()


def test_a_row_of_one_transfer_right_behind_its_tables_sees_them():
    rng = np.random.default_rng(SEED)
    for seed_rows in range(3):
        arrays = {
            "k": rng.standard_normal((20, 8)).astype(np.float16),
            "mean": rng.standard_normal(8).astype(np.float16),
            "sinks": np.array(seed_rows),
        }
        result = BLOCK.simulate(arrays, overrides=["lanes=8", "group=8"], simulator="amaranth")
        assert result["codes"].shape == (20, 8)


HEAD_SIZES = (64, 80, 96, 100, 128, 160, 256)
SHAPES = ((32, 32), (64, 8), (128, 16))


def check_shape(d, group, lanes):
    k = random_keys(1, 5, d, seed=SEED)[0]
    overrides = [f"group={group}", f"lanes={lanes}"]
    result = BLOCK.simulate({"k": k, "sinks": np.array(1)}, overrides=overrides, simulator="amaranth")
    assert result["codes"].shape == (5, d) and result["scale"].shape == (5, -(-d // group))


@pytest.mark.parametrize(("d", "shape"), [(d, SHAPES[index % 3]) for index, d in enumerate(HEAD_SIZES)])
def test_case_10_head_sizes_that_are_no_multiple_of_the_group(d, shape):
    check_shape(d, *shape)


@pytest.mark.long
@pytest.mark.parametrize("d", HEAD_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_case_10_every_head_size_with_every_group(d, shape):
    check_shape(d, *shape)


@pytest.mark.parametrize(("d", "lanes"), [(1, 1), (3, 8), (8, 8), (63, 2)])
@pytest.mark.parametrize("sinks", [0, 2])
def test_one_token_and_tiny_heads(d, lanes, sinks):
    arrays = {"k": random_keys(1, 1, d, seed=SEED)[0], "sinks": np.array(sinks)}
    result = BLOCK.simulate(arrays, overrides=[f"lanes={lanes}"], simulator="amaranth")
    assert len(result["sink"]) == min(sinks, 1)


def test_tables_of_one_and_of_few_entries_choose_as_they_are():
    k = random_keys(1, 12, 64, seed=SEED)[0]
    one = {"coeffs": np.array([40], np.uint8), "thresholds": np.zeros(0, np.uint16)}
    assert set(BLOCK.simulate({"k": k, **one}, simulator="amaranth")["coeff"].ravel()) == {40}
    few = {"coeffs": np.array([120, 5, 255], np.uint8), "thresholds": np.array([3000, 9000], np.uint16)}
    assert set(BLOCK.simulate({"k": k, **few}, simulator="amaranth")["coeff"].ravel()) <= {120, 5, 255}


def test_a_cache_filled_to_its_capacity_is_read_back_whole():
    k = random_keys(1, 96, 16, seed=SEED)[0]
    BLOCK.simulate({"k": k}, overrides=["capacity=96", "group=32", "lanes=16"], simulator="amaranth")


def test_a_code_that_differs_fails_the_comparison(monkeypatch):
    collect = spatial.collect

    def wrong(*arguments):
        result = collect(*arguments)
        result["codes"][2, 5] ^= 1
        return result

    monkeypatch.setattr(spatial, "collect", wrong)
    arrays = {"k": random_keys(1, 4, 16, seed=SEED)[0]}
    with pytest.raises(ComparisonError, match=r"^codes\[2, 5\] = "):
        BLOCK.simulate(arrays, overrides=["lanes=16"], simulator="amaranth")
    BLOCK.simulate(arrays, overrides=["lanes=16"], simulator="amaranth", check=False)


K = np.zeros((3, 64), np.float16)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "array k: missing; legal is float16 [T, d]"),
        ({"k": K.astype(np.float32)}, "array k: dtype float32; legal is float16 [T, d]"),
        ({"k": K[0]}, "array k: shape (64,); legal is float16 [T, d]"),
        ({"k": K[:0]}, "array k: shape (0, 64); legal is float16 [T, d], no length of zero"),
        ({"k": K, "v": K}, "array v: unknown; legal are k, coeffs, thresholds, mean, group, sinks, statistic"),
        ({"k": K, "coeffs": np.array([5], np.uint8)}, "array coeffs: given without thresholds; legal are both or none"),
        (
            {"k": K, "thresholds": np.array([5], np.uint16)},
            "array thresholds: given without coeffs; legal are both or none",
        ),
        (
            {"k": K, "coeffs": np.array([5, 9], np.uint8), "thresholds": np.array([5, 6], np.uint16)},
            "array thresholds: shape (2,); legal is uint16 [C-1] with C-1 = 1",
        ),
        (
            {"k": K, "coeffs": np.array([5, 9, 0], np.uint8), "thresholds": np.array([6, 5], np.uint16)},
            "thresholds[1] = 5: legal is 6 (the one before it) to 65535",
        ),
        (
            {"k": K, "coeffs": np.array([5, 254], np.uint8), "thresholds": np.array([6], np.uint16)},
            "coeffs[1] = 254: legal is 0 to 127 (max_coefficient), or 255",
        ),
        (
            {"k": K, "coeffs": np.arange(17, dtype=np.uint8), "thresholds": np.arange(16, dtype=np.uint16)},
            "array coeffs: 17 coefficients; legal is 1 to 16",
        ),
        ({"k": K, "mean": np.full(64, np.nan, np.float16)}, "mean[0] = nan: legal is a finite value"),
        ({"k": K, "mean": np.full(64, np.inf, np.float16)}, "mean[0] = inf: legal is a finite value"),
        ({"k": K, "mean": np.zeros(63, np.float16)}, "array mean: shape (63,); legal is float16 [d] with d = 64"),
        ({"k": K, "sinks": np.array(-1)}, "array: sinks = -1: legal is an integer from 0 to 256"),
        ({"k": K, "sinks": np.zeros(1, int)}, "array sinks: shape (1,); legal is a 0-d integer"),
        ({"k": K, "statistic": np.array("mean")}, "array: statistic = 'mean': legal is one of 'variance', 'moment'"),
        ({"k": K, "statistic": np.array(1)}, "array statistic: dtype int64; legal is a 0-d str"),
        ({"k": K, "group": np.array(48)}, "group = 48: legal in a cache are the powers of two from 8 on"),
        ({"k": np.zeros((4097, 64), np.float16)}, "array k: 4097 tokens; legal is 1 to capacity = 4096"),
    ],
)
def test_illegal_arrays_are_refused_in_one_line(arrays, words):
    with pytest.raises((InputError, TensorError)) as error:
        BLOCK.simulate(arrays, simulator="amaranth")
    assert str(error.value) == words


def test_illegal_lanes_are_refused():
    with pytest.raises(InputError, match="lanes = 6: legal in a cache are the powers of two up to group = 64"):
        BLOCK.simulate({"k": K}, overrides=["lanes=6"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["heads=3", "sinks=2", "lanes=8", "head_dim=20", "group=16"],
        ["lanes=2", "head_dim=12", "group=8", "port_bits=32", "capacity=8", "evict=true"],
        ["lanes=16", "head_dim=40", "group=32", "port_bits=512", "centred=true"],
        ["lanes=4", "group=64", "coefficients=[1, 2, 3]"],
    ],
)
def test_bench_vectors_name_every_transfer(overrides):
    """What a generated bench expects, word by word, is what the RTL gives."""
    chosen = config.load(None, overrides)
    vectors = BLOCK.vectors(chosen, seed=3)
    trace = simulate(lambda: BLOCK.build(chosen), "kcache", vectors.stimulus, simulator="amaranth", drain_cycles=40)
    for stream, fields in vectors.transfers.items():
        for name, values in fields.items():
            assert trace.transfers[stream][name] == values, (stream, name)
    assert trace.status == vectors.status | {"busy_cycles": trace.status["busy_cycles"]}


def test_the_manifest_states_latency_and_the_layout_of_a_page():
    facts = BLOCK.facts(config.load())
    cache = SpatialCache(CacheParameters())
    assert list(facts["latency"].values()) == [cache.latency + 2]
    assert facts["memory"]["page"]["page_bytes"] == cache.layout.page_bytes == 64 // 16 * 560 + 16
