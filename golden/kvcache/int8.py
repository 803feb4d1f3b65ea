"""Keys or values that all stay INT8 groups along the head. Source: docs/numerics.md, "INT8 groups"."""

from dataclasses import dataclass

import torch

from kvant.golden.kvcache.rows import centred, channel_vector
from kvant.golden.kvcache.spatial import int8_rows
from kvant.golden.numeric.int8 import int8_groups
from kvant.golden.numeric.tensors import as_tensor, check_group, from_groups, to_groups


@dataclass(frozen=True)
class Int8Cache:
    """A cache of INT8 rows.

    Attributes
    ----------
    q : i8 [..., T, d]
    scale : f16 [..., T, ceil(d/G)]
    nonfinite : bool
        A NaN or an infinity was met.
    group : int
    """

    q: torch.Tensor
    scale: torch.Tensor
    nonfinite: bool
    group: int

    def dequantize(self) -> torch.Tensor:
        """The rows as the cache holds them (a mean that was subtracted stays so), f32 [..., T, d]."""
        return int8_rows(self.q, self.scale, self.group)


def int8_cache(x, *, group: int, mean=None) -> Int8Cache:
    """Cache rows as INT8 groups along the head.

    Parameters
    ----------
    x : f16 [..., T, d]
        NaN counts as 0 and an infinity as 65504 of its sign.
    group : int
        G. The last group of a row may be shorter.
    mean : f16 [d] or [..., d], optional
        Subtracted from every row.
    """
    x = as_tensor(x, "x", (torch.float16,))
    check_group(group)
    rows = centred(x, None if mean is None else channel_vector(mean, "mean", x))
    q, scale = int8_groups(to_groups(rows, group))
    return Int8Cache(from_groups(q, x.shape[-1]).contiguous(), scale, bool((~torch.isfinite(x)).any()), group)
