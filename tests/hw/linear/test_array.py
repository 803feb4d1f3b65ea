"""Array of dot products against plain integers: values, order, metadata and latency."""

import random
from dataclasses import dataclass, field

import pytest
from amaranth.sim import Simulator

from kvant.hw.linear.array import LinearArray
from kvant.hw.linear.parameters import LinearParameters
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


def run(p, cycles, *, dut=None):
    """Results of every unit as (cycle, dict), in order."""
    dut = LinearArray(p) if dut is None else dut
    results = [[] for _ in range(p.units)]

    async def bench(ctx):
        for cycle in range(len(cycles) + dut.latency + 2 * p.unit_cols):
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

    simulator = Simulator(dut)
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


SHAPES = [
    (1, 1, 1),
    (1, 1, 8),
    (1, 8, 4),
    (2, 3, 7),
    (3, 5, 8),
    (5, 2, 3),
    (8, 8, 64),
    (8, 5, 20),
    (3, 8, 2),
    (2, 5, 9),
]


@pytest.mark.parametrize("multiplier", ["lut", "dsp", "ecp5_dsp"])
@pytest.mark.parametrize(("rows", "cols", "group"), SHAPES)
def test_back_to_back_slots_of_mixed_columns_equal_integer_arithmetic(rows, cols, group, multiplier):
    p = LinearParameters(rows=rows, cols=cols, group=group, multiplier=multiplier)
    rng = random.Random(f"{rows} {cols} {group}")
    slots = [random_slot(p, rng, int8=rng.choice([0, 0, 0.4])) for _ in range(12)]
    compare(p, slots, schedule(p, slots, rng))
