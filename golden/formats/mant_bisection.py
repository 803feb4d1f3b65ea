"""M-ANT with a bisecting search for the coefficient, in place of trying them all.

The authors find a coefficient in three or four steps (HPCA 2025, section IV). That supposes an error with one minimum
over the coefficient, which it has not (docs/numerics.md): the search may end beside the best. What it loses is measured
in docs/formats.md.
"""

from collections.abc import Sequence
from math import fsum

import torch

from kvant.golden.formats.base import Approximation, Format, finite_matrix
from kvant.golden.linear.objective import LocalObjective, Objective
from kvant.golden.linear.search import Chunk, chunks
from kvant.golden.linear.threads import independent_threads
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, check_table, grid_scale, unchecked_decode, unchecked_encode
from kvant.golden.numeric.rounding import FP16_MAX
from kvant.golden.numeric.tensors import group_count


class MantBisection(Format):
    """Per group, a bisection over an ascending table: of two neighbours in the middle, on with the side of the better.

    Parameters
    ----------
    coefficients : sequence of int
        Ascending, as the default table is; C entries take ceil(log2 C) steps.
    """

    name = "mant_bisection"

    def __init__(self, coefficients: Sequence[int] = DEFAULT_COEFFICIENTS):
        self._table = torch.tensor(check_table(coefficients), dtype=torch.uint8)

    def bits(self, inputs: int, group: int = 64) -> float:
        return 4 + 24 * group_count(inputs, self.group_size(group)) / inputs

    def quantize(
        self, w, group: int = 64, *, second_moment=None, scale_factors: Sequence[float] = (1.0,), name: str = "w"
    ) -> Approximation:
        """As `Format.quantize`; the first factor is bisected with, the others are tried at the coefficient found."""
        w = finite_matrix(w, name)
        outputs, inputs = w.shape
        values = torch.empty(w.shape)
        with independent_threads() as run:
            objective = Objective(inputs, self.group_size(group), second_moment, run)

            def store(chunk: Chunk) -> float:
                x = chunk.cut(w)
                local = objective.at(chunk.first, chunk.last, x.shape[-1])
                place = self._bisect(x, local, scale_factors[0])
                best, least = self._at(x, place, local, scale_factors[0])
                for factor in scale_factors[1:]:
                    stored, error = self._at(x, place, local, factor)
                    best = torch.where((error < least)[..., None], stored, best)
                    least = torch.minimum(error, least)
                chunk.paste(best, values)
                return float(local.measure(x.to(torch.float64) - best).sum())

            loss = fsum(run(store, chunks(outputs, inputs, self.group_size(group))))
        return Approximation(values, self.bits(inputs, group), loss)

    def _bisect(self, x: torch.Tensor, local: LocalObjective, factor: float) -> torch.Tensor:
        """Place in the table of every group, i64 [B, n]."""
        low = torch.zeros(x.shape[:-1], dtype=torch.int64)
        high = torch.full_like(low, len(self._table) - 1)
        while bool((low < high).any()):
            middle = (low + high) // 2
            beside = (middle + 1).clamp(max=len(self._table) - 1)
            left = self._at(x, middle, local, factor)[1] <= self._at(x, beside, local, factor)[1]
            open_ = low < high
            high = torch.where(open_ & left, middle, high)
            low = torch.where(open_ & ~left, middle + 1, low)
        return low

    def _at(
        self, x: torch.Tensor, place: torch.Tensor, local: LocalObjective, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values f32 [B, n, g] of groups at their table entries, and the objective f32 [B, n]."""
        a = self._table[place]
        scale = grid_scale(x.abs().amax(-1), a, factor).clamp(max=FP16_MAX)
        stored = scale.to(torch.float32)[..., None] * unchecked_decode(unchecked_encode(x, scale, a), a[..., None])
        return stored, local.measure(x - stored)


MANT_BISECTION = MantBisection()
