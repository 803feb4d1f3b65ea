"""Codes to INT8 rows: every code reads its centroid, for any number of sub-spaces, at the speed of the rows."""

import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from code_words import frame_codes
from formal import mutant
from memory_collisions import asserted_memories
from verilog_checks import lint, yosys

from kvant.hw.attention.row_quantizer import row_output
from kvant.hw.emit import emit
from kvant.hw.pq import centroid_decoder as hardware
from kvant.hw.pq.centroid_decoder import CentroidDecoder
from kvant.hw.pq.codebook_jobs import word_input
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.tables import ScanWord
from kvant.sim.errors import SimulationError
from kvant.sim.pq.layout import codebook_words
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

KEYS, VALUES = 0, 1

SHAPES = [  # head_dim, subspace, nbits, port_bits, lanes
    (64, 2, 4, 64, 8),
    (64, 1, 4, 128, 8),  # a slice is two transfers
    (64, 8, 5, 64, 4),  # a sub-space is two transfers
    (64, 8, 4, 64, 2),
    (80, 4, 4, 32, 16),  # a transfer is four slices and four words of codes
    (80, 2, 5, 128, 8),
    (96, 2, 4, 64, 16),
    (96, 8, 6, 64, 8),
    (128, 8, 6, 64, 16),
    (128, 4, 4, 256, 8),
    (24, 8, 8, 64, 8),
    (24, 8, 7, 64, 32),  # 16 tokens a frame, a row is one transfer with surplus channels
    (20, 4, 5, 64, 8),  # five sub-spaces, the last transfer half full
    (3, 1, 4, 64, 1),
]


def parameters(head_dim, subspace, nbits, port_bits, lanes):
    return PqParameters(
        head_dim=head_dim, subspace=subspace, nbits=nbits, port_bits=port_bits, lanes=lanes, group=128, capacity=4096
    )


class Fed(wiring.Component):
    """A decoder whose passes come with their store and scale."""

    def __init__(self, decoder):
        self.decoder = decoder
        p = decoder.p
        payload = data.StructLayout({"data": data.StructLayout({"word": ScanWord(p), "store": 1, "scale": 16})})
        rows = data.StructLayout({"data": row_output(p)})
        codebook = stream.Signature(word_input(p))
        super().__init__(
            {
                "keys": In(codebook),
                "values": In(codebook),
                "words": In(stream.Signature(payload)),
                "rows": Out(stream.Signature(rows)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.decoder = decoder = self.decoder
        given = self.words.payload.data
        wiring.connect(m, wiring.flipped(self.keys), decoder.keys)
        wiring.connect(m, wiring.flipped(self.values), decoder.values)
        # Words of the next pass wait until the last row of this one has left.
        open_ = Signal(init=1)
        ends = decoder.rows.valid & decoder.rows.ready & decoder.rows.payload.last & decoder.rows.payload.final
        with m.If(ends):
            m.d.sync += open_.eq(1)
        with m.Elif(decoder.words.valid & decoder.words.ready & given.word.last):
            m.d.sync += open_.eq(0)
        store, scale = Signal(), Signal(16)
        with m.If(open_ & self.words.valid):
            m.d.sync += [store.eq(given.store), scale.eq(given.scale)]
        m.d.comb += [
            decoder.words.payload.eq(given.word),
            decoder.words.valid.eq(self.words.valid & open_),
            self.words.ready.eq(decoder.words.ready & open_),
            decoder.store.eq(store),
            decoder.scale.eq(scale),
            self.rows.payload.data.eq(decoder.rows.payload),
            self.rows.valid.eq(decoder.rows.valid),
            decoder.rows.ready.eq(self.rows.ready),
        ]
        return m


def passes(p, lengths, *, seed=0, stores=(KEYS, VALUES)):
    """(store, scale bits, entries [M, C, d/M], codes [tokens, M]) of passes of so many tokens, stores in turn."""
    rng = np.random.default_rng(seed)
    return [
        (
            stores[number % len(stores)],
            int(rng.integers(0, 1 << 15)),
            rng.integers(-128, 128, (p.subspaces, p.centroids, p.subspace)).astype(np.int8),
            rng.integers(0, p.centroids, (tokens, p.subspaces)),
        )
        for number, tokens in enumerate(lengths)
    ]


def scan_words(p, codes, store, scale):
    lanes = frame_codes(p, codes)
    layout = data.StructLayout({"word": ScanWord(p), "store": 1, "scale": 16})
    words = []
    for number, lane_codes in enumerate(lanes):
        frame, place = divmod(number, p.frame_words)
        count = min(p.frame, len(codes) - frame * p.frame) if place == p.frame_words - 1 else number % (p.frame + 1)
        last = number == len(lanes) - 1
        word = {"data": list(map(int, lane_codes)), "count": count, "last": last}
        words.append(layout.const({"word": word, "store": store, "scale": scale}).as_value().value)
    return words


def run(p, work, factory=CentroidDecoder, **options):
    """Rows of each pass as (elements [tokens, d], scale), and the trace."""
    options = {"simulator": "amaranth"} | options
    inputs = {"words": {"data": [w for store, scale, _, codes in work for w in scan_words(p, codes, store, scale)]}}
    for store, name in enumerate(("keys", "values")):
        books = (codebook_words(p, entries) for kind, _, entries, _ in work if kind == store)
        inputs[name] = {"data": [word for book in books for word in book]}
    count = sum(len(codes) for *_, codes in work) * p.row_transfers
    stimulus = Stimulus({name: value for name, value in inputs.items() if value["data"]}, {"rows": count})
    trace = simulate(lambda: Fed(factory(p)), "decoder", stimulus, **options)
    rows = [row_output(p).from_bits(word) for word in trace.transfers["rows"]["data"]]
    results = []
    for *_, codes in work:
        mine, rows = rows[: len(codes) * p.row_transfers], rows[len(codes) * p.row_transfers :]
        elements = np.array([list(row.data) for row in mine]).reshape(len(codes), -1)[:, : p.head_dim]
        ends = [[int(row.last), int(row.final), int(row.empty)] for row in mine]
        results.append((elements, ends, {int(row.scale) for row in mine}))
    return results, trace


def equal(p, results, work):
    for (elements, ends, scales), (_, scale, entries, codes) in zip(results, work, strict=True):
        want = entries[np.arange(p.subspaces), codes].reshape(len(codes), p.head_dim)
        last = [[n % p.row_transfers == p.row_transfers - 1, n == len(ends) - 1, 0] for n in range(len(ends))]
        if not (np.array_equal(elements, want) and np.array_equal(ends, np.array(last, int)) and scales == {scale}):
            return False
    return True


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_the_entries_that_codes_name(shape):
    p = parameters(*shape)
    work = passes(p, (2 * p.frame + 1, 3, 1, p.frame), seed=1)
    with asserted_memories() as watched:
        results, _ = run(p, work)
    assert len(watched) == 2 * p.line_channels // p.subspace
    assert equal(p, results, work)


@pytest.mark.parametrize("nbits", [4, *(pytest.param(nbits, marks=pytest.mark.long) for nbits in (5, 6, 7, 8))])
@pytest.mark.parametrize("subspace", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_all_partitions(head_dim, subspace, nbits):
    """On random widths of port and transfer, so that codes, slices and transfers meet in all ways."""
    rng = np.random.default_rng((head_dim, subspace, nbits))
    p = parameters(head_dim, subspace, nbits, int(rng.choice([64, 128, 256])), int(rng.choice([4, 8, 16, 32])))
    codes = rng.integers(0, p.centroids, (p.frame + 2, p.subspaces))
    want = rng.integers(-128, 128, (p.subspaces, p.centroids, p.subspace)).astype(np.int8)
    work = [(KEYS, 0x3C00, want, codes)]
    results, _ = run(p, work)
    assert equal(p, results, work)


@pytest.mark.parametrize("stall", [0.3, 0.9, {"rows": 0.9}, {"words": 0.9}, {"keys": 0.9}, {"rows": "after_valid"}])
@pytest.mark.parametrize("shape", [(16, 2, 4, 32, 4), (16, 1, 5, 32, 8), (24, 2, 4, 32, 8)])
def test_pauses_change_nothing(shape, stall):
    p = parameters(*shape)
    work = passes(p, (5, 2, 7, 1, 3), seed=2)
    with asserted_memories():
        results, _ = run(p, work, stall=stall, seed=3)
    assert equal(p, results, work)


@pytest.mark.parametrize(
    "shape", [(64, 4, 4, 64, 8), (80, 4, 4, 32, 16), (16, 1, 4, 64, 16), (24, 8, 4, 64, 4), (8, 8, 4, 64, 8)]
)
def test_rows_follow_each_other_without_a_bubble(shape):
    p = parameters(*shape)
    work = passes(p, (40 * p.frame,), seed=4)
    results, trace = run(p, work)
    assert equal(p, results, work)
    rows, words = trace.cycles["rows"], trace.cycles["words"]
    per_frame = max(p.frame * p.row_transfers, p.frame_words)
    assert rows[-1] - rows[0] == 39 * per_frame + p.frame * p.row_transfers - 1
    filled = trace.cycles["keys"][-1]
    assert words[0] < filled and rows[0] > filled


def test_the_latency_is_the_one_stated():
    p = parameters(16, 2, 4, 32, 4)
    work = passes(p, (1,), seed=5)
    _, trace = run(p, work)
    assert trace.cycles["rows"][0] - trace.cycles["keys"][-1] == CentroidDecoder.latency + 1


def test_the_next_codebook_of_keys_comes_while_values_are_read():
    p = parameters(16, 2, 4, 32, 4)
    work = passes(p, (60, 60, 60), seed=6)
    results, trace = run(p, work)
    assert equal(p, results, work)
    keys, rows = trace.cycles["keys"], trace.cycles["rows"]
    per_pass = 60 * p.row_transfers
    first, second = keys[p.codebook_words], keys[-1]
    assert rows[per_pass - 1] - 10 < first and second < rows[2 * per_pass - 1]


def test_passes_of_one_store_behind_each_other():
    p = parameters(16, 2, 4, 32, 4)
    work = passes(p, (3, 4, 5), seed=7, stores=(VALUES,))
    with asserted_memories():
        results, _ = run(p, work)
    assert equal(p, results, work)


def test_reset_in_the_middle():
    p = parameters(16, 2, 4, 32, 4)
    work = passes(p, (20, 30), seed=8)
    results, _ = run(p, work, stall=0.3, reset=Reset(again_at=150, hold_valid=True))
    assert equal(p, results, work)


def test_generated_verilog_passes_the_linters_and_does_the_same(tmp_path):
    for number, shape in enumerate([(80, 4, 4, 32, 16), (24, 8, 4, 64, 4), (3, 1, 4, 64, 1)]):
        p = parameters(*shape)
        (tmp_path / f"decoder{number}.sv").write_text(emit(CentroidDecoder(p), "decoder").verilog)
        assert lint(tmp_path, f"decoder{number}.sv", top="decoder") == ""
        check = yosys(tmp_path, f"read_verilog -sv decoder{number}.sv; hierarchy -top decoder; proc; check -assert")
        assert check.returncode == 0, check.stderr
        work = passes(p, (7, 4), seed=9)
        results, _ = run(p, work, simulator="icarus", stall=0.2)
        assert equal(p, results, work)


FAULTS = {
    "the stores' codebooks are exchanged": ("Mux(self.store, value_memory.ch", "Mux(~self.store, value_memory.ch"),
    "the first line alone": ("codebook.line.eq(line)", "codebook.line.eq(0)"),
    "a token too many": ("token + 1 == frames.count", "token == frames.count"),
    "the same transfer of a line": ("_choose(channels, slot,", "_choose(channels, slot & 0,"),
    "a codebook is kept": ("codebook.release.eq(release)", "codebook.release.eq(0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["none", *FAULTS])
def test_a_fault_is_seen(name):
    p = parameters(16, 2, 4, 64, 4)  # two lines of two transfers
    work = passes(p, (5, 3, 4), seed=10)
    factory = CentroidDecoder if name == "none" else mutant(CentroidDecoder, *FAULTS[name])
    try:
        same = equal(p, run(p, work, factory, timeout_cycles=2000)[0], work)
    except SimulationError:
        same = False
    assert same == (name == "none")


def test_words_that_are_taken_too_early_are_seen(monkeypatch):
    """A memory that takes the next codebook while the one before is looked up."""
    faulty = mutant(hardware.CodebookMemory, "self.words.ready.eq(~whole)", "self.words.ready.eq(~whole | self.look)")
    monkeypatch.setattr(hardware, "CodebookMemory", faulty)
    p = parameters(16, 2, 4, 64, 4)
    work = passes(p, (40, 3, 40, 3), seed=11)
    try:
        same = equal(p, run(p, work, timeout_cycles=4000)[0], work)
    except SimulationError:
        same = False
    assert not same
