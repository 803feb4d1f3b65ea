"""The codebook engine against the golden model, its cycles, its priorities and its Verilog."""

import numpy as np
import pytest
from amaranth.hdl import Cat
from codebook_bench import Jobs, codebook
from memory_collisions import asserted_memories
from verilog_checks import lint, yosys

from kvant.hw.emit import emit
from kvant.hw.parameters import ParameterError
from kvant.hw.pq import nearest, product_array, read_out, reserved_queue, row_loader, step_sequencer
from kvant.hw.pq.engine import CodebookEngine
from kvant.hw.pq.job_vectors import position_lanes
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.errors import SimulationError
from kvant.sim.streams import Reset

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20261130
SMALL = PqParameters(head_dim=16, lanes=4, port_bits=64, nbits=4, batch=2, q_parallel=2)

SHAPES = {
    "two slices, parts of rows": SMALL,
    "surplus lanes, no trees": PqParameters(head_dim=20, lanes=8, port_bits=32, subspace=1, nbits=4, batch=1),
    "lanes beyond a slice": PqParameters(head_dim=24, lanes=16, subspace=4, nbits=4, batch=4, q_parallel=3),
    "one slice, port half empty": PqParameters(head_dim=16, lanes=2, port_bits=512, subspace=8, nbits=4, batch=2),
    "one lane": PqParameters(head_dim=6, lanes=1, port_bits=256, nbits=4, batch=8, q_parallel=3),
    "one element": PqParameters(head_dim=1, lanes=1, port_bits=32, subspace=1, nbits=4, batch=1),
    "bins of 44 bits": PqParameters(
        head_dim=8, lanes=8, port_bits=64, nbits=6, batch=1, q_parallel=2, capacity=1 << 20
    ),
    "bins of 24 bits": PqParameters(head_dim=8, lanes=4, port_bits=32, nbits=4, batch=2, q_parallel=2, capacity=1),
}


def bins_of(p, rng, count, shift=0):
    """Bins of which those of a sub-space sum up, shifted, to just below 2^32, or to the most weights there are.

    The shift is one of all queries, or one of each.
    """
    most = np.minimum((1 << p.bin_width) - 1, (1 << 32 + np.broadcast_to(shift, count)) - 1)[:, None, None]
    share = rng.random((count, p.subspaces, p.centroids))
    bins = (share / share.sum(-1, keepdims=True) * most * (1 - 1e-9)).astype(np.int64)
    bins[rng.random(bins.shape) < 0.3] = 0
    return bins


def most_shift(p):
    return max(0, p.bin_width - 32)


def random_jobs(p, seed, counts):
    """For each of *counts* a job of every mode, with at most that many vectors."""
    rng = np.random.default_rng(seed)
    jobs = Jobs(p, rng)
    for count in counts:
        tokens, queries = min(count, p.batch_tokens), min(count, p.q_parallel)
        scale = float(rng.choice([0.01, 0.3, 6e-8]))
        book = codebook(p, rng, scale=scale)
        jobs.encode(rng.normal(size=(tokens, p.head_dim)) * 60 * scale, book)
        jobs.query(rng.integers(-128, 128, (queries, p.head_dim)), codebook(p, rng))
        shift = rng.integers(0, most_shift(p) + 1, queries)
        jobs.read(bins_of(p, rng, queries, shift), codebook(p, rng), shift)
    return jobs


@pytest.mark.parametrize("p", SHAPES.values(), ids=SHAPES)
def test_all_modes_are_those_of_the_golden_model(p):
    most = max(p.batch_tokens, p.q_parallel)
    with asserted_memories() as watched:
        trace = random_jobs(p, SEED, [most, 1, most]).check(drain_cycles=60)
    assert len(watched) >= 3 + p.slice_subspaces
    assert trace.status["nearest"] == p.codebook_words * (2 * (p.batch_tokens + 1) + 2)
    assert trace.status["tables"] == p.codebook_words * (2 * p.q_parallel + 1)
    assert trace.status["read"] == p.codebook_words * 2 * (2 * p.q_parallel + 1)


@pytest.mark.parametrize("bin_latency", [1, 2, 7])
def test_bins_come_as_late_as_was_said(bin_latency):
    random_jobs(SMALL, SEED, [2, 1]).check(bin_latency=bin_latency, drain_cycles=60)


def extremes(p, *, seed=SEED):
    """Jobs at the ends of all ranges, and ties of all sorts."""
    rng = np.random.default_rng(seed)
    jobs = Jobs(p, rng)
    shape = (p.subspaces, p.centroids, p.subspace)
    n = p.batch_tokens
    far = np.full((n, p.head_dim), 65504.0)
    lowest = codebook(p, rng, entries=np.full(shape, -128), scale=6e-8)
    mixed = rng.choice([-128, 127], shape)
    for scale in (6e-8, 0.0, 60000.0):  # the ends of the grid; no grid; all in its middle
        jobs.encode(far, codebook(p, rng, entries=mixed, scale=scale))
        jobs.encode(-far, codebook(p, rng, entries=mixed, scale=scale))
    jobs.encode(far, lowest)  # all centroids are equal: code 0
    twice = rng.integers(-3, 4, shape)  # many equal centroids, and many half way between two
    jobs.encode(rng.integers(-7, 8, (n, p.head_dim)) * 0.5, codebook(p, rng, entries=twice, scale=1.0))
    jobs.encode(np.zeros((n, p.head_dim)), codebook(p, rng, entries=np.abs(twice) - 3, scale=1.0))
    last = np.full(shape, 100)
    last[:, -1] = 0
    jobs.encode(np.full((n, p.head_dim), -0.0), codebook(p, rng, entries=last, scale=1.0))  # the last code
    for q in (-128, 127):
        jobs.query(np.full((p.q_parallel, p.head_dim), q), lowest)
        jobs.query(np.full((p.q_parallel, p.head_dim), q), codebook(p, rng, entries=mixed))
    shift = most_shift(p)
    most = min((1 << p.bin_width) - 1, (1 << 32 + shift) - 1)
    for place in (0, p.centroids - 1):
        bins = np.zeros((p.q_parallel, p.subspaces, p.centroids), np.int64)
        bins[..., place] = most
        for entry in (-128, 127):
            jobs.read(bins, codebook(p, rng, entries=np.full(shape, entry)), shift)
    even = np.full_like(bins, min(0x8000_8000, most) // p.centroids)
    jobs.read(even, codebook(p, rng, entries=np.full(shape, -1)))
    return jobs


@pytest.mark.parametrize(
    "name",
    [
        "two slices, parts of rows",
        pytest.param("one slice, port half empty", marks=pytest.mark.long),
        pytest.param("bins of 44 bits", marks=pytest.mark.long),
    ],
)
def test_extremes_and_ties_are_exact(name):
    extremes(SHAPES[name]).check()


@pytest.mark.parametrize(
    "stall",
    [0.3, 0.9, {"attend_words": [1, 1, 1, 0]}, {"codes": [1] * 300 + [0]}, {"out": [1] * 300 + [0]}, {"rows": 0.8}],
    ids=["0.3", "0.9", "words interleave", "codes wait", "sums wait", "rows wait"],
)
def test_stalls_change_no_result(stall):
    jobs = random_jobs(SMALL, SEED, [2, 1, 2])
    jobs.check(stall=stall, seed=3, drain_cycles=60)


@pytest.mark.parametrize("again_at", [3, 90])
def test_reset_in_the_middle_equals_a_cold_start(again_at):
    jobs = random_jobs(SMALL, SEED, [2, 1])
    jobs.bins = jobs.bins * 2  # the bench's memory, too, is at its beginning after a reset
    cold = jobs.check()
    for reset in (Reset(again_at=again_at), Reset(cycles=1, again_at=again_at, hold_valid=True)):
        again = jobs.check(reset=reset)
        assert [c - again.cycles["out"][0] for c in again.cycles["out"]] == [
            c - cold.cycles["out"][0] for c in cold.cycles["out"]
        ]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_word_takes_a_step_for_each_vector_and_no_cycle_more(count):
    p = PqParameters(head_dim=16, lanes=8, port_bits=64, nbits=4, batch=8, q_parallel=5)
    rng = np.random.default_rng(SEED)
    for mode, steps in (("encode", count + 1), ("query", count), ("read", 2 * count)):
        jobs = Jobs(p, rng)
        if mode == "encode":
            jobs.encode(rng.normal(size=(count, p.head_dim)), codebook(p, rng))
        elif mode == "query":
            jobs.query(rng.integers(-128, 128, (count, p.head_dim)), codebook(p, rng))
        else:
            jobs.read(bins_of(p, rng, count), codebook(p, rng))
        words = jobs.check().cycles["encode_words" if mode == "encode" else "attend_words"]
        assert np.diff(words).tolist() == [steps] * (p.codebook_words - 1)


@pytest.mark.parametrize("p", [SMALL, SHAPES["surplus lanes, no trees"], SHAPES["one lane"]], ids=["2", "1", "8"])
def test_latencies_are_those_that_are_stated(p):
    rng = np.random.default_rng(SEED)
    engine = CodebookEngine(p)
    jobs = Jobs(p, rng)
    jobs.encode(rng.normal(size=(1, p.head_dim)), codebook(p, rng))
    cycles = jobs.check().cycles
    assert cycles["codes"][-1] - cycles["encode_words"][-1] == engine.codes_latency
    pieces = p.row_transfers * (p.lanes // position_lanes(p))
    assert cycles["encode_words"][0] - cycles["encode_job"][0] == pieces + engine.loading_latency
    jobs = Jobs(p, rng)
    jobs.query(rng.integers(-128, 128, (1, p.head_dim)), codebook(p, rng))
    cycles = jobs.check().cycles
    assert [out - word for out, word in zip(cycles["table"], cycles["attend_words"], strict=True)] == [
        engine.table_latency
    ] * p.codebook_words
    jobs = Jobs(p, rng)
    jobs.read(bins_of(p, rng, 1), codebook(p, rng))
    cycles = jobs.check().cycles
    assert cycles["out"][-1] - cycles["attend_words"][-1] == engine.out_latency


def test_attention_waits_for_no_more_than_one_word_of_an_encoding():
    """The first word is offered just after a word for encoding was taken, and the read-out then has the array."""
    p = PqParameters(head_dim=16, lanes=8, port_bits=64, nbits=4, batch=8, q_parallel=1)
    rng = np.random.default_rng(SEED)
    jobs = Jobs(p, rng)
    jobs.encode(rng.normal(size=(8, p.head_dim)), codebook(p, rng))
    jobs.read(bins_of(p, rng, 1), codebook(p, rng))
    trace = jobs.check(after={"attend_words": ("encode_words", 10)})
    words, encoded = trace.cycles["attend_words"], trace.cycles["encode_words"]
    assert words[0] - encoded[9] == 9
    assert np.diff(words).tolist() == [2] * (p.codebook_words - 1)
    assert encoded[10] == words[-1] + 2


def test_sums_that_are_not_taken_stop_no_encoding_and_codes_no_table():
    for slow, other in (("out", "codes"), ("codes", "table")):
        jobs = random_jobs(SMALL, SEED, [2])
        trace = jobs.check(stall={slow: [1] * 1500 + [0] * 1500})
        assert trace.cycles[other][-1] < 1000 and trace.cycles[slow][0] >= 1500


def test_simulators_agree_in_every_cycle():
    p = PqParameters(head_dim=8, lanes=4, port_bits=32, nbits=4, batch=2, q_parallel=2)
    jobs = random_jobs(p, SEED, [2, 1])
    traces = [jobs.check(simulator=name, stall=0.3, seed=38) for name in ("amaranth", "icarus", "verilator")]
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.long
def test_a_default_codebook_is_exact():
    p = PqParameters()
    jobs = random_jobs(p, SEED, [8, 3])
    trace = jobs.check(simulator="verilator")
    assert trace.status["nearest"] == 1024 * (9 + 4)


@pytest.mark.parametrize("p", [PqParameters(), SHAPES["lanes beyond a slice"], SHAPES["one element"]])
def test_every_tool_is_silent(p, tmp_path):
    (tmp_path / "engine.sv").write_text(emit(CodebookEngine(p), "engine").verilog)
    assert lint(tmp_path, "engine.sv", top="engine") == ""
    result = yosys(tmp_path, "read_verilog -sv engine.sv; hierarchy -check -top engine; proc; check -assert")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [({"subspace": 4, "head_dim": 6}, "subspace = 4"), ({"lanes": 3}, "lanes = 3")],
)
def test_parameters_that_make_no_cache_are_refused(values, message):
    with pytest.raises(ParameterError, match=message):
        CodebookEngine(PqParameters(**values))


def test_a_bin_latency_below_1_is_refused():
    with pytest.raises(ParameterError, match="bin_latency = 0: legal is an integer from 1"):
        CodebookEngine(SMALL, bin_latency=0)


# Seeded faults: each makes a comparison above fail.

FAULTY = PqParameters(head_dim=8, lanes=4, port_bits=64, nbits=4, batch=2, q_parallel=2, subspace=8)


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        (nearest, "key_width", lambda p: 22),
        (read_out, "BIN_BITS", 36),
        (read_out, "out_width", lambda p: 38),
        (product_array, "OPERAND_BITS", 16),
        (row_loader, "Cat", lambda *parts: Cat(parts[-1])),
        (step_sequencer.StepSequencer, "_PLACE", ("slice", "centroid", "final", "last_slice")),
    ],
    ids=["width of a key", "shift of bins", "width of a sum", "width of an operand", "place of a vector", "begin"],
)
def test_a_fault_is_seen(where, name, fault, monkeypatch):
    p = FAULTY
    monkeypatch.setattr(where, name, fault)
    for jobs in (extremes(p), random_jobs(p, SEED, [2, 2])):
        results, _ = jobs.play()
        if any(results[name] != getattr(jobs, name) for name in results):
            return
    pytest.fail("not seen")


def test_the_bench_is_sound_without_a_fault():
    for jobs in (extremes(FAULTY), random_jobs(FAULTY, SEED, [2, 2])):
        jobs.check()


def test_a_queue_without_its_place_for_an_empty_register_is_seen(monkeypatch):
    original = reserved_queue.fifo.SyncFIFOBuffered

    def short(*, width, depth):
        return original(width=width, depth=depth - 1)

    monkeypatch.setattr(reserved_queue.fifo, "SyncFIFOBuffered", short)
    with pytest.raises(SimulationError, match="no transfer for 500 cycles"):
        random_jobs(SMALL, SEED, [2]).play(timeout_cycles=500)
