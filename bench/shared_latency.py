"""What keys wait for where they share a unit with values: simulated RTL, with and without a load of values.

``python bench/shared_latency.py [--set FIELD=VALUE ...] [--windows N] [--simulator NAME]``
"""

import argparse

import numpy as np
from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import wiring

from kvant import config
from kvant.hw.kvcache.shared import SharedCache, unit_parameters
from kvant.sim.kvcache import requantizer as cache_sim
from kvant.sim.kvcache import shared as sim
from kvant.sim.simulate import simulate
from kvant.vcache import random_values

PREFILL = 8
SEED = 0
RATE = 8
"""A row of keys comes in the time of about this many rows; so does one of values, where they are paced."""


class PacedCache(wiring.Component):
    """A `SharedCache` whose rows may begin every *k_period* and *v_period* cycles only (1: at once).

    A row waits as a whole, so that the unit is not kept by one that has begun.
    """

    def __init__(self, p, k_period, v_period):
        self.p, self.periods = p, {"k": k_period, "v": v_period}
        self.cache = SharedCache(p)
        super().__init__(self.cache.signature)

    def elaborate(self, platform):
        m = Module()
        m.submodules.cache = cache = self.cache
        for name, member in self.signature.members.items():
            if name in self.periods:
                self._pace(m, getattr(self, name), getattr(cache, name), self.periods[name])
            elif member.is_signature:
                ends = (getattr(cache, name), getattr(self, name))
                if member.flow == wiring.In:
                    wiring.connect(m, wiring.flipped(ends[1]), ends[0])
                else:
                    wiring.connect(m, ends[0], wiring.flipped(ends[1]))
            else:
                m.d.comb += getattr(self, name).eq(getattr(cache, name))
        return m

    def _pace(self, m, source, sink, period):
        transfer, count, due = Signal(range(self.p.row_transfers + 1)), Signal(range(period + 1)), Signal()
        opened = Signal()
        m.d.comb += [
            opened.eq((transfer != 0) | due),
            sink.valid.eq(source.valid & opened),
            sink.payload.eq(source.payload),
            source.ready.eq(sink.ready & opened),
        ]
        m.d.sync += count.eq(Mux(count == period - 1, 0, count + 1))
        with m.If(sink.valid & sink.ready):
            m.d.sync += transfer.eq(Mux(transfer == self.p.row_transfers - 1, 0, transfer + 1))
            with m.If(transfer == 0):
                m.d.sync += due.eq(0)
        with m.If(count == period - 1):
            m.d.sync += due.eq(1)


def main():
    """Print the mean wait of a key's row at the port, and the cycles from a window's last row to its page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="overrides")
    parser.add_argument("--windows", type=int, default=3, help="windows of keys of each head")
    parser.add_argument("--simulator", default="verilator")
    options = parser.parse_args()
    p = config.load(None, ["heads=2", "offset=true", "shared_coeff=true", *options.overrides]).cache
    unit = unit_parameters(p)
    tokens = options.windows * p.group
    given = {
        "coeffs": np.arange(0, 128, 8, dtype=np.uint8),
        "thresholds": np.linspace(400, 17000, 15).astype(np.uint16),
    }
    tables = [write for head in range(unit.heads) for write in cache_sim.table_writes(unit, given, heads=[head])]
    period = RATE * p.row_transfers + 3  # no multiple: values begin at any time before a key comes
    loads = {"none": (0, 1), "paced": (tokens, period), "without a pause": (RATE * tokens, 1)}

    print(
        f"{p.heads} + {p.heads} heads, d = {p.head_dim}, G = {p.group}, P = {p.lanes}; a row takes {p.row_transfers} "
        f"cycles, a window {p.head_dim * p.group_transfers}; a row of keys every {period} cycles; seed {SEED}"
    )
    print("values           | a key waits at the port, mean | its window is in memory after: least, mean, most cycles")
    for name, (value_tokens, value_period) in loads.items():
        keys, values = (in_turn(p, count, seed) for count, seed in ((tokens, SEED), (value_tokens, SEED + 1)))
        trace = simulate(
            lambda value_period=value_period: PacedCache(p, period, value_period),
            "paced_cache",
            sim.stimulus(p, keys, values, tables, windows=p.heads * (tokens + value_tokens) // p.group),
            simulator=options.simulator,
        )
        latency = sim.window_latencies(p, trace, keys)
        wait = trace.status["k_stall_cycles"] / len(keys)
        print(f"{name:16} | {wait:29.2f} | {latency.min():6} {latency.mean():8.1f} {latency.max():6}", flush=True)


def in_turn(p, tokens, seed):
    """Rows of *tokens* of every head, the heads in turn."""
    if not tokens:
        return []
    v = random_values(p.heads, tokens, p.head_dim, seed=seed)
    rows = [cache_sim.sequence_rows(v[head], PREFILL, head) for head in range(p.heads)]
    return [row for turn in zip(*rows, strict=True) for row in turn]


if __name__ == "__main__":
    main()
