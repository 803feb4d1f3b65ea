"""Score tables: every token's score is the sum of the table entries that its codes name."""

import numpy as np
import pytest
import torch
from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from code_words import frame_codes
from memory_collisions import asserted_memories
from verilog_checks import lint, yosys

from kvant.golden.pq.codebook import Codebook
from kvant.golden.pq.scores import lookup_table, table_scores
from kvant.hw.attention.layouts import FrameScores
from kvant.hw.emit import emit
from kvant.hw.numeric.adder_tree import tree_levels, tree_sum
from kvant.hw.pq.codebook_jobs import table_output
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.tables import ScanWord, ScoreTables
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

SHAPES = [  # head_dim, subspace, nbits, port_bits, q_parallel: all of d, dimensions and bits of a code
    (64, 2, 4, 64, 2),
    (64, 4, 4, 64, 1),  # M = 16: a frame of one token is one word
    (64, 8, 5, 64, 2),
    (80, 4, 4, 32, 1),  # five words of four lanes a token
    (96, 2, 4, 64, 1),
    (96, 8, 5, 64, 2),
    (128, 8, 6, 64, 1),
    (160, 8, 4, 64, 2),
    (24, 8, 8, 64, 1),
    (256, 8, 4, 64, 1),
    (16, 1, 4, 32, 1),
    (24, 8, 7, 64, 1),  # 16 tokens a frame
    (8, 8, 4, 64, 3),
]


def parameters(head_dim, subspace, nbits, port_bits, q_parallel):
    return PqParameters(
        head_dim=head_dim, subspace=subspace, nbits=nbits, port_bits=port_bits, q_parallel=q_parallel, capacity=4096
    )


class Fed(wiring.Component):
    """Score tables with a stream of entries, which waits where a table must not be filled."""

    def __init__(self, tables):
        self.tables = tables
        p = tables.p
        super().__init__(
            {
                "entries": In(stream.Signature(data.StructLayout({"data": table_output(p)}))),
                "words": In(stream.Signature(data.StructLayout({"data": ScanWord(p)}))),
                "scores": Out(stream.Signature(data.StructLayout({"data": FrameScores(p)}))),
                "writable": Out(1),
                "filled": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.tables = tables = self.tables
        filling = Signal()
        entry = self.entries.payload.data
        m.d.comb += [
            self.entries.ready.eq(filling | tables.writable),
            tables.entry.eq(entry),
            tables.entry.valid.eq(self.entries.valid & self.entries.ready),
            tables.words.payload.eq(self.words.payload.data),
            tables.words.valid.eq(self.words.valid),
            self.words.ready.eq(tables.words.ready),
            self.scores.payload.data.eq(tables.scores.payload),
            self.scores.valid.eq(tables.scores.valid),
            tables.scores.ready.eq(self.scores.ready),
            self.writable.eq(tables.writable),
            self.filled.eq(tables.filled),
        ]
        with m.If(tables.entry.valid):
            m.d.sync += filling.eq(~entry.last)
        return m


def entry_words(p, table, queries=None):
    """Transfers of `entries` for ``table`` [B, M, centroids], slice by slice, centroid by centroid, query by query."""
    layout = table_output(p)
    queries = range(len(table)) if queries is None else queries
    order = [(k, c, q) for k in range(p.slices) for c in range(p.centroids) for q in queries]
    words = []
    for number, (k, c, q) in enumerate(order):
        values = table[q, k * p.slice_subspaces : (k + 1) * p.slice_subspaces, c]
        fields = {"valid": 1, "vector": q, "slice": k, "centroid": c, "last": number == len(order) - 1}
        words.append(layout.const(fields | {"values": [int(value) for value in values]}).as_value().value)
    return words


def scan_words(p, codes):
    """Transfers of `words` for codes [tokens, M]."""
    lanes = frame_codes(p, codes)
    words = []
    for number, lane_codes in enumerate(lanes):
        frame, place = divmod(number, p.frame_words)
        # the count of a frame counts in its last word only
        count = min(p.frame, len(codes) - frame * p.frame) if place == p.frame_words - 1 else number % (p.frame + 1)
        last = number == len(lanes) - 1
        words.append(
            ScanWord(p).const({"data": list(map(int, lane_codes)), "count": count, "last": last}).as_value().value
        )
    return words


def tables_and_codes(p, histories, seed=0, *, extreme=False):
    """Table and codes of each of *histories* tokens."""
    rng = torch.Generator().manual_seed(seed)
    result = []
    for tokens in histories:
        entries = torch.randint(-128, 128, (p.subspaces, p.centroids, p.subspace), generator=rng).to(torch.int8)
        q = torch.randint(-128, 128, (p.q_parallel, p.head_dim), generator=rng).to(torch.int8)
        if extreme:
            entries.fill_(-128)
            q.fill_(-128)
            q[0] = 127
        table = lookup_table(q, Codebook(entries, torch.tensor(1.0, dtype=torch.float16)))
        codes = torch.randint(0, p.centroids, (tokens, p.subspaces), generator=rng).to(torch.uint8)
        result.append((table, codes))
    return result


def run(p, work, factory=ScoreTables, **options):
    """Scores [B, tokens] of each history, and the trace."""
    options = {"simulator": "amaranth"} | options
    inputs = {
        "entries": {"data": [word for table, _ in work for word in entry_words(p, table)]},
        "words": {"data": [word for _, codes in work for word in scan_words(p, codes)]},
    }
    frames = [-(-len(codes) // p.frame) for _, codes in work]
    expect = {"scores": sum(frames)}
    trace = simulate(lambda: Fed(factory(p)), "tables", Stimulus(inputs, expect, ("writable", "filled")), **options)
    outputs = [FrameScores(p).from_bits(word) for word in trace.transfers["scores"]["data"]]
    results = []
    for count in frames:
        history, outputs = outputs[:count], outputs[count:]
        assert [frame.last for frame in history] == [0] * (count - 1) + [1]
        assert all(frame.count == p.frame for frame in history[:-1])
        scores = np.array([[list(token) for token in frame.scores] for frame in history])
        tokens = (count - 1) * p.frame + history[-1].count
        results.append(torch.tensor(scores.reshape(count * p.frame, p.q_parallel)[:tokens].T))
    return results, trace


def golden(work):
    return [table_scores(table, codes) for table, codes in work]


def equal(results, expected):
    return len(results) == len(expected) and all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_scores_are_sums_of_entries(shape):
    p = parameters(*shape)
    work = tables_and_codes(p, (2 * p.frame + 1, 1, 3 * p.frame), seed=1)
    with asserted_memories() as watched:
        results, trace = run(p, work)
    assert len(watched) == p.word_codes * p.q_parallel
    assert equal(results, golden(work))
    assert trace.status == {"writable": 1, "filled": 0}


@pytest.mark.parametrize("stall", [0.3, 0.9, {"scores": 0.9}, {"words": 0.9}, {"scores": "after_valid"}])
@pytest.mark.parametrize("shape", [(16, 2, 4, 32, 2), (16, 1, 5, 32, 1), (24, 2, 4, 32, 1)])
def test_pauses_change_nothing(shape, stall):
    p = parameters(*shape)
    work = tables_and_codes(p, (5, 2, 7, 1), seed=2)
    with asserted_memories():
        results, _ = run(p, work, stall=stall, seed=3)
    assert equal(results, golden(work))


@pytest.mark.parametrize("shape", [(256, 8, 4, 64, 2), (64, 1, 4, 64, 2), (8, 2, 4, 32, 2)])
def test_largest_scores_fit(shape):
    p = parameters(*shape)
    work = tables_and_codes(p, (p.frame, 1), extreme=True)
    results, _ = run(p, work)
    assert equal(results, golden(work))
    assert results[0][1, 0] == 128 * 128 * p.head_dim


@pytest.mark.parametrize("shape", [(64, 4, 4, 64, 1), (80, 4, 4, 32, 1), (64, 2, 4, 32, 1), (8, 8, 4, 64, 1)])
def test_a_word_every_cycle_while_scores_are_taken(shape):
    p = parameters(*shape)
    work = tables_and_codes(p, (20 * p.frame,), seed=4)
    results, trace = run(p, work)
    assert equal(results, golden(work))
    words, scores = trace.cycles["words"], trace.cycles["scores"]
    assert words[-1] - words[0] == 20 * p.frame_words - 1
    assert np.all(np.array(scores) - np.array(words[p.frame_words - 1 :: p.frame_words]) == ScoreTables(p).latency)


def test_a_table_is_filled_while_another_is_read():
    p = parameters(16, 2, 4, 32, 1)
    work = tables_and_codes(p, (400, 3, 2), seed=5)
    results, trace = run(p, work)
    assert equal(results, golden(work))
    entries, words = trace.cycles["entries"], trace.cycles["words"]
    per_table = p.codebook_words
    assert entries[2 * per_table - 1] < words[0] + per_table + 4  # the second table fills right after the first
    assert entries[2 * per_table] > words[399]  # the third waits for the end of the first scan
    assert words[400] - words[399] == 1  # from one table to the next without a pause


def test_queries_that_a_table_lacks_disturb_no_other():
    p = parameters(16, 2, 4, 32, 3)
    ((table, codes),) = tables_and_codes(p, (6,), seed=6)
    inputs = {"entries": {"data": entry_words(p, table, (0, 1))}, "words": {"data": scan_words(p, codes)}}
    trace = simulate(lambda: Fed(ScoreTables(p)), "tables", Stimulus(inputs, {"scores": 6}), simulator="amaranth")
    outputs = [FrameScores(p).from_bits(word).scores[0] for word in trace.transfers["scores"]["data"]]
    assert p.frame == 1
    assert torch.equal(
        torch.tensor([[scores[q] for scores in outputs] for q in (0, 1)]), table_scores(table, codes)[:2]
    )


def test_reset_in_the_middle():
    p = parameters(16, 2, 4, 32, 1)
    work = tables_and_codes(p, (40, 30), seed=7)
    results, _ = run(p, work, stall=0.3, reset=Reset(again_at=90, hold_valid=True))
    assert equal(results, golden(work))


def test_generated_verilog_passes_the_linters(tmp_path):
    for number, shape in enumerate([(80, 4, 4, 32, 2), (8, 2, 4, 32, 1)]):
        design = emit(ScoreTables(parameters(*shape)), "tables")
        (tmp_path / f"tables{number}.sv").write_text(design.verilog)
        assert lint(tmp_path, f"tables{number}.sv", top="tables") == ""
        check = yosys(tmp_path, f"read_verilog -sv tables{number}.sv; hierarchy -top tables; proc; check -assert")
        assert check.returncode == 0, check.stderr


def test_generated_verilog_does_the_same():
    p = parameters(80, 4, 4, 32, 2)
    work = tables_and_codes(p, (7, 4), seed=8)
    results, _ = run(p, work, simulator="icarus", stall=0.2)
    assert equal(results, golden(work))


@pytest.mark.long
@pytest.mark.parametrize("shape", [(64, 2, 8, 128, 1), (128, 2, 8, 128, 2), (64, 8, 8, 128, 1)])
def test_the_sizes_of_models(shape):
    p = parameters(*shape)
    work = tables_and_codes(p, (300, 200), seed=10)
    results, trace = run(p, work, simulator="verilator")
    assert equal(results, golden(work))
    words = trace.cycles["words"][: 300 * p.frame_words // p.frame]
    assert words[-1] - words[0] == len(words) - 1


@pytest.mark.parametrize("fault", ["tree_levels", "tree_sum"])
def test_a_wrong_sum_is_noticed(monkeypatch, fault):
    p = parameters(24, 2, 4, 32, 1)
    work = tables_and_codes(p, (5, 3), seed=9)
    faulty = {
        "tree_levels": lambda count: tree_levels(count) - 1,  # a frame starts a word early
        "tree_sum": lambda pipeline, values, name: tree_sum(pipeline, [*values[:-1], values[0]], name),
    }
    monkeypatch.setattr(f"kvant.hw.pq.tables.{fault}", faulty[fault])
    assert not equal(run(p, work)[0], golden(work))
