"""The cache of keys along the head as a block of the product: generated, simulated with a user's keys, compared."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvant import cache_arrays
from kvant.blocks import Vectors
from kvant.cache_arrays import NUMBER_ARRAYS, TABLE_ARRAYS, Table
from kvant.config import Config
from kvant.errors import InputError
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.simulated import Run, SimulatedBlock, shape_arrays
from kvant.tensors import ArraySpec, check_arrays

ARRAYS = [
    ArraySpec("k", "float16", ("T", "d"), required=True),
    *TABLE_ARRAYS,
    ArraySpec("mean", "float16", ("d",)),
    *NUMBER_ARRAYS,
]
"""What ``kvant simulate kcache`` takes: keys of one sequence and head, a table, a mean."""

BENCH_TOKENS = 80
"""Most tokens of a generated bench."""


class KeyCacheBlock(SimulatedBlock):
    """fp16 keys to pages of 4-bit groups along the head; see `kvant.hw.kvcache.spatial.SpatialCache`."""

    summary = "fp16 keys to 4-bit M-ANT groups along the head, as they come"
    own_fields = tuple(name for name in CacheParameters.model_fields if name not in ("offset", "shared_coeff"))
    fields = (*own_fields, "coefficients", "thresholds")
    held = ()

    def build(self, chosen: Config):
        """The component, anew at every call."""
        from kvant.hw.kvcache.spatial import SpatialCache

        return SpatialCache(chosen.cache)

    def parameters(self, chosen: Config) -> Mapping[str, Any]:
        """The fields of `CacheParameters` that the block depends on."""
        return {name: getattr(chosen.cache, name) for name in self.own_fields}

    def facts(self, chosen: Config) -> Mapping[str, Any]:
        """Latency, throughput, stream orders, memory layout and widths for the manifest."""
        from kvant.hw.kvcache.packer import BlockPacker

        p = chosen.cache
        cache = self.build(chosen)
        return {
            "latency": {"last transfer of a row to the word with its last codes": cache.latency + BlockPacker.latency},
            "throughput": {"elements per cycle": p.lanes, "cycles per row": p.row_transfers},
            "streams": {
                "k": "rows of head_dim fp16 elements, row_transfers transfers each, of any heads in turn; surplus "
                "lanes of the last one are ignored; user is read in a row's first transfer: start (first row of a "
                "sequence), flush (bring the memory up to date after this row), head",
                "cfg": "tables of a head, while no row of it is under way: kind 0 coefficient, 1 threshold, 2 mean (if "
                "centred), 4 end of its sequence; a table has 16 coefficients and 15 thresholds: a shorter one is "
                "filled up with its last coefficient and thresholds of 65535",
                "sink": "the first `sinks` rows of a sequence as INT8 groups; user = fp16 scale of the group, head; "
                "last ends a row",
                "codes": "writes of codes: byte address within the page, slot of the page in the head's ring of "
                "capacity/group pages, head, position of the page's first token",
                "meta": "writes of 16 bytes: scales and coefficients of 16 groups, trailers",
            },
            "memory": {"page": cache.layout.description, "pages per head": p.windows, "heads": p.heads},
            "widths": {
                "code word": cache.word_bits,
                "row_transfers": p.row_transfers,
                "row_groups": p.row_groups,
                "sum": p.sum_width,
                "sumsq": p.sumsq_width,
                "moment": p.moment_limit.bit_length(),
            },
        }

    def vectors(self, chosen: Config, seed: int) -> Vectors:
        """A random sequence of up to `BENCH_TOKENS` keys in each of two heads (one, if there is one), in turn."""
        from kvant.sim.kvcache import spatial

        p = chosen.cache
        heads = min(2, p.heads)
        tokens = min(p.group + 1, BENCH_TOKENS // heads)
        keys = random_keys(heads, tokens, p.head_dim, seed=seed)
        tables = {head: _bench_table(chosen, head, seed) for head in range(heads)}
        rows, golden = [], {name: [] for name in ("codes", "scale", "coeff", "sink", "sink_scale")}
        results = [golden_outputs(p, keys[head], tables[head]) for head in range(heads)]
        for t in range(tokens):
            for head in range(heads):
                rows.append(spatial.KeyVector(keys[head, t], head, start=t == 0, flush=t == tokens - 1))
                for name, values in golden.items():
                    values.extend(results[head][name][t : t + 1])
        word_bits = self.build(chosen).word_bits
        arrays = {name: np.array(values, results[0][name].dtype) for name, values in golden.items()}
        arrays |= {name: arrays[name].reshape(-1, results[0][name].shape[1]) for name in ("sink", "sink_scale")}
        return Vectors(
            stimulus=spatial.stimulus(p, rows, tables, word_bits=word_bits),
            transfers=spatial.expected(p, spatial.place_rows(p, rows), arrays, word_bits=word_bits),
            status={"nonfinite": 0, "error": 0, "busy": 0},
        )

    def case(self, arrays: Mapping[str, np.ndarray], *, path: Path | None, overrides: Iterable[str]) -> Run:
        """*arrays*: see `ARRAYS`. With a mean the cache is built to take it out.

        Raises
        ------
        InputError
            For an illegal array, or more tokens than the cache holds.
        """
        from kvant.sim.kvcache import spatial

        cache_arrays.check_together(arrays)
        lengths = check_arrays(arrays, ARRAYS, group=1)
        centred = {"centred": True} if "mean" in arrays else {}
        chosen = cache_arrays.load(arrays, path, overrides, head_dim=lengths["d"], **centred)
        cache_arrays.check_cache(chosen)
        cache_arrays.check_finite(arrays, "mean")
        p = chosen.cache
        tables = key_tables(p, cache_arrays.choice_table(arrays, chosen), arrays.get("mean"))
        capacity = p.windows * p.group
        if lengths["T"] > capacity:
            raise InputError(f"array k: {lengths['T']} tokens; legal is 1 to capacity = {capacity}")
        return Run(
            run=partial(spatial.run, p, arrays["k"], tables),
            golden=partial(golden_outputs, p, arrays["k"], tables),
            extra=shape_arrays(p.group, p.lanes),
        )


BLOCK = KeyCacheBlock()


def key_tables(p: CacheParameters, table: Table, mean: np.ndarray | None):
    """Tables of a head; where the cache is centred and there is no mean, it is 0."""
    from kvant.sim.kvcache.spatial import KeyTables

    if p.centred and mean is None:
        mean = np.zeros(p.head_dim, np.float16)
    return KeyTables(table.coefficients, table.thresholds, mean)


def _bench_table(chosen: Config, head: int, seed: int):
    """The configuration's table, with thresholds spread evenly where it has none, and a random mean."""
    rng = np.random.default_rng((seed, head))
    mean = rng.standard_normal(chosen.cache.head_dim).astype(np.float16)
    return key_tables(chosen.cache, cache_arrays.bench_table(chosen), mean if chosen.cache.centred else None)


def random_keys(heads: int, tokens: int, head_dim: int, *, seed: int) -> np.ndarray:
    """f16 [heads, T, d]: channels of different sizes, an outlier, a row of zeros, subnormal numbers."""
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((heads, tokens, head_dim)) * np.exp(rng.standard_normal(head_dim))
    k[:, 1::7, 0] = 1e4
    k[:, 2::7] = 0
    k[:, 3::7] *= 2.0**-22
    k[:, 4::7] = rng.integers(-3, 4, k[:, 4::7].shape)
    return k.astype(np.float16)


def golden_outputs(p: CacheParameters, k: np.ndarray, tables) -> dict[str, np.ndarray]:
    """The arrays of `kvant.sim.kvcache.spatial.run` for one sequence, from the golden model."""
    from kvant.golden.kvcache.choice import Tables
    from kvant.golden.kvcache.spatial import spatial_cache

    choice = Tables.of(tables.coefficients, tables.thresholds, p.statistic)
    cache = spatial_cache(k, group=p.group, tables=choice, mean=tables.mean, sinks=p.sinks)
    return {
        "codes": cache.codes.numpy(),
        "scale": cache.scale.numpy(),
        "coeff": cache.coefficient.numpy(),
        "sink": cache.sink.numpy(),
        "sink_scale": cache.sink_scale.numpy(),
        "nonfinite": np.array(cache.nonfinite, np.int64),
    }
