"""Codes of the history on their way from memory to the tables, the bins or the decoder."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.parameters import ceil_div
from kvant.hw.pq.bins import CodeWord
from kvant.hw.pq.gearbox import WordUnpacker
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.tables import ScanWord

_QUARTERS = 4  # of a word of the port: frames are whole quarters


class HistoryReader(wiring.Component):
    """Takes the words of the port that hold the codes of some tokens and cuts them into words of codes.

    A pass of T tokens takes ``ceil(frames * frame_bits / port_bits)`` words of the port, ``frames = ceil(T / frame)``,
    and gives ``frames * frame_words`` words of codes, one per cycle where the port keeps up.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    start : in
        Begin a pass; `tokens` and where it goes are stable from here to `done`. Only while `done` is high.
    tokens : in
        1 .. p.tokens.
    to_decoder, to_bins : in
        The words go to `decoder`; if not, to `bins`; otherwise to `tables`.
    words : in stream of {data: port_bits}
    tables, decoder : out stream of `ScanWord`
    bins : out stream of `CodeWord`
    done : out
        No pass is under way.
    """

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        super().__init__(
            {
                "start": In(1),
                "tokens": In(range(p.tokens + 1)),
                "to_decoder": In(1),
                "to_bins": In(1),
                "words": In(stream.Signature(data.StructLayout({"data": p.port_bits}))),
                "tables": Out(stream.Signature(ScanWord(p))),
                "bins": Out(stream.Signature(CodeWord(p))),
                "decoder": Out(stream.Signature(ScanWord(p))),
                "done": Out(1, init=1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.unpacker = unpacker = WordUnpacker(p)

        # Words of the port are counted from the number of frames, which one cycle finds and the next multiplies.
        frame_quarters = ceil_div(p.frame_bits * _QUARTERS, p.port_bits)
        frame_bits = p.frame.bit_length() - 1
        most_frames = ceil_div(p.tokens, p.frame)
        frames = Signal(range(most_frames + 1))
        port_words = Signal(range(ceil_div(most_frames * frame_quarters, _QUARTERS) + 1))
        counting = Signal(2)
        m.d.comb += unpacker.i.payload.data.eq(self.words.payload.data)
        m.d.sync += counting.eq(counting << 1 | self.start)
        with m.If(self.start):
            m.d.sync += [frames.eq((self.tokens + p.frame - 1) >> frame_bits), port_words.eq(0)]
        with m.If(counting[0]):
            m.d.sync += port_words.eq((frames * frame_quarters + _QUARTERS - 1) >> 2)
        asks = Signal()
        m.d.comb += [
            asks.eq(port_words != 0),
            unpacker.i.valid.eq(self.words.valid & asks),
            unpacker.i.payload.last.eq(port_words == 1),
            self.words.ready.eq(unpacker.i.ready & asks),
        ]
        with m.If(self.words.valid & self.words.ready):
            m.d.sync += port_words.eq(port_words - 1)

        # Words of codes: which of its frame, and tokens of the frame and of those behind it.
        word = Signal(range(max(2, p.frame_words)))
        left = Signal(range(p.tokens + 1))
        frame_end, last_frame, last = Signal(), Signal(), Signal()
        codes = unpacker.o
        m.d.comb += [
            frame_end.eq(word == p.frame_words - 1),
            last_frame.eq(left <= p.frame),
            last.eq(frame_end & last_frame),
            self.tables.payload.data.eq(codes.payload.data),
            self.tables.payload.count.eq(Mux(last_frame, left, p.frame)),
            self.tables.payload.last.eq(last),
            self.tables.valid.eq(codes.valid & ~self.to_bins & ~self.to_decoder),
            self.decoder.payload.eq(self.tables.payload),
            self.decoder.valid.eq(codes.valid & self.to_decoder),
            self.bins.payload.data.eq(codes.payload.data),
            self.bins.payload.last.eq(last),
            self.bins.valid.eq(codes.valid & self.to_bins & ~self.to_decoder),
            codes.ready.eq(
                Mux(self.to_decoder, self.decoder.ready, Mux(self.to_bins, self.bins.ready, self.tables.ready))
            ),
        ]
        with m.If(self.start):
            m.d.sync += [self.done.eq(0), word.eq(0), left.eq(self.tokens)]
        with m.Elif(codes.valid & codes.ready):
            m.d.sync += word.eq(Mux(frame_end, 0, word + 1))
            with m.If(frame_end):
                m.d.sync += left.eq(left - p.frame)
            with m.If(last):
                m.d.sync += self.done.eq(1)
        return m
