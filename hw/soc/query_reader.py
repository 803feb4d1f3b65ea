"""Query records from memory to the queries of the attention engine."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.engine import query_port
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.axi_reader import AxiReader, ReaderSignature
from kvant.hw.soc.cache_memory import CacheMemory
from kvant.hw.soc.descriptors import ErrorCode
from kvant.hw.soc.fault import Fault
from kvant.hw.soc.parameters import LONGEST_BURST, TopParameters
from kvant.hw.soc.run_cutter import RunCutter

HALF_BITS = 16
LEAST_DEPTH = 32


class QueryJob(data.StructLayout):
    """Query records at `address`, `stride` apart, both in words of the port; the job's slot."""

    def __init__(self, p: TopParameters):
        address = word_address_bits(p.soc)
        super().__init__({"address": address, "stride": address, "queries": range(p.attention.queries + 1), "slot": 1})


class QueryReader(wiring.Component):
    """Reads the queries of one job after the other; a job is read ahead while the engine has that before it.

    Members
    -------
    job : in stream
        `QueryJob`.
    port : Out(ReaderSignature)
    q : out stream
        `kvant.hw.attention.engine.query_port`.
    fault : out
        A word came back with an error: `q` ends until reset.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        super().__init__(
            {
                "job": In(stream.Signature(QueryJob(p))),
                "port": Out(ReaderSignature(p.soc)),
                "q": Out(stream.Signature(query_port(p.attention))),
                "fault": Out(Fault()),
            }
        )

    def elaborate(self, platform):
        p, soc, attention = self.p, self.p.soc, self.p.attention
        m = Module()
        record = CacheMemory(p.cache_shape, soc.port_bytes).query
        words = record.query_bytes // soc.port_bytes
        header_words = record.header.size // soc.port_bytes
        depth = max(LEAST_DEPTH, 1 << (words - 1).bit_length())
        m.submodules.reader = reader = AxiReader(soc, depth=depth, burst_beats=min(words, LONGEST_BURST))
        m.submodules.cutter = cutter = RunCutter(soc, bits=HALF_BITS, lanes=attention.x_lanes, most=attention.head_dim)
        wiring.connect(m, reader.port, wiring.flipped(self.port))

        # Records are asked for.
        ask = Signal(QueryJob(p))
        asked = Signal()
        waits, starts = Signal(), Signal()  # the numbers of a job are not with the transfers yet
        waiting = Signal(QueryJob(p))
        m.d.comb += [
            self.job.ready.eq((ask.queries == 0) & ~waits),
            reader.region.valid.eq(ask.queries != 0),
            reader.region.payload.address.eq(ask.address),
            reader.region.payload.words.eq(words),
            asked.eq(reader.region.valid & reader.region.ready),
        ]
        with m.If(starts):
            m.d.sync += waits.eq(0)
        with m.If(self.job.valid & self.job.ready):
            m.d.sync += [ask.eq(self.job.payload), waiting.eq(self.job.payload), waits.eq(1)]
        with m.Elif(asked):
            m.d.sync += [ask.address.eq(ask.address + ask.stride), ask.queries.eq(ask.queries - 1)]

        # A header, then the elements.
        left, slot = Signal.like(ask.queries), Signal()
        header = Signal(soc.port_bits * header_words)
        word = Signal(range(max(2, header_words)))
        header_failed = Signal()
        in_header, takes = Signal(), Signal()
        limits = query_port(attention)["user"].shape
        m.d.comb += [
            reader.o.ready.eq((in_header & ~header_failed) | cutter.words.ready),
            cutter.words.valid.eq(reader.o.valid),
            cutter.words.payload.eq(reader.o.payload),
            takes.eq(in_header & reader.o.valid & reader.o.ready),
            cutter.run.payload.eq(attention.head_dim),
            self.fault.code.eq(Mux(header_failed | cutter.failed, ErrorCode.READ_ATTEND, ErrorCode.NONE)),
            self.fault.slot.eq(slot),
            self.q.valid.eq(cutter.o.valid),
            cutter.o.ready.eq(self.q.ready),
            self.q.payload.data.eq(cutter.o.payload.data),
        ]
        for name, offset in (("first", record.FIRST), ("end", record.END), ("slope", record.SLOPE)):
            field = self.q.payload.user[name]
            m.d.comb += field.eq(header[8 * offset : 8 * offset + limits[name].width])
        with m.If(takes):
            m.d.sync += [
                header.eq(Cat(header, reader.o.payload.data)[soc.port_bits :]),
                header_failed.eq(reader.o.payload.error),
            ]
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += starts.eq(waits)
                m.d.sync += [left.eq(waiting.queries), word.eq(0)]
                with m.If(waits):
                    m.d.sync += slot.eq(waiting.slot)
                    m.next = "HEADER"
            with m.State("HEADER"):
                m.d.comb += in_header.eq(1)
                with m.If(takes):
                    m.d.sync += word.eq(word + 1)
                    with m.If(word == header_words - 1):
                        m.next = "RUN"
            with m.State("RUN"):
                m.d.comb += cutter.run.valid.eq(~header_failed)
                with m.If(cutter.run.valid & cutter.run.ready):
                    m.next = "ELEMENTS"
            with m.State("ELEMENTS"):
                with m.If(self.q.valid & self.q.ready & cutter.o.payload.last):
                    m.d.sync += [left.eq(left - 1), word.eq(0)]
                    with m.If(left == 1):
                        m.next = "IDLE"
                    with m.Else():
                        m.next = "HEADER"
        return m
