"""Caches of one layer as compiled models: rows in, what the attention engine reads in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from kvant.hw.emit import Design
from kvant.hw.kvcache.page import PageLayout
from kvant.hw.kvcache.parameters import BLOCK_GROUPS, CacheParameters
from kvant.hw.kvcache.requantizer import Requantizer
from kvant.hw.kvcache.spatial import SpatialCache, key_input
from kvant.sim.attention.caches import INT8_SEQUENCE
from kvant.sim.attention.contents import Int8Rows, MantKeys, MantValues
from kvant.sim.compiled.model import CompiledModel, StreamCount, records
from kvant.sim.compiled.transfers import HostPages, lanes_of, numbers, rows_of
from kvant.sim.errors import SimulationError
from kvant.sim.kvcache import requantizer, spatial
from kvant.sim.simulate import cached_design

TABLE_BITS = 48
_SCALE_BITS = 16


@dataclass(frozen=True)
class Appended:
    """What it took to cache the rows of a call: clock cycles, and bytes written to memory."""

    cycles: int
    written: int


@cache
def key_design(p: CacheParameters) -> Design:
    """The cache along the head, emitted."""
    return cached_design(lambda: SpatialCache(p), "kcache", ("kcache", p))


@cache
def value_design(p: CacheParameters) -> Design:
    """The cache along time, emitted."""
    return cached_design(lambda: Requantizer(p), "vcache", p)


def int8_parameters(p: CacheParameters) -> CacheParameters:
    """A cache along the head all of whose rows are sinks, of sequences as long as that allows."""
    capacity = -(-INT8_SEQUENCE // p.group) * p.group
    return p.model_copy(update={"sinks": INT8_SEQUENCE, "capacity": capacity, "centred": False})


def span(counts: dict[str, StreamCount]) -> int:
    """Cycles from the first transfer of a run to its last."""
    moved = [count for count in counts.values() if count.count]
    return max(count.last for count in moved) - min(count.first for count in moved) + 1


def check_error(model: CompiledModel, what: str) -> None:
    """Refuse to go on where *model* has raised its flag."""
    if model.read("error"):
        raise SimulationError(f"{what} raised its flag error: a row, a table or a request that it does not take")


class _Rows:
    """The port of rows of `SpatialCache`: sequences of heads, which grow together."""

    def __init__(self, p: CacheParameters, design: Design, tables: Sequence[spatial.KeyTables], options: dict):
        self.p, self.tokens = p, 0
        self.model = CompiledModel(design, **options)
        writes = spatial.table_writes(dict(enumerate(tables)))
        self.model.send("cfg", {"data": records(writes, TABLE_BITS)})
        self.model.run()
        self._places = {name: field.offset for name, field in key_input(p)["user"].shape}
        self._user_bits = key_input(p)["user"].width

    def send(self, x: np.ndarray, start: np.ndarray, flush: np.ndarray) -> None:
        """Rows f16 [H, n, d], head by head; bool [n] whether a row starts a sequence, and is flushed."""
        p, (heads, count, _) = self.p, x.shape
        head = np.repeat(np.arange(heads), count)
        user = np.tile(start, heads).astype(np.int64) << self._places["start"]
        user |= np.tile(flush, heads).astype(np.int64) << self._places["flush"]
        user |= head << self._places["head"]
        users = numbers(np.repeat(user, p.row_transfers), self._user_bits)
        self.model.send("k", {"data": lanes_of(x.reshape(-1, p.head_dim), p.lanes), "user": users})

    def receive_sinks(self, rows: int) -> dict[str, np.ndarray]:
        return self.model.receive("sink", rows * self.p.row_transfers)

    def sinks(self, fields: dict[str, np.ndarray], heads: int) -> tuple[np.ndarray, np.ndarray]:
        """Elements i8 [H, n, d] and scales f16 [H, n, ceil(d/G)] of rows that came out."""
        return _int8_rows(self.p, fields, heads)


def _int8_rows(p: CacheParameters, fields: dict[str, np.ndarray], heads: int) -> tuple[np.ndarray, np.ndarray]:
    q = rows_of(fields["data"], p.head_dim, p.lanes, np.int8).reshape(heads, -1, p.head_dim)
    scale = np.ascontiguousarray(fields["user"][:, : _SCALE_BITS // 8]).view(np.float16)
    return q, scale.reshape(heads, -1, p.row_transfers)[:, :, :: p.group_transfers]


class CompiledKeys:
    """M-ANT keys along the head of one layer.

    Parameters
    ----------
    p : CacheParameters
        With as many heads as the layer has.
    tables : sequence of KeyTables
        Of every head.
    options
        See `kvant.sim.compiled.model.CompiledModel`.
    """

    def __init__(self, p: CacheParameters, tables: Sequence[spatial.KeyTables], **options):
        design = key_design(p)
        self._rows = _Rows(p, design, tables, options)
        self.p = p
        self._layout = spatial.page_layout(p)
        self._word_bits = design.port(design.streams["codes"].fields["data"]).width
        self.memory = HostPages(self._layout, p.heads, p.windows)
        groups = p.row_groups
        self._sink = np.zeros((p.heads, 0, p.head_dim), np.int8), np.zeros((p.heads, 0, groups), np.float16)

    def close(self) -> None:
        """Free the model."""
        self._rows.model.close()

    def append(self, k: np.ndarray) -> Appended:
        """Cache keys f16 [H, n, d]; memory is up to date afterwards."""
        p, rows, model = self.p, self._rows, self._rows.model
        count = k.shape[1]
        position = rows.tokens + np.arange(count)
        flush = np.arange(count) == count - 1
        rows.send(k, position == 0, flush)
        codes = model.receive("codes", p.heads * count * p.row_groups * self._layout.code_words(self._word_bits))
        meta = model.receive("meta", p.heads * self._meta_words(position, flush))
        sinks = rows.receive_sinks(p.heads * int((position < p.sinks).sum()))
        counts = model.run()
        check_error(model, "the cache of keys")
        self._sink = tuple(np.concatenate(pair, 1) for pair in zip(self._sink, rows.sinks(sinks, p.heads), strict=True))
        rows.tokens += count
        written = self.memory.apply(codes) + self.memory.apply(meta)
        return Appended(span(counts), written + sum(part.size for part in sinks.values()))

    def _meta_words(self, position: np.ndarray, flush: np.ndarray) -> int:
        """Words of scales, coefficients and trailers that rows at these positions of a head are written with."""
        p = self.p
        ends = flush | (position % p.group == p.group - 1)  # the page is brought up to date
        place = (position % p.group)[:, None] * p.row_groups + np.arange(p.row_groups)
        full = place % BLOCK_GROUPS == BLOCK_GROUPS - 1
        full[:, -1] |= ends
        return int(full.sum()) * self._layout.block_meta_words + int(ends.sum())

    def contents(self, head: int) -> MantKeys:
        """What the engine reads of a head."""
        pages = -(-self._rows.tokens // self.p.group)
        return MantKeys([self.memory.pages[head, :pages].tobytes()], Int8Rows(*(part[head] for part in self._sink)))


class CompiledRows:
    """INT8 rows along the head of one layer, keys or values, as the cache of keys makes them of its sinks.

    Parameters
    ----------
    p : CacheParameters
        Of the caches beside; see `int8_parameters`.
    options
        See `kvant.sim.compiled.model.CompiledModel`.
    """

    def __init__(self, p: CacheParameters, **options):
        self.p = p = int8_parameters(p)
        self._rows = _Rows(p, key_design(p), [spatial.KeyTables([0], [])] * p.heads, options)
        for stream in ("codes", "meta"):  # of sinks there are none that count
            self._rows.model.discard(stream)
        self._held = np.zeros((p.heads, 0, p.head_dim), np.int8), np.zeros((p.heads, 0, p.row_groups), np.float16)

    def close(self) -> None:
        """Free the model."""
        self._rows.model.close()

    def append(self, x: np.ndarray) -> Appended:
        """Cache rows f16 [H, n, d]."""
        p, rows = self.p, self._rows
        taken, count = 0, x.shape[1]
        cycles = written = 0
        while taken < count:  # up to the end of a sequence at a time, for the rows of a head come behind each other
            begin = (rows.tokens + taken) % p.sinks
            part = x[:, taken : taken + p.sinks - begin]
            start = np.arange(part.shape[1]) + begin == 0
            rows.send(part, start, np.zeros(part.shape[1], bool))
            fields = rows.receive_sinks(p.heads * part.shape[1])
            cycles += span(rows.model.run())
            pairs = zip(self._held, rows.sinks(fields, p.heads), strict=True)
            self._held = tuple(np.concatenate(pair, 1) for pair in pairs)
            written += part.size + 2 * part.shape[0] * part.shape[1] * p.row_groups
            taken += part.shape[1]
        check_error(rows.model, "the cache of INT8 rows")
        rows.tokens += count
        return Appended(cycles, written)

    def contents(self, head: int) -> Int8Rows:
        """What the engine reads of a head."""
        return Int8Rows(*(part[head] for part in self._held))


class CompiledValues:
    """M-ANT values along time of one layer; the first call is the prefill.

    Parameters
    ----------
    p : CacheParameters
        With as many heads as the layer has.
    tables : sequence of dict
        Of every head ``coeffs``, ``thresholds`` and, where wanted, ``floor`` f16 [d].
    options
        See `kvant.sim.compiled.model.CompiledModel`.
    """

    def __init__(self, p: CacheParameters, tables: Sequence[dict[str, np.ndarray]], **options):
        self.p, self.tokens = p, 0
        self.model = CompiledModel(value_design(p), **options)
        writes = [
            write for head, arrays in enumerate(tables) for write in requantizer.table_writes(p, arrays, heads=[head])
        ]
        self.model.send("cfg", {"data": records(writes, TABLE_BITS)})
        self.model.run()
        self.memory = HostPages(PageLayout(p, p.head_dim), p.heads, p.windows)
        self._sink = np.zeros((p.heads, 0, p.head_dim), np.int8), np.zeros((p.heads, 0, p.row_groups), np.float16)
        self._staged = np.zeros((p.heads, 0, p.head_dim), np.int8)
        self._scale = np.zeros((p.heads, p.head_dim), np.float16)

    def close(self) -> None:
        """Free the model."""
        self.model.close()

    def append(self, v: np.ndarray) -> Appended:
        """Cache values f16 [H, n, d]."""
        p, model = self.p, self.model
        count = v.shape[1]
        rows, user = v, np.zeros(count, np.int64)
        if not self.tokens:  # a prefill comes twice, first to be scanned
            rows = np.concatenate((v, v), 1)
            user = np.where(np.arange(2 * count) < count, requantizer.SCAN, 0)
            user[0] |= requantizer.START
        heads = np.repeat(np.arange(p.heads), rows.shape[1]) << requantizer.HEAD_AT
        users = np.repeat(np.tile(user, p.heads) | heads, p.row_transfers)
        width = requantizer.HEAD_AT + requantizer.HEAD_BITS
        model.send("v", {"data": lanes_of(rows.reshape(-1, p.head_dim), p.lanes), "user": numbers(users, width)})
        after = self.tokens + count
        windows = after // p.group - self.tokens // p.group
        writes = {name: model.receive(name, p.heads * n) for name, n in requantizer.window_writes(p, windows).items()}
        sinks = max(0, min(p.sinks, after) - self.tokens)
        sink = model.receive("sink", p.heads * sinks * p.row_transfers)
        counts = model.run()
        cycles = span(counts)
        written = sum(self.memory.apply(fields) for fields in writes.values())
        self._sink = tuple(
            np.concatenate(pair, 1) for pair in zip(self._sink, _int8_rows(p, sink, p.heads), strict=True)
        )
        if windows:
            self._staged = self._staged[:, :0]
        cycles += self._fetch(after % p.group)
        check_error(model, "the cache of values")
        self.tokens = after
        return Appended(cycles, written + p.heads * (sinks + count) * p.head_dim)

    def _fetch(self, staged: int) -> int:
        """Read the rows of the open window that are new; returns the cycles."""
        p, known = self.p, self._staged.shape[1]
        if staged == known:
            return 0
        requests = np.arange(known, staged)[None] | np.arange(p.heads)[:, None] << _SCALE_BITS
        self.model.send("peek", {"data": numbers(requests.reshape(-1), 24)})
        fields = self.model.receive("staged", requests.size * p.row_transfers)
        counts = self.model.run()
        shape = p.heads, staged - known, p.head_dim
        new = rows_of(fields["data"], p.head_dim, p.lanes, np.int8).reshape(shape)
        self._staged = np.concatenate((self._staged, new), 1)
        self._scale = rows_of(fields["user"], p.head_dim, p.lanes, np.float16).reshape(shape)[:, 0].copy()
        return span(counts)

    def contents(self, head: int) -> MantValues:
        """What the engine reads of a head."""
        pages = [self.memory.pages[head, : self.tokens // self.p.group].tobytes()]
        sinks = Int8Rows(*(part[head] for part in self._sink))
        return MantValues(pages, self._staged[head], self._scale[head], sinks)
