"""Models whose weights went through a number format, and whose linear layers take rounded inputs."""

from collections.abc import Callable, Sequence

import torch

from kvant.golden.formats.base import Format
from kvant.golden.kvcache.attention import to_port
from kvant.golden.models.llama import Llama
from kvant.golden.numeric.int8 import int8_groups
from kvant.golden.numeric.tensors import from_groups, to_groups


def in_format(
    model: Llama,
    format_: Format,
    *,
    group: int = 64,
    scale_factors: Sequence[float] = (1.0,),
    step: Callable[[], None] = lambda: None,
) -> tuple[Llama, float]:
    """The model with the weights of its decoder layers' linear layers as a format stores them.

    Parameters
    ----------
    model : Llama
        Shares everything else with the result.
    format_ : Format
        Chooses by weight error, as nothing is known of the inputs.
    group : int
        G.
    scale_factors : sequence of float
        As `Format.quantize` takes them.
    step : callable
        Called when a weight has been quantised.

    Returns
    -------
    model : Llama
    bits : float
        Per element, over all these weights.
    """
    replacements, bits, elements = {}, 0.0, 0
    for info in model.checkpoint.linear_weights:
        w = model.weight(info.name)
        stored = format_.quantize(w, group, scale_factors=scale_factors, name=info.name)
        replacements[info.name] = stored.values
        bits, elements = bits + stored.bits * w.numel(), elements + w.numel()
        step()
    return model.replacing(replacements), bits / elements


def int8_inputs(group: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """What INT8 groups along the last axis make of the inputs of linear layers, f32 [..., K]."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        q, scale = int8_groups(to_groups(to_port(x), group))
        return from_groups(q * scale.float()[..., None], x.shape[-1])

    return rounded
