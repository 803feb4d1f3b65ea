"""Perplexity and divergence: protocol, weighting, refusals."""

import math
import re

import pytest
import torch
from tiny_models import CONFIG

from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.errors import ModelError
from kvant.golden.models.evaluate import evaluate, split_windows
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
