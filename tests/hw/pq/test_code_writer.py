"""Frames of codes against their layout, written out code by code."""

import numpy as np
import pytest
from amaranth.hdl import Cat
from codebook_bench import words_of
from memory_collisions import asserted_memories
from verilog_checks import lint, yosys

from kvant.hw.emit import emit
from kvant.hw.parameters import ParameterError
from kvant.hw.pq import code_writer
from kvant.hw.pq.code_writer import CodeWriter, write_job
from kvant.hw.pq.codebook_jobs import codes_output
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20261130

SHAPES = {
    "default": PqParameters(),
    "M below the lanes": PqParameters(head_dim=16, batch=8),
    "no common divisor": PqParameters(head_dim=18, subspace=2, batch=2, port_bits=64),
    "several words a frame": PqParameters(head_dim=80, nbits=8, batch=4),
    "words of 160 bits": PqParameters(head_dim=64, nbits=5, batch=8, port_bits=128),
    "4 bits": PqParameters(head_dim=64, nbits=4, subspace=4, batch=1),
    "one code": PqParameters(head_dim=1, subspace=1, nbits=4, port_bits=32, lanes=1, batch=1),
}
"""The first has frames of one token, the second of two, the third of eight with nine words."""


def jobs_of(p, seed, count):
    """Jobs with codes [tokens, M]; the last is full."""
    rng = np.random.default_rng(seed)
    most = p.tokens // p.frame - p.batch_tokens // p.frame
    jobs = []
    for number in range(count):
        tokens = p.batch_tokens if number == count - 1 else int(rng.integers(1, p.batch_tokens + 1))
        jobs.append(
            {
                "store": int(rng.integers(0, 2)),
                "head": int(rng.integers(0, 256)),
                "first": p.frame * int(rng.choice([0, most, rng.integers(0, most + 1)])),
                "codes": rng.integers(0, p.centroids, (tokens, p.subspaces)),
            }
        )
    return jobs


def stimulus(p, jobs):
    codes = [
        {
            "codes": [int(c) for c in job["codes"][vector, slice_ * p.slice_subspaces :][: p.slice_subspaces]],
            "vector": vector,
            "slice": slice_,
            "last": slice_ == p.slices - 1 and vector == len(job["codes"]) - 1,
        }
        for job in jobs
        for slice_ in range(p.slices)
        for vector in range(len(job["codes"]))
    ]
    heads = [{key: job[key] for key in ("store", "head", "first")} | {"count": len(job["codes"])} for job in jobs]
    return {"job": {"data": words_of(write_job(p), heads)}, "codes": {"data": words_of(codes_output(p), codes)}}


def expected(p, jobs):
    """(data, address, store, head, last) of every word."""
    words = []
    for job in jobs:
        tokens = len(job["codes"])
        frames = -(-tokens // p.frame)
        padded = np.zeros((frames * p.frame, p.subspaces), int)
        padded[:tokens] = job["codes"]
        for frame in range(frames):
            for k in range(p.frame_words):
                word, place = 0, 0
                for token in range(p.frame):
                    for j in range(p.run):
                        word |= int(padded[frame * p.frame + token, k * p.run + j]) << (p.nbits * place)
                        place += 1
                address = (job["first"] // p.frame + frame) * p.frame_words + k
                words.append(
                    (word, address, job["store"], job["head"], int((frame, k) == (frames - 1, p.frame_words - 1)))
                )
    return words


def play(p, jobs, **options):
    options = {"simulator": "amaranth"} | options
    right = expected(p, jobs)
    trace = simulate(lambda: CodeWriter(p), "writer", Stimulus(stimulus(p, jobs), {"words": len(right)}), **options)
    user = CodeWriter(p).words.payload.shape().members["user"]
    transfers = trace.transfers["words"]
    got = []
    for word, place, last in zip(transfers["data"], transfers["user"], transfers["last"], strict=True):
        view = user.from_bits(place)
        got.append((word, view.address, view.store, view.head, last))
    return got, trace


def check(p, jobs, **options):
    got, trace = play(p, jobs, **options)
    assert got == expected(p, jobs)
    return trace


@pytest.mark.parametrize("p", SHAPES.values(), ids=SHAPES)
def test_frames_are_laid_out_as_documented(p):
    with asserted_memories() as watched:
        check(p, jobs_of(p, SEED, 6))
    assert len(watched) == p.word_codes // p.slice_subspaces


@pytest.mark.parametrize("stall", [0.3, 0.9, {"words": [1] * 60 + [0]}, {"codes": [1, 0]}])
def test_stalls_change_nothing(stall):
    p = SHAPES["M below the lanes"]
    check(p, jobs_of(p, SEED, 6), stall=stall)


@pytest.mark.parametrize("again_at", [5, 20, 35])
def test_reset_in_the_middle_equals_a_cold_start(again_at):
    p = SHAPES["several words a frame"]
    jobs = jobs_of(p, SEED, 3)
    cold = check(p, jobs)
    again = check(p, jobs, reset=Reset(again_at=again_at, hold_valid=True))
    assert np.diff(again.cycles["words"]).tolist() == np.diff(cold.cycles["words"]).tolist()


@pytest.mark.parametrize("p", SHAPES.values(), ids=SHAPES)
def test_a_word_leaves_every_cycle_from_the_stated_latency_on(p):
    jobs = jobs_of(p, SEED, 1)
    cycles = check(p, jobs).cycles
    first = cycles["codes"][-1] + CodeWriter.latency
    assert cycles["words"] == list(range(first, first + len(cycles["words"])))


@pytest.mark.parametrize("p", [SHAPES["default"], SHAPES["no common divisor"], SHAPES["one code"]])
def test_every_tool_is_silent(p, tmp_path):
    (tmp_path / "writer.sv").write_text(emit(CodeWriter(p), "writer").verilog)
    assert lint(tmp_path, "writer.sv", top="writer") == ""
    result = yosys(tmp_path, "read_verilog -sv writer.sv; hierarchy -check -top writer; proc; check -assert")
    assert result.returncode == 0, result.stderr


def test_simulators_agree_in_every_cycle():
    p = SHAPES["several words a frame"]
    jobs = jobs_of(p, SEED, 4)
    traces = [check(p, jobs, simulator=name, stall=0.3, seed=3) for name in ("amaranth", "icarus", "verilator")]
    assert traces[0] == traces[1] == traces[2]


def test_parameters_that_make_no_cache_are_refused():
    with pytest.raises(ParameterError, match="subspace = 4"):
        CodeWriter(PqParameters(head_dim=6, subspace=4))


@pytest.mark.parametrize(
    ("name", "fault"),
    [("Mux", lambda condition, yes, no: yes if isinstance(no, int) and no == 0 else original_mux(condition, yes, no))],
    ids=["codes behind the last token"],
)
def test_a_fault_is_seen(name, fault, monkeypatch):
    p = SHAPES["M below the lanes"]
    jobs = jobs_of(p, SEED, 6)
    assert any(len(job["codes"]) % p.frame for job in jobs)
    monkeypatch.setattr(code_writer, name, fault)
    got, _ = play(p, jobs)
    assert got != expected(p, jobs)


original_mux = code_writer.Mux


def test_a_wrong_address_within_a_batch_is_seen(monkeypatch):
    p = SHAPES["several words a frame"]
    jobs = jobs_of(p, SEED, 4)
    monkeypatch.setattr(CodeWriter, "_place", lambda self, frame, word, frames: Cat(frame))
    got, _ = play(p, jobs)
    assert got != expected(p, jobs)
