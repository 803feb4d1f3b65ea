"""Attention over caches as a block of the product: generated, simulated with a user's tensors, compared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvant import attention_pq, cache_arrays
from kvant.attention_arrays import Case, check_case
from kvant.blocks import Vectors
from kvant.config import Config
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.pq.parameters import PqParameters
from kvant.simulated import SimulatedBlock, compare, shape_arrays

BENCH_TOKENS = 3
"""Tokens of a generated bench behind its windows, which stay in the open one."""


class AttentionBlock(SimulatedBlock):
    """Queries over caches of keys and values; see `kvant.hw.attention.engine.AttentionEngine`."""

    summary = "attention of queries over caches of M-ANT groups or INT8 rows, fp16 queries to fp32 outputs"
    own_fields = tuple(AttentionParameters.model_fields)
    fields = tuple(
        dict.fromkeys(
            (*own_fields, *CacheParameters.model_fields, *PqParameters.model_fields, "coefficients", "thresholds")
        )
    )
    held = ("q.user",)

    def build(self, chosen: Config):
        """The component, anew at every call."""
        from kvant.hw.attention.engine import AttentionEngine

        return AttentionEngine(chosen.attention.check_attention())

    def parameters(self, chosen: Config) -> Mapping[str, Any]:
        """The fields of `AttentionParameters`."""
        return chosen.attention.model_dump()

    def facts(self, chosen: Config) -> Mapping[str, Any]:
        """Throughput, stream orders, memory layout and widths for the manifest."""
        from kvant.sim.attention.contents import page_layouts, time_layout

        p = chosen.attention.check_attention()
        keys, values = page_layouts(p)
        return {
            "latency": {},
            "throughput": {
                "words of the port per cycle": 1,
                "multiply-accumulates per cycle": p.rows * p.cols,
                "weights made per cycle": p.x_lanes,
                "elements of INT8 rows per cycle": p.lanes,
            },
            "streams": {
                "cmd": "queries of one KV head: their number, tokens of the cache, how many of them are sinks, format "
                "of the keys (0 M-ANT along the head, 1 INT8 rows, 2 M-ANT along time), whether values are INT8 rows "
                "instead of pages, head",
                "q": "fp16 queries, ceil(head_dim / lanes of the port) transfers each, surplus lanes of the last one "
                "are ignored; user is read in a query's first transfer: it sees the keys first <= t < end; slope "
                "(fp16) * (end - 1 - t) is taken from the base-2 logarithms",
                "keys": "for each command: INT8 blocks of the sinks, then the pages of all tokens, trailers included, "
                "or, of INT8 keys, INT8 blocks of all tokens; of keys along time: the static scales, fp16, filled up "
                "with zeros to 16 channels, INT8 blocks of the open window with scales of 1, INT8 blocks of the sinks, "
                "then the pages of the full windows, trailers included",
                "values": "for each command: the pages of its full windows, trailers included; nothing for INT8 values",
                "rows": "for each command: INT8 rows with a scale for every lane, the sinks, then the tokens of the "
                "open window; or, of INT8 values, all tokens; last ends a row",
                "out": "fp32 outputs, element by element, query by query; user: the query sees no key; last: it ends",
            },
            "memory": {
                "page of keys": keys.description,
                "page of values": values.description,
                **({"page of keys along time": time_layout(p).description} if p.time_keys else {}),
                "INT8 block": {
                    "groups": 16,
                    "bytes": 16 * p.group + 32,
                    "planes": [
                        {"name": "elements", "offset": 0, "bytes_per_group": p.group, "type": "i8"},
                        {"name": "scale", "offset": 16 * p.group, "bytes_per_group": 2, "type": "f16"},
                    ],
                },
            },
            "widths": {
                "denominator": p.denominator_width,
                "accumulators": p.linear.accumulators,
                "activation words": p.linear.activation_words,
            },
        }

    def vectors(self, chosen: Config, seed: int) -> Vectors:
        """Random queries over a small M-ANT cache, over INT8 rows, and over keys along time, if the engine takes them;
        some see fewer keys.
        """
        from kvant.sim.attention import engine

        p = chosen.attention.check_attention()
        rng = np.random.default_rng(seed)
        tokens = p.group + BENCH_TOKENS if p.tokens > p.group else p.group
        k, v = (rng.standard_normal((tokens, p.head_dim)).astype(np.float16) for _ in range(2))
        table = cache_arrays.bench_table(chosen)
        attends, outs, empties = [], [], []
        for formats in (("mant", "mant"), ("int8", "int8"), *([("mant_time", "mant")] if p.time_keys else [])):
            caches = golden_caches(p, k, v, formats, (table, table), statistic=chosen.cache.statistic)
            q = rng.standard_normal((p.queries, p.head_dim)).astype(np.float16)
            end = np.maximum(tokens - np.arange(p.queries), 0)
            golden = attend_golden(p, q, caches, end=end)
            attends.append(engine.Attend(contents_of(p, caches), q, end=end))
            outs.append(golden.out.numpy())
            empties.append(golden.empty.numpy())
        return Vectors(
            stimulus=engine.stimulus(p, attends),
            transfers=engine.expected(np.concatenate(outs), np.concatenate(empties)),
            status={"nonfinite": 0, "error": 0, "busy": 0},
        )

    def case(self, arrays: Mapping[str, np.ndarray], *, path: Path | None, overrides: Iterable[str]) -> "AttentionRun":
        """*arrays*: ``q`` f16 [Hq, d] or [Tq, Hq, d], ``k`` and ``v`` f16 [Hkv, T, d], ``format_k`` and ``format_v``,
        one of `kvant.attention_arrays.FORMATS`; optional those of `TABLE_ARRAYS` and `NUMBER_ARRAYS` there.

        All tokens are prefill. Query i of Tq sees the keys 0 .. T - Tq + i; query head h uses KV head
        ``h * Hkv // Hq``. With a mean, keys are centred. Codebooks that are not given are trained on the keys, or
        values, themselves.

        Raises
        ------
        InputError
            For an illegal array, or more tokens than the caches hold.
        """
        return AttentionRun(check_case(arrays, path, overrides), arrays["q"].shape, path, tuple(overrides))


BLOCK = AttentionBlock()


@dataclass(frozen=True)
class AttentionRun:
    """Keys and values through the simulated caches, then the queries over them; see `kvant.simulated.Case`.

    Parameters
    ----------
    case : Case
    shape : tuple of int
        Of the queries as they were given.
    path, overrides
        The configuration of *case*.
    """

    case: Case
    shape: tuple[int, ...]
    path: Path | None
    overrides: tuple[str, ...]

    def outputs(self, *, check: bool, waves: Path | None, **options: Any) -> dict[str, np.ndarray]:
        """``out`` f32, of the shape of ``q``; ``k_used``, ``v_used`` f32 [Hkv, T, d], the caches as the engine reads
        them; ``q_used`` f32, the queries as its port quantises them; 0-d i64: ``cycles`` and ``busy_cycles`` of the
        engine, over all heads; ``group``, ``rows``, ``cols``, ``lanes``; ``nonfinite``, ``error`` of caches and engine.

        Waves are those of the engine.
        """
        case = self.case
        if case.formats[0] == "pq":
            configuration = {"path": self.path, "overrides": self.overrides}
            result = attention_pq.attend(case, **configuration, waves=waves, check=check, **options)
        else:
            result = _attend(case, options, waves=waves, check=check)
        for name in ("out", "q_used"):
            result[name] = case.in_order(result[name]).reshape(self.shape)
        return result


def golden_caches(
    p: AttentionParameters,
    k: np.ndarray,
    v: np.ndarray,
    formats: tuple[str, str],
    tables: tuple[cache_arrays.Table | None, cache_arrays.Table | None],
    *,
    statistic: str = "variance",
    mean: np.ndarray | None = None,
    floor: np.ndarray | None = None,
    sinks: int | None = None,
):
    """Caches of the golden model of keys and values f16 [T, d] of one head.

    *tables* are those of keys and values, if these are M-ANT; *floor* is that of values; *sinks* are
    `AttentionParameters.sinks` if not given.
    """
    from kvant.golden.kvcache.choice import Tables
    from kvant.golden.kvcache.int8 import int8_cache
    from kvant.golden.kvcache.spatial import spatial_cache
    from kvant.golden.kvcache.temporal import temporal_cache

    sinks = p.sinks if sinks is None else sinks

    def choice(table):
        return Tables.of(table.coefficients, table.thresholds, statistic)

    if formats[0] == "mant":
        keys = spatial_cache(k, group=p.group, tables=choice(tables[0]), mean=mean, sinks=sinks)
    elif formats[0] == "mant_time":
        time = {"mean": mean, "sinks": sinks, "offset": True, "shared_coefficient": True}
        keys = temporal_cache(k, len(k), group=p.group, tables=choice(tables[0]), **time)
    else:
        keys = int8_cache(k, group=p.group, mean=mean)
    if formats[1] == "mant":
        values = temporal_cache(v, len(v), group=p.group, tables=choice(tables[1]), floor=floor, sinks=sinks)
    else:
        values = int8_cache(v, group=p.group)
    return keys, values


def contents_of(p: AttentionParameters, caches):
    """What the engine reads of `golden_caches`."""
    from kvant.golden.attention.engine import token_count
    from kvant.golden.kvcache.int8 import Int8Cache
    from kvant.golden.kvcache.temporal import TemporalCache
    from kvant.sim.attention.contents import Contents, Int8Rows, MantValues, TimeKeys, packed_keys, packed_windows

    def rows(q, scale):
        return Int8Rows(q.numpy(), scale.numpy())

    keys, values = caches
    tokens = token_count(keys)
    if isinstance(keys, Int8Cache):
        stored = rows(keys.q, keys.scale)
    elif isinstance(keys, TemporalCache):
        planes = (part.numpy() for part in (keys.codes, keys.scale, keys.coefficient, keys.offset))
        fresh = keys.staged.numpy(), keys.staged_scale.numpy()
        stored = TimeKeys(packed_windows(p, *planes), *fresh, rows(keys.sink, keys.sink_scale))
    else:
        groups = (part.numpy() for part in (keys.codes, keys.scale, keys.coefficient))
        stored = packed_keys(p, *groups, rows(keys.sink, keys.sink_scale))
    if isinstance(values, Int8Cache):
        return Contents(tokens, stored, rows(values.q, values.scale))
    windows = packed_windows(p, *(part.numpy() for part in (values.codes, values.scale, values.coefficient)))
    fresh = values.staged.numpy(), values.staged_scale.numpy()
    return Contents(tokens, stored, MantValues(windows, *fresh, rows(values.sink, values.sink_scale)))


def attend_golden(p: AttentionParameters, q: np.ndarray, caches, **options):
    """`kvant.golden.attention.engine.attend` of queries f16 [B, d] of one head, as the engine is built."""
    import torch

    from kvant.golden.attention.engine import attend

    limits = {name: torch.as_tensor(value) for name, value in options.items()}
    return attend(q, *caches, planes=p.weight_planes, **limits)


def _attend(case: Case, options: dict[str, Any], *, waves: Path | None, check: bool) -> dict[str, np.ndarray]:
    """Caches of all heads, then the queries of all heads in commands of up to `AttentionParameters.queries`."""
    from kvant.sim.attention import contents, engine

    p, queries, ends = case.chosen.attention, case.queries(), case.ends()
    held, flags = _simulated_caches(case, options)
    attends = []
    for head in range(case.heads):
        for first in range(0, queries.shape[1], p.queries):
            part = slice(first, first + p.queries)
            attends.append(engine.Attend(held[head], queries[head, part], end=ends[part], head=head))
    result = engine.run(p, attends, waves=waves, **options)
    result["out"] = result["out"].reshape(queries.shape)
    result["k_used"] = np.stack([contents.used_keys(p, one) for one in held])
    result["v_used"] = np.stack([contents.used_values(p, one) for one in held])
    result["q_used"] = _used_queries(case, queries)
    for name in ("nonfinite", "error"):
        result[name] |= np.int64(any(getattr(one, name) for one in flags))
    if check:
        compare(_golden(case, queries, ends), result)
    del result["empty"]
    return result | shape_arrays(p.group, p.cols, p.rows)


def _golden(case: Case, queries: np.ndarray, ends: np.ndarray) -> dict[str, np.ndarray]:
    """``k_used``, ``v_used``, ``out``, ``empty``, ``nonfinite`` of the golden model."""
    p = case.chosen.attention
    outs: dict[str, list] = {"k_used": [], "v_used": [], "out": [], "empty": []}
    nonfinite = False
    for head in range(case.heads):
        caches = golden_caches(
            p,
            case.k[head],
            case.v[head],
            case.formats,
            (case.tables[0][head], case.tables[1][head]),
            statistic=case.chosen.cache.statistic,
            **case.head_arrays(head, ("mean", "floor")),
        )
        attended = attend_golden(p, queries[head], caches, end=ends)
        nonfinite |= attended.nonfinite or any(cache.nonfinite for cache in caches)
        outs["k_used"].append(caches[0].dequantize().numpy())
        outs["v_used"].append(caches[1].dequantize().numpy())
        outs["out"].append(attended.out.numpy())
        outs["empty"].append(attended.empty.numpy().astype(np.int64))
    golden = {name: np.stack(values) for name, values in outs.items()}
    return golden | {"empty": golden["empty"].reshape(-1), "nonfinite": np.array(nonfinite, np.int64)}


def _used_queries(case: Case, queries: np.ndarray) -> np.ndarray:
    """Queries f32 [..., d] as INT8 groups hold them; before keys along time, as they pass the port."""
    import torch

    from kvant.golden.kvcache.spatial import int8_rows
    from kvant.golden.numeric.int8 import port_rule, quantize_int8

    if case.formats[0] == "mant_time":
        return port_rule(torch.from_numpy(queries)).float().numpy()
    group = case.chosen.attention.group
    groups = quantize_int8(queries, group, "q")
    return int8_rows(groups.q, groups.scale, group).numpy()


def _simulated_caches(case: Case, options: dict[str, Any]):
    """What the caches of all heads hold after the simulated RTL, `Contents` by head, and the runs' flags."""
    from kvant.kcache import key_tables
    from kvant.sim.attention import caches
    from kvant.sim.attention.contents import Contents
    from kvant.vcache import case as value_arrays

    shape = {"heads": case.heads, "offset": False, "shared_coeff": False, "evict": False}
    cache = case.chosen.cache.model_copy(update=shape)
    means = case.arrays.get("mean")
    if case.formats[0] == "mant":
        tables = {
            head: key_tables(cache, table, None if means is None else means[head])
            for head, table in enumerate(case.tables[0])
        }
        keys = caches.mant_keys(cache, case.k, tables, **options)
    elif case.formats[0] == "mant_time":
        along_time = cache.model_copy(update={"offset": True, "shared_coeff": True})
        heads = [
            value_arrays(along_time, case.k[head], [case.tokens], table, **case.head_arrays(head, ("mean",)))
            for head, table in enumerate(case.tables[0])
        ]
        keys = caches.time_keys(along_time, heads, **options)
    else:
        keys = caches.int8_rows(cache, case.k, means, **options)
    cache = cache.model_copy(update={"centred": False})
    if case.formats[1] == "mant":
        heads = [
            value_arrays(cache, case.v[head], [case.tokens], table, **case.head_arrays(head, ("floor",)))
            for head, table in enumerate(case.tables[1])
        ]
        values = caches.mant_values(cache, heads, **options)
    else:
        values = caches.int8_rows(cache, case.v, **options)
    held = [Contents(case.tokens, *pair) for pair in zip(keys.heads, values.heads, strict=True)]
    return held, (keys, values)
