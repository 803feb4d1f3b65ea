"""INT8 groups: activations, queries, attention weights, sinks, and weights with outliers.

``s8 = fp16(absmax / 127)`` and ``q = rne(127 * x / absmax)``, division exact. One float64 division gives the exact
rule: 127*x has at most 31 bits, and a quotient that is no tie keeps a distance from it that float64 resolves.
Source: docs/numerics.md, "INT8 groups".
"""

from typing import NamedTuple

import torch

from kvant.golden.numeric.rounding import FP16_MAX, fp16, rne
from kvant.golden.numeric.tensors import as_tensor, check_group, from_groups, to_groups


class Int8Groups(NamedTuple):
    """INT8 elements and what belongs to them.

    Attributes
    ----------
    q : i8 [..., n]
        -127..127.
    scale : f16 [..., ceil(n/G)]
        ``s8`` of each group; 0 where every ``q`` is 0.
    nonfinite : bool
        Whether a NaN or an infinity was met (the sticky flag).
    """

    q: torch.Tensor
    scale: torch.Tensor
    nonfinite: bool


def port_rule(x: torch.Tensor) -> torch.Tensor:
    """What an fp16 port makes of its input: NaN counts as 0, an infinity as 65504 of its sign."""
    return torch.nan_to_num(x, nan=0.0, posinf=FP16_MAX, neginf=-FP16_MAX)


def quantize_int8(x, group: int, name: str = "x") -> Int8Groups:
    """Quantise fp16 values to INT8 in groups along the last axis, as the hardware's port does.

    Parameters
    ----------
    x : f16 [..., n]
    group : int
        G; a short last group counts its real elements only.
    name : str
        What error messages call the tensor.
    """
    x = as_tensor(x, name, (torch.float16,))
    grouped = to_groups(port_rule(x), check_group(group))
    q, scale = int8_groups(grouped)
    return Int8Groups(from_groups(q, x.shape[-1]), scale, bool((~torch.isfinite(x)).any()))


def int8_groups(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 elements i8 [..., G] and scales f16 [...] of finite elements [..., G] of any floating type."""
    wide = grouped.to(torch.float64)
    absmax = wide.abs().amax(-1)
    scale = fp16(absmax / 127)
    divisor = torch.where(absmax == 0, 1.0, absmax)[..., None]
    q = rne(127 * wide / divisor).masked_fill_((scale == 0)[..., None], 0)
    return q.to(torch.int8), scale
