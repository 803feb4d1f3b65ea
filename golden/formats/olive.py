"""OliVe: outliers that take the code of the element beside them (Guo et al., ISCA 2023, sections 3 and 4).

Elements are paired. Without an outlier both are INT4, -7 to 7. An outlier is stored in four bits as an *abfloat*, a
float of two exponent bits and one mantissa bit whose bias puts its values right above those of the integers; its
neighbour, the *victim*, becomes 0 and its code, the unused -8, marks the pair. Of two outliers the smaller is the
victim.
"""

from collections.abc import Sequence

import torch

from kvant.golden.formats.base import Approximate, GroupFormat, absmax, divide, fp16_scale, nearest

ABFLOAT_MAGNITUDES = (12, 16, 24, 32, 48, 64, 96)
"""``(2 + m) * 2^(e + 2)`` for e = 0..3 and m = 0, 1 in steps of INT4; the lowest code, 8, is the one given up for 0."""

SIGMAS = 3.0
"""Standard deviations that the integers reach to, where the search for the scale begins (section 4.2)."""

SEARCH = (1.0, 0.5, 0.625, 0.75, 0.875, 1.125, 1.25, 1.5, 1.75, 2.0)
"""Multiples of that reach which are tried, the method's own search by squared error."""


class Olive(GroupFormat):
    """Outlier-victim pairs of neighbours along K; ``s = fp16(reach / 7)``.

    The reach is `SIGMAS` standard deviations beyond the mean, times one of `SEARCH`, and never above the largest
    magnitude. A last element without a neighbour is its own pair.
    """

    name = "olive"
    code_bits = 4
    group_bits = 16

    def candidates(self, w: torch.Tensor, factors: Sequence[float]) -> list[Approximate]:
        table = torch.tensor([0.0, *range(1, 8), *ABFLOAT_MAGNITUDES])

        def at(factor: float) -> Approximate:
            def approximate(x: torch.Tensor) -> torch.Tensor:
                deviation = x.std(-1, keepdim=True, correction=0)
                reach = x.mean(-1, keepdim=True).abs() + SIGMAS * deviation
                scale = fp16_scale(torch.minimum(reach * factor, absmax(x)), 1.0, 7)
                u = divide(x, scale)
                odd = u.shape[-1] % 2
                pairs = torch.nn.functional.pad(u, (0, odd)).unflatten(-1, (-1, 2))
                magnitude = nearest(pairs.abs(), table)
                outlier = magnitude > 7
                larger = pairs.abs() >= pairs.abs().flip(-1)
                # of two equal outliers the first stays
                larger[..., 1] &= ~larger[..., 0]
                victim = outlier.flip(-1) & ~(outlier & larger)
                stored = torch.where(victim, 0.0, magnitude * pairs.sign()).flatten(-2)
                return scale * stored[..., : x.shape[-1]]

            return approximate

        return [at(factor * multiple) for multiple in SEARCH for factor in factors]


OLIVE = Olive()
