"""Outputs from sums: every rounding against fractions."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from kvant.golden.attention.normalize import coded_values, normalize, reciprocal
from kvant.golden.errors import TensorError

SEED = 20261130


def nearest_fp32(value):
    """The fp32 number nearest to a fraction, ties to even, as a fraction; no subnormals."""
    if value == 0:
        return Fraction(0)
    unit = Fraction(2) ** (abs(value.numerator).bit_length() - value.denominator.bit_length() - 25)
    while abs(value) / unit >= 1 << 24:
        unit *= 2
    return round(value / unit) * unit


def test_reciprocals_are_rounded_once():
    rng = random.Random(SEED)
    numbers = [1, 2, 3, (1 << 48) - 1, (1 << 40) + 1, (1 << 40) - 1, 1 << 47]
    numbers += [1 << 61, (1 << 62) - 1, (1 << 54) - 1, (1 << 54) + 1, (1 << 61) - 1, (1 << 61) + 1]
    numbers += [rng.randrange(1, 1 << rng.randrange(1, 63)) for _ in range(3000)]
    # denominators whose reciprocals lie next to a tie: float64 division followed by a conversion may miss them
    for _ in range(3000):
        tie = rng.randrange(1 << 24, 1 << 25) | 1
        numbers.append(round(Fraction(1 << rng.randrange(48, 86), tie)))
    numbers = [n for n in numbers if 0 < n < 1 << 62]
    got = reciprocal(torch.tensor(numbers)).tolist()
    assert got == [nearest_fp32(Fraction(1, n)) for n in numbers]
    assert reciprocal(torch.tensor([0])).tolist() == [0.0]


def test_coded_values_are_cut_to_24_bits_and_rounded_once():
    rng = random.Random(SEED)
    sums = [rng.randrange(-(1 << 40), 1 << 40) >> rng.randrange(40) for _ in range(1000)] + [0, -1, (1 << 40) - 1]
    scales = torch.tensor([1, 0x3FF, 0x2E66, 0x3C01, 0x7BFF, 0], dtype=torch.int16).view(torch.float16)
    for scale in scales:
        got = coded_values(torch.tensor([sums]), scale, torch.tensor([3]))[0]
        assert not torch.signbit(got[got == 0]).any()
        for number, value in zip(sums, got.tolist(), strict=True):
            drop = max(0, abs(number).bit_length() - 24)
            cut = (abs(number) >> drop << drop) * (1 if number > 0 else -1)
            assert value == nearest_fp32(Fraction(cut) * Fraction(scale.item())) * 8


def test_outputs_are_rounded_step_by_step():
    rng = random.Random(SEED)
    coded = torch.tensor(
        [[rng.uniform(-1, 1) * 2.0 ** rng.randrange(-20, 60) for _ in range(400)]], dtype=torch.float32
    )
    rows = torch.tensor([[rng.randrange(-(1 << 40), 1 << 40) * 2.0 ** rng.randrange(-50, 16) for _ in range(400)]])
    rows = rows.to(torch.float64)
    rows[0, :50] = -coded[0, :50].to(torch.float64)
    inverse = nearest_fp32(Fraction(1, 987654321))
    for parts in ({"coded": coded, "rows": rows}, {"coded": coded}, {"rows": rows}):
        got = normalize(torch.tensor([987654321]), **parts)[0]
        want = []
        for j in range(400):
            numbers = [nearest_fp32(Fraction(part[0, j].item())) for part in parts.values()]
            want.append(nearest_fp32(nearest_fp32(sum(numbers)) * inverse))
        assert got.tolist() == want
        assert not torch.signbit(got[got == 0]).any()


def test_a_query_without_keys_gives_zero():
    got = normalize(torch.tensor([0, 4]), rows=torch.ones((2, 3), dtype=torch.float64))
    assert got.tolist() == [[0.0] * 3, [0.25] * 3]


def test_weighted_means_come_out_as_float64_gives_them():
    generator = torch.Generator().manual_seed(SEED)
    w = torch.randint(0, 1 << 24, (6, 500), generator=generator)
    values = torch.randint(-127, 128, (500, 16), generator=generator)
    scale = torch.tensor(0.01).to(torch.float16)
    out = normalize(w.sum(-1), coded=coded_values(w @ values, scale, torch.zeros(6, dtype=torch.int64)))
    exact = (w.double() @ values.double()) * scale.double() / w.sum(-1, keepdim=True)
    np.testing.assert_allclose(out.double(), exact, rtol=2.0**-21, atol=0)


def test_bad_input_is_refused():
    one = torch.tensor([1])
    with pytest.raises(TensorError, match="coded, rows and staged: legal is at least one of them"):
        normalize(one)
    with pytest.raises(TensorError, match="rows: dtype float32; legal: float64"):
        normalize(one, rows=torch.ones((1, 3)))
    with pytest.raises(TensorError, match=r"coded: shape \(2, 3\); legal is \(1, 3\)"):
        normalize(one, coded=torch.ones((2, 3)))
    with pytest.raises(TensorError, match="denominator: -1 to 3; legal are 0 to"):
        reciprocal(torch.tensor([-1, 3]))
    with pytest.raises(TensorError, match="codebook_scale"):
        coded_values(torch.tensor([[1]]), torch.tensor(-1.0, dtype=torch.float16), torch.tensor([0]))
