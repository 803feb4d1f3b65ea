"""Queries of a command: taken row by row, sent as often as the keys need them."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.layouts import index_range
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.attention.score_softmax import QueryLimits
from kvant.hw.linear.parameters import ceil_div


def query_port(p: AttentionParameters) -> data.StructLayout:
    """Payload of the queries: `x_lanes` fp16 elements; `user`, read with a query's first transfer: its limits."""
    return data.StructLayout({"data": data.ArrayLayout(16, p.x_lanes), "user": QueryLimits(p)})


def query_transfer(p: AttentionParameters) -> data.StructLayout:
    """Elements of a query on their way to the array; with `AttentionParameters.time_keys` also where they stand.

    Members
    -------
    data : x_lanes * 16
    query, place
        Which query, and which of its transfers.
    group_last, last : 1
        The last transfer of a group of the query; of all.
    """
    where = {"query": index_range(p.queries), "place": index_range(ceil_div(p.head_dim, p.x_lanes))}
    where |= {"group_last": 1, "last": 1}
    return data.StructLayout({"data": data.ArrayLayout(16, p.x_lanes), **(where if p.time_keys else {})})


class QueryMemory(wiring.Component):
    """Takes queries row by row and sends them group by group of the head, as a job of the linear path wants them.

    Members
    -------
    start : in
        Takes `count` queries, and then sends them.
    count : in
    q : in stream
        `query_port`; surplus lanes of a row's last transfer are passed on.
    limits : out, array of `QueryLimits`
    loaded : out
        All queries are in; low from `start` on.
    send : in
        Sends them, while `loaded`.
    x : out stream
        `query_transfer`: for each group, for each query: its transfers.
    """

    def __init__(self, p: AttentionParameters):
        self.p = p
        super().__init__(
            {
                "start": In(1),
                "count": In(range(p.queries + 1)),
                "q": In(stream.Signature(query_port(p))),
                "limits": Out(QueryLimits(p)).array(p.queries),
                "loaded": Out(1),
                "send": In(1),
                "x": Out(stream.Signature(query_transfer(p))),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        transfers = ceil_div(p.head_dim, p.x_lanes)
        query_bits = (p.queries - 1).bit_length()
        # Written before `send`, read after it.
        m.submodules.words = words = memory.Memory(
            shape=16 * p.x_lanes,
            depth=max(2, ((transfers - 1) << query_bits) + p.queries),
            init=[],
            attrs={"no_rw_check": 1},
        )
        write, read = words.write_port(), words.read_port()
        loading = Signal()
        query, place = Signal(index_range(p.queries)), Signal(index_range(transfers))
        row_end = place == transfers - 1
        take = self.q.valid & self.q.ready
        m.d.comb += [
            self.q.ready.eq(loading),
            write.addr.eq(Cat(query[:query_bits], place)),
            write.data.eq(self.q.payload.data),
            write.en.eq(take),
        ]
        with m.If(self.start):
            m.d.sync += [loading.eq(1), self.loaded.eq(0), query.eq(0), place.eq(0)]
        with m.Elif(take):
            m.d.sync += place.eq(Mux(row_end, 0, place + 1))
            with m.If(row_end):
                m.d.sync += query.eq(query + 1)
                with m.If(query + 1 == self.count):
                    m.d.sync += [loading.eq(0), self.loaded.eq(1)]
        for number in range(p.queries):
            with m.If(take & (place == 0) & (query == number)):
                m.d.sync += self.limits[number].eq(self.q.payload.user)

        # A word waits at the memory, one more at the port.
        group_transfers = ceil_div(min(p.group, p.head_dim), p.x_lanes)
        sending, fetched = Signal(), Signal()
        number, first, offset = Signal.like(query), Signal.like(place), Signal(index_range(group_transfers))
        group_end = offset == group_transfers - 1
        round_end = group_end & (number + 1 == self.count)
        moves = ~self.x.valid | self.x.ready
        asks = sending & (~fetched | moves)
        m.d.comb += [read.addr.eq(Cat(number[:query_bits], (first + offset)[: len(place)])), read.en.eq(asks)]
        with m.If(self.send):
            m.d.sync += [sending.eq(1), number.eq(0), first.eq(0), offset.eq(0)]
        with m.Elif(asks):
            m.d.sync += offset.eq(Mux(group_end, 0, offset + 1))
            with m.If(group_end):
                m.d.sync += number.eq(Mux(round_end, 0, number + 1))
            with m.If(round_end):
                m.d.sync += [first.eq(first + group_transfers), sending.eq(first + group_transfers < transfers)]
        with m.If(asks):
            m.d.sync += fetched.eq(1)
        with m.Elif(moves):
            m.d.sync += fetched.eq(0)
        with m.If(moves):
            m.d.sync += [self.x.valid.eq(fetched), self.x.payload.data.eq(read.data)]
        if p.time_keys:
            here = {
                "query": number,
                "place": first + offset,
                "group_last": group_end,
                "last": round_end & (first + group_transfers >= transfers),
            }
            for name, value in here.items():
                held = Signal.like(self.x.payload[name], name=f"fetched_{name}", reset_less=True)
                with m.If(asks):
                    m.d.sync += held.eq(value)
                with m.If(moves):
                    m.d.sync += self.x.payload[name].eq(held)
        return m
