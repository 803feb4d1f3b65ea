"""Attention over M-ANT and INT8 caches: two jobs of the linear path with a softmax between."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_reader import CacheReader, word_port
from kvant.hw.attention.command import CommandPlan, CommandQueue, attention_command
from kvant.hw.attention.offset_sums import OffsetSums
from kvant.hw.attention.outputs import AttentionOutputs, attention_output
from kvant.hw.attention.parameters import UNIT_BITS, X_SHIFT, AttentionParameters
from kvant.hw.attention.query_fold import QueryFold
from kvant.hw.attention.query_memory import QueryMemory, query_port
from kvant.hw.attention.score_softmax import ScoreSoftmax
from kvant.hw.attention.value_rows import ValueRows, row_port
from kvant.hw.attention.weight_planes import WeightPlanes
from kvant.hw.attention.weight_sum import WeightSum
from kvant.hw.linear.engine import LinearEngine


class AttentionEngine(wiring.Component):
    """Attention of queries over one cache, bit for bit what `kvant.golden.attention.engine` computes.

    ::

        q ──> QueryMemory ──> x ┐                   ┌─> y ──> ScoreSoftmax ──┬──> x (value job)
                                ├──> LinearEngine ──┤      (WeightPlanes)    └──> row_weights
        keys ─┬─> CacheReader ──┘        │          └─> y ──> AttentionOutputs ──> out
        values┘                         xq ──> WeightSum ───────────^   ^
        rows ──> ValueRows ─────────────────────────────────────────────┘

    The key job multiplies the queries with all keys; the softmax makes weights of the scores; the value job multiplies
    the weights with the windows of the values, while `ValueRows` adds up the values that are INT8 rows. The next
    command's key job begins while the outputs leave; its keys are read as soon as there is room for them.

    Parameters
    ----------
    p : AttentionParameters

    Members
    -------
    cmd : in stream
        data : `attention_command`. One that is out of range raises `error` and is dropped.
    q : in stream
        `query_port`: the command's queries, row by row.
    keys : in stream
        `word_port`: blocks of sinks, then pages or INT8 blocks of keys. Along time: the static scales, INT8 blocks of
        the open window, blocks of sinks, then pages.
    values : in stream
        `word_port`: pages of complete windows; nothing with `int8_values`.
    rows : in stream
        `row_port`: rows of sinks, then those behind the windows; with `int8_values` all.
    out : out stream
        `attention_output`.
    busy : out
        A command is under way.
    nonfinite, error : out
        Sticky: NaN or infinity in a query; an illegal command, group or row.
    busy_cycles : out
        Cycles in which the array worked.
    """

    def __init__(self, p: AttentionParameters):
        self.p = p.check_attention()
        super().__init__(
            {
                "cmd": In(stream.Signature(data.StructLayout({"data": attention_command(p)}))),
                "q": In(stream.Signature(query_port(p))),
                "keys": In(stream.Signature(word_port(p))),
                "values": In(stream.Signature(word_port(p))),
                "rows": In(stream.Signature(row_port(p))),
                "out": Out(stream.Signature(attention_output())),
                "busy": Out(1),
                "nonfinite": Out(1),
                "error": Out(1),
                "busy_cycles": Out(32),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.commands = commands = CommandQueue(p)
        m.submodules.queries = queries = QueryMemory(p)
        m.submodules.reader = reader = CacheReader(p)
        m.submodules.linear = linear = LinearEngine(p.linear, sets=p.time_keys)
        m.submodules.softmax = softmax = ScoreSoftmax(p)
        m.submodules.weight_sum = weight_sum = WeightSum(p)
        m.submodules.value_rows = rows = ValueRows(p)
        m.submodules.outputs = outputs = AttentionOutputs(p, rows)
        wiring.connect(m, wiring.flipped(self.q), queries.q)
        wiring.connect(m, wiring.flipped(self.cmd), commands.cmd)
        wiring.connect(m, wiring.flipped(self.keys), reader.keys)
        wiring.connect(m, wiring.flipped(self.values), reader.values)
        wiring.connect(m, wiring.flipped(self.rows), rows.rows)
        wiring.connect(m, reader.w, linear.w)
        wiring.connect(m, softmax.row_weights, rows.row_weights)
        wiring.connect(m, outputs.out, wiring.flipped(self.out))

        # The command under way.
        plan = Signal(CommandPlan(p), reset_less=True)
        command, time_keys = plan.command, plan.time_keys if p.time_keys else Const(0)
        windows, key_windows = plan.windows, plan.key_windows
        sink_blocks, staged_blocks = plan.sink_blocks, plan.staged_blocks
        column_bits = (p.cols - 1).bit_length()
        has_groups = Mux(command.int8_values, 1, command.sinks != 0)
        has_channels = ~command.int8_values & (plan.windowed != command.tokens)

        # What its outputs need: they leave while the next command reads its keys.
        outputting = Signal()
        leaving_count = Signal.like(command.queries, reset_less=True)
        has = {name: Signal(name=f"has_{name}", reset_less=True) for name in ("sums", "groups", "channels")}

        # Its two jobs.
        values = Signal()  # the job under way is that of values
        multiplies, reads_values = Signal(), Signal()  # a job is offered
        reads_keys, keys_asked = Signal(), Signal()  # that of the next command's keys; it has been taken
        following = commands.o.payload
        job = linear.cmd.payload.data
        last_tiles = Mux(time_keys, key_windows * p.window_tiles, plan.key_tiles)
        m.d.comb += [
            # The windows behind the keys, then the keys of the next command: words come as soon as there is room.
            reads_keys.eq(~reads_values & commands.o.valid & ~keys_asked),
            reader.job.valid.eq(reads_values | reads_keys),
            reader.job.payload.values.eq(reads_values),
            reader.job.payload.int8.eq(following.int8_keys),
            reader.job.payload.sink_blocks.eq(Mux(reads_values, 0, following.sink_blocks + following.staged_blocks)),
            reader.job.payload.pages.eq(Mux(reads_values, windows, following.key_pages)),
            reader.job.payload.tiles.eq(following.key_tiles),
            linear.cmd.valid.eq(multiplies),
            job.tokens.eq(Mux(values, command.queries * p.weight_planes, command.queries)),
            job.groups.eq(Mux(values, windows, p.head_groups)),
            job.tail.eq(Mux(values, p.group, p.head_tail)),
            job.tiles.eq(Mux(values, p.value_tiles, (sink_blocks + staged_blocks) * p.key_tiles + last_tiles)),
            job.last_cols.eq(
                Mux(
                    values,
                    p.head_dim - (p.value_tiles - 1) * p.cols,
                    Mux(time_keys, p.cols, (command.tokens - 1)[:column_bits] + 1 if column_bits else 1),
                )
            ),
            job.interleave.eq(Mux(values, p.value_tiles, p.key_tiles)),
        ]

        folded_nonfinite = Signal()  # sticky
        start, second, output = Signal(), Signal(), Signal()  # first pass, second pass, end of the command

        # Streams of the linear path go with the job.
        x, y, xq = linear.x, linear.y, linear.xq
        weights = softmax.x
        if p.weight_planes > 1:
            m.submodules.planes = planes = WeightPlanes(p)
            wiring.connect(m, softmax.x, planes.i)
            m.d.comb += [
                planes.start.eq(second),
                planes.count.eq(command.queries),
                planes.valid.eq(xq.valid & values),
                planes.xq.eq(xq.payload),
            ]
            weights = planes.o
        asked = queries.x  # what the key job asks for
        sends = Signal()  # they may be sent
        fold_flags = []
        if p.time_keys:
            m.submodules.fold = fold = QueryFold(p)
            m.submodules.offsets = offsets = OffsetSums(p)
            asked = fold.o
            wiring.connect(m, reader.channel_words, fold.channel_words)
            wiring.connect(m, queries.x, fold.i)
            m.d.comb += [
                reader.job.payload.time.eq(following.time_keys & ~reads_values),
                fold.start.eq(start),
                fold.time.eq(time_keys),
                fold.with_sinks.eq(command.sinks != 0),
                fold.windows.eq(key_windows),
                fold.go.eq(sends),
                fold.kept.eq(offsets.kept),
                fold.scored.eq(softmax.window_scored),
                queries.send.eq(fold.send),
                offsets.start.eq(start),
                offsets.count.eq(command.queries),
                offsets.valid.eq(xq.valid & ~values),
                offsets.xq.eq(xq.payload),
                offsets.enable.eq(fold.enable),
                offsets.i_valid.eq(fold.window_valid),
                *(
                    getattr(offsets, name).eq(getattr(fold, name))
                    for name in ("query", "place", "group_last", "window")
                ),
                offsets.offsets.eq(fold.offsets),
                softmax.time.eq(time_keys),
                softmax.staged_tiles.eq(staged_blocks * p.key_tiles),
                softmax.offset_valid.eq(offsets.o_valid),
                softmax.offset.eq(offsets.o),
            ]
            self._connect_sets(m, linear, start, values, time_keys, staged_blocks, sink_blocks, key_windows)
            fold_flags = [fold.error]
            with m.If(fold.nonfinite):
                m.d.sync += folded_nonfinite.eq(1)
        else:
            m.d.comb += queries.send.eq(sends)
        m.d.comb += [
            x.valid.eq(Mux(values, weights.valid, asked.valid)),
            x.payload.eq(Mux(values, weights.payload.as_value(), asked.payload.as_value())),
            weights.ready.eq(x.ready & values),
            asked.ready.eq(x.ready & ~values),
            softmax.y.valid.eq(y.valid & ~values),
            outputs.y.valid.eq(y.valid & values),
            softmax.y.payload.eq(y.payload),
            outputs.y.payload.eq(y.payload),
            y.ready.eq(Mux(values, outputs.y.ready, softmax.y.ready)),
            xq.ready.eq(1),
            weight_sum.valid.eq(xq.valid & values),
            weight_sum.xq.eq(xq.payload),
        ]

        m.d.comb += [
            queries.start.eq(start),
            queries.count.eq(command.queries),
            softmax.start.eq(start),
            softmax.count.eq(command.queries),
            softmax.tokens.eq(command.tokens),
            softmax.sinks.eq(command.sinks),
            softmax.sink_tiles.eq(sink_blocks * p.key_tiles),
            softmax.go.eq(second),
            softmax.windows.eq(windows),
            softmax.int8_values.eq(command.int8_values),
            weight_sum.start.eq(second),
            weight_sum.count.eq(command.queries),
            rows.start.eq(second),
            rows.count.eq(command.queries),
            rows.group_rows.eq(Mux(command.int8_values, command.tokens, command.sinks)),
            rows.channel_rows.eq(Mux(command.int8_values, 0, command.tokens - plan.windowed)),
            outputs.start.eq(second),
            outputs.count.eq(leaving_count),
            outputs.go.eq(output),
            outputs.has_sums.eq(has["sums"]),
            outputs.has_groups.eq(has["groups"]),
            outputs.has_channels.eq(has["channels"]),
            weight_sum.query.eq(outputs.total_query),
            rows.total_query.eq(outputs.total_query),
            outputs.total.eq(Mux(has["sums"], weight_sum.total, 0) + Cat(Const(0, UNIT_BITS - X_SHIFT), rows.total)),
            outputs.look.eq(rows.look),
            outputs.scales.eq(rows.scales),
            rows.look_enable.eq(outputs.look_enable),
            rows.look_part.eq(outputs.look_part),
            rows.look_transfer.eq(outputs.look_transfer),
            rows.look_query.eq(outputs.look_query),
        ]
        for theirs, ours in zip(softmax.limits, queries.limits, strict=True):
            m.d.comb += theirs.eq(ours)

        with m.If(start):
            m.d.sync += [reads_values.eq(windows != 0), keys_asked.eq(0)]
        with m.Elif(reader.job.valid & reader.job.ready):
            m.d.sync += [reads_values.eq(0), keys_asked.eq(keys_asked | reads_keys)]
        with m.If(multiplies & linear.cmd.ready):
            m.d.sync += multiplies.eq(0)
        with m.If(second):
            m.d.sync += [
                leaving_count.eq(command.queries),
                has["sums"].eq(windows != 0),
                has["groups"].eq(has_groups),
                has["channels"].eq(has_channels),
            ]
        with m.If(output):
            m.d.sync += outputting.eq(1)
        with m.Elif(outputs.done):
            m.d.sync += outputting.eq(0)
        m.d.comb += self.busy.eq(1)
        with m.FSM():
            with m.State("COMMAND"):
                m.d.comb += [self.busy.eq(outputting | ~commands.idle), commands.o.ready.eq(keys_asked)]
                m.d.sync += [plan.eq(following), values.eq(0)]
                with m.If(commands.o.valid & keys_asked):
                    m.next = "START"
            with m.State("START"):
                m.d.comb += start.eq(1)
                m.d.sync += multiplies.eq(1)
                m.next = "QUERIES"
            with m.State("QUERIES"):
                with m.If(queries.loaded):
                    m.d.comb += sends.eq(1)
                    m.next = "SCORES"
            with m.State("SCORES"):
                with m.If(softmax.scored & ~outputting):
                    m.d.comb += second.eq(1)
                    m.d.sync += [values.eq(1), multiplies.eq(windows != 0)]
                    m.next = "VALUES"
            with m.State("VALUES"):
                with m.If((outputs.summed | (windows == 0)) & rows.done):
                    m.d.comb += output.eq(1)
                    m.next = "COMMAND"
        m.d.comb += [
            self.nonfinite.eq(linear.nonfinite | folded_nonfinite),
            self.busy_cycles.eq(linear.busy_cycles),
        ]
        with m.If(Cat(linear.error, commands.refused, rows.error, *fold_flags).any()):
            m.d.sync += self.error.eq(1)
        return m

    def _connect_sets(self, m: Module, linear, start, values, time_keys, staged_blocks, sink_blocks, windows):
        """Which blocks of tiles of the key job meet which set of queries."""
        p = self.p
        of_staged, of_sinks = Signal(), Signal()
        m.d.comb += [
            linear.sets.eq(Mux(values | ~time_keys, 1, 1 + (sink_blocks != 0) + windows)),
            linear.skip.eq(staged_blocks == 0),
            linear.set_blocks.eq(
                Mux(of_staged, staged_blocks, Mux(of_sinks, sink_blocks, p.window_tiles // p.key_tiles))
            ),
        ]
        with m.If(start):
            m.d.sync += [of_staged.eq(staged_blocks != 0), of_sinks.eq(sink_blocks != 0)]
        with m.Elif(linear.next_set):
            m.d.sync += of_staged.eq(0)
            with m.If(~of_staged):
                m.d.sync += of_sinks.eq(0)
