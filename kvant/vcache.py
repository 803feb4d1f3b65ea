"""The cache along time as a block of the product: generated, simulated with a user's values, compared."""

from collections.abc import Iterable, Mapping, Sequence
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
from kvant.tensors import ArraySpec, check_arrays, scalar

OPTION_ARRAYS = [ArraySpec("offset", "integer"), ArraySpec("shared_coeff", "integer")]
"""Options of the configuration that may be given as arrays, 0 or 1."""

ARRAYS = [
    ArraySpec("v", "float16", ("T", "d"), required=True),
    ArraySpec("calls", "int32", ("N",), required=True),
    *TABLE_ARRAYS,
    ArraySpec("mean", "float16", ("d",)),
    ArraySpec("floor", "float16", ("d",)),
    *NUMBER_ARRAYS,
    *OPTION_ARRAYS,
]
"""What ``kvant simulate vcache`` takes: rows of one sequence and head, the calls that bring them, a table, a mean, a
floor."""

BENCH_WINDOWS = 2
BENCH_TOKENS = 200
"""Most windows, and about as many tokens, of a generated bench."""


class ValueCacheBlock(SimulatedBlock):
    """fp16 values to pages of 4-bit groups along time; see `kvant.hw.kvcache.requantizer.Requantizer`."""

    summary = "fp16 values, or keys, to 4-bit M-ANT groups along time, in two phases"
    own_fields = tuple(CacheParameters.model_fields)
    fields = (*own_fields, "coefficients", "thresholds")
    held = ()

    def build(self, chosen: Config):
        """The component, anew at every call."""
        from kvant.hw.kvcache.requantizer import Requantizer

        return Requantizer(chosen.cache)

    def parameters(self, chosen: Config) -> Mapping[str, Any]:
        """The fields of `CacheParameters` that the block depends on."""
        return {name: getattr(chosen.cache, name) for name in self.own_fields}

    def facts(self, chosen: Config) -> Mapping[str, Any]:
        """Latency, throughput, stream orders, memory layout and widths for the manifest."""
        p = chosen.cache
        cache = self.build(chosen)
        timing = cache.timing
        return {
            "latency": {
                "transfer of a row until it can be read as staged": timing.written + 1,
                "last transfer of a window until its first channel is encoded, at most": timing.first_read,
                "encoding of a window": p.group_transfers * p.head_dim,
            },
            "throughput": {"elements per cycle": p.lanes, "cycles per row": p.row_transfers, "stall cycles": 0},
            "streams": {
                "v": "rows of head_dim fp16 elements, row_transfers transfers each, of any heads in turn; surplus "
                "lanes of the last one are ignored; user is read in a row's first transfer: start (first row of a "
                "sequence), scan (row of the first pass of the prefill), head. A sequence: the rows of its prefill "
                "with scan, then all its rows, those of the prefill again",
                "cfg": "tables of a head, while no row of it is under way: kind 0 coefficient, 1 threshold, 2 mean (if "
                "centred), 3 floor, 4 end of its sequence; a table has 16 coefficients and 15 thresholds: a shorter "
                "one is filled up with its last coefficient and thresholds of 65535",
                "sink": "the first `sinks` rows of a sequence as INT8 groups along the head; user = fp16 scale of the "
                "group, head; last ends a row",
                "peek": "requests for rows of the open window: number of the row in the window, head",
                "staged": "answers in the order of the requests: row_transfers transfers of INT8 elements (0 where the "
                "window has no such row); user = fp16 scale of each channel; last ends a row",
                "codes": "writes of codes: byte address within the page, slot of the page in the head's ring of "
                "capacity/group pages, head, position of the page's first token; a page is a window, its groups are "
                "the channels",
                "meta": "writes of 16 bytes: scales, coefficients and offsets of 16 channels, trailers",
            },
            "memory": {"page": cache.packer.layout.description, "pages per head": p.windows, "heads": p.heads},
            "widths": {
                "code word": cache.packer.word_bits,
                "row_transfers": p.row_transfers,
                "ring_rows": timing.ring_rows,
                "sum": p.sum_width,
                "sumsq": p.sumsq_width,
                "moment": p.moment_limit.bit_length(),
            },
        }

    def vectors(self, chosen: Config, seed: int) -> Vectors:
        """Random sequences of up to two heads in turn, with an open window at their ends, which is read."""
        from kvant.sim.kvcache import requantizer as sim

        p = chosen.cache
        heads = min(2, p.heads)
        windows = min(BENCH_WINDOWS, p.windows, max(1, BENCH_TOKENS // (heads * p.group)))
        tokens, prefill = windows * p.group + 2, p.group // 2
        values = random_values(heads, tokens, p.head_dim, seed=seed)
        tables, results, sequences = [], [], []
        for head in range(heads):
            arrays = bench_arrays(chosen, values[head], prefill, seed=seed + head)
            tables += sim.table_writes(p, arrays, heads=[head])
            results.append(golden_outputs(p, arrays))
            sequences.append(sim.sequence_rows(values[head], prefill, head))
        rows = [row for turn in zip(*sequences, strict=True) for row in turn]
        peeks = [(head, row) for head in range(heads) for row in range(tokens % p.group)]
        sinks = min(p.sinks, tokens)
        return Vectors(
            stimulus=sim.rows_stimulus(p, rows, tables, windows=heads * windows, sinks=heads * sinks, peeks=peeks),
            transfers=sim.expected(p, results),
            status={
                "nonfinite": 0,
                "error": 0,
                "full": 0,
                "saturated": sum(int(result["saturated"]) for result in results),
            },
        )

    def case(self, arrays: Mapping[str, np.ndarray], *, path: Path | None, overrides: Iterable[str]) -> Run:
        """*arrays*: see `ARRAYS`. With a mean the cache is built to take it out.

        Raises
        ------
        InputError
            For an illegal array, or more tokens than the cache holds.
        """
        from kvant.sim.kvcache import requantizer as sim

        cache_arrays.check_together(arrays)
        lengths = check_arrays(arrays, ARRAYS, group=1)
        options = {spec.name: flag for spec in OPTION_ARRAYS if (flag := _flag(arrays, spec.name)) is not None}
        if "mean" in arrays:
            options["centred"] = True
        chosen = cache_arrays.load(arrays, path, overrides, head_dim=lengths["d"], **options)
        cache_arrays.check_cache(chosen)
        cache_arrays.check_finite(arrays, "mean")
        cache_arrays.check_finite(arrays, "floor", least=0)
        p = chosen.cache
        _check_calls(arrays["calls"], lengths["T"])
        most = p.windows * p.group + p.group - 1
        if lengths["T"] > most and not p.evict:
            raise InputError(
                f"array v: {lengths['T']} tokens; legal without eviction is 1 to {most} (capacity = "
                f"{p.windows * p.group} and an open window of {p.group - 1})"
            )
        table = cache_arrays.choice_table(arrays, chosen)
        tensors = case(p, arrays["v"], arrays["calls"], table, floor=arrays.get("floor"), mean=arrays.get("mean"))
        return Run(
            run=partial(sim.run, p, tensors),
            golden=partial(golden_outputs, p, tensors),
            extra=shape_arrays(p.group, p.lanes),
        )


BLOCK = ValueCacheBlock()


def _flag(arrays: Mapping[str, np.ndarray], name: str) -> bool | None:
    """An optional array that is 0 or 1."""
    value = scalar(arrays, name)
    if value not in (None, 0, 1):
        raise InputError(f"array {name} = {value}: legal is 0 or 1")
    return None if value is None else bool(value)


def _check_calls(calls: np.ndarray, tokens: int) -> None:
    for index in np.flatnonzero(calls < 1)[:1]:
        raise InputError(f"calls[{index}] = {calls[index]}: legal is a call of at least one token")
    if calls.sum(dtype=np.int64) != tokens:
        raise InputError(f"array calls: sum {calls.sum(dtype=np.int64)}; legal is the length of v, T = {tokens}")


def case(
    p: CacheParameters,
    v: np.ndarray,
    calls: Sequence[int] | np.ndarray,
    table: Table,
    *,
    floor: np.ndarray | None = None,
    mean: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The arrays that `kvant.sim.kvcache.requantizer.run` and `golden_outputs` take; a mean is left out where the
    cache takes none.
    """
    arrays = {
        "v": v,
        "calls": np.asarray(calls, np.int32),
        "coeffs": np.array(table.coefficients, np.uint8),
        "thresholds": np.array(table.thresholds, np.uint16),
    }
    if floor is not None:
        arrays["floor"] = floor
    if p.centred:
        arrays["mean"] = np.zeros(p.head_dim, np.float16) if mean is None else mean
    return arrays


def bench_arrays(chosen: Config, v: np.ndarray, prefill: int, *, seed: int) -> dict[str, np.ndarray]:
    """A sequence with a random floor and mean and the configuration's table, with even thresholds if it has none."""
    rng = np.random.default_rng(seed)
    p = chosen.cache
    floor = (rng.random(p.head_dim) / 2).astype(np.float16)
    mean = rng.standard_normal(p.head_dim).astype(np.float16)
    return case(p, v, [prefill, len(v) - prefill], cache_arrays.bench_table(chosen), floor=floor, mean=mean)


def random_values(heads: int, tokens: int, head_dim: int, *, seed: int) -> np.ndarray:
    """f16 [heads, T, d]: channels of different sizes, a dead one, an outlier, subnormal numbers, small integers."""
    rng = np.random.default_rng(seed)
    v = rng.standard_normal((heads, tokens, head_dim)) * np.exp(rng.standard_normal(head_dim))
    v[:, tokens // 2 :: 17, 0] = 1e4
    v[:, :, head_dim // 2] = 0
    v[:, :, head_dim // 3] *= 2.0**-22
    v[:, :, head_dim // 4] = rng.integers(-3, 4, (heads, tokens))
    return v.astype(np.float16)


def golden_outputs(p: CacheParameters, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors, ``saturated`` and ``nonfinite`` of `kvant.sim.kvcache.requantizer.run`, from the golden model."""
    from kvant.golden.kvcache.choice import Tables
    from kvant.golden.kvcache.temporal import temporal_cache

    cache = temporal_cache(
        arrays["v"],
        int(arrays["calls"][0]),
        group=p.group,
        tables=Tables.of(arrays["coeffs"], arrays["thresholds"], p.statistic),
        mean=arrays.get("mean"),
        floor=arrays.get("floor"),
        sinks=p.sinks,
        offset=p.offset,
        shared_coefficient=p.shared_coeff,
    )
    tensors = {
        "codes": cache.codes,
        "scale": cache.scale,
        "coeff": cache.coefficient,
        "offset": cache.offset,
        "staged": cache.staged,
        "staged_scale": cache.staged_scale,
        "sink": cache.sink,
        "sink_scale": cache.sink_scale,
        "saturated": cache.saturated,
    }
    return {name: tensor.numpy() for name, tensor in tensors.items()} | {
        "nonfinite": np.array(cache.nonfinite, np.int64)
    }
