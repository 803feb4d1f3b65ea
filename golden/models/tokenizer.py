"""Text to token numbers and back, with the vocabulary that comes with the model."""

from pathlib import Path

from kvant.golden.models.checkpoint import Checkpoint
from kvant.golden.models.errors import ModelError

_CONTROL_TOKEN = 3  # token type of GGUF: matched as a whole in the text, never produced by merges


def load_tokenizer(checkpoint: Checkpoint):
    """Tokenizer of a model, a `tokenizers.Tokenizer`.

    A folder brings its `tokenizer.json`. From a GGUF it is rebuilt of vocabulary, merges and the name of the split
    rule: byte-level BPE with the rules ``smollm`` (GPT-2's, digits apart) and ``gpt-2``.

    Raises
    ------
    ModelError
        No tokenizer beside the weights, or a kind that cannot be rebuilt.
    """
    from tokenizers import Tokenizer

    source = checkpoint.tokenizer_source
    if isinstance(source, dict):
        return _from_gguf(source)
    path = Path(source) / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path}: missing; text cannot become tokens")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: not a tokenizer ({error})") from None


def _from_gguf(metadata: dict):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, rule = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or rule not in ("smollm", "gpt-2", "default"):
        raise ModelError(f"tokenizer.ggml = {kind}/{rule}: only gpt2/smollm and gpt2/gpt-2 can be rebuilt from a GGUF")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if rule == "smollm" else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    control = [token for token, type_ in zip(tokens, types, strict=False) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def encode(tokenizer, text: str) -> list[int]:
    """Token numbers of a text, nothing added in front or behind."""
    return tokenizer.encode(text, add_special_tokens=False).ids
