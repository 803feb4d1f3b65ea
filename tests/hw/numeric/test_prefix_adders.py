"""Prefix adders on all networks: proven equal to plain addition, pipelined, of the depth and size they promise."""

import itertools
import random
from typing import get_args

import pytest
from adder_proofs import prove, simulate
from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator
from verilog_checks import lint, yosys

from kvant.hw.emit import emit
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.numeric.adders import ADDERS, NETWORKS, AdderName, StrategyAdder, adder_strategy
from kvant.hw.numeric.kogge_stone import KoggeStone
from kvant.hw.numeric.prefix_adders import BrentKung, HanCarlson, RippleCarry, Sklansky
from kvant.hw.parameters import ParameterError

# A component that refuses its parameters never gets elaborated, which Amaranth warns of.
pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

OTHERS = [RippleCarry, BrentKung, Sklansky, HanCarlson]
"""Kogge-Stone has tests of its own."""


@pytest.mark.parametrize("network", OTHERS)
def test_case_30_every_width_from_1_to_64_is_proven_equal_to_plain_addition(network, tmp_path):
    result = prove([network(width) for width in range(1, 65)], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("width", [2, 3, 9, 32])
@pytest.mark.parametrize("network", OTHERS)
def test_the_proof_finds_a_missing_level_and_a_wrong_wire(network, width, tmp_path):
    class LevelDropped(network):
        network = property(lambda self: super().network[:-1])

    class WrongWire(network):
        @property
        def network(self):
            levels = [dict(cells) for cells in super().network]
            place = max(levels[-1])
            levels[-1][place] -= 1
            return levels

    for fault in (LevelDropped, WrongWire):
        result = prove([fault(width)], tmp_path)
        assert result.returncode != 0
        assert "proof did fail" in result.stdout + result.stderr


@pytest.mark.parametrize("network", OTHERS)
def test_case_30_long_carries_and_signed_overflow(network):
    """What the proof says, seen in simulation: operands read as two's complement, sums that do and do not fit."""
    width = 24
    adder = network(width)
    full, top = (1 << width) - 1, 1 << width - 1
    words = [0, 1, full, top, top - 1, 0xAAAAAA, 0x555555]

    async def bench(ctx):
        for a, b, carry_in in itertools.product(words, words, range(2)):
            ctx.set(adder.a, a)
            ctx.set(adder.b, b)
            ctx.set(adder.carry_in, carry_in)
            total = a + b + carry_in
            signed = sum(word - (word >> width - 1 << width) for word in (a, b)) + carry_in
            assert (ctx.get(adder.sum), ctx.get(adder.carry_out)) == (total & full, total >> width)
            assert ctx.get(adder.overflow) == (not -top <= signed < top)
            await ctx.delay(1e-9)

    simulate(adder, bench)


@pytest.mark.parametrize("stages", [1, 2, "depth"])
@pytest.mark.parametrize("width", [2, 5, 16, 33])
@pytest.mark.parametrize("network", OTHERS)
def test_a_pipelined_adder_gives_a_sum_every_cycle_after_its_latency(network, width, stages):
    rng = random.Random(f"{width} {stages}")
    full = (1 << width) - 1
    operands = [(full, 1, 0), (full, 0, 1), (full, full, 1), (0xAAAAAAAA & full, 0x55555555 & full, 1)]
    operands += [(rng.randint(0, full), rng.randint(0, full), rng.randint(0, 1)) for _ in range(60)]
    adder = network(width, stages=network(width).depth if stages == "depth" else stages)

    async def bench(ctx):
        for cycle in range(len(operands) + adder.latency):
            a, b, carry_in = operands[min(cycle, len(operands) - 1)]
            ctx.set(adder.a, a)
            ctx.set(adder.b, b)
            ctx.set(adder.carry_in, carry_in)
            if cycle >= adder.latency:
                total = sum(operands[cycle - adder.latency])
                assert (ctx.get(adder.sum), ctx.get(adder.carry_out)) == (total & full, total >> width)
            await ctx.tick()

    simulate(adder, bench)


@pytest.mark.parametrize("logarithm", range(1, 8))
def test_depth_and_cells_are_those_of_the_literature(logarithm):
    places = 1 << logarithm
    width = places - 1
    assert (RippleCarry(width).depth, RippleCarry(width).cells) == (width, width)
    assert (Sklansky(width).depth, Sklansky(width).cells) == (logarithm, places // 2 * logarithm)
    assert (KoggeStone(width).depth, KoggeStone(width).cells) == (logarithm, places * logarithm - places + 1)
    assert BrentKung(width).depth == 2 * logarithm - 1
    assert BrentKung(width).cells == 2 * places - 2 - logarithm
    assert HanCarlson(width).depth == logarithm + (logarithm > 1)
    assert HanCarlson(width).cells == places // 2 * logarithm


@pytest.mark.parametrize("width", [1, 2, 6, 11, 24, 63, 64, 200])
def test_every_cell_joins_the_span_right_below_its_own(width):
    for network in NETWORKS.values():
        bottom = list(range(width + 1))
        for cells in network(width).network:
            before = list(bottom)
            for place, lower in cells.items():
                assert lower == before[place] - 1, (network.__name__, place, lower)
                bottom[place] = before[lower]
        assert not any(bottom)


def test_every_name_has_its_adder_and_every_parameter_class_takes_it():
    assert set(get_args(AdderName)) == set(ADDERS)
    for name in ADDERS:
        assert LinearParameters(adder=name).adder == CacheParameters(adder=name).adder == name


class Sums(wiring.Component):
    """Sums of one strategy: signed operands of unlike widths, with and without a carry."""

    def __init__(self, name):
        self.strategy = adder_strategy(name)
        super().__init__({"a": In(7), "b": In(4), "carry": In(1), "plain": Out(9), "carried": Out(6)})

    def elaborate(self, platform):
        m = Module()
        a, b = self.a.as_signed(), self.b.as_signed()
        m.d.comb += [
            self.plain.eq(self.strategy.add(m, "plain", a, b, width=9)),
            self.carried.eq(self.strategy.add(m, "carried", a, b, width=6, carry=self.carry)),
        ]
        return m


@pytest.mark.parametrize("name", ADDERS)
def test_a_strategy_extends_signs_and_cuts_to_its_width(name):
    dut = Sums(name)

    async def bench(ctx):
        for a, b, carry in itertools.product(range(-64, 64, 3), range(-8, 8), range(2)):
            for port, value in ((dut.a, a), (dut.b, b), (dut.carry, carry)):
                ctx.set(port, value)
            assert (ctx.get(dut.plain), ctx.get(dut.carried)) == (a + b & 511, a + b + carry & 63)
            await ctx.delay(1e-9)

    simulator = Simulator(dut)
    simulator.add_testbench(bench)
    simulator.run()


@pytest.mark.parametrize("name", ADDERS)
@pytest.mark.parametrize("width", [1, 4])
def test_a_strategy_as_a_component_adds(name, width):
    dut = StrategyAdder(width, name)

    async def bench(ctx):
        for a, b, carry in itertools.product(range(1 << width), range(1 << width), range(2)):
            for port, value in ((dut.a, a), (dut.b, b), (dut.carry_in, carry)):
                ctx.set(port, value)
            assert ctx.get(dut.sum) == (a + b + carry) % (1 << width)
            await ctx.delay(1e-9)

    simulator = Simulator(dut)
    simulator.add_testbench(bench)
    simulator.run()


@pytest.mark.parametrize("network", NETWORKS.values())
@pytest.mark.parametrize("stages", [0, 2])
def test_every_tool_is_silent(network, stages, tmp_path):
    (tmp_path / "adder.sv").write_text(emit(network(23, stages=stages), "adder").verilog)
    assert lint(tmp_path, "adder.sv", top="adder") == ""
    result = yosys(tmp_path, "read_verilog -sv adder.sv; hierarchy -check -top adder; proc; check -assert")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("network", OTHERS)
def test_illegal_parameters_are_refused_with_their_range(network):
    for width in (0, 1025, 8.0, True):
        with pytest.raises(ParameterError, match=r"^width = .*: legal is an integer from 1 to 1024$"):
            network(width)
    depth = network(8).depth
    for stages in (-1, depth + 1, True):
        with pytest.raises(ParameterError, match=rf"^stages = .*: legal is an integer from 0 to {depth} "):
            network(8, stages=stages)
