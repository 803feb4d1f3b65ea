"""Product-quantised attention: rows of keys and values to codes in memory, queries to outputs."""

from amaranth.hdl import Const, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.int8_rows import Int8Job, Int8Rows
from kvant.hw.attention.normalize import Normalizer, denominator_width
from kvant.hw.attention.row_quantizer import RowQuantizer, query_input
from kvant.hw.attention.scaler import LOG_WIDTH, Factor, ScoreFactor
from kvant.hw.attention.softmax import SoftmaxWeights
from kvant.hw.kvcache.layouts import TableWrite
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.pq.bins import ValueBins
from kvant.hw.pq.code_path import CodePath, code_output
from kvant.hw.pq.codebook_jobs import BIN_BITS, SHIFT_BITS
from kvant.hw.pq.engine import CodebookEngine
from kvant.hw.pq.history import HistoryReader
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.ring_layouts import row_input
from kvant.hw.pq.row_ring import RowRing
from kvant.hw.pq.tables import ScoreTables

__all__ = ["PqAttention", "attend_command", "code_output"]


def attend_command(p: PqParameters) -> data.StructLayout:
    """A batch of queries of one KV head.

    Members
    -------
    history : 0 .. p.tokens
        Coded tokens that are read from memory; rows behind them are read from the ring.
    count : 1 .. q_parallel
        Queries.
    head : 8
    values : 1
        Mix the values, too; otherwise there are only scores.
    """
    return data.StructLayout({"history": range(p.tokens + 1), "count": range(p.q_parallel + 1), "head": 8, "values": 1})


def score_output(p: PqParameters) -> data.StructLayout:
    """Scores of the tokens of a frame, query by query; 0 for tokens that do not exist."""
    return data.StructLayout({"data": data.ArrayLayout(signed(p.score_width), p.frame * p.q_parallel)})


class PqAttention(wiring.Component):
    """The product-quantised cache of keys and values, and attention over it.

    ::

        x ──> RowRing ──batches──> CodebookEngine (nearest) ──> CodePath ──> codes          (to memory)
                 │
                 └──sinks, recent──> RowQuantizer ──> Int8Rows ─────────────────────────────┐
        q ───────────────────────────────┘ │              ^ largest logarithm               v
                                           v              v                             Normalizer ──> out
        codebook ────────────────> CodebookEngine   SoftmaxWeights                          ^
                                    │ (table)  ^       ^        │ weights                   │
                                    v          │       │scores  v                           │
        history (codes) ──> ScoreTables ───────│───────┘     ValueBins ──> CodebookEngine ──┘
                                               └──────────────────────────── (read-out)

    Rows are taken and coded while queries are answered: coding has a port of codebook words of its own, and its words
    go behind those of attention, one by one. A command's queries become tables, the tables scores, the scores weights
    against the largest logarithm of all keys, the weights bins, the bins and the INT8 rows outputs. See
    `kvant.golden.pq.decode` for every bit of it.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    x : in stream, see `kvant.hw.pq.ring_layouts.row_input`
        Keys and values of all heads, in turn.
    cfg : in stream of {data: `TableWrite`}
        Means, scales of codebooks, ends of sequences; see `RowRing`.
    encode_codebook : in stream of {data: port_bits}
        For every batch that is coded the codebook of its head and store.
    codes : out stream, see `code_output`
        To memory.
    cmd : in stream of {data: `attend_command`}
        A command meets the rows that have come before it.
    q : in stream, see `query_input`
        `count` queries for each command.
    codebook : in stream of {data: port_bits}
        For every command with a history the codebook of the keys, and with `values` that of the values.
    history : in stream of {data: port_bits}
        For every command with a history its codes of the keys, and with `values` those of the values.
    scores : out stream, see `score_output`
        A transfer for each frame of a history.
    out : out stream of {data: fp32, user, last}
        Query by query, element by element; `last` ends a query. `user` is 1 for a query without keys, whose elements
        are 0.
    busy : out
    nonfinite : out
        Sticky: a NaN or an infinity at `x` or `q`.
    error : out
        Sticky: see `RowRing` and `Int8Rows`; a command without queries, or with more than there are tables for.
    full : out
        See `RowRing`.
    busy_cycles : out, 32
        Cycles in which a multiplier or a table works; wraps.
    stall_cycles : out, 32
        See `RowRing`.

    Raises
    ------
    ParameterError
        When no product-quantised cache can be built of *p*.
    """

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        words = stream.Signature(data.StructLayout({"data": p.port_bits}))
        super().__init__(
            {
                "x": In(stream.Signature(row_input(p))),
                "cfg": In(stream.Signature(data.StructLayout({"data": TableWrite()}))),
                "encode_codebook": In(words),
                "codes": Out(stream.Signature(code_output(p))),
                "cmd": In(stream.Signature(data.StructLayout({"data": attend_command(p)}))),
                "q": In(stream.Signature(query_input(p))),
                "codebook": In(words),
                "history": In(words),
                "scores": Out(stream.Signature(score_output(p))),
                "out": Out(stream.Signature(data.StructLayout({"data": 32, "user": 1, "last": 1}))),
                **dict.fromkeys(("busy", "nonfinite", "error", "full"), Out(1)),
                "busy_cycles": Out(32),
                "stall_cycles": Out(32),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.bins = bins = ValueBins(p)
        m.submodules.engine = engine = CodebookEngine(p, bin_latency=bins.bin_latency)
        m.submodules.ring = ring = RowRing(p)
        m.submodules.path = path = CodePath(p)
        m.submodules.tables = tables = ScoreTables(p)
        m.submodules.softmax = softmax = SoftmaxWeights(p)
        m.submodules.rows = rows = Int8Rows(p)
        m.submodules.quantizer = quantizer = RowQuantizer(p)
        m.submodules.reader = reader = HistoryReader(p)
        m.submodules.normalizer = normalizer = Normalizer(p)
        m.submodules.factor = factor = ScoreFactor(p.head_dim)

        # Coding.
        wiring.connect(m, wiring.flipped(self.x), ring.x)
        wiring.connect(m, wiring.flipped(self.cfg), ring.cfg)
        wiring.connect(m, wiring.flipped(self.encode_codebook), engine.encode_words)
        wiring.connect(m, engine.codes, path.codes)
        wiring.connect(m, path.o, wiring.flipped(self.codes))
        job = ring.encode_job
        m.d.comb += [
            path.job.payload.eq(job.payload),
            path.job.valid.eq(job.valid & engine.encode_job.ready),
            engine.encode_job.payload.count.eq(job.payload.count),
            engine.encode_job.payload.scale.eq(job.payload.scale),
            engine.encode_job.valid.eq(job.valid & path.job.ready),
            job.ready.eq(path.job.ready & engine.encode_job.ready),
            engine.rows.payload.data.eq(ring.rows.payload.data),
            engine.rows.payload.last.eq(ring.rows.payload.last),
            engine.rows.valid.eq(ring.rows.valid),
            ring.rows.ready.eq(engine.rows.ready),
            ring.coded.eq(path.written),
        ]

        # The command at work, and the scales of its codebooks: looked up one after the other, two cycles each.
        command = Signal(attend_command(p), reset_less=True)
        coded = Signal()  # it has a history
        scales = Signal(data.ArrayLayout(16, 2), reset_less=True)
        look = Signal(range(6))
        legal = Signal()
        m.d.comb += [
            legal.eq((self.cmd.payload.data.count != 0) & (self.cmd.payload.data.count <= p.q_parallel)),
            ring.status_head.eq(command.head),
            ring.status_store.eq(look >= 3),
        ]

        # Attention: the paths of data.
        wiring.connect(m, wiring.flipped(self.q), quantizer.queries)
        wiring.connect(m, ring.row_out, quantizer.rows)
        wiring.connect(m, quantizer.row, rows.rows)
        wiring.connect(m, wiring.flipped(self.codebook), engine.attend_words)
        wiring.connect(m, wiring.flipped(self.history), reader.words)
        wiring.connect(m, reader.tables, tables.words)
        wiring.connect(m, reader.bins, bins.words)
        wiring.connect(m, engine.out, normalizer.coded)
        wiring.connect(m, rows.o, normalizer.rows)
        out, outputs = normalizer.out, Signal(range(p.q_parallel + 1))  # queries whose output is to leave
        m.d.comb += [
            self.out.payload.data.eq(out.payload.data),
            self.out.payload.user.eq(out.payload.empty),
            self.out.payload.last.eq(out.payload.last),
            self.out.valid.eq(out.valid),
            out.ready.eq(self.out.ready),
            tables.entry.eq(engine.table),
            bins.bin_read.eq(engine.bin_read),
            bins.clear.eq(engine.bin_read.vector == command.count - 1),
            engine.bins.eq(bins.bin_values),
            bins.weights.payload.weights.eq(softmax.weights.payload.weights),
            bins.weights.valid.eq(softmax.weights.valid),
            softmax.weights.ready.eq(bins.weights.ready),
        ]

        # Queries go to the tables and to the INT8 rows; their factors are made as they leave.
        query = quantizer.query
        vector = Signal(range(max(2, p.q_parallel)))
        query_end = Signal()
        m.d.comb += [
            engine.q.payload.data.eq(query.payload.data),
            engine.q.payload.last.eq(query.payload.last),
            engine.q.valid.eq(query.valid & rows.q.ready & coded),
            rows.q.payload.eq(query.payload),
            rows.q.valid.eq(query.valid & (engine.q.ready | ~coded)),
            query.ready.eq(rows.q.ready & (engine.q.ready | ~coded)),
            query_end.eq(query.valid & query.ready & query.payload.last),
            factor.query_scale.eq(query.payload.scale),
            factor.codebook_scale.eq(scales[0]),
        ]
        pipeline = Pipeline(m)
        factor_valid = pipeline.valid(query_end, cycles=factor.latency)
        factor_vector = pipeline.register(vector, "factor_vector", cycles=factor.latency)
        factors = Signal(data.ArrayLayout(Factor(), p.q_parallel), reset_less=True)
        for number in range(p.q_parallel):
            with m.If(factor_valid & (factor_vector == number)):
                m.d.sync += factors[number].eq(factor.factor)
            m.d.comb += softmax.factor[number].eq(factors[number])
        with m.If(query_end):
            m.d.sync += vector.eq(vector + 1)

        # Scores leave, and wait for their softmax if values are to be mixed.
        frame, scores = tables.scores.payload, self.scores.payload.data
        m.d.comb += [
            self.scores.valid.eq(tables.scores.valid & (softmax.scores.ready | ~command.values)),
            softmax.scores.payload.eq(frame),
            softmax.scores.valid.eq(tables.scores.valid & self.scores.ready & command.values),
            tables.scores.ready.eq(self.scores.ready & (softmax.scores.ready | ~command.values)),
        ]
        for token in range(p.frame):
            for number in range(p.q_parallel):
                score = Mux(token < frame.count, frame.scores[token][number], 0)
                m.d.comb += scores[token * p.q_parallel + number].eq(score)

        # The largest logarithm of all keys, from the scan and the rows.
        references = Signal(data.ArrayLayout(signed(LOG_WIDTH), p.q_parallel), reset_less=True)
        for number in range(p.q_parallel):
            m.d.comb += [
                rows.reference[number].eq(references[number]),
                softmax.reference[number].eq(references[number]),
            ]

        # Sums of weights, and the shifts that bring bins to `BIN_BITS`: bits of the sum beyond these.
        output = normalizer.job.payload
        for number in range(p.q_parallel):
            total = softmax.total[number]
            beyond = [total[place:].any() for place in range(BIN_BITS, p.bin_width)]
            shift = Signal(SHIFT_BITS, name=f"shift_{number}", reset_less=True)
            denominator = Signal(denominator_width(p), name=f"denominator_{number}", reset_less=True)
            m.d.sync += [
                shift.eq(sum(beyond, Const(0, SHIFT_BITS))),
                denominator.eq(Mux(coded, total, 0) + rows.total[number]),
            ]
            m.d.comb += [
                engine.read_job.payload.shift[number].eq(shift),
                output.shift[number].eq(shift),
                output.denominator[number].eq(denominator),
            ]

        # What is asked of the parts, each once per phase: `asked` bits fall as requests are taken.
        tables_job, rows_job, replay = engine.query_job, rows.job, ring.replay
        asks_table, asks_rows, asks_replay, asks_read, asks_output = (Signal() for _ in range(5))
        rows_kind, store = Signal(Int8Job), Signal()
        m.d.comb += [
            tables_job.valid.eq(asks_table & tables.writable),
            tables_job.payload.count.eq(command.count),
            rows_job.valid.eq(asks_rows),
            rows_job.payload.kind.eq(rows_kind),
            rows_job.payload.count.eq(command.count),
            replay.valid.eq(asks_replay),
            replay.payload.store.eq(store),
            replay.payload.head.eq(command.head),
            replay.payload.history.eq(command.history),
            engine.read_job.valid.eq(asks_read),
            engine.read_job.payload.count.eq(command.count),
            normalizer.job.valid.eq(asks_output),
            output.count.eq(command.count),
            output.has_coded.eq(coded),
            output.has_rows.eq(~rows.empty),
            output.codebook_scale.eq(scales[1]),
            reader.tokens.eq(command.history),
            reader.to_bins.eq(store),
            quantizer.count.eq(command.count),
        ]
        for asks, port in (
            (asks_table, tables_job),
            (asks_rows, rows_job),
            (asks_replay, replay),
            (asks_read, engine.read_job),
            (asks_output, normalizer.job),
        ):
            with m.If(port.valid & port.ready):
                m.d.sync += asks.eq(0)

        with m.FSM() as control:
            with m.State("IDLE"):
                m.d.comb += self.cmd.ready.eq(1)
                m.d.sync += [
                    command.eq(self.cmd.payload.data),
                    coded.eq(self.cmd.payload.data.history != 0),
                    look.eq(0),
                ]
                with m.If(self.cmd.valid):
                    with m.If(legal):
                        m.next = "SCALES"
                    with m.Else():
                        m.d.sync += self.error.eq(1)
            with m.State("SCALES"):
                m.d.sync += look.eq(look + 1)
                with m.If(look == 2):
                    m.d.sync += scales[0].eq(ring.status.scale)
                with m.If(look == 5):
                    m.d.sync += [
                        scales[1].eq(ring.status.scale),
                        asks_table.eq(coded),
                        asks_rows.eq(1),
                        rows_kind.eq(Int8Job.QUERIES),
                        store.eq(0),
                        vector.eq(0),
                    ]
                    m.d.comb += quantizer.start.eq(1)
                    m.next = "QUERIES"
            with m.State("QUERIES"):
                # The scan begins as soon as its table is there: `ScoreTables` waits for it.
                with m.If(quantizer.queries_done & ~asks_rows & ~asks_table):
                    m.d.comb += reader.start.eq(coded)
                    m.d.sync += [asks_rows.eq(1), rows_kind.eq(Int8Job.KEYS), asks_replay.eq(1)]
                    m.next = "KEYS"
            with m.State("KEYS"):
                scanned = reader.done & Mux(command.values, softmax.max_valid, ~tables.filled)
                with m.If(~asks_rows & ~asks_replay & rows.keys_done & (~coded | scanned)):
                    m.next = "REFERENCE"
            with m.State("REFERENCE"):
                for number in range(p.q_parallel):
                    scan_is_larger = coded & (rows.z_max[number] < softmax.z_max[number])
                    m.d.sync += references[number].eq(Mux(scan_is_larger, softmax.z_max[number], rows.z_max[number]))
                with m.If(command.values):
                    m.d.sync += [asks_rows.eq(1), rows_kind.eq(Int8Job.VALUES), asks_replay.eq(1), store.eq(1)]
                    m.next = "WEIGHTS"
                with m.Else():
                    m.next = "IDLE"
            with m.State("WEIGHTS"):
                m.d.comb += [softmax.go.eq(coded), reader.start.eq(coded)]
                m.next = "VALUES"
            with m.State("VALUES"):
                mixed = reader.done & bins.drained & softmax.done
                with m.If(~asks_rows & ~asks_replay & rows.values_done & (~coded | mixed)):
                    m.next = "SUMS"
            with m.State("SUMS"):
                m.d.sync += [asks_read.eq(coded), asks_output.eq(1), outputs.eq(command.count)]
                m.next = "OUTPUT"
            with m.State("OUTPUT"):
                with m.If(out.valid & out.ready & out.payload.last):
                    m.d.sync += outputs.eq(outputs - 1)
                with m.If(outputs == 0):
                    m.next = "IDLE"

        works = engine.steps.as_value().any() | (tables.words.valid & tables.words.ready) | rows.busy
        m.d.sync += self.busy_cycles.eq(self.busy_cycles + works)
        m.d.comb += [
            self.busy.eq(ring.busy | path.busy | engine.busy.as_value().any() | ~control.ongoing("IDLE")),
            self.full.eq(ring.full),
            self.stall_cycles.eq(ring.stall_cycles),
        ]
        with m.If(ring.nonfinite | quantizer.nonfinite):
            m.d.sync += self.nonfinite.eq(1)
        with m.If(ring.error | rows.error | softmax.error):
            m.d.sync += self.error.eq(1)
        return m
