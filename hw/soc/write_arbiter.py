"""Several writers of memory at one port."""

from amaranth.hdl import Cat, Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer
from kvant.hw.soc.axi_writer import write_word
from kvant.hw.soc.parameters import SocParameters
from kvant.hw.soc.write_words import WordArbiter


class WriterSignature(wiring.Signature):
    """What joins a writer to the `WriteArbiter`, seen by the writer.

    Members
    -------
    words : out stream
        `write_word`.
    flush : out
        No more words will come for now: bursts may end.
    written : in
        Every word that was taken has been written and answered.
    """

    def __init__(self, p: SocParameters):
        super().__init__({"words": Out(stream.Signature(write_word(p))), "flush": Out(1), "written": In(1)})


class WriteArbiter(wiring.Component):
    """Hands the words of several writers to one `AxiWriter`.

    A writer goes on while it has words. Answers do not tell writers apart: `written` waits for the words
    of all, and whoever needs to know whose write failed lets one of them write at a time.

    Parameters
    ----------
    p : SocParameters
    clients : int

    Members
    -------
    ports : array of In(WriterSignature)
    o : out stream
        `write_word`, to `AxiWriter`.
    flush : out
    idle : in
        See `AxiWriter`.
    """

    def __init__(self, p: SocParameters, clients: int):
        self.p = p
        self.clients = check_integer("clients", clients, 1)
        super().__init__(
            {
                "ports": In(WriterSignature(p)).array(clients),
                "o": Out(stream.Signature(write_word(p))),
                "flush": Out(1),
                "idle": In(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.words = words = WordArbiter(self.p, self.clients)
        wiring.connect(m, words.o, wiring.flipped(self.o))
        for theirs, port in zip(words.i, self.ports, strict=True):
            wiring.connect(m, wiring.flipped(port.words), theirs)
            m.d.comb += port.written.eq(self.idle & ~self.o.valid)
        m.d.comb += self.flush.eq(Cat(port.flush for port in self.ports).any())
        return m
