"""The golden cache inside models of transformers: what their attention is given, sequence by sequence."""

import warnings
from dataclasses import replace

import pytest
import torch
from tiny_models import CONFIG, random_tensors, write_folder
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.formats import CACHE_FORMATS, CacheSettings
from kvant.golden.kvcache.maps import apply, inverse
from kvant.golden.kvcache.spatial import spatial_cache
from kvant.golden.kvcache.temporal import temporal_cache
from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.errors import ModelError
from kvant.golden.models.huggingface import GoldenCache, cache_argument, calibrate_cache
from kvant.golden.models.llama import Llama
from kvant.golden.pq.cache import pq_cache
from kvant.golden.pq.calibration import ModelCodebooks
from kvant.golden.pq.codebook import Codebook

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LLAMA = LlamaConfig(**SHAPE)
CONFIGS = {
    "llama": LLAMA,
    "mistral_sliding": MistralConfig(**SHAPE, sliding_window=12),
    "qwen2_bias": Qwen2Config(**SHAPE),
}
HEADS, D, GROUP = 2, 8, 4
FORMATS = ("fp16", "int8", "int4_asymmetric", "kivi", "int4_asymmetric_time", "mant_head", "mant_time", "pq4", "pq2")


def random_model(config, seed: int = 0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def generate(model, ids, mask, cache=None, tokens: int = 24, **options):
    given = {} if cache is None else {cache_argument(model): cache}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # releases rename the argument of generate and forward apart
        return model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, **given, **options
        )


def prompts(batch: int, padded: int = 7, tokens: int = 20):
    """Token numbers [batch, tokens], the last sequence padded on the left, and their mask."""
    ids = torch.randint(2, 300, (batch, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if batch > 1:
        mask[-1, :padded] = 0
    return ids * mask, mask


@pytest.fixture(scope="module")
def settings():
    """Tables of the random Llama, and codebooks and maps of noise."""
    random = torch.Generator().manual_seed(3)
    windows = [torch.randint(2, 300, (48,), generator=random) for _ in range(3)]
    tables = calibrate_cache(random_model(LLAMA), windows, group=GROUP, sinks=2)

    def book(subspace: int) -> Codebook:
        entries = torch.randint(-127, 128, (2, HEADS, D // subspace, 256, subspace), generator=random)
        return Codebook(entries.to(torch.int8), torch.full((2, HEADS), 0.02).half())

    books = {f"{rows}_{n}x8": book(n) for rows in ("key", "value") for n in (2, 4)}
    maps = {kind: (torch.eye(D) + 0.2 * torch.randn(2, HEADS, D, D, generator=random)).half() for kind in ("key_4x8",)}
    codebooks = ModelCodebooks(2, tables.key_mean, books, maps)
    return CacheSettings.of(tables, codebooks, recent=3)


def rows(batch: int, tokens: int, seed: int = 5):
    """Keys and values [batch, heads, tokens, d]."""
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, HEADS, tokens, D, generator=random) for _ in range(2))


def fill(cache, keys, values, calls):
    """Append rows in calls of these many tokens; what the last one returned."""
    first = 0
    for tokens in calls:
        part = slice(first, first + tokens)
        found = cache.update(keys[:, :, part], values[:, :, part], 1)
        first += tokens
    return found


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_cache_gives_the_tokens_of_no_cache_class(name, batch):
    model, (ids, mask) = random_model(CONFIGS[name]), prompts(batch)
    cache = GoldenCache(model.config, "fp32", attention_mask=mask)
    assert torch.equal(generate(model, ids, mask, cache), generate(model, ids, mask))


@pytest.mark.parametrize("format", ["mant_time", "kivi"])
def test_sequence_of_a_padded_batch_generates_as_alone(settings, format):
    model, (ids, mask) = random_model(LLAMA), prompts(2)
    together = generate(model, ids, mask, GoldenCache(LLAMA, format, settings, attention_mask=mask))
    alone = generate(model, ids[1:, 7:], mask[1:, 7:], GoldenCache(LLAMA, format, settings))
    assert torch.equal(together[1, 7:], alone[0])


def test_quantised_cache_changes_logits(settings):
    """An option that does nothing would pass most other tests."""
    model, (ids, _) = random_model(LLAMA), prompts(1)
    with torch.no_grad():
        exact = model(input_ids=ids).logits
        for format in FORMATS:
            cache = GoldenCache(LLAMA, format, settings)
            found = model(input_ids=ids, **{cache_argument(model): cache}).logits
            assert not torch.equal(found, exact), format


@pytest.mark.parametrize("format", FORMATS)
def test_every_token_meets_the_cache_as_it_is_then(settings, format):
    """Call by call of one token, rows are those that the query of that position meets in `kvant eval`."""
    keys, values = rows(1, 11)
    cache = GoldenCache(LLAMA, format, settings)
    stores = CACHE_FORMATS[format].stores(settings)
    for t in range(1, 12):
        found = cache.update(keys[:, :, t - 1 : t], values[:, :, t - 1 : t], 1)
        for store, x, held in zip(stores, (keys, values), found, strict=True):
            view = store.view(1, x[0, :, :t])
            full = max(t - store.recent, 0) if hasattr(store, "recent") else t // store.window * store.window
            expected = torch.cat((view.finished[:, :full], view.fresh[:, full:]), 1)
            if getattr(store, "transform", None) is not None:
                expected = (inverse(store.transform)[1] @ expected.mT).mT
                torch.testing.assert_close(held[0], expected, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(held[0], expected)


def test_rows_are_those_of_the_golden_caches(settings):
    """The prompt's length fixes INT8 scales of windows; whatever split follows stores the same."""
    keys, values = rows(1, 23)
    tables, first = settings.tables, 6
    held = [fill(GoldenCache(LLAMA, "mant_time", settings), keys, values, calls) for calls in ((6, 17), (6, *[1] * 17))]
    for found in held:
        for part, x, kind, mean, floor in (
            (found[0], keys, "key_time", tables.key_mean[1], tables.key_floor[1]),
            (found[1], values, "value_time", None, tables.value_floor[1]),
        ):
            options = {"offset": True, "shared_coefficient": True} if kind == "key_time" else {}
            expected = temporal_cache(
                x[0].half(),
                first,
                group=GROUP,
                tables=tables.layers(kind)[1],
                mean=mean,
                floor=floor,
                sinks=2,
                **options,
            )
            assert torch.equal(part[0], expected.dequantize())
    found = fill(GoldenCache(LLAMA, "mant_head", settings), keys, values, (6, 17))[0]
    expected = spatial_cache(
        keys[0].half(), group=GROUP, tables=tables.layers("key_head")[1], mean=tables.key_mean[1], sinks=2
    )
    assert torch.equal(found[0], expected.dequantize())
    found = fill(GoldenCache(LLAMA, "pq4", settings), keys, values, (6, 17))[1]
    book = settings.codebooks.layers("value_2x8")[1]
    expected = pq_cache(values[0].half(), book, group=GROUP, sinks=2, recent=3)
    assert torch.equal(found[0], expected.dequantize())


@pytest.mark.parametrize("format", FORMATS)
def test_padding_enters_nothing(settings, format):
    """Sequences of different lengths, padded left, right and not at all, each as in a cache of its own."""
    lengths, width, later = (2, 9, 13, 13), 13, 6
    keys, values = rows(len(lengths), width + later)
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for number, (length, left) in enumerate(zip(lengths, (True, True, False, False), strict=True)):
        mask[number, width - length :] = 1
        if not left:
            mask[number] = mask[number].flip(0)
    mask[3, 4:7] = 0
    padding = ~mask.bool()[:, None, :, None].expand(-1, HEADS, -1, D)
    for x in (keys, values):
        x[:, :, :width][padding] = torch.nan  # whatever stands there
    together = fill(GoldenCache(LLAMA, format, settings, attention_mask=mask), keys, values, (width, 2, 4))
    real = torch.cat((mask.bool(), torch.ones(len(lengths), later, dtype=torch.bool)), 1)
    for number, places in enumerate(real):
        prompt = int(mask[number].sum())
        one = [x[number : number + 1, :, places] for x in (keys, values)]
        alone = fill(GoldenCache(LLAMA, format, settings), *one, (prompt, 2, 4))
        for joint, single in zip(together, alone, strict=True):
            assert torch.equal(joint[number][:, places], single[0])
            assert not joint[number][:, ~places].any()


def test_sequence_that_begins_in_a_later_call_has_its_own_prompt(settings):
    keys, values = rows(2, 10)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, :5] = False
    together = fill(GoldenCache(LLAMA, "mant_time", settings, attention_mask=mask), keys, values, (4, 4, 2))
    alone = fill(GoldenCache(LLAMA, "mant_time", settings), keys[1:, :, 5:], values[1:, :, 5:], (3, 2))
    assert torch.equal(together[1][1, :, 5:], alone[1][0])


def test_beams_and_removed_sequences_take_their_padding_along(settings):
    keys, values = rows(2, 12)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :4] = False
    cache = GoldenCache(LLAMA, "mant_time", settings, attention_mask=mask)
    fill(cache, keys[:, :, :9], values[:, :, :9], (9,))
    fill_one = [x[:, :, 9:12] for x in (keys, values)]
    for layer in (cache.layers[1],):  # a model updates all layers; here only one holds rows
        layer.batch_repeat_interleave(2)
        layer.reorder_cache(torch.tensor([3, 1, 0, 2]))
        layer.batch_select_indices(torch.tensor([0, 2]))
    found = cache.update(*(x.flip(0) for x in fill_one), 1)
    expected = fill(GoldenCache(LLAMA, "mant_time", settings, attention_mask=mask), keys, values, (9, 3))
    for part, whole in zip(found, expected, strict=True):
        assert torch.equal(part, whole.flip(0))


def test_beam_search_runs_on_a_padded_batch(settings):
    model, (ids, mask) = random_model(LLAMA), prompts(2)
    found = generate(model, ids, mask, GoldenCache(LLAMA, "fp32", attention_mask=mask), tokens=6, num_beams=3)
    assert torch.equal(found, generate(model, ids, mask, tokens=6, num_beams=3))


def test_crop_and_reset_leave_nothing_behind(settings):
    keys, values = rows(1, 12)
    cache = GoldenCache(LLAMA, "mant_time", settings)
    fill(cache, *rows(1, 15, seed=9), (15,))
    cache.reset()
    assert cache.get_seq_length(1) == 0 and cache.layers[1].cached_tokens == 0
    fill(cache, keys[:, :, :10], values[:, :, :10], (6, 4))
    cache.layers[1].crop(-3)
    found = cache.update(keys[:, :, 7:12], values[:, :, 7:12], 1)
    expected = fill(GoldenCache(LLAMA, "mant_time", settings), keys, values, (6, 1, 5))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("format", ["mant_time", "mant_head", "int8_mapped"])
def test_maps_are_undone_behind_the_cache(settings, format):
    """What is held is that of mapped rows, which the maps of the tables lead back from."""
    random = torch.Generator().manual_seed(8)
    maps = [(torch.eye(D) + 0.2 * torch.randn(2, HEADS, D, D, generator=random)).half() for _ in range(2)]
    mapped = replace(settings, tables=replace(settings.tables, key_map=maps[0], value_map=maps[1]))
    keys, values = rows(1, 21)
    found = fill(GoldenCache(LLAMA, format, mapped), keys, values, (6, 15))
    inside = [apply(a[1], x) for a, x in zip(maps, (keys, values), strict=True)]
    plain = "int8" if format == "int8_mapped" else format
    held = fill(GoldenCache(LLAMA, plain, settings), *inside, (6, 15))
    for a, there, here in zip(maps, held, found, strict=True):
        assert torch.equal(here[0], apply(inverse(a)[1], there[0]))
    cache = GoldenCache(LLAMA, format, mapped)
    fill(cache, keys, values, (21,))
    expected = [each.at(21) for each in CACHE_FORMATS[format].footprint(mapped, D)]
    cache.update(keys, values, 0)
    assert cache.bits_per_element == sum(expected) / 2


def test_bits_are_those_of_the_stores(settings):
    cache = GoldenCache(LLAMA, "kivi", settings)
    assert cache.bits_per_element == 0
    keys, values = rows(1, 9)
    cache.update(keys, values, 0)
    expected = [store.footprint(D).at(9) for store in CACHE_FORMATS["kivi"].stores(settings)]
    assert cache.bits_per_element == sum(expected) / 2


def test_logits_are_those_of_the_golden_forward(tmp_path):
    """Token by token, transformers over this cache and the golden forward over the same store."""
    write_folder(tmp_path, random_tensors())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(24) * 7 % CONFIG["vocab_size"]
    settings = CacheSettings(group=GROUP, sinks=2)
    cache = GoldenCache(model.config, "int8", settings)
    with torch.no_grad():
        found = torch.cat([model(input_ids=t.view(1, 1), **{cache_argument(model): cache}).logits[0] for t in ids])
    expected = Llama(open_model(tmp_path), attention=CACHE_FORMATS["int8"].attention(settings)).logits(ids[None])[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_batch_without_a_mask_is_refused():
    cache = GoldenCache(LLAMA, "int8")
    with pytest.raises(TensorError, match=r"attention_mask: missing for 2 sequences; legal is the tokenizer's"):
        cache.update(*rows(2, 3), 0)


def test_what_does_not_fit_is_refused(settings):
    with pytest.raises(TensorError, match="format = 'mant5': legal are fp32, fp16"):
        GoldenCache(LLAMA, "mant5")
    with pytest.raises(TensorError, match="tables: missing"):
        GoldenCache(LLAMA, "mant_time")
    with pytest.raises(TensorError, match=r"mean of keys: shape \(2, 2, 8\); the model's is \(3, 2, 8\)"):
        GoldenCache(LlamaConfig(**SHAPE | {"num_hidden_layers": 3}), "mant_time", settings)
    with pytest.raises(TensorError, match=r"attention_mask: shape \(3,\)"):
        GoldenCache(LLAMA, "int8", attention_mask=torch.ones(3))
    cache = GoldenCache(LLAMA, "int8", attention_mask=torch.ones(2, 4))
    with pytest.raises(TensorError, match="attention_mask: 2 sequences; the model runs 3"):
        cache.update(*rows(3, 4), 0)
    mixed = LlamaConfig(**SHAPE)
    mixed.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelError, match="layer_types: 'linear_attention'; legal are full_attention"):
        GoldenCache(mixed, "int8")
    capped = LlamaConfig(**SHAPE)
    capped.attn_logit_softcapping = 50.0
    with pytest.raises(ModelError, match="llama: its softmax sees a shift"):
        GoldenCache(capped, "mant_head", settings)
    GoldenCache(capped, "int8", settings)
