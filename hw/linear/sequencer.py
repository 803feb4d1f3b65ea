"""Starts slots: picks weight tile, activation group and accumulator for every beat of the array."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.layouts import index_width
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.linear.tile_loop import COUNT_WIDTH, TileLoop


class Sequencer(wiring.Component):
    """Issues the beats of a job, one slot after the other, without a bubble while nothing is missing.

    A slot starts only when its weight tile is complete and there is room for its outputs, so that nothing behind the
    sequencer needs flow control; its activations may still be on their way, and a beat waits for its word.

    Two slots that add to the same accumulators are at least `spacing` cycles apart: the outputs that take turns
    normally see to that; where a round of them is too short, the sequencer waits.

    Parameters
    ----------
    p : LinearParameters
    spacing : int
        Fewest cycles between two groups of one output (`GroupAccumulator.loop_latency`).
    groups_stored : int
        Activation groups that fit in the buffer.

    Members
    -------
    start : in
        Begin a job; its numbers are stable from here on.
    tokens, tiles, interleave, groups, tail_beats : in
        See `TileLoop`, `WeightBuffer`, `ActivationBuffer`.
    done : out
        All slots have been issued.
    head_valid, high_plane : in
        A complete weight tile waits; it has a plane of high INT8 digits.
    written : in
        Words of the activation buffer below this address may be read.
    room : in
        The outputs of one more finished slot fit.
    beat_valid, first, last, high : out
        A beat is issued; its place in the slot (see `Beat`).
    weight_beat, word_address, group_address : out
        Beat of the tile, word and group of the activation buffer it reads.
    release, release_beats : out
        The tile has been read for the last time.
    address, first_group, last_group : out
        Accumulator of the slot; first or last group of its outputs.
    finishing : out
        A slot of a last group starts.
    last_column_tile, last_slot : out
        The slot holds the last columns of the matrix; it is the last slot of the job.
    """

    def __init__(self, p: LinearParameters, *, spacing: int, groups_stored: int):
        self.p = p
        self.spacing = spacing
        tile_beats = p.beats * (2 if p.int8_groups else 1)
        super().__init__(
            {
                "start": In(1),
                "tokens": In(COUNT_WIDTH),
                "tiles": In(COUNT_WIDTH),
                "interleave": In(COUNT_WIDTH),
                "groups": In(COUNT_WIDTH),
                "tail_beats": In(index_width(p.beats + 1)),
                "done": Out(1),
                "head_valid": In(1),
                "high_plane": In(1),
                "written": In(index_width(p.activation_words + 1)),
                "room": In(1),
                "beat_valid": Out(1),
                "first": Out(1),
                "last": Out(1),
                "high": Out(1),
                "weight_beat": Out(index_width(tile_beats)),
                "word_address": Out(index_width(p.activation_words)),
                "group_address": Out(index_width(groups_stored)),
                "release": Out(1),
                "release_beats": Out(index_width(tile_beats + 1)),
                "address": Out(index_width(p.accumulators)),
                "first_group": Out(1),
                "last_group": Out(1),
                "finishing": Out(1),
                "last_column_tile": Out(1),
                "last_slot": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.loop = loop = TileLoop()

        # Progress within a slot.
        active = Signal()  # a slot is under way (from its second cycle on)
        beats_done = Signal()  # all its beats are issued, it only fills up the pitch
        beat = Signal(range(max(2, p.beats)))  # beat of the plane
        code_plane = Signal()  # the high plane, if there is one, is over
        phase = Signal(range(max(2, p.unit_cols)))  # cycles of the slot, counted as far as they matter

        plane_beats = Mux(loop.last_group, self.tail_beats, p.beats)
        start_slot, issue, plane_end, slot_end, word_ready = Signal(), Signal(), Signal(), Signal(), Signal()
        pitch_reached = phase == p.unit_cols - 1
        m.d.comb += [
            word_ready.eq(self.word_address < self.written),
            issue.eq(start_slot | (active & ~beats_done & word_ready)),
            plane_end.eq(beat + 1 == plane_beats),
            self.high.eq(self.high_plane & ~code_plane),
            self.beat_valid.eq(issue),
            self.first.eq(beat == 0),
            self.last.eq(plane_end & ~self.high),
            slot_end.eq((start_slot | active) & pitch_reached & ((issue & self.last) | beats_done)),
        ]
        with m.If(start_slot):
            m.d.sync += active.eq(1)
        with m.If((start_slot | active) & ~pitch_reached):
            m.d.sync += phase.eq(phase + 1)
        with m.If(issue):
            m.d.sync += [self.weight_beat.eq(self.weight_beat + 1), beat.eq(beat + 1)]
            with m.If(plane_end):
                m.d.sync += [beat.eq(0), code_plane.eq(1)]
                with m.If(self.last):
                    m.d.sync += beats_done.eq(1)
        with m.If(slot_end):
            m.d.sync += [
                active.eq(0),
                beats_done.eq(0),
                beat.eq(0),
                code_plane.eq(0),
                phase.eq(0),
                self.weight_beat.eq(0),
            ]

        # Which slot.
        token = Signal(COUNT_WIDTH)
        last_token = Signal()
        round_group = Signal.like(self.group_address)  # activation group of token 0
        round_word = Signal.like(self.word_address)
        slot_word = Signal.like(self.word_address)  # first word of the slot's activation group
        following_word = Signal.like(self.word_address)
        m.d.comb += [
            last_token.eq(token + 1 == self.tokens),
            loop.start.eq(self.start),
            loop.step.eq(slot_end & last_token),
            loop.tiles.eq(self.tiles),
            loop.interleave.eq(self.interleave),
            loop.groups.eq(self.groups),
            self.done.eq(loop.done),
            self.first_group.eq(loop.first_group),
            self.last_group.eq(loop.last_group),
            self.last_column_tile.eq(loop.last_column_tile),
            self.last_slot.eq(loop.last_tile & last_token),
            self.finishing.eq(start_slot & loop.last_group),
            self.release.eq(slot_end & last_token),
            self.release_beats.eq(Mux(self.high_plane, plane_beats << 1, plane_beats)),
            following_word.eq(slot_word + p.beats),
        ]
        with m.If(issue):
            m.d.sync += self.word_address.eq(Mux(plane_end, slot_word, self.word_address + 1))
        with m.If(slot_end):
            m.d.sync += [
                token.eq(token + 1),
                self.address.eq(self.address + 1),
                self.group_address.eq(self.group_address + 1),
                slot_word.eq(following_word),
                self.word_address.eq(following_word),
            ]
            with m.If(last_token):
                m.d.sync += token.eq(0)
                with m.If(~loop.last_of_round):  # the next tile meets the same activations
                    m.d.sync += [
                        self.group_address.eq(round_group),
                        slot_word.eq(round_word),
                        self.word_address.eq(round_word),
                    ]
                with m.Else():
                    m.d.sync += self.address.eq(0)
                    with m.If(~loop.last_group):
                        m.d.sync += [round_group.eq(self.group_address + 1), round_word.eq(following_word)]
                    with m.Else():
                        m.d.sync += [
                            self.group_address.eq(0),
                            slot_word.eq(0),
                            self.word_address.eq(0),
                            round_group.eq(0),
                            round_word.eq(0),
                        ]

        # Spacing between the rounds. From a slot's last beat to that of its successor in the next round there are all
        # slots of a round but one, none shorter than `shortest`, and the beats of the successor itself; cycles between
        # the rounds add to that.
        shortest = Signal(range(max(p.beats, p.unit_cols) + 1))
        round_end = Signal()
        m.d.comb += [
            shortest.eq(Mux(self.tail_beats > p.unit_cols, self.tail_beats, p.unit_cols)),
            round_end.eq(last_token & loop.last_of_round),
        ]
        distance = Signal(range(self.spacing + 1))
        before = Signal.like(distance)
        between_rounds = Signal(init=1)
        gain = Mux(slot_end, Mux(round_end, self.tail_beats, shortest), between_rounds & ~start_slot)
        m.d.comb += before.eq(Mux(start_slot & between_rounds, 0, distance))
        with m.If(self.start):
            m.d.sync += [between_rounds.eq(1), distance.eq(self.spacing)]
        with m.Else():
            grown = before + gain
            m.d.sync += distance.eq(Mux(grown > self.spacing, self.spacing, grown))
            with m.If(slot_end):
                m.d.sync += between_rounds.eq(round_end)
            with m.Elif(start_slot):
                m.d.sync += between_rounds.eq(0)
        m.d.comb += start_slot.eq(
            ~active
            & ~loop.done
            & self.head_valid
            & word_ready
            & (~between_rounds | (distance == self.spacing))
            & (~loop.last_group | self.room)
        )
        return m
