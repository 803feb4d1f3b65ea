"""What formats with a dictionary of values for a whole tensor have in common."""

import torch

from kvant.golden.formats.base import Approximation, nearest
from kvant.golden.linear.objective import Objective
from kvant.golden.linear.search import chunks
from kvant.golden.numeric.tensors import check_group

INDEX_BITS = 32
"""Bits that the place of an element stored apart takes."""


def measured(w: torch.Tensor, stored: torch.Tensor, bits: float, group: int, second_moment) -> Approximation:
    """An approximation of f32 [N, K] with its objective, group by group."""
    objective = Objective(w.shape[1], check_group(group), second_moment)
    loss = 0.0
    for chunk in chunks(*w.shape, group):
        x = chunk.cut(w)
        error = x.to(torch.float64) - chunk.cut(stored)
        loss += float(objective.at(chunk.first, chunk.last, x.shape[-1]).measure(error).sum())
    return Approximation(stored, bits, loss)


def centroids(x: torch.Tensor, count: int, iterations: int) -> torch.Tensor:
    """Ascending means of *count* clusters of values f32 [n], from clusters of equal population, by Lloyd's rounds.

    Rounds end early when the mean absolute distance no longer falls (the criterion of GOBO). An empty cluster keeps its
    centre.
    """
    ordered = x.sort().values
    if not len(ordered):
        return torch.zeros(count)
    means = torch.stack([part.mean() for part in ordered.tensor_split(count) if len(part)])
    if len(means) < count:
        means = torch.cat((means, means[-1:].expand(count - len(means))))
    distance = (ordered - nearest(ordered, means)).abs().mean()
    for _ in range(iterations):
        place = torch.bucketize(ordered, (means[1:] + means[:-1]) / 2)
        total = torch.zeros(count, dtype=torch.float64).index_add_(0, place, ordered.double())
        members = torch.bincount(place, minlength=count)
        moved = torch.where(members > 0, total / members.clamp(min=1), means.double()).float().sort().values
        found = (ordered - nearest(ordered, moved)).abs().mean()
        if not found < distance:
            break
        means, distance = moved, found
    return means
