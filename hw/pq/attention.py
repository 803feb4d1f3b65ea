"""Product-quantised attention: rows of keys and values to codes in memory, queries to outputs."""

from amaranth.hdl import Const, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.int8_rows import Int8Job, Int8Rows
from kvant.hw.attention.layouts import BIN_BITS, SHIFT_BITS
from kvant.hw.attention.normalize import NormalizeJob, Normalizer, denominator_width
from kvant.hw.attention.row_quantizer import RowQuantizer, query_input
from kvant.hw.attention.scaler import LOG_WIDTH
from kvant.hw.attention.softmax import SoftmaxWeights
from kvant.hw.kvcache.layouts import TableWrite
from kvant.hw.numeric.output_queue import OutputQueue
from kvant.hw.numeric.stream_register import StreamRegister
from kvant.hw.pq.bins import ValueBins
from kvant.hw.pq.centroid_decoder import CentroidDecoder
from kvant.hw.pq.code_path import CodePath, code_output
from kvant.hw.pq.codebook_merge import CodebookMerge
from kvant.hw.pq.decoded_rows import CodebookSplit, RowMerge
from kvant.hw.pq.engine import CodebookEngine
from kvant.hw.pq.history import HistoryReader
from kvant.hw.pq.job_vectors import position_lanes
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.query_stage import PreparedCommand, QueryStage, attend_command
from kvant.hw.pq.ring_layouts import row_input
from kvant.hw.pq.row_ring import RowRing
from kvant.hw.pq.tables import ScoreTables


def score_output(p: PqParameters) -> data.StructLayout:
    """Scores of the tokens of a frame, query by query; 0 for tokens that do not exist.

    Those of queries that the command does not have mean nothing.
    """
    return data.StructLayout({"data": data.ArrayLayout(signed(p.score_width), p.frame * p.q_parallel)})


class WeightSums(data.StructLayout):
    """Of a query: sum of all weights, and places by which the read-out shifts its bins."""

    def __init__(self, p: PqParameters):
        super().__init__({"denominator": denominator_width(p), "shift": SHIFT_BITS})


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

    With `decode_tokens`, a command may have its history decoded instead: `CentroidDecoder` turns codes into rows, which
    `Int8Rows` takes before those of the ring, and there are neither tables nor scores nor bins.

    Rows are taken and coded while queries are answered: coding has a port of codebook words of its own, and its words
    go behind those of attention, one by one. A command's queries become tables, the tables scores, the scores weights
    against the largest logarithm of all keys, the weights bins, the bins and the INT8 rows outputs. See
    `kvant.golden.pq.decode` for every bit of it.

    Three commands are at work at once: tables are built for the next one while keys and values of one are read, and
    the bins of the one before are read out while keys are.

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
        A command meets the rows of its head that are there when its keys, and its values, are read: no row of the head
        comes between the command and its outputs.
    q : in stream, see `query_input`
        `count` queries for each command.
    codebook_k, codebook_v : in stream of {data: port_bits}
        For every command with a history the codebook of the keys, and with `values` that of the values; of both modes,
        in the order of the commands.
    history : in stream of {data: port_bits}
        For every command with a history its codes of the keys, and with `values` those of the values.
    scores : out stream, see `score_output`
        A transfer for each frame of a history that is not decoded.
    out : out stream of {data: fp32, user, last}
        Query by query, element by element; `last` ends a query. `user` is 1 for a query without keys, whose elements
        are 0.
    busy : out
    nonfinite : out
        Sticky: a NaN or an infinity at `x` or `q`.
    error : out
        Sticky: see `RowRing` and `Int8Rows`; a command without queries, with more than there are tables for, with a
        longer history than `tokens`, or one that would decode more than `decode_tokens` tokens, which is dropped (and
        its queries are not taken).
    full : out
        See `RowRing`.
    busy_cycles : out, 32
        Cycles in which the engine, the tables or the bins work, or INT8 rows are under way; wraps.
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
                "codebook_k": In(words),
                "codebook_v": In(words),
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
        m.submodules.queries = queries = QueryStage(p)
        m.submodules.codebooks = codebooks = CodebookMerge(p)

        def buffered(name: str, source):
            """*source* behind a register in either direction: its two ends are far apart on a chip."""
            m.submodules[f"{name}_queue"] = queue = OutputQueue(source.payload.shape())
            m.d.comb += [
                queue.payload.eq(source.payload),
                queue.valid.eq(source.valid),
                source.ready.eq(queue.advance),
            ]
            return queue.o

        def crossing(name: str, source):
            """*source* behind two such queues, one for either end: so no signal goes there and back in a cycle."""
            return buffered(f"{name}_far", buffered(name, source))

        def held(name: str, source):
            """*source* in one register, for a transfer every second cycle at most."""
            m.submodules[f"{name}_register"] = register = StreamRegister(source.payload.shape())
            wiring.connect(m, source, register.i)
            return register.o

        # Coding.
        # Cut into pieces, a transfer takes cycles anyway.
        batch = (held if position_lanes(p) < p.lanes else crossing)("batch", ring.rows)
        wiring.connect(m, wiring.flipped(self.x), ring.x)
        wiring.connect(m, wiring.flipped(self.cfg), ring.cfg)
        wiring.connect(m, wiring.flipped(self.encode_codebook), engine.encode_words)
        wiring.connect(m, engine.codes, path.codes)
        wiring.connect(m, path.o, wiring.flipped(self.codes))
        job = held("job", ring.encode_job)
        written = Signal()
        m.d.sync += written.eq(path.written)
        m.d.comb += [
            path.job.payload.eq(job.payload),
            path.job.valid.eq(job.valid & engine.encode_job.ready),
            engine.encode_job.payload.count.eq(job.payload.count),
            engine.encode_job.payload.scale.eq(job.payload.scale),
            engine.encode_job.valid.eq(job.valid & path.job.ready),
            job.ready.eq(path.job.ready & engine.encode_job.ready),
            engine.rows.payload.data.eq(batch.payload.data),
            engine.rows.payload.last.eq(batch.payload.last),
            engine.rows.valid.eq(batch.valid),
            batch.ready.eq(engine.rows.ready),
            ring.coded.eq(written),
        ]

        # Attention: the paths of data.
        begins = Signal()  # the first cycle of a command in the second stage
        asks_read = Signal()  # bins are to be read out
        wiring.connect(m, wiring.flipped(self.cmd), queries.cmd)
        wiring.connect(m, wiring.flipped(self.q), quantizer.queries)
        wiring.connect(m, crossing("replay", ring.row_out), quantizer.rows)
        wiring.connect(m, crossing("query", quantizer.query), queries.query)
        wiring.connect(m, held("table_queries", queries.table_queries), engine.q)
        wiring.connect(m, queries.queries, rows.q)
        wiring.connect(m, codebooks.o, engine.attend_words)
        wiring.connect(m, wiring.flipped(self.history), reader.words)
        wiring.connect(m, reader.tables, tables.words)
        wiring.connect(m, reader.bins, bins.words)
        wiring.connect(m, held("coded", engine.out), normalizer.coded)
        wiring.connect(m, held("sums", rows.o), normalizer.rows)
        out = buffered("out", normalizer.out)
        m.d.comb += [
            self.out.payload.data.eq(out.payload.data),
            self.out.payload.user.eq(out.payload.empty),
            self.out.payload.last.eq(out.payload.last),
            self.out.valid.eq(out.valid),
            out.ready.eq(self.out.ready),
            tables.entry.eq(engine.table),
            bins.bin_read.eq(engine.bin_read),
            engine.bins.eq(bins.bin_values),
            bins.weights.payload.weights.eq(softmax.weights.payload.weights),
            bins.weights.valid.eq(softmax.weights.valid),
            softmax.weights.ready.eq(bins.weights.ready),
            ring.status_store.eq(queries.status_store),
            ring.status_head.eq(queries.status_head),
            queries.scale.eq(ring.status.scale),
            quantizer.start.eq(queries.quantize),
            quantizer.count.eq(queries.count),
            queries.quantized.eq(quantizer.queries_done),
            # A table is begun when there is room for it.
            engine.query_job.payload.eq(queries.tables.payload),
            engine.query_job.valid.eq(queries.tables.valid & tables.writable),
            queries.tables.ready.eq(engine.query_job.ready & tables.writable),
            codebooks.table.eq(engine.query_job.valid & engine.query_job.ready),
            codebooks.read_out.eq(engine.read_job.valid & engine.read_job.ready),
        ]

        # The command whose keys and values are read.
        prepared = Signal(PreparedCommand(p), reset_less=True)
        command = prepared.command
        coded = Signal()  # its history goes to tables and bins
        decoded = Signal()  # its history is decoded
        store = Signal()

        if p.decode_tokens:
            m.submodules.decoder = decoder = CentroidDecoder(p)
            m.submodules.row_merge = row_merge = RowMerge(p)
            splits = []
            for name, words, engine_words, decoder_words in (
                ("keys", self.codebook_k, codebooks.keys, decoder.keys),
                ("values", self.codebook_v, codebooks.values, decoder.values),
            ):
                m.submodules[f"{name}_split"] = split = CodebookSplit(p)
                wiring.connect(m, wiring.flipped(words), split.words)
                wiring.connect(m, split.engine, engine_words)
                wiring.connect(m, split.decoder, decoder_words)
                splits.append(split)
            wiring.connect(m, reader.decoder, decoder.words)
            wiring.connect(m, decoder.rows, row_merge.decoded)
            wiring.connect(m, quantizer.row, row_merge.fresh)
            # The values' codebook comes while keys are read, behind those of read-outs that were asked for before.
            asks_centroids = Signal()
            key_split, value_split = splits
            m.d.comb += [
                decoder.store.eq(store),
                decoder.scale.eq(Mux(store, prepared.value_scale, prepared.key_scale)),
                row_merge.decodes.eq(decoded),
                key_split.to_engine.eq(codebooks.table),
                key_split.to_decoder.eq(queries.decodes),
                value_split.to_engine.eq(codebooks.read_out),
                value_split.to_decoder.eq(asks_centroids & ~asks_read),
            ]
            with m.If(begins):
                m.d.sync += asks_centroids.eq(decoded & command.values)
            with m.Elif(~asks_read):
                m.d.sync += asks_centroids.eq(0)
            attended_rows = row_merge.rows
        else:
            wiring.connect(m, wiring.flipped(self.codebook_k), codebooks.keys)
            wiring.connect(m, wiring.flipped(self.codebook_v), codebooks.values)
            attended_rows = quantizer.row
        wiring.connect(m, crossing("row", attended_rows), rows.rows)

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

        # The largest logarithm of all keys, from the scan and the rows; the sums of weights.
        references = Signal(data.ArrayLayout(signed(LOG_WIDTH), p.q_parallel), reset_less=True)
        sums = Signal(data.ArrayLayout(WeightSums(p), p.q_parallel), reset_less=True)
        for number in range(p.q_parallel):
            total = softmax.total[number]
            # Bits of the sum of coded weights beyond those that the read-out takes.
            beyond = [total[place:].any() for place in range(BIN_BITS, p.bin_width)]
            m.d.sync += [
                sums[number].shift.eq(sum(beyond, Const(0, SHIFT_BITS))),
                sums[number].denominator.eq(Mux(coded, total, 0) + rows.total[number]),
            ]
            m.d.comb += [
                rows.reference[number].eq(references[number]),
                softmax.reference[number].eq(references[number]),
                softmax.factor[number].eq(prepared.factors[number]),
            ]

        # Keys, then values, of a command.
        asks_rows, asks_replay = Signal(), Signal()
        scored = Signal()  # the last scores of the command have left
        rows_kind = Signal(Int8Job)
        wants_rows = Signal()  # about to use the quantiser
        at_rows = Signal()  # using it
        finishes, hands_over = Signal(), Signal()
        m.d.comb += [
            rows.job.valid.eq(asks_rows),
            rows.job.payload.kind.eq(rows_kind),
            rows.job.payload.count.eq(command.count),
            ring.replay.valid.eq(asks_replay),
            ring.replay.payload.store.eq(store),
            ring.replay.payload.head.eq(command.head),
            ring.replay.payload.history.eq(command.history),
            reader.tokens.eq(command.history),
            reader.to_decoder.eq(decoded),
            reader.to_bins.eq(store),
            queries.may_quantize.eq(~at_rows & ~wants_rows),
        ]
        with m.If(tables.scores.valid & tables.scores.ready & frame.last):
            m.d.sync += scored.eq(1)
        with m.If(rows.job.valid & rows.job.ready):
            m.d.sync += asks_rows.eq(0)
        with m.If(ring.replay.valid & ring.replay.ready):
            m.d.sync += asks_replay.eq(0)
        passed = ~asks_rows & ~asks_replay & Mux(store, rows.values_done, rows.keys_done)
        with m.FSM() as control:
            with m.State("IDLE"):
                coming = queries.prepared.payload.command
                m.d.comb += queries.prepared.ready.eq(1)
                m.d.sync += [
                    prepared.eq(queries.prepared.payload),
                    coded.eq((coming.history != 0) & ~coming.decode),
                    decoded.eq((coming.history != 0) & coming.decode),
                    store.eq(0),
                ]
                with m.If(queries.prepared.valid):
                    m.d.sync += [asks_rows.eq(1), rows_kind.eq(Int8Job.QUERIES)]
                    m.next = "BEGIN"
            with m.State("BEGIN"):
                # The scan begins at once: `ScoreTables` waits for its table, `CentroidDecoder` for its codebook.
                m.d.comb += [reader.start.eq(coded | decoded), begins.eq(1)]
                m.d.sync += scored.eq(0)
                m.next = "QUERIES"
            with m.State("QUERIES"):
                m.d.comb += wants_rows.eq(1)
                with m.If(~asks_rows & quantizer.queries_done):
                    m.d.sync += [asks_rows.eq(1), rows_kind.eq(Int8Job.KEYS), asks_replay.eq(1), at_rows.eq(1)]
                    m.next = "KEYS"
            with m.State("KEYS"):
                scanned = scored & (softmax.max_valid | ~command.values)
                with m.If(passed):
                    m.d.sync += at_rows.eq(0)
                with m.If(passed & (~coded | scanned)):
                    m.next = "REFERENCE"
            with m.State("REFERENCE"):
                for number in range(p.q_parallel):
                    scan_is_larger = coded & (rows.z_max[number] < softmax.z_max[number])
                    m.d.sync += references[number].eq(Mux(scan_is_larger, softmax.z_max[number], rows.z_max[number]))
                with m.If(command.values):
                    m.next = "WEIGHTS"
                with m.Else():
                    m.next = "IDLE"
            with m.State("WEIGHTS"):
                # The bins of the command before have to be read, if any are needed.
                free = ~finishes | ~coded
                m.d.comb += wants_rows.eq(free)
                with m.If(free & quantizer.queries_done):
                    m.d.comb += [softmax.go.eq(coded), reader.start.eq(coded | decoded)]
                    m.d.sync += [
                        asks_rows.eq(1),
                        rows_kind.eq(Int8Job.VALUES),
                        asks_replay.eq(1),
                        at_rows.eq(1),
                        store.eq(1),
                    ]
                    m.next = "VALUES"
            with m.State("VALUES"):
                mixed = reader.done & bins.drained & softmax.done
                with m.If(passed):
                    m.d.sync += at_rows.eq(0)
                with m.If(passed & (~coded | mixed)):
                    m.next = "SUMS"
            with m.State("SUMS"):
                with m.If(~finishes):
                    m.next = "HAND OVER"
            with m.State("HAND OVER"):
                m.d.comb += hands_over.eq(1)
                m.next = "IDLE"
        attends = ~control.ongoing("IDLE")

        # The output of a command, while the next one's keys are read.
        asks_output = Signal()
        finishing = Signal(NormalizeJob(p), reset_less=True)
        outputs = Signal(range(p.q_parallel + 1))  # queries whose output is to leave
        m.d.comb += [
            finishes.eq(outputs != 0),
            normalizer.job.payload.eq(finishing),
            normalizer.job.valid.eq(asks_output),
            engine.read_job.payload.count.eq(finishing.count),
            engine.read_job.payload.shift.eq(finishing.shift),
            engine.read_job.valid.eq(asks_read),
            bins.clear.eq(engine.bin_read.vector == finishing.count - 1),
        ]
        with m.If(engine.read_job.valid & engine.read_job.ready):
            m.d.sync += asks_read.eq(0)
        with m.If(normalizer.job.valid & normalizer.job.ready):
            m.d.sync += asks_output.eq(0)
        with m.If(hands_over):
            m.d.sync += [
                finishing.count.eq(command.count),
                finishing.has_coded.eq(coded),
                finishing.has_rows.eq(~rows.empty),
                finishing.codebook_scale.eq(prepared.value_scale),
                *(finishing.shift[number].eq(sums[number].shift) for number in range(p.q_parallel)),
                *(finishing.denominator[number].eq(sums[number].denominator) for number in range(p.q_parallel)),
                asks_read.eq(coded),
                asks_output.eq(1),
                outputs.eq(command.count),
            ]
        with m.Elif(out.valid & out.ready & out.payload.last):
            m.d.sync += outputs.eq(outputs - 1)

        looks = (tables.words.valid & tables.words.ready) | (bins.words.valid & bins.words.ready)
        works = engine.steps.as_value().any() | looks | rows.busy
        worked = Signal()
        m.d.sync += [worked.eq(works), self.busy_cycles.eq(self.busy_cycles + worked)]
        m.d.comb += [
            self.busy.eq(ring.busy | path.busy | engine.busy.as_value().any() | queries.busy | attends | finishes),
            self.full.eq(ring.full),
            self.stall_cycles.eq(ring.stall_cycles),
        ]
        with m.If(ring.nonfinite | quantizer.nonfinite):
            m.d.sync += self.nonfinite.eq(1)
        with m.If(ring.error | rows.error | softmax.error | queries.error):
            m.d.sync += self.error.eq(1)
        return m
