"""Writes of a cache to its pages as words of the port."""

from amaranth.hdl import Array, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.control import POSITION_BITS
from kvant.hw.kvcache.layouts import PageWrite
from kvant.hw.kvcache.parameters import CacheParameters, ceil_div
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.axi_writer import write_word
from kvant.hw.soc.parameters import SocParameters


class PageWriter(wiring.Component):
    """Gives writes to pages their place in memory; a word of the port per cycle.

    Writes of one window follow each other. Its page is looked up when the first of them comes, or ahead.

    Parameters
    ----------
    p : CacheParameters
    soc : SocParameters
    bits : int
        Width of a write.

    Members
    -------
    ahead, first : in
        Look up the page of this window, that of the next write. Only while `idle`.
    start : in
        Forget the page.
    i : in stream
        `PageWrite`. `page` and `head` do not count.
    window : out stream
    known, base : in
        To and from a `PageTable`.
    o : out stream
        `write_word`; some may have no strobes.
    idle : out
        Nothing is held.
    """

    def __init__(self, p: CacheParameters, soc: SocParameters, bits: int):
        self.p = p
        self.soc = soc
        self.bits = bits
        super().__init__(
            {
                "start": In(1),
                "ahead": In(1),
                "first": In(POSITION_BITS - p.group.bit_length() + 1),
                "i": In(stream.Signature(PageWrite(bits))),
                "window": Out(stream.Signature(POSITION_BITS)),
                "known": In(1),
                "base": In(word_address_bits(soc)),
                "o": Out(stream.Signature(write_word(soc))),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform):
        soc = self.soc
        m = Module()
        steps = ceil_div(self.bits, soc.port_bits)
        held = Signal(PageWrite(self.bits), reset_less=True)
        occupied = Signal()
        window, page = Signal.like(self.first), Signal(word_address_bits(soc))
        asks, placed = Signal(), Signal()  # the page of the window is being looked up, is known
        step = Signal(range(max(2, steps)))
        free, moves, leaves, take = Signal(), Signal(), Signal(), Signal()
        given = self.i.payload
        window_bits = self.p.group.bit_length() - 1
        m.d.comb += [
            free.eq(~self.o.valid | self.o.ready),
            moves.eq(occupied & placed & free),
            leaves.eq(moves & (step == steps - 1)),
            self.i.ready.eq(~occupied | leaves),
            take.eq(self.i.valid & self.i.ready),
            self.window.valid.eq(asks),
            self.window.payload.eq(window),
            self.idle.eq(~occupied & ~self.o.valid),
        ]
        with m.If(self.known):
            m.d.sync += [page.eq(self.base), placed.eq(1), asks.eq(0)]
        with m.If(moves):
            m.d.sync += step.eq(Mux(leaves, 0, step + 1))
        with m.If(take):
            m.d.sync += [held.eq(given), occupied.eq(1)]
            number = given.user.timestamp >> window_bits
            with m.If(~(asks | placed) | (number != window)):
                m.d.sync += [window.eq(number), asks.eq(1), placed.eq(0)]
        with m.Elif(leaves):
            m.d.sync += occupied.eq(0)
        with m.If(self.start):
            m.d.sync += [placed.eq(0), asks.eq(0)]
        with m.If(self.ahead):
            m.d.sync += [window.eq(self.first), asks.eq(1)]
        data = Array(held.data.word_select(k, soc.port_bits) for k in range(steps))
        keep = Array(held.keep.word_select(k, soc.port_bytes) for k in range(steps))
        with m.If(free):
            word = self.o.payload
            m.d.sync += [
                self.o.valid.eq(moves),
                word.address.eq(page + (held.user.address >> soc.align_bits) + step),
                word.data.eq(data[step]),
                word.strobes.eq(keep[step]),
            ]
        return m
