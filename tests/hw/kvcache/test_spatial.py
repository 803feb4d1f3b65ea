"""The cache of keys in simulation: rate, latency, heads in turn, capacity, stalls, reset, unknown memory, faults."""

import re

import numpy as np
import pytest
from amaranth.lib import data
from verilog_checks import lint, yosys

from kvant.hw.emit import emit
from kvant.hw.kvcache import spatial as hardware
from kvant.hw.kvcache.layouts import Table
from kvant.hw.kvcache.packer import BlockPacker
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.spatial import SpatialCache
from kvant.hw.parameters import ParameterError
from kvant.kcache import golden_outputs, random_keys
from kvant.sim.kvcache import spatial
from kvant.sim.kvcache.spatial import KeyTables, KeyVector, sequence
from kvant.sim.kvcache.tables import table_write
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

# A component that only tells its latency is never elaborated.
pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20261130
DEFAULT = KeyTables(
    [5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 100, 120, 255],
    [400, 700, 1100, 1700, 2600, 6970, 7915, 8542, 9251, 10320, 10890, 12551, 12980, 13684, 17162],
)
OTHERS = [DEFAULT, KeyTables([7, 255], [5000]), KeyTables([0, 127, 60], [900, 900]), KeyTables([33], [])]


def with_mean(p, table, seed):
    mean = np.random.default_rng(seed).standard_normal(p.head_dim).astype(np.float16)
    return KeyTables(table.coefficients, table.thresholds, mean if p.centred else None)


def check_heads(p, trace, keys, tables):
    """What stands in memory of each head is what it would be alone."""
    memory = spatial.memory_of(p, trace)
    for head, k in keys.items():
        golden = golden_outputs(p, k, tables[head])
        result = spatial.read_sequence(p, memory, len(k), head=head) | spatial.read_sinks(p, trace, head=head)
        for name, array in result.items():
            bits = f"u{array.itemsize}"
            np.testing.assert_array_equal(array.view(bits), golden[name].view(bits), err_msg=f"head {head}: {name}")


def in_turn(rng, keys):
    """Rows of several heads in a random order."""
    rows = {head: sequence(k, head=head) for head, k in keys.items()}
    order = rng.permutation(np.repeat(list(rows), [len(rows[head]) for head in rows]))
    return [rows[head].pop(0) for head in order.tolist()]


def interleaved(p, tokens, *, simulator="amaranth", **options):
    rng = np.random.default_rng(SEED)
    keys = {head: random_keys(1, count, p.head_dim, seed=head)[0] for head, count in enumerate(tokens)}
    tables = {head: with_mean(p, OTHERS[head % len(OTHERS)], head) for head in keys}
    trace = spatial.play(p, in_turn(rng, keys), tables, simulator=simulator, **options)
    check_heads(p, trace, keys, tables)
    assert trace.status["error"] == trace.status["busy"] == 0
    return trace


SHAPES = [
    {"head_dim": 64, "group": 64, "lanes": 4},
    {"head_dim": 64, "group": 64, "lanes": 8, "centred": True},
    {"head_dim": 80, "group": 64, "lanes": 16, "sinks": 2},
    {"head_dim": 96, "group": 32, "lanes": 8, "statistic": "moment"},
    {"head_dim": 40, "group": 32, "lanes": 32},
    {"head_dim": 32, "group": 32, "lanes": 32},
    {"head_dim": 100, "group": 16, "lanes": 16, "port_bits": 32},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_transfer_is_taken_in_every_cycle(shape):
    p = CacheParameters(heads=2, **shape)
    trace = interleaved(p, (9, 10))
    taken = trace.cycles["k"]
    assert len(taken) == 19 * p.row_transfers
    assert taken == list(range(taken[0], taken[0] + len(taken)))


@pytest.mark.parametrize("shape", SHAPES[:6])
def test_the_latency_is_the_stated_one(shape):
    p = CacheParameters(**shape)
    k = random_keys(1, 1, p.head_dim, seed=SEED)[0]
    trace = spatial.play(p, sequence(k), {0: with_mean(p, DEFAULT, 0)}, simulator="amaranth")
    word = trace.cycles["codes"]
    # Words of zeros fill the last group up behind the word with its last codes.
    words = spatial.page_layout(p).code_words(SpatialCache(p).word_bits)
    filled = -(-p.tail * 4 // min(SpatialCache(p).word_bits, 4 * p.group))
    assert word[-1 - (words - filled)] == trace.cycles["k"][-1] + SpatialCache(p).latency + BlockPacker.latency


@pytest.mark.parametrize("stall", [0.3, 0.9, {"k": [0, 1], "codes": [1, 0, 0]}, {"codes": [1] * 400 + [0] * 60}])
def test_heads_take_turns_and_stalls_change_nothing(stall):
    p = CacheParameters(head_dim=20, group=16, lanes=8, heads=3, sinks=2, centred=True)
    interleaved(p, (17, 1, 9), stall=stall, seed=1)


def test_long_stalls_of_each_output_lose_nothing():
    p = CacheParameters(head_dim=20, group=16, lanes=8, sinks=3)
    for stream in ("codes", "meta", "sink"):
        interleaved(p, (19,), stall={stream: [1] * 1000 + [0] * 200})


@pytest.mark.parametrize("simulator", ["verilator", "icarus"])
def test_the_simulators_agree_to_the_cycle(simulator):
    p = CacheParameters(head_dim=20, group=16, lanes=4, heads=2, sinks=1, centred=True)
    want = interleaved(p, (17, 5), stall=0.4)
    got = interleaved(p, (17, 5), stall=0.4, simulator=simulator)
    assert got.transfers == want.transfers and got.cycles == want.cycles and got.status == want.status


@pytest.mark.parametrize("again_at", [70, 135, 180, 261])
def test_case_36_after_a_reset_in_the_middle_a_run_equals_a_cold_start(again_at):
    p = CacheParameters(head_dim=20, group=8, lanes=4, heads=2, sinks=1)
    cold = interleaved(p, (13, 9), stall=0.2)
    reset = Reset(cycles=1, again_at=again_at, hold_valid=True)
    assert interleaved(p, (13, 9), stall=0.2, reset=reset).transfers == cold.transfers


def test_case_13_rows_beyond_the_capacity_wait_until_the_sequence_begins_anew():
    p = CacheParameters(head_dim=8, group=8, lanes=8, heads=2, capacity=16)
    k = random_keys(1, 16, 8, seed=SEED)[0]
    rows = [*sequence(k), *sequence(k[:9], head=1)]
    tables = {0: DEFAULT, 1: DEFAULT}
    check_heads(p, spatial.play(p, rows, tables, simulator="amaranth"), {0: k, 1: k[:9]}, tables)
    # One row more of head 0 blocks the port: what comes behind it is not taken, nothing is overwritten, `full` is high.
    stimulus = spatial.stimulus(p, rows, tables, word_bits=SpatialCache(p).word_bits)
    more = spatial.row_words(p, [KeyVector(k[0]), KeyVector(k[0], head=1)])
    inputs = dict(stimulus.inputs) | {"k": {name: stimulus.inputs["k"][name] + more[name] for name in more}}
    with pytest.raises(Exception, match="k 26 of 27 sent"):
        simulate(
            lambda: SpatialCache(p),
            "kcache",
            Stimulus(inputs, stimulus.expect, after=stimulus.after),
            simulator="amaranth",
            timeout_cycles=100,
        )
    anew = [*sequence(k), KeyVector(k[3], start=True, flush=True)]
    trace = spatial.play(p, anew, tables, simulator="amaranth")
    memory = spatial.memory_of(p, trace)
    assert memory.read(0, 0, 1).codes.tolist() == golden_outputs(p, k[3:4], DEFAULT)["codes"].tolist()
    assert memory.read(0, 1).codes.tolist() == golden_outputs(p, k, DEFAULT)["codes"][8:].tolist()


@pytest.mark.parametrize("tokens", [7, 8, 9, 16, 17, 83])
def test_case_13_with_eviction_the_ring_holds_the_newest_pages(tokens):
    p = CacheParameters(head_dim=8, group=8, lanes=8, capacity=16, evict=True)
    k = random_keys(1, tokens, 8, seed=SEED)[0]
    memory = spatial.memory_of(p, spatial.play(p, sequence(k), {0: DEFAULT}, simulator="amaranth"))
    codes = golden_outputs(p, k, DEFAULT)["codes"]
    for page in range(max(0, (tokens - 1) // 8 - 1), (tokens - 1) // 8 + 1):
        held = memory.read(0, page % 2, min(8, tokens - 8 * page))
        assert held.timestamp == 8 * page
        np.testing.assert_array_equal(held.codes, codes[8 * page : 8 * page + 8])


def test_rows_without_a_sequence_or_head_are_dropped_with_an_error_and_change_nothing():
    p = CacheParameters(head_dim=20, group=8, lanes=8, heads=2)
    k = random_keys(1, 6, 20, seed=SEED)[0]
    good = sequence(k)
    stimulus = spatial.stimulus(p, good, {0: DEFAULT}, word_bits=SpatialCache(p).word_bits)
    for bad in (KeyVector(k[0], head=1), KeyVector(k[0], head=2, start=True), KeyVector(k[0], head=255)):
        rows = [bad, good[0], bad, bad, *good[1:], bad]
        inputs = dict(stimulus.inputs) | {"k": spatial.row_words(p, rows)}
        play_this = Stimulus(inputs, stimulus.expect, status=spatial.STATUS, after=stimulus.after)
        trace = simulate(lambda: SpatialCache(p), "kcache", play_this, simulator="amaranth")
        check_heads(p, trace, {0: k}, {0: DEFAULT})
        assert trace.status["error"] == 1 and trace.status["nonfinite"] == 0


def test_a_sequence_ends_on_demand():
    p = CacheParameters(head_dim=8, group=8, lanes=8)
    k = random_keys(1, 2, 8, seed=SEED)[0]
    stimulus = spatial.stimulus(p, sequence(k), {0: DEFAULT}, word_bits=SpatialCache(p).word_bits)
    cfg = [*stimulus.inputs["cfg"]["data"], table_write(Table.END, 0)]
    rows = spatial.row_words(p, [KeyVector(k[0]), *sequence(k)])
    play_this = Stimulus(
        {"cfg": {"data": cfg}, "k": rows}, stimulus.expect, status=spatial.STATUS, after={"k": ("cfg", len(cfg))}
    )
    trace = simulate(lambda: SpatialCache(p), "kcache", play_this, simulator="amaranth")
    assert trace.status["error"] == 1, "the row before the start belongs to no sequence"
    check_heads(p, trace, {0: k}, {0: DEFAULT})


@pytest.mark.parametrize(
    ("write", "is_error"),
    [
        ((Table.COEFFICIENT, 0, 15, 5), 0), ((Table.COEFFICIENT, 0, 16, 5), 1), ((Table.THRESHOLD, 0, 14, 5), 0),
        ((Table.THRESHOLD, 0, 15, 5), 1), ((Table.MEAN, 0, 7, 0), 0), ((Table.MEAN, 0, 8, 0), 1),
        ((Table.FLOOR, 0, 0, 0), 1), ((5, 0, 0, 0), 1), ((Table.END, 1, 0, 0), 1), ((Table.END, 0, 9, 9), 0),
        ((Table.COEFFICIENT, 1, 0, 5), 1),
    ],
)  # fmt: skip
def test_table_writes_to_nowhere_are_errors(write, is_error):
    p = CacheParameters(head_dim=8, group=8, lanes=8, centred=True)
    stimulus = Stimulus({"cfg": {"data": [table_write(*write)]}}, status=["error"])
    assert simulate(lambda: SpatialCache(p), "kcache", stimulus, simulator="amaranth").status["error"] == is_error


def test_a_reserved_coefficient_counts_zero_and_is_an_error():
    p = CacheParameters(head_dim=8, group=8, lanes=8, sinks=1)
    k = random_keys(1, 2, 8, seed=SEED)[0]
    result = spatial.run(p, k, KeyTables([200], []), simulator="amaranth")
    assert int(result["error"]) == 1 and not result["codes"].any() and not result["scale"].any()
    assert int(spatial.run(p, k[:1], KeyTables([200], []), simulator="amaranth")["error"]) == 0, "a sink has none"


def test_case_16_unknown_memory_reaches_no_output():
    """Every memory of the design begins as X; a short sequence, after tables and means are written."""

    def forget(verilog):
        text, count = re.subn(r"  initial begin\n(?:    .*\n)+?  end\n", "", verilog)
        assert count > 5
        return text

    p = CacheParameters(head_dim=20, group=16, lanes=8, heads=3, sinks=1, centred=True)
    want = interleaved(p, (5, 3))
    got = interleaved(p, (5, 3), simulator="icarus", edit_verilog=forget)
    assert got.transfers == want.transfers


class TestFaults:
    def run(self):
        p = CacheParameters(head_dim=20, group=16, lanes=8, heads=2, sinks=1)
        interleaved(p, (9, 6))

    def test_a_count_of_the_full_group_for_a_short_one_is_caught(self, monkeypatch):
        statistic = hardware.GroupStatistic
        monkeypatch.setattr(hardware, "GroupStatistic", lambda p, tag, counts: statistic(p, tag))
        with pytest.raises(AssertionError):
            self.run()

    def test_sinks_that_are_coded_are_caught(self, monkeypatch):
        def without_bits(self):
            data.StructLayout.__init__(self, {"sink": 0})

        monkeypatch.setattr(hardware.SinkTag, "__init__", without_bits)
        with pytest.raises(AssertionError):
            self.run()


def test_parameters_that_are_no_cache_are_refused():
    with pytest.raises(ParameterError, match="group = 48: legal in a cache are the powers of two from 8 on"):
        SpatialCache(CacheParameters(group=48))
    with pytest.raises(ParameterError, match="lanes = 64: legal in a cache are the powers of two up to group = 32"):
        SpatialCache(CacheParameters(group=32, lanes=64))


@pytest.mark.parametrize(
    "parameters",
    [
        {"heads": 3, "centred": True, "sinks": 4, "head_dim": 80, "lanes": 4, "evict": True},
        {"head_dim": 96, "group": 32, "lanes": 32, "statistic": "moment", "capacity": 32},
    ],
)
def test_the_verilog_passes_all_linters(tmp_path, parameters):
    design = emit(SpatialCache(CacheParameters(**parameters)), "kcache")
    (tmp_path / "kcache.sv").write_text(design.verilog)
    assert lint(tmp_path, "kcache.sv", top="kcache") == ""
    result = yosys(tmp_path, "read_verilog -sv kcache.sv; hierarchy -check -top kcache; proc; check -assert")
    assert result.returncode == 0, result.stdout + result.stderr
