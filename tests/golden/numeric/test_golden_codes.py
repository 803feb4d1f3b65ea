"""Levels, tables, and both encode rules of the 4-bit code."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.codes import (
    DEFAULT_COEFFICIENTS,
    DEFAULT_THRESHOLDS,
    INT8,
    LINEAR,
    check_table,
    decode,
    encode,
    encode_int8,
    grid_scale,
    largest_level,
    level_table,
    levels,
    requantized_scale,
)
from kvant.golden.numeric.rounding import fp16_from_bits, fp16_to_bits

GRIDS = [*range(128), LINEAR]
ALL_CODES = torch.arange(16, dtype=torch.uint8)


def f16(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float16)


@pytest.mark.parametrize("a", GRIDS)
def test_levels_are_the_closed_formula(a):
    """Case 09: formula, symmetry, strictly increasing magnitudes, range of the datapath."""
    expected = [i if a == LINEAR else a * i + 2**i for i in range(8)]
    assert levels(a).tolist() == expected
    assert expected == sorted(set(expected))
    decoded = decode(ALL_CODES, a).tolist()
    assert decoded == expected + [-level for level in expected]
    assert largest_level(a) == expected[-1] == (7 if a == LINEAR else 7 * a + 128)
    assert expected[-1] <= 1017


def test_magnitude_zero_of_an_adaptive_group_is_one_not_zero():
    assert decode(torch.tensor([0x0, 0x8], dtype=torch.uint8), 17).tolist() == [1, -1]
    assert decode(torch.tensor([0x0, 0x8], dtype=torch.uint8), LINEAR).tolist() == [0, 0]


@pytest.mark.parametrize("a", [-1, 128, 253, INT8, 256, 2.0, 2.5, "5", True, None])
def test_illegal_coefficient_is_refused_by_name(a):
    """Case 09: out of range, fractional, wrong type."""
    with pytest.raises(TensorError, match=r"^coefficient = .*: legal is an integer from 0 to 127, or 255 \(linear\)$"):
        levels(a)


def test_decode_refuses_reserved_coefficients_and_wide_codes():
    with pytest.raises(TensorError, match=r"^coefficient\[1\] = 200: legal is 0 to 127, or 255 \(linear\)$"):
        decode(torch.zeros(2, dtype=torch.uint8), torch.tensor([5, 200], dtype=torch.uint8))
    with pytest.raises(TensorError, match=r"^codes: value 16; legal is 0 to 15$"):
        decode(torch.tensor([16], dtype=torch.uint8), 5)


def test_largest_level_of_tensors():
    coefficients = torch.tensor([0, 5, 127, INT8, LINEAR], dtype=torch.uint8)
    assert largest_level(coefficients).tolist() == [128, 163, 1017, 127, 7]


def test_table_check():
    assert check_table([255, 0, 0]) == (255, 0, 0)
    assert check_table(torch.tensor([3, 2], dtype=torch.uint8)) == (3, 2)
    assert level_table((1, 255)).tolist() == [levels(1).tolist(), levels(255).tolist()]
    assert len(DEFAULT_COEFFICIENTS) == 16 and len(DEFAULT_THRESHOLDS) == 15
    assert list(DEFAULT_THRESHOLDS) == sorted(DEFAULT_THRESHOLDS)
    with pytest.raises(TensorError, match=r"^coefficients: 0 entries; legal is 1 to 16$"):
        check_table([])
    with pytest.raises(TensorError, match=r"^coefficients: 17 entries; legal is 1 to 16$"):
        check_table(range(17))
    with pytest.raises(TensorError, match=r"^coefficients\[2\] = 254: legal is an integer from 0 to 127"):
        check_table([1, 2, 254])


@pytest.mark.parametrize("a", GRIDS)
@pytest.mark.parametrize("scale", [2.0**-24, 0.03125, 0.0100021362, 1.0])
def test_software_encode_is_nearest_by_exact_fractions(a, scale):
    """Every tie and its float32 neighbours, both signs: the smaller magnitude wins only on the tie itself."""
    s = f16(scale)
    magnitudes = levels(a).tolist()
    exact = Fraction(s.item())
    ties = torch.tensor([float(exact * (p + q) / 2) for p, q in pairwise(magnitudes)])
    x = torch.cat([ties, torch.nextafter(ties, torch.zeros(1)), torch.nextafter(ties, torch.tensor(1e9))])
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, float(exact) * 2000, 1e-30, -1e-30])])
    got = encode(x[None], s, a)[0].tolist()
    for value, code in zip(x.tolist(), got, strict=True):
        magnitude = min(range(8), key=lambda i, v=value: (abs(abs(Fraction(v)) - exact * magnitudes[i]), i))
        negative = value < 0 and not (a == LINEAR and magnitude == 0)
        assert code == magnitude + 8 * negative, (value, a)


@pytest.mark.parametrize("a", GRIDS)
def test_hardware_encode_is_nearest_by_exact_fractions(a):
    """All pairs |q| <= m of selected m, with the levels scaled so that the largest one is m."""
    magnitudes = levels(a).tolist()
    for m in (1, 2, 7, 63, 100, 127, 128, 255):
        q = torch.arange(-m, m + 1, dtype=torch.int16)
        got = encode_int8(q[None], torch.tensor([m], dtype=torch.int16), a)[0].tolist()
        for value, code in zip(q.tolist(), got, strict=True):
            scaled = [Fraction(m * level, magnitudes[-1]) for level in magnitudes]
            magnitude = min(range(8), key=lambda i, v=value, s=scaled: (abs(abs(v) - s[i]), i))
            negative = value < 0 and not (a == LINEAR and magnitude == 0)
            assert code == magnitude + 8 * negative, (value, m, a)


def test_tie_rounds_to_the_smaller_magnitude():
    """Case 08: half steps of the linear type, negatives, and one beyond the top level."""
    x = torch.tensor([[0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 7.5, -7.5]])
    assert encode(x, f16(1.0), LINEAR).tolist() == [[0, 0, 1, 9, 2, 10, 7, 15]]
    q = torch.tensor([[1, -1, 3, -3, 5, -5, 14, -14]], dtype=torch.int8)
    assert encode_int8(q, torch.tensor([14], dtype=torch.int8), LINEAR).tolist() == [[0, 0, 1, 9, 2, 10, 7, 15]]


def test_zero_scale_and_zero_maximum_give_code_zero():
    assert encode(torch.tensor([[-1e-9, 1e-9, 0.0]]), f16(0.0), 5).tolist() == [[0, 0, 0]]
    assert encode_int8(torch.zeros(1, 3, dtype=torch.int8), torch.zeros(1, dtype=torch.int8), 5).tolist() == [[0, 0, 0]]


def test_encode_then_decode_returns_every_level_of_every_grid():
    for a in GRIDS:
        level = decode(ALL_CODES, a)
        again = decode(encode((level * 0.5)[None].to(torch.float32), f16(0.5), a)[0], a)
        assert torch.equal(again, level)


def test_groups_encode_with_their_own_scale_and_coefficient():
    torch.manual_seed(3)
    x = torch.randn(4, 3, 17)
    scale = (torch.rand(4, 3) * 0.01 + 0.001).to(torch.float16)
    a = torch.tensor(DEFAULT_COEFFICIENTS[:12], dtype=torch.uint8).reshape(4, 3)
    together = encode(x, scale, a)
    for i in range(4):
        for j in range(3):
            assert torch.equal(together[i, j], encode(x[i, j][None], scale[i, j][None], int(a[i, j]))[0])


def test_encode_does_not_overflow_at_the_end_of_float32():
    assert encode(torch.tensor([[3e38, -3e38]]), f16(65504.0), 127).tolist() == [[7, 15]]


def test_encode_refuses_what_is_not_finite_or_negative():
    x = torch.ones(1, 2)
    with pytest.raises(TensorError, match=r"^scale\[0\] = -1.0: legal is a finite value of at least 0$"):
        encode(x, f16(-1.0), 5)
    assert encode(x, f16(-0.0), 5).tolist() == [[0, 0]]
    with pytest.raises(TensorError, match=r"^scale\[0\] = inf"):
        encode(x, f16(float("inf")), 5)
    with pytest.raises(TensorError, match=r"^x: NaN or infinity"):
        encode(torch.tensor([[1.0, float("nan")]]), f16(1.0), 5)
    with pytest.raises(TensorError, match=r"^scale: shape \(2,\); legal is \(1,\)$"):
        encode(x, f16(1.0, 1.0), 5)
    with pytest.raises(TensorError, match=r"^x: dtype float64; legal: float16, bfloat16, float32$"):
        encode(x.double(), f16(1.0), 5)


def test_stored_scale_lands_on_subnormals_exactly():
    """Case 02: scales 0x0001, 0x03FF, 0x0400 are reached and kept."""
    for pattern in (0x0001, 0x03FF, 0x0400):
        s = fp16_from_bits(torch.tensor([pattern]))
        absmax = s.to(torch.float32) * 163
        assert fp16_to_bits(grid_scale(absmax, 5)).tolist() == [pattern]


def test_requantized_scale_is_the_exact_quotient_rounded_once(nearest_fp16):
    for pattern in (1, 0x3FF, 0x400, 0x1234, 0x3C00, 0x7BFF):
        s8 = fp16_from_bits(torch.tensor(pattern))
        for m in (0, 1, 64, 127, 255):
            for a in (0, 17, 127, LINEAR):
                got = requantized_scale(s8, torch.tensor(m), a)
                exact = Fraction(s8.item()) * m / largest_level(a)
                if exact < 65520:
                    assert fp16_to_bits(got).item() == nearest_fp16(exact)
