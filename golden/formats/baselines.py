"""Integers, tables of levels and block floats that M-ANT is compared with; fp16 scales where nothing else is said."""

from collections.abc import Sequence

import torch

from kvant.golden.formats.base import Approximate, GroupFormat, absmax, divide, fp16_scale, nearest
from kvant.golden.numeric.rounding import FP16_MAX


class IntSymmetric(GroupFormat):
    """Two's complement integers with a symmetric scale, ``s = fp16(absmax / (2^(b-1) - 1))``.

    The lowest integer, -2^(b-1), has no counterpart and is used only by elements that a smaller scale clips.
    """

    group_bits = 16

    def __init__(self, code_bits: int):
        self.code_bits = code_bits
        self.name = f"int{code_bits}"

    def candidates(self, w: torch.Tensor, factors: Sequence[float]) -> list[Approximate]:
        largest = 2 ** (self.code_bits - 1) - 1

        def at(factor: float) -> Approximate:
            def approximate(x: torch.Tensor) -> torch.Tensor:
                scale = fp16_scale(absmax(x), factor, largest)
                return scale * divide(x, scale).round().clamp(-largest - 1, largest)

            return approximate

        return [at(factor) for factor in factors]


class IntAsymmetric(GroupFormat):
    """Unsigned integers between an fp16 minimum and ``minimum + (2^b - 1) s`` (with 4 bits, as GGUF's Q4_1).

    A factor below 1 shrinks both ends of the range towards 0.
    """

    group_bits = 32

    def __init__(self, code_bits: int):
        self.code_bits = code_bits
        self.name = f"int{code_bits}_asymmetric"

    def candidates(self, w: torch.Tensor, factors: Sequence[float]) -> list[Approximate]:
        steps = 2**self.code_bits - 1

        def at(factor: float) -> Approximate:
            def approximate(x: torch.Tensor) -> torch.Tensor:
                low, high = x.aminmax(dim=-1, keepdim=True)
                low = (low * factor).clamp(-FP16_MAX, FP16_MAX).to(torch.float16).to(torch.float32)
                scale = fp16_scale(high * factor - low, 1.0, steps)
                return low + scale * divide(x - low, scale).round().clamp(0, steps)

            return approximate

        return [at(factor) for factor in factors]


class LevelTable(GroupFormat):
    """One or several tables of ascending levels, the best of which is chosen per group.

    ``s = fp16(absmax / largest)`` with the largest magnitude of the table.
    """

    code_bits = 4

    def __init__(self, name: str, tables: Sequence[Sequence[float]]):
        self.name = name
        self._tables = [torch.tensor(table, dtype=torch.float32) for table in tables]
        self.group_bits = 16 + (len(tables) - 1).bit_length()

    def candidates(self, w: torch.Tensor, factors: Sequence[float]) -> list[Approximate]:
        def at(table: torch.Tensor, factor: float) -> Approximate:
            largest = float(table.abs().max())

            def approximate(x: torch.Tensor) -> torch.Tensor:
                scale = fp16_scale(absmax(x), factor, largest)
                return scale * nearest(divide(x, scale), table)

            return approximate

        return [at(table, factor) for table in self._tables for factor in factors]


def symmetric(magnitudes: Sequence[float]) -> list[float]:
    """A table of both signs from ascending magnitudes that begin with 0."""
    return [-m for m in reversed(magnitudes[1:])] + list(magnitudes)


NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NormalFloat4: quantiles of a Gaussian with an exact zero (QLoRA, NeurIPS 2023, appendix E)."""

ANT_MAGNITUDES = {
    "int": (0, 1, 2, 3, 4, 5, 6, 7),
    "pot": (0, 1, 2, 4, 8, 16, 32, 64),
    "flint": (0, 1, 2, 3, 4, 6, 8, 16),
}
"""Types of ANT (MICRO 2022, section IV) at sign plus three bits: integer, power of two, and their mixture flint."""

E2M1_LARGEST = 6.0
"""Largest value of a 4-bit float with two exponent bits and one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""


def e2m1(u: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 values, ties to the even mantissa, saturating at 6 (OCP Microscaling Formats 1.0, section 5.3.3)."""
    magnitude = u.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return torch.round(u / step).mul(step).clamp(-E2M1_LARGEST, E2M1_LARGEST)


class Mxfp4(GroupFormat):
    """OCP MXFP4: 32 E2M1 elements share an E8M0 scale, ``2^(floor(log2(absmax)) - 2)`` (version 1.0, section 6.3).

    Its scale knows powers of two only: a search tries the neighbours of the specified one.
    """

    name = "mxfp4"
    fixed_group = 32
    code_bits = 4
    group_bits = 8

    def candidates(self, w: torch.Tensor, factors: Sequence[float]) -> list[Approximate]:
        def at(offset: int) -> Approximate:
            def approximate(x: torch.Tensor) -> torch.Tensor:
                exponent = torch.frexp(absmax(x)).exponent - 1 - 2 + offset  # frexp's mantissa is below 1
                scale = torch.exp2(exponent.clamp(-126, 127).to(torch.float32))
                return scale * e2m1(x / scale)

            return approximate

        return [at(offset) for offset in ((0,) if len(factors) == 1 else (0, 1, -1))]


class Nvfp4(GroupFormat):
    """NVFP4: 16 E2M1 elements share an E4M3 scale, above which the tensor has one of fp32.

    The tensor's scale brings the largest group scale to 448, the largest E4M3 value (NVIDIA, "Introducing NVFP4",
    2025).
    """

    name = "nvfp4"
    fixed_group = 16
    code_bits = 4
    group_bits = 8

    def candidates(self, w: torch.Tensor, factors: Sequence[float]) -> list[Approximate]:
        tensor_scale = (w.abs().max() / (E2M1_LARGEST * 448.0)).clamp(min=torch.finfo(torch.float32).tiny)

        def at(factor: float) -> Approximate:
            def approximate(x: torch.Tensor) -> torch.Tensor:
                wanted = factor * absmax(x) / (E2M1_LARGEST * tensor_scale)
                scale = wanted.clamp(max=448.0).to(torch.float8_e4m3fn).to(torch.float32) * tensor_scale
                return scale * e2m1(divide(x, scale))

            return approximate

        return [at(factor) for factor in factors]


INT4 = IntSymmetric(4)
INT2_ASYMMETRIC = IntAsymmetric(2)
INT4_ASYMMETRIC = IntAsymmetric(4)
INT8 = IntSymmetric(8)
INT8_ASYMMETRIC = IntAsymmetric(8)
NF4 = LevelTable("nf4", [NF4_LEVELS])
ANT = LevelTable("ant", [symmetric(magnitudes) for magnitudes in ANT_MAGNITUDES.values()])
POT4 = LevelTable("pot4", [symmetric(ANT_MAGNITUDES["pot"])])
FLINT4 = LevelTable("flint4", [symmetric(ANT_MAGNITUDES["flint"])])
MXFP4 = Mxfp4()
NVFP4 = Nvfp4()
