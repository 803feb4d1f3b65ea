"""Where the decoder meets the rest: codebooks go where they were asked for, rows of two sides have one end."""

import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from formal import mutant
from verilog_checks import lint, yosys

from kvant.hw.attention.row_quantizer import row_output
from kvant.hw.emit import emit
from kvant.hw.pq.codebook_jobs import word_input
from kvant.hw.pq.decoded_rows import CodebookSplit, RowMerge
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.errors import SimulationError
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

P = PqParameters(head_dim=8, lanes=4, group=8, nbits=4, port_bits=64)


class Merged(wiring.Component):
    """A merge whose passes are told by a stream: whether each has decoded rows."""

    def __init__(self, merge):
        self.merge = merge
        rows = stream.Signature(data.StructLayout({"data": row_output(merge.p)}))
        passes = stream.Signature(data.StructLayout({"data": 1}))
        super().__init__({"passes": In(passes), "decoded": In(rows), "fresh": In(rows), "rows": Out(rows)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.merge = merge = self.merge
        at_work, decodes = Signal(), Signal()
        ends = self.rows.valid & self.rows.ready & merge.rows.payload.last & merge.rows.payload.final
        m.d.comb += [
            merge.decodes.eq(decodes),
            self.passes.ready.eq(~at_work),
            self.rows.payload.data.eq(merge.rows.payload),
            self.rows.valid.eq(merge.rows.valid & at_work),
            merge.rows.ready.eq(self.rows.ready & at_work),
        ]
        for name in ("decoded", "fresh"):
            inner, outer = getattr(merge, name), getattr(self, name)
            m.d.comb += [
                inner.payload.eq(outer.payload.data),
                inner.valid.eq(outer.valid),
                outer.ready.eq(inner.ready & at_work),
            ]
        with m.If(self.passes.valid & ~at_work):
            m.d.sync += [at_work.eq(1), decodes.eq(self.passes.payload.data)]
        with m.Elif(ends):
            m.d.sync += at_work.eq(0)
        return m


def rows(count, rng):
    """Transfers of *count* rows as dicts; one that is empty for none."""
    numbers = [[int(n) for n in rng.integers(-128, 128, P.lanes)] for _ in range(max(1, count * P.row_transfers))]
    scales = rng.integers(0, 1 << 15, len(numbers))
    ends = [(n + 1) % P.row_transfers == 0 or not count for n in range(len(numbers))]
    return [
        {"data": x, "scale": int(s), "last": end, "final": end and n == len(numbers) - 1, "empty": not count}
        for n, (x, s, end) in enumerate(zip(numbers, scales, ends, strict=True))
    ]


def merge(passes, factory=RowMerge, **options):
    """Rows of passes of (decoded, fresh) rows, as they leave and as they should."""
    rng = np.random.default_rng(1)
    layout = row_output(P)
    given = {"decoded": [], "fresh": []}
    want = []
    for decoded, fresh in passes:
        first, then = rows(decoded, rng) if decoded else [], rows(fresh, rng)
        given["decoded"] += first
        given["fresh"] += then
        if first and not fresh:
            want += first
        else:
            want += [row | {"final": False} for row in first] + then
    words = {name: {"data": [layout.const(row).as_value().value for row in each]} for name, each in given.items()}
    inputs = {"passes": {"data": [int(decoded > 0) for decoded, _ in passes]}, **words}
    stimulus = Stimulus({name: each for name, each in inputs.items() if each["data"]}, {"rows": len(want)})
    options = {"simulator": "amaranth"} | options
    trace = simulate(lambda: Merged(factory(P)), "merge", stimulus, **options)
    return trace.transfers["rows"]["data"], [layout.const(row).as_value().value for row in want]


PASSES = [(2, 3), (0, 2), (1, 0), (3, 0), (0, 0), (1, 1), (2, 0), (0, 1), (4, 2)]


@pytest.mark.parametrize("stall", [0.0, 0.3, 0.9, {"fresh": 0.9}, {"decoded": 0.9}, {"rows": "after_valid"}])
def test_decoded_rows_come_first_and_one_row_is_final(stall):
    got, want = merge(PASSES, stall=stall, seed=2)
    assert got == want


def test_reset_in_the_middle_of_a_merge():
    got, want = merge(PASSES, stall=0.3, seed=3, reset=Reset(again_at=25, hold_valid=True))
    assert got == want


MERGE_FAULTS = {
    "the last decoded row never ends the pass": ("decoded.payload.final & fresh.payload.empty", "0"),
    "fresh rows are left out": ("through.eq(~fresh.payload.empty)", "through.eq(0)"),
    "an empty answer stays": ("decoded.valid & ends & fresh.payload.empty, 1", "0, 1"),
    "decoded rows never come again": ("m.d.sync += through.eq(0)", "m.d.sync += through.eq(1)"),
}


@pytest.mark.parametrize("name", ["none", *MERGE_FAULTS])
def test_a_fault_of_the_merge_is_seen(name):
    factory = RowMerge if name == "none" else mutant(RowMerge, *MERGE_FAULTS[name])
    try:
        got, want = merge(PASSES, factory, timeout_cycles=1000)
        same = got == want
    except SimulationError:
        same = False
    assert same == (name == "none")


class Asked(wiring.Component):
    """A split whose codebooks are asked for by a stream: 1 for the decoder."""

    def __init__(self, split):
        self.split = split
        words = stream.Signature(word_input(split.p))
        asks = stream.Signature(data.StructLayout({"data": 1}))
        super().__init__({"asks": In(asks), "words": In(words), "engine": Out(words), "decoder": Out(words)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.split = split = self.split
        wiring.connect(m, wiring.flipped(self.words), split.words)
        wiring.connect(m, split.engine, wiring.flipped(self.engine))
        wiring.connect(m, split.decoder, wiring.flipped(self.decoder))
        asked = self.asks.valid
        m.d.comb += [
            self.asks.ready.eq(1),
            split.to_engine.eq(asked & ~self.asks.payload.data),
            split.to_decoder.eq(asked & self.asks.payload.data),
        ]
        return m


def split(asks, factory=CodebookSplit, **options):
    """Words at the engine and at the decoder, as they come and as they should."""
    words = [(number << 16) + k for number in range(len(asks)) for k in range(P.codebook_words)]
    want = [[w for w in words if asks[w >> 16] == to] for to in (0, 1)]
    inputs = {"asks": {"data": asks}, "words": {"data": words}}
    stimulus = Stimulus(inputs, {"engine": len(want[0]), "decoder": len(want[1])})
    trace = simulate(lambda: Asked(factory(P)), "split", stimulus, **({"simulator": "amaranth"} | options))
    return [trace.transfers[name]["data"] for name in ("engine", "decoder")], want


@pytest.mark.parametrize("stall", [0.0, 0.3, {"engine": 0.9}, {"asks": 0.9}])
def test_codebooks_go_whole_to_where_they_were_asked_for(stall):
    got, want = split([0, 1, 1, 0, 1, 0, 0], stall=stall, seed=4)
    assert got == want


@pytest.mark.parametrize("unit", [RowMerge, CodebookSplit])
def test_generated_verilog_passes_the_linters(unit, tmp_path):
    (tmp_path / "unit.sv").write_text(emit(unit(P), "unit").verilog)
    assert lint(tmp_path, "unit.sv", top="unit") == ""
    check = yosys(tmp_path, "read_verilog -sv unit.sv; hierarchy -top unit; proc; check -assert")
    assert check.returncode == 0, check.stderr


def test_a_codebook_that_is_cut_is_seen():
    try:
        got, want = split(
            [0, 1, 0], mutant(CodebookSplit, "take & (left == 0)", "take & (left == 1)"), timeout_cycles=1000
        )
    except (SimulationError, AssertionError):
        return
    assert got != want
