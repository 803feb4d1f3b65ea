"""Attention of a decoder in the compiled RTL: bit for bit the golden engines, call by call."""

from contextlib import closing

import numpy as np
import pytest
from engine_caches import (
    DECODE_TOKENS,
    GROUPED,
    HEADS,
    LAYERS,
    engine_parameters,
    hold_against,
    mant_stores,
    pq_parameters,
    pq_stores,
    vectors,
)

from kvant.golden.attention.engine import attend, float64_attention
from kvant.golden.errors import TensorError
from kvant.golden.kvcache.growing import growing_cache
from kvant.golden.kvcache.int8 import int8_cache
from kvant.golden.models.engines import EngineAttention, PqEngineAttention
from kvant.sim.attention.contents import Contents
from kvant.sim.compiled import caches
from kvant.sim.compiled.attention import CompiledAttention
from kvant.sim.compiled.pq import CompiledPq, CompiledPqAttention
from kvant.sim.errors import SimulationError


def engines(kind: str = "mant/mant", shape: dict | None = None, planes: int = 2, **options):
    """The RTL and its golden model."""
    shape = shape or {}
    stores = mant_stores(kind, **shape)
    p, cache = engine_parameters(**shape, weight_planes=planes)
    rtl = CompiledAttention(*stores, layers=LAYERS, p=p, cache=cache, **options)
    return closing(rtl), EngineAttention(*stores, planes=planes)


def pq_blocks(stores=None, shape: dict | None = None, **options):
    """The RTL and its golden model."""
    stores, p = stores or pq_stores(), pq_parameters(**shape or {})
    rtl = CompiledPqAttention(*stores, layers=LAYERS, p=p, **options)
    return closing(rtl), PqEngineAttention(*stores, batch=p.batch_tokens, decode_tokens=p.decode_tokens)


@pytest.mark.parametrize("calls", [(5, 1, 9, 1, 1, 16, 1), (1, 1, 1), (37, 1, 10, 1)])
def test_windows_close_within_calls_at_their_end_and_by_single_tokens(calls):
    closed, golden = engines()
    with closed as rtl:
        hold_against(rtl, golden, calls)


@pytest.mark.parametrize("kind", ["int8/int8", "int8/mant", "mant/int8"])
def test_int8_rows_of_either_side_equal_the_golden_engine(kind):
    closed, golden = engines(kind)
    with closed as rtl:
        hold_against(rtl, golden, (5, 1, 12, 1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "calls"),
    [
        ({"head_dim": 32, "sinks": 0}, (37, 1, 10, 1)),  # two groups a key
        ({"head_dim": 16, "sinks": 20}, (3, 20, 1)),  # more sinks than a window, some behind the prefill
        ({"head_dim": 64, "group": 64}, (70, 1, 1)),
    ],
)
def test_other_shapes_equal_the_golden_engine(shape, calls):
    closed, golden = engines(shape=shape)
    with closed as rtl:
        hold_against(rtl, golden, calls, head_dim=shape["head_dim"])


@pytest.mark.long
def test_one_plane_of_weights_equals_the_golden_engine():
    closed, golden = engines(planes=1)
    with closed as rtl:
        hold_against(rtl, golden, (20, 1))


@pytest.mark.parametrize("stall", [0.3, 0.9])
def test_pauses_change_no_bit(stall):
    for closed, golden in (engines(stall=stall, seed=4), pq_blocks(stall=stall, seed=4)):
        with closed as rtl:
            hold_against(rtl, golden, (5, 1, 12, 1), seed=2)


def test_product_quantised_histories_are_decoded_and_looked_up():
    closed, golden = pq_blocks()
    with closed as rtl:
        hold_against(rtl, golden, (1, 9, 1, 1, 1, 12, 1, 1))
        blocks = rtl._blocks
        assert all(block._coded(block.tokens) > DECODE_TOKENS for block in blocks)


def test_maps_around_product_quantised_caches_are_applied():
    closed, golden = pq_blocks(pq_stores(maps=True))
    with closed as rtl:
        hold_against(rtl, golden, (9, 1, 12), seed=1)


@pytest.mark.long
@pytest.mark.parametrize("nbits", [4, 6])
def test_other_codes_equal_the_golden_model(nbits):
    shape = {"head_dim": 16, "nbits": nbits, "batch": 4, "lanes": 4, "port_bits": 64}
    closed, golden = pq_blocks(pq_stores(head_dim=16, nbits=nbits), shape)
    with closed as rtl:
        hold_against(rtl, golden, (30, 1, 1, 1), head_dim=16)


@pytest.mark.long
def test_a_context_of_4096_tokens_equals_the_golden_engine():
    shape, tokens = {"head_dim": 64, "group": 64}, 4096
    stores = mant_stores("mant/mant", **shape)
    p, cache = engine_parameters(**shape, capacity=tokens, rows=8, cols=8)
    rng = np.random.default_rng(11)
    queries, keys, values = (vectors(rng, HEADS, count, 64).half() for count in (GROUPED, tokens, tokens))
    rtl = CompiledAttention(*stores, layers=1, p=p, cache=cache)
    with closing(rtl):
        held = rtl._caches[0]
        golden = [growing_cache(store, 0) for store in stores]
        for one, other, x in zip(held, golden, (keys, values), strict=True):
            one.append(x.numpy())
            other.append(x)
        contents = [Contents(tokens, *(one.contents(head) for one in held)) for head in range(HEADS)]
        out, cycles, moved = rtl._engine.attend(contents, queries.numpy(), [tokens] * GROUPED)
    wanted = attend(queries, golden[0].cache, golden[1].cache, planes=2).out.numpy()
    assert out.tobytes() == wanted.tobytes()
    assert cycles > moved / (p.port_bits // 8)
    exact = float64_attention(queries, golden[0].cache, golden[1].cache).numpy()
    assert np.abs(out - exact).max() < 2**-6 * np.abs(exact).max()


def test_rows_of_several_int8_sequences_are_one_cache():
    _, p = engine_parameters()
    with closing(caches.CompiledRows(p)) as held:
        x = np.random.default_rng(3).standard_normal((HEADS, 600, p.head_dim)).astype(np.float16)
        for part in (x[:, :255], x[:, 255:300], x[:, 300:]):
            held.append(part)
        for head in range(HEADS):
            rows, golden = held.contents(head), int8_cache(x[head], group=p.group)
            assert np.array_equal(rows.q, golden.q.numpy())
            assert np.array_equal(rows.scale, golden.scale.numpy())


def test_a_write_that_never_reaches_the_memory_is_seen(monkeypatch):
    apply = caches.HostPages.apply

    def lossy(self, fields):
        return apply(self, {name: buffer[1:] for name, buffer in fields.items()})

    monkeypatch.setattr(caches.HostPages, "apply", lossy)
    closed, golden = engines()
    with closed as rtl, pytest.raises((AssertionError, SimulationError)):
        hold_against(rtl, golden, (5, 1))


def test_a_code_that_is_served_wrong_is_seen(monkeypatch):
    append = CompiledPq.append

    def wrong(self, k, v):
        taken = append(self, k, v)
        self._codes[0, 1, 0, 0] ^= 1
        return taken

    monkeypatch.setattr(CompiledPq, "append", wrong)
    closed, golden = pq_blocks()
    with closed as rtl, pytest.raises(AssertionError, match="call 0"):
        hold_against(rtl, golden, (20,))


def test_caches_that_no_engine_reads_are_refused():
    keys, values = mant_stores("mant/mant")
    for pair, match in [((values, values), "keys: MantTime"), ((keys, keys), "values: MantHead")]:
        with pytest.raises(TensorError, match=match):
            EngineAttention(*pair)
    with pytest.raises(TensorError, match="keys: MantHead; legal is a product-quantised cache"):
        PqEngineAttention(keys, values, batch=8)
