"""Keys and values through one unit: exact, keys first, neither blocks the other."""

import numpy as np
import pytest
from verilog_checks import lint, yosys

from kvant.hw.emit import emit
from kvant.hw.kvcache import shared as hw_shared
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.shared import SharedCache, unit_parameters
from kvant.hw.parameters import ParameterError
from kvant.sim.errors import SimulationError
from kvant.sim.kvcache import requantizer as cache_sim
from kvant.sim.kvcache import shared as sim
from kvant.sim.simulate import simulate
from kvant.vcache import golden_outputs, random_values

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

COEFFICIENTS = np.array([5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 100, 120, 255], np.uint8)
THRESHOLDS = np.array(
    [400, 700, 1100, 1700, 2600, 6970, 7915, 8542, 9251, 10320, 10890, 12551, 12980, 13684, 17162], np.uint16
)


def parameters(**fields):
    return CacheParameters(**{"group": 8, "lanes": 4, "head_dim": 8} | fields)


def arrays(p, v, head):
    values = {
        "v": v,
        "calls": np.array([3, len(v) - 3], np.int32),
        "coeffs": np.roll(COEFFICIENTS, head),
        "thresholds": THRESHOLDS,
        "floor": np.full(p.head_dim, 0.5 + head, np.float16),
    }
    if p.centred:
        values["mean"] = np.full(p.head_dim, head / 8, np.float16)
    return values


class Load:
    """Sequences of *tokens* of every head of keys and of values, rows of the heads in turn."""

    def __init__(self, p, tokens, *, values=True, seed=0):
        self.p = p
        v = random_values(2 * p.heads, tokens, p.head_dim, seed=seed)
        self.arrays = [arrays(p, v[head], head) for head in range(p.heads * (2 if values else 1))]
        rows = [cache_sim.sequence_rows(given["v"], 3, head % p.heads) for head, given in enumerate(self.arrays)]
        self.keys = [row for turn in zip(*rows[: p.heads], strict=True) for row in turn]
        self.values = [row for turn in zip(*rows[p.heads :], strict=True) for row in turn]
        self.tables = []
        for head, given in enumerate(self.arrays):
            self.tables += cache_sim.table_writes(unit_parameters(p), given, heads=[head])
        self.windows = tokens // p.group * len(self.arrays)
        self.sinks = min(p.sinks, tokens) * len(self.arrays)
        self.peeks = [(head, row) for head in range(len(self.arrays)) for row in range(tokens % p.group)]

    def run(self, simulator="amaranth", **options):
        stimulus = sim.stimulus(
            self.p,
            self.keys,
            self.values,
            self.tables,
            windows=self.windows,
            sinks=self.sinks,
            peeks=self.peeks,
        )
        return simulate(lambda: SharedCache(self.p), "shared_cache", stimulus, simulator=simulator, **options)

    def check(self, trace):
        """Every window, sink and staged row is the golden model's."""
        unit = unit_parameters(self.p)
        windows, sinks = cache_sim.written_windows(unit, trace), cache_sim.sink_rows(unit, trace)
        staged, _ = cache_sim.staged_rows(unit, trace)
        for head, given in enumerate(self.arrays):
            golden = golden_outputs(unit, given)
            own = [window.page for window in windows if window.head == head]
            assert [page.timestamp for page in own] == [k * unit.group for k in range(len(given["v"]) // unit.group)]
            for number, page in enumerate(own):
                rows = slice(number * unit.group, (number + 1) * unit.group)
                np.testing.assert_array_equal(page.codes.T, golden["codes"][rows])
                np.testing.assert_array_equal(page.scale.view(np.uint16), golden["scale"][number].view(np.uint16))
                np.testing.assert_array_equal(page.coefficient, golden["coeff"][number])
                np.testing.assert_array_equal(page.offset, golden["offset"][number])
            np.testing.assert_array_equal(sinks[head][0], golden["sink"])
            count = len(golden["staged"])
            np.testing.assert_array_equal(staged[:count], golden["staged"])
            staged = staged[count:]
        assert trace.status["error"] == 0


@pytest.mark.parametrize(
    "fields",
    [{}, {"heads": 3}, {"offset": True, "shared_coeff": True, "centred": True, "sinks": 3, "heads": 2}],
    ids=str,
)
@pytest.mark.parametrize("stall", [0.0, 0.4])
def test_keys_and_values_are_those_of_units_of_their_own(fields, stall):
    load = Load(parameters(**fields), 3 * 8 + 2)
    load.check(load.run(stall=stall, seed=5))


def test_verilog_agrees():
    load = Load(parameters(heads=2), 19)
    load.check(load.run(simulator="icarus", stall=0.2, seed=1))


def test_keys_take_the_port_before_values():
    """With both offered without a pause, every key goes before the first value but one that has begun."""
    load = Load(parameters(heads=2), 20)
    trace = load.run()
    assert trace.status["k_stall_cycles"] <= load.p.row_transfers
    assert trace.cycles["k"][-1] - trace.cycles["k"][0] < len(trace.cycles["k"]) + load.p.row_transfers
    assert trace.cycles["v"][load.p.row_transfers] > trace.cycles["k"][-1]


def test_a_key_waits_for_one_row_of_values_at_most():
    p = parameters(head_dim=32)  # 8 transfers a row
    load = Load(p, 24)
    # A row of keys now and then, values all the time.
    trace = load.run(stall={"k": sim.paced(p, load.tables, 5 * p.row_transfers + 3)})
    load.check(trace)
    assert trace.cycles["v"][0] < trace.cycles["k"][0]
    assert 0 < trace.status["k_stall_cycles"] <= len(load.keys) * (p.row_transfers - 1)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_rows_in_turn_never_wait_for_the_requantiser(heads):
    """Keys every second row time and values between them: a transfer in every cycle, over many windows."""
    p = parameters(heads=heads, head_dim=16)
    load = Load(p, 6 * 8)
    trace = load.run(stall={"k": sim.paced(p, load.tables, 2 * p.row_transfers)})
    load.check(trace)
    first, last = trace.cycles["k"][0], trace.cycles["k"][-1]
    cycles = np.sort(trace.cycles["k"] + trace.cycles["v"])
    assert trace.status["k_stall_cycles"] == 0
    assert (np.diff(cycles[(cycles >= first) & (cycles <= last)]) == 1).all()


def test_windows_of_keys_pass_those_of_values():
    """Values of four heads close their windows together, keys theirs a little later: keys are written before most."""
    p = parameters(heads=4, group=16, head_dim=8)
    load = Load(p, 16)
    keys, values = load.keys, load.values
    stimulus = sim.stimulus(p, keys, values, load.tables, windows=load.windows)
    pace = {"k": sim.paced(p, load.tables, 2 * p.row_transfers)}
    trace = simulate(lambda: SharedCache(p), "shared_cache", stimulus, simulator="amaranth", stall=pace)
    latencies = sim.window_latencies(p, trace, keys)
    window = p.head_dim * p.group_transfers
    alone = simulate(
        lambda: SharedCache(p),
        "shared_cache",
        sim.stimulus(p, keys, [], load.tables[: len(load.tables) // 2], windows=load.windows // 2),
        simulator="amaranth",
        stall=pace,
    )
    assert (latencies <= sim.window_latencies(p, alone, keys).max() + 2 * window).all()


@pytest.mark.parametrize("full", ["k", "v"])
def test_a_full_cache_of_one_does_not_block_the_other(full):
    p = parameters(capacity=8)
    load, short = Load(p, 20), Load(p, 12)
    keys, values = (load.keys, short.values) if full == "k" else (short.keys, load.values)
    stimulus = sim.stimulus(p, keys, values, load.tables, windows=2)
    with pytest.raises(SimulationError) as error:
        simulate(lambda: SharedCache(p), "shared_cache", stimulus, simulator="amaranth", timeout_cycles=400)
    other, rows = ("v", short.values) if full == "k" else ("k", short.keys)
    transfers = len(rows) * p.row_transfers
    # The one stops with a full page and all but one row of the next window, the other is taken to its end.
    assert f"{full} {(3 + 15) * p.row_transfers} of" in str(error.value)
    assert f"{other} {transfers} of {transfers}" in str(error.value) or f"{other} " not in str(error.value)


def test_heads_that_do_not_exist_are_dropped():
    p = parameters(heads=2)
    load = Load(p, 9)
    strange = cache_sim.sequence_rows(load.arrays[0]["v"], 3, head=2)
    stimulus = sim.stimulus(p, load.keys + strange, load.values + strange, load.tables, windows=load.windows)
    trace = simulate(lambda: SharedCache(p), "shared_cache", stimulus, simulator="amaranth")
    assert trace.status["error"] == 1
    assert {window.head for window in cache_sim.written_windows(unit_parameters(p), trace)} == {0, 1, 2, 3}


def test_verilog_passes_lint_and_check(tmp_path):
    (tmp_path / "dut.sv").write_text(emit(SharedCache(parameters(heads=2)), name="shared_cache").verilog)
    assert lint(tmp_path, "dut.sv", top="shared_cache") == ""
    checked = yosys(tmp_path, "read_verilog -sv dut.sv; prep -top shared_cache; check -assert")
    assert checked.returncode == 0, checked.stderr


def test_too_many_heads_are_refused():
    with pytest.raises(ParameterError, match="heads = 128: legal where keys and values share a unit are 1 to 127"):
        SharedCache(parameters(heads=128))


class LosesTheRow(hw_shared.RowArbiter):
    """Fault: a row of values that has begun gives way to a key."""

    def elaborate(self, platform):
        m = super().elaborate(platform)
        m.d.comb += self.v.ready.eq(self.o.ready & ~self.k.valid)
        return m


def test_seeded_fault_is_found(monkeypatch):
    monkeypatch.setattr(hw_shared, "RowArbiter", LosesTheRow)
    with pytest.raises((AssertionError, SimulationError)):
        test_a_key_waits_for_one_row_of_values_at_most()
