"""Linear layers of transformers' models in the bits of the hardware: M-ANT weights, INT8 group activations."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import to_port
from kvant.golden.linear.engine import multiply
from kvant.golden.linear.search import quantize_weights
from kvant.golden.linear.weights import QuantizedWeights
from kvant.golden.models.errors import ModelError
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS
from kvant.golden.numeric.int8 import quantize_int8


class QuantizedLinear(nn.Module):
    """Takes the place of a `torch.nn.Linear`: ``y = x W^T + b`` with W in M-ANT groups and x in INT8 groups.

    Inputs become fp16 at the port, saturating, then INT8 groups; the product has the bits of
    `kvant.golden.linear.engine.quantized_linear`; the bias is added in float32, the output has the type of the input.
    It computes on the CPU, wherever the model is, and has no gradient.

    Parameters
    ----------
    weights : QuantizedWeights
        [N, K].
    bias : f32 [N], optional
    """

    def __init__(self, weights: QuantizedWeights, bias: torch.Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weights.shape
        self.group, self._name = weights.group, weights.name
        for plane in ("codes", "scale", "coefficient", "int8"):
            self.register_buffer(plane, getattr(weights, plane))
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    @property
    def weights(self) -> QuantizedWeights:
        """The record that engine, files and simulations take."""
        return QuantizedWeights(self.codes, self.scale, self.coefficient, self.int8, self.group, name=self._name)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [..., N] of inputs [..., K] of any float type."""
        groups = quantize_int8(to_port(x.float().flatten(0, -2)), self.group)
        y = multiply(groups.q, groups.scale, self.weights)
        if self.bias is not None:
            y = y + self.bias
        return y.unflatten(0, x.shape[:-1]).to(x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.group}"

    def _apply(self, fn, recurse=True):
        """Leaves the planes as they are: their types are what they mean, ``model.half()`` must not touch them."""
        return self


def quantize_model(
    model: nn.Module,
    *,
    group: int = 64,
    coefficients: Sequence[int] = DEFAULT_COEFFICIENTS,
    moments: Mapping[str, torch.Tensor] | None = None,
    scale_factors: Sequence[float] = (1.0,),
    skip: Sequence[str] = ("lm_head",),
) -> list[str]:
    """Replace the linear layers of a model by quantised ones, in place.

    Parameters
    ----------
    model : torch.nn.Module
    group, coefficients, scale_factors
        As `kvant.golden.linear.search.quantize_weights` takes them.
    moments : mapping, optional
        Second moments of inputs by name of the layer (`input_moments`): the search minimises the output error.
    skip : sequence of str
        Layers that stay, by the last part of their name or by their whole name.

    Returns
    -------
    list of str
        Names of the layers replaced.

    Raises
    ------
    ModelError
        No layer to replace.
    TensorError
        A layer whose moment is missing, or whose weight cannot be quantised, by its name.
    """
    found = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}
    names = [name for name in found if name not in skip and name.rpartition(".")[2] not in skip]
    if not names:
        raise ModelError(f"{type(model).__name__}: no torch.nn.Linear to replace beside {', '.join(skip) or 'none'}")
    for name in names:
        if moments is not None and name not in moments:
            raise TensorError(f"moments: none for {name}; legal are those of all layers replaced")
        weights = quantize_weights(
            found[name].weight.detach(),
            group,
            coefficients,
            second_moment=None if moments is None else moments[name],
            scale_factors=scale_factors,
            name=name,
        )
        model.set_submodule(name, QuantizedLinear(weights, found[name].bias))
    return names
