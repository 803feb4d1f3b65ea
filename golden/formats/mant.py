"""M-ANT behind the interface of all formats, and the list of formats."""

from collections.abc import Sequence

from kvant.golden.formats import baselines
from kvant.golden.formats.base import Approximation, Format
from kvant.golden.linear.search import quantize_weights
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, check_table
from kvant.golden.numeric.tensors import group_count


class Mant(Format):
    """M-ANT with a table of coefficients: fp16 scale and coefficient byte per group."""

    def __init__(self, coefficients: Sequence[int] = DEFAULT_COEFFICIENTS, name: str = "mant"):
        self.name = name
        self._coefficients = check_table(coefficients)

    def bits(self, inputs: int, group: int = 64) -> float:
        return 4 + 24 * group_count(inputs, self.group_size(group)) / inputs

    def quantize(
        self, w, group: int = 64, *, second_moment=None, scale_factors: Sequence[float] = (1.0,), name: str = "w"
    ) -> Approximation:
        weights = quantize_weights(
            w, group, self._coefficients, second_moment=second_moment, scale_factors=scale_factors, name=name
        )
        return Approximation(weights.dequantize(), weights.bits_per_element, weights.loss)


MANT = Mant()

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        MANT,
        baselines.INT4,
        baselines.INT4_ASYMMETRIC,
        baselines.NF4,
        baselines.ANT,
        baselines.MXFP4,
        baselines.NVFP4,
        baselines.INT8,
    )
}
"""All formats by name, M-ANT first."""
