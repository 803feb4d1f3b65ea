"""Keys grouped along the head: each row becomes INT8 groups, then 4-bit codes, at once.

Source: docs/numerics.md, "Choosing the coefficient", "Encoding", "Sinks"; M-ANT (HPCA 2025, section V, spatial
quantisation of the key cache).
"""

from dataclasses import dataclass

import torch

from kvant.golden.kvcache.choice import Tables, choose, group_statistics
from kvant.golden.kvcache.rows import centred, channel_vector, check_sinks
from kvant.golden.numeric.codes import decode, encode_int8, requantized_scale
from kvant.golden.numeric.int8 import int8_groups
from kvant.golden.numeric.tensors import as_tensor, check_group, from_groups, to_groups


@dataclass(frozen=True)
class SpatialCache:
    """A cache grouped along the head.

    Attributes
    ----------
    codes : u8 [..., T, d]
        0x0 in the rows of sinks, as are their scales and coefficients 0.
    scale : f16 [..., T, ceil(d/G)]
    coefficient : u8 [..., T, ceil(d/G)]
    sink : i8 [..., min(sinks, T), d]
    sink_scale : f16 [..., min(sinks, T), ceil(d/G)]
    nonfinite : bool
        A NaN or an infinity was met.
    group : int
    """

    codes: torch.Tensor
    scale: torch.Tensor
    coefficient: torch.Tensor
    sink: torch.Tensor
    sink_scale: torch.Tensor
    nonfinite: bool
    group: int

    def dequantize(self) -> torch.Tensor:
        """The rows as the cache holds them (a mean that was subtracted stays so), f32 [..., T, d]."""
        d = self.codes.shape[-1]
        levels = decode(to_groups(self.codes, self.group), self.coefficient[..., None])
        rows = from_groups(levels * self.scale.to(torch.float32)[..., None], d)
        sinks = self.sink.shape[-2]
        rows[..., :sinks, :] = int8_rows(self.sink, self.sink_scale, self.group)
        return rows


def int8_rows(q: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    """Values f32 [..., T, d] of rows of INT8 groups i8 [..., T, d] with scales f16 [..., T, ceil(d/G)]."""
    return from_groups(to_groups(q, group) * scale.to(torch.float32)[..., None], q.shape[-1])


def spatial_cache(k, *, group: int, tables: Tables, mean=None, sinks: int = 0) -> SpatialCache:
    """Cache rows of keys along the head.

    Parameters
    ----------
    k : f16 [..., T, d]
        NaN counts as 0 and an infinity as 65504 of its sign.
    group : int
        G. The last group of a row may be shorter.
    tables : Tables
        For all heads, or with the leading axes of *k*.
    mean : f16 [d] or [..., d], optional
        Subtracted from every row.
    sinks : int
        First rows that stay INT8.
    """
    k = as_tensor(k, "k", (torch.float16,))
    check_group(group), check_sinks(sinks)
    mean = None if mean is None else channel_vector(mean, "mean", k)
    d, sinks = k.shape[-1], min(sinks, k.shape[-2])
    grouped = to_groups(centred(k, mean), group)
    q, int8_scale = int8_groups(grouped)
    codes = torch.zeros(grouped.shape, dtype=torch.uint8)
    coefficient = torch.zeros(int8_scale.shape, dtype=torch.uint8)
    scale = torch.zeros(int8_scale.shape, dtype=torch.float16)
    whole = d // group
    for groups, n in ((slice(0, whole), group), (slice(whole, None), d % group)):
        if not n or (groups.stop == 0):
            continue
        part = q[..., groups, :n]
        statistics = group_statistics(part)
        a = choose(statistics, tables)
        s = requantized_scale(int8_scale[..., groups], statistics.peak, a)
        part = encode_int8(part, statistics.peak.to(torch.int32), a).masked_fill_((s == 0)[..., None], 0)
        codes[..., groups, :n], coefficient[..., groups], scale[..., groups] = part, a, s
    sink, sink_scale = from_groups(q, d)[..., :sinks, :].clone(), int8_scale[..., :sinks, :].clone()
    codes = from_groups(codes, d).clone()
    codes[..., :sinks, :], coefficient[..., :sinks, :], scale[..., :sinks, :] = 0, 0, 0
    return SpatialCache(codes, scale, coefficient, sink, sink_scale, bool((~torch.isfinite(k)).any()), group)
