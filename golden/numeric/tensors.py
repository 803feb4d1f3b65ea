"""Tensors at the borders of the golden model: accepted kinds, one-line refusals, and groups along an axis."""

from collections.abc import Iterable

import numpy as np
import torch

from kvant.golden.errors import TensorError

LARGEST_GROUP = 256
"""Largest group size G; every integer and every rounded product of the contract stays exact far beyond it."""


def as_tensor(value, name: str, dtypes: Iterable[torch.dtype], dims: int | None = None) -> torch.Tensor:
    """*value* as a contiguous tensor on the CPU without gradient; the caller's data are never modified.

    Parameters
    ----------
    value : torch.Tensor or numpy.ndarray
    name : str
        What error messages call it.
    dtypes : iterable of torch.dtype
        Accepted element types; nothing is converted silently.
    dims : int, optional
        Number of dimensions it must have.

    Raises
    ------
    TensorError
        For another type, dtype or number of dimensions, or a tensor without elements.
    """
    if isinstance(value, np.ndarray):
        try:
            value = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape).copy())
        except TypeError:
            raise TensorError(f"{name}: dtype {value.dtype}; legal: {_names(dtypes)}") from None
    if not isinstance(value, torch.Tensor):
        raise TensorError(f"{name}: {type(value).__name__}; legal is a torch tensor or a numpy array")
    if value.dtype not in dtypes:
        raise TensorError(f"{name}: dtype {_name(value.dtype)}; legal: {_names(dtypes)}")
    if dims is not None and value.dim() != dims:
        raise TensorError(f"{name}: shape {tuple(value.shape)}; legal is {dims} dimension{'s' if dims > 1 else ''}")
    if value.numel() == 0:
        raise TensorError(f"{name}: shape {tuple(value.shape)}; legal is at least one element")
    return value.detach().cpu().contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(_name(dtype) for dtype in dtypes)


def check_shape(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    """Refuse *tensor* unless it has exactly *shape*."""
    if tuple(tensor.shape) != shape:
        raise TensorError(f"{name}: shape {tuple(tensor.shape)}; legal is {shape}")


def check_group(group) -> int:
    """The group size G as an int, or a refusal."""
    if isinstance(group, bool) or not isinstance(group, int | np.integer) or not 1 <= group <= LARGEST_GROUP:
        raise TensorError(f"group = {group!r}: legal is an integer from 1 to {LARGEST_GROUP}")
    return int(group)


def check_scales(scale: torch.Tensor, name: str) -> None:
    """Refuse fp16 scales that are negative or not finite; -0 is a zero."""
    bad = ~torch.isfinite(scale) | (scale < 0)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise TensorError(f"{name}{list(where)} = {scale[where].item()}: legal is a finite value of at least 0")


def group_count(length: int, group: int) -> int:
    """Groups of an axis of *length* elements, ``ceil(length / group)``; the last one may be shorter."""
    return -(-length // group)


def to_groups(x: torch.Tensor, group: int) -> torch.Tensor:
    """Cut the last axis into groups.

    Parameters
    ----------
    x : [..., K]
    group : int
        G.

    Returns
    -------
    [..., ceil(K/G), G]
        A short last group is filled up with zeros, which are no elements: whoever reduces over a group has to
        know that they add nothing (0 to a sum, a maximum, an exact dot product).
    """
    short = -x.shape[-1] % group
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def from_groups(x: torch.Tensor, length: int) -> torch.Tensor:
    """Inverse of `to_groups`: [..., ceil(K/G), G] to [..., K], dropping what filled up the last group."""
    return x.flatten(-2)[..., :length]
