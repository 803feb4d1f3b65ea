"""Attention over caches: what a query at each position meets, in float and in integers, and what is stored."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_models import CONFIG

from kvant.golden.attention.engine import key_logarithms
from kvant.golden.attention.softmax import softmax_constant
from kvant.golden.errors import TensorError
from kvant.golden.formats import baselines
from kvant.golden.kvcache.attention import CachedAttention, Exact, Int8Head, MantHead, MantTime, spans
from kvant.golden.kvcache.baselines import GroupedStore
from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.formats import CACHE_FORMATS, CacheSettings
from kvant.golden.kvcache.integer import IntegerAttention, _Contents, int8_group
from kvant.golden.kvcache.spatial import spatial_cache
from kvant.golden.kvcache.temporal import temporal_cache
from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.llama import Llama, exact_attention
from kvant.golden.numeric.int8 import int8_groups, quantize_int8
from kvant.golden.numeric.packing import pack_nibbles

LAYERS, HEADS, KV_HEADS, TOKENS, D, GROUP, SINKS = 2, 6, 2, 45, 16, 8, 3
TABLES = tuple(Tables.of([5, 20, 60, 255], [9000, 12000, 16000], s) for s in ("variance", "moment"))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensors(seed: int = 0, tokens: int = TOKENS):
    """Queries, keys with a mean per channel, values; one sequence."""
    random = seeded(seed)
    mean = 2 * torch.randn(KV_HEADS, 1, D, generator=seeded(7))
    queries = torch.randn(1, HEADS, tokens, D, generator=random)
    keys = torch.randn(1, KV_HEADS, tokens, D, generator=random) + mean
    return queries, keys, torch.randn(1, KV_HEADS, tokens, D, generator=random)


MEAN = (2 * torch.randn(KV_HEADS, 1, D, generator=seeded(7)))[:, 0].half().expand(LAYERS, -1, -1)
FLOOR = torch.full((LAYERS, KV_HEADS, D), 3.0).half()


def time_store(keys: bool, **options) -> MantTime:
    options = {"floor": FLOOR, "sinks": SINKS, "prefill": 5} | options
    return MantTime(GROUP, TABLES, MEAN if keys else None, offset=keys, shared_coefficient=keys, **options)


STORES = {
    "exact": (Exact(), Exact()),
    "int8": (Int8Head(GROUP), Int8Head(GROUP)),
    "head": (MantHead(GROUP, TABLES, MEAN, SINKS), time_store(False)),
    "time": (time_store(True), time_store(False)),
    "baseline": (GroupedStore(baselines.INT4_ASYMMETRIC, GROUP, True, Int8Head(GROUP), SINKS, GROUP),) * 2,
    "kivi": (
        GroupedStore(baselines.INT4_ASYMMETRIC, GROUP, True, Exact(16), SINKS, GROUP),
        GroupedStore(baselines.INT4_ASYMMETRIC, GROUP, False, Exact(16), SINKS, GROUP),
    ),
}


def test_exact_stores_give_exact_attention():
    rows = tensors()
    found = CachedAttention(Exact(), Exact())(0, *rows)
    assert torch.allclose(found, exact_attention(0, *rows), atol=1e-6)


@pytest.mark.parametrize("name", STORES)
def test_no_position_sees_what_comes_later(name):
    attention = CachedAttention(*STORES[name])
    queries, keys, values = tensors()
    before = attention(1, queries, keys, values)
    for position in (4, 7, 8, 22, 23, 40):  # behind the prefill, in and at the ends of windows
        later = [x.clone() for x in (queries, keys, values)]
        for x in later:
            x[:, :, position + 1 :] *= -3
        after = attention(1, *later)
        assert torch.equal(before[:, :, : position + 1], after[:, :, : position + 1])


@pytest.mark.parametrize("along_time", [True, False])
def test_each_position_attends_over_the_cache_of_the_tokens_so_far(along_time):
    keys_store, values_store = STORES["time" if along_time else "head"]
    queries, keys, values = tensors(3)
    found = CachedAttention(keys_store, values_store)(1, queries, keys, values)[0]
    k, v = keys[0].half(), values[0].half()
    common = {"group": GROUP, "tables": TABLES[1], "sinks": SINKS}
    for t in range(TOKENS):
        prefill = min(5, t + 1)
        if t + 1 < 5:
            continue  # the first call is not complete: its scales are known from its end on
        held_v = temporal_cache(v[:, : t + 1], prefill, floor=FLOOR[1], **common).dequantize()
        if along_time:
            options = {"mean": MEAN[1], "floor": FLOOR[1], "offset": True, "shared_coefficient": True}
            held_k = temporal_cache(k[:, : t + 1], prefill, **options, **common).dequantize()
        else:
            held_k = spatial_cache(k[:, : t + 1], mean=MEAN[1], **common).dequantize()
        q = queries[0, :, t].unflatten(0, (KV_HEADS, -1))
        expected = (q @ held_k.mT / math.sqrt(D)).softmax(-1) @ held_v
        assert torch.allclose(found[:, t].unflatten(0, (KV_HEADS, -1)), expected, atol=1e-5)


def test_prefill_of_all_tokens_sets_the_scales_from_all_of_them():
    values = tensors(4)[2]
    store = time_store(False, floor=None, prefill=None)
    rows, _ = store.fill(0, values[0])
    assert int(rows.saturated.sum()) == 0
    first, _ = time_store(False, floor=None, prefill=SINKS + 1).fill(0, values[0])
    assert int(first.saturated.sum()) > 0


def test_sequences_of_a_batch_share_nothing():
    one, two = tensors(5), tensors(6)
    attention = CachedAttention(*STORES["time"])
    both = attention(0, *(torch.cat(pair) for pair in zip(one, two, strict=True)))
    assert torch.equal(both[:1], attention(0, *one)) and torch.equal(both[1:], attention(0, *two))


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 45])
@pytest.mark.parametrize("value_options", [False, True])
def test_integer_chain_is_near_float_attention_over_the_same_cache(tokens, value_options):
    keys, values = time_store(True), time_store(False)
    if value_options:
        values = MantTime(GROUP, TABLES, None, FLOOR, SINKS, True, True, 5)
    rows = tensors(8, tokens)
    expected = CachedAttention(keys, values)(0, *rows)
    found = IntegerAttention(keys, values)(0, *rows)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < 2**-5


def test_integer_chain_has_the_scores_of_the_hardware():
    """Of the last token: the same integers and float32 chains, but for the last place of its logarithms."""
    store, (queries, keys, _) = time_store(True), tensors(8)
    rows, cache = store.fill(0, keys[0])
    q = queries[0].unflatten(0, (KV_HEADS, -1))[:, :, -1:].half()  # [H, R, 1, d]
    full = cache.codes.shape[-2]
    found = _Contents(rows, cache).scores(q.float(), TOKENS, full)[:, :, 0]
    prefilled = replace(cache, staged=rows.q[..., full:, :].contiguous())
    z = key_logarithms(q[:, :, 0], quantize_int8(q[:, :, 0], GROUP), prefilled)
    logarithms = found.double() * softmax_constant(D).double() * 2**16
    assert float((z - logarithms).abs().max()) < 2


def test_integer_chain_takes_heads_that_the_group_does_not_divide():
    keys = MantTime(32, TABLES, None, FLOOR, 2, True, True)
    values = MantTime(32, TABLES, None, FLOOR, 2)
    rows = tensors(9, 70)
    expected = CachedAttention(keys, values)(0, *rows)
    found = IntegerAttention(keys, values)(0, *rows)
    assert float((found - expected).norm() / expected.norm()) < 2**-5


def test_folded_groups_are_exact_int8_groups():
    x = torch.randn(200, 16, generator=seeded(1))
    x[::9] *= 1e-7
    x[5] = 0
    q, scale = int8_group(x)
    exact_q, exact_scale = int8_groups(x.half())
    assert torch.equal(q, exact_q.float()) and torch.equal(scale[:, 0], exact_scale.float())


def test_spans_follow_the_window_that_each_token_completes():
    for tokens in (1, 7, 8, 9, 24, 25):
        covered = [(t, full) for first, last, full in spans(tokens, 8) for t in range(first, last)]
        assert covered == [(t, (t + 1) // 8 * 8) for t in range(tokens)]
    assert list(spans(5, None)) == [(0, 5, 5)]


def test_windows_of_two_lengths_are_refused():
    with pytest.raises(TensorError, match="windows of keys and values: 8 and 16; legal is one length"):
        CachedAttention(time_store(True), MantTime(16, TABLES))


def test_footprint_counts_the_stored_tensors():
    keys = tensors(2, 43)[1]
    for keys_side in (True, False):
        store = time_store(keys_side)
        cache = store.fill(0, keys[0])[1]
        windows = 43 // GROUP
        bits = 8 * pack_nibbles(cache.codes).nbytes + 8 * cache.scale.nbytes + 8 * cache.coefficient.nbytes
        bits += 8 * cache.offset.nbytes if store.offset else 0
        footprint, elements = store.footprint(D), KV_HEADS * D
        assert footprint.history * windows * GROUP * elements == pytest.approx(bits)
        page = KV_HEADS * windows * (128 - 8 * store.shared_coefficient)  # a trailer a page, coefficient counted above
        bits += 8 * cache.staged.nbytes + 8 * cache.staged_scale.nbytes + page
        bits += 8 * (cache.sink.nbytes + cache.sink_scale.nbytes)
        assert footprint.at(43) * 43 * elements == pytest.approx(bits)


def test_bits_of_the_formats_are_the_published_ones():
    assert MantTime(64, ()).footprint(64).history == 4.375
    assert MantTime(64, (), offset=True, shared_coefficient=True).footprint(64).history == pytest.approx(
        4.375, abs=0.002
    )
    assert MantTime(64, (), offset=True).footprint(64).history == 4.5
    assert MantHead(64, ()).footprint(64).history == 4.375
    settings = CacheSettings()
    for name, bits in {
        "fp32": 32,
        "fp16": 16,
        "int8": 8.25,
        "int4": 4.25,
        "int4_asymmetric": 4.5,
        "nvfp4": 4.5,
    }.items():
        assert CACHE_FORMATS[name].footprint(settings, 64)[0].history == bits
    assert CACHE_FORMATS["int4_asymmetric_time"].footprint(settings, 64)[1].history == 4.5


def test_baseline_groups_along_time_keep_their_extremes_and_leave_sinks_out():
    store = STORES["baseline"][0]
    x = torch.randn(KV_HEADS, 24, D, generator=seeded(3)).half().float()
    x[:, :SINKS] = 1000
    view = store.view(0, x)
    window = slice(8, 16)
    low, high = x[:, window].amin(1), x[:, window].amax(1)
    assert torch.equal(view.finished[:, window].amin(1), low)
    assert torch.allclose(view.finished[:, window].amax(1), high, atol=4e-3)
    step = (x[:, SINKS:8].amax(1) - x[:, SINKS:8].amin(1)) / 15
    assert bool(((view.finished[:, SINKS:8] - x[:, SINKS:8]).abs() <= 0.51 * step[:, None] + 4e-3).all())
    assert torch.allclose(view.finished[:, :SINKS], x[:, :SINKS], rtol=1e-2)


def test_model_runs_with_a_cache(folder):
    checkpoint = open_model(folder)
    model = Llama(checkpoint)
    tokens = torch.arange(40)[None] * 7 % CONFIG["vocab_size"]
    expected = model.logits(tokens)
    same = model.attending(CachedAttention(Exact(), Exact()))
    assert torch.allclose(same.logits(tokens), expected, rtol=1e-3, atol=1e-3)
    close = model.attending(CachedAttention(Int8Head(8), Int8Head(8))).logits(tokens)
    assert not torch.equal(close, expected)
    assert float((close - expected).norm() / expected.norm()) < 0.1
    assert torch.equal(model.logits(tokens), expected)


def test_formats_without_their_tables_are_refused():
    with pytest.raises(TensorError, match="tables: missing"):
        CACHE_FORMATS["mant_time"].attention(CacheSettings())
