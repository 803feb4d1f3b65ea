"""Queries that wait: as many as are asked for, in order, whole, with their scales."""

import itertools
import random

import pytest
from amaranth.hdl import Module, Mux
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention import query_buffer as hardware
from kvant.hw.attention.query_buffer import QueryBuffer
from kvant.hw.attention.row_quantizer import query_output
from kvant.hw.emit import emit
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.errors import SimulationError
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus
from tests.helpers.memory_collisions import asserted_memories
from tests.helpers.verilog_checks import lint, yosys

SEED = 20261130

SHAPES = {
    "three queries": PqParameters(head_dim=16, lanes=4, group=8, q_parallel=3),
    "one query, one transfer": PqParameters(head_dim=8, lanes=8, group=8, q_parallel=1),
}
THREE = SHAPES["three queries"]


class Bench(wiring.Component):
    """The unit with a stream of numbers of queries: so many are taken, then sent."""

    def __init__(self, p):
        self.p = p
        self.unit = QueryBuffer(p)
        super().__init__(
            {
                "batches": In(stream.Signature(self.unit.count.shape())),
                "i": In(stream.Signature(query_output(p))),
                "o": Out(stream.Signature(query_output(p))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.unit = unit = self.unit
        wiring.connect(m, unit.o, wiring.flipped(self.o))
        left = unit.count.like(unit.count, name="left")
        m.d.comb += [
            unit.count.eq(self.batches.payload),
            unit.i.payload.eq(self.i.payload),
            unit.i.valid.eq(self.i.valid & self.i.ready),
        ]
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += unit.clear.eq(1)
                m.d.sync += left.eq(self.batches.payload)
                with m.If(self.batches.valid):
                    m.next = "TAKE"
            with m.State("TAKE"):
                m.d.comb += self.i.ready.eq(left != 0)
                with m.If(self.i.valid & self.i.ready & self.i.payload.last):
                    m.d.sync += left.eq(left - 1)
                with m.If(left == 0):
                    m.d.comb += unit.send.eq(1)
                    m.next = "SEND"
            with m.State("SEND"):
                with m.If(unit.sent):
                    m.d.comb += self.batches.ready.eq(1)
                    m.next = "IDLE"
        return m


def play(p, counts, **options):
    """What leaves, and what went in: transfers of the queries of each batch."""
    rng, layout = random.Random(SEED), query_output(p)
    words, right = [], []
    for _ in range(sum(counts)):
        scale = rng.randrange(0x7C00)
        for place in range(p.row_transfers):
            last = place == p.row_transfers - 1
            elements = [rng.randrange(-128, 128) for _ in range(p.lanes)]
            # only the scale of a query's last transfer counts
            word = {"data": elements, "scale": scale if last else rng.randrange(0x7C00), "last": int(last)}
            words.append(layout.const(word).as_bits())
            right.append((elements, scale, int(last)))
    stimulus = Stimulus({"batches": {"data": counts}, "i": {"data": words}}, {"o": len(words)})
    with asserted_memories():
        trace = simulate(lambda: Bench(p), "buffer", stimulus, **({"simulator": "amaranth"} | options))
    found = [layout.from_bits(word) for word in trace.transfers["o"]["data"]]
    return [([word.data[lane] for lane in range(p.lanes)], word.scale, word.last) for word in found], right, trace


@pytest.mark.parametrize("p", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("stall", [0.0, 0.3, 0.9])
def test_queries_leave_as_they_came(p, stall):
    found, right, _ = play(p, [p.q_parallel, 1, p.q_parallel, p.q_parallel, 1], stall=stall, seed=SEED)
    assert found == right


def test_a_transfer_leaves_every_second_cycle():
    *_, trace = play(THREE, [3])
    cycles = trace.cycles["o"]
    assert {after - before for before, after in itertools.pairwise(cycles)} == {2}


def test_a_reset_forgets_what_was_under_way():
    found, right, _ = play(THREE, [3, 2], reset=Reset(again_at=25))
    assert found == right


def test_two_simulators_agree():
    found, right, _ = play(THREE, [3, 1, 2], simulator="verilator", stall=0.3, seed=SEED)
    assert found == right


def test_a_fault_is_seen(monkeypatch):
    monkeypatch.setattr(hardware, "Mux", lambda selector, high, low: Mux(selector, low, high))
    try:
        found, right, _ = play(THREE, [3, 1, 2], timeout_cycles=1000)
    except SimulationError:
        return
    assert found != right


def test_every_tool_is_silent(tmp_path):
    (tmp_path / "unit.sv").write_text(emit(QueryBuffer(THREE), "unit").verilog)
    assert lint(tmp_path, "unit.sv", top="unit") == ""
    result = yosys(tmp_path, "read_verilog -sv unit.sv; hierarchy -check -top unit; proc; check -assert")
    assert result.returncode == 0, result.stderr
