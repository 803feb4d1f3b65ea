"""Calibration of a cache from text: key means, floors, coefficient tables and their thresholds.

A table is fitted to the statistic that hardware computes, so that the squared error of all groups, at the coefficient
that the table gives them, is least. The groups are sorted into bins of equal population by their statistic; dynamic
programming cuts the bins into at most C segments and gives each the coefficient with the least error. The
best coefficient is no monotone function of the statistic, so neither is the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.choice import THRESHOLD_LIMIT, GroupStatistics, Tables, group_statistics
from kvant.golden.kvcache.rows import centred
from kvant.golden.kvcache.temporal import stage_rows
from kvant.golden.numeric.codes import LARGEST_COEFFICIENT, LINEAR, TABLE_SIZE, level_table
from kvant.golden.numeric.int8 import int8_groups
from kvant.golden.numeric.rounding import fp16
from kvant.golden.numeric.tensors import to_groups

ALL_COEFFICIENTS = (*range(LARGEST_COEFFICIENT + 1), LINEAR)
"""Every coefficient there is."""

USUAL_COEFFICIENTS = (*range(0, 125, 5), LINEAR)
"""Those that M-ANT's authors search (HPCA 2025, section IV), and the linear type."""

RATIOS = 1024
"""Bins of ``|q| / m`` in the histograms that errors are taken from."""


class Groups(NamedTuple):
    """Groups of one kind of cache.

    Attributes
    ----------
    q : i16 [..., n]
        INT8 elements, the offset taken out; 0 in the places of sinks.
    weight : f32 [...]
        What the squared error of an element of the group counts, in units of ``q``.
    statistics : GroupStatistics
    """

    q: torch.Tensor
    weight: torch.Tensor
    statistics: GroupStatistics


def groups_of_head(rows: torch.Tensor, *, group: int, mean: torch.Tensor | None, sinks: int) -> Groups:
    """Groups along the head [H, T - sinks, d/G] of f16 rows [H, T, d]; the elements of a short last group are left out.

    Its statistic is normalised, so a table fitted to full groups serves it too.
    """
    d = rows.shape[-1]
    x = centred(rows, None if mean is None else mean[..., None, :])[..., sinks:, :]
    q, scale = int8_groups(to_groups(x[..., : max(d // group * group, min(d, group))], group))
    n = min(d, group)
    return _groups(q[..., :n], scale.float(), group_statistics(q[..., :n]), offset=False)


def groups_of_time(
    rows: torch.Tensor, *, group: int, mean: torch.Tensor | None, floor: torch.Tensor | None, sinks: int, offset: bool
) -> Groups:
    """Groups along time [H, W, d] of the full windows of f16 rows [H, T, d], staged as a one-token prefill leaves them.

    Without a floor all rows are the prefill.
    """
    staged = stage_rows(rows, rows.shape[-2] if floor is None else 1, group=group, mean=mean, floor=floor, sinks=sinks)
    windows = rows.shape[-2] // group
    q = staged.q[..., : windows * group, :].unflatten(-2, (windows, group)).transpose(-1, -2).contiguous()
    statistics = group_statistics(q, offset=offset)
    scale = staged.scale.float()[..., None, :].expand(statistics.peak.shape)
    return _groups(q, scale, statistics, offset=offset)


def _groups(q: torch.Tensor, scale: torch.Tensor, statistics: GroupStatistics, *, offset: bool) -> Groups:
    q = q.to(torch.int16)
    if offset:
        q = q - statistics.offset[..., None].to(torch.int16)
    return Groups(q, scale.square(), statistics)


def normalised(statistics: GroupStatistics, statistic: str) -> torch.Tensor:
    """``floor(statistic * 2^16 / (n*m)^2)`` i64 [...]: a group passes T exactly when this is at least T. 0 for m = 0."""
    limit = (statistics.count * statistics.peak) ** 2
    return (statistics.of(statistic) << 16) // limit.clamp(min=1)


def shared_statistic(value: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """The statistic that decides for all groups along the last axis, i64 [...]; -1 where none is alive.

    ``2 * P_k >= D`` of `choose_shared` holds exactly when the ``ceil(D/2)``-th largest statistic passes ``T_k``.
    """
    ordered = torch.where(alive, value, -1).sort(-1, descending=True).values
    place = (alive.sum(-1, keepdim=True) + 1) // 2 - 1
    return torch.where(place < 0, -1, ordered.gather(-1, place.clamp(min=0)))[..., 0]


def error_table(candidates: Sequence[int]) -> torch.Tensor:
    """Squared distance of ``(r + 0.5) / RATIOS`` to the nearest level over M, f64 [RATIOS, candidates]."""
    grid = level_table_of(candidates)
    x = (torch.arange(RATIOS, dtype=torch.float64) + 0.5) / RATIOS
    return (x[:, None, None] - grid).square().amin(-1)


def level_table_of(candidates: Sequence[int]) -> torch.Tensor:
    """Levels over the largest one, f64 [candidates, 8]."""
    pieces = [candidates[first : first + TABLE_SIZE] for first in range(0, len(candidates), TABLE_SIZE)]
    grid = torch.cat([level_table(piece) for piece in pieces]).to(torch.float64)
    return grid / grid[:, -1:]


class Histogram:
    """Elements of groups, by the statistic that chooses for them and by ``|q| / m``.

    Parameters
    ----------
    edges : i64 [B]
        Ascending; bin b holds the statistics from ``edges[b]`` to ``edges[b + 1] - 1``.
    """

    def __init__(self, edges: torch.Tensor):
        self.edges = edges
        self.weights = torch.zeros(len(edges), RATIOS, dtype=torch.float64)

    def add(self, groups: Groups, value: torch.Tensor) -> None:
        """Count groups whose statistics are *value*, of their shape."""
        peak = groups.statistics.peak.float()
        alive = peak > 0
        bins = torch.bucketize(value.contiguous(), self.edges, right=True).sub_(1).clamp_(min=0)
        magnitude = groups.q.abs().to(torch.float32) * (RATIOS / peak.clamp(min=1))[..., None]
        place = magnitude.to(torch.int32).clamp_(max=RATIOS - 1) + (bins * RATIOS).to(torch.int32)[..., None]
        weight = (groups.weight * peak.square() * alive)[..., None].expand(groups.q.shape)
        # one row of counts per thread would be faster; it is fast enough
        self.weights += torch.bincount(
            place.reshape(-1), weight.reshape(-1).to(torch.float64), minlength=self.weights.numel()
        ).view_as(self.weights)

    def errors(self, candidates: Sequence[int]) -> torch.Tensor:
        """Squared error of each bin at each coefficient, f64 [B, candidates]."""
        return self.weights @ error_table(candidates)


def bin_edges(value: torch.Tensor, bins: int) -> torch.Tensor:
    """Distinct lower edges of at most *bins* bins of about equal population, i64 [B], the first is 0."""
    ordered = value.reshape(-1).sort().values
    places = torch.linspace(0, len(ordered) - 1, bins + 1)[:-1].long()
    edges = ordered[places].clamp(0, THRESHOLD_LIMIT)
    edges[0] = 0
    return edges.unique()


def fit_table(
    edges: torch.Tensor, errors: torch.Tensor, candidates: Sequence[int], size: int = TABLE_SIZE
) -> tuple[list[int], list[int]]:
    """The table with the least error.

    Parameters
    ----------
    edges : i64 [B]
        Lower edges of the bins.
    errors : f64 [B, A]
        Error of each bin at each candidate.
    candidates : sequence of int
        A coefficients.
    size : int
        Entries of the table, C.

    Returns
    -------
    coefficients, thresholds : list of int
        C and C - 1. A table that needs fewer entries repeats its last one behind thresholds of 65535.
    """
    bins, count = errors.shape
    best = torch.full((size, count), torch.inf, dtype=torch.float64)
    best[0] = errors[0]
    opened = torch.zeros(bins, size, count, dtype=torch.bool)  # a segment begins at this bin
    origin = torch.zeros(bins, size, dtype=torch.long)  # coefficient of the segment before it
    for b in range(1, bins):
        least, where = best[:-1].min(-1)
        other = torch.cat((torch.full((1,), torch.inf, dtype=torch.float64), least))[:, None]
        origin[b, 1:] = where
        opened[b] = other < best
        best = torch.minimum(best, other) + errors[b]
    segment, a = divmod(int(best.argmin()), count)
    coefficients, thresholds = [candidates[a]], []
    for b in range(bins - 1, 0, -1):
        if opened[b, segment, a]:
            thresholds.append(int(edges[b]))
            a = int(origin[b, segment])
            segment -= 1
            coefficients.append(candidates[a])
    coefficients.reverse(), thresholds.reverse()
    short = size - len(coefficients)
    return coefficients + coefficients[-1:] * short, thresholds + [THRESHOLD_LIMIT] * short
