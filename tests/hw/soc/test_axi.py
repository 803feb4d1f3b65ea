"""Readers and the writer at a memory with latency, pauses and errors."""

import random

import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator
from axi_memory import memory_process

from kvant.hw.soc import axi_reader, axi_writer
from kvant.hw.soc.axi import ReadSignature
from kvant.hw.soc.axi_reader import AxiReader, ReadArbiter, Region, read_word
from kvant.hw.soc.axi_writer import AxiWriter
from kvant.hw.soc.parameters import SocParameters
from kvant.sim.errors import SimulationError
from kvant.sim.soc.memory import AxiMemory

STALLS = [0.0, 0.3, 0.9]


class Readers(wiring.Component):
    """Readers behind an arbiter."""

    def __init__(self, p, clients, *, depth=64, burst_beats=16):
        self.p, self.clients = p, clients
        self.readers = [AxiReader(p, depth=depth, burst_beats=burst_beats) for _ in range(clients)]
        super().__init__(
            {
                "region": In(stream.Signature(Region(p))).array(clients),
                "o": Out(stream.Signature(read_word(p))).array(clients),
                "stop": In(1),
                "owes": Out(1),
                "bus": Out(ReadSignature(p)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.arbiter = arbiter = ReadArbiter(self.p, self.clients)
        wiring.connect(m, arbiter.bus, wiring.flipped(self.bus))
        for number, reader in enumerate(self.readers):
            m.submodules[f"reader_{number}"] = reader
            wiring.connect(m, reader.port, arbiter.ports[number])
            wiring.connect(m, wiring.flipped(self.region[number]), reader.region)
            wiring.connect(m, reader.o, wiring.flipped(self.o[number]))
        m.d.comb += [arbiter.stop.eq(self.stop), self.owes.eq(arbiter.owes)]
        return m


async def give(ctx, port, payloads, rng, stall):
    for payload in payloads:
        while rng.random() < stall:
            await ctx.tick()
        ctx.set(port.payload, payload)
        ctx.set(port.valid, 1)
        while not ctx.get(port.ready):
            await ctx.tick()
        await ctx.tick()
        ctx.set(port.valid, 0)


async def take(ctx, port, count, rng, stall, seen):
    while len(seen) < count:
        ready = rng.random() >= stall
        ctx.set(port.ready, ready)
        if ready and ctx.get(port.valid):
            seen.append((ctx.get(port.payload.data), ctx.get(port.payload.error)))
        await ctx.tick()
    ctx.set(port.ready, 0)


def limit(memory, cycles):
    """Testbench that ends the simulation with an error if it takes too long."""

    async def process(ctx):
        for _ in range(cycles):
            await ctx.tick()
        raise AssertionError(f"not done after {cycles} cycles; reads {memory.reads}, writes {memory.writes}")

    return process


def filled(memory, seed=1):
    memory.data[:] = random.Random(seed).randbytes(memory.size)
    return memory


def read_all(p, regions, memory, *, stall=0.0, depth=64, burst_beats=16, cycles=20_000):
    """Read *regions* (of each client a list of (word address, words)); words, and the cycle of the last one."""
    dut = Readers(p, len(regions), depth=depth, burst_beats=burst_beats)
    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    seen = [[] for _ in regions]
    end = []

    def client(number):
        async def feed(ctx):
            payloads = [{"address": a, "words": n} for a, n in regions[number]]
            await give(ctx, dut.region[number], payloads, random.Random(number), stall)

        async def drain(ctx):
            count = sum(n for _, n in regions[number])
            await take(ctx, dut.o[number], count, random.Random(100 + number), stall, seen[number])
            end.append(memory.cycle)

        simulator.add_testbench(feed)
        simulator.add_testbench(drain)

    for number in range(len(regions)):
        client(number)
    simulator.add_testbench(memory_process(dut.bus, memory), background=True)
    simulator.add_testbench(limit(memory, cycles), background=True)
    simulator.run()
    return seen, max(end)


def words_of(p, memory, regions):
    size = p.port_bytes
    return [
        int.from_bytes(memory.data[place * size : (place + 1) * size], "little")
        for first, count in regions
        for place in range(first, first + count)
    ]


@pytest.mark.parametrize("stall", STALLS)
@pytest.mark.parametrize(("port_bits", "burst_beats"), [(128, 16), (32, 64), (512, 5)])
def test_readers_return_their_regions_in_order(stall, port_bits, burst_beats):
    p = SocParameters(port_bits=port_bits)
    memory = filled(AxiMemory(1 << 15, p.port_bytes, latency=7, stall=stall, seed=3))
    page = 4096 // p.port_bytes
    regions = [
        [(0, 1), (page - 1, 2), (page - 3, 40)],
        [(2 * page - 1, 1), (page, burst_beats + 1)],
        [(5, 70)],
    ]
    seen, _ = read_all(p, regions, memory, stall=stall, burst_beats=burst_beats)
    for number, parts in enumerate(regions):
        assert seen[number] == [(word, 0) for word in words_of(p, memory, parts)]
    assert max(beats for _, beats in memory.reads) <= burst_beats


def test_bursts_are_as_long_as_the_rules_allow():
    p = SocParameters(port_bits=128)
    memory = AxiMemory(1 << 15, p.port_bytes)
    read_all(p, [[(250, 600)]], memory, depth=256, burst_beats=256)
    assert memory.reads == [(4000, 6), (4096, 256), (8192, 256), (12288, 82)]


@pytest.mark.parametrize(("depth", "burst_beats"), [(128, 16), (128, 64), (512, 256)])
def test_a_reader_streams_without_a_gap_at_a_latency_of_50(depth, burst_beats):
    p = SocParameters(port_bits=128)
    memory = filled(AxiMemory(1 << 16, p.port_bytes, latency=50))
    seen, end = read_all(p, [[(0, 2048)]], memory, depth=depth, burst_beats=burst_beats)
    assert seen[0] == [(word, 0) for word in words_of(p, memory, [(0, 2048)])]
    assert end <= 2048 + 50 + 20


def test_readers_share_the_port_in_turn_and_use_all_of_it():
    p = SocParameters(port_bits=128)
    memory = filled(AxiMemory(1 << 16, p.port_bytes, latency=50))
    _, end = read_all(p, [[(0, 512)], [(512, 512)], [(1024, 512)]], memory, depth=64)
    assert end <= 3 * 512 + 50 + 60
    clients = [address // (512 * 16) for address, _ in memory.reads]
    assert all(14 <= clients[:48].count(client) <= 18 for client in range(3))


def test_an_error_comes_with_its_word():
    p = SocParameters(port_bits=64)
    memory = filled(AxiMemory(1 << 12, 8, fault=lambda kind, address: address in (80, 88 + 8 * 16)))
    seen, _ = read_all(p, [[(0, 100)]], memory)
    assert [index for index, (_, error) in enumerate(seen[0]) if error] == [10, 27]


def test_after_a_stop_nothing_is_asked_for_and_nothing_is_owed():
    p = SocParameters(port_bits=64)
    memory = filled(AxiMemory(1 << 14, 8, latency=30))
    dut = Readers(p, 1)
    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    asked = []

    async def bench(ctx):
        await give(ctx, dut.region[0], [{"address": 0, "words": 1000}], random.Random(0), 0)
        await ctx.tick().repeat(40)
        ctx.set(dut.stop, 1)
        await ctx.tick().repeat(8)
        asked.append(len(memory.reads))
        await ctx.tick().until(~dut.owes)
        assert not memory.busy
        await ctx.tick().repeat(100)
        asked.append(len(memory.reads))

    simulator.add_testbench(bench)
    simulator.add_testbench(memory_process(dut.bus, memory), background=True)
    simulator.run()
    assert asked[0] == asked[1] > 0


def write_all(p, words, memory, *, stall=0.0, depth=32, burst_beats=16, cycles=20_000, stop_at=None):
    """Write *words*, a list of (word address, data, strobes); (errors, idle at the end, cycles)."""
    dut = AxiWriter(p, depth=depth, burst_beats=burst_beats)
    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    result = {"errors": 0, "end": None}

    async def feed(ctx):
        payloads = [dict(zip(("address", "data", "strobes"), word, strict=True)) for word in words]
        await give(ctx, dut.i, payloads, random.Random(5), stall)
        ctx.set(dut.flush, 1)
        await ctx.tick().repeat(3)
        await ctx.tick().until(dut.idle)
        result["end"] = memory.cycle

    async def watch(ctx):
        while True:
            if stop_at is not None and memory.cycle == stop_at:
                ctx.set(dut.stop, 1)
            result["errors"] += ctx.get(dut.error)
            result["owes"] = ctx.get(dut.owes)
            await ctx.tick()

    simulator.add_testbench(feed, background=stop_at is not None)
    simulator.add_testbench(memory_process(dut.bus, memory), background=True)
    simulator.add_testbench(watch, background=True)
    if stop_at is None:
        simulator.add_testbench(limit(memory, cycles), background=True)
        simulator.run()
    else:
        simulator.run_until(cycles * 1e-8)
    return result


def random_writes(p, rng, memory_size):
    """Runs of words at random places, and the memory they make."""
    expected = bytearray(memory_size)
    words = []
    for _ in range(25):
        count = rng.choice([1, 2, 3, 16, 17, 40])
        first = rng.randrange(memory_size // p.port_bytes - count)
        for place in range(first, first + count):
            data, strobes = rng.getrandbits(p.port_bits), rng.getrandbits(p.port_bytes)
            words.append((place, data, strobes))
            for byte in range(p.port_bytes):
                if strobes >> byte & 1:
                    expected[place * p.port_bytes + byte] = data >> 8 * byte & 255
    return words, expected


@pytest.mark.parametrize("stall", STALLS)
@pytest.mark.parametrize("port_bits", [32, 128])
def test_the_writer_writes_what_is_strobed_where_it_belongs(stall, port_bits):
    p = SocParameters(port_bits=port_bits)
    memory = AxiMemory(1 << 14, p.port_bytes, latency=5, stall=stall, seed=9)
    words, expected = random_writes(p, random.Random(port_bits), memory.size)
    result = write_all(p, words, memory, stall=stall)
    assert result["end"] is not None and result["errors"] == 0
    assert memory.data == expected


def test_consecutive_words_are_long_bursts():
    p = SocParameters(port_bits=128)
    memory = AxiMemory(1 << 14, p.port_bytes, latency=20)
    words = [(place, place, 0xFFFF) for place in range(250, 550)]
    result = write_all(p, words, memory)
    assert memory.writes[0] == (4000, 6)
    assert all(beats == 16 for _, beats in memory.writes[1:-1]) and len(memory.writes) == 20
    assert result["end"] <= 300 + 20 * 3 + 60


def test_errors_of_writes_are_reported_and_nothing_hangs():
    p = SocParameters(port_bits=128)
    memory = AxiMemory(1 << 14, p.port_bytes, fault=lambda kind, address: kind == "write" and address == 0x100)
    words = [(place, place, 0xFFFF) for place in range(100)]
    result = write_all(p, words, memory)
    assert result["errors"] == 1 and result["end"] is not None


def test_a_stopped_writer_finishes_its_burst_without_writing():
    p = SocParameters(port_bits=32)
    memory = AxiMemory(1 << 12, p.port_bytes, latency=3, stall=0.5)
    words = [(place, 0xFFFFFFFF, 15) for place in range(200)]
    result = write_all(p, words, memory, stop_at=150, cycles=600)
    assert not result["owes"] and not memory.busy
    written = memory.data.index(0) // 4
    assert 0 < written < 199 and not any(memory.data[4 * written :])
    assert len(memory.writes) * 16 < 200


def test_the_memory_refuses_a_burst_across_4_kb_and_a_payload_that_changes():
    """The model would see a fault of the master."""
    memory = AxiMemory(1 << 14, 16)
    idle = dict.fromkeys(("arvalid", "awvalid", "wvalid", "rready", "bready"), 0)
    request = {"arid": 0, "araddr": 4080, "arlen": 1, "arsize": 4, "arburst": 1}
    zeros = dict.fromkeys(("awid", "awaddr", "awlen", "awsize", "awburst", "wdata", "wstrb", "wlast"), 0)
    memory.drive()
    with pytest.raises(SimulationError, match="2 beats cross"):
        memory.sample(idle | zeros | request | {"arvalid": 1})
    memory = AxiMemory(1 << 14, 16, stall=0.999)
    memory.drive()
    memory.sample(idle | zeros | request | {"arvalid": 1, "arlen": 0})
    memory.drive()
    with pytest.raises(SimulationError, match="changed while it waited"):
        memory.sample(idle | zeros | request | {"arvalid": 1, "arlen": 0, "araddr": 0})


@pytest.mark.parametrize("module", [axi_reader, axi_writer])
def test_a_master_that_forgets_4_kb_is_caught(monkeypatch, module):
    p = SocParameters(port_bits=128)
    memory = AxiMemory(1 << 15, p.port_bytes)
    monkeypatch.setattr(module, "PAGE_BYTES", 8192)
    with pytest.raises(SimulationError, match="cross a multiple of 4096"):
        if module is axi_reader:
            read_all(p, [[(250, 30)]], memory)
        else:
            write_all(p, [(place, place, 0xFFFF) for place in range(250, 280)], memory)
