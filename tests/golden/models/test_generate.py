"""Decoding token by token with strategies for linear layers and attention."""

import pytest
import torch
from tiny_models import CONFIG, random_tensors, write_folder

from kvant.golden.linear.search import quantize_weights
from kvant.golden.models.chat import chat_prompt, stop_tokens
from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.errors import ModelError
from kvant.golden.models.generate import (
    PARTS,
    Decoder,
    GoldenAttention,
    GoldenLinear,
    LinearLayers,
    Product,
    multiplied_weights,
    part_of,
)
from kvant.golden.models.llama import Llama, exact_attention
from kvant.golden.models.trace import Trace

PROMPT = [5, 80, 7, 200, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("generate") / "tiny", random_tensors())


@pytest.fixture(scope="module")
def checkpoint(folder):
    return open_model(folder)


class Unquantised(LinearLayers):
    """The model's own weights, float32."""

    where = "float32"

    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def multiply(self, name, x):
        return Product(x.float() @ self.checkpoint.weight(name).T)


@pytest.fixture(scope="module")
def weights(checkpoint):
    return {name: quantize_weights(checkpoint.weight(name), 16, name=name) for name in multiplied_weights(checkpoint)}


def decoder(checkpoint, linear):
    return Decoder(checkpoint, linear, GoldenAttention(exact_attention))


def test_step_by_step_is_the_whole_sequence_at_once(checkpoint):
    model = decoder(checkpoint, Unquantised(checkpoint))
    steps = list(model.generate(PROMPT, 6))
    tokens = [step.token for step in steps]
    logits = Llama(checkpoint).logits(torch.tensor([PROMPT + tokens[:-1]]))[0]
    for number, step in enumerate(steps):  # inputs of linear layers are rounded to fp16 here
        torch.testing.assert_close(step.logits, logits[len(PROMPT) - 1 + number], atol=0.05, rtol=0.01)
    assert model.position == len(PROMPT) + 5


def test_prefill_and_single_tokens_give_the_same_bits(checkpoint, weights):
    whole, single = (decoder(checkpoint, GoldenLinear(weights)) for _ in range(2))
    trace = Trace()
    trace.begin_step()
    whole.step(PROMPT, trace)
    for number, token in enumerate(PROMPT):
        parts = Trace()
        parts.begin_step()
        single.step([token], parts)
        name = "step0.model.layers.0.self_attn.v_proj.output"  # nothing before it sees other tokens
        assert parts.arrays[name][0].tobytes() == trace.arrays[name][0, number : number + 1].tobytes()


def test_generation_ends_at_a_stop_token(checkpoint, weights):
    tokens = [step.token for step in decoder(checkpoint, GoldenLinear(weights)).generate(PROMPT, 5)]
    assert len(tokens) == 5
    stopped = decoder(checkpoint, GoldenLinear(weights)).generate(PROMPT, 5, frozenset({tokens[1]}))
    first = tokens.index(tokens[1])
    assert [step.token for step in stopped] == tokens[: first + 1]


def test_ties_of_logits_go_to_the_lowest_token(checkpoint):
    class Flat(Unquantised):
        def multiply(self, name, x):
            y = super().multiply(name, x).y
            return Product(torch.ones_like(y) if part_of(name) == "head" else y)

    assert decoder(checkpoint, Flat(checkpoint)).step(PROMPT).token == 0


def test_the_trace_has_the_order_of_the_model(checkpoint, weights):
    trace = Trace()
    list(decoder(checkpoint, GoldenLinear(weights)).generate(PROMPT, 2, trace=trace))
    names = list(trace.arrays)
    layer = [name.removeprefix("step0.model.layers.0.") for name in names if name.startswith("step0.model.layers.0.")]
    assert layer == [
        *["self_attn.q_proj.input", "self_attn.q_proj.output", "self_attn.k_proj.output", "self_attn.v_proj.output"],
        *["queries", "keys", "values", "self_attn.attention", "self_attn.o_proj.input", "self_attn.o_proj.output"],
        *["mlp.gate_proj.input", "mlp.gate_proj.output", "mlp.up_proj.output"],
        *["mlp.down_proj.input", "mlp.down_proj.output", "hidden"],
    ]
    assert names.index("step0.logits") < names.index("step1.model.layers.0.self_attn.q_proj.input")
    assert trace.arrays["step1.model.layers.1.hidden"].shape == (1, 1, CONFIG["hidden_size"])


def test_time_is_split_into_all_parts(checkpoint, weights):
    step = decoder(checkpoint, GoldenLinear(weights)).step(PROMPT)
    assert set(step.seconds) == set(PARTS)
    assert {part_of(name) for name in multiplied_weights(checkpoint)} == set(PARTS[:4])


def test_context_and_vocabulary_are_respected(checkpoint, weights):
    model = decoder(checkpoint, GoldenLinear(weights))
    for tokens, match in [([], "0 behind 0"), ([1] * 129, "129 behind 0; legal is 1 to 128"), ([300], "0..299")]:
        with pytest.raises(ModelError, match=match):
            model.step(tokens)


def test_chat_template_of_the_folder_is_rendered(folder, checkpoint):
    with pytest.raises(ModelError, match="no chat template"):
        chat_prompt(checkpoint, "Hello")
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    path = folder / "tokenizer_config.json"
    try:
        for text, expected in [(template, "<user>Hello$"), ("{% for %}", None), ("{{ raise_it() }}", None)]:
            path.write_text(f'{{"chat_template": "{text}", "eos_token": "$"}}')
            if expected is None:
                with pytest.raises(ModelError, match="cannot be rendered"):
                    chat_prompt(checkpoint, "Hello")
            else:
                assert chat_prompt(checkpoint, "Hello") == expected
    finally:
        path.unlink()


def test_end_tokens_are_those_of_the_configuration(folder, checkpoint):
    assert stop_tokens(checkpoint) == frozenset()
    path = folder / "generation_config.json"
    try:
        path.write_text('{"eos_token_id": [3, 4]}')
        assert stop_tokens(checkpoint) == {3, 4}
    finally:
        path.unlink()
