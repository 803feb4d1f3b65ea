"""Which word of which codebook meets which vector, cycle by cycle."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.layouts import SHIFT_BITS
from kvant.hw.pq.codebook_jobs import Mode, Step, word_input
from kvant.hw.pq.parameters import PqParameters


class CodebookPlace(wiring.Component):
    """Place of the next word of a codebook.

    Members
    -------
    advance : in
        The word is taken.
    slice, centroid, first, final, last_slice : out
        As in `Step`.
    """

    def __init__(self, p: PqParameters):
        self.p = p
        members = Step(p).members
        names = ("slice", "centroid", "first", "final", "last_slice")
        super().__init__({"advance": In(1), **{name: Out(members[name]) for name in names}})

    def elaborate(self, platform):
        m = Module()
        m.d.comb += [
            self.first.eq(self.centroid == 0),
            self.final.eq(self.centroid == self.p.centroids - 1),
            self.last_slice.eq(self.slice == self.p.slices - 1),
        ]
        with m.If(self.advance):
            m.d.sync += self.centroid.eq(self.centroid + 1)
            with m.If(self.final):
                m.d.sync += self.slice.eq(Mux(self.last_slice, 0, self.slice + 1))
        return m


class StepSequencer(wiring.Component):
    """Takes words of codebooks and holds each for the vectors of its job: one step per cycle, without a bubble.

    Between two words it chooses: a word for attention, where there is one and its job may go on, else one for
    encoding. So a word for attention waits for at most one other's steps.

    Members
    -------
    encode_ready : in
        The vectors of an encode job are there; low in the cycle after `encode_done`.
    encode_count : in
        Its vectors.
    encode_room : in
        A slice's last word may be taken. Is read 16 words after whatever changed it, at the earliest.
    encode_done : out
        The job's last word is being taken.
    attend_ready, attend_mode, attend_count, attend_shift, attend_room, attend_done
        The same of the oldest job for attention; `attend_room` is about read-outs.
    encode_words, attend_words : in stream
        Words of codebooks, slice by slice, centroid by centroid.
    valid, step, word : out
        A step, and the word's elements.
    begins : out
        One word is being taken that is its slice's last, of an encode job [0], of a read-out [1].
    """

    def __init__(self, p: PqParameters):
        self.p = p
        counts = range(max(p.q_parallel, p.batch_tokens) + 1)
        super().__init__(
            {
                "encode_ready": In(1),
                "encode_count": In(counts),
                "encode_room": In(1),
                "encode_done": Out(1),
                "attend_ready": In(1),
                "attend_mode": In(Mode),
                "attend_count": In(counts),
                "attend_shift": In(data.ArrayLayout(SHIFT_BITS, p.q_parallel)),
                "attend_room": In(1),
                "attend_done": Out(1),
                "encode_words": In(stream.Signature(word_input(p))),
                "attend_words": In(stream.Signature(word_input(p))),
                "valid": Out(1),
                "step": Out(Step(p)),
                "word": Out(8 * p.slice_bytes),
                "begins": Out(2),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.encode_place = encode = CodebookPlace(p)
        m.submodules.attend_place = attend = CodebookPlace(p)

        step, valid = Signal(Step(p), reset_less=True), Signal()
        word = Signal(8 * p.slice_bytes, reset_less=True)
        last_vector = Signal(Step(p).members["vector"], reset_less=True)  # number of the last one
        # A word's vectors go on while the next job is already at hand: the shifts of the later ones are kept here.
        shifts = Signal(SHIFT_BITS * (p.q_parallel - 1), reset_less=True)
        free, word_end = Signal(), Signal()
        m.d.comb += [
            word_end.eq(step.last_vector & ~step.norm & ((step.mode != Mode.READ_OUT) | step.upper)),
            free.eq(~valid | word_end),
        ]

        # Choice of the next word.
        attend_may, encode_may = Signal(), Signal()
        take_attend, take_encode = Signal(), Signal()
        m.d.comb += [
            attend_may.eq(self.attend_ready & (self.attend_room | ~attend.final | (self.attend_mode != Mode.READ_OUT))),
            encode_may.eq(self.encode_ready & (self.encode_room | ~encode.final)),
            self.attend_words.ready.eq(free & attend_may),
            self.encode_words.ready.eq(free & encode_may & ~(attend_may & self.attend_words.valid)),
            take_attend.eq(self.attend_words.valid & self.attend_words.ready),
            take_encode.eq(self.encode_words.valid & self.encode_words.ready),
            attend.advance.eq(take_attend),
            encode.advance.eq(take_encode),
            self.attend_done.eq(take_attend & attend.final & attend.last_slice),
            self.encode_done.eq(take_encode & encode.final & encode.last_slice),
            self.begins[0].eq(take_encode & encode.final),
            self.begins[1].eq(take_attend & attend.final & (self.attend_mode == Mode.READ_OUT)),
        ]
        count = Signal(self.attend_count.shape())
        m.d.comb += count.eq(Mux(take_attend, self.attend_count, self.encode_count))
        next_vector = (step.vector + 1)[: len(step.vector)]
        with m.If(free):
            m.d.sync += [
                valid.eq(take_attend | take_encode),
                step.norm.eq(take_encode),
                step.upper.eq(0),
                step.vector.eq(0),
                step.last_vector.eq(count == 1),
                step.shift.eq(self.attend_shift[0]),
                shifts.eq(self.attend_shift.as_value()[SHIFT_BITS:]),
                last_vector.eq(count - 1),
            ]
            with m.If(take_attend):
                m.d.sync += [word.eq(self.attend_words.payload.data), step.mode.eq(self.attend_mode)]
                m.d.sync += [step[name].eq(getattr(attend, name)) for name in self._PLACE]
            with m.Else():
                m.d.sync += [word.eq(self.encode_words.payload.data), step.mode.eq(Mode.NEAREST)]
                m.d.sync += [step[name].eq(getattr(encode, name)) for name in self._PLACE]
        with m.Elif(step.norm):
            m.d.sync += step.norm.eq(0)
        with m.Elif((step.mode == Mode.READ_OUT) & ~step.upper):
            m.d.sync += step.upper.eq(1)
        with m.Else():
            m.d.sync += [
                step.upper.eq(0),
                step.vector.eq(next_vector),
                step.shift.eq(shifts[:SHIFT_BITS]),
                shifts.eq(shifts[SHIFT_BITS:]),
                step.last_vector.eq(next_vector == last_vector),
            ]
        m.d.comb += [self.valid.eq(valid), self.step.eq(step), self.word.eq(word)]
        return m

    _PLACE = ("slice", "centroid", "first", "final", "last_slice")
