"""Attention of a decoder in the very numbers of the engines, over caches that grow call by call.

Rows of a call enter the cache together; then every query of the call meets the keys up to its own. So windows along
time that the call fills are met in their final form by all of its queries, as the hardware does it.
"""

import torch

from kvant.golden.attention.engine import attend
from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import Int8Head, MantHead, MantTime, by_kv_head, to_port
from kvant.golden.kvcache.growing import GrowingCache, growing_cache
from kvant.golden.kvcache.maps import apply, inverse
from kvant.golden.models.generate import AttentionBackend, Mixed
from kvant.golden.pq.attention import Pq
from kvant.golden.pq.cache import PqCache, check_recent, fresh_rows
from kvant.golden.pq.decode import decode_attention
from kvant.golden.pq.encode import encode


def check_engine_stores(keys, values) -> None:
    """Refuse caches that the attention engine does not read.

    Raises
    ------
    TensorError
        Keys that are neither INT8 nor M-ANT along the head, values that are neither INT8 nor M-ANT along time with a
        coefficient for every group and no offset, or groups of two sizes.
    """
    if not isinstance(keys, MantHead | Int8Head):
        raise TensorError(f"keys: {type(keys).__name__}; legal are INT8 rows and M-ANT groups along the head")
    if not isinstance(values, MantTime | Int8Head):
        raise TensorError(f"values: {type(values).__name__}; legal are INT8 rows and M-ANT groups along time")
    if isinstance(values, MantTime) and (values.offset or values.shared_coefficient or values.mean is not None):
        raise TensorError("values: a mean, an offset or a shared coefficient; legal is none of them")
    if keys.group != values.group:
        raise TensorError(f"values: groups of {values.group}; legal is {keys.group}, as keys have")


def check_pq_stores(keys, values) -> None:
    """Refuse caches that the product-quantised block does not hold.

    Raises
    ------
    TensorError
        Other caches, or two that differ in anything but their codebooks, means and maps.
    """
    for name, store in (("keys", keys), ("values", values)):
        if not isinstance(store, Pq):
            raise TensorError(f"{name}: {type(store).__name__}; legal is a product-quantised cache")
        check_recent(store.recent)
    for name in ("group", "sinks", "recent"):
        if getattr(keys, name) != getattr(values, name):
            raise TensorError(
                f"{name} of values: {getattr(values, name)}; legal is {getattr(keys, name)}, as keys have"
            )
    if values.mean is not None:
        raise TensorError("values: a mean; legal is none")


def coded_tokens(tokens: int, *, sinks: int, recent: int, batch: int) -> int:
    """Tokens that are met by their codes when there are *tokens*: whole batches behind the sinks, so that between
    *recent* and ``recent + batch - 1`` stay INT8.
    """
    return max(0, tokens - sinks - recent) // batch * batch


class EngineAttention(AttentionBackend):
    """Attention over M-ANT and INT8 caches: `kvant.golden.attention.engine.attend`.

    Parameters
    ----------
    keys, values : MantHead or Int8Head, MantTime or Int8Head
        The prefill of values is the first call, whatever the store says.
    planes : 1 or 2
        INT8 groups that the weights of a window become.

    Raises
    ------
    TensorError
        See `check_engine_stores`.
    """

    where = "golden model"

    def __init__(self, keys: MantHead | Int8Head, values: MantTime | Int8Head, *, planes: int = 2):
        check_engine_stores(keys, values)
        self._stores, self._planes = (keys, values), planes
        self._caches: dict[int, tuple[GrowingCache, GrowingCache]] = {}

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Mixed:
        if layer not in self._caches:
            self._caches[layer] = tuple(growing_cache(store, layer) for store in self._stores)
        held = self._caches[layer]
        for cache, x in zip(held, (keys, values), strict=True):
            cache.append(to_port(x))
        grouped = by_kv_head(to_port(queries), len(keys))  # [Hkv, R, n, d]
        end = held[0].tokens - keys.shape[1] + 1 + torch.arange(keys.shape[1])
        attended = attend(
            grouped.flatten(1, 2),
            held[0].cache,
            held[1].cache,
            end=end.repeat(grouped.shape[1]),
            planes=self._planes,
        )
        return Mixed(attended.out.reshape(queries.shape))


class MappedBackend(AttentionBackend):
    """Another attention behind maps that the host applies, as `kvant.golden.kvcache.maps.MappedAttention` does.

    Parameters
    ----------
    inner : AttentionBackend
    keys, values : f16 [L, H, d, d]
        Maps of both.
    """

    def __init__(self, inner: AttentionBackend, keys: torch.Tensor, values: torch.Tensor):
        self.inner, self.where = inner, inner.where
        self._keys, self._values = keys, values
        self._meet, self._leave = inverse(keys).mT, inverse(values)

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Mixed:
        queries = apply(self._meet[layer][:, None], by_kv_head(queries, len(keys))).flatten(0, 1)
        mixed = self.inner.attend(layer, queries, apply(self._keys[layer], keys), apply(self._values[layer], values))
        y = apply(self._leave[layer][:, None], by_kv_head(mixed.y, len(keys))).flatten(0, 1)
        return mixed._replace(y=y)

    def close(self) -> None:
        self.inner.close()


class PqEngineAttention(AttentionBackend):
    """Attention over product-quantised caches: `kvant.golden.pq.decode.decode_attention`, token by token.

    Rows are coded in whole batches, see `coded_tokens`.

    Parameters
    ----------
    keys, values : Pq
    batch : int
        Tokens that are coded together.
    decode_tokens : int
        Longest history that is decoded into INT8 rows; a longer one is met by tables and bins.

    Raises
    ------
    TensorError
        See `check_pq_stores`.
    """

    where = "golden model"

    def __init__(self, keys: Pq, values: Pq, *, batch: int, decode_tokens: int = 0):
        check_pq_stores(keys, values)
        self._stores, self._batch, self._decode_tokens = (keys, values), batch, decode_tokens
        self._rows: dict[int, list[_PqRows]] = {}

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Mixed:
        if layer not in self._rows:
            self._rows[layer] = [_PqRows(store, layer) for store in self._stores]
        rows, store = self._rows[layer], self._stores[0]
        for held, x in zip(rows, (keys, values), strict=True):
            held.append(x)
        q = to_port(store.meet(layer, by_kv_head(queries, len(keys))))
        known = rows[0].tokens - keys.shape[1]
        mixed = torch.empty(q.shape)
        for number in range(keys.shape[1]):
            tokens = known + number + 1
            coded = coded_tokens(tokens, sinks=store.sinks, recent=store.recent, batch=self._batch)
            caches = [held.cache(tokens, coded) for held in rows]
            mode = "decode" if coded <= self._decode_tokens else "table"
            mixed[:, :, number] = decode_attention(q[:, :, number], *caches, mode=mode).out
        return Mixed(self._stores[1].leave(layer, mixed).reshape(queries.shape))


class _PqRows:
    """Rows of one layer in both forms: codes, and INT8 groups."""

    def __init__(self, store: Pq, layer: int):
        self._store, self._layer = store, layer
        self._mean = None if store.mean is None else store.mean[layer]
        self._parts: list[torch.Tensor] | None = None
        self._book = None

    @property
    def tokens(self) -> int:
        return 0 if self._parts is None else self._parts[0].shape[1]

    def append(self, x: torch.Tensor) -> None:
        """Rows f32 [H, n, d]."""
        x = self._store.enter(self._layer, x)
        self._book = self._store.codebooks[self._layer].match(tuple(x.shape[:-2]), "x")
        new = [encode(x, self._book, mean=self._mean), *fresh_rows(x, self._store.group, self._mean)]
        old = self._parts or [part[:, :0] for part in new]
        self._parts = [torch.cat(pair, 1) for pair in zip(old, new, strict=True)]

    def cache(self, tokens: int, coded: int) -> PqCache:
        """The first *tokens* rows, *coded* of them behind the sinks met by their codes."""
        codes, q, scale = (part[:, :tokens] for part in self._parts)
        sinks = min(self._store.sinks, tokens)
        history = sinks + coded
        codes = codes.clone()
        codes[:, :sinks], codes[:, history:] = 0, 0
        return PqCache(
            codes=codes,
            recent=q[:, history:],
            recent_scale=scale[:, history:],
            sink=q[:, :sinks],
            sink_scale=scale[:, :sinks],
            codebook=self._book,
            nonfinite=False,
            group=self._store.group,
        )
