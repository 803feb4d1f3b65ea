"""Every cache format by name: what it holds, what a position may know, and that nothing is silently left out."""

import pytest
import torch

from kvant.golden.errors import TensorError
from kvant.golden.formats import baselines
from kvant.golden.formats.baselines import NF4_LEVELS
from kvant.golden.formats.mant_groups import MANT_GROUPS
from kvant.golden.kvcache.attention import Exact, Int8Head
from kvant.golden.kvcache.calibration import Activations, CacheCalibrator
from kvant.golden.kvcache.formats import CACHE_FORMATS, CacheSettings
from kvant.golden.kvcache.kvquant import TokenLevels, largest_of_tokens
from kvant.golden.kvcache.static_integer import StaticInteger
from kvant.golden.linear.search import quantize_weights
from kvant.golden.pq.attention import PqAttention
from kvant.golden.pq.calibration import CodebookCalibrator, Kind

LAYERS, HEADS, QUERIES, TOKENS, D, GROUP, SINKS = 2, 2, 4, 40, 16, 8, 2
KINDS = [
    "key_1x4",
    *(f"{rows}_{n}x8{shared}" for rows in ("key", "value") for n in (2, 4) for shared in ("", "_layer", "_model")),
]
NAMES = [name for name, format_ in CACHE_FORMATS.items() if not format_.mapped]
SEES_ALL = ("nvfp4",)
"""Formats with a scale of the whole tensor, which a cache would have to know ahead."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


MEAN = 2 * torch.randn(LAYERS, HEADS, 1, D, generator=seeded(7))


def rows(layer: int, seed: int, tokens: int = TOKENS):
    """Queries, keys with a mean per channel, values: [heads, tokens, d]."""
    random = seeded(10 * seed + layer)
    queries = torch.randn(QUERIES, tokens, D, generator=random)
    return (
        queries,
        torch.randn(HEADS, tokens, D, generator=random) + MEAN[layer],
        torch.randn(HEADS, tokens, D, generator=random),
    )


@pytest.fixture(scope="module")
def settings():
    tables = CacheCalibrator(group=GROUP, sinks=SINKS, statistic="moment")
    books = CodebookCalibrator(KINDS, sinks=SINKS, maps=False)
    for layer in range(LAYERS):
        observers = []
        for window in range(4):
            observer = Activations()
            observer.queries, *pair = rows(layer, 100 + window, 64)
            observer.keys, observer.values = (x.half() for x in pair)
            observers.append(observer)
        tables.add(observers)
        books.add(observers)
    return CacheSettings.of(tables.result(), books.result(), recent=4)


@pytest.mark.parametrize("name", NAMES)
def test_attention_is_near_exact_and_no_position_sees_what_comes_later(settings, name):
    attention = CACHE_FORMATS[name].attention(settings)
    exact = CACHE_FORMATS["fp32"].attention(settings)
    batch = [x[None] for x in rows(1, 1)]
    found = attention(1, *batch)
    assert found.isfinite().all()
    assert torch.equal(found, exact(1, *batch)) == (name == "fp32")
    lost = float((found - exact(1, *batch)).square().mean() / exact(1, *batch).square().mean())
    assert lost < {"kivi2": 0.5, "int4_tensor": 0.5, "pot4": 0.5, "flint4": 0.5, "pq2": 0.5, "pq2_float": 0.5}.get(
        name, 0.2
    )
    if name in SEES_ALL:
        return
    for position in (3, 7, 22):
        later = [x.clone() for x in batch]
        for x in later:
            x[:, :, position + 1 :] *= -2
        assert torch.equal(attention(1, *later)[:, :, : position + 1], found[:, :, : position + 1])


@pytest.mark.parametrize("name", NAMES)
def test_footprint_is_that_of_a_cache_and_ends_at_its_bits(settings, name):
    for footprint in CACHE_FORMATS[name].footprint(settings, D):
        assert 1.9 < footprint.history <= 32
        # beyond the sinks and what is kept once, a long cache costs what its windows cost
        assert footprint.at(10**7) == pytest.approx(footprint.history + footprint.page, abs=0.05)


def test_static_integers_use_the_calibrated_scale_and_clamp():
    peak = torch.tensor([[[7.0, 14, 3.5], [70, 7, 7]]])
    x = torch.tensor([[7.0, 14, 3.5], [3.2, -20, 0.2]]).expand(2, -1, -1)
    by_channel = StaticInteger(4, peak, True, Int8Head(4))
    assert by_channel.view(0, x).finished[0].tolist() == [[7, 14, 3.5], [3, -14, 0]]
    assert by_channel.view(0, x).finished[1].tolist() == [[10, 7, 4], [0, -7, 0]]
    by_layer = StaticInteger(4, peak, False, Int8Head(4))
    assert by_layer.view(0, x).finished[0].tolist() == [[10, 10, 0], [0, -20, 0]]
    with_sink = StaticInteger(4, peak, True, Int8Head(4), sinks=1).view(0, x)
    assert torch.equal(with_sink.finished[:, 0], Int8Head(4).view(0, x).fresh[:, 0])
    assert with_sink.finished[0, 1].tolist() == [3, -14, 0]


def test_finer_static_scales_lose_less(settings):
    keys = rows(0, 2)[1]
    losses = [
        (CACHE_FORMATS[name].stores(settings)[0].view(0, keys).finished - keys)[:, SINKS:].square().sum()
        for name in ("int8_channel", "int8_tensor", "int4_channel", "int4_tensor")
    ]
    assert max(losses[:2]) < losses[2] < losses[3]  # in 8 bits, what new text clamps costs as much as the step


def test_groups_take_the_best_type_of_a_format(settings):
    """A cache in ANT is its types, group by group; taking the first type alone would be integers."""
    keys = rows(0, 3)[1].half().float()
    store = CACHE_FORMATS["ant"].stores(settings)[0]
    groups = keys[:, SINKS:].reshape(-1, GROUP)
    expected = baselines.ANT.quantize(groups, GROUP).values.view(HEADS, -1, D)
    assert torch.equal(store.view(0, keys).finished[:, SINKS:], expected)
    assert not torch.equal(expected, baselines.INT4.quantize(groups, GROUP).values.view(HEADS, -1, D))


def test_searched_groups_are_those_of_the_weight_search():
    x = torch.randn(12, 32, generator=seeded(4))
    expected = quantize_weights(x, 16).dequantize()
    found = MANT_GROUPS.store(x.unflatten(1, (2, 16))).flatten(1)
    error, least = ((y - x).square().sum().item() for y in (found, expected))
    assert error == pytest.approx(least, rel=1e-6)
    assert MANT_GROUPS.bits(64, 64) == 4.375


def test_kivi2_is_two_bits_with_a_window_in_fp16(settings):
    keys, values = CACHE_FORMATS["kivi2"].stores(settings)
    assert keys.along_time and not values.along_time and keys.fresh == Exact(16)
    assert keys.footprint(D).history == 2 + 32 / GROUP
    x = rows(0, 5)[1].half().float()
    window = x[:, GROUP : 2 * GROUP]
    found = keys.view(0, x).finished[:, GROUP : 2 * GROUP]
    step = (window.amax(1, keepdim=True) - window.amin(1, keepdim=True)) / 3
    assert ((found - window).abs() <= 0.51 * step + 4e-3).all()
    assert all(len(channel.unique()) <= 4 for channel in found.transpose(1, 2).flatten(0, 1))


def test_token_levels_lie_between_extremes_of_all_heads():
    x = torch.randn(HEADS, 9, D, generator=seeded(6)).half().float()
    x[1, 5, 3] = 50
    found = TokenLevels(Int8Head(GROUP), HEADS).view(0, x).finished
    low, high = x.amin((0, 2)), x.amax((0, 2))
    for t in range(9):
        offset, scale = ((high + low) / 2)[t].half().float(), ((high - low) / 2)[t].half().float()
        distance = (found[:, t] - offset).div(scale)[..., None] - torch.tensor(NF4_LEVELS)
        assert distance.abs().amin(-1).max() < 1e-5
    apart = TokenLevels(Int8Head(GROUP), HEADS, outliers=0.01).view(0, x).finished
    assert apart[1, 5, 3] == 50
    rest = torch.ones(HEADS, D, dtype=torch.bool)
    rest[1, 3] = False
    errors = [((y - x)[:, 5].square() * rest).sum() for y in (apart, found)]
    assert errors[0] < 0.1 * errors[1]  # the outlier no longer stretches the scale
    high = TokenLevels(Int8Head(GROUP), HEADS, outliers=0.01).view(0, (x + 100).half().float()).finished
    assert ((high - x - 100)[:, 5].square() * rest).sum() < 1.5 * errors[0]  # nor does a zero that is not there


def test_constant_token_is_exact():
    x = torch.full((HEADS, 2, D), 0.75)
    assert torch.equal(TokenLevels(Int8Head(GROUP), HEADS).view(0, x).finished, x)


def test_outliers_of_a_token_are_counted_over_all_heads():
    x = torch.zeros(2, 3, 4)
    x[0, 0, 1], x[1, 0, 2], x[1, 1, 3] = 5, -9, 1
    apart = largest_of_tokens(x, 2)
    assert apart.sum((0, 2)).tolist() == [2, 2, 2]
    assert apart[0, 0, 1] and apart[1, 0, 2] and apart[1, 1, 3]


def test_kvquant_keys_are_levels_of_their_channel_and_outliers_exact(settings):
    plain, sparse = (CACHE_FORMATS[name].stores(settings)[0] for name in ("kvquant", "kvquant_outliers"))
    keys = rows(1, 8)[1].half().float()
    found, apart = (store.view(1, keys).finished for store in (plain, sparse))
    book = settings.codebooks.books["key_1x4"]
    levels = book.entries[1].float()[..., 0] * book.scale[1].float()[:, None, None]  # [H, d, 16]
    assert ((found[:, SINKS:, :, None] - levels[:, None]).abs().amin(-1) < 1e-6).all()
    centred = (keys - settings.codebooks.key_mean[1].float()[:, None]).half().float()
    changed = found != apart
    assert changed.sum((0, 2))[SINKS:].tolist() == [1] * (TOKENS - SINKS)  # 1 % of 32 elements, rounded up
    assert torch.equal(apart[changed], centred[changed])
    assert (apart - centred).square().sum() < (found - centred).square().sum()
    assert sparse.footprint(D).history == plain.footprint(D).history + 1


def test_shared_codebooks_are_one(settings):
    books = settings.codebooks.books
    for part in ("entries", "scale"):
        per_head, layer, model = (getattr(books[f"value_2x8{s}"], part) for s in ("", "_layer", "_model"))
        assert torch.equal(layer[:, :1].expand_as(layer), layer) and not torch.equal(layer[0], layer[1])
        assert torch.equal(model[:1, :1].expand_as(model), model)
        assert per_head.shape == layer.shape == model.shape
    assert not torch.equal(books["value_2x8"].entries[0, 0], books["value_2x8"].entries[0, 1])


def test_shared_codebooks_take_less_and_lose_more(settings):
    values = rows(0, 9, 200)[2]
    stores = [CACHE_FORMATS[name].stores(settings)[1] for name in ("pq4", "pq4_layer", "pq4_model")]
    once = [store.footprint(D).sequence for store in stores]
    assert once == [once[0], once[0] / HEADS, once[0] / (HEADS * LAYERS)]
    assert isinstance(CACHE_FORMATS["pq4_model"].attention(settings), PqAttention)
    assert all((store.view(0, values).finished - values).square().mean() < 0.1 for store in stores)


def test_kinds_have_their_names():
    for name in ("key_2x8", "value_4x5_layer", "key_1x4_model"):
        assert Kind.of(name).name == name
    assert [Kind.of(f"key_2x8{s}").sharing(30, 3) for s in ("", "_layer", "_model")] == [1, 3, 90]
    with pytest.raises(TensorError, match="legal is key_ or value_, then dimensions x bits"):
        Kind.of("key_2x8_heads")


def test_formats_without_what_they_need_are_refused(settings):
    for name in ("int4_channel", "int8_tensor"):
        with pytest.raises(TensorError, match="tables: missing"):
            CACHE_FORMATS[name].attention(CacheSettings())
    with pytest.raises(TensorError, match="codebooks: missing"):
        CACHE_FORMATS["kvquant"].attention(CacheSettings())
    books = settings.codebooks
    mapped = type(books)(books.sinks, books.key_mean, books.books, {"key_1x4": torch.eye(D).half().expand(2, 2, D, D)})
    with pytest.raises(
        TensorError, match=r"codebooks 'key_1x4': trained behind a map; kvquant needs those of --no-maps"
    ):
        CACHE_FORMATS["kvquant"].attention(CacheSettings.of(settings.tables, mapped))
