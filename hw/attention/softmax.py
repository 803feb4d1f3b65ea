"""Attention weights of coded keys: scores wait in a buffer until the largest of all keys is known."""

from amaranth.hdl import Const, EnableInserter, Module, Mux, Signal, Value, signed
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_shape import WEIGHT_BITS, CacheShape
from kvant.hw.attention.exponential import Exponential
from kvant.hw.attention.layouts import FrameScores
from kvant.hw.attention.scaler import LOG_WIDTH, Factor, ScoreScaler
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.numeric.adder_tree import tree_levels, tree_sum
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.numeric.output_queue import OutputQueue


class WeightBeat(data.StructLayout):
    """Weights of the tokens of a frame, for each query; `last` ends the scan."""

    def __init__(self, p: CacheShape):
        per_token = data.ArrayLayout(WEIGHT_BITS, p.q_parallel)
        super().__init__({"weights": data.ArrayLayout(per_token, p.frame), "last": 1})


def larger(a: Value, b: Value) -> Value:
    """The larger of two numbers."""
    return Mux(a < b, b, a)


class SoftmaxWeights(wiring.Component):
    """Softmax of coded keys in two passes over a buffer of scores.

    ::

        scores ──┬──> buffer (memory) ──┬──> ScoreScaler ──┬──> reference - z ──> Exponential ──┬──> weights
                 │                      │                  │                                    │
                 └──> largest ──────────┘                  └──> z_max                           └──> total

    The first pass takes the scores of a scan and finds the largest of each query; its logarithm comes out as `z_max`.
    Whoever knows the other keys answers with the largest logarithm of all; then the second pass sends a frame of
    weights per cycle, in the order of the scores. Nothing is rescaled, so bits do not depend on stalls.

    Parameters
    ----------
    p : CacheShape

    Attributes
    ----------
    peak_latency : int
        Cycles from the last transfer of `scores` to `max_valid`.
    latency : int
        Cycles from `go` to the first transfer of `weights`. Both if earlier weights have been taken.
    total_delay : int
        Cycles from the last transfer of `weights`, if it is taken at once, to `done`.

    Members
    -------
    scores : in stream
        `FrameScores`: of the scan's frames, of which `count` tokens exist. At least one token in a scan.
    factor : in, array of q_parallel
        `Factor` that turns scores into logarithms. Stable from a scan's last transfer until `done`.
    z_max : out, signed, array of q_parallel
        Largest logarithm of each query; stays until the end of the next scan.
    max_valid : out
        `z_max` is there and `go` is awaited.
    go : in
        Starts the second pass; read while `max_valid` is high.
    reference : in, signed, array of q_parallel
        Largest logarithm over all keys of the query, at least `z_max`. Stable from `go` until `done`.
    weights : out stream
        `WeightBeat`; weight 0 for tokens that do not exist.
    total : out, array of q_parallel
        Sums of the weights, exact.
    done : out
        `total` is complete; low from `go` on. The next scan may begin.
    error : out
        Sticky: a scan had more frames than the buffer, and those were dropped.

    Raises
    ------
    ParameterError
        See `CacheShape.check_pq`.
    """

    def __init__(self, p: CacheShape):
        self.p = p.check_pq()
        self.frames = ceil_div(p.tokens, p.frame)
        self._levels = tree_levels(p.frame)
        scaler, exponential = ScoreScaler.latency, Exponential.latency
        # A word is asked for in cycle 0 of the pipeline and enters the scaler in cycle 2.
        self._z_cycle = 2 + scaler
        self._weight_cycle = self._z_cycle + 1 + exponential
        self.peak_latency = 2 + self._levels + self._z_cycle + 1
        self.latency = 1 + self._weight_cycle + 1
        self.total_delay = self._levels
        queries = p.q_parallel
        super().__init__(
            {
                "scores": In(stream.Signature(FrameScores(p))),
                "factor": In(Factor()).array(queries),
                "z_max": Out(signed(LOG_WIDTH)).array(queries),
                "max_valid": Out(1),
                "go": In(1),
                "reference": In(signed(LOG_WIDTH)).array(queries),
                "weights": Out(stream.Signature(WeightBeat(p))),
                "total": Out(p.bin_width).array(queries),
                "done": Out(1),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        p, queries = self.p, self.p.q_parallel
        always = Pipeline(m)
        # The least number is no score: it stands for a token that does not exist.
        absent = Const(1 << (p.score_width - 1), p.score_width)

        m.submodules.queue = queue = OutputQueue(WeightBeat(p))
        wiring.connect(m, queue.o, wiring.flipped(self.weights))
        advance = queue.advance
        moving = Pipeline(m, enable=advance)

        # First pass: into the buffer, which is written in the first pass and read in the second.
        ready = Signal()
        take = Signal()
        m.d.comb += [self.scores.ready.eq(ready), take.eq(self.scores.valid & ready)]
        beat = self.scores.payload
        per_token = data.ArrayLayout(p.score_width, queries)
        word = Signal(data.ArrayLayout(per_token, p.frame), reset_less=True)
        for token in range(p.frame):
            for q in range(queries):
                m.d.sync += word[token][q].eq(Mux(token < beat.count, beat.scores[token][q], absent))
        taken = always.valid(take, cycles=1)
        place = Signal(range(self.frames + 1))  # where the word goes
        newest = Signal(range(max(2, self.frames)), reset_less=True)  # where the last one of the scan went
        fits = place != self.frames
        m.submodules.buffer = buffer = memory.Memory(
            shape=word.shape(), depth=max(2, self.frames), init=[], attrs={"no_rw_check": 1}
        )
        write, read = buffer.write_port(), buffer.read_port()
        m.d.comb += [write.addr.eq(place[: len(write.addr)]), write.data.eq(word), write.en.eq(taken & fits)]
        with m.If(taken):
            with m.If(fits):
                m.d.sync += [place.eq(place + 1), newest.eq(place)]
            with m.Else():
                m.d.sync += self.error.eq(1)

        # The largest score: a tree over a frame's tokens, then over the frames.
        ended = always.valid(take & beat.last, cycles=1)
        arrived, over = taken, ended
        if self._levels:
            arrived = always.valid(taken, cycles=self._levels)
            over = always.valid(ended, cycles=self._levels)
        largest = []
        restart = Signal()
        for q in range(queries):
            values = [word[token][q].as_signed() for token in range(p.frame)]
            while len(values) > 1:
                pairs = zip(values[::2], values[1::2], strict=True)
                values = [always.register(larger(a, b), "larger") for a, b in pairs]
            running = Signal(signed(p.score_width), name=f"largest_{q}", reset_less=True)
            with m.If(restart):
                m.d.sync += running.eq(absent.as_signed())
            with m.Elif(arrived & (running < values[0])):
                m.d.sync += running.eq(values[0])
            largest.append(running)

        # Both passes share the scalers: the largest score of a query goes through that of the first token.
        ask_peak, ask_frame, ask_last = Signal(), Signal(), Signal()
        address = Signal(range(max(2, self.frames)), reset_less=True)
        m.d.comb += [read.addr.eq(address), read.en.eq(advance & ask_frame), ask_last.eq(address == newest)]
        peak_entry = moving.valid(ask_peak, cycles=1)
        peak_found = moving.valid(peak_entry, cycles=self._z_cycle - 1)
        leaving = moving.valid(ask_frame, cycles=self._weight_cycle)
        last = moving.valid(ask_frame & ask_last, cycles=self._weight_cycle)
        lanes = [[None] * queries for _ in range(p.frame)]
        for token in range(p.frame):
            for q in range(queries):
                name = f"{token}_{q}"
                fetched = read.data[token][q]
                entry = Mux(peak_entry, largest[q], fetched.as_signed()) if token == 0 else fetched.as_signed()
                entry = moving.register(entry, f"entry_{name}")
                scaler, exponential = ScoreScaler(p.score_width), Exponential()
                for part, unit in (("scaler", scaler), ("exponential", exponential)):
                    m.submodules[f"{part}_{name}"] = EnableInserter(advance)(unit)
                missing = moving.register(entry == absent.as_signed(), f"missing_{name}", cycles=scaler.latency)
                below = (self.reference[q] - scaler.z)[:LOG_WIDTH] | missing.replicate(LOG_WIDTH)
                m.d.comb += [
                    scaler.a.eq(entry),
                    scaler.b.eq(self.factor[q].mantissa),
                    scaler.e.eq(self.factor[q].exponent),
                    exponential.x.eq(moving.register(below, f"below_{name}")),
                    queue.payload.weights[token][q].eq(exponential.w),
                ]
                lanes[token][q] = exponential.w
                if token == 0:
                    with m.If(peak_found & advance):
                        m.d.sync += self.z_max[q].eq(scaler.z)
        m.d.comb += [queue.valid.eq(leaving), queue.payload.last.eq(last)]

        # The sums of the weights, of each query.
        summed, summed_last = leaving, last
        if self._levels:
            summed = moving.valid(leaving, cycles=self._levels)
            summed_last = moving.valid(last, cycles=self._levels)
        for q in range(queries):
            frame_sum = tree_sum(moving, [lanes[token][q] for token in range(p.frame)], f"sum_{q}")
            with m.If(self.go & self.max_valid):
                m.d.sync += self.total[q].eq(0)
            with m.Elif(summed & advance):
                m.d.sync += self.total[q].eq((self.total[q] + frame_sum)[: p.bin_width])

        with m.FSM():
            with m.State("SCORES"):
                m.d.sync += ready.eq(1)
                m.d.comb += restart.eq(~ready)
                with m.If(take & beat.last):
                    m.d.sync += ready.eq(0)
                    m.next = "LARGEST"
            with m.State("LARGEST"):
                with m.If(over):
                    m.next = "ASK"
            with m.State("ASK"):
                m.d.comb += ask_peak.eq(1)
                with m.If(advance):
                    m.next = "PEAK"
            with m.State("PEAK"):
                with m.If(peak_found & advance):
                    m.d.sync += self.max_valid.eq(1)
                with m.If(self.max_valid & self.go):
                    m.d.sync += [self.max_valid.eq(0), self.done.eq(0), address.eq(0)]
                    m.next = "FRAMES"
            with m.State("FRAMES"):
                m.d.comb += ask_frame.eq(1)
                with m.If(advance):
                    m.d.sync += address.eq(address + 1)
                    with m.If(ask_last):
                        m.next = "TOTAL"
            with m.State("TOTAL"):
                with m.If(summed_last & advance):
                    m.d.sync += [self.done.eq(1), place.eq(0)]
                    m.next = "SCORES"
        return m
