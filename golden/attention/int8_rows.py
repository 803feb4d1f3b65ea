"""Keys and values that stay INT8 rows, sinks and recent tokens, in the numbers of the hardware.

The dot product of a query, which is one INT8 group, with every group of a row becomes a fixed-point logarithm, and the
groups' logarithms are added; the value of a row counts with its attention weight in a block-floating sum: per query and
group of channels one exponent, per channel an integer. Source: docs/numerics.md, "Softmax".
"""

from typing import NamedTuple

import torch

from kvant.golden.attention.softmax import LOG_LIMIT, logarithms, score_factor
from kvant.golden.errors import TensorError
from kvant.golden.numeric.rounding import fp16_to_bits
from kvant.golden.numeric.tensors import (
    as_tensor,
    check_group,
    check_scales,
    check_shape,
    from_groups,
    group_count,
    to_groups,
)

WEIGHT_LIMIT = (1 << 24) - 1
"""Largest attention weight."""

FACTOR_BITS = 17
"""Bits that are kept of the product of a weight and a scale."""

GUARD_BITS = 8
"""Bits of a sum below the last bit of its largest product."""

PLACE_OFFSET = 25 + FACTOR_BITS + GUARD_BITS
"""A scale is ``mantissa * 2^(e - 25)``; a factor with `FACTOR_BITS` bits has its first one at place ``bits + e``."""


class RowSums(NamedTuple):
    """Sums of values under their weights, ``mantissa * 2^exponent``.

    Attributes
    ----------
    mantissa : i64 [..., B, d]
    exponent : i64 [..., B, ceil(d/G)]
        -50 to 15; -50 where nothing counted.
    group : int
    """

    mantissa: torch.Tensor
    exponent: torch.Tensor
    group: int

    def values(self) -> torch.Tensor:
        """The sums, f64 [..., B, d], exact."""
        exponent = _channels(self.exponent, self.group, self.mantissa.shape[-1])
        return torch.ldexp(self.mantissa.to(torch.float64), exponent)


def row_scores(q, rows, *, group: int) -> torch.Tensor:
    """Scores of queries with the groups of rows: the exact dot products ``r_g``.

    Parameters
    ----------
    q : i8 [..., B, d]
        Queries; -128 is exact too.
    rows : i8 [..., N, d]
        N may be 0.
    group : int
        G; a short last group has only its real elements.

    Returns
    -------
    i64 [..., B, N, ceil(d/G)]

    Raises
    ------
    TensorError
        For shapes or dtypes that do not fit.
    """
    q = as_tensor(q, "q", (torch.int8,))
    rows = _checked_elements(rows, group)
    if q.dim() < 2 or q.shape[-1] != rows.shape[-1]:
        raise TensorError(f"q: shape {tuple(q.shape)}; legal is [..., B, {rows.shape[-1]}]")
    # float64 multiplies matrices faster, and holds every sum; groups before the vectors: [..., g, B or N, G]
    q_groups, row_groups = (to_groups(x.to(torch.float64), group).transpose(-2, -3) for x in (q, rows))
    return (q_groups @ row_groups.mT).movedim(-3, -1).to(torch.int64)


def row_logarithms(q, q_scale, rows, row_scale, *, group: int) -> torch.Tensor:
    """Logarithms of rows, ``z = sum_g rne(r_g * c * s_q * s_g * 2^16)``, limited to `LOG_LIMIT` in magnitude.

    Every group is rounded, and limited, on its own: a row of n groups is off by at most n/2 units of 2^-16.

    Parameters
    ----------
    q : i8 [..., B, d]
        Queries, each one INT8 group.
    q_scale : f16 [..., B]
    rows : i8 [..., N, d]
    row_scale : f16 [..., N, ceil(d/G)]
    group : int

    Returns
    -------
    i64 [..., B, N]

    Raises
    ------
    TensorError
        For shapes or dtypes that do not fit, scales that are negative or not finite.
    """
    rows, row_scale = _checked_rows(rows, row_scale, group)
    r = row_scores(q, rows, group=group)
    q_scale = as_tensor(q_scale, "q_scale", (torch.float16,))
    check_shape(q_scale, "q_scale", tuple(r.shape[:-2]))
    check_scales(q_scale, "q_scale")
    if not r.shape[-2]:
        return torch.zeros(r.shape[:-1], dtype=torch.int64)
    factor = score_factor(q_scale[..., None, None], row_scale[..., None, :, :], q.shape[-1])
    return logarithms(r, factor).sum(-1).clamp_(-LOG_LIMIT, LOG_LIMIT)


def weighted_rows(weights, rows, row_scale, *, group: int) -> RowSums:
    """Sums of rows under their weights, row by row from the first.

    The product of weight and scale of a group is cut to its first 17 bits. The exponent of a sum is that of the largest
    factor so far; what is added, and the sum when the exponent grows, is shifted down to it and rounded to minus
    infinity. A row whose weight or scale is 0 changes nothing.

    Parameters
    ----------
    weights : integers [..., B, N]
        0 to 2^24 - 1.
    rows : i8 [..., N, d]
        N may be 0.
    row_scale : f16 [..., N, ceil(d/G)]
    group : int

    Raises
    ------
    TensorError
        For shapes or dtypes that do not fit, weights outside their range, scales that are negative or not finite.
    """
    rows, row_scale = _checked_rows(rows, row_scale, group)
    tokens, d = rows.shape[-2:]
    if weights.dim() < 2 or weights.shape[-1] != tokens or weights.dtype not in (torch.int32, torch.int64):
        shape = f"{weights.dtype} {tuple(weights.shape)}"
        raise TensorError(f"weights: {shape}; legal are int64 or int32 [..., B, {tokens}]")
    weights = weights.to(torch.int64)
    if ((weights < 0) | (weights > WEIGHT_LIMIT)).any():
        raise TensorError(f"weights: {int(weights.min())} to {int(weights.max())}; legal are 0 to {WEIGHT_LIMIT}")
    if not tokens:
        groups = row_scale.shape[-1]
        nothing = torch.zeros((*weights.shape[:-1], d), dtype=torch.int64)
        return RowSums(nothing, torch.full((*weights.shape[:-1], groups), -PLACE_OFFSET), group)
    factor, place = _factors(weights, row_scale)
    exponent = place.cummax(-2).values
    # float64 is exact: products have 25 bits, sums of up to 2^20 rows 53, and what shifts them is a power of two
    scaled = torch.ldexp(factor.to(torch.float64), GUARD_BITS + place - exponent)
    growth = exponent.diff(dim=-2, prepend=exponent[..., :1, :])
    kept = torch.ldexp(torch.ones(growth.shape, dtype=torch.float64), -growth)
    elements = to_groups(rows, group)
    mantissa = torch.zeros((*weights.shape[:-1], *elements.shape[-2:]), dtype=torch.float64)
    for n in range(tokens):
        product = elements[..., None, n, :, :].to(torch.float64) * scaled[..., n, :, None]
        mantissa.mul_(kept[..., n, :, None]).floor_().add_(product.floor_())
    return RowSums(from_groups(mantissa, d).to(torch.int64), exponent[..., -1, :] - PLACE_OFFSET, group)


def _checked_elements(rows, group: int) -> torch.Tensor:
    """Rows, possibly none, or a refusal."""
    check_group(group)
    if isinstance(rows, torch.Tensor) and rows.dim() >= 2 and rows.shape[-2] == 0 and rows.shape[-1]:
        if rows.dtype != torch.int8:
            raise TensorError(f"rows: dtype {str(rows.dtype).removeprefix('torch.')}; legal: int8")
        return rows
    rows = as_tensor(rows, "rows", (torch.int8,))
    if rows.dim() < 2:
        raise TensorError(f"rows: shape {tuple(rows.shape)}; legal is [..., N, d]")
    return rows


def _checked_rows(rows, row_scale, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and their scales, or a refusal."""
    rows = _checked_elements(rows, group)
    if not rows.shape[-2]:
        return rows, torch.zeros((*rows.shape[:-1], group_count(rows.shape[-1], group)), dtype=torch.float16)
    row_scale = as_tensor(row_scale, "row_scale", (torch.float16,))
    check_shape(row_scale, "row_scale", (*rows.shape[:-1], group_count(rows.shape[-1], group)))
    check_scales(row_scale, "row_scale")
    return rows, row_scale


def _factors(weights: torch.Tensor, row_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of weights [..., B, N] and scales [..., N, g]: 17 bits and the place of the first, [..., B, N, g].

    The place counts from 1 on; it is 0 for a product of 0.
    """
    bits = fp16_to_bits(row_scale).to(torch.int64)
    stored = bits >> 10 & 31
    mantissa = torch.where(stored > 0, 1 << 10, 0) | bits & 1023
    product = weights[..., None] * mantissa[..., None, :, :]
    length = torch.frexp(product.to(torch.float64)).exponent.to(torch.int64)
    factor = torch.where(
        length > FACTOR_BITS,
        product >> (length - FACTOR_BITS).clamp(min=0),
        product << (FACTOR_BITS - length).clamp(min=0),
    )
    return factor, torch.where(product > 0, length + stored.clamp(min=1)[..., None, :, :], 0)


def _channels(per_group: torch.Tensor, group: int, d: int) -> torch.Tensor:
    """What belongs to a group [..., ceil(d/G)], for each of its channels [..., d]."""
    return per_group.repeat_interleave(group, -1)[..., :d]
