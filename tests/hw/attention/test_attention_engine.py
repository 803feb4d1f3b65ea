"""The attention engine against the golden model: caches of all kinds, shapes, limits, biases, stalls, tools, faults."""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from memory_collisions import asserted_memories
from verilog_checks import lint, yosys

from kvant.attention import contents_of
from kvant.golden.attention.engine import attend
from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.int8 import int8_cache
from kvant.golden.kvcache.spatial import spatial_cache
from kvant.golden.kvcache.temporal import temporal_cache
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS
from kvant.hw.attention import outputs, score_softmax
from kvant.hw.attention.engine import AttentionEngine
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.emit import emit
from kvant.sim.attention.engine import Attend, collect, play, stimulus
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset

SEED = 20261130
TABLES = Tables.of(DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS)
SMALL = AttentionParameters(group=8, head_dim=8, rows=4, cols=2, lanes=4, capacity=32, sinks=2, queries=2)
SHAPES = [
    SMALL,
    AttentionParameters(
        group=16, head_dim=32, rows=8, cols=4, capacity=64, sinks=3, queries=3, quant_lanes=2, port_bits=64
    ),
    AttentionParameters(
        group=16, head_dim=12, rows=16, cols=8, lanes=4, capacity=64, sinks=1, queries=1, weight_planes=1
    ),
]
"""One group a token; several, and scores of several units; a short group, one plane of weights."""


@dataclass(frozen=True)
class Case:
    """A command: formats of keys and values, tokens, queries, and what `attend` takes."""

    formats: str
    tokens: int
    queries: int
    sinks: int = 0
    first: tuple = None
    end: tuple = None
    slope: tuple = None
    spread: float = 1.0


MIXED = [
    Case("int8 mant", 5, 2, sinks=2, slope=(0.25, 1.5)),
    Case("mant int8", 17, 1, first=(3,), end=(11,)),
    Case("mant mant", 17, 2, first=(3, 4), end=(11, 4)),
    Case("mant mant", 11, 2, sinks=2, slope=(0.001, 60.0)),
    Case("int8 int8", 1, 1),
]
"""Open windows alone, whole INT8 caches, a query without keys, sinks in pages, one token."""


def golden(p, case, seed):
    """The command, and what it gives."""
    rng = np.random.default_rng((SEED, seed))
    shapes = ((case.queries, p.head_dim), (case.tokens, p.head_dim), (case.tokens, p.head_dim))
    q, k, v = (torch.from_numpy((rng.standard_normal(s) * case.spread).astype(np.float16)) for s in shapes)
    kinds, mant = case.formats.split(), {"group": p.group, "tables": TABLES, "sinks": case.sinks}
    if kinds[0] == "time":
        k = (k.float() + 3 * torch.linspace(-1, 1, p.head_dim)).half()  # what is left of a mean
        keys = temporal_cache(k, case.tokens, **mant, offset=True, shared_coefficient=True)
    else:
        keys = spatial_cache(k, **mant) if kinds[0] == "mant" else int8_cache(k, group=p.group)
    values = temporal_cache(v, case.tokens, **mant) if kinds[1] == "mant" else int8_cache(v, group=p.group)
    first = case.first or (0,) * case.queries
    end = case.end or (case.tokens,) * case.queries
    slope = np.array(case.slope or (0,) * case.queries, np.float16)
    limits = {"first": torch.tensor(first), "end": torch.tensor(end), "slope": torch.from_numpy(slope)}
    result = attend(q, keys, values, planes=p.weight_planes, **limits)
    return Attend(contents_of(p, (keys, values)), q.numpy(), first=first, end=end, slope=slope), result


def check(p, cases, **options):
    """Holds outputs and flags of the commands against the golden ones, bit for bit; their trace."""
    pairs = [golden(p, case, number) for number, case in enumerate(cases)]
    options = {"simulator": "amaranth", "timeout_cycles": 2000} | options
    with asserted_memories() if options["simulator"] == "amaranth" else nullcontext():
        trace = play(p, [command for command, _ in pairs], **options)
    got = collect(p, trace)
    assert (got["out"].view(np.uint32) == np.concatenate([r.out.numpy() for _, r in pairs]).view(np.uint32)).all()
    assert (got["empty"] == np.concatenate([r.empty.numpy() for _, r in pairs])).all()
    assert got["nonfinite"] == any(r.nonfinite for _, r in pairs) and got["error"] == 0
    assert trace.status["busy"] == 0
    return trace


@pytest.mark.parametrize("stall", [0, 0.3, 0.9])
def test_commands_of_all_kinds_follow_each_other(stall):
    check(SMALL, MIXED if stall < 0.5 else MIXED[2:3], stall=stall)


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 16, "rows": 8, "cols": 8, "quant_lanes": 2, "queries": 3, "port_bits": 64},
        pytest.param({"head_dim": 12, "rows": 16, "cols": 4, "queries": 1}, marks=pytest.mark.long),
        pytest.param({"head_dim": 20, "group": 32, "rows": 2, "cols": 16, "queries": 2}, marks=pytest.mark.long),
        pytest.param({"head_dim": 64, "rows": 8, "cols": 2, "queries": 2}, marks=pytest.mark.long),
    ],
)
def test_keys_along_time(shape):
    """As many rows as columns, more, fewer; short heads and those of several groups; tokens that end anywhere."""
    p = AttentionParameters(**{"group": 16, "sinks": 3, "lanes": 4, "capacity": 96, "time_keys": True} | shape)
    cases = [
        Case("time mant", 2 * p.group + 5, p.queries, sinks=3),
        Case("mant mant", 3, 1),
        Case("time int8", p.group - 2, 1, sinks=1),
        Case("time mant", 3 * p.group, p.queries, slope=(0.5,) * p.queries),
    ]
    check(p, cases, timeout_cycles=4000)


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2])
def test_other_shapes(number):
    p = SHAPES[number]
    cases = [
        Case("mant mant", 2 * p.group + 5, p.queries, sinks=p.sinks),
        Case("int8 mant", p.group, 1),
        Case("mant int8", 3, p.queries, sinks=p.sinks),
    ]
    check(p, cases)


def test_one_huge_value_and_a_full_cache():
    check(SMALL, [Case("mant mant", 32, 2, spread=3000.0), Case("mant mant", 32, 1, spread=0.0)])


def test_a_reset_in_the_middle_leaves_nothing_behind():
    check(SMALL, MIXED[3:4], reset=Reset(again_at=200, hold_valid=True))


def test_an_illegal_command_is_dropped_and_reported():
    command, result = golden(SMALL, MIXED[3], 3)
    played = stimulus(SMALL, [command])
    word = played.inputs["cmd"]["data"][0]
    layout = dict(iter(AttentionEngine(SMALL).cmd.payload.shape()["data"].shape))
    tokens = layout["tokens"]
    wrong = [word & ~(((1 << tokens.width) - 1) << tokens.offset), word | 3 << layout["sinks"].offset, word & ~3]
    played.inputs["cmd"]["data"][:0] = wrong  # no tokens; more sinks than the cache can have; no queries
    trace = simulate(lambda: AttentionEngine(SMALL), "attention", played, simulator="amaranth")
    got = collect(SMALL, trace)
    assert (got["out"] == result.out.numpy()).all() and got["error"] == 1


def test_nan_in_a_query_counts_as_zero_and_is_reported():
    command, _ = golden(SMALL, MIXED[2], 2)
    command.queries[0, 3] = np.nan
    trace = play(SMALL, [command], simulator="amaranth")
    assert collect(SMALL, trace)["nonfinite"] == 1


def test_icarus_sees_the_same():
    ours = check(SMALL, MIXED[3:4], stall=0.2)
    theirs = check(SMALL, MIXED[3:4], stall=0.2, simulator="icarus")
    assert ours.cycles == theirs.cycles


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_verilator_sees_the_same(number):
    p = SHAPES[number]
    cases = [
        Case(kinds, n, p.queries, sinks=s)
        for kinds in ("mant mant", "int8 int8", "int8 mant")
        for n, s in ((1, 1), (p.group - 1, 0), (p.group, 1), (p.tokens, p.sinks), (p.tokens - 1, 0))
    ]
    check(p, cases, simulator="verilator", stall=0.1)


@pytest.mark.parametrize("number", [0, *(pytest.param(k, marks=pytest.mark.long) for k in (1, 2))])
def test_tools_accept_the_verilog(number, tmp_path):
    (tmp_path / "attention.sv").write_text(emit(AttentionEngine(SHAPES[number]), "attention").verilog)
    assert lint(tmp_path, "attention.sv", top="attention") == ""
    script = "read_verilog -sv attention.sv; hierarchy -check -top attention; proc; check -assert"
    checked = yosys(tmp_path, script)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(("unit", "name", "value"), [(outputs, "X_SHIFT", 8), (score_softmax, "LOG_FRACTION", 15)])
def test_a_fault_is_seen(unit, name, value, monkeypatch):
    monkeypatch.setattr(unit, name, value)
    with pytest.raises(AssertionError):
        check(SMALL, MIXED[3:4], design_key=None)


@pytest.mark.long
def test_the_ports_are_read_nearly_all_the_time():
    p = AttentionParameters(capacity=512, queries=1)
    trace = check(p, [Case("mant mant", 512, 1)] * 3, simulator="verilator")
    second = trace.cycles["keys"][len(trace.cycles["keys"]) // 3]
    third = trace.cycles["keys"][2 * len(trace.cycles["keys"]) // 3]
    words = len(trace.cycles["keys"]) // 3 + len(trace.cycles["values"]) // 3
    assert words / (third - second) > 0.9
