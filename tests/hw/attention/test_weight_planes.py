"""What the INT8 groups of weights leave, and the sum of all weights, against exact fractions."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from group_streams import words
from memory_collisions import asserted_memories

from kvant.golden.attention.engine import FRACTION, window_groups, windows_total
from kvant.hw.attention import weight_planes
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.attention.weight_planes import WeightPlanes
from kvant.hw.attention.weight_sum import WeightSum
from kvant.hw.linear.activation_buffer import ActivationBuffer
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

SEED = 20261130


class Bench(wiring.Component):
    """Planes, the quantiser of the linear path behind them, and the sums; `totals` asks for them at the end."""

    def __init__(self, p):
        self.p = p
        self.planes = WeightPlanes(p)
        job = data.StructLayout({"count": range(p.queries + 1), "windows": 8})
        super().__init__(
            {
                "job": In(stream.Signature(job)),
                "x": In(stream.Signature(self.planes.i.payload.shape())),
                "o": Out(stream.Signature(self.planes.o.payload.shape())),
                "totals": Out(stream.Signature(p.denominator_width)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.planes = planes = self.planes
        m.submodules.sums = sums = WeightSum(p)
        m.submodules.buffer = buffer = ActivationBuffer(p.linear)
        wiring.connect(m, wiring.flipped(self.x), planes.i)
        job, start, groups = Signal(self.job.payload.shape()), Signal(), Signal(16)
        taken = buffer.xq.valid & buffer.xq.ready
        m.d.comb += [
            self.o.payload.eq(planes.o.payload),
            self.o.valid.eq(planes.o.valid & buffer.x.ready),
            planes.o.ready.eq(self.o.ready & buffer.x.ready),
            buffer.x.payload.eq(planes.o.payload),
            buffer.x.valid.eq(planes.o.valid & self.o.ready),
            buffer.start.eq(start),
            buffer.tokens.eq(job.count << 1),
            buffer.groups.eq(job.windows),
            buffer.tail.eq(p.group),
            buffer.xq.ready.eq(1),
            planes.start.eq(start),
            planes.count.eq(job.count),
            planes.valid.eq(taken),
            planes.xq.eq(buffer.xq.payload),
            sums.start.eq(start),
            sums.count.eq(job.count),
            sums.valid.eq(taken),
            sums.xq.eq(buffer.xq.payload),
        ]
        begun, waited, query = Signal(), Signal(range(sums.latency + 1)), Signal(range(p.queries + 1))
        with m.If(self.job.valid & ~begun):
            m.d.comb += self.job.ready.eq(1)
            m.d.sync += [job.eq(self.job.payload), begun.eq(1)]
        begun_now = Signal()
        m.d.sync += begun_now.eq(begun)
        m.d.comb += start.eq(begun & ~begun_now)
        with m.If(taken & buffer.xq.payload.last):
            m.d.sync += groups.eq(groups + 1)
        with m.If(begun & (groups == job.count * job.windows * 2) & (waited != sums.latency)):
            m.d.sync += waited.eq(waited + 1)
        m.d.comb += [
            sums.query.eq(query),
            self.totals.payload.eq(sums.total),
            self.totals.valid.eq((waited == sums.latency) & (query != job.count)),
        ]
        with m.If(self.totals.valid & self.totals.ready):
            m.d.sync += query.eq(query + 1)
        return m


def play(p, w, **options):
    """Transfers as halves [windows, 2, queries, G], and totals of the queries, of weights i64 [queries, tokens]."""
    count, tokens = w.shape
    windows = tokens // p.group
    halves = (w / 512).astype(np.float16).view(np.uint16).reshape(count, windows, -1, p.x_lanes).transpose(1, 0, 2, 3)
    bench = Bench(p)
    inputs = {
        "job": {"data": words(bench.job.payload.shape(), [{"count": count, "windows": windows}])},
        "x": {"data": words(bench.x.payload.shape()["data"].shape, halves.reshape(-1, p.x_lanes).tolist())},
    }
    expect = {"o": 2 * count * tokens // p.x_lanes, "totals": count}
    watched = asserted_memories if options.get("simulator", "amaranth") == "amaranth" else nullcontext
    with watched():
        trace = simulate(lambda: Bench(p), "planes", Stimulus(inputs, expect), **({"simulator": "amaranth"} | options))
    lanes = [word >> 16 * k & 0xFFFF for word in trace.transfers["o"]["data"] for k in range(p.x_lanes)]
    return np.array(lanes, np.uint16).view(np.float16).reshape(windows, 2, count, p.group), trace.transfers["totals"]


def check(p, w, **options):
    """Holds both against the golden planes."""
    count, tokens = w.shape
    got, totals = play(p, w, **options)
    planes = window_groups(torch.from_numpy(w), windows=tokens // p.group, sinks=0, group=p.group, planes=2)
    first = (w / 512).astype(np.float16).astype(np.float64).reshape(count, -1, p.group)
    scale = planes[0].scale.to(torch.float64).numpy()[..., None]
    left = first - planes[0].q.numpy().reshape(first.shape) * scale
    expected = np.stack((first, left), 1).transpose(2, 1, 0, 3).astype(np.float16)
    assert (got == expected).all()
    assert totals["data"] == sum(windows_total(plane, p.group) for plane in planes).tolist()
    assert FRACTION == 24


SHAPES = [
    {"group": 8, "head_dim": 8, "rows": 8, "cols": 4, "queries": 1},
    {"group": 16, "head_dim": 16, "rows": 4, "cols": 4, "queries": 2, "quant_lanes": 2},
    {"group": 8, "head_dim": 8, "rows": 2, "cols": 4, "queries": 3, "quant_lanes": 1},
]


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_the_second_plane_is_what_the_first_one_leaves(number):
    p = AttentionParameters(capacity=4 * SHAPES[number]["group"], lanes=4, **SHAPES[number])
    rng = np.random.default_rng((SEED, number))
    w = np.floor(2.0 ** (24 - rng.exponential(5, (p.queries, 3 * p.group)))).astype(np.int64) - 1
    w[:, p.group : 2 * p.group] = rng.integers(0, 40, (p.queries, p.group))  # what is left lies among the subnormals
    w[0, :3] = (1 << 24) - 1, 0, 1
    check(p, w, stall=(0, 0.3, 0.9)[number % 3])


def test_windows_without_weights_count_nothing():
    p = AttentionParameters(capacity=32, lanes=4, **SHAPES[0])
    check(p, np.zeros((1, 16), np.int64))


def test_a_reset_in_the_middle_leaves_nothing_behind():
    p = AttentionParameters(capacity=32, lanes=4, **SHAPES[0])
    w = np.random.default_rng(SEED).integers(0, 1 << 24, (1, 24))
    check(p, w, reset=Reset(again_at=30))


def test_a_fault_is_seen(monkeypatch):
    monkeypatch.setattr(weight_planes, "FP16_MANTISSA", 12)  # rounds a bit too late
    p = AttentionParameters(capacity=32, lanes=4, **SHAPES[0])
    with pytest.raises(AssertionError):
        check(p, np.random.default_rng(SEED).integers(0, 1 << 24, (1, 24)))
