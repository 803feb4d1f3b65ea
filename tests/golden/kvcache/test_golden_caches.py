"""The caches' golden model: known answers, an exact model element by element, splits, heads, refusals."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scalar_caches import Table, spatial, temporal

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.spatial import spatial_cache
from kvant.golden.kvcache.temporal import stage_rows, temporal_cache
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS

KNOWN_ANSWERS = Path(__file__).parents[2] / "known_answers"
DEFAULT = Tables.of(DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS)
ODD = ([127, 255, 0, 60, 5], [500, 9000, 9000, 30000])


def outputs(cache):
    """A cache as `kvant simulate` names its arrays."""
    names = {"coefficient": "coeff"}
    return {names.get(name, name): array for name, array in vars(cache).items() if isinstance(array, torch.Tensor)}


def known(name):
    archive = np.load(KNOWN_ANSWERS / f"{name}.npz")
    inputs = {key[3:]: archive[key] for key in archive.files if key.startswith("in_")}
    results = {key[4:]: archive[key] for key in archive.files if key.startswith("out_")}
    tables = Tables.of(inputs["coeffs"], inputs["thresholds"], str(inputs.get("statistic", "variance")))
    common = {
        "group": int(inputs.get("group", 64)),
        "tables": tables,
        "mean": inputs.get("mean"),
        "sinks": int(inputs.get("sinks", 0)),
    }
    return inputs, common, results


def assert_same_bits(cache, expected):
    for name, array in expected.items():
        found = outputs(cache)[name].numpy()
        assert (found.dtype, found.shape) == (array.dtype, array.shape), name
        assert found.tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.mark.parametrize("name", sorted(path.stem for path in KNOWN_ANSWERS.glob("kcache_*.npz")))
def test_known_answers_along_the_head(name):
    inputs, common, expected = known(name)
    assert_same_bits(spatial_cache(inputs["k"], **common), expected)


@pytest.mark.parametrize(
    "name", sorted(path.stem for pattern in ("vcache_*", "keys_*") for path in KNOWN_ANSWERS.glob(f"{pattern}.npz"))
)
def test_known_answers_along_time(name):
    inputs, common, expected = known(name)
    cache = temporal_cache(
        inputs["v"],
        int(inputs["calls"][0]),
        floor=inputs.get("floor"),
        offset=bool(inputs["offset"]),
        shared_coefficient=bool(inputs["shared_coeff"]),
        **common,
    )
    assert_same_bits(cache, expected)


def hard_rows(rng, tokens, d):
    """Normal rows with a dead channel, a constant one, an outlier, subnormals, ties, NaN and infinities."""
    x = rng.standard_normal((tokens, d)) * np.exp(rng.standard_normal(d))
    x[:, 0] = 0
    x[:, 1 % d] = 3
    x[:, 2 % d] = rng.integers(-3, 4, tokens) * 2.0**-24
    x[:, 3 % d] = rng.integers(-8, 9, tokens) / 2
    x = x.astype(np.float16)
    x[rng.integers(tokens), rng.integers(d)] = 1e4
    x[rng.integers(tokens), rng.integers(d)] = np.nan
    x[rng.integers(tokens), rng.integers(d)] = -np.inf
    return x


def as_floats(rows):
    return np.array(rows, dtype=object).astype(np.float64)


def assert_equal_to_scalars(cache, expected):
    for name, rows in expected.items():
        found, exact = outputs(cache)[name].double().numpy(), as_floats(rows)
        assert found.size == exact.size, name
        assert np.array_equal(found.reshape(exact.shape), exact), name


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("statistic", ["variance", "moment"])
def test_along_the_head_equals_exact_arithmetic(seed, statistic):
    rng = np.random.default_rng(seed)
    d, group, sinks = [(20, 8, 2), (1, 16, 0), (16, 16, 1), (33, 32, 9), (7, 8, 0), (12, 5, 1)][seed]
    k = hard_rows(rng, 6, d)
    mean = None if seed % 2 else (3 * rng.standard_normal(d)).astype(np.float16)
    cache = spatial_cache(k, group=group, tables=Tables.of(*ODD, statistic), mean=mean, sinks=sinks)
    assert_equal_to_scalars(cache, spatial(k, group, Table(*ODD, statistic), mean, sinks))


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_along_time_equals_exact_arithmetic(seed, shared, offset):
    rng = np.random.default_rng(seed)
    tokens, d, group, prefill, sinks = [(21, 6, 8, 3, 2), (9, 5, 4, 9, 0), (17, 3, 8, 1, 9), (7, 4, 8, 2, 0)][seed]
    v = hard_rows(rng, tokens, d)
    mean = (3 * rng.standard_normal(d)).astype(np.float16) if seed % 2 else None
    floor = rng.random(d).astype(np.float16) if seed in (0, 3) else None
    statistic = ["variance", "moment"][seed % 2]
    options = {"mean": mean, "floor": floor, "sinks": sinks, "offset": offset}
    cache = temporal_cache(
        v, prefill, group=group, tables=Tables.of(*ODD, statistic), shared_coefficient=shared, **options
    )
    expected = temporal(v, prefill, group, Table(*ODD, statistic), shared=shared, **options)
    assert_equal_to_scalars(cache, expected)


@pytest.mark.parametrize("d", [64, 80, 96, 100, 128, 160, 256])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_case_10_any_head_size_stays_near_the_rows(d, group):
    rng = np.random.default_rng(d + group)
    rows = rng.standard_normal((2 * group + 5, d)).astype(np.float16)
    error = {}
    for name, cache in (
        ("head", spatial_cache(rows, group=group, tables=DEFAULT)),
        ("time", temporal_cache(rows, len(rows), group=group, tables=DEFAULT)),
    ):
        difference = cache.dequantize().numpy() - rows.astype(np.float32)
        error[name] = float((difference**2).mean())
    assert max(error.values()) < 0.02, error


def test_case_11_the_split_of_the_tokens_changes_nothing():
    rng = np.random.default_rng(11)
    v = rng.standard_normal((200, 16)).astype(np.float16)
    floor = np.abs(v).max(0)
    caches = [temporal_cache(v, n, group=32, tables=DEFAULT, floor=floor) for n in (200, 1, 31)]
    for cache in caches[1:]:
        assert_same_bits(cache, {name: array.numpy() for name, array in outputs(caches[0]).items()})
    assert caches[0].staged.shape == (200 % 32, 16)


def test_case_14_heads_of_different_sequences_share_nothing():
    rng = np.random.default_rng(14)
    v = rng.standard_normal((3, 70, 8)).astype(np.float16) * np.array([1, 100, 0.01], np.float16)[:, None, None]
    tables = Tables.of([DEFAULT_COEFFICIENTS, DEFAULT_COEFFICIENTS[::-1], [7] * 16], [DEFAULT_THRESHOLDS] * 3)
    together = temporal_cache(v, 5, group=32, tables=tables, sinks=3, shared_coefficient=True)
    keys = spatial_cache(v, group=4, tables=tables, sinks=3)
    for head in range(3):
        own = Tables.of(tables.coefficients[head], DEFAULT_THRESHOLDS)
        for whole, alone in (
            (together, temporal_cache(v[head], 5, group=32, tables=own, sinks=3, shared_coefficient=True)),
            (keys, spatial_cache(v[head], group=4, tables=own, sinks=3)),
        ):
            assert_same_bits(alone, {name: array[head].numpy() for name, array in outputs(whole).items()})


def test_a_dead_channel_is_exactly_zero_and_takes_the_last_entry():
    v = np.random.default_rng(1).standard_normal((32, 4)).astype(np.float16)
    v[:, 2] = 0
    cache = temporal_cache(v, 32, group=32, tables=DEFAULT)
    assert cache.coefficient[0, 2] == DEFAULT_COEFFICIENTS[-1]
    assert not cache.dequantize()[:, 2].any() and not cache.codes[:, 2].any()


def test_a_value_beyond_the_staging_scale_counts_as_saturated():
    v = np.array([[1.0], [1.01], [-2.0], [0.5]], np.float16)
    rows = stage_rows(v, 1, group=8)
    assert rows.q[:, 0].tolist() == [127, 127, -127, 64]
    assert int(rows.saturated) == 2
    zero = stage_rows(np.array([[0.0], [1.0]], np.float16), 1, group=8)
    assert (zero.q[:, 0].tolist(), int(zero.saturated)) == ([0, 0], 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": np.zeros((4, 2), np.float32)}, "v: dtype float32"),
        ({"prefill": 0}, "prefill = 0: legal is an integer from 1 to the 4 rows"),
        ({"prefill": 5}, "prefill = 5"),
        ({"mean": np.array([0, np.nan], np.float16)}, r"mean\[1\] = nan: legal is a finite value"),
        ({"mean": np.zeros(3, np.float16)}, r"mean: shape \(3,\); legal is \(2,\)"),
        ({"floor": np.array([0, -1], np.float16)}, r"floor\[1\] = -1.0: legal is a finite value of at least 0"),
        ({"floor": np.array([np.inf, 1], np.float16)}, r"floor\[0\] = inf"),
        ({"sinks": -1}, "sinks = -1: legal is an integer from 0"),
        ({"group": 0}, "group = 0"),
    ],
)
def test_illegal_arguments_are_refused(change, message):
    arguments = {"v": np.zeros((4, 2), np.float16), "prefill": 2, "group": 4, "tables": DEFAULT, **change}
    with pytest.raises(TensorError, match=message):
        temporal_cache(arguments.pop("v"), arguments.pop("prefill"), **arguments)


@pytest.mark.parametrize(
    ("coefficients", "thresholds", "statistic", "message"),
    [
        ([1, 2], [], "variance", r"thresholds: shape \(0,\); legal is \(1,\)"),
        ([1, 2, 3], [5, 4], "variance", r"thresholds\[1\] = 4: legal are non-descending"),
        ([1, 2], [65536], "variance", r"thresholds\[0\] = 65536: legal is 0 to 65535"),
        ([1, 128], [5], "variance", r"coefficients\[1\] = 128"),
        ([1, 2], [5], "median", "statistic = 'median'"),
    ],
)
def test_illegal_tables_are_refused(coefficients, thresholds, statistic, message):
    with pytest.raises(TensorError, match=message):
        Tables.of(coefficients, thresholds, statistic)
