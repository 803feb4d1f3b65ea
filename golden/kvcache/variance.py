"""Sums of groups of INT8 elements: what the variance unit finds out about a group, in exact integers."""

from typing import NamedTuple

import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.tensors import as_tensor

LARGEST_GROUP = 65536
"""Most elements of a group: ``n * sumsq`` and ``sum**2`` stay far below 2**63."""


class GroupSums(NamedTuple):
    """Sums of each group.

    Attributes
    ----------
    sum, sumsq : i64 [...]
    maximum, minimum : i64 [...]
    absmax : i64 [...]
        Largest magnitude; that of -128 is 128.
    nvar : i64 [...]
        ``n * sumsq - sum**2``: the variance times ``n**2``, exact and never negative.
    """

    sum: torch.Tensor
    sumsq: torch.Tensor
    maximum: torch.Tensor
    minimum: torch.Tensor
    absmax: torch.Tensor
    nvar: torch.Tensor


def group_sums(q, name: str = "q") -> GroupSums:
    """Sums of groups along the last axis.

    Parameters
    ----------
    q : i8 [..., n]
        One group of n elements per row, n from 1 to 65536.
    name : str
        What error messages call it.

    Raises
    ------
    TensorError
        For another dtype, no elements or too many.
    """
    q = as_tensor(q, name, (torch.int8,)).to(torch.int64)
    if q.dim() < 1 or q.shape[-1] > LARGEST_GROUP:
        raise TensorError(f"{name}: shape {tuple(q.shape)}; legal is 1 to {LARGEST_GROUP} elements along the last axis")
    total, sumsq = q.sum(-1), (q * q).sum(-1)
    maximum, minimum = q.amax(-1), q.amin(-1)
    return GroupSums(
        sum=total,
        sumsq=sumsq,
        maximum=maximum,
        minimum=minimum,
        absmax=torch.maximum(maximum, -minimum),
        nvar=q.shape[-1] * sumsq - total * total,
    )
