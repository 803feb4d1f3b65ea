"""Attention over keys and values that are INT8 rows: sinks and the newest tokens.

Two passes over the same rows. The key pass makes the base-2 logarithm z of every weight; once the largest z of all keys
is known, the value pass makes the weights and adds the rows up under them. One set of multipliers serves both: elements
of a row times those of a query, or times a weight. Source: docs/numerics.md, "Softmax"; the sums are block floating
point, one exponent for the channels of a group.
"""

from amaranth.hdl import Array, Cat, Module, Mux, Signal, signed
from amaranth.lib import data, enum, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.block_sums import PLACE_OFFSET, SPACING, BlockSums, sum_width
from kvant.hw.attention.cache_shape import WEIGHT_BITS, CacheShape
from kvant.hw.attention.exponential import Exponential
from kvant.hw.attention.layouts import index_range
from kvant.hw.attention.row_factor import PLACE_BITS, RowFactor
from kvant.hw.attention.row_scores import RowScores
from kvant.hw.attention.scaler import LOG_LEAST, LOG_WIDTH
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.numeric.adder_tree import tree_levels, tree_sum
from kvant.hw.numeric.delay_line import DelayLine
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.parameters import check_integer


class Int8Job(enum.Enum, shape=2):
    """What `Int8Rows` is to do."""

    QUERIES = 0
    KEYS = 1
    VALUES = 2


def default_rows(p: CacheShape) -> int:
    """Rows of a pass at most: decoded ones, sinks, the recent window, and two batches on their way to the coder."""
    return p.decode_tokens + p.sinks + p.recent + 2 * p.batch_tokens


def total_width(rows: int) -> int:
    """Bits of the unsigned sum of the weights of so many rows."""
    return (rows * ((1 << WEIGHT_BITS) - 1)).bit_length()


def row_sums(p: CacheShape, *, queries: int | None = None, rows: int | None = None) -> data.StructLayout:
    """Payload of `Int8Rows.o`: `lanes` sums ``data * 2^exponent`` of query `vector`; `last` ends the job."""
    queries = p.q_parallel if queries is None else queries
    width = sum_width(default_rows(p) if rows is None else rows)
    return data.StructLayout(
        {
            "data": data.ArrayLayout(signed(width), p.lanes),
            "exponent": signed(PLACE_BITS),
            "vector": index_range(queries),
            "last": 1,
        }
    )


class Position(data.StructLayout):
    """Where a transfer of a row stands, and its scale.

    Members
    -------
    transfer
        Transfer of the row.
    first_row, first_transfer, last_transfer : 1
        First row of the pass; first and last transfer of the row.
    first, last : 1
        First and last transfer of the group.
    first_group, last_group : 1
        First and last group of the row.
    final : 1
        Last row of the pass.
    scale : 16
        fp16, of the group.
    """

    def __init__(self, transfers: int):
        flags = ("first_row", "first_transfer", "last_transfer", "first", "last", "first_group", "last_group", "final")
        super().__init__({"transfer": index_range(transfers), **dict.fromkeys(flags, 1), "scale": 16})


class Int8Rows(wiring.Component):
    """Scores of INT8 rows with the queries of a KV head, and sums of INT8 rows under attention weights.

    ::

        rows ──> row register ─────── delay ────────> multipliers ──┬──> tree ──> RowScores ──> logarithms, z_max
                                                           ^        └──> BlockSums ──> o
        q ─────> queries (memory) ──────────── or ─────────┤                 ^
                 logarithms ──> Exponential ──> RowFactor ─┘─────────────────┘
                                     └──> total

    A job QUERIES stores queries. A job KEYS takes the rows of keys and keeps ``z`` of every row and query (see
    `kvant.hw.attention.scaler`); a job VALUES takes as many rows of values in the same order, gives each the weight of
    ``reference - z`` and adds it up (see `BlockSums`; the weight's product with the scale is cut to 17 bits). Queries
    take turns on the multipliers: one transfer of a row with one query per cycle.

    Parameters
    ----------
    p : CacheShape
    queries : int, optional
        Queries held at most; `q_parallel` if not given.
    rows : int, optional
        Rows of a pass at most; `default_rows` if not given.

    Attributes
    ----------
    turns : callable
        Cycles that a transfer of a row takes, from the number of queries.
    key_latency, value_latency : int
        Cycles from the transfer that ends a pass, if nothing is before it, and with one query, until `keys_done`;
        until the first transfer of `o`.

    Members
    -------
    job : in stream
        kind : Int8Job
        count : 1 .. queries
            Queries, in QUERIES; the passes that follow are of as many.
    q : in stream
        data : lanes * signed(8)
        scale : 16
            fp16, of the whole query; read with its last transfer.
        last : 1
            Last transfer of the query. (Surplus lanes are ignored.)
    rows : in stream
        data : lanes * signed(8)
        scale : 16
            fp16, of the transfer's group; finite and not negative.
        last : 1
            Last transfer of the row.
        final : 1
            With `last`: last row of the pass.
        empty : 1
            This transfer is none: there are no rows. The only transfer of its pass.
    reference : in, signed, array of `queries`
        Largest z of all keys of the query, these rows and others. Stable from the job VALUES on until `values_done`.
    z_max : out, signed, array of `queries`
        Largest z of the rows, the least signed number for no rows; valid with `keys_done`.
    total : out, array of `queries`
        Sum of the weights of the rows, exact; valid with `values_done`.
    keys_done, values_done : out
        The last job KEYS or VALUES is through (the sums are made; `o` follows). Low from a job's transfer on.
    empty : out
        There were no rows in the last pass.
    o : out stream
        See `row_sums`: for each query, for each transfer of a row; nothing if there were no rows. A transfer every
        second cycle at most.
    busy : out
        A job is under way.
    error : out
        Sticky: `last` is not where a row ends, a pass has more than `rows` rows, or a value pass has another number
        than the key pass. Results have no meaning then.

    Raises
    ------
    ParameterError
        When a transfer would have elements of two groups, or an argument is out of range.
    """

    def __init__(self, p: CacheShape, *, queries: int | None = None, rows: int | None = None):
        self.p = p.check_pq()
        self.queries = check_integer("queries", p.q_parallel if queries is None else queries, 1, 64)
        self.most_rows = check_integer("rows", default_rows(p) if rows is None else rows, 1)
        self.row_groups = ceil_div(p.head_dim, p.group)
        self.group_transfers = ceil_div(min(p.group, p.head_dim), p.lanes)
        self._words = self._address(p.row_transfers - 1, self.queries - 1) + 1
        self.least_turns = ceil_div(SPACING, p.row_transfers)
        # Cycles of a turn. The element's operand waits for the weight's in both passes.
        self._weight_cycle = 4 + Exponential.latency
        self._operand_cycle = self._weight_cycle + RowFactor.latency + 1
        self._ask_cycle = self._operand_cycle - 2  # asks for the query's elements
        self._sum_cycle = self._operand_cycle + 2 - BlockSums.product_delay
        self._tree_levels = tree_levels(p.lanes)
        self._z_cycle = self._operand_cycle + 2 + self._tree_levels + RowScores.latency
        self.key_latency = 1 + self._z_cycle + 4
        self.value_latency = 1 + self._sum_cycle + BlockSums.latency + 3
        layout = row_sums(p, queries=self.queries, rows=self.most_rows)
        elements = data.ArrayLayout(signed(8), p.lanes)
        super().__init__(
            {
                "job": In(stream.Signature(data.StructLayout({"kind": Int8Job, "count": range(self.queries + 1)}))),
                "q": In(stream.Signature(data.StructLayout({"data": elements, "scale": 16, "last": 1}))),
                "rows": In(
                    stream.Signature(
                        data.StructLayout({"data": elements, "scale": 16, "last": 1, "final": 1, "empty": 1})
                    )
                ),
                "reference": In(signed(LOG_WIDTH)).array(self.queries),
                "z_max": Out(signed(LOG_WIDTH)).array(self.queries),
                "total": Out(total_width(self.most_rows)).array(self.queries),
                "keys_done": Out(1),
                "values_done": Out(1),
                "empty": Out(1),
                "o": Out(stream.Signature(layout)),
                "busy": Out(1),
                "error": Out(1),
            }
        )

    def turns(self, count: int) -> int:
        """Cycles that a transfer of a row takes with *count* queries."""
        return max(count, self.least_turns)

    def _address(self, transfer, vector):
        """Word of a transfer and query, numbers or values."""
        bits = (self.queries - 1).bit_length()
        if isinstance(transfer, int):
            return transfer << bits | vector
        return Cat(vector[:bits], transfer)

    def elaborate(self, platform):
        p = self.p
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register
        transfers = p.row_transfers
        job, queries, rows = self.job.payload, self.q.payload, self.rows.payload

        # The job.
        count = Signal(range(self.queries + 1), init=1)
        values = Signal()
        idle, loading, passing, sending = Signal(), Signal(), Signal(), Signal()
        end_of_keys, end_of_values, sent = Signal(), Signal(), Signal()
        take_job, take_query, take_row = (stream.valid & stream.ready for stream in (self.job, self.q, self.rows))
        query_end, pass_end, no_rows = Signal(), Signal(), Signal()
        m.d.comb += [self.job.ready.eq(idle), self.q.ready.eq(loading), self.busy.eq(~idle)]
        with m.FSM(name="job"):
            with m.State("IDLE"):
                m.d.comb += idle.eq(1)
                with m.If(self.job.valid):
                    with m.If(job.kind == Int8Job.QUERIES):
                        m.next = "QUERIES"
                    with m.Else():
                        m.next = "PASS"
            with m.State("QUERIES"):
                m.d.comb += loading.eq(1)
                with m.If(query_end):
                    m.next = "IDLE"
            with m.State("PASS"):
                m.d.comb += passing.eq(1)
                with m.If(no_rows):
                    m.next = "IDLE"
                with m.Elif(pass_end):
                    m.next = "DRAIN"
            with m.State("DRAIN"):
                with m.If(end_of_keys):
                    m.next = "IDLE"
                with m.If(end_of_values):
                    m.next = "SEND"
            with m.State("SEND"):
                m.d.comb += sending.eq(1)
                with m.If(sent):
                    m.next = "IDLE"
        turns = Signal(range(max(self.queries, self.least_turns) + 1))
        starts = take_job & (job.kind != Int8Job.QUERIES)
        with m.If(take_job):
            m.d.sync += values.eq(job.kind == Int8Job.VALUES)
            with m.If(job.kind == Int8Job.QUERIES):
                m.d.sync += [
                    count.eq(job.count),
                    turns.eq(Mux(job.count < self.least_turns, self.least_turns, job.count)),
                ]
        with m.If(starts):
            m.d.sync += [self.keys_done.eq(0), self.values_done.eq(0), self.empty.eq(0)]
        with m.Elif(no_rows):
            m.d.sync += [self.keys_done.eq(~values), self.values_done.eq(values), self.empty.eq(1)]
        with m.Elif(end_of_keys | end_of_values):
            m.d.sync += [self.keys_done.eq(end_of_keys), self.values_done.eq(end_of_values)]

        # Queries.
        m.submodules.scores = scores = RowScores(p, self.queries)
        m.submodules.queries = query_words = memory.Memory(
            shape=8 * p.lanes,
            depth=max(2, self._words),
            init=[],
            attrs={"no_rw_check": 1},
        )
        query_write, query_read = query_words.write_port(), query_words.read_port()
        query_vector, query_transfer = Signal(index_range(self.queries)), Signal(index_range(transfers))
        query_row_end = query_transfer == transfers - 1
        m.d.comb += [
            query_write.addr.eq(self._address(query_transfer, query_vector)),
            query_write.data.eq(queries.data),
            query_write.en.eq(take_query),
            scores.scale_write.eq(take_query & query_row_end),
            scores.scale_vector.eq(query_vector),
            scores.query_scale.eq(queries.scale),
            query_end.eq(take_query & query_row_end & (query_vector + 1 == count)),
        ]
        with m.If(take_query):
            m.d.sync += query_transfer.eq(Mux(query_row_end, 0, query_transfer + 1))
            with m.If(query_row_end):
                m.d.sync += query_vector.eq(Mux(query_end, 0, query_vector + 1))

        # Rows, a transfer at a time. It stays until every query has had its turn.
        transfer, group_transfer = Signal(index_range(transfers)), Signal(index_range(self.group_transfers))
        first_row, first_group = Signal(), Signal()
        row, key_rows = Signal(range(self.most_rows + 1)), Signal(range(self.most_rows + 1))
        row_end, group_end, last_group = Signal(), Signal(), Signal()
        m.d.comb += [
            row_end.eq(transfer == transfers - 1),
            group_end.eq(row_end | (group_transfer == self.group_transfers - 1)),
            last_group.eq(1 if self.row_groups == 1 else transfer >= (self.row_groups - 1) * self.group_transfers),
            no_rows.eq(take_row & rows.empty),
            pass_end.eq(take_row & rows.last & rows.final),
        ]
        with m.If(starts):
            m.d.sync += [transfer.eq(0), group_transfer.eq(0), first_group.eq(1), first_row.eq(1), row.eq(0)]
        with m.Elif(take_row):
            m.d.sync += [
                transfer.eq(Mux(row_end, 0, transfer + 1)),
                group_transfer.eq(Mux(group_end, 0, group_transfer + 1)),
            ]
            with m.If(row_end):
                m.d.sync += [first_group.eq(1), first_row.eq(0), row.eq(row + 1)]
            with m.Elif(group_end):
                m.d.sync += first_group.eq(0)
        rows_now = Mux(no_rows, 0, row + 1)
        with m.If(no_rows | pass_end):
            with m.If(~values):
                m.d.sync += key_rows.eq(rows_now)
            with m.Elif(key_rows != rows_now):
                m.d.sync += self.error.eq(1)
        wrong_end = ~rows.empty & ((rows.last != row_end) | (row == self.most_rows))
        with m.If((take_row & wrong_end) | (take_query & (queries.last != query_row_end))):
            m.d.sync += self.error.eq(1)

        held = Signal()
        x = Signal(data.ArrayLayout(signed(8), p.lanes), reset_less=True)
        position = Signal(Position(transfers), reset_less=True)
        turn = Signal(range(max(2, self.queries, self.least_turns)))
        passes, goes, last_turn = Signal(), Signal(), Signal()
        m.d.comb += [
            goes.eq(held & (turn < count)),
            last_turn.eq(goes & position.last_transfer & (turn + 1 == count)),
            passes.eq(~held | (turn + 1 == turns)),
            self.rows.ready.eq(passing & passes),
        ]
        with m.If(passes):
            m.d.sync += [held.eq(take_row & ~rows.empty), turn.eq(0)]
        with m.Else():
            m.d.sync += turn.eq(turn + 1)
        with m.If(take_row):
            tail_lanes = p.head_dim - (transfers - 1) * p.lanes
            m.d.sync += [
                *(x[lane].eq(rows.data[lane]) for lane in range(tail_lanes)),
                *(x[lane].eq(Mux(row_end, 0, rows.data[lane])) for lane in range(tail_lanes, p.lanes)),
                position.transfer.eq(transfer),
                position.first_row.eq(first_row),
                position.first_transfer.eq(transfer == 0),
                position.last_transfer.eq(row_end),
                position.first.eq(group_transfer == 0),
                position.last.eq(group_end),
                position.first_group.eq(first_group),
                position.last_group.eq(last_group),
                position.final.eq(rows.final),
                position.scale.eq(rows.scale),
            ]

        # Logarithms, in the order in which the key pass makes them and the value pass needs them. Passes do not
        # overlap: no address is read and written in one cycle.
        m.submodules.logarithms = logarithms = memory.Memory(
            shape=signed(LOG_WIDTH), depth=max(2, self.most_rows * self.queries), init=[], attrs={"no_rw_check": 1}
        )
        log_write, log_read = logarithms.write_port(), logarithms.read_port()
        row_base, log_address = Signal.like(log_read.addr), Signal.like(log_write.addr)
        with m.If(starts):
            m.d.sync += row_base.eq(0)
        with m.Elif(last_turn):
            m.d.sync += row_base.eq(row_base + count)

        # Cycles 0 to 3: how far a row's z is below the reference. Then its weight.
        m.submodules.exponential = exponential = Exponential()
        vector = turn[: len(Signal(index_range(self.queries)))]
        z = register(log_read.data, "z")
        reference = register(self._of(self.reference, register(vector, "vector", cycles=2)), "reference")
        m.d.comb += [
            log_read.addr.eq(register((row_base + vector)[: len(row_base)], "log_address")),
            log_read.en.eq(pipeline.valid(goes & values, cycles=1)),
            exponential.x.eq(register((reference - z)[:LOG_WIDTH], "below")),
        ]

        # The turn waits for its weight, the elements for their operand.
        turn_layout = data.StructLayout({"vector": index_range(self.queries), "position": Position(transfers)})
        m.submodules.turns = turns_line = DelayLine(turn_layout, self._weight_cycle - 1)
        # So long a line is a memory of 16 words; a few cycles more are registers.
        line_cycles = min(self._operand_cycle - 1, 16)
        m.submodules.elements = elements_line = DelayLine(x.shape(), line_cycles)
        m.d.comb += [
            turns_line.i.vector.eq(vector),
            turns_line.i.position.eq(position),
            elements_line.i.eq(x),
        ]

        def delayed(view, cycles):
            return data.View(turn_layout, register(view.as_value(), "turn", cycles=cycles))

        weighed = delayed(turns_line.o, 1)
        m.submodules.factor = factor = RowFactor()
        m.d.comb += [factor.weight.eq(exponential.w), factor.scale.eq(weighed.position.scale)]

        # The sums of the weights; two rows of one query are `SPACING` cycles apart at least.
        begins = goes & values & position.first_transfer
        counted = pipeline.valid(begins, cycles=self._weight_cycle + 1)
        counted_vector = register(weighed.vector, "counted_vector")
        total = register(self._of(self.total, weighed.vector), "total") + register(exponential.w, "weight")
        for number in range(self.queries):
            with m.If(starts & (job.kind == Int8Job.VALUES)):
                m.d.sync += self.total[number].eq(0)
            with m.Elif(counted & (counted_vector == number)):
                m.d.sync += self.total[number].eq(total)

        # The multipliers.
        asked = delayed(weighed, self._ask_cycle - self._weight_cycle)
        summed = delayed(asked, self._sum_cycle - self._ask_cycle)
        m.d.comb += [
            query_read.addr.eq(self._address(asked.position.transfer, asked.vector)),
            query_read.en.eq(pipeline.valid(goes & ~values, cycles=self._ask_cycle)),
        ]
        elements = register(elements_line.o.as_value(), "elements", cycles=self._operand_cycle - line_cycles)
        products = []
        for lane in range(p.lanes):
            operand = Mux(values, factor.factor, query_read.data[8 * lane : 8 * lane + 8].as_signed())
            operand = register(operand, "operand")
            # The register behind a multiplier leads to another one and nothing else: it can lie where that does.
            products.append(register(elements[8 * lane : 8 * lane + 8].as_signed() * operand, "product", cycles=2))

        # Values.
        m.submodules.sums = sums = BlockSums(p.lanes, self._words, sum_width(self.most_rows))
        m.d.comb += [
            sums.valid.eq(pipeline.valid(goes & values, cycles=self._sum_cycle)),
            sums.address.eq(self._address(summed.position.transfer, summed.vector)),
            sums.first.eq(summed.position.first_row),
            sums.place.eq(register(factor.place, "place", cycles=2)),
            *(sums.products[lane].eq(product) for lane, product in enumerate(products)),
            end_of_values.eq(
                pipeline.valid(last_turn & position.final & values, cycles=self._sum_cycle + sums.latency)
            ),
        ]
        self._send(m, sums, count, sending, sent)

        # Keys.
        partial = tree_sum(pipeline, [product[:16].as_signed() for product in products], "partial")
        tree_cycles = BlockSums.product_delay + self._tree_levels
        scored = delayed(summed, tree_cycles)
        m.d.comb += [
            scores.valid.eq(pipeline.valid(goes & ~values, cycles=self._sum_cycle + tree_cycles)),
            scores.vector.eq(scored.vector),
            scores.partial.eq(partial),
            scores.scale.eq(scored.position.scale),
            *(
                getattr(scores, name).eq(scored.position[name])
                for name in ("first", "last", "first_group", "last_group")
            ),
            log_write.addr.eq(log_address),
            log_write.data.eq(scores.z),
            log_write.en.eq(scores.o_valid),
        ]
        with m.If(starts):
            m.d.sync += log_address.eq(0)
        with m.Elif(scores.o_valid):
            m.d.sync += log_address.eq(log_address + 1)

        # The largest z of each query.
        z = register(scores.z, "z", cycles=2)
        largest = register(self._of(self.z_max, scores.o_vector), "largest")
        larger = register(register(scores.z, "z") > largest, "larger")
        z_vector = register(scores.o_vector, "z_vector", cycles=2)
        compared = pipeline.valid(scores.o_valid, cycles=2)
        for number in range(self.queries):
            with m.If(starts & (job.kind == Int8Job.KEYS)):
                m.d.sync += self.z_max[number].eq(LOG_LEAST)
            with m.Elif(compared & larger & (z_vector == number)):
                m.d.sync += self.z_max[number].eq(z)
        m.d.comb += end_of_keys.eq(pipeline.valid(last_turn & position.final & ~values, cycles=self._z_cycle + 3))
        return m

    def _of(self, ports, vector):
        """The port of a query."""
        return Array(ports)[vector] if self.queries > 1 else ports[0]

    def _send(self, m: Module, sums: BlockSums, count: Signal, sending: Signal, sent: Signal):
        """Reads the sums, query by query: a word waits at the memory, one more in the output register."""
        transfers, o = self.p.row_transfers, self.o
        vector, transfer = Signal(index_range(self.queries)), Signal(index_range(transfers))
        asked, fetched = Signal(), Signal()
        asks, moves = sending & ~asked & ~fetched, fetched & (~o.valid | o.ready)
        row_end = transfer == transfers - 1
        last_word = row_end & (vector + 1 == count)
        fetched_vector = Signal.like(vector)
        m.d.comb += [
            sums.look_enable.eq(asks),
            sums.look_address.eq(self._address(transfer, vector)),
            sent.eq(o.valid & o.ready & o.payload.last),
        ]
        with m.If(asks):
            m.d.sync += [
                fetched.eq(1),
                asked.eq(last_word),
                fetched_vector.eq(vector),
                transfer.eq(Mux(row_end, 0, transfer + 1)),
                vector.eq(Mux(last_word, 0, vector + row_end)),
            ]
        with m.Else():
            with m.If(moves):
                m.d.sync += fetched.eq(0)
            with m.If(sent):
                m.d.sync += asked.eq(0)
        with m.If(moves):
            m.d.sync += [
                o.valid.eq(1),
                o.payload.data.eq(sums.look.sums),
                o.payload.exponent.eq(sums.look.place - PLACE_OFFSET),
                o.payload.vector.eq(fetched_vector),
                o.payload.last.eq(asked),
            ]
        with m.Elif(o.ready):
            m.d.sync += o.valid.eq(0)
