"""Calibration of caches: fitted tables, the statistic they are fitted to, and what their choice costs."""

import itertools

import pytest
import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.calibration import (
    ALL_COEFFICIENTS,
    KINDS,
    USUAL_COEFFICIENTS,
    CacheCalibrator,
    KeysAndValues,
    bin_edges,
    candidate_errors,
    choice_error,
    fit_table,
    groups_of_head,
    groups_of_time,
    normalised,
    shared_statistic,
)
from kvant.golden.kvcache.choice import Tables, choose, choose_shared, group_statistics, passes
from kvant.golden.kvcache.spatial import spatial_cache
from kvant.golden.kvcache.temporal import temporal_cache
from kvant.golden.models import slice as model_slice


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observed(keys, values) -> KeysAndValues:
    observer = KeysAndValues()
    observer("model.layers.0.keys", torch.as_tensor(keys)[None].float())
    observer("model.layers.0.values", torch.as_tensor(values)[None].float())
    return observer


def random_rows(tokens: int, seed: int, heads: int = 2, d: int = 16) -> torch.Tensor:
    spread = torch.rand(heads, 1, d, generator=seeded(99)) + 0.2
    return (torch.randn(heads, tokens, d, generator=seeded(seed)) * spread).half()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fitted_table_is_the_best_of_all_tables(size):
    errors = torch.rand(6, 4, generator=seeded(size), dtype=torch.float64)
    edges = torch.tensor([0, 10, 20, 40, 41, 60])
    candidates = (3, 17, 120, 255)
    coefficients, thresholds = fit_table(edges, errors, candidates, size)
    index = torch.bucketize(edges, torch.tensor(thresholds), right=True)
    a = [candidates.index(coefficients[i]) for i in index.tolist()]
    found = float(errors[torch.arange(6), a].sum())
    best = min(
        sum(float(errors[first:last].sum(0).min()) for first, last in itertools.pairwise((0, *cuts, 6)))
        for count in range(size)
        for cuts in itertools.combinations(range(1, 6), count)
    )
    assert found == pytest.approx(best, rel=1e-12)
    assert len(coefficients) == size and len(thresholds) == size - 1 and thresholds == sorted(thresholds)


def test_table_that_needs_few_entries_repeats_its_last_one():
    errors = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    coefficients, thresholds = fit_table(torch.tensor([0, 5, 9]), errors, (7, 255), 4)
    assert coefficients == [7, 255, 255, 255] and thresholds == [9, 65535, 65535]


@pytest.mark.parametrize("statistic", ["variance", "moment"])
def test_normalised_statistic_decides_as_the_thresholds_do(statistic):
    q = torch.randint(-127, 128, (500, 16), generator=seeded(), dtype=torch.int8)
    q[::7] //= 40
    statistics = group_statistics(q)
    value = normalised(statistics, statistic)
    thresholds = sorted(
        {0, 1, 65535, *value[:12].clamp(max=65535).tolist(), *(value[:12] + 1).clamp(max=65535).tolist()}
    )
    thresholds = (thresholds * 15)[:15]
    tables = Tables.of([7] * 16, sorted(thresholds), statistic)
    alive = statistics.peak > 0
    expected = passes(statistics, tables)[alive]
    assert torch.equal(value[alive, None] >= torch.tensor(sorted(thresholds)), expected)


def test_shared_statistic_decides_as_the_vote_does():
    q = torch.randint(-127, 128, (40, 9, 16), generator=seeded(1), dtype=torch.int8)
    q[torch.rand(40, 9, generator=seeded(2)) < 0.4] = 0
    q[3] = 0
    statistics = group_statistics(q)
    thresholds = torch.linspace(15000, 32000, 15).long()
    tables = Tables.of(list(range(16)), thresholds.tolist())
    value = shared_statistic(normalised(statistics, "variance"), statistics.peak > 0)
    assert value[3] == -1
    index = (value[:, None] >= thresholds).sum(-1)
    index[value < 0] = 15
    assert torch.equal(choose_shared(statistics, tables)[..., 0].long(), index)


def test_bins_start_at_zero_and_hold_about_equal_numbers():
    value = torch.randint(0, 60000, (5000,), generator=seeded())
    edges = bin_edges(value, 20)
    assert edges[0] == 0 and edges.max() <= 65535 and bool((edges.diff() > 0).all())
    counts = torch.bincount(torch.bucketize(value.clamp(max=65535), edges, right=True) - 1)
    assert counts.min() > 240 and counts.max() < 260


@pytest.mark.parametrize("kind", list(KINDS))
def test_candidate_errors_are_those_of_the_cache(kind):
    options = KINDS[kind]
    rows, mean, floor = random_rows(40, 3), torch.full((2, 16), 0.25).half(), torch.full((2, 16), 1.5).half()
    mean = mean if options.rows == "keys" else None
    common = {"group": 8, "mean": mean, "sinks": 3}
    for a in (0, 20, 127, 255):
        tables = Tables.of([a], [])
        if options.along_time:
            more = {"offset": options.offset, "shared_coefficient": options.shared_coefficient, "floor": floor}
            cache = temporal_cache(rows, 1, tables=tables, **common, **more)
        else:
            cache = spatial_cache(rows, tables=tables, **common)
        exact = rows.double() - (0.0 if mean is None else 0.25)
        error = (cache.dequantize().double() - exact.half().double())[:, 3:].square().sum()
        _, errors = candidate_errors(rows, options, floor=floor, candidates=(a,), **common)
        assert float(errors.sum()) == pytest.approx(float(error), rel=1e-4)


@pytest.mark.parametrize("statistic", ["variance", "moment"])
@pytest.mark.parametrize("seen", [slice(128), slice(128, None)], ids=["first half", "second half"])
@pytest.mark.parametrize("layer", [5, 20])
def test_choice_costs_little_more_than_the_best_coefficients_on_unseen_tokens(layer, seen, statistic):
    piece = model_slice.load().attention[layer]
    keys, values = torch.from_numpy(piece.keys.copy()), torch.from_numpy(piece.values.copy())
    calibrator = CacheCalibrator(group=64, sinks=4, statistic=statistic)
    calibrator.add([observed(keys[:, seen], values[:, seen])])
    found = calibrator.result()
    unseen = slice(128, None) if seen.start is None else slice(128)
    for name, kind in KINDS.items():
        mean, floor = (found.key_mean[0], found.key_floor) if kind.rows == "keys" else (None, found.value_floor)
        rows = (keys if kind.rows == "keys" else values)[:, unseen]
        statistics, errors = candidate_errors(rows, kind, group=64, mean=mean, floor=floor[0], sinks=4)
        chosen, least = choice_error(statistics, errors, kind, found.layers(name)[0], ALL_COEFFICIENTS)
        assert least < chosen <= 1.2 * least, name


def test_means_and_floors_leave_the_sinks_out():
    keys, values = random_rows(24, 1), random_rows(24, 2)
    keys[:, :4], values[:, :4] = 100, -100
    short = random_rows(9, 5)
    calibrator = CacheCalibrator(group=8, sinks=4)
    calibrator.add([observed(keys, values), observed(short, short)])
    found = calibrator.result()
    every = torch.cat((keys[:, 4:], short[:, 4:]), 1).double()
    assert torch.allclose(found.key_mean[0].double(), every.mean(1), atol=1e-3)
    assert torch.equal(found.value_floor[0], torch.cat((values[:, 4:], short[:, 4:]), 1).abs().amax(1))
    centred = (every.half().double() - found.key_mean[0].double()[:, None]).abs().amax(1)
    assert torch.allclose(found.key_floor[0].double(), centred, atol=2e-3)
    assert list(found.tables) == list(KINDS) and found.group == 8 and found.sinks == 4
    assert found.tables["key_time"].coefficients.shape == (1, 16)


def test_usual_coefficients_may_be_asked_for_alone():
    calibrator = CacheCalibrator(group=8, candidates=USUAL_COEFFICIENTS, kinds=["value_time"])
    calibrator.add([observed(random_rows(64, 1), random_rows(64, 2))])
    assert set(calibrator.result().tables["value_time"].coefficients.flatten().tolist()) <= set(USUAL_COEFFICIENTS)


def test_dead_rows_get_a_table_all_the_same():
    nothing = torch.zeros(2, 16, 16).half()
    calibrator = CacheCalibrator(group=8)
    calibrator.add([observed(nothing, nothing)])
    found = calibrator.result()
    assert int(found.value_floor.abs().max()) == 0 and len(found.layers("value_time")) == 1


def test_text_too_short_for_a_window_is_refused():
    calibrator = CacheCalibrator(group=64)
    with pytest.raises(TensorError, match=r"calibration windows of 40 tokens: legal is at least group = 64"):
        calibrator.add([observed(random_rows(40, 1), random_rows(40, 2))])
    with pytest.raises(TensorError, match="statistic = 'entropy': legal is one of 'variance', 'moment'"):
        CacheCalibrator(group=64, statistic="entropy")


def test_kind_that_was_not_calibrated_is_refused():
    calibrator = CacheCalibrator(group=8, kinds=["value_time"])
    calibrator.add([observed(random_rows(16, 1), random_rows(16, 2))])
    with pytest.raises(TensorError, match="table 'key_time': not calibrated; there are value_time"):
        calibrator.result().layers("key_time")


def test_groups_hold_what_the_cache_quantises():
    rows = random_rows(20, 7)
    time = groups_of_time(rows, group=8, mean=None, floor=None, sinks=2, offset=True)
    assert time.q.shape == (2, 2, 16, 8) and int(time.statistics.peak.max()) == int(time.q.abs().max())
    head = groups_of_head(rows, group=8, mean=None, sinks=2)
    assert head.q.shape == (2, 18, 2, 8)
    assert torch.equal(choose(head.statistics, Tables.of([9], [])), torch.full((2, 18, 2), 9, dtype=torch.uint8))
