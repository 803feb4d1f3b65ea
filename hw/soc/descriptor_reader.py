"""Reads descriptors from their ring in memory, as far as the doorbell allows."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.parameters import ceil_div
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.axi_reader import AxiReader, ReaderSignature
from kvant.hw.soc.descriptors import DESCRIPTOR_BYTES, ErrorCode
from kvant.hw.soc.parameters import SocParameters

INDEX_BITS = 16


class FetchedDescriptor(data.StructLayout):
    """The bits of a descriptor, its place in the ring, and an `ErrorCode` if it could not be read."""

    def __init__(self):
        super().__init__({"bits": 8 * DESCRIPTOR_BYTES, "index": INDEX_BITS, "code": 8})


class DescriptorReader(wiring.Component):
    """Reads one descriptor ahead.

    Members
    -------
    run : in
        Descriptors may be read. The reader begins at `head` after reset.
    base, count, head, tail : in
        The ring: word address, places, first descriptor, place behind the last one.
    port : Out(ReaderSignature)
        See `AxiReader`.
    o : out stream
        `FetchedDescriptor`. The code RING stands for a doorbell beyond the ring.
    """

    def __init__(self, p: SocParameters):
        self.p = p
        super().__init__(
            {
                "run": In(1),
                "base": In(word_address_bits(p)),
                "count": In(INDEX_BITS),
                "head": In(INDEX_BITS),
                "tail": In(INDEX_BITS),
                "port": Out(ReaderSignature(p)),
                "o": Out(stream.Signature(FetchedDescriptor())),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        words = ceil_div(DESCRIPTOR_BYTES, p.port_bytes)
        m.submodules.reader = reader = AxiReader(p, depth=max(2, words), burst_beats=words)
        wiring.connect(m, reader.port, wiring.flipped(self.port))
        index = Signal(INDEX_BITS)
        word = Signal(range(words + 1))
        fetched = self.o.payload
        beyond = Signal()
        m.d.comb += [
            reader.region.payload.address.eq(self.base + index * words),
            reader.region.payload.words.eq(words),
        ]
        m.d.sync += beyond.eq(self.tail >= self.count)
        with m.FSM():
            with m.State("BEGIN"):
                with m.If(self.run):
                    m.d.sync += index.eq(self.head)
                    m.next = "IDLE"
            with m.State("IDLE"):
                with m.If(self.run & (index != self.tail)):
                    m.d.sync += [word.eq(0), fetched.index.eq(index), fetched.code.eq(ErrorCode.NONE)]
                    m.next = "JUDGE"  # `beyond` is that of this doorbell a cycle after it
            with m.State("JUDGE"):
                with m.If(beyond):
                    m.d.sync += [fetched.code.eq(ErrorCode.RING), self.o.valid.eq(1)]
                    m.next = "GIVE"
                with m.Else():
                    m.next = "ASK"
            with m.State("ASK"):
                m.d.comb += reader.region.valid.eq(1)
                with m.If(reader.region.ready):
                    m.next = "COLLECT"
            with m.State("COLLECT"):
                m.d.comb += reader.o.ready.eq(1)
                with m.If(reader.o.valid):
                    m.d.sync += [
                        fetched.bits.eq(Cat(fetched.bits, reader.o.payload.data)[p.port_bits :]),
                        word.eq(word + 1),
                    ]
                    with m.If(reader.o.payload.error):
                        m.d.sync += fetched.code.eq(ErrorCode.FETCH)
                    with m.If(word == words - 1):
                        m.d.sync += self.o.valid.eq(1)
                        m.next = "GIVE"
            with m.State("GIVE"):
                with m.If(self.o.ready):
                    m.d.sync += [self.o.valid.eq(0), index.eq(Mux(index + 1 == self.count, 0, index + 1))]
                    m.next = "IDLE"
        return m
