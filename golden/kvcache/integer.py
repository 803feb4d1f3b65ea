"""The integer chain over caches along time: folded INT8 queries, INT8 attention weights, integer dot products.

Source: docs/numerics.md, "Attention engine". Per window the query becomes INT8 groups of ``fp16(q * s)``, so that
integer dot products with the codes' levels give the score; the offsets enter once per window through the query folded
with the staging scales, which is also the query of the staged rows. Weights are INT8 groups of a window each, of the
open window, and of the sinks.
"""

import math

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import MantTime, by_kv_head, causal_mask, spans, to_port
from kvant.golden.kvcache.temporal import Staging, TemporalCache
from kvant.golden.numeric.codes import LARGEST_COEFFICIENT, decode, largest_level
from kvant.golden.numeric.rounding import FP16_MAX, fp16
from kvant.golden.numeric.tensors import to_groups

WEIGHT_SCALE = 2.0**15
"""Exponentials, at most 1, are multiplied by this before they become INT8 groups: an fp16 scale below 2^-14 is
subnormal and would lose the tail of a flat distribution."""

_FLOAT32_EXACT = 1 << 24
"""float32 holds every integer up to here."""


class IntegerAttention:
    """Attention over caches along time in integers, for `Llama`.

    Everything that the contract calls exact is exact here; the softmax is float32, and sums over windows are float32 in
    no fixed order.

    Parameters
    ----------
    keys, values : MantTime
        With the same group and sinks.

    Raises
    ------
    TensorError
        When they differ in one of these.
    """

    def __init__(self, keys: MantTime, values: MantTime):
        if (keys.group, keys.sinks) != (values.group, values.sinks):
            raise TensorError(
                f"group, sinks = {keys.group}, {keys.sinks} of keys and {values.group}, {values.sinks} of values: "
                "legal are equal ones"
            )
        self.keys, self.values = keys, values

    def __call__(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._attend(layer, *rows) for rows in zip(queries, keys, values, strict=True)])

    def _attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """One sequence: queries [Hq, T, d], keys and values [Hkv, T, d]."""
        grouped = to_port(by_kv_head(queries, keys.shape[0])).float()
        keys, values = _Contents(*self.keys.fill(layer, keys)), _Contents(*self.values.fill(layer, values))
        mixed = torch.empty_like(grouped)
        for first, last, full in spans(queries.shape[1], self.keys.window):
            scores = keys.scores(grouped[..., first:last, :], last, full) / math.sqrt(queries.shape[-1])
            scores += causal_mask(first, last)
            weights = (scores - scores.amax(-1, keepdim=True)).exp() * WEIGHT_SCALE
            mixed[..., first:last, :] = values.mix(weights.to(torch.float16).float(), full)
        return mixed.reshape(queries.shape)


class _Contents:
    """What the caches of one layer hold of one sequence, H heads, with an axis for the queries of a head."""

    def __init__(self, rows: Staging, cache: TemporalCache):
        group = cache.group
        self.group, self.sinks = group, rows.sink.shape[-2]
        levels = torch.zeros(cache.codes.shape)
        if cache.codes.numel():
            levels = decode(cache.codes, cache.coefficient.repeat_interleave(group, -2)).float()
        self.levels = levels.unflatten(-2, (-1, group))[:, None]  # [H, 1, W, G, d]
        self.scale = cache.scale.float()[:, None]  # [H, 1, W, d]
        self.offset = cache.offset.float()[:, None]  # [H, 1, W, d]
        self.staged, self.staged_scale = rows.q.float()[:, None], rows.scale.float()[:, None, None]  # [H, 1, T | 1, d]
        self.sink, self.sink_scale = rows.sink.float()[:, None], rows.sink_scale.float()[:, None]  # [H, 1, sinks, ...]

    def scores(self, q: torch.Tensor, last: int, full: int) -> torch.Tensor:
        """``q . k`` f32 [H, R, n, last] of fp16 queries [H, R, n, d]: *full* tokens in windows, the rest staged."""
        windows, sinks = full // self.group, min(self.sinks, last)
        static = self._fold(q, self.staged_scale)
        scores = [self._products(static, self.staged[..., full:last, :])]
        if windows:
            offsets = self._products(static, self.offset[..., :windows, :])  # [H, R, n, W]
            folded = self._fold(q[..., None, :, :], self.scale[..., :windows, None, :])  # [H, R, W, n, ...]
            products = self._products(folded, self.levels[..., :windows, :, :]) + offsets.mT[..., None]
            scores.insert(0, products.transpose(-3, -2).flatten(-2))
        scores = torch.cat(scores, dim=-1)
        q, unit = int8_group(to_groups(q, self.group))  # [H, R, n, d/G, G]
        sink = to_groups(self.sink, self.group)[..., :sinks, :, :]
        products = exact_dot(q.transpose(-3, -2), sink.transpose(-3, -2).mT)  # [H, R, d/G, n, sinks]
        unit = unit.transpose(-3, -2) * self.sink_scale[..., :sinks, :].mT[..., None, :]
        scores[..., :sinks] = (products * unit).sum(-3)
        return scores

    def _fold(self, q: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [..., n, d] with scales folded in, as `kvant.golden.attention.time_keys.folded_queries` makes them:
        INT8 groups f32 [..., n, d/G, G] and scales [..., n, d/G, 1].
        """
        return int8_group(to_groups((q * scale).clamp(-FP16_MAX, FP16_MAX), self.group))

    def _products(self, folded: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """Sums f32 [..., n, N] with rows of integers [..., N, d]: the float32 chain over the groups of the head."""
        q, unit = folded
        rows = to_groups(rows, self.group)
        return sum(exact_dot(q[..., g, :], rows[..., g, :].mT) * unit[..., g, :] for g in range(rows.shape[-2]))

    def mix(self, weights: torch.Tensor, full: int) -> torch.Tensor:
        """Mean of the values f32 [H, R, n, d] under fp16 weights [H, R, n, last], which need not sum to 1."""
        windows, last = full // self.group, weights.shape[-1]
        sinks, d = min(self.sinks, last), self.staged.shape[-1]
        own = weights[..., :sinks]
        weights = weights.clone()
        weights[..., :sinks] = 0
        # a scale per token cannot leave the sum over tokens: it is folded into the weights, for each group of the head
        units = self.sink_scale[..., :sinks, :].mT[..., None, :]  # [H, 1, d/G, 1, sinks]
        folded, unit = int8_group((own[..., None, :, :] * units).to(torch.float16).float())
        sink = to_groups(self.sink, self.group)[..., :sinks, :, :].transpose(-3, -2)  # [H, 1, d/G, sinks, G]
        mixed = (exact_dot(folded, sink) * unit).transpose(-3, -2).flatten(-2)[..., :d]
        p, unit = int8_group(own)
        total = p.sum(-1, keepdim=True) * unit
        p, unit = int8_group(weights[..., full:])
        mixed = mixed + exact_dot(p, self.staged[..., full:last, :]) * (unit * self.staged_scale)
        total = total + p.sum(-1, keepdim=True) * unit
        if windows:
            p, unit = int8_group(weights[..., :full].unflatten(-1, (windows, self.group)).transpose(-3, -2))
            products = exact_dot(p, self.levels[..., :windows, :, :]) * self.scale[..., :windows, None, :]
            sums = p.sum(-1, keepdim=True)
            products = products + sums * self.offset[..., :windows, None, :] * self.staged_scale[..., None, :]
            mixed = mixed + (products * unit).sum(-3)
            total = total + (sums * unit).sum(-3)
        return mixed / total


def int8_group(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 elements and scales, both f32 [..., n] and [..., 1], of the last axis, rounded to fp16, as one group.

    One float32 division rounds as the exact rule does, while results stay within 127.
    """
    x = x.to(torch.float16).float()
    if not x.shape[-1]:
        return x, x.new_zeros(*x.shape[:-1], 1)
    absmax = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))  # two reads, no copy: these are large
    scale = fp16(absmax.double() / 127).float()
    q = x.mul_(127).div_(absmax.clamp(min=torch.finfo(torch.float32).tiny)).round_()
    return q.masked_fill_(scale == 0, 0), scale


def exact_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Matrix product f32 of integers: INT8 times levels or INT8, exact."""
    largest = 127 * largest_level(LARGEST_COEFFICIENT) * a.shape[-1]
    if largest > _FLOAT32_EXACT:
        return (a.double() @ b.double()).float()
    return a @ b
