"""Packed weights become the beats of the linear path, whatever the widths."""

import random

import numpy as np
import pytest
from amaranth.hdl import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator
from axi_memory import memory_process

from kvant import config
from kvant.hw.linear.jobs import JobNumbers
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.linear.weight_buffer import weight_input
from kvant.hw.parameters import ParameterError
from kvant.hw.soc.axi import ReadSignature
from kvant.hw.soc.axi_reader import ReadArbiter
from kvant.hw.soc.fault import Fault
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.hw.soc.weight_layout import layout, pack_weights, stored_interleave, unit_bits
from kvant.hw.soc.weight_reader import WeightJob, WeightReader
from kvant.linear import random_case
from kvant.sim.linear.engine import stimulus
from kvant.sim.soc.memory import AxiMemory

BASE = 0xFC0


class Weights(wiring.Component):
    """A weight reader at a port of its own."""

    def __init__(self, p):
        self.p = p
        super().__init__(
            {
                "job": In(stream.Signature(WeightJob(p))),
                "w": Out(stream.Signature(weight_input(p.linear))),
                "fault": Out(Fault()),
                "bus": Out(ReadSignature(p.soc)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.arbiter = arbiter = ReadArbiter(self.p.soc, 1)
        m.submodules.weights = weights = WeightReader(self.p)
        wiring.connect(m, arbiter.bus, wiring.flipped(self.bus))
        wiring.connect(m, weights.port, arbiter.ports[0])
        wiring.connect(m, wiring.flipped(self.job), weights.job)
        wiring.connect(m, weights.w, wiring.flipped(self.w))
        m.d.comb += self.fault.eq(weights.fault)
        return m


def make(overrides, **soc):
    chosen = config.load(None, overrides)
    return chosen, TopParameters(chosen.linear, SocParameters(**soc))


def pack(p, case, interleave):
    return pack_weights(p, case["w_codes"], case["w_scale"], case["w_coeff"], case["w_int8"], interleave=interleave)


def play(p, case, *, interleave, packed_for=None, jobs=1, stall=0.0, latency=20, fault=None, cut=0, cycles=20_000):
    """Read the weights of *case*, *jobs* times; beats (codes, metadata), cycles, fault."""
    linear = p.linear
    raw = pack(p, case, packed_for or interleave)
    memory = AxiMemory(1 << 16, p.soc.port_bytes, latency=latency, stall=stall, seed=2)
    memory.data[BASE : BASE + len(raw)] = raw
    if fault is not None:
        memory.fault = lambda kind, address: address == BASE + fault
    outputs, inputs = case["w_codes"].shape
    groups, tiles = ceil_div(inputs, linear.group), ceil_div(outputs, linear.cols)
    tail = inputs - (groups - 1) * linear.group
    numbers = JobNumbers(0, 1, groups, tail, tiles, outputs - (tiles - 1) * linear.cols, interleave)
    w = stimulus(linear, [numbers], case).inputs["w"]
    expected = list(zip(w["data"], w["user"], strict=True)) * jobs

    dut = Weights(p)
    simulator = Simulator(dut)
    simulator.add_clock(1e-8)
    seen, result = [], {}
    rng = random.Random(4)

    async def feed(ctx):
        words = len(raw) // p.soc.port_bytes - cut
        for _ in range(jobs):
            payload = {
                "region": {"address": BASE // p.soc.port_bytes, "words": words},
                "tiles": tiles,
                "interleave": interleave,
                "groups": groups,
                "tail_beats": ceil_div(tail, linear.rows),
            }
            ctx.set(dut.job.payload, payload)
            ctx.set(dut.job.valid, 1)
            while not ctx.get(dut.job.ready):
                await ctx.tick()
            await ctx.tick()
            ctx.set(dut.job.valid, 0)

    async def drain(ctx):
        while len(seen) < len(expected):
            ready = rng.random() >= stall
            ctx.set(dut.w.ready, ready)
            await ctx.delay(0)
            if ready and ctx.get(dut.w.valid):
                payload = ctx.get(dut.w.payload.as_value())
                seen.append((payload & ((1 << 4 * linear.lanes) - 1), payload >> 4 * linear.lanes))
            if ctx.get(dut.fault.code) or memory.cycle > cycles:
                break
            await ctx.tick()
        result["cycles"] = memory.cycle
        ctx.set(dut.w.ready, 0)
        for _ in range(10):
            await ctx.tick()
        result["fault"] = ctx.get(dut.fault.code)
        result["more"] = ctx.get(dut.w.valid)

    simulator.add_testbench(feed, background=True)
    simulator.add_testbench(drain)
    simulator.add_testbench(memory_process(dut.bus, memory), background=True)
    simulator.run()
    return seen, expected, result


GEOMETRIES = [
    (["rows=8", "cols=8", "group=64"], 128),
    (["rows=5", "cols=3", "group=16"], 128),
    (["rows=2", "cols=3", "group=16"], 64),
    (["rows=8", "cols=2", "group=32"], 512),
    (["rows=16", "cols=4", "group=32"], 32),
]


@pytest.mark.parametrize("stall", [0.0, 0.3])
@pytest.mark.parametrize(("overrides", "port_bits"), GEOMETRIES)
def test_beats_are_those_of_the_linear_path(overrides, port_bits, stall):
    chosen, p = make(overrides, port_bits=port_bits, burst_beats=16, weight_words=64)
    cols, group = p.linear.cols, p.linear.group
    case = random_case(chosen, tokens=1, outputs=2 * cols + 1, inputs=group + group // 3, seed=5)
    assert (case["w_coeff"] == 254).any()
    seen, expected, result = play(p, case, interleave=2, jobs=2, stall=stall)
    assert seen == expected
    assert result["fault"] == 0 and not result["more"]


def test_weights_stream_at_the_full_width_of_the_port():
    """8 x 8 lanes take 280 bits a beat: a port of 128 bits is what limits them."""
    chosen, p = make(["int8_groups=false"], port_bits=128)
    case = random_case(chosen, tokens=1, outputs=64, inputs=640, seed=5)
    seen, expected, result = play(p, case, interleave=1, latency=50)
    words = len(pack(p, case, 1)) // 16
    assert seen == expected
    assert result["cycles"] <= words + 50 + 40


def test_a_fault_of_the_packing_is_seen():
    chosen, p = make(GEOMETRIES[2][0], port_bits=64, burst_beats=16, weight_words=64)
    case = random_case(chosen, tokens=1, outputs=11, inputs=40, seed=5)
    seen, expected, _ = play(p, case, interleave=2, packed_for=3)
    assert seen != expected


@pytest.mark.parametrize(("fault", "cut", "code"), [(0, 0, 17), (160, 0, 17), (None, 1, 20), (None, -1, 20)])
def test_faults_end_the_stream_and_are_reported(fault, cut, code):
    chosen, p = make(GEOMETRIES[2][0], port_bits=64, burst_beats=16, weight_words=64)
    case = random_case(chosen, tokens=1, outputs=11, inputs=40, seed=5)
    seen, expected, result = play(p, case, interleave=2, fault=fault, cut=cut)
    assert result["fault"] == code
    assert seen == expected[: len(seen)]


def test_packed_weights_take_few_bits_more_than_their_codes():
    _, p = make([], port_bits=128)
    assert layout(p)["bits_per_weight"] == 4.375
    codes = np.zeros((576, 576), np.uint8)
    scale, coefficient = np.zeros((576, 9), np.float16), np.zeros((576, 9), np.uint8)
    raw = pack_weights(p, codes, scale, coefficient, interleave=stored_interleave(p.linear, 576))
    assert 8 * len(raw) / codes.size <= 4.3754
    assert unit_bits(p) == 64


def test_what_cannot_be_packed_is_refused():
    chosen, p = make(["int8_groups=false"], port_bits=128)
    case = random_case(chosen, tokens=1, outputs=8, inputs=64, seed=0)
    with pytest.raises(ParameterError, match=r"interleave = 65: legal is an integer from 1 to 64"):
        pack(p, case, 65)
    case["w_coeff"][0, 0] = 254
    with pytest.raises(ParameterError, match="coefficient = 254: the design has int8_groups = false"):
        pack(p, case, 1)
    with pytest.raises(ParameterError, match="scale: shape"):
        pack_weights(p, case["w_codes"], case["w_scale"][:, :0], case["w_coeff"], interleave=1)
