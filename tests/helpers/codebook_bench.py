"""The codebook engine behind streams alone, its bins in a memory, and jobs for it as the golden model sees them."""

from dataclasses import dataclass, field

import numpy as np
import torch
from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.golden.pq.codebook import Codebook
from kvant.golden.pq.encode import encode
from kvant.golden.pq.scores import lookup_table, read_out
from kvant.hw.attention.layouts import SHIFT_BITS
from kvant.hw.pq.codebook_jobs import encode_job, read_job
from kvant.hw.pq.engine import CodebookEngine
from kvant.sim.simulate import simulate
from kvant.sim.streams import Stimulus

STREAMS = ("encode_job", "rows", "encode_words", "codes", "q", "attend_words", "out")


def attend_job(p):
    """A job for attention: a read-out, or a table."""
    return data.StructLayout({"read": 1, **dict(read_job(p).members)})


INPUTS = ("encode_job", "rows", "encode_words", "attend_job", "q", "attend_words")


class EngineBench(wiring.Component):
    """A codebook engine whose `table` is a stream that is always ready, and whose bins lie here.

    Query and read jobs come in one stream `attend_job` {read, count, shift}, and so in a known order.

    Parameters
    ----------
    engine : CodebookEngine
    bins : list of int arrays [Q, M, 2^nbits]
        Of each read job in turn.
    """

    def __init__(self, engine, bins=()):
        self.engine, self.bins = engine, bins
        members = {name: engine.signature.members[name] for name in STREAMS}
        table = stream.Signature(engine.table.shape(), always_ready=True)
        counters = {name: Out(32) for name in ("nearest", "tables", "read")}
        job = In(stream.Signature(attend_job(engine.p)))
        super().__init__({**members, "attend_job": job, "table": Out(table), "busy": Out(3), **counters})

    def elaborate(self, platform):
        engine, p = self.engine, self.engine.p
        m = Module()
        m.submodules.engine = engine
        for name in STREAMS:
            inner, outer = getattr(engine, name), wiring.flipped(getattr(self, name))
            wiring.connect(m, *((outer, inner) if engine.signature.members[name].flow is In else (inner, outer)))
        job = self.attend_job.payload
        m.d.comb += [
            engine.query_job.valid.eq(self.attend_job.valid & ~job.read),
            engine.query_job.payload.count.eq(job.count),
            engine.read_job.valid.eq(self.attend_job.valid & job.read),
            engine.read_job.payload.count.eq(job.count),
            engine.read_job.payload.shift.eq(job.shift),
            self.attend_job.ready.eq(Mux(job.read, engine.read_job.ready, engine.query_job.ready)),
            self.table.valid.eq(engine.table.valid),
            self.table.payload.eq(engine.table),
            self.busy.eq(engine.busy),
        ]
        m.d.sync += [
            self.nearest.eq(self.nearest + engine.steps.nearest),
            self.tables.eq(self.tables + engine.steps.table),
            self.read.eq(self.read + engine.steps.read_out),
        ]

        layout = engine.bins.shape()
        init = []
        for of_job in self.bins:
            padded = np.zeros((p.q_parallel, p.slices, p.slice_subspaces, p.centroids), object)
            bins = np.asarray(of_job).reshape(-1, *padded.shape[1:])
            padded[: len(bins)] = bins
            for query in padded:
                for piece in query:
                    init += [layout.const([int(one) for one in column]).as_value().value for column in piece.T]
        words = memory.Memory(shape=layout.size, depth=max(2, len(init)), init=init)
        m.submodules.words = words
        read = words.read_port()
        ask = engine.bin_read
        begins, number = Signal(), Signal(16, init=0xFFFF)
        this = Signal(16)
        m.d.comb += [
            begins.eq(ask.valid & (ask.vector == 0) & (ask.slice == 0) & (ask.centroid == 0)),
            this.eq(number + begins),
            read.addr.eq(((this * p.q_parallel + ask.vector) * p.slices + ask.slice) * p.centroids + ask.centroid),
        ]
        m.d.sync += number.eq(this)
        valid, bins = ask.valid, read.data
        for cycle in range(engine.bin_latency):
            held = Signal(name="valid")
            m.d.sync += held.eq(valid)
            valid = held
            if cycle:
                held = Signal(layout.size, name="bins")
                m.d.sync += held.eq(bins)
                bins = held
        m.d.comb += engine.bins.eq(Mux(valid, bins, ~bins))  # at no other time do they mean anything
        return m


def codebook(p, rng, *, entries=None, scale=0.01):
    """A random codebook, or one of given entries."""
    if entries is None:
        entries = rng.integers(-128, 128, (p.subspaces, p.centroids, p.subspace))
    return Codebook.of(torch.tensor(np.asarray(entries, np.int8)), torch.tensor(scale, dtype=torch.float16))


def codebook_words(p, book, rng):
    """Words of the port, slice by slice, centroid by centroid; bytes that do not count are random."""
    slices = book.entries.numpy().reshape(p.slices, p.slice_subspaces, p.centroids, p.subspace)
    words = []
    for piece in slices.transpose(0, 2, 1, 3).reshape(p.codebook_words, p.slice_bytes):
        rest = rng.integers(-128, 128, p.port_bytes - p.slice_bytes).astype(np.int8)
        words.append(int.from_bytes(np.concatenate([piece, rest]).tobytes(), "little"))
    return words


def row_transfers(p, rows, bits, rng):
    """Transfers of rows [n, d] of unsigned integers; lanes that do not count are random."""
    values, last = [], []
    surplus = p.row_transfers * p.lanes - p.head_dim
    for row in rows:
        elements = [int(one) for one in (*row, *rng.integers(0, 1 << bits, surplus))]
        for first in range(0, len(elements), p.lanes):
            values.append(sum(one << (bits * lane) for lane, one in enumerate(elements[first : first + p.lanes])))
            last.append(int(first + p.lanes >= len(elements)))
    return values, last


def words_of(layout, rows):
    """Dicts of a layout's fields as integers."""
    return [layout.const(row).as_value().value for row in rows]


def split(layout, word):
    """Fields of a word as plain integers and lists."""
    view = layout.from_bits(word)
    return {
        name: [int(one) for one in view[name]] if isinstance(shape, data.ArrayLayout) else int(view[name])
        for name, shape in layout.members.items()
    }


@dataclass
class Jobs:
    """Jobs for an engine, with what the golden model makes of them."""

    p: object
    rng: np.random.Generator
    inputs: dict = field(default_factory=lambda: {name: {} for name in INPUTS})
    bins: list = field(default_factory=list)
    codes: list = field(default_factory=list)
    table: list = field(default_factory=list)
    out: list = field(default_factory=list)

    def _add(self, name, **fields):
        for key, values in fields.items():
            self.inputs[name].setdefault(key, []).extend(values)

    def _attend(self, *, read, count, shift=()):
        unused = self.rng.integers(0, 1 << SHIFT_BITS, self.p.q_parallel - len(shift))
        job = {"read": read, "count": count, "shift": [int(each) for each in (*shift, *unused)]}
        self._add("attend_job", data=words_of(attend_job(self.p), [job]))

    def encode(self, x, book):
        """An encode job of rows f16 [n, d]."""
        p = self.p
        x = np.asarray(x, np.float16)
        scale = int(book.scale.numpy().view(np.uint16))
        self._add("encode_job", data=words_of(encode_job(p), [{"count": len(x), "scale": scale}]))
        values, last = row_transfers(p, x.view(np.uint16), 16, self.rng)
        self._add("rows", data=values, last=last)
        self._add("encode_words", data=codebook_words(p, book, self.rng))
        codes = encode(torch.from_numpy(x), book).numpy().reshape(len(x), p.slices, p.slice_subspaces)
        self.codes += [
            (slice_, vector, [int(c) for c in codes[vector, slice_]], slice_ == p.slices - 1 and vector == len(x) - 1)
            for slice_ in range(p.slices)
            for vector in range(len(x))
        ]

    def query(self, q, book):
        """A query job of queries i8 [n, d]."""
        p = self.p
        q = np.asarray(q, np.int8)
        self._attend(read=0, count=len(q))
        values, last = row_transfers(p, q.view(np.uint8), 8, self.rng)
        self._add("q", data=values, last=last)
        self._add("attend_words", data=codebook_words(p, book, self.rng))
        table = lookup_table(torch.from_numpy(q), book).numpy()
        table = table.reshape(len(q), p.slices, p.slice_subspaces, p.centroids)
        self.table += [
            (slice_, centroid, vector, table[vector, slice_, :, centroid].tolist())
            for slice_ in range(p.slices)
            for centroid in range(p.centroids)
            for vector in range(len(q))
        ]
        self.table[-1] = (*self.table[-1], "last")

    def read(self, bins, book, shift=0):
        """A read job of bins [n, M, 2^nbits]; *shift* of all queries, or of each."""
        p = self.p
        bins = np.asarray(bins, np.int64)
        shifts = np.broadcast_to(shift, len(bins))
        self._attend(read=1, count=len(bins), shift=shifts)
        self._add("attend_words", data=codebook_words(p, book, self.rng))
        self.bins.append(bins)
        sums = read_out(torch.from_numpy(bins >> shifts[:, None, None]), book).numpy()
        out = sums.reshape(len(bins), p.slices, p.slice_bytes)
        self.out += [
            (slice_, vector, out[vector, slice_].tolist(), slice_ == p.slices - 1 and vector == len(bins) - 1)
            for slice_ in range(p.slices)
            for vector in range(len(bins))
        ]

    def play(self, *, bin_latency=2, factory=CodebookEngine, after=None, **options):
        """Run all jobs; the results in the form of `codes`, `table` and `out`, and the trace."""
        engine = factory(self.p, bin_latency=bin_latency)
        layouts = {name: getattr(engine, name).payload.shape() for name in ("codes", "out")}
        layouts["table"] = engine.table.shape()
        stimulus = Stimulus(
            {name: values for name, values in self.inputs.items() if values},
            {"codes": len(self.codes), "table": len(self.table), "out": len(self.out)},
            status=["busy", "nearest", "tables", "read"],
            after=after or {},
        )
        options = {"simulator": "amaranth", "timeout_cycles": 20_000} | options
        trace = simulate(lambda: EngineBench(engine, self.bins), "engine", stimulus, **options)

        def fields(name):
            transfers = trace.transfers[name]
            layout = layouts[name]
            if set(transfers) == {"data"}:
                return [split(layout, word) for word in transfers["data"]]
            return [
                {
                    key: split(data.StructLayout({key: layout.members[key]}), word)[key]
                    for key, word in zip(transfers, row, strict=True)
                }
                for row in zip(*transfers.values(), strict=True)
            ]

        results = {
            name: [(one["slice"], one["vector"], one[key], bool(one["last"])) for one in fields(name)]
            for name, key in (("codes", "codes"), ("out", "data"))
        }
        results["table"] = [
            (one["slice"], one["centroid"], one["vector"], one["values"], *(["last"] if one["last"] else []))
            for one in fields("table")
        ]
        return results, trace

    def check(self, **options):
        """Results are those of the golden model; the trace."""
        results, trace = self.play(**options)
        assert results["table"] == self.table
        assert results["codes"] == self.codes
        assert results["out"] == self.out
        assert trace.status["busy"] == 0
        return trace
