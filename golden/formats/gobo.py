"""GOBO: few outliers as they are, all other weights as centroids of their tensor (Zadeh et al., MICRO 2020).

Outliers are weights that are improbable under a Gaussian fitted to the tensor, log probability density below -4. The
others are sorted into clusters of equal population, whose means are then refined while the mean absolute distance
falls. It is a method for weights; nothing in it can be made of a cache's rows one by one.
"""

import math
from collections.abc import Sequence

import torch

from kvant.golden.formats.base import Approximation, Format, finite_matrix, nearest
from kvant.golden.formats.dictionaries import INDEX_BITS, centroids, measured

LEAST_LOG_DENSITY = -4.0
"""Weights of a lower logarithm of the density are outliers."""

ITERATIONS = 50


def outliers(w: torch.Tensor) -> torch.Tensor:
    """Which weights are outliers, bool of the shape of *w*."""
    deviation = w.std(correction=0)
    if deviation == 0:
        return torch.zeros(w.shape, dtype=torch.bool)
    z = (w - w.mean()) / deviation
    density = -0.5 * z.square() - torch.log(deviation) - 0.5 * math.log(2 * math.pi)
    return density < LEAST_LOG_DENSITY


class Gobo(Format):
    """One dictionary of fp32 centroids for the tensor; there is no scale, so scale factors change nothing.

    Parameters
    ----------
    code_bits : int
        3 in the article, 4 to compare with other formats.
    """

    def __init__(self, code_bits: int):
        self.name = "gobo" if code_bits == 4 else f"gobo{code_bits}"
        self._code_bits = code_bits

    def bits(self, inputs: int, group: int = 64) -> float:
        return self._code_bits

    def quantize(
        self, w, group: int = 64, *, second_moment=None, scale_factors: Sequence[float] = (1.0,), name: str = "w"
    ) -> Approximation:
        """As `Format.quantize`; the bits count outliers (value and place in 32 bits each) and the dictionary."""
        w = finite_matrix(w, name)
        apart = outliers(w)
        table = centroids(w[~apart], 2**self._code_bits, ITERATIONS)
        stored = torch.where(apart, w, nearest(w, table))
        extra = int(apart.sum()) * (32 + INDEX_BITS) + 32 * len(table)
        return measured(w, stored, self._code_bits + extra / w.numel(), group, second_moment)


GOBO = Gobo(4)
GOBO3 = Gobo(3)
