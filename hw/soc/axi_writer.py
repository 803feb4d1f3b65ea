"""Words with addresses to memory, in bursts."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer
from kvant.hw.soc.axi import Burst, WriteSignature, word_address_bits
from kvant.hw.soc.parameters import LONGEST_BURST, PAGE_BYTES, SocParameters
from kvant.hw.soc.word_queue import WordQueue

WAITING_BURSTS = 8
UNANSWERED = 15
"""Most bursts without an answer."""


def write_word(p: SocParameters) -> data.StructLayout:
    """A word to memory: word address, data, byte strobes, and whether the burst ends with it whatever follows."""
    return data.StructLayout(
        {"address": word_address_bits(p), "data": p.port_bits, "strobes": p.port_bytes, "last": 1},
    )


class AxiWriter(wiring.Component):
    """Collects words at consecutive addresses into bursts and writes them.

    A burst ends where the next word does not follow, at `last`, at `burst_beats` and before a multiple of 4 KB. It
    begins at the port when all its words are here, so that it never holds up the port.

    Parameters
    ----------
    p : SocParameters
    depth : int
        Words of the queue, a power of two, at least `burst_beats`.
    burst_beats : int
        Longest burst.

    Members
    -------
    i : in stream
        `write_word`. The last word of a run has `last`, or it stays here.
    stop : in
        Begin no further burst; words of one that has begun are written with all strobes 0.
    owes : out
        A burst has begun that has not been answered. While it is low under `stop`, the writer may be reset.
    idle : out
        Every word has been written and answered.
    error : out
        In the cycle of an answer that reports an error.
    sent : out
        A word is transferred to memory.
    bus : Out(WriteSignature)
    """

    def __init__(self, p: SocParameters, *, depth: int, burst_beats: int):
        self.p = p
        self.depth = depth
        self.burst_beats = check_integer("burst_beats", burst_beats, 1, min(depth, LONGEST_BURST))
        super().__init__(
            {
                "i": In(stream.Signature(write_word(p))),
                "stop": In(1),
                "owes": Out(1),
                "idle": Out(1),
                "error": Out(1),
                "sent": Out(1),
                "bus": Out(WriteSignature(p)),
            }
        )

    def elaborate(self, platform):
        p, bus = self.p, self.bus
        m = Module()
        words_shape = data.StructLayout({"data": p.port_bits, "strobes": p.port_bytes})
        m.submodules.words = words = WordQueue(words_shape, self.depth)
        m.submodules.bursts = bursts = fifo.SyncFIFOBuffered(width=Burst(p).size, depth=WAITING_BURSTS)
        page_words = PAGE_BYTES // p.port_bytes

        # Bursts form.
        word = self.i.payload
        is_open = Signal()
        base, following = Signal(word_address_bits(p)), Signal(word_address_bits(p))
        count = Signal(8)  # words of the open burst
        apart, ends, take, close = Signal(), Signal(), Signal(), Signal()
        burst = Signal(Burst(p))
        m.d.comb += [
            apart.eq(is_open & (word.address != following)),
            ends.eq(
                word.last
                | (word.address % page_words == page_words - 1)
                | (Mux(is_open, count, 0) == self.burst_beats - 1)
            ),
            close.eq(self.i.valid & bursts.w_rdy & (apart | (ends & words.i.ready))),
            take.eq(self.i.valid & bursts.w_rdy & ~apart & words.i.ready),
            self.i.ready.eq(bursts.w_rdy & ~apart & words.i.ready),
            words.i.valid.eq(take),
            words.i.payload.data.eq(word.data),
            words.i.payload.strobes.eq(word.strobes),
            burst.address.eq(Mux(is_open, base, word.address)),
            burst.beats.eq(Mux(is_open, count, 0) - apart),
            bursts.w_data.eq(burst),
            bursts.w_en.eq(close),
        ]
        with m.If(close):
            m.d.sync += is_open.eq(0)
        with m.Elif(take):
            m.d.sync += [is_open.eq(1), count.eq(Mux(is_open, count, 0) + 1)]
            with m.If(~is_open):
                m.d.sync += base.eq(word.address)
        with m.If(take):
            m.d.sync += following.eq(word.address + 1)

        # Bursts go out.
        next_burst = Signal(Burst(p))
        unanswered = Signal(range(UNANSWERED + 1))
        writing = Signal()  # words of the burst are not all in the register before the port
        beats = Signal(8)
        begin, answered, load = Signal(), Signal(), Signal()
        m.d.comb += [
            next_burst.eq(bursts.r_data),
            begin.eq(bursts.r_rdy & ~writing & ~bus.awvalid & (unanswered != UNANSWERED) & ~self.stop),
            bursts.r_en.eq(begin),
            bus.bready.eq(1),
            answered.eq(bus.bvalid),
            self.error.eq(answered & bus.bresp[1]),
            load.eq(writing & words.o.valid & (~bus.wvalid | bus.wready)),
            words.o.ready.eq(load),
            self.sent.eq(bus.wvalid & bus.wready),
            self.owes.eq(unanswered != 0),
            self.idle.eq(~is_open & ~bursts.r_rdy & (bursts.level == 0) & ~self.owes),
        ]
        m.d.sync += unanswered.eq(unanswered + begin - answered)
        with m.If(bus.awready):
            m.d.sync += bus.awvalid.eq(0)
        with m.If(bus.wready):
            m.d.sync += bus.wvalid.eq(0)
        with m.If(begin):
            m.d.sync += [
                bus.awvalid.eq(1),
                bus.awaddr.eq(Cat(Const(0, p.align_bits), next_burst.address)),
                bus.awlen.eq(next_burst.beats),
                writing.eq(1),
                beats.eq(next_burst.beats),
            ]
        with m.If(load):
            m.d.sync += [
                bus.wvalid.eq(1),
                bus.wdata.eq(words.o.payload.data),
                bus.wstrb.eq(Mux(self.stop, 0, words.o.payload.strobes)),
                bus.wlast.eq(beats == 0),
                beats.eq(beats - 1),
                writing.eq(beats != 0),
            ]
        return m
