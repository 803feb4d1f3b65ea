"""The order in which a job of a cache in memory is done."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.layouts import Table, TableWrite
from kvant.hw.kvcache.staged_reader import StagedRequest
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.axi_reader import Region
from kvant.hw.soc.cache_job import TOKEN_BITS, CacheJob
from kvant.hw.soc.cache_memory import CacheMemory
from kvant.hw.soc.fp16_rows import RowsJob
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.record_writer import RecordPart

QUIET_CYCLES = 4
"""Cycles without anything under way after which nothing more will come."""

SETTLE_CYCLES = 4
"""Cycles after which a table write is in its memory."""

SCAN, START = 1, 2
"""Tags of rows: of a scan; the first row starts a sequence."""


class CacheControl(wiring.Component):
    """Takes the steps of a job, one after the other.

    1. What follows from position and number of the rows; rows are asked for.
    2. Calibration, and where the sequence goes on, to the tables of the engine.
    3. Rows to the engine: of values the scan, or the row of scales of the record, and the rows to stage.
    4. Of values, when the engine is quiet: the scales, at the first call, and the staged rows of the open window, as
       far as the record does not hold them, to the record.
    5. Everything to memory.

    Parameters
    ----------
    p : TopParameters

    Members
    -------
    job : in stream
        `CacheJob`.
    current : out
        The one under way.
    clear : out
        For a cycle at the beginning: the engines forget the job before.
    rows : out stream
        `RowsJob`.
    calibration : out stream
        `Region` of the calibration; `count` of its numbers are wanted.
    look_up : out
        For a cycle: the page of the first row's window will be written, and page numbers may be read from now on.
    calibrated : in
        No table write is left.
    resume : out stream
        `TableWrite`.
    pass_rows : out
        Rows may enter the engine.
    last_row : in
        The last transfer of the last row enters it.
    record_start, record_part, record_row : out
        See `RecordWriter`.
    peek : out stream
        `StagedRequest`.
    staged_row : in
        A staged row has been taken.
    quiet : in
        Nothing is under way between rows and memory, but words that wait for their rest.
    merge : out
        They do not wait any more.
    merged : in
        None is left.
    flush, written, done
        See `CacheUnit`.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        self.layout = CacheMemory(p.cache, p.soc.port_bytes)
        table_write = data.StructLayout({"data": TableWrite()})
        request = data.StructLayout({"data": StagedRequest()})
        super().__init__(
            {
                "job": In(stream.Signature(CacheJob(p))),
                "current": Out(CacheJob(p)),
                "clear": Out(1),
                "rows": Out(stream.Signature(RowsJob(p.soc))),
                "calibration": Out(stream.Signature(Region(p.soc))),
                "count": Out(range(p.cache.head_dim + 1)),
                "look_up": Out(1),
                "calibrated": In(1),
                "resume": Out(stream.Signature(table_write)),
                "pass_rows": Out(1),
                "last_row": In(1),
                "record_start": Out(1),
                "record_part": Out(RecordPart),
                "record_row": Out(range(max(p.cache.sinks, p.cache.group) + 1)),
                "peek": Out(stream.Signature(request)),
                "staged_row": In(1),
                "quiet": In(1),
                "merge": Out(1),
                "merged": In(1),
                "flush": Out(1),
                "written": In(1),
                "done": Out(1),
            }
        )

    def elaborate(self, platform):
        p, cache, job = self.p, self.p.cache, self.current
        m = Module()
        window_bits = cache.group.bit_length() - 1
        in_window, end_row = job.position[:window_bits], Signal(TOKEN_BITS + 1)
        fills = Signal()  # a window of values becomes full
        offset = Signal(word_address_bits(p.soc))  # of the first row that is read
        bits, step = Signal(window_bits), Signal(range(window_bits + 1))
        begins, follows = Signal(), Signal()  # jobs of rows that are still to be given
        goes_on = job.values & ~job.first
        self._ask_for_rows(m, begins, follows, end_row, fills, offset)

        # Rows of the open window that are asked for, from `peeked` to `open_end`.
        peeked, open_end, unanswered = (Signal(range(cache.group + 1)) for _ in range(3))
        m.d.comb += self.peek.payload.data.row.eq(peeked)
        with m.If(self.peek.valid & self.peek.ready):
            m.d.sync += peeked.eq(peeked + 1)
        m.d.sync += unanswered.eq(unanswered + (self.peek.valid & self.peek.ready) - self.staged_row)
        m.d.comb += self.peek.valid.eq((peeked != open_end) & (unanswered == 0))

        position = self.resume.payload.data
        m.d.comb += [
            position.kind.eq(Mux(fills, Table.WINDOW, Table.POSITION)),
            position.value.eq(job.position[:16]),
            position.index.eq(job.position[16:]),
        ]
        self._calibration(m)
        quiet = Signal(range(QUIET_CYCLES + 1))
        m.d.sync += quiet.eq(Mux(self.quiet, Mux(quiet == QUIET_CYCLES, quiet, quiet + 1), 0))
        is_quiet = quiet == QUIET_CYCLES
        settled = Signal(range(SETTLE_CYCLES + 1))
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.job.ready.eq(1)
                m.d.sync += job.eq(self.job.payload)
                with m.If(self.job.valid):
                    m.next = "BEGIN"
            with m.State("BEGIN"):
                m.d.comb += self.clear.eq(1)
                m.d.sync += [end_row.eq(in_window + job.tokens), bits.eq(in_window), step.eq(window_bits), offset.eq(0)]
                m.next = "FILLS"
            with m.State("FILLS"):
                m.d.sync += fills.eq(job.values & (end_row >= cache.group))
                m.d.comb += [
                    self.record_start.eq(1),
                    self.record_part.eq(Mux(job.values, RecordPart.VALUE_SINKS, RecordPart.KEY_SINKS)),
                    self.record_row.eq(job.position),
                ]
                m.next = "OFFSET"
            with m.State("OFFSET"):
                # Rows of the window that the record holds are not read, if it stays open.
                with m.If(~goes_on | fills | (step == 0)):
                    m.d.sync += [begins.eq(job.values), follows.eq(1)]
                    m.next = "CALIBRATE"
                with m.Else():
                    m.d.sync += [
                        offset.eq((offset << 1) + Mux(bits[-1], job.stride, 0)),
                        bits.eq(bits << 1),
                        step.eq(step - 1),
                    ]
            with m.State("CALIBRATE"):
                m.d.comb += self.calibration.valid.eq(1)
                with m.If(self.calibration.ready):
                    # Values of a window that stays open are not written to a page.
                    m.d.comb += self.look_up.eq(~job.values | fills)
                    m.next = "TABLES"
            with m.State("TABLES"):
                with m.If(self.calibrated):
                    m.next = "SETTLE"
                    with m.If(~(job.values & job.first)):
                        m.next = "RESUME"
            with m.State("RESUME"):
                m.d.comb += self.resume.valid.eq(1)
                with m.If(self.resume.ready):
                    m.next = "SETTLE"
            with m.State("SETTLE"):
                m.d.sync += settled.eq(settled + 1)
                with m.If(settled == SETTLE_CYCLES):
                    m.d.sync += settled.eq(0)
                    m.next = "ROWS"
            with m.State("ROWS"):
                m.d.comb += self.pass_rows.eq(1)
                with m.If(self.last_row):
                    m.d.sync += quiet.eq(0)
                    m.next = "WORK"
            with m.State("WORK"):
                with m.If(is_quiet):
                    m.next = "MERGE"
                    with m.If(job.values):
                        m.next = "WINDOW"
                    with m.If(job.values & job.first):
                        # They come along with any row of an open window, even an empty one.
                        m.d.comb += [self.record_start.eq(1), self.record_part.eq(RecordPart.VALUE_SCALES)]
                        m.d.sync += [peeked.eq(0), open_end.eq(1)]
                        m.next = "SCALES"
            with m.State("SCALES"):
                with m.If((peeked == open_end) & (unanswered == 0) & self.quiet):
                    m.next = "WINDOW"
            with m.State("WINDOW"):
                first_row = Mux(fills, 0, in_window)
                m.d.comb += [
                    self.record_start.eq(1),
                    self.record_part.eq(RecordPart.VALUE_WINDOW),
                    self.record_row.eq(first_row),
                ]
                m.d.sync += [peeked.eq(first_row), open_end.eq(end_row[:window_bits])]
                m.next = "STAGED"
            with m.State("STAGED"):
                with m.If((peeked == open_end) & (unanswered == 0) & self.quiet):
                    m.next = "MERGE"
            with m.State("MERGE"):
                m.d.comb += self.merge.eq(1)
                with m.If(self.merged):
                    m.next = "FLUSH"
            with m.State("FLUSH"):
                m.d.comb += self.flush.eq(1)
                with m.If(self.written):
                    m.d.comb += self.done.eq(1)
                    m.next = "IDLE"
        return m

    def _ask_for_rows(self, m: Module, begins: Signal, follows: Signal, end_row, fills, offset) -> None:
        """First, of values, the scan or the row of scales, then the rows."""
        job, port_bytes, rows = self.current, self.p.soc.port_bytes, self.rows.payload
        scales = job.record + self.layout.record.value_scales.offset // port_bytes
        m.d.comb += [
            self.rows.valid.eq(begins | follows),
            rows.address.eq(job.rows + offset),
            rows.stride.eq(job.stride),
            rows.rows.eq(Mux(fills, end_row, job.tokens)),
            rows.tag.eq(Mux(job.values, 0, START)),
        ]
        with m.If(begins):
            m.d.comb += rows.tag.eq(SCAN | START)
            with m.If(~job.first):
                m.d.comb += [rows.address.eq(scales), rows.rows.eq(1)]
        with m.If(self.rows.valid & self.rows.ready):
            m.d.sync += [begins.eq(0), follows.eq(begins)]

    def _calibration(self, m: Module) -> None:
        """Numbers are wanted for keys that have a mean, and as floors at a first call."""
        job, layout, port_bytes = self.current, self.layout, self.p.soc.port_bytes
        keys, values = layout.key_calibration, layout.value_calibration
        words = Mux(job.first, values.calibration_bytes // port_bytes, values.numbers.offset // port_bytes)
        m.d.comb += [
            self.calibration.payload.address.eq(job.calibration),
            self.calibration.payload.words.eq(Mux(job.values, words, keys.calibration_bytes // port_bytes)),
            self.count.eq(Mux(job.values, Mux(job.first, values.channels, 0), keys.channels)),
        ]
