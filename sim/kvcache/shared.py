"""Keys and values through one requantiser in a simulator: stimulus, and what a key's window has to wait for."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvant.hw.kvcache.layouts import PageAddress
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.shared import unit_parameters
from kvant.sim.kvcache.requantizer import Row, row_transfers, rows_stimulus
from kvant.sim.streams import Stimulus, Trace

STATUS = ("nonfinite", "error", "full", "saturated", "k_stall_cycles", "v_stall_cycles", "busy_cycles")
"""Plain outputs that every simulation reads at its end."""


def stimulus(
    p: CacheParameters,
    keys: Sequence[Row],
    values: Sequence[Row],
    tables: Sequence[int],
    *,
    windows: int,
    sinks: int = 0,
    peeks: Sequence[tuple[int, int]] = (),
) -> Stimulus:
    """Tables, then rows of keys and of values beside each other, then requests for staged rows.

    Heads count from 0 in *keys* and in *values*; those of the tables and requests are the unit's.
    """
    plain = rows_stimulus(unit_parameters(p), [], tables, windows=windows, sinks=sinks, peeks=peeks)
    ports = {"k": row_transfers(p, keys), "v": row_transfers(p, values)}
    last = "v" if values else "k"
    return replace(
        plain,
        inputs={"cfg": plain.inputs["cfg"], "peek": plain.inputs["peek"], **ports},
        status=STATUS,
        after={"k": ("cfg", len(tables)), "v": ("cfg", len(tables)), "peek": (last, len(ports[last]["data"]))},
    )


def paced(p: CacheParameters, tables: Sequence[int], period: int) -> list[int]:
    """Pauses of a port on which a row comes every *period* cycles, without a pause in it, once the tables are there.

    A row that has begun keeps the unit: pauses in it would be those of the other port too.
    """
    begin = 1 + len(tables) + p.row_transfers  # tables take a cycle each, from the second one after reset on
    row = {(begin + transfer) % period for transfer in range(p.row_transfers)}
    return [int(cycle not in row) for cycle in range(period)]


def window_latencies(p: CacheParameters, trace: Trace, keys: Sequence[Row]) -> np.ndarray:
    """Cycles from the last transfer of every window of keys to the last write of its page, in the order of *keys*."""
    taken = trace.cycles["k"][p.row_transfers - 1 :: p.row_transfers]
    closed, staged = {}, {}
    for row, cycle in zip(keys, taken, strict=True):
        if row.start:
            staged[row.head] = 0
        if not row.scan:
            staged[row.head] += 1
            if staged[row.head] % p.group == 0:
                closed[row.head, staged[row.head] - p.group] = cycle
    written = {}
    for port in ("codes", "meta"):
        transfers = trace.transfers[port]
        for user, last, cycle in zip(transfers["user"], transfers["last"], trace.cycles[port], strict=True):
            where = PageAddress().from_bits(user)
            if last:
                written[where.head, where.timestamp] = cycle
    return np.array([written[window] - cycle for window, cycle in closed.items()])
