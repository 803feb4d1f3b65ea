"""Keys along time: every rounding of folded queries and offsets against fractions, outputs against float64."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from kvant.golden.attention import time_keys
from kvant.golden.attention.engine import attend, float64_attention, key_logarithms
from kvant.golden.attention.softmax import softmax_constant
from kvant.golden.errors import TensorError
from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.int8 import int8_cache
from kvant.golden.kvcache.temporal import temporal_cache
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS
from kvant.golden.numeric.int8 import quantize_int8

SEED = 20261201
TABLES = Tables.of(DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS)
BOUND = 2.0**-5
"""Of outputs with folded queries."""


def tensors(queries, tokens, d, *, spread=1.0, drift=0.0, heads=()):
    """Queries, keys that drift (windows have offsets), values."""
    rng = np.random.default_rng((SEED, tokens, d))
    q, k, v = (rng.standard_normal((*heads, n, d)) for n in (queries, tokens, tokens))
    k += drift * rng.standard_normal(d) * np.sin(np.arange(tokens) / 40)[:, None]
    return tuple(torch.from_numpy(x.clip(-65504, 65504).astype(np.float16)) for x in (q * spread, k, v))


def time_cache(k, *, group=64, sinks=0, prefill=None):
    prefill = k.shape[-2] if prefill is None else prefill
    return temporal_cache(k, prefill, group=group, tables=TABLES, sinks=sinks, offset=True, shared_coefficient=True)


def miss(q, keys, values, **options):
    """Largest distance of a query's output from float64, relative to the float64 output."""
    out = attend(q, keys, values, planes=2, **options).out.double()
    exact = float64_attention(q, keys, values, **options)
    return ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item()


def nearest(value, bits, least):
    """The number of *bits* significant bits nearest to a fraction, ties to even; multiples of *least* at the finest."""
    if value == 0:
        return Fraction(0)
    unit = max(Fraction(2) ** (math.frexp(float(abs(value)))[1] - bits), Fraction(2) ** least)
    return round(value / unit) * unit


def fp16(value):
    return max(min(nearest(value, 11, -24), Fraction(65504)), Fraction(-65504))


def fp32(value):
    return nearest(value, 24, -149)


def int8_by_fractions(x, group):
    """INT8 groups of a vector: elements, and the scale of every group."""
    elements, scales = [], []
    for start in range(0, len(x), group):
        part = x[start : start + group]
        largest = max(map(abs, part))
        scales.append(nearest(largest / 127, 11, -24))
        elements += [round(127 * value / largest) if scales[-1] else 0 for value in part]
    return elements, scales


def chain(elements, scales, rows, row_scales, group):
    """The fp32 chain over the groups of a head."""
    y = Fraction(0)
    for g, start in enumerate(range(0, len(elements), group)):
        columns = range(start, min(start + group, len(elements)))
        y = fp32(y + fp32(sum(elements[j] * rows[j] for j in columns) * scales[g] * row_scales[g]))
    return y


def logarithms_by_fractions(q, keys):
    """One query and token at a time, by the words of the numerics page."""
    group, d, sinks = keys.group, q.shape[-1], keys.sink.shape[-2]
    constant, windows = Fraction(softmax_constant(d).item()), keys.scale.shape[-2]
    groups = -(-d // group)

    def fractions(x):
        return [Fraction(value) for value in x.tolist()]

    def level(code, a):
        i = code & 7
        return (i if a == 255 else a * i + (1 << i)) * (-1 if code >= 8 else 1)

    rows = []
    for vector in q:
        query = fractions(vector)

        def fold(scale, query=query):
            return int8_by_fractions([fp16(x * s) for x, s in zip(query, fractions(scale), strict=True)], group)

        static, z = fold(keys.staged_scale), []
        for t in range(windows * group + keys.staged.shape[-2]):
            offset = 0
            if t < sinks:
                row, scales = keys.sink[t].tolist(), fractions(keys.sink_scale[t])
                y = chain(*int8_by_fractions(query, group), row, scales, group)
            elif t < windows * group:
                window = t // group
                row = [level(code, int(keys.coefficient[window, 0])) for code in keys.codes[t].tolist()]
                y = chain(*fold(keys.scale[window]), row, [1] * groups, group)
                for g in range(groups):
                    part = slice(g * group, (g + 1) * group)
                    o = keys.offset[window].tolist()[part]
                    r = sum(a * b for a, b in zip(static[0][part], o, strict=True))
                    offset += round(r * constant * static[1][g] * (1 << 16))
            else:
                y = chain(*static, keys.staged[t - windows * group].tolist(), [1] * groups, group)
            z.append(round(y * constant * (1 << 16)) + offset)
        rows.append(z)
    return rows


@pytest.mark.parametrize("sinks,tokens,d,group", [(0, 21, 8, 8), (3, 19, 16, 8), (10, 12, 8, 8), (2, 5, 5, 8)])
@pytest.mark.parametrize("spread", [3.0, 1e-4, 3e4])
def test_every_step_is_rounded_as_the_words_say(sinks, tokens, d, group, spread):
    q, k, _ = tensors(3, tokens, d, spread=spread, drift=4)
    keys = time_cache(k, group=group, sinks=sinks)
    assert keys.offset.any() or sinks + group > tokens
    assert key_logarithms(q, quantize_int8(q, group), keys).tolist() == logarithms_by_fractions(q, keys)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 300, 1024])
@pytest.mark.parametrize("formats", ["mant", "int8"])
def test_outputs_are_near_float64_for_any_length(tokens, sinks, formats):
    for spread, drift in ((1, 0), (3, 1)):
        q, k, v = tensors(3, tokens, 64, spread=spread, drift=drift)
        values = int8_cache(v, group=64)
        if formats == "mant":
            values = temporal_cache(v, tokens, group=64, tables=TABLES, sinks=sinks)
        assert miss(q, time_cache(k, sinks=sinks), values) < BOUND


@pytest.mark.parametrize("d,group", [(128, 64), (128, 128), (80, 16), (5, 8), (256, 256)])
def test_heads_of_several_groups_and_of_a_short_one(d, group):
    q, k, v = tensors(4, 3 * group + 7, d, spread=2)
    assert miss(q, time_cache(k, group=group, sinks=4), int8_cache(v, group=group)) < BOUND


def test_limits_and_biases_count_as_for_other_keys():
    q, k, v = tensors(4, 200, 64, drift=2)
    keys, values = time_cache(k, sinks=4), int8_cache(v, group=64)
    slope = torch.tensor([0.0, 0.004, 0.1, 20.0]).half()
    limits = {"end": torch.tensor([200, 150, 77, 64]), "first": torch.tensor([0, 3, 70, 20])}
    assert miss(q, keys, values, slope=slope, **limits) < BOUND


def test_heads_are_independent():
    q, k, v = tensors(3, 77, 32, heads=(2,), drift=1)
    both = attend(q, time_cache(k, group=32, sinks=4), int8_cache(v, group=32))
    for head in range(2):
        one = attend(q[head], time_cache(k[head], group=32, sinks=4), int8_cache(v[head], group=32))
        assert torch.equal(both.out[head], one.out)


def test_products_beyond_fp16_saturate():
    q = torch.full((1, 8), 65504.0).half()
    groups = time_keys.folded_queries(q, torch.tensor([516.0] + [0.0] * 7).half(), 8)
    assert groups.q.tolist() == [[127] + [0] * 7] and not groups.nonfinite
    assert groups.scale.item() == torch.tensor(65504 / 127).half().item()


def test_a_coefficient_of_every_channel_is_refused():
    q, k, v = tensors(2, 20, 16)
    keys = temporal_cache(k, 20, group=8, tables=TABLES, offset=True)
    with pytest.raises(TensorError, match=r"^keys: a coefficient for every channel; legal along time is one a window$"):
        attend(q, keys, int8_cache(v, group=8))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("fp16", lambda x: x.to(torch.float32)),
        ("logarithms", lambda r, factor: (r * torch.ldexp(factor.mantissa.double(), factor.exponent + 16)).long()),
    ],
)
def test_a_fault_is_seen(name, fault, monkeypatch):
    q, k, _ = tensors(3, 21, 8, spread=3, drift=4)
    keys = time_cache(k, group=8)
    right = logarithms_by_fractions(q, keys)
    monkeypatch.setattr(time_keys, name, fault)
    assert key_logarithms(q, quantize_int8(q, 8), keys).tolist() != right
