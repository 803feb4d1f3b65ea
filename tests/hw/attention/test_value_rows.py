"""Rows of values under their weights, against the golden sums: both kinds of scales, counts, stalls."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from group_streams import words
from memory_collisions import asserted_memories

from kvant.golden.attention.int8_rows import weighted_rows
from kvant.hw.attention import value_rows
from kvant.hw.attention.block_sums import GUARD_BITS, PLACE_OFFSET
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.attention.value_rows import HALF_WEIGHT, ValueRows
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

SEED = 20261130


class Bench(wiring.Component):
    """The unit with its numbers in a stream, and a stream that reads all sums when it is done."""

    def __init__(self, p):
        self.p = p
        self.unit = unit = ValueRows(p)
        names = ("count", "group_rows", "channel_rows")
        self.names = names
        look = {"look": unit.look.shape(), "scales": unit.scales.shape(), "total": unit.total.shape()}
        super().__init__(
            {
                "job": In(
                    stream.Signature(
                        data.StructLayout({n: getattr(unit, n).shape() for n in names} | {"row_weights": 16})
                    )
                ),
                "rows": In(stream.Signature(unit.rows.payload.shape())),
                "row_weights": In(stream.Signature(unit.row_weights.payload.shape())),
                "sums": Out(stream.Signature(data.StructLayout(look))),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.unit = unit = self.unit
        wiring.connect(m, wiring.flipped(self.rows), unit.rows)
        job, running, left = Signal(self.job.payload.shape()), Signal(), Signal(16)
        m.d.comb += [  # those of a job come after its start
            unit.row_weights.payload.eq(self.row_weights.payload),
            unit.row_weights.valid.eq(self.row_weights.valid & running & (left != 0)),
            self.row_weights.ready.eq(unit.row_weights.ready & running & (left != 0)),
        ]
        with m.If(unit.row_weights.valid & unit.row_weights.ready):
            m.d.sync += left.eq(left - 1)
        m.d.comb += [getattr(unit, name).eq(job[name]) for name in self.names]
        query, part, transfer = Signal(range(p.queries + 1)), Signal(2), Signal(range(p.row_transfers + 1))
        m.d.comb += [
            unit.look_query.eq(query),
            unit.total_query.eq(query),
            unit.look_part.as_value().eq(part),
            unit.look_transfer.eq(transfer),
            self.sums.payload.look.eq(unit.look),
            self.sums.payload.scales.eq(unit.scales),
            self.sums.payload.total.eq(unit.total),
        ]
        with m.If(unit.error):
            m.d.sync += self.error.eq(1)
        with m.FSM():
            with m.State("JOB"):
                m.d.comb += self.job.ready.eq(1)
                m.d.sync += [job.eq(self.job.payload), query.eq(0), part.eq(0), transfer.eq(0)]
                with m.If(self.job.valid):
                    m.next = "START"
            with m.State("START"):
                m.d.comb += unit.start.eq(1)
                m.d.sync += left.eq(job.row_weights)
                m.next = "WAIT"
            with m.State("WAIT"):
                m.d.comb += running.eq(1)
                with m.If(unit.done):
                    m.next = "LOOK"
            with m.State("LOOK"):
                m.d.comb += unit.look_enable.eq(1)
                m.next = "SEND"
            with m.State("SEND"):
                m.d.comb += self.sums.valid.eq(1)
                with m.If(self.sums.ready):
                    m.next = "LOOK"
                    transfer_end, part_end = transfer == p.row_transfers - 1, part == 2
                    m.d.sync += transfer.eq(Mux(transfer_end, 0, transfer + 1))
                    with m.If(transfer_end):
                        m.d.sync += part.eq(Mux(part_end, 0, part + 1))
                    with m.If(transfer_end & part_end):
                        m.d.sync += query.eq(query + 1)
                        with m.If(query + 1 == job.count):
                            m.next = "JOB"
        return m


def random_rows(rng, p, count, group_rows, channel_rows):
    """Elements i8 [rows, d], scales of groups f16 [rows, groups], of channels f16 [d], weights [rows, count]."""
    rows = group_rows + channel_rows
    elements = rng.integers(-128, 128, (rows, p.head_dim)).astype(np.int8)
    group_scale = (2.0 ** rng.uniform(-24, 15, (group_rows, p.head_groups))).astype(np.float16)
    channel_scale = (2.0 ** rng.uniform(-24, 15, p.head_dim)).astype(np.float16)
    weights = np.floor(2.0 ** rng.uniform(0, 24, (rows, count))).astype(np.int64) - 1
    return elements, group_scale, channel_scale, weights


def play(p, jobs, **options):
    """Of every job, [count][part][transfer] the words of the bench's sums."""
    bench = Bench(p)
    rows, row_weights, numbers = {"data": [], "user": [], "last": []}, [], []
    fill = p.row_transfers * p.lanes - p.head_dim
    for elements, group_scale, channel_scale, weights in jobs:
        groups = len(group_scale)
        scales = np.repeat(group_scale, p.group, axis=1)[:, : p.head_dim]
        scales = np.concatenate((scales, np.broadcast_to(channel_scale, (len(elements) - groups, p.head_dim))))
        padded = np.pad(elements, ((0, 0), (0, fill)), constant_values=99).reshape(-1, p.lanes)
        bits = np.pad(scales.view(np.uint16), ((0, 0), (0, fill)), constant_values=0x7E00).reshape(-1, p.lanes)
        layout = bench.rows.payload.shape()
        rows["data"] += words(layout["data"].shape, padded.tolist())
        rows["user"] += words(layout["user"].shape, bits.tolist())
        rows["last"] += ([0] * (p.row_transfers - 1) + [1]) * len(elements)
        row_weights += weights.reshape(-1).tolist()
        number = {"count": weights.shape[1], "group_rows": groups, "channel_rows": len(elements) - groups}
        numbers.append(number | {"row_weights": weights.size})
    inputs = {
        "job": {"data": words(bench.job.payload.shape(), numbers)},
        "rows": rows,
        "row_weights": {"data": row_weights},
    }
    count = sum(3 * p.row_transfers * number["count"] for number in numbers)
    stimulus = Stimulus(inputs, {"sums": count}, status=["error"])
    watched = asserted_memories if options.get("simulator", "amaranth") == "amaranth" else nullcontext
    with watched():
        trace = simulate(lambda: Bench(p), "value_rows", stimulus, **({"simulator": "amaranth"} | options))
    assert trace.status == {"error": 0}
    layout, text = bench.sums.payload.shape(), iter(trace.transfers["sums"]["data"])
    return [
        [[[layout.from_bits(next(text)) for _ in range(p.row_transfers)] for _ in range(3)] for _ in range(n["count"])]
        for n in numbers
    ]


def check(p, jobs, **options):
    """Holds the sums of all jobs against the golden ones."""
    for (elements, group_scale, channel_scale, weights), got in zip(jobs, play(p, jobs, **options), strict=True):
        groups, count = len(group_scale), weights.shape[1]
        golden = weighted_rows(
            *(torch.from_numpy(part) for part in (weights[:groups].T.copy(), elements[:groups], group_scale)),
            group=p.group,
        ).values()
        exact = weights[groups:].T @ elements[groups:].astype(np.int64)
        for query in range(count):
            lanes = [
                [(word, lane) for word in words_of_part for lane in range(p.lanes)][: p.head_dim]
                for words_of_part in got[query]
            ]
            assert got[query][0][0].total == weights[:, query].sum()
            if groups:
                sums = [word.look.sums[lane] * 2.0 ** (word.look.place - PLACE_OFFSET) for word, lane in lanes[0]]
                assert sums == golden[query].tolist()
            if groups < len(elements):
                low, high = ([word.look.sums[lane] >> GUARD_BITS for word, lane in part] for part in lanes[1:])
                assert [a + (b << HALF_WEIGHT) for a, b in zip(low, high, strict=True)] == exact[query].tolist()
                scales = [word.scales[lane] for word, lane in lanes[2]]
                assert scales == channel_scale.view(np.uint16).tolist()


SMALL = {"group": 8, "rows": 4, "cols": 2, "capacity": 32, "sinks": 4}

CASES = [
    ({"head_dim": 16, "lanes": 4, "queries": 2}, [(2, 2, 3), (1, 0, 2), (2, 3, 0)]),
    ({"head_dim": 6, "lanes": 4, "queries": 3}, [(3, 4, 7), (1, 1, 0)]),
    ({"head_dim": 8, "lanes": 8, "queries": 1}, [(1, 2, 7), (1, 0, 1)]),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_sums_are_those_of_the_golden_model(number):
    shape, jobs = CASES[number]
    p, rng = AttentionParameters(**SMALL | shape), np.random.default_rng((SEED, number))
    check(p, [random_rows(rng, p, *job) for job in jobs], stall=(0, 0.3, 0.9)[number % 3])


def test_the_largest_sums_fit():
    p = AttentionParameters(**SMALL | {"head_dim": 8, "lanes": 8, "queries": 1})
    weights = np.full((32, 1), (1 << 24) - 1, np.int64)
    elements = np.full((32, 8), -128, np.int8)
    job = elements, np.full((25, 1), 1.0, np.float16), np.full(8, 65504.0, np.float16), weights
    check(p, [job])


def test_no_rows_are_done_at_once():
    p = AttentionParameters(**SMALL | {"head_dim": 8, "lanes": 8, "queries": 1})
    empty = np.zeros((0, 8), np.int8), np.zeros((0, 1), np.float16), np.ones(8, np.float16), np.zeros((0, 1), np.int64)
    check(p, [empty])


def test_a_reset_in_the_middle_leaves_nothing_behind():
    p = AttentionParameters(**SMALL | {"head_dim": 16, "lanes": 4, "queries": 2})
    check(p, [random_rows(np.random.default_rng(SEED), p, 2, 3, 3)], reset=Reset(again_at=60))


def test_a_fault_is_seen(monkeypatch):
    monkeypatch.setattr(value_rows, "HALF_WEIGHT", 11)
    p = AttentionParameters(**SMALL | {"head_dim": 8, "lanes": 8, "queries": 1})
    with pytest.raises(AssertionError):
        check(p, [random_rows(np.random.default_rng(SEED), p, 1, 0, 3)])
