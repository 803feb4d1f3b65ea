"""The attention unit at a memory: caches behind page tables, records, queries, outputs, faults."""

import random
import struct

import numpy as np
import pytest
import torch
from amaranth.hdl import Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator
from axi_memory import memory_process
from cache_images import queries, record

from kvant.attention import contents_of
from kvant.golden.attention.engine import attend
from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.spatial import spatial_cache
from kvant.golden.kvcache.temporal import temporal_cache
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.linear.parameters import LinearParameters, ceil_div
from kvant.hw.soc import page_table
from kvant.hw.soc.attend_job import AttendJob
from kvant.hw.soc.attend_unit import FAULTS, READERS, AttendUnit
from kvant.hw.soc.axi import MasterSignature, ReadSignature, WriteSignature
from kvant.hw.soc.axi_reader import ReadArbiter
from kvant.hw.soc.axi_writer import AxiWriter
from kvant.hw.soc.cache_memory import CacheMemory
from kvant.hw.soc.descriptors import ErrorCode
from kvant.hw.soc.fault import Fault
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.hw.soc.write_arbiter import WriteArbiter
from kvant.sim.attention.engine import Attend
from kvant.sim.soc.memory import AxiMemory

SEED = 20261201
TABLES = Tables.of(DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS)
UNWRITTEN = 0xA5


def make(port_bits=128, **fields):
    attention = AttentionParameters(port_bits=port_bits, **fields)
    linear = LinearParameters(rows=2, cols=2, group=max(8, port_bits // 16))
    soc = SocParameters(port_bits=port_bits, burst_beats=8, weight_words=32)
    return TopParameters(linear, soc, attention=attention)


SMALL = make(group=8, head_dim=8, rows=4, cols=2, lanes=4, capacity=32, sinks=2, queries=2)
SHAPES = [
    make(64, group=16, head_dim=32, rows=4, cols=4, capacity=64, sinks=3, queries=3, quant_lanes=2),
    make(32, group=16, head_dim=12, rows=4, cols=8, lanes=16, capacity=64, sinks=1, queries=1, weight_planes=1),
]
"""Several groups a token, transfers of several words; a short group, words shorter than a transfer."""


class Bench(wiring.Component):
    """The unit at a port of its own."""

    def __init__(self, p):
        self.p = p
        super().__init__(
            {
                "job": In(stream.Signature(AttendJob(p))),
                "done": Out(1),
                "faults": Out(Fault()).array(FAULTS),
                "nonfinite": Out(1),
                "error": Out(1),
                "stop": In(1),
                "clear": In(1),
                "owes": Out(1),
                "write_error": Out(1),
                "bus": Out(MasterSignature(p.soc)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        clear = Signal()
        parts = {
            "unit": AttendUnit(p),
            "arbiter": ReadArbiter(p.soc, READERS),
            "writes": WriteArbiter(p.soc, 1),
            "writer": AxiWriter(p.soc, depth=32, burst_beats=16),
        }
        unit, arbiter, writes, writer = parts.values()
        for name, part in parts.items():
            m.submodules[name] = ResetInserter(clear)(part)
        for number in range(READERS):
            wiring.connect(m, unit.readers[number], arbiter.ports[number])
        wiring.connect(m, unit.memory, writes.ports[0])
        wiring.connect(m, writes.o, writer.i)
        wiring.connect(m, wiring.flipped(self.job), unit.job)
        for half, signature in ((arbiter.bus, ReadSignature(p.soc)), (writer.bus, WriteSignature(p.soc))):
            for name, member in signature.members.items():
                ours, theirs = getattr(self.bus, name), getattr(half, name)
                m.d.comb += ours.eq(theirs) if member.flow is Out else theirs.eq(ours)
        m.d.comb += [
            clear.eq(self.clear),
            arbiter.stop.eq(self.stop),
            writer.stop.eq(self.stop),
            self.owes.eq(arbiter.owes | writer.owes),
            writer.flush.eq(writes.flush),
            writes.idle.eq(writer.idle),
            self.done.eq(unit.done),
            self.nonfinite.eq(unit.nonfinite),
            self.error.eq(unit.error),
            self.write_error.eq(writer.error),
        ]
        m.d.comb += [ours.eq(theirs) for ours, theirs in zip(self.faults, unit.faults, strict=True)]
        return m


class Image:
    """Memory with the caches of sequences, whose pages lie in any order, and queries; jobs over them."""

    def __init__(self, p, *, seed=0, size=1 << 16, **options):
        self.p, self.rng = p, random.Random(seed)
        self.memory = AxiMemory(size, p.soc.port_bytes, **options)
        self.memory.data[:] = bytes([UNWRITTEN]) * size
        self.layout = CacheMemory(p.cache_shape, p.soc.port_bytes)
        self.free = p.soc.port_bytes

    def place(self, content):
        """Address of *content*, at any word."""
        step = self.p.soc.port_bytes
        address = self.free + step * self.rng.randrange(5)
        self.free = ceil_div(address + len(content), step) * step
        assert self.free <= self.memory.size
        self.memory.data[address : address + len(content)] = content
        return address

    def pool(self, pages, page_bytes, numbers):
        """Address of a pool whose pages of these numbers are *pages*."""
        raw = bytearray([UNWRITTEN]) * (page_bytes * (max(numbers) + 1))
        for page, number in zip(pages, numbers, strict=False):
            raw[number * page_bytes : (number + 1) * page_bytes] = page
        return self.place(raw)

    def job(self, command, slot):
        """The fields of `AttendJob` for a command, and where its outputs go: address, stride in bytes."""
        attention, step = self.p.attention, self.p.soc.port_bytes
        contents = command.contents
        windows = ceil_div(contents.tokens, attention.group)
        numbers = self.rng.sample(range(windows + 3), windows)
        raw = queries(self.layout, command)
        query_stride = len(raw[0]) + step * self.rng.randrange(2)
        row = ceil_div(4 * attention.head_dim, step) * step
        out_stride = row + step * self.rng.randrange(3)
        addresses = {
            "table": self.place(struct.pack(f"<{windows}I", *numbers)),
            "key_pool": self.pool(contents.keys.pages, self.layout.keys.page_bytes, numbers),
            "value_pool": self.pool(contents.values.pages, self.layout.values.page_bytes, numbers),
            "record": self.place(record(attention, self.layout, contents)),
            "q": self.place(b"".join(each.ljust(query_stride, b"\xff") for each in raw)),
            "out": self.place(bytes([UNWRITTEN]) * (out_stride * len(raw))),
        }
        job = {name: address // step for name, address in addresses.items()}
        numbers = {"queries": len(raw), "tokens": contents.tokens, "sinks": contents.sinks, "slot": slot}
        strides = {"query_stride": query_stride // step, "out_stride": out_stride // step}
        return job | numbers | strides, (addresses["out"], out_stride)

    def outputs(self, place, count):
        """Rows of outputs f32 [count, d], when nothing else of the rows was touched."""
        address, stride = place
        raw = np.frombuffer(bytes(self.memory.data[address : address + stride * count]), np.uint8)
        rows = raw.reshape(count, stride)
        used = 4 * self.p.attention.head_dim
        assert (rows[:, used:] == UNWRITTEN).all()
        return rows[:, :used].copy().view(np.float32)


def command_of(p, tokens, count, *, sinks=0, seed=1, first=None, end=None, slope=None):
    """Queries over random caches, and the golden outputs."""
    attention = p.attention
    rng = np.random.default_rng((SEED, seed))
    shapes = [(count, attention.head_dim), (tokens, attention.head_dim), (tokens, attention.head_dim)]
    q, k, v = (torch.from_numpy(rng.standard_normal(shape).astype(np.float16)) for shape in shapes)
    options = {"group": attention.group, "tables": TABLES, "sinks": sinks}
    keys, values = spatial_cache(k, **options), temporal_cache(v, tokens, **options)
    first, end = first or [0] * count, end or [tokens] * count
    slope = np.array(slope or [0] * count, np.float16)
    limits = {"first": torch.tensor(first), "end": torch.tensor(end), "slope": torch.from_numpy(slope)}
    result = attend(q, keys, values, planes=attention.weight_planes, **limits)
    command = Attend(contents_of(attention, (keys, values)), q.numpy(), first=first, end=end, slope=slope)
    return command, result.out.numpy()


def run(p, commands, image, *, fault_at=None, cycles=40_000, gap=0):
    """Jobs through the unit; fields of interest at the end."""
    dut = Bench(p)
    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    jobs = [image.job(command, number % 2) for number, command in enumerate(commands)]
    seen = {"done": [], "nonfinite": 0, "error": 0, "faults": []}

    async def bench(ctx):
        for number, (job, _) in enumerate(jobs):
            ctx.set(dut.job.payload, job)
            while number - len(seen["done"]) >= 2:  # as many as the sequencer lets come under way
                await ctx.tick()
            ctx.set(dut.job.valid, 1)
            await ctx.tick().until(dut.job.ready)
            ctx.set(dut.job.valid, 0)
            await ctx.tick().repeat(gap + 1)
        while len(seen["done"]) < len(jobs) and not seen["faults"]:
            await ctx.tick()

    async def watch(ctx):
        for cycle in range(cycles):
            seen["nonfinite"] |= ctx.get(dut.nonfinite)
            seen["error"] |= ctx.get(dut.error)
            seen["faults"] = seen["faults"] or [
                *((ctx.get(fault.code), ctx.get(fault.slot)) for fault in dut.faults if ctx.get(fault.code)),
                *[(ErrorCode.WRITE_ATTEND, len(seen["done"]))] * ctx.get(dut.write_error),  # of the oldest job
            ]
            if ctx.get(dut.done):
                seen["done"].append(cycle)
            await ctx.tick()
        raise AssertionError(f"not done after {cycles} cycles, {len(seen['done'])} jobs of {len(jobs)}")

    simulator.add_testbench(bench)
    simulator.add_testbench(watch, background=True)
    simulator.add_testbench(memory_process(dut.bus, image.memory), background=True)
    simulator.run()
    return seen, [place for _, place in jobs]


def check(p, pairs, *, stall=0.0, latency=10, seed=3, **options):
    """Holds the outputs of commands against the golden ones; what was seen, and the memory."""
    image = Image(p, seed=seed, latency=latency, stall=stall)
    seen, places = run(p, [command for command, _ in pairs], image, **options)
    for place, (_, expected) in zip(places, pairs, strict=True):
        result = image.outputs(place, len(expected))
        assert np.array_equal(result.view(np.uint32), expected.view(np.uint32))
    assert len(seen["done"]) == len(pairs) and not seen["error"]
    return seen, image


MIXED = [(1, 2, 1), (17, 2, 2), (16, 1, 0), (31, 2, 2), (8, 1, 1), (5, 2, 0)]
"""Tokens, queries, sinks: an open window alone, whole windows, sinks in pages, all there is."""


@pytest.mark.parametrize("stall", [0.0, 0.3, 0.9])
def test_jobs_of_several_sequences_follow_each_other(stall):
    pairs = [command_of(SMALL, *numbers[:2], sinks=numbers[2], seed=k) for k, numbers in enumerate(MIXED)]
    check(SMALL, pairs if stall < 0.5 else pairs[1:2], stall=stall, seed=int(10 * stall))


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_other_shapes(number):
    p = SHAPES[number]
    queries_, sinks = p.attention.queries, p.attention.sinks
    pairs = [command_of(p, tokens, queries_, sinks=s, seed=tokens) for tokens, s in ((33, sinks), (16, 0), (3, 1))]
    check(p, pairs, stall=0.1)


def test_what_a_query_sees_comes_with_it():
    pairs = [command_of(SMALL, 20, 2, first=[3, 4], end=[11, 4], slope=[0.25, 1.5])]
    check(SMALL, pairs)


def test_the_next_job_is_read_while_the_one_before_ends():
    pairs = [command_of(SMALL, 16, 1, seed=7)] * 3
    together, _ = check(SMALL, pairs, latency=50)
    alone, _ = check(SMALL, pairs[:1], latency=50)
    assert together["done"][2] - together["done"][1] < alone["done"][0] - 80


def test_nan_in_a_query_is_reported_for_each_busy_time():
    command, _ = command_of(SMALL, 9, 1)
    command.queries[0, 3] = np.nan
    image = Image(SMALL)
    seen, _ = run(SMALL, [command], image)
    assert seen["nonfinite"] and not seen["error"]


PLACES = [
    "q",
    "q elements",
    "table",
    "key_pool",
    "value_pool",
    "key sinks",
    "value sinks",
    "value_scales",
    "window",
    "out",
]


@pytest.mark.parametrize(("victim", "place"), [(number % 2, place) for number, place in enumerate(PLACES)])
def test_an_error_of_the_memory_names_the_job_that_asked(place, victim):
    commands = [command_of(SMALL, 9, 1, sinks=1, seed=k)[0] for k in range(2)]
    image = Image(SMALL, latency=5)
    jobs = []
    original = image.job

    def job_of(command, slot):
        jobs.append(original(command, slot))
        if slot == victim:
            job, (out, _) = jobs[-1]
            layout, step = image.layout.record, SMALL.soc.port_bytes
            at = {
                "q": job["q"] * step,
                "q elements": job["q"] * step + image.layout.query.elements.offset,
                "table": job["table"] * step,
                "key sinks": job["record"] * step,
                "value sinks": job["record"] * step + layout.value_sinks.offset + layout.row_bytes,
                "value_scales": job["record"] * step + layout.value_scales.offset,
                "window": job["record"] * step + layout.value_window.offset,
                "out": out,
            }
            if place in ("key_pool", "value_pool"):
                page_bytes = getattr(image.layout, place.removesuffix("_pool") + "s").page_bytes
                number = int.from_bytes(image.memory.data[job["table"] * step :][:4], "little")
                address = job[place] * step + number * page_bytes + step
            else:
                address = at[place]
            kind = "write" if place == "out" else "read"
            image.memory.fault = lambda what, where: (what, where) == (kind, address)
        return jobs[-1]

    image.job = job_of
    seen, _ = run(SMALL, commands, image)
    assert seen["faults"] == [(ErrorCode.WRITE_ATTEND if place == "out" else ErrorCode.READ_ATTEND, victim)]


def test_another_page_number_is_seen(monkeypatch):
    monkeypatch.setattr(page_table, "PAGE_NUMBER_BYTES", 8)
    with pytest.raises(AssertionError):
        check(SMALL, [command_of(SMALL, 17, 1)], cycles=4000)
