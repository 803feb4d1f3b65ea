"""A calibration in memory as writes to the tables of a cache."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.layouts import Table, TableWrite
from kvant.hw.kvcache.parameters import TABLE_ENTRIES, THRESHOLDS
from kvant.hw.soc.axi_reader import read_word
from kvant.hw.soc.parameters import SocParameters


class CalibrationReader(wiring.Component):
    """Cuts the words of a calibration into table writes of head 0, one per cycle.

    Parameters
    ----------
    p : SocParameters
    channels : int
        Most numbers that a calibration has.

    Members
    -------
    start, kind, count : in
        Takes the words of a calibration: coefficients, thresholds and, unless *count* is 0, *count* numbers for tables
        of this kind.
    words : in stream
        `read_word`.
    o : out stream
        Of `TableWrite`.
    busy : out
        From `start` on until the last write has been taken.
    failed : out
        A word came back with an error: `o` ends until reset.
    """

    def __init__(self, p: SocParameters, channels: int):
        self.p = p
        self.channels = channels
        super().__init__(
            {
                "start": In(1),
                "kind": In(Table),
                "count": In(range(channels + 1)),
                "words": In(stream.Signature(read_word(p))),
                "o": Out(stream.Signature(data.StructLayout({"data": TableWrite()}))),
                "busy": Out(1),
                "failed": Out(1),
            }
        )

    def elaborate(self, platform):
        bits = self.p.port_bits
        m = Module()
        word, filled = Signal(bits), Signal()
        index, place = Signal(range(max(TABLE_ENTRIES, self.channels))), Signal(range(bits // 8))
        count = Signal.like(self.count)
        table = Signal(Table)
        part = Signal(range(3))
        narrow, entries, per_word = Signal(), Signal(range(max(TABLE_ENTRIES, self.channels) + 1)), bits // 8
        kind = Signal(Table)
        m.d.comb += narrow.eq(part == 0)
        with m.Switch(part):
            with m.Case(0):
                m.d.comb += [entries.eq(TABLE_ENTRIES), kind.eq(Table.COEFFICIENT)]
            with m.Case(1):
                m.d.comb += [entries.eq(THRESHOLDS), kind.eq(Table.THRESHOLD)]
            with m.Default():
                m.d.comb += [entries.eq(count), kind.eq(table)]
        part_end, word_end, moves, takes = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            part_end.eq(index == entries - 1),
            word_end.eq(part_end | (place == Mux(narrow, per_word - 1, per_word // 2 - 1))),
            self.o.valid.eq(filled),
            self.o.payload.data.kind.eq(kind),
            self.o.payload.data.index.eq(index),
            self.o.payload.data.value.eq(Mux(narrow, word[:8], word[:16])),
            moves.eq(self.o.valid & self.o.ready),
            self.words.ready.eq(self.busy & ~self.failed & ~filled),
            takes.eq(self.words.valid & self.words.ready),
        ]
        with m.If(takes):
            m.d.sync += [word.eq(self.words.payload.data), filled.eq(~self.words.payload.error)]
            m.d.sync += self.failed.eq(self.words.payload.error)
        with m.If(moves):
            m.d.sync += [
                word.eq(Mux(narrow, word >> 8, word >> 16)),
                place.eq(Mux(word_end, 0, place + 1)),
                index.eq(Mux(part_end, 0, index + 1)),
            ]
            with m.If(word_end):
                m.d.sync += filled.eq(0)
            with m.If(part_end):
                m.d.sync += part.eq(part + 1)
                with m.If((part == 2) | ((part == 1) & (count == 0))):
                    m.d.sync += self.busy.eq(0)
        with m.If(self.start):
            m.d.sync += [self.busy.eq(1), part.eq(0), count.eq(self.count), table.eq(self.kind)]
        return m
