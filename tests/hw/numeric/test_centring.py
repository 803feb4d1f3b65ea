"""Centring against float64, in which the difference of two fp16 numbers is exact and numpy rounds it once."""

import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator

from kvant.hw.numeric import centring
from kvant.hw.numeric.centring import Centring, CentringLane
from kvant.hw.parameters import ParameterError
from kvant.sim.simulate import simulate
from kvant.sim.streams import Stimulus
from kvant.sim.words import pack_words, unpack_words

# A component whose parameters are refused is never elaborated.
pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20261130
INFINITY, NAN, LARGEST, MINUS = 0x7C00, 0x7E00, 0x7BFF, 0x8000
CORNERS = [
    *(0x0000, 0x0001, 0x0002, 0x0003, 0x01FF, 0x0200, 0x03FE, 0x03FF),  # 0 and subnormal
    *(0x0400, 0x0401, 0x07FF, 0x0800, 0x0BFF, 0x0C00, 0x0C01),  # where normal numbers begin
    *(0x3BFF, 0x3C00, 0x3C01, 0x3FFF, 0x4000, 0x67FF, 0x6800, 0x6801),  # about 1, and where units exceed 1
    *(0x7800, 0x77FF, 0x7400, 0x4C00, 0x4BFF, 0x7BFE, LARGEST),  # the largest, and half its last place
]
SPECIAL = [INFINITY, NAN, 0x7C01, 0x7FFF]


class Stream(wiring.Component):
    """A `Centring` between streams that do not wait, so that a simulator of Verilog plays it."""

    def __init__(self, lanes):
        self.lanes = lanes
        elements = data.ArrayLayout(16, lanes)
        operands = data.StructLayout({"data": elements, "user": elements})
        result = data.StructLayout({"data": elements, "user": lanes})
        super().__init__({"i": In(stream.Signature(operands)), "o": Out(stream.Signature(result, always_ready=True))})

    def elaborate(self, platform):
        m = Module()
        m.submodules.unit = unit = Centring(self.lanes)
        valids = Signal(unit.latency)
        m.d.sync += valids.eq(valids << 1 | self.i.valid)
        m.d.comb += [
            self.i.ready.eq(1),
            unit.x.eq(self.i.payload.data),
            unit.mean.eq(self.i.payload.user),
            self.o.valid.eq(valids[-1]),
            self.o.payload.data.eq(unit.y),
            self.o.payload.user.eq(unit.nonfinite),
        ]
        return m


def value(patterns):
    return np.asarray(patterns, np.uint16).view(np.float16).astype(np.float64)


def expected(x, mean):
    """(y, nonfinite) of fp16 patterns; the sign of a difference of 0 is positive."""
    x = np.asarray(x, np.int64)
    special = x >> 10 & 31 == 31
    magnitude = np.where(special, np.where(x & 1023, 0, LARGEST), x & 0x7FFF)
    difference = value(magnitude | x & MINUS) - value(mean)
    assert (np.abs(difference) * 2**24 % 1 == 0).all()
    with np.errstate(over="ignore"):
        rounded = difference.astype(np.float16)
    y = np.clip(rounded, -65504, 65504).view(np.uint16)
    return np.where(y == MINUS, 0, y), special


def centred(pairs, simulator="amaranth", lanes=1):
    """(y, nonfinite) of [n, 2] pairs through the hardware."""
    padded = np.resize(pairs, (-(-len(pairs) // lanes) * lanes, 2)).reshape(-1, lanes, 2)
    stimulus = Stimulus(
        {"i": {"data": pack_words(padded[..., 0], 16), "user": pack_words(padded[..., 1], 16)}},
        expect={"o": len(padded)},
    )
    trace = simulate(lambda: Stream(lanes), "centring_stream", stimulus, simulator=simulator)
    assert {out - given for given, out in zip(trace.cycles["i"], trace.cycles["o"], strict=True)} == {Centring.latency}
    y = unpack_words(trace.transfers["o"]["data"], lanes, 16).reshape(-1)[: len(pairs)]
    nonfinite = unpack_words(trace.transfers["o"]["user"], lanes, 1).reshape(-1)[: len(pairs)]
    return y, nonfinite


def check(pairs, **options):
    pairs = np.asarray(pairs)
    y, nonfinite = centred(pairs, **options)
    expected_y, special = expected(pairs[:, 0], pairs[:, 1])
    wrong = np.flatnonzero((y != expected_y) | (nonfinite != special))
    assert not len(wrong), [(hex(pairs[k, 0]), hex(pairs[k, 1]), hex(int(y[k])), hex(expected_y[k])) for k in wrong[:5]]


def with_signs(magnitudes):
    return [sign | magnitude for magnitude in magnitudes for sign in (0, MINUS)]


def corner_pairs():
    """Every corner with every finite one, both signs."""
    return np.array([(x, mean) for x in with_signs(CORNERS + SPECIAL) for mean in with_signs(CORNERS)])


def dense_pairs(rng, count):
    """Random pairs: of any exponents, of exponents so near that much cancels, and of differences at a tie."""
    x = rng.integers(0, 1 << 16, count)
    mean = rng.integers(0, LARGEST + 1, count) | rng.integers(0, 2, count) << 15
    near = np.clip((x & 0x7FFF) + rng.integers(-3000, 3001, count), 0, LARGEST) | rng.integers(0, 2, count) << 15
    # A mean that is an odd multiple of half the last place of x: the difference lies halfway wherever it keeps its
    # exponent.
    exponent = np.clip((x >> 10 & 31) - 11, 0, 30)
    tie = exponent << 10 | (1 << rng.integers(0, 10, count)) & 1023 | rng.integers(0, 2, count) << 15
    return np.stack((x, np.choose(rng.integers(0, 3, count), (mean, near, tie))), 1)


def test_every_pair_of_corner_classes_is_exact_or_rounded_once():
    check(corner_pairs(), simulator="verilator", lanes=16)


def test_a_dense_sample_is_exact_or_rounded_once():
    check(dense_pairs(np.random.default_rng(SEED), 400_000), simulator="verilator", lanes=16)


def test_every_element_less_a_mean():
    """All 65,536 patterns, each with a mean of its own."""
    rng = np.random.default_rng(SEED + 1)
    pairs = dense_pairs(rng, 1 << 16)
    pairs[:, 0] = np.arange(1 << 16)
    check(pairs, simulator="verilator", lanes=16)


def test_a_mean_of_zero_changes_no_finite_element():
    x = np.arange(0, LARGEST + 1, 37)
    for mean in (0, MINUS):
        y, nonfinite = centred(np.stack((x, np.full_like(x, mean)), 1))
        assert (y == x).all() and not nonfinite.any()


@pytest.mark.parametrize("simulator", ["amaranth", "icarus"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_simulators_agree(simulator, lanes):
    rng = np.random.default_rng(SEED + 2)
    check(
        np.concatenate((rng.permutation(corner_pairs())[:300], dense_pairs(rng, 900))), simulator=simulator, lanes=lanes
    )


@pytest.mark.parametrize(
    ("x", "mean", "y", "nonfinite"),
    [
        (NAN, 0x3C00, 0xBC00, 1),  # 0 - 1
        (MINUS | NAN, 0, 0, 1),
        (INFINITY, 0, LARGEST, 1),
        (MINUS | INFINITY, 0x5000, MINUS | LARGEST, 1),  # -65504 - 32 rounds beyond, and saturates
        (LARGEST, MINUS | 0x4BFF, LARGEST, 0),  # 65504 + 15.99: below the tie
        (LARGEST, MINUS | 0x4C00, LARGEST, 0),  # 65504 + 16: the tie would round to an infinity
        (LARGEST, MINUS | LARGEST, LARGEST, 0),
        (MINUS, 0, 0, 0),  # -0 - 0
        (0x3C00, 0x3C00, 0, 0),
        (0x0400, 0x0001, 0x03FF, 0),  # from normal to subnormal
        (0x0001, 0x8001, 0x0002, 0),
        (0x03FF, 0x8001, 0x0400, 0),  # from subnormal to normal
        (0x3C00, 0x9000, 0x3C00, 0),  # 1 + 2**-11: tie to even
        (0x3C01, 0x9000, 0x3C02, 0),
        (0x3C00, 0x9001, 0x3C01, 0),
        (0x3C00, 0x0C00, 0x3C00, 0),  # 1 - 2**-12: tie to even, downwards
        (0x3C00, 0x0C01, 0x3BFF, 0),
    ],
)
def test_named_cases(x, mean, y, nonfinite):
    assert expected(x, mean) == (y, nonfinite)
    assert centred(np.array([[x, mean]])) == (y, nonfinite)


def test_a_lost_sticky_bit_is_caught(monkeypatch):
    real = centring.shift_right_sticky
    monkeypatch.setattr(centring, "shift_right_sticky", lambda *args: (real(*args)[0], Signal()))
    with pytest.raises(AssertionError):
        check(dense_pairs(np.random.default_rng(SEED), 2000))


@pytest.mark.parametrize("lanes", [0, True, 2.0])
def test_illegal_lanes_are_refused(lanes):
    with pytest.raises(ParameterError, match=f"lanes = {lanes!r}: legal is an integer from 1"):
        Centring(lanes)


def test_a_lane_works_alone():
    unit = CentringLane()

    async def bench(ctx):
        ctx.set(unit.x, 0x4200)  # 3 - 1
        ctx.set(unit.mean, 0x3C00)
        await ctx.tick().repeat(unit.latency)
        assert ctx.get(unit.y) == 0x4000 and not ctx.get(unit.nonfinite)

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
