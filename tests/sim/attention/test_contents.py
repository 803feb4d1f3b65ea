"""What the engine reads: bytes and rows of golden caches, their meaning, and those that simulated caches write."""

from dataclasses import replace

import numpy as np
import pytest

from kvant.attention import contents_of, golden_caches
from kvant.cache_arrays import Table
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.sim.attention import caches
from kvant.sim.attention.contents import (
    Contents,
    Int8Rows,
    int8_blocks,
    key_bytes,
    page_layouts,
    used_keys,
    used_values,
    value_bytes,
    value_rows,
)
from kvant.sim.kvcache.pages import UNWRITTEN
from kvant.sim.kvcache.spatial import KeyTables

SEED = 20261130
TABLE = Table(DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS)
FORMATS = [("mant", "mant"), ("int8", "mant"), ("mant", "int8"), ("int8", "int8")]
SMALL = AttentionParameters(group=8, head_dim=16, sinks=3, capacity=64, rows=4, cols=2, lanes=4).check_attention()


def rows_of(p, tokens, seed=SEED):
    rng = np.random.default_rng((seed, tokens))
    return [rng.standard_normal((tokens, p.head_dim)).astype(np.float16) for _ in range(2)]


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 7, 8, 9, 37, 64])
@pytest.mark.parametrize(
    "p",
    [SMALL, SMALL.model_copy(update={"head_dim": 5, "sinks": 0}), SMALL.model_copy(update={"group": 64, "sinks": 40})],
    ids=["", "short-head", "sinks-in-the-open-window"],
)
def test_the_bytes_mean_the_cache(p, tokens, formats):
    both = golden_caches(p, *rows_of(p, tokens), formats, (TABLE, TABLE))
    contents = contents_of(p, both)
    np.testing.assert_array_equal(used_keys(p, contents), both[0].dequantize().numpy())
    np.testing.assert_array_equal(used_values(p, contents), both[1].dequantize().numpy())


@pytest.mark.parametrize("tokens", [1, 8, 37])
def test_lengths_of_what_the_ports_carry(tokens):
    p = SMALL
    keys, values = page_layouts(p)
    for formats in FORMATS:
        contents = contents_of(p, golden_caches(p, *rows_of(p, tokens), formats, (TABLE, TABLE)))
        sinks, windows = min(3, tokens), tokens // 8
        block = 16 * p.group + 32
        if formats[0] == "mant":
            assert len(key_bytes(p, contents)) == block + -(-tokens // 8) * keys.page_bytes
        else:
            first = block if formats[1] == "mant" else 0  # the sinks of the values
            assert len(key_bytes(p, contents)) == first + -(-tokens * 2 // 16) * block
        mant = formats[1] == "mant"
        assert len(value_bytes(contents)) == (windows * values.page_bytes if mant else 0)
        elements, scales = value_rows(p, contents)
        assert elements.shape == scales.shape == (sinks + tokens - 8 * windows if mant else tokens, 16)
        assert elements.dtype == np.int8 and scales.dtype == np.float16


def test_int8_blocks_are_planes_of_sixteen_groups():
    q = np.arange(-8, 8, dtype=np.int8)[None] + np.arange(9, dtype=np.int8)[:, None]
    scale = np.arange(1, 19, dtype=np.float16).reshape(9, 2)
    text = np.frombuffer(int8_blocks(SMALL, Int8Rows(q, scale)), np.uint8).reshape(2, -1)
    assert text.shape == (2, 16 * 8 + 32)
    np.testing.assert_array_equal(text[:, :128].reshape(-1, 16)[:9].view(np.int8), q)
    np.testing.assert_array_equal(np.ascontiguousarray(text[:, 128:]).view("<f2").reshape(-1)[:18], scale.reshape(-1))
    assert not text[1, 16:128].any() and not text[1, 128 + 4 :].any()


def test_bytes_behind_the_last_group_mean_nothing():
    p = SMALL
    contents = contents_of(p, golden_caches(p, *rows_of(p, 13), ("mant", "mant"), (TABLE, TABLE)))
    right = used_keys(p, contents)
    page = np.frombuffer(contents.keys.pages[1], np.uint8).copy()
    assert (page[10 * 4 : 16 * 4] == UNWRITTEN).all()  # codes of 5 tokens, 2 groups each
    page[10 * 4 : 16 * 4] = 0x5A
    keys = replace(contents.keys, pages=[contents.keys.pages[0], page.tobytes()])
    np.testing.assert_array_equal(used_keys(p, replace(contents, keys=keys)), right)


@pytest.mark.parametrize("simulator", ["icarus"])
def test_simulated_caches_write_these_bytes(simulator):
    """Keys, values and INT8 rows of two heads: what memory holds where it was written, rows, scales."""
    p, heads, tokens = SMALL, 2, 37
    cache = CacheParameters(**{name: getattr(p, name) for name in ("group", "head_dim", "sinks", "capacity", "lanes")})
    cache = cache.model_copy(update={"heads": heads})
    k, v = (np.stack(rows) for rows in zip(*(rows_of(p, tokens, seed) for seed in (1, 2)), strict=True))
    options = {"simulator": simulator, "stall": 0.2}
    keys = caches.mant_keys(
        cache, k, {head: KeyTables(TABLE.coefficients, TABLE.thresholds) for head in range(heads)}, **options
    )
    tables = {"coeffs": np.array(TABLE.coefficients, np.uint8), "thresholds": np.array(TABLE.thresholds, np.uint16)}
    values = caches.mant_values(cache, [{"v": v[head], "calls": [tokens]} | tables for head in range(heads)], **options)
    assert not keys.error | keys.nonfinite | values.error | values.nonfinite
    for head in range(heads):
        golden = contents_of(p, golden_caches(p, k[head], v[head], ("mant", "mant"), (TABLE, TABLE)))
        got = Contents(tokens, keys.heads[head], values.heads[head])
        for texts in ((key_bytes(p, got), key_bytes(p, golden)), (value_bytes(got), value_bytes(golden))):
            one, right = (np.frombuffer(text, np.uint8) for text in texts)
            written = (one != UNWRITTEN) & (right != UNWRITTEN)
            np.testing.assert_array_equal(one[written], right[written])
            assert written.mean() > 0.8
        for one, right in zip(value_rows(p, got), value_rows(p, golden), strict=True):
            np.testing.assert_array_equal(one, right)
        np.testing.assert_array_equal(used_keys(p, got), used_keys(p, golden))
        np.testing.assert_array_equal(used_values(p, got), used_values(p, golden))


def test_int8_rows_are_made_by_a_cache_of_sinks(monkeypatch):
    p, heads, tokens = SMALL, 2, 20
    monkeypatch.setattr(caches, "INT8_SEQUENCE", 8)  # fewer than the rows: a sequence after the other
    cache = CacheParameters(group=8, head_dim=16, lanes=4, heads=heads)
    x = np.stack([rows_of(p, tokens, seed)[0] for seed in (1, 2)])
    means = np.stack([rows_of(p, 1, seed)[0][0] for seed in (3, 4)])
    written = caches.int8_rows(cache, x, means, simulator="icarus")
    for head in range(heads):
        both = golden_caches(p, x[head], x[head], ("int8", "int8"), (TABLE, TABLE), mean=means[head])
        golden = contents_of(p, both).keys
        np.testing.assert_array_equal(written.heads[head].q, golden.q)
        np.testing.assert_array_equal(written.heads[head].scale, golden.scale)
