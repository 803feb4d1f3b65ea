"""Linear maps of keys and values ahead of a product-quantised cache, chosen from calibration text.

The encoder keeps the squared error of a vector small. What a key's error ``e`` costs is ``(q . e)^2`` summed over the
queries that attend to it, and a value's ``|W_o e|^2``. With ``k' = A k`` and ``q' = A^-T q`` all scores stay as they
are, with ``v' = B v`` and ``B^-1`` on the output all results; the cache holds k' and v' and knows nothing of it. A is
``S Q^T C^(1/2)``: C makes the squared error of k' the cost, and the rotation Q makes the channels of k' uncorrelated
and deals them out so that all sub-spaces have the same product of variances, which is what equal numbers of centroids
want (optimised product quantisation, Ge et al., CVPR 2013, section 3.2). S scales sub-spaces, for the sake of INT8.
"""

import math

import torch

from kvant.golden.kvcache.attention import by_kv_head, causal_mask
from kvant.golden.numeric.rounding import fp16

_POSITIONS = 128  # queries at a time
_FLOOR = 1e-3  # of the mean eigenvalue, added to every one: directions that calibration has not seen still count
_LEAST = 1e-9  # of the largest variance: the product of variances needs a bound


def output_gram(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """``W_h^T W_h`` f32 [Hq, d, d] of an output projection f32 [hidden, Hq * d] of that many query heads."""
    parts = weight.to(torch.float32).unflatten(1, (heads, -1)).transpose(0, 1)
    return parts.mT @ parts


def score_metric(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    gram: torch.Tensor | None = None,
    *,
    sinks: int,
    recent: int,
) -> torch.Tensor:
    """What errors of coded keys cost: C with the cost ``e^T C e`` of an error, summed over all queries of a window.

    An error ``d`` of the score of token j under weight ``p_j`` moves the output by ``p_j d (v_j - o)``. Errors of
    tokens being independent, a query counts ``sum_j p_j^2 |W_o (v_j - o)|^2`` over the tokens that it meets coded.

    Parameters
    ----------
    queries : f32 [Hq, T, d]
    keys, values : float [H, T, d]
        Of one window, after RoPE.
    gram : f32 [Hq, d, d], optional
        See `output_gram`; default identity.
    sinks, recent : int
        First and newest tokens, which queries meet as INT8 rows.

    Returns
    -------
    f64 [H, d, d]
        0 where no query meets a coded token.
    """
    keys, values = keys.float(), values.float()[:, None]
    heads, tokens, dim = keys.shape
    queries = by_kv_head(queries, heads)
    gram = torch.eye(dim).expand(heads, 1, dim, dim) if gram is None else by_kv_head(gram, heads)
    weighed = values @ gram
    energy = (weighed * values).sum(-1)
    metric, token = torch.zeros(heads, dim, dim, dtype=torch.float64), torch.arange(tokens)
    for first in range(max(recent + sinks, 0), tokens, _POSITIONS):
        last = min(first + _POSITIONS, tokens)
        coded = (token[first:last, None] - token[:last] >= recent) & (token[:last] >= sinks)
        q = queries[:, :, first:last]
        p = (q @ keys[:, None, :last].mT / math.sqrt(dim) + causal_mask(first, last)).softmax(-1)
        out = p @ values[:, :, :last]
        distance = energy[:, :, None, :last] - 2 * out @ weighed[:, :, :last].mT
        distance += ((out @ gram) * out).sum(-1, keepdim=True)
        cost = (p.square() * distance.clamp(min=0)).masked_fill(~coded, 0).sum(-1, dtype=torch.float64)
        q = q.to(torch.float64)
        metric += ((q * cost[..., None]).mT @ q).sum(1)
    return metric


def covariance(rows: torch.Tensor) -> torch.Tensor:
    """Covariance f64 [..., d, d] of rows [..., N, d]."""
    rows = rows.to(torch.float64)
    rows = rows - rows.mean(-2, keepdim=True)
    return rows.mT @ rows / rows.shape[-2]


def second_moments(queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Mean of ``q q^T`` f64 [H, d, d] over the query heads and tokens, [Hq, T, d], of each KV head."""
    rows = by_kv_head(queries, kv_heads).flatten(1, 2).to(torch.float64)
    return rows.mT @ rows / rows.shape[-2]


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


def apply(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A x`` f32 of rows [..., N, d] under maps f16 or f32 [..., d, d]."""
    return x.to(torch.float32) @ matrix.mT.to(torch.float32)


def inverse(maps: torch.Tensor) -> torch.Tensor:
    """Inverses f32 [..., d, d] of maps f16 [..., d, d], made in float64."""
    return torch.linalg.inv(maps.to(torch.float64)).to(torch.float32)
