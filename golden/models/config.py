"""Shape of a Llama-like model, from a Hugging Face `config.json` or the metadata of a GGUF."""

from dataclasses import dataclass

import torch

from kvant.golden.models.errors import ModelError

ARCHITECTURES = ("llama", "mistral", "qwen2")
"""Model types whose forward is the one of `kvant.golden.models.llama`."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelConfig:
    """What the forward needs to know.

    Parameters
    ----------
    architecture : str
        Model type, one of `ARCHITECTURES`.
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocabulary : int
        Shape. `heads` is a multiple of `kv_heads`; query head ``h`` uses KV head ``h * kv_heads // heads``.
    norm_epsilon : float
        Added to the mean square in RMSNorm.
    rope_theta : float
        Base of the rotary frequencies.
    rope_scaling : RopeScaling, optional
        Llama 3's scaling; None leaves the frequencies alone.
    context : int
        Longest sequence the model was made for, in tokens.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    context: int

    def __post_init__(self):
        if self.architecture not in ARCHITECTURES:
            raise ModelError(f"architecture = {self.architecture!r}: the forward knows {', '.join(ARCHITECTURES)}")
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ModelError(f"heads = {self.heads}: must be a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim = {self.head_dim}: must be even, rotary positions turn pairs")

    def inverse_frequencies(self) -> torch.Tensor:
        """Rotary frequencies in radians per token, f32 [head_dim / 2]."""
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        frequency = self.rope_theta**-exponent
        if (scaling := self.rope_scaling) is not None:
            wavelength = 2 * torch.pi / frequency
            low = scaling.original_context / scaling.low_frequency_factor
            high = scaling.original_context / scaling.high_frequency_factor
            smooth = (scaling.original_context / wavelength - scaling.low_frequency_factor) / (
                scaling.high_frequency_factor - scaling.low_frequency_factor
            )
            between = (1 - smooth) * frequency / scaling.factor + smooth * frequency
            frequency = torch.where(
                wavelength > low, frequency / scaling.factor, torch.where(wavelength < high, frequency, between)
            )
        return frequency.float()


def from_hugging_face(config: dict) -> ModelConfig:
    """Configuration from the contents of a `config.json`.

    Raises
    ------
    ModelError
        A missing entry, an unknown architecture or a kind of rotary scaling that the forward does not know.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ModelError(f"rope_type = {kind!r}: the forward knows default and llama3")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act = {activation!r}: the forward knows silu")
    context = int(config.get("max_position_embeddings", 2048))
    if config.get("use_sliding_window", True) and config.get("sliding_window"):
        context = min(context, int(config["sliding_window"]))  # up to there, all keys are seen
    try:
        scaling = None
        if kind == "llama3":
            scaling = RopeScaling(
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                int(rope["original_max_position_embeddings"]),
            )
        heads = int(config["num_attention_heads"])
        return ModelConfig(
            architecture=config["model_type"],
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            norm_epsilon=float(config["rms_norm_eps"]),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            rope_scaling=scaling,
            context=context,
        )
    except KeyError as missing:
        raise ModelError(f"config.json: entry {missing} is missing") from None


def from_gguf(metadata: dict) -> ModelConfig:
    """Configuration from GGUF key-value pairs.

    Raises
    ------
    ModelError
        A missing key, an unknown architecture or a kind of rotary scaling that the forward does not know.
    """
    try:
        architecture = metadata["general.architecture"]
        if architecture not in ARCHITECTURES:
            raise ModelError(f"general.architecture = {architecture!r}: the forward knows {', '.join(ARCHITECTURES)}")
        value = {key.removeprefix(architecture + "."): v for key, v in metadata.items()}
        heads = int(value["attention.head_count"])
        hidden = int(value["embedding_length"])
        head_dim = int(value.get("attention.key_length", hidden // heads))
        rotated = int(value.get("rope.dimension_count", head_dim))
        if rotated != head_dim:
            raise ModelError(f"rope.dimension_count = {rotated}: the forward rotates whole heads of {head_dim}")
        kind = value.get("rope.scaling.type", "none")
        if kind != "none" or "rope_freqs.weight" in metadata:
            raise ModelError(f"rope.scaling.type = {kind!r}: the forward knows none in a GGUF; use the original folder")
        return ModelConfig(
            architecture=architecture,
            layers=int(value["block_count"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(value.get("attention.head_count_kv", heads)),
            head_dim=head_dim,
            intermediate=int(value["feed_forward_length"]),
            vocabulary=int(value.get("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))),
            norm_epsilon=float(value["attention.layer_norm_rms_epsilon"]),
            rope_theta=float(value.get("rope.freq_base", 10000.0)),
            rope_scaling=None,
            context=int(value.get("context_length", 2048)),
        )
    except KeyError as missing:
        raise ModelError(f"GGUF metadata: key {missing} is missing") from None
