"""k-means in many small spaces at once, exact and the same everywhere.

Samples are put on a grid of integers, so that every distance is an exact integer (`search`) and no sum depends on its
order: the result is the same for any number of threads.

Seeds come from a space-filling curve. Centroids that quantise a density f in D dimensions best have a density of
``f^(D/(D+2))`` (Zador), so a sample deserves a share of ``f^(-2/(D+2))`` of them. Along a Hilbert curve through the
samples the distance l to the neighbour stands for ``f^(-1/D)``, hence the share is ``l^(2D/(D+2))``. The curve is cut
into pieces of equal shares; their means are the seeds. They lie better than those of k-means++, at a fraction of its
time (docs/blocks/pq_golden.md has figures).
"""

from typing import NamedTuple

import torch

from kvant.golden.pq.search import nearest

GRID = 1 << 20
"""Largest magnitude of a grid coordinate: with 8 dimensions and 256 centres `search` is exact up to here."""

_KEY_BITS = 62
_CURVE_BITS = 10  # per dimension: finer than 256 seeds can be
_SEEDING = 16  # samples per seed


class Clusters(NamedTuple):
    """Centroids of B problems.

    Attributes
    ----------
    centroids : f64 [B, K, D]
    counts : i64 [B, K]
        Samples of each; 0 for a centroid that is not used.
    """

    centroids: torch.Tensor
    counts: torch.Tensor


def kmeans(samples: torch.Tensor, count: int, iterations: int) -> Clusters:
    """Cluster samples, in an order that means nothing (the first ones alone place the seeds).

    A problem with at most K distinct samples gets exactly these as centroids; the rest of its centroids repeat the
    last one and have no samples. In all others an empty cluster takes the sample that is farthest from its centroid.

    Parameters
    ----------
    samples : f64 [B, N, D]
        Finite.
    count : int
        K, a power of two.
    iterations : int
        Rounds of assignment and means.
    """
    centre = (samples.amax(1, keepdim=True) + samples.amin(1, keepdim=True)) / 2
    unit = (samples - centre).abs().amax((1, 2), keepdim=True) / GRID
    points = torch.round((samples - centre) / torch.where(unit == 0, 1.0, unit)).clamp_(-GRID, GRID)
    centroids, counts = lloyd(points, hilbert_seeds(points[:, : _SEEDING * count], count), iterations)
    clusters = Clusters(centroids * unit + centre, counts)
    for problem in _maybe_few_distinct(samples, count):
        distinct, frequency = samples[problem].unique(dim=0, return_counts=True)
        if len(distinct) <= count:
            clusters.centroids[problem] = distinct[-1]
            clusters.centroids[problem, : len(distinct)] = distinct
            clusters.counts[problem] = torch.nn.functional.pad(frequency, (0, count - len(distinct)))
    return clusters


def _maybe_few_distinct(samples: torch.Tensor, count: int) -> list[int]:
    """Problems but those of which a look at the first samples shows more than *count* distinct ones."""
    values = samples[:, : 4 * count].sort(1).values.diff(dim=1).ne(0).sum(1).amax(-1) + 1
    return (values <= count).nonzero().flatten().tolist()


def lloyd(points: torch.Tensor, centres: torch.Tensor, iterations: int) -> Clusters:
    """Rounds of assignment and means.

    Parameters
    ----------
    points : f64 [B, N, D]
        Integers of at most `GRID`.
    centres : f64 [B, K, D]
        Where to begin; rounded to integers.
    iterations : int
        At least 1.

    Returns
    -------
    Clusters
        Means, not rounded, and counts of the last round.
    """
    problems, count, dimensions = centres.shape
    first = torch.arange(problems)[:, None] * count
    for _ in range(iterations):
        centres = torch.round(centres)
        index = nearest(points, centres)
        flat = (index + first).flatten()
        counts = torch.bincount(flat, minlength=problems * count).view(problems, count)
        sums = torch.zeros(problems * count, dimensions, dtype=torch.float64)
        sums.index_add_(0, flat, points.reshape(-1, dimensions))
        means = sums.view(centres.shape) / counts.clamp(min=1)[..., None]
        for problem in (counts == 0).any(-1).nonzero().flatten().tolist():
            error = (points[problem] - centres[problem, index[problem]]).square().sum(-1)
            empty = (counts[problem] == 0).nonzero().flatten()[: len(error)]
            farthest = error.argsort(dim=0, descending=True, stable=True)[: len(empty)]
            means[problem, empty] = points[problem, farthest]
        centres = means
    return Clusters(centres, counts)


def hilbert_seeds(points: torch.Tensor, count: int) -> torch.Tensor:
    """Seeds f64 [B, K, D] from points f64 [B, N, D], integers of at most `GRID`."""
    problems, _, dimensions = points.shape
    bits = GRID.bit_length() if dimensions == 1 else min(_CURVE_BITS, _KEY_BITS // dimensions)
    cells = (points.to(torch.int64) + GRID) >> (GRID.bit_length() - bits)
    order = hilbert_index(cells.clamp_(max=(1 << bits) - 1), bits).argsort(dim=-1, stable=True)
    path = points.gather(1, order[..., None].expand(points.shape))
    step = path.diff(dim=1).square().sum(-1).sqrt()
    # a step of one grid unit at least: coinciding samples deserve little, but something
    share = torch.nn.functional.pad(step.clamp_(min=1), (1, 0), value=1.0).pow_(2 * dimensions / (dimensions + 2))
    # integers: their running sum is exact, whatever the order of a library's additions
    share = torch.round(share * (2.0**50 / share.amax(1, keepdim=True) / points.shape[1])).to(torch.int64)
    along = share.cumsum(1)
    piece = (along.to(torch.float64) / along[:, -1:].clamp(min=1) * count).to(torch.int64).clamp_(max=count - 1)
    flat = (piece + torch.arange(problems)[:, None] * count).flatten()
    sums = torch.zeros(problems * count, dimensions, dtype=torch.float64)
    sums.index_add_(0, flat, path.reshape(-1, dimensions))
    counts = torch.bincount(flat, minlength=problems * count)
    return (sums / counts.clamp(min=1)[:, None]).view(problems, count, dimensions)


def hilbert_index(cells: torch.Tensor, bits: int) -> torch.Tensor:
    """Position along a Hilbert curve.

    Parameters
    ----------
    cells : i64 [..., D]
        Coordinates of *bits* bits each; D * bits is at most 62.
    bits : int

    Returns
    -------
    i64 [...]
        Neighbours along the curve are neighbours in space. Algorithm: J. Skilling, "Programming the Hilbert curve",
        AIP Conf. Proc. 707, 2004.
    """
    axes = [cells[..., d].clone() for d in range(cells.shape[-1])]
    for level in range(bits - 1, 0, -1):
        low = (1 << level) - 1
        for d, axis in enumerate(axes):
            inverted = (axis >> level & 1) * low  # all lower bits where the bit is set
            exchanged = (axes[0] ^ axis) & (low - inverted)
            axes[0] = axes[0] ^ inverted ^ exchanged
            if d:
                axes[d] = axis ^ exchanged
    for d in range(1, len(axes)):
        axes[d] = axes[d] ^ axes[d - 1]
    turn = torch.zeros_like(axes[0])
    for level in range(bits - 1, 0, -1):
        turn ^= (axes[-1] >> level & 1) * ((1 << level) - 1)
    index = torch.zeros_like(turn)
    for bit in range(bits - 1, -1, -1):
        for axis in axes:
            index = index << 1 | (axis ^ turn) >> bit & 1
    return index
