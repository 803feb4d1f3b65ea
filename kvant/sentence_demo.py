"""A short sentence of a real model in the demo: linear layers and attention in the compiled RTL."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvant.errors import InputError

if TYPE_CHECKING:
    from kvant.config import Config
    from kvant.golden.kvcache.calibration import CacheTables
    from kvant.golden.models.config import ModelConfig
    from kvant.golden.models.generate import Decoder

MODEL = "smollm2"
PROMPT = "The capital of France is"
TOKENS = 4
CACHE = "mant"
SINKS = 4

NEEDED_MODULES = ("gguf", "tokenizers")
"""What the model is read with, which a smaller installation leaves out."""

OPTIONS = {"multiplier": "dsp", "int8_groups": False, "queries": 3, "sinks": SINKS}
"""What is set beside the demo's configuration: as simulates fastest."""

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Sentence:
    """What was decoded.

    Attributes
    ----------
    prompt, text : str
        What was given, and what was decoded behind it.
    tokens : int
        Decoded ones.
    cycles, attention_cycles : int
        Of all steps, the prompt included.
    """

    prompt: str
    text: str
    tokens: int
    cycles: int
    attention_cycles: int


def skip_reason(chosen: "Config") -> str | None:
    """Why nothing can be decoded, in one line; None if it can. Fetches the model where it is not there."""
    from kvant.golden.models import fetch
    from kvant.golden.models.errors import ModelError

    missing = [name for name in NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        return f"the Python packages {', '.join(missing)} are missing: pip install 'kvant[llm]'"
    if chosen.thresholds is None:
        return "the configuration's coefficients have no thresholds"
    try:
        fetch.fetch(MODEL)
    except ModelError as error:
        return f"the model is missing: {' '.join(str(error).split())}"
    return None


def plain_tables(chosen: "Config", shape: "ModelConfig") -> "CacheTables":
    """Tables of caches that nothing was calibrated for: the configuration's, no mean, no floors."""
    import torch

    from kvant.golden.kvcache.calibration import CacheTables
    from kvant.golden.kvcache.choice import Tables

    def layered(values):
        return [list(values)] * shape.layers

    table = Tables.of(layered(chosen.coefficients), layered(chosen.thresholds), chosen.cache.statistic)
    nothing = torch.zeros(shape.layers, shape.kv_heads, shape.head_dim, dtype=torch.float16)
    kinds = dict.fromkeys(("key_head", "value_time"), table)
    return CacheTables(chosen.linear.group, SINKS, nothing, nothing, nothing, kinds)


def decode(chosen: "Config", report: Report) -> Sentence:
    """Decode `TOKENS` tokens behind `PROMPT`.

    Raises
    ------
    InputError
        Of the configuration no engine can be built for this model.
    """
    from kvant.golden.models.checkpoint import open_model
    from kvant.golden.models.tokenizer import load_tokenizer

    checkpoint = open_model(MODEL)
    decoder, prompt = prepare(chosen, checkpoint, report)
    try:
        steps = list(decoder.generate(prompt, TOKENS))
    finally:
        decoder.close()
    return Sentence(
        prompt=PROMPT,
        text=load_tokenizer(checkpoint).decode([step.token for step in steps]),
        tokens=len(steps),
        cycles=sum(step.cycles.total() for step in steps),
        attention_cycles=sum(step.cycles["attention"] for step in steps),
    )


def prepare(chosen: "Config", checkpoint, report: Report) -> "tuple[Decoder, list[int]]":
    """The decoder in the RTL, and the prompt's tokens."""
    from kvant import config
    from kvant.commands import run
    from kvant.golden.kvcache.formats import CacheSettings
    from kvant.hw.parameters import ParameterError
    from kvant.run_attention import plan_attention

    fields = {name: value for name, value in chosen.as_dict().items() if value is not None}
    fields.pop("capacity", None)
    chosen = config.compose([("demo", fields | OPTIONS)])
    prompt = run.encode_prompt(checkpoint, PROMPT, raw=True, count=TOKENS)
    settings = CacheSettings.of(plain_tables(chosen, checkpoint.config), None)
    try:
        plan = plan_attention(CACHE, settings, chosen, checkpoint.config, tokens=len(prompt) + TOKENS)
        weights = run.model_weights(checkpoint, chosen, None, report)
        return run.rtl_decoder(checkpoint, chosen, weights, plan, report), prompt
    except ParameterError as error:
        raise InputError(str(error)) from None
