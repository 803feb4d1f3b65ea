"""Codes on their way from the codebook engine to memory."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.parameters import ceil_div
from kvant.hw.pq.code_writer import CodeWriter
from kvant.hw.pq.codebook_jobs import codes_output
from kvant.hw.pq.gearbox import WordPacker
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.ring_layouts import EncodeJob


class CodeUser(data.StructLayout):
    """Where a word of codes goes.

    Members
    -------
    address
        In words of the port, within the codes of the head and store.
    store : 1
        0: keys, 1: values.
    head : 8
    """

    def __init__(self, p: PqParameters):
        words = ceil_div(p.tokens, p.chunk_tokens) * p.chunk_words
        super().__init__({"address": range(max(2, words)), "store": 1, "head": 8})


def code_output(p: PqParameters) -> data.StructLayout:
    """Payload of the port of codes: a word of the port, `CodeUser`, the end of a batch."""
    return data.StructLayout({"data": p.port_bits, "user": CodeUser(p), "last": 1})


class CodePath(wiring.Component):
    """Arranges the codes of batches as they lie in memory; see `PqParameters`.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    job : in stream of `EncodeJob`
        A batch whose codes will come; its scale is ignored.
    codes : in stream, see `kvant.hw.pq.codebook_jobs.codes_output`
    o : out stream, see `code_output`
        Whole frames, the first at ``first / chunk_tokens * chunk_words``; tokens that do not exist have code 0.
    written : out
        In this cycle the last word of a batch is taken.
    busy : out
        A batch is under way.
    """

    BATCHES = 4  # between the engine's taking a batch and its last word

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        super().__init__(
            {
                "job": In(stream.Signature(EncodeJob(p))),
                "codes": In(stream.Signature(codes_output(p))),
                "o": Out(stream.Signature(code_output(p))),
                "written": Out(1),
                "busy": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.writer = writer = CodeWriter(p)
        m.submodules.packer = packer = WordPacker(p)
        wiring.connect(m, wiring.flipped(self.codes), writer.codes)
        # The engine takes batches ahead of their codes. A batch leaves the writer before its last word leaves here, so
        # each has a queue of its own; what `places` has room for, `jobs` has, too.
        shape = EncodeJob(p)
        m.submodules.jobs = jobs = fifo.SyncFIFOBuffered(width=shape.size, depth=self.BATCHES)
        m.submodules.places = places = fifo.SyncFIFOBuffered(width=shape.size, depth=self.BATCHES)
        waiting = data.View(shape, jobs.r_data)
        m.d.comb += [
            self.job.ready.eq(places.w_rdy & jobs.w_rdy),
            *(queue.w_data.eq(self.job.payload) for queue in (jobs, places)),
            *(queue.w_en.eq(self.job.valid & self.job.ready) for queue in (jobs, places)),
            writer.job.valid.eq(jobs.r_rdy),
            *(writer.job.payload[name].eq(waiting[name]) for name in ("store", "head", "first", "count")),
            jobs.r_en.eq(writer.job.ready),
            self.busy.eq(places.level != 0),
        ]

        address = self.o.payload.user.address
        current, offset = data.View(shape, places.r_data), Signal.like(address)
        chunk = current.first >> (p.chunk_tokens.bit_length() - 1)
        m.d.comb += [
            packer.i.payload.data.eq(writer.words.payload.data),
            packer.i.payload.last.eq(writer.words.payload.last),
            packer.i.valid.eq(writer.words.valid),
            writer.words.ready.eq(packer.i.ready),
            self.o.payload.data.eq(packer.o.payload.data),
            self.o.payload.last.eq(packer.o.payload.last),
            self.o.payload.user.store.eq(current.store),
            self.o.payload.user.head.eq(current.head),
            address.eq((chunk * p.chunk_words + offset)[: len(address)]),
            self.o.valid.eq(packer.o.valid & places.r_rdy),
            packer.o.ready.eq(self.o.ready & places.r_rdy),
            self.written.eq(self.o.valid & self.o.ready & self.o.payload.last),
            places.r_en.eq(self.written),
        ]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += offset.eq(offset + 1)
            with m.If(self.o.payload.last):
                m.d.sync += offset.eq(0)
        return m
