"""Every tensor of a decoding run, by name and in the order of the model."""

import numpy as np
import torch


class Trace:
    """Records what a `Decoder` computes, step by step.

    An entry is called ``step0.model.layers.5.mlp.up_proj.output``; the step that comes first is the prefill. The input
    that several weights share is kept once, under the name of the first of them.

    Attributes
    ----------
    arrays : dict of str to array
        In the order of the model.
    """

    def __init__(self):
        self.arrays: dict[str, np.ndarray] = {}
        self._step = -1
        self._input: torch.Tensor | None = None

    def begin_step(self) -> None:
        """The entries that follow belong to the next step."""
        self._step += 1

    def __call__(self, name: str, value: torch.Tensor) -> None:
        """An `kvant.golden.models.llama.Observer`."""
        if name.endswith(".weight"):
            if value is self._input:
                return
            self._input, name = value, name.removesuffix("weight") + "input"
        self.arrays[f"step{self._step}.{name}"] = value.detach().numpy().copy()

    def take_step(self) -> dict[str, np.ndarray]:
        """The entries since the last call, which are then forgotten."""
        arrays, self.arrays = self.arrays, {}
        return arrays
