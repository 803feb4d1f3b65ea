"""Starts slots: picks weight tile, activation group and accumulator for every beat of the array."""

from amaranth.hdl import Const, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.layouts import index_width
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.linear.tile_loop import COUNT_WIDTH, TileLoop, job_ports

JOB_NUMBERS = ("tokens", "tiles", "interleave", "groups", "tail_beats")
"""What the sequencer has to know of a job."""


def set_ports(p: LinearParameters) -> dict[str, wiring.Member]:
    """Ports of a unit that walks jobs with several sets of activations.

    A set is ``tokens * groups`` groups of activations, which a number of successive blocks of tiles meet before the
    next ones meet the next set.

    Members
    -------
    separate : in
        The job has sets of its own for its blocks; otherwise there is one set, which all blocks meet.
    first_group : in
        The activation group with which the set of the first block begins; stable from a cycle before `start`.
    set_blocks : in
        Blocks of the set that is taken next, at least 1.
    next_set : out
        In this cycle it is.
    """
    return {
        "separate": In(1),
        "first_group": In(index_width(p.stored_groups)),
        "set_blocks": In(COUNT_WIDTH),
        "next_set": Out(1),
    }


class SlotPlan(data.StructLayout):
    """What a slot is, known before it can start.

    Members
    -------
    address, group_address, word_address : index
        Accumulator, activation group, and the group's first word.
    beats : index
        Beats of a plane.
    one_beat : 1
        `beats` is 1.
    wait : index
        Cycles to wait before it starts.
    first_group, last_group : 1
        First, last group of its outputs.
    last_token : 1
        The last one of its weight tile.
    last_column_tile, last_slot : 1
        It holds the last columns of the matrix; it is the last one of the job.
    """

    def __init__(self, p: LinearParameters, *, spacing: int):
        super().__init__(
            {
                "address": index_width(p.accumulators),
                "group_address": index_width(p.stored_groups),
                "word_address": index_width(p.activation_words),
                "beats": index_width(p.beats + 1),
                "one_beat": 1,
                "wait": index_width(spacing + 1),
                "first_group": 1,
                "last_group": 1,
                "last_token": 1,
                "last_column_tile": 1,
                "last_slot": 1,
            }
        )


class SlotWalker(wiring.Component):
    """Walks the slots of a job: the tiles in the order of `TileLoop`, for each of them all tokens.

    Two slots that add to the same accumulators are at least `spacing` cycles apart: the outputs that take turns
    normally see to that; where a round of them is too short, the first slot of the next round has to wait. From a
    slot's last beat to that of its successor in the next round there are all slots of a round but one, none shorter
    than its beats and than `unit_cols`, and the beats of the successor itself; a last group of K may make both short.

    Members
    -------
    start : in
        Begin a job; its numbers are stable from a cycle before.
    tokens, tiles, interleave, groups, tail_beats : in
        See `TileLoop`, `WeightBuffer`, `ActivationBuffer`.
    valid, plan : out
        The slot.
    step : in
        Go on to the next slot.

    With *sets* also those of `set_ports`.
    """

    def __init__(self, p: LinearParameters, *, spacing: int, sets: bool = False):
        self.p = p
        self.spacing = spacing
        self.sets = sets
        super().__init__(
            {
                "start": In(1),
                **job_ports(p, *JOB_NUMBERS),
                "valid": Out(1),
                "plan": Out(SlotPlan(p, spacing=spacing)),
                "step": In(1),
                **(set_ports(p) if sets else {}),
            }
        )

    def elaborate(self, platform):
        p, plan = self.p, self.plan
        m = Module()
        m.submodules.loop = loop = TileLoop(p)

        tokens_left = Signal.like(self.tokens)  # after this one
        last_token = Signal()
        address = Signal.like(plan.address)
        group = Signal.like(plan.group_address)
        word = Signal.like(plan.word_address)
        round_group = Signal.like(group)  # of token 0
        round_word = Signal.like(word)
        following_word = Signal.like(word)
        round_end = Signal()
        m.d.comb += [
            loop.start.eq(self.start),
            loop.step.eq(self.step & last_token),
            loop.tiles.eq(self.tiles),
            loop.interleave.eq(self.interleave),
            loop.groups.eq(self.groups),
            following_word.eq(word + p.beats),
            round_end.eq(last_token & loop.last_of_round),
            self.valid.eq(~loop.done),
            plan.address.eq(address),
            plan.group_address.eq(group),
            plan.word_address.eq(word),
            plan.beats.eq(Mux(loop.last_group, self.tail_beats, p.beats)),
            plan.one_beat.eq(plan.beats == 1),
            plan.first_group.eq(loop.first_group),
            plan.last_group.eq(loop.last_group),
            plan.last_token.eq(last_token),
            plan.last_column_tile.eq(loop.last_of_round & loop.last_block),
            plan.last_slot.eq(round_end & loop.last_group & loop.last_block),
        ]
        with m.If(self.start | (self.step & last_token)):
            m.d.sync += [last_token.eq(self.tokens == 1), tokens_left.eq(self.tokens - 1)]
        with m.Elif(self.step):
            m.d.sync += [last_token.eq(tokens_left == 1), tokens_left.eq(tokens_left - 1)]

        block_end = round_end & loop.last_group
        set_group, set_word = Const(0), Const(0)  # where the set of the block begins
        set_end, first_group = Const(0), Const(0)
        if self.sets:
            set_group, set_word = Signal.like(group), Signal.like(word)
            blocks_left, set_end = Signal(COUNT_WIDTH), Signal()
            first_group = Mux(self.separate, self.first_group, 0)
            m.d.comb += [
                set_end.eq(self.separate & (blocks_left == 1)),
                self.next_set.eq(self.separate & (self.start | (self.step & block_end & set_end & ~loop.last_block))),
            ]
            with m.If(self.start):
                m.d.sync += [set_group.eq(first_group), set_word.eq(first_group * p.beats)]
            with m.Elif(self.next_set):
                m.d.sync += [set_group.eq(group + 1), set_word.eq(following_word)]
            with m.If(self.next_set):
                m.d.sync += blocks_left.eq(self.set_blocks)
            with m.Elif(self.step & block_end):
                m.d.sync += blocks_left.eq(blocks_left - 1)

        with m.If(self.start):
            first_word = first_group * p.beats
            m.d.sync += [
                address.eq(0),
                group.eq(first_group),
                word.eq(first_word),
                round_group.eq(first_group),
                round_word.eq(first_word),
            ]
        with m.Elif(self.step):
            m.d.sync += [address.eq(address + 1), group.eq(group + 1), word.eq(following_word)]
            with m.If(round_end):
                m.d.sync += address.eq(0)
                with m.If(block_end & ~set_end):  # another block begins with the first group of its set
                    m.d.sync += [
                        group.eq(set_group),
                        word.eq(set_word),
                        round_group.eq(set_group),
                        round_word.eq(set_word),
                    ]
                with m.Else():
                    m.d.sync += [round_group.eq(group + 1), round_word.eq(following_word)]
            with m.Elif(last_token):  # the next tile meets the same activations
                m.d.sync += [group.eq(round_group), word.eq(round_word)]

        # Distance that the slots of a round keep, as far as it matters.
        shortest = Signal(range(self.spacing + 1))  # slot
        tail = Signal.like(shortest)
        distance = Signal.like(shortest)
        grown = Signal(range(2 * self.spacing + 1))
        kept = Signal.like(shortest)
        tail_or_pitch = Mux(self.tail_beats > p.unit_cols, self.tail_beats, p.unit_cols)
        m.d.sync += [
            shortest.eq(Mux(tail_or_pitch > self.spacing, self.spacing, tail_or_pitch)),
            tail.eq(Mux(self.tail_beats > self.spacing, self.spacing, self.tail_beats)),
        ]
        m.d.comb += [
            grown.eq(distance + Mux(round_end, tail, shortest)),
            kept.eq(Mux(grown > self.spacing, self.spacing, grown)),
        ]
        with m.If(self.start):
            m.d.sync += [distance.eq(0), plan.wait.eq(0)]
        with m.Elif(self.step):
            m.d.sync += [
                distance.eq(Mux(round_end, 0, kept)),
                plan.wait.eq(Mux(round_end, self.spacing - kept, 0)),
            ]
        return m


class Sequencer(wiring.Component):
    """Issues the beats of a job, one slot after the other, without a bubble while nothing is missing.

    A slot starts only when its weight tile is complete and there is room for its outputs, so that nothing behind the
    sequencer needs flow control; its activations may still be on their way, and a beat waits for its word.

    Parameters
    ----------
    p : LinearParameters
    spacing : int
        Fewest cycles between two groups of one output (`GroupAccumulator.loop_latency`).

    Members
    -------
    start : in
        Begin a job; its numbers are stable from a cycle before.
    tokens, tiles, interleave, groups, tail_beats : in
        See `SlotWalker`.
    done : out
        All slots have been issued.
    head_valid, high_plane : in
        A complete weight tile waits; it has a plane of high INT8 digits.
    written, newest : in
        See `ActivationBuffer`.
    room : in
        The outputs of one more finished slot fit.
    plan : out
        The slot that waits or is under way.
    beat_valid, first, last, high : out
        A beat is issued; its place in the slot (see `Beat`).
    word_address : out
        The word of activations it reads. Beats of weights are read in order.
    slot_end : out
        The slot ends. If it is its tile's last, the tile may go.
    finishing : out
        A slot of a last group starts.

    With *sets* also those of `set_ports`.
    """

    def __init__(self, p: LinearParameters, *, spacing: int, sets: bool = False):
        self.p = p
        self.sets = sets
        self._walker = SlotWalker(p, spacing=spacing, sets=sets)
        super().__init__(
            {
                "start": In(1),
                **job_ports(p, *JOB_NUMBERS),
                "done": Out(1),
                "head_valid": In(1),
                "high_plane": In(1),
                "written": In(index_width(p.activation_words + 1)),
                "newest": In(index_width(p.activation_words + 1)),
                "room": In(1),
                "plan": Out(SlotPlan(p, spacing=spacing)),
                "beat_valid": Out(1),
                "first": Out(1),
                "last": Out(1),
                "high": Out(1),
                "word_address": Out(index_width(p.activation_words)),
                "slot_end": Out(1),
                "finishing": Out(1),
                **(set_ports(p) if sets else {}),
            }
        )

    def elaborate(self, platform):
        p, plan = self.p, self.plan
        m = Module()
        m.submodules.walker = walker = self._walker
        # The walker runs ahead by up to two slots: what it does next does not have to wait for the end of a slot.
        next_plan, later_plan = Signal(plan.shape()), Signal(plan.shape())
        next_valid, later_valid = Signal(), Signal()
        m.d.comb += [getattr(walker, name).eq(getattr(self, name)) for name in ("start", *JOB_NUMBERS)]
        if self.sets:
            m.d.comb += [
                *(getattr(walker, name).eq(getattr(self, name)) for name in ("separate", "first_group", "set_blocks")),
                self.next_set.eq(walker.next_set),
            ]

        waiting = Signal()  # a slot is planned or under way
        active = Signal()  # it is under way, from its second cycle on
        beats_left = Signal.like(plan.beats)  # of the plane, this one included
        plane_end = Signal()  # it is the last one
        code_plane = Signal()  # the high plane, if there is one, is over
        beats_done = Signal()  # all beats are issued, it only fills up the pitch
        pitch_left = Signal(range(max(2, p.unit_cols)))  # cycles after this one
        pitch_end = Signal()  # there is none
        word_ready = Signal()  # the next word may be read

        start_slot, issue, load = Signal(), Signal(), Signal()
        m.d.comb += [
            start_slot.eq(
                waiting & ~active & word_ready & self.head_valid & (plan.wait == 0) & (~plan.last_group | self.room)
            ),
            issue.eq(start_slot | (active & ~beats_done & word_ready)),
            self.high.eq(self.high_plane & ~code_plane),
            self.beat_valid.eq(issue),
            self.last.eq(plane_end & ~self.high),
            self.slot_end.eq((start_slot | active) & pitch_end & ((issue & self.last) | beats_done)),
            self.finishing.eq(start_slot & plan.last_group),
            walker.step.eq(walker.valid & ~later_valid),
            load.eq(next_valid & (~waiting | self.slot_end)),
            self.done.eq(~walker.valid & ~next_valid & ~waiting),
        ]
        with m.If(load | ~next_valid):
            m.d.sync += [
                next_plan.eq(Mux(later_valid, later_plan, walker.plan)),
                next_valid.eq(later_valid | walker.step),
                later_valid.eq(0),
            ]
        with m.Elif(walker.step):
            m.d.sync += later_valid.eq(1)
        with m.If(walker.step):
            m.d.sync += later_plan.eq(walker.plan)
        with m.If(start_slot):
            m.d.sync += active.eq(1)
        with m.If((start_slot | active) & ~pitch_end):
            m.d.sync += [pitch_left.eq(pitch_left - 1), pitch_end.eq(pitch_left == 1)]
        with m.If(plan.wait != 0):
            m.d.sync += plan.wait.eq(plan.wait - 1)
        with m.If(issue):
            m.d.sync += [
                self.first.eq(plane_end),
                beats_left.eq(Mux(plane_end, plan.beats, beats_left - 1)),
                plane_end.eq(Mux(plane_end, plan.one_beat, beats_left == 2)),
                self.word_address.eq(Mux(plane_end, plan.word_address, self.word_address + 1)),
                beats_done.eq(self.last),
            ]
            with m.If(plane_end):
                m.d.sync += code_plane.eq(1)
        with m.If(self.slot_end):
            m.d.sync += [waiting.eq(0), active.eq(0)]
        with m.If(load):
            m.d.sync += [
                plan.eq(next_plan),
                waiting.eq(1),
                beats_left.eq(next_plan.beats),
                plane_end.eq(next_plan.one_beat),
                self.word_address.eq(next_plan.word_address),
                self.first.eq(1),
                code_plane.eq(0),
                beats_done.eq(0),
                pitch_left.eq(p.unit_cols - 1),
                pitch_end.eq(p.unit_cols == 1),
            ]

        # Whether a word is there is found out a cycle before it is wanted. What was read once stays.
        with m.If(load):
            m.d.sync += word_ready.eq(next_plan.word_address < self.written)
        with m.Elif(issue):
            m.d.sync += word_ready.eq(plane_end | (self.word_address < self.newest))
        with m.Else():
            m.d.sync += word_ready.eq(self.word_address < self.written)
        return m
