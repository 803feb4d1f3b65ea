"""Greedy decoding of a model whose linear layers and attention are strategies.

The host side is float32: embedding, norms, rotary positions, SiLU, residual sums, biases. Where it hands over, it
rounds once: activations of a linear layer become fp16 at the port, saturating at +-65504; outputs come back as fp32.
What attention makes of queries, keys and values is its own matter.
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvant.golden.kvcache.attention import to_port
from kvant.golden.linear.engine import multiply
from kvant.golden.linear.weights import QuantizedWeights
from kvant.golden.models.checkpoint import Checkpoint
from kvant.golden.models.errors import ModelError
from kvant.golden.models.llama import Attention, Llama, Observer
from kvant.golden.models.trace import Trace
from kvant.golden.numeric.int8 import quantize_int8

PARTS = ("q/k/v", "o", "mlp", "head", "attention", "host")
"""What time is split into; the first four are linear layers."""

_PART_OF = {"q_proj": "q/k/v", "k_proj": "q/k/v", "v_proj": "q/k/v", "o_proj": "o"}
_PART_OF |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp")
_PART_OF |= dict.fromkeys(("lm_head", "embed_tokens"), "head")


def head_name(checkpoint: Checkpoint) -> str:
    """Name of the weight of the output projection."""
    return "model.embed_tokens.weight" if checkpoint.tied else "lm_head.weight"


def part_of(name: str) -> str:
    """The part of `PARTS` that a weight belongs to."""
    return _PART_OF[name.removesuffix(".weight").rpartition(".")[2]]


class Product(NamedTuple):
    """Output of a linear layer.

    Attributes
    ----------
    y : f32 [T, N]
    cycles : int
        Clock cycles of the hardware; 0 where none ran.
    weight_bytes : int
        What it read of the weights: codes, scales and coefficients.
    """

    y: torch.Tensor
    cycles: int = 0
    weight_bytes: int = 0


class LinearLayers(ABC):
    """All matrix products of a model, by name of the weight."""

    where: str
    """Where they run, in words."""

    @abstractmethod
    def multiply(self, name: str, x: torch.Tensor) -> Product:
        """The product of activations f16 [T, K] with a weight."""

    def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Free what runs them."""


class GoldenLinear(LinearLayers):
    """The golden model: the bits of the hardware, in PyTorch.

    Parameters
    ----------
    weights : mapping of str to QuantizedWeights
        By name.
    """

    where = "golden model"

    def __init__(self, weights: Mapping[str, QuantizedWeights]):
        self._weights = weights

    def multiply(self, name: str, x: torch.Tensor) -> Product:
        weights = self._weights[name]
        groups = quantize_int8(x, weights.group)
        return Product(multiply(groups.q, groups.scale, weights))


class Mixed(NamedTuple):
    """Output of attention.

    Attributes
    ----------
    y : f32 [Hq, n, d]
    cycles : int
        Clock cycles of the hardware, caching included; 0 where none ran.
    cache_bytes : int
        What it read and wrote of the cache: codes, rows, scales, coefficients, codebooks.
    """

    y: torch.Tensor
    cycles: int = 0
    cache_bytes: int = 0


class AttentionBackend(ABC):
    """Attention with its cache, which grows by the tokens of every call."""

    where: str
    """Where it runs, in words."""

    @abstractmethod
    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Mixed:
        """Append keys and values of new tokens and attend to everything up to each of them.

        Parameters
        ----------
        layer : int
        queries : f32 [Hq, n, d]
        keys, values : f32 [Hkv, n, d]
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Free what runs it."""


class GoldenAttention(AttentionBackend):
    """A strategy of the golden model over the rows of all calls.

    Parameters
    ----------
    strategy : Attention
        Causal attention over a whole sequence, for instance `kvant.golden.pq.attention.PqAttention`. What it gives for
        a position must depend on rows up to there alone.
    """

    where = "golden model"

    def __init__(self, strategy: Attention):
        self._strategy = strategy
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Mixed:
        if layer in self._rows:
            keys, values = (torch.cat(pair, 1) for pair in zip(self._rows[layer], (keys, values), strict=True))
        self._rows[layer] = keys, values
        new, known = queries.shape[1], keys.shape[1] - queries.shape[1]
        # The strategy answers for every position; those before have been asked and are asked with a query of zeros.
        queries = torch.cat((queries.new_zeros(len(queries), known, queries.shape[2]), queries), 1)
        return Mixed(self._strategy(layer, queries[None], keys[None], values[None])[0][:, known : known + new])


@dataclass(frozen=True)
class Step:
    """What one step of decoding gave.

    Attributes
    ----------
    token : int
        The next token, the lowest number of those with the greatest logit.
    tokens : int
        Tokens that were taken in: the prompt in the first step, then one.
    hidden : f32 [tokens, hidden]
        Last hidden states.
    logits : f32 [vocabulary]
        Of the last token.
    seconds, cycles, memory_bytes : Counter
        By part, see `PARTS`. Bytes are those of weights, and in attention of the cache, read and written.
    """

    token: int
    tokens: int
    hidden: torch.Tensor
    logits: torch.Tensor
    seconds: Counter
    cycles: Counter
    memory_bytes: Counter


class Decoder(Llama):
    """A model that takes in tokens call by call.

    Parameters
    ----------
    checkpoint : Checkpoint
        Gives everything but the weights of linear layers.
    linear : LinearLayers
    attention : AttentionBackend

    Raises
    ------
    ModelError
        When the checkpoint does not describe a model that this forward knows.
    """

    def __init__(self, checkpoint: Checkpoint, linear: LinearLayers, attention: AttentionBackend):
        super().__init__(checkpoint, attention=self._attend)
        self.linear = linear
        self.backend = attention
        self.position = 0
        self._seconds, self._cycles, self._bytes = Counter(), Counter(), Counter()
        self._observe: Observer | None = None

    def close(self) -> None:
        """Free what runs linear layers and attention."""
        self.linear.close()
        self.backend.close()

    def _linear(self, name: str, x: torch.Tensor, observe: Observer | None) -> torch.Tensor:
        if observe is not None:
            observe(f"{name}.weight", x)
        part, begin = part_of(name), time.perf_counter()
        product = self.linear.multiply(f"{name}.weight", to_port(x.flatten(0, -2)))
        self._seconds[part] += time.perf_counter() - begin
        self._cycles[part] += product.cycles
        self._bytes[part] += product.weight_bytes
        y = product.y.unflatten(0, x.shape[:-1])
        if f"{name}.bias" in self.checkpoint.tensors:
            y = y + self.weight(f"{name}.bias")
        if observe is not None:
            observe(f"{name}.output", y)
        return y

    def _attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        mixed = self.backend.attend(layer, queries[0], keys[0], values[0])
        self._seconds["attention"] += time.perf_counter() - begin
        self._cycles["attention"] += mixed.cycles
        self._bytes["attention"] += mixed.cache_bytes
        if self._observe is not None:
            self._observe(f"model.layers.{layer}.self_attn.attention", mixed.y)
        return mixed.y[None]

    @torch.no_grad()
    def step(self, tokens: Sequence[int], observe: Observer | None = None) -> Step:
        """Take in tokens and choose the next one.

        Raises
        ------
        ModelError
            No token, one outside the vocabulary, or more than the model's context holds.
        """
        if not tokens or self.position + len(tokens) > self.config.context:
            raise ModelError(
                f"tokens: {len(tokens)} behind {self.position}; legal is 1 to {self.config.context - self.position}"
            )
        for counter in (self._seconds, self._cycles, self._bytes):
            counter.clear()
        begin = time.perf_counter()
        self._observe = observe
        hidden = self.embed(torch.tensor(tokens)[None])
        for number in range(self.config.layers):
            hidden = self.layer(number, hidden, observe, self.position)
            if observe is not None:
                observe(f"model.layers.{number}.hidden", hidden)
        logits = self.head(hidden[:, -1:])[0, 0]
        if observe is not None:
            observe("logits", logits)
        if not bool(logits.isfinite().all()):
            raise ModelError(f"position {self.position + len(tokens) - 1}: the model's logits are not finite")
        self.position += len(tokens)
        token = int((logits == logits.max()).nonzero()[0])
        seconds = Counter(self._seconds)
        seconds["host"] = time.perf_counter() - begin - seconds.total()
        return Step(token, len(tokens), hidden[0], logits, seconds, Counter(self._cycles), Counter(self._bytes))

    def generate(
        self,
        prompt: Sequence[int],
        count: int,
        stop: frozenset[int] = frozenset(),
        trace: Trace | None = None,
    ) -> Iterator[Step]:
        """Decode up to *count* tokens greedily; the last step is the one whose token is in *stop*.

        Parameters
        ----------
        prompt : sequence of int
        count : int
        stop : set of int
        trace : Trace, optional
            Is told everything.
        """
        tokens = list(prompt)
        for _ in range(count):
            if trace is not None:
                trace.begin_step()
            step = self.step(tokens, trace)
            yield step
            if step.token in stop:
                return
            tokens = [step.token]


def multiplied_weights(checkpoint: Checkpoint) -> list[str]:
    """Names of the weights that `Decoder` multiplies with, in the order of the model."""
    attention = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    mlp = [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    names = [
        f"model.layers.{layer}.{name}.weight"
        for layer in range(checkpoint.config.layers)
        for name in (*attention, *mlp)
    ]
    return [*names, head_name(checkpoint)]
