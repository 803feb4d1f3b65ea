"""Queries and rows that share one quantiser: bits of the golden model, order, ends of rows, what goes first."""

import itertools

import numpy as np
import pytest
import torch
from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.golden.numeric.int8 import quantize_int8
from kvant.golden.numeric.rounding import fp16_to_bits
from kvant.hw.attention import row_quantizer as hardware
from kvant.hw.attention.layouts import replay_output
from kvant.hw.attention.row_quantizer import RowQuantizer, query_input, query_output, row_output
from kvant.hw.emit import emit
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.errors import SimulationError
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus
from tests.helpers.memory_collisions import asserted_memories
from tests.helpers.verilog_checks import lint, yosys

SEED = 20261130

SHAPES = {
    "two groups": PqParameters(head_dim=16, lanes=4, group=8, q_parallel=2),
    "surplus lanes": PqParameters(head_dim=20, lanes=8, group=8, q_parallel=1),
    "one transfer": PqParameters(head_dim=6, lanes=8, group=8, q_parallel=3),
}
TWO_GROUPS = SHAPES["two groups"]


class Bench(wiring.Component):
    """The unit with a stream of batches in place of `start`. Batches and passes wait until all rows are through."""

    def __init__(self, p):
        self.p = p
        self.unit = RowQuantizer(p)
        super().__init__(
            {
                "batches": In(stream.Signature(self.unit.count.shape())),
                "queries": In(stream.Signature(query_input(p))),
                "rows": In(stream.Signature(replay_output(p))),
                "query": Out(stream.Signature(query_output(p))),
                "row": Out(stream.Signature(row_output(p))),
                "nonfinite": Out(8),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.unit = unit = self.unit
        wiring.connect(m, wiring.flipped(self.queries), unit.queries)
        wiring.connect(m, unit.query, wiring.flipped(self.query))
        wiring.connect(m, unit.row, wiring.flipped(self.row))
        inside = Signal(8)  # transfers of rows
        enters, leaves = self.rows.valid & self.rows.ready, self.row.valid & self.row.ready
        in_pass, waits = Signal(), Signal()
        m.d.sync += inside.eq(inside + enters - leaves)
        with m.If(enters):
            m.d.sync += in_pass.eq(~self.rows.payload.final | ~self.rows.payload.last)
        m.d.comb += [
            unit.count.eq(self.batches.payload),
            self.batches.ready.eq(unit.queries_done & (inside == 0) & ~in_pass),
            waits.eq(unit.start | (~in_pass & (inside != 0))),
            unit.start.eq(self.batches.valid & self.batches.ready),
            unit.rows.payload.eq(self.rows.payload),
            unit.rows.valid.eq(self.rows.valid & ~waits),
            self.rows.ready.eq(unit.rows.ready & ~waits),
        ]
        m.d.sync += self.nonfinite.eq(self.nonfinite + unit.nonfinite)
        return m


def halves(rng, *shape):
    x = rng.normal(size=shape) * np.exp2(rng.integers(-12, 12, (*shape[:-1], 1)))
    return torch.from_numpy(x.astype(np.float16))


def cut(p, row, garbage):
    """Elements of each transfer of a row of bits; surplus lanes hold *garbage*."""
    padded = [*row, *[garbage] * (p.row_transfers * p.lanes - p.head_dim)]
    return [padded[start : start + p.lanes] for start in range(0, len(padded), p.lanes)]


def row_words(p, rows):
    layout, words = replay_output(p), []
    for number, row in enumerate(fp16_to_bits(rows).tolist()):
        for place, elements in enumerate(cut(p, row, 0)):
            end = (place + 1) * p.lanes
            last = place == p.row_transfers - 1
            word = {
                "data": elements,
                "keep": min(p.head_dim, end) - place * p.lanes,
                "group_last": int(last or end % p.group == 0),
                "last": int(last),
                "final": int(number == len(rows) - 1),
                "empty": 0,
            }
            words.append(layout.const(word).as_bits())
    ends = dict.fromkeys(("group_last", "last", "final", "empty"), 1)
    return words or [layout.const({"data": [0] * p.lanes, "keep": 0, **ends}).as_bits()]


def play(p, batches, passes, **options):
    """What leaves, and what has to: transfers of queries and of rows, and those of queries with NaN or infinity."""
    queries = [word for batch in batches for row in fp16_to_bits(batch).tolist() for word in cut(p, row, 0x7C01)]
    layout = query_input(p)
    inputs = {
        "batches": {"data": [len(batch) for batch in batches]},
        "queries": {"data": [layout.const({"data": word}).as_bits() for word in queries]},
        "rows": {"data": [word for rows in passes for word in row_words(p, rows)]},
    }
    right_queries, right_rows, nonfinite = [], [], 0
    for batch in batches:
        for query in batch:
            result = quantize_int8(query, p.head_dim)
            nonfinite += result.nonfinite * p.row_transfers
            scale = fp16_to_bits(result.scale).item()
            parts = cut(p, result.q.tolist(), 0)
            right_queries += [(part, scale, int(k == len(parts) - 1)) for k, part in enumerate(parts)]
    for rows in passes:
        for number, row in enumerate(rows):
            result = quantize_int8(row, p.group)
            scales = fp16_to_bits(result.scale).tolist()
            for k, part in enumerate(parts := cut(p, result.q.tolist(), 0)):
                last = k == len(parts) - 1
                final = last and number == len(rows) - 1
                right_rows.append((part, scales[k * p.lanes // p.group], int(last), int(final)))
        if not len(rows):
            right_rows.append("empty")
    expect = {"query": len(right_queries), "row": len(right_rows)}
    stimulus = Stimulus(inputs, {name: count for name, count in expect.items() if count}, status=["nonfinite"])
    with asserted_memories():
        trace = simulate(lambda: Bench(p), "quantizer", stimulus, **({"simulator": "amaranth"} | options))
    found_queries, found_rows = [], []
    for word in map(query_output(p).from_bits, trace.transfers["query"]["data"]):
        found_queries.append(([word.data[lane] for lane in range(p.lanes)], word.scale, word.last))
    for word in map(row_output(p).from_bits, trace.transfers["row"]["data"]):
        item = ([word.data[lane] for lane in range(p.lanes)], word.scale, word.last, word.final)
        found_rows.append("empty" if word.empty and word.last and word.final else item)
    return (found_queries, found_rows, trace.status["nonfinite"]), (right_queries, right_rows, nonfinite)


def case(p, seed=SEED):
    """Batches of queries, passes of rows; one query has an infinity, one pass has no rows, and one follows it."""
    rng = np.random.default_rng(seed)
    batches = [halves(rng, count, p.head_dim) for count in (p.q_parallel, 1, p.q_parallel)]
    batches[1][0, 3] = float("-inf")
    batches[2][0] = 0
    return batches, [halves(rng, count, p.head_dim) for count in (3, 0, 1, 9)]


@pytest.mark.parametrize("p", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("stall", [0.0, 0.3, 0.9])
def test_queries_and_rows_are_those_of_the_golden_model(p, stall):
    found, right = play(p, *case(p), stall=stall, seed=SEED)
    assert found == right


@pytest.mark.parametrize("alone", ["queries", "rows", "no rows"])
def test_one_kind_alone(alone):
    batches, passes = case(TWO_GROUPS)
    batches, passes = {"queries": (batches, []), "rows": ([], passes), "no rows": ([], [passes[1]])}[alone]
    found, right = play(TWO_GROUPS, batches, passes)
    assert found == right


def test_a_reset_forgets_what_was_under_way():
    found, right = play(TWO_GROUPS, *case(TWO_GROUPS), reset=Reset(again_at=40))
    assert found == right


def test_two_simulators_agree_with_the_golden_model():
    found, right = play(TWO_GROUPS, *case(TWO_GROUPS), simulator="verilator", stall=0.3, seed=SEED)
    assert found == right


CHOICES = 10
"""Multiplexers of the unit."""


@pytest.mark.parametrize("number", range(CHOICES))
def test_a_choice_the_wrong_way_round_is_seen(number, monkeypatch):
    calls = itertools.count()

    def choose(selector, high, low):
        return Mux(selector, low, high) if next(calls) == number else Mux(selector, high, low)

    monkeypatch.setattr(hardware, "Mux", choose)
    p = SHAPES["surplus lanes"]
    try:
        found, right = play(p, *case(p), timeout_cycles=1000)
    except (SimulationError, ValueError):
        return
    assert next(calls) == CHOICES
    assert found != right


def test_every_tool_is_silent(tmp_path):
    (tmp_path / "unit.sv").write_text(emit(RowQuantizer(TWO_GROUPS), "unit").verilog)
    assert lint(tmp_path, "unit.sv", top="unit") == ""
    result = yosys(tmp_path, "read_verilog -sv unit.sv; hierarchy -check -top unit; proc; check -assert")
    assert result.returncode == 0, result.stderr
