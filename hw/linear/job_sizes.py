"""Sizes that follow from the numbers of a job: whether its products fit the buffers, and the beats of its tail."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.layouts import index_width
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.linear.tile_loop import COUNT_WIDTH


class JobSizes(wiring.Component):
    """Multiplies ``tokens * interleave`` and ``tokens * groups`` serially, then divides the tail by the rows.

    `verdict` comes `COUNT_WIDTH + 1` cycles after `start`, `done` as many cycles later as the tail has beats.

    Members
    -------
    start : in
        Begins.
    tokens, tail : in
        Elements of the last group of K; both are read in the cycle of `start`.
    groups, interleave : in
        Stable from a cycle after `start`.
    verdict : out
        For a cycle: the products are known.
    too_many_accumulators, too_many_groups : out
        ``tokens * interleave`` is beyond the accumulators, ``tokens * groups`` beyond the stored groups.
    stored : out
        ``tokens * groups``, where that is not beyond the stored groups; stable from `verdict` to the next `start`.
    drop : in
        In the cycle of `verdict`: the tail is not asked for.
    done : out
        For a cycle: `tail_beats` is known in the next one.
    tail_beats : out
        Beats of a plane of the last group of K; 0 from `start` on.
    """

    def __init__(self, p: LinearParameters):
        self.p = p
        super().__init__(
            {
                "start": In(1),
                "tokens": In(COUNT_WIDTH),
                "tail": In(COUNT_WIDTH),
                "groups": In(COUNT_WIDTH),
                "interleave": In(COUNT_WIDTH),
                "verdict": Out(1),
                "too_many_accumulators": Out(1),
                "too_many_groups": Out(1),
                "stored": Out(range(p.stored_groups + 1)),
                "drop": In(1),
                "done": Out(1),
                "tail_beats": Out(index_width(p.beats + 1)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        bit = Signal(range(COUNT_WIDTH))
        multiplier = Signal(COUNT_WIDTH)
        accumulators = Signal(range(p.accumulators + 1))
        groups = self.stored
        left = Signal(COUNT_WIDTH)  # elements of the last group not yet in a beat
        # Most significant bit first. A product past its limit only grows, so it need not be kept.
        next_accumulators = (accumulators << 1) + Mux(multiplier[-1], self.interleave, 0)
        next_groups = (groups << 1) + Mux(multiplier[-1], self.groups, 0)
        with m.FSM():
            with m.State("IDLE"):
                with m.If(self.start):
                    m.d.sync += [
                        multiplier.eq(self.tokens),
                        left.eq(self.tail),
                        bit.eq(0),
                        accumulators.eq(0),
                        groups.eq(0),
                        self.too_many_accumulators.eq(0),
                        self.too_many_groups.eq(0),
                        self.tail_beats.eq(0),
                    ]
                    m.next = "MULTIPLY"
            with m.State("MULTIPLY"):
                m.d.sync += [
                    multiplier.eq(multiplier << 1),
                    accumulators.eq(next_accumulators),
                    groups.eq(next_groups),
                    bit.eq(bit + 1),
                ]
                with m.If(next_accumulators > p.accumulators):
                    m.d.sync += self.too_many_accumulators.eq(1)
                with m.If(next_groups > p.stored_groups):
                    m.d.sync += self.too_many_groups.eq(1)
                with m.If(bit == COUNT_WIDTH - 1):
                    m.next = "VERDICT"
            with m.State("VERDICT"):
                m.d.comb += self.verdict.eq(1)
                m.next = "TAIL"
                with m.If(self.drop):
                    m.next = "IDLE"
            with m.State("TAIL"):
                m.d.sync += [self.tail_beats.eq(self.tail_beats + 1), left.eq(left - p.rows)]
                with m.If(left <= p.rows):
                    m.d.comb += self.done.eq(1)
                    m.next = "IDLE"
        return m
