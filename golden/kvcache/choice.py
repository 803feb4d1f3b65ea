"""Choosing a group's coefficient from a normalised second moment, without division.

A group of INT8 elements has ``S = sum q``, ``Q = sum q^2``, ``m = max |q|`` over its n elements. The statistic is
``V = n*Q - S^2`` (variance) or ``n*Q`` (moment), and the table entry is ``#{k : statistic * 2^16 >= T_k * n^2 * m^2}``.
Source: docs/numerics.md, "Choosing the coefficient"; the idea is M-ANT's (HPCA 2025, section V), which estimates the
variance in real time.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.codes import check_table
from kvant.golden.numeric.tensors import as_tensor

STATISTICS = ("variance", "moment")
"""Second moments that may choose: about the mean, or about zero."""

THRESHOLD_LIMIT = 65535
"""Largest threshold."""


@dataclass(frozen=True)
class Tables:
    """Coefficients and the thresholds between them, one table for all heads or one for each.

    Attributes
    ----------
    coefficients : u8 [..., C]
    thresholds : i64 [..., C-1]
    statistic : str
        What the thresholds are limits of, one of `STATISTICS`.
    """

    coefficients: torch.Tensor
    thresholds: torch.Tensor
    statistic: str = "variance"

    @classmethod
    def of(cls, coefficients, thresholds, statistic: str = "variance") -> "Tables":
        """Checked tables from sequences, arrays or tensors.

        Raises
        ------
        TensorError
            For a coefficient that is none, thresholds of another length, outside 0..65535 or descending, an unknown
            statistic.
        """
        if statistic not in STATISTICS:
            raise TensorError(f"statistic = {statistic!r}: legal is one of {', '.join(map(repr, STATISTICS))}")
        table = torch.as_tensor(np.asarray(coefficients).astype(np.int64))
        limits = torch.as_tensor(np.asarray(thresholds).astype(np.int64))
        for row in table.reshape(-1, table.shape[-1]):
            check_table(row)
        if limits.shape != (*table.shape[:-1], table.shape[-1] - 1):
            raise TensorError(
                f"thresholds: shape {tuple(limits.shape)}; legal is {(*table.shape[:-1], table.shape[-1] - 1)}, one "
                "fewer than coefficients"
            )
        for where in ((limits < 0) | (limits > THRESHOLD_LIMIT)).nonzero()[:1].tolist():
            raise TensorError(f"thresholds{where} = {int(limits[tuple(where)])}: legal is 0 to {THRESHOLD_LIMIT}")
        for where in (limits.diff(dim=-1) < 0).nonzero()[:1].tolist():
            where[-1] += 1
            raise TensorError(f"thresholds{where} = {int(limits[tuple(where)])}: legal are non-descending thresholds")
        return cls(table.to(torch.uint8), limits, statistic)


@dataclass(frozen=True)
class GroupStatistics:
    """Integers of complete groups, i64 [...].

    Attributes
    ----------
    offset : -127 .. 127
        ``rne(S / n)`` where it is taken out, else 0.
    peak : 0 .. 254
        ``m``, the largest ``|q - offset|``.
    variance, moment : at least 0
        ``n*Q - S^2``, which an offset does not change, and ``n`` times the sum of ``(q - offset)^2``.
    count : int
        ``n``.
    """

    offset: torch.Tensor
    peak: torch.Tensor
    variance: torch.Tensor
    moment: torch.Tensor
    count: int

    def of(self, statistic: str) -> torch.Tensor:
        """The second moment called *statistic*."""
        return self.variance if statistic == "variance" else self.moment


def group_statistics(q, *, offset: bool = False) -> GroupStatistics:
    """Statistics of groups along the last axis.

    Parameters
    ----------
    q : i8 [..., n]
        All elements of each group.
    offset : bool
        Take the rounded mean out.
    """
    q = as_tensor(q, "q", (torch.int8,)).to(torch.int64)
    n = q.shape[-1]
    total, squares = q.sum(-1), (q * q).sum(-1)
    o = torch.round(total.to(torch.float64) / n).to(torch.int64) if offset else torch.zeros_like(total)
    peak = torch.maximum(q.amax(-1) - o, o - q.amin(-1))
    moment = n * (squares - 2 * o * total + n * o * o)
    return GroupStatistics(o, peak, n * squares - total * total, moment, n)


def passes(statistics: GroupStatistics, tables: Tables) -> torch.Tensor:
    """Which thresholds each group passes, bool [..., C-1]; leading axes of *tables* match those of the groups."""
    limit = (statistics.count * statistics.peak) ** 2
    thresholds = tables.thresholds
    while thresholds.dim() - 1 < limit.dim():  # tables of heads, groups of heads
        thresholds = thresholds.unsqueeze(-2)
    return (statistics.of(tables.statistic) << 16)[..., None] >= thresholds * limit[..., None]


def choose(statistics: GroupStatistics, tables: Tables) -> torch.Tensor:
    """Coefficient of every group, u8 [...]."""
    return look_up(tables, passes(statistics, tables).sum(-1))


def choose_shared(statistics: GroupStatistics, tables: Tables) -> torch.Tensor:
    """One coefficient for all groups along the last axis, u8 [..., 1].

    The entry is ``#{k : 2 * P_k >= D}``, D the groups that are not all zero and P_k those of them that pass the
    threshold k; the last entry where D is 0.
    """
    alive = statistics.peak > 0
    votes = (passes(statistics, tables) & alive[..., None]).sum(-2, keepdim=True)
    return look_up(tables, (2 * votes >= alive.sum(-1, keepdim=True)[..., None]).sum(-1))


def look_up(tables: Tables, index: torch.Tensor) -> torch.Tensor:
    """Entries *index* [...] of tables whose leading axes match the first ones of *index*, u8 [...]."""
    leading = tables.coefficients.shape[:-1]
    flat = tables.coefficients.reshape(-1, tables.coefficients.shape[-1])
    rows = index.reshape(flat.shape[0], -1)
    if leading != index.shape[: len(leading)]:
        raise TensorError(f"tables: leading shape {tuple(leading)}; legal is that of the groups, {tuple(index.shape)}")
    return torch.gather(flat, 1, rows).reshape(index.shape)
