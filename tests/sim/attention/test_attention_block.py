"""The block `attention`: the engine's outputs bit for bit, users' tensors through caches and engine, refusals."""

import numpy as np
import pytest
from amaranth.hdl import Module
from verilog_checks import lint, yosys

from kvant.attention import BLOCK, attend_golden, contents_of, golden_caches
from kvant.cache_arrays import Table
from kvant.errors import ComparisonError, InputError
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS
from kvant.hw.attention.engine import AttentionEngine, attention_command
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.emit import emit
from kvant.sim.attention import engine
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset
from kvant.sim.words import struct_word
from kvant.simulated import compare

SEED = 20261130
TABLE = Table(DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS)
MANT, INT8 = ("mant", "mant"), ("int8", "int8")
TINY = AttentionParameters(group=8, head_dim=16, sinks=3, capacity=64, rows=4, cols=2, lanes=4, queries=2)
SETTINGS = ("group=8", "capacity=64", "rows=4", "cols=2", "lanes=4", "queries=2")
PQ_SETTINGS = ("group=16", "capacity=64", "lanes=4", "nbits=4", "batch=4", "port_bits=64")

TIME = TINY.model_copy(update={"time_keys": True})
TIME_FORMATS = ("mant_time", "mant")

COMMANDS = [
    (1, MANT, {}),
    (2, MANT, {}),
    (13, ("int8", "mant"), {}),
    (8, MANT, {}),
    (64, MANT, {}),
    (3, ("int8", "mant"), {}),
    (21, ("mant", "int8"), {}),
    (37, MANT, {"end": [37, 20], "first": [0, 5]}),
    (37, MANT, {"end": [0, 3], "first": [0, 2]}),
    (33, MANT, {"slope": [0, 0.02]}),
    (33, INT8, {"slope": [6e4, 0.02], "end": [20, 8]}),
    (13, MANT, {}),
]
"""Tokens, formats and limits: windows that are full and open, sinks in the open one, queries that see nothing."""

TIME_COMMANDS = [
    (2, TIME_FORMATS, {}),
    (16, TIME_FORMATS, {}),
    (13, MANT, {}),
    (13, TIME_FORMATS, {}),
    (64, TIME_FORMATS, {"slope": [0, 0.02]}),
    (21, ("mant_time", "int8"), {"end": [21, 9], "first": [0, 5]}),
    (9, INT8, {}),
    (45, TIME_FORMATS, {"end": [0, 40]}),
]
"""Open windows alone and none, sinks alone, more windows than fit in the buffers, other keys between."""


def played(p, commands, *, huge=False):
    """Commands for the engine, and the golden outputs."""
    attends, outs, empties = [], [], []
    for number, (tokens, formats, limits) in enumerate(commands):
        rng = np.random.default_rng((SEED, number))
        k, v, q = (rng.standard_normal((n, p.head_dim)) for n in (tokens, tokens, p.queries))
        if huge:
            k[:, 5], v[:, 6], q[:, 7], k[1::3], v[2::4] = 1e4, 6e4, -1e4, 0, 6e-8
            q[0, number], q[1, 3:5] = np.nan, (np.inf, -np.inf)
        k, v, q = (x.astype(np.float16) for x in (k, v, 2 * q))
        options = {name: np.array(value, np.float16 if name == "slope" else np.int64) for name, value in limits.items()}
        caches = golden_caches(p, k, v, formats, (TABLE, TABLE))
        golden = attend_golden(p, q, caches, **options)
        attends.append(engine.Attend(contents_of(p, caches), q, **options))
        outs.append(golden.out.numpy())
        empties.append(golden.empty.numpy().astype(np.int64))
    return attends, {"out": np.concatenate(outs), "empty": np.concatenate(empties)}


@pytest.mark.parametrize(
    ("simulator", "stall"), [("icarus", 0.0), ("icarus", 0.3), ("icarus", 0.9), ("verilator", 0.3)]
)
def test_commands_of_every_kind_after_each_other(simulator, stall):
    attends, golden = played(TINY, COMMANDS)
    result = engine.run(TINY, attends, simulator=simulator, stall=stall, seed=3)
    compare(golden, result)
    assert int(result["error"]) == int(result["nonfinite"]) == 0
    assert 0 < int(result["busy_cycles"]) < int(result["cycles"])


def test_huge_channels_zeros_subnormal_numbers_and_what_is_none():
    attends, golden = played(TINY, COMMANDS, huge=True)
    result = engine.run(TINY, attends, simulator="icarus", stall=0.3)
    compare(golden, result)
    assert int(result["error"]) == 0 and int(result["nonfinite"]) == 1
    assert np.isfinite(result["out"]).all()


@pytest.mark.parametrize(
    ("simulator", "stall"), [("icarus", 0.0), ("icarus", 0.3), ("icarus", 0.9), ("verilator", 0.3)]
)
def test_keys_along_time_of_every_length(simulator, stall):
    attends, golden = played(TIME, TIME_COMMANDS)
    result = engine.run(TIME, attends, simulator=simulator, stall=stall, seed=3)
    compare(golden, result)
    assert int(result["error"]) == int(result["nonfinite"]) == 0


def test_keys_along_time_with_huge_channels_and_what_is_no_number():
    attends, golden = played(TIME, TIME_COMMANDS, huge=True)
    result = engine.run(TIME, attends, simulator="icarus", stall=0.3, reset=Reset(again_at=700))
    compare(golden, result)
    assert int(result["error"]) == 0 and int(result["nonfinite"]) == 1
    assert np.isfinite(result["out"]).all()


def test_keys_along_time_are_refused_where_they_are_not_built():
    attends, golden = played(TINY, COMMANDS[3:4])
    play = engine.stimulus(TINY, attends)
    legal = play.inputs["cmd"]["data"]
    good = {"queries": 2, "tokens": 8, "sinks": 3, "int8_values": 0, "head": 0}
    for p, wrong in ((TINY, (2, 3)), (TIME, (3,))):
        words = [struct_word(attention_command(p), good | {"key_format": key_format}) for key_format in wrong]
        play.inputs["cmd"]["data"] = [*words, legal[0]]
        trace = simulate(
            lambda p=p: AttentionEngine(p), "attention", play, simulator="icarus", design_key=("attention", p)
        )
        compare(golden, engine.collect(p, trace))
        assert trace.status["error"] == 1


@pytest.mark.parametrize(
    ("place", "value"), [(0, b"\x00\xfc"), (-16 + 4, b"\x80")], ids=["static scale", "coefficient"]
)
def test_illegal_numbers_of_keys_along_time_raise_error(place, value, monkeypatch):
    attends, _ = played(TIME, [(8, ("mant_time", "int8"), {})])
    original = engine.key_bytes

    def damaged(p, contents):
        text = bytearray(original(p, contents))
        text[place : len(text) + place + len(value) if place < 0 else place + len(value)] = value
        return bytes(text)

    monkeypatch.setattr(engine, "key_bytes", damaged)
    assert int(engine.run(TIME, attends, simulator="icarus")["error"]) == 1


def test_a_fault_in_the_offsets_is_seen(monkeypatch):
    attends, golden = played(TIME, TIME_COMMANDS[1:2])
    monkeypatch.setattr("kvant.hw.attention.score_softmax.OffsetAddends.elaborate", lambda self, platform: Module())
    trace = engine.play(TIME, attends, simulator="amaranth", design_key="without offsets")
    with pytest.raises(ComparisonError, match=r"^out\["):
        compare(golden, engine.collect(TIME, trace))


@pytest.mark.parametrize("again_at", [333, pytest.param(40, marks=pytest.mark.long)])
def test_a_reset_in_the_middle_forgets_everything(again_at):
    attends, golden = played(TINY, COMMANDS[4:8])
    result = engine.run(TINY, attends, simulator="icarus", reset=Reset(again_at=again_at))
    compare(golden, result)
    assert int(result["error"]) == 0


def test_commands_out_of_range_are_dropped_and_raise_error():
    p = TINY
    attends, golden = played(p, COMMANDS[3:5])
    play = engine.stimulus(p, attends)
    legal = play.inputs["cmd"]["data"]
    good = {"queries": 2, "tokens": 8, "sinks": 3, "key_format": 0, "int8_values": 0, "head": 0}
    changes = ({"queries": 0}, {"queries": 3}, {"tokens": 0}, {"tokens": 65}, {"sinks": 4}, {"tokens": 2})
    words = [struct_word(attention_command(p), good | change) for change in changes]
    play.inputs["cmd"]["data"] = [*words[:3], legal[0], *words[3:], legal[1]]
    trace = simulate(lambda: AttentionEngine(p), "attention", play, simulator="icarus", design_key=("attention", p))
    compare(golden, engine.collect(p, trace))
    assert trace.status["error"] == 1
    play.inputs["cmd"]["data"] = [legal[0], words[0], legal[1]]
    trace = simulate(lambda: AttentionEngine(p), "attention", play, simulator="icarus", design_key=("attention", p))
    assert trace.status["error"] == 1


@pytest.mark.long
def test_other_hardware_is_seen():
    """One plane of weights where the model has two."""
    attends, golden = played(TINY, COMMANDS[:5])
    other = TINY.model_copy(update={"weight_planes": 1})
    with pytest.raises(ComparisonError, match=r"^out\["):
        compare(golden, engine.run(other, attends, simulator="icarus"))
    compare(played(other, COMMANDS[:5])[1], engine.run(other, attends, simulator="icarus"))


@pytest.mark.parametrize(
    "p",
    [TINY, TIME, pytest.param(AttentionParameters(sinks=4), marks=pytest.mark.long)],
    ids=["tiny", "time", "default"],
)
def test_every_tool_is_silent(p, tmp_path):
    (tmp_path / "attention.sv").write_text(emit(AttentionEngine(p), "attention").verilog)
    assert lint(tmp_path, "attention.sv", top="attention") == ""
    result = yosys(tmp_path, "read_verilog -sv attention.sv; hierarchy -check -top attention; proc; check -assert")
    assert result.returncode == 0, result.stderr


def given(*, tokens=13, queries=(2,), heads=1, d=16, formats=MANT, **changes):
    """A user's case, with arrays replaced, or taken out where None is given."""
    rng = np.random.default_rng((SEED, tokens))
    shapes = {"q": (*queries, d), "k": (heads, tokens, d), "v": (heads, tokens, d)}
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    arrays |= {"format_k": np.array(formats[0]), "format_v": np.array(formats[1])}
    return {name: value for name, value in (arrays | changes).items() if value is not None}


def float64_attention(result):
    """Attention over what the result says was used; query i of Tq sees the keys 0 .. T - Tq + i."""
    q, k, v = (result[name].astype(np.float64) for name in ("q_used", "k_used", "v_used"))
    rows = q.reshape(-1, *q.shape[-2:])
    out = np.zeros(rows.shape)
    for i, h in np.ndindex(rows.shape[:2]):
        head, seen = h * len(k) // rows.shape[1], max(0, k.shape[1] - len(rows) + i + 1)
        if seen:
            scores = k[head, :seen] @ rows[i, h] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ v[head, :seen] / weights.sum()
    return out.reshape(q.shape)


def check(arrays, settings=SETTINGS, **options):
    """The block's result, which is near float64 attention; RTL and golden model are compared on the way."""
    result = BLOCK.simulate(arrays, overrides=settings, **({"simulator": "icarus"} | options))
    exact = float64_attention(result)
    miss = np.linalg.norm(result["out"] - exact, axis=-1)
    bound = 2.0**-5 if arrays["format_k"] == "mant_time" else 2.0**-6
    assert (miss <= bound * np.linalg.norm(exact, axis=-1)).all()
    kv = arrays["k"].shape
    shapes = {"out": arrays["q"].shape, "q_used": arrays["q"].shape, "k_used": kv, "v_used": kv}
    numbers = ("cycles", "busy_cycles", "group", "rows", "cols", "lanes", "nonfinite", "error")
    assert set(result) == {*shapes, *numbers}
    for name, shape in shapes.items():
        assert (result[name].dtype, result[name].shape) == (np.float32, shape), name
    for name in numbers:
        assert (result[name].dtype, result[name].shape) == (np.int64, ()), name
    assert int(result["error"]) == 0
    return result


@pytest.mark.long
@pytest.mark.parametrize("formats", [MANT, INT8, ("int8", "mant"), ("mant", "int8")])
def test_grouped_queries_over_several_heads(formats):
    result = check(given(tokens=21, queries=(9,), heads=3, formats=formats, sinks=np.array(3)), stall=0.2, seed=1)
    shape = {name: int(result[name]) for name in ("group", "rows", "cols", "lanes")}
    assert shape == {"group": 8, "rows": 4, "cols": 2, "lanes": 8}


def test_query_tokens_see_the_keys_before_them_and_tables_belong_to_heads():
    """Two query tokens of 6 heads; tables, means and floors of their own for each of 2 KV heads."""
    rng = np.random.default_rng(SEED)
    tables = {
        "coeffs_k": np.array([[5, 60, 255], [0, 17, 120]], np.uint8),
        "thresholds_k": np.array([[3000, 9000], [500, 12000]], np.uint16),
        "coeffs_v": np.array([[40], [255]], np.uint8),
        "thresholds_v": np.zeros((2, 0), np.uint16),
        "mean": rng.standard_normal((2, 16)).astype(np.float16),
        "floor": rng.random((2, 16)).astype(np.float16),
        "statistic": np.array("moment"),
    }
    check(given(tokens=19, queries=(2, 6), heads=2, **tables))


@pytest.mark.parametrize("tokens", [19, pytest.param(16, marks=pytest.mark.long)])
def test_keys_along_time_come_from_their_cache(tokens):
    """Two query tokens of 6 heads, keys of 2 heads with means and tables of their own, drifting; sinks."""
    rng = np.random.default_rng(SEED)
    drift = np.sin(np.arange(tokens) / 9)[:, None] * rng.standard_normal((2, 1, 16)) * 3
    more = {
        "k": (rng.standard_normal((2, tokens, 16)) + drift).astype(np.float16),
        "coeffs_k": np.array([[5, 60, 255], [0, 17, 120]], np.uint8),
        "thresholds_k": np.array([[3000, 9000], [500, 12000]], np.uint16),
        "mean": rng.standard_normal((2, 16)).astype(np.float16),
        "sinks": np.array(2),
    }
    check(given(tokens=tokens, queries=(2, 6), heads=2, formats=TIME_FORMATS, **more))


@pytest.mark.long
def test_more_query_tokens_than_keys():
    result = check(given(tokens=2, queries=(4, 1)))
    assert not result["out"][:2].any() and result["out"][2:].any(axis=-1).all()


@pytest.mark.long
@pytest.mark.parametrize(
    ("arrays", "settings"),
    [
        (given(tokens=333, queries=(9,), heads=3, d=64, sinks=np.array(4)), ()),
        (given(tokens=129, queries=(2, 4), heads=2, d=128), ("queries=4",)),
        (given(tokens=65, queries=(2,), d=64, formats=INT8), ()),
        (given(tokens=100, queries=(3,), d=64, group=np.array(32)), ("port_bits=64",)),
        (given(tokens=333, queries=(9,), heads=3, d=64, formats=TIME_FORMATS, sinks=np.array(4)), ()),
        (given(tokens=200, queries=(2, 4), heads=2, d=128, formats=TIME_FORMATS), ("queries=4", "quant_lanes=2")),
    ],
    ids=["default", "two-groups", "int8", "group-32", "time", "time-two-groups"],
)
@pytest.mark.parametrize("stall", [0.0, 0.3])
def test_full_size_on_verilator(arrays, settings, stall):
    check(arrays, settings, simulator="verilator", stall=stall)


@pytest.mark.long
@pytest.mark.parametrize(("queries", "recent"), [((4,), 4), ((2, 2), 0)])
def test_product_quantised_heads(queries, recent):
    arrays = given(
        tokens=20, queries=queries, heads=2, formats=("pq", "pq"), recent=np.array(recent), sinks=np.array(2)
    )
    result = check(arrays, PQ_SETTINGS, simulator="verilator")
    assert [int(result[name]) for name in ("group", "rows", "cols", "lanes")] == [16, 1, 4, 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": None}, "array q: missing"),
        ({"format_k": None}, "array format_k: missing"),
        ({"format_v": np.array(1)}, "array format_v: dtype int64"),
        ({"format_v": np.array("fp16")}, "format_v = 'fp16': legal is one of mant, int8, pq"),
        ({"format_v": np.array("mant_time")}, "format_v = 'mant_time': legal is one of mant, int8, pq"),
        ({"format_k": np.array("fp8")}, "format_k = 'fp8': legal is one of mant, mant_time, int8, pq"),
        ({"format_v": np.array("pq")}, "format_v = 'pq' with format_k = 'mant': legal is pq for both or for none"),
        ({"q": np.zeros((2, 15), np.float16)}, "array q: shape (2, 15)"),
        ({"q": np.zeros((0, 16), np.float16)}, "no length of zero"),
        ({"q": np.zeros((2, 2, 2, 16), np.float16)}, "array q: shape (2, 2, 2, 16)"),
        ({"q": np.zeros((2, 16), np.float32)}, "array q: dtype float32"),
        ({"k": np.zeros((2, 13, 16), np.float16)}, "array v: shape (1, 13, 16)"),
        ({"v": np.zeros((1, 12, 16), np.float16)}, "array v: shape (1, 12, 16)"),
        ({n: np.zeros((3, 13, 16), np.float16) for n in "kv"}, "Hq = 2 query heads; legal are the multiples of Hkv ="),
        ({n: np.zeros((1, 65, 16), np.float16) for n in "kv"}, "array k: 65 tokens; legal is 1 to capacity = 64"),
        ({"coeffs_k": np.zeros((1, 2), np.uint8)}, "array coeffs_k: given without thresholds_k"),
        ({"thresholds_v": np.zeros((1, 2), np.uint16)}, "array thresholds_v: given without coeffs_v"),
        (
            {"coeffs_k": np.zeros((1, 3), np.uint8), "thresholds_k": np.zeros((1, 3), np.uint16)},
            "array thresholds_k: shape (1, 3)",
        ),
        (
            {"coeffs_v": np.zeros((1, 3), np.uint8), "thresholds_v": np.array([[2, 1]], np.uint16)},
            "KV head 0, arrays coeffs_v and thresholds_v: thresholds[1] = 1: legal is 2",
        ),
        (
            {"coeffs_k": np.array([[5, 200]], np.uint8), "thresholds_k": np.array([[9]], np.uint16)},
            "KV head 0, arrays coeffs_k and thresholds_k: coeffs[1] = 200: legal is 0 to 127",
        ),
        ({"mean": np.zeros(16, np.float16)}, "array mean: shape (16,)"),
        ({"mean": np.full((1, 16), np.nan, np.float16)}, "mean[0][0] = nan"),
        ({"floor": np.full((1, 16), -1, np.float16)}, "floor[0][0] = -1.0: legal is a finite value of at least 0"),
        (
            {"format_v": np.array("int8"), "floor": np.zeros((1, 16), np.float16)},
            "array floor: no effect with format_v = int8; legal with mant",
        ),
        (
            {"codebook_k": np.zeros((1, 8, 16, 2), np.int8), "codebook_k_scale": np.ones((1, 1), np.float16)},
            "array codebook_k: no effect with format_k = mant; legal with pq",
        ),
        ({"sinks": np.array(1.5)}, "array sinks: dtype float64"),
        ({"group": np.array(4)}, "group = 4: legal in a cache are the powers of two from 8"),
        ({"group": np.array(8), **{n: np.zeros(s, np.float16) for n, s in
                                   (("q", (1, 20)), ("k", (1, 3, 20)), ("v", (1, 3, 20)))}}, "head_dim = 20"),
        ({"calls": np.array([13], np.int32)}, "array calls: unknown"),
    ],
)  # fmt: skip
def test_illegal_arrays_are_refused(changes, words):
    with pytest.raises(InputError) as caught:
        BLOCK.simulate(given(**changes), overrides=SETTINGS, simulator="icarus")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("cols=3", "cols = 3: legal are numbers whose product with"),
        ("rows=3", "rows = 3: legal in attention are the powers of two"),
        ("port_bits=256", "port_bits = 256: legal in attention are 32, 64 and 128"),
        ("weight_planes=3", "weight_planes = 3"),
        ("queries=0", "queries = 0"),
        ("time_keys=maybe", "time_keys"),
    ],
)
def test_illegal_settings_are_refused(setting, words):
    with pytest.raises(InputError) as caught:
        BLOCK.simulate(given(), overrides=[*SETTINGS, setting], simulator="icarus")
    assert words in str(caught.value)


def test_query_tokens_and_a_recent_window_do_not_go_together():
    arrays = given(tokens=8, queries=(2, 1), formats=("pq", "pq"), recent=np.array(3))
    with pytest.raises(InputError, match=r"^array q: 2 tokens with recent = 3: legal with pq is one token"):
        BLOCK.simulate(arrays, overrides=PQ_SETTINGS, simulator="icarus")


def test_the_program_ends_with_the_right_codes(kvant, tmp_path):
    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    options = ("--data", source, "--out", target, "--simulator", "icarus")
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    np.savez(source, **given(format_k=np.array("fp8")))
    result = kvant("simulate", "attention", *options, *settings)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and not target.exists()
    np.savez(source, **given())
    result = kvant("simulate", "attention", *options, *settings)
    assert result.returncode == 0, result.stderr
    with np.load(target) as archive:
        assert archive["out"].shape == (2, 16)


def test_a_difference_is_reported(monkeypatch):
    def wrong(*arguments, **options):
        golden = attend_golden(*arguments, **options)
        golden.out[1, 3] += 1
        return golden

    monkeypatch.setattr("kvant.attention.attend_golden", wrong)
    with pytest.raises(ComparisonError, match=r"^out\[0, 1, 3\]"):
        BLOCK.simulate(given(), overrides=SETTINGS, simulator="icarus")
