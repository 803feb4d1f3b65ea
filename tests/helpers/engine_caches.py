"""Caches of a small decoder, built as `kvant run` builds them for the tiny model, so that designs are compiled once."""

import numpy as np
import torch

from kvant.golden.kvcache.attention import Int8Head, MantHead, MantTime
from kvant.golden.kvcache.choice import Tables
from kvant.golden.pq.attention import Pq
from kvant.golden.pq.codebook import Codebook
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.pq.parameters import PqParameters

LAYERS, HEADS, GROUPED = 2, 2, 3
"""Layers, KV heads, and query heads of each."""

GROUP, HEAD_DIM, SINKS, CAPACITY = 16, 8, 4, 128
TABLES = (Tables.of([5, 20, 60, 120], [3000, 8000, 12000]), Tables.of([0, 40, 255], [5000, 9000]))
RECENT, DECODE_TOKENS = 2, 12
"""Of product-quantised caches."""


def vectors(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Normal f32 of deviation 2."""
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32) * 2)


def mant_stores(kind: str, *, group: int = GROUP, head_dim: int = HEAD_DIM, sinks: int = SINKS):
    """Stores of keys and values; *kind* names those of either, "mant" or "int8", with a slash between."""
    rng = np.random.default_rng(7)
    mean, floor = (vectors(rng, LAYERS, HEADS, head_dim).half() for _ in range(2))
    mant = MantHead(group, TABLES, mean, sinks), MantTime(group, TABLES, None, floor.abs(), sinks)
    return tuple(one if name == "mant" else Int8Head(group) for name, one in zip(kind.split("/"), mant, strict=True))


def engine_parameters(
    *, group: int = GROUP, head_dim: int = HEAD_DIM, sinks: int = SINKS, capacity: int = CAPACITY, **fields
) -> tuple[AttentionParameters, CacheParameters]:
    """The engine, and the caches of a layer."""
    shape = {"group": group, "head_dim": head_dim, "sinks": sinks, "capacity": capacity}
    array = {"rows": 4, "cols": 4, "queries": 12} | fields
    return AttentionParameters(**shape | array), CacheParameters(**shape, heads=HEADS)


def pq_stores(*, head_dim: int = HEAD_DIM, nbits: int = 8, maps: bool = False) -> tuple[Pq, Pq]:
    """Product-quantised stores with random codebooks; with *maps* behind random linear maps."""
    rng = np.random.default_rng(5)
    made = []
    for mean in (vectors(rng, LAYERS, HEADS, head_dim).half(), None):
        books = []
        for _ in range(LAYERS):
            entries = rng.integers(-127, 128, (HEADS, head_dim // 2, 1 << nbits, 2)).astype(np.int8)
            books.append(Codebook.of(entries, (0.02 + 0.02 * rng.random(HEADS)).astype(np.float16)))
        square = vectors(rng, LAYERS, HEADS, head_dim, head_dim) * 0.1 + 2 * torch.eye(head_dim)
        made.append(Pq(tuple(books), GROUP, mean, SINKS, RECENT, square.half() if maps else None))
    return tuple(made)


def pq_parameters(**fields) -> PqParameters:
    """The block of a layer."""
    shape = {"group": GROUP, "head_dim": HEAD_DIM, "sinks": SINKS, "capacity": CAPACITY, "heads": HEADS}
    options = {"recent": RECENT, "centred": True, "q_parallel": GROUPED, "decode_tokens": DECODE_TOKENS}
    return PqParameters(**shape | options | fields)


def hold_against(rtl, golden, calls, *, head_dim: int = HEAD_DIM, seed: int = 0) -> None:
    """Attend in two backends, in calls of so many tokens: every output must be equal in every bit."""
    rng = np.random.default_rng(seed)
    for number, count in enumerate(calls):
        for layer in range(LAYERS):
            queries = vectors(rng, HEADS * GROUPED, count, head_dim)
            keys, values = (vectors(rng, HEADS, count, head_dim) for _ in range(2))
            given, wanted = (each.attend(layer, queries, keys, values) for each in (rtl, golden))
            assert given.y.shape == queries.shape
            assert torch.equal(given.y.view(torch.int32), wanted.y.view(torch.int32)), f"call {number}, layer {layer}"
            assert given.cycles > 0
