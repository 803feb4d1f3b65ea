"""The cache along time: bit for bit the golden model, without a stall, whatever shapes, heads, sequences and pauses.

Most runs use Amaranth's simulator, in which every block RAM without collision logic watches its ports (case 41).
"""

import dataclasses
import functools
import re
from dataclasses import dataclass, field

import numpy as np
import pytest
from amaranth.sim import Simulator
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_collisions import asserted_memories

from kvant.golden.kvcache.temporal import stage_rows
from kvant.hw.kvcache.layouts import Table
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.requantizer import Requantizer
from kvant.hw.kvcache.window_buffer import WindowBuffer
from kvant.hw.parameters import ParameterError
from kvant.sim.errors import SimulationError
from kvant.sim.kvcache import requantizer as sim
from kvant.sim.kvcache.tables import table_write
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset
from kvant.vcache import golden_outputs, random_values

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

COEFFICIENTS = [5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 100, 120, 255]
THRESHOLDS = [400, 700, 1100, 1700, 2600, 6970, 7915, 8542, 9251, 10320, 10890, 12551, 12980, 13684, 17162]


@pytest.fixture(autouse=True)
def watched_memories():
    with asserted_memories() as watched:
        yield watched


def parameters(**fields):
    return CacheParameters(**{"group": 8, "lanes": 4, "head_dim": 10} | fields)


@dataclass
class Sequence:
    """A sequence with its tables, and what the golden model makes of it."""

    p: CacheParameters
    v: np.ndarray
    prefill: int
    head: int = 0
    floor: np.ndarray | None = None
    arrays: dict = field(init=False)
    golden: dict = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(self.head)
        d = self.p.head_dim
        self.floor = (rng.random(d) / 2).astype(np.float16) if self.floor is None else self.floor
        self.arrays = {
            "v": self.v,
            "calls": np.array([self.prefill, len(self.v) - self.prefill], np.int32),
            "coeffs": np.roll(COEFFICIENTS, self.head).astype(np.uint8),
            "thresholds": np.array(THRESHOLDS, np.uint16),
            "floor": self.floor,
        }
        if self.p.centred:
            self.arrays["mean"] = rng.standard_normal(d).astype(np.float16)
        self.golden = golden_outputs(self.p, self.arrays)

    @property
    def rows(self):
        return sim.sequence_rows(self.v, self.prefill, self.head)

    @property
    def windows(self):
        return len(self.v) // self.p.group

    @property
    def tables(self):
        return sim.table_writes(self.p, self.arrays, heads=[self.head])


def sequences(p, *, tokens, prefill=5, seed=0):
    """A random sequence for every head."""
    values = random_values(p.heads, tokens, p.head_dim, seed=seed)
    return [Sequence(p, values[head], prefill, head) for head in range(p.heads)]


def in_turn(parts):
    """Rows of sequences, one of each in turn."""
    rows = [list(part.rows) for part in parts]
    return [queue.pop(0) for _ in range(max(map(len, rows))) for queue in rows if queue]


def play(p, parts, rows, *, simulator="amaranth", peeks=None, **options):
    """Trace of rows of *parts*, whose open windows are read at the end."""
    if peeks is None:
        peeks = [(part.head, row) for part in parts[-p.heads :] for row in range(len(part.v) % p.group)]
    stimulus = sim.rows_stimulus(
        p,
        rows,
        [write for part in {part.head: part for part in parts}.values() for write in part.tables],
        windows=sum(part.windows for part in parts),
        sinks=sum(min(p.sinks, len(part.v)) for part in parts),
        peeks=peeks,
    )
    return simulate(lambda: Requantizer(p), "vcache", stimulus, simulator=simulator, **options)


def check(p, parts, trace):
    """Every sequence's windows, sinks and open window are those of the golden model, and nothing else came."""
    windows, sinks = sim.written_windows(p, trace), sim.sink_rows(p, trace)
    staged, scales = sim.staged_rows(p, trace)
    for part in parts:
        golden = part.golden
        own = [window for window in windows if window.head == part.head][: part.windows]
        for number, window in enumerate(own):
            windows.remove(window)
            assert (window.slot, window.page.timestamp) == (number % p.windows, number * p.group)
            rows = slice(number * p.group, (number + 1) * p.group)
            np.testing.assert_array_equal(window.page.codes.T, golden["codes"][rows], err_msg=f"window {number}")
            np.testing.assert_array_equal(window.page.scale.view(np.uint16), golden["scale"][number].view(np.uint16))
            np.testing.assert_array_equal(window.page.coefficient, golden["coeff"][number])
            np.testing.assert_array_equal(window.page.offset, golden["offset"][number])
        count = len(golden["sink"])
        own_sinks, own_scales = sinks[part.head]
        np.testing.assert_array_equal(own_sinks[:count], golden["sink"])
        np.testing.assert_array_equal(own_scales[:count].view(np.uint16), golden["sink_scale"].view(np.uint16))
        sinks[part.head] = own_sinks[count:], own_scales[count:]
    assert not windows
    begin = 0
    for part in parts[-p.heads :]:
        count = len(part.golden["staged"])
        np.testing.assert_array_equal(staged[begin : begin + count], part.golden["staged"])
        for row in scales[begin : begin + count]:
            np.testing.assert_array_equal(row.view(np.uint16), part.golden["staged_scale"].view(np.uint16))
        begin += count
    assert trace.status["error"] == 0
    assert trace.status["saturated"] == sum(int(part.golden["saturated"]) for part in parts)


def run(p, *, tokens, prefill=5, seed=0, **options):
    """A sequence for every head, in turn, checked; the trace."""
    parts = sequences(p, tokens=tokens, prefill=prefill, seed=seed)
    trace = play(p, parts, in_turn(parts), **options)
    check(p, parts, trace)
    return trace


SHAPES = [
    {},
    {"offset": True},
    {"shared_coeff": True},
    {"offset": True, "shared_coeff": True, "centred": True, "sinks": 5},
    {"statistic": "moment"},
    {"statistic": "moment", "offset": True, "sinks": 11},
    {"lanes": 1, "head_dim": 3},
    {"lanes": 2, "head_dim": 2, "shared_coeff": True},
    {"lanes": 8, "head_dim": 8},
    {"lanes": 8, "head_dim": 19, "shared_coeff": True},
    {"heads": 3, "sinks": 3},
    {"heads": 2, "lanes": 8, "head_dim": 16, "offset": True, "shared_coeff": True},
    {"group": 16, "lanes": 8, "head_dim": 16},
    {"group": 32, "lanes": 16, "head_dim": 16, "shared_coeff": True},
    {"adder": "kogge_stone"},
    {"port_bits": 32},
    {"port_bits": 256, "offset": True},
]


@pytest.mark.parametrize("fields", SHAPES, ids=str)
def test_rows_back_to_back_never_wait_over_many_windows(fields, watched_memories):
    p = parameters(**fields)
    trace = run(p, tokens=6 * p.group + 3)
    assert trace.status["stall_cycles"] == 0
    cycles = trace.cycles["v"]
    assert cycles[-1] - cycles[0] + 1 == len(cycles)
    assert len(watched_memories) >= p.lanes + 3


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_configurations_are_exact_with_pauses(data):
    group = data.draw(st.sampled_from([8, 16]))
    p = parameters(
        group=group,
        lanes=data.draw(st.sampled_from([1, 2, 4, 8])),
        head_dim=data.draw(st.integers(1, 20)),
        heads=data.draw(st.integers(1, 3)),
        offset=data.draw(st.booleans()),
        shared_coeff=data.draw(st.booleans()),
        centred=data.draw(st.booleans()),
        sinks=data.draw(st.sampled_from([0, 0, 1, 12])),
        statistic=data.draw(st.sampled_from(["variance", "moment"])),
        capacity=data.draw(st.sampled_from([None, 5 * group])),
    )
    tokens = data.draw(st.integers(1, 5 * group + 3))
    prefill = data.draw(st.integers(1, tokens))
    run(p, tokens=tokens, prefill=prefill, stall=data.draw(st.sampled_from([0.0, 0.1, 0.6])), seed=group + tokens)


@pytest.mark.long
@pytest.mark.parametrize("lanes", [4, 8, 16, 32])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_case_10_any_head_size_without_a_stall(head_dim, group, lanes):
    shared = (head_dim + group // 32 + lanes) // 4 % 2 == 1
    p = CacheParameters(group=group, lanes=lanes, head_dim=head_dim, shared_coeff=shared, offset=shared)
    trace = run(p, tokens=5 * group + 9, prefill=20, simulator="verilator")
    assert trace.status["stall_cycles"] == 0


def test_case_11_stored_windows_do_not_depend_on_the_prefill_under_a_dominating_floor():
    p = parameters(offset=True)
    v = random_values(1, 50, 10, seed=11)[0].clip(-4, 4)
    floor = np.full(10, 4, np.float16)
    results = []
    for prefill in (1, 7, 31, 50):
        part = Sequence(p, v, prefill, floor=floor)
        trace = play(p, [part], part.rows)
        check(p, [part], trace)
        results.append((trace.transfers["codes"], trace.transfers["meta"], trace.transfers["staged"]))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    "windows", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("past", [-1, 0, 1])
def test_case_13_eviction_keeps_the_last_windows(windows, past):
    p = parameters(capacity=8 * windows, evict=True)
    for tokens in (8 * windows + past, 16 * windows + past, 80 * windows + 3):
        part = Sequence(p, random_values(1, tokens, 10, seed=tokens)[0], 5)
        trace = play(p, [part], part.rows)
        check(p, [part], trace)
        assert trace.status["full"] == 0
        # What memory holds in the end: the last windows, each once.
        pages = {window.slot: window.page.timestamp for window in sim.written_windows(p, trace)}
        first = max(0, part.windows - windows)
        assert sorted(pages.values()) == [8 * number for number in range(first, part.windows)]
        if past < 0:
            break


def test_case_13_a_full_cache_stops_taking_rows_and_overwrites_nothing():
    p = parameters(capacity=16)
    whole, part = (Sequence(p, random_values(1, 30, 10, seed=1)[0][:tokens], 5) for tokens in (30, 23))
    with pytest.raises(SimulationError, match=r"v (\d+) of 105 sent") as error:
        play(p, [whole], whole.rows, timeout_cycles=300, peeks=[])
    # 5 rows of the scan and 23 of the cache; the next one would complete a window that has no page.
    assert int(re.search(r"v (\d+) of", str(error.value))[1]) == 3 * (5 + 23)
    trace = play(p, [part], part.rows)
    check(p, [part], trace)


@pytest.mark.parametrize(
    "fields", [{"sinks": 3, "offset": True}, {"heads": 2, "shared_coeff": True, "centred": True}], ids=str
)
def test_case_16_unwritten_memory_reaches_no_output(fields):
    # Icarus keeps X where nothing was written; the player refuses an X at a valid output.
    p = parameters(**fields)
    parts = sequences(p, tokens=19)
    trace = play(p, parts, in_turn(parts), simulator="icarus", edit_verilog=without_initial_memory)
    check(p, parts, trace)


def without_initial_memory(verilog):
    """The text without the blocks that fill memories at power-up."""
    text, count = re.subn(r"  initial begin\n(?:    .*\n)+?  end\n", "", verilog)
    assert count > 5
    return text


def test_a_short_sequence_after_a_long_one_sees_nothing_of_it():
    p = parameters(sinks=3, heads=2)
    values = random_values(6, 45, 10, seed=3)
    lengths = [45, 45, 20, 20, 3, 8]
    parts = [Sequence(p, values[k][:n], min(5, n), k % 2) for k, n in enumerate(lengths)]
    rows = [row for pair in zip(parts[::2], parts[1::2], strict=True) for row in in_turn(pair)]
    check(p, parts, play(p, parts, rows))
    check(p, parts, play(p, parts, rows, stall=0.3, seed=4))


@pytest.mark.parametrize("tokens,prefill", [(1, 1), (3, 2), (7, 7), (8, 8), (9, 1)])
def test_sequences_about_as_long_as_a_window(tokens, prefill):
    run(parameters(sinks=2), tokens=tokens, prefill=prefill)


def hostile(name, tokens, d):
    """f16 [tokens, d]"""
    rng = np.random.default_rng(7)
    v = rng.standard_normal((tokens, d))
    if name == "constant":
        v[:] = 1.5
    elif name == "zeros":
        v[:] = 0
    elif name == "outlier":
        v[tokens // 3, 1] = 1e4
    elif name == "dead channel":
        v[:, 2] = 0
    elif name == "not finite":
        v[tokens // 2, :3] = np.nan, np.inf, -np.inf
        v[0, 4] = np.inf
    elif name == "subnormal":
        v = rng.integers(-200, 200, (tokens, d)) * 2.0**-24
    elif name == "ties":
        v[0] = 127
        v[1:] = rng.integers(-126, 126, (tokens - 1, d)) + 0.5
    elif name == "largest":
        v = rng.choice([-65504.0, 65504.0], (tokens, d))
    return v.astype(np.float16)


HOSTILE = ["constant", "zeros", "outlier", "dead channel", "not finite", "subnormal", "ties", "largest"]


@pytest.mark.parametrize("prefill", [1, 9])
def test_hostile_rows_of_eight_heads_in_turn(prefill):
    p = parameters(heads=len(HOSTILE), offset=prefill == 9)
    floor = np.zeros(10, np.float16)
    parts = [Sequence(p, hostile(name, 26, 10), prefill, head, floor) for head, name in enumerate(HOSTILE)]
    trace = play(p, parts, in_turn(parts))
    check(p, parts, trace)
    assert trace.status["nonfinite"] == 1 and trace.status["stall_cycles"] == 0
    assert all(int(parts[HOSTILE.index(name)].golden["saturated"]) == 0 for name in ("constant", "zeros"))
    assert prefill == 9 or int(parts[HOSTILE.index("outlier")].golden["saturated"]) > 0


@pytest.mark.parametrize(
    "stall",
    [
        {"codes": [1] * 1000 + [0] * 1000},
        {"meta": [1] * 700 + [0] * 300},
        {"sink": [1] * 900 + [0] * 200},
        {"v": [0, 1], "codes": [1, 0], "meta": [0, 1], "sink": [0, 1], "staged": [1, 0], "peek": [0, 1]},
        dict.fromkeys(("codes", "meta", "sink", "staged"), "after_valid"),
        {"v": [0] * 7 + [1] * 30},
        {"v": [1] * 25 + [0]},
        {"codes": 0.9, "meta": 0.9, "v": 0.1},
    ],
    ids=[
        "codes held",
        "meta held",
        "sinks held",
        "alternating",
        "ready after valid",
        "bursts",
        "slow rows",
        "slow memory",
    ],
)
def test_case_35_and_37_pauses_change_no_result(stall):
    p = parameters(sinks=3, heads=2)
    parts = sequences(p, tokens=5 * 8 + 3)
    check(p, parts, play(p, parts, in_turn(parts), stall=stall, seed=35))


def test_case_37_rows_wait_while_both_windows_are_full():
    p = parameters(group=16, lanes=4, head_dim=16)
    trace = run(p, tokens=10 * 16, stall={"codes": [1] * 3000 + [0] * 3000})
    assert trace.status["stall_cycles"] > 1000
    # The ring took what it holds before the first word of codes left.
    first_codes = trace.cycles["codes"][0]
    taken = sum(cycle < first_codes for cycle in trace.cycles["v"]) // p.row_transfers - 5
    assert 2 * p.group <= taken <= Requantizer(p).timing.ring_rows


@pytest.mark.parametrize("again_at", [130, 175, 230, 300])
@pytest.mark.parametrize("hold_valid", [False, True])
def test_case_36_reset_in_the_middle_equals_a_cold_start(again_at, hold_valid):
    p = parameters(sinks=3)
    parts = sequences(p, tokens=27)
    reset = Reset(cycles=1, again_at=again_at, hold_valid=hold_valid)
    trace = play(p, parts, in_turn(parts), reset=reset, stall=0.1, seed=again_at)
    check(p, parts, trace)


def test_case_47_simulators_agree_on_every_cycle():
    p = parameters(heads=2, offset=True)
    parts = sequences(p, tokens=18)
    traces = [
        play(p, parts, in_turn(parts), simulator=name, stall=0.2, seed=9)
        for name in ("amaranth", "icarus", "verilator")
    ]
    assert traces[0] == traces[1] == traces[2]


def test_a_skew_that_is_off_by_one_is_caught(monkeypatch):
    original = WindowBuffer.elaborate

    def off_by_one(self, platform):
        m = original(self, platform)
        m.d.comb += self.q[0].eq(0)
        return m

    monkeypatch.setattr(WindowBuffer, "elaborate", off_by_one)
    with pytest.raises(AssertionError):
        run(parameters(), tokens=20)


class Bench:
    """A cache under Amaranth's simulator, whose outputs are collected while a scenario talks to its inputs."""

    def __init__(self, p):
        self.p = p
        self.dut = Requantizer(p)
        self.transfers = {
            name: {member: [] for member in ("data", "keep", "user", "last") if member in self.shape(name).members}
            for name in ("codes", "meta", "sink", "staged")
        }

    def shape(self, name):
        return self.dut.signature.members[name].signature.members["payload"].shape

    def run(self, scenario):
        async def collect(ctx, name):
            port = getattr(self.dut, name)
            ctx.set(port.ready, 1)
            fields = self.transfers[name]
            values = [getattr(port.payload, field) for field in fields]
            values = [value if not hasattr(value, "as_value") else value.as_value() for value in values]
            while True:
                _, _, valid, *payload = await ctx.tick().sample(port.valid, *values)
                if valid:
                    for column, value in zip(fields.values(), payload, strict=True):
                        column.append(value)

        async def main(ctx):
            self.ctx = ctx
            await scenario(self)

        simulator = Simulator(self.dut)
        simulator.add_clock(1e-8)
        for name in self.transfers:
            simulator.add_testbench(functools.partial(collect, name=name), background=True)
        simulator.add_testbench(main)
        simulator.run()

    async def ticks(self, count):
        for _ in range(count):
            await self.ctx.tick()

    async def write(self, *writes):
        """Table writes."""
        self.ctx.set(self.dut.cfg.valid, 1)
        for write in writes:
            self.ctx.set(self.dut.cfg.payload.as_value(), write)
            await self.ctx.tick()
        self.ctx.set(self.dut.cfg.valid, 0)

    async def row(self, row, *, patience=2000):
        """Offer a row; whether it was taken, its first transfer within *patience* cycles."""
        fields = sim.row_transfers(self.p, [row])
        port = self.dut.v
        for data, user in zip(fields["data"], fields["user"], strict=True):
            self.ctx.set(port.payload.data.as_value(), data)
            self.ctx.set(port.payload.user.as_value(), user)
            self.ctx.set(port.valid, 1)
            for _ in range(patience):
                _, _, ready = await self.ctx.tick().sample(port.ready)
                if ready:
                    break
            else:
                return False
        self.ctx.set(port.valid, 0)
        return True

    async def peek(self, head, row):
        """A row of the open window and its scales."""
        count = len(self.transfers["staged"]["data"]) + self.p.row_transfers
        port = self.dut.peek
        self.ctx.set(port.payload.data.head, head)
        self.ctx.set(port.payload.data.row, row)
        self.ctx.set(port.valid, 1)
        while not (await self.ctx.tick().sample(port.ready))[2]:
            pass
        self.ctx.set(port.valid, 0)
        for _ in range(1000):
            if len(self.transfers["staged"]["data"]) == count:
                break
            await self.ctx.tick()
        data, scales = sim.staged_rows(self.p, self)
        return data[-1], scales[-1]

    def get(self, name):
        return self.ctx.get(getattr(self.dut, name))


def test_full_is_shown_while_a_row_waits_for_a_page():
    p = parameters(capacity=8, head_dim=4)
    part = Sequence(p, random_values(1, 16, 4, seed=1)[0], 1)

    async def scenario(bench):
        await bench.write(*part.tables)
        for row in part.rows[:-1]:
            assert await bench.row(row)
            assert not bench.get("full")
        assert not await bench.row(part.rows[-1], patience=300)
        assert bench.get("full") and not bench.get("error")
        assert bench.get("stall_cycles") >= 300
        # A new sequence gives the pages up.
        assert await bench.row(part.rows[0])
        assert not bench.get("full")

    bench = Bench(p)
    bench.run(scenario)
    assert len(sim.written_windows(p, bench)) == 1


def test_a_request_sees_every_row_before_it_at_any_time():
    p = parameters(heads=2, head_dim=10)
    parts = sequences(p, tokens=40, prefill=3, seed=5)
    pattern = np.random.default_rng(5).random(200) < 0.4

    async def scenario(bench):
        for part in parts:
            await bench.write(*part.tables)
            for row in part.rows[: part.prefill]:
                await bench.row(row)
        for token in range(40):
            for part in parts:
                await bench.row(part.rows[part.prefill + token])
                number = token % p.group  # of the row in its window
                if pattern[2 * token + part.head] and number < p.group - 1:
                    for asked in {number, 0, number // 2}:
                        q, scales = await bench.peek(part.head, asked)
                        np.testing.assert_array_equal(
                            q, right(part, token - number + asked), err_msg=f"{token} {asked}"
                        )
                        np.testing.assert_array_equal(scales, part.golden["staged_scale"])
                    q, _ = await bench.peek(part.head, number + 1)
                    assert not q.any()
        await bench.ticks(400)
        assert not bench.get("error") and not bench.get("busy")

    bench = Bench(p)
    bench.run(scenario)
    assert len(sim.written_windows(p, bench)) == 10


def right(part, token):
    """A row as it is staged."""
    whole = Sequence(part.p, part.v[: token // part.p.group * part.p.group + part.p.group - 1], part.prefill, part.head)
    return whole.golden["staged"][token % part.p.group]


def test_requests_without_a_pause_cost_a_window_no_more_than_the_reading_of_a_row():
    p = parameters(head_dim=8)
    part = Sequence(p, random_values(1, 20 * p.group + 3, p.head_dim, seed=3)[0], 3)
    traces = []
    for requests in (0, 60):
        stimulus = sim.rows_stimulus(p, part.rows, part.tables, windows=20, sinks=0, peeks=[(0, 1)] * requests)
        # The first request finds two staged rows; from then on there is always one.
        after = stimulus.after | {"peek": ("v", (2 * part.prefill) * p.row_transfers)}
        stimulus = dataclasses.replace(stimulus, after=after)
        traces.append(simulate(lambda: Requantizer(p), "vcache", stimulus, simulator="amaranth"))
    without, beside = traces
    assert without.status["stall_cycles"] == 0
    assert beside.status["stall_cycles"] <= 20 * p.row_transfers
    for stream in ("codes", "meta"):
        assert beside.transfers[stream] == without.transfers[stream]
    answers, _ = sim.staged_rows(p, beside)
    staged = stage_rows(part.v, part.prefill, group=p.group, floor=part.floor).q.numpy()
    legal = {row.tobytes() for row in staged[1 :: p.group]} | {bytes(p.head_dim)}  # or there is no such row yet
    assert len(answers) == 60 and {row.tobytes() for row in answers} <= legal


def test_requests_for_windows_that_are_not_open_are_errors_answered_with_zeros():
    p = parameters(heads=2)
    part = Sequence(p, random_values(1, 5, 10, seed=1)[0], 2, 1)

    async def scenario(bench):
        await bench.write(*part.tables)
        for head in (0, 1, 2, 255):
            q, scales = await bench.peek(head, 0)
            assert not q.any() and not scales.any()
            assert bench.get("error")

    Bench(p).run(scenario)


def test_the_end_of_a_sequence_gives_up_its_open_window():
    p = parameters()
    part = Sequence(p, random_values(1, 13, 10, seed=1)[0], 2)

    async def scenario(bench):
        await bench.write(*part.tables)
        for _ in range(2):
            for row in part.rows:
                await bench.row(row)
            await bench.ticks(300)
            await bench.write(table_write(Table.END, 0))
            await bench.ticks(2)
        assert not bench.get("error") and not bench.get("busy")
        # Now there is no sequence that a row without a start could belong to.
        assert await bench.row(part.rows[-1])
        await bench.ticks(3)
        assert bench.get("error")

    bench = Bench(p)
    bench.run(scenario)
    windows = sim.written_windows(p, bench)
    assert [window.page.timestamp for window in windows] == [0, 0]
    np.testing.assert_array_equal(windows[1].page.codes.T, part.golden["codes"])


@pytest.mark.parametrize(
    "write",
    [
        table_write(Table.FLOOR, 2),
        table_write(Table.FLOOR, 0, 10),
        table_write(Table.MEAN, 0, 0),
        table_write(Table.COEFFICIENT, 0, 16),
        table_write(Table.THRESHOLD, 0, 15),
        table_write(Table.END, 2),
        5 << 40,
    ],
    ids=["head", "channel", "no mean", "entry", "threshold", "end of no head", "kind"],
)
def test_a_table_write_without_a_place_is_an_error(write):
    async def scenario(bench):
        await bench.write(table_write(Table.FLOOR, 1, 9, 5), table_write(Table.END, 1))
        await bench.ticks(2)
        assert not bench.get("error")
        await bench.write(write)
        await bench.ticks(2)
        assert bench.get("error")

    Bench(parameters(heads=2)).run(scenario)


def test_a_row_out_of_order_is_swallowed_and_raises_error():
    p = parameters()
    part = Sequence(p, random_values(1, 13, 10, seed=1)[0], 2)

    async def scenario(bench):
        await bench.write(*part.tables)
        for row in (part.rows[-1], part.rows[1]):  # staged, scanned: there is no sequence yet
            assert await bench.row(row)
        await bench.ticks(2)
        assert bench.get("error")
        for row in part.rows:
            await bench.row(row)
        await bench.ticks(300)

    bench = Bench(p)
    bench.run(scenario)
    np.testing.assert_array_equal(sim.written_windows(p, bench)[0].page.codes.T, part.golden["codes"])


def test_a_reserved_coefficient_is_an_error_and_its_groups_are_zero():
    p = parameters()
    part = Sequence(p, random_values(1, 8, 10, seed=1)[0], 2)

    async def scenario(bench):
        await bench.write(*part.tables)
        await bench.write(*(table_write(Table.COEFFICIENT, 0, index, 200) for index in range(16)))
        for row in part.rows:
            await bench.row(row)
        await bench.ticks(300)
        assert bench.get("error")

    bench = Bench(p)
    bench.run(scenario)
    page = sim.written_windows(p, bench)[0].page
    assert not page.codes.any() and not page.scale.any()


@pytest.mark.parametrize(
    "fields,text", [({"group": 12}, "group = 12"), ({"lanes": 6}, "lanes = 6"), ({"lanes": 16}, "lanes = 16")]
)
def test_shapes_that_no_cache_has_are_refused(fields, text):
    with pytest.raises(ParameterError, match=text):
        Requantizer(parameters(**fields))


@pytest.mark.parametrize("kind", [Table.POSITION, Table.WINDOW])
@pytest.mark.parametrize("position", [3, 8, 13])
def test_a_sequence_goes_on_under_its_scales(kind, position):
    """As if it had never ended: windows, sinks, open window, what is clamped from the position on."""
    p = parameters(heads=2, sinks=5, evict=True)
    part, other = sequences(p, tokens=29, prefill=6)
    begin = position // p.group * p.group if kind == Table.WINDOW or position % p.group == 0 else position
    end = 29 if begin % p.group == 0 else (position // p.group + 1) * p.group - 1  # a window that lacks rows stays open
    cut = Sequence(p, part.v[:end], 6, 0) if end >= 6 else part
    rows = [
        sim.Row(0, part.golden["staged_scale"], scan=True, start=True),
        *(sim.Row(0, row) for row in part.v[begin:end]),
    ]
    mixed = [row for pair in zip(other.rows, [*rows, *[None] * len(other.rows)], strict=False) for row in pair if row]
    first_window = -(-begin // p.group)
    windows = max(0, end // p.group - first_window)
    stimulus = sim.rows_stimulus(
        p,
        mixed,
        [*part.tables, *other.tables, table_write(kind, 0, position >> 16, position & 0xFFFF)],
        windows=windows + other.windows,
        sinks=max(0, min(p.sinks, end) - position) + p.sinks,
        peeks=[(0, row) for row in range(begin % p.group if windows == 0 else 0, end % p.group)],
    )
    trace = simulate(lambda: Requantizer(p), "vcache", stimulus, simulator="amaranth")
    assert not trace.status["error"]
    golden = cut.golden
    mine = [window for window in sim.written_windows(p, trace) if window.head == 0]
    assert [window.page.timestamp for window in mine] == [p.group * (first_window + k) for k in range(windows)]
    for number, window in enumerate(mine, first_window):
        codes = golden["codes"][number * p.group : (number + 1) * p.group]
        assert np.array_equal(window.page.codes.T, codes)
        assert np.array_equal(window.page.scale, golden["scale"][number])
    sinks, _ = sim.sink_rows(p, trace)[0]
    assert np.array_equal(sinks, part.golden["sink"][position:end])
    staged, scales = sim.staged_rows(p, trace)
    open_begin = end // p.group * p.group
    assert np.array_equal(staged, golden["staged"][max(begin, open_begin) - open_begin :])
    assert (scales == part.golden["staged_scale"]).all()
    before = Sequence(p, part.v[:position], 6, 0).golden["saturated"] if position >= 6 else None
    if before is not None:
        assert trace.status["saturated"] == golden["saturated"] - before + other.golden["saturated"]


def test_scales_of_a_centred_cache_cannot_be_given():
    p = parameters(centred=True)
    part = sequences(p, tokens=9)[0]
    stimulus = sim.rows_stimulus(p, part.rows, [*part.tables, table_write(Table.POSITION, 0)], windows=1, sinks=0)
    assert simulate(lambda: Requantizer(p), "vcache", stimulus, simulator="amaranth").status["error"]
