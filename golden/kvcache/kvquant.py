"""KVQuant's cache (Hooper et al., NeurIPS 2024), as far as a cache of rows after RoPE can hold it.

Keys: every channel has sixteen levels of its own, found by k-means on calibration text ahead of time; values: every
token has an offset and a scale over all heads, and the sixteen levels of NF4 between. Optionally the elements of a
token that fit worst, 1 % of all its heads', are stored apart in fp16. What differs from the article:

- it quantises keys before RoPE and turns them at every use; a cache that takes keys after RoPE cannot;
- its levels ("nuq") are one table per layer, weighted with the loss's sensitivity, scaled per channel or token. Here
  levels of keys are fitted per channel, unweighted, which holds more; those of values are NF4's, which holds less;
- its outliers of keys exceed thresholds of their channel; here they are the elements with the largest error of a token;
- it keeps the first token in fp16; here the first tokens are INT8 sinks, as in the other formats.
"""

import math
from dataclasses import dataclass

import torch

from kvant.golden.formats.base import divide, nearest
from kvant.golden.formats.baselines import NF4_LEVELS
from kvant.golden.kvcache.attention import Footprint, Int8Head, Store, View, to_port
from kvant.golden.kvcache.rows import centred
from kvant.golden.numeric.rounding import FP16_MAX
from kvant.golden.pq.attention import Pq

OUTLIER_BITS = 32
"""Bits of an element stored apart: its value in fp16 and its place."""


def outlier_count(fraction: float, elements: int) -> int:
    """Elements of a token that are stored apart."""
    return math.ceil(fraction * elements)


def largest_of_tokens(x: torch.Tensor, count: int) -> torch.Tensor:
    """The *count* elements of largest magnitude of every token, over all heads: bool of the shape [H, T, d] of *x*."""
    heads, tokens, d = x.shape
    rows = x.abs().transpose(0, 1).reshape(tokens, heads * d)
    chosen = torch.zeros(rows.shape, dtype=torch.bool).scatter_(1, rows.topk(count, dim=1).indices, True)
    return chosen.view(tokens, heads, d).transpose(0, 1)


@dataclass(frozen=True)
class KeyLevels(Store):
    """Keys at the levels of their channels.

    Parameters
    ----------
    levels : Pq
        With sub-spaces of one element and no map.
    heads : int
        KV heads.
    outliers : float
        Fraction of elements stored apart.
    """

    levels: Pq
    heads: int
    outliers: float = 0.0

    @property
    def mean(self) -> torch.Tensor | None:
        """What is missing in all rows, f16 [L, H, d]."""
        return self.levels.mean

    def view(self, layer: int, x: torch.Tensor) -> View:
        rows = self.levels.view(layer, x).finished
        exact = centred(to_port(x), None if self.mean is None else self.mean[layer][..., None, :]).float()
        if count := outlier_count(self.outliers, self.heads * x.shape[-1]):
            apart = largest_of_tokens(exact - rows, count)
            apart[..., : self.levels.sinks, :] = False
            rows = torch.where(apart, exact, rows)
        return View(rows, rows)

    def footprint(self, head_dim: int) -> Footprint:
        inner, elements = self.levels.footprint(head_dim), self.heads * head_dim
        bits = inner.history + OUTLIER_BITS * outlier_count(self.outliers, elements) / elements
        return Footprint(bits, bits, inner.sink, 1, inner.sinks, sequence=inner.sequence)


@dataclass(frozen=True)
class TokenLevels(Store):
    """Values at levels between the least and the largest element of their token, over all heads.

    Parameters
    ----------
    fresh : Store
        How sinks are held.
    heads : int
        KV heads.
    sinks : int
    outliers : float
        Fraction of elements stored apart, those farthest from the token's mean; they do not stretch the scale.
    """

    fresh: Int8Head
    heads: int
    sinks: int = 0
    outliers: float = 0.0

    def view(self, layer: int, x: torch.Tensor) -> View:
        x = to_port(x).float()
        apart = torch.zeros(x.shape, dtype=torch.bool)
        if count := outlier_count(self.outliers, self.heads * x.shape[-1]):
            apart = largest_of_tokens(x - x.mean((0, 2), keepdim=True), count)
        low = x.masked_fill(apart, math.inf).amin((0, 2), keepdim=True)
        high = x.masked_fill(apart, -math.inf).amax((0, 2), keepdim=True)
        offset, scale = ((v / 2).clamp(-FP16_MAX, FP16_MAX).half().float() for v in (high + low, high - low))
        levels = offset + scale * nearest(divide(x - offset, scale), torch.tensor(NF4_LEVELS))
        rows = torch.where(apart, x, levels)
        rows[..., : self.sinks, :] = self.fresh.view(layer, x).fresh[..., : self.sinks, :]
        return View(rows, rows)

    def footprint(self, head_dim: int) -> Footprint:
        elements, sink = self.heads * head_dim, self.fresh.footprint(head_dim).fresh
        bits = 4 + (32 + OUTLIER_BITS * outlier_count(self.outliers, elements)) / elements
        return Footprint(bits, bits, sink, 1, self.sinks)
