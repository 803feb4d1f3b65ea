"""M-ANT groups whose coefficient is searched by squared error, made of the exact elements: what a cache could reach.

Hardware chooses from a second moment, and re-quantises INT8 elements (docs/numerics.md, "Choosing the coefficient").
"""

from collections.abc import Sequence

import torch

from kvant.golden.formats.base import Approximate, GroupFormat, absmax
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, check_table, grid_scale, unchecked_decode, unchecked_encode
from kvant.golden.numeric.rounding import FP16_MAX


class MantGroups(GroupFormat):
    """One candidate for each entry of a table of coefficients.

    Parameters
    ----------
    coefficients : sequence of int
    """

    name = "mant_search"
    code_bits = 4
    group_bits = 24

    def __init__(self, coefficients: Sequence[int] = DEFAULT_COEFFICIENTS):
        self._table = check_table(coefficients)

    def candidates(self, w: torch.Tensor, factors: Sequence[float]) -> list[Approximate]:
        def at(coefficient: int, factor: float) -> Approximate:
            def approximate(x: torch.Tensor) -> torch.Tensor:
                scale = grid_scale(absmax(x)[..., 0], coefficient, factor).clamp(max=FP16_MAX)
                a = torch.full(scale.shape, coefficient, dtype=torch.uint8)
                level = unchecked_decode(unchecked_encode(x, scale, a), a[..., None])
                return scale.to(torch.float32)[..., None] * level

            return approximate

        return [at(coefficient, factor) for coefficient in self._table for factor in factors]


MANT_GROUPS = MantGroups()
