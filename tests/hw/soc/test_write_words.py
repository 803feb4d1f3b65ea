"""Parts of words to memory put together, and streams of words into one, against a memory of bytes."""

import random
from itertools import pairwise

import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator

from kvant.hw.soc.axi_writer import write_word
from kvant.hw.soc.parameters import SocParameters
from kvant.hw.soc.write_words import WordArbiter, WordMerger

P = SocParameters(port_bits=64)
CYCLES = 20_000


class Mergers(wiring.Component):
    """Mergers before an arbiter."""

    def __init__(self, clients):
        self.clients = clients
        word = stream.Signature(write_word(P))
        super().__init__({"i": In(word).array(clients), "o": Out(word), "flush": In(1), "idle": Out(1)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.arbiter = arbiter = WordArbiter(P, self.clients)
        wiring.connect(m, arbiter.o, wiring.flipped(self.o))
        idle = ~self.o.valid
        for number, port in enumerate(self.i):
            m.submodules[f"merger_{number}"] = merger = WordMerger(P)
            wiring.connect(m, wiring.flipped(port), merger.i)
            wiring.connect(m, merger.o, arbiter.i[number])
            m.d.comb += merger.flush.eq(self.flush)
            idle = idle & merger.idle
        m.d.comb += self.idle.eq(idle)
        return m


def apply(memory, word):
    address, data, strobes = word
    for byte in range(P.port_bytes):
        if strobes >> byte & 1:
            memory[address, byte] = data >> 8 * byte & 255


def merge(streams, stall, seed=0):
    """The words that leave."""
    dut, rng = Mergers(len(streams)), random.Random(seed)
    left, out = [len(streams)], []

    def feed(port, words):
        async def process(ctx):
            for address, data, strobes in words:
                while rng.random() < stall:
                    await ctx.tick()
                ctx.set(port.payload, {"address": address, "data": data, "strobes": strobes})
                ctx.set(port.valid, 1)
                await ctx.tick().until(port.ready)
                ctx.set(port.valid, 0)
            left[0] -= 1

        return process

    async def take(ctx):
        for _ in range(CYCLES):
            ctx.set(dut.flush, left[0] == 0)
            ready = rng.random() >= stall
            ctx.set(dut.o.ready, ready)
            if ready and ctx.get(dut.o.valid):
                out.append(tuple(ctx.get(dut.o.payload[name]) for name in ("address", "data", "strobes")))
            if not left[0] and ctx.get(dut.flush) and ctx.get(dut.idle):
                return
            await ctx.tick()
        raise AssertionError(f"not done after {CYCLES} cycles")

    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    for port, words in zip(dut.i, streams, strict=True):
        simulator.add_testbench(feed(port, words), background=True)
    simulator.add_testbench(take)
    simulator.run()
    return out


def random_words(rng, base, count):
    address, words = base, []
    for _ in range(count):
        address += rng.choice([0, 0, 1])
        words.append((address, rng.getrandbits(64), rng.choice([0, 0xFF, 0x0F, 0xF0, 1 << rng.randrange(8)])))
    return words


@pytest.mark.parametrize("stall", [0.0, 0.3, 0.9])
def test_every_byte_is_written_as_it_was_last(stall):
    rng = random.Random(int(10 * stall))
    streams = [random_words(rng, 1000 * number, 60) for number in range(3)]
    expected, memory = {}, {}
    for words in streams:
        for word in words:
            apply(expected, word)
    out = merge(streams, stall)
    for word in out:
        assert word[2]
        apply(memory, word)
    assert memory == expected


def test_parts_of_a_word_leave_together():
    parts = [(7, 0x11 << 8 * byte, 1 << byte) for byte in range(8)] + [(8, 5, 15), (9, 0, 0), (8, 6 << 32, 0xF0)]
    assert merge([parts], 0.0) == [(7, 0x1111111111111111, 0xFF), (8, 5 | 6 << 32, 0xFF)]


def test_a_stream_goes_on_while_it_has_words():
    streams = [[(1000 * number + place, place, 0xFF) for place in range(20)] for number in range(2)]
    owners = [address // 1000 for address, _, _ in merge(streams, 0.0)]
    assert sum(a != b for a, b in pairwise(owners)) == 1
