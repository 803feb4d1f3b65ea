"""INT8 queries that wait while the ones before them are still needed."""

from amaranth.hdl import Array, Module, Mux, Signal
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_shape import CacheShape
from kvant.hw.attention.row_quantizer import query_output


class QueryBuffer(wiring.Component):
    """Holds the queries of one command, and sends them on when they are asked for.

    Parameters
    ----------
    p : CacheShape

    Members
    -------
    i : in stream, see `kvant.hw.attention.row_quantizer.query_output`
        Always ready. After `clear` up to `q_parallel` queries; none come while queries are sent.
    clear : in
        The next transfer of `i` is the first of the first query.
    send, count : in
        Send the first `count` queries; only while `sent` is high.
    o : out stream, as `i`
        A transfer every second cycle.
    sent : out
        Nothing is being sent.
    """

    def __init__(self, p: CacheShape):
        self.p = p.check_pq()
        super().__init__(
            {
                "i": In(stream.Signature(query_output(p), always_ready=True)),
                "clear": In(1),
                "send": In(1),
                "count": In(range(p.q_parallel + 1)),
                "o": Out(stream.Signature(query_output(p))),
                "sent": Out(1, init=1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        item, o = self.i.payload, self.o.payload
        words = p.q_parallel * p.row_transfers
        # Written before `send`, read after it: no address is both at once.
        m.submodules.words = store = memory.Memory(
            shape=item.data.shape(), depth=max(2, words), init=[], attrs={"no_rw_check": 1}
        )
        write, read = store.write_port(), store.read_port()
        scales = Array(Signal(16, name=f"scale_{number}", reset_less=True) for number in range(p.q_parallel))
        vector = Signal(range(max(2, p.q_parallel)))
        m.d.comb += [write.data.eq(item.data), write.en.eq(self.i.valid)]
        with m.If(self.clear):
            m.d.sync += [write.addr.eq(0), vector.eq(0)]
        with m.Elif(self.i.valid):
            m.d.sync += write.addr.eq(write.addr + 1)
            with m.If(item.last):
                m.d.sync += [vector.eq(vector + 1), scales[vector].eq(item.scale)]

        place = Signal(range(max(2, p.row_transfers)))
        sending = Signal.like(vector)
        row_end = Signal()
        fetched = Signal()
        m.d.comb += [
            row_end.eq(place == p.row_transfers - 1),
            read.en.eq(~self.sent & ~fetched),
            self.o.valid.eq(fetched),
            o.data.eq(read.data),
            o.scale.eq(scales[sending]),
            o.last.eq(row_end),
        ]
        with m.If(self.send):
            m.d.sync += [self.sent.eq(0), read.addr.eq(0), place.eq(0), sending.eq(0), fetched.eq(0)]
        with m.Elif(~self.sent):
            m.d.sync += fetched.eq(~(fetched & self.o.ready))
            with m.If(fetched & self.o.ready):
                m.d.sync += [
                    read.addr.eq(read.addr + 1),
                    place.eq(Mux(row_end, 0, place + 1)),
                    sending.eq(sending + row_end),
                    self.sent.eq(row_end & (sending == self.count - 1)),
                ]
        return m
