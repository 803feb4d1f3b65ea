"""The caches of the demo: real keys and values through the simulated RTL, beside 4-bit integers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvant.errors import InputError

if TYPE_CHECKING:
    from kvant.cache_arrays import Table
    from kvant.config import Config
    from kvant.sim.streams import Trace

LAYER = 20
HEAD = 0
"""Layer and key-value head of the committed slice that are shown."""

PREFILL = 64
"""Tokens of the first call; they also give the mean of the keys and the floors, so that most tokens are held out."""

FLOOR_MARGIN = 1.5
"""Room that the floors leave above the largest magnitudes of the first call."""

SINKS = 4
"""First tokens that stay INT8."""

OPEN_TOKENS = 16
"""Tokens of the slice that are left out, so that a window stays open."""


@dataclass(frozen=True)
class CacheRun:
    """A cache that the RTL filled.

    Attributes
    ----------
    label : str
    bits : float
        Bits per element of a full page, all metadata counted.
    error : float
        Root of squared error over squared rows.
    rows : f32 [T, d]
        What the cache holds, in the units of the original rows.
    cycles_per_row : float
        Cycles over tokens; a prefill along time passes twice.
    stalls : int
        Cycles in which a row was offered and not taken.
    values : int
        Numbers that were compared with the golden model.
    arrays : dict
        What came out.
    """

    label: str
    bits: float
    error: float
    rows: np.ndarray
    cycles_per_row: float
    stalls: int
    values: int
    arrays: dict[str, np.ndarray]


@dataclass(frozen=True)
class CacheDemo:
    """What the demo shows of the caches.

    Attributes
    ----------
    runs : list of CacheRun
        Keys along the head, keys along time, values along time.
    integers : dict of str to (float, float)
        Bits and error of 4-bit integers on the same rows, by label.
    keys, values : f16 [T, d]
    trace : Trace
        Of the values.
    group : int
    """

    runs: list[CacheRun]
    integers: dict[str, tuple[float, float]]
    keys: np.ndarray
    values: np.ndarray
    trace: "Trace"
    group: int


def cache_config(chosen: "Config", head_dim: int, **options: bool) -> "Config":
    """*chosen* for the demo's rows.

    Raises
    ------
    InputError
        No cache can be built of it.
    """
    from kvant import cache_arrays, config

    fields = {name: value for name, value in chosen.as_dict().items() if value is not None}
    fields |= {"head_dim": head_dim, "heads": 1, "sinks": SINKS, "capacity": None, **options}
    chosen = config.compose([("demo", fields)])
    cache_arrays.check_cache(chosen)
    return chosen


@dataclass(frozen=True)
class Calibrated:
    """Tables fitted on the other heads of the layer, mean and floors of the first call of the head shown.

    Attributes
    ----------
    tables : dict of str to Table
        By the kind of cache, see `kvant.golden.kvcache.calibration.KINDS`.
    mean, key_floor, value_floor : f16 [d]
    """

    tables: dict[str, "Table"]
    mean: np.ndarray
    key_floor: np.ndarray
    value_floor: np.ndarray


def calibrate(chosen: "Config") -> Calibrated:
    """Tables, mean and floors for the head shown."""
    import torch

    from kvant.cache_arrays import Table
    from kvant.golden.kvcache.calibration import CacheCalibrator
    from kvant.golden.models import slice as model_slice
    from kvant.golden.numeric.codes import LINEAR

    attention = model_slice.load().attention[LAYER]
    p = chosen.cache
    kinds = ("key_head", "key_time", "value_time")
    calibrator = CacheCalibrator(
        group=p.group,
        sinks=SINKS,
        statistic=p.statistic,
        kinds=kinds,
        candidates=(*range(p.max_coefficient + 1), LINEAR),
    )
    observer = calibrator.observer()
    others = [head for head in range(len(attention.keys)) if head != HEAD]
    observer.keys = torch.from_numpy(attention.keys[others].copy())
    observer.values = torch.from_numpy(attention.values[others].copy())
    calibrator.add([observer])
    found = calibrator.result().tables
    tables = {
        kind: Table(tuple(found[kind].coefficients[0].tolist()), tuple(found[kind].thresholds[0].tolist()))
        for kind in kinds
    }
    keys, values = (rows[HEAD, SINKS:PREFILL].astype(np.float32) for rows in (attention.keys, attention.values))
    mean = keys.mean(0).astype(np.float16)
    floors = [
        (FLOOR_MARGIN * np.abs(rows).max(0)).astype(np.float16) for rows in (keys - mean.astype(np.float32), values)
    ]
    return Calibrated(tables, mean, *floors)


def real_rows() -> tuple[np.ndarray, np.ndarray]:
    """Keys and values f16 [T, d] of the head shown."""
    from kvant.golden.models import slice as model_slice

    attention = model_slice.load().attention[LAYER]
    tokens = attention.keys.shape[1] - OPEN_TOKENS
    return attention.keys[HEAD, :tokens].copy(), attention.values[HEAD, :tokens].copy()


def run_caches(chosen: "Config", simulator: str, progress: Callable[[str], None]) -> CacheDemo:
    """Keys and values of the demo through the RTL of both caches, compared bit for bit with the golden model.

    *progress* is told of every run that is done.

    Raises
    ------
    InputError
        See `cache_config`.
    ComparisonError
        If an output of the RTL differs from the golden model.
    """
    keys, values = real_rows()
    found = calibrate(chosen)
    runs = [_keys_along_the_head(chosen, keys, found, simulator)]
    progress(runs[-1].label)
    options = {"centred": True, "offset": True, "shared_coeff": True}
    arrays = {"table": found.tables["key_time"], "floor": found.key_floor, "mean": found.mean}
    run, _ = _along_time(cache_config(chosen, keys.shape[1], **options), "keys, along time", keys, simulator, **arrays)
    runs.append(run)
    progress(runs[-1].label)
    options = dict.fromkeys(options, False)
    arrays = {"table": found.tables["value_time"], "floor": found.value_floor}
    label = "values, along time"
    run, trace = _along_time(cache_config(chosen, values.shape[1], **options), label, values, simulator, **arrays)
    runs.append(run)
    progress(runs[-1].label)
    return CacheDemo(runs, _integers(keys, values, chosen.linear.group), keys, values, trace, chosen.linear.group)


def _keys_along_the_head(chosen: "Config", keys: np.ndarray, found: Calibrated, simulator: str) -> CacheRun:
    import torch

    from kvant.golden.kvcache.spatial import SpatialCache
    from kvant.hw.kvcache.page import PageLayout
    from kvant.kcache import golden_outputs
    from kvant.sim.kvcache import spatial
    from kvant.simulated import compare

    chosen = cache_config(chosen, keys.shape[1], centred=True)
    p = chosen.cache
    table = found.tables["key_head"]
    tables = spatial.KeyTables(table.coefficients, table.thresholds, found.mean)
    result = spatial.run(p, keys, tables, simulator=simulator)
    compare(golden_outputs(p, keys, tables), result)
    parts = {name: torch.from_numpy(result[name]) for name in ("codes", "scale", "coeff", "sink", "sink_scale")}
    cache = SpatialCache(coefficient=parts.pop("coeff"), nonfinite=False, group=p.group, **parts)
    rows = cache.dequantize().numpy() + found.mean.astype(np.float32)
    page = PageLayout(p, p.group * p.row_groups)
    return _cache_run("keys, along the head", result, rows, keys, 8 * page.page_bytes / (p.group * p.head_dim))


def _along_time(
    chosen: "Config",
    label: str,
    rows: np.ndarray,
    simulator: str,
    *,
    table: "Table",
    floor: np.ndarray,
    mean: np.ndarray | None = None,
) -> tuple[CacheRun, "Trace"]:
    import torch

    from kvant import vcache
    from kvant.golden.kvcache.temporal import TemporalCache
    from kvant.hw.kvcache.page import PageLayout
    from kvant.sim.kvcache import requantizer
    from kvant.simulated import compare

    p = chosen.cache
    arrays = vcache.case(p, rows, [PREFILL, len(rows) - PREFILL], table, floor=floor, mean=mean)
    result, trace = requantizer.play(p, arrays, simulator=simulator, design_key=p)
    compare(vcache.golden_outputs(p, arrays), result)
    names = ("codes", "scale", "coeff", "offset", "staged", "staged_scale", "sink", "sink_scale", "saturated")
    parts = {name: torch.from_numpy(np.array(result[name])) for name in names}
    cache = TemporalCache(coefficient=parts.pop("coeff"), nonfinite=False, group=p.group, **parts)
    held = cache.dequantize().numpy() + (0 if mean is None else mean.astype(np.float32))
    page = PageLayout(p, p.head_dim)
    return _cache_run(label, result, held, rows, 8 * page.page_bytes / (p.group * p.head_dim)), trace


def _cache_run(label: str, arrays: dict[str, np.ndarray], held: np.ndarray, rows: np.ndarray, bits: float) -> CacheRun:
    compared = ("codes", "scale", "coeff", "offset", "staged", "staged_scale", "sink", "sink_scale")
    return CacheRun(
        label=label,
        bits=bits,
        error=_error(held, rows),
        rows=held,
        cycles_per_row=int(arrays["cycles"]) / len(rows),
        stalls=int(arrays.get("stall_cycles", 0)),
        values=sum(arrays[name].size for name in compared if name in arrays),
        arrays=arrays,
    )


def _integers(keys: np.ndarray, values: np.ndarray, group: int) -> dict[str, tuple[float, float]]:
    """Bits and error of integer groups under the rules of the caches: the same sinks, an open window of INT8."""
    import torch

    from kvant.golden.formats.baselines import INT4, INT4_ASYMMETRIC
    from kvant.golden.kvcache.attention import Int8Head
    from kvant.golden.kvcache.baselines import GroupedStore

    fresh = Int8Head(group)
    stores = {
        "along the head: INT4": GroupedStore(INT4, group, False, fresh, SINKS),
        "along time: INT4 with zero point": GroupedStore(INT4_ASYMMETRIC, group, True, fresh, SINKS, group),
    }
    result = {}
    for name, rows in (("keys", keys), ("values", values)):
        for label, store in stores.items():
            held = store.view(LAYER, torch.from_numpy(rows.astype(np.float32))).finished.numpy()
            result[f"{name}, {label}"] = store.footprint(rows.shape[1]).history, _error(held, rows)
    return result


def _error(held: np.ndarray, rows: np.ndarray) -> float:
    exact = rows.astype(np.float64)
    return float(np.linalg.norm(held - exact) / np.linalg.norm(exact))


def write_tensors(folder: Path, demo: CacheDemo) -> None:
    """Keep keys, values and what came out."""
    names = ("keys_along_head", "keys_along_time", "values_along_time")
    np.savez_compressed(folder / "cache_in.npz", keys=demo.keys, values=demo.values)
    for name, run in zip(names, demo.runs, strict=True):
        np.savez_compressed(folder / f"{name}.npz", **run.arrays)


def skip_reason(chosen: "Config") -> str | None:
    """Why no cache can be built of a configuration, in one line; None if one can."""
    keys, _ = real_rows()
    try:
        cache_config(chosen, keys.shape[1])
    except InputError as error:
        return str(error)
    return None
