"""Group accumulator against integers and numpy: exact results, rounding, order of sums, errors, timing."""

from dataclasses import dataclass

import numpy as np
import pytest
from amaranth.hdl import ClockDomain, Module, Signal, Value
from amaranth.lib import memory
from amaranth.sim import Simulator

from kvant.hw.linear import accumulate
from kvant.hw.linear.accumulate import GroupAccumulator
from kvant.hw.linear.layouts import GroupSum, Output
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.numeric import floating

SEED = 20260702
LINEAR, INT8 = 255, 254
INFINITY, NAN, MINUS_ONE, MINUS_ZERO = 0x7C00, 0x7E00, 0xBC00, 0x8000
FIELDS = [
    "valid", "psum1", "psum2", "coefficient", "w_scale", "x_scale", "address", "column", "first_group", "last_group",
]  # fmt: skip


def group_sums(count, **columns):
    """A table of group sums; columns that are not given hold those of a legal single-group output with scales of 1."""
    default = {"valid": 1, "coefficient": LINEAR, "w_scale": 0x3C00, "x_scale": 0x3C00, "first_group": 1}
    default["last_group"] = 1
    table = np.zeros(count, [(name, np.int64) for name in FIELDS])
    for name in FIELDS:
        table[name] = columns.get(name, default.get(name, 0))
    return table


@dataclass
class Run:
    """What came out: per output its cycle, fp32 bits, column and address; the cycles with `error`."""

    cycle: np.ndarray
    y: np.ndarray
    column: np.ndarray
    address: np.ndarray
    errors: list


def words(table, layout):
    """Rows of *table* as integers of the bits of *layout*."""
    result = np.zeros(len(table), object)
    for name in FIELDS:
        field = layout[name]
        result |= (table[name].astype(object) & ((1 << field.width) - 1)) << field.offset
    return [int(word) for word in result]


def run(unit, table, watch=None):
    """Feed one row per cycle, the first in cycle 0, and then as many cycles as the last output needs."""
    p = unit.p
    stimulus = words(table, GroupSum(p)) + [0] * (unit.latency + 2)
    i, o = Value.cast(unit.i), Value.cast(unit.o)
    outputs, errors = [], []

    async def bench(ctx):
        for cycle, word in enumerate(stimulus):
            ctx.set(i, word)
            if ctx.get(unit.error):
                errors.append(cycle)
            out = ctx.get(o)
            if out & 1:
                outputs.append((cycle, out))
            await ctx.tick()

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    if watch is not None:
        simulator.add_testbench(watch, background=True)
    simulator.run()
    fields = {name: (field.offset, (1 << field.width) - 1) for name, field in Output(p)}
    return Run(
        np.array([cycle for cycle, _ in outputs], int),
        *(
            np.array([word >> fields[name][0] & fields[name][1] for _, word in outputs], np.int64)
            for name in ("y", "column", "address")
        ),
        errors,
    )


def integer_results(table, p):
    """r of each row, and whether the row is illegal."""
    a, psum1, psum2, scale = (table[name] for name in ("coefficient", "psum1", "psum2", "w_scale"))
    mant, int8 = a <= p.max_coefficient, (a == INT8) & p.int8_groups
    legal = (mant | int8 | (a == LINEAR)) & (scale & 0x7C00 != 0x7C00) & ((scale >> 15 == 0) | (scale == MINUS_ZERO))
    r = np.where(mant, a * psum1 + psum2, np.where(int8, psum1 + psum2, psum1))
    return np.where(legal, r, 0), ~legal


def expected(table, p):
    """Outputs in order, fp32 bits: numpy float32 sums of exact products, which float64 holds, rounded once."""
    r, _ = integer_results(table, p)
    x_scale, w_scale = (
        (table[name] & 0x7FFF).astype(np.uint16).view(np.float16).astype(np.float64) for name in ("x_scale", "w_scale")
    )
    w_scale = np.where(r == 0, 0, w_scale)  # illegal ones
    products = (r * x_scale * w_scale).astype(np.float32) + np.float32(0)
    sums, results = {}, []
    for row, product in zip(table, products, strict=True):
        if not row["valid"]:
            continue
        place = (row["column"], row["address"])
        sums[place] = product if row["first_group"] else sums[place] + product
        if row["last_group"]:
            results.append(sums[place])
    return np.array(results, np.float32).view(np.uint32)


def random_sums(rng, p, count):
    """Partial sums of random groups, from tiny to the largest ones; small ones make exponents of outputs cover."""
    x = rng.integers(-128, 128, (count, p.group)) >> rng.integers(0, 8, (count, 1))
    i, sign = rng.integers(0, 8, (count, p.group)), rng.integers(0, 2, (count, p.group)) * 2 - 1
    sign = np.where(rng.random((count, 1)) < 0.2, 1, sign)
    x = np.where(rng.random((count, 1)) < 0.1, -128, x)
    i = np.where(rng.random((count, 1)) < 0.2, 7, i)
    return (x * sign * i).sum(axis=1), (x * sign * (1 << i)).sum(axis=1)


def random_table(rng, p, outputs, groups, scale_spread=8):
    """*outputs* outputs of *groups* groups, in the order of the linear path: group by group."""
    count = outputs * groups
    psum1, psum2 = random_sums(rng, p, count)
    place = np.tile(np.arange(outputs), groups)
    group = np.repeat(np.arange(groups), outputs)

    def scale():
        exponent = np.clip(15 + rng.integers(-scale_spread, scale_spread + 1, count), 0, 30)
        return exponent << 10 | rng.integers(0, 1024, count)

    return group_sums(
        count,
        psum1=psum1,
        psum2=psum2,
        coefficient=np.where(rng.random(count) < 0.2, LINEAR, rng.integers(0, p.max_coefficient + 1, count)),
        w_scale=scale(),
        x_scale=scale(),
        address=place // p.unit_cols,
        column=place % p.unit_cols,
        first_group=group == 0,
        last_group=group == groups - 1,
    )


def test_every_kind_of_group_is_combined_as_its_coefficient_says():
    p = LinearParameters()
    rng = np.random.default_rng(SEED)
    psum1, psum2 = random_sums(rng, p, 300)
    kinds = np.resize([0, 1, 63, 64, 126, 127, LINEAR, INT8], 300)
    digits = np.where(kinds == INT8, 17, 1)  # sums of INT8 digits use the full width of psum1
    table = group_sums(300, psum1=psum1 * digits, psum2=psum2, coefficient=kinds)
    np.testing.assert_array_equal(run(GroupAccumulator(p), table).y, expected(table, p))


@pytest.mark.parametrize("group", [1, 7, 64, 128, 256])
def test_the_largest_results_are_exact(group):
    """x = -128 everywhere against codes of one sign and the largest magnitude; with a = 127 the largest result."""
    p = LinearParameters(group=group)
    rows = []
    for sign in (1, -1):
        psum1, psum2 = sign * -128 * 7 * group, sign * -128 * 128 * group
        rows += [(psum1, psum2, a) for a in (0, 1, 127, LINEAR)]
        int8 = sign * -128 * -128 * group  # w = -128: digits -8 and 0, all of it in psum2, times 16
        rows += [(0, int8, INT8), (sign * -128 * 119 * group, sign * -128 * 8 * group, INT8)]
    psum1, psum2, coefficient = np.array(rows).T
    table = group_sums(len(rows), psum1=psum1, psum2=psum2, coefficient=coefficient)
    result = run(GroupAccumulator(p), table)
    np.testing.assert_array_equal(result.y, expected(table, p))
    assert integer_results(table, p)[0].max() == p.result_limit
    assert result.errors == []


def test_scales_from_zero_to_the_largest_multiply_exactly():
    p = LinearParameters()
    scales = [0x0000, 0x0001, 0x0002, 0x03FF, 0x0400, 0x0401, 0x3C00, 0x3C01, 0x7BFE, 0x7BFF, MINUS_ZERO]
    r = [1, -1, 0, 57344, -57343, 32769]
    rows = np.array([(psum, x, w) for psum in r for x in scales[:-1] for w in scales])
    table = group_sums(len(rows), psum1=rows[:, 0], x_scale=rows[:, 1], w_scale=rows[:, 2])
    result = run(GroupAccumulator(p), table)
    np.testing.assert_array_equal(result.y, expected(table, p))
    assert not (result.y == 1 << 31).any(), "no result is -0"
    assert result.errors == []


def test_sums_run_over_groups_in_order_and_round_after_each():
    p = LinearParameters()
    table = random_table(np.random.default_rng(SEED), p, outputs=24, groups=100)
    np.testing.assert_array_equal(run(GroupAccumulator(p), table).y, expected(table, p))


def test_exponents_far_apart_accumulate():
    p = LinearParameters()
    table = random_table(np.random.default_rng(SEED), p, outputs=96, groups=12, scale_spread=20)
    np.testing.assert_array_equal(run(GroupAccumulator(p), table).y, expected(table, p))


def test_groups_of_scale_zero_keep_the_sum():
    p = LinearParameters()
    table = random_table(np.random.default_rng(SEED), p, outputs=8, groups=9)
    middle = (table["first_group"] == 0) & (table["last_group"] == 0)
    table["w_scale"][middle] = 0
    ends = table[~middle]
    np.testing.assert_array_equal(run(GroupAccumulator(p), table).y, expected(ends, p))


def test_a_sum_that_cancels_is_plus_zero_and_goes_on():
    p = LinearParameters()
    table = random_table(np.random.default_rng(SEED), p, outputs=8, groups=3)
    first, second = table["first_group"] == 1, (table["first_group"] == 0) & (table["last_group"] == 0)
    for name in ("psum1", "psum2", "coefficient", "w_scale", "x_scale"):
        table[name][second] = table[name][first]
    table["psum1"][second] *= -1
    table["psum2"][second] *= -1
    third = table[table["last_group"] == 1]
    third["first_group"] = 1
    unit = GroupAccumulator(p)
    np.testing.assert_array_equal(run(unit, table).y, expected(third, p))
    cancelled = table[table["last_group"] == 0]
    cancelled["last_group"] = cancelled["first_group"] == 0
    assert not run(GroupAccumulator(p), cancelled).y.any()


def test_alternating_signs_and_growth_over_many_groups():
    p = LinearParameters(cols=1)
    groups = 400
    psum = np.where(np.arange(groups) % 2, -57344, 57343)
    x_scale = np.where(np.arange(groups) < groups // 2, 0x3555, 0x7BFF)
    table = group_sums(groups, psum1=psum, x_scale=x_scale, first_group=0, last_group=0)
    table["first_group"][0] = table["last_group"][-1] = 1
    spaced = group_sums(groups * GroupAccumulator.loop_latency, valid=0)
    spaced[:: GroupAccumulator.loop_latency] = table
    np.testing.assert_array_equal(run(GroupAccumulator(p), spaced).y, expected(table, p))


def test_one_result_per_cycle_after_the_stated_latency():
    p = LinearParameters()
    table = random_table(np.random.default_rng(SEED), p, outputs=64, groups=1)
    unit = GroupAccumulator(p)
    result = run(unit, table)
    np.testing.assert_array_equal(result.cycle, np.arange(64) + unit.latency)
    np.testing.assert_array_equal(result.column, table["column"])
    np.testing.assert_array_equal(result.address, table["address"])


def test_an_accumulator_is_free_again_after_loop_latency_and_no_sooner():
    p = LinearParameters(cols=1)
    for spacing, right in ((GroupAccumulator.loop_latency, True), (GroupAccumulator.loop_latency - 1, False)):
        table = random_table(np.random.default_rng(SEED), p, outputs=spacing, groups=20)
        table["address"] = np.arange(len(table)) % spacing
        result = run(GroupAccumulator(p), table)
        assert (result.y == expected(table, p)).all() == right
    assert GroupAccumulator.loop_latency <= 8


def test_gaps_and_garbage_between_groups_change_nothing():
    p = LinearParameters()
    rng = np.random.default_rng(SEED)
    table = random_table(rng, p, outputs=24, groups=12)
    gap = rng.random(2 * len(table)) < 0.5
    gap &= np.cumsum(gap) <= len(table)
    spread = random_table(rng, p, outputs=1, groups=int(gap.sum()) + len(table))
    spread["valid"] = 0
    spread["coefficient"], spread["w_scale"] = 200, NAN  # an error, were it valid
    spread[np.flatnonzero(~gap[: len(spread)])[: len(table)]] = table
    result = run(GroupAccumulator(p), spread)
    np.testing.assert_array_equal(result.y, expected(table, p))
    assert result.errors == []


@pytest.mark.parametrize(
    "options", [{}, {"max_coefficient": 50}, {"int8_groups": False}, {"max_coefficient": 0, "int8_groups": False}]
)
def test_a_coefficient_that_is_not_legal_raises_error_and_counts_zero(options):
    p = LinearParameters(**options)
    coefficients = np.arange(256)
    table = group_sums(256, psum1=100, psum2=77, coefficient=coefficients)
    result = run(GroupAccumulator(p), table)
    legal = (coefficients <= p.max_coefficient) | (coefficients == LINEAR)
    legal |= (coefficients == INT8) & p.int8_groups
    np.testing.assert_array_equal(result.y, expected(table, p))
    assert not result.y[~legal].any()
    np.testing.assert_array_equal(result.errors, np.flatnonzero(~legal) + 1)


def test_a_weight_scale_that_is_not_finite_or_negative_raises_error_and_counts_zero():
    p = LinearParameters()
    scales = np.array([INFINITY, 0x7C01, NAN, 0x7FFF, 0xFC00, 0xFE00, MINUS_ONE, 0x8001, 0xFBFF, MINUS_ZERO, 0x7BFF, 0])
    illegal = np.arange(len(scales)) < 9
    table = group_sums(2 * len(scales), psum1=3, coefficient=np.tile([5, INT8], len(scales)))
    table["w_scale"] = np.repeat(scales, 2)
    result = run(GroupAccumulator(p), table)
    np.testing.assert_array_equal(result.y, expected(table, p))
    np.testing.assert_array_equal(result.errors, np.flatnonzero(np.repeat(illegal, 2)) + 1)


def test_an_illegal_group_keeps_the_sum_of_the_others():
    p = LinearParameters()
    table = random_table(np.random.default_rng(SEED), p, outputs=8, groups=5)
    table["coefficient"][16:24] = 128
    kept = np.delete(table, np.s_[16:24])
    np.testing.assert_array_equal(run(GroupAccumulator(p), table).y, expected(kept, p))


@pytest.mark.parametrize(
    "shape",
    [
        {"group": 1, "rows": 1, "cols": 1, "accumulators": 1},
        {"group": 32, "rows": 8, "cols": 5, "accumulators": 3},
        {"group": 256, "rows": 2, "cols": 64, "accumulators": 5},
        {"group": 7, "rows": 3, "cols": 7, "accumulators": 1000, "max_coefficient": 0, "int8_groups": False},
    ],
)
def test_shapes_use_all_their_accumulators(shape):
    p = LinearParameters(**shape)
    outputs = min(p.accumulators * p.unit_cols, 300)
    rng = np.random.default_rng(SEED)
    table = random_table(rng, p, outputs=outputs, groups=3)
    if p.accumulators * p.unit_cols > outputs:  # the last ones
        table["address"] += p.accumulators - 1 - table["address"].max()
    spacing = -(-GroupAccumulator.loop_latency // outputs)
    spaced = group_sums(spacing * len(table), valid=0)
    spaced[::spacing] = table
    np.testing.assert_array_equal(run(GroupAccumulator(p), spaced).y, expected(table, p))


def test_reset_leaves_no_output_and_no_error_behind():
    p = LinearParameters()
    unit = GroupAccumulator(p)
    word = words(group_sums(1, psum1=5, coefficient=200), GroupSum(p))[0]
    seen = []

    async def bench(ctx):
        ctx.set(Value.cast(unit.i), word)
        await ctx.tick().repeat(unit.latency - 1)
        ctx.set(Value.cast(unit.i), 0)
        ctx.set(reset, 1)
        await ctx.tick()
        ctx.set(reset, 0)
        for _ in range(2 * unit.latency):
            seen.append(ctx.get(unit.o.valid) | ctx.get(unit.error))
            await ctx.tick()

    m = Module()
    reset = Signal()
    m.domains.sync = domain = ClockDomain("sync")
    m.d.comb += domain.rst.eq(reset)
    m.submodules.unit = unit
    simulator = Simulator(m)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert not any(seen)


def test_the_memory_is_not_read_and_written_at_one_address_in_one_cycle(monkeypatch):
    """It is built without collision logic; `loop_latency` keeps reads and writes of an accumulator apart."""
    memories, collisions = [], []

    class Watched(memory.Memory):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            memories.append(self)

    async def watch(ctx):
        (read,), (write,) = memories[-1].read_ports, memories[-1].write_ports
        while True:
            if ctx.get(read.en) and ctx.get(write.en) and ctx.get(read.addr) == ctx.get(write.addr):
                collisions.append(ctx.get(read.addr))
            await ctx.tick()

    monkeypatch.setattr(accumulate.memory, "Memory", Watched)
    p = LinearParameters()
    run(GroupAccumulator(p), random_table(np.random.default_rng(SEED), p, outputs=8, groups=12), watch=watch)
    assert collisions == []
    run(GroupAccumulator(p), random_table(np.random.default_rng(SEED), p, outputs=7, groups=12), watch=watch)
    assert collisions != [], "one cycle sooner they meet"


class TestSeededFaults:
    """A fault in the RTL makes the comparison fail."""

    @staticmethod
    def differs(unit, scale_spread=8):
        p = unit.p
        table = random_table(np.random.default_rng(SEED), p, outputs=8, groups=20, scale_spread=scale_spread)
        return (run(unit, table).y != expected(table, p)).any()

    @pytest.fixture
    def patched_register(self, monkeypatch):
        """Replace the pipeline registers of one name: ``patched_register(name, fault)``."""
        register = floating.Pipeline.register

        def patch(name, fault):
            def faulty(self, value, held_name, *, cycles=1):
                held = register(self, value, held_name, cycles=cycles)
                return fault(held) if held_name == name else held

            monkeypatch.setattr(floating.Pipeline, "register", faulty)

        return patch

    def test_the_sound_unit_does_not_differ(self):
        assert not self.differs(GroupAccumulator(LinearParameters()))

    def test_a_stale_accumulator_is_caught(self, patched_register):
        patched_register("first_group", lambda held: floating.Const(0, 1))
        unit = GroupAccumulator(LinearParameters())
        table = random_table(np.random.default_rng(SEED), unit.p, outputs=8, groups=4)
        table = np.concatenate([table, table])
        assert (run(unit, table).y != expected(table, unit.p)).any()

    def test_a_wrong_sign_is_caught(self, patched_register):
        patched_register("sign", lambda held: ~held)
        assert self.differs(GroupAccumulator(LinearParameters()))

    def test_a_product_shifted_by_one_is_caught(self, patched_register):
        patched_register("exponents", lambda held: held + 1)
        assert self.differs(GroupAccumulator(LinearParameters()))

    def test_a_dropped_carry_is_caught(self, patched_register):
        patched_register("high", lambda held: held & ~1)
        assert self.differs(GroupAccumulator(LinearParameters()))

    def test_a_dropped_sticky_bit_is_caught(self, monkeypatch):
        monkeypatch.setattr(
            floating, "shift_right_sticky", lambda m, value, amount: (value >> amount, floating.Const(0, 1))
        )
        assert self.differs(GroupAccumulator(LinearParameters()))

    def test_psum2_taken_for_a_linear_group_is_caught(self, patched_register):
        patched_register("with_psum2", lambda held: floating.Const(1, 1))
        assert self.differs(GroupAccumulator(LinearParameters()))
