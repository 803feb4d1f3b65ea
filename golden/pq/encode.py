"""Codes of vectors: the nearest centroid of every sub-vector, in integers.

The encoder works on ``u = clamp(rne(16 * x / s_cb), -32767, 32767)``, 0 where ``s_cb = 0``, and takes the least
``sum_j (u_j - 16 C_j)^2``, the lowest index on a tie. Source: docs/numerics.md, "Product quantisation".
"""

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.rows import centred, channel_vector
from kvant.golden.numeric.rounding import rne
from kvant.golden.numeric.tensors import as_tensor
from kvant.golden.pq.codebook import Codebook
from kvant.golden.pq.search import nearest

FRACTION = 16
"""Steps of ``u`` per step of an INT8 entry."""

LARGEST = 32767
"""Largest magnitude of ``u``."""


def grid_position(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``u`` of finite fp16 elements, integers in float64 of *x*'s shape.

    The float64 quotient, rounded, is the exact rule. 16*x is exact. Let ``16|x| = a * 2^i`` and ``s = b * 2^j`` with
    integers a, b < 2^11, and ``k = i - j``. A quotient ``a*2^k / b`` that is no tie ``n + 1/2`` keeps the distance
    ``|a*2^(k+1) - (2n+1)*b| / 2b >= 2^-12`` from it when k >= 0. When k < 0 its denominator is ``b * 2^-k``; a quotient
    of at least 1/4, and all others round to 0, has ``b * 2^-k <= 4a < 2^13``, so the distance is at least 2^-14. Below
    2^16 the steps of float64 are at most 2^-37. (Those of float32 are 2^-8 there: it would fail.)

    Parameters
    ----------
    x : f16 [...]
    scale : f16, broadcastable to *x*
    """
    s = scale.to(torch.float64)
    quotient = x.to(torch.float64) * FRACTION / torch.where(s == 0, 1.0, s)
    return rne(quotient).clamp(-LARGEST, LARGEST).masked_fill_(s.expand(x.shape) == 0, 0)


def encode(x, codebook: Codebook, *, mean=None, name: str = "x") -> torch.Tensor:
    """Codes of vectors.

    Parameters
    ----------
    x : f16 [..., T, d]
        NaN counts as 0 and an infinity as 65504 of its sign.
    codebook : Codebook
        One for all leading axes of *x*, or one for each of them (or of the last of them).
    mean : f16 [d] or [..., d], optional
        Subtracted from every vector (centred keys).
    name : str
        What error messages call *x*.

    Returns
    -------
    u8 [..., T, M]
    """
    x = as_tensor(x, name, (torch.float16,))
    partition = codebook.partition
    if x.dim() < 2 or x.shape[-1] != partition.head_dim:
        raise TensorError(f"{name}: shape {tuple(x.shape)}; legal is [..., T, {partition.head_dim}]")
    leading, tokens = tuple(x.shape[:-2]), x.shape[-2]
    codebook = codebook.match(leading, name)
    x = centred(x, None if mean is None else channel_vector(mean, "mean", x))
    u = partition.cut(grid_position(x, codebook.scale[..., None, None]))  # [..., T, M, d/M]
    u = u.transpose(-2, -3).reshape(-1, tokens, partition.dimensions)
    centres = codebook.entries.to(torch.float64).reshape(-1, partition.centroids, partition.dimensions) * FRACTION
    codes = nearest(u, centres).to(torch.uint8)
    return codes.view(*leading, partition.subspaces, tokens).transpose(-1, -2).contiguous()
