"""Formats with one scale for a whole row (an output channel) or the whole matrix: what groups are compared with."""

from collections.abc import Sequence

import torch

from kvant.golden.formats.base import Approximation, Format, GroupFormat, finite_matrix
from kvant.golden.linear.objective import Objective
from kvant.golden.linear.search import chunks
from kvant.golden.numeric.tensors import check_group

GRANULARITIES = ("channel", "tensor")
"""What one scale may cover."""


class Coarse(Format):
    """A group format with one group per row or one for all.

    The objective is summed over whatever shares a scale, so a search chooses factor and type for all of it. Metadata of
    a matrix count nothing in `bits`.

    Parameters
    ----------
    inner : GroupFormat
        Without a group size of its own.
    granularity : str
        One of `GRANULARITIES`.
    """

    def __init__(self, inner: GroupFormat, granularity: str):
        self.name = f"{inner.name}_{granularity}"
        self._inner, self._whole = inner, granularity == "tensor"

    def bits(self, inputs: int, group: int = 64) -> float:
        return self._inner.code_bits + (0 if self._whole else self._inner.group_bits / inputs)

    def quantize(
        self, w, group: int = 64, *, second_moment=None, scale_factors: Sequence[float] = (1.0,), name: str = "w"
    ) -> Approximation:
        w = finite_matrix(w, name)
        outputs, inputs = w.shape
        objective = Objective(inputs, check_group(group), second_moment)

        def losses(stored: torch.Tensor) -> torch.Tensor:
            """Objective f64 [N] of every row; of a tensor, its sum in every place."""
            rows = torch.zeros(outputs, dtype=torch.float64)
            for chunk in chunks(outputs, inputs, group):
                x = chunk.cut(w)
                error = x.to(torch.float64) - chunk.cut(stored)
                rows[chunk.rows] += objective.at(chunk.first, chunk.last, x.shape[-1]).measure(error).sum(0)
            return rows.sum().expand(outputs) if self._whole else rows

        best, least = None, None
        for approximate in self._inner.candidates(w, scale_factors):
            stored = approximate(w.reshape(1, -1) if self._whole else w).view(w.shape)
            found = losses(stored)
            if best is None:
                best, least = stored, found
            else:
                better = found < least
                best, least = torch.where(better[:, None], stored, best), torch.where(better, found, least)
        loss = float(least[0] if self._whole else least.sum())
        return Approximation(best, self.bits(inputs, group), loss)
