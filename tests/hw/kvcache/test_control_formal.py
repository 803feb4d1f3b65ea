"""Bounded proofs of the window control, for every order of rows, releases and ends, and a free choice of the head."""

from itertools import pairwise

import pytest
from amaranth.hdl import Array, Assert, Assume, Cover, Module, Mux, ResetSignal, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In
from formal import check, mutant

from kvant.hw.kvcache import control
from kvant.hw.kvcache.control import RowRequest, SequenceControl, SequenceState, WindowControl
from kvant.hw.kvcache.parameters import CacheParameters

PATIENCE = 3
"""Cycles after which the environment of the liveness proof releases a window for which a row waits."""


class Proof(wiring.Component):
    """A control, and a record of one head, one row of its ring and one of its pages, which may be any.

    The record remembers which token of which sequence the row holds and whether it is unread, so that loss, doubling,
    exchange and mixture of rows show when their window is released.

    Inputs are free, reset included; `chosen` is the choice, made in the first cycle.
    """

    COUNT = 5
    """Bits of the record's counters: they do not wrap within the depth of the proofs."""

    def __init__(self, p, ring_rows, *, resets=False, dut_class=WindowControl):
        self.p, self.ring_rows, self.resets = p, ring_rows, resets
        self.dut = dut_class(p, ring_rows, position_bits=p.group.bit_length() + 1)
        choice = {"head": range(max(2, p.heads)), "row": range(ring_rows), "page": range(max(2, p.windows))}
        super().__init__(
            {
                "request": In(RowRequest()),
                "offered": In(1),
                "willing": In(1),
                "release": In(1),
                "release_head": In(8),
                "end": In(1),
                "end_head": In(8),
                "chosen": In(data.StructLayout(choice)),
            }
        )

    def elaborate(self, platform):
        p, ring_rows, dut = self.p, self.ring_rows, self.dut
        pending_limit = ring_rows // p.group
        m = Module()
        m.submodules.dut = dut
        plan, status = dut.plan, dut.status

        # The environment: anything, but a row that is offered stays until it is taken, and only windows that are
        # pending are released.
        begun, held_back, former, choice = Signal(), Signal(), Signal(RowRequest()), Signal.like(self.chosen)
        take = Signal()
        pendings = Array(Signal(range(pending_limit + 2), name=f"pending_{head}") for head in range(p.heads))
        m.d.sync += [
            begun.eq(1),
            choice.eq(Mux(begun, choice, self.chosen)),
            held_back.eq(self.offered & ~take),
            former.eq(self.request),
        ]
        m.d.comb += [
            Assume((self.chosen.head < p.heads) & (self.chosen.row < ring_rows) & (self.chosen.page < p.windows)),
            Assume(~begun | ~ResetSignal() | self.resets),
            Assume(begun | ~(self.offered | self.release | self.end)),
            Assume(~held_back | (self.offered & (self.request.as_value() == former.as_value()))),
            Assume(~self.release | ((self.release_head < p.heads) & (pendings[self.release_head] != 0))),
            take.eq(self.offered & dut.granted & self.willing),
            dut.request.eq(self.request),
            dut.offered.eq(self.offered),
            dut.take.eq(take),
            dut.release.eq(self.release),
            dut.release_head.eq(self.release_head),
            dut.end.eq(self.end),
            dut.end_head.eq(self.end_head),
            dut.status_head.eq(choice.head),
        ]
        for head, count in enumerate(pendings):
            closed = take & ~plan.drop & plan.last_of_window & (self.request.head == head)
            m.d.sync += count.eq(count + closed - (self.release & (self.release_head == head)))

        # What happens to the head of the record
        state, pending = Signal(SequenceState), Signal(range(pending_limit + 2))
        sequence, tokens, scanned, held = (Signal(self.COUNT) for _ in range(4))
        mine, legal, staged, closes, frees, ends = (Signal() for _ in range(6))
        in_window, window_start = tokens % p.group, Signal.like(tokens)
        m.d.comb += [
            pending.eq(pendings[choice.head]),
            mine.eq(take & (self.request.head == choice.head)),
            legal.eq(
                Mux(
                    self.request.scan,
                    self.request.start | (state == SequenceState.SCAN),
                    ~self.request.start & (state != SequenceState.EMPTY),
                )
            ),
            staged.eq(mine & legal & ~self.request.scan),
            closes.eq(staged & (in_window == p.group - 1)),
            frees.eq(self.release & (self.release_head == choice.head)),
            ends.eq(self.end & (self.end_head == choice.head)),
            window_start.eq(tokens - in_window),
            # Rows out of order, and only these, are dropped with an error.
            Assert(~mine | (dut.error == ~legal)),
            Assert(~(take & (self.request.head >= p.heads)) | dut.error),
            Assert(~take | (dut.error == plan.drop)),
            Assert(take | ~dut.error),
        ]
        row = Signal(data.StructLayout({"unread": 1, "sequence": self.COUNT, "token": self.COUNT}))
        page = Signal(data.StructLayout({"held": 1, "pending": 1, "timestamp": self.COUNT}))
        with m.If(mine & legal & self.request.scan):
            m.d.comb += [
                Assert(plan.scan & (plan.scan_first == self.request.start)),
                Assert(plan.sink == (Mux(self.request.start, 0, scanned) < p.sinks)),
                Assert(~plan.first_of_window & ~plan.last_of_window),
            ]
            m.d.sync += scanned.eq(Mux(self.request.start, 1, scanned + 1))
            with m.If(self.request.start):
                m.d.comb += Assert(pending == 0)
                m.d.sync += [
                    state.eq(SequenceState.SCAN),
                    sequence.eq(sequence + 1),
                    tokens.eq(0),
                    held.eq(0),
                    page.held.eq(0),
                    row.unread.eq(0),  # of the open window of a sequence that is given up
                ]
        with m.If(staged):
            m.d.comb += [
                Assert(~plan.scan & ~plan.scan_first),
                Assert(plan.row < ring_rows),
                Assert((plan.row != choice.row) | ~row.unread),
                Assert(plan.window_row == in_window),
                Assert(plan.first_of_window == (in_window == 0)),
                Assert(plan.last_of_window == (in_window == p.group - 1)),
                Assert(plan.timestamp == window_start % (1 << dut.position_bits)),
                Assert(plan.sink == (tokens < p.sinks)),
            ]
            m.d.sync += [state.eq(SequenceState.OPEN), tokens.eq(tokens + 1)]
            with m.If(plan.row == choice.row):
                m.d.sync += [row.unread.eq(1), row.sequence.eq(sequence), row.token.eq(tokens)]
        with m.If(closes):
            m.d.comb += Assert(plan.page < p.windows)
            m.d.sync += held.eq(Mux(held == p.windows, held, held + 1))
            with m.If(plan.page == choice.page):
                # It is free; or it is the oldest, has been written and is given up.
                m.d.comb += [
                    Assert(~(page.held & page.pending)),
                    Assert(~page.held | (p.evict & (page.timestamp + p.windows * p.group == window_start))),
                ]
                m.d.sync += [page.held.eq(1), page.pending.eq(1), page.timestamp.eq(window_start)]
        with m.If(ends):
            m.d.sync += [state.eq(SequenceState.EMPTY), held.eq(0), page.held.eq(0)]

        # Windows that are pending, oldest first
        window = data.StructLayout(
            {"base": range(ring_rows), "page": range(max(2, p.windows)), "sequence": self.COUNT, "token": self.COUNT}
        )
        windows = [Signal(window, name=f"window_{age}") for age in range(pending_limit + 1)]
        closing = Signal(window)
        m.d.comb += [
            closing.base.eq(plan.base),
            closing.page.eq(plan.page),
            closing.sequence.eq(sequence),
            closing.token.eq(window_start),
            Assert(pending <= pending_limit),
        ]
        for age, (this, older) in enumerate(pairwise(windows)):
            with m.If(frees):
                m.d.sync += this.eq(older)
            with m.If(closes & (pending - frees == age)):
                m.d.sync += this.eq(closing)
        with m.If(frees):
            oldest = windows[0]
            for offset in range(p.group):
                place = oldest.base + offset
                with m.If(Mux(place >= ring_rows, place - ring_rows, place) == choice.row):
                    m.d.comb += [
                        Assert(row.unread),
                        Assert(row.sequence == oldest.sequence),
                        Assert(row.token == oldest.token + offset),
                    ]
                    m.d.sync += row.unread.eq(0)
            with m.If(oldest.page == choice.page):
                m.d.sync += page.pending.eq(0)

        # The status is that of the cycle before.
        was = Signal(
            data.StructLayout({"known": 1, "state": SequenceState, "pending": pending.shape(), "held": self.COUNT})
        )
        was_tokens = Signal.like(tokens)
        m.d.sync += [
            was.known.eq(begun),
            was.state.eq(state),
            was.pending.eq(pending),
            was.held.eq(held),
            was_tokens.eq(tokens),
        ]
        with m.If(was.known):
            m.d.comb += [Assert(status.state == was.state), Assert(status.pending == was.pending)]
            with m.If(was.state == SequenceState.OPEN):
                age = was_tokens % p.group + was.held * p.group
                m.d.comb += [
                    Assert(status.windows == was.held),
                    Assert(status.staged == was_tokens % p.group),
                    Assert(status.oldest == (was_tokens - age) % (1 << dut.position_bits)),
                    Assert(status.full == (0 if p.evict else was.held == p.windows)),
                ]

        # Every row is granted in the end. The only one that may wait for ever is one that completes a window when no
        # page is free, in a cache that does not evict; all others wait for windows that are pending.
        waits, stuck = Signal(), Signal()
        longest = pending_limit * (PATIENCE + 1)
        waited, unreleased = Signal(range(longest + 2)), Signal(range(PATIENCE + 2))
        m.d.comb += [
            waits.eq(self.offered & (self.request.head == choice.head) & ~dut.granted),
            Assert(~waits | legal),
            Assert(~waits | stuck | (pending != 0)),
            Assert(waited <= longest),
            Assume(unreleased <= PATIENCE),
        ]
        if not p.evict:
            last = (state == SequenceState.OPEN) & (in_window == p.group - 1)
            m.d.comb += stuck.eq(legal & ~self.request.scan & last & (held == p.windows))
        m.d.sync += [
            waited.eq(Mux(waits & ~stuck, waited + 1, 0)),
            unreleased.eq(Mux(waits & ~stuck & ~frees, unreleased + 1, 0)),
        ]

        # The interesting states are reached.
        m.d.comb += [
            Cover(staged & (tokens == ring_rows) & (plan.row == 0)),
            Cover(waits & self.request.start & (pending == min(pending_limit, p.windows))),
            Cover(staged & (sequence == 2) & (tokens == p.group)),
            Cover(frees & (state == SequenceState.EMPTY)),
            Cover(mine & plan.drop),
        ]
        if p.windows >= pending_limit:
            m.d.comb += [
                Cover(closes & frees),
                Cover(waits & ~self.request.scan & ~stuck & (pending == pending_limit) & (tokens >= ring_rows)),
            ]
        if not p.evict:
            m.d.comb += [Cover(waits & stuck & dut.full), Cover(mine & plan.drop & dut.full)]
        else:
            m.d.comb += [
                Cover(closes & (held == p.windows) & (plan.page == choice.page) & page.held),
                Cover(staged & (tokens == 1 << dut.position_bits) & (plan.timestamp == 0)),
            ]
            if p.windows <= pending_limit:
                m.d.comb += Cover(waits & (held == p.windows) & (pending == p.windows) & ~self.request.start)
        return m


def parameters(windows, evict, heads, sinks=1):
    return CacheParameters(group=2, heads=heads, sinks=sinks, capacity=2 * windows, evict=evict)


@pytest.mark.parametrize(
    ("windows", "evict", "heads", "ring_rows", "resets", "depth"),
    [
        (3, False, 1, 5, False, 12),
        (1, True, 1, 4, True, 10),
        (2, True, 2, 5, False, 10),
        pytest.param(3, False, 1, 5, False, 20, marks=pytest.mark.long),
        pytest.param(1, True, 1, 4, True, 17, marks=pytest.mark.long),
        pytest.param(2, True, 2, 5, False, 14, marks=pytest.mark.long),
        pytest.param(2, False, 2, 7, True, 13, marks=pytest.mark.long),
    ],
)
def test_no_order_of_events_breaks_a_promise(tmp_path, windows, evict, heads, ring_rows, resets, depth):
    proof = Proof(parameters(windows, evict, heads), ring_rows, resets=resets)
    passed, report = check(proof, tmp_path, mode="bmc", depth=depth)
    assert passed, report


@pytest.mark.parametrize(
    ("windows", "evict", "heads", "ring_rows"), [(3, False, 1, 5), (1, True, 1, 4), (2, True, 2, 5)]
)
def test_proofs_reach_the_interesting_states(tmp_path, windows, evict, heads, ring_rows):
    passed, report = check(Proof(parameters(windows, evict, heads), ring_rows), tmp_path, mode="cover", depth=20)
    assert passed, report


FAULTS = {
    "a row is granted though the ring is full": (
        (3, False),
        "ring_full.eq(now.ring_end & (pending == self.pending_limit))",
        "ring_full.eq(0)",
        "Assert((plan.row != choice.row) | ~row.unread)",
    ),
    "a row waits for ever at the end of the ring": (
        (3, False),
        "ring_full.eq(now.ring_end & (pending == self.pending_limit))",
        "ring_full.eq(now.ring_end)",
        "Assert(~waits | stuck | (pending != 0))",
    ),
    "rows run past the end of the ring": (
        (3, False),
        "now.row == self.ring_rows - 1",
        "now.row == self.ring_rows",
        "Assert(plan.row < ring_rows)",
    ),
    "a window begins at the last row of the former one": (
        (3, False),
        "after.base.eq(next_row)",
        "after.base.eq(now.row)",
        "Assert(row.token == oldest.token + offset)",
    ),
    "a page is overwritten": (
        (1, False),
        "page_missing.eq(now.last_of_window & now.pages_held)",
        "page_missing.eq(0)",
        "Assert(~page.held",
    ),
    "a page is given up before it is written": (
        (1, True),
        "& (pending == p.windows)",
        "& (pending > p.windows)",
        "Assert(~(page.held & page.pending))",
    ),
    "a sequence starts while windows of the former one are pending": (
        (3, False),
        "~self.request.start | (pending == 0)",
        "~self.request.start | (pending < 2)",
        "Assert(pending == 0)",
    ),
    "two sequences share a group": (
        (3, False),
        "after.eq(Mux(resumes, first, anew))",
        "after.sinks.eq(1)",
        "Assert(plan.window_row == in_window)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_fault_is_found(tmp_path, fault):
    (windows, evict), old, new, property_ = FAULTS[fault]
    proof = Proof(parameters(windows, evict, 1), 5, dut_class=mutant(WindowControl, old, new))
    passed, report = check(proof, tmp_path, mode="bmc", depth=14)
    assert not passed
    assert property_ in report


def test_lost_release_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(
        control,
        "SequenceControl",
        mutant(SequenceControl, "self.release & ~self.close", "self.release & ~self.close & ~self.end"),
    )
    passed, report = check(Proof(parameters(3, False, 1), 5), tmp_path, mode="bmc", depth=12)
    assert not passed
    assert "Assert(~waits | stuck | (pending != 0))" in report or "status.pending" in report
