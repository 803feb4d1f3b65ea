"""INT8 activations of a job: quantised on the way in, read back once per weight tile."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.layouts import index_width
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.linear.tile_loop import COUNT_WIDTH, job_ports
from kvant.hw.numeric.int8_quantizer import Int8Quantizer


def activation_input(p: LinearParameters) -> data.StructLayout:
    """Payload of the fp16 port: `x_lanes` activations."""
    return data.StructLayout({"data": data.ArrayLayout(16, p.x_lanes)})


def quantized_output(p: LinearParameters) -> data.StructLayout:
    """Payload of the INT8 port: a word of `rows` values, the group's fp16 scale, the end of a group."""
    return data.StructLayout({"data": data.ArrayLayout(signed(8), p.rows), "user": 16, "last": 1})


class ActivationBuffer(wiring.Component):
    """Quantises the fp16 activations of a job to INT8 groups and keeps them.

    The input comes group by group of K, all tokens of a group after each other; each group starts a new
    transfer, surplus lanes of its last transfer are ignored. Group ``i`` in that order is stored at words
    ``i * beats ...`` in words of `rows` values, zero past the group's end.

    Members
    -------
    start : in
        Forget the stored groups and expect those of a job; `tokens`, `groups` and `tail` are stable from here on.
    tokens, groups, tail : in
        Tokens, groups of K, and elements of the last group.
    x : in stream
        fp16 activations.
    xq : out stream
        The quantised activations as stored; a word is stored when it is taken here.
    written : out
        Words below this address may be read, and the scales of the groups they begin.
    newest : out
        `written` less one, once that is not 0.
    read, word_address, group_address : in
        Read a word, and the scale of a group.
    word, scale : out
        Their contents, one cycle later.
    nonfinite : out
        Sticky: a NaN or an infinity came in.

    With *sets* also:

    sets : in
        Sets of activations, 1 or more: the input comes so many times; stable from `start` on.
    """

    def __init__(self, p: LinearParameters, *, sets: bool = False):
        self.p = p
        self.with_sets = sets
        super().__init__(
            {
                "start": In(1),
                **job_ports(p, "tokens", "groups", "tail"),
                "x": In(stream.Signature(activation_input(p))),
                "xq": Out(stream.Signature(quantized_output(p))),
                "written": Out(index_width(p.activation_words + 1)),
                "newest": Out(index_width(p.activation_words + 1)),
                "read": In(1),
                "word_address": In(index_width(p.activation_words)),
                "group_address": In(index_width(p.stored_groups)),
                "word": Out(8 * p.rows),
                "scale": Out(16),
                "nonfinite": Out(1),
                **({"sets": In(COUNT_WIDTH)} if sets else {}),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.quantizer = quantizer = Int8Quantizer(lanes=p.x_lanes, group=p.group)
        # Nothing is read before the cycle after it is written, so no address is read and written at once.
        m.submodules.words = words = memory.Memory(
            shape=8 * p.rows, depth=p.activation_words, init=[], attrs={"no_rw_check": 1}
        )
        m.submodules.scales = scales = memory.Memory(shape=16, depth=p.stored_groups, init=[], attrs={"no_rw_check": 1})

        # Input side: cut the stream into groups.
        open_ = Signal()  # elements of the job are still to come
        token = Signal.like(self.tokens)
        group = Signal.like(self.groups)
        left = Signal(range(p.group + 1))  # elements of the current group still to come
        last = Signal()
        last_set = Const(1)
        if self.with_sets:
            last_set = Signal()
            set_ = Signal.like(self.sets)
            m.d.comb += last_set.eq(set_ + 1 == self.sets)
        m.d.comb += [
            last.eq(left <= p.x_lanes),
            quantizer.i.payload.data.eq(self.x.payload.data),
            quantizer.i.payload.keep.eq(Mux(last, left, p.x_lanes)),
            quantizer.i.payload.last.eq(last),
            quantizer.i.valid.eq(self.x.valid & open_),
            self.x.ready.eq(quantizer.i.ready & open_),
        ]
        with m.If(self.start):
            m.d.sync += [
                open_.eq(1),
                token.eq(0),
                group.eq(0),
                left.eq(Mux(self.groups == 1, self.tail, p.group)),
            ]
            if self.with_sets:
                m.d.sync += set_.eq(0)
        with m.Elif(self.x.valid & self.x.ready):
            m.d.sync += left.eq(left - p.x_lanes)
            with m.If(last):
                last_token = token + 1 == self.tokens
                last_group = group + 1 == self.groups
                next_is_tail = Mux(last_token, group + 2 == self.groups, last_group)
                next_group = group + last_token
                if self.with_sets:
                    set_end = last_token & last_group
                    next_is_tail = next_is_tail | (set_end & (self.groups == 1))
                    next_group = Mux(set_end, 0, next_group)
                    m.d.sync += set_.eq(set_ + set_end)
                m.d.sync += [
                    left.eq(Mux(next_is_tail, self.tail, p.group)),
                    token.eq(Mux(last_token, 0, token + 1)),
                    group.eq(next_group),
                    open_.eq(~(last_token & last_group & last_set)),
                ]

        # Output side: collect words of `rows` values and store them.
        q, xq = quantizer.o, self.xq
        parts = p.word_transfers
        part = Signal(range(max(2, parts)))
        word = Signal(8 * p.rows)
        word_scale = Signal(16)
        word_last = Signal()
        full = Signal()
        m.d.comb += [
            q.ready.eq(~full | xq.ready),
            xq.valid.eq(full),
            xq.payload.data.eq(word),
            xq.payload.user.eq(word_scale),
            xq.payload.last.eq(word_last),
        ]
        with m.If(xq.ready):
            m.d.sync += full.eq(0)
        with m.If(q.valid & q.ready):
            lanes = Cat(*q.payload.q)
            m.d.sync += [
                full.eq(q.payload.last | (part == parts - 1)),
                part.eq(Mux(q.payload.last | (part == parts - 1), 0, part + 1)),
                word_scale.eq(q.payload.scale),
                word_last.eq(q.payload.last),
            ]
            with m.If(part == 0):
                m.d.sync += word.eq(lanes)  # zero-extends: the word's later parts are padding until they come
            with m.Else():
                m.d.sync += word.word_select(part, 8 * p.x_lanes).eq(lanes)
            with m.If(q.payload.nonfinite):
                m.d.sync += self.nonfinite.eq(1)

        word_write, word_read = words.write_port(), words.read_port()
        scale_write, scale_read = scales.write_port(), scales.read_port()
        store = xq.valid & xq.ready
        group_number = Signal(index_width(p.stored_groups + 1))
        following_group = Signal(index_width(p.activation_words + p.beats))  # its first word
        word_first = Signal()
        m.d.comb += [
            word_write.addr.eq(self.written),
            word_write.data.eq(word),
            word_write.en.eq(store),
            scale_write.addr.eq(group_number),
            scale_write.data.eq(word_scale),
            scale_write.en.eq(store & word_first),
            word_read.en.eq(self.read),
            scale_read.en.eq(self.read),
            word_read.addr.eq(self.word_address),
            scale_read.addr.eq(self.group_address),
            self.word.eq(word_read.data),
            self.scale.eq(scale_read.data),
        ]
        with m.If(self.start):
            m.d.sync += [self.written.eq(0), group_number.eq(0), following_group.eq(p.beats), word_first.eq(1)]
        with m.Elif(store):
            m.d.sync += [
                self.written.eq(self.written + 1),
                self.newest.eq(self.written),
                word_first.eq(word_last),
            ]
            with m.If(word_last):
                m.d.sync += [
                    group_number.eq(group_number + 1),
                    self.written.eq(following_group),
                    self.newest.eq(following_group - 1),
                    following_group.eq(following_group + p.beats),
                ]
        return m
