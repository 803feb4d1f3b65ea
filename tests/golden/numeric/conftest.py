"""binary16 by exact arithmetic: the oracle of the rounding tests."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from kvant.golden.numeric.rounding import fp16_to_bits


@pytest.fixture(scope="session")
def nearest_fp16() -> Callable[[Fraction], int]:
    """Pattern of the binary16 value nearest to one of 0 or more below the overflow, ties to even."""

    def pattern(value: Fraction) -> int:
        place = Fraction(2) ** -24
        while value / place >= 2048:
            place *= 2
        units = round(value / place)  # Python rounds a Fraction half to even
        return fp16_to_bits(torch.tensor(float(units * place), dtype=torch.float16)).item()

    return pattern
