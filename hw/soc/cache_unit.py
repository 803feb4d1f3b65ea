"""Caches of sequences whose whole state lies in memory: rows of keys or values in, pages and records out."""

from amaranth.hdl import Cat, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.layouts import Table
from kvant.hw.kvcache.packer import META_BITS
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.requantizer import Requantizer
from kvant.hw.kvcache.spatial import SpatialCache
from kvant.hw.soc.axi_reader import AxiReader, ReaderSignature
from kvant.hw.soc.axi_writer import write_word
from kvant.hw.soc.cache_control import SCAN, START, CacheControl
from kvant.hw.soc.cache_job import CacheJob
from kvant.hw.soc.cache_memory import CacheMemory
from kvant.hw.soc.calibration_reader import CalibrationReader
from kvant.hw.soc.descriptors import ErrorCode
from kvant.hw.soc.fp16_rows import RowReader
from kvant.hw.soc.page_table import PageTable
from kvant.hw.soc.page_writer import PageWriter
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.record_writer import RecordWriter
from kvant.hw.soc.weight_reader import Fault
from kvant.hw.soc.write_words import WordArbiter, WordMerger

READ_DEPTH = 64
"""Words of calibrations that are read ahead."""

READ_BURST = 16


def key_parameters(p: CacheParameters) -> CacheParameters:
    """Of the engine of keys: one head; the ring of pages does not limit a sequence."""
    return p.model_copy(update={"heads": 1, "capacity": None, "evict": True})


def value_parameters(p: CacheParameters) -> CacheParameters:
    """Of the engine of values, which have no mean."""
    return key_parameters(p).model_copy(update={"centred": False})


class CacheUnit(wiring.Component):
    """Appends rows to caches, job by job; nothing of a job is kept for the next.

    ::

        rows ────> RowReader ──────────> SpatialCache, Requantizer ──> PageWriter ──> WordMerger ─┐
        memory ─┬> CalibrationReader ──>       │ sinks, staged rows                               ├─> words
                └> PageTable ──> PageWriter    └──> RecordWriter ───────────────────> WordMerger ─┘

    Keys: the new rows are quantised as `SpatialCache` does it, a sequence that goes on at their position; what a page
    lacks stays as it is. Values: the first call is scanned, then staged; later ones are staged under the scales of the
    record. Where a window becomes full, all its rows are read again from its beginning, and become the same INT8 rows
    as before; else the new rows alone are read, and added to the window of the record.

    Parameters
    ----------
    p : TopParameters
        With `cache`.

    Members
    -------
    job : in stream
        `CacheJob`; the next one is taken when everything of the one before is in memory.
    rows, memory : Out(ReaderSignature)
        Readers of rows, and of everything else.
    words : out stream
        `write_word`.
    flush : out
        No more words will come: bursts may end.
    written : in
        All words are in memory.
    done : out
        For a cycle: the job's words are in memory.
    fault : out
        A word came back with an error: nothing goes on until reset.
    saturated : out
        Values that were clamped in this cycle; rows that are read again do not count again.
    nonfinite, error : out
        Of the job, from the cycle of the event to the next job: NaN or an infinity in a row; a reserved coefficient.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        cache = p.cache
        self.memory_layout = CacheMemory(cache, p.soc.port_bytes)
        self._keys = SpatialCache(key_parameters(cache))
        self._values = Requantizer(value_parameters(cache))
        self._code_bits = max(self._keys.word_bits, self._values.packer.word_bits)
        super().__init__(
            {
                "job": In(stream.Signature(CacheJob(p))),
                "rows": Out(ReaderSignature(p.soc)),
                "memory": Out(ReaderSignature(p.soc)),
                "words": Out(stream.Signature(write_word(p.soc))),
                "flush": Out(1),
                "written": In(1),
                "done": Out(1),
                "fault": Out(Fault()),
                "saturated": Out(range(cache.lanes + 1)),
                "nonfinite": Out(1),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p, cache, soc = self.p, self.p.cache, self.p.soc
        m = Module()
        m.submodules.control = control = CacheControl(p)
        job, keys, values = control.current, self._keys, self._values
        m.submodules.keys = ResetInserter(control.clear)(keys)
        m.submodules.values = ResetInserter(control.clear)(values)
        m.submodules.row_reader = reader = RowReader(cache, soc)
        m.submodules.calibration = calibration = CalibrationReader(soc, cache.head_dim)
        sizes = (self.memory_layout.keys.page_bytes, self.memory_layout.values.page_bytes)
        m.submodules.pages = pages = PageTable(soc, sizes, 2)
        m.submodules.record_writer = record = RecordWriter(cache, soc)
        wiring.connect(m, wiring.flipped(self.job), control.job)
        wiring.connect(m, control.rows, reader.job)
        wiring.connect(m, reader.port, wiring.flipped(self.rows))
        self._read_aside(m, control, calibration, pages)
        self._tables(m, control, calibration)
        self._pass_rows(m, control, reader)
        self._write_record(m, control, record)

        writers = {"codes": PageWriter(cache, soc, self._code_bits), "meta": PageWriter(cache, soc, META_BITS)}
        for number, (name, writer) in enumerate(writers.items()):
            m.submodules[f"{name}_writer"] = writer
            self._write_pages(m, control, name, writer, pages, number)
        sources = [*writers.values(), record]
        m.submodules.words = words = WordArbiter(soc, len(sources))
        mergers = []
        for number, source in enumerate(sources):
            m.submodules[f"merger_{number}"] = merger = WordMerger(soc)
            wiring.connect(m, source.o, merger.i)
            wiring.connect(m, merger.o, words.i[number])
            m.d.comb += merger.flush.eq(control.merge)
            mergers.append(merger)
        wiring.connect(m, words.o, wiring.flipped(self.words))
        before, failed = Signal(32), reader.failed | calibration.failed | pages.failed
        m.d.sync += before.eq(Mux(control.clear, 0, values.saturated))
        m.d.comb += [
            pages.table.eq(job.table),
            pages.pool.eq(job.pool),
            pages.values.eq(job.values),
            control.quiet.eq(
                ~Cat(keys.busy, values.busy, record.sink.valid).any()
                & record.idle
                & Cat(writer.idle for writer in writers.values()).all()
            ),
            control.merged.eq(Cat(merger.idle for merger in mergers).all() & ~self.words.valid),
            control.written.eq(self.written),
            self.flush.eq(control.flush),
            self.done.eq(control.done),
            self.saturated.eq(values.saturated - before),
            self.nonfinite.eq(keys.nonfinite | values.nonfinite),
            self.error.eq(keys.error | values.error),
            self.fault.code.eq(Mux(failed, ErrorCode.READ_CACHE, ErrorCode.NONE)),
            self.fault.slot.eq(job.slot),
        ]
        return m

    def _read_aside(self, m: Module, control: CacheControl, calibration: CalibrationReader, pages: PageTable) -> None:
        """The calibration of a job is read before its rows enter, page numbers after that."""
        soc = self.p.soc
        m.submodules.aside = aside = AxiReader(soc, depth=READ_DEPTH, burst_beats=min(READ_BURST, soc.burst_beats))
        wiring.connect(m, aside.port, wiring.flipped(self.memory))
        asks, region = control.calibration.valid, aside.region
        m.d.comb += [
            region.valid.eq(asks | pages.region.valid),
            region.payload.eq(Mux(asks, control.calibration.payload, pages.region.payload)),
            control.calibration.ready.eq(region.ready),
            pages.region.ready.eq(region.ready & ~asks),
            calibration.start.eq(asks & region.ready),
            calibration.kind.eq(Mux(control.current.values, Table.FLOOR, Table.MEAN)),
            calibration.count.eq(control.count),
            control.calibrated.eq(~calibration.busy),
            calibration.words.valid.eq(aside.o.valid & calibration.busy),
            pages.words.valid.eq(aside.o.valid & ~calibration.busy),
            aside.o.ready.eq(Mux(calibration.busy, calibration.words.ready, pages.words.ready)),
        ]
        for reader in (calibration, pages):
            m.d.comb += reader.words.payload.eq(aside.o.payload)

    def _tables(self, m: Module, control: CacheControl, calibration: CalibrationReader) -> None:
        """Calibration, then the position, to the tables of the engine."""
        of_values, resumes = control.current.values, control.resume.valid
        ports = (self._keys.cfg, self._values.cfg)
        for port, chosen in zip(ports, (~of_values, of_values), strict=True):
            m.d.comb += [
                port.valid.eq((calibration.o.valid | resumes) & chosen),
                port.payload.eq(Mux(resumes, control.resume.payload, calibration.o.payload)),
            ]
        ready = Mux(of_values, ports[1].ready, ports[0].ready)
        m.d.comb += [calibration.o.ready.eq(ready & ~resumes), control.resume.ready.eq(ready)]

    def _pass_rows(self, m: Module, control: CacheControl, reader: RowReader) -> None:
        row, of_values, passes = reader.o.payload, control.current.values, control.pass_rows
        k, v = self._keys.k, self._values.v
        start, scan = row.first & (row.tag & START != 0), row.tag & SCAN != 0
        m.d.comb += [
            k.valid.eq(reader.o.valid & passes & ~of_values),
            v.valid.eq(reader.o.valid & passes & of_values),
            reader.o.ready.eq(passes & Mux(of_values, v.ready, k.ready)),
            k.payload.data.eq(row.data),
            k.payload.user.start.eq(start),
            k.payload.user.flush.eq(row.final),
            v.payload.data.eq(row.data),
            v.payload.user.start.eq(start),
            v.payload.user.scan.eq(scan),
            control.last_row.eq(reader.o.valid & reader.o.ready & row.final & row.row_end & ~scan),
        ]

    def _write_record(self, m: Module, control: CacheControl, record: RecordWriter) -> None:
        """Sinks of the engine that works, and what is asked for of the open window."""
        of_values, keys, values = control.current.values, self._keys, self._values
        wiring.connect(m, control.peek, values.peek)
        wiring.connect(m, values.staged, record.staged)
        m.d.comb += [
            record.start.eq(control.record_start),
            record.part.eq(control.record_part),
            record.row.eq(control.record_row),
            record.record.eq(control.current.record),
            record.sink.valid.eq(Mux(of_values, values.sink.valid, keys.sink.valid)),
            record.sink.payload.eq(Mux(of_values, values.sink.payload, keys.sink.payload)),
            keys.sink.ready.eq(record.sink.ready & ~of_values),
            values.sink.ready.eq(record.sink.ready & of_values),
            control.staged_row.eq(values.staged.valid & values.staged.ready & values.staged.payload.last),
        ]

    def _write_pages(
        self, m: Module, control: CacheControl, name: str, writer: PageWriter, pages: PageTable, number: int
    ) -> None:
        """A stream of writes of the engine that works; client *number* of the page table."""
        keys, values = getattr(self._keys, name), getattr(self._values, name)
        of_values = control.current.values
        wiring.connect(m, writer.window, pages.windows[number])
        m.d.comb += [
            writer.start.eq(control.clear),
            writer.ahead.eq(control.look_up),
            writer.first.eq(control.current.position >> (self.p.cache.group.bit_length() - 1)),
            writer.known.eq(pages.known[number]),
            writer.base.eq(pages.base),
            writer.i.valid.eq(Mux(of_values, values.valid, keys.valid)),
            keys.ready.eq(writer.i.ready & ~of_values),
            values.ready.eq(writer.i.ready & of_values),
        ]
        for member in writer.i.payload.shape().members:
            m.d.comb += writer.i.payload[member].eq(
                Mux(of_values, Value.cast(values.payload[member]), Value.cast(keys.payload[member]))
            )
