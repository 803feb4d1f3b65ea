"""Maps ahead of caches: what they keep, what they weigh, and that the one for scalar quantisers is the best."""

import math

import pytest
import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import CachedAttention, Exact, MantTime
from kvant.golden.kvcache.calibration import Activations, CacheCalibrator
from kvant.golden.kvcache.formats import CACHE_FORMATS, CacheSettings
from kvant.golden.kvcache.maps import (
    MAP_BITS,
    MappedAttention,
    apply,
    balanced_map,
    covariance,
    equalising_rotation,
    inverse,
    output_gram,
    score_metric,
)

D, HEADS, QUERIES, TOKENS = 8, 2, 4, 40


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(seed, d=D):
    """A covariance f64 [d, d] whose variances differ a thousandfold."""
    x = normal(8 * d, d, seed=seed).double() * torch.logspace(-1.5, 1.5, d, dtype=torch.float64)
    return covariance(x @ torch.linalg.qr(normal(d, d, seed=seed + 1).double())[0])


def cost(a, metric, spread):
    back = torch.linalg.inv(a)
    return float(((back.mT @ metric @ back).diagonal() * (a @ spread @ a.mT).diagonal()).sum())


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8, 12, 64, 80, 96])
def test_a_rotation_makes_any_sizes_equal(d):
    size = torch.rand(d, generator=torch.Generator().manual_seed(d), dtype=torch.float64) ** 4 + 1e-4
    rotation = equalising_rotation(size)
    assert torch.allclose(rotation @ rotation.mT, torch.eye(d, dtype=torch.float64), atol=1e-12)
    diagonal = (rotation * size @ rotation.mT).diagonal()
    assert torch.allclose(diagonal, size.mean().expand(d), rtol=1e-9)


@pytest.mark.parametrize("d", [1, 8, 12])
def test_no_other_map_costs_less(d):
    metric, spread = uneven(3, d), uneven(5, d)
    found = balanced_map(metric, spread)
    assert found.dtype == torch.float16
    root = torch.linalg.eigvals(metric @ spread).real.clamp(min=0).sqrt()
    least = float(root.sum() ** 2 / d)
    assert least == pytest.approx(cost(found.double(), metric, spread), rel=0.05)
    others = [torch.eye(d).double(), *(normal(d, d, seed=seed).double() for seed in range(200))]
    near = [
        found.double() + 0.05 * normal(d, d, seed=seed).double() * found.double().abs().mean() for seed in range(200)
    ]
    assert all(cost(a, metric, spread) >= 0.999 * least for a in (*others, *near))
    assert d == 1 or cost(others[0], metric, spread) > 1.5 * least


def test_channels_behind_the_map_are_alike_to_errors_and_in_size():
    metric, spread = uneven(3), uneven(5)
    found = balanced_map(metric, spread).double()
    back = torch.linalg.inv(found)
    for moments in (found @ spread @ found.mT, back.mT @ metric @ back):
        diagonal = moments.diagonal()
        assert float(diagonal.max() / diagonal.min()) < 1.3
    assert float((found @ spread @ found.mT).trace()) == pytest.approx(float(spread.trace()), rel=1e-2)


@pytest.mark.parametrize("metric", [torch.zeros(D, D), torch.eye(D), torch.diag(torch.arange(D))])
def test_degenerate_moments_give_a_map_that_can_be_inverted(metric):
    for spread in (torch.zeros(D, D), torch.diag(torch.arange(D)), 1e8 * torch.eye(D), 1e-8 * torch.eye(D)):
        found = balanced_map(metric.double(), spread.double())
        assert inverse(found).isfinite().all()


@pytest.mark.parametrize(
    ("sinks", "recent", "window"), [(0, 0, 1), (2, 0, 1), (0, 5, 1), (3, 8, 1), (3, TOKENS, 1), (0, 0, 8), (3, 2, 16)]
)
def test_the_cost_of_key_errors_is_summed_over_queries_that_meet_them_coded(sinks, recent, window):
    queries, keys, values = (
        normal(QUERIES, TOKENS, D),
        normal(HEADS, TOKENS, D, seed=1),
        normal(HEADS, TOKENS, D, seed=2),
    )
    projection = normal(12, QUERIES * D, seed=3)
    gram = output_gram(projection, QUERIES)
    expected = torch.zeros(HEADS, D, D, dtype=torch.float64)
    for head in range(QUERIES):
        part, weight = head // 2, projection[:, head * D : (head + 1) * D]
        for t in range(TOKENS):
            q, v = queries[head, t], values[part, : t + 1]
            p = (keys[part, : t + 1] @ q / math.sqrt(D)).softmax(-1)
            moved = (v - p @ v) @ weight.mT
            coded = [j for j in range(sinks, t + 1) if j < (t + 1 - recent) // window * window]
            cost = sum(float(p[j] ** 2 * moved[j].square().sum()) for j in coded)
            expected[part] += cost * torch.outer(q, q).double()
    found = score_metric(queries, keys, values, gram, sinks=sinks, recent=recent, window=window)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    if recent == TOKENS:
        assert not found.any()


def test_attention_behind_maps_is_attention():
    queries, keys, values = (normal(2, heads, TOKENS, D, seed=heads) for heads in (QUERIES, HEADS, HEADS))
    maps = [torch.stack([balanced_map(uneven(s), uneven(s + 9)) for s in seeds])[None] for seeds in ((1, 2), (3, 4))]
    plain = CachedAttention(Exact(), Exact())
    expected = plain(0, queries, keys, values)
    found = MappedAttention(plain, *maps)(0, queries, keys, values)
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


def test_the_inner_attention_meets_mapped_rows():
    queries, keys, values = (normal(1, heads, TOKENS, D, seed=heads) for heads in (QUERIES, HEADS, HEADS))
    maps = [torch.stack([balanced_map(uneven(s), uneven(s + 9)) for s in seeds])[None] for seeds in ((1, 2), (3, 4))]
    met = []

    def inner(layer, *rows):
        met.append((layer, *rows))
        return rows[0]

    MappedAttention(inner, *maps)(0, queries, keys, values)
    _, q, k, v = met[0]
    assert torch.equal(k, apply(maps[0][0], keys)) and torch.equal(v, apply(maps[1][0], values))
    scores = q.unflatten(1, (HEADS, -1)) @ k[:, :, None].mT
    assert torch.allclose(scores, queries.unflatten(1, (HEADS, -1)) @ keys[:, :, None].mT, atol=1e-2)


def calibrated(**options):
    """Tables of a layer whose keys and queries are large in the same directions, and the rows."""
    calibrator = CacheCalibrator(group=8, sinks=2, **options)
    turn = torch.linalg.qr(normal(D, D, seed=77))[0]
    observers = []
    for window in range(6):
        observer = Activations()
        spread = torch.logspace(0.5, -1.0, D)
        observer("model.layers.0.queries", normal(1, QUERIES, 60, D, seed=window) * spread @ turn)
        observer("model.layers.0.keys", normal(1, HEADS, 60, D, seed=window + 10) * spread @ turn + 2)
        observer("model.layers.0.values", normal(1, HEADS, 60, D, seed=window + 20) * spread.flip(0) @ turn)
        observers.append(observer)
    calibrator.add(observers)
    return calibrator.result(), observers


def test_maps_lower_the_error_of_scores_at_the_same_bits():
    errors = []
    for maps in (False, True):
        tables, observers = calibrated(maps=maps)
        total = 0.0
        for observer in observers:
            q, k = observer.queries.unflatten(0, (HEADS, -1)), observer.keys.float()
            exact = q @ k[:, None].mT
            if maps:
                q, k = apply(inverse(tables.key_map[0]).mT[:, None], q), apply(tables.key_map[0], k)
            store = MantTime(8, tables.layers("key_time"), tables.key_mean, tables.key_floor, 2, True, True)
            error = q @ store.view(0, k).finished[:, None].mT - exact
            error = (error - error.mean(-1, keepdim=True))[..., 2:56]  # a constant of all keys is nothing to a softmax
            total += float(error.square().sum())
        errors.append(total)
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_maps_are_the_same_for_any_number_of_threads(threads):
    expected = calibrated(maps=True)[0]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = calibrated(maps=True)[0]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found.key_map, expected.key_map) and torch.equal(found.value_map, expected.value_map)
    assert torch.equal(found.tables["key_time"].thresholds, expected.tables["key_time"].thresholds)


def test_formats_of_tables_with_maps_attend_behind_them_and_count_them():
    tables, observers = calibrated(maps=True)
    plain = calibrated()[0]
    assert plain.key_map is None
    rows = [x[None].float() for x in (observers[0].queries, observers[0].keys, observers[0].values)]
    exact = CachedAttention(Exact(), Exact())(0, *rows)
    for name in ("mant_head", "mant_time", "mant_time_integer"):
        with_maps, without = (CacheSettings.of(each, None) for each in (tables, plain))
        attention = CACHE_FORMATS[name].attention(with_maps)
        assert isinstance(attention, MappedAttention)
        assert float((attention(0, *rows) - exact).square().mean() / exact.square().mean()) < 0.1
        pairs = zip(*(CACHE_FORMATS[name].footprint(each, D) for each in (with_maps, without)), strict=True)
        for more, less in pairs:
            assert more.history == less.history
            assert (more.at(TOKENS) - less.at(TOKENS)) * TOKENS * D == pytest.approx(MAP_BITS * D * D)


def test_other_formats_gain_a_form_behind_the_maps():
    tables, observers = calibrated(maps=True)
    rows = [x[None].float() for x in (observers[0].queries, observers[0].keys, observers[0].values)]
    settings = CacheSettings.of(tables, None, prefill=None)
    exact = CachedAttention(Exact(), Exact())(0, *rows)
    errors = [
        float((CACHE_FORMATS[name].attention(settings)(0, *rows) - exact).square().mean())
        for name in ("int4_asymmetric_time", "int4_asymmetric_time_mapped")
    ]
    assert errors[1] < 0.7 * errors[0]
    with pytest.raises(TensorError, match="maps: missing in the tables"):
        CACHE_FORMATS["kivi_mapped"].attention(CacheSettings.of(calibrated()[0], None))
