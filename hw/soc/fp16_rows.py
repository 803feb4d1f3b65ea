"""Rows of fp16 elements from memory, cut into transfers."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.parameters import CacheParameters, ceil_div
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.axi_reader import AxiReader, ReaderSignature
from kvant.hw.soc.parameters import LONGEST_BURST, SocParameters
from kvant.hw.soc.unit_ring import UnitRing

HALF_BITS = 16
"""Bits of an element."""

ROW_COUNT_BITS = 17
"""Bits of a number of rows."""

WAITING_JOBS = 2
LEAST_DEPTH = 64
"""Words read ahead, so that a memory's latency of some 50 cycles does not show."""


class RowsJob(data.StructLayout):
    """Rows in memory.

    Members
    -------
    address : word address of the first row
    stride : words from a row to the next
    rows : from 1
    tag : 2
        Comes back with the transfers.
    """

    def __init__(self, p: SocParameters):
        super().__init__(
            {"address": word_address_bits(p), "stride": word_address_bits(p), "rows": ROW_COUNT_BITS, "tag": 2}
        )


def row_transfer(p: CacheParameters) -> data.StructLayout:
    """A transfer of a row.

    Members
    -------
    data : lanes * 16
    first, final : 1
        Of the first row of its job, of the last row; in all transfers of it.
    row_end : 1
    tag : 2
    """
    return data.StructLayout(
        {"data": data.ArrayLayout(HALF_BITS, p.lanes), "first": 1, "final": 1, "row_end": 1, "tag": 2}
    )


class RowReader(wiring.Component):
    """Reads rows of `head_dim` elements, job by job, and hands them out in `row_transfers` transfers each.

    A row is a few words, one burst or more. Rows of the next job are asked for while those of a job wait. Surplus lanes
    of a last transfer have no meaning.

    Parameters
    ----------
    p : CacheParameters
    soc : SocParameters

    Members
    -------
    job : in stream
        `RowsJob`.
    port : Out(ReaderSignature)
    o : out stream
        `row_transfer`.
    failed : out
        A word came back with an error: `o` ends until reset.
    """

    def __init__(self, p: CacheParameters, soc: SocParameters):
        self.p = p
        self.soc = soc
        self.row_words = ceil_div(HALF_BITS * p.head_dim, soc.port_bits)
        super().__init__(
            {
                "job": In(stream.Signature(RowsJob(soc))),
                "port": Out(ReaderSignature(soc)),
                "o": Out(stream.Signature(row_transfer(p))),
                "failed": Out(1),
            }
        )

    def elaborate(self, platform):
        p, soc = self.p, self.soc
        m = Module()
        depth = max(LEAST_DEPTH, 1 << (2 * self.row_words - 1).bit_length())
        m.submodules.reader = reader = AxiReader(soc, depth=depth, burst_beats=min(self.row_words, LONGEST_BURST))
        wiring.connect(m, reader.port, wiring.flipped(self.port))

        # Rows are asked for.
        tag_shape = data.StructLayout({"rows": ROW_COUNT_BITS, "tag": 2})
        m.submodules.jobs = jobs = fifo.SyncFIFOBuffered(width=tag_shape.size, depth=WAITING_JOBS)
        asked = Signal(RowsJob(soc))
        asking = Signal()
        m.d.comb += [
            self.job.ready.eq(~asking & jobs.w_rdy),
            jobs.w_en.eq(self.job.valid & self.job.ready),
            jobs.w_data.eq(Cat(self.job.payload.rows, self.job.payload.tag)),
            reader.region.valid.eq(asking),
            reader.region.payload.address.eq(asked.address),
            reader.region.payload.words.eq(self.row_words),
        ]
        with m.If(jobs.w_en):
            m.d.sync += [asked.eq(self.job.payload), asking.eq(1)]
        with m.Elif(asking & reader.region.ready):
            m.d.sync += [
                asked.address.eq(asked.address + asked.stride),
                asked.rows.eq(asked.rows - 1),
                asking.eq(asked.rows != 1),
            ]

        # Rows are cut. Each begins with a word: where transfers are no whole words, the rest is dropped at its end.
        word_halves = soc.port_bits // HALF_BITS
        m.submodules.ring = ring = UnitRing(HALF_BITS, word_halves, [p.lanes])
        gapless = self.row_words * word_halves == p.row_transfers * p.lanes
        current = Signal(tag_shape)
        active, first, opens, last_words = Signal(), Signal(), Signal(), Signal()
        transfer = Signal(range(max(2, p.row_transfers)))
        row_end, moves, takes, wanted = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            row_end.eq(transfer == p.row_transfers - 1),
            wanted.eq(~self.failed),
            ring.i.valid.eq(reader.o.valid & wanted),
            ring.i.payload.eq(reader.o.payload.data),
            reader.o.ready.eq(ring.i.ready & wanted),
            takes.eq(reader.o.valid & reader.o.ready),
            self.o.valid.eq(active & ~opens & (ring.available[0] | (row_end & last_words)) & ~self.failed),
            self.o.payload.data.eq(ring.window),
            self.o.payload.first.eq(first),
            self.o.payload.final.eq(current.rows == 1),
            self.o.payload.row_end.eq(row_end),
            self.o.payload.tag.eq(current.tag),
            moves.eq(self.o.valid & self.o.ready),
            ring.take[0].eq(moves),
            jobs.r_en.eq(~active),
        ]
        if not gapless:
            words = Signal(range(self.row_words + 1))  # of the row that are still to come
            m.d.comb += [wanted.eq(~self.failed & (words != 0)), last_words.eq(words == 0), ring.clear.eq(opens)]
            with m.If(opens):
                m.d.sync += [words.eq(self.row_words), opens.eq(0)]
            with m.Elif(takes):
                m.d.sync += words.eq(words - 1)
        with m.If(takes & reader.o.payload.error):
            m.d.sync += self.failed.eq(1)
        with m.If(~active):
            m.d.sync += first.eq(1)
            with m.If(jobs.r_rdy):
                m.d.sync += [current.eq(jobs.r_data), active.eq(1), opens.eq(not gapless)]
        with m.Elif(moves):
            m.d.sync += transfer.eq(transfer + 1)
            with m.If(row_end):
                m.d.sync += [
                    transfer.eq(0),
                    first.eq(0),
                    current.rows.eq(current.rows - 1),
                    active.eq(current.rows != 1),
                    opens.eq(not gapless),
                ]
        return m
