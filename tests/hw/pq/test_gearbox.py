"""Gearbox: the bits of words of codes, without gaps, as port words, and back."""

import random

import numpy as np
import pytest
from code_words import frame_codes
from verilog_checks import lint, yosys

from kvant.hw.emit import emit
from kvant.hw.pq.gearbox import WordPacker, WordUnpacker
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.errors import SimulationError
from kvant.sim.pq.layout import code_words
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

LENGTHS = (1, 2, 3, 4, 5, 8, 9, 1, 1, 7)


def parameters(nbits, port_bits=32):
    return PqParameters(head_dim=64, nbits=nbits, port_bits=port_bits)


def packets(p, lengths, seed=0):
    """Words of codes in packets of *lengths*, and the port words they are: (data, last) each."""
    rng = random.Random(seed)
    width = p.word_codes * p.nbits
    words, port = [], []
    for length in lengths:
        data = [rng.choice([rng.getrandbits(width), (1 << width) - 1, 0]) for _ in range(length)]
        words += [(word, number == length - 1) for number, word in enumerate(data)]
        bits = sum(word << number * width for number, word in enumerate(data))
        count = -(-length * width // p.port_bits)
        port += [
            (bits >> number * p.port_bits & (1 << p.port_bits) - 1, number == count - 1) for number in range(count)
        ]
    return words, port


def play(component, given, expected, **options):
    fields = {"data": [word for word, _ in given], "last": [int(last) for _, last in given]}
    options = {"simulator": "amaranth"} | options
    return simulate(component, "gearbox", Stimulus({"i": fields}, {"o": len(expected)}), **options)


def transfers(trace):
    fields = trace.transfers["o"]
    return [(word, bool(last)) for word, last in zip(fields["data"], fields["last"], strict=True)]


@pytest.mark.parametrize("stall", [0, 0.3, 0.9, {"o": 0.8}, {"i": 0.8}, {"o": "after_valid"}])
@pytest.mark.parametrize("nbits", [4, 5, 6, 7, 8])
def test_packets_become_contiguous_bits_and_words_again(nbits, stall):
    p = parameters(nbits)
    words, port = packets(p, LENGTHS, seed=nbits)
    assert transfers(play(lambda: WordPacker(p), words, port, stall=stall, seed=1)) == port
    assert transfers(play(lambda: WordUnpacker(p), port, words, stall=stall, seed=2)) == words


@pytest.mark.parametrize("port_bits", [64, 128, 512])
@pytest.mark.parametrize("nbits", [5, 6, 7])
def test_wide_ports(nbits, port_bits):
    p = parameters(nbits, port_bits)
    words, port = packets(p, LENGTHS, seed=nbits)
    assert transfers(play(lambda: WordPacker(p), words, port, stall=0.3)) == port
    assert transfers(play(lambda: WordUnpacker(p), port, words, stall=0.3)) == words


@pytest.mark.parametrize("nbits", [4, 5, 6, 7, 8])
def test_a_port_word_every_cycle_while_nobody_waits(nbits):
    p = parameters(nbits)
    words, port = packets(p, (64,))
    for component, given, expected, side in (
        (lambda: WordPacker(p), words, port, "o"),
        (lambda: WordUnpacker(p), port, words, "i"),
    ):
        cycles = play(component, given, expected).cycles[side]
        assert cycles[-1] - cycles[0] == len(port) - 1


@pytest.mark.parametrize("nbits", [5, 7])
def test_reset_forgets_what_is_held(nbits):
    p = parameters(nbits)
    words, port = packets(p, (9, 4))
    reset = Reset(again_at=12, hold_valid=True)
    assert transfers(play(lambda: WordPacker(p), words, port, stall=0.3, reset=reset)) == port
    assert transfers(play(lambda: WordUnpacker(p), port, words, stall=0.3, reset=reset)) == words


@pytest.mark.parametrize("component", [WordPacker, WordUnpacker])
@pytest.mark.parametrize("nbits", [5, 6, 7, 8])
def test_generated_verilog_passes_the_linters(component, nbits, tmp_path):
    design = emit(component(parameters(nbits)), "gearbox")
    (tmp_path / "gearbox.sv").write_text(design.verilog)
    assert lint(tmp_path, "gearbox.sv", top="gearbox") == ""
    check = yosys(tmp_path, "read_verilog -sv gearbox.sv; hierarchy -top gearbox; proc; check -assert")
    assert check.returncode == 0, check.stderr


def test_generated_verilog_does_the_same():
    p = parameters(6)
    words, port = packets(p, LENGTHS)
    assert transfers(play(lambda: WordPacker(p), words, port, stall=0.3, simulator="icarus")) == port
    assert transfers(play(lambda: WordUnpacker(p), port, words, stall=0.3, simulator="icarus")) == words


@pytest.mark.parametrize("nbits", [4, 5, 6, 7, 8])
def test_codes_lie_in_memory_as_the_layout_says(nbits):
    p = PqParameters(head_dim=24, nbits=nbits, port_bits=32)
    codes = np.random.default_rng(nbits).integers(0, p.centroids, (3 * p.chunk_tokens - 1, p.subspaces))
    words = [sum(int(code) << k * nbits for k, code in enumerate(lanes)) for lanes in frame_codes(p, codes)]
    given = [(word, number == len(words) - 1) for number, word in enumerate(words)]
    expected = code_words(p, codes.astype(np.uint8))
    assert [word for word, _ in transfers(play(lambda: WordPacker(p), given, expected))] == expected
    port = [(word, number == len(expected) - 1) for number, word in enumerate(expected)]
    assert transfers(play(lambda: WordUnpacker(p), port, given)) == given


@pytest.mark.parametrize(
    "component,right,wrong",
    [(WordPacker, "level >= 3'h4", "level >= 3'h5"), (WordUnpacker, "level - 2'h3", "level - 2'h2")],
)
def test_a_wrong_count_of_what_is_held_is_noticed(component, right, wrong):
    p = parameters(7)
    words, port = packets(p, (9,))
    given, expected = (words, port) if component is WordPacker else (port, words)

    def edit(verilog):
        assert verilog.count(right) == 1
        return verilog.replace(right, wrong)

    try:
        trace = play(lambda: component(p), given, expected, simulator="icarus", edit_verilog=edit, timeout_cycles=100)
    except SimulationError:
        return  # too many words, or too few
    assert transfers(trace) != expected
