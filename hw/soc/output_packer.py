"""fp32 outputs, one after the other, to words of memory."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.soc.axi_writer import write_word
from kvant.hw.soc.parameters import SocParameters

WORD_BITS = 32
"""Bits of an output."""


def output_address_bits(p: SocParameters) -> int:
    """Bits of an address that counts outputs."""
    return p.address_bits - 2


class PlacedOutput(data.StructLayout):
    """An output with its place in memory.

    Members
    -------
    value : 32
    keep : 1
        It is written.
    address : counts outputs
    leaves : 1
        No output for the same word follows.
    """

    def __init__(self, p: SocParameters):
        super().__init__({"value": WORD_BITS, "keep": 1, "address": output_address_bits(p), "leaves": 1})


class OutputPacker(wiring.Component):
    """Gathers outputs that share a word of the port; one output per cycle. Only outputs are strobed.

    Members
    -------
    i : in stream
        `PlacedOutput`. A word leaves when its last lane is written, and with `leaves`.
    words : out stream
        `write_word`, from a register.
    """

    def __init__(self, p: SocParameters):
        self.p = p
        super().__init__(
            {"i": In(stream.Signature(PlacedOutput(p))), "words": Out(stream.Signature(write_word(p)))},
        )

    def elaborate(self, platform):
        m = Module()
        lanes = self.p.port_bits // WORD_BITS
        lane_bits = lanes.bit_length() - 1
        given, words = self.i.payload, self.words
        held = Signal(data.ArrayLayout(WORD_BITS, lanes))
        strobes, word_strobes = Signal(lanes), Signal(lanes)
        lane = given.address[:lane_bits] if lanes > 1 else 0
        leaves = Signal()
        merged = [Mux(given.keep & (lane == number), given.value, held[number]) for number in range(lanes)]
        m.d.comb += [
            self.i.ready.eq(~words.valid | words.ready),
            word_strobes.eq(strobes | (given.keep << lane)),
            leaves.eq((given.keep & (lane == lanes - 1)) | given.leaves),
        ]
        with m.If(words.ready):
            m.d.sync += words.valid.eq(0)
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                Cat(*(held[number] for number in range(lanes))).eq(Cat(merged)),
                strobes.eq(Mux(leaves, 0, word_strobes)),
            ]
            with m.If(leaves):
                m.d.sync += [
                    words.valid.eq(word_strobes.any()),
                    words.payload.address.eq(given.address >> lane_bits),
                    words.payload.data.eq(Cat(merged)),
                    words.payload.strobes.eq(Cat(strobe.replicate(4) for strobe in word_strobes)),
                ]
        return m
