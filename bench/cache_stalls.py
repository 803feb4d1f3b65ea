"""Cycles per row and stall cycles of the caches: rows back to back through the simulated RTL.

``python bench/cache_stalls.py [--lanes P ...] [--windows N] [--heads H] [--set FIELD=VALUE ...]``
"""

import argparse
import time

import numpy as np

from kvant import config, kcache, vcache
from kvant.cache_arrays import Table
from kvant.hw.kvcache.requantizer import Requantizer
from kvant.sim.kvcache import requantizer, spatial
from kvant.sim.simulate import simulate

LANES = [4, 8, 16, 32]
SEED = 0


def time_rows(cycles: list[int], rows: int) -> tuple[float, int]:
    """Cycles per row, and cycles in which no transfer came, between the first and the last transfer."""
    taken = cycles[-1] - cycles[0] + 1
    return taken / rows, taken - len(cycles)


def along_time(chosen: config.Config, tokens: int) -> tuple[float, int, int]:
    """Cycles per row, pauses and the counter of stall cycles of `vcache`, heads in turn."""
    p = chosen.cache
    values = vcache.random_values(p.heads, tokens, p.head_dim, seed=SEED)
    prefill = min(tokens, p.group // 2)
    tables, sequences = [], []
    for head in range(p.heads):
        arrays = vcache.bench_arrays(chosen, values[head], prefill, seed=SEED)
        tables += requantizer.table_writes(p, arrays, heads=[head])
        sequences.append(requantizer.sequence_rows(values[head], prefill, head))
    rows = [row for turn in zip(*sequences, strict=True) for row in turn]
    stimulus = requantizer.rows_stimulus(
        p, rows, tables, windows=p.heads * (tokens // p.group), sinks=p.heads * min(p.sinks, tokens)
    )
    trace = simulate(lambda: Requantizer(p), "vcache", stimulus, design_key=p)
    return *time_rows(trace.cycles["v"], len(rows)), trace.status["stall_cycles"]


def along_head(chosen: config.Config, tokens: int) -> tuple[float, int]:
    """Cycles per row and pauses of `kcache`, one head."""
    p = chosen.cache
    keys = kcache.random_keys(1, tokens, p.head_dim, seed=SEED)[0]
    table = Table(tuple(chosen.coefficients), tuple(chosen.thresholds))
    mean = np.zeros(p.head_dim, np.float16) if p.centred else None
    tables = {0: spatial.KeyTables(table.coefficients, table.thresholds, mean)}
    component = spatial.SpatialCache(p)
    stimulus = spatial.stimulus(p, spatial.sequence(keys), tables, word_bits=component.word_bits)
    trace = simulate(lambda: spatial.SpatialCache(p), "kcache", stimulus, design_key=p)
    return time_rows(trace.cycles["k"], tokens)


def main():
    """Print a line for each number of lanes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lanes", type=int, nargs="+", default=LANES)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--heads", type=int, default=1, help="heads of vcache that take turns")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="overrides")
    options = parser.parse_args()
    chosen = config.load(None, options.overrides)
    tokens = options.windows * chosen.cache.group
    print(f"G = {chosen.cache.group}, d = {chosen.cache.head_dim}, {tokens} tokens, {options.heads} heads, seed {SEED}")
    print("    P    d/P | vcache: cycles/row   pauses   stall cycles | kcache: cycles/row   pauses | seconds")
    for lanes in options.lanes:
        begin = time.perf_counter()
        own = [*options.overrides, f"lanes={lanes}"]
        per_row, pauses, stalls = along_time(config.load(None, [*own, f"heads={options.heads}"]), tokens)
        key_row, key_pauses = along_head(config.load(None, own), tokens)
        transfers = -(-chosen.cache.head_dim // lanes)
        print(
            f"{lanes:5} {transfers:6} | {per_row:18.3f} {pauses:8} {stalls:14} | {key_row:18.3f} {key_pauses:8}"
            f" | {time.perf_counter() - begin:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
