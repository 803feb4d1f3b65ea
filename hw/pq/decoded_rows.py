"""What joins the decoder of codes to the rest: codebooks that go two ways, rows that come from two sides."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.row_quantizer import row_output
from kvant.hw.pq.codebook_jobs import word_input
from kvant.hw.pq.parameters import PqParameters


class CodebookSplit(wiring.Component):
    """Sends each codebook of a stream to the engine or to the decoder, as they were asked for.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    to_engine, to_decoder : in
        The next codebook that nobody has asked for goes there; never both in one cycle.
    words : in stream, see `kvant.hw.pq.codebook_jobs.word_input`
    engine, decoder : out stream, as `words`
    """

    _JOBS = 8  # more than commands at work and those that the engine takes ahead

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        words = stream.Signature(word_input(p))
        super().__init__(
            {
                "to_engine": In(1),
                "to_decoder": In(1),
                "words": In(words),
                "engine": Out(words),
                "decoder": Out(words),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.jobs = jobs = fifo.SyncFIFOBuffered(width=1, depth=self._JOBS)
        left = Signal(range(p.codebook_words), init=p.codebook_words - 1)  # words after this one
        words, decodes = self.words, jobs.r_data
        take = Signal()
        m.d.comb += [
            jobs.w_en.eq(self.to_engine | self.to_decoder),
            jobs.w_data.eq(self.to_decoder),
            self.engine.payload.eq(words.payload),
            self.decoder.payload.eq(words.payload),
            self.engine.valid.eq(words.valid & jobs.r_rdy & ~decodes),
            self.decoder.valid.eq(words.valid & jobs.r_rdy & decodes),
            words.ready.eq(jobs.r_rdy & Mux(decodes, self.decoder.ready, self.engine.ready)),
            take.eq(words.valid & words.ready),
            jobs.r_en.eq(take & (left == 0)),
        ]
        with m.If(take):
            m.d.sync += left.eq(Mux(left == 0, p.codebook_words - 1, left - 1))
        return m


class RowMerge(wiring.Component):
    """Decoded rows of a pass, then the rows that were never coded, with one end.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    decodes : in
        The pass has decoded rows; stable while it lasts.
    decoded : in stream, see `kvant.hw.attention.row_quantizer.row_output`
        Without `empty`.
    fresh : in stream, as `decoded`
        Of every pass. If it is empty, the last decoded row ends the pass, so that one's last transfer waits until it
        is known.
    rows : out stream, as `decoded`
    """

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        rows = stream.Signature(row_output(p))
        super().__init__({"decodes": In(1), "decoded": In(rows), "fresh": In(rows), "rows": Out(rows)})

    def elaborate(self, platform):
        m = Module()
        decoded, fresh, rows = self.decoded, self.fresh, self.rows
        through = Signal()  # all decoded rows have left
        first, ends, take = Signal(), Signal(), Signal()
        m.d.comb += [
            first.eq(self.decodes & ~through),
            ends.eq(decoded.payload.last & decoded.payload.final),
            *(
                rows.payload[name].eq(Mux(first, decoded.payload[name], fresh.payload[name]))
                for name in ("scale", "last", "empty")
            ),
            rows.payload.data.as_value().eq(Mux(first, decoded.payload.data.as_value(), fresh.payload.data.as_value())),
            rows.payload.final.eq(Mux(first, decoded.payload.final & fresh.payload.empty, fresh.payload.final)),
            rows.valid.eq(Mux(first, decoded.valid & (fresh.valid | ~ends), fresh.valid)),
            take.eq(rows.valid & rows.ready),
            decoded.ready.eq(first & rows.ready & (fresh.valid | ~ends)),
            fresh.ready.eq(rows.ready & Mux(first, decoded.valid & ends & fresh.payload.empty, 1)),
        ]
        with m.If(first):
            with m.If(take & ends):
                m.d.sync += through.eq(~fresh.payload.empty)
        with m.Elif(take & fresh.payload.last & fresh.payload.final):
            m.d.sync += through.eq(0)
        return m
