"""Divisions without restoring against Python's integers: all quotients, remainders, stations, timing, refusals."""

import random

import pytest
from amaranth.sim import Simulator

from kvant.hw.numeric import division
from kvant.hw.numeric.division import SharedDivisions
from kvant.hw.parameters import ParameterError

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20261130
DIVISOR, SMALL, LARGE = 6, (14, 8), (22, 16)


def cases(count):
    """Divisors with a small and a large dividend, at the ends of their ranges, exact and one beside exact."""
    rng = random.Random(SEED)
    for _ in range(count):
        divisor = rng.choice([1, 2, 63, rng.randrange(1, 64)])
        dividends = []
        for _, bits in (SMALL, LARGE):
            limit = divisor << bits
            exact = divisor * rng.randrange(1 << bits)
            dividends.append(
                rng.choice([0, limit - 1, exact, max(0, exact - 1), min(exact + 1, limit - 1), rng.randrange(limit)])
            )
        yield divisor, dividends


def run(unit, divisions, distance):
    """Start a division every *distance* cycles; results and the cycles in which they came."""
    results, cycles = [], []

    async def bench(ctx):
        for cycle in range(distance * len(divisions) + unit.latency + 2):
            index, rest = divmod(cycle, distance)
            start = rest == 0 and index < len(divisions)
            ctx.set(unit.start, start)
            if start:
                divisor, dividends = divisions[index]
                ctx.set(unit.divisor, divisor)
                for port, value in zip(unit.dividends, dividends, strict=True):
                    ctx.set(port, value)
            else:  # what lies there between starts must not matter
                ctx.set(unit.divisor, 0b010101)
            if ctx.get(unit.done):
                rests = ctx.get(unit.rests)
                results.append([(ctx.get(port), rests >> k & 1) for k, port in enumerate(unit.quotients)])
                cycles.append(cycle)
            await ctx.tick()

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    return results, cycles


def expected(divisions):
    return [[(value // divisor, int(value % divisor > 0)) for value in values] for divisor, values in divisions]


@pytest.mark.parametrize(
    ("interval", "distance"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (100, 8), (1, 3), (4, 5), (8, 11)]
)
def test_quotients_are_exact_at_any_distance(interval, distance):
    divisions = list(cases(200))
    unit = SharedDivisions(DIVISOR, [SMALL, LARGE], interval)
    assert unit.stay <= distance
    results, cycles = run(unit, divisions, distance)
    assert results == expected(divisions)
    assert cycles == [unit.latency + distance * k for k in range(len(divisions))]


def test_every_quotient_of_a_small_divisor_is_exact():
    divisions = [(divisor, [value]) for divisor in (1, 2, 3, 7) for value in range(divisor << 8)]
    assert run(SharedDivisions(3, [(11, 8)], 1), divisions, 1)[0] == expected(divisions)


def test_a_lost_carry_is_caught(monkeypatch):
    monkeypatch.setattr(division, "add_with_carry", lambda a, b, carry: a + b)
    divisions = list(cases(20))
    assert run(SharedDivisions(DIVISOR, [SMALL, LARGE], 2), divisions, 2)[0] != expected(divisions)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, [SMALL], 1), ["divisor_width = 0"]),
        ((6, [SMALL], 0), ["interval = 0"]),
        ((6, [SMALL], True), ["interval = True"]),
        ((6, [(12, 7)], 1), ["quotient bits = 7", "multiples of 8"]),
        ((6, [(15, 8)], 1), ["dividend bits = 15", "from 8 to 14"]),
        ((6, [(7, 8)], 1), ["dividend bits = 7"]),
    ],
)
def test_illegal_parameters_are_refused(arguments, words):
    with pytest.raises(ParameterError) as error:
        SharedDivisions(*arguments)
    assert all(word in str(error.value) for word in words)
