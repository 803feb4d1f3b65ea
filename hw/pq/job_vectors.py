"""Vectors of the job that the codebook engine works on: grid positions of a batch, INT8 queries."""

from amaranth.hdl import Cat, Module, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.layouts import index_range
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.pq.codebook_jobs import encode_job, row_input
from kvant.hw.pq.grid_position import GridPosition
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.row_loader import Pieces, RowLoader, VectorMemory

_LOADING_SHARE = 8  # loading takes at most this part of a search, where the lanes of rows allow it


def position_lanes(p: PqParameters) -> int:
    """Elements of `rows` per cycle: a power of two, enough that loading takes an eighth of the search."""
    search = p.codebook_words * (p.batch_tokens + 1)
    wanted = ceil_div(_LOADING_SHARE * p.batch_tokens * p.head_dim, search)
    return min(p.lanes, p.slice_bytes, 1 << (wanted - 1).bit_length())


def _reader(p: PqParameters, element, vectors: int) -> dict:
    """Members by which a job's vectors are read: see `VectorMemory`."""
    return {
        "read": In(1),
        "vector": In(index_range(vectors)),
        "slice": In(index_range(p.slices)),
        "o": Out(data.ArrayLayout(element, p.slice_bytes)),
    }


def _connect_reader(m: Module, outer, vectors: VectorMemory):
    m.d.comb += [
        vectors.read.eq(outer.read),
        vectors.vector.eq(outer.vector),
        vectors.slice.eq(outer.slice),
        outer.o.eq(vectors.o),
    ]


class BatchVectors(wiring.Component):
    """Takes an encode job and its rows, and keeps the grid positions of its tokens until the search is over.

    Members
    -------
    job : in stream
        {count, scale}.
    rows : in stream
        fp16 rows: `position_lanes` elements a cycle.
    taken : out
        A job is here. The next one is taken after `release`.
    loaded, count : out
        All its positions are here.
    release : in
        They have been read for the last time.
    read, vector, slice : in
    o : out
        See `VectorMemory`.
    """

    def __init__(self, p: PqParameters):
        self.p = p
        super().__init__(
            {
                "job": In(stream.Signature(encode_job(p))),
                "rows": In(stream.Signature(row_input(p, 16))),
                "taken": Out(1),
                "loaded": Out(1),
                "count": Out(range(p.batch_tokens + 1)),
                "release": In(1),
                **_reader(p, signed(16), p.batch_tokens),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        pipeline = Pipeline(m)
        lanes, delay = position_lanes(p), GridPosition.latency
        m.submodules.loader = loader = RowLoader(Pieces(p, 16, lanes, p.batch_tokens))
        m.submodules.vectors = vectors = VectorMemory(Pieces(p, signed(16), lanes, p.batch_tokens))
        wiring.connect(m, wiring.flipped(self.rows), loader.i)
        _connect_reader(m, self, vectors)

        scale = Signal(16, reset_less=True)
        units = []
        for lane in range(lanes):
            m.submodules[f"position_{lane}"] = unit = GridPosition()
            m.d.comb += [unit.x.eq(loader.elements[lane]), unit.scale.eq(scale)]
            units.append(unit.u)
        under_way = Signal(delay)  # a piece may be in a stage of the lanes
        m.d.sync += under_way.eq(Cat(loader.busy, under_way))
        m.d.comb += [
            vectors.write.eq(pipeline.valid(loader.valid, cycles=delay)),
            vectors.place.eq(pipeline.register(loader.place, "place", cycles=delay)),
            vectors.elements.eq(Cat(units)),
            self.job.ready.eq(~self.taken),
            loader.start.eq(self.job.valid & self.job.ready),
            loader.count.eq(self.job.payload.count),
        ]
        with m.If(loader.start):
            m.d.sync += [self.taken.eq(1), self.count.eq(self.job.payload.count), scale.eq(self.job.payload.scale)]
        with m.Elif(self.release):
            m.d.sync += [self.taken.eq(0), self.loaded.eq(0)]
        with m.Elif(self.taken & ~loader.busy & ~under_way.any()):
            m.d.sync += self.loaded.eq(1)
        return m


class QueryVectors(wiring.Component):
    """Keeps the INT8 queries of a query job until its table is made.

    Members
    -------
    start, count : in
        Take the rows of a job; only while not `taken`.
    q : in stream
        INT8 rows: ``min(p.lanes, p.slice_bytes)`` elements a cycle.
    taken, loaded, release, read, vector, slice, o
        As those of `BatchVectors`.
    """

    def __init__(self, p: PqParameters):
        self.p = p
        super().__init__(
            {
                "start": In(1),
                "count": In(range(p.q_parallel + 1)),
                "q": In(stream.Signature(row_input(p, signed(8)))),
                "taken": Out(1),
                "loaded": Out(1),
                "release": In(1),
                **_reader(p, signed(8), p.q_parallel),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        pieces = Pieces(p, signed(8), min(p.lanes, p.slice_bytes), p.q_parallel)
        m.submodules.loader = loader = RowLoader(pieces)
        m.submodules.vectors = vectors = VectorMemory(pieces)
        wiring.connect(m, wiring.flipped(self.q), loader.i)
        _connect_reader(m, self, vectors)
        m.d.comb += [
            vectors.write.eq(loader.valid),
            vectors.place.eq(loader.place),
            vectors.elements.eq(loader.elements),
            loader.start.eq(self.start),
            loader.count.eq(self.count),
        ]
        with m.If(self.start):
            m.d.sync += self.taken.eq(1)
        with m.Elif(self.release):
            m.d.sync += [self.taken.eq(0), self.loaded.eq(0)]
        with m.Elif(self.taken & ~loader.busy):
            m.d.sync += self.loaded.eq(1)
        return m
