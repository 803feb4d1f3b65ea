"""Runs of elements that begin at words become pieces, whatever the widths."""

import random

import pytest
from amaranth.sim import Simulator

from kvant.hw.linear.parameters import ceil_div
from kvant.hw.soc import run_cutter
from kvant.hw.soc.parameters import SocParameters
from kvant.hw.soc.run_cutter import RunCutter

SHAPES = [(128, 16, 8), (128, 16, 3), (32, 16, 16), (64, 8, 4), (32, 32, 1), (512, 8, 64)]
"""Bits of a word, of an element, elements of a piece: pieces of a word, of parts of words, of several words."""


def play(port_bits, bits, lanes, runs, *, stall=0.0, error=None):
    """Pieces of *runs*, lists of elements: of each run a list of (elements, last); whether it failed."""
    p = SocParameters(port_bits=port_bits)
    dut = RunCutter(p, bits=bits, lanes=lanes, most=max(len(run) for run in runs))
    in_word = port_bits // bits
    words = []
    for run in runs:
        for start in range(0, len(run), in_word):
            words.append(sum(value << bits * k for k, value in enumerate(run[start : start + in_word])))
    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    pieces, state = [], {}

    async def give(ctx, port, payloads, seed):
        rng = random.Random(seed)
        for payload in payloads:
            while rng.random() < stall:
                await ctx.tick()
            ctx.set(port.payload, payload)
            ctx.set(port.valid, 1)
            while not ctx.get(port.ready):
                await ctx.tick()
            await ctx.tick()
            ctx.set(port.valid, 0)

    async def give_runs(ctx):
        await give(ctx, dut.run, [len(run) for run in runs], 1)

    async def give_words(ctx):
        await give(ctx, dut.words, [{"data": word, "error": k == error} for k, word in enumerate(words)], 2)

    async def take(ctx):
        rng = random.Random(3)
        expected = sum(ceil_div(len(run), lanes) for run in runs)
        for _ in range(4000):
            ready = rng.random() >= stall
            ctx.set(dut.o.ready, ready)
            if ready and ctx.get(dut.o.valid):
                value = ctx.get(dut.o.payload.data)
                elements = [value >> bits * k & ((1 << bits) - 1) for k in range(lanes)]
                pieces.append((elements, ctx.get(dut.o.payload.last)))
            await ctx.tick()
            if len(pieces) == expected:
                break
        state["failed"] = ctx.get(dut.failed)

    simulator.add_testbench(give_runs, background=True)
    simulator.add_testbench(give_words, background=True)
    simulator.add_testbench(take)
    simulator.run()
    return pieces, state["failed"]


def random_runs(bits, seed=4):
    rng = random.Random(seed)
    return [[rng.getrandbits(bits) for _ in range(length)] for length in (1, 40, 7, 64, 65, 2)]


def expected(runs, lanes):
    """Pieces of elements, the last one of a run short."""
    return [
        (run[start : start + lanes], int(start + lanes >= len(run)))
        for run in runs
        for start in range(0, len(run), lanes)
    ]


@pytest.mark.parametrize("stall", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_are_the_elements_in_order(shape, stall):
    runs = random_runs(shape[1])
    pieces, failed = play(*shape, runs, stall=stall)
    wanted = expected(runs, shape[2])
    assert [(piece[: len(run)], last) for (piece, last), (run, _) in zip(pieces, wanted, strict=True)] == wanted
    assert not failed


def test_nothing_comes_from_a_word_with_an_error_on():
    runs = random_runs(16)
    pieces, failed = play(128, 16, 8, runs, error=3)  # the third word of the second run
    assert failed and len(pieces) <= 3


def test_a_run_that_forgets_its_rest_is_caught(monkeypatch):
    monkeypatch.setattr(run_cutter, "ceil_div", lambda a, b: a // b)
    runs = [[1, 2, 3]] * 3
    pieces, _ = play(64, 16, 4, runs)
    assert [piece[:3] for piece, _ in pieces] != runs or len(pieces) != 3
