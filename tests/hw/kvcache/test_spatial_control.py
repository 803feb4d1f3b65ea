"""Admission of rows against a model that keeps the positions of sequences as plain numbers."""

import random

import pytest
from amaranth.sim import Simulator

from kvant.hw.kvcache import spatial_control
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.spatial_control import KeyControl

SEED = 20261130


class Model:
    """Of each head the number of tokens so far; None without a sequence."""

    def __init__(self, p):
        self.p = p
        self.tokens = [None] * p.heads

    def request(self, start, head):
        """(granted, drop, what belongs to the row)."""
        p = self.p
        if head >= p.heads or (not start and self.tokens[head] is None):
            return True, True, None
        position = 0 if start else self.tokens[head]
        if position == p.windows * p.group and not p.evict:
            return False, False, None
        page, in_page = divmod(position, p.group)
        return True, False, {
            "sink": position < p.sinks,
            "first_of_page": in_page == 0,
            "last_of_page": in_page == p.group - 1,
            "page": page % p.windows,
            "timestamp": position - in_page,
            "head": head,
        }  # fmt: skip

    def take(self, start, head):
        if not self.request(start, head)[1]:
            self.tokens[head] = 1 if start else self.tokens[head] + 1

    def end(self, head):
        if head < self.p.heads:
            self.tokens[head] = None


def run(p, cycles, *, restart=0.02, end=0.02, offer=0.9, strange=0.05):
    """Random rows; returns how often a row had to wait and how often one was dropped."""
    rng = random.Random(SEED)
    unit, model = KeyControl(p), Model(p)
    counts = {"waits": 0, "drops": 0, "taken": 0}

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
            await ctx.tick()
            if take:
                model.take(start, head)
                counts["taken"] += not drop
            if ends:
                model.end(end_head)

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
