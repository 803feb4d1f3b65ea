"""Levels of the 4-bit code and the meaning of a coefficient byte."""

import itertools

import pytest
from amaranth.hdl import Cat, Module, Signal
from amaranth.sim import Simulator

from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.numeric.codes import INT8, LINEAR, MAX_COEFFICIENT, decode_coefficient, level, levels
from kvant.hw.parameters import ParameterError

EVERY_LEGAL_COEFFICIENT = [*range(MAX_COEFFICIENT + 1), LINEAR]


@pytest.mark.parametrize("coefficient", EVERY_LEGAL_COEFFICIENT)
def test_case_09_levels_equal_the_closed_formula_and_increase(coefficient):
    a, power = (1, 0) if coefficient == LINEAR else (coefficient, 1)
    magnitudes = levels(coefficient)
    assert magnitudes == tuple(a * i + power * 2**i for i in range(8))
    assert all(low < high for low, high in itertools.pairwise(magnitudes))


@pytest.mark.parametrize("coefficient", EVERY_LEGAL_COEFFICIENT)
def test_case_09_levels_are_symmetric_and_fit_the_datapath(coefficient):
    for code in range(8):
        assert level(coefficient, code + 8) == -level(coefficient, code)
    p = LinearParameters(group=1, max_coefficient=min(coefficient, MAX_COEFFICIENT), int8_groups=False)
    assert 128 * levels(coefficient)[-1] <= p.result_limit


def test_magnitude_zero_of_a_mant_group_is_one_and_of_a_linear_group_zero():
    assert (level(0, 0x0), level(0, 0x8), level(17, 0x0), level(17, 0x8)) == (1, -1, 1, -1)
    assert (level(LINEAR, 0x0), level(LINEAR, 0x8)) == (0, 0)


@pytest.mark.parametrize("coefficient", [-1, 128, 253, INT8, 256, 1.5, "5", True, None])
def test_case_09_an_illegal_coefficient_is_refused_with_the_legal_ones(coefficient):
    with pytest.raises(
        ParameterError, match=r"^coefficient = .*: legal is an integer from 0 to 127, or 255 \(linear\)$"
    ):
        levels(coefficient)


@pytest.mark.parametrize("code", [-1, 16, 2.0, "1", False])
def test_an_illegal_code_is_refused(code):
    with pytest.raises(ParameterError, match=r"^code = .*: legal is an integer from 0 to 15$"):
        level(0, code)


@pytest.mark.parametrize("max_coefficient", [0, 100, 127])
@pytest.mark.parametrize("int8_groups", [True, False])
def test_every_coefficient_byte_has_exactly_one_class(max_coefficient, int8_groups):
    coefficient = Signal(8)
    classes = Signal(4)
    m = Module()
    m.d.comb += classes.eq(
        Cat(*decode_coefficient(coefficient, max_coefficient=max_coefficient, int8_groups=int8_groups))
    )

    async def bench(ctx):
        for byte in range(256):
            ctx.set(coefficient, byte)
            if byte <= max_coefficient:
                expected = 0b0001
            elif byte == LINEAR:
                expected = 0b0010
            elif byte == INT8 and int8_groups:
                expected = 0b0100
            else:
                expected = 0b1000
            assert ctx.get(classes) == expected, byte
            await ctx.delay(1e-9)

    simulator = Simulator(m)
    simulator.add_testbench(bench)
    simulator.run()
