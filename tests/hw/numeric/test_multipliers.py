"""Lane multipliers, exhaustively: every activation times every code and every INT8 digit."""

import itertools

import pytest
from amaranth.back import rtlil
from amaranth.hdl import Signal, signed
from amaranth.sim import Simulator

from kvant.hw.numeric.multipliers import LANES, lane_multiplier
from kvant.hw.parameters import ParameterError

ACTIVATIONS = range(-128, 128)
CODE, LOW_DIGIT, HIGH_DIGIT = (0, 0), (1, 0), (1, 1)
"""What a lane reads its four bits as: (int8, high)."""


def products(x, code, reading):
    """Product and shifted product by their definitions."""
    i = code & 7
    if reading == CODE:
        sign = -1 if code & 8 else 1
        return sign * x * i, sign * (x << i)
    digit = code - 16 if reading == HIGH_DIGIT and code & 8 else code
    return x * i, x * digit - x * i


def run(lane, stimulus):
    """Products of every (x, code, reading), one a cycle."""
    stimulus = list(stimulus)
    results = []

    async def bench(ctx):
        for cycle in range(len(stimulus) + lane.latency):
            x, code, (int8, high) = stimulus[min(cycle, len(stimulus) - 1)]
            ctx.set(lane.x, x)
            ctx.set(lane.code, code)
            ctx.set(lane.int8, int8)
            ctx.set(lane.high, high)
            if cycle >= lane.latency:
                product, shifted = ctx.get(lane.product), ctx.get(lane.shifted)
                results.append((product.value + product.carry, shifted.value + shifted.carry))
            await ctx.tick()

    simulator = Simulator(lane)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return results


@pytest.mark.parametrize("adder", ["plus", "kogge_stone"])
@pytest.mark.parametrize("strategy", LANES)
def test_every_product_is_exact_and_comes_after_the_latency(strategy, adder):
    # Neighbouring cycles differ in everything, so that a register too many or too few shows.
    stimulus = list(itertools.product(ACTIVATIONS, range(16), (CODE, LOW_DIGIT, HIGH_DIGIT)))
    lane = lane_multiplier(strategy)(adder=adder)
    assert run(lane, stimulus) == [products(*entry) for entry in stimulus]


@pytest.mark.parametrize("strategy", LANES)
def test_without_int8_groups_the_digit_flags_are_ignored(strategy):
    stimulus = list(itertools.product((-128, -77, -1, 0, 1, 127), range(16), (CODE, LOW_DIGIT, HIGH_DIGIT)))
    lane = lane_multiplier(strategy)(int8_groups=False)
    assert run(lane, stimulus) == [products(x, code, CODE) for x, code, _ in stimulus]


def test_the_packed_operand_is_the_code_twice():
    packed = lane_multiplier("dsp").packed
    assert [packed(code) for code in (0x0, 0x1, 0x7, 0x8, 0xF)] == [512, 1025, 65543, -512, -65543]


class WrongSign(lane_multiplier("lut")):
    """Seeded fault: the product of a negative code lacks its carry, which is one in the last place."""

    def elaborate(self, platform):
        m = super().elaborate(platform)
        m.d.comb += self.product.carry.eq(0)
        return m


class UnsignedShift(lane_multiplier("lut")):
    """Seeded fault: the sign does not act in the shifted product."""

    def elaborate(self, platform):
        m = super().elaborate(platform)
        shifted = Signal(signed(16))
        m.d.sync += shifted.eq(self.x << self.code[:3])
        m.d.comb += [self.shifted.value.eq(shifted), self.shifted.carry.eq(0)]
        return m


class ShiftByOne(lane_multiplier("dsp")):
    """Seeded fault: the powers of two are one place too high."""

    @classmethod
    def packed(cls, code):
        return super().packed(code) * 2


@pytest.mark.parametrize("fault", [WrongSign, UnsignedShift, ShiftByOne])
def test_a_faulty_lane_is_caught(fault):
    stimulus = list(itertools.product((-128, -3, 5, 127), range(16), (CODE,)))
    assert run(fault(), stimulus) != [products(*entry) for entry in stimulus]


class Ecp5:
    """As much of an Amaranth platform as a lane looks at."""

    device = "LFE5U-85F"


def test_on_an_ecp5_the_multiplier_uses_all_its_registers():
    text = rtlil.convert(lane_multiplier("ecp5_dsp")(), platform=Ecp5())
    assert text.count("cell \\MULT18X18D") == 1
    for register in ("INPUTA", "INPUTB", "PIPELINE", "OUTPUT"):
        assert f'parameter \\REG_{register}_CLK "CLK0"' in text
    assert "cell $mul" not in text


@pytest.mark.parametrize("platform", [None, type("Ice40", (), {"device": "iCE40UP5K"})()])
def test_elsewhere_it_is_a_behavioural_model(platform):
    text = rtlil.convert(lane_multiplier("ecp5_dsp")(), platform=platform)
    assert "MULT18X18D" not in text
    assert text.count("cell $mul") == 1


def test_an_unknown_multiplier_is_refused():
    with pytest.raises(ParameterError, match=r"^multiplier = 'booth': legal is one of 'lut', 'dsp', 'ecp5_dsp'$"):
        lane_multiplier("booth")
