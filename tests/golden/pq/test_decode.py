"""Attention over a product-quantised cache in the hardware's numbers, against float64 over what the cache holds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvant.golden.attention.int8_rows import row_logarithms
from kvant.golden.attention.softmax import logarithms, score_factor
from kvant.golden.errors import TensorError
from kvant.golden.pq.cache import pq_cache, reference_attention
from kvant.golden.pq.decode import MODES, decode_attention
from kvant.golden.pq.scores import quantize_query
from kvant.golden.pq.train import train_codebooks

SEED = 3
BOUND = 2.0**-12
"""Relative error: the contract asks for 2^-6."""


def tensors(rng, tokens, d, *, size=1.0):
    k, v, q = (torch.from_numpy(rng.standard_normal((n, d)).astype(np.float16)) for n in (tokens, tokens, 5))
    return k * size, v * size, q * size


def caches(k, v, *, subspace=2, nbits=6, **options):
    books = [train_codebooks(x.clamp(-60000, 60000), subspace=subspace, nbits=nbits, iterations=4) for x in (k, v)]
    return [pq_cache(x, book, **options) for x, book in zip((k, v), books, strict=True)]


def decoded_rows(cache):
    """Coded tokens as integers i8 [N, d] with one scale each, f16 [N, 1]."""
    codebook = cache.codebook
    entries = replace(codebook, scale=torch.ones_like(codebook.scale)).decode(cache.codes[cache.history])
    return entries.to(torch.int8), codebook.scale.expand(len(entries), 1)


def check(q, keys, values, bound=BOUND):
    """The result in both modes; that of tables is returned."""
    exact = reference_attention(q, keys, values)
    results = [decode_attention(q, keys, values, mode=mode) for mode in MODES]
    for result in results:
        error = (result.out - exact).norm(dim=-1)
        assert (error <= bound * exact.norm(dim=-1)).all()
        assert torch.isfinite(result.out).all()
        assert torch.equal(result.scores, results[0].scores)
    return results[0]


@pytest.mark.parametrize(
    ("tokens", "d", "subspace", "nbits", "options"),
    [
        (1, 16, 2, 4, {}),
        (1, 16, 2, 4, {"sinks": 1}),
        (1, 16, 2, 4, {"recent": 1}),
        (100, 64, 2, 8, {"sinks": 4, "recent": 16}),
        (100, 80, 4, 6, {"sinks": 4, "recent": 16}),
        (70, 96, 1, 4, {"recent": 7, "group": 32}),
        (70, 80, 8, 5, {"sinks": 70}),
        (70, 80, 8, 5, {"recent": 70, "group": 128}),
        (3000, 32, 2, 6, {"sinks": 4, "recent": 64}),
    ],
)
@pytest.mark.parametrize("size", [1.0, 30.0, 2.0**-10])
def test_outputs_are_those_of_float64(tokens, d, subspace, nbits, options, size):
    k, v, q = tensors(np.random.default_rng(SEED), tokens, d, size=size)
    check(q, *caches(k, v, subspace=subspace, nbits=nbits, **options))


@pytest.mark.parametrize("part", ["coded", "sinks", "recent"])
def test_outliers_and_dead_channels(part):
    rng = np.random.default_rng(SEED)
    k, v, q = tensors(rng, 90, 64)
    k[:, 3], v[:, 5] = 1e4, 0
    row = {"coded": 40, "sinks": 1, "recent": 88}[part]
    k[row, 7], v[row, 9] = -1e4, 3e4
    q[0] *= 100
    q[1] = 0
    result = check(q, *caches(k, v, nbits=8, sinks=4, recent=20))
    assert (result.scores[1] == 0).all(), "all scores of a query of zeros"


@pytest.mark.parametrize("size", [3e3, 1e4, 6e4])
@pytest.mark.parametrize(("d", "group"), [(16, 16), (64, 64), (64, 16)])
@pytest.mark.parametrize("nbits", [4, 8])
def test_a_channel_that_is_huge_in_all_keys_and_queries(size, d, group, nbits):
    """Logarithms of millions of whole powers of two: coded keys, sinks and recent rows must count from one point."""
    for seed in range(4):
        k, v, q = tensors(np.random.default_rng(seed), 60, d)
        k[:, 3], q[:, 3] = size, size
        q[1, 3], q[2, 3] = -size, size / 10
        check(q, *caches(k, v, nbits=nbits, sinks=4, recent=8, group=group))


def test_equal_keys_have_equal_weights():
    k = torch.ones(64, 16, dtype=torch.float16)
    v = torch.arange(64, dtype=torch.float16)[:, None].expand(64, 16).contiguous()
    keys, values = caches(k, v, nbits=6, sinks=2, recent=3)
    out = check(torch.ones(1, 16, dtype=torch.float16), keys, values).out
    mean = values.dequantize().mean(0)
    torch.testing.assert_close(out[0], mean, rtol=1e-4, atol=0)


def test_one_key_far_above_the_others_takes_all():
    k = torch.zeros(40, 16, dtype=torch.float16)
    k[30] = 200
    v = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).half()
    keys, values = caches(k, v, nbits=4)
    out = decode_attention(torch.full((1, 16), 100, dtype=torch.float16), keys, values).out
    torch.testing.assert_close(out[0], values.dequantize()[30], rtol=2**-20, atol=0)


def test_queries_that_are_not_finite_are_flagged_and_counted_as_the_port_says():
    k, v, q = tensors(np.random.default_rng(SEED), 30, 16)
    keys, values = caches(k, v, nbits=4, recent=8)
    bad, same = q.clone(), q.clone()
    bad[0, 0], bad[1, 1] = float("nan"), float("-inf")
    same[0, 0], same[1, 1] = 0, -65504
    assert not decode_attention(q, keys, values).nonfinite
    result = decode_attention(bad, keys, values)
    assert result.nonfinite
    assert torch.equal(result.out, decode_attention(same, keys, values).out)


@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("d", [16, 80])
def test_logarithms_are_the_same_in_both_modes_if_a_head_is_one_group(d, size):
    """A score times its factor is rounded once in either; with two groups, once for each."""
    k, v, q = tensors(np.random.default_rng(SEED), 60, d, size=size)
    keys, _ = caches(k, v, nbits=5, group=128)
    queries = quantize_query(q)
    factor = score_factor(queries.scale[:, None], keys.codebook.scale, d)
    tabled = logarithms(keys.scores(queries.q), factor)
    rows, scale = decoded_rows(keys)
    decoded = row_logarithms(queries.q, queries.scale, rows, scale, group=128)
    assert torch.equal(decoded, tabled)
    of_two = row_logarithms(queries.q, queries.scale, rows, scale.expand(-1, 2), group=d // 2)
    assert (of_two - tabled).abs().max() == 1


def test_rows_of_codes_come_before_sinks_and_recent_ones():
    """Order matters in block-floating sums: that of a cache whose tokens are all sinks, put in this order."""
    k, v, q = tensors(np.random.default_rng(SEED), 40, 32)
    keys, values = caches(k, v, nbits=4, group=32, sinks=3, recent=8)
    out = decode_attention(q, keys, values, mode="decode").out
    ordered = [
        replace(
            cache,
            codes=torch.zeros_like(cache.codes),
            sink=torch.cat((rows, cache.sink, cache.recent)),
            sink_scale=torch.cat((scale, cache.sink_scale, cache.recent_scale)),
            recent=cache.recent[:0],
            recent_scale=cache.recent_scale[:0],
        )
        for cache in (keys, values)
        for rows, scale in [decoded_rows(cache)]
    ]
    assert torch.equal(out, decode_attention(q, *ordered).out)


def test_a_cache_without_coded_tokens_is_the_same_in_both_modes():
    k, v, q = tensors(np.random.default_rng(SEED), 12, 16)
    keys, values = caches(k, v, nbits=4, sinks=2, recent=10)
    outs = [decode_attention(q, keys, values, mode=mode).out for mode in MODES]
    assert torch.equal(*outs)


def test_another_mode_is_refused():
    k, v, q = tensors(np.random.default_rng(SEED), 12, 16)
    with pytest.raises(TensorError, match=r"mode = 'tables': legal is one of table, decode"):
        decode_attention(q, *caches(k, v, nbits=4), mode="tables")


def test_heads_are_independent():
    rng = np.random.default_rng(SEED)
    k, v, q = (torch.from_numpy(rng.standard_normal((3, n, 16)).astype(np.float16)) for n in (50, 50, 2))
    books = [train_codebooks(x, nbits=4) for x in (k, v)]
    both = [pq_cache(x, book, sinks=2, recent=9) for x, book in zip((k, v), books, strict=True)]
    for mode in MODES:
        out = decode_attention(q, *both, mode=mode)
        for head in range(3):
            one = [pq_cache(x[head], book.at(head), sinks=2, recent=9) for x, book in zip((k, v), books, strict=True)]
            alone = decode_attention(q[head], *one, mode=mode)
            assert torch.equal(alone.out, out.out[head]) and torch.equal(alone.scores, out.scores[head])


def test_keys_and_values_of_other_tokens_are_refused():
    k, v, q = tensors(np.random.default_rng(SEED), 30, 16)
    keys, _ = caches(k, v, nbits=4, recent=8)
    _, values = caches(k, v, nbits=4, recent=7)
    with pytest.raises(TensorError, match=r"values: coded tokens"):
        decode_attention(q, keys, values)
