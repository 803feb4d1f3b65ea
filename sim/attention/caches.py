"""Caches of several heads in a simulator: keys and values in, what the attention engine reads out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvant.hw.kvcache.page import PageLayout
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.requantizer import Requantizer
from kvant.sim.attention.contents import Int8Rows, MantKeys, MantValues, TimeKeys
from kvant.sim.kvcache import requantizer, spatial
from kvant.sim.kvcache.pages import PageMemory
from kvant.sim.simulate import simulate

INT8_SEQUENCE = 256
"""Rows of a sequence whose rows all are sinks: the most that a cache can have."""


@dataclass(frozen=True)
class Written:
    """What a cache gave for each head, and its flags."""

    heads: list
    nonfinite: int
    error: int


def mant_keys(p: CacheParameters, k: np.ndarray, tables: Mapping[int, spatial.KeyTables], **options) -> Written:
    """Keys f16 [H, T, d] through the simulated cache along the head; a `MantKeys` for each head.

    Parameters
    ----------
    p : CacheParameters
        With H heads.
    k : f16 [H, T, d]
    tables : dict
        Of every head.
    options
        See `kvant.sim.simulate.simulate`.
    """
    rows = [row for head, sequence in enumerate(k) for row in spatial.sequence(sequence, head=head)]
    trace = spatial.play(p, rows, tables, design_key=("kcache", p), **options)
    memory = spatial.memory_of(p, trace)
    heads = [
        MantKeys(
            pages=_pages(memory, head, -(-k.shape[1] // p.group)),
            sinks=_sinks(spatial.read_sinks(p, trace, head=head)),
        )
        for head in range(len(k))
    ]
    return _written(heads, trace)


def int8_rows(p: CacheParameters, x: np.ndarray, means: Sequence[np.ndarray] | None = None, **options) -> Written:
    """Rows f16 [H, T, d] as INT8 groups along the head, as a cache makes them of its sinks; `Int8Rows` for each head.

    Parameters
    ----------
    p : CacheParameters
        With H heads.
    x : f16 [H, T, d]
    means : sequence of f16 [d], optional
        Of every head, where the rows are centred.
    options
        See `kvant.sim.simulate.simulate`.
    """
    capacity = -(-INT8_SEQUENCE // p.group) * p.group
    p = p.model_copy(update={"sinks": INT8_SEQUENCE, "capacity": capacity, "centred": means is not None})
    tables = {h: spatial.KeyTables([0], [], None if means is None else means[h]) for h in range(len(x))}
    rows = [
        row
        for head, sequence in enumerate(x)
        for first in range(0, len(sequence), INT8_SEQUENCE)
        for row in spatial.sequence(sequence[first : first + INT8_SEQUENCE], head=head)
    ]
    trace = spatial.play(p, rows, tables, name="int8_rows", design_key=("kcache", p), **options)
    return _written([_sinks(spatial.read_sinks(p, trace, head=head)) for head in range(len(x))], trace)


def mant_values(p: CacheParameters, heads: Sequence[Mapping[str, np.ndarray]], **options) -> Written:
    """Values through the simulated cache along time, all tokens being the prefill; a `MantValues` for each head.

    Parameters
    ----------
    p : CacheParameters
        With as many heads.
    heads : sequence of dict
        As `kvant.sim.kvcache.requantizer.run` takes them, of equally many tokens.
    options
        See `kvant.sim.simulate.simulate`.
    """
    return _along_time(p, heads, MantValues, **options)


def time_keys(p: CacheParameters, heads: Sequence[Mapping[str, np.ndarray]], **options) -> Written:
    """Keys through the simulated cache along time, as `mant_values`; a `TimeKeys` for each head.

    *p* has `offset` and `shared_coeff`, and is `centred` if the arrays have a mean.
    """
    return _along_time(p, heads, TimeKeys, **options)


def _along_time(
    p: CacheParameters, heads: Sequence[Mapping[str, np.ndarray]], kind: type[MantValues | TimeKeys], **options
) -> Written:
    tokens = len(heads[0]["v"])
    windows, staged = divmod(tokens, p.group)
    rows, tables, peeks = [], [], []
    for head, arrays in enumerate(heads):
        tables += requantizer.table_writes(p, arrays, heads=[head])
        rows += requantizer.sequence_rows(arrays["v"], tokens, head)
        peeks += [(head, row) for row in range(max(1, staged))]  # the scales come along with a row
    stimulus = requantizer.rows_stimulus(
        p,
        rows,
        tables,
        windows=len(heads) * windows,
        sinks=len(heads) * min(p.sinks, tokens),
        peeks=peeks,
    )
    trace = simulate(lambda: Requantizer(p), "vcache", stimulus, design_key=p, **options)
    memory = PageMemory(PageLayout(p, p.head_dim), p.heads, p.windows)
    for stream in ("codes", "meta"):
        memory.apply(trace.transfers[stream])
    elements, scales = (part.reshape(len(heads), -1, p.head_dim) for part in requantizer.staged_rows(p, trace))
    sinks = requantizer.sink_rows(p, trace)
    written = [
        kind(_pages(memory, head, windows), elements[head, :staged], scales[head, 0], Int8Rows(*sinks[head]))
        for head in range(len(heads))
    ]
    return _written(written, trace)


def _pages(memory: PageMemory, head: int, count: int) -> list[bytes]:
    return [bytes(memory.pages[head, slot]) for slot in range(count)]


def _sinks(arrays: Mapping[str, np.ndarray]) -> Int8Rows:
    return Int8Rows(arrays["sink"], arrays["sink_scale"])


def _written(heads: list, trace) -> Written:
    return Written(heads, trace.status["nonfinite"], trace.status["error"])
