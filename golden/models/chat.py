"""What surrounds a prompt and ends an answer: chat template and end tokens that come with a model."""

import json
from pathlib import Path

from kvant.golden.models.checkpoint import Checkpoint
from kvant.golden.models.errors import ModelError
from kvant.golden.models.tokenizer import load_tokenizer


def chat_prompt(checkpoint: Checkpoint, text: str) -> str:
    """The first message of a user in the model's own template, up to where the answer begins.

    Raises
    ------
    ModelError
        The model brings no template, or one that cannot be rendered.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = checkpoint.tokenizer_source
    metadata = source if isinstance(source, dict) else _file(source, "tokenizer_config.json")
    template = metadata.get("tokenizer.chat_template" if isinstance(source, dict) else "chat_template")
    if not isinstance(template, str):
        raise ModelError(
            f"{checkpoint.path.name}: brings no chat template; without one a prompt is legal as it is (raw)"
        )
    tokens = {name: token for name in ("bos_token", "eos_token") if isinstance(token := metadata.get(name), str)}
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": text}], add_generation_prompt=True, **tokens
        )
    except TemplateError as error:
        raise ModelError(f"{checkpoint.path.name}: chat template cannot be rendered ({error})") from None


def stop_tokens(checkpoint: Checkpoint) -> frozenset[int]:
    """Token numbers that end an answer; none if the model does not say."""
    source = checkpoint.tokenizer_source
    if isinstance(source, dict):
        found = source.get("tokenizer.ggml.eos_token_id")
    else:
        found = next(
            (
                value
                for name in ("generation_config.json", "config.json")
                if (value := _file(source, name).get("eos_token_id")) is not None
            ),
            None,
        )
    numbers = set(found if isinstance(found, list) else [] if found is None else [found])
    end = load_tokenizer(checkpoint).token_to_id("<|im_end|>")  # ends a message of the widespread template
    return frozenset(int(number) for number in numbers | ({end} - {None}))


def _file(folder: Path, name: str) -> dict:
    path = Path(folder) / name
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from None
