"""The codebook engine: tables of queries, nearest centroids and the read-out of bins on one array of multipliers.

Source: docs/numerics.md, "Product quantisation"; the method is MILLION's (DAC 2025, section III).
"""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.layouts import SHIFT_BITS, read_output
from kvant.hw.numeric.delay_line import DelayLine
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.parameters import check_integer
from kvant.hw.pq.codebook_jobs import (
    PIECE_BITS,
    Mode,
    bin_read,
    bins_input,
    codes_output,
    encode_job,
    modes,
    query_job,
    read_job,
    row_input,
    table_output,
    word_input,
)
from kvant.hw.pq.grid_position import GridPosition
from kvant.hw.pq.job_vectors import BatchVectors, QueryVectors
from kvant.hw.pq.nearest import NearestSearch
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.product_array import OPERAND_BITS, ProductArray
from kvant.hw.pq.read_out import BinPieces, ReadOut
from kvant.hw.pq.step_sequencer import StepSequencer

_JOBS = 4  # for attention, accepted and not begun


class CodebookEngine(wiring.Component):
    """One array of ``p.slice_bytes`` multipliers in three modes, one product step per cycle.

    ::

        encode_job, rows ──> GridPosition ──> u ──┐                      ┌──> NearestSearch ──> codes
        query_job, q ─────────────────────> q ────┼──> ProductArray ─────┼──> table
        read_job ──> bin_read ... bins ──> pieces ┘         ^            └──> ReadOut ──> out
        encode_words, attend_words ──> StepSequencer ───────┘

    A word of a codebook is held for the vectors of its job: queries, or tokens of a batch. With n vectors a word takes
    n steps for a table, n + 1 for the nearest centroid (one for its norm) and 2n for a read-out. Steps follow each
    other without a bubble while words are there. Words for attention go before words for encoding, word by word.
    Behind the sequencer nothing ever stalls: a slice's last word waits until there is room for what it makes.

    An encode job is loaded (``ceil(d / position_lanes)`` cycles a row, `latency` of `GridPosition` behind it), then
    searched; a query job is loaded (``d / min(lanes, slice_bytes)`` cycles a row), then its table is made. A job is
    loaded when the one before, of its kind, has been read for the last time.

    Parameters
    ----------
    p : PqParameters
    bin_latency : int
        Cycles from `bin_read` to `bins`, at least 1.

    Attributes
    ----------
    loading_latency : int
        Cycles in which an encode job is taken, with a row that is offered at once, to the first word, beside one for
        each piece of `position_lanes` elements.
    table_latency : int
        Cycles in which a word on `attend_words` is taken to the first of its entries on `table`.
    codes_latency, out_latency : int
        Cycles from a slice's last word, with one vector, to its codes, or sums.

    Members
    -------
    encode_job : in stream
        {count: 1 .. p.batch_tokens, scale: fp16, finite, not negative}.
    rows : in stream
        {data: P fp16, finite, centred; last: end of a row}: `count` rows for each encode job.
    encode_words : in stream
        {data}: `p.codebook_words` for each encode job.
    codes : out stream
        {codes, vector, slice, last}: for each slice, for each vector; last: end of the job.
    query_job : in stream
        {count: 1 .. p.q_parallel}.
    q : in stream
        {data: P INT8, last: end of a row}: `count` rows for each query job; may come before the job's words.
    table : out
        {valid, vector, slice, centroid, values, last}: no back-pressure.
    read_job : in stream
        {count: 1 .. p.q_parallel, shift}: of each query a shift after which the bins of a sub-space together are below
        2^32.
    attend_words : in stream
        {data}: `p.codebook_words` for each query and read job, in the order in which these were taken; of a query and
        a read job offered in the same cycle the query job is taken first.
    bin_read : out
        {valid, vector, slice, centroid}
    bins : in
        `bin_latency` cycles after `bin_read`.
    out : out stream
        {data, vector, slice, last}: for each slice, for each query, ``sum_c (bin >> shift) * C``.
    busy : out
        Of each mode: a job is taken, and not all of its results have left.
    steps : out
        Of each mode: the array gets a step of it in this cycle.

    Raises
    ------
    ParameterError
        When no product-quantised cache can be built of *p*, or *bin_latency* is not positive.
    """

    def __init__(self, p: PqParameters, *, bin_latency: int = 2):
        self.p = p.check_pq()
        self.bin_latency = check_integer("bin_latency", bin_latency, 1)
        self._array = ProductArray(p)
        # Stage of a step in which its operand is chosen: bins come in stage 1 + bin_latency.
        self._operand_stage = bin_latency + 2
        self._product_stage = self._operand_stage + self._array.product_latency
        self._sum_stage = self._operand_stage + self._array.sum_latency
        self.loading_latency = GridPosition.latency + 3
        self.table_latency = self._sum_stage + 2
        queue = {True: 1, False: 2}  # from a push to the output, of a register and of a memory
        self.codes_latency = self._sum_stage + 4 + queue[p.batch_tokens == 1]
        self.out_latency = self._product_stage + 3 + queue[p.q_parallel == 1]
        super().__init__(
            {
                "encode_job": In(stream.Signature(encode_job(p))),
                "rows": In(stream.Signature(row_input(p, 16))),
                "encode_words": In(stream.Signature(word_input(p))),
                "codes": Out(stream.Signature(codes_output(p))),
                "query_job": In(stream.Signature(query_job(p))),
                "q": In(stream.Signature(row_input(p, signed(8)))),
                "table": Out(table_output(p)),
                "read_job": In(stream.Signature(read_job(p))),
                "attend_words": In(stream.Signature(word_input(p))),
                "bin_read": Out(bin_read(p)),
                "bins": In(bins_input(p)),
                "out": Out(stream.Signature(read_output(p))),
                "busy": Out(modes()),
                "steps": Out(modes()),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        register = Pipeline(m).register
        m.submodules.sequencer = sequencer = StepSequencer(p)
        wiring.connect(m, wiring.flipped(self.encode_words), sequencer.encode_words)
        wiring.connect(m, wiring.flipped(self.attend_words), sequencer.attend_words)

        # The steps: steps[k], valids[k] in stage k.
        steps, valids = [sequencer.step], [sequencer.valid]
        for _ in range(self._sum_stage):
            steps.append(register(steps[-1], "step"))
            valid = Signal(name="valid")
            m.d.sync += valid.eq(valids[-1])
            valids.append(valid)

        def of(stage, mode):
            return valids[stage] & (steps[stage].mode == mode)

        def ends_job(stage, mode):
            step = steps[stage]
            return of(stage, mode) & step.final & step.last_slice & step.last_vector & ~step.norm

        # Vectors are read one stage before bins come, so that both can be chosen from in the stage after.
        bins_stage = self._operand_stage - 1
        m.submodules.batch = batch = BatchVectors(p)
        m.submodules.queries = queries = QueryVectors(p)
        wiring.connect(m, wiring.flipped(self.encode_job), batch.job)
        wiring.connect(m, wiring.flipped(self.rows), batch.rows)
        wiring.connect(m, wiring.flipped(self.q), queries.q)
        for vectors, mode in ((batch, Mode.NEAREST), (queries, Mode.TABLE)):
            m.d.comb += [
                vectors.read.eq(of(bins_stage - 1, mode)),
                vectors.vector.eq(steps[bins_stage - 1].vector),
                vectors.slice.eq(steps[bins_stage - 1].slice),
                vectors.release.eq(ends_job(bins_stage, mode)),
            ]

        # Jobs for attention.
        shifts = data.ArrayLayout(SHIFT_BITS, p.q_parallel)
        job_shape = data.StructLayout({"mode": Mode, "count": range(p.q_parallel + 1), "shift": shifts})
        m.submodules.jobs = jobs = fifo.SyncFIFOBuffered(width=job_shape.size, depth=_JOBS)
        new, job = Signal(job_shape), data.View(job_shape, jobs.r_data)
        take_read = Signal()
        m.d.comb += [
            self.query_job.ready.eq(jobs.w_rdy & ~queries.taken),
            queries.start.eq(self.query_job.valid & self.query_job.ready),
            queries.count.eq(self.query_job.payload.count),
            self.read_job.ready.eq(jobs.w_rdy & ~queries.start),
            take_read.eq(self.read_job.valid & self.read_job.ready),
            new.mode.eq(Mux(queries.start, Mode.TABLE, Mode.READ_OUT)),
            new.count.eq(Mux(queries.start, self.query_job.payload.count, self.read_job.payload.count)),
            new.shift.eq(self.read_job.payload.shift),
            jobs.w_data.eq(new),
            jobs.w_en.eq(queries.start | take_read),
            jobs.r_en.eq(sequencer.attend_done),
        ]

        # The array.
        m.submodules.word_delay = word_delay = DelayLine(len(sequencer.word), self._operand_stage)
        m.submodules.pieces = pieces = BinPieces(p)
        m.submodules.array = array = self._array
        centroid = data.View(array.centroid.shape(), word_delay.o)
        # Elements and pieces are 0 where they are not wanted (resets of their registers), so that one level of logic
        # chooses the operand.
        table, vectors_wanted = Signal(), Signal()
        m.d.comb += [
            table.eq(steps[bins_stage].mode == Mode.TABLE),
            vectors_wanted.eq(table | ((steps[bins_stage].mode == Mode.NEAREST) & ~steps[bins_stage].norm)),
        ]
        norm = steps[self._operand_stage].norm
        operands = []
        for lane in range(p.slice_bytes):
            element = Mux(vectors_wanted, Mux(table, queries.o[lane], batch.o[lane]), 0)
            terms = (
                register(element[:PIECE_BITS].as_signed(), "element"),
                pieces.pieces[lane // p.subspace],
                Mux(norm, centroid[lane], 0),
            )
            operand = Signal(signed(OPERAND_BITS), name="operand")
            m.d.comb += operand.eq(terms[0] | terms[1] | terms[2])
            operands.append(operand)
        asks = of(0, Mode.READ_OUT) & ~steps[0].upper
        for name in ("vector", "slice", "centroid"):
            m.d.comb += getattr(self.bin_read, name).eq(register(steps[0][name], name))
        asked = Signal()
        m.d.sync += asked.eq(asks)
        m.d.comb += [
            self.bin_read.valid.eq(asked),
            pieces.lower.eq(of(bins_stage, Mode.READ_OUT) & ~steps[bins_stage].upper),
            pieces.upper.eq(steps[bins_stage].upper),
            pieces.shift.eq(steps[bins_stage].shift),
            pieces.bins.eq(self.bins),
            word_delay.i.eq(sequencer.word),
            array.centroid.eq(word_delay.o),
            array.operands.eq(Cat(operands)),
        ]

        # What becomes of the products.
        m.submodules.search = search = NearestSearch(p, array.sums.shape().elem_shape)
        m.submodules.read_out = read_out = ReadOut(p)
        wiring.connect(m, search.codes, wiring.flipped(self.codes))
        wiring.connect(m, read_out.o, wiring.flipped(self.out))
        m.d.comb += [
            search.valid.eq(of(self._sum_stage, Mode.NEAREST)),
            search.step.eq(steps[self._sum_stage]),
            search.sums.eq(array.sums),
            search.count.eq(batch.count),
            search.reserve.eq(sequencer.begins[0]),
            read_out.valid.eq(of(self._product_stage, Mode.READ_OUT)),
            read_out.step.eq(steps[self._product_stage]),
            read_out.products.eq(array.products),
            read_out.count.eq(job.count),
            read_out.reserve.eq(sequencer.begins[1]),
        ]
        entries = Signal(self.table.shape(), reset_less=True)
        table_valid = Signal()
        m.d.sync += [
            table_valid.eq(of(self._sum_stage, Mode.TABLE)),
            *(entries[name].eq(steps[self._sum_stage][name]) for name in ("vector", "slice", "centroid")),
            entries.last.eq(ends_job(self._sum_stage, Mode.TABLE)),
            *(value.eq(total) for value, total in zip(entries["values"], array.sums, strict=True)),
        ]
        fields = {name: entries[name] for name in ("vector", "slice", "centroid", "values", "last")}
        m.d.comb += [self.table.valid.eq(table_valid), *(self.table[name].eq(value) for name, value in fields.items())]

        # What the sequencer has to know.
        searched = Signal()  # all words of the batch have been taken
        encode_room, attend_room = Signal(), Signal()
        m.d.sync += [encode_room.eq(search.free >= batch.count), attend_room.eq(read_out.free >= job.count)]
        with m.If(batch.release):
            m.d.sync += searched.eq(0)
        with m.Elif(sequencer.encode_done):
            m.d.sync += searched.eq(1)
        m.d.comb += [
            sequencer.encode_ready.eq(batch.loaded & ~searched),
            sequencer.encode_count.eq(batch.count),
            sequencer.encode_room.eq(encode_room),
            sequencer.attend_ready.eq(jobs.r_rdy & (queries.loaded | (job.mode == Mode.READ_OUT))),
            sequencer.attend_mode.eq(job.mode),
            sequencer.attend_count.eq(job.count),
            sequencer.attend_shift.eq(job.shift),
            sequencer.attend_room.eq(attend_room),
        ]

        # A read-out counts from its job to its last sums; each that has left the queue of jobs holds one place.
        reads = Signal(range(_JOBS + p.q_parallel + 3))
        m.d.sync += reads.eq(reads + take_read - (self.out.valid & self.out.ready & self.out.payload.last))
        table_steps = Cat(of(stage, Mode.TABLE) for stage in range(self._sum_stage + 1))
        m.d.comb += [
            self.busy.nearest.eq(batch.taken | ~search.idle),
            self.busy.table.eq(queries.taken | table_steps.any() | table_valid),
            self.busy.read_out.eq(reads != 0),
            *(getattr(self.steps, mode.name.lower()).eq(of(0, mode)) for mode in Mode),
        ]
        return m
