"""Which row of a cache along the head goes where: sequences, positions, the ring of pages."""

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal
from amaranth.lib import data, enum, memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.control import POSITION_BITS
from kvant.hw.kvcache.parameters import CacheParameters


class KeyState(enum.Enum, shape=2):
    """State of the sequence of a head.

    EMPTY
        No sequence.
    OPEN
        Rows are taken.
    FULL
        `CacheParameters.capacity` tokens are held and none is given up: rows wait.
    """

    EMPTY = 0
    OPEN = 1
    FULL = 2


class KeyRow(data.StructLayout):
    """What belongs to a row of keys.

    Members
    -------
    sink : 1
        One of the first `sinks` tokens of the sequence.
    first_of_page : 1
        Nothing is known of its page: its first row, or the first row of a sequence that goes on.
    place
        With `first_of_page`: number of the row's first group in the page.
    last_of_page : 1
    page : 24
        Slot of its page in the head's ring.
    timestamp : 32
        Position of the page's first token.
    head : 8
    """

    def __init__(self, p: CacheParameters):
        super().__init__(
            {
                "sink": 1,
                "first_of_page": 1,
                "place": range(p.group * p.row_groups),
                "last_of_page": 1,
                "page": 24,
                "timestamp": POSITION_BITS,
                "head": 8,
            }
        )


class KeySequence(wiring.Component):
    """The state machine of one head.

    ======  =================  =====  ================================
    from    on                 to     besides
    ======  =================  =====  ================================
    any     `begin`            OPEN
    OPEN    `fill`             FULL
    any     `end`              EMPTY  stronger than the others
    ======  =================  =====  ================================

    Members
    -------
    begin : in
        The first row of a sequence is taken.
    fill : in
        A row is taken that completes the last free page; only while OPEN.
    end : in
    state : out
    """

    def __init__(self):
        super().__init__({**dict.fromkeys(["begin", "fill", "end"], In(1)), "state": Out(KeyState)})

    def elaborate(self, platform):
        m = Module()
        with m.If(self.end):
            m.d.sync += self.state.eq(KeyState.EMPTY)
        with m.Elif(self.begin):
            m.d.sync += self.state.eq(KeyState.OPEN)
        with m.Elif(self.fill):
            m.d.sync += self.state.eq(KeyState.FULL)
        return m


class KeyControl(wiring.Component):
    """Admits rows, one per cycle at most, and says where each goes.

    Pages hold the tokens 0 .. group - 1, group .. 2 * group - 1, ... of the sequence, in a ring of
    `CacheParameters.windows` pages. With `evict` a sequence goes on in the page of its oldest tokens.

    A row that breaks the order is granted with `drop`: one of a head that does not exist, or without a start while the
    state is EMPTY. `granted`, `drop` and `row` answer in the same cycle, from registers through one look-up by head.

    Parameters
    ----------
    p : CacheParameters

    Members
    -------
    start, head : in
        The row at the port; first row of its sequence.
    granted : out
        It may be taken.
    take : in
        It is taken; only with `granted`.
    drop : out
        Ignore it.
    row : out
        What belongs to it.
    end, end_head : in
        The head's sequence ends, after a row that is taken in the same cycle.
    resume, resume_head, position : in
        The head's next sequence begins at this position, in the first page of the ring; not in the cycle of a start of
        any head. It replaces what was said for another head before.
    """

    def __init__(self, p: CacheParameters):
        self.p = p
        super().__init__(
            {
                "start": In(1),
                "head": In(8),
                "granted": Out(1),
                "take": In(1),
                "drop": Out(1),
                "row": Out(KeyRow(p)),
                "end": In(1),
                "end_head": In(8),
                "resume": In(1),
                "resume_head": In(8),
                "position": In(POSITION_BITS),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        row_bits = p.group.bit_length() - 1
        # What a start does not use is not reset, so the memory needs none.
        counters = data.StructLayout(
            {
                "row": row_bits,  # in the page
                "slot": range(max(2, p.windows)),
                "number": POSITION_BITS - row_bits,  # of the page
                "sinks": range(p.sinks + 1),  # counted so far; stops at p.sinks
                "last_of_page": 1,  # the next row completes a page
                "last_slot": 1,  # which is the ring's last one
            }
        )
        m.submodules.counters = words = memory.Memory(shape=counters, depth=max(2, p.heads), init=[])
        write, read = words.write_port(), words.read_port(domain="comb")

        # Where the next sequence of one head begins; at 0 where nothing else was said.
        anew = counters.const({"last_slot": p.windows == 1})
        first, place, first_head = Signal(counters, init=anew), Signal(range(p.group * p.row_groups)), Signal(8)
        goes_on = Signal()
        row, number = self.position[:row_bits], self.position[row_bits:]
        with m.If(self.resume):
            m.d.sync += [
                first.row.eq(row),
                first.number.eq(number),
                first.sinks.eq(Mux(self.position < p.sinks, self.position, p.sinks) if p.sinks else 0),
                first.last_of_page.eq(row == p.group - 1),
                place.eq(row * p.row_groups),
                first_head.eq(self.resume_head),
                goes_on.eq(1),
            ]
        resumes = Signal()
        m.d.comb += resumes.eq(self.start & goes_on & (self.head == first_head))

        head, end_head = Signal(range(max(2, p.heads))), Signal(range(max(2, p.heads)))
        begin, fill = Signal(), Signal()
        m.d.comb += [head.eq(self.head), end_head.eq(self.end_head)]
        states = []
        for number in range(p.heads):
            m.submodules[f"sequence_{number}"] = sequence = KeySequence()
            taken = (head == number) if p.heads > 1 else Const(1)
            m.d.comb += [
                sequence.begin.eq(begin & taken),
                sequence.fill.eq(fill & taken),
                sequence.end.eq(self.end & (self.end_head == number)),
            ]
            states.append(sequence.state)

        state, known, legal = Signal(KeyState), Signal(), Signal()
        now, old, after = Signal(counters), Signal(counters), Signal(counters)
        sink = Signal()
        m.d.comb += [
            state.eq(Array(states)[head]),
            read.addr.eq(head),
            old.eq(read.data),
            now.eq(Mux(resumes, first, Mux(self.start, anew, old))),
            known.eq(self.head < p.heads),
            legal.eq(known & (self.start | (state != KeyState.EMPTY))),
            self.drop.eq(~legal),
            self.granted.eq(self.start | ~known | (state != KeyState.FULL)),
            begin.eq(self.take & legal & self.start),
            sink.eq(now.sinks != p.sinks),
            self.row.sink.eq(sink),
            self.row.first_of_page.eq((now.row == 0) | resumes),
            self.row.place.eq(Mux(resumes, place, 0)),
            self.row.last_of_page.eq(now.last_of_page),
            self.row.page.eq(now.slot),
            self.row.timestamp.eq(Cat(Const(0, row_bits), now.number)),
            self.row.head.eq(self.head),
        ]
        with m.If(self.take & resumes):
            m.d.sync += goes_on.eq(0)
        if not p.evict:
            m.d.comb += fill.eq(self.take & legal & now.last_of_page & now.last_slot)
        next_slot = Mux(now.last_slot, 0, now.slot + 1)
        m.d.comb += [
            after.row.eq(now.row + 1),
            after.last_of_page.eq(now.row == p.group - 2),
            after.sinks.eq(now.sinks + sink),
            after.slot.eq(Mux(now.last_of_page, next_slot, now.slot)),
            after.last_slot.eq(Mux(now.last_of_page, next_slot == p.windows - 1, now.last_slot)),
            after.number.eq(now.number + now.last_of_page),
            write.addr.eq(head),
            write.data.eq(after),
            write.en.eq(self.take & legal),
        ]
        return m
