"""Training of codebooks: cases 20 to 23, the same bytes every time, quality against plain k-means."""

import itertools

import numpy as np
import pytest
import torch

from kvant.golden.errors import TensorError
from kvant.golden.models import slice as model_slice
from kvant.golden.pq.codebook import Partition
from kvant.golden.pq.encode import encode
from kvant.golden.pq.kmeans import GRID, Clusters, hilbert_index, hilbert_seeds, kmeans, lloyd
from kvant.golden.pq.search import nearest
from kvant.golden.pq.train import INT8_MAX, quantize_centroids, train_codebooks


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(a, b):
    return torch.equal(a.entries, b.entries) and torch.equal(a.scale, b.scale)


def squared_error(points, centroids):
    return (points[:, None] - centroids).square().sum(-1).amin(-1).mean()


# --- the parts


@pytest.mark.parametrize(("dimensions", "bits"), [(1, 6), (2, 1), (2, 5), (3, 3), (4, 3), (8, 1)])
def test_a_hilbert_curve_visits_every_cell_once_and_steps_to_a_neighbour(dimensions, bits):
    cells = torch.tensor(list(itertools.product(range(1 << bits), repeat=dimensions)))
    index = hilbert_index(cells, bits)
    order = index.argsort()
    assert torch.equal(index[order], torch.arange(len(cells)))
    assert (cells[order].diff(dim=0).abs().sum(-1) == 1).all()


@pytest.mark.parametrize("dimensions", [1, 2, 4, 8])
def test_nearest_is_exact_at_the_ends_of_the_grid(dimensions):
    rng = np.random.default_rng(dimensions)
    ends = np.array([-GRID, -GRID + 1, -1, 0, 1, GRID - 1, GRID])
    points, centres = rng.choice(ends, (1, 300, dimensions)), rng.choice(ends, (1, 256, dimensions))
    found = nearest(torch.tensor(points, dtype=torch.float64), torch.tensor(centres, dtype=torch.float64))
    for point, index in zip(points[0].tolist(), found[0].tolist(), strict=True):
        distances = [sum((a - b) ** 2 for a, b in zip(point, c, strict=True)) for c in centres[0].tolist()]
        assert index == distances.index(min(distances))


def test_lloyd_never_raises_the_error_and_fills_empty_clusters_with_the_farthest_samples():
    points = torch.round(normal(1, 500, 2) * 1e4).double()
    centres = points[:, :16].clone()
    centres[:, 8:] = centres[:, :1]  # eight of them never win
    errors = []
    for _ in range(5):
        centres, counts = lloyd(points, centres, 1)
        errors.append(float(squared_error(points[0], centres[0])))
    assert errors == sorted(errors, reverse=True)
    assert (counts > 0).all()


@pytest.mark.parametrize("dimensions", [1, 2, 4])
def test_seeds_are_better_than_samples_drawn_at_random(dimensions):
    points = torch.round(normal(3, 4096, dimensions, seed=dimensions) * 2e5).clamp(-GRID, GRID).double()
    seeds = hilbert_seeds(points, 64)
    for problem in range(3):
        drawn = squared_error(points[problem], points[problem, :64])
        assert squared_error(points[problem], seeds[problem]) < drawn


def test_the_best_scale_is_no_worse_than_the_one_that_holds_everything():
    centroids = normal(4, 16, 2).double()
    centroids[0, 0] = 40  # one far centroid with a single sample
    counts = torch.full((4, 16), 1000)
    counts[0, 0] = 1
    entries, scale = quantize_centroids(Clusters(centroids, counts))
    assert entries.abs().max() <= INT8_MAX

    def cost(entries, scale):
        return float(((centroids - entries.double() * scale.double()).square() * counts[..., None]).sum())

    whole = (centroids.abs().max() / INT8_MAX).half()
    assert cost(entries, scale) <= cost(torch.round(centroids / whole.double()), whole)


# --- the training


def test_a_code_book_of_real_keys_is_close_to_plain_k_means():
    keys = torch.tensor(model_slice.load().attention[5].keys[0])
    book = train_codebooks(keys, nbits=4)
    partition = book.partition
    assert (partition.subspaces, partition.centroids, partition.dimensions) == (32, 16, 2)
    error = (book.decode(encode(keys, book)) - keys.float()).square().mean()
    samples = partition.cut(keys.double()).transpose(0, 1)
    plain = []
    for number, points in enumerate(samples):
        centres = points[torch.randperm(len(points), generator=torch.Generator().manual_seed(number))[:16]]
        for _ in range(30):
            index = (points[:, None] - centres).square().sum(-1).argmin(-1)
            centres = torch.stack([points[index == c].mean(0) if (index == c).any() else centres[c] for c in range(16)])
        plain.append(squared_error(points, centres) / 2)
    assert error < 1.03 * sum(plain) / len(plain)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_seed_gives_the_same_bytes_for_any_number_of_threads(threads):
    samples = normal(5, 3000, 8).half()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = train_codebooks(samples, nbits=5, seed=3, most_samples=1000)
        torch.set_num_threads(threads)
        assert same(train_codebooks(samples, nbits=5, seed=3, most_samples=1000), expected)
        assert not same(train_codebooks(samples, nbits=5, seed=4, most_samples=1000), expected)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_head_does_not_depend_on_the_others():
    samples = normal(2, 3, 400, 8).half()
    together = train_codebooks(samples, nbits=4)
    assert same(together.at(1, 2), train_codebooks(samples[1, 2], nbits=4))


def test_a_layers_codebook_serves_all_its_heads():
    samples = normal(2, 3, 400, 8).half()
    samples[:, 1] += 4
    shared = train_codebooks(samples, nbits=6, shared=True)
    assert shared.leading == (2,)
    values = shared.at(0).decode(encode(samples[0], shared.at(0)))
    assert (values - samples[0].float()).square().mean() < 0.1


def test_a_mean_is_subtracted_as_the_cache_does():
    samples, mean = normal(2, 500, 8).half(), torch.tensor([[3.0] * 8, [-2.0] * 8]).half()
    moved = (samples.float() + mean[:, None].float()).half()
    book = train_codebooks(moved, nbits=4, mean=mean)
    assert same(book, train_codebooks(moved.float() - mean[:, None].float(), nbits=4))


@pytest.mark.parametrize("subspace", [1, 2, 4, 8])
@pytest.mark.parametrize("nbits", [4, 8])
def test_every_partition_trains_and_more_centroids_err_less(subspace, nbits):
    samples = normal(1200, 16, seed=subspace).half()
    book = train_codebooks(samples, subspace=subspace, nbits=nbits)
    assert book.partition == Partition(16, 16 // subspace, nbits)
    error = (book.decode(encode(samples, book)) - samples.float()).square().mean()
    # a Gaussian source cannot be coded better than 2^(-2 bits), nor has a codebook to be 3 times worse
    floor = 2.0 ** (-2 * nbits / subspace)
    assert error < 3 * floor + 1e-4


# --- cases


@pytest.mark.parametrize("distinct", [1, 2, 15, 16])
def test_case_20_few_distinct_samples_are_reproduced_exactly(distinct):
    points = torch.round(normal(distinct, 2, seed=distinct) * 1000).double()
    samples = points[torch.arange(1000) % distinct][None]
    centroids, counts = kmeans(samples, 16, 3)
    assert centroids.shape == (1, 16, 2)
    found = {tuple(each) for each in centroids[0].tolist()}
    assert found == {tuple(each) for each in points.tolist()}
    assert int(counts.sum()) == 1000
    assert int((counts > 0).sum()) == len(points.unique(dim=0))


def test_case_20_a_sample_far_out_does_not_merge_the_others():
    points = torch.cat((normal(15, 2).double() * 1e-6, torch.tensor([[1e6, -1e6]], dtype=torch.float64)))
    centroids, _ = kmeans(points[torch.arange(800) % 16][None], 16, 3)
    assert {tuple(each) for each in centroids[0].tolist()} == {tuple(each) for each in points.tolist()}


@pytest.mark.parametrize(
    "samples",
    [
        torch.zeros(1000, 8),
        torch.full((1000, 8), 7.0),
        torch.tensor([[1.0, -2, 3, -4, 5, -6, 7, -8], [9, 9, -9, -9, 0, 0, 1, 1]])[torch.arange(1000) % 2],
        torch.cat((normal(1000, 4), torch.zeros(1000, 4)), dim=-1),
        normal(1, 8),
        normal(7, 8),
    ],
    ids=["zeros", "constant", "two", "zero channels", "one sample", "fewer than centroids"],
)
def test_case_20_codebooks_of_degenerate_samples(samples):
    book = train_codebooks(samples.half(), nbits=4)
    assert book.entries.shape == (4, 16, 2)
    assert torch.isfinite(book.scale)
    values = book.decode(encode(samples.half(), book))
    distinct = max(len(part.unique(dim=0)) for part in book.partition.cut(samples).transpose(0, 1))
    if distinct <= 16:  # within a step of INT8: the scale that costs least may clip the largest
        assert (values - samples.half().float()).abs().max() <= 1.01 * float(book.scale)
    zero = (samples == 0).all(0)
    assert not values[:, zero].any()


def test_case_20_many_copies_beside_few_others_leave_no_centroid_unused():
    samples = torch.cat((torch.zeros(5000, 2), normal(300, 2)))
    _, counts = kmeans(samples.double()[None], 64, 8)
    assert (counts > 0).sum() >= 60


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_case_21_a_nonfinite_sample_is_refused_with_its_place(bad):
    samples = normal(2, 50, 8)
    samples[1, 33, 5] = bad
    with pytest.raises(TensorError) as refusal:
        train_codebooks(samples, name="keys")
    assert str(refusal.value) == f"keys[1, 33, 5] = {bad}: legal are finite samples"


def test_case_23_layout_and_type_of_the_samples_do_not_matter():
    samples = normal(3, 600, 8).bfloat16().half().bfloat16()  # values that every type holds
    expected = train_codebooks(samples.float().contiguous(), nbits=4)
    wide = torch.zeros(3, 1200, 8)
    wide[:, ::2] = samples
    for given in (
        samples,
        samples.half(),
        samples.double(),
        samples.float().numpy(),
        samples.float().transpose(1, 2).contiguous().transpose(1, 2),
        samples.float().permute(1, 0, 2).contiguous().transpose(0, 1),
        wide[:, ::2],
        samples.float().requires_grad_(),
    ):
        before = given.copy() if isinstance(given, np.ndarray) else given.detach().clone()
        assert same(train_codebooks(given, nbits=4), expected)
        after = given if isinstance(given, np.ndarray) else given.detach()
        assert (before == after).all()


@pytest.mark.parametrize(
    ("samples", "options", "text"),
    [
        (torch.zeros(0, 8), {}, "shape (0, 8)"),
        (torch.zeros(8), {}, "shape (8,)"),
        (torch.zeros(10, 8), {"shared": True}, "[..., H, N, d]"),
        (torch.zeros(10, 8, dtype=torch.int32), {}, "dtype int32"),
        (torch.zeros(10, 9), {}, "subspace = 2"),
        (torch.zeros(10, 8), {"nbits": 9}, "nbits = 9"),
        (torch.zeros(10, 8), {"iterations": 0}, "iterations = 0"),
        (torch.zeros(10, 8), {"most_samples": 0}, "most_samples = 0"),
        (torch.full((10, 8), 1e30), {}, "magnitude"),
    ],
)
def test_illegal_training_is_refused(samples, options, text):
    with pytest.raises(TensorError) as refusal:
        train_codebooks(samples, **options)
    assert text in str(refusal.value)
    assert "\n" not in str(refusal.value)
