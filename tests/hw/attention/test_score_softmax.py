"""Logarithms and weights of a command's keys against the golden softmax: biases, limits, sinks, stalls."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from group_streams import words
from memory_collisions import asserted_memories

from kvant.golden.attention.engine import biased_logarithms
from kvant.golden.attention.softmax import distance_logarithms, reference, score_logarithms, weights
from kvant.golden.numeric.rounding import fp16_to_bits
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.attention.score_softmax import PositionBias, QueryLimits, ScoreSoftmax, WeightToHalf
from kvant.hw.linear.engine import output
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

SEED = 20261130


class Bench(wiring.Component):
    """The unit with its plain inputs in a stream; the second pass begins when the scores are in."""

    def __init__(self, p):
        self.p = p
        self.unit = unit = ScoreSoftmax(p)
        names = ("count", "tokens", "sinks", "sink_tiles", "windows", "int8_values")
        self.names = names
        job = {name: getattr(unit, name).shape() for name in names}
        job["limits"] = data.ArrayLayout(QueryLimits(p), p.queries)
        super().__init__(
            {
                "job": In(stream.Signature(data.StructLayout(job))),
                "done": Out(stream.Signature(1)),
                "y": In(stream.Signature(unit.y.payload.shape())),
                "x": Out(stream.Signature(unit.x.payload.shape())),
                "row_weights": Out(stream.Signature(unit.row_weights.payload.shape())),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.unit = unit = self.unit
        job = Signal(self.job.payload.shape())
        wiring.connect(m, unit.x, wiring.flipped(self.x))
        wiring.connect(m, unit.row_weights, wiring.flipped(self.row_weights))
        m.d.comb += [getattr(unit, name).eq(job[name]) for name in self.names]
        m.d.comb += [unit.limits[q].eq(job.limits[q]) for q in range(self.p.queries)]
        taking = Signal()
        m.d.comb += [
            unit.y.payload.eq(self.y.payload),
            unit.y.valid.eq(self.y.valid & taking),
            self.y.ready.eq(unit.y.ready & taking),
        ]
        with m.FSM():
            with m.State("JOB"):
                m.d.comb += self.job.ready.eq(1)
                m.d.sync += job.eq(self.job.payload)
                with m.If(self.job.valid):
                    m.next = "START"
            with m.State("START"):
                m.d.comb += unit.start.eq(1)
                m.next = "SCORES"
            with m.State("SCORES"):
                m.d.comb += taking.eq(~unit.scored)
                with m.If(unit.scored):
                    m.d.comb += unit.go.eq(1)
                    m.next = "DONE"
            with m.State("DONE"):  # until the bench says so, whose streams count the transfers
                m.d.comb += self.done.valid.eq(1)
        return m


def transfers(p, scores, sinks):
    """Scores f32 [queries, tokens] in the order of the key job; NaN where nothing may look."""
    linear = p.linear
    count, tokens = scores.shape
    filled = np.full((count, -(-tokens // p.cols) * p.cols), 0x7FC00000, np.uint32)
    filled[:, :tokens] = scores.view(np.uint32)
    parts = [filled]
    if sinks:
        first = np.full((count, -(-sinks // (p.key_tiles * p.cols)) * p.key_tiles * p.cols), 0x7FC00000, np.uint32)
        first[:, :sinks] = filled[:, :sinks]
        filled = filled.copy()
        filled[:, :sinks] = 0x7FC00000
        parts = [first, filled]
    rows = []
    for part in parts:
        lanes = part.reshape(count, -1, linear.units, linear.unit_cols).transpose(1, 0, 3, 2).reshape(-1, linear.units)
        rows += lanes.tolist()
    ends = [0] * (len(rows) - 1) + [1]
    return {"data": words(output(linear)["data"].shape, rows), "keep": [0] * len(rows), "last": ends}


def play(p, scores, *, sinks=0, first=None, end=None, slope=None, int8_values=False, **options):
    """Halves [windows, queries, G] and weights [rows, queries]."""
    count, tokens = scores.shape
    first = [0] * count if first is None else first
    end = [tokens] * count if end is None else end
    slope = np.zeros(count, np.float16) if slope is None else np.asarray(slope, np.float16)
    windows = 0 if int8_values else tokens // p.group
    limits = [
        {"first": a, "end": b, "slope": int(s)} for a, b, s in zip(first, end, slope.view(np.uint16), strict=True)
    ] + [{"first": 0, "end": 0, "slope": 0}] * (p.queries - count)
    bench = Bench(p)
    sink_tiles = -(-sinks // (p.key_tiles * p.cols)) * p.key_tiles
    job = {"count": count, "tokens": tokens, "sinks": sinks, "sink_tiles": sink_tiles, "windows": windows}
    job |= {"int8_values": int(int8_values), "limits": limits}
    fresh = tokens - windows * p.group
    rows = (fresh if int8_values else sinks + fresh) * count
    halves = windows * count * p.group // p.x_lanes
    expect = {name: number for name, number in (("x", halves), ("row_weights", rows)) if number}
    inputs = {"job": {"data": words(bench.job.payload.shape(), [job])}, "y": transfers(p, scores, sinks)}
    watched = asserted_memories if options.get("simulator", "amaranth") == "amaranth" else nullcontext
    with watched():
        trace = simulate(lambda: Bench(p), "softmax", Stimulus(inputs, expect), **({"simulator": "amaranth"} | options))
    lanes = [word >> 16 * k & 0xFFFF for word in trace.transfers["x"]["data"] for k in range(p.x_lanes)]
    x = np.array(lanes, np.uint16).reshape(windows, count, p.group)
    return x, np.array(trace.transfers["row_weights"]["data"], np.int64).reshape(-1, count)


def expected(p, scores, *, sinks=0, first=None, end=None, slope=None, int8_values=False):
    """What `play` gives, by the golden model."""
    count, tokens = scores.shape
    first = torch.tensor([0] * count if first is None else first)
    end = torch.tensor([tokens] * count if end is None else end)
    slope = None if slope is None else torch.tensor(slope, dtype=torch.float16)
    z = biased_logarithms(score_logarithms(torch.from_numpy(scores), p.head_dim), end=end, slope=slope)
    token = torch.arange(tokens)
    seen = (token >= first[:, None]) & (token < end[:, None])
    w = weights(z, reference(z, seen), seen)
    windows = 0 if int8_values else tokens // p.group
    hidden = w.clone()
    if not int8_values:
        hidden[:, :sinks] = 0
    x = (hidden[:, : windows * p.group].to(torch.float64) / 512).to(torch.float16)
    x = fp16_to_bits(x).reshape(count, windows, p.group).transpose(0, 1)
    rows = w if int8_values else torch.cat((w[:, :sinks], hidden[:, windows * p.group :]), 1)
    return x.numpy().astype(np.uint16), rows.T.numpy()


def random_scores(rng, count, tokens, spread=4.0):
    return (rng.standard_normal((count, tokens)) * spread).astype(np.float32)


SMALL = {"group": 8, "head_dim": 8, "rows": 4, "cols": 4, "lanes": 4, "capacity": 32, "sinks": 3}

CASES = [
    (SMALL | {"queries": 2}, {"tokens": 21}),
    (SMALL | {"queries": 2, "quant_lanes": 1}, {"tokens": 16, "sinks": 3, "first": [0, 5], "end": [16, 9]}),
    (SMALL | {"queries": 3, "quant_lanes": 2}, {"tokens": 19, "sinks": 2, "slope": [0.0, 1.25, 700.0]}),
    (SMALL | {"queries": 1}, {"tokens": 5, "sinks": 3}),
    (SMALL | {"queries": 2}, {"tokens": 12, "sinks": 3, "int8_values": True, "end": [12, 0]}),
    (SMALL | {"queries": 1}, {"tokens": 1}),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_weights_are_those_of_the_golden_model(number):
    shape, case = CASES[number]
    p, case = AttentionParameters(**shape), dict(case)
    scores = random_scores(np.random.default_rng((SEED, number)), p.queries, case.pop("tokens"))
    x, rows = play(p, scores, stall=(0, 0.3, 0.9)[number % 3], **case)
    golden_x, golden_rows = expected(p, scores, **case)
    assert (x == golden_x).all() and (rows == golden_rows).all()


def test_extreme_scores_saturate_and_vanish_as_the_golden_ones():
    p = AttentionParameters(**SMALL | {"queries": 1})
    scores = np.array([[2.0**57, -(2.0**57), 0, 2.0**-48, -(2.0**-48), 2.0**38, 2.0**39, 1]], np.float32)
    for chosen in (scores, scores[:, 2:], scores[:, 2:5], -scores):
        rows = play(p, np.ascontiguousarray(chosen), int8_values=True)[1]
        assert (rows == expected(p, np.ascontiguousarray(chosen), int8_values=True)[1]).all()


def test_a_reset_in_the_middle_leaves_nothing_behind():
    p = AttentionParameters(**SMALL | {"queries": 2})
    scores = random_scores(np.random.default_rng(SEED), 2, 21)
    x, rows = play(p, scores, reset=Reset(again_at=40))
    golden_x, golden_rows = expected(p, scores)
    assert (x == golden_x).all() and (rows == golden_rows).all()


class Unit(wiring.Component):
    """A unit of constant latency between two streams that never wait."""

    def __init__(self, factory, inputs, result):
        self.factory, self.inputs, self.result = factory, inputs, result
        unit = factory()
        layout = data.StructLayout({name: getattr(unit, name).shape() for name in inputs})
        super().__init__(
            {
                "i": In(stream.Signature(layout, always_ready=True)),
                "o": Out(stream.Signature(getattr(unit, result).shape(), always_ready=True)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.unit = unit = self.factory()
        m.d.comb += [getattr(unit, name).eq(self.i.payload[name]) for name in self.inputs]
        valids = Signal(unit.latency)
        m.d.sync += valids.eq(valids << 1 | self.i.valid)
        m.d.comb += [self.o.valid.eq(valids[-1]), self.o.payload.eq(getattr(unit, self.result))]
        return m


def results(factory, inputs, result, rows):
    """What a `Unit` makes of rows."""
    bench = Unit(factory, inputs, result)
    stimulus = Stimulus({"i": {"data": words(bench.i.payload.shape(), rows)}}, {"o": len(rows)})
    return simulate(lambda: bench, "unit", stimulus, simulator="amaranth").transfers["o"]["data"]


def test_biases_are_rounded_once():
    rng = np.random.default_rng(SEED)
    slopes = np.concatenate(([0, 1, 0x3FF, 0x400, 0x7BFF], rng.integers(0, 0x7C00, 400))).astype(np.uint16)
    distances = np.concatenate(([4095, 1, 3, 0, 4095], rng.integers(0, 4096, 400)))
    rows = [{"slope": int(s), "distance": int(n)} for s, n in zip(slopes, distances, strict=True)]
    got = results(lambda: PositionBias(12), ("slope", "distance"), "bias", rows)
    golden = distance_logarithms(torch.from_numpy(slopes.view(np.float16)), torch.from_numpy(distances))
    assert got == golden.tolist()


def test_weights_become_the_nearest_halves():
    rng = np.random.default_rng(SEED)
    lengths = rng.integers(0, 25, 400)
    numbers = [0, 1, 2047, 2049, 2051, 4095, (1 << 24) - 1, (1 << 24) - 4096, (1 << 24) - 4097]
    numbers += [int(n) & ((1 << int(bits)) - 1) for n, bits in zip(rng.integers(0, 1 << 24, 400), lengths, strict=True)]
    got = results(WeightToHalf, ("w",), "x", [{"w": n} for n in numbers])
    assert got == (np.array(numbers) / 512).astype(np.float16).view(np.uint16).tolist()
