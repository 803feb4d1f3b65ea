"""Attention of a decoder in the compiled RTL: bit for bit the golden engines, call by call."""

import numpy as np
import pytest
import torch

from kvant.golden.kvcache.attention import Int8Head, MantHead, MantTime
from kvant.golden.kvcache.choice import Tables
from kvant.golden.models.engines import EngineAttention
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.sim.compiled import caches
from kvant.sim.compiled.attention import CompiledAttention
from kvant.sim.errors import SimulationError

LAYERS, HEADS, GROUPED = 2, 2, 3
TABLES = (Tables.of([5, 20, 60, 120], [3000, 8000, 12000]), Tables.of([0, 40, 255], [5000, 9000]))
SMALL = {"rows": 2, "cols": 2, "lanes": 4, "queries": 6, "capacity": 96, "port_bits": 64}


def vectors(rng, *shape) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 2)


def stores(kind: str, group: int, head_dim: int, sinks: int):
    """Stores of keys and values of a kind each."""
    rng = np.random.default_rng(7)
    mean, floor = (vectors(rng, LAYERS, HEADS, head_dim).half() for _ in range(2))
    mant = MantHead(group, TABLES, mean, sinks), MantTime(group, TABLES, None, floor.abs(), sinks)
    kinds = kind.split("/")
    return tuple(one if name == "mant" else Int8Head(group) for name, one in zip(kinds, mant, strict=True))


def backends(kind: str, group: int, head_dim: int, sinks: int, **options):
    pair = stores(kind, group, head_dim, sinks)
    planes = options.pop("planes", 2)
    shape = {"group": group, "head_dim": head_dim, "sinks": sinks}
    p = AttentionParameters(**SMALL, **shape, weight_planes=planes)
    cache = CacheParameters(**shape, heads=HEADS, lanes=4, capacity=96)
    rtl = CompiledAttention(*pair, layers=LAYERS, p=p, cache=cache, **options)
    return rtl, EngineAttention(*pair, planes=planes)


def decode(rtl, golden, head_dim: int, calls, seed: int = 0) -> None:
    """Hold calls of so many tokens against each other."""
    rng = np.random.default_rng(seed)
    for number, count in enumerate(calls):
        for layer in range(LAYERS):
            q = vectors(rng, HEADS * GROUPED, count, head_dim)
            k, v = (vectors(rng, HEADS, count, head_dim) for _ in range(2))
            given, wanted = (each.attend(layer, q, k, v) for each in (rtl, golden))
            assert torch.equal(given.y.view(torch.int32), wanted.y.view(torch.int32)), (number, layer)
            assert given.cycles > 0 and given.cache_bytes > 0


@pytest.mark.parametrize(
    ("kind", "group", "head_dim", "sinks", "calls"),
    [
        ("mant/mant", 16, 16, 3, (5, 1, 9, 1, 1, 16, 1)),  # windows that close in a call, at its end, by one token
        ("mant/mant", 16, 32, 0, (37, 1, 10, 1)),  # two groups a key, a prefill of several windows
        ("mant/mant", 16, 8, 20, (3, 20, 1)),  # more sinks than a window, some behind the prefill
        ("int8/int8", 16, 16, 0, (5, 1, 12, 1)),
        ("int8/mant", 16, 16, 2, (17, 1)),
        ("mant/int8", 16, 16, 2, (17, 1)),
    ],
)
def test_every_call_equals_the_golden_engine(kind, group, head_dim, sinks, calls):
    rtl, golden = backends(kind, group, head_dim, sinks)
    try:
        decode(rtl, golden, head_dim, calls)
    finally:
        rtl.close()


def test_pauses_change_no_bit():
    rtl, golden = backends("mant/mant", 16, 16, 3, stall=0.3, seed=4)
    try:
        decode(rtl, golden, 16, (5, 1, 12, 1), seed=2)
    finally:
        rtl.close()


def test_rows_of_several_int8_sequences_are_one_cache():
    p = CacheParameters(group=16, head_dim=16, heads=HEADS, lanes=4)
    held = caches.CompiledRows(p)
    try:
        x = np.random.default_rng(3).standard_normal((HEADS, 600, 16)).astype(np.float16)
        for part in (x[:, :255], x[:, 255:300], x[:, 300:]):
            held.append(part)
        for head in range(HEADS):
            rows = held.contents(head)
            golden = caches_golden(x[head])
            assert np.array_equal(rows.q, golden.q.numpy()) and np.array_equal(rows.scale, golden.scale.numpy())
    finally:
        held.close()


def caches_golden(x: np.ndarray):
    from kvant.golden.kvcache.int8 import int8_cache

    return int8_cache(x, group=16)


def test_a_lost_write_is_seen(monkeypatch):
    """A fault: the trailer and scales of the newest block never reach the memory."""
    rtl, golden = backends("mant/mant", 16, 16, 0)
    apply = caches.HostPages.apply

    def lossy(self, fields):
        return apply(self, {name: buffer[:-4] for name, buffer in fields.items()})

    monkeypatch.setattr(caches.HostPages, "apply", lossy)
    try:
        with pytest.raises((AssertionError, SimulationError)):
            decode(rtl, golden, 16, (5, 1))
    finally:
        rtl.close()
