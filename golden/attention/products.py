"""Products of the linear array over caches, head by head."""

import torch

from kvant.golden.linear.engine import multiply
from kvant.golden.linear.weights import QuantizedWeights
from kvant.golden.numeric.int8 import Int8Groups


def array_products(
    x: Int8Groups, codes: torch.Tensor, scale: torch.Tensor, coefficient: torch.Tensor, int8, *, group: int
) -> torch.Tensor:
    """Outputs of the linear array, f32 [..., B, N]: the fp32 chain of "Group dot product" over the groups of K.

    Parameters
    ----------
    x : Int8Groups
        i8 [..., B, K] and f16 [..., B, ceil(K/G)].
    codes : u8 [..., N, K]
    scale : f16 [..., N, ceil(K/G)]
    coefficient : u8 [..., N, ceil(K/G)]
    int8 : i8 [..., N, K] or None
        Elements of INT8 groups.
    group : int
        G.
    """
    leading = x.q.shape[:-2]
    planes = [x.q, x.scale, codes, scale, coefficient] + ([] if int8 is None else [int8])
    heads = zip(*(plane.reshape(-1, *plane.shape[-2:]) for plane in planes), strict=True)
    y = [multiply(q, s, QuantizedWeights(*weights, *[None] * (int8 is None), group)) for q, s, *weights in heads]
    return torch.stack(y).reshape(*leading, *y[0].shape)
