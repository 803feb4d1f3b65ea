"""Caches that grow call by call are those of all rows at once."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import Exact, Int8Head, MantHead, MantTime
from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.growing import growing_cache
from kvant.golden.kvcache.int8 import int8_cache
from kvant.golden.kvcache.spatial import spatial_cache
from kvant.golden.kvcache.temporal import temporal_cache

G, HEADS = 16, 2
TABLES = (Tables.of([5, 20, 60, 120], [3000, 8000, 12000]), Tables.of([0, 40, 255], [5000, 9000]))
CALLS = [(1, 1, 1), (7, 1, 40, 16), (16, 16, 1), (37, 2), (3,) * 14]


def rows(seed: int, tokens: int, head_dim: int) -> torch.Tensor:
    x = np.random.default_rng(seed).standard_normal((HEADS, tokens, head_dim)) * 3
    x[0, tokens // 2, 0] = np.inf
    return torch.from_numpy(x.astype(np.float16))


def equal(a, b) -> bool:
    """Whether all fields of two caches are equal in every bit."""
    pairs = [(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def grown(store, layer: int, x: torch.Tensor, calls):
    cache = growing_cache(store, layer)
    for part in x.split(calls, 1):
        cache.append(part)
    return cache.cache


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("sinks", [0, 4, 20])
@pytest.mark.parametrize("head_dim", [12, 40])
def test_calls_do_not_change_a_bit(calls, sinks, head_dim):
    x = rows(sum(calls), sum(calls), head_dim)
    mean = rows(1, 2, head_dim)[:, 0].nan_to_num(posinf=1)[None].expand(2, -1, -1)
    floor = mean.abs()
    keys = MantHead(G, TABLES, mean, sinks)
    whole = spatial_cache(x, group=G, tables=TABLES[1], mean=mean[1], sinks=sinks)
    assert equal(grown(keys, 1, x, calls), whole)
    values = MantTime(G, TABLES, None, floor, sinks)
    whole = temporal_cache(x, calls[0], group=G, tables=TABLES[0], floor=floor[0], sinks=sinks)
    assert equal(grown(values, 0, x, calls), whole)
    assert equal(grown(Int8Head(G), 0, x, calls), int8_cache(x, group=G))


def test_offsets_and_shared_coefficients_grow_too():
    x = rows(3, 50, 24)
    whole = temporal_cache(x, 20, group=G, tables=TABLES[0], offset=True, shared_coefficient=True, sinks=3)
    assert equal(grown(MantTime(G, TABLES, None, None, 3, True, True), 0, x, (20, 29, 1)), whole)


def test_other_stores_are_refused():
    with pytest.raises(TensorError, match="store: Exact; legal is MantHead"):
        growing_cache(Exact(), 0)
