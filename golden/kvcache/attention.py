"""Attention of a model over a quantised cache, causal and position by position.

The query of position t meets a cache that holds the tokens 0 to t: windows that are full by then in their final form,
the rest of the open window as it was staged, the first tokens as sinks. `CachedAttention` is a strategy that
`kvant.golden.models.llama.Llama` takes; what it knows of keys and values is what their `Store` made of them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.spatial import int8_rows, spatial_cache
from kvant.golden.kvcache.temporal import Staging, TemporalCache, requantize, stage_rows
from kvant.golden.numeric.int8 import int8_groups
from kvant.golden.numeric.rounding import FP16_MAX
from kvant.golden.numeric.tensors import from_groups, to_groups

TRAILER_BYTES = 16
"""What a page has behind its groups."""


class View(NamedTuple):
    """Rows as a query meets them.

    Attributes
    ----------
    finished : f32 [..., T, d]
        Rows whose window is full.
    fresh : f32 [..., T, d]
        Rows of the open window.
    """

    finished: torch.Tensor
    fresh: torch.Tensor


@dataclass(frozen=True)
class Footprint:
    """What is stored, in bits.

    Attributes
    ----------
    history : float
        Bits per element of a full window: codes and all metadata of its groups.
    fresh : float
        Bits per element of a row of the open window.
    sink : float
        Bits per element of a sink's row.
    window : int
        Tokens of a window; 1 where every row is final at once.
    sinks : int
        Tokens that are stored as sinks.
    page : float
        Bits per element that the page of a full window adds: timestamp and alignment.
    sequence : float
        Bits per channel kept once for the sequence.
    recent : int
        Newest tokens that are held as rows of an open window are, in a cache without windows.
    """

    history: float
    fresh: float
    sink: float
    window: int
    sinks: int
    page: float = 0.0
    sequence: float = 0.0
    recent: int = 0

    def at(self, tokens: int) -> float:
        """Bits per element of a cache of *tokens* tokens, everything counted: codes of sinks are stored too."""
        full = max(tokens - self.recent, 0) // self.window * self.window
        bits = full * (self.history + self.page) + (tokens - full) * self.fresh
        return (bits + min(self.sinks, tokens) * self.sink + self.sequence) / tokens


class Store(ABC):
    """How keys, or values, are cached.

    Attributes
    ----------
    window : int
        Tokens of a window; 1 where every row is final at once.
    """

    window: int = 1

    @abstractmethod
    def view(self, layer: int, x: torch.Tensor) -> View:
        """Cache the rows f32 [H, T, d] of *layer* and read them back."""

    @abstractmethod
    def footprint(self, head_dim: int) -> Footprint:
        """Bits of a cache of vectors of *head_dim* elements."""

    def latest(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Rows f32 [H, T, d] as the query of the last token meets them."""
        view, full = self.view(layer, x), x.shape[-2] // self.window * self.window
        return torch.cat((view.finished[..., :full, :], view.fresh[..., full:, :]), dim=-2)

    def begun(self, prefill: int) -> "Store":
        """The store of a sequence whose first call has *prefill* tokens."""
        return self


def to_port(x: torch.Tensor) -> torch.Tensor:
    """f16 of f32, an overflow saturating as at the port."""
    return x.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)


@dataclass(frozen=True)
class Exact(Store):
    """Nothing is lost: the reference's own cache, fp32, or fp16."""

    bits: int = 32

    def view(self, layer: int, x: torch.Tensor) -> View:
        x = x if self.bits == 32 else to_port(x).float()
        return View(x, x)

    def footprint(self, head_dim: int) -> Footprint:
        return Footprint(self.bits, self.bits, 0, 1, 0)


class _Calibrated(Store):
    """A store with means per layer."""

    mean: torch.Tensor | None

    def _mean(self, layer: int) -> torch.Tensor | None:
        return None if self.mean is None else self.mean[layer]


@dataclass(frozen=True)
class MantHead(_Calibrated):
    """M-ANT groups along the head (numerics, "Choosing the coefficient"): every row is final at once.

    Parameters
    ----------
    group : int
        G.
    tables : sequence of Tables
        By layer.
    mean : f16 [L, H, d], optional
        Subtracted from every row.
    sinks : int
        First tokens that stay INT8.
    """

    group: int
    tables: tuple[Tables, ...]
    mean: torch.Tensor | None = None
    sinks: int = 0

    def view(self, layer: int, x: torch.Tensor) -> View:
        cache = spatial_cache(
            to_port(x), group=self.group, tables=self.tables[layer], mean=self._mean(layer), sinks=self.sinks
        )
        rows = cache.dequantize()
        return View(rows, rows)

    def footprint(self, head_dim: int) -> Footprint:
        groups = math.ceil(head_dim / self.group)
        bits = 4 + 24 * groups / head_dim
        page = 8 * TRAILER_BYTES / (self.group * head_dim)  # a page is as many tokens as a group has elements
        return Footprint(bits, bits, 8 + 16 * groups / head_dim, 1, self.sinks, page)


@dataclass(frozen=True)
class MantTime(_Calibrated):
    """M-ANT groups along time (numerics, "The V cache"): values, and with a mean, keys.

    Parameters
    ----------
    group : int
        G.
    tables : sequence of Tables
        By layer.
    mean : f16 [L, H, d], optional
        Subtracted from every row.
    floor : f16 [L, H, d], optional
        Least magnitude that the INT8 scale of a channel holds.
    sinks : int
        First tokens that stay INT8.
    offset, shared_coefficient : bool
        Options of the cache.
    prefill : int or None
        Tokens of the first call, which fix the INT8 scales; None: all tokens are prefill.
    """

    group: int
    tables: tuple[Tables, ...]
    mean: torch.Tensor | None = None
    floor: torch.Tensor | None = None
    sinks: int = 0
    offset: bool = False
    shared_coefficient: bool = False
    prefill: int | None = 1

    @property
    def window(self) -> int:
        return self.group

    def fill(self, layer: int, x: torch.Tensor) -> tuple[Staging, TemporalCache]:
        """Both phases of the rows f32 [H, T, d] of *layer*."""
        tokens = x.shape[-2]
        rows = stage_rows(
            to_port(x),
            tokens if self.prefill is None else min(self.prefill, tokens),
            group=self.group,
            mean=self._mean(layer),
            floor=None if self.floor is None else self.floor[layer],
            sinks=self.sinks,
        )
        cache = requantize(
            rows,
            group=self.group,
            tables=self.tables[layer],
            offset=self.offset,
            shared_coefficient=self.shared_coefficient,
        )
        return rows, cache

    def begun(self, prefill: int) -> "MantTime":
        return replace(self, prefill=prefill)

    def view(self, layer: int, x: torch.Tensor) -> View:
        rows, cache = self.fill(layer, x)
        fresh = cache.staged_rows(rows.q)
        fresh[..., : rows.sink.shape[-2], :] = int8_rows(rows.sink, rows.sink_scale, self.group)
        return View(cache.dequantize(), fresh)

    def footprint(self, head_dim: int) -> Footprint:
        elements = self.group * head_dim
        history = 4 + 16 / self.group + (8 / self.group if self.offset else 0)
        history += 8 / elements if self.shared_coefficient else 8 / self.group
        trailer = 8 * TRAILER_BYTES - (8 if self.shared_coefficient else 0)  # it holds a shared coefficient
        sink = 8 + 16 * math.ceil(head_dim / self.group) / head_dim
        return Footprint(history, 8, sink, self.group, self.sinks, trailer / elements, 16)


@dataclass(frozen=True)
class Int8Head(Store):
    """INT8 groups along the head (numerics, "INT8 groups")."""

    group: int

    def view(self, layer: int, x: torch.Tensor) -> View:
        q, scale = int8_groups(to_groups(to_port(x), self.group))
        rows = int8_rows(from_groups(q, x.shape[-1]), scale, self.group)
        return View(rows, rows)

    def footprint(self, head_dim: int) -> Footprint:
        bits = 8 + 16 * math.ceil(head_dim / self.group) / head_dim
        return Footprint(bits, bits, bits, 1, 0)


class CachedAttention:
    """Attention over a cache, for `Llama`; scores, softmax and sums in float32 over the values that the cache holds.

    Parameters
    ----------
    keys, values : Store
        Windows of both begin at position 0; where both have windows, these are equally long.

    Raises
    ------
    TensorError
        Windows of different lengths.
    """

    def __init__(self, keys: Store, values: Store):
        lengths = {store.window for store in (keys, values)} - {1}
        if len(lengths) > 1:
            raise TensorError(f"windows of keys and values: {keys.window} and {values.window}; legal is one length")
        self.keys, self.values = keys, values
        self._window = max(lengths, default=None)

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._attend(layer, *rows) for rows in zip(queries, keys, values, strict=True)])

    def _attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """One sequence: queries [Hq, T, d], keys and values [Hkv, T, d]."""
        grouped = by_kv_head(queries, keys.shape[0]) / math.sqrt(queries.shape[-1])
        keys, values = self.keys.view(layer, keys), self.values.view(layer, values)
        mixed = torch.empty_like(grouped)
        for first, last, full in spans(queries.shape[1], self._window):
            seen = [torch.cat((v.finished[..., :full, :], v.fresh[..., full:last, :]), dim=-2) for v in (keys, values)]
            scores = grouped[..., first:last, :] @ seen[0].unsqueeze(1).transpose(-1, -2)
            scores += causal_mask(first, last)
            mixed[..., first:last, :] = scores.softmax(-1) @ seen[1].unsqueeze(1)
        return mixed.reshape(queries.shape)


def by_kv_head(queries: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Queries [Hq, T, d] as [Hkv, Hq / Hkv, T, d]: query head h uses KV head ``h * Hkv // Hq``."""
    return queries.unflatten(0, (kv_heads, -1))


def spans(tokens: int, window: int | None) -> Iterator[tuple[int, int, int]]:
    """Positions whose queries meet the same full windows: the first, the one behind the last, tokens in full windows.

    Query t meets ``floor((t + 1) / window)`` full windows: the one that its own token completes is among them.
    """
    if window is None:
        yield 0, tokens, tokens
        return
    for full in range(0, tokens + 1, window):
        first, last = max(full - 1, 0), min(full + window - 1, tokens)
        if first < last:
            yield first, last, full


def causal_mask(first: int, last: int) -> torch.Tensor:
    """Added to the scores [..., last - first, last] of positions *first* to *last* - 1: hides what comes later."""
    hidden = torch.arange(last) > torch.arange(first, last)[:, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
