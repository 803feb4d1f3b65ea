"""Product quantisation: known answers, exact arithmetic element by element, extremes, ties, refusals."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from kvant.golden.errors import TensorError
from kvant.golden.pq.cache import pq_cache, reference_attention
from kvant.golden.pq.codebook import Codebook, Partition
from kvant.golden.pq.encode import encode, grid_position
from kvant.golden.pq.scores import largest_score, lookup_table, quantize_query, read_out, table_scores, value_bins

KNOWN_ANSWERS = Path(__file__).parents[2] / "known_answers"


def random_codebook(rng, d, subspace, nbits, heads=(), scale=0.1):
    entries = rng.integers(-128, 128, (*heads, d // subspace, 1 << nbits, subspace), dtype=np.int8)
    return Codebook.of(entries, np.full(heads, scale, dtype=np.float16))


# --- an independent model: one number at a time, in fractions and integers


def exact_rne(value):
    return round(Fraction(value))  # Python rounds ties to even


def port(value):
    value = float(value)
    if math.isnan(value):
        return Fraction(0)
    return Fraction(max(-65504, min(65504, value)))


def exact_fp16(value):
    """binary16 of a fraction: the nearest of its neighbours in the list of all of them, ties to the even pattern."""
    magnitude = abs(value)
    low, high = 0, 0x7BFF
    if magnitude >= FINITE[high]:
        return (FINITE[high] if value > 0 else -FINITE[high]), high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if FINITE[middle] <= magnitude else (low, middle)
    below, above = magnitude - FINITE[low], FINITE[high] - magnitude
    pattern = low if below < above or (below == above and low % 2 == 0) else high
    return (FINITE[pattern] if value > 0 else -FINITE[pattern]), pattern


FINITE = [Fraction(float(x)) for x in np.arange(0x7C00, dtype=np.uint16).view(np.float16)]


def scalar_codes(rows, entries, scale, mean=None):
    scale = Fraction(float(scale))
    codes = []
    for row in rows:
        x = [port(value) for value in row]
        if mean is not None:
            x = [exact_fp16(value - Fraction(float(m)))[0] for value, m in zip(x, mean, strict=True)]
        u = [0 if scale == 0 else max(-32767, min(32767, exact_rne(16 * value / scale))) for value in x]
        codes.append([])
        for m, centroids in enumerate(entries.tolist()):
            part = u[m * len(centroids[0]) : (m + 1) * len(centroids[0])]
            distances = [sum((a - 16 * c) ** 2 for a, c in zip(part, each, strict=True)) for each in centroids]
            codes[-1].append(distances.index(min(distances)))
    return codes


def scalar_int8(row):
    values = [port(value) for value in row]
    largest = max(abs(value) for value in values)
    scale, _ = exact_fp16(largest / 127)
    return ([exact_rne(127 * value / largest) for value in values] if scale else [0] * len(row)), scale


def hard_rows(rng, tokens, d, scale):
    """Rows with ties of the grid, zeros, subnormals, values far outside the codebook, NaN and infinities."""
    x = rng.standard_normal((tokens, d)) * 60 * float(scale)
    x[0] = rng.integers(-40, 40, d) * float(scale) / 32
    x[1] = rng.integers(-3, 4, d) * 2.0**-24
    x[2] = 0
    x = x.astype(np.float16)
    x[3, rng.integers(d)], x[4, rng.integers(d)], x[5, rng.integers(d)] = np.nan, np.inf, -6e4
    return x


# --- known answers


def test_known_answers():
    archive = np.load(KNOWN_ANSWERS / "pq_keys.npz")
    codebook = Codebook.of(archive["in_codebook_k"], archive["in_codebook_k_scale"])
    cache = pq_cache(archive["in_k"], codebook)
    assert cache.codes.numpy().tobytes() == archive["out_k_codes"].tobytes()
    scores = cache.scores(quantize_query(archive["in_q"]).q)
    assert scores.numpy().dtype == archive["out_scores"].dtype
    assert np.array_equal(scores, archive["out_scores"])


# --- encoding


@pytest.mark.parametrize("subspace", [1, 2, 4, 8])
@pytest.mark.parametrize("nbits", [4, 5, 8])
def test_codes_equal_exact_arithmetic(subspace, nbits):
    rng = np.random.default_rng(10 * subspace + nbits)
    scale = np.float16(rng.choice([0.1, 0.001, 3, 2.0**-20]))
    codebook = random_codebook(rng, 8, subspace, nbits, scale=scale)
    rows = hard_rows(rng, 8, 8, scale)
    mean = (rng.standard_normal(8) * 5 * float(scale)).astype(np.float16) if nbits == 5 else None
    codes = encode(rows, codebook, mean=mean)
    assert codes.dtype == torch.uint8
    assert codes.tolist() == scalar_codes(rows, codebook.entries, scale, mean)


@pytest.mark.parametrize("seed", range(4))
def test_grid_position_is_rounded_once_for_any_pair_of_halves(seed):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 0x7C00, 4000, dtype=np.uint16).view(np.float16)
    # scales for which the quotient is in range; every second pair is an exact tie, or next to one
    s = np.minimum(np.abs(x.astype(np.float64)) * 2.0 ** rng.uniform(-11, 5, x.shape), 65504).astype(np.float16)
    s[::2] = (s[::2].view(np.uint16) & 0x7FF0 & 0x73FF).view(np.float16)
    odd = rng.integers(0, 32, x.shape) * 2 + 1
    tied = (odd[::2] * 2.0**-5 * s[::2].astype(np.float64)).astype(np.float16)
    x[::2] = (tied.view(np.uint16) + rng.integers(0, 2, tied.shape, dtype=np.uint16)).view(np.float16)
    found = grid_position(torch.tensor(x), torch.tensor(s))
    ties = 0
    for value, scale, u in zip(x.tolist(), s.tolist(), found.tolist(), strict=True):
        quotient = 16 * Fraction(value) / Fraction(scale) if scale else Fraction(0)
        ties += quotient.denominator == 2
        assert u == min(32767, exact_rne(quotient))
    assert ties > 200


def test_a_tie_between_equal_centroids_goes_to_the_lowest_index():
    entries = np.zeros((1, 16, 2), dtype=np.int8)
    entries[0, :, 0] = [5, 1, 3, 3, -3, 1, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]
    codebook = Codebook.of(entries, np.float16([1]))
    rows = np.array([[3, 0], [1, 0], [2, 0], [4, 0], [0, 0], [100, 0], [-1, 0]], dtype=np.float16)
    # 2 lies between 1 and 3, 4 between 5 and 3, -1 between 1 and -3
    assert encode(rows, codebook).flatten().tolist() == [2, 1, 1, 0, 1, 6, 1]


def test_case_21_nonfinite_elements_follow_the_port_rule():
    rng = np.random.default_rng(21)
    codebook = random_codebook(rng, 4, 2, 4)
    rows = np.array([[np.nan, 1, np.inf, -np.inf]], dtype=np.float16)
    assert torch.equal(encode(rows, codebook), encode(np.float16([[0, 1, 65504, -65504]]), codebook))
    assert pq_cache(rows, codebook).nonfinite


def test_a_zero_scale_sees_zeros():
    rng = np.random.default_rng(0)
    codebook = random_codebook(rng, 8, 2, 4, scale=0)
    rows = rng.standard_normal((3, 8)).astype(np.float16)
    assert encode(rows, codebook).tolist() == scalar_codes(rows, codebook.entries, 0)
    assert not pq_cache(rows, codebook).dequantize().any()


def test_extremes_of_u_and_entries_stay_exact():
    entries = np.full((1, 16, 8), 127, dtype=np.int8)
    entries[0, 7] = -128
    entries[0, 8] = -127
    codebook = Codebook.of(entries, np.float16([2.0**-24]))
    rows = np.array([[-65504] * 8, [65504] * 8, [0] * 8], dtype=np.float16)
    assert encode(rows, codebook).flatten().tolist() == [7, 0, 0]
    assert encode(rows, codebook).tolist() == scalar_codes(rows, codebook.entries, 2.0**-24)


def test_heads_share_nothing_and_may_share_a_codebook():
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((2, 3, 9, 8)).astype(np.float16)
    codebooks = random_codebook(rng, 8, 2, 6, heads=(3,))
    together = encode(rows, codebooks)
    for sequence in range(2):
        for head in range(3):
            assert torch.equal(together[sequence, head], encode(rows[sequence, head], codebooks.at(head)))
    shared = encode(rows, codebooks.at(0))
    assert torch.equal(shared[1, 2], encode(rows[1, 2], codebooks.at(0)))


def test_codes_depend_on_no_number_of_threads_nor_on_the_layout_of_the_input():
    rng = np.random.default_rng(4)
    rows = torch.tensor(rng.standard_normal((700, 8)).astype(np.float16))
    codebook = random_codebook(rng, 8, 2, 8)
    before = torch.get_num_threads()
    expected = encode(rows, codebook)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(encode(rows, codebook), expected)
    finally:
        torch.set_num_threads(before)
    wide = torch.zeros(700, 16, dtype=torch.float16)
    wide[:, ::2] = rows
    assert torch.equal(encode(wide[:, ::2], codebook), expected)
    assert torch.equal(encode(rows.T.contiguous().T, codebook), expected)
    assert torch.equal(encode(rows.clone().requires_grad_(), codebook), expected)


# --- scores and values


@pytest.mark.parametrize(("d", "subspace", "nbits"), [(8, 1, 8), (12, 2, 5), (24, 8, 4), (12, 4, 8)])
def test_scores_and_values_equal_sums_over_tokens(d, subspace, nbits):
    rng = np.random.default_rng(d + nbits)
    codebook = random_codebook(rng, d, subspace, nbits)
    codes = torch.tensor(rng.integers(0, 1 << nbits, (9, d // subspace), dtype=np.uint8))
    q = torch.tensor(rng.integers(-128, 128, (2, d), dtype=np.int8))
    weights = rng.integers(0, 1 << 24, (2, 9))
    rows = [
        [entry for m, code in enumerate(token) for entry in codebook.entries[m, code].tolist()]
        for token in codes.tolist()
    ]
    scores = table_scores(lookup_table(q, codebook), codes)
    assert scores.tolist() == [
        [sum(a * b for a, b in zip(each, row, strict=True)) for row in rows] for each in q.tolist()
    ]
    bins = value_bins(weights, codes, 1 << nbits)
    assert bins.sum(-1).tolist() == [[int(each.sum())] * (d // subspace) for each in weights]
    expected = [
        [sum(w * row[j] for w, row in zip(each, rows, strict=True)) for j in range(d)] for each in weights.tolist()
    ]
    assert read_out(bins, codebook).tolist() == expected


@pytest.mark.parametrize(("d", "subspace"), [(256, 1), (256, 2), (160, 2), (96, 8), (80, 2), (8, 8), (1, 1)])
@pytest.mark.parametrize("sign", [1, -1])
def test_case_25_all_entries_at_their_extreme(d, subspace, sign):
    entries = np.full((d // subspace, 256, subspace), -128, dtype=np.int8)
    codebook = Codebook.of(entries, np.float16([1]))
    q = torch.full((1, d), -128 if sign > 0 else 127, dtype=torch.int8)
    codes = torch.full((3, d // subspace), 255, dtype=torch.uint8)
    expected = d * 128 * (128 if sign > 0 else -127)
    assert table_scores(lookup_table(q, codebook), codes).tolist() == [[expected] * 3]
    assert abs(expected) <= largest_score(codebook)


def test_a_query_is_one_int8_group_whatever_its_length():
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, 3, 200)).astype(np.float16)
    q[0, 0, 5], q[0, 1, 7], q[1, 2] = np.nan, np.inf, 0
    found = quantize_query(q)
    assert found.nonfinite
    for elements, scale, row in zip(found.q.view(6, 200), found.scale.flatten(), q.reshape(6, 200), strict=True):
        expected, exact = scalar_int8(row)
        assert elements.tolist() == expected
        assert Fraction(float(scale)) == exact


# --- the cache


@pytest.mark.parametrize(
    ("tokens", "sinks", "recent"), [(20, 4, 8), (20, 0, 0), (5, 4, 64), (3, 9, 2), (9, 0, 9), (6, 2, 4)]
)
def test_rows_of_sinks_and_recent_tokens_are_int8_and_zero_in_codes_and_scores(tokens, sinks, recent):
    rng = np.random.default_rng(tokens)
    d, group = 12, 8
    codebook = random_codebook(rng, d, 2, 4)
    rows = (5 * rng.standard_normal((tokens, d))).astype(np.float16)
    mean = rng.standard_normal(d).astype(np.float16)
    cache = pq_cache(rows, codebook, group=group, mean=mean, sinks=sinks, recent=recent)
    first, last = min(sinks, tokens), max(min(sinks, tokens), tokens - recent)
    expected = scalar_codes(rows, codebook.entries, codebook.scale, mean)
    int8 = [t < first or t >= last for t in range(tokens)]
    assert cache.codes.tolist() == [[0] * 6 if int8[t] else expected[t] for t in range(tokens)]
    q = quantize_query(rng.standard_normal((2, d)).astype(np.float16)).q
    scores, values = cache.scores(q), cache.dequantize()
    stored = {t: (cache.sink[t], cache.sink_scale[t]) for t in range(first)}
    stored |= {t: (cache.recent[t - last], cache.recent_scale[t - last]) for t in range(last, tokens)}
    assert cache.sink.shape == (first, d)
    assert cache.recent.shape == (tokens - last, d)
    for t in range(tokens):
        if int8[t]:
            centred_row = [exact_fp16(port(a) - Fraction(float(b)))[0] for a, b in zip(rows[t], mean, strict=True)]
            for g, start in enumerate(range(0, d, group)):
                elements, scale = scalar_int8(centred_row[start : start + group])
                assert stored[t][0][start : start + group].tolist() == elements
                assert Fraction(float(stored[t][1][g])) == scale
                assert [Fraction(x) for x in values[t, start : start + group].tolist()] == [e * scale for e in elements]
            assert not scores[:, t].any()
        else:
            entries = [e for m, c in enumerate(expected[t]) for e in codebook.entries[m, c].tolist()]
            scale = Fraction(float(codebook.scale))
            assert [Fraction(x) for x in values[t].tolist()] == [e * scale for e in entries]
            assert scores[:, t].tolist() == [
                sum(a * b for a, b in zip(each, entries, strict=True)) for each in q.tolist()
            ]
    weights = rng.integers(0, 1 << 16, (2, tokens))
    scale = float(codebook.scale)
    coded = torch.tensor([not each for each in int8])
    expected_mix = (torch.tensor(weights)[:, coded].double() @ values[coded].double() / scale).round().long()
    assert torch.equal(cache.mix(torch.tensor(weights)), expected_mix)


def test_attention_by_tables_and_bins_is_the_reference():
    rng = np.random.default_rng(9)
    rows, q = (rng.standard_normal((2, n, 8)).astype(np.float16) for n in (60, 3))
    books = random_codebook(rng, 8, 2, 6, heads=(2,), scale=0.02), random_codebook(rng, 8, 4, 8, heads=(2,), scale=0.02)
    caches = [pq_cache(rows, book, group=8, sinks=4, recent=8) for book in books]
    queries = quantize_query(q)
    unit = queries.scale.double()[..., None]
    scores = caches[0].scores(queries.q).double() * unit * books[0].scale.double()[:, None, None]
    history = caches[0].history
    for part, kept, scale in (
        (slice(0, 4), caches[0].sink, caches[0].sink_scale),
        (slice(52, 60), caches[0].recent, caches[0].recent_scale),
    ):
        scores[..., part] = (queries.q.double() * unit) @ (kept.double() * scale.double()).mT
    weights = torch.round((scores / np.sqrt(8)).softmax(-1) * 2**30).long()  # fine enough to count as exact
    mixed = caches[1].mix(weights).double() * books[1].scale.double()[:, None, None]
    held = caches[1].dequantize().double()
    others = torch.ones(60, dtype=torch.bool)
    others[history] = False
    mixed += weights[..., others].double() @ held[:, others]
    found = mixed / weights.sum(-1, keepdim=True)
    assert torch.allclose(found, reference_attention(q, *caches), rtol=1e-6, atol=1e-7)


def test_a_code_does_not_depend_on_the_recent_window():
    rng = np.random.default_rng(6)
    codebook = random_codebook(rng, 8, 2, 8)
    rows = rng.standard_normal((30, 8)).astype(np.float16)
    for recent in (0, 7, 29):
        cache = pq_cache(rows, codebook, recent=recent)
        assert torch.equal(cache.codes[cache.history], encode(rows, codebook)[cache.history])


# --- refusals


@pytest.mark.parametrize(
    ("d", "subspaces", "nbits"),
    [
        (80, 32, 8),
        (80, 0, 8),
        (80, 160, 8),
        (80, -40, 8),
        (80, 5, 8),
        (80, 40, 1),
        (80, 40, 9),
        (80, 40, 16),
        (80, 40, 3),
    ],
)
def test_case_22_an_illegal_partition_is_refused_with_its_numbers(d, subspaces, nbits):
    with pytest.raises(TensorError) as refusal:
        Partition(d, subspaces, nbits)
    assert f"d = {d}, M = {subspaces}, nbits = {nbits}" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("d", "subspaces"), [(80, 80), (8, 1), (1, 1), (256, 32)])
def test_case_22_legal_extremes_work(d, subspaces):
    rng = np.random.default_rng(d)
    codebook = random_codebook(rng, d, d // subspaces, 8, scale=1)
    rows = codebook.decode(torch.full((1, subspaces), 255, dtype=torch.uint8))
    codes = encode(rows.half(), codebook)
    assert torch.equal(codebook.decode(codes), rows)  # code 255, or an earlier twin of it


@pytest.mark.parametrize(
    ("entries", "scale", "text"),
    [
        (np.zeros((2, 16, 2), np.int16), np.float16([1]), "dtype int16"),
        (np.zeros((2, 16), np.int8), np.float16([1]), "shape"),
        (np.zeros((2, 17, 2), np.int8), np.float16([1]), "17 centroids"),
        (np.zeros((2, 16, 3), np.int8), np.float16([1]), "M = 2"),
        (np.zeros((2, 16, 2), np.int8), np.float16([1, 1]), "codebook_scale: shape (2,)"),
        (np.zeros((2, 16, 2), np.int8), np.float16([-1]), "codebook_scale[0] = -1.0"),
        (np.zeros((2, 16, 2), np.int8), np.float16([np.nan]), "nan"),
        (np.zeros((2, 16, 2), np.int8), np.float32([1]), "codebook_scale: dtype float32"),
    ],
)
def test_an_illegal_codebook_is_refused(entries, scale, text):
    with pytest.raises(TensorError) as refusal:
        Codebook.of(entries, scale)
    assert text in str(refusal.value)


def test_illegal_arguments_are_refused():
    rng = np.random.default_rng(0)
    codebook = random_codebook(rng, 8, 2, 4, heads=(2,))
    rows = rng.standard_normal((2, 3, 8)).astype(np.float16)
    for call, text in (
        (lambda: encode(rows[..., :6], codebook), "legal is [..., T, 8]"),
        (lambda: encode(rows[:1], codebook), "heads (2,)"),
        (lambda: encode(rows.astype(np.float32), codebook), "float32"),
        (lambda: encode(rows, codebook, mean=np.full(8, np.inf, np.float16)), "mean"),
        (lambda: pq_cache(rows, codebook, recent=-1), "recent = -1"),
        (lambda: pq_cache(rows, codebook, sinks=-1), "sinks = -1"),
        (lambda: codebook.decode(np.full((2, 3, 4), 16, np.uint8)), "value 16"),
        (lambda: Partition.of(80, 3), "subspace = 3"),
    ):
        with pytest.raises(TensorError) as refusal:
            call()
        assert text in str(refusal.value)
