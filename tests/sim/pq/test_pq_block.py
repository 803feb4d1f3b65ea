"""The block `pq` with a user's tensors: known answer, adversarial rows, shapes, heads, stalls, faults, refusals."""

from pathlib import Path

import numpy as np
import pytest
from formal import mutant
from verilog_checks import lint, yosys

from kvant.errors import ComparisonError, InputError
from kvant.hw.emit import emit
from kvant.hw.pq.attention import PqAttention
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.query_stage import attend_command
from kvant.pq import BLOCK, golden_outputs, random_tables
from kvant.sim.errors import SimulationError
from kvant.sim.pq import attention as sim
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset
from kvant.simulated import compare

SEED = 20261130
FOLDER = Path(__file__).parents[2] / "known_answers"

TINY = PqParameters(head_dim=16, lanes=4, group=16, nbits=4, port_bits=64, batch=4, capacity=64)
"""A small cache: 8 sub-spaces, a frame of 2 tokens in one word of 16 codes."""

WINDOWS = TINY.model_copy(update={"group": 8, "sinks": 2, "recent": 5, "q_parallel": 2, "centred": True})
PACKED = PqParameters(
    head_dim=20, lanes=4, group=32, nbits=5, subspace=4, port_bits=64, batch=4, capacity=128, sinks=1, recent=3
)
"""Codes without gaps, a frame of 16 tokens, a head that fills no power of two."""


def rows_of(p, tokens, queries, *, seed=SEED):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, p.head_dim)).astype(np.float16) for n in (tokens, tokens, queries)]


def check(p, k, v, q, *, tables=None, **options):
    tables = tables or random_tables(p, seed=3)
    result = sim.run(p, k, v, q, tables, seed=5, **options)
    compare(golden_outputs(p, k, v, q, tables), result)
    assert int(result["error"]) == 0
    return result


def known():
    with np.load(FOLDER / "pq_keys.npz") as archive:
        return tuple({key[3 if key[0] == "i" else 4 :]: archive[key] for key in archive.files if key.startswith(kind)}
                     for kind in ("in_", "out_"))  # fmt: skip


@pytest.mark.parametrize(
    ("simulator", "stall"), [("verilator", 0.0), pytest.param("verilator", 0.3, marks=pytest.mark.long)]
)
def test_known_answer(simulator, stall):
    given, answers = known()
    result = BLOCK.simulate(given, simulator=simulator, stall=stall, seed=7)
    for name, values in answers.items():
        assert result[name].dtype == values.dtype
        np.testing.assert_array_equal(result[name], values, err_msg=name)
    for name in ("codebook_k", "codebook_k_scale"):
        np.testing.assert_array_equal(result[name], given[name])
    numbers = {name: int(result[name]) for name in ("group", "rows", "cols", "lanes", "nonfinite", "error")}
    assert numbers == {"group": 64, "rows": 1, "cols": 8, "lanes": 8, "nonfinite": 0, "error": 0}
    assert 0 < int(result["busy_cycles"]) <= int(result["cycles"])


@pytest.mark.parametrize(
    ("p", "tokens", "queries", "simulator", "stall"),
    [
        (WINDOWS, 30, 3, "icarus", 0.3),
        (WINDOWS, 30, 3, "icarus", 0.0),
        (TINY, 1, 1, "icarus", 0.0),
        (WINDOWS, 3, 2, "icarus", 0.3),  # sinks and one recent token alone
        (PqParameters(head_dim=3, lanes=8, group=8, subspace=1, nbits=4, port_bits=64, recent=1), 14, 2, "icarus", 0.0),
        (PACKED, 70, 2, "verilator", 0.3),
        pytest.param(PACKED, 120, 3, "icarus", 0.3, marks=pytest.mark.long),
        pytest.param(TINY, 64, 20, "verilator", 0.3, marks=pytest.mark.long),
    ],
)
def test_codes_scores_and_outputs(p, tokens, queries, simulator, stall):
    """Both simulators, with and without stalls; Icarus knows unknown bits: what memory holds before reaches no port."""
    check(p, *rows_of(p, tokens, queries), simulator=simulator, stall=stall)


def adversarial(p, tokens):
    """Rows of every kind that breaks quantisers."""
    rng = np.random.default_rng(SEED)
    x = rng.standard_normal((tokens, p.head_dim))
    x[1::9] = 0
    x[2::9] = 6e-8
    x[3::9, 3] = 1e4
    x[4::9, 5] = np.nan
    x[5::9, 0], x[5::9, 1] = np.inf, -np.inf
    x[6::9] = 65504
    x[7::9] = np.clip(np.arange(p.head_dim) - 8, -127, 127) / 32  # ties on the grid of a codebook
    x[:, 9] = 0
    return x.astype(np.float16)


def test_adversarial_rows_and_queries():
    p = WINDOWS.model_copy(update={"centred": False})
    k = v = adversarial(p, 40)
    result = check(p, k, v, adversarial(p, 9)[1:], simulator="verilator")
    assert int(result["nonfinite"]) == 1
    assert np.isfinite(result["out"]).all()


def test_a_channel_that_is_huge_in_all_keys_and_queries():
    """Logarithms of millions of whole powers of two, of coded keys and of INT8 rows of two groups."""
    p = WINDOWS.model_copy(update={"centred": False})
    k, v, q = rows_of(p, 20, 2)
    k[:, 3] = q[:, 3] = 6e4
    check(p, k, v, q, simulator="icarus")


def test_one_code_repeated_for_ever():
    """All tokens equal: every word adds to the bins of the word before."""
    p = TINY
    k = np.tile(np.linspace(-1, 1, p.head_dim), (50, 1)).astype(np.float16)
    result = check(p, k, k, k[:2], simulator="icarus")
    assert (result["v_codes"] == result["v_codes"][0]).all()


def test_scale_of_a_codebook_is_zero():
    p, tables = TINY, random_tables(TINY, seed=3)
    tables = sim.Tables(tables.entries, (np.float16(0), np.float16(0)))
    result = check(p, *rows_of(p, 20, 2), tables=tables, simulator="icarus")
    assert not result["out"].any()


def play_heads(p, sequences, *, factory=PqAttention, **options):
    """Sequences of heads, whose rows come in turn, then a batch of queries for each head's last one.

    *sequences* are (head, k, v, q); a head's later sequence replaces its earlier one.
    """
    tables = {head: random_tables(p, seed=head) for head, *_ in sequences}
    per_head = {}
    for head, k, v, q in sequences:
        rows, *_ = per_head.get(head, ([],))
        per_head[head] = rows + sim.sequence(k, v, head=head), k, v, q
    longest = max(len(rows) for rows, *_ in per_head.values())
    rows = [rows[t] for t in range(longest) for rows, *_ in per_head.values() if t < len(rows)]
    attends = [
        sim.Attend(q[first : first + p.q_parallel], sim.history_of(p, len(k)), head)
        for head, (_, k, _, q) in per_head.items()
        for first in range(0, len(q), p.q_parallel)
    ]
    trace = simulate(lambda: factory(p), "pq", sim.stimulus(p, rows, attends, tables), **options)
    got = np.array(trace.transfers["out"]["data"], np.uint32).view(np.float32).reshape(-1, p.head_dim)
    want = [golden_outputs(p, k, v, q, tables[head])["out"] for head, (_, k, v, q) in per_head.items()]
    assert trace.status["error"] == 0
    return got, np.concatenate(want)


def test_heads_in_turn_and_a_sequence_that_replaces_another():
    p = WINDOWS.model_copy(update={"heads": 2})
    sequences = [(0, *rows_of(p, 17, 2, seed=1)), (1, *rows_of(p, 36, 1, seed=2)), (0, *rows_of(p, 21, 2, seed=3))]
    got, want = play_heads(p, sequences, simulator="verilator", stall=0.2)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def test_reset_in_the_middle():
    p = WINDOWS
    got, want = play_heads(p, [(0, *rows_of(p, 24, 2))], simulator="icarus", reset=Reset(again_at=900))
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


FAULTS = {
    "bins are not cleared": ("engine.bin_read.vector == finishing.count - 1", "0"),
    "the scan's keys alone have a reference": ("coded & (rows.z_max[number] < softmax.z_max[number])", "coded"),
    "scale of the values' codebook": (".codebook_scale.eq(prepared.value_scale)", ".codebook_scale.eq(0x3C00)"),
    "all queries have the first one's factor": ("prepared.factors[number]", "prepared.factors[0]"),
    "rows are left out": (".has_rows.eq(~rows.empty)", ".has_rows.eq(rows.empty)"),
    "weights of rows do not count": ("Mux(coded, total, 0) + rows.total[number]", "Mux(coded, total, 0)"),
}


@pytest.mark.parametrize("name", ["none", *FAULTS])
def test_a_fault_is_seen(name):
    """Each fault changes an output, or stops the design; without one there is neither."""
    p, tensors = WINDOWS, rows_of(WINDOWS, 24, 4)
    factory = PqAttention if name == "none" else mutant(PqAttention, *FAULTS[name])
    try:
        got, want = play_heads(p, [(0, *tensors)], factory=factory, simulator="icarus", timeout_cycles=4000)
        same = np.array_equal(got.view(np.uint32), want.view(np.uint32))
    except SimulationError:
        same = False
    assert same == (name == "none")


def test_commands_for_scores_alone_between_others():
    """Longer scans than a table takes, with the next table there before a scan ends, and scores that wait."""
    p = TINY.model_copy(update={"nbits": 4, "subspace": 1, "head_dim": 8, "group": 8, "capacity": 128})
    k, v, q = rows_of(p, 120, 6)
    tables, history = random_tables(p, seed=3), 120
    kinds = [False, False, True, False, True, True]
    attends = [sim.Attend(q[n : n + 1], history, values=values) for n, values in enumerate(kinds)]
    assert history * p.subspaces // p.word_codes > p.codebook_words + 30
    play = sim.stimulus(p, sim.sequence(k, v), attends, {0: tables})
    for stall in (0.0, {"scores": 0.7}):
        trace = simulate(lambda: PqAttention(p), "pq", play, simulator="icarus", stall=stall, seed=2)
        golden = golden_outputs(p, k, v, q, tables)
        got = np.array(trace.transfers["out"]["data"], np.uint32).reshape(-1, p.head_dim)
        np.testing.assert_array_equal(got, golden["out"][np.array(kinds)].view(np.uint32))
        np.testing.assert_array_equal(sim.scores_of(p, trace, attends, len(k)), golden["scores"])
        assert trace.status["error"] == 0


def play_modes(p, tokens, modes, *, factory=PqAttention, stall=0.0, **options):
    """Commands over one sequence, one for each query, in these modes: outputs and scores, as simulated and as golden.

    A mode is "table", "decode" or "scores" (alone).
    """
    k, v, q = rows_of(p, tokens, len(modes))
    tables, history = random_tables(p, seed=3), sim.history_of(p, tokens)
    attends = [
        sim.Attend(q[n : n + 1], history, values=mode != "scores", decode=mode == "decode")
        for n, mode in enumerate(modes)
    ]
    play = sim.stimulus(p, sim.sequence(k, v), attends, {0: tables})
    trace = simulate(lambda: factory(p), "pq", play, stall=stall, **options)
    golden = {mode: golden_outputs(p, k, v, q, tables, mode=mode) for mode in ("table", "decode")}
    out = [golden[mode]["out"][n] for n, mode in enumerate(modes) if mode != "scores"]
    scores = [golden["table"]["scores"][n] for n, mode in enumerate(modes) if mode != "decode"]
    assert trace.status["error"] == 0 and trace.status["busy"] == 0
    return (
        np.array(trace.transfers["out"]["data"], np.uint32).reshape(-1, p.head_dim),
        np.array(out).view(np.uint32),
        sim.scores_of(p, trace, attends, tokens),
        np.array(scores),
    )


SOME = ["decode", "table", "decode", "scores", "decode"]
MIXED = ["table", "decode", "decode", "scores", "table", "decode", "scores", "decode", "table", "table"]

DECODING = WINDOWS.model_copy(update={"decode_tokens": 40})

TWO_GROUPS = PqParameters(
    head_dim=128, lanes=8, nbits=4, port_bits=128, batch=4, capacity=64, recent=3, decode_tokens=32
)


@pytest.mark.parametrize(
    ("p", "tokens", "modes", "simulator", "stall"),
    [
        (DECODING, 18, SOME, "icarus", 0.2),
        (TWO_GROUPS, 24, MIXED, "verilator", 0.0),
        pytest.param(TWO_GROUPS, 24, MIXED, "verilator", 0.3, marks=pytest.mark.long),
        pytest.param(DECODING, 30, MIXED, "icarus", 0.2, marks=pytest.mark.long),
        pytest.param(DECODING, 6, SOME, "icarus", 0.0, marks=pytest.mark.long),  # nothing is coded
        pytest.param(TINY.model_copy(update={"decode_tokens": 64}), 24, MIXED, "icarus", 0.2, marks=pytest.mark.long),
        pytest.param(
            PACKED.model_copy(update={"decode_tokens": 100}), 50, MIXED, "verilator", 0.3, marks=pytest.mark.long
        ),
    ],
)
def test_commands_of_both_modes_in_any_order(p, tokens, modes, simulator, stall):
    """With sinks and recent rows, and with an empty ring; with one group and two."""
    out, want, scores, want_scores = play_modes(p, tokens, modes, simulator=simulator, stall=stall, seed=4)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(scores, want_scores)


def test_a_history_too_long_to_decode_is_refused():
    """The command is dropped, without its queries; those around it are answered."""
    p = TINY.model_copy(update={"decode_tokens": 20})
    k, v, q = rows_of(p, 24, 1)
    tables = random_tables(p, seed=3)
    attend = sim.Attend(q, 24)
    play = sim.stimulus(p, sim.sequence(k, v), [attend, attend], {0: tables})
    legal = play.inputs["cmd"]["data"]
    decode = attend_command(p)["decode"].offset
    play.inputs["cmd"]["data"] = [legal[0], legal[0] | 1 << decode, legal[1]]
    trace = simulate(lambda: PqAttention(p), "pq", play, simulator="icarus")
    out = np.array(trace.transfers["out"]["data"], np.uint32).reshape(2, -1)
    np.testing.assert_array_equal(out, np.repeat(golden_outputs(p, k, v, q, tables)["out"], 2, 0).view(np.uint32))
    assert trace.status["error"] == 1 and trace.status["busy"] == 0


DECODE_FAULTS = {
    "one scale for keys and values": ("Mux(store, prepared.value_scale, prepared.key_scale)", "prepared.key_scale"),
    "codes of values are looked up among the keys": ("decoder.store.eq(store)", "decoder.store.eq(0)"),
    "tables are scanned as well": ("softmax.go.eq(coded)", "softmax.go.eq(coded | decoded)"),
    "the values' codebook never comes": ("asks_centroids.eq(decoded & command.values)", "asks_centroids.eq(0)"),
    "decoded rows are left out": ("row_merge.decodes.eq(decoded)", "row_merge.decodes.eq(0)"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name.startswith("one") else pytest.mark.long) for name in DECODE_FAULTS]
)
def test_a_fault_of_the_decode_mode_is_seen(name):
    factory = mutant(PqAttention, *DECODE_FAULTS[name])
    try:
        out, want, *_ = play_modes(
            DECODING, 24, ["decode", "table"], factory=factory, simulator="icarus", timeout_cycles=4000
        )
        same = np.array_equal(out, want)
    except (SimulationError, AssertionError):
        same = False
    assert not same


@pytest.mark.parametrize(
    "p",
    [
        PqParameters(),
        PACKED.model_copy(update={"decode_tokens": 64}),
        WINDOWS.model_copy(update={"heads": 3, "q_parallel": 3}),
    ],
)
def test_every_tool_is_silent(p, tmp_path):
    (tmp_path / "pq.sv").write_text(emit(PqAttention(p), "pq").verilog)
    assert lint(tmp_path, "pq.sv", top="pq") == ""
    result = yosys(tmp_path, "read_verilog -sv pq.sv; hierarchy -check -top pq; proc; check -assert")
    assert result.returncode == 0, result.stderr


def given(**changes):
    """A legal case, with arrays replaced, or taken out where None is given."""
    rng = np.random.default_rng(SEED)
    arrays = {name: rng.standard_normal((n, 16)).astype(np.float16) for name, n in (("k", 20), ("v", 20), ("q", 2))}
    arrays |= {f"codebook_{name}": np.zeros((8, 16, 2), np.int8) for name in "kv"}
    arrays |= {f"codebook_{name}_scale": np.ones(1, np.float16) for name in "kv"}
    return {name: value for name, value in (arrays | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": None}, "array k: missing"),
        ({"q": np.zeros((2, 15), np.float16)}, "array q"),
        ({"v": np.zeros((19, 16), np.float16)}, "array v"),
        ({"q": np.zeros((0, 16), np.float16)}, "no length of zero"),
        ({"k": np.zeros((20, 16), np.float32)}, "array k: dtype float32"),
        ({"codebook_k_scale": None}, "codebook_k: given without codebook_k_scale"),
        ({"codebook_v": None}, "codebook_v_scale: given without codebook_v"),
        ({"v": None}, "codebook_v: given without v"),
        ({"codebook_k_scale": np.ones(2, np.float16)}, "array codebook_k_scale"),
        ({"codebook_k_scale": np.array([-1], np.float16)}, "codebook_k_scale[0] = -1.0"),
        ({"codebook_v_scale": np.array([np.nan], np.float16)}, "codebook_v_scale[0] = nan"),
        ({"codebook_v": np.zeros((4, 16, 4), np.int8)}, "array codebook_v: (4, 16, 4); legal is (8, 16, 2)"),
        ({f"codebook_{n}": np.zeros((8, 17, 2), np.int8) for n in "kv"}, "17 centroids"),
        ({f"codebook_{n}": np.zeros((8, 512, 2), np.int8) for n in "kv"}, "512 centroids"),
        ({f"codebook_{n}": np.zeros((7, 16, 2), np.int8) for n in "kv"}, "d/M in 1, 2, 4, 8 and d = 16"),
        ({f"codebook_{n}": np.zeros((1, 16, 16), np.int8) for n in "kv"}, "d/M in 1, 2, 4, 8 and d = 16"),
        ({"mean": np.full(16, np.inf, np.float16)}, "mean[0] = inf"),
        ({"recent": np.array(-1)}, "recent = -1"),
        ({"sinks": np.array(1.5)}, "array sinks: dtype float64"),
        ({"codes": np.zeros(3, np.uint8)}, "array codes: unknown"),
        ({"mode": np.array("tables")}, "array mode: tables; legal is one of table, decode"),
        ({"mode": np.array(1)}, "array mode: dtype int64"),
    ],
)
def test_case_22_illegal_arrays_are_refused(changes, words):
    with pytest.raises(InputError) as caught:
        BLOCK.simulate(given(**changes), simulator="icarus")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("capacity=8", "array k: 20 tokens"),
        ("decode_tokens=19", "decode_tokens = 19: legal with 20 coded tokens is 20 or more"),
        ("decode_tokens=513", "decode_tokens = 513: legal is 0 to capacity = 512"),
        ("lanes=3", "lanes = 3"),
        ("nbits=9", "nbits = 9"),
        ("batch=3", "batch = 3"),
        ("group=12", "group = 12: legal in a product-quantised cache are multiples of lanes = 8"),
    ],
)
def test_illegal_settings_are_refused(setting, words):
    arrays = {name: value for name, value in given(mode=np.array("decode")).items() if "codebook" not in name}
    with pytest.raises(InputError) as caught:
        BLOCK.simulate(arrays, overrides=["group=8", setting], simulator="icarus")
    assert words in str(caught.value)


def test_a_difference_is_reported(monkeypatch):
    def wrong(*arguments, **options):
        outputs = golden_outputs(*arguments, **options)
        outputs["scores"][1, 3] += 1
        return outputs

    monkeypatch.setattr("kvant.pq.golden_outputs", wrong)
    settings = ["port_bits=64", "lanes=4", "batch=4", "group=16", "capacity=64"]
    with pytest.raises(ComparisonError, match=r"scores\[1, 3\]"):
        BLOCK.simulate(given(), overrides=settings, simulator="icarus")


def test_codebooks_are_trained_where_none_are_given():
    arrays = {name: value for name, value in given().items() if "codebook" not in name}
    settings = ["port_bits=64", "lanes=4", "batch=4", "group=16", "capacity=64", "nbits=4"]
    result = BLOCK.simulate(arrays, overrides=settings, simulator="icarus", seed=1)
    assert result["codebook_k"].shape == (8, 16, 2) and result["codebook_v_scale"].shape == (1,)
    again = BLOCK.simulate(arrays | {name: result[name] for name in result if "codebook" in name},
                           overrides=settings, simulator="icarus", seed=2)  # fmt: skip
    np.testing.assert_array_equal(again["out"], result["out"])


def test_scores_alone_of_tokens_none_of_which_is_coded():
    """Nothing comes out at all; scores are 0."""
    rng = np.random.default_rng(SEED)
    arrays = {name: rng.standard_normal((n, 16)).astype(np.float16) for name, n in (("k", 3), ("q", 2))}
    settings = ["port_bits=64", "lanes=4", "batch=4", "group=16", "capacity=64", "nbits=4", "recent=5"]
    result = BLOCK.simulate(arrays, overrides=settings, simulator="icarus")
    assert set(result) >= {"k_codes", "scores", "codebook_k"} and not {"out", "v_codes"} & set(result)
    assert not result["scores"].any() and not result["k_codes"].any()


def test_the_decode_mode_of_a_user():
    """Outputs, and scores by tables behind them, are compared within; the decoder is as long as the history."""
    arrays = given(mode=np.array("decode"))
    settings = ["port_bits=64", "lanes=4", "batch=4", "group=16", "capacity=64", "q_parallel=2"]
    decoded = BLOCK.simulate(arrays, overrides=settings, simulator="icarus")
    assert decoded["scores"].shape == (2, 20) and not decoded["error"]


def test_the_seed_of_the_pauses_changes_no_codebook():
    arrays = {name: value for name, value in given().items() if "codebook" not in name}
    settings = ["port_bits=64", "lanes=4", "batch=4", "group=16", "capacity=64", "nbits=4"]
    one, other = (
        BLOCK.simulate(arrays, overrides=settings, simulator="icarus", stall=stall, seed=seed)
        for stall, seed in ((0.0, 0), (0.5, 1 << 70))
    )
    for name in one.keys() - {"cycles", "busy_cycles"}:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
