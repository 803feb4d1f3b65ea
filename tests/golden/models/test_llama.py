"""The forward, against transformers' implementation of the same model and against itself."""

import pytest
import torch
from tiny_models import CONFIG, random_tensors, write_folder

from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.errors import ModelError
from kvant.golden.models.evaluate import evaluate
from kvant.golden.models.llama import Llama
from kvant.golden.models.tokenizer import encode, load_tokenizer

TOKENS = torch.arange(40).reshape(2, 20) * 7 % CONFIG["vocab_size"]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "change",
    [{}, {"tie_word_embeddings": False}, {"rope_scaling": LLAMA3_ROPE, "max_position_embeddings": 512}],
    ids=["tied", "own_head", "llama3_rope"],
)
def test_logits_equal_those_of_transformers(tmp_path, change):
    from transformers import AutoModelForCausalLM

    config = CONFIG | change
    write_folder(tmp_path, random_tensors(config), config)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(TOKENS).logits
    torch.testing.assert_close(Llama(open_model(tmp_path)).logits(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_gguf_gives_the_logits_of_the_folder(folder, gguf_file):
    from_folder, from_gguf = (Llama(open_model(path)).logits(TOKENS) for path in (folder, gguf_file))
    torch.testing.assert_close(from_gguf, from_folder, rtol=1e-5, atol=1e-5)


def test_a_later_token_changes_no_earlier_logits(folder):
    model = Llama(open_model(folder))
    changed = TOKENS.clone()
    changed[:, -1] += 1
    torch.testing.assert_close(model.logits(changed)[:, :-1], model.logits(TOKENS)[:, :-1], rtol=0, atol=1e-5)


def test_observer_sees_the_input_of_every_linear_weight_and_the_heads(folder):
    checkpoint = open_model(folder)
    seen = {}
    Llama(checkpoint).logits(TOKENS, lambda name, value: seen.update({name: value.shape}))
    for info in checkpoint.linear_weights:
        assert seen[info.name] == (2, 20, info.shape[1])
    assert seen["model.layers.1.keys"] == seen["model.layers.1.values"] == (2, 2, 20, 8)
    assert seen["model.layers.1.queries"] == (2, 6, 20, 8)


def test_replaced_weights_are_used(folder):
    checkpoint = open_model(folder)
    name = "model.layers.0.mlp.down_proj.weight"
    zero = {name: torch.zeros_like(checkpoint.weight(name))}
    assert not torch.equal(Llama(checkpoint, zero).logits(TOKENS), Llama(checkpoint).logits(TOKENS))
    same = {name: checkpoint.weight(name)}
    assert torch.equal(Llama(checkpoint, same).logits(TOKENS), Llama(checkpoint).logits(TOKENS))


def test_replacement_of_another_shape_is_refused(folder):
    with pytest.raises(ModelError, match="down_proj"):
        Llama(open_model(folder), {"model.layers.0.mlp.down_proj.weight": torch.zeros(2, 2)})


def test_token_outside_the_vocabulary_is_refused(folder):
    with pytest.raises(ModelError, match=r"legal is 0\.\.299"):
        Llama(open_model(folder)).logits(torch.tensor([[0, 300]]))


@pytest.mark.long
def test_real_model_predicts_the_licence_text_as_before(smollm2):
    """The figure of the forward whose perplexity on eight windows of WikiText-2 was 22.904."""
    from pathlib import Path

    text = (Path(__file__).parents[3] / "LICENSE").read_text(encoding="utf-8")
    tokens = torch.tensor(encode(load_tokenizer(smollm2), text)[:256])
    assert evaluate(Llama(smollm2), [tokens]).nll == pytest.approx(2.876, abs=0.01)
