"""Linear maps of keys and values ahead of a cache, chosen from calibration text and applied by the host.

A quantiser keeps the squared error of what it stores small. What a key's error ``e`` costs is ``(q . e)^2`` summed
over the queries that attend to it, and a value's ``|W_o e|^2``. With ``k' = A k`` and ``q' = A^-T q`` all scores stay
as they are, with ``v' = B v`` and ``B^-1`` on the output all results; the cache holds k' and v' and knows nothing of
it. For a token that is a product of d x d for each head; B and its inverse can as well be folded into the projections
before and behind attention.

`balanced_map` is for scalar quantisers, whose error in a channel follows the spread of that channel or of a group of
channels; `kvant.golden.pq.transform` has the map for product quantisation.
"""

import math
from collections.abc import Callable

import torch

from kvant.golden.kvcache.attention import by_kv_head, causal_mask, to_port
from kvant.golden.numeric.rounding import fp16

MAP_BITS = 16
"""Bits of an entry of a map."""

_POSITIONS = 128  # queries at a time
_FLOOR = 1e-3  # of the mean eigenvalue, added to every one: directions that calibration has not seen still count


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
    recent: int = 0,
    window: int = 1,
) -> torch.Tensor:
    """What errors of coded keys cost: C with the cost ``e^T C e`` of an error, summed over all queries of a text.

    An error ``d`` of the score of token j under weight ``p_j`` moves the output by ``p_j d (v_j - o)``. Errors of
    tokens being independent, a query counts ``sum_j p_j^2 |W_o (v_j - o)|^2`` over the tokens that it meets coded.

    Parameters
    ----------
    queries : f32 [Hq, T, d]
    keys, values : float [H, T, d]
        Of one text, after RoPE.
    gram : f32 [Hq, d, d], optional
        See `output_gram`; default identity.
    sinks, recent : int
        First and newest tokens, which queries meet as INT8 rows.
    window : int
        Tokens are coded in windows of so many, when all of them are there and older than *recent*.

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
    for first in range(recent + sinks, tokens, _POSITIONS):
        last = min(first + _POSITIONS, tokens)
        finished = (token[first:last, None] + 1 - recent) // window * window
        coded = (token[:last] < finished) & (token[:last] >= sinks)
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


def balanced_map(metric: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """The map A of vectors of one head for a scalar quantiser.

    With a squared error in channel i in proportion to its variance, errors cost the sum over i of
    ``(A S A^T)_ii (A^-T C A^-1)_ii``. Let ``C^(1/2) S C^(1/2) = V L V^T``. With ``A = R L^(-1/4) V^T C^(1/2)`` both
    factors are the diagonal of ``R L^(1/2) R^T``, and a rotation R that makes it constant brings the sum to
    ``(sum_i L_i^(1/2))^2 / d``, the least value that there is. Channels alike are also what groups along the head want,
    which share a scale, and INT8 rows.

    Parameters
    ----------
    metric : f64 [d, d]
        C, cost of an error; 0 counts as identity.
    spread : f64 [d, d]
        S, covariance of what the quantiser meets.

    Returns
    -------
    f16 [d, d]
        Exactly the map in use: inverses are those of the rounded entries. The total variance stays as it is.
    """
    eye = torch.eye(len(metric), dtype=torch.float64)
    root, spread_root = (_floored_root(m, eye) for m in (metric, spread))
    # singular values of C^(1/2) S^(1/2) are the roots of L; the product of C^(1/2) S C^(1/2) is not formed
    axes, size, _ = torch.linalg.svd(root @ spread_root)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # an axis has no sign of its own
    found = equalising_rotation(size) @ (size.rsqrt()[:, None] * (axes.mT @ root))
    before, after = spread.trace(), (found @ spread @ found.mT).trace()
    return fp16(found * (before / after).sqrt() if before > 0 else found)


def _floored_root(matrix: torch.Tensor, eye: torch.Tensor) -> torch.Tensor:
    """Symmetric root of a moment matrix over its mean eigenvalue, none of its own less than a small part of that."""
    mean = matrix.diagonal().mean()
    size, axes = torch.linalg.eigh(eye if mean <= 0 else matrix / mean + _FLOOR * eye)
    return (axes * size.clamp(min=_FLOOR).sqrt()) @ axes.mT


def equalising_rotation(size: torch.Tensor) -> torch.Tensor:
    """A rotation R f64 [d, d] for which ``R diag(size) R^T`` has a constant diagonal.

    Hadamard's matrix does it for any sizes where d is a power of two, and mixes all channels besides, so that what
    comes out is close to normal whatever went in. Its product with Hartley's for the odd part of d comes near;
    rotations of two channels at a time then finish (Schur and Horn).
    """
    d = len(size)
    odd = d // (d & -d)
    angle = 2 * math.pi / odd * torch.outer(torch.arange(odd), torch.arange(odd)).double()
    rotation = (angle.cos() + angle.sin()) / math.sqrt(odd)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    for _ in range((d // odd).bit_length() - 1):
        rotation = torch.kron(rotation, step)
    mean = float(size.mean())
    if odd == 1:
        return rotation
    for _ in range(d - 1):
        product = rotation * size @ rotation.mT
        high, low = int(product.diagonal().argmax()), int(product.diagonal().argmin())
        a, b, c = float(product[high, high]), float(product[low, low]), float(product[high, low])
        if a - b <= 1e-12 * mean:
            break
        # t = tan of the angle that brings the larger one to the mean: (b - mean) t^2 + 2 c t + (a - mean) = 0
        root = math.sqrt(max(c * c - (b - mean) * (a - mean), 0.0))
        t = (a - mean) / (-c + math.copysign(root, -c) if c else root)
        cosine = 1 / math.hypot(1, t)
        turn = torch.tensor([[cosine, t * cosine], [-t * cosine, cosine]], dtype=torch.float64)
        rotation[[high, low]] = turn @ rotation[[high, low]]
    return rotation


class MappedAttention:
    """An attention strategy behind maps: keys, queries and values pass through them, outputs back.

    Parameters
    ----------
    inner : callable
        Of a layer's number, queries, keys and values, as `kvant.golden.models.llama.Llama` calls it.
    keys, values : f16 [L, H, d, d]
        Maps A of both.
    """

    def __init__(self, inner: Callable, keys: torch.Tensor, values: torch.Tensor):
        self.inner, self.keys, self.values = inner, keys, values
        self._meet, self._leave = inverse(keys).mT, inverse(values)

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        heads = keys.shape[1]
        queries = apply(self._meet[layer][:, None], queries.unflatten(1, (heads, -1))).flatten(1, 2)
        mixed = self.inner(layer, queries, apply(self.keys[layer], keys), apply(self.values[layer], values))
        return apply(self._leave[layer][:, None], mixed.unflatten(1, (heads, -1))).flatten(1, 2)


def apply(matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A x`` f32 of rows [..., N, d] under maps f16 or f32 [..., d, d]."""
    return x.to(torch.float32) @ matrix.mT.to(torch.float32)


def inverse(maps: torch.Tensor) -> torch.Tensor:
    """Inverses f32 [..., d, d] of maps f16 [..., d, d], made in float64."""
    return torch.linalg.inv(maps.to(torch.float64)).to(torch.float32)


def mapped_mean(mean: torch.Tensor, matrix: torch.Tensor | None) -> torch.Tensor:
    """``fp16(A mean)`` of a mean f16 [..., d] and a map f16 [..., d, d], or the mean itself without one."""
    if matrix is None:
        return mean
    return to_port((matrix.to(torch.float64) * mean.to(torch.float64)[..., None, :]).sum(-1))
