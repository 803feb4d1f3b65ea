"""Processing element against plain integers: sums, latency, and faults that must show."""

import random
from typing import NamedTuple

import pytest
from amaranth.hdl import Module, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.sim import Simulator

from kvant.hw.linear import pe as pe_module
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.linear.pe import ProcessingElement
from kvant.hw.numeric.multipliers import LANES, lane_multiplier


class Group(NamedTuple):
    """One slot of one column."""

    x: list
    weights: list  # codes, or 8-bit integers of an INT8 group
    int8: bool = False
    high_plane: bool = False  # the slot has a plane of high digits, for this column or for another one


def sums(group):
    """The group's result: (psum1, psum2) of codes, (sum of products,) of 8-bit integers."""
    pairs = list(zip(group.x, group.weights, strict=True))
    if group.int8:
        return (sum(x * w for x, w in pairs),)
    signed = [(x, -1 if code & 8 else 1, code & 7) for x, code in pairs]
    return sum(x * sign * i for x, sign, i in signed), sum(sign * (x << i) for x, sign, i in signed)


def beats(p, group):
    """Values of the inputs, beat by beat."""
    assert group.high_plane or not group.int8
    n = len(group.x)
    for high in [True, False] if group.high_plane else [False]:
        codes = group.weights
        if group.int8:
            codes = [(w >> 4) & 15 if high else w & 15 for w in group.weights]
        for start in range(0, n, p.rows):
            missing = max(0, start + p.rows - n)
            last = start + p.rows >= n and not high
            yield {
                "valid": 1,
                "first": int(start == 0),
                "last": int(last),
                "high": int(high),
                "int8": int(group.int8),
                "x": group.x[start : start + p.rows] + [0] * missing,
                "codes": codes[start : start + p.rows] + [0] * missing,
            }


def run(p, groups, *, element=None, gap=0.0, seed=0):
    """Feed the groups back to back, with a random gap before a beat where asked.

    Returns the sums at every `done`, the cycles of `done` and the cycles of the last beats.
    """
    rng = random.Random(seed)
    element = ProcessingElement(p) if element is None else element
    stimulus = []
    for group in groups:
        for beat in beats(p, group):
            while rng.random() < gap:
                stimulus.append(
                    {
                        "valid": 0,
                        "first": rng.randrange(2),
                        "last": rng.randrange(2),
                        "high": rng.randrange(2),
                        "int8": int(group.int8),
                        "x": [rng.randrange(-128, 128) for _ in range(p.rows)],
                        "codes": [rng.randrange(16) for _ in range(p.rows)],
                    }
                )
            stimulus.append(beat)
    results, done = [], []

    async def bench(ctx):
        for cycle in range(len(stimulus) + element.latency + 2):
            for name, value in (stimulus[cycle] if cycle < len(stimulus) else {"valid": 0}).items():
                ctx.set(getattr(element, name), value)
            if ctx.get(element.done):
                results.append((ctx.get(element.psum1), ctx.get(element.psum2)))
                done.append(cycle)
            await ctx.tick()

    simulator = Simulator(element)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return results, done, [cycle for cycle, beat in enumerate(stimulus) if beat["valid"] and beat["last"]]


def right(groups, results):
    """Whether the results are the groups' sums."""
    if len(groups) != len(results):
        return False
    return all(
        (psum1 + psum2,) == sums(group) if group.int8 else (psum1, psum2) == sums(group)
        for group, (psum1, psum2) in zip(groups, results, strict=True)
    )


def random_groups(p, rng, count):
    groups = []
    for _ in range(count):
        n = rng.choice([p.group, p.group, rng.randint(1, p.group)])
        int8 = p.int8_groups and rng.random() < 0.3
        groups.append(
            Group(
                x=[rng.randrange(-128, 128) for _ in range(n)],
                weights=[rng.randrange(-128, 128) if int8 else rng.randrange(16) for _ in range(n)],
                int8=int8,
                high_plane=int8 or (p.int8_groups and rng.random() < 0.3),
            )
        )
    return groups


@pytest.mark.parametrize("multiplier", LANES)
@pytest.mark.parametrize(
    ("rows", "group"), [(1, 1), (1, 6), (2, 1), (2, 7), (3, 2), (3, 9), (5, 5), (5, 12), (8, 3), (8, 64), (13, 30)]
)
def test_back_to_back_groups_equal_integer_arithmetic(rows, group, multiplier):
    p = LinearParameters(rows=rows, cols=1, group=group, multiplier=multiplier)
    groups = random_groups(p, random.Random(f"{rows} {group}"), 25)
    results, done, last = run(p, groups)
    assert right(groups, results)
    assert done == [cycle + ProcessingElement.latency_of(p) for cycle in last]


@pytest.mark.parametrize("multiplier", LANES)
def test_gaps_between_beats_change_no_sum(multiplier):
    p = LinearParameters(rows=3, cols=1, group=10, multiplier=multiplier)
    groups = random_groups(p, random.Random(1), 25)
    assert right(groups, run(p, groups, gap=0.4, seed=2)[0])


@pytest.mark.parametrize("multiplier", LANES)
@pytest.mark.parametrize("adder", ["plus", "kogge_stone"])
def test_the_most_negative_activation_is_exact_with_every_code_and_extreme_weight(multiplier, adder):
    p = LinearParameters(rows=4, cols=1, group=256, multiplier=multiplier, adder=adder)
    groups = [Group([-128] * 256, [code] * 256) for code in range(16)]
    groups += [Group([x] * 256, [w] * 256, True, True) for x in (-128, 127) for w in (-128, 127, -1, 0, 15, 16)]
    assert right(groups, run(p, groups)[0])


def test_accumulators_hold_the_largest_sums_without_int8_groups():
    p = LinearParameters(rows=8, cols=1, group=256, int8_groups=False)
    groups = [Group([-128] * 256, [code] * 256) for code in (0xF, 0x7, 0x0, 0x8)]
    assert right(groups, run(p, groups)[0])


def test_a_column_of_codes_idles_while_others_take_their_high_digits():
    p = LinearParameters(rows=2, cols=1, group=4)
    groups = [Group([1, 2, 3, 4], [0x1, 0x9, 0x7, 0xF], False, True), Group([-128] * 4, [0xF] * 4)]
    assert right(groups, run(p, groups)[0])


def test_a_reset_within_a_group_leaves_nothing_behind():
    p = LinearParameters(rows=2, cols=1, group=6)
    group = Group([100, -128, 77, 3, 2, 1], [0xF] * 6)
    results = []
    reset = Signal()
    element = ProcessingElement(p)
    m = Module()
    m.submodules.element = ResetInserter(reset)(element)

    async def bench(ctx):
        stream = list(beats(p, group))
        for cycle, beat in enumerate([*stream[:2], *[stream[0]] * 2, *stream, *[{"valid": 0}] * element.latency]):
            for name, value in beat.items():
                ctx.set(getattr(element, name), value)
            ctx.set(reset, cycle in (2, 3))  # with a beat at the inputs
            if ctx.get(element.done):
                results.append((ctx.get(element.psum1), ctx.get(element.psum2)))
            await ctx.tick()

    simulator = Simulator(m)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    assert results == [sums(group)]


class StaleAccumulator(ProcessingElement):
    """Seeded fault: the second sum starts from the previous group's."""

    def elaborate(self, platform):
        m = super().elaborate(platform)
        previous = Signal.like(self.psum2)
        with m.If(self.done):
            m.d.sync += [previous.eq(self.psum2), self.psum2.eq(self.psum2 + previous)]
        return m


class SwappedNibbles(wiring.Component):
    """Seeded fault: the codes of neighbouring rows are exchanged."""

    def __init__(self, p):
        self.element = ProcessingElement(p)
        super().__init__(self.element.signature)

    @property
    def latency(self):
        return self.element.latency

    def elaborate(self, platform):
        m = Module()
        m.submodules.element = self.element
        for name in self.signature.members:
            inner, outer = getattr(self.element, name), getattr(self, name)
            m.d.comb += outer.eq(inner) if name in ("done", "psum1", "psum2") else inner.eq(outer)
        m.d.comb += [self.element.codes[0].eq(self.codes[1]), self.element.codes[1].eq(self.codes[0])]
        return m


@pytest.mark.parametrize("fault", [StaleAccumulator, SwappedNibbles])
def test_a_faulty_element_is_caught(fault):
    p = LinearParameters(rows=2, cols=1, group=5)
    groups = random_groups(p, random.Random(3), 6)
    assert right(groups, run(p, groups)[0])
    assert not right(groups, run(p, groups, element=fault(p))[0])


def test_a_forgotten_weight_of_the_high_digit_is_caught(monkeypatch):
    p = LinearParameters(rows=2, cols=1, group=5)
    groups = [Group([1, -2, 3, -4, 5], [100, -100, 50, -128, 127], True, True)]
    monkeypatch.setattr(pe_module, "DIGIT_BITS", 3)
    assert not right(groups, run(p, groups)[0])


@pytest.mark.parametrize("sign", ["product", "shifted"])
def test_a_wrong_sign_in_one_lane_is_caught(monkeypatch, sign):
    class WrongSign(lane_multiplier("lut")):
        def elaborate(self, platform):
            m = super().elaborate(platform)
            m.d.comb += getattr(self, sign).carry.eq(0)
            return m

    p = LinearParameters(rows=2, cols=1, group=4)
    groups = [Group([5, 6, -7, 8], [0x9, 0x1, 0xB, 0x3])]
    monkeypatch.setitem(LANES, "lut", WrongSign)
    assert not right(groups, run(p, groups)[0])
