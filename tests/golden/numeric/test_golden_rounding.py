"""Rounding to integers, binary16 and binary32: once, ties to even, subnormals kept."""

from fractions import Fraction

import numpy as np
import torch

from kvant.golden.numeric.rounding import FP16_MAX, fp16, fp16_from_bits, fp16_to_bits, fp32, rne

ALL_PATTERNS = torch.arange(65536, dtype=torch.int32)
FINITE = ALL_PATTERNS[(ALL_PATTERNS & 0x7C00) != 0x7C00]


def bits(values) -> list[int]:
    return fp16_to_bits(fp16(torch.tensor(values, dtype=torch.float64))).tolist()


def test_all_fp16_patterns_agree_with_numpy():
    """Case 02: every pattern, subnormals included, both ways."""
    expected = np.arange(65536, dtype=np.uint16).view(np.float16)
    values = fp16_from_bits(ALL_PATTERNS)
    assert np.array_equal(values.numpy().view(np.uint16), expected.view(np.uint16))
    assert torch.equal(fp16_to_bits(values), ALL_PATTERNS)
    wide = torch.from_numpy(expected.astype(np.float64))
    finite = torch.isfinite(wide)
    assert torch.equal(fp16_to_bits(fp16(wide))[finite], ALL_PATTERNS[finite])
    assert torch.equal(fp16(wide).isnan(), wide.isnan())
    assert torch.equal(values.to(torch.float64)[finite], wide[finite])


def test_values_between_all_neighbours_round_as_fractions_say():
    """Midpoints go to the even pattern; a hair beside them, far below float32's resolution, decides."""
    low = FINITE[FINITE < 0x7BFF]
    a, b = (fp16_from_bits(p).to(torch.float64) for p in (low, low + 1))
    middle = (a + b) / 2
    even = torch.where(low % 2 == 0, low, low + 1)
    assert torch.equal(fp16_to_bits(fp16(middle)), even)
    above, below = torch.nextafter(middle, b), torch.nextafter(middle, a)
    assert torch.equal(fp16_to_bits(fp16(above)), low + 1)
    assert torch.equal(fp16_to_bits(fp16(below)), low)
    assert torch.equal(fp16_to_bits(fp16(-above)), (low + 1) | 0x8000)


def test_fp16_does_not_round_through_float32():
    assert bits([1 + 2.0**-11 + 2.0**-40]) == [0x3C01]
    assert bits([1 + 2.0**-11]) == [0x3C00]


def test_fp16_range_ends():
    assert bits([0.0, 2.0**-25, 2.0**-25 * (1 + 2.0**-52), 2.0**-24, 5e-324]) == [0, 0, 1, 1, 0]
    assert bits([FP16_MAX, 65519.99999, 65520.0, 1e300, float("inf"), -65520.0]) == [
        0x7BFF, 0x7BFF, 0x7C00, 0x7C00, 0x7C00, 0xFC00,
    ]  # fmt: skip


def test_quotients_of_scales_round_as_exact_fractions_do(nearest_fp16):
    """float64 divides before `fp16` rounds: that must not create or destroy a tie."""
    random = np.random.default_rng(2)
    tie_points = [Fraction(2 * m + 1, 2) * Fraction(2) ** -10 for m in range(1024, 2048, 37)]
    for largest in (7, 127, 128, 135, 663, 1017):
        for tie in tie_points:
            exact = np.float32(float(tie * largest))  # next to a quotient that is a tie, or equal to one
            candidates = [np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(1e9))]
            candidates.append(np.float32(random.uniform(1e-9, 1e7)))
            for absmax in candidates:
                quotient = Fraction(float(absmax)) / largest
                got = fp16(torch.tensor(float(absmax), dtype=torch.float64) / largest)
                assert fp16_to_bits(got).item() == nearest_fp16(quotient), (absmax, largest)


def test_rne_ties_and_negatives():
    values = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 126.5], dtype=torch.float64)
    assert rne(values).tolist() == [-2, -2, 0, 0, 2, 2, 126]


def test_fp32_rounds_once_with_ties_to_even():
    values = torch.tensor([1 + 2.0**-24, 1 + 3 * 2.0**-24, 1 + 2.0**-24 + 2.0**-50], dtype=torch.float64)
    assert fp32(values).tolist() == [1.0, 1 + 2.0**-22, 1 + 2.0**-23]
