"""M-ANT behind the interface of all formats, and the list of formats."""

from collections.abc import Sequence

from kvant.golden.formats import baselines
from kvant.golden.formats.base import Approximation, Format
from kvant.golden.formats.bitmod import BITMOD
from kvant.golden.formats.coarse import GRANULARITIES, Coarse
from kvant.golden.formats.gobo import GOBO, GOBO3
from kvant.golden.formats.mant_bisection import MANT_BISECTION
from kvant.golden.formats.mokey import MOKEY, MOKEY_TENSOR
from kvant.golden.formats.olive import OLIVE
from kvant.golden.linear.search import quantize_weights
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, check_table
from kvant.golden.numeric.tensors import group_count

OUTLIER_RATIO = 5.0
"""Largest magnitude over root mean square from which a group counts as one with an evident outlier: one of 64 Gaussian
elements exceeds this in 4 of 100,000 groups."""


class Mant(Format):
    """M-ANT with a table of coefficients: fp16 scale and coefficient byte per group.

    Parameters
    ----------
    coefficients : sequence of int
    name : str
    outlier_groups : float, optional
        Groups whose largest magnitude exceeds this many times their root mean square stay INT8.
    """

    def __init__(
        self,
        coefficients: Sequence[int] = DEFAULT_COEFFICIENTS,
        name: str = "mant",
        outlier_groups: float | None = None,
    ):
        self.name = name
        self._coefficients = check_table(coefficients)
        self._outlier_groups = outlier_groups

    def bits(self, inputs: int, group: int = 64) -> float:
        return 4 + 24 * group_count(inputs, self.group_size(group)) / inputs

    def quantize(
        self, w, group: int = 64, *, second_moment=None, scale_factors: Sequence[float] = (1.0,), name: str = "w"
    ) -> Approximation:
        weights = quantize_weights(
            w,
            group,
            self._coefficients,
            second_moment=second_moment,
            scale_factors=scale_factors,
            outlier_groups=self._outlier_groups,
            name=name,
        )
        return Approximation(weights.dequantize(), weights.bits_per_element, weights.loss)


MANT = Mant()
MANT_OUTLIERS = Mant(name="mant_outliers", outlier_groups=OUTLIER_RATIO)

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        MANT,
        MANT_BISECTION,
        MANT_OUTLIERS,
        baselines.INT4,
        baselines.INT4_ASYMMETRIC,
        *(Coarse(f, whole) for f in (baselines.INT4, baselines.INT4_ASYMMETRIC) for whole in GRANULARITIES),
        baselines.INT2_ASYMMETRIC,
        baselines.NF4,
        baselines.ANT,
        *(Coarse(baselines.ANT, whole) for whole in GRANULARITIES),
        baselines.POT4,
        baselines.FLINT4,
        OLIVE,
        *(Coarse(OLIVE, whole) for whole in GRANULARITIES),
        GOBO,
        GOBO3,
        MOKEY,
        MOKEY_TENSOR,
        BITMOD,
        baselines.MXFP4,
        baselines.NVFP4,
        baselines.INT8,
        baselines.INT8_ASYMMETRIC,
        *(Coarse(f, whole) for f in (baselines.INT8, baselines.INT8_ASYMMETRIC) for whole in GRANULARITIES),
    )
}
"""All formats of weights by name, M-ANT first."""
