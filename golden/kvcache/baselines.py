"""Caches that M-ANT is compared with, under the same rules: groups of a published 4-bit format, INT8 sinks, windows."""

from dataclasses import dataclass

import torch

from kvant.golden.formats.base import GroupFormat
from kvant.golden.kvcache.attention import Footprint, Store, View, to_port
from kvant.golden.numeric.tensors import from_groups, to_groups


@dataclass(frozen=True)
class GroupedStore(Store):
    """Groups of any format, along the head or along time, made of the exact fp16 rows (no INT8 staging in between).

    Parameters
    ----------
    format : GroupFormat
        What a group is stored as.
    group : int
        G; formats with a group of their own take that.
    along_time : bool
        A group is one channel of a window, else a part of one row.
    fresh : Store
        How rows of the open window, and the sinks, are held; its own windows are ignored.
    sinks : int
        First tokens, which take no part in groups along time.
    window : int
        Tokens of a window; 1 where rows along the head are final at once.
    """

    format: GroupFormat
    group: int
    along_time: bool
    fresh: Store
    sinks: int = 0
    window: int = 1

    def view(self, layer: int, x: torch.Tensor) -> View:
        x = to_port(x).float()
        fresh, tokens = self.fresh.view(layer, x).fresh, x.shape[-2]
        if self.along_time:
            rows = x.clone()
            if tokens > self.sinks:
                rows[..., : self.sinks, :] = rows[..., self.sinks : self.sinks + 1, :]  # a copy changes no extreme
            full = tokens // self.window * self.window
            groups = to_groups(rows[..., :full, :].mT, self.format.group_size(self.group))
            finished = torch.cat((from_groups(self._stored(groups), full).mT, fresh[..., full:, :]), dim=-2)
        else:
            groups = to_groups(x, self.format.group_size(self.group))
            finished = from_groups(self._stored(groups), x.shape[-1]).clone()
        finished[..., : self.sinks, :] = fresh[..., : self.sinks, :]
        return View(finished, fresh)

    def _stored(self, groups: torch.Tensor) -> torch.Tensor:
        """Groups [..., G] as the format holds them; a short last one was filled up with zeros."""
        return self.format.store(groups) if groups.numel() else groups

    def footprint(self, head_dim: int) -> Footprint:
        bits = self.format.bits(self.window if self.along_time else head_dim, self.group)
        fresh = self.fresh.footprint(head_dim).fresh
        return Footprint(bits, fresh, fresh, self.window, self.sinks)
