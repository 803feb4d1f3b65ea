"""Kogge-Stone adder: proven equal to plain addition, not sampled."""

import itertools
import random

import pytest
from adder_proofs import prove, simulate

from kvant.hw.numeric.adders import ADDERS, AdderTree, adder_strategy
from kvant.hw.numeric.kogge_stone import KoggeStone
from kvant.hw.parameters import ParameterError

# A component that refuses its parameters never gets elaborated, which Amaranth warns of.
pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")


class TopLevelDropped(KoggeStone):
    """Seeded fault: the last prefix level is missing, so that long carries are lost."""

    @property
    def spans(self):
        return super().spans[:-1]


class WrongWire(KoggeStone):
    """Seeded fault: the second level reaches one place too far."""

    @property
    def spans(self):
        return [span + (span == 2) for span in super().spans]


def test_case_30_every_width_from_1_to_64_is_proven_equal_to_plain_addition(tmp_path):
    result = prove([KoggeStone(width) for width in range(1, 65)], tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("fault", [TopLevelDropped, WrongWire])
@pytest.mark.parametrize("width", [3, 9, 32])
def test_the_proof_finds_a_wrong_prefix_network(tmp_path, fault, width):
    result = prove([fault(width)], tmp_path)
    assert result.returncode != 0
    assert "proof did fail" in result.stdout + result.stderr


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("width", [5, 16, 33])
def test_a_pipelined_adder_gives_a_sum_every_cycle_after_its_latency(width, stages):
    rng = random.Random(f"{width} {stages}")
    full = (1 << width) - 1
    operands = [(full, 1, 0), (full, 0, 1), (full, full, 1), (0xAAAAAAAA & full, 0x55555555 & full, 1)]
    operands += [(rng.randint(0, full), rng.randint(0, full), rng.randint(0, 1)) for _ in range(100)]
    adder = KoggeStone(width, stages=stages)
    assert adder.latency == stages

    async def bench(ctx):
        for cycle in range(len(operands) + stages):
            a, b, carry_in = operands[min(cycle, len(operands) - 1)]
            ctx.set(adder.a, a)
            ctx.set(adder.b, b)
            ctx.set(adder.carry_in, carry_in)
            if cycle >= stages:
                total = sum(operands[cycle - stages])
                assert (ctx.get(adder.sum), ctx.get(adder.carry_out)) == (total & full, total >> width)
            await ctx.tick()

    simulate(adder, bench)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_overflow_means_that_the_signed_sum_does_not_fit(width):
    adder = KoggeStone(width)
    half = 1 << (width - 1)

    async def bench(ctx):
        for a, b, carry_in in itertools.product(range(-half, half), range(-half, half), range(2)):
            ctx.set(adder.a, a)
            ctx.set(adder.b, b)
            ctx.set(adder.carry_in, carry_in)
            assert ctx.get(adder.overflow) == (not -half <= a + b + carry_in < half)
            await ctx.delay(1e-9)

    simulate(adder, bench)


@pytest.mark.parametrize("width", [0, -3, 1025, 8.0, "8", True, None])
def test_an_illegal_width_is_refused_with_its_range(width):
    with pytest.raises(ParameterError, match=r"^width = .*: legal is an integer from 1 to 1024$"):
        KoggeStone(width)


@pytest.mark.parametrize("stages", [-1, 5, 1.0, True])
def test_more_registers_than_prefix_levels_are_refused(stages):
    with pytest.raises(ParameterError, match=r"^stages = .*: legal is an integer from 0 to 4 "):
        KoggeStone(8, stages=stages)


def test_an_unknown_adder_is_refused():
    with pytest.raises(ParameterError, match=r"^adder = 'carry_skip': legal is one of 'plus', 'kogge_stone', "):
        adder_strategy("carry_skip")


@pytest.mark.parametrize("adder", ADDERS)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13])
def test_a_tree_sums_values_and_carries_exactly(count, adder):
    rng = random.Random(f"{count} {adder}")
    width = 6
    low, high = -(1 << (width - 1)), (1 << (width - 1)) - 1
    sets = [[(low, 0)] * count, [(high, 1)] * count, [(-1, 1)] * count]
    sets += [[(rng.randint(low, high), rng.randint(0, 1)) for _ in range(count)] for _ in range(40)]
    tree = AdderTree(count, width, adder=adder)

    async def bench(ctx):
        for cycle in range(len(sets) + tree.latency):
            for term, (value, carry) in zip(tree.i, sets[min(cycle, len(sets) - 1)], strict=True):
                ctx.set(term, {"value": value, "carry": carry})
            if cycle >= tree.latency:
                total = sum(value + carry for value, carry in sets[cycle - tree.latency])
                out = ctx.get(tree.o)
                assert out.value + out.carry == total
            await (ctx.tick() if tree.latency else ctx.delay(1e-8))

    simulate(tree, bench)
