"""Softmax of the array's scores: fp32 scores come in tile by tile, weights leave in the order of the values' job."""

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, fifo, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_shape import WEIGHT_BITS
from kvant.hw.attention.exponential import Exponential
from kvant.hw.attention.floating import shift_up
from kvant.hw.attention.layouts import index_range
from kvant.hw.attention.offset_sums import OFFSET_FACTOR, WINDOWS_AHEAD, OffsetTerm
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.attention.scaler import LOG_FRACTION, LOG_LEAST, LOG_LIMIT, LOG_WIDTH, ScoreScaler, softmax_constant
from kvant.hw.linear.activation_buffer import activation_input
from kvant.hw.linear.engine import output
from kvant.hw.numeric.floating import (
    FP16_LSB,
    FP16_MANTISSA,
    FP32_BIAS,
    FP32_MANTISSA,
    Pipeline,
    leading_zeros,
    shift_left,
)

MOST_EXPONENT = 9
"""With a larger exponent every product of two mantissas saturates as it does with this one."""

LEAST_EXPONENT = -54
"""With a smaller exponent every product of two mantissas is 0 as it is with this one."""


class OffsetAddends(wiring.Component):
    """What the offsets of keys along time add to the logarithms of a window: the sum over the groups of the head.

    Parameters
    ----------
    p : AttentionParameters

    Members
    -------
    valid, term, z : in
        An `OffsetTerm` and its logarithm.
    query, window : in
    addend : out
        Of this query and window, in the same cycle.
    """

    def __init__(self, p: AttentionParameters):
        self.p = p
        super().__init__(
            {
                "valid": In(1),
                "term": In(OffsetTerm(p)),
                "z": In(signed(LOG_WIDTH)),
                "query": In(index_range(p.queries)),
                "window": In(range(WINDOWS_AHEAD)),
                "addend": Out(signed(LOG_WIDTH)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        # LUT memory: read, added and written in one cycle.
        query_bits = (p.queries - 1).bit_length()
        m.submodules.sums = sums = memory.Memory(shape=signed(LOG_WIDTH), depth=WINDOWS_AHEAD << query_bits, init=[])
        write, read, look = sums.write_port(), sums.read_port(domain="comb"), sums.read_port(domain="comb")
        where = Cat(self.term.query[:query_bits], self.term.window)
        m.d.comb += [
            read.addr.eq(where),
            write.addr.eq(where),
            write.data.eq(Mux(self.term.first, 0, read.data) + self.z),
            write.en.eq(self.valid),
            look.addr.eq(Cat(self.query[:query_bits], self.window)),
            self.addend.eq(look.data),
        ]
        return m


class QueryLimits(data.StructLayout):
    """What a query sees: keys ``first <= t < end``, their logarithms less ``slope * (end - 1 - t)``; slope is fp16."""

    def __init__(self, p: AttentionParameters):
        super().__init__({"first": range(p.tokens + 1), "end": range(p.tokens + 1), "slope": 16})


class PositionBias(wiring.Component):
    """``rne(slope * distance * 2^16)``.

    Parameters
    ----------
    width : int
        Bits of the distance.

    Attributes
    ----------
    latency : int
        Cycles to the result. One per cycle.

    Members
    -------
    slope : in
        fp16, finite; its sign is ignored.
    distance : in
    bias : out
    """

    latency = 6

    def __init__(self, width: int):
        self.behind = -1 - FP16_LSB - LOG_FRACTION  # bits of the product behind the last one of the result
        self.width = width + FP16_MANTISSA + 29
        super().__init__({"slope": In(16), "distance": In(width), "bias": Out(self.width - self.behind + 1)})

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register
        normal = self.slope[10:15].any()
        mantissa = register(Cat(self.slope[:10], normal), "mantissa")
        shift = register(Mux(normal, self.slope[10:15] - 1, 0)[:5], "shift", cycles=3)
        distance = register(self.distance, "distance")
        product = register(mantissa * distance, "product", cycles=2)
        product = shift_up(m, pipeline, product, shift, width=self.width, name="product")
        kept, half, rest = product[self.behind :], product[self.behind - 1], product[: self.behind - 1].any()
        m.d.comb += self.bias.eq(register(kept + (half & (rest | kept[0])), "bias"))
        return m


class WeightToHalf(wiring.Component):
    """``fp16(w * 2^-9)``, ties to even.

    Attributes
    ----------
    latency : int
        Cycles to the result, a register. One per cycle.
    """

    latency = 3

    def __init__(self):
        super().__init__({"w": In(WEIGHT_BITS), "x": Out(16)})

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register
        zeros = register(leading_zeros(m, self.w), "zeros")
        nonzero = register(self.w.any(), "nonzero", cycles=2)
        w = register(self.w, "w")
        normal = register(shift_left(m, w, zeros), "normal")
        exponent = register((29 - zeros)[:5], "exponent")  # of 2^14 to 2^15, where w has no zero before it
        cut = WEIGHT_BITS - FP16_MANTISSA
        fraction, half, rest = normal[cut:-1], normal[cut - 1], normal[: cut - 1].any()
        rounded = (Cat(fraction, exponent) + (half & (rest | fraction[0])))[:15]
        m.d.comb += self.x.eq(register(Mux(nonzero, rounded, 0), "x"))
        return m


class ScoreSoftmax(wiring.Component):
    """Logarithms of all keys of a command's queries, and then their weights.

    ::

        y ──> ScoreScaler ──> minus bias ──┬──> store (memory) ──> peak - z ──> Exponential ──┬──> fp16 ──> x
                                           └──> peak of each query ────────────┘              └──> row_weights

    The key job's scores fill the store and the largest logarithm of every query is found as they come. `go` starts the
    second pass: windows of the cache of values leave as fp16 activations of the value job, tokens whose values are
    INT8 rows as weights of 24 bits. Both share the lanes; either has room reserved before it is asked for, so that
    neither waits for the other.

    Parameters
    ----------
    p : AttentionParameters

    Attributes
    ----------
    latency : int
        Cycles from a score's turn to its logarithm in the store.

    Members
    -------
    start : in
        A command begins; the inputs below are stable from here on until the next one.
    count, tokens, sinks, sink_tiles : in
        Queries, keys, sinks among them; tiles of the key job that hold sinks.
    limits : in, array of `QueryLimits`
    y : in stream
        Outputs of the key job. A score per cycle.
    scored : out
        All scores are in, the peaks are known; low from `start` on.
    go : in
        Starts the second pass, while `scored`.
    windows, int8_values : in
        Windows whose weights leave at `x`; or all tokens are rows. Stable from `go` on.
    x : out stream
        `activation_input` of the linear path: for each window, for each query: its tokens. Sinks have weight 0.
    row_weights : out stream
        For each row, for each query, the weight: of sinks, then of tokens behind the windows, where sinks have weight
        0; with `int8_values` of all tokens.

    With `AttentionParameters.time_keys` also:

    time, staged_tiles : in
        Keys along time: the first tiles of the key job, so many, hold the open window, then come those of the sinks.
    offset_valid, offset : in
        An `OffsetTerm`; taken at once, it goes before a score.
    window_scored : out
        In this cycle the last score of a window is taken.
    """

    def __init__(self, p: AttentionParameters):
        self.p = p.check_attention()
        self.constant = softmax_constant(p.head_dim)
        self.room = 32
        """Transfers that a queue holds, more than are under way."""
        self.latency = 1 + ScoreScaler.latency + 2
        time_ports = {
            "time": In(1),
            "staged_tiles": In(range(p.staged_blocks * p.key_tiles + 1)),
            "offset_valid": In(1),
            "offset": In(OffsetTerm(p)),
            "window_scored": Out(1),
        }
        super().__init__(
            {
                "start": In(1),
                "count": In(range(p.queries + 1)),
                "tokens": In(range(p.tokens + 1)),
                "sinks": In(range(p.sinks + 2)),
                "sink_tiles": In(range(p.sink_blocks * p.key_tiles + 2)),
                "limits": In(QueryLimits(p)).array(p.queries),
                "y": In(stream.Signature(output(p.linear))),
                "scored": Out(1),
                "go": In(1),
                "windows": In(range(p.tokens // p.group + 1)),
                "int8_values": In(1),
                "x": Out(stream.Signature(activation_input(p.linear))),
                "row_weights": Out(stream.Signature(WEIGHT_BITS)),
                **(time_ports if p.time_keys else {}),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        lane_bits = (p.x_lanes - 1).bit_length()
        token_bits = (p.tokens - 1).bit_length()
        word_bits = token_bits - lane_bits
        query_bits = (p.queries - 1).bit_length()
        stores = []
        for lane in range(p.x_lanes):
            # The first pass writes, the second one reads.
            m.submodules[f"store_{lane}"] = store = memory.Memory(
                shape=signed(LOG_WIDTH),
                depth=max(2, ((p.queries - 1) << word_bits) + p.tokens // p.x_lanes),
                init=[],
                attrs={"no_rw_check": 1},
            )
            stores.append(store)

        def address(word: Value, query: Value) -> Value:
            return Cat(word[:word_bits], query[:query_bits])

        peaks = [Signal(signed(LOG_WIDTH), name=f"peak_{q}") for q in range(p.queries)]
        self._score(m, stores, address, peaks, lane_bits, token_bits)
        self._weigh(m, stores, address, peaks, lane_bits, token_bits)
        return m

    def _limits_of(self, query: Value) -> data.View:
        """The limits of a query."""
        if self.p.queries == 1:
            return self.limits[0]
        return data.View(QueryLimits(self.p), Array(limits.as_value() for limits in self.limits)[query])

    def _score(self, m: Module, stores, address, peaks, lane_bits, token_bits):
        """First pass."""
        p, linear = self.p, self.p.linear
        pipeline = Pipeline(m)
        register = pipeline.register

        # A score at a time: tile, query, step, unit.
        unit, step = Signal(range(max(2, linear.units))), Signal(range(max(2, linear.unit_cols)))
        query, tile = Signal(index_range(p.queries)), Signal(range(p.tokens // p.cols + 1))
        sink_tiles = Signal.like(self.sink_tiles)
        staged_tiles, offset_valid = Const(0), Const(0)
        if p.time_keys:
            staged_tiles, offset_valid = Signal.like(self.staged_tiles), self.offset_valid
        of_staged = staged_tiles != 0
        of_sinks = ~of_staged & (sink_tiles != 0)
        unit_end = unit == linear.units - 1
        step_end = unit_end & (step == linear.unit_cols - 1)
        tile_end = step_end & (query + 1 == self.count)
        y = self.y.payload
        scores = self.y.valid & ~offset_valid
        m.d.comb += self.y.ready.eq(unit_end & ~offset_valid)
        with m.If(self.start):
            m.d.sync += [unit.eq(0), step.eq(0), query.eq(0), tile.eq(0), sink_tiles.eq(self.sink_tiles)]
            if p.time_keys:
                m.d.sync += staged_tiles.eq(Mux(self.time, self.staged_tiles, 0))
        with m.Elif(scores):
            m.d.sync += unit.eq(Mux(unit_end, 0, unit + 1))
            with m.If(unit_end):
                m.d.sync += step.eq(Mux(step_end, 0, step + 1))
            with m.If(step_end):
                m.d.sync += query.eq(Mux(tile_end, 0, query + 1))
            with m.If(tile_end):
                m.d.sync += tile.eq(Mux((of_sinks & (sink_tiles == 1)) | (staged_tiles == 1), 0, tile + 1))
                with m.If(of_sinks):
                    m.d.sync += sink_tiles.eq(sink_tiles - 1)
                if p.time_keys:
                    with m.If(of_staged):
                        m.d.sync += staged_tiles.eq(staged_tiles - 1)
        column = Cat(step[: (linear.unit_cols - 1).bit_length()], unit[: (linear.units - 1).bit_length()])
        token = Signal(token_bits + 1)
        score = Signal(32)
        m.d.comb += [token.eq(Cat(column, tile)), score.eq(y.data[0])]
        group_bits = (p.group - 1).bit_length()
        with m.If(of_staged):  # they stand behind the windows
            m.d.comb += token.eq(Cat(Cat(column, tile)[:group_bits], self.tokens[group_bits:]))
        if linear.units > 1:
            m.d.comb += score.eq(Array(y.data[k] for k in range(linear.units))[unit])

        # Cycle 1: its number. Sinks are read from their own tiles, and not from the pages.
        wanted = (token < self.tokens) & ((token < self.sinks) == of_sinks)
        stored = pipeline.valid(scores & wanted, cycles=self.latency)
        limits = data.View(QueryLimits(p), register(self._limits_of(query).as_value(), "limits"))
        token = register(token, "token")
        score = register(score, "score")
        m.submodules.scaler = scaler = ScoreScaler(
            FP32_MANTISSA + 1,
            factor_width=OFFSET_FACTOR if p.time_keys else FP32_MANTISSA,
            most_exponent=MOST_EXPONENT,
        )
        nonzero = score[23:31].any()
        magnitude = Cat(score[:23], 1) & nonzero.replicate(FP32_MANTISSA)
        # In units of the last place of z.
        offset = self.constant.exponent + LOG_FRACTION - (FP32_BIAS + FP32_MANTISSA - 1)
        exponent = Signal(signed(10))
        m.d.comb += [
            exponent.eq(score[23:31] + offset),
            scaler.a.eq(Mux(score[31], -magnitude, magnitude)),
            scaler.b.eq(self.constant.mantissa),
            scaler.e.eq(exponent),
        ]
        with m.If(exponent > MOST_EXPONENT):
            m.d.comb += scaler.e.eq(MOST_EXPONENT)
        with m.Elif(exponent < LEAST_EXPONENT):
            m.d.comb += scaler.e.eq(LEAST_EXPONENT)
        if p.time_keys:
            offset = data.View(OffsetTerm(p), register(self.offset.as_value(), "offset"))
            with m.If(pipeline.valid(offset_valid, cycles=1)):
                m.d.comb += [scaler.a.eq(offset.r), scaler.b.eq(offset.mantissa), scaler.e.eq(offset.exponent)]

        # Its distance from the last key that the query sees.
        visible = register((token >= limits.first) & (token < limits.end), "visible", cycles=self.latency - 1)
        distance = Signal(token_bits + 1)
        m.d.comb += distance.eq(limits.end - 1 - token)
        m.submodules.bias = bias = PositionBias(len(distance))
        m.d.comb += [
            bias.slope.eq(register(limits.slope, "slope")),
            bias.distance.eq(register(distance, "distance")),
        ]
        amount = bias.bias
        if p.time_keys:
            # What a window's offsets add goes along with it.
            m.submodules.addends = addends = OffsetAddends(p)
            cycles = scaler.latency
            of_window = register(self.time & ~of_staged & ~of_sinks, "of_window", cycles=cycles)
            m.d.comb += [
                addends.valid.eq(pipeline.valid(offset_valid, cycles=1 + cycles)),
                addends.term.eq(register(offset.as_value(), "offset", cycles=cycles)),
                addends.z.eq(scaler.z),
                addends.query.eq(register(query, "query", cycles=cycles)),
                addends.window.eq(register(token[group_bits:], "window", cycles=cycles - 1)),
                self.window_scored.eq(
                    scores & tile_end & self.time & ~of_staged & ~of_sinks & ((tile + 1) % p.window_tiles == 0)
                ),
            ]
            amount = register(amount, "amount", cycles=cycles - bias.latency - 2)
            amount = register(amount - Mux(of_window, addends.addend, 0), "amount")
        else:
            amount = register(amount, "amount", cycles=scaler.latency - bias.latency - 1)

        # Then the difference, and within its limits.
        difference = register(scaler.z - amount, "difference")
        least = -LOG_LIMIT
        limited = Mux(difference < least, least, difference)
        if p.time_keys:
            limited = Mux(difference > LOG_LIMIT, LOG_LIMIT, limited)
        z = register(limited[:LOG_WIDTH].as_signed(), "z")
        token = register(token, "token", cycles=self.latency - 1)
        query = register(query, "query", cycles=self.latency)
        for lane, store in enumerate(stores):
            write = store.write_port()
            m.d.comb += [
                write.addr.eq(address(token[lane_bits:], query)),
                write.data.eq(z),
                write.en.eq(stored & (token[:lane_bits] == lane if lane_bits else 1)),
            ]
        ended = pipeline.valid(self.y.valid & self.y.ready & y.last, cycles=self.latency + 1)
        for number, peak in enumerate(peaks):
            with m.If(self.start):
                m.d.sync += peak.eq(LOG_LEAST)
            with m.Elif(stored & visible & (query == number) & (z > peak)):
                m.d.sync += peak.eq(z)
        with m.If(self.start):
            m.d.sync += self.scored.eq(0)
        with m.Elif(ended):
            m.d.sync += self.scored.eq(1)

    def _weigh(self, m: Module, stores, address, peaks, lane_bits, token_bits):
        """Second pass."""
        p = self.p
        pipeline = Pipeline(m)
        register = pipeline.register
        m.submodules.x_queue = x_queue = fifo.SyncFIFOBuffered(width=16 * p.x_lanes, depth=self.room)
        m.submodules.row_queue = row_queue = fifo.SyncFIFOBuffered(width=WEIGHT_BITS, depth=self.room)
        for queue, port in ((x_queue, self.x), (row_queue, self.row_weights)):
            m.d.comb += [
                port.valid.eq(queue.r_rdy),
                port.payload.eq(queue.r_data),
                queue.r_en.eq(port.ready),
            ]

        # Windows: a word of tokens of a query.
        asks_window, asks_row = Signal(), Signal()
        x_room, row_room = Signal(range(self.room + 1), init=self.room), Signal(range(self.room + 1), init=self.room)
        m.d.sync += [
            x_room.eq(x_room - asks_window + (self.x.valid & self.x.ready)),
            row_room.eq(row_room - asks_row + (self.row_weights.valid & self.row_weights.ready)),
        ]
        group_words = p.group // p.x_lanes
        windows_left = Signal.like(self.windows)
        window, window_query = Signal(range(max(2, p.tokens // p.group))), Signal(index_range(p.queries))
        word = Signal(range(max(2, group_words)))
        word_end = word == group_words - 1
        window_end = word_end & (window_query + 1 == self.count)
        m.d.comb += asks_window.eq((windows_left != 0) & (x_room != 0))
        with m.If(self.go):
            m.d.sync += [windows_left.eq(self.windows), window.eq(0), window_query.eq(0), word.eq(0)]
        with m.Elif(asks_window):
            m.d.sync += word.eq(Mux(word_end, 0, word + 1))
            with m.If(word_end):
                m.d.sync += window_query.eq(Mux(window_end, 0, window_query + 1))
            with m.If(window_end):
                m.d.sync += [window.eq(window + 1), windows_left.eq(windows_left - 1)]

        # Rows: a token of a query.
        rows, sinks = Signal(), Signal()
        row, row_query = Signal(token_bits + 1), Signal(index_range(p.queries))
        group_bits = (p.group - 1).bit_length()
        staged = Signal.like(row)  # the first token behind the windows
        staged_first = Mux(self.int8_values, 0, Cat(Const(0, group_bits), self.windows))
        row_end = row_query + 1 == self.count
        m.d.comb += [
            staged.eq(staged_first),
            asks_row.eq(rows & (row_room != 0) & ~asks_window),
        ]
        with m.If(self.go):
            with_sinks = ~self.int8_values & (self.sinks != 0)
            m.d.sync += [
                sinks.eq(with_sinks),
                row.eq(Mux(with_sinks, 0, staged)),
                rows.eq(with_sinks | (staged != self.tokens)),
                row_query.eq(0),
            ]
        with m.Elif(asks_row):
            m.d.sync += row_query.eq(Mux(row_end, 0, row_query + 1))
            with m.If(row_end):
                with m.If(sinks & (row + 1 == self.sinks)):
                    m.d.sync += [row.eq(staged), sinks.eq(0), rows.eq(staged != self.tokens)]
                with m.Else():
                    m.d.sync += [row.eq(row + 1), rows.eq(row + 1 != self.tokens)]

        # Cycle 1: the store is asked. Cycle 3: what it answered.
        row_query_now = Mux(asks_window, window_query, row_query)
        query = register(row_query_now, "query")
        window_token = Cat(Const(0, lane_bits), word[: (group_words - 1).bit_length()], window)
        first = register(Mux(asks_window, window_token, row)[: token_bits + 1], "first")
        # Tokens below it have weight 0: sinks, where they are not asked for as such.
        hidden = register(Mux(asks_window | ~(sinks | self.int8_values), self.sinks, 0), "hidden")
        asked = pipeline.valid(asks_window | asks_row, cycles=1)
        limits = self._limits_of(query)
        visible_from = register(Mux(limits.first > hidden, limits.first, hidden), "visible_from")
        visible_to = register(limits.end, "visible_to")
        peak = Array(peaks)[query] if p.queries > 1 else peaks[0]
        peak = register(register(peak, "peak"), "peak")
        token = register(first, "token")
        lanes, halves = [], []
        for lane, store in enumerate(stores):
            read = store.read_port()
            of_lane = Cat(Const(lane, lane_bits), token[lane_bits:])
            seen = register((of_lane >= visible_from) & (of_lane < visible_to), f"seen_{lane}")
            z = register(read.data, f"z_{lane}")
            below = (peak - z)[:LOG_WIDTH] | (~seen).replicate(LOG_WIDTH)
            m.submodules[f"exponential_{lane}"] = exponential = Exponential()
            m.submodules[f"half_{lane}"] = half = WeightToHalf()
            m.d.comb += [
                read.addr.eq(address(first[lane_bits:], query)),
                read.en.eq(asked),
                exponential.x.eq(register(below, f"below_{lane}")),
                half.w.eq(exponential.w),
            ]
            lanes.append(exponential.w)
            halves.append(half.x)
        weighed = 4 + Exponential.latency
        place = register(first[:lane_bits], "place", cycles=weighed - 1) if lane_bits else Const(0, 1)
        weight = register(Array(lanes)[place] if lane_bits else lanes[0], "weight")
        m.d.comb += [
            x_queue.w_data.eq(Cat(*halves)),
            x_queue.w_en.eq(pipeline.valid(asks_window, cycles=weighed + WeightToHalf.latency)),
            row_queue.w_data.eq(weight),
            row_queue.w_en.eq(pipeline.valid(asks_row, cycles=weighed + 1)),
        ]
