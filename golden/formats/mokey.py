"""Mokey: one dictionary made of a Gaussian for everything (Zadeh et al., ISCA 2022, section II).

The *golden dictionary* holds eight magnitudes for a standard Gaussian, which fit ``a^i + b`` with a = 1.179 and
b = -0.977, i = 0..7, so that products become sums of exponents. A tensor takes it at its own standard deviation and
mean. Values beyond what it reaches have a second dictionary of their tensor, sixteen values too.
"""

from collections.abc import Sequence

import torch

from kvant.golden.formats.base import Approximate, Approximation, Format, GroupFormat, divide, finite_matrix, nearest
from kvant.golden.formats.dictionaries import INDEX_BITS, centroids, measured
from kvant.golden.numeric.rounding import FP16_MAX

BASE, SHIFT = 1.179, -0.977
"""a and b."""

MAGNITUDES = tuple(BASE**i + SHIFT for i in range(8))
"""The golden dictionary's magnitudes, in standard deviations."""

LEVELS = (*(-m for m in reversed(MAGNITUDES)), *MAGNITUDES)
"""Both signs; there is no zero."""

REACH = MAGNITUDES[-1] + (MAGNITUDES[-1] - MAGNITUDES[-2]) / 2
"""Where the dictionary ends, half a step above its largest magnitude; what lies beyond is an outlier."""

OUTLIER_LEVELS = 16
ITERATIONS = 50


def _fp16(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-FP16_MAX, FP16_MAX).to(torch.float16).to(torch.float32)


class Mokey(GroupFormat):
    """The golden dictionary at mean and deviation, fp16, of every group; values beyond it saturate.

    What is left of the method where a group, not a tensor, is quantised, as in a cache: outliers would need a
    dictionary of the group.
    """

    name = "mokey"
    code_bits = 4
    group_bits = 32

    def candidates(self, w: torch.Tensor, factors: Sequence[float]) -> list[Approximate]:
        table = torch.tensor(LEVELS)

        def at(factor: float) -> Approximate:
            def approximate(x: torch.Tensor) -> torch.Tensor:
                mean = _fp16(x.mean(-1, keepdim=True))
                scale = _fp16(factor * x.std(-1, keepdim=True, correction=0))
                # all equal: no deviation, and the levels have no zero
                return torch.where(scale == 0, mean, mean + scale * nearest(divide(x - mean, scale), table))

            return approximate

        return [at(factor) for factor in factors]


class MokeyTensor(Format):
    """The method as published: mean and deviation of the tensor, outliers in a dictionary of their own.

    The outliers' dictionary is sixteen means of clusters. Scale factors multiply the deviation.
    """

    name = "mokey_tensor"

    def bits(self, inputs: int, group: int = 64) -> float:
        return 4.0

    def quantize(
        self, w, group: int = 64, *, second_moment=None, scale_factors: Sequence[float] = (1.0,), name: str = "w"
    ) -> Approximation:
        """As `Format.quantize`; the bits count places of outliers and their dictionary."""
        w = finite_matrix(w, name)
        table, mean, deviation = torch.tensor(LEVELS), w.mean(), w.std(correction=0)
        best = None
        for factor in scale_factors:
            scale = factor * deviation
            u = divide(w - mean, scale)
            apart = u.abs() > REACH
            outliers = centroids(w[apart], OUTLIER_LEVELS, ITERATIONS)
            stored = torch.where(apart, nearest(w, outliers), mean + scale * nearest(u, table))
            stored = torch.where(scale == 0, mean, stored)
            bits = 4 + (int(apart.sum()) * INDEX_BITS + 16 * (OUTLIER_LEVELS + 2)) / w.numel()
            found = measured(w, stored, bits, group, second_moment)
            if best is None or found.loss < best.loss:
                best = found
        return best


MOKEY = Mokey()
MOKEY_TENSOR = MokeyTensor()
