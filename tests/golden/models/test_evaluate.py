"""Perplexity and divergence: protocol, weighting, refusals."""

import math
import re

import pytest
import torch
from tiny_models import CONFIG

from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.errors import ModelError
from kvant.golden.models.evaluate import Losses, Window, cut_windows, evaluate, split_windows, window_losses
from kvant.golden.models.llama import Llama

TOKENS = [n * 31 % CONFIG["vocab_size"] for n in range(50)]


@pytest.fixture
def model(folder):
    return Llama(open_model(folder))


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity(folder):
    checkpoint = open_model(folder)
    name = "model.norm.weight"
    blank = Llama(checkpoint, {name: torch.zeros_like(checkpoint.weight(name))})
    result = evaluate(blank, [torch.tensor(TOKENS)])
    assert result.perplexity == pytest.approx(CONFIG["vocab_size"], rel=1e-6)
    assert result.kl is None


def test_loss_is_that_of_an_independent_computation(model):
    windows = split_windows(TOKENS, 16)
    total, count = 0.0, 0
    for window in windows:
        probabilities = model.logits(window[None])[0].double().softmax(-1)
        for position in range(1, len(window)):
            total -= math.log(probabilities[position - 1, window[position]])
            count += 1
    result = evaluate(model, windows)
    assert result.nll == pytest.approx(total / count, rel=1e-6)
    assert result.tokens == count == 46  # 15 + 15 + 15 + 1


def test_every_token_weighs_the_same_whatever_its_window(model):
    long, short = torch.tensor(TOKENS[:40]), torch.tensor(TOKENS[:3])
    parts = evaluate(model, [long]), evaluate(model, [short])
    both = evaluate(model, [long, short])
    assert both.nll == pytest.approx((39 * parts[0].nll + 2 * parts[1].nll) / 41)


def test_divergence_from_itself_is_zero_and_from_another_positive(folder, model):
    windows = split_windows(TOKENS, 25)
    assert evaluate(model, windows, model).kl == 0
    checkpoint = open_model(folder)
    name = "model.layers.0.self_attn.o_proj.weight"
    other = Llama(checkpoint, {name: checkpoint.weight(name) * 1.5})
    assert evaluate(other, windows, model).kl > 0


def test_protocol_states_windows_length_bos_tokens_and_type(model):
    protocol = evaluate(model, split_windows(TOKENS, 16)).protocol
    for words in ("4 windows", "16 tokens", "no BOS", "46 tokens counted", "float32"):
        assert words in protocol


@pytest.mark.parametrize(("length", "lengths"), [(50, [50]), (64, [50]), (49, [49]), (16, [16, 16, 16, 2])])
def test_windows_cover_the_text_and_a_single_last_token_is_dropped(length, lengths):
    assert [len(window) for window in split_windows(TOKENS, length)] == lengths


@pytest.mark.parametrize(("tokens", "length"), [([], 16), ([1], 16), (TOKENS, 1)])
def test_text_that_predicts_nothing_is_refused(tokens, length):
    with pytest.raises(ModelError):
        split_windows(tokens, length)


def test_no_window_is_refused(model):
    with pytest.raises(ModelError, match="no window"):
        evaluate(model, [])


def test_loss_that_is_not_finite_is_a_failure_with_the_window(folder):
    checkpoint = open_model(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    broken = Llama(checkpoint, {name: torch.full_like(checkpoint.weight(name), math.nan)})
    with pytest.raises(ModelError, match=re.escape("window 0: the loss is nan")):
        evaluate(broken, split_windows(TOKENS, 25))


@pytest.mark.parametrize(
    "length, stride, bos", [(16, None, None), (16, 5, None), (16, 15, 7), (16, None, 7), (64, 9, None), (2, 1, None)]
)
def test_case_53_every_token_is_counted_once_with_any_stride(length, stride, bos):
    windows = cut_windows(TOKENS, length, stride, bos)
    counted = [int(token) for window in windows for token in window.tokens[window.first :]]
    heads = range(0, len(TOKENS), length) if stride is None else [0]  # tokens that nothing stands before
    skipped = set() if bos is not None else set(heads)
    assert counted == [token for position, token in enumerate(TOKENS) if position not in skipped]
    assert all(len(window.tokens) <= length for window in windows)
    assert bos is None or all(int(window.tokens[0]) == bos for window in windows)


def test_larger_stride_takes_samples():
    windows = cut_windows(TOKENS, 8, 20)
    assert [window.tokens.tolist() for window in windows] == [TOKENS[start : start + 8] for start in (0, 20, 40)]
    assert [window.first for window in windows] == [1, 1, 1]


def test_windows_that_predict_nothing_are_refused():
    for arguments, text in (
        ((TOKENS, 1), "window = 1: legal is 2 or more"),
        ((TOKENS, 8, 0), "stride = 0: legal is 1 or more"),
        (([5], 8), "text of 1 tokens: at least 2"),
        (([], 8, None, 0), "text of 0 tokens"),
    ):
        with pytest.raises(ModelError, match=re.escape(text)):
            cut_windows(*arguments)


def test_losses_of_windows_are_those_of_evaluate(model, folder):
    checkpoint = open_model(folder)
    name = "model.layers.0.mlp.up_proj.weight"
    other = Llama(checkpoint, {name: checkpoint.weight(name) * 1.1})
    windows = cut_windows(TOKENS, 16)
    sums = {"same": Losses(), "other": Losses()}
    for window in windows:
        found = window_losses(model, {"same": model, "other": other}, window)
        sums = {key: sums[key] + found[key] for key in sums}
    expected = evaluate(other, [window.tokens for window in windows], model)
    assert sums["other"].perplexity == pytest.approx(expected.perplexity)
    assert sums["other"].divergence[0] == pytest.approx(expected.kl, rel=1e-4)
    assert sums["other"].dnll[0] == pytest.approx(
        expected.nll - evaluate(model, [w.tokens for w in windows]).nll, abs=1e-5
    )
    assert sums["same"].dnll == (0, 0) and sums["same"].divergence == (0, 0)
    assert sums["other"].tokens == expected.tokens


def test_standard_error_is_that_of_the_mean_over_tokens():
    values = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.float64)
    losses = Losses(4, 1.0, float(values.sum()), float(values.square().sum()))
    assert losses.dnll == (pytest.approx(float(values.mean())), pytest.approx(float(values.std()) / 2))


def test_loss_that_is_not_finite_names_the_model(folder, model):
    checkpoint = open_model(folder)
    name = "model.norm.weight"
    broken = Llama(checkpoint, {name: checkpoint.weight(name) * math.nan})
    with pytest.raises(ModelError, match="broken: the loss is nan"):
        window_losses(model, {"broken": broken}, Window(torch.tensor(TOKENS[:8])))
