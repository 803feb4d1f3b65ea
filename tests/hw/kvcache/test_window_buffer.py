"""Window buffer: rows written as they come are read across, channel by channel, or along, row by row."""

import numpy as np
import pytest
from amaranth.sim import Simulator

from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.window_buffer import WindowBuffer
from kvant.hw.parameters import ParameterError


def play(dut, writes, reads):
    """Elements that *reads* give, one per cycle, after *writes*, one per cycle, and while they go on.

    Parameters
    ----------
    writes : list of (address, elements)
    reads : list of (cycle, read_row, address, lane), in order of cycles
    """
    out = []
    when = {cycle: request for cycle, *request in reads}
    last = max(len(writes), max(when, default=0) + 1) + dut.read_latency

    async def bench(ctx):
        for cycle in range(last):
            ctx.set(dut.write, cycle < len(writes))
            if cycle < len(writes):
                ctx.set(dut.write_address, writes[cycle][0])
                for lane, value in enumerate(writes[cycle][1]):
                    ctx.set(dut.write_q[lane], int(value))
            ctx.set(dut.read, cycle in when)
            if cycle in when:
                read_row, address, lane = when[cycle]
                ctx.set(dut.read_row, read_row)
                ctx.set(dut.read_address, address)
                ctx.set(dut.read_lane, lane)
            if cycle - dut.read_latency in when:
                out.append([ctx.get(value) for value in dut.q])
            await ctx.tick()

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return np.array(out)


@pytest.mark.parametrize(
    "lanes,head_dim,heads,ring_rows", [(4, 10, 2, 20), (1, 3, 1, 17), (2, 2, 3, 16), (8, 16, 1, 24)]
)
def test_every_element_is_found_across_and_along(lanes, head_dim, heads, ring_rows):
    p = CacheParameters(group=8, lanes=lanes, head_dim=head_dim, heads=heads)
    dut = WindowBuffer(p, ring_rows)
    words = heads * p.row_transfers
    q = np.random.default_rng(lanes).integers(-127, 128, (words, ring_rows, lanes))
    order = [(word, row) for row in range(ring_rows) for word in range(words)]
    writes = [(word * ring_rows + row, q[word, row]) for word, row in order]
    reads, right = [], []
    cycle = len(writes) + dut.write_latency
    for word in range(words):
        for block in range(0, ring_rows - lanes + 1, lanes):
            for lane in range(lanes):
                reads.append((cycle, 0, word * ring_rows + block, lane))
                right.append(q[word, block : block + lanes, lane])
                cycle += 1
        for row in range(ring_rows):
            reads.append((cycle, 1, word * ring_rows + row, 0))
            right.append(q[word, row])
            cycle += 1
    np.testing.assert_array_equal(play(dut, writes, reads), right)


def test_a_row_is_read_as_soon_as_its_latency_says_while_the_next_is_written():
    p = CacheParameters(group=8, lanes=4, head_dim=4)
    dut = WindowBuffer(p, 16)
    q = np.random.default_rng(3).integers(-127, 128, (16, 4))
    writes = [(row, q[row]) for row in range(16)]
    reads = [(row + dut.write_latency, 1, row, 0) for row in range(16)]
    np.testing.assert_array_equal(play(dut, writes, reads), q)


def test_ring_that_would_split_a_reading_is_refused():
    with pytest.raises(ParameterError, match="ring_rows = 18: legal are the multiples of lanes = 4"):
        WindowBuffer(CacheParameters(group=8, lanes=4), 18)
