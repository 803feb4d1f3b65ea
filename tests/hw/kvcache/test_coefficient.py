"""Choice of coefficients against the inequality itself, and the shared choice against counting votes."""

import random

import pytest
from group_streams import play

from kvant.hw.kvcache import coefficient
from kvant.hw.kvcache.coefficient import CoefficientChoice, SharedChoice
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.parameters import ParameterError

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20261130
DEFAULT = (
    [5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 100, 120, 255],
    [400, 700, 1100, 1700, 2600, 6970, 7915, 8542, 9251, 10320, 10890, 12551, 12980, 13684, 17162],
)
TABLES = {
    0: DEFAULT,
    1: ([7] * 5 + [255] * 11, [0, 0, 300, 300] + [65535] * 11),  # equal thresholds, a filled-up table
    2: (list(range(127, 111, -1)), [65535] * 15),
    4: (list(range(16)), [0] * 15),
}


def random_groups(p, count, counts, heads):
    """Moments of all sizes, and those just at a threshold, one below and one above."""
    rng = random.Random(SEED)
    for tag in range(count):
        n, head = rng.choice(counts), rng.choice(heads)
        peak = rng.choice([rng.randrange(1, p.peak_limit + 1), p.peak_limit, 1, 0])
        largest = (n * peak) ** 2
        threshold = rng.choice(TABLES[head][1])
        at = -(-threshold * largest >> 16)  # the least that passes
        moment = rng.choice([at, at - 1, at + 1, rng.randrange(largest + 1), 0, largest])
        yield {"moment": min(max(moment, 0), largest), "peak": peak, "count": n, "head": head, "tag": tag % 128}


def index_of(row):
    limit = row["count"] ** 2 * row["peak"] ** 2
    return sum(row["moment"] << 16 >= threshold * limit for threshold in TABLES[row["head"]][1])


def check(p, *, interval=1, counts=None, count=150, heads=(0,), **options):
    rows = list(random_groups(p, count, counts or [p.group], heads))
    got, trace = play(
        lambda: CoefficientChoice(p, 7, interval, counts=counts),
        rows,
        tables={head: TABLES[head] for head in heads},
        **options,
    )
    want = [(index_of(row), TABLES[row["head"]][0][index_of(row)], row["tag"]) for row in rows]
    assert [(view.index, view.coefficient, view.tag) for view in got] == want
    return trace


@pytest.mark.parametrize("interval", [1, 2, 3, 4, 16])
def test_the_index_is_the_number_of_thresholds_passed(interval):
    check(CacheParameters(group=64), interval=interval)


@pytest.mark.parametrize(
    ("parameters", "counts"),
    [
        ({"group": 8, "lanes": 8}, None),
        ({"group": 256}, None),
        ({"group": 256, "offset": True}, None),
        ({"group": 64}, [16, 64]),
        ({"group": 128}, [1, 128]),
    ],
)
def test_moments_of_all_sizes_are_compared_exactly(parameters, counts):
    check(CacheParameters(**parameters), counts=counts)


def test_every_head_has_tables_of_its_own():
    check(CacheParameters(group=64, heads=5), heads=tuple(TABLES), interval=2)


def test_tables_are_replaced_at_run_time():
    p = CacheParameters(group=64)
    row = {"moment": 5000, "peak": 3, "count": 64, "head": 0, "tag": 0}
    for table in TABLES.values():
        (view,), _ = play(lambda: CoefficientChoice(p, 7, 4), [row], tables={0: DEFAULT} | {0: table})
        limit = 64**2 * 9
        assert view.coefficient == table[0][sum(threshold * limit <= 5000 << 16 for threshold in table[1])]


@pytest.mark.parametrize("stall", [0.3, 0.9, {"o": [1] * 150 + [0] * 40}])
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_stalls_change_nothing(interval, stall):
    check(CacheParameters(group=64), interval=interval, stall=stall, count=80)


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_the_rate_is_sustained_from_the_stated_latency_on(interval):
    unit = CoefficientChoice(CacheParameters(), 7, interval)
    pauses = [0] + [1] * (interval - 1)
    trace = check(CacheParameters(group=64), interval=interval, stall={"i": pauses})
    taken = trace.cycles["i"]
    assert taken == [taken[0] + interval * k for k in range(len(taken))], "a group every interval cycles"
    waits = [out - cycle - unit.latency for cycle, out in zip(taken, trace.cycles["o"], strict=True)]
    assert waits[0] == 0 and 0 <= max(waits) <= 5


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_groups_offered_without_a_pause_are_taken_at_the_rate_at_least(interval):
    trace = check(CacheParameters(group=64), interval=interval, count=120)
    taken = trace.cycles["i"]
    assert taken[-1] - taken[0] <= interval * 119


def test_a_dropped_bit_of_the_product_is_caught(monkeypatch):
    register = coefficient.Pipeline.register

    def faulty(pipeline, value, name, **options):
        return register(pipeline, value & 0 if name == "more" else value, name, **options)

    monkeypatch.setattr(coefficient.Pipeline, "register", faulty)
    with pytest.raises(AssertionError):
        check(CacheParameters(group=64))


def test_illegal_parameters_are_refused():
    with pytest.raises(ParameterError, match="interval = 0"):
        CoefficientChoice(CacheParameters(), 1, 0)
    with pytest.raises(ParameterError, match="count = 0"):
        CoefficientChoice(CacheParameters(), 1, 1, counts=[0])


def shared_index(window):
    alive = sum(vote["alive"] for vote in window)
    passing = [sum(vote["alive"] and vote["index"] > k for vote in window) for k in range(15)]
    return sum(2 * votes >= alive for votes in passing)


def windows(rng, count, longest, heads):
    for number in range(count):
        head = rng.choice(heads)
        n = min(longest, rng.choice([1, 2, 3, longest, rng.randrange(1, longest + 1)]))
        kind = rng.choice(["any", "dead", "two", "few"])
        votes = []
        for _ in range(n):
            index = {"two": rng.choice([3, 12]), "dead": 15}.get(kind, rng.randrange(16))
            alive = {"dead": 0, "few": int(rng.random() < 0.2)}.get(kind, 1)
            votes.append({"index": index, "alive": alive, "head": head, "last": 0, "tag": rng.randrange(64)})
        votes[-1] |= {"last": 1, "tag": number % 64}
        yield votes


def check_shared(p, *, count=60, heads=(0,), **options):
    cases = list(windows(random.Random(SEED), count, p.head_dim, heads))
    rows = [vote for window in cases for vote in window]
    got, trace = play(
        lambda: SharedChoice(p, 6), rows, results=count, tables={head: TABLES[head] for head in heads}, **options
    )
    want = []
    for number, window in enumerate(cases):
        index = shared_index(window)
        want.append((index, TABLES[window[0]["head"]][0][index], number % 64))
    assert [(view.index, view.coefficient, view.tag) for view in got] == want
    return trace, cases


@pytest.mark.parametrize("head_dim", [1, 2, 16, 80])
def test_a_window_takes_the_entry_that_half_of_its_living_channels_reach(head_dim):
    check_shared(CacheParameters(head_dim=head_dim, heads=5), heads=tuple(TABLES))


@pytest.mark.parametrize("stall", [0.3, 0.9, {"o": [1] * 100 + [0] * 20}])
def test_stalls_change_no_shared_choice(stall):
    check_shared(CacheParameters(head_dim=12), stall=stall, count=30)


def test_a_channel_per_cycle_flows_and_a_window_has_the_stated_latency():
    trace, cases = check_shared(CacheParameters(head_dim=40), count=20)
    taken = trace.cycles["i"]
    ends, position = [], -1
    for window in cases:
        position += len(window)
        ends.append(taken[position])
    assert trace.cycles["o"][0] == ends[0] + SharedChoice.latency
    long = [vote for _ in range(6) for vote in [*[cases[0][0] | {"last": 0}] * 39, cases[0][0] | {"last": 1}]]
    _, trace = play(lambda: SharedChoice(CacheParameters(head_dim=40), 6), long, results=6, tables={0: DEFAULT})
    assert trace.cycles["i"] == list(range(trace.cycles["i"][0], trace.cycles["i"][0] + 240))
    assert trace.cycles["o"] == [trace.cycles["i"][40 * k + 39] + SharedChoice.latency for k in range(6)]
