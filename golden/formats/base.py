"""One interface for number formats, so that M-ANT and its competitors are compared with the same search.

A format turns a weight matrix into the values it would be stored as, and says how many bits that takes. Scales
may be searched: every format then tries the same factors below its own full-range scale, measured with the same
objective (weight error, or output error with calibration), group by group.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum

import torch

from kvant.golden.errors import TensorError
from kvant.golden.linear.objective import Objective, cut_moment
from kvant.golden.linear.search import Chunk, chunks
from kvant.golden.linear.threads import independent_threads
from kvant.golden.numeric.rounding import FP16_MAX, fp16
from kvant.golden.numeric.tensors import as_tensor, check_group, group_count

Approximate = Callable[[torch.Tensor], torch.Tensor]
"""Groups f32 [..., g] to the values they are stored as, f32 [..., g]."""


@dataclass(frozen=True)
class Approximation:
    """A matrix as a format stores it.

    Attributes
    ----------
    values : f32 [N, K]
    bits : float
        Stored bits per element, metadata included.
    loss : float
        The objective, summed over all groups.
    """

    values: torch.Tensor
    bits: float
    loss: float


class Format(ABC):
    """A number format of groups along K.

    Attributes
    ----------
    name : str
    fixed_group : int or None
        The group size a format is defined for, where it does not take any.
    """

    name: str
    fixed_group: int | None = None

    def group_size(self, group: int = 64) -> int:
        """Elements of a group when *group* is asked for."""
        return self.fixed_group or check_group(group)

    @abstractmethod
    def bits(self, inputs: int, group: int = 64) -> float:
        """Stored bits per element of rows of *inputs* elements."""

    @abstractmethod
    def quantize(
        self, w, group: int = 64, *, second_moment=None, scale_factors: Sequence[float] = (1.0,), name: str = "w"
    ) -> Approximation:
        """Store a matrix in this format.

        Parameters
        ----------
        w : f16, bf16 or f32 [N, K]
        group : int
            G; formats with a fixed group ignore it.
        second_moment : [K] or [ceil(K/G), G, G], optional
            As `search.quantize_weights` takes it, for *group*; formats with a smaller group use its blocks.
        scale_factors : sequence of float
            Factors of the full-range scale that are tried.
        name : str
            What error messages call the tensor.
        """


class GroupFormat(Format):
    """A format defined by how it stores a group: `code_bits` per element and `group_bits` per group."""

    code_bits: int
    group_bits: int

    def bits(self, inputs: int, group: int = 64) -> float:
        return self.code_bits + self.group_bits * group_count(inputs, self.group_size(group)) / inputs

    @abstractmethod
    def candidates(self, w: torch.Tensor, factors: Sequence[float]) -> list[Approximate]:
        """Ways to store a group of matrix *w*, among which the objective chooses; on a tie the earliest."""

    def store(self, groups: torch.Tensor) -> torch.Tensor:
        """Groups f32 [..., g] as they are stored: of the full-range candidates the one with the least squared error."""
        candidates = self.candidates(groups, (1.0,))
        best = candidates[0](groups)
        for approximate in candidates[1:]:
            stored = approximate(groups)
            better = (groups - stored).square().sum(-1) < (groups - best).square().sum(-1)
            best = torch.where(better[..., None], stored, best)
        return best

    def quantize(
        self, w, group: int = 64, *, second_moment=None, scale_factors: Sequence[float] = (1.0,), name: str = "w"
    ) -> Approximation:
        w = finite_matrix(w, name)
        outputs, inputs = w.shape
        size = self.group_size(group)
        candidates = self.candidates(w, scale_factors)
        values = torch.empty(w.shape)
        with independent_threads() as run:
            objective = Objective(inputs, size, cut_moment(second_moment, group, size, inputs), run)

            def store(chunk: Chunk) -> float:
                x = chunk.cut(w)
                local = objective.at(chunk.first, chunk.last, x.shape[-1])
                best, least = None, None
                for approximate in candidates:
                    stored = approximate(x)
                    error = local.measure(x - stored)
                    if best is None:
                        best, least = stored, error
                    else:
                        better = error < least
                        best = torch.where(better[..., None], stored, best)
                        least = torch.where(better, error, least)
                chunk.paste(best, values)
                return float(local.measure(x.to(torch.float64) - best).sum())

            loss = fsum(run(store, chunks(outputs, inputs, size)))
        return Approximation(values, self.bits(inputs, group), loss)


def finite_matrix(w, name: str) -> torch.Tensor:
    """A weight matrix as f32 [N, K], or a refusal."""
    w = as_tensor(w, name, (torch.float16, torch.bfloat16, torch.float32), 2).to(torch.float32)
    if not torch.isfinite(w).all():
        raise TensorError(f"{name}: NaN or infinity; legal are finite elements")
    return w


def absmax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of groups [..., g], as [..., 1]."""
    return x.abs().amax(-1, keepdim=True)


def fp16_scale(largest_magnitude: torch.Tensor, factor: float, largest: float) -> torch.Tensor:
    """``fp16(factor * absmax / largest)`` as f32, saturating instead of overflowing."""
    scale = fp16(largest_magnitude.to(torch.float64) * (factor / largest))
    return scale.clamp(max=FP16_MAX).to(torch.float32)


def divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale`` per group, 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, x / torch.where(scale == 0, 1.0, scale))


def nearest(u: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The entry of an ascending f32 *table* nearest to each element (the lower one on a tie)."""
    return table[torch.bucketize(u.contiguous(), (table[1:] + table[:-1]) / 2)]
