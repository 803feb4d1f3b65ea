"""The fixed-point softmax against float64: the bounds of the contract, parts, order, extremes."""

import math
import random
from fractions import Fraction

import pytest
import torch

from kvant.golden.attention import softmax
from kvant.golden.attention.softmax import (
    LOG_FRACTION,
    LOG_LIMIT,
    NO_KEY,
    Factor,
    bin_shift,
    exponential,
    logarithms,
    reference,
    score_factor,
    softmax_constant,
    weights,
)
from kvant.golden.errors import TensorError

SEED = 20261130
LARGEST = (1 << 24) - 1


def from_logits(logits):
    """Logarithms of natural logits f64 [..., T], to 16 fraction bits: what an exact score would give."""
    return torch.round(logits * (math.log2(math.e) * (1 << LOG_FRACTION))).to(torch.int64)


def normalised(w):
    return w.to(torch.float64) / w.sum(-1, keepdim=True)


def assert_within_bounds(logits):
    """The bounds of the contract for rows of natural logits; returns what was reached of each."""
    z = from_logits(logits)
    w = weights(z, reference(z))
    got, exact = normalised(w), torch.softmax(logits, -1)
    error = (got - exact).abs()
    relative = torch.where(exact > 2.0**-12, error / exact, 0.0)
    reached = {
        "sum": (got.sum(-1) - 1).abs().max().item(),
        "weight": error.max().item(),
        "relative": relative.max().item(),
        "absolute sum": error.sum(-1).max().item(),
    }
    assert reached["sum"] <= 2.0**-10 and reached["weight"] <= 2.0**-10
    assert reached["relative"] <= 2.0**-6 and reached["absolute sum"] <= 2.0**-8
    # order: a larger logit never has a smaller weight
    order = logits.argsort(-1)
    assert (w.gather(-1, order).diff(dim=-1) >= 0).all()
    assert (w.amax(-1) == LARGEST).all() and (w >= 0).all()
    return reached


def log2_logits(powers):
    return torch.tensor(powers, dtype=torch.float64) * math.log(2)


def adversarial(tokens, generator):
    """Rows of logits [tokens] that a softmax of too few bits gets wrong."""
    one_and_tail = torch.full((tokens,), -17.0, dtype=torch.float64)
    one_and_tail[tokens // 3] = 0
    rows = [torch.zeros(tokens, dtype=torch.float64)]
    # the tail at every depth around the last bit of a weight, and half way down
    for depth in (1, 8, 15.5, 17, 20, 22.999, 23.5, 24, 24.01, 24.5, 24.999, 25, 25.001, 26, 60):
        row = torch.full((tokens,), -float(depth), dtype=torch.float64)
        row[tokens // 3] = 0
        rows.append(row * math.log(2))
    for spread in (0.01, 1, 3, 10, 100, 1e4, 1e6):
        rows.append(torch.randn(tokens, generator=generator, dtype=torch.float64) * spread)
    rows.append(torch.linspace(0, -30, tokens, dtype=torch.float64))
    rows.append(torch.randint(-4, 5, (tokens,), generator=generator).to(torch.float64))  # many ties
    rows.append(torch.cat([torch.zeros(1, dtype=torch.float64), torch.full((tokens - 1,), -1e9, dtype=torch.float64)]))
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 256, 4096, 32768])
def test_bounds_hold_from_1_to_32768_keys(tokens):
    assert_within_bounds(adversarial(tokens, torch.Generator().manual_seed(SEED)))


def test_a_flat_tail_of_32767_keys_carries_its_fifth_of_the_mass():
    logits = torch.full((32768,), -17 * math.log(2), dtype=torch.float64)
    logits[12345] = 0
    z = from_logits(logits)
    w = normalised(weights(z, reference(z)))
    assert abs(1 - w[12345].item() - 0.2) < 2.0**-10


def test_every_weight_is_within_its_bound_and_never_rises():
    x = torch.arange(26 << LOG_FRACTION)
    w = exponential(x)
    exact = torch.exp2(24 - x.to(torch.float64) / (1 << LOG_FRACTION))
    assert ((w - exact).abs() <= exact * 2.0**-16 + 0.5).all()
    assert (w.diff() <= 0).all() and w[0] == LARGEST and w[-1] == 0
    assert exponential(torch.tensor([2 * LOG_LIMIT + 1, 1 << 40])).tolist() == [0, 0]


def test_weights_follow_the_documented_formula():
    rng = random.Random(SEED)
    bases = [round(2.0 ** (24 - k / 64)) for k in range(65)]
    bases[0] -= 1
    numbers = [rng.randrange(30 << 16) for _ in range(2000)]
    for x, w in zip(numbers, exponential(torch.tensor(numbers)).tolist(), strict=True):
        whole, fraction = divmod(x, 1 << 16)
        k, r = divmod(fraction, 1 << 10)
        v = bases[k] * 1024 - (bases[k] - bases[k + 1]) * r
        assert w == math.floor(Fraction(v, 1 << (10 + whole)) + Fraction(1, 2))


def limited(z):
    return max(-LOG_LIMIT, min(LOG_LIMIT, z))


def by_fractions(scores, mantissas, exponents):
    products = zip(scores, mantissas, exponents, strict=True)
    return [limited(round(Fraction(a * b) * Fraction(2) ** (e + LOG_FRACTION))) for a, b, e in products]


def by_golden(scores, mantissas, exponents):
    return logarithms(torch.tensor(scores), Factor(torch.tensor(mantissas), torch.tensor(exponents))).tolist()


def test_logarithms_are_rounded_once_and_saturate():
    rng = random.Random(SEED)
    largest, cases = 1 << 25, []
    for _ in range(4000):
        a = rng.choice([largest, -largest, rng.randrange(-largest, largest + 1) >> rng.randrange(26)])
        b = rng.choice([(1 << 46) - 1, 1 << 45, rng.randrange(1 << 46) >> rng.randrange(47)])
        cases.append((a, b, rng.choice([-80, -13, rng.randrange(-80, -12), rng.randrange(-46, -12)])))
    cases = [list(part) for part in zip(*cases, strict=True)]
    want = by_fractions(*cases)
    assert by_golden(*cases) == want
    assert {LOG_LIMIT, -LOG_LIMIT, 0} <= set(want)


@pytest.mark.parametrize("bits", [10, 30, 45, 50, 52, 54])
def test_logarithms_of_one_size_and_some_ties_are_rounded_once(bits):
    """Most of them are told by float64 products, those near a tie in integers, and from 2^51 on all of them."""
    rng = random.Random(bits)
    cases = []
    for _ in range(2000):
        a, b = rng.randrange(-(1 << 20), 1 << 20) | 1, rng.randrange(1 << 45, 1 << 46)
        cases.append((a, b, bits - 66 - LOG_FRACTION))
    for places in range(1, 20):  # exact ties, and products next to them that float64 cannot tell from ties
        z = rng.randrange(1 << min(bits - 1, 44))
        for beside in (-1, 0, 1):
            product = ((2 * z + 1) << places) + beside
            if product < 1 << 46:
                cases.append((1, product, -1 - places - LOG_FRACTION))
        a = 2 * rng.randrange(1 << 19) + 1
        near = (rng.randrange(1 << 45) | 1 << 44) // a * 2 + 1
        cases += [(a, near + beside, -places - 16 - LOG_FRACTION) for beside in range(-8, 9)]
    cases = [list(part) for part in zip(*cases, strict=True)]
    assert by_golden(*cases) == by_fractions(*cases)


def test_a_product_that_float64_takes_for_a_tie_is_rounded_right(monkeypatch):
    a, b, e = 3325445, 130011341107, -58 - LOG_FRACTION
    assert a * b == 3 * 2**57 - 1  # 3/2 less 2^-58
    assert by_golden([a, -a], [b, b], [e, e]) == [1, -1]
    monkeypatch.setattr(softmax, "_wide_logarithms", lambda scores, mantissa, exponent: scores.sign() * 2)
    assert by_golden([a, -a], [b, b], [e, e]) == [2, -2], "it is not in doubt"


def test_ties_of_every_length_round_to_even_and_their_neighbours_to_the_nearest():
    cases = []
    for places in range(1, 67):
        for whole in (0, 1, 2, 3, 1 << 20):
            for beside in (-1, 0, 1):
                product = ((2 * whole + 1) << (places - 1)) + beside
                drop = max(0, product.bit_length() - 46)
                if drop < 25 and product % (1 << drop) == 0:
                    cases += [(sign << drop, product >> drop, -places - LOG_FRACTION) for sign in (1, -1)]
    cases = [list(part) for part in zip(*cases, strict=True)]
    assert by_golden(*cases) == by_fractions(*cases)
    assert by_golden([1, 3, 5, -1, -3], [1] * 5, [-1 - LOG_FRACTION] * 5) == [0, 2, 2, 0, -2]
    # 2^56 - 1 halves: between the largest number and one that is too large
    assert by_golden([16383, -16383], [((1 << 56) - 1) // 16383] * 2, [-1 - LOG_FRACTION] * 2) == [
        LOG_LIMIT,
        -LOG_LIMIT,
    ]


def test_the_factor_is_the_exact_product():
    rng = random.Random(SEED)
    bits = torch.tensor(
        [[rng.randrange(0x7C00) for _ in range(2)] for _ in range(300)] + [[0, 5], [1, 1], [0x7BFF] * 2]
    )
    scales = bits.to(torch.int16).view(torch.float16)
    for head_dim in (1, 64, 80):
        got = score_factor(scales[:, 0], scales[:, 1], head_dim)
        c = Fraction(softmax_constant(head_dim).item())
        for (s_q, s), mantissa, exponent in zip(scales.tolist(), *(part.tolist() for part in got), strict=True):
            assert mantissa * Fraction(2) ** exponent == c * Fraction(s_q) * Fraction(s)
            assert 0 <= mantissa < 1 << 46 and exponent <= 3 - LOG_FRACTION


def test_parts_with_a_common_reference_are_the_whole():
    generator = torch.Generator().manual_seed(SEED)
    z = torch.randint(-(1 << 20), 1 << 20, (3, 5, 200), generator=generator)
    whole = weights(z, reference(z))
    parts = z.split([1, 70, 0, 129], -1)
    largest = torch.stack([reference(part) for part in parts]).amax(0)
    assert torch.equal(torch.cat([weights(part, largest) for part in parts], -1), whole)


def test_a_constant_added_to_all_logarithms_changes_no_weight():
    z = torch.randint(-(1 << 30), 1 << 30, (4, 100), generator=torch.Generator().manual_seed(SEED))
    assert torch.equal(weights(z, reference(z)), weights(z + 987654321, reference(z + 987654321)))


def test_absent_keys_count_nothing_and_no_key_is_neutral():
    z = torch.tensor([[5 << 16, 0, 9 << 16], [1, 2, 3]])
    present = torch.tensor([[True, True, False], [False, False, False]])
    largest = reference(z, present)
    assert largest.tolist() == [5 << 16, NO_KEY]
    assert weights(z, largest, present).tolist() == [[LARGEST, exponential(torch.tensor(5 << 16)).item(), 0], [0, 0, 0]]
    assert reference(z[..., :0]).tolist() == [NO_KEY, NO_KEY]


def test_bins_are_shifted_to_32_bits():
    totals = [0, 1, (1 << 32) - 1, 1 << 32, (1 << 33) - 1, 1 << 33, (1 << 41) - 1]
    assert bin_shift(torch.tensor(totals)).tolist() == [0, 0, 0, 1, 1, 2, 9]


@pytest.mark.parametrize("fault", [lambda w: w & ~0xFF, lambda w: torch.where(w < 200, 0, w), lambda w: w + w // 200])
def test_a_worse_exponential_breaks_the_bounds(monkeypatch, fault):
    monkeypatch.setattr(softmax, "exponential", lambda x: fault(exponential(x)))
    with pytest.raises(AssertionError):
        assert_within_bounds(adversarial(32768, torch.Generator().manual_seed(SEED)))


@pytest.mark.parametrize("name, value", [("CONSTANT_BITS", 23), ("LOG_FRACTION", 15)])
def test_a_wrong_constant_is_seen(monkeypatch, name, value):
    scale = torch.tensor([1024], dtype=torch.float16)

    def error():
        right = round(3 * Fraction(softmax_constant(1).item()) * 1024**2 * (1 << 16))
        return logarithms(torch.tensor([3]), score_factor(scale, scale, 1)).item() - right

    assert error() == 0
    monkeypatch.setattr(softmax, name, value)
    assert error() != 0


@pytest.mark.parametrize("head_dim", [0, True, 64.0])
def test_illegal_head_sizes_are_refused(head_dim):
    with pytest.raises(TensorError, match="head_dim = "):
        softmax_constant(head_dim)
