"""Maps ahead of product-quantised caches: what they keep, what they weigh, how they deal out channels."""

import pytest
import torch

from kvant.golden.kvcache.attention import to_port
from kvant.golden.kvcache.calibration import Activations
from kvant.golden.kvcache.maps import (
    apply,
    covariance,
    inverse,
    mapped_mean,
    second_moments,
)
from kvant.golden.pq.attention import FloatPqAttention, Pq, PqAttention
from kvant.golden.pq.calibration import CodebookCalibrator
from kvant.golden.pq.train import train_codebooks
from kvant.golden.pq.transform import balanced_order, transform

D, HEADS, QUERIES, TOKENS = 8, 2, 4, 40


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uneven(seed, *leading):
    """Covariances f64 [..., D, D] whose variances differ a thousandfold."""
    x = normal(*leading, 64, D, seed=seed).double() * torch.logspace(-1.5, 1.5, D, dtype=torch.float64)
    return covariance(x @ torch.linalg.qr(normal(D, D, seed=seed + 1).double())[0])


def test_channels_are_dealt_out_by_equal_products():
    variances = torch.tensor([1.0, 2, 4, 8, 16, 32, 64, 128], dtype=torch.float64)
    order = balanced_order(variances, 2)
    assert sorted(order) == list(range(8))
    assert variances[order].view(4, 2).prod(1).tolist() == [128] * 4


@pytest.mark.parametrize(("variance", "order"), [(0.0, [0, 1, 2, 3, 4, 5, 6, 7]), (1.0, [0, 2, 4, 6, 1, 3, 5, 7])])
def test_equal_variances_are_dealt_out_in_order(variance, order):
    assert balanced_order(torch.full((8,), variance, dtype=torch.float64), 4) == order


def test_squared_length_behind_a_map_is_the_cost_of_an_error():
    metric, error = uneven(3), normal(50, D).double()
    found = transform(metric, uneven(5), 2)
    assert found.dtype == torch.float16
    length = apply(found, error).double().square().sum(-1)
    cost = ((error @ (metric / metric.diagonal().mean() + 1e-3 * torch.eye(D))) * error).sum(-1)
    assert torch.allclose(length / length.mean(), cost / cost.mean(), rtol=1e-2)


def test_channels_behind_a_map_are_uncorrelated_and_keep_the_total_variance():
    metric, spread = uneven(3), uneven(5)
    found = transform(metric, spread, 4).double()
    mapped = found @ spread @ found.mT
    assert float((mapped - torch.diag(mapped.diagonal())).abs().max()) < 1e-2 * float(mapped.diagonal().max())
    assert float(mapped.trace()) == pytest.approx(float(spread.trace()), rel=1e-2)


def test_scales_of_subspaces_share_out_queries_and_keys_alike_and_change_no_shape():
    metric, spread, queries = uneven(3), uneven(5), second_moments(normal(QUERIES, TOKENS, D), HEADS)[0]
    plain, scaled = (transform(metric, spread, 2, q).double() for q in (None, queries))

    def energies(a):
        back = torch.linalg.inv(a)
        return [(m.diagonal().view(-1, 2).sum(-1)) for m in (back.mT @ queries @ back, a @ spread @ a.mT)]

    asked, given = energies(scaled)
    assert torch.allclose(asked / asked.sum(), given / given.sum(), rtol=2e-2)
    assert float(given.sum()) == pytest.approx(float(spread.trace()), rel=1e-2)
    before = energies(plain)
    assert asked.sum() * given.sum() < 0.9 * before[0].sum() * before[1].sum()
    ratio = (scaled / plain).view(-1, 2 * D)  # one number for each sub-space
    assert float(((ratio / ratio.median(-1, keepdim=True).values) - 1).abs().max()) < 0.05


@pytest.mark.parametrize("queries", [torch.zeros(D, D), torch.eye(D)])
def test_degenerate_moments_give_a_map_that_can_be_inverted(queries):
    for spread in (torch.zeros(D, D), torch.diag(torch.arange(D))):
        found = transform(torch.zeros(D, D).double(), spread.double(), 2, queries.double())
        assert inverse(found).isfinite().all()


def test_without_costs_a_map_is_a_rotation():
    found = transform(torch.zeros(D, D, dtype=torch.float64), uneven(5), 2).double()
    assert torch.allclose(found @ found.mT, torch.eye(D, dtype=torch.float64), atol=1e-2)
    same = transform(torch.eye(D, dtype=torch.float64), torch.zeros(D, D, dtype=torch.float64), 2)
    assert torch.allclose(
        same.abs().double(), torch.eye(D, dtype=torch.float64)[balanced_order(torch.zeros(D), 2)], atol=2e-3
    )


@pytest.fixture(scope="module")
def mapped():
    """Rows of a model, maps of keys and values, and codebooks of the mapped rows."""
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randn(1, heads, TOKENS, D, generator=generator) for heads in (QUERIES, HEADS, HEADS)]
    maps = [torch.stack([transform(uneven(s), uneven(s + 1), 4) for s in (seed, seed + 5)])[None] for seed in (11, 31)]
    mean = mapped_mean(rows[1][0].mean(-2).half(), maps[0][0])
    books = [
        train_codebooks(to_port(apply(a[0], x[0])), subspace=4, nbits=4, mean=m)
        for x, a, m in zip(rows[1:], maps, (mean, None), strict=True)
    ]
    return rows, maps, mean[None], books


@pytest.mark.parametrize("kind", [PqAttention, FloatPqAttention])
def test_attention_behind_maps_is_that_of_the_mapped_rows(mapped, kind):
    (queries, keys, values), maps, mean, books = mapped
    behind = kind(Pq((books[0],), 4, mean, 2, 8, maps[0]), Pq((books[1],), 4, None, 2, 8, maps[1]))
    plain = kind(Pq((books[0],), 4, mean, 2, 8), Pq((books[1],), 4, None, 2, 8))
    back, forth = inverse(maps[0][0]).mT[:, None], inverse(maps[1][0])[:, None]
    turned = apply(back, queries[0].unflatten(0, (HEADS, -1))).flatten(0, 1)[None]
    out = plain(0, turned, apply(maps[0][0], keys), apply(maps[1][0], values))
    expected = apply(forth, out[0].unflatten(0, (HEADS, -1))).flatten(0, 1)
    assert torch.equal(behind(0, queries, keys, values)[0], expected)


def test_with_everything_recent_rotations_change_little(mapped):
    (queries, keys, values), _, _, books = mapped
    turn = torch.stack([transform(torch.zeros(D, D, dtype=torch.float64), uneven(s), 4) for s in (1, 9)])[None]
    exact = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    behind = PqAttention(Pq((books[0],), D, None, 0, TOKENS, turn), Pq((books[1],), D, None, 0, TOKENS, turn))
    assert float((behind(0, queries, keys, values) - exact).square().mean() / exact.square().mean()) < 1e-3


def calibrated(kinds, **options):
    """Codebooks of a layer whose keys and queries are large in the same channels."""
    calibrator = CodebookCalibrator(kinds, sinks=2, recent=4, **options)
    observers = []
    for window in range(4):
        observer = Activations()
        spread = torch.linspace(3, 0.3, D)
        observer("model.layers.0.queries", normal(1, QUERIES, 60, D, seed=window) * spread / 3)
        observer("model.layers.0.keys", normal(1, HEADS, 60, D, seed=window + 10) * spread + 2)
        observer("model.layers.0.values", normal(1, HEADS, 60, D, seed=window + 20) * spread.flip(0))
        observers.append(observer)
    calibrator.add(observers)
    return calibrator.result(), observers


def test_maps_lower_the_error_of_scores_at_the_same_bits():
    errors = []
    for maps in (False, True):
        books, observers = calibrated(["key_4x4"], maps=maps)
        store = Pq(books.layers("key_4x4"), 8, books.mean("key_4x4"), 0, 0, books.transforms.get("key_4x4"))
        total = 0.0
        for observer in observers:
            q = observer.queries.unflatten(0, (HEADS, -1))
            held = store.meet(0, q) @ store.view(0, observer.keys.float()).finished[:, None].mT
            error = held - q @ observer.keys.float()[:, None].mT
            error = error - error.mean(-1, keepdim=True)  # a constant of all keys is nothing to a softmax
            total += float(error.square().sum())
        errors.append(total)
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_maps_and_codebooks_are_the_same_for_any_number_of_threads(threads):
    kinds = ["key_2x4", "value_4x4"]
    expected = calibrated(kinds)[0]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = calibrated(kinds)[0]
    finally:
        torch.set_num_threads(before)
    for kind in kinds:
        assert torch.equal(found.transforms[kind], expected.transforms[kind])
        assert torch.equal(found.books[kind].entries, expected.books[kind].entries)


def test_the_footprint_counts_the_map(mapped):
    _, maps, mean, books = mapped
    with_map, without = (Pq((books[0],), 4, mean, 2, 8, a).footprint(D) for a in (maps[0], None))
    assert with_map.history == without.history
    assert (with_map.at(TOKENS) - without.at(TOKENS)) * TOKENS * D == pytest.approx(16 * D * D)
