"""Values, and keys, grouped along time: rows staged as INT8, full windows requantised to 4 bits.

Source: docs/numerics.md, "The V cache"; M-ANT (HPCA 2025, section V, two-phase quantisation of the value cache).
"""

from dataclasses import dataclass

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.choice import Tables, choose, choose_shared, group_statistics
from kvant.golden.kvcache.rows import centred, channel_vector, check_sinks
from kvant.golden.kvcache.spatial import int8_rows
from kvant.golden.numeric.codes import decode, encode_int8, requantized_scale
from kvant.golden.numeric.int8 import int8_groups
from kvant.golden.numeric.rounding import fp16, rne
from kvant.golden.numeric.tensors import as_tensor, check_group, from_groups, to_groups

INT8_MAX = 127
"""Largest magnitude of a staged element."""


@dataclass(frozen=True)
class TemporalCache:
    """A cache grouped along time: W windows of G tokens, and the open window.

    Attributes
    ----------
    codes : u8 [..., W*G, d]
        0x0 in the rows of sinks.
    scale : f16 [..., W, d]
    coefficient : u8 [..., W, d], or [..., W, 1] when shared
    offset : i8 [..., W, d]
        0 where no offset is taken out.
    staged : i8 [..., T - W*G, d]
        The open window; 0 in the rows of sinks.
    staged_scale : f16 [..., d]
        ``s8`` of every channel.
    sink : i8 [..., min(sinks, T), d]
    sink_scale : f16 [..., min(sinks, T), ceil(d/G)]
    saturated : i64 [...]
        Values that were clamped while they were staged.
    nonfinite : bool
        A NaN or an infinity was met.
    group : int
    """

    codes: torch.Tensor
    scale: torch.Tensor
    coefficient: torch.Tensor
    offset: torch.Tensor
    staged: torch.Tensor
    staged_scale: torch.Tensor
    sink: torch.Tensor
    sink_scale: torch.Tensor
    saturated: torch.Tensor
    nonfinite: bool
    group: int

    def dequantize(self) -> torch.Tensor:
        """All T rows as the cache holds them: windows, open window, sinks; f32 [..., T, d].

        A mean that was subtracted stays so. Products and sums are exact in float64 and rounded once.
        """
        levels = decode(self.codes, self.coefficient.repeat_interleave(self.group, -2)) if self.codes.numel() else None
        offset = self.offset.to(torch.float64) * self.staged_scale.to(torch.float64)[..., None, :]
        parts = [self.staged_rows(self.staged)]
        if levels is not None:
            scale = self.scale.to(torch.float64).repeat_interleave(self.group, -2)
            parts.insert(0, (levels * scale + offset.repeat_interleave(self.group, -2)).to(torch.float32))
        rows = torch.cat(parts, dim=-2)
        rows[..., : self.sink.shape[-2], :] = int8_rows(self.sink, self.sink_scale, self.group)
        return rows

    def staged_rows(self, q: torch.Tensor) -> torch.Tensor:
        """Values f32 of staged rows i8 [..., n, d]."""
        return q * self.staged_scale.to(torch.float32)[..., None, :]


@dataclass(frozen=True)
class Staging:
    """Rows as the first phase holds them.

    Attributes
    ----------
    q : i8 [..., T, d]
        0 in the rows of sinks.
    scale : f16 [..., d]
    sink : i8 [..., min(sinks, T), d]
    sink_scale : f16 [..., min(sinks, T), ceil(d/G)]
    saturated : i64 [...]
    nonfinite : bool
    """

    q: torch.Tensor
    scale: torch.Tensor
    sink: torch.Tensor
    sink_scale: torch.Tensor
    saturated: torch.Tensor
    nonfinite: bool


def stage_rows(v, prefill: int, *, group: int, mean=None, floor=None, sinks: int = 0) -> Staging:
    """The first phase: INT8 rows against the scale that the prefill fixed.

    Parameters
    ----------
    v : f16 [..., T, d]
    prefill : 1 .. T
        Rows of the first call.
    group, mean, floor, sinks
        As in `temporal_cache`.
    """
    v = as_tensor(v, "v", (torch.float16,))
    check_group(group), check_sinks(sinks)
    tokens, d = v.shape[-2:]
    if isinstance(prefill, bool) or not isinstance(prefill, int) or not 1 <= prefill <= tokens:
        raise TensorError(f"prefill = {prefill!r}: legal is an integer from 1 to the {tokens} rows")
    x = _centred(v, mean)
    largest = torch.zeros((*v.shape[:-2], d), dtype=torch.float64)
    if floor is not None:
        largest = largest + channel_vector(floor, "floor", v, least=0).to(torch.float64)[..., 0, :]
    if prefill > sinks:
        largest = torch.maximum(largest, x[..., sinks:prefill, :].abs().amax(-2))
    return _staged(v, x, fp16(largest / INT8_MAX), group=group, sinks=sinks)


def stage_more(v, scale: torch.Tensor, *, group: int, mean=None, sinks: int = 0) -> Staging:
    """The first phase of rows behind those that fixed the scale.

    Parameters
    ----------
    v : f16 [..., n, d]
    scale : f16 [..., d]
        Of the rows before, see `stage_rows`.
    group, mean
        As in `temporal_cache`.
    sinks : int
        How many of these rows, the first ones, are still sinks of their sequence.
    """
    v = as_tensor(v, "v", (torch.float16,))
    check_group(group), check_sinks(sinks)
    return _staged(v, _centred(v, mean), scale, group=group, sinks=sinks)


def _centred(v: torch.Tensor, mean) -> torch.Tensor:
    """Rows in f64, the mean, if any, taken out."""
    return centred(v, None if mean is None else channel_vector(mean, "mean", v)).to(torch.float64)


def _staged(v: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *, group: int, sinks: int) -> Staging:
    """Rows *v* that are *x* where their mean is taken out, against a scale f16 [..., d]."""
    tokens, d = v.shape[-2:]
    divisor = scale.to(torch.float64)[..., None, :]
    quotient = rne(x / torch.where(divisor == 0, 1.0, divisor))
    clamps = torch.where(divisor == 0, x != 0, quotient.abs() > INT8_MAX)
    q = quotient.clamp(-INT8_MAX, INT8_MAX).masked_fill_(divisor == 0, 0).to(torch.int8)
    sinks = min(sinks, tokens)
    q[..., :sinks, :], clamps[..., :sinks, :] = 0, False
    sink, sink_scale = int8_groups(to_groups(x[..., :sinks, :], group))
    saturated = clamps.sum((-2, -1))
    return Staging(q, scale, from_groups(sink, d).contiguous(), sink_scale, saturated, bool((~torch.isfinite(v)).any()))


def temporal_cache(
    v,
    prefill: int,
    *,
    group: int,
    tables: Tables,
    mean=None,
    floor=None,
    sinks: int = 0,
    offset: bool = False,
    shared_coefficient: bool = False,
) -> TemporalCache:
    """Cache rows along time.

    Parameters
    ----------
    v : f16 [..., T, d]
        Rows of one sequence; leading axes are heads (of any number of sequences) that share nothing. NaN counts as 0
        and an infinity as 65504 of its sign.
    prefill : 1 .. T
        Rows of the first call, which fix the INT8 scale of every channel.
    group : int
        G, tokens of a window.
    tables : Tables
        For all heads, or with the leading axes of *v*.
    mean : f16 [d] or [..., d], optional
        Subtracted from every row (centred keys).
    floor : f16 [d] or [..., d], optional
        Least magnitude that the INT8 scale of a channel has to hold.
    sinks : int
        First rows that stay INT8 groups along the head.
    offset : bool
        Take the rounded mean out of every group.
    shared_coefficient : bool
        One coefficient per window and head.
    """
    rows = stage_rows(v, prefill, group=group, mean=mean, floor=floor, sinks=sinks)
    return requantize(rows, group=group, tables=tables, offset=offset, shared_coefficient=shared_coefficient)


def requantize(
    rows: Staging, *, group: int, tables: Tables, offset: bool = False, shared_coefficient: bool = False
) -> TemporalCache:
    """The second phase: every full window of staged rows becomes codes. Parameters as in `temporal_cache`."""
    sinks = rows.sink.shape[-2]
    tokens, d = rows.q.shape[-2:]
    leading = rows.q.shape[:-2]
    windows = tokens // group
    shape = (*leading, windows, d)
    if windows:
        # [..., W, d, G]: a group is a channel of a window
        q = rows.q[..., : windows * group, :].reshape(*leading, windows, group, d).transpose(-1, -2)
        statistics = group_statistics(q, offset=offset)
        coefficient = (choose_shared if shared_coefficient else choose)(statistics, tables)
        a = coefficient.expand(shape)
        scale = requantized_scale(rows.scale[..., None, :].expand(shape), statistics.peak, a)
        codes = encode_int8(q.to(torch.int32) - statistics.offset[..., None].int(), statistics.peak.int(), a)
        codes = codes.masked_fill_((scale == 0)[..., None], 0).transpose(-1, -2).reshape(*leading, -1, d)
        codes[..., :sinks, :] = 0
        offsets = statistics.offset.to(torch.int8)
    else:
        codes = torch.zeros((*leading, 0, d), dtype=torch.uint8)
        scale = torch.zeros(shape, dtype=torch.float16)
        offsets = torch.zeros(shape, dtype=torch.int8)
        coefficient = torch.zeros((*shape[:-1], 1 if shared_coefficient else d), dtype=torch.uint8)
    return TemporalCache(
        codes=codes.contiguous(),
        scale=scale,
        coefficient=coefficient,
        offset=offsets,
        staged=rows.q[..., windows * group :, :].contiguous(),
        staged_scale=rows.scale,
        sink=rows.sink,
        sink_scale=rows.sink_scale,
        saturated=rows.saturated,
        nonfinite=rows.nonfinite,
        group=group,
    )
