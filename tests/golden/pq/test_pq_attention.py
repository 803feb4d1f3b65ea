"""Product-quantised caches inside a model's attention, and codebooks of a whole model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import Exact, Int8Head, MantTime
from kvant.golden.kvcache.calibration import KeysAndValues
from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.integer import int8_group
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS
from kvant.golden.pq import attention
from kvant.golden.pq.attention import FloatPqAttention, Pq, PqAttention
from kvant.golden.pq.cache import pq_cache
from kvant.golden.pq.calibration import CodebookCalibrator, Kind
from kvant.golden.pq.codebook import Codebook
from kvant.golden.pq.decode import decode_attention
from kvant.golden.pq.scores import quantize_query
from kvant.golden.pq.train import train_codebooks

D, TOKENS, HEADS, QUERIES = 8, 40, 2, 4


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, TOKENS, D, generator=generator).half().float() for heads in (QUERIES, HEADS, HEADS)]


@pytest.fixture(scope="module")
def stores(rows):
    """Makes stores of keys and values for a number of sinks and recent tokens."""
    mean = rows[1][0].mean(-2).half()
    keys = train_codebooks(rows[1][0], nbits=5, mean=mean)
    values = train_codebooks(rows[2][0], nbits=4, subspace=4)

    def make(sinks, recent):
        return (
            Pq((keys,), 4, mean[None], sinks, recent),
            Pq((values,), 4, None, sinks, recent),
        )

    return make


def decoded(pair, queries, keys, values, position):
    """Outputs f32 [Hq, d] of the hardware's rule for the query of one position and the caches of the tokens so far."""
    caches = []
    for rows, store in zip((keys, values), pair, strict=True):
        mean = None if store.mean is None else store.mean[0]
        options = {"group": store.group, "mean": mean, "sinks": store.sinks, "recent": store.recent}
        caches.append(pq_cache(rows[:, : position + 1].half(), store.codebooks[0], **options))
    heads, dim = keys.shape[0], keys.shape[-1]
    return decode_attention(queries[:, position].half().view(heads, -1, dim), *caches).out.view(-1, dim)


def uneven_rows(tokens, *, seed):
    """Queries, keys and values whose rows differ in size by up to 2^9, some of zeros."""
    generator = torch.Generator().manual_seed(seed)

    def make(heads, powers):
        size = 2.0 ** torch.randint(-powers, 1, (1, heads, tokens, 1), generator=generator)
        zero = torch.rand((1, heads, tokens, 1), generator=generator) < 0.05
        return (torch.randn(1, heads, tokens, D, generator=generator) * size * 4).masked_fill(zero, 0).half().float()

    return make(QUERIES, 2), make(HEADS, 3), make(HEADS, 9)


@pytest.mark.parametrize(
    ("sinks", "recent", "group"), [(3, 6, 4), (0, 0, 8), (4, 0, 8), (0, 7, 3), (5, 200, 16), (200, 9, 8), (1, 1, 5)]
)
def test_every_position_has_the_numbers_of_the_hardware(sinks, recent, group):
    queries, keys, values = uneven_rows(150, seed=sinks + recent)
    mean = keys[0].mean(-2).half()
    pair = (
        Pq((train_codebooks(keys[0], nbits=5, mean=mean),), group, mean[None], sinks, recent),
        Pq((train_codebooks(values[0], nbits=4, subspace=4),), group, None, sinks, recent),
    )
    found = PqAttention(*pair)(0, queries, keys, values)[0]
    assert found.dtype == torch.float32
    for position in range(found.shape[-2]):
        expected = decoded(pair, queries[0], keys[0], values[0], position)
        assert torch.equal(found[:, position], expected), f"position {position}"


def test_shifted_bins_are_cut_as_in_hardware():
    queries, keys, values = uneven_rows(300, seed=1)
    queries[:, 1::2] = 0  # all weights are the largest: from 257 coded tokens on, bins have more than 32 bits
    pair = tuple(Pq((train_codebooks(x[0], nbits=4),), 8, None, 2, 10) for x in (keys, values))
    found = PqAttention(*pair)(0, queries, keys, values)[0]
    whole = pair[1].hold(0, values[0]).levels
    differs = []
    for position in (263, 267, 268, 269, 280, 298, 299):
        assert torch.equal(found[:, position], decoded(pair, queries[0], keys[0], values[0], position))
        coded = whole[:, 2 : position - 9].sum(-2) * (2**24 - 1)
        differs.append(bool((coded.long() % 2).any()) and position - 11 > 256)
    assert any(differs), "cutting lost nothing in these cases"


def test_one_codebook_may_serve_all_heads():
    queries, keys, values = uneven_rows(70, seed=2)
    shared, own = [], []
    for rows in (keys, values):
        book = train_codebooks(rows[0, :1], nbits=4).at(0)
        shared.append(Pq((book,), 8, None, 2, 8))
        twice = Codebook(torch.stack((book.entries,) * HEADS), torch.stack((book.scale,) * HEADS))
        own.append(Pq((twice,), 8, None, 2, 8))
    assert torch.equal(PqAttention(*shared)(0, queries, keys, values), PqAttention(*own)(0, queries, keys, values))


def test_rows_beyond_fp16_count_as_the_port_says():
    rows = uneven_rows(80, seed=3)
    pair = tuple(Pq((train_codebooks(x[0], nbits=4),), 8, None, 2, 8) for x in rows[1:])
    beyond, saturated = ([x.clone() for x in rows] for _ in range(2))
    for x, y in zip(beyond, saturated, strict=True):
        x[0, 0, 20, 1], y[0, 0, 20, 1] = -1e30, -65504
    assert torch.equal(PqAttention(*pair)(0, *beyond), PqAttention(*pair)(0, *saturated))


def test_a_lost_unit_of_a_weight_is_seen(monkeypatch):
    """The comparison with the hardware's rule would find a fault as small as can be."""
    queries, keys, values = uneven_rows(60, seed=4)
    pair = tuple(Pq((train_codebooks(x[0], nbits=4),), 8, None, 2, 8) for x in (keys, values))
    right = PqAttention(*pair)(0, queries, keys, values)
    exact = attention.weights
    monkeypatch.setattr(attention, "weights", lambda z, *rest: (exact(z, *rest) - 1).clamp(min=0))
    assert not torch.equal(PqAttention(*pair)(0, queries, keys, values), right)


def test_integers_are_close_to_a_float32_softmax(rows, stores):
    pair = stores(3, 6)
    integers, floats = PqAttention(*pair)(0, *rows), FloatPqAttention(*pair)(0, *rows)
    assert not torch.equal(integers, floats)
    assert (integers - floats).norm() < 0.01 * floats.norm()


def test_a_query_meets_the_cache_as_it_is_after_its_token(rows, stores):
    sinks, recent = 3, 6
    pair = stores(sinks, recent)
    found = FloatPqAttention(*pair)(0, *rows)[0]
    queries, keys, values = (x[0].half() for x in rows)
    for t in range(TOKENS):
        for head in range(QUERIES):
            kv = head * HEADS // QUERIES
            held = [
                pq_cache(
                    x[kv, : t + 1],
                    store.codebooks[0].at(kv),
                    group=4,
                    mean=None if store.mean is None else store.mean[0, kv],
                    sinks=sinks,
                    recent=recent,
                )
                for x, store in zip((keys, values), pair, strict=True)
            ]
            q = quantize_query(queries[head, t][None])
            # coded tokens by look-up, the others as the cache holds them
            history = held[0].history
            scores = held[0].dequantize().double() @ (q.q[0].double() * float(q.scale[0]))
            looked_up = held[0].scores(q.q)[0].double() * float(q.scale[0]) * float(held[0].codebook.scale)
            assert torch.allclose(scores[history], looked_up[history], rtol=1e-12)
            weights = ((scores - scores.max()) / math.sqrt(D)).exp() * 2**15
            sink = torch.arange(t + 1) < history.start
            newest = torch.arange(t + 1) >= max(history.stop, history.start)
            for part in (sink, newest):
                group, unit = int8_group((weights * part).float())
                weights = torch.where(part, (group * unit).double(), weights)
            expected = weights @ held[1].dequantize().double() / weights.sum()
            # a weight of an INT8 group next to a tie may be rounded the other way: the softmax is float32
            assert torch.allclose(found[head, t].double(), expected, atol=4e-3)


def test_with_everything_recent_only_int8_remains(rows, stores):
    mean = stores(0, 0)[0].mean
    found = FloatPqAttention(*stores(0, TOKENS), exact_weights=True)(0, *rows)
    centred = [rows[0], rows[1] - mean[:, :, None].float(), rows[2]]
    exact = torch.nn.functional.scaled_dot_product_attention(*centred, is_causal=True, enable_gqa=True)
    assert (found - exact).abs().max() < 0.05
    sinks_only = FloatPqAttention(*stores(TOKENS, 0), exact_weights=True)(0, *rows)
    assert torch.allclose(found, sinks_only, atol=1e-5)


def test_one_side_may_be_exact(rows, stores):
    keys, values = stores(2, 4)
    exact = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
    for pair, bound in (((keys, Exact()), 0.6), ((Exact(), values), 1.5), ((Int8Head(4), values), 1.5)):
        error = (FloatPqAttention(*pair)(0, *rows) - exact).abs().max()
        assert 0 < error < bound


def test_a_batch_is_its_sequences(rows, stores):
    double = [torch.cat((x, x.flip(2)), dim=0) for x in rows]
    for kind in (PqAttention, FloatPqAttention):
        attend = kind(*stores(2, 4))
        assert torch.equal(attend(0, *double)[:1], attend(0, *rows))


def test_caches_that_do_not_belong_together_are_refused(stores):
    table = (Tables.of(DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS),)
    keys, values = stores(2, 4)
    pairs = [(Exact(), Exact()), (keys, MantTime(64, table)), (keys, stores(2, 5)[1]), (stores(1, 4)[0], values)]
    integer_only = [(keys, Exact()), (Int8Head(4), values), (replace(keys, group=8), values)]
    refused = [(FloatPqAttention, pair) for pair in pairs] + [(PqAttention, pair) for pair in pairs + integer_only]
    for kind, pair in refused:
        with pytest.raises(TensorError) as refusal:
            kind(*pair)
        assert "legal" in str(refusal.value)


def test_footprint_counts_codebook_recent_tokens_and_sinks(stores):
    found = stores(4, 16)[0].footprint(D)
    assert found.history == 5 / 2
    # 40 - 16 coded, 16 as INT8 with two fp16 scales of 8 elements, 4 sinks, and a codebook of 32 x 8 bytes and a scale
    expected = (24 * 2.5 + 16 * (8 + 32 / 8) + 4 * (8 + 32 / 8) + 8 * (32 * 8 + 2) / 8) / 40
    assert found.at(40) == pytest.approx(expected)


def test_codebooks_of_a_model_leave_the_sinks_out_and_centre_the_keys():
    rng = np.random.default_rng(0)
    calibrator = CodebookCalibrator(["key_2x4", "value_4x5", "key_2x4"], sinks=2, maps=False)
    calibrator.check(D)
    layers = []
    for _ in range(2):
        observers = []
        for length in (30, 2, 25):  # the second window is nothing but sinks
            observer = KeysAndValues()
            for name in ("keys", "values"):
                x = rng.standard_normal((1, HEADS, length, D)).astype(np.float32) + 3
                x[:, :, :2] = 1e4
                observer(f"model.layers.0.{name}", torch.tensor(x))
            observers.append(observer)
        layers.append(observers)
        calibrator.add(observers)
    found = calibrator.result()
    assert found.key_mean.shape == (2, HEADS, D)
    assert found.key_mean.max() < 5
    assert {name: book.entries.shape for name, book in found.books.items()} == {
        "key_2x4": (2, HEADS, 4, 16, 2),
        "value_4x5": (2, HEADS, 2, 32, 4),
    }
    keys = torch.cat([layers[1][0].keys[:, 2:], layers[1][2].keys[:, 2:]], dim=1)
    expected = train_codebooks(keys, nbits=4, mean=found.key_mean[1])
    assert torch.equal(found.layers("key_2x4")[1].entries, expected.entries)
    with pytest.raises(TensorError, match="value_2x8"):
        found.layers("value_2x8")


@pytest.mark.parametrize("name", ["key", "key_2x9", "key_3x8", "keys_2x8", "value_2x3", "value_2x8 "])
def test_unknown_kinds_of_codebooks_are_refused(name):
    with pytest.raises(TensorError, match="key_2x8"):
        Kind.of(name)


def test_illegal_calibrations_are_refused():
    with pytest.raises(TensorError, match="no kind"):
        CodebookCalibrator([])
    with pytest.raises(TensorError, match="subspace = 4"):
        CodebookCalibrator(["key_4x8"]).check(6)
    observer = KeysAndValues()
    observer("model.layers.0.keys", torch.zeros(1, HEADS, 4, D))
    observer("model.layers.0.values", torch.zeros(1, HEADS, 4, D))
    with pytest.raises(TensorError, match="more than sinks = 4"):
        CodebookCalibrator(["key_2x8"], sinks=4).add([observer])
    with pytest.raises(TensorError, match="recent = -1"):
        CodebookCalibrator(["key_2x8"], recent=-1)
