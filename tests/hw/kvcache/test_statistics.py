"""Statistics of groups against sums over their elements, in Python's integers."""

import random
from fractions import Fraction

import pytest
from group_streams import play

from kvant.hw.kvcache import statistics
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.statistics import GroupStatistic
from kvant.hw.parameters import ParameterError

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20261130


def groups(rng, counts, count):
    """Random groups and the extremes of every size."""
    for n in counts:
        for value in (0, 1, -1, 127, -127):
            yield [value] * n
        yield [127] * (n // 2) + [-127] * (n - n // 2)
        yield [127] * (n - 1) + [126]
        yield [1] * (n // 2) + [0] * (n - n // 2)  # a mean of a half
        yield [-1] * (n // 2) + [0] * (n - n // 2)
        yield [3] * (n // 2) + [0] * (n - n // 2)
        yield [0] * (n - 1) + [-127]
    for _ in range(count):
        n = rng.choice(counts)
        spread = rng.choice([1, 5, 127])
        middle = rng.randrange(-127 + spread, 128 - spread)
        yield [middle + rng.randrange(-spread, spread + 1) for _ in range(n)]


def sums(q, tag):
    numbers = {"sum": sum(q), "sumsq": sum(x * x for x in q), "maximum": max(q), "minimum": min(q), "count": len(q)}
    return {"sums": numbers, "tag": tag}


def expected(p, q):
    """(offset, peak, moment), element by element."""
    n = len(q)
    offset = round(Fraction(sum(q), n)) if p.offset else 0
    centred = [x - offset for x in q]
    if p.statistic == "moment":
        moment = n * sum(x * x for x in centred)
    else:
        moment = n * sum(x * x for x in centred) - sum(centred) ** 2
    return offset, max(abs(x) for x in centred), moment


def check(p, *, counts=None, seed=SEED, **options):
    rng = random.Random(seed)
    cases = list(groups(rng, counts or [p.group], 60))
    rows = [sums(q, tag % 32) for tag, q in enumerate(cases)]
    got, trace = play(lambda: GroupStatistic(p, 5, counts=counts), rows, **options)
    assert [(v.offset, v.peak, v.moment, v.count, v.tag) for v in got] == [
        (*expected(p, q), len(q), tag % 32) for tag, q in enumerate(cases)
    ]
    return trace


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("statistic", ["variance", "moment"])
@pytest.mark.parametrize("group", [8, 64, 256])
def test_statistics_of_full_groups_are_exact(group, statistic, offset):
    check(CacheParameters(group=group, statistic=statistic, offset=offset))


@pytest.mark.parametrize("statistic", ["variance", "moment"])
@pytest.mark.parametrize(("group", "counts"), [(64, [64, 16]), (32, [4, 32]), (64, [1]), (128, [128, 127]), (1, [1])])
def test_statistics_of_short_groups_count_their_own_elements(group, counts, statistic):
    check(CacheParameters(group=group, lanes=1, statistic=statistic), counts=counts)


@pytest.mark.parametrize("stall", [0.3, 0.9])
def test_stalls_change_nothing(stall):
    check(CacheParameters(group=32, offset=True), stall=stall)


def test_a_group_per_cycle_flows_from_the_stated_latency_on():
    trace = check(CacheParameters(group=32))
    first = trace.cycles["i"][0]
    assert trace.cycles["i"] == list(range(first, first + len(trace.cycles["i"])))
    assert trace.cycles["o"] == [cycle + GroupStatistic.latency for cycle in trace.cycles["i"]]


def test_a_wrong_count_is_caught(monkeypatch):
    monkeypatch.setattr(statistics, "times_count", lambda value, count, counts: value * counts[0])
    with pytest.raises(AssertionError):
        check(CacheParameters(group=64), counts=[64, 16])


def test_counts_that_cannot_be_are_refused():
    with pytest.raises(ParameterError, match=r"count = 65: legal is an integer from 1 to 64"):
        GroupStatistic(CacheParameters(group=64), 1, counts=[64, 65])
    with pytest.raises(ParameterError, match=r"counts = \(16, 64\): legal with an offset is one power of two"):
        GroupStatistic(CacheParameters(group=64, offset=True), 1, counts=[64, 16])
