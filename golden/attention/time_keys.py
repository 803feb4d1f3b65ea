"""Scores of keys along time, in the very numbers of the hardware.

A key's channel ch is ``scale[w, ch] * level + s8[ch] * offset[w, ch]`` in window w. The reduction of a score runs
across channels, so scales go to the query: per window INT8 groups of ``fp16(q * scale)``, which the array multiplies
with the window's levels. Rows of the open window, and the offsets of every window, are INT8 numbers against the query
folded with the static scales ``s8``. Source: docs/numerics.md, "Attention engine".
"""

import torch

from kvant.golden.attention.int8_rows import row_scores
from kvant.golden.attention.products import array_products
from kvant.golden.attention.softmax import logarithms, score_factor, score_logarithms
from kvant.golden.kvcache.temporal import TemporalCache
from kvant.golden.numeric.codes import INT8
from kvant.golden.numeric.int8 import Int8Groups, int8_groups, port_rule
from kvant.golden.numeric.rounding import FP16_MAX, fp16
from kvant.golden.numeric.tensors import from_groups, to_groups


def folded_queries(q: torch.Tensor, scale: torch.Tensor, group: int) -> Int8Groups:
    """INT8 groups along the head of ``fp16(q * scale)``, saturating at +-65504 without a flag.

    Parameters
    ----------
    q : f16 [..., d]
        After the port rule.
    scale : f16, broadcastable to [..., d]
    group : int
        G: a head of more channels has a scale for each G of them.
    """
    folded = fp16(q.to(torch.float64) * scale.to(torch.float64))
    elements, scales = int8_groups(to_groups(folded.clamp(-FP16_MAX, FP16_MAX), group))
    return Int8Groups(from_groups(elements, q.shape[-1]), scales, False)


def time_key_logarithms(q, groups: Int8Groups, keys: TemporalCache) -> torch.Tensor:
    """Logarithms of all keys, i64 [..., B, T], less than twice `LOG_LIMIT` in magnitude.

    Parameters
    ----------
    q : f16 [..., B, d]
        Queries as they come.
    groups : Int8Groups
        The same as INT8 groups of G along the head, which sinks meet.
    keys : TemporalCache
        With one coefficient a window.
    """
    q, group, d = port_rule(q), keys.group, q.shape[-1]
    static = folded_queries(q, keys.staged_scale[..., None, :], group)
    parts = []
    if keys.scale.shape[-2]:
        z = window_logarithms(q, keys) + offset_logarithms(static, keys.offset, group)[..., None]
        parts.append(z.flatten(-2))
    if keys.staged.shape[-2]:
        parts.append(score_logarithms(_int8_products(static, keys.staged, None, group), d))
    z = torch.cat(parts, dim=-1)
    if sinks := keys.sink.shape[-2]:
        z[..., :sinks] = score_logarithms(_int8_products(groups, keys.sink, keys.sink_scale, group), d)
    return z


def window_logarithms(q: torch.Tensor, keys: TemporalCache) -> torch.Tensor:
    """Logarithms of the tokens in windows without their offsets, i64 [..., B, W, G]; *q* after the port rule."""
    folded = folded_queries(q[..., None, :, :], keys.scale[..., None, :], keys.group)  # [..., W, B, d]
    codes = keys.codes.unflatten(-2, (-1, keys.group))
    shape = (*codes.shape[:-1], folded.scale.shape[-1])
    ones = torch.ones(shape, dtype=torch.float16)
    coefficient = keys.coefficient[..., None].expand(shape)
    y = array_products(folded, codes, ones, coefficient, None, group=keys.group)  # [..., W, B, G]
    return score_logarithms(y, q.shape[-1]).transpose(-2, -3)


def offset_logarithms(static: Int8Groups, offset: torch.Tensor, group: int) -> torch.Tensor:
    """What the offsets i8 [..., W, d] of windows add to the logarithms of their tokens, i64 [..., B, W].

    The sum over the groups of the head of ``rne(r * c * s * 2^16)``, with the exact dot product r of a
    group of the query folded with the static scales and its scale s: every product is rounded once.
    """
    r = row_scores(static.q, offset, group=group)  # [..., B, W, g]
    one = torch.ones((), dtype=torch.float16)
    return logarithms(r, score_factor(static.scale[..., None, :], one, static.q.shape[-1])).sum(-1)


def _int8_products(x: Int8Groups, rows: torch.Tensor, scale: torch.Tensor | None, group: int) -> torch.Tensor:
    """Scores f32 [..., B, N] of INT8 rows; with scale 1 where none is given."""
    shape = (*rows.shape[:-1], x.scale.shape[-1])
    scale = torch.ones(shape, dtype=torch.float16) if scale is None else scale
    codes, coefficient = torch.zeros(rows.shape, dtype=torch.uint8), torch.full(shape, INT8, dtype=torch.uint8)
    return array_products(x, codes, scale, coefficient, rows, group=group)
