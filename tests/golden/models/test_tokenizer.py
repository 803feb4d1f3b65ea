"""Text to tokens: rebuilt from a GGUF as from the original's tokenizer.json."""

import pytest

from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.errors import ModelError
from kvant.golden.models.tokenizer import encode, load_tokenizer

TEXTS = ["the other the", " the  the\n\tthe", "in 1984, 12 monkeys", "naïve Ünïcode 你好 🙂", "", "a<|end|>b"]


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_and_folder_give_the_same_tokens_and_the_text_back(folder, gguf_file, text):
    tokenizers = [load_tokenizer(open_model(path)) for path in (folder, gguf_file)]
    tokens = [encode(tokenizer, text) for tokenizer in tokenizers]
    assert tokens[0] == tokens[1]
    assert tokenizers[1].decode(tokens[1], skip_special_tokens=False) == text


def test_merges_are_applied_and_digits_stand_apart(gguf_file):
    tokenizer = load_tokenizer(open_model(gguf_file))
    assert tokenizer.encode("the the 12").tokens == ["the", "Ġthe", "Ġ", "1", "2"]


def test_control_tokens_are_matched_whole(gguf_file):
    assert load_tokenizer(open_model(gguf_file)).encode("a<|end|>").tokens == ["a", "<|end|>"]


def test_folder_without_tokenizer_is_refused_by_its_path(folder, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        load_tokenizer(open_model(tmp_path))


def test_damaged_tokenizer_is_refused(folder, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="not a tokenizer"):
        load_tokenizer(open_model(tmp_path))


@pytest.mark.long
def test_real_tokenizer_equals_the_one_transformers_builds_of_the_same_file(smollm2):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    ours = load_tokenizer(smollm2)
    for text in [*TEXTS, "It's 3.14159; don't\n\n    return x[1:-1]\r\n"]:
        assert encode(ours, text) == reference.encode(text, add_special_tokens=False), text
