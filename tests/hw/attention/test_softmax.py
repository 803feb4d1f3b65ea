"""Weights of coded keys against the golden softmax: frame shapes, references of other parts, stalls, resets."""

import math
import random
from contextlib import nullcontext

import pytest
import torch
from amaranth.hdl import Const, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from group_streams import words
from memory_collisions import asserted_memories
from verilog_checks import lint, yosys

from kvant.golden.attention import softmax as golden
from kvant.hw.attention import softmax as hardware
from kvant.hw.attention.layouts import FrameScores
from kvant.hw.attention.scaler import LOG_WIDTH, Factor
from kvant.hw.attention.softmax import SoftmaxWeights, WeightBeat
from kvant.hw.emit import emit
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

SEED = 20261130

# frames of 1, 2, 4 and 8 tokens
SHAPES = [
    {"head_dim": 8, "q_parallel": 1, "port_bits": 32},
    {"head_dim": 12, "q_parallel": 2, "port_bits": 32},
    {"head_dim": 6, "subspace": 2, "q_parallel": 1, "port_bits": 32},
    {"head_dim": 8, "subspace": 8, "port_bits": 64, "q_parallel": 2},
]


class Bench(wiring.Component):
    """The unit with a stream of references in place of `go`, and a stream of what it says at the end of a scan."""

    def __init__(self, p):
        self.p = p
        queries = p.q_parallel
        self.unit = SoftmaxWeights(p)
        log = data.ArrayLayout(signed(LOG_WIDTH), queries)
        end = data.StructLayout({"z_max": log, "total": data.ArrayLayout(p.bin_width, queries)})
        super().__init__(
            {
                "scores": In(stream.Signature(FrameScores(p))),
                "above": In(stream.Signature(log)),
                "factors": In(data.ArrayLayout(Factor(), queries)),
                "weights": Out(stream.Signature(WeightBeat(p))),
                "end": Out(stream.Signature(end)),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.unit = unit = self.unit
        wiring.connect(m, wiring.flipped(self.scores), unit.scores)
        wiring.connect(m, unit.weights, wiring.flipped(self.weights))
        running, waiting = Signal(), Signal()
        m.d.comb += [
            self.above.ready.eq(unit.max_valid & ~waiting),
            unit.go.eq(self.above.valid & ~waiting),
            self.end.valid.eq(waiting),
            self.error.eq(unit.error),
        ]
        for q in range(self.p.q_parallel):
            held = Signal(signed(LOG_WIDTH), name=f"held_{q}")
            # what the stream says is how far other keys are above the scan's largest
            reference = Signal(signed(LOG_WIDTH), name=f"reference_{q}")
            m.d.comb += [
                reference.eq(unit.z_max[q] + self.above.payload[q]),
                unit.factor[q].eq(self.factors[q]),
                unit.reference[q].eq(Mux(running, held, reference)),
            ]
            with m.If(running & unit.done):
                m.d.sync += [
                    self.end.payload.z_max[q].eq(unit.z_max[q]),
                    self.end.payload.total[q].eq(unit.total[q]),
                ]
            with m.If(unit.go & unit.max_valid):
                m.d.sync += held.eq(reference)
        with m.If(unit.go & unit.max_valid):
            m.d.sync += running.eq(1)
        with m.If(running & unit.done):
            m.d.sync += [running.eq(0), waiting.eq(1)]
        with m.If(self.end.valid & self.end.ready):
            m.d.sync += waiting.eq(0)
        return m


def random_scores(rng, p, tokens, spread):
    return [[rng.randrange(-spread, spread + 1) for _ in range(p.q_parallel)] for _ in range(tokens)]


def beats(p, scans):
    """Transfers of scores; lanes of tokens that do not exist hold the largest score."""
    rows = []
    for scan in scans:
        for first in range(0, len(scan), p.frame):
            tokens = scan[first : first + p.frame]
            junk = [[(1 << (p.score_width - 1)) - 1] * p.q_parallel] * (p.frame - len(tokens))
            rows.append(
                {"scores": tokens + junk, "count": len(tokens), "last": int(first + p.frame >= len(scan))},
            )
    return words(FrameScores(p), rows)


def exact_factors(numbers):
    """The golden factors of numbers: mantissas of 46 bits."""
    parts = [math.frexp(number) for number in numbers]
    return golden.Factor(
        torch.tensor([int(mantissa * (1 << 46)) for mantissa, _ in parts]),
        torch.tensor([exponent - 46 for _, exponent in parts]),
    )


def play(p, scans, above, factors, *, frames=None, error=0, **options):
    """Weights [tokens][queries] of each scan, and (z_max, total) of each, by the hardware; and the trace."""
    log = data.ArrayLayout(signed(LOG_WIDTH), p.q_parallel)
    frames = frames or sum(-(-len(scan) // p.frame) for scan in scans)
    numbers = zip(factors.mantissa.tolist(), factors.exponent.tolist(), strict=True)
    parts = [{"mantissa": mantissa, "exponent": exponent + golden.LOG_FRACTION} for mantissa, exponent in numbers]
    stimulus = Stimulus(
        {"scores": {"data": beats(p, scans)}, "above": {"data": words(log, above)}},
        {"weights": frames, "end": len(scans)},
        status=["error"],
        constants={"factors": words(data.ArrayLayout(Factor(), p.q_parallel), [parts])[0]},
    )
    watched = asserted_memories if options.get("simulator", "amaranth") == "amaranth" else nullcontext
    with watched():
        trace = simulate(lambda: Bench(p), "softmax", stimulus, **({"simulator": "amaranth"} | options))
    assert trace.status == {"error": error}
    got, scan = [], []
    layout = WeightBeat(p)
    for word in trace.transfers["weights"]["data"]:
        beat = layout.from_bits(word)
        scan += [list(beat.weights[token]) for token in range(p.frame)]
        if beat.last:
            got.append(scan)
            scan = []
    assert not scan
    layout = Bench(p).end.payload.shape()
    ends = [layout.from_bits(word) for word in trace.transfers["end"]["data"]]
    return got, [(list(end.z_max), list(end.total)) for end in ends], trace


def expected(p, scans, above, factors):
    got, ends = [], []
    for scan, more in zip(scans, above, strict=True):
        z = golden.logarithms(torch.tensor(scan).T, golden.Factor(*(part[:, None] for part in factors)))
        largest = golden.reference(z)
        w = golden.weights(z, largest + torch.tensor(more))
        padding = [[0] * p.q_parallel] * (-len(scan) % p.frame)
        got.append(w.T.tolist() + padding)
        ends.append((largest.tolist(), w.sum(-1).tolist()))
    return got, ends


def check(p, scans, above, factors, **options):
    got, ends, trace = play(p, scans, above, factors, **options)
    assert (got, ends) == expected(p, scans, above, factors)
    return trace


def example(p, lengths, seed=SEED, spread=20000):
    """Scans, distances of the reference, factors: numbers that make scores differ by some powers of two."""
    rng = random.Random(seed)
    scans = [random_scores(rng, p, n, rng.choice([1, 300, spread])) for n in lengths]
    above = [[rng.choice([0, rng.randrange(20 << 16)]) for _ in range(p.q_parallel)] for _ in lengths]
    return scans, above, exact_factors([rng.uniform(2, 40) / spread for _ in range(p.q_parallel)])


@pytest.mark.parametrize("stall", [0, 0.3, 0.9])
@pytest.mark.parametrize("shape", SHAPES, ids=["frame 1", "frame 2", "frame 4", "frame 8"])
def test_weights_are_those_of_the_golden_softmax(shape, stall):
    p = PqParameters(capacity=20, group=20, **shape)
    check(p, *example(p, [1, 5, 20, 2, 17]), stall=stall, timeout_cycles=4000)


@pytest.mark.parametrize("simulator", ["icarus", pytest.param("verilator", marks=pytest.mark.long)])
def test_the_verilog_gives_the_same(simulator):
    p = PqParameters(capacity=20, group=20, **SHAPES[1])
    check(p, *example(p, [1, 20, 9]), stall=0.3, simulator=simulator)


def test_equal_scores_and_extremes_have_equal_and_extreme_weights():
    p = PqParameters(capacity=16, group=16, **SHAPES[0])
    most = 1 << (p.score_width - 2)
    scans = [[[most]] * 16, [[most], [-most]] * 8, [[0]] * 3, [[-most]], [[most - k] for k in range(16)]]
    factor = exact_factors([1.0 / 16])
    got, _, _ = play(p, scans, [[0]] * len(scans), factor)
    assert got[0] == [[(1 << 24) - 1]] * 16
    assert got[1] == [[(1 << 24) - 1], [0]] * 8
    check(p, scans, [[0]] * len(scans), factor)
    check(p, scans, [[0]] * len(scans), exact_factors([0.0]))


def test_a_frame_goes_in_and_out_in_every_cycle_and_latencies_are_as_stated():
    p = PqParameters(capacity=40, group=40, **SHAPES[1])
    trace = check(p, *example(p, [40, 7]))
    unit = SoftmaxWeights(p)
    into, out, go = trace.cycles["scores"], trace.cycles["weights"], trace.cycles["above"]
    assert into[:20] == list(range(into[0], into[0] + 20))
    assert out[:20] == list(range(out[0], out[0] + 20))
    # the bench answers in the cycle in which the largest logarithm is there, and shows the end a cycle after `done`
    assert go == [into[19] + unit.peak_latency, into[23] + unit.peak_latency]
    assert out[0] == go[0] + unit.latency
    assert trace.cycles["end"] == [out[19] + unit.total_delay + 1, out[23] + unit.total_delay + 1]


@pytest.mark.parametrize("again_at", [3, 30, 60, 90])
def test_reset_in_the_middle_equals_a_cold_start(again_at):
    p = PqParameters(capacity=20, group=20, **SHAPES[2])
    check(p, *example(p, [20, 9]), reset=Reset(again_at=again_at))


def test_a_receiver_that_sleeps_changes_nothing():
    p = PqParameters(capacity=20, group=20, **SHAPES[1])
    check(p, *example(p, [20, 20]), stall={"weights": [1] * 300 + [0] * 7}, timeout_cycles=1000)


def test_a_scan_longer_than_the_buffer_is_an_error():
    p = PqParameters(capacity=8, group=8, **SHAPES[0])
    got, _, _ = play(p, [[[1]] * 9], [[0]], exact_factors([1.0]), frames=8, error=1)
    assert got == [[[(1 << 24) - 1]] * 8]


class TestSeededFaults:
    """A fault in the RTL makes the comparisons of this file fail."""

    def test_tokens_that_do_not_exist_are_seen(self, monkeypatch):
        monkeypatch.setattr(hardware, "Mux", lambda test, a, b: a if isinstance(b, Const) else Mux(test, a, b))
        p = PqParameters(capacity=20, group=20, **SHAPES[2])
        with pytest.raises(AssertionError):
            check(p, *example(p, [5, 9]))

    def test_a_largest_score_over_frames_alone_is_seen(self, monkeypatch):
        monkeypatch.setattr(hardware, "larger", lambda a, b: a)
        p = PqParameters(capacity=20, group=20, **SHAPES[1])
        with pytest.raises(AssertionError):
            check(p, [[[k, -k] for k in range(20)]], [[0, 0]], exact_factors([1.0, 1.0]))


def test_every_tool_is_silent(tmp_path):
    for name, shape in (("one", SHAPES[0]), ("four", SHAPES[2])):
        design = emit(SoftmaxWeights(PqParameters(capacity=64, **shape)), name)
        (tmp_path / f"{name}.sv").write_text(design.verilog)
        assert lint(tmp_path, f"{name}.sv", top=name) == ""
        checked = yosys(tmp_path, f"read_verilog -sv {name}.sv; hierarchy -check -top {name}; proc; check -assert")
        assert checked.returncode == 0, checked.stderr
