"""Array of dot products against plain integers: values, order, metadata and latency."""

import random
from dataclasses import dataclass, field

import pytest
from amaranth.hdl import Module, ResetInserter, Signal
from amaranth.lib.wiring import Out
from amaranth.sim import Simulator

from kvant.hw.linear import array as array_module
from kvant.hw.linear.array import LinearArray
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.linear.pe import ProcessingElement
from kvant.hw.numeric.codes import INT8, LINEAR

EXTREME_CODES = (0x0, 0x7, 0x8, 0xF)


@dataclass
class SlotData:
    """One group of every column, as numbers."""

    x: list  # activations of the group
    weights: list  # per column: codes, or 8-bit integers of an INT8 column
    coefficient: list
    w_scale: list
    x_scale: int
    address: int
    first_group: int
    last_group: int
    gaps: list = field(default_factory=list)  # beats before which a cycle without a beat is put
    idle: int = 0  # cycles without a beat after the pitch is reached


def partial_sums(x, weights, coefficient):
    """psum1 and psum2 by the definition; their sum only for an INT8 group."""
    if coefficient == INT8:
        return None, sum(a * b for a, b in zip(x, weights, strict=True))
    signs = [-1 if code & 8 else 1 for code in weights]
    psum1 = sum(a * s * (code & 7) for a, s, code in zip(x, signs, weights, strict=True))
    psum2 = sum(s * (a << (code & 7)) for a, s, code in zip(x, signs, weights, strict=True))
    return psum1, psum2


def random_slot(p, rng, *, n=None, style="random", int8=0.0):
    n = p.group if n is None else n
    extreme = style == "extreme"
    coefficient = [
        INT8
        if p.int8_groups and rng.random() < int8
        else rng.choice([0, 127, LINEAR] if extreme else [*range(128), *[LINEAR] * 30])
        for _ in range(p.cols)
    ]
    weights = []
    for a in coefficient:
        if a == INT8:
            weights.append([rng.choice([-128, 127, -1, 0, 15, -16] if extreme else range(-128, 128)) for _ in range(n)])
        else:
            same = rng.choice(EXTREME_CODES)
            weights.append([same if extreme else rng.randrange(16) for _ in range(n)])
    return SlotData(
        x=[-128 if extreme else rng.randrange(-128, 128) for _ in range(n)],
        weights=weights,
        coefficient=coefficient,
        w_scale=[rng.randrange(1 << 16) for _ in range(p.cols)],
        x_scale=rng.randrange(1 << 16),
        address=rng.randrange(p.accumulators),
        first_group=rng.randrange(2),
        last_group=rng.randrange(2),
    )


def beats_of(p, slot):
    """The slot as values of the beat port, high plane first."""
    n = len(slot.x)
    planes = [True, False] if INT8 in slot.coefficient else [False]
    beats = []
    for high in planes:
        for start in range(0, n, p.rows):

            def digit(column, j, high=high):
                if j >= n:
                    return 0
                w = slot.weights[column][j]
                if slot.coefficient[column] != INT8:
                    return 0 if high else w
                return (w >> 4) & 15 if high else w & 15

            last_of_plane = start + p.rows >= n
            beats.append(
                {
                    "valid": 1,
                    "first": int(start == 0),
                    "last": int(last_of_plane and not high),
                    "high": int(high),
                    "x": [slot.x[j] if j < n else 0 for j in range(start, start + p.rows)],
                    "codes": [[digit(c, j) for j in range(start, start + p.rows)] for c in range(p.cols)],
                }
            )
    return beats


def schedule(p, slots, rng):
    """Cycle by cycle: (beat, slot or None), slots as close as the array allows."""
    idle = {"valid": 0, "first": 1, "last": 1, "high": 0}
    cycles = []
    for slot in slots:
        begin = len(cycles)
        for index, beat in enumerate(beats_of(p, slot)):
            if index in slot.gaps:
                cycles.append((garbage(p, rng) | idle, slot))
            cycles.append((beat, slot))
        missing = p.unit_cols - (len(cycles) - begin)
        cycles += [(garbage(p, rng) | idle, None)] * (max(0, missing) + slot.idle)
    return cycles


def garbage(p, rng):
    return {
        "x": [rng.randrange(-128, 128) for _ in range(p.rows)],
        "codes": [[rng.randrange(16) for _ in range(p.rows)] for _ in range(p.cols)],
    }


def run(p, cycles, *, dut=None, top=None, before_cycle=lambda ctx, cycle: None):
    """Results of every unit as (cycle, dict), in order; `top` is what is simulated where it is not the array itself."""
    dut = LinearArray(p) if dut is None else dut
    results = [[] for _ in range(p.units)]

    async def bench(ctx):
        for cycle in range(len(cycles) + dut.latency + 2 * p.unit_cols):
            before_cycle(ctx, cycle)
            beat, slot = cycles[cycle] if cycle < len(cycles) else ({"valid": 0}, None)
            ctx.set(dut.beat, beat)
            if slot is not None:
                names = ("coefficient", "w_scale", "x_scale", "address", "first_group", "last_group")
                ctx.set(dut.slot, {name: getattr(slot, name) for name in names})
            for unit in range(p.units):
                result = ctx.get(dut.results[unit])
                if result.valid:
                    results[unit].append((cycle, {name: result[name] for name, _ in result.shape()}))
            await ctx.tick()

    simulator = Simulator(dut if top is None else top)
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return results


def expected(p, slots, cycles, latency):
    """What `run` must return, cycle numbers included."""
    results = [[] for _ in range(p.units)]
    ends = [cycle for cycle, (beat, _) in enumerate(cycles) if beat["valid"] and beat["last"]]
    free = 0
    for slot, end in zip(slots, ends, strict=True):
        begin = max(end + latency, free)
        free = begin + p.unit_cols
        for column in range(p.cols):
            unit, step = divmod(column, p.unit_cols)
            psums = partial_sums(slot.x, slot.weights[column], slot.coefficient[column])
            results[unit].append((begin + step, slot, column, step, psums))
    return results


def compare(p, slots, cycles, *, dut=None):
    dut = LinearArray(p) if dut is None else dut
    got = run(p, cycles, dut=dut)
    want = expected(p, slots, cycles, dut.latency)
    for unit in range(p.units):
        assert [cycle for cycle, _ in got[unit]] == [entry[0] for entry in want[unit]]
        for (cycle, result), (_, slot, column, step, (psum1, psum2)) in zip(got[unit], want[unit], strict=True):
            where = f"cycle {cycle}, column {column}"
            if psum1 is None:
                assert result["psum1"] + result["psum2"] == psum2, where
            else:
                assert result["psum1"] == psum1, where
                if slot.coefficient[column] != LINEAR:
                    assert result["psum2"] == psum2, where
            assert result["column"] == step, where
            assert result["coefficient"] == slot.coefficient[column], where
            assert result["w_scale"] == slot.w_scale[column], where
            for name in ("x_scale", "address", "first_group", "last_group"):
                assert result[name] == getattr(slot, name), where


SIZES = [1, 2, 3, 5, 8]


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("cols", SIZES)
def test_back_to_back_slots_of_mixed_columns_equal_integer_arithmetic(rows, cols):
    rng = random.Random(f"{rows} {cols}")
    p = LinearParameters(rows=rows, cols=cols, group=rng.randint(1, 3 * rows))
    slots = [random_slot(p, rng, n=rng.choice([None, None, 1]), int8=rng.choice([0, 0, 0.4])) for _ in range(10)]
    compare(p, slots, schedule(p, slots, rng))


@pytest.mark.parametrize("multiplier", ["dsp", "ecp5_dsp"])
@pytest.mark.parametrize(("rows", "cols", "group"), [(1, 1, 1), (1, 5, 2), (3, 5, 8), (8, 8, 64)])
def test_multiplier_strategies_give_the_same_sums(rows, cols, group, multiplier):
    p = LinearParameters(rows=rows, cols=cols, group=group, multiplier=multiplier)
    rng = random.Random(f"{rows} {cols} {group}")
    slots = [random_slot(p, rng, int8=rng.choice([0, 0.4])) for _ in range(8)]
    compare(p, slots, schedule(p, slots, rng))


def test_prefix_adders_give_the_same_sums():
    p = LinearParameters(rows=3, cols=2, group=7, adder="kogge_stone")
    rng = random.Random(4)
    slots = [random_slot(p, rng, int8=rng.choice([0, 0.4])) for _ in range(8)]
    compare(p, slots, schedule(p, slots, rng))


@pytest.mark.parametrize(("rows", "group"), [(1, 1), (2, 1), (4, 256), (7, 128), (8, 64)])
@pytest.mark.parametrize("int8", [0.0, 0.5])
def test_extremes_of_activations_codes_and_coefficients_are_exact(rows, group, int8):
    p = LinearParameters(rows=rows, cols=3, group=group)
    rng = random.Random(f"{rows} {group}")
    slots = [random_slot(p, rng, style="extreme", int8=int8) for _ in range(8)]
    compare(p, slots, schedule(p, slots, rng))


def test_an_array_without_int8_groups_is_exact():
    p = LinearParameters(rows=4, cols=3, group=16, int8_groups=False)
    rng = random.Random(5)
    slots = [random_slot(p, rng, style=style) for style in ("random", "extreme") * 4]
    compare(p, slots, schedule(p, slots, rng))


@pytest.mark.parametrize(("rows", "cols", "group"), [(1, 1, 4), (2, 5, 9), (8, 3, 8), (3, 8, 9)])
def test_gaps_between_beats_and_slots_change_nothing(rows, cols, group):
    p = LinearParameters(rows=rows, cols=cols, group=group)
    rng = random.Random(f"{rows} {cols} {group}")
    slots = [random_slot(p, rng, int8=rng.choice([0, 0.4])) for _ in range(12)]
    for slot in slots:
        slot.gaps = [index for index in range(1, 2 * p.beats) if rng.random() < 0.4]
        slot.idle = rng.choice([0, 0, 1, 3, 12])
    compare(p, slots, schedule(p, slots, rng))


def test_metadata_of_every_slot_stay_with_its_sums_at_a_pitch_of_one():
    p = LinearParameters(rows=8, cols=3, group=4)
    assert (p.beats, p.unit_cols, p.units) == (1, 1, 3)
    rng = random.Random(6)
    slots = [random_slot(p, rng) for _ in range(40)]
    cycles = schedule(p, slots, rng)
    assert len(cycles) == 40
    compare(p, slots, cycles)


def test_a_short_slot_waits_until_the_columns_before_have_left():
    p = LinearParameters(rows=1, cols=8, group=8)
    assert p.unit_cols == 8
    rng = random.Random(7)
    slots = [random_slot(p, rng, n=n) for n in (8, 1, 8, 3, 1, 1, 5, 8, 7, 8, 2)]
    compare(p, slots, schedule(p, slots, rng))


def test_columns_that_the_last_unit_lacks_give_no_result():
    p = LinearParameters(rows=1, cols=5, group=3)
    assert (p.units, p.unit_cols) == (2, 3)
    rng = random.Random(8)
    slots = [random_slot(p, rng) for _ in range(6)]
    results = run(p, schedule(p, slots, rng))
    assert [len(unit) for unit in results] == [6 * 3, 6 * 2]
    assert {result["column"] for _, result in results[1]} == {0, 1}


@pytest.mark.parametrize("multiplier", ["lut", "dsp", "ecp5_dsp"])
def test_the_latency_is_the_stated_one(multiplier):
    p = LinearParameters(rows=5, cols=1, group=5, multiplier=multiplier)
    rng = random.Random(9)
    slots = [random_slot(p, rng)]
    dut = LinearArray(p)
    ((cycle, _),) = run(p, schedule(p, slots, rng), dut=dut)[0]
    assert cycle == dut.latency
    assert dut.latency == {"lut": 6, "dsp": 7, "ecp5_dsp": 8}[multiplier]


class StaleCoefficient(LinearArray):
    """Seeded fault: the metadata come from one register too few."""

    @property
    def _metadata_offsets(self):
        return super()._metadata_offsets[:-1]


def faulty_element(fault):
    """A processing element whose inputs are tampered with: `fault(inner, outer)` gives the statements that do it."""

    class FaultyElement(ProcessingElement):
        def elaborate(self, platform):
            m = Module()
            m.submodules.element = element = ProcessingElement(self.p)
            for name, member in self.signature.members.items():
                inner, outer = getattr(element, name), getattr(self, name)
                m.d.comb += outer.eq(inner) if member.flow is Out else inner.eq(outer)
            m.d.comb += fault(element, self)
            return m

    return FaultyElement


ELEMENT_FAULTS = {
    "stale_accumulator": lambda inner, outer: inner.first.eq(0),
    "swapped_nibbles": lambda inner, outer: [inner.codes[0].eq(outer.codes[1]), inner.codes[1].eq(outer.codes[0])],
    "wrong_sign": lambda inner, outer: inner.codes[0].eq(outer.codes[0] ^ 8),
    "high_digits_taken_for_low_ones": lambda inner, outer: inner.high.eq(0),
}


def test_metadata_of_another_slot_are_caught():
    p = LinearParameters(rows=8, cols=2, group=4)
    rng = random.Random(10)
    slots = [random_slot(p, rng) for _ in range(6)]
    with pytest.raises(AssertionError):
        compare(p, slots, schedule(p, slots, rng), dut=StaleCoefficient(p))


@pytest.mark.parametrize("fault", ELEMENT_FAULTS)
def test_a_faulty_element_is_caught(fault, monkeypatch):
    p = LinearParameters(rows=2, cols=2, group=4)
    rng = random.Random(11)
    slots = [random_slot(p, rng, int8=0.5) for _ in range(4)]
    cycles = schedule(p, slots, rng)
    compare(p, slots, cycles)
    monkeypatch.setattr(array_module, "ProcessingElement", faulty_element(ELEMENT_FAULTS[fault]))
    with pytest.raises(AssertionError):
        compare(p, slots, cycles)


@pytest.mark.parametrize("cycles_before", [1, 2, 5, 9])
def test_after_a_reset_within_a_slot_a_run_equals_a_cold_start(cycles_before):
    p = LinearParameters(rows=2, cols=4, group=8)
    rng = random.Random(13)
    slots = [random_slot(p, rng, int8=0.3) for _ in range(4)]
    cycles = schedule(p, slots, rng)
    dut = LinearArray(p)
    reset = Signal()
    m = Module()
    m.submodules.dut = ResetInserter(reset)(dut)
    # The reset comes in the middle of a beat's cycle and lasts one; what was under way must never come out.
    interrupted = [*cycles[:cycles_before], *cycles]
    results = run(
        p, interrupted, dut=dut, top=m, before_cycle=lambda ctx, cycle: ctx.set(reset, cycle == cycles_before - 1)
    )
    cold = run(p, cycles)
    assert [[(cycle - cycles_before, result) for cycle, result in unit] for unit in results] == cold
