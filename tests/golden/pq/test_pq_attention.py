"""Product-quantised caches inside a model's attention, and codebooks of a whole model."""

import math

import numpy as np
import pytest
import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import Exact, Int8Head, MantTime
from kvant.golden.kvcache.calibration import KeysAndValues
from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.integer import int8_group
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS
from kvant.golden.pq.attention import Pq, PqAttention
from kvant.golden.pq.cache import pq_cache
from kvant.golden.pq.calibration import CodebookCalibrator, Kind
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


def test_a_query_meets_the_cache_as_it_is_after_its_token(rows, stores):
    sinks, recent = 3, 6
    pair = stores(sinks, recent)
    found = PqAttention(*pair)(0, *rows)[0]
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
    found = PqAttention(*stores(0, TOKENS), exact_weights=True)(0, *rows)
    centred = [rows[0], rows[1] - mean[:, :, None].float(), rows[2]]
    exact = torch.nn.functional.scaled_dot_product_attention(*centred, is_causal=True, enable_gqa=True)
    assert (found - exact).abs().max() < 0.05
    sinks_only = PqAttention(*stores(TOKENS, 0), exact_weights=True)(0, *rows)
    assert torch.allclose(found, sinks_only, atol=1e-5)


def test_one_side_may_be_exact(rows, stores):
    keys, values = stores(2, 4)
    exact = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)
    for pair, bound in (((keys, Exact()), 0.6), ((Exact(), values), 1.5), ((Int8Head(4), values), 1.5)):
        error = (PqAttention(*pair)(0, *rows) - exact).abs().max()
        assert 0 < error < bound


def test_a_batch_is_its_sequences(rows, stores):
    attention = PqAttention(*stores(2, 4))
    double = [torch.cat((x, x.flip(2)), dim=0) for x in rows]
    assert torch.equal(attention(0, *double)[:1], attention(0, *rows))


def test_caches_that_do_not_belong_together_are_refused(stores):
    table = (Tables.of(DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS),)
    keys, values = stores(2, 4)
    for pair in ((Exact(), Exact()), (keys, MantTime(64, table)), (keys, stores(2, 5)[1]), (stores(1, 4)[0], values)):
        with pytest.raises(TensorError) as refusal:
            PqAttention(*pair)
        assert "legal" in str(refusal.value)


def test_footprint_counts_codebook_recent_tokens_and_sinks(stores):
    found = stores(4, 16)[0].footprint(D)
    assert found.history == 5 / 2
    # 40 - 16 coded, 16 as INT8 with two fp16 scales of 8 elements, 4 sinks, and a codebook of 32 x 8 bytes and a scale
    expected = (24 * 2.5 + 16 * (8 + 32 / 8) + 4 * (8 + 32 / 8) + 8 * (32 * 8 + 2) / 8) / 40
    assert found.at(40) == pytest.approx(expected)


def test_codebooks_of_a_model_leave_the_sinks_out_and_centre_the_keys():
    rng = np.random.default_rng(0)
    calibrator = CodebookCalibrator(["key_2x4", "value_4x5", "key_2x4"], sinks=2)
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
