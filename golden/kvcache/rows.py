"""What happens to every row of keys or values before it is cached: the port, the mean, the sinks."""

import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.int8 import port_rule
from kvant.golden.numeric.rounding import FP16_MAX, fp16
from kvant.golden.numeric.tensors import as_tensor


def channel_vector(value, name: str, rows: torch.Tensor, *, least: float | None = None) -> torch.Tensor:
    """An fp16 vector per channel, [d] or [..., d] with the leading axes of *rows* [..., T, d], as [..., 1, d].

    Raises
    ------
    TensorError
        For another dtype or shape, an element that is not finite, or one below *least*.
    """
    vector = as_tensor(value, name, (torch.float16,))
    legal = [(rows.shape[-1],), (*rows.shape[:-2], rows.shape[-1])]
    if tuple(vector.shape) not in legal:
        raise TensorError(
            f"{name}: shape {tuple(vector.shape)}; legal is {' or '.join(map(str, dict.fromkeys(legal)))}"
        )
    bad = ~torch.isfinite(vector)
    if least is not None:
        bad |= vector < least
    for where in bad.nonzero()[:1].tolist():
        bound = "" if least is None else f" of at least {least:g}"
        raise TensorError(f"{name}{where} = {vector[tuple(where)].item()}: legal is a finite value{bound}")
    return vector[..., None, :]


def centred(x: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    """``fp16(x - mean)``, rounded once and saturating, of fp16 rows after the port rule.

    Parameters
    ----------
    x : f16 [..., T, d]
    mean : f16 [..., 1, d], optional
    """
    x = port_rule(x)
    if mean is None:
        return x
    return fp16(x.to(torch.float64) - mean.to(torch.float64)).clamp(-FP16_MAX, FP16_MAX)


def check_sinks(sinks: int) -> int:
    """The number of sinks, or a refusal."""
    if isinstance(sinks, bool) or not isinstance(sinks, int) or sinks < 0:
        raise TensorError(f"sinks = {sinks!r}: legal is an integer from 0")
    return sinks
