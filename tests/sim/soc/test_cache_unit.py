"""The cache unit at a memory: whatever the calls are that bring rows, memory holds what the golden models say.

Every test compares the whole memory, so that it also shows what must not be written.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from cache_scenes import Scene
from cache_unit_bench import Step, run
from formal import mutant
from verilog_checks import lint, yosys

from kvant.hw.emit import emit
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.soc import cache_unit
from kvant.hw.soc.cache_control import CacheControl
from kvant.hw.soc.cache_unit import CacheUnit
from kvant.hw.soc.descriptors import ErrorCode
from kvant.hw.soc.parameters import SocParameters, TopParameters

pytest.importorskip("cocotb")


def parameters(port_bits, **cache):
    return TopParameters(
        LinearParameters(group=64), SocParameters(port_bits=port_bits), CacheParameters(port_bits=port_bits, **cache)
    )


P = parameters(64, group=8, head_dim=12, lanes=4, sinks=5, centred=True)
"""Two groups a key, the second one short; a page of one block; two transfers a word."""

SHAPES = {
    "a head shorter than a group": parameters(128, group=16, head_dim=8, lanes=8),
    "transfers wider than words": parameters(32, group=16, head_dim=40, lanes=16, sinks=20, statistic="moment"),
    "single elements": parameters(128, group=8, head_dim=5, lanes=1, sinks=3),
    "offsets and shared coefficients": parameters(
        64, group=16, head_dim=20, lanes=8, sinks=2, offset=True, shared_coeff=True
    ),
    "a usual head": parameters(128, group=64, head_dim=64, lanes=8, sinks=4, centred=True),
}


def calls_of(rng, length, group):
    """A random split of *length* tokens into calls."""
    calls = []
    while sum(calls) < length:
        tokens = rng.choice([1, 1, 2, 3, group - 1, group, group + 1, rng.randint(1, 3 * group)])
        calls.append(min(tokens, length - sum(calls)))
    return calls


def play(scene, todo, seed, **options):
    """The calls of *todo* (sequence, values, lengths) in a random order: memory and counts are right."""
    before, rng, steps, saturated = bytes(scene.image), random.Random(seed), [], []
    todo = [(sequence, values, list(calls)) for sequence, values, calls in todo]
    while todo:
        sequence, values, calls = todo[rng.randrange(len(todo))]
        clamped = scene.saturated(sequence) if values else 0
        steps.append(Step(scene.job(sequence, values, calls.pop(0))))
        saturated.append(scene.saturated(sequence) - clamped if values else 0)
        todo = [entry for entry in todo if entry[2]]
    after, ends = run(scene.p, before, steps, seed=seed, **options)
    assert [end.how for end in ends] == ["done"] * len(steps)
    assert not any(end.nonfinite or end.error for end in ends)
    assert [end.saturated for end in ends] == saturated and sum(saturated)
    same_memory(after, scene)


def same_memory(memory, scene):
    expected = bytes(scene.image)
    wrong = [place for place, (a, b) in enumerate(zip(memory, expected, strict=True)) if a != b]
    assert not wrong, f"{len(wrong)} bytes differ, the first of them at {wrong[:5]}"


@pytest.mark.parametrize(
    ("simulator", "stall", "latency"), [("verilator", 0.0, 3), ("verilator", 0.3, 40), ("icarus", 0.9, 10)]
)
def test_sequences_and_heads_share_a_memory(simulator, stall, latency):
    slow = simulator == "icarus"
    lengths = [17, 3] if slow else [33, 8, 6, 17]
    scene = Scene(P, int(100 * stall), lengths, heads=1 if slow else 2)
    rng = random.Random(1)
    todo = [
        (sequence, values, calls_of(rng, len(sequence.rows[values]), P.cache.group))
        for sequence in scene.sequences
        for values in (False, True)
    ]
    play(scene, todo, 1, simulator=simulator, stall=stall, latency=latency)


SPLITS = [
    [26],  # at once, longer than windows
    [8, 8, 8],  # whole windows
    [1] * 19,  # token by token, from the first one
    [3, 4, 1, 1],  # the first call shorter than a window, which closes at the end of a call
    [13, 2, 9],  # the first call longer, a window closes within a call
    [2, 23, 1],  # several windows in a later call
    [4, 1, 2, 3],  # sinks in several calls
]


def test_every_split_into_calls_leaves_what_one_call_would():
    scene = Scene(P, 7, [sum(calls) for calls in SPLITS])
    todo = [(s, values, calls) for s, calls in zip(scene.sequences, SPLITS, strict=True) for values in (False, True)]
    play(scene, todo, 2)


@pytest.mark.long
@pytest.mark.parametrize("stall", [0.0, 0.4])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape(shape, stall):
    p = SHAPES[shape]
    group = p.cache.group
    lengths = [3 * group + 5, group - 2, 2 * group] if group < 64 else [group + 5, group - 2]
    scene = Scene(p, 11, lengths, heads=2)
    rng = random.Random(3)
    todo = [
        (sequence, values, calls_of(rng, len(sequence.rows[values]), group))
        for sequence in scene.sequences
        for values in (False, True)
    ]
    play(scene, todo, 3, stall=stall, latency=17)


def appended(scene, calls):
    """Jobs of keys and values in turn."""
    sequence = scene.sequences[0]
    return [scene.job(sequence, values, tokens) for tokens in calls for values in (False, True)]


def test_an_error_of_a_read_stops_the_job_that_asked_and_it_can_be_repeated():
    scene = Scene(P, 21, [24])
    before, step = bytes(scene.image), P.soc.port_bytes
    jobs = appended(scene, [6, 5, 9])
    row_words = 2 * P.cache.head_dim // step
    places = {
        2: lambda job: job["calibration"] + 2,
        3: lambda job: job["record"] + scene.layout.record.value_scales.offset // step,
        4: lambda job: job["rows"] + 3 * job["stride"] + row_words - 1,
        5: lambda job: job["table"],
    }
    steps = []
    for number, job in enumerate(jobs):
        if number in places:
            at = places[number](job) * step
            steps.append(Step(job, fault=("read", range(at, at + step))))
        steps.append(Step(job))
    after, ends = run(P, before, steps, stall=0.2, latency=15)
    faults = [(step.job["slot"], end) for step, end in zip(steps, ends, strict=True) if step.fault]
    assert [(end.how, end.code, end.slot) for _, end in faults] == [
        ("fault", ErrorCode.READ_CACHE, slot) for slot, _ in faults
    ]
    assert [end.how for step, end in zip(steps, ends, strict=True) if not step.fault] == ["done"] * len(jobs)
    same_memory(after, scene)


def test_an_error_of_a_write_is_seen_before_the_job_is_done():
    scene = Scene(P, 22, [24])
    before, step = bytes(scene.image), P.soc.port_bytes
    sequence = scene.sequences[0]
    jobs = appended(scene, [6, 5, 9])
    page = sequence.head.pools[False] + sequence.pages[0] * scene.layout.keys.page_bytes
    faults = {2: page + scene.layout.keys.trailer, 3: sequence.record + scene.layout.record.value_window.offset}
    steps = []
    for number, job in enumerate(jobs):
        if number in faults:
            steps.append(Step(job, fault=("write", range(faults[number], faults[number] + step))))
        steps.append(Step(job))
    after, ends = run(P, before, steps, latency=15)
    assert [end.how for end in ends] == ["write" if step.fault else "done" for step in steps]
    same_memory(after, scene)


def test_a_job_that_was_stopped_anywhere_can_be_repeated():
    scene, rng = Scene(P, 23, [40]), random.Random(5)
    before = bytes(scene.image)
    steps = []
    for job in appended(scene, [6, 5, 9, 1, 19]):
        steps += [Step(job, stop_after=rng.randrange(3, 250)) for _ in range(4)]
        steps.append(Step(job))
    after, ends = run(P, before, steps, stall=0.1, latency=9)
    assert [end.how for step, end in zip(steps, ends, strict=True) if step.stop_after is None] == ["done"] * 10
    assert sum(end.how == "stopped" for end in ends) > 20
    same_memory(after, scene)


def test_flags_tell_of_their_job_alone():
    scene = Scene(P, 24, [8, 8])
    bad, good = scene.sequences
    bad.rows[False][1, 3], bad.rows[True][2, 0] = np.inf, np.nan
    for values, (row, column) in {False: (1, 3), True: (2, 0)}.items():
        at = bad.addresses[values] + row * bad.stride + 2 * column
        scene.image[at : at + 2] = bad.rows[values][row, column].tobytes()
    before = bytes(scene.image)
    steps = [Step(scene.job(s, values, 7)) for s in (bad, good) for values in (False, True)]
    # A reserved coefficient, whichever entry is chosen; its groups count 0, in pages that nothing else is written to.
    spoilt = replace(steps[2], job=steps[2].job | {"calibration": len(before) // P.soc.port_bytes})
    entries = scene.layout.key_calibration.encode([200], [], scene.heads[0].mean.tobytes())
    after, ends = run(P, before + entries, [*steps[:2], spoilt, *steps[2:]])
    assert [end.nonfinite for end in ends] == [1, 1, 0, 0, 0]
    assert [end.error for end in ends] == [0, 0, 1, 0, 0]
    same_memory(after[: len(before)], scene)


def test_a_window_that_does_not_begin_at_its_first_row_is_caught(monkeypatch):
    """Seeded fault: rows that are read again are taken for new ones."""
    fault = mutant(CacheControl, "Mux(fills, Table.WINDOW, Table.POSITION)", "Table.POSITION")
    monkeypatch.setattr(cache_unit, "CacheControl", fault)
    scene = Scene(P, 25, [12])
    before = bytes(scene.image)
    steps = [Step(scene.job(scene.sequences[0], True, tokens)) for tokens in (3, 6)]
    after, _ = run(P, before, steps, simulator="icarus", cached=False)
    with pytest.raises(AssertionError, match="bytes differ"):
        same_memory(after, scene)


@pytest.mark.parametrize(
    "p", [P, pytest.param(SHAPES["transfers wider than words"], marks=pytest.mark.long)], ids=["narrow", "wide"]
)
def test_verilog_passes_lint_and_check(tmp_path, p):
    design = emit(CacheUnit(p), "cache_unit")
    (tmp_path / "unit.sv").write_text(design.verilog)
    assert lint(tmp_path, "unit.sv", top="cache_unit") == ""
    result = yosys(tmp_path, "read_verilog -sv unit.sv; hierarchy -top cache_unit; proc; check -assert")
    assert result.returncode == 0, result.stderr
