"""Forward of a Llama-like model in plain torch, float32: the reference that quantised models are compared with.

Weights are read from a `Checkpoint` at their first use and kept. Layers can be run one by one, so that calibration of
a large model holds one layer at a time.
"""

import copy
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from kvant.golden.models.checkpoint import Checkpoint
from kvant.golden.models.errors import ModelError

Observer = Callable[[str, torch.Tensor], None]
"""Called during a forward with a name and a tensor: for every linear weight its name and its input [B, T, K], and for
every layer ``model.layers.5.queries`` [B, Hq, T, d], ``.keys`` and ``.values`` [B, Hkv, T, d], all after RoPE."""

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal attention of a layer: its number, queries [B, Hq, T, d], keys and values [B, Hkv, T, d] of positions 0 to T-1,
all after RoPE, to the mixed values [B, Hq, T, d]."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Scale the last dimension to a mean square of 1, then by *weight*."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions on [..., T, d]: pairs (j, j + d/2) turn by the angles of [T, d/2] tables."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def exact_attention(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention over keys and values as they are: the `Attention` of a model whose cache loses nothing."""
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


class Llama:
    """A model ready to run.

    Parameters
    ----------
    checkpoint : Checkpoint
        Where weights come from.
    replacements : mapping, optional
        Float32 weights that take the place of the checkpoint's, by name: dequantised ones, to measure their loss.
    attention : Attention
        What the layers attend with: `exact_attention`, or one over a quantised cache
        (`kvant.golden.kvcache.attention`).

    Raises
    ------
    ModelError
        When the checkpoint does not describe a model that this forward knows.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        replacements: Mapping[str, torch.Tensor] | None = None,
        attention: Attention = exact_attention,
    ):
        self.config = checkpoint.config
        self.attention = attention
        self.checkpoint = checkpoint
        self._replacements = self._checked(replacements or {})
        self._kept: dict[str, torch.Tensor] = {}
        self._inputs: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._frequencies = self.config.inverse_frequencies()

    def _checked(self, replacements: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, value in replacements.items():
            tensors = self.checkpoint.tensors
            if name not in tensors or tuple(value.shape) != tensors[name].shape:
                raise ModelError(
                    f"{name}: shape {tuple(value.shape)} replaces no tensor of {self.checkpoint.path.name}"
                )
        return dict(replacements)

    def replacing(self, replacements: Mapping[str, torch.Tensor]) -> "Llama":
        """The same model, all other weights shared, with these replacements and no others."""
        other = copy.copy(self)
        other._replacements = self._checked(replacements)
        return other

    def rounding(self, inputs: Callable[[torch.Tensor], torch.Tensor]) -> "Llama":
        """The same model with something done to the inputs of the decoder layers' linear layers."""
        other = copy.copy(self)
        other._inputs = inputs
        return other

    def attending(self, attention: Attention) -> "Llama":
        """The same model, its weights shared, with another attention."""
        other = copy.copy(self)
        other.attention = attention
        return other

    def weight(self, name: str) -> torch.Tensor:
        """Float32 values in use."""
        if name in self._replacements:
            return self._replacements[name]
        if name not in self._kept:
            self._kept[name] = self.checkpoint.weight(name)
        return self._kept[name]

    def _linear(self, name: str, x: torch.Tensor, observe: Observer | None) -> torch.Tensor:
        if observe is not None:
            observe(f"{name}.weight", x)
        if self._inputs is not None and name.startswith("model.layers."):
            x = self._inputs(x)
        bias = self.weight(f"{name}.bias") if f"{name}.bias" in self.checkpoint.tensors else None
        return functional.linear(x, self.weight(f"{name}.weight"), bias)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """First hidden states [B, T, hidden] of token numbers [B, T].

        Raises
        ------
        ModelError
            A token number outside the vocabulary.
        """
        tokens = tokens.long()
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.vocabulary:
            raise ModelError(
                f"tokens = {int(tokens.min())}..{int(tokens.max())}: legal is 0..{self.config.vocabulary - 1}"
            )
        return self.weight("model.embed_tokens.weight")[tokens]

    def layer(self, number: int, hidden: torch.Tensor, observe: Observer | None = None, first: int = 0) -> torch.Tensor:
        """One decoder layer on hidden states [B, T, hidden] whose first token has position *first*."""
        config, base = self.config, f"model.layers.{number}"
        positions = torch.arange(first, first + hidden.shape[1], dtype=torch.float32)
        angles = torch.outer(positions, self._frequencies)
        cosine, sine = angles.cos(), angles.sin()

        def heads(name: str, x: torch.Tensor) -> torch.Tensor:
            projected = self._linear(f"{base}.self_attn.{name}", x, observe)
            return projected.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)

        x = rms_norm(hidden, self.weight(f"{base}.input_layernorm.weight"), config.norm_epsilon)
        queries = rotate(heads("q_proj", x), cosine, sine)
        keys = rotate(heads("k_proj", x), cosine, sine)
        values = heads("v_proj", x)
        if observe is not None:
            for name, value in (("queries", queries), ("keys", keys), ("values", values)):
                observe(f"{base}.{name}", value)
        mixed = self.attention(number, queries, keys, values)
        hidden = hidden + self._linear(f"{base}.self_attn.o_proj", mixed.transpose(1, 2).flatten(2), observe)

        x = rms_norm(hidden, self.weight(f"{base}.post_attention_layernorm.weight"), config.norm_epsilon)
        gate = functional.silu(self._linear(f"{base}.mlp.gate_proj", x, observe))
        up = self._linear(f"{base}.mlp.up_proj", x, observe)
        return hidden + self._linear(f"{base}.mlp.down_proj", gate * up, observe)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, vocabulary] of the last hidden states."""
        x = rms_norm(hidden, self.weight("model.norm.weight"), self.config.norm_epsilon)
        return self._linear("model.embed_tokens" if self.checkpoint.tied else "lm_head", x, None)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, observe: Observer | None = None) -> torch.Tensor:
        """Logits [B, T, vocabulary] of token numbers [B, T], causal, positions from 0."""
        return self.head(self.hidden(tokens, observe))

    @torch.no_grad()
    def hidden(self, tokens: torch.Tensor, observe: Observer | None = None) -> torch.Tensor:
        """Last hidden states [B, T, hidden] of token numbers [B, T]: what `head` takes."""
        hidden = self.embed(tokens)
        for number in range(self.config.layers):
            hidden = self.layer(number, hidden, observe)
        return hidden
