"""INT8 rows in attention: largest logarithms, totals and block-floating sums against the golden model, bit for bit."""

import re

import numpy as np
import pytest
import torch
from amaranth.hdl import Shape

from kvant.golden.attention import softmax
from kvant.golden.attention.int8_rows import row_logarithms, weighted_rows
from kvant.golden.numeric.int8 import quantize_int8
from kvant.golden.numeric.rounding import fp16_to_bits
from kvant.hw.attention import block_sums, row_factor, scaler
from kvant.hw.attention import int8_rows as hardware
from kvant.hw.attention.block_sums import BlockSums
from kvant.hw.attention.int8_rows import Int8Job, Int8Rows
from kvant.hw.attention.row_scores import RowScores
from kvant.hw.emit import emit
from kvant.hw.parameters import ParameterError
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus
from tests.helpers.memory_collisions import asserted_memories
from tests.helpers.verilog_checks import lint, yosys

SEED = 3


def random_case(p, queries, rows, seed=SEED):
    """Quantised queries, keys and values: dict of tensors. Values of rows differ by powers of two."""
    rng = np.random.default_rng(seed)
    d = p.head_dim

    def half(*shape, spread=0.0):
        x = rng.normal(size=shape) * np.exp2(rng.normal(scale=spread, size=(shape[0], 1)))
        return torch.from_numpy(np.clip(x, -65504, 65504).astype(np.float16))

    q = quantize_int8(half(queries, d), d)
    case = {"q": q.q, "q_scale": q.scale[:, 0]}
    for name, spread in (("k", 1.0), ("v", 4.0)):
        groups = -(-d // p.group)
        if rows:
            quantized = quantize_int8(half(rows, d, spread=spread), p.group)
            case |= {name: quantized.q, f"{name}_scale": quantized.scale}
        else:
            case |= {name: torch.zeros((0, d), dtype=torch.int8)}
            case |= {f"{name}_scale": torch.zeros((0, groups), dtype=torch.float16)}
    return case


def extreme_case(p, queries, rows, seed=SEED):
    """Elements -128 and 127; scales 0, subnormal, largest."""
    rng = np.random.default_rng(seed)
    d, groups = p.head_dim, -(-p.head_dim // p.group)
    scales = np.array([0, 2**-24, 1023 * 2**-24, 2**-14, 0.125, 65504], np.float16)

    def pick(values, *shape):
        return torch.from_numpy(rng.choice(values, shape))

    ends = np.array([-128, -128, 127, 0, 1], np.int8)
    return {
        "q": pick(ends, queries, d),
        "q_scale": pick(scales, queries),
        "k": pick(ends, rows, d),
        "k_scale": pick(scales, rows, groups),
        "v": pick(ends, rows, d),
        "v_scale": pick(scales, rows, groups),
    }


def largest_case(p, queries, rows, seed=SEED):
    """Everything as large as it gets, negative elements: no sum may overflow."""
    case = extreme_case(p, queries, rows, seed)
    return {
        name: torch.full_like(tensor, 511.75 if tensor.is_floating_point() else -128) for name, tensor in case.items()
    }


def golden(p, case, above=0):
    """What the block has to give, with a reference *above* the largest z of the rows."""
    z = row_logarithms(case["q"], case["q_scale"], case["k"], case["k_scale"], group=p.group)
    largest = softmax.reference(z)
    reference = torch.clamp(largest + above, min=-(2**40))
    weights = softmax.weights(z, reference)
    sums = weighted_rows(weights, case["v"], case["v_scale"], group=p.group)
    return largest.tolist(), reference.tolist(), weights.sum(-1).tolist(), sums


def bits(value, shape):
    return int(value) & ((1 << Shape.cast(shape).width) - 1)


def packed(layout, **fields):
    return layout.const(fields).as_bits()


def transfers(p, elements, scales, garbage=77):
    """Elements of each transfer of a row, surplus lanes not 0, and the scale of its group."""
    padded = [*(int(value) for value in elements), *[garbage] * (p.row_transfers * p.lanes - p.head_dim)]
    for start in range(0, p.row_transfers * p.lanes, p.lanes):
        yield padded[start : start + p.lanes], int(scales[start // p.group])


def row_words(p, layout, rows, scales):
    words = []
    for number, (row, scale) in enumerate(zip(rows.tolist(), fp16_to_bits(scales).tolist(), strict=True)):
        parts = list(transfers(p, row, scale))
        for place, (part, own) in enumerate(parts):
            last = place == len(parts) - 1
            final = number == len(rows) - 1
            words.append(packed(layout, data=part, scale=own, last=last, final=final, empty=0))
    return words or [packed(layout, data=[5] * p.lanes, scale=99, last=1, final=1, empty=1)]


def stimulus(p, cases, reference, queries=None, rows=None):
    """Jobs QUERIES, KEYS, VALUES of each case in turn."""
    dut = Int8Rows(p, queries=queries, rows=rows)
    job, q, row = (stream.payload.shape() for stream in (dut.job, dut.q, dut.rows))
    jobs, q_words, words, outputs = [], [], [], 0
    for case in cases:
        count = len(case["q"])
        jobs += [packed(job, kind=kind, count=count) for kind in (Int8Job.QUERIES, Int8Job.KEYS, Int8Job.VALUES)]
        for vector, scale in zip(case["q"].tolist(), fp16_to_bits(case["q_scale"]).tolist(), strict=True):
            parts = list(transfers(p, vector, [scale] * p.head_dim, garbage=-128))
            for place, (part, own) in enumerate(parts):
                last = place == len(parts) - 1
                q_words.append(packed(q, data=part, scale=own if last else 0x7C00, last=last))
        words += row_words(p, row, case["k"], case["k_scale"]) + row_words(p, row, case["v"], case["v_scale"])
        outputs += count * p.row_transfers if len(case["k"]) else 0
    status = [f"{name}_{number}" for name in ("z_max", "total") for number in range(dut.queries)]
    return Stimulus(
        inputs={"job": {"data": jobs}, "q": {"data": q_words}, "rows": {"data": words}},
        expect={"o": outputs},
        status=[*status, "keys_done", "values_done", "empty", "busy", "error"],
        constants={f"reference_{k}": bits(value, 56) for k, value in enumerate(reference)},
    )


def signed_bits(value, width):
    return value - (1 << width) if value >> (width - 1) else value


def results(p, trace, cases, layout):
    """Of every case mantissas [B][d] and exponents [B][transfers]; order and end are checked on the way."""
    words, found = iter(trace.transfers["o"]["data"]), []
    for case in cases:
        if not len(case["k"]):
            found.append(([], []))
            continue
        mantissas, exponents = [], []
        for vector in range(len(case["q"])):
            row, places = [], []
            for transfer in range(p.row_transfers):
                word = layout.from_bits(next(words))
                last = vector == len(case["q"]) - 1 and transfer == p.row_transfers - 1
                assert (word.vector, word.last) == (vector, last)
                row += [word.data[lane] for lane in range(p.lanes)]
                places.append(word.exponent)
            mantissas.append(row[: p.head_dim])
            exponents.append(places)
        found.append((mantissas, exponents))
    return found


def play(p, cases, *, above=0, queries=None, rows=None, simulator="amaranth", **options):
    """Trace of the jobs of *cases*, sums found, sums that are right, status that is right."""
    right, reference = [], [-(2**50)] * (p.q_parallel if queries is None else queries)
    for case in cases:
        for k, value in enumerate(golden(p, case, above)[1]):
            reference[k] = max(reference[k], value)
    for case in cases:
        z = row_logarithms(case["q"], case["q_scale"], case["k"], case["k_scale"], group=p.group)
        weights = softmax.weights(z, torch.tensor(reference[: len(case["q"])]))
        sums = weighted_rows(weights, case["v"], case["v_scale"], group=p.group)
        assert above or not len(case["k"]) or (weights.sum(-1) > 1000).all(), "a case that tests nothing"
        groups = [transfer * p.lanes // p.group for transfer in range(p.row_transfers)]
        right.append((sums.mantissa.tolist(), sums.exponent[:, groups].tolist()) if len(case["k"]) else ([], []))
    status = {"keys_done": 0, "values_done": 1, "empty": int(not len(case["k"])), "busy": 0, "error": 0}
    for k, value in enumerate(softmax.reference(z).tolist()):
        status[f"z_max_{k}"] = bits(value, 56)
        status[f"total_{k}"] = int(weights[k].sum())
    trace = simulate(
        lambda: Int8Rows(p, queries=queries, rows=rows),
        "int8_rows",
        stimulus(p, cases, reference, queries, rows),
        simulator=simulator,
        **options,
    )
    layout = hardware.row_sums(p, queries=queries, rows=rows)
    return trace, results(p, trace, cases, layout), right, status


def check(p, cases, **options):
    """Play and compare; the trace."""
    trace, found, right, status = play(p, cases, **options)
    assert found == right
    assert {name: trace.status[name] for name in status} == status
    return trace


SMALL = {"recent": 4, "sinks": 2, "batch": 1, "port_bits": 64}
SHAPES = [
    {"head_dim": 32, "lanes": 4, "group": 32},  # one group, rows without a bubble
    {"head_dim": 40, "lanes": 8, "group": 16},  # the last group is one transfer
    {"head_dim": 20, "lanes": 8, "group": 8},  # a group of half a transfer, groups of one transfer
    {"head_dim": 6, "lanes": 8, "group": 64},  # a row of less than a transfer
    {"head_dim": 12, "lanes": 1, "group": 5},
    {"head_dim": 16, "lanes": 16, "group": 8, "subspace": 2},
]


@pytest.mark.parametrize("make", [random_case, extreme_case])
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_results_are_those_of_the_golden_model(shape, make):
    p = PqParameters(**SMALL, **shape, q_parallel=3)
    if make is extreme_case:  # one alone: the reference of others would leave no weight
        check(p, [make(p, 3, 8)])
    else:
        check(p, [make(p, queries, 5, seed) for seed, queries in enumerate((1, 2, 3))])


def test_a_block_for_one_query_gives_the_same():
    p = PqParameters(**SMALL, head_dim=20, lanes=8, group=8)
    check(p, [random_case(p, 1, 5, seed) for seed in range(3)])


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_the_largest_results_fit(shape):
    """As many rows as there is room for, all of them -128 and with the largest weight."""
    p = PqParameters(**SMALL, **shape, q_parallel=2)
    most = hardware.default_rows(p)
    check(p, [largest_case(p, 2, most)])
    right = golden(p, largest_case(p, 2, most))[3]
    assert (right.mantissa < 0).all()  # -128 * -128 in the scores, -128 in the values
    assert int(right.mantissa.abs().max()).bit_length() == block_sums.sum_width(most) - 1


@pytest.mark.parametrize("above", [12345, 24 << 16, 26 << 16, 2**50])
def test_the_reference_may_lie_above_all_rows(above):
    """Coded keys may have the largest logarithm: down to weights of 0, with which no row counts."""
    p = PqParameters(**SMALL, head_dim=24, lanes=8, group=16)
    check(p, [random_case(p, 1, 5)], above=above)


def test_one_row_and_as_many_as_there_is_room_for():
    p = PqParameters(**SMALL, head_dim=24, lanes=8, group=8, q_parallel=2)
    check(p, [random_case(p, 2, rows, seed=rows) for rows in (1, 2, hardware.default_rows(p), 1)])
    check(p, [random_case(p, 2, 40)], rows=40)


def test_no_rows_are_answered_at_once():
    p = PqParameters(**SMALL, head_dim=24, lanes=8, group=8, q_parallel=2)
    trace = check(p, [random_case(p, 2, 0)])
    assert trace.cycles["rows"][0] - trace.cycles["job"][1] == 1
    assert trace.cycles["job"][2] - trace.cycles["rows"][0] == 1
    assert trace.status["z_max_1"] == bits(softmax.NO_KEY, 56) and trace.status["total_1"] == 0


@pytest.mark.parametrize("stall", [0.0, 0.3])
def test_jobs_follow_each_other_and_leave_nothing_behind(stall):
    """Heads with fewer queries than there is room for, with more and fewer rows, and with none."""
    p = PqParameters(**SMALL, head_dim=24, lanes=8, group=16)
    cases = [random_case(p, 3, 5, 1), random_case(p, 1, 2, 2), random_case(p, 2, 0, 3), random_case(p, 3, 4, 4)]
    cases += [random_case(p, 3, 0, 5), random_case(p, 3, 6, 6)]
    check(p, cases, queries=3, stall=stall)
    check(p, [random_case(p, 3, 5, 1), random_case(p, 3, 0, 5)], queries=3, stall=stall)


@pytest.mark.parametrize(
    "stall",
    [0.3, 0.9, {"rows": [0] * 3 + [1] * 40, "o": "after_valid"}, {"rows": [0, 1], "o": [1] * 200 + [0] * 20}],
    ids=str,
)
def test_stalls_change_no_result(stall):
    p = PqParameters(**SMALL, head_dim=8, lanes=4, group=4)
    cases = [random_case(p, queries, 6, seed) for seed in range(3) for queries in (2, 1)]
    check(p, cases, queries=2, stall=stall)


@pytest.mark.parametrize("again_at", [3, 40, 75, 110])
def test_reset_in_the_middle_equals_a_cold_start(again_at):
    p = PqParameters(**SMALL, head_dim=8, lanes=4, group=4, q_parallel=2)
    cold = check(p, [random_case(p, 2, 6)])
    assert cold.cycles["o"][0] > 110
    again = check(p, [random_case(p, 2, 6)], reset=Reset(again_at=again_at, hold_valid=again_at == 40))
    assert again.transfers == cold.transfers


def test_rows_follow_each_other_without_a_bubble_and_latencies_are_those_stated():
    p = PqParameters(**SMALL, head_dim=64, lanes=8, group=64)
    for queries in (1, 3):
        trace = check(p, [random_case(p, queries, 8)], queries=queries)
        taken = np.array(trace.cycles["rows"])
        assert np.diff(taken[:64]).tolist() == [queries] * 63 == np.diff(taken[64:]).tolist()
        keys, values = taken[63], taken[127]
        dut = Int8Rows(p, queries=queries)
        # The job of the values is taken as soon as that of the keys is through.
        assert trace.cycles["job"][2] - keys == dut.key_latency + queries - 1
        assert trace.cycles["o"][0] - values == dut.value_latency + queries - 1
        assert np.diff(trace.cycles["o"]).tolist() == [2] * (8 * queries - 1)


@pytest.mark.parametrize(
    ("shape", "queries", "cycles"),
    [
        ({"head_dim": 8, "lanes": 8, "group": 8}, 3, 7),
        ({"head_dim": 32, "lanes": 8, "group": 32}, 1, 8),
        ({"head_dim": 128, "lanes": 8, "group": 64}, 1, 16),
        ({"head_dim": 80, "lanes": 16, "group": 64}, 1, 10),
        ({"head_dim": 64, "lanes": 8, "group": 8}, 1, 8),
    ],
    ids=str,
)
def test_cycles_per_row_are_those_documented(shape, queries, cycles):
    p = PqParameters(**SMALL, **shape)
    trace = check(p, [random_case(p, queries, 6)], queries=queries)
    firsts = np.array(trace.cycles["rows"])[:: p.row_transfers]
    assert np.diff(firsts[1:6]).tolist() == np.diff(firsts[7:]).tolist() == [cycles] * 4


def test_memories_are_never_read_and_written_at_one_address():
    for shape in (SHAPES[2], SHAPES[3]):
        p = PqParameters(**SMALL, **shape)
        with asserted_memories() as watched:
            check(p, [random_case(p, 2, 6), random_case(p, 1, 6)], queries=2)
        assert len(watched) == 5  # queries, logarithms, sums, two delay lines


@pytest.mark.parametrize("fault", ["too many rows", "other rows", "last too early", "last missing", "query too long"])
def test_what_breaks_the_protocol_raises_error(fault):
    p = PqParameters(**SMALL, head_dim=16, lanes=8, group=8)
    good = random_case(p, 1, 4)
    assert (
        simulate(lambda: Int8Rows(p), "int8_rows", stimulus(p, [good], [2**40]), simulator="amaranth").status["error"]
        == 0
    )
    case = dict(random_case(p, 1, 9)) if fault == "too many rows" else dict(good)
    if fault == "other rows":
        case |= {"v": case["v"][:3], "v_scale": case["v_scale"][:3]}
    made = stimulus(p, [case], [2**40])
    words, q_words = made.inputs["rows"]["data"], made.inputs["q"]["data"]
    last = 1 << (8 * p.lanes + 16)
    if fault == "last too early":
        words[0] |= last
    elif fault == "last missing":
        words[1] ^= last
    elif fault == "query too long":
        q_words[1] ^= last
    trace = simulate(lambda: Int8Rows(p), "int8_rows", made, simulator="amaranth")
    assert trace.status["error"] == 1 and trace.status["busy"] == 0


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        (SHAPES[5], {}, "group = 8: legal in a product-quantised cache are multiples of lanes = 16"),
        ({"head_dim": 64, "lanes": 6}, {}, "lanes = 6: legal in a product-quantised cache are the powers of two"),
        ({}, {"queries": 0}, "queries = 0: legal is an integer from 1 to 64"),
        ({}, {"rows": 0}, "rows = 0: legal is an integer from 1"),
    ],
    ids=str,
)
def test_parameters_that_are_not_legal_are_refused(shape, arguments, message):
    with pytest.raises(ParameterError, match=f"^{message}"):
        Int8Rows(PqParameters(**shape), **arguments)


# The Verilog.


def test_simulators_agree_in_every_cycle_and_nothing_is_unknown():
    p = PqParameters(**SMALL, head_dim=24, lanes=8, group=16, q_parallel=2)
    cases = [random_case(p, 2, 5), random_case(p, 1, 6, 8)]
    traces = [check(p, cases, simulator=name, stall=0.2) for name in ("amaranth", "icarus", "verilator")]
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.parametrize(
    ("shape", "queries"),
    [({"head_dim": 40, "group": 16}, 3), ({"head_dim": 8}, 1)],
    ids=str,
)
def test_every_tool_is_silent(shape, queries, tmp_path):
    p = PqParameters(recent=8, sinks=2, **shape)
    (tmp_path / "int8_rows.sv").write_text(emit(Int8Rows(p, queries=queries), "int8_rows").verilog)
    assert lint(tmp_path, "int8_rows.sv", top="int8_rows") == ""
    result = yosys(tmp_path, "read_verilog -sv int8_rows.sv; hierarchy -check -top int8_rows; proc; check -assert")
    assert result.returncode == 0, result.stderr


# Seeded faults: each makes a comparison above fail.


def differs(stall=0.0, **options):
    p = PqParameters(**SMALL, head_dim=40, lanes=8, group=16)
    cases = [random_case(p, 2, 6), random_case(p, 2, 6, 8)]
    trace, found, right, status = play(p, cases, queries=2, stall=stall, **options)
    return found != right or {name: trace.status[name] for name in status} != status


def test_the_sound_block_does_not_differ():
    assert not differs()


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (block_sums, "GUARD_BITS", 7),
        (scaler, "LOG_FRACTION", 15),
        (scaler, "SPLIT_PRODUCT_LATENCY", 2),
        (scaler, "FP16_LSB", -24),
        (hardware, "LOG_LEAST", 1 << 50),
        (row_factor, "FP16_MANTISSA", 10),
        (RowScores, "latency", RowScores.latency - 1),
        (BlockSums, "product_delay", BlockSums.product_delay + 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_seen(where, name, value, monkeypatch):
    monkeypatch.setattr(where, name, value)
    assert differs()


def test_rows_that_follow_too_soon_are_seen(monkeypatch):
    p = PqParameters(**SMALL, head_dim=8, lanes=8, group=8)
    case = random_case(p, 1, 6)
    check(p, [case])
    monkeypatch.setattr(hardware, "SPACING", hardware.SPACING - 1)
    _, found, right, _ = play(p, [case])
    assert found != right


@pytest.mark.parametrize("sign", [1, -1])
def test_logarithms_beyond_the_limit_saturate_in_the_sum_of_the_groups(sign):
    """Sums of limits, sums that come back into the range, and the first number beyond the limit."""
    p = PqParameters(**SMALL, head_dim=24, lanes=8, group=8)
    most, least, one, none = [127] * 8, [-127] * 8, [0] * 7 + [3], [0] * 8
    groups = [[most, most, most], [most, most, least], [most, least, most], [most, one, none]]
    k = torch.tensor(groups, dtype=torch.int8).flatten(1) * sign
    scales = torch.full((4, 3), 65504, dtype=torch.float16)
    scales[3, 1] = 2.0**-24
    q = torch.full((1, 24), 127, dtype=torch.int8)
    q[0, 15] = 1
    case = random_case(p, 1, 4) | {"k": k, "k_scale": scales, "q": q, "q_scale": torch.tensor([256], dtype=torch.half)}
    z = row_logarithms(q, case["q_scale"], k, scales, group=8)
    assert z.tolist() == [[sign * softmax.LOG_LIMIT] * 4]
    scales[3, 0] = 0
    assert row_logarithms(q, case["q_scale"], k[3:], scales[3:], group=8).item() == sign
    scales[3, 0] = 65504
    check(p, [case], above=1)
    for number in range(4):
        alone = case | {name: case[name][number : number + 1] for name in ("k", "k_scale", "v", "v_scale")}
        check(p, [alone], above=1)


def test_a_product_that_is_shifted_in_place_of_the_sum_is_seen():
    def edit(verilog):
        changed, count = re.subn(r"grows \? (\w+(?:\[[^]]*\])?) : (\w+(?:\[[^]]*\])?);", r"grows ? \2 : \1;", verilog)
        assert count
        return changed

    assert differs(simulator="icarus", edit_verilog=edit)
