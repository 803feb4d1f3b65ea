"""Runs of elements in memory, each from a word on, to pieces of several elements."""

from math import gcd

from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.parameters import ceil_div
from kvant.hw.soc.axi_reader import read_word
from kvant.hw.soc.parameters import SocParameters
from kvant.hw.soc.unit_ring import UnitRing


class RunCutter(wiring.Component):
    """Cuts runs of elements; a word enters and a piece leaves per cycle, and a cycle lies between two runs.

    Parameters
    ----------
    p : SocParameters
    bits : int
        Of an element, a power of two up to `port_bits`.
    lanes : int
        Elements of a piece.
    most : int
        Elements of a run at most.

    Members
    -------
    run : in stream
        Elements of a run, from 1.
    words : in stream
        `read_word`: as many as the run takes; none is taken without a run.
    o : out stream
        `data`: a piece, the first element lowest; what lies behind the run's last element is undefined. `last`: it
        ends the run.
    failed : out
        A word came with an error: `o` ends until reset.
    """

    def __init__(self, p: SocParameters, *, bits: int, lanes: int, most: int):
        self.p, self.bits, self.lanes, self.most = p, bits, lanes, most
        super().__init__(
            {
                "run": In(stream.Signature(range(most + 1))),
                "words": In(stream.Signature(read_word(p))),
                "o": Out(stream.Signature(data.StructLayout({"data": bits * lanes, "last": 1}))),
                "failed": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        port_bits = self.p.port_bits
        unit = gcd(port_bits, self.bits * self.lanes)
        m.submodules.ring = ring = UnitRing(unit, port_bits // unit, [self.bits * self.lanes // unit])
        in_word = port_bits // self.bits
        word_bits = in_word.bit_length() - 1
        left = Signal(range(self.most + 1))
        words_left = Signal(range(ceil_div(self.most, in_word) + 1))
        active, last, take_word = Signal(), Signal(), Signal()
        m.d.comb += [
            self.run.ready.eq(~active),
            ring.clear.eq(~active),
            last.eq(left <= self.lanes),
            ring.i.payload.eq(self.words.payload.data),
            ring.i.valid.eq(self.words.valid & (words_left != 0) & ~self.failed),
            self.words.ready.eq(ring.i.ready & (words_left != 0) & ~self.failed),
            take_word.eq(self.words.valid & self.words.ready),
            # What lies behind the last element does not matter, so the words that are here are enough.
            self.o.valid.eq(active & (ring.available[0] | (last & (words_left == 0))) & ~self.failed),
            self.o.payload.data.eq(ring.window),
            self.o.payload.last.eq(last),
            ring.take[0].eq(self.o.valid & self.o.ready),
        ]
        with m.If(self.run.valid & self.run.ready):
            m.d.sync += [
                active.eq(1),
                left.eq(self.run.payload),
                words_left.eq((self.run.payload + (in_word - 1)) >> word_bits),
            ]
        with m.If(take_word):
            m.d.sync += words_left.eq(words_left - 1)
            with m.If(self.words.payload.error):
                m.d.sync += self.failed.eq(1)
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += [left.eq(left - self.lanes), active.eq(~last)]
        return m
