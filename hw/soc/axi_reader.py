"""Regions of memory as streams of words, and several such readers at one port."""

from collections.abc import Sequence

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer
from kvant.hw.soc.axi import ID_BITS, Burst, ReadSignature, word_address_bits
from kvant.hw.soc.parameters import LONGEST_BURST, PAGE_BYTES, SocParameters
from kvant.hw.soc.word_queue import WordQueue


class Region(data.StructLayout):
    """Words one behind the other.

    Members
    -------
    address : word address
    words : word address
        How many, from 1.
    """

    def __init__(self, p: SocParameters):
        super().__init__({"address": word_address_bits(p), "words": word_address_bits(p)})


def read_word(p: SocParameters) -> data.StructLayout:
    """A word from memory, and whether the memory answered with an error."""
    return data.StructLayout({"data": p.port_bits, "error": 1})


class ReaderSignature(wiring.Signature):
    """What joins a reader to the `ReadArbiter`, seen by the reader.

    Members
    -------
    stop : in
        Ask for nothing more.
    owes : out
        Words were asked for that have not come back, or are being asked for. While it is low under `stop`, the reader
        may be reset.
    burst : out stream
        `Burst`: what is asked for.
    back : in stream
        A word that comes back; always taken.
    """

    def __init__(self, p: SocParameters):
        super().__init__(
            {
                "stop": In(1),
                "owes": Out(1),
                "burst": Out(stream.Signature(Burst(p))),
                "back": In(stream.Signature(read_word(p), always_ready=True)),
            }
        )


class AxiReader(wiring.Component):
    """Reads regions in bursts and hands out their words in order.

    A burst is asked for only when the queue has room for all of it, so that nothing that comes back ever waits. It ends
    at `burst_beats`, at a multiple of 4 KB, and at the end of the region. Bursts follow each other every five cycles at
    best; longer ones stream without a gap where the queue holds the words of the memory's latency and one burst.

    Parameters
    ----------
    p : SocParameters
    depth : int
        Words of the queue, a power of two, at least `burst_beats`.
    burst_beats : int
        Longest burst.

    Members
    -------
    region : in stream
        What to read; the next one may come before the words of the one before have been taken.
    port : Out(ReaderSignature)
        To the `ReadArbiter`.
    o : out stream
        The words.
    """

    def __init__(self, p: SocParameters, *, depth: int, burst_beats: int):
        self.p = p
        self.depth = depth
        self.burst_beats = check_integer("burst_beats", burst_beats, 1, min(depth, LONGEST_BURST))
        super().__init__(
            {
                "region": In(stream.Signature(Region(p))),
                "port": Out(ReaderSignature(p)),
                "o": Out(stream.Signature(read_word(p))),
            }
        )

    def elaborate(self, platform):
        p, port = self.p, self.port
        m = Module()
        m.submodules.queue = queue = WordQueue(read_word(p), self.depth)
        page_words = PAGE_BYTES // p.port_bytes
        address = Signal(word_address_bits(p))
        left = Signal(word_address_bits(p))
        done = Signal(init=1)  # nothing is left
        limit = Signal(range(min(self.burst_beats, page_words) + 1))
        beats = Signal.like(limit)
        free = Signal(range(self.depth + 1), init=self.depth)  # places that no burst was asked for
        fits = Signal()
        owed = Signal(range(self.depth + 1))
        asked = Signal()
        to_page = Signal(range(page_words + 1))
        m.d.comb += [
            to_page.eq(page_words - (address % page_words)),
            port.burst.payload.address.eq(address),
            port.burst.payload.beats.eq(beats - 1),
            asked.eq(port.burst.valid & port.burst.ready),
            port.owes.eq((owed != 0) | port.burst.valid),
            queue.i.valid.eq(port.back.valid),
            queue.i.payload.eq(port.back.payload),
            self.o.valid.eq(queue.o.valid),
            self.o.payload.eq(queue.o.payload),
            queue.o.ready.eq(self.o.ready),
        ]
        m.d.sync += [
            free.eq(free + queue.left - Mux(asked, beats, 0)),
            owed.eq(owed + Mux(asked, beats, 0) - port.back.valid),
            fits.eq(free >= beats),
        ]
        with m.FSM():
            with m.State("LIMIT"):
                m.d.comb += self.region.ready.eq(done)
                m.d.sync += limit.eq(Mux(to_page < self.burst_beats, to_page, self.burst_beats))
                with m.If(~done):
                    m.next = "CUT"
                with m.Elif(self.region.valid):
                    m.d.sync += [
                        address.eq(self.region.payload.address),
                        left.eq(self.region.payload.words),
                        done.eq(0),
                    ]
            with m.State("CUT"):
                m.d.sync += beats.eq(Mux(left < limit, left, limit))
                m.next = "MEASURE"
            with m.State("MEASURE"):
                m.next = "WAIT"
            with m.State("WAIT"):
                with m.If(fits & ~port.stop):
                    m.next = "ASK"
            with m.State("ASK"):
                m.d.comb += port.burst.valid.eq(1)
                with m.If(port.burst.ready):
                    m.d.sync += [address.eq(address + beats), left.eq(left - beats), done.eq(left == beats)]
                    m.next = "LIMIT"
        return m


class ReadArbiter(wiring.Component):
    """Lets several readers share a port: bursts in turn, each with its reader's number as identifier.

    Answers may come back in any order between readers, also mixed word by word; every one is taken at once.

    Parameters
    ----------
    p : SocParameters
    clients : int
        1 to 16.

    Members
    -------
    ports : array of In(ReaderSignature)
        Words come back one cycle after they come to the port.
    stop : in
        Every reader asks for nothing more.
    owes : out
        A reader owes; see `ReaderSignature`.
    bus : Out(ReadSignature)
    received : out
        A word comes back.
    """

    def __init__(self, p: SocParameters, clients: int):
        self.p = p
        self.clients = check_integer("clients", clients, 1, 1 << ID_BITS)
        super().__init__(
            {
                "ports": In(ReaderSignature(p)).array(clients),
                "stop": In(1),
                "owes": Out(1),
                "bus": Out(ReadSignature(p)),
                "received": Out(1),
            }
        )

    def elaborate(self, platform):
        p, bus = self.p, self.bus
        m = Module()
        last = Signal(ID_BITS)
        free = Signal()
        m.d.comb += [free.eq(~bus.arvalid | bus.arready), bus.rready.eq(1)]
        chosen, any_valid = Signal(ID_BITS), Signal()
        valid = Cat(port.burst.valid for port in self.ports)
        m.d.comb += [
            any_valid.eq(valid.any()),
            self.owes.eq(Cat(port.owes for port in self.ports).any()),
            *(port.stop.eq(self.stop) for port in self.ports),
        ]
        with m.Switch(last):
            for previous in range(self.clients):
                with m.Case(previous):
                    order = [(previous + step) % self.clients for step in range(1, self.clients + 1)]
                    m.d.comb += chosen.eq(_first(valid, order))
        with m.If(free):
            m.d.sync += bus.arvalid.eq(any_valid)
            with m.Switch(chosen):
                for client, port in enumerate(self.ports):
                    with m.Case(client):
                        m.d.comb += port.burst.ready.eq(any_valid)
                        m.d.sync += [
                            bus.araddr.eq(Cat(Const(0, p.align_bits), port.burst.payload.address)),
                            bus.arlen.eq(port.burst.payload.beats),
                        ]
            with m.If(any_valid):
                m.d.sync += [last.eq(chosen), bus.arid.eq(chosen)]

        word = Signal(read_word(p))
        m.d.sync += [word.data.eq(bus.rdata), word.error.eq(bus.rresp[1])]
        m.d.comb += self.received.eq(bus.rvalid)
        for client, port in enumerate(self.ports):
            m.d.sync += port.back.valid.eq(bus.rvalid & (bus.rid == client))
            m.d.comb += port.back.payload.eq(word)
        return m


def _first(valid: Value, order: Sequence[int]) -> Value:
    """The first number of *order* whose bit is set; the last one if none is."""
    choice = Const(order[-1], ID_BITS)
    for number in reversed(order[:-1]):
        choice = Mux(valid[number], number, choice)
    return choice
