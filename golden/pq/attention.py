"""Attention of a model over a product-quantised cache, causal and position by position.

The query of position t meets the tokens 0 to t: the first as sinks, the newest ``recent`` as INT8 rows, all between by
their codes. `PqAttention` is a strategy that `kvant.golden.models.llama.Llama` takes.
"""

import math
from dataclasses import dataclass

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import Footprint, Store, View, by_kv_head, causal_mask, to_port
from kvant.golden.kvcache.integer import WEIGHT_SCALE, int8_group
from kvant.golden.kvcache.spatial import int8_rows
from kvant.golden.pq.cache import check_recent, fresh_rows, pq_cache
from kvant.golden.pq.codebook import Codebook
from kvant.golden.pq.scores import quantize_query

_ROWS = 256  # queries at a time: bounds the memory of scores


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
    """

    codebooks: tuple[Codebook, ...]
    group: int = 64
    mean: torch.Tensor | None = None
    sinks: int = 0
    recent: int = 0

    def view(self, layer: int, x: torch.Tensor) -> View:
        x, mean = to_port(x), None if self.mean is None else self.mean[layer]
        coded = pq_cache(x, self.codebooks[layer], group=self.group, mean=mean, sinks=self.sinks).dequantize()
        return View(coded, int8_rows(*fresh_rows(x, self.group, mean), self.group))

    def footprint(self, head_dim: int) -> Footprint:
        fresh = 8 + 16 * math.ceil(head_dim / self.group) / head_dim
        partition = self.codebooks[0].partition
        once = 8 * partition.codebook_bytes / head_dim
        return Footprint(partition.bits_per_element, fresh, fresh, 1, self.sinks, sequence=once, recent=self.recent)


class PqAttention:
    """Attention over product-quantised keys and values, for `Llama`.

    Queries are INT8 groups over the whole head. Weights of recent tokens, and of sinks, are INT8 groups of their own;
    those of coded tokens add into bins as they are. The denominator sums the weights that multiply the values. Scores
    of coded tokens, and the products with INT8 rows, are the integers of `scores` times their scales; softmax and sums
    are float32.

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
        self._exact_queries, self._exact_weights = exact_queries, exact_weights

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._attend(layer, *rows) for rows in zip(queries, keys, values, strict=True)])

    def _attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """One sequence: queries [Hq, T, d], keys and values [Hkv, T, d]."""
        grouped = by_kv_head(queries, keys.shape[0])
        if not self._exact_queries:
            groups = quantize_query(to_port(grouped))
            grouped = groups.q * groups.scale.float()[..., None]
        grouped = grouped / math.sqrt(queries.shape[-1])
        keys, values = self.keys.view(layer, keys), self.values.view(layer, values)
        mixed, tokens = torch.empty_like(grouped), queries.shape[1]
        for first in range(0, tokens, _ROWS):
            last = min(first + _ROWS, tokens)
            age = torch.arange(first, last)[:, None] - torch.arange(last)
            recent = (age >= 0) & (age < self._recent)
            q = grouped[..., first:last, :]
            coded, fresh = (rows[..., :last, :].unsqueeze(1) for rows in keys)
            scores = torch.where(recent, q @ fresh.mT, q @ coded.mT) + causal_mask(first, last)
            weights = (scores - scores.amax(-1, keepdim=True)).exp() * WEIGHT_SCALE
            mixed[..., first:last, :] = self._mix(weights, recent, values, last)
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
