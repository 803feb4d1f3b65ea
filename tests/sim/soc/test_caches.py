"""Caches and attention of the accelerator: sequences in memory, appended to and attended over by descriptors."""

from pathlib import Path

import cache_programs as programs
import numpy as np
import pytest
import torch
from cache_programs import Append, Attend, Calibrated

from kvant import config
from kvant.golden.attention.engine import attend as golden_attend
from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.spatial import spatial_cache
from kvant.golden.kvcache.temporal import temporal_cache
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.parameters import ParameterError
from kvant.hw.soc.descriptors import ErrorCode
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.linear import golden_outputs, random_case
from kvant.sim.soc import bench

pytest.importorskip("cocotbext.axi")

HELPERS = [str(Path(programs.__file__).parent)]
CHOSEN = config.load(None, ["rows=2", "cols=2", "group=8", "accumulators=8", "activation_words=64"])
SHAPE = {"group": 8, "head_dim": 8, "sinks": 2, "lanes": 4}
P = TopParameters(
    CHOSEN.linear,
    SocParameters(burst_beats=16, weight_words=64),
    cache=CacheParameters(**SHAPE),
    attention=AttentionParameters(**SHAPE, rows=4, cols=2, capacity=32, queries=2),
)
TABLES = [([5, 20, 40, 60, 255], [2000, 6000, 9000, 12000]), ([10, 30, 80], [5000, 11000])]
FLOOR = np.linspace(0.1, 2, 8).astype(np.float16)
HEADS = [Calibrated(TABLES[0], TABLES[1], FLOOR), Calibrated(TABLES[1], TABLES[0], FLOOR[::-1].copy())]


def run(program, *, latency=20, stall=0.0, seed=0, memory="model", cycles=200_000, **arguments):
    options = {"latency": latency, "stall": stall, "seed": seed, "memory": memory, "cycles": cycles}
    return bench.run(P, program, options=options, paths=HELPERS, heads=HEADS, **arguments)


class Story:
    """Steps of several sequences, and what the golden model makes of them."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.steps, self.expected = [], []
        self.rows = {}  # of each sequence: keys, values, length of the first call

    def random(self, count):
        return self.rng.standard_normal((len(HEADS), count, SHAPE["head_dim"])).astype(np.float16)

    def append(self, sequence, count):
        step = Append(sequence, self.random(count), self.random(count))
        k, v, prefill = self.rows.get(sequence, (step.k[:, :0], step.v[:, :0], count))
        self.rows[sequence] = np.concatenate((k, step.k), 1), np.concatenate((v, step.v), 1), prefill
        self.steps.append(step)
        return step

    def attend(self, sequence, count, **options):
        q = self.random(count)
        self.steps.append(Attend(sequence, q, options))
        self.expected.append(self.golden(sequence, q, **options))
        return self.steps[-1]

    def golden(self, sequence, q, first=0, end=None, slope=0.0):
        k, v, prefill = self.rows[sequence]
        end = k.shape[1] if end is None else end
        outputs = []
        for head, calibrated in enumerate(HEADS):
            options = {"group": SHAPE["group"], "sinks": SHAPE["sinks"]}
            keys = spatial_cache(torch.from_numpy(k[head]), tables=Tables.of(*calibrated.keys), **options)
            floor = torch.from_numpy(calibrated.floor)
            tables = Tables.of(*calibrated.values)
            values = temporal_cache(torch.from_numpy(v[head]), prefill, tables=tables, floor=floor, **options)
            limits = [torch.from_numpy(np.broadcast_to(x, q.shape[:2])[head].copy()) for x in (first, end)]
            slopes = torch.from_numpy(np.broadcast_to(np.float16(slope), q.shape[:2])[head].copy())
            result = golden_attend(
                torch.from_numpy(q[head]),
                keys,
                values,
                first=limits[0],
                end=limits[1],
                slope=slopes,
                planes=P.attention.weight_planes,
            )
            outputs.append(result.out.numpy())
        return np.stack(outputs)


def same(result, expected):
    return np.array_equal(result.view(np.uint32), expected.view(np.uint32))


def conversation(seed=1, rounds=4):
    """Two sequences that grow in turn: calls of many tokens and of one, windows that become full by either."""
    story = Story(seed)
    story.append(0, 11)
    story.attend(0, 3)
    story.append(1, 1)
    story.attend(1, 1)
    for number in range(rounds):
        story.append(number % 2, (1, 4, 5, 9)[number % 4])
        story.attend(number % 2, 2, first=1, slope=0.5)
        story.attend(1 - number % 2, 1)
    return story


@pytest.mark.parametrize(("stall", "memory", "latency"), [(0.0, "model", 0), (0.3, "model", 50), (0.3, "cocotbext", 0)])
def test_sequences_in_turn_equal_the_golden_model(stall, memory, latency):
    story = conversation(seed=int(10 * stall) + latency)
    results, counters, errors = run(
        programs.conversations, sequences=2, steps=story.steps, stall=stall, memory=memory, latency=latency
    )
    for number, (result, expected) in enumerate(zip(results, story.expected, strict=True)):
        assert same(result, expected), number
    assert not any(errors.values())
    assert counters["SATURATIONS"] > 0 and counters["BYTES_WRITTEN"] > 0


def one_run(seed=5):
    story = Story(seed)
    appends = [story.append(0, 13), story.append(1, 3)]
    attends = [story.attend(number % 2, 2) for number in range(4)]
    return story, appends, attends


def test_appends_layers_and_attention_in_one_ring():
    story, appends, attends = one_run()
    layer = random_case(CHOSEN, tokens=2, outputs=5, inputs=19, seed=2)
    outputs, y, counters = run(programs.one_ring, appends=appends, attends=attends, linear=layer)
    for number, (result, expected) in enumerate(zip(outputs, story.expected, strict=True)):
        assert same(result, expected), number
    assert same(y, golden_outputs(CHOSEN.linear, layer)["y"])
    assert counters["DESCRIPTORS"] == 8 + 4 * 2 + 4 + 1


def scene(seed=9):
    story = Story(seed)
    arguments = {"append": story.append(0, 14), "more": story.append(0, 4), "attend": story.attend(0, 3)}
    return arguments, story.expected[0]


def test_illegal_descriptors_are_refused_before_anything_is_done_for_them():
    arguments, expected = scene()
    reports, outputs = run(programs.bad_descriptors, latency=2, **arguments)
    assert len(reports) > 35
    for text, report, field, touched in reports:
        assert report is not None and report[2] == field and not touched, text
        assert report[0] in (ErrorCode.RESERVED, ErrorCode.SIZE, ErrorCode.ALIGNMENT, ErrorCode.ADDRESS), text
    assert same(outputs, expected)


def test_errors_of_the_memory_stop_the_descriptor_they_belong_to():
    arguments, expected = scene()
    reports = run(programs.bus_errors, latency=10, **arguments)
    codes = [ErrorCode.READ_CACHE] * 3 + [ErrorCode.WRITE_CACHE] * 2 + [ErrorCode.READ_ATTEND] * 3
    for (name, (report, head, owed, outputs)), code in zip(
        reports.items(), [*codes, ErrorCode.WRITE_ATTEND], strict=True
    ):
        assert report is not None and report[0] == code and report[1] == head and not owed, name
        assert same(outputs, expected), name


def test_after_an_abort_at_any_time_everything_can_be_done_again():
    arguments, expected = scene()
    delays = [10, 60, 150, 300, 450, 600, 800, 1000, 1200, 1400]
    for delay, quiet, outputs in run(programs.aborts, latency=15, stall=0.1, delays=delays, **arguments):
        assert quiet and same(outputs, expected), delay


@pytest.mark.parametrize(
    ("cache", "attention", "words"),
    [
        ({"head_dim": 16}, {}, "head_dim = 8 of the attention: legal is 16, that of the caches"),
        ({"port_bits": 64}, {}, "port_bits = 64 of the caches: legal is 128, that of the top"),
        ({}, {"port_bits": 32}, "port_bits = 32 of the attention: legal is 128, that of the top"),
        ({"offset": True}, {}, "offset = true: legal in a top with attention is false"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(cache, attention, words):
    with pytest.raises(ParameterError) as error:
        TopParameters(
            P.linear,
            P.soc,
            cache=P.cache.model_copy(update=cache),
            attention=P.attention.model_copy(update=attention),
        )
    assert str(error.value) == words
