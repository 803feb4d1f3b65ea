"""Maps ahead of a product-quantised cache; see `kvant.golden.kvcache.maps` for what a map is.

A is ``S Q^T C^(1/2)``: C makes the squared error of k' the cost, and the rotation Q makes the channels of k'
uncorrelated and deals them out so that all sub-spaces have the same product of variances, which is what equal numbers
of centroids want (optimised product quantisation, Ge et al., CVPR 2013, section 3.2). S scales sub-spaces, for the sake
of INT8.
"""

import torch

from kvant.golden.numeric.rounding import fp16

_FLOOR = 1e-3  # of the mean eigenvalue, added to every one: directions that calibration has not seen still count
_LEAST = 1e-9  # of the largest variance: the product of variances needs a bound


def balanced_order(variances: torch.Tensor, subspace: int) -> list[int]:
    """Channels by sub-space, so that the products of variances of all sub-spaces are about equal.

    From the largest variance down, a channel goes to the sub-space with room whose product is least; the first of
    several.

    Parameters
    ----------
    variances : f64 [d]
    subspace : int
        Channels of a sub-space.
    """
    floor = max(float(variances.max()) * _LEAST, torch.finfo(torch.float64).tiny)
    size = (variances.clamp(min=floor) / floor).log2().tolist()
    dealt: list[list[int]] = [[] for _ in range(len(size) // subspace)]
    total = [0.0] * len(dealt)
    for channel in sorted(range(len(size)), key=lambda c: (-size[c], c)):
        place = min((m for m in range(len(dealt)) if len(dealt[m]) < subspace), key=lambda m: (total[m], m))
        dealt[place].append(channel)
        total[place] += size[channel]
    return [channel for piece in dealt for channel in piece]


def transform(
    metric: torch.Tensor, spread: torch.Tensor, subspace: int, queries: torch.Tensor | None = None
) -> torch.Tensor:
    """The map A of vectors of one head, for sub-spaces of so many dimensions.

    Scales of sub-spaces change no code. With *queries* they are those that make the rounding of INT8 queries and rows
    cost least: as much as the energies of both, one times the other, which is least where each sub-space has the same
    share of both. The total variance stays as it is.

    Parameters
    ----------
    metric : f64 [d, d]
        C, cost of an error; 0 counts as identity.
    spread : f64 [d, d]
        Covariance of the vectors.
    subspace : int
        Dimensions of a sub-space.
    queries : f64 [d, d], optional
        Mean of ``q q^T``, where the vectors are keys.

    Returns
    -------
    f16 [d, d]
        Exactly the map in use: inverses are those of the rounded entries.
    """
    mean = metric.diagonal().mean()
    eye = torch.eye(len(metric), dtype=torch.float64)
    cost, axes = torch.linalg.eigh(eye if mean <= 0 else metric / mean + _FLOOR * eye)
    root = (axes * cost.clamp(min=_FLOOR).sqrt()) @ axes.mT
    variances, axes = torch.linalg.eigh(root @ spread @ root)
    # an axis has no sign of its own: its largest component is made positive
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    order = balanced_order(variances.clamp(min=0), subspace)
    found, variances = axes[:, order].mT @ root, variances[order].clamp(min=0)
    if queries is not None:
        back = torch.linalg.inv(found)
        asked = (back.mT @ queries @ back).diagonal().clamp(min=0).view(-1, subspace).sum(-1)
        given = variances.view(-1, subspace).sum(-1)
        scale = torch.where((asked > 0) & (given > 0), asked / given, 1.0).pow(0.25).repeat_interleave(subspace)
        found, variances = scale[:, None] * found, scale.square() * variances
    before, after = spread.trace(), variances.sum()
    return fp16(found * (before / after).sqrt() if before > 0 and after > 0 else found)
