"""The cache of keys in a simulator: rows in, and what stands in memory afterwards out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvant.hw.kvcache.layouts import Table
from kvant.hw.kvcache.page import PageLayout
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.spatial import SpatialCache, key_input
from kvant.sim.kvcache.page_writes import StoredGroup, Writes, page_writes
from kvant.sim.kvcache.pages import PageMemory
from kvant.sim.kvcache.tables import channel_writes, choice_writes
from kvant.sim.simulate import simulate
from kvant.sim.streams import Stimulus, Trace
from kvant.sim.words import pack_words, unpack_words

STATUS = ("nonfinite", "error", "busy_cycles", "busy")


@dataclass(frozen=True)
class KeyTables:
    """Tables of a head: coefficients and thresholds, f16 [d] mean where the cache is centred."""

    coefficients: Sequence[int]
    thresholds: Sequence[int]
    mean: np.ndarray | None = None


@dataclass(frozen=True)
class KeyVector:
    """A row at the port."""

    values: np.ndarray  # f16 [d]
    head: int = 0
    start: bool = False
    flush: bool = False


@dataclass(frozen=True)
class Placed:
    """A row's place: sink or not, position in its sequence, page, and its number in the page."""

    row: KeyVector
    position: int
    page: int
    sink: bool


def place_rows(p: CacheParameters, rows: Iterable[KeyVector]) -> list[Placed]:
    """Where the rows of sequences go, none of which is longer than the cache (without `evict`)."""
    positions: dict[int, int] = {}
    placed = []
    for row in rows:
        position = 0 if row.start else positions[row.head] + 1
        positions[row.head] = position
        placed.append(Placed(row, position, position // p.group % p.windows, position < p.sinks))
    return placed


def sequence(k: np.ndarray, *, head: int = 0) -> list[KeyVector]:
    """The rows of a sequence k f16 [T, d], the memory being up to date after the last one."""
    return [KeyVector(row, head, start=t == 0, flush=t == len(k) - 1) for t, row in enumerate(k)]


def table_writes(tables: Mapping[int, KeyTables]) -> list[int]:
    """Transfers of `cfg` for the tables of heads."""
    writes = []
    for head, table in tables.items():
        writes += choice_writes(head, table.coefficients, table.thresholds)
        if table.mean is not None:
            writes += channel_writes(Table.MEAN, head, table.mean)
    return writes


def row_words(p: CacheParameters, rows: Sequence[KeyVector]) -> dict[str, list[int]]:
    """Transfers of `k`. Lanes past a row's end, and `user` after a row's first transfer, hold what must not count."""
    fill = -p.head_dim % p.lanes
    elements = np.stack([np.asarray(row.values, np.float16) for row in rows]).view(np.uint16)
    elements = np.pad(elements, ((0, 0), (0, fill)), constant_values=0x7E00).reshape(-1, p.lanes)
    offsets = {name: field.offset for name, field in key_input(p)["user"].shape}
    users = []
    for row in rows:
        user = {"start": int(row.start), "flush": int(row.flush), "head": row.head}
        word = sum(value << offsets[name] for name, value in user.items())
        users += [word] + [word ^ ((1 << key_input(p)["user"].width) - 1)] * (p.row_transfers - 1)
    return {"data": pack_words(elements, 16), "user": users}


def writes_of(p: CacheParameters, rows: Sequence[Placed], codes, scale, coefficient, *, word_bits: int) -> Writes:
    """The page writes of rows whose groups are known: codes u8 [T, d], scale f16 and coefficient u8 [T, d/G]."""
    scale = np.ascontiguousarray(scale).view(np.uint16)
    groups = []
    for t, placed in enumerate(rows):
        in_page = placed.position % p.group
        for g in range(p.row_groups):
            row_end = g == p.row_groups - 1
            groups.append(
                StoredGroup(
                    codes=codes[t, g * p.group : (g + 1) * p.group],
                    scale=int(scale[t, g]),
                    coefficient=int(coefficient[t, g]),
                    page=placed.page,
                    head=placed.row.head,
                    timestamp=placed.position - in_page,
                    place=in_page * p.row_groups + g,
                    page_end=row_end and in_page == p.group - 1,
                    flush=row_end and placed.row.flush,
                )
            )
    return page_writes(page_layout(p), word_bits, groups)


def page_layout(p: CacheParameters) -> PageLayout:
    """Layout of a page of keys along the head."""
    return PageLayout(p.model_copy(update={"offset": False, "shared_coeff": False}), p.group * p.row_groups)


def stimulus(p: CacheParameters, rows: Sequence[KeyVector], tables: Mapping[int, KeyTables], *, word_bits: int):
    """Tables, then the rows, as transfers."""
    placed = place_rows(p, rows)
    nothing = np.zeros((len(rows), p.head_dim), np.uint8), np.zeros((len(rows), p.row_groups), np.float16)
    writes = writes_of(p, placed, nothing[0], nothing[1], nothing[1].astype(np.uint8), word_bits=word_bits)
    cfg = table_writes(tables)
    return Stimulus(
        inputs={"cfg": {"data": cfg}, "k": row_words(p, rows)},
        expect={
            "codes": len(writes.codes["data"]),
            "meta": len(writes.meta["data"]),
            "sink": p.row_transfers * sum(one.sink for one in placed),
        },
        status=STATUS,
        after={"k": ("cfg", len(cfg))} if cfg else {},
    )


def play(
    p: CacheParameters,
    rows: Sequence[KeyVector],
    tables: Mapping[int, KeyTables],
    *,
    name: str = "kcache",
    **options,
) -> Trace:
    """Rows through the simulated RTL; *options* are those of `kvant.sim.simulate.simulate`."""
    cache = SpatialCache(p)
    play_this = stimulus(p, rows, tables, word_bits=cache.word_bits)
    made = [cache]
    return simulate(lambda: made.pop() if made else SpatialCache(p), name, play_this, **options)


def memory_of(p: CacheParameters, trace: Trace) -> PageMemory:
    """The memory of all pages after a run, filled with 0xFF before."""
    memory = PageMemory(page_layout(p), p.heads, p.windows)
    for stream in ("codes", "meta"):
        memory.apply(trace.transfers[stream])
    return memory


def read_sequence(p: CacheParameters, memory: PageMemory, tokens: int, *, head: int = 0) -> dict[str, np.ndarray]:
    """``codes`` u8 [T, d], ``scale`` f16 and ``coeff`` u8 [T, d/G] of a sequence's first *tokens* rows in memory."""
    codes, scale, coefficient = [], [], []
    for first in range(0, tokens, p.group):
        held = min(p.group, tokens - first)
        page = memory.read(head, first // p.group, held * p.row_groups)
        codes.append(page.codes.reshape(held, -1)[:, : p.head_dim])
        scale.append(page.scale.reshape(held, -1))
        coefficient.append(page.coefficient.reshape(held, -1))
    return {"codes": np.concatenate(codes), "scale": np.concatenate(scale), "coeff": np.concatenate(coefficient)}


def read_sinks(p: CacheParameters, trace: Trace, *, head: int = 0) -> dict[str, np.ndarray]:
    """``sink`` i8 [n, d] and ``sink_scale`` f16 [n, d/G] of the sink rows of a head, as they came out."""
    transfers = trace.transfers["sink"]
    words = unpack_words(transfers["data"], p.lanes, 8, signed=True).astype(np.int8)
    users = np.array(transfers["user"], np.int64)
    mine = users >> 16 == head
    elements = words[mine].reshape(-1, p.row_transfers * p.lanes)[:, : p.head_dim]
    scales = users[mine].astype(np.uint16).view(np.float16).reshape(-1, p.row_transfers)
    return {"sink": elements, "sink_scale": np.ascontiguousarray(scales[:, :: p.group_transfers])}


def run(
    p: CacheParameters, k: np.ndarray, tables: KeyTables, *, name: str = "kcache", **options
) -> dict[str, np.ndarray]:
    """One sequence through the simulated RTL.

    Parameters
    ----------
    p : CacheParameters
    k : f16 [T, d]
    tables : KeyTables
    name, options
        See `kvant.sim.simulate.simulate`.

    Returns
    -------
    dict
        ``codes``, ``scale``, ``coeff`` as read back from memory, ``sink``, ``sink_scale``; 0-d i64 ``cycles`` from the
        first transfer of a row to the last of an output, ``busy_cycles``, ``nonfinite``, ``error``.
    """
    trace = play(p, sequence(k), {0: tables}, name=name, design_key=("kcache", p), **options)
    return collect(p, trace, len(k))


def collect(p: CacheParameters, trace: Trace, tokens: int) -> dict[str, np.ndarray]:
    """The arrays of one sequence of head 0 in a trace."""
    ends = [trace.cycles[name][-1] for name in ("codes", "meta", "sink") if trace.cycles[name]]
    numbers = {"cycles": max(ends) - trace.cycles["k"][0] + 1}
    numbers |= {name: trace.status[name] for name in ("busy_cycles", "nonfinite", "error")}
    arrays = read_sequence(p, memory_of(p, trace), tokens) | read_sinks(p, trace)
    return arrays | {name: np.array(value, np.int64) for name, value in numbers.items()}


def expected(
    p: CacheParameters, rows: Sequence[Placed], arrays: Mapping[str, np.ndarray], *, word_bits: int
) -> dict[str, dict[str, list[int]]]:
    """Transfers of the output streams: the inverse of `collect`.

    Parameters
    ----------
    p : CacheParameters
    rows : sequence of Placed
        Of any heads.
    arrays : dict
        ``codes`` u8 [T, d], ``scale`` f16, ``coeff`` u8 [T, d/G] of all rows in their order; ``sink`` i8 [n, d],
        ``sink_scale`` f16 [n, d/G] of those of them that are sinks.
    word_bits : int
        Of `SpatialCache`.
    """
    writes = writes_of(p, rows, arrays["codes"], arrays["scale"], arrays["coeff"], word_bits=word_bits)
    heads = np.array([placed.row.head for placed in rows if placed.sink], np.int64)
    words = np.pad(arrays["sink"], ((0, 0), (0, -p.head_dim % p.lanes))).reshape(-1, p.lanes)
    scales = np.ascontiguousarray(arrays["sink_scale"]).view(np.uint16).astype(np.int64) | heads[:, None] << 16
    sink = {
        "data": pack_words(words, 8) if len(words) else [],
        "user": np.repeat(scales, p.group_transfers, axis=1)[:, : p.row_transfers].reshape(-1).tolist(),
        "last": ([0] * (p.row_transfers - 1) + [1]) * len(heads),
    }
    return {"codes": writes.codes, "meta": writes.meta, "sink": sink}
