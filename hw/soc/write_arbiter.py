"""Several writers of memory at one port."""

from amaranth.hdl import Array, Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer
from kvant.hw.soc.axi_writer import write_word
from kvant.hw.soc.parameters import SocParameters


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

    A writer keeps the port as long as it offers words. Answers do not tell writers apart: `written` waits for the words
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
        chosen = Signal(range(max(2, self.clients)))
        chosen_valid = Signal()
        valid = Array(port.words.valid for port in self.ports)
        m.d.comb += [
            chosen_valid.eq(valid[chosen]),
            self.flush.eq(Cat(port.flush for port in self.ports).any()),
        ]
        for number, port in enumerate(self.ports):
            m.d.comb += port.written.eq(self.idle)
            with m.If(~chosen_valid & port.words.valid):
                m.d.sync += chosen.eq(number)
            with m.If(chosen == number):
                m.d.comb += [
                    self.o.valid.eq(port.words.valid),
                    self.o.payload.eq(port.words.payload),
                    port.words.ready.eq(self.o.ready),
                ]
        return m
