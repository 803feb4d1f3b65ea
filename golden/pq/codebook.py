"""Codebooks of product quantisation: a head's vector cut into sub-vectors, each one of a few centroids.

A head vector of ``d`` elements is ``M`` sub-vectors of ``d/M``; each becomes the index of one of ``2^nbits`` centroids.
Entries are INT8 with one fp16 scale per codebook. Source: docs/numerics.md, "Product quantisation"; the method is
MILLION's (DAC 2025, section III).
"""

import numbers
from dataclasses import dataclass

import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.tensors import as_tensor, check_scales

SUBSPACE_DIMENSIONS = (1, 2, 4, 8)
"""Legal dimensions of a sub-space, d/M."""

LEAST_BITS, MOST_BITS = 4, 8
"""Legal bits of a code."""


@dataclass(frozen=True)
class Partition:
    """How a head vector is cut and coded.

    Parameters
    ----------
    head_dim : int
        d, elements of a head vector.
    subspaces : int
        M; d/M is 1, 2, 4 or 8.
    nbits : int
        Bits of a code, 4 to 8.

    Raises
    ------
    TensorError
        For any other combination.
    """

    head_dim: int
    subspaces: int
    nbits: int

    def __post_init__(self):
        d, subspaces, nbits = (self.head_dim, self.subspaces, self.nbits)
        given = f"d = {d!r}, M = {subspaces!r}, nbits = {nbits!r}"
        for value in (d, subspaces, nbits):
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TensorError(f"product quantisation: {given}; legal are integers")
        if d < 1 or subspaces < 1 or d % subspaces or d // subspaces not in SUBSPACE_DIMENSIONS:
            dimensions = ", ".join(map(str, SUBSPACE_DIMENSIONS))
            raise TensorError(f"product quantisation: {given}; legal is an M that cuts d into pieces of {dimensions}")
        if not LEAST_BITS <= nbits <= MOST_BITS:
            raise TensorError(f"product quantisation: {given}; legal is nbits from {LEAST_BITS} to {MOST_BITS}")

    @classmethod
    def of(cls, head_dim: int, subspace: int = 2, nbits: int = MOST_BITS) -> "Partition":
        """The partition with *subspace* dimensions a piece."""
        if isinstance(subspace, bool) or subspace not in SUBSPACE_DIMENSIONS or head_dim % subspace:
            legal = ", ".join(str(each) for each in SUBSPACE_DIMENSIONS if head_dim % each == 0)
            raise TensorError(f"subspace = {subspace!r}: legal for d = {head_dim} is one of {legal}")
        return cls(head_dim, head_dim // subspace, nbits)

    @property
    def dimensions(self) -> int:
        """d/M, dimensions of a sub-space."""
        return self.head_dim // self.subspaces

    @property
    def centroids(self) -> int:
        """Centroids of a sub-space, ``2^nbits``."""
        return 1 << self.nbits

    @property
    def bits_per_element(self) -> float:
        """Bits of codes per element of a vector."""
        return self.nbits / self.dimensions

    @property
    def codebook_bytes(self) -> int:
        """Bytes of a codebook: INT8 entries and the fp16 scale."""
        return self.centroids * self.head_dim + 2

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors [..., d] as sub-vectors [..., M, d/M]."""
        return x.unflatten(-1, (self.subspaces, self.dimensions))


@dataclass(frozen=True)
class Codebook:
    """INT8 centroids of one head, or of several along leading axes.

    Attributes
    ----------
    entries : i8 [..., M, 2^nbits, d/M]
        ``C``; -128 is legal, though training makes none.
    scale : f16 [...]
        ``s_cb``, one for all centroids of a head.
    """

    entries: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, entries, scale, name: str = "codebook") -> "Codebook":
        """A checked codebook.

        Parameters
        ----------
        entries : i8 [..., M, 2^nbits, d/M]
        scale : f16 [...] or [..., 1]
        name : str
            What error messages call it; the scale is ``NAME_scale``.

        Raises
        ------
        TensorError
            For other dtypes and shapes, an illegal partition, a scale that is negative or not finite.
        """
        entries = as_tensor(entries, name, (torch.int8,))
        scale = as_tensor(scale, f"{name}_scale", (torch.float16,))
        if entries.dim() < 3:
            raise TensorError(f"{name}: shape {tuple(entries.shape)}; legal is [M, 2^nbits, d/M], heads in front")
        subspaces, centroids, dimensions = entries.shape[-3:]
        if centroids & (centroids - 1):
            raise TensorError(f"{name}: {centroids} centroids; legal is a power of two from 16 to 256")
        Partition(subspaces * dimensions, subspaces, centroids.bit_length() - 1)
        leading = tuple(entries.shape[:-3])
        if tuple(scale.shape) not in (leading, (*leading, 1)):
            raise TensorError(f"{name}_scale: shape {tuple(scale.shape)}; legal is {leading} or {(*leading, 1)}")
        check_scales(scale, f"{name}_scale")
        return cls(entries, scale.reshape(leading))

    @property
    def partition(self) -> Partition:
        """How vectors are cut."""
        subspaces, centroids, dimensions = self.entries.shape[-3:]
        return Partition(subspaces * dimensions, subspaces, centroids.bit_length() - 1)

    @property
    def leading(self) -> tuple[int, ...]:
        """Axes of heads, () for one head's codebook."""
        return tuple(self.entries.shape[:-3])

    def at(self, *index) -> "Codebook":
        """The codebook, or codebooks, at *index* of the leading axes."""
        return Codebook(self.entries[index], self.scale[index])

    def match(self, leading: tuple[int, ...], name: str) -> "Codebook":
        """Codebooks for vectors with these leading axes: one serves all, otherwise the last axes must agree."""
        own = self.leading
        if own and own != leading[len(leading) - len(own) :]:
            raise TensorError(f"codebook: heads {own}; legal is one codebook, or the heads of {name}, {leading}")
        return Codebook(
            self.entries.expand(*leading, *self.entries.shape[-3:]),
            self.scale.expand(leading) if leading else self.scale,
        )

    def centroids(self) -> torch.Tensor:
        """Values of all centroids, f32 [..., M, 2^nbits, d/M]; the products are exact."""
        return self.entries * self.scale.to(torch.float32)[..., None, None, None]

    def check_codes(self, codes, name: str = "codes") -> torch.Tensor:
        """*codes* u8 [..., T, M] as a tensor, refused where a code names no centroid."""
        codes = as_tensor(codes, name, (torch.uint8,))
        partition = self.partition
        if codes.dim() < 2 or codes.shape[-1] != partition.subspaces:
            raise TensorError(f"{name}: shape {tuple(codes.shape)}; legal is [..., T, {partition.subspaces}]")
        if int(codes.max()) >= partition.centroids:
            raise TensorError(f"{name}: value {int(codes.max())}; legal is 0 to {partition.centroids - 1}")
        return codes

    def decode(self, codes) -> torch.Tensor:
        """Vectors f32 [..., T, d] of codes u8 [..., T, M]."""
        codes = self.check_codes(codes)
        leading, tokens = tuple(codes.shape[:-2]), codes.shape[-2]
        partition = self.partition
        centroids = self.match(leading, "codes").centroids().reshape(-1, partition.dimensions)
        # centroid c of sub-space m of head h is row (h*M + m) * 2^nbits + c
        rows = codes.reshape(-1, tokens, partition.subspaces).long()
        first = torch.arange(rows.shape[0] * partition.subspaces).view(-1, 1, partition.subspaces)
        return centroids[rows + first * partition.centroids].reshape(*leading, tokens, partition.head_dim)
