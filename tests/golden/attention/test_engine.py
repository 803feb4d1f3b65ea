"""The attention engine's numbers: every rounding against fractions, outputs and weights against float64."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from kvant.golden.attention import engine
from kvant.golden.attention.engine import attend, float64_attention, key_scores, window_groups
from kvant.golden.attention.softmax import LOG_LIMIT, distance_logarithms, score_logarithms, softmax_constant
from kvant.golden.errors import TensorError
from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.int8 import int8_cache
from kvant.golden.kvcache.spatial import spatial_cache
from kvant.golden.kvcache.temporal import temporal_cache
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS
from kvant.golden.numeric.int8 import quantize_int8

SEED = 20261130
TABLES = Tables.of(DEFAULT_COEFFICIENTS, DEFAULT_THRESHOLDS)
BOUND = 2.0**-6
FORMATS = [("mant", "mant"), ("int8", "mant"), ("mant", "int8"), ("int8", "int8")]


def caches(k, v, formats=("mant", "mant"), *, group=64, sinks=0):
    mant = {"group": group, "tables": TABLES, "sinks": sinks}
    keys = spatial_cache(k, **mant) if formats[0] == "mant" else int8_cache(k, group=group)
    values = temporal_cache(v, v.shape[-2], **mant) if formats[1] == "mant" else int8_cache(v, group=group)
    return keys, values


def tensors(queries, tokens, d, seed=SEED, spread=1.0, heads=()):
    rng = np.random.default_rng((seed, tokens, d))
    shapes = ((*heads, n, d) for n in (queries, tokens, tokens))
    q, k, v = (torch.from_numpy(rng.standard_normal(shape).astype(np.float16)) for shape in shapes)
    return q * spread, k, v


def miss(q, keys, values, **options):
    """Largest distance of a query's output from float64, relative to the float64 output."""
    out = attend(q, keys, values, planes=2, **options).out.double()
    exact = float64_attention(q, keys, values, **options)
    length = exact.norm(dim=-1)
    assert not out[length == 0].any()
    return ((out - exact).norm(dim=-1)[length > 0] / length[length > 0]).max().item()


def nearest(value, bits, least=None):
    """The number of *bits* significant bits nearest to a fraction, ties to even; multiples of *least* at the finest."""
    if value == 0:
        return Fraction(0)
    unit = Fraction(2) ** (math.frexp(float(abs(value)))[1] - bits - 1)
    while abs(value) / unit >= 1 << bits:
        unit *= 2
    unit = unit if least is None else max(unit, least)
    return round(value / unit) * unit


def fp32(value):
    return nearest(value, 24)


def attend_by_fractions(q, keys, values, first, end, slope, planes):
    """One head and query at a time, by the words of the numerics page; logarithms become weights by the golden rule."""
    group, sinks = keys.group, keys.sink.shape[-2]
    d, tokens = q.shape[-1], keys.codes.shape[-2]
    quantised = quantize_int8(q, group)
    constant = Fraction(softmax_constant(d).item())

    def level(code, a):
        i = int(code) & 7
        return (i if a == 255 else a * i + (1 << i)) * (-1 if int(code) >= 8 else 1)

    windows = tokens // group
    outputs = []
    for b in range(q.shape[0]):
        seen = range(int(first[b]), int(end[b]))
        z = {}
        for t in seen:
            y = Fraction(0)
            for g, start in enumerate(range(0, d, group)):
                columns = range(start, min(start + group, d))
                if t < sinks:
                    elements, scale = [int(keys.sink[t, j]) for j in columns], keys.sink_scale[t, g]
                else:
                    a = int(keys.coefficient[t, g])
                    elements, scale = [level(keys.codes[t, j], a) for j in columns], keys.scale[t, g]
                r = sum(int(quantised.q[b, j]) * e for j, e in zip(columns, elements, strict=True))
                y = fp32(y + fp32(r * Fraction(quantised.scale[b, g].item()) * Fraction(scale.item())))
            bias = round(Fraction(slope[b].item()) * (int(end[b]) - 1 - t) * (1 << 16))
            z[t] = round(y * constant * (1 << 16)) - bias
        if not z:
            outputs.append([0.0] * d)
            continue
        top = max(z.values())
        all_weights = engine.weights(torch.tensor([list(z.values())]), torch.tensor([top]))[0]
        weight = dict(zip(z, all_weights.tolist(), strict=True))
        denominator, chains = Fraction(0), [[Fraction(0)] * d for _ in range(planes)]
        for window in range(windows):
            inside = range(window * group, (window + 1) * group)
            x = [Fraction(0 if t < sinks else weight.get(t, 0), 512) for t in inside]
            for plane in range(planes):
                x = [nearest(value, 11, Fraction(1, 1 << 24)) for value in x]
                largest = max(map(abs, x))
                scale = nearest(largest / 127, 11, Fraction(1, 1 << 24))
                p = [round(127 * value / largest) if scale else 0 for value in x]
                x = [value - scale * e for value, e in zip(x, p, strict=True)]
                denominator += scale * sum(p)
                for c in range(d):
                    a, s = int(values.coefficient[window, c]), Fraction(values.scale[window, c].item())
                    r = sum(e * level(values.codes[t, c], a) for e, t in zip(p, inside, strict=True))
                    chains[plane][c] = fp32(chains[plane][c] + fp32(r * scale * s))
        fresh = range(max(windows * group, sinks), tokens)
        sink_weights = torch.tensor([[weight.get(t, 0) for t in range(sinks)]], dtype=torch.int64)
        rows = engine._weighted(sink_weights, values.sink, values.sink_scale, group)
        denominator += sum(Fraction(w, 512) for t, w in weight.items() if t < sinks or t >= windows * group)
        inverse = fp32(1 / denominator)
        out = []
        for c in range(d):
            numerator = Fraction(0)
            for chain in chains:
                numerator = fp32(numerator + chain[c])
            if sinks:
                numerator = fp32(numerator + fp32(Fraction(rows[0, c].item())))
            staged = sum(weight.get(t, 0) * int(values.staged[t - windows * group, c]) for t in fresh)
            numerator = fp32(numerator + fp32(Fraction(staged, 512) * Fraction(values.staged_scale[c].item())))
            out.append(float(fp32(numerator * inverse)))
        outputs.append(out)
    return outputs


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(
    "sinks,tokens,d,group", [(0, 21, 8, 8), (3, 19, 16, 8), (10, 12, 8, 8), (2, 5, 5, 8), (0, 1, 3, 8)]
)
def test_every_step_is_rounded_as_the_words_say(sinks, tokens, d, group, planes):
    q, k, v = tensors(3, tokens, d, spread=3)
    keys, values = caches(k, v, group=group, sinks=sinks)
    first, end = torch.tensor([0, min(2, tokens - 1), 0]), torch.tensor([tokens, tokens, 0])
    slope = torch.tensor([0, 0.01, 3]).half()
    got = attend(q, keys, values, first=first, end=end, slope=slope, planes=planes)
    assert got.out.tolist() == attend_by_fractions(q, keys, values, first, end, slope, planes)
    assert got.empty.tolist() == [False, False, True]


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 300, 1024, 4096])
def test_outputs_are_near_float64_for_any_length(tokens, sinks, formats):
    for spread in (1, 3):
        q, k, v = tensors(3, tokens, 64, spread=spread)
        assert miss(q, *caches(k, v, formats, sinks=sinks)) < BOUND / 32


@pytest.mark.parametrize("staged", range(8))
def test_every_length_of_the_open_window_counts(staged):
    q, k, v = tensors(3, 16 + staged, 16)
    assert miss(q, *caches(k, v, group=8, sinks=4)) < BOUND / 32


@pytest.mark.parametrize("sinks", [3, 4, 7, 8, 9, 16, 17, 40])
def test_sinks_may_end_anywhere(sinks):
    """Within, at the end of and beyond the first window, in the open one, and all tokens."""
    q, k, v = tensors(3, 18, 16)
    assert miss(q, *caches(k, v, group=8, sinks=sinks)) < BOUND / 32


@pytest.mark.parametrize("d,group", [(128, 64), (96, 32), (64, 32), (128, 128), (80, 64), (5, 8), (256, 256)])
def test_heads_of_several_groups_and_of_a_short_one(d, group):
    q, k, v = tensors(4, 3 * group + 7, d, spread=2)
    for formats in FORMATS:
        assert miss(q, *caches(k, v, formats, group=group, sinks=4)) < BOUND / 32


def test_one_plane_of_weights_misses_the_bound_that_two_keep():
    q, k, v = tensors(9, 128, 128, spread=2.2)
    keys, values = caches(k, v, group=128)
    exact = float64_attention(q, keys, values)
    misses = [
        ((attend(q, keys, values, planes=planes).out - exact).norm(dim=-1) / exact.norm(dim=-1)).max()
        for planes in (1, 2)
    ]
    assert misses[0] > BOUND and misses[1] < BOUND / 32


@pytest.mark.parametrize("formats", FORMATS)
def test_causal_tiles_and_sliding_windows_hide_the_other_keys(formats):
    """What a query does not see changes nothing, and what it sees is that of a shorter cache."""
    tokens, queries = 150, 20
    q, k, v = tensors(queries, tokens, 64, spread=2)
    keys, values = caches(k, v, formats, sinks=4)
    end = torch.arange(tokens - queries + 1, tokens + 1)
    first = (end - 70).clamp(min=0)
    for limits in ({"end": end}, {"end": end, "first": first}):
        assert miss(q, keys, values, **limits) < BOUND / 32
    if formats[1] == "int8":  # values along time have other scales in a shorter cache
        out = attend(q, keys, values, end=end).out
        for i in (0, 7, 19):
            shorter = caches(k[: end[i]], v[: end[i]], formats, sinks=4)
            assert torch.equal(attend(q[i : i + 1], *shorter).out[0], out[i])


@pytest.mark.parametrize("formats", FORMATS)
def test_position_biases_take_from_logarithms(formats):
    q, k, v = tensors(4, 200, 64)
    slope = torch.tensor([0.0, 0.004, 0.1, 20.0]).half()
    keys, values = caches(k, v, formats, sinks=4)
    assert miss(q, keys, values, slope=slope, end=torch.tensor([200, 150, 77, 64])) < BOUND / 32
    plain = attend(q[:1], keys, values).out
    assert torch.equal(attend(q[:1], keys, values, slope=torch.zeros(1).half()).out, plain)


def test_biases_are_rounded_once():
    rng = np.random.default_rng(SEED)
    slopes = torch.from_numpy(rng.integers(0, 0x7C00, 4000).astype(np.int16)).view(torch.float16)
    distance = torch.from_numpy(rng.integers(0, 1 << rng.integers(1, 23, 4000)))
    ties = torch.tensor([2.0**-17, 3 * 2.0**-17, 2.0**-24, 65504.0]).half(), torch.tensor([1, 1, 128, 1 << 22])
    slopes, distance = torch.cat((slopes, ties[0])), torch.cat((distance, ties[1]))
    got = distance_logarithms(slopes, distance).tolist()
    pairs = zip(slopes.tolist(), distance.tolist(), strict=True)
    assert got == [round(Fraction(s) * n * (1 << 16)) for s, n in pairs]


def test_logarithms_of_scores_are_rounded_once_and_saturate():
    rng = np.random.default_rng(SEED)
    y = torch.from_numpy((rng.standard_normal(3000) * np.exp2(rng.integers(-60, 50, 3000))).astype(np.float32))
    y = torch.cat((y, torch.tensor([0.0, 3e38, -3e38, 2.0**39, 2.0**40])))
    for d in (1, 64, 80):
        c = Fraction(softmax_constant(d).item())
        right = [max(-LOG_LIMIT, min(LOG_LIMIT, round(Fraction(value) * c * (1 << 16)))) for value in y.tolist()]
        assert score_logarithms(y, d).tolist() == right


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("sinks", [0, 4])
def test_one_huge_channel(formats, sinks):
    """In queries, keys or values, and in keys and values; in queries and keys at once."""
    for places in ((0,), (1,), (2,), (1, 2), (0, 1)):
        parts = tensors(4, 200, 64)
        for place in places:
            parts[place][:, 5] = 1e4
        q, k, v = parts
        assert miss(q, *caches(k, v, formats, sinks=sinks)) < BOUND / 8


def test_zeros_everywhere_give_means_of_values():
    q, k, v = tensors(2, 100, 64)
    keys, values = caches(torch.zeros_like(k), v, sinks=4)
    exact = values.dequantize().double().mean(0)
    for queries in (q, torch.zeros_like(q)):
        out = attend(queries, keys, values, planes=2).out.double()
        assert ((out - exact).norm(dim=-1) / exact.norm()).max() < BOUND / 8
    keys, values = caches(k, torch.zeros_like(v), sinks=4)
    out = attend(q, keys, values, planes=2).out
    assert not out.any() and not torch.signbit(out).any()


def test_ties_share_the_output():
    q, k, v = tensors(3, 1, 64)
    keys, values = caches(k.expand(130, -1), v.expand(130, -1), ("mant", "int8"))
    single = caches(k, v, ("mant", "int8"))
    torch.testing.assert_close(attend(q, keys, values).out, attend(q, *single).out, rtol=2.0**-15, atol=0)


def test_a_query_that_sees_nothing_gives_zero_and_a_flag():
    q, k, v = tensors(3, 70, 64)
    for formats in FORMATS:
        end, first = torch.tensor([0, 40, 70]), torch.tensor([0, 40, 69])
        got = attend(q, *caches(k, v, formats, sinks=4), first=first, end=end)
        assert got.empty.tolist() == [True, True, False]
        assert not got.out[:2].any() and got.out[2].any()


def test_nan_and_infinities_of_queries_count_as_the_port_says():
    q, k, v = tensors(2, 70, 64)
    q[0, 3], q[1, 4] = math.nan, -math.inf
    keys, values = caches(k, v)
    got = attend(q, keys, values)
    q[0, 3], q[1, 4] = 0, -65504
    plain = attend(q, keys, values)
    assert torch.equal(got.out, plain.out) and got.nonfinite and not plain.nonfinite
    assert torch.isfinite(got.out).all()


@pytest.mark.parametrize("tokens", [1, 64, 1000, 4096])
@pytest.mark.parametrize("spread", [0.5, 2, 8])
def test_weights_keep_the_bounds_of_a_softmax(tokens, spread):
    """Before they become INT8: sum 1, absolute 2^-10, relative 2^-6 above 2^-12, sum of errors 2^-8, order kept."""
    q, k, v = tensors(4, tokens, 64, spread=spread)
    keys, _ = caches(k, v, sinks=4)
    groups = quantize_int8(q, 64)
    z = score_logarithms(key_scores(groups, keys), 64)
    w = engine.weights(z, z.amax(-1)).double()
    p = w / w.sum(-1, keepdim=True)
    used = groups.q.double() * groups.scale.double()
    scores = used @ keys.dequantize().double().mT / 8
    exact = scores.softmax(-1)
    error = (p - exact).abs()
    assert ((p.sum(-1) - 1).abs() < 2.0**-10).all() and error.max() < 2.0**-10 and (error.sum(-1) < 2.0**-8).all()
    assert (error[exact > 2.0**-12] < 2.0**-6 * exact[exact > 2.0**-12]).all()
    order = scores.argsort(-1)
    assert (w.gather(-1, order).diff(dim=-1) >= 0).all()


def test_planes_leave_less_and_less_of_the_weights():
    rng = np.random.default_rng(SEED)
    w = torch.from_numpy(np.minimum(np.exp2(24 - rng.exponential(6, (5, 128))), 2**24 - 1).astype(np.int64))
    planes = window_groups(w, windows=2, sinks=3, group=64, planes=2)
    x = w.double() / 512
    x[:, :3] = 0
    largest = x.unflatten(-1, (2, 64)).amax(-1, keepdim=True)
    for groups, bound in zip(planes, (2.0**-7, 2.0**-10), strict=True):
        assert groups.scale.shape == (5, 2) and groups.q.dtype == torch.int8
        x = x - groups.q.double() * groups.scale.double().repeat_interleave(64, -1)
        assert (x.unflatten(-1, (2, 64)).abs() <= bound * largest).all()


def test_heads_are_independent():
    q, k, v = tensors(3, 77, 32, heads=(2,))
    for formats in FORMATS:
        both = attend(q, *caches(k, v, formats, group=32, sinks=4), planes=2)
        for head in range(2):
            one = attend(q[head], *caches(k[head], v[head], formats, group=32, sinks=4), planes=2)
            assert torch.equal(both.out[head], one.out)


def test_what_does_not_fit_is_refused():
    q, k, v = tensors(2, 20, 16)
    keys, values = caches(k, v, group=8)
    with pytest.raises(TensorError, match=r"^keys: tokens of shape \(20, 16\); legal is \(20, 15\)$"):
        attend(q[:, :15], keys, values)
    with pytest.raises(TensorError, match=r"^values: groups of 16; legal is 8, as keys have$"):
        attend(q, keys, caches(k, v, group=16)[1])
    with pytest.raises(TensorError, match=r"^values: tokens of shape \(12, 16\); legal is \(20, 16\)$"):
        attend(q, keys, caches(k[:12], v[:12], group=8)[1])
    with pytest.raises(TensorError, match=r"^values: tokens of shape \(12, 16\); legal is \(20, 16\)$"):
        attend(q, keys, caches(k, v[:12], ("mant", "int8"), group=8)[1])
    with pytest.raises(TensorError, match=r"^values: an offset or a shared coefficient; legal is neither$"):
        attend(q, keys, temporal_cache(v + 3, 20, group=8, tables=TABLES, offset=True))
    with pytest.raises(TensorError, match=r"^values: SpatialCache; legal is TemporalCache or Int8Cache$"):
        attend(q, keys, keys)
    with pytest.raises(TensorError, match=r"^keys: a coefficient for every channel; legal along time is one a window$"):
        attend(q, values, values)
    with pytest.raises(TensorError, match=r"^end: 3 to 21; legal are 0 to the 20 tokens$"):
        attend(q, keys, values, end=torch.tensor([3, 21]))
    with pytest.raises(TensorError, match=r"^first: dtype float32; legal are int64 and int32$"):
        attend(q, keys, values, first=torch.tensor([0.0, 1.0]))
    with pytest.raises(TensorError, match=r"^slope\[1, 0\] = -1\.0: legal is a finite value of at least 0$"):
        attend(q, keys, values, slope=torch.tensor([0.0, -1.0]).half())
    with pytest.raises(TensorError, match=r"^planes = 3: legal is 1 or 2$"):
        attend(q, keys, values, planes=3)


@pytest.mark.parametrize(
    "name,fault",
    [
        ("fp16", lambda x: x),
        ("rows_total", lambda w: w.sum(-1) << 14),
        ("score_logarithms", lambda y, d: score_logarithms(y, d) + (y > 1)),
    ],
)
def test_a_fault_is_seen(name, fault, monkeypatch):
    """Against the words of the contract, which the model equals else."""
    q, k, v = tensors(3, 19, 16, spread=3)
    keys, values = caches(k, v, group=8, sinks=3)
    limits = torch.tensor([0, 0, 0]), torch.tensor([19, 18, 17])
    right = attend_by_fractions(q, keys, values, *limits, torch.zeros(3), 1)
    assert attend(q, keys, values, end=limits[1]).out.tolist() == right
    monkeypatch.setattr(engine, name, fault)
    assert attend(q, keys, values, end=limits[1]).out.tolist() != right


def test_the_order_of_the_fp32_chain_counts():
    _, k, v = tensors(3, 64, 16, spread=3)
    values = caches(k, v, group=8)[1]
    w = torch.from_numpy(np.random.default_rng(SEED).integers(0, 1 << 24, (3, 64)))

    def turned(x):
        return x.unflatten(0, (-1, 8)).flip(0).flatten(0, 1)

    last_first = replace(
        values,
        codes=turned(values.codes),
        scale=values.scale.flip(0).contiguous(),
        coefficient=values.coefficient.flip(0).contiguous(),
    )
    assert not torch.equal(engine.mix_values(turned(w.T).T, last_first), engine.mix_values(w, values))
