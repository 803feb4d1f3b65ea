"""Admission of rows against a model that keeps the positions of sequences as plain numbers."""

import random

import pytest
from amaranth.sim import Simulator

from kvant.hw.kvcache import spatial_control
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.spatial_control import KeyControl

SEED = 20261130


class Model:
    """Of each head the number of tokens so far, None without a sequence, and at which it began here."""

    def __init__(self, p):
        self.p = p
        self.tokens = [None] * p.heads
        self.begins = [0] * p.heads
        self.next_begin = None  # (head, position)

    def begin(self, head):
        """Position of the first row of a sequence that begins now."""
        return self.next_begin[1] if self.next_begin and self.next_begin[0] == head else 0

    def request(self, start, head):
        """(granted, drop, what belongs to the row)."""
        p = self.p
        if head >= p.heads or (not start and self.tokens[head] is None):
            return True, True, None
        position = self.begin(head) if start else self.tokens[head]
        first_page = (position if start else self.begins[head]) // p.group
        page, in_page = divmod(position, p.group)
        if page - first_page == p.windows and not p.evict:
            return False, False, None
        resumes = start and self.next_begin is not None and self.next_begin[0] == head
        return True, False, {
            "sink": position < p.sinks,
            "first_of_page": in_page == 0 or resumes,
            "place": in_page * p.row_groups if resumes else 0,
            "last_of_page": in_page == p.group - 1,
            "page": (page - first_page) % p.windows,
            "timestamp": position - in_page,
            "head": head,
        }  # fmt: skip

    def take(self, start, head):
        if not self.request(start, head)[1]:
            if start:
                self.tokens[head] = self.begins[head] = self.begin(head)
                if self.next_begin and self.next_begin[0] == head:
                    self.next_begin = None
            self.tokens[head] += 1

    def end(self, head):
        if head < self.p.heads:
            self.tokens[head] = None


def run(p, cycles, *, restart=0.02, end=0.02, offer=0.9, strange=0.05, resume=0.0):
    """Random rows; returns how often a row had to wait and how often one was dropped."""
    rng = random.Random(SEED)
    unit, model = KeyControl(p), Model(p)
    counts = {"waits": 0, "drops": 0, "taken": 0, "resumes": 0}

    async def bench(ctx):
        for _ in range(cycles):
            head = rng.randrange(p.heads) if rng.random() >= strange else rng.randrange(256)
            start = int(rng.random() < restart)
            ctx.set(unit.head, head)
            ctx.set(unit.start, start)
            granted, drop, row = model.request(start, head)
            assert ctx.get(unit.granted) == granted
            take = granted and rng.random() < offer
            ctx.set(unit.take, take)
            if granted:
                assert ctx.get(unit.drop) == drop
                if not drop:
                    got = ctx.get(unit.row)
                    assert {name: getattr(got, name) for name in row} == row
            counts["waits"] += not granted
            counts["drops"] += drop
            ends = rng.random() < end
            end_head = rng.randrange(p.heads + 2)
            ctx.set(unit.end, ends)
            ctx.set(unit.end_head, end_head)
            resumes = rng.random() < resume and not (take and start)
            where = (rng.randrange(p.heads), rng.choice([rng.randrange(4 * p.group), rng.getrandbits(31)]))
            ctx.set(unit.resume, resumes)
            ctx.set(unit.resume_head, where[0])
            ctx.set(unit.position, where[1])
            await ctx.tick()
            if take:
                model.take(start, head)
                counts["taken"] += not drop
            if ends:
                model.end(end_head)
            if resumes:
                model.next_begin = where
                counts["resumes"] += 1

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return counts


@pytest.mark.parametrize(
    "parameters",
    [
        {"heads": 1, "capacity": 16, "sinks": 3},
        {"heads": 3, "capacity": 8},
        {"heads": 5, "capacity": 24, "sinks": 12, "evict": True},
        {"heads": 2, "capacity": 8, "sinks": 1, "evict": True},
    ],
)
def test_rows_go_where_their_position_says(parameters):
    p = CacheParameters(group=8, **parameters)
    counts = run(p, 2000)
    assert counts["taken"] > 100 and counts["drops"] > 10
    assert (counts["waits"] > 0) == (not p.evict)


@pytest.mark.parametrize(
    "parameters",
    [
        {"heads": 1, "sinks": 11, "evict": True, "head_dim": 20},
        {"heads": 3, "sinks": 3, "capacity": 16, "head_dim": 8},
    ],
)
def test_a_sequence_goes_on_at_its_position(parameters):
    counts = run(CacheParameters(group=8, **parameters), 2000, restart=0.1, resume=0.2)
    assert counts["taken"] > 100 and counts["resumes"] > 100


def test_a_full_head_waits_until_its_sequence_begins_anew_or_ends():
    counts = run(CacheParameters(group=8, capacity=8), 2000, restart=0.01, end=0.0, strange=0)
    assert counts["waits"] > 500 and counts["drops"] > 0
    assert run(CacheParameters(group=8, capacity=8), 2000, restart=0.05, end=0.01)["taken"] > 100


def test_a_sink_too_many_is_caught(monkeypatch):
    class Wrong(spatial_control.KeyControl):
        def elaborate(self, platform):
            self.p = self.p.model_copy(update={"sinks": self.p.sinks + 1})
            return super().elaborate(platform)

    monkeypatch.setitem(globals(), "KeyControl", Wrong)
    with pytest.raises(AssertionError):
        run(CacheParameters(group=8, sinks=2), 200)
