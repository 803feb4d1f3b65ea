"""Running sums: windows of rows, of one head or several, back to back or with gaps, however short a row is."""

import numpy as np
import pytest
from amaranth.sim import Simulator

from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.running import RunningSums


def feed(p, rows, *, gap, seed=0):
    """Sums of closed windows, [(head, slot, first address)] -> fields, after rows ``(head, first, last, slot, q)``."""
    dut = RunningSums(p, slots=2)
    rng = np.random.default_rng(seed)
    sums = {}

    async def bench(ctx):
        pending = []
        for head, first, last, slot, q in rows:
            for word in range(p.row_transfers):
                while rng.random() < gap:
                    ctx.set(dut.valid, 0)
                    await step(ctx, pending)
                ctx.set(dut.valid, 1)
                ctx.set(dut.address, head * p.row_transfers + word)
                ctx.set(dut.first, first)
                ctx.set(dut.last, last)
                ctx.set(dut.slot, slot)
                pending.append(q[word * p.lanes : (word + 1) * p.lanes])
                await step(ctx, pending)
        ctx.set(dut.valid, 0)
        for _ in range(dut.latency):
            await step(ctx, pending)
        for head in range(p.heads):
            for slot in range(2):
                for word in range(p.row_transfers):
                    ctx.set(dut.read_enable, 1)
                    ctx.set(dut.read_address, head * p.row_transfers + word)
                    ctx.set(dut.read_slot, slot)
                    await ctx.tick()
                    for lane in range(p.lanes):
                        value = ctx.get(dut.sums)[lane]
                        sums[head, slot, word * p.lanes + lane] = (value.sum, value.sumsq, value.maximum, value.minimum)

    async def step(ctx, pending):
        """A cycle; elements follow their address by one."""
        given = ctx.get(dut.valid)
        await ctx.tick()
        for lane in range(p.lanes):
            ctx.set(dut.q[lane], int(pending[0][lane]) if given else 77)
        if given:
            pending.pop(0)

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return sums


def windows(p, count, seed):
    """Rows of *count* windows of every head, the heads taking turns, and the right sums of the last two."""
    rng = np.random.default_rng(seed)
    q = rng.integers(-127, 128, (p.heads, count, p.group, p.head_dim))
    q[0, -1] = 127
    q[-1, -2] = -127
    rows, right = [], {}
    for window in range(count):
        for row in range(p.group):
            for head in range(p.heads):
                rows.append((head, row == 0, row == p.group - 1, window % 2, q[head, window, row]))
    for head in range(p.heads):
        for window in (count - 2, count - 1):
            part = q[head, window]
            fields = zip(part.sum(0), (part**2).sum(0), part.max(0), part.min(0), strict=True)
            for channel, values in enumerate(fields):
                right[head, window % 2, channel] = tuple(map(int, values))
    return rows, right


@pytest.mark.parametrize("gap", [0, 0.4])
@pytest.mark.parametrize(
    "lanes,head_dim,heads", [(4, 4, 1), (4, 8, 1), (2, 6, 1), (4, 16, 1), (4, 20, 2), (1, 3, 2), (8, 8, 3)]
)
def test_closed_windows_have_the_sums_of_their_rows(lanes, head_dim, heads, gap):
    p = CacheParameters(group=8, lanes=lanes, head_dim=head_dim, heads=heads)
    rows, right = windows(p, 3, seed=lanes)
    assert feed(p, rows, gap=gap, seed=1) == right


@pytest.mark.parametrize("adder", ["plus", "kogge_stone"])
def test_extremes_of_the_largest_group_fit(adder):
    p = CacheParameters(group=256, lanes=4, head_dim=4, adder=adder)
    rows, right = windows(p, 2, seed=5)
    assert feed(p, rows, gap=0) == right
    assert right[0, 1, 0] == (127 * 256, 127**2 * 256, 127, 127)
