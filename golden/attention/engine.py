"""Attention over caches of M-ANT groups and of INT8 rows, in the very numbers of the hardware.

Two products of the linear array with a softmax between. Scores are the fp32 outputs of a linear layer whose weights are
the keys, group by group along the head; a score becomes a base-2 logarithm, the logarithms of a query become weights of
24 bits against the largest one. Values in windows are the weights of a second linear layer, whose INT8 activations are
the attention weights, window by window; values in INT8 rows (sinks, the open window, a whole INT8 cache) are summed
under the 24-bit weights themselves. Source: docs/numerics.md, "Attention engine".
"""

import math
from typing import NamedTuple

import torch

from kvant.golden.attention.int8_rows import weighted_rows
from kvant.golden.attention.normalize import normalize
from kvant.golden.attention.products import array_products
from kvant.golden.attention.softmax import (
    LOG_LIMIT,
    distance_logarithms,
    reference,
    score_logarithms,
    weights,
)
from kvant.golden.attention.time_keys import time_key_logarithms
from kvant.golden.errors import TensorError
from kvant.golden.kvcache.int8 import Int8Cache
from kvant.golden.kvcache.spatial import SpatialCache, int8_rows
from kvant.golden.kvcache.temporal import TemporalCache
from kvant.golden.numeric.codes import INT8
from kvant.golden.numeric.int8 import Int8Groups, int8_groups, port_rule, quantize_int8
from kvant.golden.numeric.rounding import fp16
from kvant.golden.numeric.tensors import as_tensor, from_groups, to_groups

WEIGHT_PLACES = 9
"""An attention weight w becomes the fp16 number ``w * 2^-9`` before it is an INT8 element: the largest is 2^15."""

FRACTION = 24
"""Fraction bits of the denominator: its unit is the smallest fp16 number, that of the scales of weight groups."""


class Attended(NamedTuple):
    """What a batch of queries gives.

    Attributes
    ----------
    out : f32 [..., B, d]
    empty : bool [..., B]
        The query sees no key; its output is 0.
    nonfinite : bool
        A query had a NaN or an infinity.
    """

    out: torch.Tensor
    empty: torch.Tensor
    nonfinite: bool


def attend(
    q,
    keys: SpatialCache | TemporalCache | Int8Cache,
    values: TemporalCache | Int8Cache,
    *,
    first=0,
    end=None,
    slope=None,
    planes: int = 1,
) -> Attended:
    """Attention of queries over one sequence, bit for bit as the hardware gives it.

    Parameters
    ----------
    q : f16 [..., B, d]
        NaN counts as 0 and an infinity as 65504 of its sign; each becomes INT8 groups of G along the head. Leading axes
        are KV heads; B are all queries of a KV head.
    keys, values
        Caches of the same T tokens, with the leading axes of *q* and one group. Values along time have no offsets, and
        a coefficient for every group; keys along time share one coefficient a window.
    first, end : int or integers, broadcastable to [..., B]
        A query sees the keys ``first <= t < end``: from 0 and up to T by default, which are also the limits of both.
    slope : f16, broadcastable to [..., B], optional
        Of a linear position bias: ``slope * (end - 1 - t)`` is taken from the logarithms.
    planes : 1 or 2
        INT8 groups that the weights of a window become, see `window_groups`.

    Raises
    ------
    TensorError
        For shapes or dtypes that do not fit, caches of other kinds or of different tokens.
    """
    q = as_tensor(q, "q", (torch.float16,))
    groups = quantize_int8(q, keys.group, "q")
    tokens = _check_caches(keys, values, groups.q.shape)
    shape = tuple(groups.q.shape[:-1])
    first = _limits(first, "first", tokens, shape)
    end = _limits(tokens if end is None else end, "end", tokens, shape)
    seen = _seen(first, end, tokens)
    z = biased_logarithms(key_logarithms(q, groups, keys), end=end, slope=slope)
    w = weights(z, reference(z, seen), seen)
    out = mix_values(w, values, planes=planes)
    return Attended(out, ~seen.any(-1), groups.nonfinite)


def key_logarithms(q, groups: Int8Groups, keys: SpatialCache | TemporalCache | Int8Cache) -> torch.Tensor:
    """Logarithms of all keys, i64 [..., B, T], without position biases.

    Parameters
    ----------
    q : f16 [..., B, d]
        Queries as they come: keys along time fold scales into them.
    groups : Int8Groups
        The same as INT8 groups of G along the head, for all other keys.
    keys
        Sinks are INT8 groups.
    """
    if isinstance(keys, TemporalCache):
        return time_key_logarithms(q, groups, keys)
    return score_logarithms(key_scores(groups, keys), groups.q.shape[-1])


def key_scores(queries: Int8Groups, keys: SpatialCache | Int8Cache) -> torch.Tensor:
    """Scores of queries with keys along the head, as the linear array adds them up, f32 [..., B, T].

    Parameters
    ----------
    queries : Int8Groups
        i8 [..., B, d] and f16 [..., B, ceil(d/G)].
    keys : SpatialCache or Int8Cache
        Sinks are INT8 groups.
    """
    if isinstance(keys, Int8Cache):
        codes, scale, int8 = torch.zeros(keys.q.shape, dtype=torch.uint8), keys.scale, keys.q
        coefficient = torch.full(scale.shape, INT8, dtype=torch.uint8)
    else:
        sinks = keys.sink.shape[-2]
        codes, scale, coefficient = keys.codes, keys.scale.clone(), keys.coefficient.clone()
        int8 = torch.zeros(codes.shape, dtype=torch.int8)
        int8[..., :sinks, :], scale[..., :sinks, :], coefficient[..., :sinks, :] = keys.sink, keys.sink_scale, INT8
    return array_products(queries, codes, scale, coefficient, int8, group=keys.group)


def biased_logarithms(z: torch.Tensor, *, end: torch.Tensor, slope=None) -> torch.Tensor:
    """Logarithms i64 [..., B, T] less what position biases take, at most `LOG_LIMIT` in magnitude.

    Parameters
    ----------
    z : i64 [..., B, T]
        At most twice `LOG_LIMIT` in magnitude.
    end : i64 [..., B]
        The token behind the last one that a query sees.
    slope : f16, broadcastable to [..., B], optional
        See `attend`. What lies at or behind *end* has no meaning.
    """
    if slope is not None:
        slope = as_tensor(slope, "slope", (torch.float16,)).expand(end.shape)
        distance = (end[..., None] - 1 - torch.arange(z.shape[-1])).clamp_(min=0)
        z = z - distance_logarithms(slope[..., None], distance)
    return z.clamp(-LOG_LIMIT, LOG_LIMIT)


def mix_values(w: torch.Tensor, values: TemporalCache | Int8Cache, *, planes: int = 1) -> torch.Tensor:
    """Means of values f32 [..., B, d] under weights i64 [..., B, T] of 24 bits; 0 where all weights are 0.

    *planes* as in `attend`.
    """
    if isinstance(values, Int8Cache):
        return normalize(rows_total(w), rows=_weighted(w, values.q, values.scale, values.group), fraction=FRACTION)
    windows, sinks = values.scale.shape[-2], values.sink.shape[-2]
    total, parts = torch.zeros(w.shape[:-1], dtype=torch.int64), {}
    if windows:
        coded = 0.0
        for groups in window_groups(w, windows=windows, sinks=sinks, group=values.group, planes=planes):
            coded = coded + window_sums(groups, values)
            total += windows_total(groups, values.group)
        parts["coded"] = coded
    if sinks:
        parts["rows"] = _weighted(w[..., :sinks], values.sink, values.sink_scale, values.group)
        total += rows_total(w[..., :sinks])
    fresh = max(windows * values.group, sinks)  # an open window may hold sinks, which are staged as 0
    if fresh < w.shape[-1]:
        parts["staged"] = staged_sums(w[..., fresh:], values)
        total += rows_total(w[..., fresh:])
    return normalize(total, **parts, fraction=FRACTION)


def window_groups(w: torch.Tensor, *, windows: int, sinks: int, group: int, planes: int = 1) -> list[Int8Groups]:
    """Weights of the tokens in windows as activations of the linear array, which makes INT8 groups of them.

    A second plane is what the first one leaves, ``fp16(x - s8 * q)``, as groups of its own: one INT8 group a window has
    steps of 1/127 of the window's largest weight, which the sum of many lesser ones shows.

    Returns
    -------
    list of Int8Groups
        Of each plane i8 [..., B, W*G] and f16 [..., B, W]. The weight of a sink counts as 0 here.
    """
    if planes not in (1, 2):
        raise TensorError(f"planes = {planes!r}: legal is 1 or 2")
    x = torch.ldexp(w[..., : windows * group].to(torch.float64), torch.tensor(-WEIGHT_PLACES))
    x[..., :sinks] = 0
    x, result = to_groups(x, group), []
    for _ in range(planes):
        x = fp16(x).to(torch.float64)
        q, scale = int8_groups(x)
        result.append(Int8Groups(from_groups(q, windows * group), scale, False))
        x = x - q * scale.to(torch.float64)[..., None]  # multiples of 2^-24 up to 2^15: exact
    return result


def window_sums(groups: Int8Groups, values: TemporalCache) -> torch.Tensor:
    """Sums of values in windows under a plane of `window_groups`, as the linear array gives them, f32 [..., B, d]."""
    return array_products(groups, values.codes.mT, values.scale.mT, values.coefficient.mT, None, group=values.group)


def windows_total(groups: Int8Groups, group: int) -> torch.Tensor:
    """Sum of the weights that multiply the values in windows, i64 [..., B], in units of ``2^-FRACTION``."""
    units = torch.ldexp(groups.scale.to(torch.float64), torch.tensor(FRACTION)).to(torch.int64)
    return (units * to_groups(groups.q, group).sum(-1, dtype=torch.int64)).sum(-1)


def rows_total(w: torch.Tensor) -> torch.Tensor:
    """Sum of the weights i64 [..., N] that multiply rows, i64 [...], in units of ``2^-FRACTION``."""
    return w.sum(-1) << (FRACTION - WEIGHT_PLACES)


def staged_sums(w: torch.Tensor, values: TemporalCache) -> torch.Tensor:
    """Sums of the last rows of the open window under their weights i64 [..., B, N], exact in f64 [..., B, d].

    Units are those of `window_sums`: a weight counts ``2^-WEIGHT_PLACES``.
    """
    rows = values.staged[..., values.staged.shape[-2] - w.shape[-1] :, :]
    sums = w.to(torch.float64) @ rows.to(torch.float64)  # 24, 7 and 8 bits
    return torch.ldexp(sums * values.staged_scale.to(torch.float64)[..., None, :], torch.tensor(-WEIGHT_PLACES))


def float64_attention(q, keys, values, *, first=0, end=None, slope=None) -> torch.Tensor:
    """Attention in float64 over what the caches hold, f64 [..., B, d]: what the hardware is measured against.

    Parameters are those of `attend`; a query that sees no key gives 0. Queries over keys along time are taken as the
    port takes them, others as INT8 groups.
    """
    q = as_tensor(q, "q", (torch.float16,))
    groups = quantize_int8(q, keys.group, "q")
    tokens = _check_caches(keys, values, groups.q.shape)
    shape, head_dim = tuple(groups.q.shape[:-1]), groups.q.shape[-1]
    end = _limits(tokens if end is None else end, "end", tokens, shape)
    seen = _seen(_limits(first, "first", tokens, shape), end, tokens)
    queries = used_queries(q, groups, keys).to(torch.float64)
    scores = queries @ keys.dequantize().to(torch.float64).mT / math.sqrt(head_dim)
    if slope is not None:
        distance = end[..., None] - 1 - torch.arange(tokens)
        slope = as_tensor(slope, "slope", (torch.float16,)).to(torch.float64)
        scores = scores - slope[..., None] * distance * math.log(2)
    scores = torch.where(seen, scores, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ values.dequantize().to(torch.float64)


def used_queries(q, groups: Int8Groups, keys: SpatialCache | TemporalCache | Int8Cache) -> torch.Tensor:
    """Queries f32 [..., B, d] as they meet the keys, before scales are folded into them; see `key_logarithms`."""
    if isinstance(keys, TemporalCache):
        return port_rule(q).to(torch.float32)
    return int8_rows(groups.q, groups.scale, keys.group)


def _check_caches(keys, values, shape: torch.Size) -> int:
    """The number of tokens, or a refusal; *shape* is that of the queries."""
    if not isinstance(keys, SpatialCache | TemporalCache | Int8Cache):
        raise TensorError(f"keys: {type(keys).__name__}; legal is SpatialCache, TemporalCache or Int8Cache")
    if not isinstance(values, TemporalCache | Int8Cache):
        raise TensorError(f"values: {type(values).__name__}; legal is TemporalCache or Int8Cache")
    if len(shape) < 2:
        raise TensorError(f"q: shape {tuple(shape)}; legal is [..., B, d]")
    expected = (*shape[:-2], token_count(keys), shape[-1])
    for cache, name in ((keys, "keys"), (values, "values")):
        if cache.group != keys.group:
            raise TensorError(f"{name}: groups of {cache.group}; legal is {keys.group}, as keys have")
        if isinstance(cache, TemporalCache):
            found = (*cache.scale.shape[:-2], token_count(cache), cache.scale.shape[-1])
        else:
            found = tuple((cache.q if isinstance(cache, Int8Cache) else cache.codes).shape)
        if found != expected:
            raise TensorError(f"{name}: tokens of shape {found}; legal is {expected}")
    if isinstance(values, TemporalCache) and (values.coefficient.shape != values.scale.shape or values.offset.any()):
        raise TensorError("values: an offset or a shared coefficient; legal is neither")
    if isinstance(keys, TemporalCache) and keys.coefficient.shape != (*keys.scale.shape[:-1], 1):
        raise TensorError("keys: a coefficient for every channel; legal along time is one a window")
    return expected[-2]


def token_count(cache: SpatialCache | TemporalCache | Int8Cache) -> int:
    """The number of tokens of a cache."""
    if isinstance(cache, TemporalCache):
        return cache.codes.shape[-2] + cache.staged.shape[-2]
    return (cache.q if isinstance(cache, Int8Cache) else cache.codes).shape[-2]


def _limits(value, name: str, tokens: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Positions i64 of *shape*."""
    value = torch.as_tensor(value)
    if value.dtype not in (torch.int64, torch.int32):
        raise TensorError(f"{name}: dtype {str(value.dtype).removeprefix('torch.')}; legal are int64 and int32")
    if value.numel() and (int(value.min()) < 0 or int(value.max()) > tokens):
        raise TensorError(f"{name}: {int(value.min())} to {int(value.max())}; legal are 0 to the {tokens} tokens")
    return value.to(torch.int64).expand(shape)


def _seen(first: torch.Tensor, end: torch.Tensor, tokens: int) -> torch.Tensor:
    """The keys that queries see, bool [..., B, T]."""
    token = torch.arange(tokens)
    return (token >= first[..., None]) & (token < end[..., None])


def _weighted(w: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """Block-floating sums of INT8 rows, f64 [..., B, d], in the units of `staged_sums`."""
    return torch.ldexp(weighted_rows(w, rows, scale, group=group).values(), torch.tensor(-WEIGHT_PLACES))
