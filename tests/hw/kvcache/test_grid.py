"""Scale and limits of a group against exact fractions and the golden model."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from amaranth.hdl import Const
from group_streams import play

from kvant.golden.numeric.codes import requantized_scale
from kvant.hw.kvcache import grid
from kvant.hw.kvcache.grid import GridFit
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.numeric.codes import LINEAR, levels
from kvant.hw.parameters import ParameterError

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20261130
LARGEST_SCALE = int(np.float16(65504 / 127).view(np.uint16))


def fp16_value(bits):
    exponent, fraction = bits >> 10, bits & 1023
    mantissa = fraction | 1024 if exponent else fraction
    return mantissa * Fraction(2) ** (max(exponent, 1) - 25)


def nearest_fp16(value):
    """fp16 bits nearest to a non-negative fraction, ties to even."""
    units = value * 2**24
    places = max(0, int(units).bit_length() - 11)
    mantissa = round(units / (1 << places))  # of a Fraction: to even
    return mantissa if places == 0 else (places << 10) + mantissa


def expected(row, max_coefficient=127):
    """(limits, scale, zero, linear, error, coefficient, tag)."""
    a, peak, tag = row["coefficient"], row["peak"], row["tag"]
    if a != LINEAR and a > max_coefficient:
        return None, 0, 1, 0, 1, a, tag
    level = levels(a)
    limits = [peak * (level[k] + level[k + 1]) // (2 * level[7]) for k in range(7)]
    scale = nearest_fp16(fp16_value(row["scale"]) * peak / level[7])
    return limits, scale, int(scale == 0), int(a == LINEAR), 0, a, tag


def check(rows, *, interval=1, p=None, **options):
    p = p or CacheParameters()
    got, trace = play(lambda: GridFit(p, 6, interval), rows, **options)
    for view, row in zip(got, rows, strict=True):
        g = view.grid
        want = expected(row, p.max_coefficient)
        limits = want[0] and list(g.limits)
        assert (limits, g.scale, g.zero, g.linear, g.error, view.coefficient, view.tag) == want, row
    return trace


def random_rows(count, coefficients):
    """Scales of all sizes, subnormals and extremes included."""
    rng = random.Random(SEED)
    for tag in range(count):
        scale = rng.choice(
            [rng.randrange(1, 1 << 10), rng.randrange(1, LARGEST_SCALE + 1), rng.randrange(1 << rng.randrange(11))]
        )
        scale = rng.choice([scale] * 6 + [0, 1, 0x03FF, 0x0400, LARGEST_SCALE])
        yield {
            "scale": scale,
            "peak": rng.choice([rng.randrange(255)] * 4 + [0, 1, 127, 254]),
            "coefficient": rng.choice(coefficients),
            "tag": tag % 64,
        }


@pytest.mark.parametrize("interval", [1, 2, 4, 8])
def test_random_groups_have_exact_grids_at_every_rate(interval):
    check(list(random_rows(200, [*range(0, 128, 3), 127, LINEAR, LINEAR])), interval=interval)


def test_every_coefficient_with_the_extreme_peaks():
    pairs = itertools.product([*range(128), LINEAR], [127, 254])
    check([{"scale": 0x2E65, "peak": peak, "coefficient": a, "tag": 0} for a, peak in pairs])


def test_scales_that_are_ties_round_to_even():
    """``s8 * m / 128`` at a = 0 is a tie where the product has 12 digits."""
    rows = [
        {"scale": 0x4400 | mantissa, "peak": peak, "coefficient": 0, "tag": 0}
        for mantissa in (1, 3, 341, 1023)
        for peak in (3, 5, 7, 9, 127)
    ]
    rows += [
        {"scale": scale, "peak": peak, "coefficient": 0, "tag": 0} for scale in (1, 3, 65) for peak in (64, 65, 96)
    ]
    check(rows)
    assert expected(rows[-9])[1] == 0, "half of the smallest number rounds to 0"


def test_scales_equal_the_golden_model():
    rows = list(random_rows(300, [0, 5, 127, LINEAR]))
    got, _ = play(lambda: GridFit(CacheParameters(), 6, 1), rows)
    s8 = torch.from_numpy(np.array([row["scale"] for row in rows], np.uint16).view(np.float16))
    peak = torch.tensor([row["peak"] for row in rows])
    a = torch.tensor([row["coefficient"] for row in rows], dtype=torch.uint8)
    golden = requantized_scale(s8, peak, a).numpy().view(np.uint16)
    assert [view.grid.scale for view in got] == golden.tolist()


def test_reserved_coefficients_and_those_beyond_the_datapath_are_errors_and_count_zero():
    p = CacheParameters(max_coefficient=100)
    values = [0, 100, 101, 127, 128, 200, 253, 254, LINEAR]
    check([{"scale": 0x3C00, "peak": 99, "coefficient": a, "tag": 1} for a in values], p=p)


@pytest.mark.parametrize("stall", [0.3, 0.9, {"o": [1] * 200 + [0] * 50}])
@pytest.mark.parametrize("interval", [1, 8])
def test_stalls_change_nothing(interval, stall):
    check(list(random_rows(60, [5, 60, LINEAR])), interval=interval, stall=stall)


@pytest.mark.parametrize(("interval", "distance"), [(1, 1), (2, 2), (3, 2), (5, 4), (8, 8), (64, 8)])
def test_the_rate_is_sustained_from_the_stated_latency_on(interval, distance):
    trace = check(list(random_rows(40, [5, 60, LINEAR])), interval=interval)
    first = trace.cycles["i"][0]
    assert trace.cycles["i"] == [first + distance * k for k in range(40)]
    assert trace.cycles["o"] == [cycle + GridFit.latency for cycle in trace.cycles["i"]]


def test_a_scale_without_its_rest_is_caught(monkeypatch):
    register = grid.Pipeline.register

    def faulty(pipeline, value, name, **options):
        return register(pipeline, Const(0, 1) if name == "rest" else value, name, **options)

    monkeypatch.setattr(grid.Pipeline, "register", faulty)
    with pytest.raises(AssertionError):
        check(list(random_rows(100, [5, 60, LINEAR])))


def test_an_illegal_interval_is_refused():
    with pytest.raises(ParameterError, match="interval = 0: legal is an integer from 1"):
        GridFit(CacheParameters(), 1, 0)
