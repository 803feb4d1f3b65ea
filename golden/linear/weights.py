"""Quantised weights: the record that the search makes and engine, files and simulations take."""

from dataclasses import dataclass

import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.codes import INT8, LARGEST_COEFFICIENT, LINEAR, unchecked_decode
from kvant.golden.numeric.tensors import as_tensor, check_group, check_scales, check_shape, group_count


@dataclass(frozen=True, eq=False)
class QuantizedWeights:
    """A weight matrix of N outputs and K inputs in groups of G along K.

    Attributes
    ----------
    codes : u8 [N, K]
        One code per byte; 0x0 in INT8 groups.
    scale : f16 [N, ceil(K/G)]
    coefficient : u8 [N, ceil(K/G)]
        0..127, 255 (linear) or 254 (INT8 group).
    int8 : i8 [N, K] or None
        Elements of INT8 groups, 0 elsewhere; None when there is no such group.
    group : int
        G.
    loss : float
        The objective of the search that made these weights, summed over all groups; 0 if they came from elsewhere.
    name : str
        What error messages call the tensor.

    Raises
    ------
    TensorError
        When shapes do not fit each other, a code exceeds 15, a coefficient is reserved, a scale is negative or not
        finite, or an INT8 group has no INT8 plane.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    coefficient: torch.Tensor
    int8: torch.Tensor | None
    group: int
    loss: float = 0.0
    name: str = "w"

    def __post_init__(self):
        group = check_group(self.group)
        codes = as_tensor(self.codes, f"{self.name}_codes", (torch.uint8,), 2)
        outputs, inputs = codes.shape
        per_group = (outputs, group_count(inputs, group))
        if int(codes.max()) > 15:
            raise TensorError(f"{self.name}_codes: value {int(codes.max())}; legal is 0 to 15")
        scale = as_tensor(self.scale, f"{self.name}_scale", (torch.float16,), 2)
        check_shape(scale, f"{self.name}_scale", per_group)
        check_scales(scale, f"{self.name}_scale")
        coefficient = as_tensor(self.coefficient, f"{self.name}_coeff", (torch.uint8,), 2)
        check_shape(coefficient, f"{self.name}_coeff", per_group)
        reserved = (coefficient > LARGEST_COEFFICIENT) & (coefficient != LINEAR) & (coefficient != INT8)
        if reserved.any():
            where = reserved.nonzero()[0].tolist()
            raise TensorError(
                f"{self.name}_coeff{where} = {int(coefficient[tuple(where)])}: legal is 0 to 127, 254 (INT8 group) "
                "or 255 (linear)"
            )
        int8 = self.int8
        if int8 is not None:
            int8 = as_tensor(int8, f"{self.name}_int8", (torch.int8,), 2)
            check_shape(int8, f"{self.name}_int8", (outputs, inputs))
        elif (coefficient == INT8).any():
            where = (coefficient == INT8).nonzero()[0].tolist()
            raise TensorError(
                f"{self.name}_int8: missing, though {self.name}_coeff{where} = 254; legal is i8 {[outputs, inputs]}"
            )
        for field, value in (("codes", codes), ("scale", scale), ("coefficient", coefficient), ("int8", int8)):
            object.__setattr__(self, field, value)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs N and inputs K."""
        return tuple(self.codes.shape)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per weight: codes, scales, coefficients and, in INT8 groups, eight bits per element more."""
        elements = self.codes.numel()
        bits = 4 * elements + 24 * self.scale.numel()
        if self.int8 is not None:
            marked = (self.coefficient == INT8).repeat_interleave(self.group, 1)[:, : self.shape[1]]
            bits += 8 * int(marked.sum())
        return bits / elements

    def levels(self) -> torch.Tensor:
        """Signed integer levels, i16 [N, K]: what the lanes multiply by; of an INT8 group, its elements."""
        a = self.coefficient.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]
        level = unchecked_decode(self.codes, a).to(torch.int16)
        return level if self.int8 is None else torch.where(a == INT8, self.int8.to(torch.int16), level)

    def dequantize(self) -> torch.Tensor:
        """The weights these codes stand for, ``scale * level``, exact in f32 [N, K]."""
        scale = self.scale.to(torch.float32).repeat_interleave(self.group, dim=1)[:, : self.shape[1]]
        return scale * self.levels().to(torch.float32)
