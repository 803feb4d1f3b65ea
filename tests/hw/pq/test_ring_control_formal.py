"""Bounded proofs of the control of a ring of rows, for every order of rows, ends, sent and completed batches."""

import pytest
from amaranth.hdl import Array, Assert, Assume, Cover, Module, Mux, ResetSignal, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In
from formal import check, mutant

from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.ring_control import RingControl
from kvant.hw.pq.ring_layouts import RingShape, RowUser

PATIENCE = 7
"""Cycles within which a row is taken that nothing holds back: from the port to its place, and the look-ups."""

COUNT = 5
"""Bits of the record's counters: they do not wrap within the depth of the proofs."""


class Proof(wiring.Component):
    """A control of one head's keys and values with rows of one transfer, and a record of both that never wraps.

    Inputs are free, reset included. Batches that are sent become complete at any time; pulses of `coded` without one
    come as well.
    """

    def __init__(self, p, *, dut_class=RingControl, resets=False):
        self.p, self.resets = p, resets
        self.shape = RingShape(p)
        self.dut = dut_class(p, self.shape, 1)
        super().__init__(
            {
                "user": In(RowUser()),
                "offered": In(1),
                "hold": In(1),
                "end": In(1),
                "end_head": In(8),
                "sends": In(1),
                "coded": In(1),
            }
        )

    def elaborate(self, platform):
        p, shape, dut = self.p, self.shape, self.dut
        ring_rows = shape.ring_rows
        m = Module()
        m.submodules.dut = dut

        begun, held_back, former, take = Signal(), Signal(), Signal(RowUser()), Signal()
        ended = Signal()
        m.d.sync += [begun.eq(1), ended.eq(self.end), held_back.eq(self.offered & ~take), former.eq(self.user)]
        m.d.comb += [
            Assume(~begun | ~ResetSignal() | self.resets),
            Assume(begun | ~(self.offered | self.coded | self.end)),
            Assume(~held_back | (self.offered & (self.user.as_value() == former.as_value()))),
            Assume(~(self.end | ended) | self.hold),
            take.eq(self.offered & dut.ready),
            dut.offered.eq(self.offered),
            dut.user.eq(self.user),
            dut.hold.eq(self.hold),
            dut.end.eq(self.end),
            dut.end_head.eq(self.end_head),
            dut.batch_sent.eq(dut.batch_valid & self.sends),
            dut.coded.eq(self.coded),
        ]

        # The record: two contexts, and all batches that are not complete, oldest first.
        context = data.StructLayout(
            dict.fromkeys(["sinks", "rows", "base", "queued", "freed", "coded"], COUNT) | {"open": 1}
        )
        contexts = Array(Signal(context, name=f"context_{store}") for store in (0, 1))
        batch = data.StructLayout({"store": 1, "count": COUNT, "first": COUNT})
        batches = Array(Signal(batch, name=f"batch_{age}") for age in range(shape.jobs + 1))
        number, sent = Signal(range(shape.jobs + 2)), Signal(range(shape.jobs + 2))
        store = self.user.store
        now, after = Signal(context), Signal(context)
        known, legal, kept, sink, makes, exceeds, completes = (Signal() for _ in range(7))
        count, older = Signal(COUNT), Signal(COUNT)
        oldest = batches[0]
        m.d.comb += [
            known.eq(self.user.head < p.heads),
            legal.eq(known & (self.user.start | contexts[store].open)),
            now.eq(Mux(self.user.start, 0, contexts[store])),
            kept.eq(take & legal),
            sink.eq(now.sinks < p.sinks),
            older.eq(now.rows + 1 - p.recent),
            makes.eq(
                ~sink
                & (now.rows >= p.recent)
                & Mux(self.user.flush, older > now.queued, older - now.base == p.batch_tokens)
            ),
            count.eq(older - now.base),
            exceeds.eq(makes & (now.base + count > p.tokens)),
            after.eq(now),
            after.open.eq(1),
            after.sinks.eq(now.sinks + sink),
            after.rows.eq(now.rows + ~sink),
            completes.eq(self.coded & (sent != 0)),
        ]
        whole = count - count % p.chunk_tokens
        with m.If(makes):
            m.d.comb += [after.base.eq(now.base + whole), after.queued.eq(older)]

        # Every place is right, free, and every row is kept or dropped as it should.
        ring = store * shape.context_rows
        before = contexts[store]
        m.d.comb += [
            Assert(~take | (dut.enter == legal)),
            Assert(dut.error == ((take & ~legal) | (self.coded & (sent == 0)))),
            Assert(~kept | ~self.user.start | (before.queued == before.coded)),
            Assert(~kept | (dut.row == ring + Mux(sink, ring_rows + now.sinks, now.rows % ring_rows))),
            Assert(~kept | sink | (now.rows - now.freed < ring_rows)),
            Assert(~kept | ~makes | (~exceeds & (number < shape.jobs))),
            Assert(~take | ~self.hold),
        ]
        # Batches come out as they should.
        offered = batches[sent]
        m.d.comb += [
            Assert(number <= shape.jobs),
            Assert(~dut.batch_valid | (sent < number)),
            Assert(
                ~dut.batch_valid
                | (
                    (dut.batch.store == offered.store)
                    & (dut.batch.head == 0)
                    & (dut.batch.count == offered.count)
                    & (dut.batch.first == offered.first)
                    & (dut.batch.slot == offered.first % ring_rows)
                )
            ),
        ]
        unsent = Signal(range(6))
        m.d.sync += unsent.eq(Mux((sent < number) & ~dut.batch_valid, unsent + 1, 0))
        m.d.comb += Assert(unsent < 3)

        pushes = kept & makes
        for age in range(shape.jobs):
            with m.If(completes):
                m.d.sync += batches[age].eq(batches[age + 1])
            with m.If(pushes & (number - completes == age)):
                m.d.sync += [
                    batches[age].store.eq(store),
                    batches[age].count.eq(count),
                    batches[age].first.eq(now.base),
                ]
        m.d.sync += [
            number.eq(number + pushes - completes),
            sent.eq(sent + (dut.batch_valid & self.sends) - completes),
        ]
        end = oldest.first + oldest.count
        for index, record in enumerate(contexts):
            with m.If(completes & (oldest.store == index)):
                m.d.sync += [record.coded.eq(end), record.freed.eq(end - end % p.chunk_tokens)]
            with m.If(kept & (store == index)):
                fields = ("open", "sinks", "rows", "base", "queued")
                m.d.sync += [record[name].eq(after[name]) for name in fields]
                with m.If(self.user.start):
                    m.d.sync += [record.coded.eq(0), record.freed.eq(0)]
            with m.If(self.end & (self.end_head == 0)):
                m.d.sync += record.open.eq(0)

        # Nothing waits that may be taken.
        may = Signal()
        waited = Signal(range(PATIENCE + 2))
        busy_context = before.queued != before.coded
        m.d.comb += may.eq(
            ~legal
            | Mux(self.user.start, ~busy_context, sink | (now.rows - now.freed < ring_rows))
            & ~(makes & (exceeds | (number == shape.jobs)))
        )
        m.d.sync += waited.eq(Mux(self.offered & ~take & ~self.hold & may, waited + 1, 0))
        m.d.comb += Assert(waited <= PATIENCE)

        # The interesting states are reached.
        m.d.comb += [
            Cover(kept & ~sink & (now.rows == ring_rows)),
            Cover(self.offered & ~may & ~self.user.start & (number != 0)),
            Cover(self.offered & ~may & self.user.start),
            Cover(kept & self.user.start & completes),
            Cover(kept & makes & self.user.flush & (count < p.batch_tokens) if p.batch_tokens > 1 else kept & makes),
            Cover(take & ~legal & known),
        ]
        return m


def parameters(name):
    common = {"subspace": 1, "port_bits": 32, "group": 8, "capacity": 8}
    if name == "tokens":  # one token is a frame and a batch; three rows
        return PqParameters(head_dim=4, lanes=4, batch=1, recent=1, **common)
    return PqParameters(head_dim=2, lanes=2, batch=1, recent=0, sinks=1, **common)  # frames of two; four rows


@pytest.mark.parametrize(
    ("name", "resets", "depth"),
    [
        ("tokens", False, 14),
        ("frames", False, 14),
        pytest.param("tokens", True, 26, marks=pytest.mark.long),
        pytest.param("frames", True, 26, marks=pytest.mark.long),
    ],
)
def test_no_order_of_events_breaks_a_promise(tmp_path, name, resets, depth):
    passed, report = check(Proof(parameters(name), resets=resets), tmp_path, mode="bmc", depth=depth)
    assert passed, report


@pytest.mark.long
@pytest.mark.parametrize("name", ["tokens", "frames"])
def test_proofs_reach_the_interesting_states(tmp_path, name):
    passed, report = check(Proof(parameters(name)), tmp_path, mode="cover", depth=32)
    assert passed, report


FAULTS = {
    "a row is granted though the ring is full": (
        "free.eq(held != ring_rows)",
        "free.eq(1)",
        "Assert(~kept | sink | (now.rows - now.freed < ring_rows))",
    ),
    "a row waits though there is a place": (
        "free.eq(held != ring_rows)",
        "free.eq(held < ring_rows - 1)",
        "Assert(waited <= PATIENCE)",
    ),
    "slots run past the end of the ring": (
        "now.slot == ring_rows - 1",
        "now.slot == ring_rows",
        "Assert(~kept | (dut.row ==",
    ),
    "a sequence starts while batches of the former one are under way": (
        "(was_used & ~matched)",
        "0",
        "Assert(~kept | ~self.user.start | (before.queued == before.coded))",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_fault_is_found(tmp_path, fault):
    old, new, property_ = FAULTS[fault]
    proof = Proof(parameters("tokens"), dut_class=mutant(RingControl, old, new))
    passed, report = check(proof, tmp_path, mode="bmc", depth=26)
    assert not passed
    assert property_ in report
