"""INT8 rows in attention: largest logarithms, totals and block-floating sums against the golden model, bit for bit."""

import re

import numpy as np
import pytest
import torch
from amaranth.hdl import Shape

from kvant.golden.attention import softmax
from kvant.golden.attention.int8_rows import row_scores, weighted_rows
from kvant.golden.numeric.int8 import quantize_int8
from kvant.golden.numeric.rounding import fp16_to_bits
from kvant.hw.attention import int8_rows as hardware
from kvant.hw.attention.int8_rows import BlockSums, Int8Job, Int8Rows, RowScores
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

    q = quantize_int8(half(queries, d, spread=1.0) * 4, d)
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
    scales = np.array([0, 2**-24, 1023 * 2**-24, 2**-14, 0.125, 515.5], np.float16)
    small = scales[:5]

    def pick(values, *shape):
        return torch.from_numpy(rng.choice(values, shape))

    ends = np.array([-128, -128, 127, 0, 1], np.int8)
    return {
        "q": pick(ends, queries, d),
        "q_scale": pick(small, queries),
        "k": pick(ends, rows, d),
        "k_scale": pick(small, rows, groups),
        "v": pick(ends, rows, d),
        "v_scale": pick(scales, rows, groups),
    }


def largest_case(p, queries, rows, seed=SEED):
    """Everything as large as it gets, negative elements: no sum may overflow."""
    case = extreme_case(p, queries, rows, seed)
    return {
        name: torch.full_like(tensor, 515.5 if tensor.is_floating_point() else -128) for name, tensor in case.items()
    }


def golden(p, case, above=0):
    """What the block has to give, with a reference *above* the largest z of the rows."""
    y = row_scores(case["q"], case["q_scale"], case["k"], case["k_scale"], group=p.group)
    z = softmax.logarithms(y, softmax.softmax_constant(p.head_dim))
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
    """Of every case mantissas [B][d] and exponents [B][groups]; what is said of a transfer is checked on the way."""
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
                if transfer * p.lanes % p.group == 0:
                    places.append(word.exponent)
                assert word.exponent == places[-1]
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
        y = row_scores(case["q"], case["q_scale"], case["k"], case["k_scale"], group=p.group)
        z = softmax.logarithms(y, softmax.softmax_constant(p.head_dim))
        weights = softmax.weights(z, torch.tensor(reference[: len(case["q"])]))
        sums = weighted_rows(weights, case["v"], case["v_scale"], group=p.group)
        right.append((sums.mantissa.tolist(), sums.exponent.tolist()) if len(case["k"]) else ([], []))
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
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_results_are_those_of_the_golden_model(shape, queries, make):
    p = PqParameters(**SMALL, **shape, q_parallel=queries)
    check(p, [make(p, queries, 5)])
