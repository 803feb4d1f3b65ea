"""Integers whose scales calibration fixed once: per channel of a head, or for all keys or values of a layer."""

from dataclasses import dataclass

import torch

from kvant.golden.formats.base import divide
from kvant.golden.kvcache.attention import Footprint, Int8Head, Store, View, to_port
from kvant.golden.numeric.rounding import fp16


@dataclass(frozen=True)
class StaticInteger(Store):
    """Symmetric integers, ``q = rne(x / s)`` clamped, ``s = fp16(peak / (2^(b-1) - 1))``; every row is final at once.

    Parameters
    ----------
    bits : int
        b.
    peak : f32 [L, H, d]
        Largest magnitude of every channel in the calibration text.
    per_channel : bool
        A scale per channel, else one for the layer.
    fresh : Store
        How sinks are held; they took no part in the calibration.
    sinks : int
    """

    bits: int
    peak: torch.Tensor
    per_channel: bool
    fresh: Int8Head
    sinks: int = 0

    def view(self, layer: int, x: torch.Tensor) -> View:
        x, largest = to_port(x).float(), 2 ** (self.bits - 1) - 1
        peak = self.peak[layer]
        peak = peak if self.per_channel else peak.amax().expand_as(peak)
        scale = fp16(peak.to(torch.float64) / largest).float()[:, None]
        rows = divide(x, scale).round().clamp(-largest, largest) * scale
        rows[..., : self.sinks, :] = self.fresh.view(layer, x).fresh[..., : self.sinks, :]
        return View(rows, rows)

    def footprint(self, head_dim: int) -> Footprint:
        sink = self.fresh.footprint(head_dim).fresh
        return Footprint(self.bits, self.bits, sink, 1, self.sinks, sequence=16 if self.per_channel else 0)
