"""Scores and weighted sums of INT8 rows against the rule in Python's integers and fractions, and against float64."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from kvant.golden.attention import int8_rows
from kvant.golden.attention.int8_rows import row_logarithms, row_scores, weighted_rows
from kvant.golden.attention.softmax import LOG_FRACTION, LOG_LIMIT, logarithms, score_factor, softmax_constant
from kvant.golden.errors import TensorError
from kvant.golden.numeric.int8 import quantize_int8

SHAPES = [(1, 1, 5, 8), (3, 4, 40, 16), (2, 3, 64, 64), (1, 6, 24, 32), (2, 2, 33, 8)]
"""Queries, rows, channels, G."""


def fractions(scale):
    """fp16 numbers, exactly."""
    return [[Fraction(float(value)) for value in row] for row in scale]


def dot_products(vector, row, group):
    starts = range(0, len(row), group)
    return [sum(a * b for a, b in zip(vector[k : k + group], row[k : k + group], strict=True)) for k in starts]


def logarithms_by_fractions(q, q_scale, rows, row_scale, group):
    c = Fraction(softmax_constant(q.shape[1]).item())

    def limited(z):
        return max(-LOG_LIMIT, min(LOG_LIMIT, z))

    return [
        [
            limited(
                sum(
                    limited(round(r * c * Fraction(s_q) * s * (1 << LOG_FRACTION)))
                    for r, s in zip(dot_products(vector, row, group), scales, strict=True)
                )
            )
            for row, scales in zip(rows.tolist(), fractions(row_scale), strict=True)
        ]
        for vector, s_q in zip(q.tolist(), q_scale.tolist(), strict=True)
    ]


def sums_by_integers(weights, rows, row_scale, group):
    """Mantissas and exponents [B][d], by the words of the contract."""
    mantissas, exponents = [], []
    for vector in weights.tolist():
        sums, places = [0] * rows.shape[1], [0] * rows.shape[1]
        for n, w in enumerate(vector):
            for j in range(rows.shape[1]):
                bits = int(np.float16(row_scale[n, j // group].item()).view(np.uint16)) & 0x7FFF
                exponent, mantissa = bits >> 10, bits & 1023
                p = w * (mantissa + 1024 if exponent else mantissa)
                if p == 0:
                    continue
                length = p.bit_length()
                factor = p >> length - 17 if length > 17 else p << 17 - length
                place = length + max(1, exponent)
                grown = max(place, places[j])
                product = factor * int(rows[n, j]) << 8
                sums[j] = (sums[j] >> grown - places[j]) + (product >> grown - place)
                places[j] = grown
        mantissas.append(sums)
        exponents.append([place - 50 for place in places[::group]])
    return mantissas, exponents


def random_case(queries, tokens, d, group, seed, spread=4.0):
    rng = np.random.default_rng(seed)
    q = quantize_int8(torch.from_numpy(rng.normal(size=(queries, d)).astype(np.float16)), d)
    x = rng.normal(size=(tokens, d)) * np.exp2(rng.normal(scale=spread, size=(tokens, 1)))
    rows = quantize_int8(torch.from_numpy(np.clip(x, -65504, 65504).astype(np.float16)), group)
    weights = np.minimum(np.exp2(24 - rng.exponential(8, (queries, tokens))), 2**24 - 1)
    return q.q, q.scale[:, 0], rows.q, rows.scale, torch.from_numpy(weights.astype(np.int64))


def extreme_case(queries, tokens, d, group, seed):
    """-128 and 127, scales 0, -0, subnormal, largest; weights 0, 1 and the largest."""
    rng = np.random.default_rng(seed)
    pick = lambda values, shape: torch.from_numpy(rng.choice(values, shape))  # noqa: E731
    ends = np.array([-128, 127, 0, 1, -1], np.int8)
    scales = np.array([0, -0.0, 2**-24, 3 * 2**-24, 1023 * 2**-24, 2**-14, 1.0, 515.5], np.float16)
    groups = -(-d // group)
    return (
        pick(ends, (queries, d)),
        pick(scales, queries),
        pick(ends, (tokens, d)),
        pick(scales, (tokens, groups)),
        pick(np.array([0, 1, 2**24 - 1, 2**23, 777]), (queries, tokens)),
    )


@pytest.mark.parametrize("make", [random_case, extreme_case])
@pytest.mark.parametrize("queries,tokens,d,group", SHAPES)
def test_logarithms_are_those_of_exact_fractions(make, queries, tokens, d, group):
    q, q_scale, rows, row_scale, _ = make(queries, tokens, d, group, d)
    z = row_logarithms(q, q_scale, rows, row_scale, group=group)
    assert z.dtype == torch.int64
    assert z.tolist() == logarithms_by_fractions(q, q_scale, rows, row_scale, group)


@pytest.mark.parametrize("make", [random_case, extreme_case])
@pytest.mark.parametrize("queries,tokens,d,group", SHAPES)
def test_scores_are_the_dot_products_of_the_groups(make, queries, tokens, d, group):
    q, _, rows, _, _ = make(queries, tokens, d, group, d)
    right = [[dot_products(vector, row, group) for row in rows.tolist()] for vector in q.tolist()]
    assert row_scores(q, rows, group=group).tolist() == right


def test_logarithms_saturate_by_group_and_in_their_sum():
    q, row = torch.full((1, 24), 127, dtype=torch.int8), torch.full((1, 24), 127, dtype=torch.int8)
    scale = torch.full((1, 3), 65504, dtype=torch.float16)
    for signs in ((1, 1, 1), (1, 1, -1), (1, -1, -1), (-1, -1, -1)):
        rows = row * torch.tensor(signs, dtype=torch.int8).repeat_interleave(8)
        z = row_logarithms(q, scale[:, 0], rows, scale, group=8)
        assert z.tolist() == logarithms_by_fractions(q, scale[:, 0], rows, scale, 8)
        assert z.item() == (LOG_LIMIT if sum(signs) > 0 else -LOG_LIMIT)


def test_a_row_of_one_group_and_a_coded_key_of_the_same_score_and_scale_have_one_logarithm():
    """However large: what was rounded in different places let parts of a cache drift apart by whole powers of two."""
    rng = np.random.default_rng(3)
    q, rows = (torch.from_numpy(rng.integers(100, 128, (n, 64)).astype(np.int8)) for n in (4, 30))
    q_scale, scale = (torch.tensor(rng.uniform(100, 500, n)).half() for n in (4, 30))
    z = row_logarithms(q, q_scale, rows, scale[:, None], group=64)
    coded = logarithms(row_scores(q, rows, group=64)[..., 0], score_factor(q_scale[:, None], scale, 64))
    assert torch.equal(z, coded) and (z > 1 << 45).all()


@pytest.mark.parametrize("make", [random_case, extreme_case])
@pytest.mark.parametrize("queries,tokens,d,group", [*SHAPES, (1, 200, 8, 8)])
def test_sums_are_those_of_the_words_of_the_contract(make, queries, tokens, d, group):
    *_, rows, row_scale, weights = make(queries, tokens, d, group, d)
    sums = weighted_rows(weights, rows, row_scale, group=group)
    mantissas, exponents = sums_by_integers(weights, rows, row_scale, group)
    assert sums.mantissa.tolist() == mantissas
    assert sums.exponent.tolist() == exponents


@pytest.mark.parametrize("spread", [0.0, 4.0])
def test_sums_are_close_to_those_of_float64(spread):
    """Each product misses less than 2^-16 of itself, each step a unit of 2^-24 of its group's largest factor."""
    *_, rows, row_scale, weights = random_case(3, 84, 64, 64, 5, spread)
    sums = weighted_rows(weights, rows, row_scale, group=64)
    factors = weights.to(torch.float64)[..., None] * row_scale.to(torch.float64)  # [B, N, 1]
    products = factors * rows.to(torch.float64)
    error = (sums.values() - products.sum(-2)).abs()
    bound = products.abs().sum(-2) * 2.0**-16 + 2 * 84 * factors.amax(-2) * 2.0**-24
    assert (error <= bound).all()


def test_a_row_that_weighs_nothing_changes_nothing():
    *_, rows, row_scale, weights = random_case(2, 6, 24, 16, 9)
    weights[:, 3] = 0
    keep = [0, 1, 2, 4, 5]
    few = weighted_rows(weights[:, keep], rows[keep], row_scale[keep], group=16)
    all_rows = weighted_rows(weights, rows, row_scale, group=16)
    assert torch.equal(few.mantissa, all_rows.mantissa) and torch.equal(few.exponent, all_rows.exponent)


def test_no_rows_are_legal():
    rows, scale = torch.zeros((0, 16), dtype=torch.int8), torch.zeros((0, 2), dtype=torch.float16)
    q, q_scale = torch.ones((3, 16), dtype=torch.int8), torch.ones(3, dtype=torch.float16)
    assert row_scores(q, rows, group=8).shape == (3, 0, 2)
    assert row_logarithms(q, q_scale, rows, scale, group=8).shape == (3, 0)
    sums = weighted_rows(torch.zeros((3, 0), dtype=torch.int64), rows, scale, group=8)
    assert not sums.mantissa.any() and sums.mantissa.shape == (3, 16) and (sums.exponent == -50).all()
    assert not sums.values().any()


def test_heads_are_independent():
    heads = [random_case(2, 5, 24, 16, seed) for seed in (1, 2)]
    q, q_scale, rows, row_scale, weights = (torch.stack(parts) for parts in zip(*heads, strict=True))
    z = row_logarithms(q, q_scale, rows, row_scale, group=16)
    sums = weighted_rows(weights, rows, row_scale, group=16)
    for head, (one_q, one_q_scale, one_rows, one_scale, one_weights) in enumerate(heads):
        assert torch.equal(z[head], row_logarithms(one_q, one_q_scale, one_rows, one_scale, group=16))
        assert torch.equal(sums.values()[head], weighted_rows(one_weights, one_rows, one_scale, group=16).values())


def test_what_does_not_fit_is_refused():
    q, q_scale, rows, row_scale, weights = random_case(2, 5, 24, 16, 0)
    with pytest.raises(TensorError, match=r"^q: shape \(2, 20\); legal is \[\.\.\., B, 24\]$"):
        row_scores(q[:, :20], rows, group=16)
    with pytest.raises(TensorError, match=r"^row_scale: shape \(5, 1\); legal is \(5, 2\)$"):
        row_logarithms(q, q_scale, rows, row_scale[:, :1], group=16)
    with pytest.raises(TensorError, match=r"^q_scale\[0\] = -1\.0: legal is"):
        row_logarithms(q, torch.full_like(q_scale, -1), rows, row_scale, group=16)
    with pytest.raises(TensorError, match=r"^weights: -1 to .*; legal are 0 to 16777215$"):
        weighted_rows(weights - weights.min() - 1, rows, row_scale, group=16)
    with pytest.raises(TensorError, match=r"^weights: torch.int64 \(2, 4\); legal"):
        weighted_rows(weights[:, :4], rows, row_scale, group=16)
    with pytest.raises(TensorError, match=r"^rows: dtype int32; legal: int8$"):
        row_scores(q, rows.to(torch.int32), group=16)


@pytest.mark.parametrize(("name", "value"), [("GUARD_BITS", 7), ("FACTOR_BITS", 16)])
def test_a_wrong_constant_is_seen(name, value, monkeypatch):
    *_, rows, row_scale, weights = random_case(2, 6, 24, 16, 9)
    monkeypatch.setattr(int8_rows, name, value)
    sums = weighted_rows(weights, rows, row_scale, group=16)
    assert sums.mantissa.tolist() != sums_by_integers(weights, rows, row_scale, 16)[0]
