"""Attention of a model over a product-quantised cache, causal and position by position.

The query of position t meets the tokens 0 to t: the first as sinks, the newest ``recent`` as INT8 rows, all between by
their codes. `PqAttention` gives the very numbers of the hardware, those of `kvant.golden.pq.decode.decode_attention` at
every position; `FloatPqAttention` is the same attention with a float32 softmax, to measure what the integers cost. Both
are strategies that `kvant.golden.models.llama.Llama` takes.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvant.golden.attention.int8_rows import row_logarithms, weighted_rows
from kvant.golden.attention.normalize import coded_values, normalize
from kvant.golden.attention.softmax import bin_shift, logarithms, reference, score_factor, weights
from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import Footprint, Store, View, by_kv_head, causal_mask, to_port
from kvant.golden.kvcache.integer import WEIGHT_SCALE, int8_group
from kvant.golden.kvcache.maps import MAP_BITS, apply, inverse
from kvant.golden.kvcache.spatial import int8_rows
from kvant.golden.numeric.int8 import Int8Groups
from kvant.golden.pq.cache import check_recent, fresh_rows, pq_cache
from kvant.golden.pq.codebook import Codebook
from kvant.golden.pq.encode import encode
from kvant.golden.pq.scores import quantize_query, read_out, value_bins

_POSITIONS = 64  # at a time: what is made for them stays near the caches
_FLOAT_POSITIONS = 256


class Held(NamedTuple):
    """Rows in both forms that a cache holds them in, for H heads and T tokens.

    Attributes
    ----------
    codes : u8 [H, T, M]
    levels : f64 [H, T, d]
        Integer entries that the codes name.
    codebook : Codebook
        One for each head.
    q : i8 [H, T, d]
    scale : f16 [H, T, ceil(d/G)]
        Of the INT8 rows.
    """

    codes: torch.Tensor
    levels: torch.Tensor
    codebook: Codebook
    q: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True)
class Pq(Store):
    """Product-quantised rows. In the view, rows are finished when they are coded, and fresh as INT8.

    Parameters
    ----------
    codebooks : sequence of Codebook
        By layer, each for all its heads or with an axis of heads.
    group : int
        G of INT8 rows.
    mean : f16 [L, H, d], optional
        Subtracted from every row.
    sinks : int
        First tokens that stay INT8.
    recent : int
        Newest tokens that stay INT8.
    transform : f16 [L, H, d, d], optional
        Map A that rows take before anything else, applied by the host: what the store holds and gives is ``A x``.
        `meet` and `leave` are the maps of the queries and of the outputs that belong to it.
    sharing : int
        Heads, of one or several layers, that have one codebook in common.
    """

    codebooks: tuple[Codebook, ...]
    group: int = 64
    mean: torch.Tensor | None = None
    sinks: int = 0
    recent: int = 0
    transform: torch.Tensor | None = None
    sharing: int = 1

    def __post_init__(self):
        object.__setattr__(self, "_inverse", None if self.transform is None else inverse(self.transform))

    def enter(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Rows f16 [H, T, d] at the port, of rows f32."""
        return to_port(x if self.transform is None else apply(self.transform[layer], x))

    def meet(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Queries f32 [H, R, T, d] that give mapped keys the scores of the keys: ``A^-T q``."""
        return queries if self.transform is None else apply(self._inverse[layer].mT[:, None], queries)

    def leave(self, layer: int, outputs: torch.Tensor) -> torch.Tensor:
        """Outputs f32 [H, R, T, d] of the values from those of mapped values: ``A^-1 y``."""
        return outputs if self.transform is None else apply(self._inverse[layer][:, None], outputs)

    def view(self, layer: int, x: torch.Tensor) -> View:
        x, mean = self.enter(layer, x), None if self.mean is None else self.mean[layer]
        coded = pq_cache(x, self.codebooks[layer], group=self.group, mean=mean, sinks=self.sinks).dequantize()
        return View(coded, int8_rows(*fresh_rows(x, self.group, mean), self.group))

    def latest(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """As `Store.latest`, behind the inverse of the map: what queries and outputs without a map need."""
        view, history = self.view(layer, x), max(x.shape[-2] - self.recent, 0)
        rows = torch.cat((view.finished[..., :history, :], view.fresh[..., history:, :]), dim=-2)
        return rows if self.transform is None else apply(self._inverse[layer], rows)

    def hold(self, layer: int, x: torch.Tensor) -> Held:
        """The rows f32 [H, T, d] of *layer*, each coded and as INT8."""
        x, mean = self.enter(layer, x), None if self.mean is None else self.mean[layer]
        codebook = self.codebooks[layer].match(tuple(x.shape[:-2]), "x")
        codes = encode(x, codebook, mean=mean)
        levels = replace(codebook, scale=torch.ones_like(codebook.scale)).decode(codes)
        return Held(codes, levels.to(torch.float64), codebook, *fresh_rows(x, self.group, mean))

    def footprint(self, head_dim: int) -> Footprint:
        fresh = 8 + 16 * math.ceil(head_dim / self.group) / head_dim
        partition = self.codebooks[0].partition
        once = 8 * partition.codebook_bytes / head_dim / self.sharing
        if self.transform is not None:
            once += MAP_BITS * head_dim
        return Footprint(partition.bits_per_element, fresh, fresh, 1, self.sinks, sequence=once, recent=self.recent)


class _Attention(ABC):
    """Attention sequence by sequence, of caches with the same sinks and recent window."""

    def __init__(self, keys: Store, values: Store):
        coded = [store for store in (keys, values) if isinstance(store, Pq)]
        if not coded or any(store.window != 1 for store in (keys, values)):
            raise TensorError("keys and values: legal is a product-quantised cache of either, none with windows")
        if len({(store.sinks, check_recent(store.recent)) for store in coded}) > 1:
            raise TensorError(
                f"keys and values: recent {keys.recent} and {values.recent}, sinks {keys.sinks} and {values.sinks}; "
                "legal are equal ones"
            )
        self.keys, self.values = keys, values
        self._sinks, self._recent = coded[0].sinks, coded[0].recent

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._attend(layer, *rows) for rows in zip(queries, keys, values, strict=True)])

    @abstractmethod
    def _attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """One sequence: queries [Hq, T, d], keys and values [Hkv, T, d]."""


class PqAttention(_Attention):
    """Attention over product-quantised keys and values in the numbers of the hardware, for `Llama`.

    Every output is bit for bit that of `kvant.golden.pq.decode.decode_attention` for the caches of the tokens so far.
    Only the order of exact integer sums differs: scores and values of coded tokens are products with the entries that
    the codes name, in float64, which holds them up to 2^22 tokens. Bins are made for the queries alone whose bins are
    shifted, since then each bin is cut.

    Parameters
    ----------
    keys, values : Pq
        With the same sinks, recent window and group.

    Raises
    ------
    TensorError
        Caches of another kind, or that differ.
    """

    def __init__(self, keys: Pq, values: Pq):
        super().__init__(keys, values)
        if not (isinstance(keys, Pq) and isinstance(values, Pq)) or keys.group != values.group:
            raise TensorError("keys and values: legal are two product-quantised caches with groups of one size")

    def _attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        groups = quantize_query(to_port(self.keys.meet(layer, by_kv_head(queries, keys.shape[0]))))
        keys, values = self.keys.hold(layer, keys), self.values.hold(layer, values)
        tokens = queries.shape[1]
        mixed = torch.empty(groups.q.shape)
        for first in range(0, tokens, _POSITIONS):
            part = slice(first, min(first + _POSITIONS, tokens))
            some = Int8Groups(groups.q[:, :, part], groups.scale[:, :, part], groups.nonfinite)
            mixed[:, :, part] = self._mix(self._logarithms(some, keys, part), values, part)
        return self.values.leave(layer, mixed).reshape(queries.shape)

    def _seen(self, positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that queries meet, and those that they meet as INT8 rows, bool [n, positions.stop]."""
        token = torch.arange(positions.stop)
        age = torch.arange(positions.start, positions.stop)[:, None] - token
        return age >= 0, (age >= 0) & ((age < self._recent) | (token < self._sinks))

    def _logarithms(self, queries: Int8Groups, keys: Held, positions: slice) -> torch.Tensor:
        """Of all keys up to the last position, i64 [H, R, n, positions.stop]; some are for no eyes."""
        last, head_dim = positions.stop, queries.q.shape[-1]
        q, scale = queries.q.flatten(1, 2), queries.scale.flatten(1, 2)
        factor = score_factor(scale[..., None], keys.codebook.scale[:, None, None], head_dim)
        z = logarithms(q.to(torch.float64) @ keys.levels[:, :last].mT, factor)
        # no other tokens are a row to any of these queries
        oldest = max(positions.start + 1 - self._recent, 0) if self._recent else last
        held = torch.cat((torch.arange(min(self._sinks, oldest)), torch.arange(oldest, last)))
        z = z.unflatten(1, queries.q.shape[1:3])
        if len(held):
            rows = row_logarithms(q, scale, keys.q[:, held], keys.scale[:, held], group=self.keys.group)
            rows = rows.unflatten(1, queries.q.shape[1:3])
            z[..., held] = torch.where(self._seen(positions)[1][:, held], rows, z[..., held])
        return z

    def _mix(self, z: torch.Tensor, values: Held, positions: slice) -> torch.Tensor:
        """Outputs f32 [H, R, n, d] of queries whose keys have these logarithms."""
        seen, as_row = self._seen(positions)
        w = weights(z, reference(z, seen), seen)
        coded = self._coded(w.masked_fill(as_row, 0), values, positions.stop)
        return normalize(w.sum(-1), coded=coded, rows=self._rows(w, values, positions))

    def _coded(self, w: torch.Tensor, values: Held, last: int) -> torch.Tensor:
        """Sums of coded values f32 [H, R, n, d] under weights [H, R, n, last]."""
        grouped, w = w.shape[1:3], w.flatten(1, 2)
        shift = bin_shift(w.sum(-1))
        sums = (w.to(torch.float64) @ values.levels[:, :last]).to(torch.int64)
        for head in (shift > 0).any(-1).nonzero().flatten():
            codebook, cut = values.codebook.at(head), shift[head].nonzero().flatten()
            bins = value_bins(w[head, cut], values.codes[head, :last], codebook.partition.centroids)
            sums[head, cut] = read_out(bins >> shift[head, cut, None, None], codebook)
        return coded_values(sums, values.codebook.scale[:, None], shift).unflatten(1, grouped)

    def _rows(self, w: torch.Tensor, values: Held, positions: slice) -> torch.Tensor | None:
        """Block-floating sums of INT8 rows, exact in f64 [H, R, n, d], under weights [H, R, n, positions.stop].

        Every query has its own rows: the sinks, then the recent tokens from the oldest. A place for one that is missing
        has the weight 0, which changes nothing.
        """
        last = positions.stop
        sinks, recent = min(self._sinks, last), min(self._recent, last)
        if not sinks + recent:
            return None
        newest = torch.arange(positions.start, last)[:, None] + torch.arange(1 - recent, 1)
        token = torch.cat((torch.arange(sinks).expand(len(newest), -1), newest.clamp(min=0)), -1)
        present = torch.cat((torch.ones(len(newest), sinks, dtype=torch.bool), newest >= sinks), -1)
        w = w.gather(-1, token.expand(*w.shape[:2], -1, -1)).masked_fill(~present, 0)
        # positions in front of the query heads, which have their rows in common
        sums = weighted_rows(w.transpose(1, 2), values.q[:, token], values.scale[:, token], group=self.values.group)
        return sums.values().transpose(1, 2)


class FloatPqAttention(_Attention):
    """`PqAttention` with softmax and sums in float32, to measure what integers cost; one side may be another cache.

    Queries are INT8 groups over the whole head. Weights of recent tokens, and of sinks, are INT8 groups of their own;
    those of coded tokens add into bins as they are. The denominator sums the weights that multiply the values.

    Parameters
    ----------
    keys, values : Store
        Without windows; `Pq` ones with the same sinks and recent window.
    exact_queries, exact_weights : bool
        Leave queries, or weights, in float32: to measure what their INT8 costs.

    Raises
    ------
    TensorError
        Windows, or recent windows or sinks that differ.
    """

    def __init__(self, keys: Store, values: Store, *, exact_queries: bool = False, exact_weights: bool = False):
        super().__init__(keys, values)
        self._exact_queries, self._exact_weights = exact_queries, exact_weights

    def _attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        grouped = by_kv_head(queries, keys.shape[0])
        if isinstance(self.keys, Pq):
            grouped = self.keys.meet(layer, grouped)
        if not self._exact_queries:
            groups = quantize_query(to_port(grouped))
            grouped = groups.q * groups.scale.float()[..., None]
        grouped = grouped / math.sqrt(queries.shape[-1])
        keys, values = self.keys.view(layer, keys), self.values.view(layer, values)
        mixed, tokens = torch.empty_like(grouped), queries.shape[1]
        for first in range(0, tokens, _FLOAT_POSITIONS):
            last = min(first + _FLOAT_POSITIONS, tokens)
            age = torch.arange(first, last)[:, None] - torch.arange(last)
            recent = (age >= 0) & (age < self._recent)
            q = grouped[..., first:last, :]
            coded, fresh = (rows[..., :last, :].unsqueeze(1) for rows in keys)
            scores = torch.where(recent, q @ fresh.mT, q @ coded.mT) + causal_mask(first, last)
            weights = (scores - scores.amax(-1, keepdim=True)).exp() * WEIGHT_SCALE
            mixed[..., first:last, :] = self._mix(weights, recent, values, last)
        if isinstance(self.values, Pq):
            mixed = self.values.leave(layer, mixed)
        return mixed.reshape(queries.shape)

    def _mix(self, weights: torch.Tensor, recent: torch.Tensor, values: View, last: int) -> torch.Tensor:
        """Mean of the values [Hkv, R, n, d] under weights [Hkv, R, n, last]."""
        sink = torch.arange(last) < self._sinks
        parts = [weights * part for part in (~sink & ~recent, ~sink & recent, sink)]
        if not self._exact_weights:
            parts[1:] = [p * unit for p, unit in map(int8_group, parts[1:])]
        coded, fresh = (rows[..., :last, :].unsqueeze(1) for rows in values)
        mixed = parts[0] @ coded + (parts[1] + parts[2]) @ fresh
        return mixed / sum(parts).sum(-1, keepdim=True)
