"""Window control against a model that keeps lists of rows, not counters."""

import random
from dataclasses import dataclass, field

import pytest
from amaranth.back import rtlil
from amaranth.hdl import ResetInserter, Signal
from amaranth.sim import Simulator
from verilog_checks import lint, yosys

from kvant.hw.emit import emit
from kvant.hw.kvcache import control
from kvant.hw.kvcache.control import RowPlan, SequenceControl, SequenceState, WindowControl
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.parameters import ParameterError

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")


@dataclass
class Sequence:
    """One head of the model: every row is an entry of a list."""

    state: str = "EMPTY"
    scanned: int = 0
    rows: int = 0  # staged since the sequence began
    ring: list[int] = field(default_factory=list)  # positions whose rows are unread, oldest first
    pending: int = 0
    pages: list[int] = field(default_factory=list)  # numbers of the windows that are held


class Model:
    """What the control promises, in unbounded numbers."""

    def __init__(self, p, ring_rows, position_bits=32):
        self.p, self.ring_rows, self.position_bits = p, ring_rows, position_bits
        self.heads = [Sequence() for _ in range(p.heads)]

    def legal(self, start, scan, head):
        if head >= self.p.heads or (start and not scan):
            return False
        return bool(start) or self.heads[head].state in ("SCAN",) + (() if scan else ("OPEN",))

    def granted(self, start, scan, head):
        if not self.legal(start, scan, head):
            return True
        h = self.heads[head]
        if start:
            return h.pending == 0
        return scan or not (len(h.ring) == self.ring_rows or self.waits_for_page(start, scan, head))

    def waits_for_page(self, start, scan, head):
        if not self.legal(start, scan, head) or scan:
            return False
        h = self.heads[head]
        if (h.rows + 1) % self.p.group or len(h.pages) < self.p.windows or h.state != "OPEN":
            return False
        return not self.p.evict or h.pending == len(h.pages)  # the oldest page is itself pending

    def take(self, start, scan, head):
        """The plan of a row, which is then part of the sequence; None: dropped."""
        if not self.legal(start, scan, head):
            return None
        h, group = self.heads[head], self.p.group
        if start:
            self.heads[head] = h = Sequence("SCAN")
        if scan:
            h.scanned += 1
            sink = h.scanned <= self.p.sinks
            return {"scan": 1, "scan_first": start, "sink": sink, "first_of_window": 0, "last_of_window": 0}
        h.state = "OPEN"
        position, window = h.rows, h.rows // group
        h.rows += 1
        h.ring.append(position)
        last = position % group == group - 1
        if last:
            h.pending += 1
            h.pages = [*h.pages, window][-self.p.windows :]
        return {
            "scan": 0,
            "scan_first": 0,
            "sink": position < self.p.sinks,
            "row": position % self.ring_rows,
            "base": window * group % self.ring_rows,
            "window_row": position % group,
            "first_of_window": position % group == 0,
            "last_of_window": last,
            "page": window % self.p.windows,
            "timestamp": window * group % 2**self.position_bits,
        }

    def release(self, head):
        h = self.heads[head]
        h.pending -= 1
        h.ring = h.ring[self.p.group :]

    def end(self, head):
        if head < self.p.heads:  # what is pending stays until it is released
            h = self.heads[head]
            self.heads[head] = Sequence(ring=h.ring[: h.pending * self.p.group], pending=h.pending)

    def status(self, head):
        if head >= self.p.heads:
            return dict.fromkeys(["state", "pending", "staged", "base", "windows", "oldest", "full"], 0)
        h, group = self.heads[head], self.p.group
        is_open = h.state == "OPEN"
        return {
            "state": SequenceState[h.state].value,
            "pending": h.pending,
            "staged": h.rows % group if is_open else 0,
            "base": h.rows // group * group % self.ring_rows if is_open else 0,
            "windows": len(h.pages) if is_open else 0,
            # With no page held, that of the window to come.
            "oldest": (h.pages[0] if h.pages else 0) * group % 2**self.position_bits if is_open else 0,
            "full": is_open and len(h.pages) == self.p.windows and not self.p.evict,
        }


class Bench:
    """Drives a control and its model in step; every cycle compares everything there is."""

    def __init__(self, ctx, dut):
        self.ctx, self.dut = ctx, dut
        self.model = Model(dut.p, dut.ring_rows, dut.position_bits)
        self.expected_status = None
        self.expected_full = False

    async def cycle(self, row=None, *, take=True, release=None, end=None, look=0, reset=None):
        """One cycle; returns the plan of the row taken, None if none was, "drop" if it was dropped."""
        ctx, dut, model = self.ctx, self.dut, self.model
        request = row or (0, 0, 0)
        for name, value in zip(("start", "scan", "head"), request, strict=True):
            ctx.set(dut.request[name], value)
        ctx.set(dut.offered, row is not None)
        ctx.set(dut.release, release is not None)
        ctx.set(dut.release_head, release or 0)
        ctx.set(dut.end, end is not None)
        ctx.set(dut.end_head, end or 0)
        ctx.set(dut.status_head, look)
        if self.expected_status is not None:
            status = ctx.get(dut.status)
            got = {name: getattr(status[name], "value", status[name]) for name in self.expected_status}
            assert got == self.expected_status
        assert ctx.get(dut.full) == self.expected_full
        granted = model.granted(*request)
        assert ctx.get(dut.granted) == granted
        taken = row is not None and take and granted
        ctx.set(dut.take, taken)
        self.expected_status = model.status(look)
        self.expected_full = row is not None and model.waits_for_page(*request)
        result = None
        if taken:
            expected = model.take(*request)
            plan = ctx.get(dut.plan)
            assert ctx.get(dut.error) == plan.drop == (expected is None)
            if expected is not None:
                assert plan.head == request[2]
                assert {name: plan[name] for name in expected} == expected
            result = "drop" if expected is None else expected
        else:
            assert ctx.get(dut.error) == 0
        if release is not None:
            model.release(release)
        if end is not None:
            model.end(end)
        await ctx.tick()
        return result

    async def push(self, *rows):
        """Take the rows one after the other, releasing windows of their heads only where one must wait."""
        plans = []
        for row in rows:
            while (plan := await self.cycle(row)) is None:
                assert not self.model.waits_for_page(*row)
                await self.cycle(release=row[2])
            plans.append(plan)
        return plans


def bench(play, dut):
    simulator = Simulator(dut)
    simulator.add_clock(1e-6)

    async def testbench(ctx):
        await play(Bench(ctx, dut))

    simulator.add_testbench(testbench)
    simulator.run()


START, SCAN, STAGE = (1, 1, 0), (0, 1, 0), (0, 0, 0)


def of(head, row):
    return (*row[:2], head)


@pytest.mark.parametrize(
    ("group", "ring_rows", "windows", "heads", "sinks", "evict"),
    [
        (2, 4, 1, 1, 0, False),
        (2, 5, 1, 2, 1, True),
        (4, 8, 2, 3, 0, True),
        (4, 11, 3, 1, 5, False),
        (8, 27, 2, 2, 3, True),
        (16, 40, 3, 5, 4, True),
    ],
)
def test_agrees_with_the_model_in_random_operation(group, ring_rows, windows, heads, sinks, evict):
    p = CacheParameters(group=group, heads=heads, sinks=sinks, capacity=windows * group, evict=evict)
    dut = WindowControl(p, ring_rows, position_bits=group.bit_length() + 2)
    rng = random.Random(f"{p}")

    async def play(bench):
        row = None
        for _ in range(2500):
            model = bench.model
            if row is None and rng.random() < 0.8:
                head = rng.randrange(heads + (rng.random() < 0.05))
                known = head < heads
                kinds = [STAGE] if known and model.heads[head].state != "EMPTY" else [START]
                row = of(head, rng.choice(kinds * 60 + [START, SCAN, (1, 0, 0), STAGE]))
            pending = [h for h in range(heads) if model.heads[h].pending]
            release = rng.choice(pending) if pending and rng.random() < 0.15 else None
            stuck = row is not None and model.waits_for_page(*row)
            end = rng.randrange(heads + 1) if rng.random() < (0.3 if stuck else 0.004) else None
            look = rng.randrange(heads + 1)
            if await bench.cycle(row, take=rng.random() < 0.9, release=release, end=end, look=look):
                row = None

    bench(play, dut)


@pytest.mark.parametrize(
    "calls",
    [[7] + [1] * 193, [7, 193], [7, 25, 100, 68], [7, 1, 31, 161], [1] * 200, [200], [31, 169]],
    ids=["7+193x1", "7+1x193", "7+25+100+68", "7+1+31+161", "200x1", "1x200", "31+169"],
)
def test_windows_do_not_depend_on_the_calls(calls):
    """A call is a run of rows without a pause; between calls, windows are released."""
    p = CacheParameters(group=32)
    plans = []

    async def play(bench):
        await bench.push(START, *[SCAN] * (calls[0] - 1))
        for length in calls:
            plans.extend(await bench.push(*[STAGE] * length))
            while bench.model.heads[0].pending:
                await bench.cycle(release=0)
        await bench.cycle()
        assert bench.expected_status["staged"] == sum(calls) % p.group

    bench(play, WindowControl(p, 70))
    assert [plan["window_row"] for plan in plans] == [t % 32 for t in range(200)]
    assert [plan["timestamp"] for plan in plans] == [t // 32 * 32 for t in range(200)]
    assert [plan["last_of_window"] for plan in plans] == [t % 32 == 31 for t in range(200)]


@pytest.mark.parametrize("tokens", [7, 8, 9, 16, 17, 83])
def test_evicting_ring_holds_the_newest_windows(tokens):
    """As many as fit, each once, with their timestamps: through every counter's wrap."""
    p = CacheParameters(group=8, capacity=24, evict=True)

    async def play(bench):
        await bench.push(START)
        for count in range(1, tokens + 1):
            await bench.push(STAGE)
            await bench.cycle()
            held = min(count // 8, 3)
            status = bench.expected_status
            assert (status["windows"], status["staged"], status["full"]) == (held, count % 8, False)
            assert status["oldest"] == max(count // 8 - 3, 0) * 8 % 32

    bench(play, WindowControl(p, 20, position_bits=5))


def test_full_cache_stops_taking_rows_until_the_sequence_ends():
    p = CacheParameters(group=8, capacity=16)

    async def play(bench):
        await bench.push(START, *[STAGE] * 23)  # two windows, and all but the last row of a third
        while bench.model.heads[0].pending:
            await bench.cycle(release=0)
        for _ in range(50):
            assert await bench.cycle(STAGE) is None
        assert bench.expected_full
        await bench.cycle(STAGE, end=0)
        assert await bench.cycle(STAGE) == "drop"
        assert (await bench.push(START, STAGE))[1]["timestamp"] == 0
        await bench.cycle()
        assert bench.expected_status["windows"] == 0

    bench(play, WindowControl(p, 18))


def test_page_of_a_pending_window_is_not_given_up():
    p = CacheParameters(group=8, capacity=8, evict=True)

    async def play(bench):
        await bench.push(START, *[STAGE] * 15)
        for _ in range(20):
            assert await bench.cycle(STAGE) is None
        await bench.cycle(STAGE, release=0)
        assert (await bench.cycle(STAGE))["page"] == 0

    bench(play, WindowControl(p, 24))


def test_interleaved_heads_equal_their_single_runs():
    """Lengths 5, 64, 65 and 200; the longest ends in the middle and another sequence takes its head."""
    lengths = [5, 64, 65, 200]
    p = CacheParameters(group=32, heads=4, sinks=4)
    rng = random.Random(14)

    async def play_single(bench, head, length, out):
        out.extend(await bench.push(of(head, START), *[of(head, STAGE)] * length))

    singles = [[] for _ in lengths]
    for head, length in enumerate(lengths):
        bench(lambda b, h=head, n=length: play_single(b, h, n, singles[h]), WindowControl(p, 72))

    async def play(bench):
        todo = {head: [START] + [STAGE] * length for head, length in enumerate(lengths)}
        got = [[] for _ in lengths]
        for _ in range(250):  # the longest is cut short
            head = rng.choice([h for h in todo if todo[h]])
            got[head] += await bench.push(of(head, todo[head].pop(0)))
        for head in range(4):
            assert got[head] == singles[head][: len(got[head])]
        await bench.cycle(end=3)
        todo[3] = [START] + [STAGE] * 40
        got[3] = []
        while any(todo.values()):
            head = rng.choice([h for h in todo if todo[h]])
            got[head] += await bench.push(of(head, todo[head].pop(0)))
        for head in range(3):
            assert got[head] == singles[head]
        assert got[3] == singles[3][:41]

    bench(play, WindowControl(p, 72))


def test_new_sequence_waits_for_pending_windows():
    p = CacheParameters(group=8)

    async def play(bench):
        await bench.push(START, *[STAGE] * 11)
        for _ in range(10):
            assert await bench.cycle(START) is None
        await bench.cycle(START, release=0)
        assert (await bench.cycle(START))["scan_first"] == 1

    bench(play, WindowControl(p, 18))


def test_rows_out_of_order_are_dropped_with_an_error():
    p = CacheParameters(group=8, heads=2)

    async def play(bench):
        for row in (STAGE, SCAN, (1, 0, 0), of(2, START), of(255, STAGE)):
            assert await bench.cycle(row) == "drop"
        await bench.push(START, STAGE)
        for row in (SCAN, (1, 0, 0), of(1, STAGE)):
            assert await bench.cycle(row) == "drop"
        assert (await bench.cycle(STAGE))["window_row"] == 1  # the sequence goes on as if nothing had been there

    bench(play, WindowControl(p, 18))


def test_first_staged_row_may_follow_one_scanned_row_and_sinks_count_anew():
    p = CacheParameters(group=8, sinks=2)

    async def play(bench):
        plans = await bench.push(START, *[STAGE] * 4, START, SCAN, SCAN, STAGE, STAGE, STAGE)
        assert [plan["sink"] for plan in plans] == [1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 0]

    bench(play, WindowControl(p, 16))


@pytest.mark.parametrize("rows", [0, 3, 8, 13])
def test_reset_forgets_everything(rows):
    """Reset in the middle of a window, with a row offered and waiting: then as from a cold start."""
    dut = WindowControl(CacheParameters(group=4, capacity=8, sinks=1), 9)
    reset = Signal()
    simulator = Simulator(ResetInserter(reset)(dut))
    simulator.add_clock(1e-6)

    async def testbench(ctx):
        first = Bench(ctx, dut)
        if rows:
            await first.push(START)
            for _ in range(rows - 1):
                await first.cycle(STAGE)
        ctx.set(reset, 1)
        ctx.set(dut.offered, 1)
        ctx.set(dut.take, 0)
        await ctx.tick()
        ctx.set(reset, 0)
        again = Bench(ctx, dut)
        assert await again.cycle(STAGE) == "drop"
        plans = await again.push(START, *[STAGE] * 8)
        assert [plan["row"] for plan in plans[1:]] == list(range(8))

    simulator.add_testbench(testbench)
    simulator.run()


def test_release_and_last_row_may_meet():
    """With the ring full but for one row, and in the cycle in which the next window is complete."""
    p = CacheParameters(group=4)

    async def play(bench):
        await bench.push(START, *[STAGE] * 7)
        await bench.cycle(STAGE, release=0)
        await bench.cycle()
        assert bench.expected_status["pending"] == 1
        await bench.push(*[STAGE] * 30)

    bench(play, WindowControl(p, 8))


@pytest.mark.parametrize(
    ("ring_rows", "group", "position_bits", "message"),
    [
        (127, 64, 32, "ring_rows = 127: legal is an integer from 128 to 65536"),
        (128, 64, 6, "position_bits = 6: legal is an integer from 7 to 32"),
        (128, 48, 32, "group = 48: legal along time are the powers of two from 2 on"),
    ],
)
def test_illegal_parameters_are_refused(ring_rows, group, position_bits, message):
    with pytest.raises(ParameterError, match=message):
        WindowControl(CacheParameters(group=group), ring_rows, position_bits=position_bits)


def test_many_heads_elaborate():
    p = CacheParameters(heads=256)
    assert "sequence_255" in rtlil.convert(WindowControl(p, 140))
    assert RowPlan(p, 140)["head"].width == 8


@pytest.mark.parametrize(("heads", "sinks", "windows", "evict"), [(1, 0, 1, True), (1, 4, 64, False), (5, 4, 3, True)])
def test_verilog_passes_lint_and_check(tmp_path, heads, sinks, windows, evict):
    p = CacheParameters(heads=heads, sinks=sinks, capacity=64 * windows, evict=evict)
    text = emit(WindowControl(p, 140), name="window_control").verilog
    (tmp_path / "dut.sv").write_text(text)
    assert lint(tmp_path, "dut.sv", top="window_control") == ""
    checked = yosys(tmp_path, "read_verilog -sv dut.sv; prep -top window_control; check -assert")
    assert checked.returncode == 0, checked.stderr


class LosesRelease(SequenceControl):
    """Fault: a window that is released in the cycle in which the next one is complete stays pending."""

    def elaborate(self, platform):
        m = super().elaborate(platform)
        with m.If(self.close):
            m.d.sync += self.pending.eq(self.pending + 1)
        return m


def test_random_operation_catches_a_fault(monkeypatch):
    monkeypatch.setattr(control, "SequenceControl", LosesRelease)
    with pytest.raises(AssertionError):
        test_release_and_last_row_may_meet()
    with pytest.raises(AssertionError):
        test_agrees_with_the_model_in_random_operation(4, 11, 3, 1, 5, False)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("position", [0, 1, 7, 8, 21, 40, 63])
def test_a_sequence_goes_on_at_its_position(position, repeats):
    """Or at the first row of its window; other heads, and the sequence after that, begin at 0."""
    group, sinks, head = 8, 10, 1
    dut = WindowControl(CacheParameters(group=group, heads=2, sinks=sinks, evict=True), 20)
    first = position // group * group if repeats else position
    simulator = Simulator(dut)
    simulator.add_clock(1e-6)

    async def take(ctx, start, scan, of_head):
        for name, value in {"start": start, "scan": scan, "head": of_head}.items():
            ctx.set(dut.request[name], value)
        ctx.set(dut.offered, 1)
        assert ctx.get(dut.granted)
        ctx.set(dut.take, 1)
        plan = ctx.get(dut.plan)
        closes = plan.last_of_window
        await ctx.tick()
        ctx.set(dut.take, 0)
        ctx.set(dut.release, closes)
        ctx.set(dut.release_head, of_head)
        await ctx.tick()
        ctx.set(dut.release, 0)
        return plan

    async def sequence(ctx, of_head, first, until, resumed):
        plan = await take(ctx, 1, 1, of_head)
        assert (plan.scales, plan.scan_first, plan.repeated) == (resumed, 1, 0)
        assert plan.sink == (not resumed)
        for t in range(first, until):
            plan = await take(ctx, 0, 0, of_head)
            assert (plan.timestamp, plan.window_row) == (t // group * group, t % group)
            assert plan.row == (t - first // group * group) % 20
            assert plan.sink == (t < sinks)
            assert plan.first_of_window == (t % group == 0)
            assert plan.last_of_window == (t % group == group - 1)
            assert plan.repeated == (resumed and t < position)
            assert (plan.drop, plan.scan, plan.scales) == (0, 0, 0)

    async def play(ctx):
        for name, value in {"resume": 1, "resume_head": head, "position": position, "repeats": repeats}.items():
            ctx.set(getattr(dut, name), value)
        await ctx.tick()
        ctx.set(dut.resume, 0)
        await sequence(ctx, 0, 0, 5, False)
        await sequence(ctx, head, first, position + 27, True)
        await sequence(ctx, head, 0, 12, False)

    simulator.add_testbench(play)
    simulator.run()
