"""Value bins: every bin is the sum of the weights of the tokens that its code names."""

import numpy as np
import pytest
import torch
from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from code_words import frame_codes
from memory_collisions import asserted_memories
from verilog_checks import lint, yosys

from kvant.golden.pq.scores import value_bins
from kvant.hw.attention.cache_shape import WEIGHT_BITS
from kvant.hw.emit import emit
from kvant.hw.pq import bins
from kvant.hw.pq.bins import CodeWord, FrameWeights, ValueBins
from kvant.hw.pq.codebook_jobs import bin_read
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

LARGEST = (1 << WEIGHT_BITS) - 1

SHAPES = [  # head_dim, subspace, nbits, port_bits, q_parallel: all of d, dimensions and bits of a code
    (64, 2, 4, 64, 2),  # two words a token
    (64, 4, 4, 64, 1),  # M = 16: a token is one word
    (64, 8, 5, 64, 2),
    (80, 4, 4, 32, 1),  # five words of four lanes a token
    (96, 2, 4, 128, 1),  # three words a token
    (96, 8, 5, 64, 2),
    (128, 8, 6, 64, 1),
    (160, 8, 4, 64, 2),
    (24, 8, 8, 64, 1),
    (256, 8, 4, 64, 1),
    (16, 1, 4, 32, 1),
    (24, 8, 7, 64, 1),  # 16 tokens a frame
    (8, 8, 4, 64, 3),
]
TIGHT = [(64, 4, 4, 64, 1), (64, 2, 4, 64, 2), (96, 2, 4, 128, 1), (32, 1, 4, 32, 1)]  # 1 to 4 words a token


def parameters(head_dim, subspace, nbits, port_bits, q_parallel, capacity=256):
    return PqParameters(
        head_dim=head_dim, subspace=subspace, nbits=nbits, port_bits=port_bits, q_parallel=q_parallel, capacity=capacity
    )


class Rounds(wiring.Component):
    """Value bins that take turns: words up to `last`, then readings up to `last`, and so on."""

    def __init__(self, dut, *, wait=True):
        self.dut = dut
        self.wait = wait
        p = dut.p
        request = data.StructLayout({"read": bin_read(p), "clear": 1})
        super().__init__(
            {
                "words": In(stream.Signature(CodeWord(p))),
                "weights": In(stream.Signature(data.StructLayout({"data": FrameWeights(p)}))),
                "requests": In(stream.Signature(data.StructLayout({"data": request, "last": 1}))),
                "bins": Out(stream.Signature(data.StructLayout({"data": dut.bin_values.shape()}), always_ready=True)),
                "drained": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.dut = dut = self.dut
        reading = Signal()
        delays = Signal(dut.bin_latency)
        request = self.requests.payload
        m.d.comb += [
            dut.words.payload.eq(self.words.payload),
            dut.words.valid.eq(self.words.valid & ~reading),
            self.words.ready.eq(dut.words.ready & ~reading),
            dut.weights.payload.eq(self.weights.payload.data),
            dut.weights.valid.eq(self.weights.valid),
            self.weights.ready.eq(dut.weights.ready),
            self.requests.ready.eq(reading & (dut.drained if self.wait else 1)),
            dut.bin_read.eq(request.data.read),
            dut.bin_read.valid.eq(self.requests.valid & self.requests.ready),
            dut.clear.eq(request.data.clear),
            self.bins.valid.eq(delays[-1]),
            self.bins.payload.data.eq(dut.bin_values),
            self.drained.eq(dut.drained),
        ]
        m.d.sync += delays.eq(Cat(dut.bin_read.valid, delays))
        with m.If(reading):
            m.d.sync += reading.eq(~(dut.bin_read.valid & request.last))
        with m.Else():
            m.d.sync += reading.eq(self.words.valid & self.words.ready & self.words.payload.last)
        return m


def word_fields(p, histories):
    """Transfers of `words` for codes [tokens, M] of each history."""
    fields = {"data": [], "last": []}
    layout = CodeWord(p).members["data"]
    for codes in histories:
        lanes = frame_codes(p, codes)
        fields["data"] += [layout.const(list(map(int, word))).as_value().value for word in lanes]
        fields["last"] += [0] * (len(lanes) - 1) + [1]
    return fields


def weight_words(p, weights):
    """Transfers of `weights` for weights [B, tokens]; tokens that a frame lacks have weight 0."""
    queries, tokens = weights.shape
    padded = np.zeros((-(-tokens // p.frame) * p.frame, queries), dtype=np.int64)
    padded[:tokens] = weights.T
    frames = padded.reshape(-1, p.frame, queries).tolist()
    return [FrameWeights(p).const({"weights": frame}).as_value().value for frame in frames]


def request_fields(p, *, clear=True):
    """Transfers of `requests` for all bins, slice by slice, centroid by centroid, query by query."""
    layout = data.StructLayout({"read": bin_read(p), "clear": 1})
    words = []
    for k in range(p.slices):
        for c in range(p.centroids):
            for q in range(p.q_parallel):
                read = {"valid": 1, "vector": q, "slice": k, "centroid": c}
                last_query = q == p.q_parallel - 1
                words.append(layout.const({"read": read, "clear": clear and last_query}).as_value().value)
    return {"data": words, "last": [0] * (len(words) - 1) + [1]}


def run(p, work, *, clear=None, factory=ValueBins, wait=True, **options):
    """Bins [B, M, centroids] as read after each history ``(weights [B, tokens], codes [tokens, M])``, and the trace."""
    options = {"simulator": "amaranth"} | options
    clear = [True] * len(work) if clear is None else clear
    requests = [request_fields(p, clear=each) for each in clear]
    inputs = {
        "words": word_fields(p, [codes for _, codes in work]),
        "weights": {"data": [word for weights, _ in work for word in weight_words(p, weights.numpy())]},
        "requests": {field: [value for each in requests for value in each[field]] for field in ("data", "last")},
    }
    count = len(work) * p.codebook_words * p.q_parallel
    stimulus = Stimulus(inputs, {"bins": count}, ("drained",))
    trace = simulate(lambda: Rounds(factory(p), wait=wait), "value_bins", stimulus, **options)
    layout = data.ArrayLayout(p.bin_width, p.slice_subspaces)
    values = np.array([list(layout.from_bits(word)) for word in trace.transfers["bins"]["data"]])
    values = values.reshape(len(work), p.slices, p.centroids, p.q_parallel, p.slice_subspaces)
    values = values.transpose(0, 3, 1, 4, 2).reshape(len(work), p.q_parallel, p.subspaces, p.centroids)
    return list(torch.from_numpy(values)), trace


def histories(p, lengths, seed=0):
    """Weights and codes of histories of *lengths* tokens, with few distinct codes in some."""
    rng = torch.Generator().manual_seed(seed)
    work = []
    for number, tokens in enumerate(lengths):
        distinct = (p.centroids, 3, 1)[number % 3]
        pool = torch.randint(0, p.centroids, (distinct,), generator=rng)
        codes = pool[torch.randint(0, distinct, (tokens, p.subspaces), generator=rng)].to(torch.uint8)
        weights = torch.randint(0, LARGEST + 1, (p.q_parallel, tokens), generator=rng)
        weights[0, 0] = LARGEST
        work.append((weights, codes))
    return work


def golden(p, work):
    return [value_bins(weights, codes, p.centroids) for weights, codes in work]


def equal(results, expected):
    return len(results) == len(expected) and all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_bins_are_sums_of_weights_and_are_cleared_by_reading(shape):
    p = parameters(*shape)
    work = histories(p, (2 * p.frame + 1, 3 * p.frame), seed=1)
    with asserted_memories() as watched:
        results, trace = run(p, work)
    assert len(watched) == p.word_codes
    assert equal(results, golden(p, work))
    assert trace.status == {"drained": 1}


@pytest.mark.parametrize("stall", [0, 0.3, {"words": 0.9}, {"words": [0, 0, 1]}, {"weights": 0.7}])
@pytest.mark.parametrize("shape", TIGHT)
def test_codes_that_repeat_soon(shape, stall):
    """With one to three words a token, accesses to a bin overlap; pauses vary their distance."""
    p = parameters(*shape)
    work = histories(p, (12 * p.frame, 15 * p.frame, 12 * p.frame), seed=2)
    with asserted_memories():
        results, _ = run(p, work, stall=stall, seed=3)
    assert equal(results, golden(p, work))


def test_one_code_for_ever_with_the_largest_weight():
    p = parameters(64, 4, 4, 64, 1)
    assert (p.subspaces, p.frame_words, p.tokens) == (16, 1, 256)
    weights = torch.full((1, p.tokens), LARGEST)
    codes = torch.full((p.tokens, p.subspaces), 15, dtype=torch.uint8)
    results, trace = run(p, [(weights, codes)])
    assert equal(results, golden(p, [(weights, codes)]))
    assert results[0].max() == p.tokens * LARGEST == (1 << p.bin_width) - p.tokens
    words = trace.cycles["words"]
    assert words[-1] - words[0] == p.tokens - 1


@pytest.mark.parametrize("shape", [*TIGHT, (80, 4, 4, 32, 1), (8, 8, 4, 64, 1)])
def test_a_word_every_cycle_while_weights_are_there(shape):
    p = parameters(*shape)
    work = histories(p, (20 * p.frame,), seed=4)
    results, trace = run(p, work)
    assert equal(results, golden(p, work))
    words = trace.cycles["words"]
    assert words[-1] - words[0] == 20 * p.frame_words - 1


@pytest.mark.parametrize("shape", TIGHT)
def test_reading_without_clearing_keeps_the_bins(shape):
    p = parameters(*shape)
    work = histories(p, (9 * p.frame, 5 * p.frame, 2 * p.frame), seed=5)
    results, _ = run(p, work, clear=[False, True, True])
    first, second, third = golden(p, work)
    assert equal(results, [first, first + second, third])


def test_the_bins_are_empty_after_reset():
    p = parameters(16, 2, 4, 32, 2)
    work = histories(p, (50, 40), seed=6)
    results, trace = run(p, work, stall=0.2, reset=Reset(again_at=60, hold_valid=True))
    assert equal(results, golden(p, work))
    assert trace.cycles["words"][0] >= p.bank_entries


def test_words_right_after_the_pass_and_right_after_readings():
    p = parameters(16, 2, 4, 32, 1)
    assert p.frame_words == 1
    codes = torch.full((6, p.subspaces), 15, dtype=torch.uint8)  # the last bin that is cleared
    work = [(torch.full((1, 6), 1000 + number), codes) for number in range(3)]
    results, trace = run(p, work)
    assert equal(results, golden(p, work))
    requests, words = trace.cycles["requests"], trace.cycles["words"]
    assert words[6] - requests[p.codebook_words - 1] == 4
    assert requests[0] - words[5] == 5


def test_generated_verilog_passes_the_linters(tmp_path):
    for number, shape in enumerate([(80, 4, 4, 32, 2), (8, 2, 4, 32, 1)]):
        design = emit(ValueBins(parameters(*shape)), "value_bins")
        (tmp_path / f"bins{number}.sv").write_text(design.verilog)
        assert lint(tmp_path, f"bins{number}.sv", top="value_bins") == ""
        check = yosys(tmp_path, f"read_verilog -sv bins{number}.sv; hierarchy -top value_bins; proc; check -assert")
        assert check.returncode == 0, check.stderr


def test_generated_verilog_does_the_same():
    p = parameters(16, 2, 4, 32, 2)
    work = histories(p, (19, 18), seed=8)
    results, _ = run(p, work, simulator="icarus", stall=0.2)
    assert equal(results, golden(p, work))


@pytest.mark.long
@pytest.mark.parametrize("shape", [(64, 2, 8, 128, 1), (128, 2, 8, 128, 2), (64, 8, 8, 128, 1)])
def test_the_sizes_of_models(shape):
    p = parameters(*shape)
    work = histories(p, (300, 200), seed=10)
    results, trace = run(p, work, simulator="verilator")
    assert equal(results, golden(p, work))
    words = trace.cycles["words"][: 300 * p.frame_words // p.frame]
    assert words[-1] - words[0] == len(words) - 1


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_a_forwarding_that_is_missing_is_noticed(monkeypatch, distance):
    class Forgetful(bins._Bank):
        def __init__(self, p):
            super().__init__(p)
            self.distances = tuple(k for k in self.distances if k != distance)

    monkeypatch.setattr(bins, "_Bank", Forgetful)
    p = parameters(64, 4, 4, 64, 1)
    work = histories(p, (30,), seed=9)
    work[0][1][:] = torch.arange(30)[:, None].remainder(distance).to(torch.uint8)
    assert not equal(run(p, work)[0], golden(p, work))


def test_reading_before_the_words_are_in_is_noticed():
    p = parameters(64, 2, 4, 64, 1)
    codes = torch.zeros((5, p.subspaces), dtype=torch.uint8)
    work = [(torch.full((1, 5), 7), codes)]
    assert equal(run(p, work)[0], golden(p, work))
    assert not equal(run(p, work, wait=False)[0], golden(p, work))
