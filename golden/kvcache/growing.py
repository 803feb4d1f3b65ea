"""Caches that grow by the rows of every call, bit for bit those of all rows at once.

What is final stays as it is: rows along the head, full windows along time, sinks. Only the open window is looked at
again. Source: docs/numerics.md, "The V cache", "Sinks".
"""

from abc import ABC, abstractmethod
from dataclasses import replace

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import Int8Head, MantHead, MantTime, Store
from kvant.golden.kvcache.int8 import Int8Cache, int8_cache
from kvant.golden.kvcache.spatial import SpatialCache, spatial_cache
from kvant.golden.kvcache.temporal import Staging, TemporalCache, requantize, stage_more, stage_rows


class GrowingCache(ABC):
    """A cache of one sequence of H heads.

    Attributes
    ----------
    tokens : int
        Rows so far.
    cache : SpatialCache, TemporalCache, Int8Cache or None
        What they became; None before the first call.
    """

    def __init__(self):
        self.tokens = 0
        self.cache = None

    def append(self, x: torch.Tensor) -> None:
        """Take rows f16 [H, n, d]: NaN counts as 0, an infinity as 65504 of its sign."""
        self.cache = self._appended(x)
        self.tokens += x.shape[-2]

    @abstractmethod
    def _appended(self, x: torch.Tensor) -> SpatialCache | TemporalCache | Int8Cache:
        """The cache with more rows."""


class GrowingSpatial(GrowingCache):
    """M-ANT groups along the head.

    Parameters
    ----------
    store : MantHead
    layer : int
        Whose tables and mean are used.
    """

    def __init__(self, store: MantHead, layer: int):
        super().__init__()
        self._options = {"group": store.group, "tables": store.tables[layer]}
        self._mean = None if store.mean is None else store.mean[layer]
        self._sinks = store.sinks

    def _appended(self, x: torch.Tensor) -> SpatialCache:
        sinks = max(0, self._sinks - self.tokens)
        new = spatial_cache(x, **self._options, mean=self._mean, sinks=sinks)
        return _joined(self.cache, new, ("codes", "scale", "coefficient", "sink", "sink_scale"))


class GrowingInt8(GrowingCache):
    """INT8 groups along the head, of *group* elements."""

    def __init__(self, group: int):
        super().__init__()
        self._group = group

    def _appended(self, x: torch.Tensor) -> Int8Cache:
        return _joined(self.cache, int8_cache(x, group=self._group), ("q", "scale"))


class GrowingTemporal(GrowingCache):
    """M-ANT groups along time. The first call is the prefill, which fixes the INT8 scale of every channel.

    Parameters
    ----------
    store : MantTime
    layer : int
        Whose tables, mean and floor are used.
    """

    def __init__(self, store: MantTime, layer: int):
        super().__init__()
        self._store, self._layer = store, layer
        self._mean = None if store.mean is None else store.mean[layer]

    def _appended(self, x: torch.Tensor) -> TemporalCache:
        store, held = self._store, self.cache
        if held is None:
            floor = None if store.floor is None else store.floor[self._layer]
            rows = stage_rows(x, x.shape[-2], group=store.group, mean=self._mean, floor=floor, sinks=store.sinks)
            return self._closed(rows)
        sinks = max(0, store.sinks - self.tokens)
        rows = stage_more(x, held.staged_scale, group=store.group, mean=self._mean, sinks=sinks)
        known = _joined(held, rows, ("sink", "sink_scale"))
        begin = held.scale.shape[-2] * store.group  # of the open window
        opened = torch.cat((held.staged, rows.q), -2)
        inside = slice(begin, begin + opened.shape[-2])  # a window may begin with sinks
        new = self._closed(
            replace(rows, q=opened, sink=known.sink[..., inside, :], sink_scale=known.sink_scale[..., inside, :])
        )
        joined = _joined(held, new, ("codes", "scale", "coefficient", "offset"))
        return replace(
            joined,
            staged=new.staged,
            sink=known.sink,
            sink_scale=known.sink_scale,
            saturated=held.saturated + rows.saturated,
        )

    def _closed(self, rows: Staging) -> TemporalCache:
        store = self._store
        return requantize(
            rows,
            group=store.group,
            tables=store.tables[self._layer],
            offset=store.offset,
            shared_coefficient=store.shared_coefficient,
        )


def growing_cache(store: Store, layer: int) -> GrowingCache:
    """An empty cache of a layer as *store* says.

    Raises
    ------
    TensorError
        Another store than those of M-ANT and INT8.
    """
    if isinstance(store, MantHead):
        return GrowingSpatial(store, layer)
    if isinstance(store, MantTime):
        return GrowingTemporal(store, layer)
    if isinstance(store, Int8Head):
        return GrowingInt8(store.group)
    raise TensorError(f"store: {type(store).__name__}; legal is MantHead, MantTime or Int8Head")


def _joined(held, new, names: tuple[str, ...]):
    """*held* with the rows of *new* behind its own in the tensors of these *names*, and the flags of both."""
    if held is None:
        return new
    parts = {name: torch.cat((getattr(held, name), getattr(new, name)), -2) for name in names}
    return replace(held, **parts, nonfinite=held.nonfinite or new.nonfinite)
