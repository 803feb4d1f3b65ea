"""Weight quantisation: coefficient and scale of every group by least error.

Candidates are the table's coefficients, each at one or several scales. Each is encoded exactly and measured in
float32; where the two best lie closer than float32 tells apart, float64 decides. So the least weight error is the
one of float64 at the stored scale, ties going to the earliest table entry, at the speed of float32.
Source: docs/numerics.md, "Choosing the coefficient" and "Groups and scales".
"""

import numbers
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvant.golden.errors import TensorError
from kvant.golden.linear.objective import LocalObjective, Objective
from kvant.golden.linear.threads import independent_threads
from kvant.golden.linear.weights import QuantizedWeights
from kvant.golden.numeric.codes import (
    DEFAULT_COEFFICIENTS,
    INT8,
    check_table,
    level_table,
    unchecked_decode,
    unchecked_encode,
)
from kvant.golden.numeric.int8 import int8_groups
from kvant.golden.numeric.rounding import FP16_OVERFLOW, fp16
from kvant.golden.numeric.tensors import as_tensor, check_group, check_shape, group_count

CHUNK = 1 << 17
"""Elements worked on at a time: a few float32 buffers of them stay in the cache of a core."""

DECIDED = 256
"""Groups decided in float64 at a time (each brings a copy of its second moment's root)."""

CALIBRATED_TOLERANCE = 2e-4
"""Relative difference of calibrated objectives below which float64 decides."""


def quantize_weights(
    w,
    group: int = 64,
    coefficients=DEFAULT_COEFFICIENTS,
    *,
    second_moment=None,
    scale_factors=(1.0,),
    outlier_groups=None,
    name: str = "w",
) -> QuantizedWeights:
    """Quantise a weight matrix to M-ANT groups along K.

    Parameters
    ----------
    w : f16, bf16 or f32 [N, K]
    group : int
        G; a short last group, K < G and K = 1 are legal.
    coefficients : sequence of int
        Table of 1 to 16 bytes of 0..127 or 255, any order, repeats included. On a tie the earliest entry wins.
    second_moment : [K] or [ceil(K/G), G, G], optional
        Diagonal or full second moment of the calibration activations (`objective.diagonal_moment`,
        `objective.second_moment`): the search minimises the group's output error instead of its weight error.
    scale_factors : sequence of float
        Scales tried, ``fp16(factor * absmax / M)``, as factors of 0 < factor <= 2. On a tie the earliest wins
        (after the earliest coefficient).
    outlier_groups : bool [N, ceil(K/G)] or float, optional
        Groups that stay INT8 (coefficient 254): marked ones, or all whose absmax exceeds this many times the root
        mean square of the group.
    name : str
        What error messages call the tensor.

    Returns
    -------
    QuantizedWeights
        A group whose scale rounds to 0 has codes 0x0 and value 0; an all-zero one has the first table entry.

    Raises
    ------
    TensorError
        An element is not finite, or every coefficient's scale of a group overflows fp16: the text names tensor
        and group.
    """
    w = as_tensor(w, name, (torch.float16, torch.bfloat16, torch.float32), 2)
    group = check_group(group)
    outputs, inputs = w.shape
    shape = (outputs, group_count(inputs, group))
    search = _Search(check_table(coefficients), _check_factors(scale_factors))
    outliers = _Outliers(outlier_groups, shape)
    with independent_threads() as run:
        objective = Objective(inputs, group, second_moment, run)
        codes = torch.empty(outputs, inputs, dtype=torch.uint8)
        int8 = torch.zeros(outputs, inputs, dtype=torch.int8) if outliers else None
        scale = torch.empty(shape, dtype=torch.float16)
        coefficient = torch.empty(shape, dtype=torch.uint8)
        loss = torch.empty(shape, dtype=torch.float64)

        def quantize(chunk: Chunk) -> None:
            x = chunk.cut(w)
            chunk.check_finite(x, name)
            keep = outliers.marked(x, chunk)
            search.check_range(x, keep, chunk, name)
            local = objective.at(chunk.first, chunk.last, x.shape[-1])
            s, a = search.best(x, local, objective)
            code = unchecked_encode(x, s, a)
            level = unchecked_decode(code, a[..., None])
            if keep is not None:
                q, s8 = int8_groups(x)
                q = q.masked_fill_(~keep[..., None], 0)
                code.masked_fill_(keep[..., None], 0)
                level = torch.where(keep[..., None], q.to(torch.int32), level)
                s, a = torch.where(keep, s8, s), torch.where(keep, INT8, a)
                chunk.paste(q, int8)
            error = x.to(torch.float64) - s.to(torch.float64)[..., None] * level
            loss[chunk.groups] = local.measure(error).T
            scale[chunk.groups], coefficient[chunk.groups] = s.T, a.T
            chunk.paste(code, codes)

        run(quantize, chunks(outputs, inputs, group))
        total = float(np.sum(loss.numpy()))
        if int8 is not None and not (coefficient == INT8).any():
            int8 = None
        return QuantizedWeights(codes, scale, coefficient, int8, group, total, name)


def _check_factors(factors) -> tuple[float, ...]:
    factors = tuple(factors)
    legal = [isinstance(f, numbers.Real) and not isinstance(f, bool) and 0 < f <= 2 for f in factors]
    if not factors or not all(legal):
        raise TensorError(f"scale_factors = {factors!r}: legal is at least one number above 0 and up to 2")
    return tuple(float(f) for f in factors)


@dataclass(frozen=True)
class Chunk:
    """Some rows of a weight matrix and some whole groups along K (or the short last one), worked on at a time.

    Attributes
    ----------
    rows : slice
    first, last : int
        Groups first .. last-1 along K.
    start, stop : int
        Inputs start .. stop-1.
    """

    rows: slice
    first: int
    last: int
    start: int
    stop: int

    @property
    def groups(self) -> tuple[slice, slice]:
        """Index of the chunk in an array of one entry per group, [N, ceil(K/G)]."""
        return self.rows, slice(self.first, self.last)

    def cut(self, w: torch.Tensor) -> torch.Tensor:
        """Elements as f32 [groups along K, rows, g], without -0."""
        part = w[self.rows, self.start : self.stop].unflatten(1, (self.last - self.first, -1)).transpose(0, 1)
        return torch.add(part, 0.0, out=torch.empty(part.shape))

    def paste(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Inverse of `cut`."""
        whole[self.rows, self.start : self.stop].unflatten(1, (self.last - self.first, -1)).copy_(part.transpose(0, 1))

    def check_finite(self, x: torch.Tensor, name: str) -> None:
        """Refuse elements, as `cut` gives them, that are not finite."""
        bad = ~torch.isfinite(x)
        if bad.any():
            row, group, element = bad.transpose(0, 1).nonzero()[0].tolist()
            value = x[group, row, element].item()
            row, column = self.rows.start + row, self.start + group * x.shape[-1] + element
            raise TensorError(
                f"{name}[{row}, {column}] = {value} (group [{row}, {self.first + group}]): legal are finite elements"
            )


def chunks(outputs: int, inputs: int, group: int) -> Iterator[Chunk]:
    """Cut a matrix into chunks, a short last group by itself.

    Groups at several places along K go together as long as a chunk keeps to `CHUNK` elements; a large matrix is also
    cut along its outputs.
    """
    whole = inputs // group
    row_step = max(1, min(outputs, CHUNK // group))
    group_step = max(1, CHUNK // (row_step * group))
    spans = [(g, min(g + group_step, whole)) for g in range(0, whole, group_step)]
    spans = [(first, last, first * group, last * group) for first, last in spans]
    if inputs % group:
        spans.append((whole, whole + 1, whole * group, inputs))
    for row in range(0, outputs, row_step):
        for span in spans:
            yield Chunk(slice(row, row + row_step), *span)


class _Outliers:
    """Which groups stay INT8: marked ones, or those whose peak exceeds a multiple of the root mean square."""

    def __init__(self, outlier_groups, shape: tuple[int, int]):
        self._mask = self._threshold = None
        if isinstance(outlier_groups, numbers.Real) and not isinstance(outlier_groups, bool):
            if not outlier_groups > 0:
                raise TensorError(f"outlier_groups = {outlier_groups!r}: legal is a number above 0")
            self._threshold = float(outlier_groups)
        elif outlier_groups is not None:
            self._mask = as_tensor(outlier_groups, "outlier_groups", (torch.bool,), 2)
            check_shape(self._mask, "outlier_groups", shape)

    def __bool__(self) -> bool:
        return self._mask is not None or self._threshold is not None

    def marked(self, x: torch.Tensor, chunk: Chunk) -> torch.Tensor | None:
        """Groups of a chunk to keep INT8, bool [B, n]; None if there are none in any chunk."""
        if self._mask is not None:
            return self._mask[chunk.groups].T
        if self._threshold is None:
            return None
        return x.abs().amax(-1) > self._threshold * x.to(torch.float64).square().mean(-1).sqrt()


class _Search:
    """The candidates of a search, and the choice among them for a chunk of groups."""

    def __init__(self, table: tuple[int, ...], factors: tuple[float, ...]):
        self._candidates = [(a, f) for a in table for f in factors]
        levels = level_table(table).repeat_interleave(len(factors), 0)  # [candidates, 8]
        self._largest = levels[:, -1].to(torch.float64)
        self._neighbours = (levels[:, :-1] + levels[:, 1:]).to(torch.float32)
        self._steps = torch.cat((levels[:, :1], levels.diff(dim=1)), dim=1).tolist()  # a level is a sum of steps
        self._coefficient = torch.tensor([a for a, _ in self._candidates], dtype=torch.uint8)
        self._factor = torch.tensor([f for _, f in self._candidates], dtype=torch.float64)

    def check_range(self, x: torch.Tensor, keep: torch.Tensor | None, chunk: Chunk, name: str) -> None:
        """Refuse groups of a chunk that no candidate's scale reaches (nor INT8's, where *keep* is set)."""
        limit = torch.tensor((FP16_OVERFLOW * self._largest / self._factor).max().item(), dtype=torch.float64)
        if keep is not None:
            limit = torch.where(keep, FP16_OVERFLOW * 127, limit)
        absmax = x.abs().amax(-1).to(torch.float64)
        beyond = absmax >= limit
        if beyond.any():
            row, group = beyond.T.nonzero()[0].tolist()
            raise TensorError(
                f"{name}: group [{chunk.rows.start + row}, {chunk.first + group}] has absmax "
                f"{absmax[group, row].item():g}; legal is below {limit.expand(absmax.shape)[group, row].item():g}, "
                "or its scale overflows fp16"
            )

    def best(self, x: torch.Tensor, local: LocalObjective, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored scale f16 [B, n] and coefficient u8 [B, n] of groups x, f32 [B, n, g]."""
        magnitude = x.abs()
        absmax = magnitude.amax(-1)
        view = (-1, 1, 1)
        scale = fp16(absmax.to(torch.float64) * self._factor.view(view) / self._largest.view(view))  # [C, B, n]
        if len(self._candidates) == 1:
            choice = torch.zeros(absmax.shape, dtype=torch.int64)
        else:
            errors = self._errors(x, magnitude, scale, local, objective.signed)
            choice = self._decide(x, absmax, scale, errors, local, objective)
        return scale.gather(0, choice[None])[0], self._coefficient[choice]

    def _errors(self, x, magnitude, scale, local: LocalObjective, signed: bool) -> torch.Tensor:
        """Objective of every candidate, f32 [C, B, n]; infinite where the scale overflows."""
        errors = torch.empty(scale.shape)
        twice = 2 * magnitude
        sign = torch.where(x < 0, -1.0, 1.0) if signed else None
        above, level, work = (torch.empty_like(x) for _ in range(3))
        s = scale.to(torch.float32)
        thresholds = (s[:, None] * self._neighbours[:, :, None, None])[..., None]  # exact: 11 by 11 bits
        s = s[..., None]
        for index, levels in enumerate(self._steps):
            level.fill_(levels[0])
            for k in range(7):
                torch.gt(twice, thresholds[index, k], out=above)
                level.add_(above, alpha=levels[k + 1])
            level.mul_(s[index])  # exact; 0 where the scale is 0
            error = torch.sub(magnitude, level, out=level)
            if signed:
                error.mul_(sign)
            errors[index] = local.measure(error, work)
        return errors.masked_fill_(torch.isinf(scale), torch.inf)

    def _decide(self, x, absmax, scale, errors, local: LocalObjective, objective: Objective) -> torch.Tensor:
        """Index of the least error, i64 [B, n]; the earliest on a tie."""
        best, choice = errors.min(0)
        contenders = errors <= best * (1 + self._tolerance(x.shape[-1], objective)) + 1e-35
        # groups of zeros tie exactly, and the first candidate has it
        choice.masked_fill_(absmax == 0, 0)
        position, row = ((contenders.sum(0) > 1) & (absmax > 0)).nonzero(as_tuple=True)
        for part in torch.arange(len(row)).split(DECIDED):
            p, r = position[part], row[part]
            choice[p, r] = self._decide_wide(x[p, r], scale[:, p, r], contenders[:, p, r], p, local)
        return choice

    @staticmethod
    def _tolerance(length: int, objective: Objective) -> float:
        """Relative difference below which float32 does not tell two objectives apart.

        Of the weight error this is a bound: an element's error is the rounded difference of exact numbers, its square
        is rounded, and so are at most *length* additions of positive terms, and the root and its square, 2^-24 each
        time, in both objectives. Of a calibrated objective it is a generous habit.
        """
        return 2 * (length + 16) * 2.0**-24 if objective.is_weight_error else CALIBRATED_TOLERANCE

    def _decide_wide(self, x, scale, contenders, position, local: LocalObjective) -> torch.Tensor:
        """The choice among contenders in float64, i64 [m], of groups x [m, g] at places *position* [m] along K."""
        errors = torch.full(contenders.shape, torch.inf, dtype=torch.float64)
        index, which = contenders.nonzero(as_tuple=True)
        x, s, coefficient = x[which], scale[index, which], self._coefficient[index]
        level = unchecked_decode(unchecked_encode(x, s, coefficient), coefficient[:, None])
        error = x.to(torch.float64) - s.to(torch.float64)[:, None] * level
        errors[index, which] = local.measure_rows(error, position[which])
        return errors.argmin(0)
