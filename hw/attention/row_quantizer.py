"""Queries and fp16 rows of a cache to INT8: one quantiser, in turn."""

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_shape import CacheShape
from kvant.hw.attention.layouts import replay_output
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.numeric.int8_quantizer import Int8Quantizer


def query_input(p: CacheShape) -> data.StructLayout:
    """Payload of the port of queries: `lanes` fp16 elements, any; surplus ones are ignored."""
    return data.StructLayout({"data": data.ArrayLayout(16, p.lanes)})


def query_output(p: CacheShape) -> data.StructLayout:
    """INT8 elements of a query, its fp16 scale, the end of the query."""
    return data.StructLayout({"data": data.ArrayLayout(signed(8), p.lanes), "scale": 16, "last": 1})


def row_output(p: CacheShape) -> data.StructLayout:
    """INT8 elements of a row and the fp16 scale of their group; ends of row and pass; `empty`: there are no rows."""
    return data.StructLayout(
        {"data": data.ArrayLayout(signed(8), p.lanes), "scale": 16, "last": 1, "final": 1, "empty": 1}
    )


class RowQuantizer(wiring.Component):
    """INT8 groups over whole queries, or over the groups of rows that are replayed.

    A batch of queries is begun by `start` and goes before rows that come later; rows that have come are finished
    first.

    Parameters
    ----------
    p : CacheShape

    Members
    -------
    start, count : in
        Take 1 .. q_parallel queries; only while `queries_done` is high and no rows are under way.
    queries_done : out
        All queries have left.
    queries : in stream, see `query_input`
        `row_transfers` transfers a query.
    rows : in stream, see `kvant.hw.attention.layouts.replay_output`
    query : out stream, see `query_output`
    row : out stream, see `row_output`
    nonfinite : out
        In this cycle a query leaves that had a NaN or an infinity.
    """

    def __init__(self, p: CacheShape):
        self.p = p.check_pq()
        super().__init__(
            {
                "start": In(1),
                "count": In(range(p.q_parallel + 1)),
                "queries_done": Out(1),
                "queries": In(stream.Signature(query_input(p))),
                "rows": In(stream.Signature(replay_output(p))),
                "query": Out(stream.Signature(query_output(p))),
                "row": Out(stream.Signature(row_output(p))),
                "nonfinite": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.quantizer = quantizer = Int8Quantizer(p.lanes, p.head_dim)
        in_flight = ceil_div(quantizer.depth + quantizer.latency, p.row_transfers) + 2
        m.submodules.finals = finals = fifo.SyncFIFOBuffered(width=1, depth=in_flight)

        to_take, to_leave = Signal.like(self.count), Signal.like(self.count)
        taking = to_take != 0
        m.d.comb += self.queries_done.eq(to_leave == 0)

        # In: a query is one group, a row says where its groups end.
        place = Signal(range(max(2, p.row_transfers)))
        query_end = Signal()
        tail = p.head_dim - (p.row_transfers - 1) * p.lanes
        row, item = self.rows.payload, quantizer.i.payload
        row_room = finals.w_rdy | ~row.last
        takes_row = ~taking & self.queries_done & ~row.empty & row_room
        m.d.comb += [
            query_end.eq(place == p.row_transfers - 1),
            item.data.eq(Mux(taking, self.queries.payload.data.as_value(), row.data.as_value())),
            item.keep.eq(Mux(taking, Mux(query_end, tail, p.lanes), row.keep)),
            item.last.eq(Mux(taking, query_end, row.group_last)),
            quantizer.i.valid.eq(Mux(taking, self.queries.valid, self.rows.valid & takes_row)),
            self.queries.ready.eq(quantizer.i.ready & taking),
            finals.w_data.eq(row.final),
            finals.w_en.eq(self.rows.valid & takes_row & quantizer.i.ready & row.last),
        ]
        with m.If(self.start):
            m.d.sync += [to_take.eq(self.count), to_leave.eq(self.count)]
        with m.Elif(taking & self.queries.valid & quantizer.i.ready):
            m.d.sync += [place.eq(Mux(query_end, 0, place + 1)), to_take.eq(to_take - query_end)]

        # Out.
        out_place = Signal.like(place)
        out_end = Signal()
        leaves = Signal()
        o = quantizer.o
        takes_empty = row.empty & self.queries_done & ~self.start
        m.d.comb += [
            out_end.eq(out_place == p.row_transfers - 1),
            self.query.valid.eq(o.valid & ~self.queries_done),
            self.query.payload.data.eq(o.payload.q),
            self.query.payload.scale.eq(o.payload.scale),
            self.query.payload.last.eq(out_end),
            self.row.valid.eq(
                Mux(o.valid, self.queries_done & (finals.r_rdy | ~out_end), self.rows.valid & takes_empty)
            ),
            self.row.payload.data.eq(o.payload.q),
            self.row.payload.scale.eq(o.payload.scale),
            self.row.payload.last.eq(out_end | ~o.valid),
            self.row.payload.final.eq((out_end & finals.r_data) | ~o.valid),
            self.row.payload.empty.eq(~o.valid),
            o.ready.eq(Mux(self.queries_done, self.row.ready & (finals.r_rdy | ~out_end), self.query.ready)),
            leaves.eq(o.valid & o.ready),
            finals.r_en.eq(leaves & self.queries_done & out_end),
            self.rows.ready.eq(Mux(row.empty, takes_empty & ~o.valid & self.row.ready, takes_row & quantizer.i.ready)),
            self.nonfinite.eq(leaves & ~self.queries_done & o.payload.nonfinite),
        ]
        with m.If(leaves):
            m.d.sync += out_place.eq(Mux(out_end, 0, out_place + 1))
            with m.If(~self.queries_done):
                m.d.sync += to_leave.eq(to_leave - out_end)
        return m
