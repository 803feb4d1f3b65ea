"""Codebooks of keys and of values into the one stream that the codebook engine reads."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.pq.codebook_jobs import word_input
from kvant.hw.pq.parameters import PqParameters


class CodebookMerge(wiring.Component):
    """Passes on whole codebooks in the order in which the engine takes its jobs.

    That order depends on when commands come, the order of either stream does not: memory can serve each by itself.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    table, read_out : in
        The engine takes a job of the kind in this cycle, never both.
    keys, values : in stream, see `kvant.hw.pq.codebook_jobs.word_input`
        Codebooks for tables, and for read-outs.
    o : out stream, as they
    """

    _JOBS = 8  # more than the engine takes ahead

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        words = stream.Signature(word_input(p))
        super().__init__({"table": In(1), "read_out": In(1), "keys": In(words), "values": In(words), "o": Out(words)})

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.jobs = jobs = fifo.SyncFIFOBuffered(width=1, depth=self._JOBS)
        left = Signal(range(p.codebook_words), init=p.codebook_words - 1)  # words after this one
        keys, values, o = self.keys, self.values, self.o
        m.d.comb += [
            jobs.w_en.eq(self.table | self.read_out),
            jobs.w_data.eq(self.read_out),
            o.valid.eq(jobs.r_rdy & Mux(jobs.r_data, values.valid, keys.valid)),
            o.payload.eq(Mux(jobs.r_data, values.payload.data, keys.payload.data)),
            keys.ready.eq(jobs.r_rdy & ~jobs.r_data & o.ready),
            values.ready.eq(jobs.r_rdy & jobs.r_data & o.ready),
            jobs.r_en.eq(o.valid & o.ready & (left == 0)),
        ]
        with m.If(o.valid & o.ready):
            m.d.sync += left.eq(Mux(left == 0, p.codebook_words - 1, left - 1))
        return m
