"""Outputs put together from coded values and INT8 rows, bit for bit those of the golden model."""

import random
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from amaranth.sim import Simulator
from group_streams import words
from memory_collisions import asserted_memories
from verilog_checks import lint, yosys

from kvant.golden.attention import normalize as golden
from kvant.hw.attention import normalize as hardware
from kvant.hw.attention.int8_rows import row_sums
from kvant.hw.attention.layouts import out_width, read_output
from kvant.hw.attention.normalize import NormalizeJob, Normalizer, Reciprocal, denominator_width
from kvant.hw.emit import emit
from kvant.hw.pq.parameters import PqParameters
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

SEED = 20261130

SHAPES = {
    "one query": {"head_dim": 8, "port_bits": 32, "lanes": 4, "group": 8},
    "odd head": {"head_dim": 12, "port_bits": 64, "lanes": 8, "group": 8, "q_parallel": 3, "sinks": 4},
    "one lane": {"head_dim": 6, "port_bits": 32, "lanes": 1, "group": 8, "q_parallel": 2, "recent": 8},
    "wide": {"head_dim": 16, "port_bits": 128, "lanes": 16, "group": 16, "q_parallel": 2},
}


def shape(name):
    return PqParameters(capacity=1 << 16, **({"group": 8} | SHAPES[name]))


def example(p, rng, *, coded=True, rows=True, count=None):
    """One job: numbers of all sizes that the widths allow, scales with subnormals, some of it 0."""
    count = count or p.q_parallel
    largest = (1 << (out_width(p) - 1)) - 1
    width = row_sums(p)["data"].shape.elem_shape.width
    groups = -(-p.head_dim // p.group)

    def integers(limit):
        return [
            [
                rng.choice([0, 1, -limit, limit, rng.randrange(-limit, limit + 1) >> rng.randrange(40)])
                for _ in range(p.head_dim)
            ]
            for _ in range(count)
        ]

    denominators = [
        rng.choice(
            [
                1,
                (1 << 24) - 1,
                (1 << denominator_width(p)) - 1,
                rng.randrange(1, 1 << rng.randrange(1, denominator_width(p))),
            ]
        )
        for _ in range(count)
    ]
    return {
        "count": count,
        "coded": integers(largest) if coded else None,
        "rows": integers((1 << (width - 1)) - 1) if rows else None,
        "exponents": [[rng.randrange(-50, 16) for _ in range(groups)] for _ in range(count)],
        "scale": rng.choice([0, 1, 0x3FF, 0x400, 0x7BFF, rng.randrange(0x7C00)]),
        "shifts": [rng.randrange(10) for _ in range(count)],
        "denominators": denominators,
    }


def transfers(p, jobs):
    """Words of the three input streams."""
    job_words, coded, rows = [], [], []
    for job in jobs:
        fill = [0] * (p.q_parallel - job["count"])
        job_words.append(
            {
                "count": job["count"],
                "has_coded": int(job["coded"] is not None),
                "has_rows": int(job["rows"] is not None),
                "codebook_scale": job["scale"],
                "shift": job["shifts"] + fill,
                "denominator": job["denominators"] + fill,
            }
        )
        places = [(piece, vector) for piece in range(p.slices) for vector in range(job["count"])]
        for piece, vector in places if job["coded"] else ():
            values = job["coded"][vector][piece * p.slice_bytes :][: p.slice_bytes]
            coded.append({"data": values, "vector": vector, "slice": piece, "last": int((piece, vector) == places[-1])})
        places = [(vector, transfer) for vector in range(job["count"]) for transfer in range(p.row_transfers)]
        for vector, transfer in places if job["rows"] else ():
            values = job["rows"][vector][transfer * p.lanes :][: p.lanes]
            rows.append(
                {
                    "data": values + [12345] * (p.lanes - len(values)),
                    "exponent": job["exponents"][vector][transfer * p.lanes // p.group],
                    "vector": vector,
                    "last": int((vector, transfer) == places[-1]),
                }
            )
    return {
        "job": {"data": words(NormalizeJob(p), job_words)},
        "coded": {"data": words(read_output(p), coded)},
        "rows": {"data": words(row_sums(p), rows)},
    }


def play(p, jobs, **options):
    """Bits of all outputs, whether empty, and the trace."""
    unit = Normalizer(p)
    layout = unit.out.payload.shape()
    stimulus = Stimulus(transfers(p, jobs), {"out": p.head_dim * sum(job["count"] for job in jobs)})
    watched = asserted_memories if options.get("simulator", "amaranth") == "amaranth" else nullcontext
    with watched():
        trace = simulate(lambda: unit, "normalizer", stimulus, **({"simulator": "amaranth"} | options))
    beats = [layout.from_bits(word) for word in trace.transfers["out"]["data"]]
    assert [beat.last for beat in beats] == [int(k % p.head_dim == p.head_dim - 1) for k in range(len(beats))]
    return [beat.data for beat in beats], [beat.empty for beat in beats], trace


def expected(p, jobs):
    bits, empty = [], []
    for job in jobs:
        coded = rows = None
        if job["coded"] is not None:
            scale = torch.tensor(job["scale"], dtype=torch.int16).view(torch.float16)
            coded = golden.coded_values(torch.tensor(job["coded"]), scale, torch.tensor(job["shifts"]))
        if job["rows"] is not None:
            exponents = torch.tensor(job["exponents"]).repeat_interleave(p.group, -1)[:, : p.head_dim]
            rows = torch.ldexp(torch.tensor(job["rows"]).double(), exponents)
        if coded is None and rows is None:
            rows = torch.zeros((job["count"], p.head_dim), dtype=torch.float64)
        out = golden.normalize(torch.tensor(job["denominators"]), coded=coded, rows=rows)
        bits += out.flatten().numpy().view(np.uint32).tolist()
        empty += [int(d == 0) for d in job["denominators"] for _ in range(p.head_dim)]
    return bits, empty


def check(p, jobs, **options):
    got, empty, trace = play(p, jobs, **options)
    assert (got, empty) == expected(p, jobs)
    return trace


def jobs_of_all_kinds(p, seed=SEED):
    rng = random.Random(seed)
    jobs = [example(p, rng, coded=c, rows=r) for c, r in ((1, 1), (1, 0), (0, 1), (1, 1), (1, 1))]
    return [*jobs, example(p, rng, count=1), example(p, rng)]


@pytest.mark.parametrize("stall", [0, 0.3, 0.9])
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_are_those_of_the_golden_model(name, stall):
    p = shape(name)
    check(p, jobs_of_all_kinds(p), stall=stall, timeout_cycles=2000)


@pytest.mark.parametrize("simulator", ["icarus", pytest.param("verilator", marks=pytest.mark.long)])
def test_the_verilog_gives_the_same(simulator):
    p = shape("odd head")
    check(p, jobs_of_all_kinds(p), stall=0.3, simulator=simulator)


def test_parts_that_cancel_give_plus_zero_and_ties_round_to_even():
    p = shape("one query")
    base = {"count": 1, "exponents": [[0]], "scale": 0x3C00, "shifts": [0], "denominators": [1]}
    odd = (1 << 24) + 1
    coded = [[5, -5, odd, -odd, odd, 1 << 24, -(1 << 24), 0]]
    rows = [[-5, 5, -odd, odd, odd + 2, 1, -3, 0]]
    jobs = [base | {"coded": coded, "rows": rows}, base | {"coded": rows, "rows": coded}]
    got, _, _ = play(p, jobs)
    assert got[:2] == [0, 0]
    check(p, jobs)


def test_a_query_without_keys_gives_zero_and_says_so():
    p = shape("wide")
    rng = random.Random(SEED)
    jobs = [example(p, rng, coded=c, rows=r) for c, r in ((1, 1), (0, 0), (0, 1))]
    for job in jobs:
        job["denominators"] = [0, 7]
        for part in ("coded", "rows"):
            if job[part]:
                job[part][0] = [0] * p.head_dim
    got, empty, _ = play(p, jobs)
    assert not any(bits for bits, none in zip(got, empty, strict=True) if none)
    check(p, jobs)


def test_an_element_per_cycle_flows_and_latency_is_as_stated():
    p = shape("odd head")
    trace = check(p, [example(p, random.Random(SEED))])
    out, rows = trace.cycles["out"], trace.cycles["rows"]
    assert out == list(range(out[0], out[0] + 36))
    # a transfer of rows is taken with its last element
    assert out[p.lanes - 1] == rows[0] + Normalizer(p).latency
    assert out[-1] == rows[-1] + Normalizer(p).latency


@pytest.mark.parametrize("again_at", [2, 20, 45, 60, 80])
def test_reset_in_the_middle_equals_a_cold_start(again_at):
    p = shape("one lane")
    check(p, jobs_of_all_kinds(p)[:2], reset=Reset(again_at=again_at))


def rounded_reciprocal(denominator):
    """Bits of ``fp32(1 / denominator)``, by fractions."""
    if denominator == 0:
        return 0
    shift = denominator.bit_length() + 22
    mantissa = round(Fraction(1 << shift, denominator) if shift >= 0 else 0)
    if mantissa < 1 << 23:
        shift += 1
        mantissa = round(Fraction(1 << shift, denominator))
    return int(np.float32(mantissa * 2.0**-shift).view(np.uint32))


def invert(width, denominators):
    unit, results, cycles = Reciprocal(width), [], []

    async def bench(ctx):
        for denominator in denominators:
            ctx.set(unit.start, 1)
            ctx.set(unit.denominator, denominator)
            await ctx.tick()
            ctx.set(unit.start, 0)
            waited = 1
            while not ctx.get(unit.done):
                await ctx.tick()
                waited += 1
            results.append(ctx.get(unit.y))
            cycles.append(waited)

    simulator = Simulator(unit)
    simulator.add_clock(1e-6)
    simulator.add_testbench(bench)
    simulator.run()
    assert max(cycles) <= unit.most_cycles
    return results


@pytest.mark.parametrize("width", [2, 24, 33, 41, 48])
def test_reciprocals_are_rounded_once(width):
    rng = random.Random(SEED)
    numbers = [0, 1, 2, 3, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) + 1, (1 << (width - 1)) - 1]
    numbers += [rng.randrange(1 << width) >> rng.randrange(width) for _ in range(200)]
    assert invert(width, numbers) == [rounded_reciprocal(n) for n in numbers]


class TestSeededFaults:
    """A fault in the RTL makes the comparisons of this file fail."""

    def test_an_unrounded_reciprocal_is_seen(self, monkeypatch):
        monkeypatch.setattr(hardware, "FP32_BIAS", 126)
        assert invert(8, [3]) != [rounded_reciprocal(3)]

    def test_rounding_coded_sums_is_seen(self, monkeypatch):
        class Rounds(hardware.FloatFromInteger):
            def elaborate(self, platform):
                self.truncate = hardware.Const(0, 1)
                return super().elaborate(platform)

        monkeypatch.setattr(hardware, "FloatFromInteger", Rounds)
        p = shape("one query")
        with pytest.raises(AssertionError):
            check(p, jobs_of_all_kinds(p))


def test_every_tool_is_silent(tmp_path):
    for name in ("one query", "odd head"):
        top = name.replace(" ", "_")
        (tmp_path / f"{top}.sv").write_text(emit(Normalizer(shape(name)), top).verilog)
        assert lint(tmp_path, f"{top}.sv", top=top) == ""
        checked = yosys(tmp_path, f"read_verilog -sv {top}.sv; hierarchy -check -top {top}; proc; check -assert")
        assert checked.returncode == 0, checked.stderr
