"""Linear layers of a model on the compiled linear engine."""

from collections.abc import Callable, Mapping

import torch

from kvant.golden.linear.engine import check_weights
from kvant.golden.linear.weights import QuantizedWeights
from kvant.golden.models.generate import LinearLayers, Product
from kvant.sim.compiled.linear import CompiledLinear


class CompiledLayers(LinearLayers):
    """All linear layers of a model in the RTL, one after another on one array.

    Weights are brought into the order of the array once, here.

    Parameters
    ----------
    engine : CompiledLinear
    weights : mapping of str to QuantizedWeights
        By name, in groups of the engine's size.
    progress : callable, optional
        Called with weights done and weights in all.

    Raises
    ------
    TensorError
        Coefficients that the engine is not built for.
    ParameterError
        A layer that does not fit the engine's buffers.
    """

    where = "RTL"

    def __init__(
        self,
        engine: CompiledLinear,
        weights: Mapping[str, QuantizedWeights],
        progress: Callable[[int, int], None] | None = None,
    ):
        self._engine = engine
        self._packed = {}
        for number, (name, record) in enumerate(weights.items()):
            arrays = {"w_codes": record.codes, "w_scale": record.scale, "w_coeff": record.coefficient}
            if record.int8 is not None:
                arrays["w_int8"] = record.int8
            check_weights(**arrays, group=engine.p.group, max_coefficient=engine.p.max_coefficient)
            self._packed[name] = engine.pack({key: value.numpy() for key, value in arrays.items()})
            if progress is not None:
                progress(number + 1, len(weights))

    def multiply(self, name: str, x: torch.Tensor) -> Product:
        weights = self._packed[name]
        product = self._engine.multiply(x.numpy(), weights)
        passes = product.transfers // len(weights.data)
        size = passes * (weights.code_bytes + weights.metadata_bytes)
        return Product(torch.from_numpy(product.y), product.cycles, size)

    def close(self) -> None:
        """Free the compiled model."""
        self._engine.close()
