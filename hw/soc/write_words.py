"""Streams of words to memory: parts of a word put together, several streams into one."""

from amaranth.hdl import Array, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer
from kvant.hw.soc.axi_writer import write_word
from kvant.hw.soc.parameters import SocParameters


class WordMerger(wiring.Component):
    """Puts writes to one word that follow each other together; of a byte that is written twice, the later one counts.

    A word waits until it is full, another address follows, or `flush`. A word per cycle.

    Parameters
    ----------
    p : SocParameters

    Members
    -------
    i, o : in stream, out stream
        `write_word`. Without strobes nothing leaves.
    flush : in
        Do not wait for more.
    idle : out
        Nothing is held.
    """

    def __init__(self, p: SocParameters):
        self.p = p
        word = stream.Signature(write_word(p))
        super().__init__({"i": In(word), "o": Out(word), "flush": In(1), "idle": Out(1)})

    def elaborate(self, platform):
        p, i = self.p, self.i.payload
        m = Module()
        held = Signal(write_word(p), reset_less=True)
        merged = Signal(write_word(p))
        occupied, joins, leaves, free, take, writes = (Signal() for _ in range(6))
        m.d.comb += [
            writes.eq(i.strobes.any()),
            free.eq(~self.o.valid | self.o.ready),
            joins.eq(occupied & (i.address == held.address)),
            leaves.eq(occupied & free & (held.strobes.all() | self.flush | (self.i.valid & writes & ~joins))),
            self.i.ready.eq(~occupied | joins | leaves | ~writes),
            take.eq(self.i.valid & self.i.ready & writes),
            self.idle.eq(~occupied & ~self.o.valid),
            merged.address.eq(i.address),
            merged.strobes.eq(i.strobes | Mux(joins & ~leaves, held.strobes, 0)),
        ]
        for byte in range(p.port_bytes):
            here = slice(8 * byte, 8 * byte + 8)
            m.d.comb += merged.data[here].eq(Mux(i.strobes[byte], i.data[here], held.data[here]))
        with m.If(free):
            m.d.sync += [self.o.valid.eq(leaves), self.o.payload.eq(held)]
        with m.If(take):
            m.d.sync += [held.eq(merged), occupied.eq(1)]
        with m.Elif(leaves):
            m.d.sync += occupied.eq(0)
        return m


class WordArbiter(wiring.Component):
    """Words of several streams into one. A stream goes on while it has words, so that they make up bursts.

    Parameters
    ----------
    p : SocParameters
    clients : int

    Members
    -------
    i : in streams
        `write_word`.
    o : out stream
    """

    def __init__(self, p: SocParameters, clients: int):
        self.p = p
        self.clients = check_integer("clients", clients, 1)
        word = stream.Signature(write_word(p))
        super().__init__({"i": In(word).array(clients), "o": Out(word)})

    def elaborate(self, platform):
        m = Module()
        chosen = Signal(range(max(2, self.clients)))
        valid = Array(port.valid for port in self.i)
        free = Signal()
        m.d.comb += free.eq(~self.o.valid | self.o.ready)
        with m.If(free):
            m.d.sync += [
                self.o.valid.eq(valid[chosen]),
                self.o.payload.eq(Array(port.payload.as_value() for port in self.i)[chosen]),
            ]
        for number, port in enumerate(self.i):
            m.d.comb += port.ready.eq(free & (chosen == number))
        # The next one in turn that has a word, as soon as the chosen one has none.
        with m.Switch(chosen):
            for now in range(self.clients):
                with m.Case(now):
                    for step in reversed(range(1, self.clients)):
                        other = (now + step) % self.clients
                        with m.If(~self.i[now].valid & self.i[other].valid):
                            m.d.sync += chosen.eq(other)
        return m
