"""Scores by table look-up and values by bins, all of it in integers.

A query becomes one INT8 group over the whole head. ``LUT[m][c] = sum_j q[m][j] * C[m][c][j]`` is made once per query;
the score of a token is the sum over sub-spaces of the entry that its code names. For values the attention weight of
every token adds into the bin of its code, per sub-space; the output is the bins times the codebook. Source:
docs/numerics.md, "Product quantisation"; the asymmetric distance table is MILLION's (DAC 2025, section III).
"""

import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.int8 import Int8Groups, int8_groups, port_rule
from kvant.golden.numeric.tensors import as_tensor
from kvant.golden.pq.codebook import Codebook

INT8_MAGNITUDE = 128
"""Largest magnitude of an INT8 number."""


def quantize_query(q, name: str = "q") -> Int8Groups:
    """Queries f16 [..., d] as INT8 groups over the whole head, whatever G: i8 [..., d] and scales f16 [...]."""
    q = as_tensor(q, name, (torch.float16,))
    elements, scale = int8_groups(port_rule(q))
    return Int8Groups(elements, scale, bool((~torch.isfinite(q)).any()))


def lookup_table(q, codebook: Codebook) -> torch.Tensor:
    """Products of queries with all centroids.

    Parameters
    ----------
    q : i8 [..., B, d]
        B queries of each head.
    codebook : Codebook
        One for all leading axes, or one for each (or of the last of them).

    Returns
    -------
    i64 [..., B, M, 2^nbits]
        ``LUT``, exact. No entry exceeds ``128 * 128 * d/M``.
    """
    q = as_tensor(q, "q", (torch.int8,))
    partition = codebook.partition
    if q.dim() < 2 or q.shape[-1] != partition.head_dim:
        raise TensorError(f"q: shape {tuple(q.shape)}; legal is [..., B, {partition.head_dim}]")
    entries = codebook.match(tuple(q.shape[:-2]), "q").entries.to(torch.float64)
    # float64 holds every sum: the products of 8-bit numbers are tiny
    table = partition.cut(q.to(torch.float64)).transpose(-2, -3) @ entries.transpose(-1, -2)  # [..., M, B, 2^nbits]
    return table.transpose(-2, -3).to(torch.int64)


def largest_score(codebook: Codebook) -> int:
    """Largest magnitude that a score can have for any INT8 query and codes, ``128 * 128 * d``."""
    return INT8_MAGNITUDE * INT8_MAGNITUDE * codebook.partition.head_dim


def table_scores(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Scores by look-up.

    Parameters
    ----------
    table : i64 [..., B, M, 2^nbits]
    codes : u8 [..., T, M]
        Leading axes as those of *table*.

    Returns
    -------
    i64 [..., B, T]
        Exact.
    """
    total = torch.zeros((*table.shape[:-2], codes.shape[-2]), dtype=torch.int64)
    index = codes.long()
    for m in range(codes.shape[-1]):
        total += table[..., m, :].gather(-1, index[..., None, :, m].expand(total.shape))
    return total


def value_bins(weights, codes: torch.Tensor, centroids: int) -> torch.Tensor:
    """Attention weights added up by code.

    Parameters
    ----------
    weights : integers [..., B, T]
        Weights of the tokens for each of B queries, as the softmax's fixed-point rule gives them.
    codes : u8 [..., T, M]
        Leading axes as those of *weights*.
    centroids : int
        ``2^nbits``.

    Returns
    -------
    i64 [..., B, M, 2^nbits]
        Exact: the sum of a sub-space's bins is the sum of the weights.
    """
    weights = as_tensor(weights, "weights", (torch.int16, torch.int32, torch.int64)).to(torch.int64)
    subspaces = codes.shape[-1]
    bins = torch.zeros((*weights.shape[:-1], subspaces, centroids), dtype=torch.int64)
    index = codes.long().transpose(-1, -2)[..., None, :, :].expand(*weights.shape[:-1], subspaces, -1)
    return bins.scatter_add_(-1, index, weights[..., None, :].expand(index.shape))


def read_out(bins: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """Bins times the codebook.

    Parameters
    ----------
    bins : i64 [..., B, M, 2^nbits]
    codebook : Codebook
        Of the values.

    Returns
    -------
    i64 [..., B, d]
        ``sum_c bins[m][c] * C[m][c][j]``, exact: the sum of all tokens' weights times their entries. The output is this
        times ``s_cb`` and the weights' scale.
    """
    entries = codebook.match(tuple(bins.shape[:-3]), "bins").entries.to(torch.int64)
    # torch has no integer matrix product over batches that is fast everywhere; these are few
    products = bins[..., None] * entries[..., None, :, :, :]
    return products.sum(-2).flatten(-2)
