"""The first stage of attention: queries become INT8 and tables, while the command before is still at work."""

from amaranth.hdl import Const, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.query_buffer import QueryBuffer
from kvant.hw.attention.row_quantizer import query_output
from kvant.hw.attention.scaler import Factor, ScoreFactor
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.pq.codebook_jobs import query_job, row_input
from kvant.hw.pq.parameters import PqParameters


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
    decode : 1
        Read the history as INT8 rows, without tables and bins; there are no scores of it. Legal up to
        `p.decode_tokens` tokens, if that is not 0.
    """
    return data.StructLayout(
        {"history": range(p.tokens + 1), "count": range(p.q_parallel + 1), "head": 8, "values": 1, "decode": 1}
    )


class PreparedCommand(data.StructLayout):
    """A command whose queries are quantised: the fp16 scales of the codebooks, and of each query the factor that turns
    scores into logarithms.
    """

    def __init__(self, p: PqParameters):
        factors = data.ArrayLayout(Factor(), p.q_parallel)
        super().__init__({"command": attend_command(p), "key_scale": 16, "value_scale": 16, "factors": factors})


class QueryStage(wiring.Component):
    """Prepares one command ahead: its scales are looked up, its queries quantised, its tables begun.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    cmd : in stream of {data: `attend_command`}
        Taken when the command before has been handed over, with its queries.
    status_store, status_head : out
    scale : in
        fp16 scale of a codebook, two cycles after it is asked for.
    may_quantize : in
        Nobody else is at the quantiser, or about to be.
    quantize, count, quantized : out, out, in
        Starts the quantiser with that many queries; it has finished.
    query : in stream, see `kvant.hw.attention.row_quantizer.query_output`
    tables : out stream, see `kvant.hw.pq.codebook_jobs.query_job`
        Tables to build, of a command with a history that it does not decode.
    table_queries : out stream
        Their queries, for the codebook engine.
    decodes : out
        High for a cycle: the keys' codebook of a command that decodes its history may come.
    prepared : out stream of `PreparedCommand`
    queries : out stream, as `query`
        The queries of a command, after it has been handed over.
    busy : out
        A command is in this stage.
    error : out
        High for a cycle: a command without queries, with more than `q_parallel`, with a longer history than `tokens`,
        or one that would decode more than `decode_tokens` tokens (any, if that is 0), which is dropped.
    """

    _LOOK_CYCLES = 3

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        super().__init__(
            {
                "cmd": In(stream.Signature(data.StructLayout({"data": attend_command(p)}))),
                "status_store": Out(1),
                "status_head": Out(8),
                "scale": In(16),
                "may_quantize": In(1),
                "quantize": Out(1),
                "count": Out(range(p.q_parallel + 1)),
                "quantized": In(1),
                "query": In(stream.Signature(query_output(p))),
                "tables": Out(stream.Signature(query_job(p))),
                "table_queries": Out(stream.Signature(row_input(p, signed(8)))),
                "decodes": Out(1),
                "prepared": Out(stream.Signature(PreparedCommand(p))),
                "queries": Out(stream.Signature(query_output(p))),
                "busy": Out(1),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.buffer = buffer = QueryBuffer(p)
        m.submodules.factor = factor = ScoreFactor(p.head_dim)
        wiring.connect(m, buffer.o, wiring.flipped(self.queries))

        ready = Signal(PreparedCommand(p), reset_less=True)
        command = ready.command
        coded = Signal()  # tables are needed: the command has a history, and does not decode it

        # Queries go to the buffer, and for tables to the engine; their factors follow.
        query = self.query
        query_end = Signal()
        m.d.comb += [
            query.ready.eq(self.table_queries.ready | ~coded),
            buffer.i.valid.eq(query.valid & query.ready),
            buffer.i.payload.eq(query.payload),
            self.table_queries.payload.data.eq(query.payload.data),
            self.table_queries.payload.last.eq(query.payload.last),
            self.table_queries.valid.eq(query.valid & coded),
            query_end.eq(query.valid & query.ready & query.payload.last),
            factor.query_scale.eq(query.payload.scale),
            factor.scale.eq(ready.key_scale),
        ]
        found = Pipeline(m).valid(query_end, cycles=factor.latency)
        vector = Signal(range(p.q_parallel + 1))  # queries whose factors are found
        with m.If(found):
            m.d.sync += vector.eq(vector + 1)
        for number in range(p.q_parallel):
            with m.If(found & (vector == number)):
                m.d.sync += ready.factors[number].eq(factor.factor)

        given, legal, fits = self.cmd.payload.data, Signal(), Signal()
        built = Const(1) if p.decode_tokens else ~given.decode
        look = Signal(range(2 * self._LOOK_CYCLES))
        asks_tables = Signal()
        m.d.comb += [
            fits.eq(given.history <= Mux(given.decode, p.decode_tokens, p.tokens)),
            legal.eq((given.count != 0) & (given.count <= p.q_parallel) & fits & built),
            self.status_head.eq(command.head),
            self.status_store.eq(look >= self._LOOK_CYCLES),
            self.count.eq(command.count),
            self.tables.valid.eq(asks_tables),
            self.tables.payload.count.eq(command.count),
            self.prepared.payload.eq(ready),
            buffer.count.eq(command.count),
        ]
        with m.If(asks_tables & self.tables.ready):
            m.d.sync += asks_tables.eq(0)
        running = Signal()  # not in reset, where nothing may be taken
        m.d.sync += [self.error.eq(0), running.eq(1)]
        with m.FSM() as control:
            with m.State("IDLE"):
                m.d.comb += [self.cmd.ready.eq(running), buffer.clear.eq(1)]
                m.d.sync += [
                    command.eq(given),
                    coded.eq((given.history != 0) & ~given.decode),
                    look.eq(0),
                    vector.eq(0),
                ]
                with m.If(self.cmd.valid & running):
                    with m.If(legal):
                        m.next = "SCALES"
                    with m.Else():
                        m.d.sync += self.error.eq(1)
            with m.State("SCALES"):
                m.d.sync += look.eq(look + 1)
                with m.If(look == self._LOOK_CYCLES - 1):
                    m.d.sync += ready.key_scale.eq(self.scale)
                with m.If(look == 2 * self._LOOK_CYCLES - 1):
                    m.d.comb += self.decodes.eq(command.decode & (command.history != 0))
                    m.d.sync += [ready.value_scale.eq(self.scale), asks_tables.eq(coded)]
                    m.next = "START"
            with m.State("START"):
                m.d.comb += self.quantize.eq(self.may_quantize)
                with m.If(self.may_quantize):
                    m.next = "QUERIES"
            with m.State("QUERIES"):
                with m.If(self.quantized & ~asks_tables & (vector == command.count)):
                    m.next = "PREPARED"
            with m.State("PREPARED"):
                m.d.comb += [self.prepared.valid.eq(1), buffer.send.eq(self.prepared.ready)]
                with m.If(self.prepared.ready):
                    m.next = "SEND"
            with m.State("SEND"):
                with m.If(buffer.sent):
                    m.next = "IDLE"
        m.d.comb += self.busy.eq(~control.ongoing("IDLE"))
        return m
