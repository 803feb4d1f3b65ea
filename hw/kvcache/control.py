"""Which row of a cache along time goes where: sequences, windows, the ring of staged rows and the ring of pages."""

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal
from amaranth.lib import data, enum, memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.parameters import ParameterError, check_integer

POSITION_BITS = 32
"""Width of positions and timestamps, which count modulo ``2^32``."""


class SequenceState(enum.Enum, shape=2):
    """State of the sequence of a head.

    EMPTY
        No sequence. Windows of the former one may still be pending.
    SCAN
        First pass of the prefill: rows give their maxima and are not kept.
    OPEN
        Rows are staged.
    """

    EMPTY = 0
    SCAN = 1
    OPEN = 2


class RowRequest(data.StructLayout):
    """A row at the port.

    Members
    -------
    start : 1
        First row of a sequence; only legal on a row of the scan.
    scan : 1
        Row of the first pass of the prefill; 0: row to stage.
    head : 8
    """

    def __init__(self):
        super().__init__({"start": 1, "scan": 1, "head": 8})


class RowPlan(data.StructLayout):
    """What to do with a row.

    Members
    -------
    drop : 1
        The row breaks the order of a sequence: ignore it, and all that follows here.
    scan : 1
        Row of the scan; otherwise it is staged.
    scan_first : 1
        First row of the scan: former maxima do not count.
    scales : 1
        Its elements are the scales of a sequence that goes on.
    repeated : 1
        A staged row that was one of the sequence before it went on.
    sink : 1
        One of the first `sinks` tokens of the sequence.
    row : 0 .. ring_rows - 1
        Where a staged row goes in the head's ring.
    base : 0 .. ring_rows - 1
        Where the window of a staged row begins in the ring.
    window_row : 0 .. group - 1
        Number of a staged row in its window.
    first_of_window, last_of_window : 1
        Of a staged row; never high for another.
    page : 24
        Slot of the window's page in the head's ring of pages.
    timestamp : 32
        Position of the window's first token.
    head : 8
    """

    def __init__(self, p: CacheParameters, ring_rows: int):
        super().__init__(
            {
                "drop": 1,
                "scan": 1,
                "scan_first": 1,
                "scales": 1,
                "repeated": 1,
                "sink": 1,
                "row": range(ring_rows),
                "base": range(ring_rows),
                "window_row": range(p.group),
                "first_of_window": 1,
                "last_of_window": 1,
                "page": 24,
                "timestamp": POSITION_BITS,
                "head": 8,
            }
        )


class HeadStatus(data.StructLayout):
    """What is known of a head; all but `state` and `pending` are 0 unless the state is OPEN.

    Members
    -------
    state : SequenceState
    pending : 0 .. ring_rows // group
        Complete windows whose rows are still in the ring, oldest first; those of an ended sequence included.
    staged : 0 .. group - 1
        Rows in the open window.
    base : 0 .. ring_rows - 1
        Ring row of the first of them.
    windows : 0 .. p.windows
        Complete windows of the sequence that have a page, pending ones included.
    oldest : 32
        Timestamp of the oldest of them.
    full : 1
        Every page is taken, and the cache does not evict.
    """

    def __init__(self, p: CacheParameters, ring_rows: int):
        super().__init__(
            {
                "state": SequenceState,
                "pending": range(ring_rows // p.group + 1),
                "staged": range(p.group),
                "base": range(ring_rows),
                "windows": range(p.windows + 1),
                "oldest": POSITION_BITS,
                "full": 1,
            }
        )


class SequenceControl(wiring.Component):
    """The state machine of one head.

    ======  ===================  ======  ============================================
    from    on                   to      besides
    ======  ===================  ======  ============================================
    any     `begin`              SCAN    only while no window is pending
    SCAN    `stage`              OPEN
    OPEN    `stage`              OPEN    with `close` one more window is pending
    any     `end`                EMPTY   stronger than `begin` and `stage`
    any     `release`            (same)  one window less is pending
    ======  ===================  ======  ============================================

    Parameters
    ----------
    windows : int
        Most windows that may be pending.

    Members
    -------
    begin, stage, close : in
        A row of the head is taken: the first of a sequence; to be staged; to be staged as the last of its window
        (with `stage`).
    release : in
        The oldest pending window is encoded.
    end : in
    state, pending : out
    """

    def __init__(self, windows: int):
        self.windows = windows
        super().__init__(
            {
                **dict.fromkeys(["begin", "stage", "close", "release", "end"], In(1)),
                "state": Out(SequenceState),
                "pending": Out(range(windows + 1)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        with m.FSM():
            with m.State("EMPTY"):
                m.d.comb += self.state.eq(SequenceState.EMPTY)
                with m.If(self.begin & ~self.end):
                    m.next = "SCAN"
            with m.State("SCAN"):
                m.d.comb += self.state.eq(SequenceState.SCAN)
                with m.If(self.end):
                    m.next = "EMPTY"
                with m.Elif(self.stage):
                    m.next = "OPEN"
            with m.State("OPEN"):
                m.d.comb += self.state.eq(SequenceState.OPEN)
                with m.If(self.end):
                    m.next = "EMPTY"
                with m.Elif(self.begin):
                    m.next = "SCAN"
        with m.If(self.close & ~self.release):
            m.d.sync += self.pending.eq(self.pending + 1)
        with m.If(self.release & ~self.close):
            m.d.sync += self.pending.eq(self.pending - 1)
        return m


class WindowControl(wiring.Component):
    """Admits rows, one at a time, and says what is to be done with each.

    A sequence is scanned, then staged; both passes count tokens from 0. Windows begin at the positions 0, `group`,
    2 * `group`, ... of the sequence, whatever the calls were that brought the rows. A staged row takes the next row
    of the head's ring; the rows of a window are given back together when it is encoded (`release`). The row that
    completes a window takes the next page of the head's ring of `CacheParameters.windows` pages.

    A row waits (`granted` low) while

    - the ring is full: every row of it belongs to a window that is pending or open;
    - it completes a window and there is no page: all are held and the cache does not evict (`full`), or it evicts
      and the oldest page is still to be written;
    - it starts a sequence and windows of the head's former one are pending.

    A sequence that goes on (`resume`) has a scan of one row, which holds its scales, and counts from its position on,
    in the first row of the ring of a window that begins there, and in the first page.

    A row that breaks the order of a sequence is granted with ``plan.drop`` and raises `error`: one of a head that does
    not exist, a start outside the scan, a row of the scan while rows are staged, any row without a start while the
    state is EMPTY.

    Every head has a state machine (`SequenceControl`); the rest of its state shares a small memory with one set of
    counters, because only one row is admitted per cycle.

    Latency: `granted` and `plan` answer in the same cycle, from registers through one look-up by head. A row can be
    taken every cycle. `status` answers one cycle after `status_head`.

    Parameters
    ----------
    p : CacheParameters
        `group` must be a power of two.
    ring_rows : int
        Rows of a head's ring, at least ``2 * p.group``.
    position_bits : int
        Counted bits of a position; timestamps wrap after ``2^position_bits`` tokens.

    Members
    -------
    request : in
        The row at the port.
    offered : in
        There is one.
    granted : out
        It may be taken in this cycle.
    take : in
        It is taken; only with `offered` and `granted`.
    plan : out
        What to do with it.
    release, release_head : in
        The oldest pending window of the head is encoded: its rows are free. Only while one is pending.
    end, end_head : in
        The head's sequence ends, after a row that is taken in the same cycle: its open window and its pages are given
        up. Windows that are pending must still be released. Ignored for a head that does not exist.
    resume, resume_head, position, repeats : in
        The head's next sequence goes on: its first staged row has this position, or, with `repeats`, that of the first
        row of its window, and rows before the position are repeated. Not in the cycle of a start of any head. It
        replaces what was said for another head before.
    status_head : in
    status : out
        State of `status_head` as it was in the cycle before.
    full : out
        Registered: the offered row waits for a page.
    error : out
        One cycle: the row that is taken is dropped.
    """

    def __init__(self, p: CacheParameters, ring_rows: int, *, position_bits: int = POSITION_BITS):
        if p.group < 2 or p.group & (p.group - 1):
            raise ParameterError(f"group = {p.group}: legal along time are the powers of two from 2 on")
        check_integer("ring_rows", ring_rows, 2 * p.group, 1 << 16)
        check_integer("position_bits", position_bits, p.group.bit_length(), POSITION_BITS)
        self.p = p
        self.ring_rows = ring_rows
        self.position_bits = position_bits
        self.pending_limit = ring_rows // p.group
        """Most windows of a head that can be pending."""
        super().__init__(
            {
                "request": In(RowRequest()),
                "offered": In(1),
                "granted": Out(1),
                "take": In(1),
                "plan": Out(RowPlan(p, ring_rows)),
                "release": In(1),
                "release_head": In(8),
                "end": In(1),
                "end_head": In(8),
                "resume": In(1),
                "resume_head": In(8),
                "position": In(POSITION_BITS),
                "repeats": In(1),
                "status_head": In(8),
                "status": Out(HeadStatus(p, ring_rows)),
                "full": Out(1),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        window_bits = p.group.bit_length() - 1
        ring_rest = self.ring_rows % p.group
        # What `start` does not set is never read, so that the memory needs no reset. Conditions of the next row are
        # kept beside the counters they are made of: `granted` waits for no comparison.
        head_counters = data.StructLayout(
            {
                "window_row": window_bits,
                "row": range(self.ring_rows),
                "base": range(self.ring_rows),
                "slot": range(max(2, p.windows)),
                "held": range(p.windows + 1),
                "number": self.position_bits - window_bits,
                "sinks": range(p.sinks + 1),  # counted so far in this pass; stops at p.sinks
                "last_of_window": 1,  # the next row completes the window
                "ring_end": 1,  # with `pending_limit` windows pending the next row finds the ring full
                "pages_held": 1,  # every page is taken
                "goes_on": 1,  # the sequence was begun before
                "repeats": range(p.group),  # rows to come that are repeated
            }
        )
        anew = head_counters.const({"sinks": int(p.sinks > 0), "ring_end": int(ring_rest == 0)})
        # Where the next sequence of one head begins; at 0 where nothing else was said.
        first, first_head = Signal(head_counters, init=anew), Signal(8)
        in_window = self.position[:window_bits]
        row, repeats = Signal(window_bits), Signal(window_bits)
        position = Signal(POSITION_BITS)  # of the first row that is staged
        m.d.comb += [
            row.eq(Mux(self.repeats, 0, in_window)),
            repeats.eq(Mux(self.repeats, in_window, 0)),
            position.eq(Cat(row, self.position[window_bits:])),
        ]
        with m.If(self.resume):
            m.d.sync += [
                first.window_row.eq(row),
                first.row.eq(row),
                first.number.eq(position[window_bits:]),
                first.sinks.eq(Mux(position < p.sinks, position, p.sinks) if p.sinks else 0),
                first.last_of_window.eq(row == p.group - 1),
                first.ring_end.eq(row == ring_rest),
                first.goes_on.eq(1),
                first.repeats.eq(repeats),
                first_head.eq(self.resume_head),
            ]
        m.submodules.counters = counters = memory.Memory(shape=head_counters, depth=max(2, p.heads), init=[])
        write, read, look = counters.write_port(), counters.read_port(domain="comb"), counters.read_port(domain="comb")

        take_head, release_head, end_head = (Signal(range(max(2, p.heads))) for _ in range(3))
        m.d.comb += [
            take_head.eq(self.request.head),
            release_head.eq(self.release_head),
            end_head.eq(self.end_head),
        ]
        begin, stage, close = Signal(), Signal(), Signal()
        states, pendings = [], []
        for head in range(p.heads):
            m.submodules[f"sequence_{head}"] = sequence = SequenceControl(self.pending_limit)
            taken = (take_head == head) if p.heads > 1 else Const(1)
            m.d.comb += [
                sequence.begin.eq(begin & taken),
                sequence.stage.eq(stage & taken),
                sequence.close.eq(close & taken),
                sequence.release.eq(self.release & ((release_head == head) if p.heads > 1 else 1)),
                sequence.end.eq(self.end & (self.end_head == head)),
            ]
            states.append(sequence.state)
            pendings.append(sequence.pending)

        # Admission
        state, pending = Signal(SequenceState), Signal(range(self.pending_limit + 1))
        known, legal, opens, ring_full, page_missing = (Signal() for _ in range(5))
        now = Signal(head_counters)
        m.d.comb += [
            state.eq(Array(states)[take_head]),
            pending.eq(Array(pendings)[take_head]),
            read.addr.eq(take_head),
            now.eq(read.data),
            known.eq(self.request.head < p.heads),
            opens.eq(self.request.start & self.request.scan),
            ring_full.eq(now.ring_end & (pending == self.pending_limit)),
        ]
        if not p.evict:
            m.d.comb += page_missing.eq(now.last_of_window & now.pages_held)
        elif p.windows <= self.pending_limit:
            # The oldest page may be given up only once it is written.
            m.d.comb += page_missing.eq(now.last_of_window & now.pages_held & (pending == p.windows))
        with m.If(self.request.scan):
            m.d.comb += legal.eq(known & (self.request.start | (state == SequenceState.SCAN)))
            m.d.comb += self.granted.eq(~known | ~self.request.start | (pending == 0))
        with m.Else():
            m.d.comb += legal.eq(known & ~self.request.start & (state != SequenceState.EMPTY))
            m.d.comb += self.granted.eq(~legal | ~(ring_full | page_missing))
        m.d.sync += self.full.eq(self.offered & legal & ~self.request.scan & page_missing)

        staging = Signal()
        m.d.comb += [
            staging.eq(legal & ~self.request.scan),
            begin.eq(self.take & legal & opens),
            stage.eq(self.take & staging),
            close.eq(stage & now.last_of_window),
            self.error.eq(self.take & ~legal),
        ]

        # Plan and counters. Both passes begin to count at 0, unless the sequence goes on.
        pass_begins, sinks, sink, resumes = Signal(), Signal.like(now.sinks), Signal(), Signal()
        m.d.comb += [
            resumes.eq(opens & first.goes_on & (self.request.head == first_head)),
            pass_begins.eq(opens | (staging & (state == SequenceState.SCAN) & ~now.goes_on)),
            sinks.eq(Mux(pass_begins, 0, now.sinks)),
            sink.eq(sinks != p.sinks),
            self.plan.drop.eq(~legal),
            self.plan.scan.eq(self.request.scan),
            self.plan.scan_first.eq(opens),
            self.plan.scales.eq(resumes),
            self.plan.repeated.eq(staging & (now.repeats != 0)),
            self.plan.sink.eq(sink & ~resumes),
            self.plan.row.eq(now.row),
            self.plan.base.eq(now.base),
            self.plan.window_row.eq(now.window_row),
            self.plan.first_of_window.eq(staging & (now.window_row == 0)),
            self.plan.last_of_window.eq(staging & now.last_of_window),
            self.plan.page.eq(now.slot),
            self.plan.timestamp.eq(Cat(Const(0, window_bits), now.number)),
            self.plan.head.eq(self.request.head),
        ]
        after = Signal(head_counters)
        next_row = Mux(now.row == self.ring_rows - 1, 0, now.row + 1)
        m.d.comb += [
            write.addr.eq(take_head),
            write.data.eq(after),
            write.en.eq(self.take & legal),
            after.eq(now),
            after.sinks.eq(sinks + sink),
        ]
        with m.If(self.take & legal & resumes):
            m.d.sync += first.eq(anew)
        with m.If(opens):
            m.d.comb += after.eq(Mux(resumes, first, anew))
        with m.Elif(~self.request.scan):
            m.d.comb += [
                after.repeats.eq(now.repeats - self.plan.repeated),
                after.window_row.eq(now.window_row + 1),
                after.row.eq(next_row),
                after.last_of_window.eq(now.window_row == p.group - 2),
                after.ring_end.eq(now.window_row == (ring_rest - 1) % p.group),
            ]
            with m.If(now.last_of_window):
                m.d.comb += [
                    after.base.eq(next_row),
                    after.slot.eq(Mux(now.slot == p.windows - 1, 0, now.slot + 1)),
                    after.held.eq(now.held + ~now.pages_held),
                    after.pages_held.eq(now.pages_held | (now.held == p.windows - 1)),
                    after.number.eq(now.number + 1),
                ]

        # Status
        seen = Signal(head_counters)
        seen_head = Signal(range(max(2, p.heads)))
        seen_state = Signal(SequenceState)
        oldest = Signal.like(seen.number)
        m.d.comb += [
            seen_head.eq(self.status_head),
            look.addr.eq(seen_head),
            seen.eq(look.data),
            seen_state.eq(Array(states)[seen_head]),
            oldest.eq(seen.number - seen.held),
        ]
        m.d.sync += self.status.eq(0)
        with m.If(self.status_head < p.heads):
            m.d.sync += [self.status.state.eq(seen_state), self.status.pending.eq(Array(pendings)[seen_head])]
            with m.If(seen_state == SequenceState.OPEN):
                m.d.sync += [
                    self.status.staged.eq(seen.window_row),
                    self.status.base.eq(seen.base),
                    self.status.windows.eq(seen.held),
                    self.status.oldest.eq(Cat(Const(0, window_bits), oldest)),
                    self.status.full.eq(0 if p.evict else seen.pages_held),
                ]
        return m
