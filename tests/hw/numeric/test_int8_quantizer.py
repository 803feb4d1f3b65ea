"""INT8 quantiser against exact integer arithmetic: values, scales, port rule, streams, latency, reset."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from amaranth.hdl import ClockDomain, Const, Module, Signal, Value
from amaranth.lib import data, memory
from amaranth.sim import Simulator

from kvant.hw.numeric import floating, int8_quantizer
from kvant.hw.numeric.int8_quantizer import Int8Quantizer, Int8Scale, quantizer_input, quantizer_output
from kvant.hw.parameters import ParameterError

# A component whose parameters are refused is never elaborated.
pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20260703
NAN, INFINITY, LARGEST = 0x7E01, 0x7C00, 0x7BFF
MINUS = 0x8000


def fp16_units(patterns):
    """fp16 magnitudes, finite, as integers in units of 2**-24."""
    exponent, fraction = patterns >> 10 & 31, patterns & 1023
    return np.where(exponent == 0, fraction, (fraction | 1024) << np.maximum(exponent, 1) - 1)


def nearest_fp16(value):
    """fp16 pattern nearest to a non-negative rational number of units of 2**-24, ties to even."""
    places = max(0, (value.numerator // value.denominator).bit_length() - 11)
    mantissa = round(value / (1 << places))  # Python rounds a Fraction to even
    if mantissa == 2048:
        mantissa, places = 1024, places + 1
    return mantissa if mantissa < 1024 else places + 1 << 10 | mantissa & 1023


def expected_group(elements):
    """(q, scale, nonfinite) of one group of fp16 patterns, in integers."""
    elements = np.asarray(elements, np.int64)
    special = elements >> 10 & 31 == 31
    magnitude = np.where(special, np.where(elements & 1023, 0, LARGEST), elements & 0x7FFF)
    x = fp16_units(magnitude)
    absmax = int(x.max())
    scale = nearest_fp16(Fraction(absmax, 127))
    if scale == 0:
        return np.zeros(len(x), int), 0, bool(special.any())
    twice, odd = np.divmod(254 * x + absmax, 2 * absmax)  # 127 * x / absmax + 1/2
    q = twice - ((odd == 0) & (twice & 1))
    return np.where(elements & MINUS, -q, q), scale, bool(special.any())


def transfers(groups, lanes, rng):
    """Input words and expected output tuples of *groups*; lanes without an element hold garbage."""
    layout = data.Layout.cast(quantizer_input(lanes))
    offset = {name: field.offset for name, field in layout}
    words, results = [], []
    for group in groups:
        q, scale, nonfinite = expected_group(group)
        for start in range(0, len(group), lanes):
            part = [int(element) for element in group[start : start + lanes]]
            last = start + lanes >= len(group)
            filled = part + [int(noise) for noise in rng.integers(0, 1 << 16, lanes - len(part))]
            word = sum(element << offset["data"] + 16 * lane for lane, element in enumerate(filled))
            words.append(word | len(part) << offset["keep"] | last << offset["last"])
            quantised = [int(value) for value in q[start : start + lanes]] + [0] * (lanes - len(part))
            results.append((quantised, scale, last, nonfinite))
    return words, results


class Bench:
    """Plays transfers into a quantiser and checks the stream rules at its output.

    Parameters
    ----------
    offer, accept : iterable of bool
        In which cycles the source has something to offer (once it does, it holds it) and the receiver is ready.
    """

    def __init__(self, unit, words, *, offer=None, accept=None, expect=None, reset_at=None):
        self.unit = unit
        self.words = words
        self.offer = itertools.repeat(True) if offer is None else iter(offer)
        self.accept = itertools.repeat(True) if accept is None else iter(accept)
        self.expect = len(words) if expect is None else expect
        self.reset_at = reset_at
        self.results, self.taken, self.given = [], [], []  # output tuples; cycles of input and output transfers
        self.refused = 0  # cycles in which input was offered and not taken

    def run(self, limit=100_000, watch=None):
        unit = self.unit
        m = Module()
        reset = Signal()
        m.domains.sync = domain = ClockDomain("sync")
        m.d.comb += domain.rst.eq(reset)
        m.submodules.unit = unit
        payload, result = Value.cast(unit.i.payload), Value.cast(unit.o.payload)
        layout = data.Layout.cast(quantizer_output(unit.lanes))

        def unpack(word):
            fields = layout.from_bits(word)
            return list(fields.q), fields.scale, fields.last, fields.nonfinite

        async def bench(ctx):
            ctx.set(reset, 1)
            await ctx.tick()
            ctx.set(reset, 0)
            index, held = 0, None
            for cycle in range(limit):
                if cycle == self.reset_at:
                    ctx.set(reset, 1)
                    ctx.set(unit.i.valid, 1)  # held through reset, and still offered after it
                    await ctx.tick()
                    ctx.set(payload, self.words[0])
                    assert not ctx.get(unit.i.ready) and not ctx.get(unit.o.valid)
                    ctx.set(reset, 0)
                    index, held = 0, None
                    self.results, self.taken, self.given = [], [], []
                if not ctx.get(unit.i.valid) and index < len(self.words) and next(self.offer):
                    ctx.set(unit.i.valid, 1)
                    ctx.set(payload, self.words[index])
                ctx.set(unit.o.ready, 0)
                valid = ctx.get(unit.o.valid)
                ctx.set(unit.o.ready, ready := int(next(self.accept)))
                assert ctx.get(unit.o.valid) == valid, "valid waits for ready"
                word = ctx.get(result)
                if held is not None:
                    assert valid and word == held, "an offered result changed"
                held = word if valid and not ready else None
                if valid and ready:
                    self.results.append(unpack(word))
                    self.given.append(cycle)
                taken = ctx.get(unit.i.valid) and ctx.get(unit.i.ready)
                self.refused += bool(ctx.get(unit.i.valid) and not taken)
                await ctx.tick()
                if taken:
                    self.taken.append(cycle)
                    index += 1
                    ctx.set(unit.i.valid, 0)
                if len(self.results) >= self.expect:
                    break

        simulator = Simulator(m)
        simulator.add_clock(1e-6)
        simulator.add_testbench(bench)
        if watch is not None:
            simulator.add_testbench(watch, background=True)
        simulator.run()
        return self


def random_groups(rng, count, longest):
    """Groups of all lengths and kinds: any pattern, normal numbers, subnormals, few distinct values, wide ranges."""
    groups = []
    for kind in range(count):
        n = int(rng.integers(1, longest + 1))
        sign = rng.integers(0, 2, n) << 15
        groups.append(
            [
                rng.integers(0, 1 << 16, n),
                rng.standard_normal(n).astype(np.float16).view(np.uint16).astype(int),
                rng.integers(0, 0x400, n) | sign,
                rng.choice([0, 1, 0x3C00, 0x3BFF, 0x4000], n) | sign,
                rng.integers(0, 0x7C00, n) | sign,
                rng.integers(0, 0x80, n) | sign,
            ][kind % 6]
        )
    return groups


def check(lanes, group, groups, **options):
    rng = np.random.default_rng(SEED)
    words, results = transfers(groups, lanes, rng)
    bench = Bench(Int8Quantizer(lanes, group), words, **options).run()
    assert bench.results == results
    return bench


def test_the_division_rule_holds_for_every_pair_of_mantissas_and_every_exponent_difference():
    """Eight digits and a remainder bit, shifted and rounded, as `Int8Ratio` does, against 127*X/A * 2**-d exactly."""
    x = np.arange(1, 2048)[:, None]

    def rounded(numerator, denominator):
        quotient, rest = np.divmod(2 * numerator + denominator, 2 * denominator)
        return quotient - ((rest == 0) & (quotient & 1))

    def by_digits(x, a, d):
        quotient, rest = np.divmod(254 * x if d == 0 else 127 * x, a)
        assert quotient.max() < 256
        shift = max(0, d - 1)
        sticky = (rest != 0) | (quotient & ((1 << shift) - 1) != 0)
        quotient >>= shift
        return (quotient >> 1) + (quotient & 1 & (sticky | (quotient >> 1 & 1)))

    for chunk in np.array_split(np.arange(1024, 2048), 8):
        a = chunk[None, :]
        same = np.minimum(x, a)
        np.testing.assert_array_equal(by_digits(same, a, 0), rounded(127 * same, a))
        normal = x[1023:]
        for d in range(1, 12):
            np.testing.assert_array_equal(by_digits(normal, a, d), rounded(127 * normal, a << d))
    a = np.arange(64, 1024)[None, :]  # subnormal maxima, and with them subnormal elements
    below = np.minimum(x[:1023], a)
    np.testing.assert_array_equal(by_digits(below, a, 0), rounded(127 * below, a))


def test_every_scale_is_the_exact_quotient_rounded_once():
    unit = Int8Scale()
    absmax = np.concatenate([np.arange(0, 0x0C00), np.arange(0x0C00, 0x7C00, 7), np.arange(0x7800, 0x7C00)])
    scales = []

    async def bench(ctx):
        for cycle in range(len(absmax) + unit.latency):
            pattern = int(absmax[min(cycle, len(absmax) - 1)])
            ctx.set(unit.absmax.exponent, max(1, pattern >> 10))
            ctx.set(unit.absmax.mantissa, pattern & 1023 | (pattern >= 1024) << 10)
            if cycle >= unit.latency:
                scales.append(ctx.get(unit.scale))
            await ctx.tick()

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    units = [int(value) for value in fp16_units(absmax)]
    assert scales == [nearest_fp16(Fraction(value, 127)) for value in units]
    assert [scale == 0 for scale in scales] == [value <= 63 for value in units]


def test_all_fp16_patterns_are_quantised_exactly():
    patterns = np.random.default_rng(SEED).permutation(1 << 16)
    bench = check(16, 256, np.split(patterns, 256))
    assert bench.refused <= 1, "not ready only in the first cycle after reset"


def test_all_patterns_of_neighbouring_exponents_are_quantised_exactly():
    """Groups whose elements lie within a few powers of two of their maximum, where q takes all its values."""
    rng = np.random.default_rng(SEED)
    order = np.concatenate([rng.permutation(np.arange(low, low + 2048)) for low in range(0, 0x7800, 2048)])
    signs = rng.integers(0, 2, len(order)) << 15
    check(16, 128, np.split(order | signs, len(order) // 128))


def ties(rng, count):
    """Groups of absmax 127 * 2**k and elements that are odd multiples of half a step, or a little beside them.

    Elements 1 to 7 are ties, 8 to 11 are at most one place of fp16 away, 12 to 15 an eighth of a step.
    """
    groups = []
    for _ in range(count):
        power = float(2.0 ** rng.integers(-12, 8))
        halves = np.arange(1, 254, 2)[rng.permutation(127)[:15]] / 2
        halves[11:] = np.arange(1, 32, 2)[rng.permutation(16)[:4]] / 2 + rng.choice([-1, 1], 4) / 8
        values = np.float16(np.concatenate([[127], halves]) * power * rng.choice([-1, 1], 16))
        patterns = values.view(np.uint16).astype(int)
        patterns[8:12] += rng.integers(-1, 2, 4)
        groups.append(patterns)
    return groups


def test_ties_round_to_even():
    groups = ties(np.random.default_rng(SEED), 40)
    exact = [abs(int(q)) for group in groups for q in expected_group(group)[0][1:8]]
    assert all(q % 2 == 0 for q in exact)
    check(4, 16, groups)


def test_zero_and_vanishing_groups_are_zero_and_leave_their_neighbours_alone():
    """A scale of at most half the smallest fp16 number rounds to 0: absmax up to 63 units of 2**-24."""
    alone = [[0x3C00, 0xB800, 0x0001, 0x8000, 0x3555]]
    groups = [
        [0] * 5, *alone, [MINUS] * 3, [63, MINUS | 63, 1, 0, 62], *alone, [64, MINUS | 64, 32, 33, 1], [1], [63], [64],
        *alone, [MINUS | 127, 1, MINUS | 64, 63, 126],
    ]  # fmt: skip
    q, scale, _ = expected_group(groups[5])
    assert scale == 1 and q[0] == 127
    assert expected_group(groups[3])[1] == 0
    check(2, 5, [np.array(group) for group in groups])


def test_nan_counts_zero_and_infinity_as_the_largest_number_and_both_are_flagged():
    groups = [
        [NAN, 0x3C00], [0x3C00, 0x4000], [MINUS | NAN, NAN], [INFINITY, 0x3C00, MINUS | INFINITY], [0x7BFF, 0x5BFF],
        [1, 2, 3, 4, NAN, 5], [0xFC01, 0x0040], [0x3C00],
    ]  # fmt: skip
    flags = [expected_group(group)[2] for group in groups]
    assert flags == [True, False, True, True, False, True, True, False]
    assert list(expected_group(groups[3])[0]) == [127, 0, -127]
    check(2, 6, [np.array(group) for group in groups])


def test_garbage_in_lanes_without_an_element_is_ignored():
    """`transfers` fills them with random patterns, NaN and infinities among them."""
    rng = np.random.default_rng(SEED)
    check(8, 8, [rng.integers(0, 0x0400, n) for n in [1, 2, 3, 4, 5, 6, 7, 8] * 4])


@pytest.mark.parametrize(("lanes", "group"), [(1, 1), (1, 5), (2, 7), (3, 64), (4, 4), (8, 64), (8, 100), (32, 16)])
def test_groups_of_all_lengths_and_kinds_follow_each_other(lanes, group):
    rng = np.random.default_rng(SEED)
    check(lanes, group, random_groups(rng, 60, group))


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_stalls_on_both_sides_change_nothing(probability):
    rng = np.random.default_rng(SEED)
    groups = random_groups(rng, 60, 20)
    coin = np.random.default_rng(SEED + 1)
    options = {side: (bool(coin.random() >= probability) for _ in itertools.count()) for side in ("offer", "accept")}
    check(4, 20, groups, **options)


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_receiver_that_sleeps_for_long_loses_nothing(lanes):
    """The memories fill up, with groups of one transfer each as well, and the source has to wait."""
    rng = np.random.default_rng(SEED)
    groups = [rng.integers(0, 1 << 16, n) for n in [lanes] * 150 + [16, 1, 16, 16]]
    accept = itertools.chain(
        itertools.repeat(False, 100), [True] * 7, itertools.repeat(False, 50), itertools.cycle([1])
    )
    bench = check(lanes, 16, groups, accept=accept)
    assert bench.refused > 100


def test_ready_in_every_other_cycle_halves_the_rate_and_changes_nothing():
    rng = np.random.default_rng(SEED)
    check(4, 16, random_groups(rng, 40, 16), accept=itertools.cycle([False, True]))


@pytest.mark.parametrize(("lanes", "group"), [(1, 8), (2, 8), (4, 32), (8, 64), (16, 64), (64, 256)])
def test_full_groups_flow_without_a_bubble_from_the_stated_latency_on(lanes, group):
    rng = np.random.default_rng(SEED)
    length = -(-group // lanes)
    bench = check(lanes, group, [rng.integers(0, 1 << 16, group) for _ in range(12)])
    assert bench.refused <= 1, "not ready only in the first cycle after reset"
    taken, given = np.array(bench.taken), np.array(bench.given)
    assert (np.diff(taken) == 1).all() and (np.diff(given) == 1).all()
    assert given[0] - taken[length - 1] == bench.unit.latency
    if lanes <= 8:
        assert given[0] - taken[0] <= length + 14


def test_input_never_waits_while_results_are_taken_whatever_the_lengths():
    rng = np.random.default_rng(SEED)
    lengths = [64, *[1] * 20, 64, 64, *[8] * 9, 1, 64, 7, 9, *[63] * 4, 1, 1, 64]
    bench = check(8, 64, [rng.integers(0, 1 << 16, n) for n in lengths])
    assert bench.refused <= 1
    single = check(8, 64, [rng.integers(0, 1 << 16, 8) for _ in range(50)])
    assert (np.diff(single.given) == 1).all()


@pytest.mark.parametrize("cycle", [1, 3, 9, 17, 30])
def test_reset_in_the_middle_equals_a_cold_start(cycle):
    rng = np.random.default_rng(SEED)
    groups = [np.array([0x7BFF] * 16), *random_groups(rng, 10, 16)]  # a stale maximum would be seen
    words, results = transfers(groups, 4, rng)
    cold = Bench(Int8Quantizer(4, 16), words).run()
    for accept in (None, itertools.chain([False] * cycle, itertools.repeat(True))):
        bench = Bench(Int8Quantizer(4, 16), words, reset_at=cycle, accept=accept).run()
        assert bench.results == results
    shift = bench.taken[0] - cold.taken[0]
    assert [value - shift for value in bench.given] == cold.given


@pytest.mark.parametrize(
    ("name", "value"), [("lanes", 0), ("lanes", -1), ("group", 0), ("group", 8.0), ("lanes", True)]
)
def test_parameters_that_are_not_legal_are_refused(name, value):
    with pytest.raises(ParameterError, match=rf"^{name} = {value}: legal is an integer from 1$"):
        Int8Quantizer(**{"lanes": 4, "group": 16, name: value})


def test_no_memory_is_read_and_written_at_one_address_in_one_cycle(monkeypatch):
    """The memories are built without collision logic."""
    memories = []

    class Watched(memory.Memory):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            memories.append(self)

    monkeypatch.setattr(int8_quantizer.memory, "Memory", Watched)
    rng = np.random.default_rng(SEED)
    coin = np.random.default_rng(SEED + 2)
    words, results = transfers(random_groups(rng, 60, 12), 4, rng)
    unit = Int8Quantizer(4, 12)
    bench = Bench(unit, words, accept=(bool(coin.random() < 0.6) for _ in itertools.count()))
    collisions = []

    async def watch(ctx):
        reads_and_writes = [(*block.read_ports, *block.write_ports) for block in memories]
        assert len(reads_and_writes) == 2
        while True:
            for read, write in reads_and_writes:
                if ctx.get(read.en) and ctx.get(write.en) and ctx.get(read.addr) == ctx.get(write.addr):
                    collisions.append(ctx.get(read.addr))
            await ctx.tick()

    assert bench.run(watch=watch).results == results
    assert collisions == []


class TestSeededFaults:
    """A fault in the RTL makes the comparison fail."""

    @staticmethod
    def differs():
        rng = np.random.default_rng(SEED)
        words, results = transfers(ties(rng, 6) + random_groups(rng, 18, 16), 4, rng)
        return Bench(Int8Quantizer(4, 16), words).run(limit=400).results != results

    @pytest.fixture
    def patched_register(self, monkeypatch):
        """Replace the pipeline registers of one name: ``patched_register(name, fault)``."""
        register = floating.Pipeline.register

        def patch(name, fault):
            def faulty(self, value, held_name, *, cycles=1):
                held = register(self, value, held_name, cycles=cycles)
                return fault(register, self, held) if held_name == name else held

            monkeypatch.setattr(floating.Pipeline, "register", faulty)

        return patch

    def test_the_sound_unit_does_not_differ(self):
        assert not self.differs()

    def test_a_dropped_sticky_bit_is_caught(self, patched_register):
        patched_register("rest", lambda register, pipeline, held: Const(0, 1))
        assert self.differs()

    def test_rounding_ties_up_is_caught(self, patched_register):
        patched_register("rest", lambda register, pipeline, held: Const(1, 1))
        assert self.differs()

    def test_a_lost_bit_of_the_alignment_is_caught(self, monkeypatch):
        monkeypatch.setattr(
            int8_quantizer, "shift_right_sticky", lambda m, value, amount: (value >> amount, Const(0, 1))
        )
        assert self.differs()

    def test_a_wrong_sign_is_caught(self, patched_register):
        patched_register("sign", lambda register, pipeline, held: Const(0, 1))
        assert self.differs()

    def test_a_stale_maximum_is_caught(self, patched_register):
        patched_register("absmax", lambda register, pipeline, held: register(pipeline, held, "stale"))
        assert self.differs()

    def test_a_scale_that_is_not_rounded_is_caught(self, patched_register):
        patched_register("b", lambda register, pipeline, held: held & 0x3F)
        assert self.differs()
