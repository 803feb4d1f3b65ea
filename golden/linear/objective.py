"""What a weight search minimises: the weight error of a group, or its own term of the output error.

With calibration activations X the group's term of the squared output error is ``e^T (X_g^T X_g) e``, ``e`` the group's
weight error, the other groups left exact. Every objective here is a sum of squares ``|e R|^2``: R is the identity, the
root of a diagonal, or the root of the group's full second moment. Source: docs/numerics.md, "Choosing the
coefficient"; M-ANT (HPCA 2025), section V.
"""

import torch

from kvant.golden.errors import TensorError
from kvant.golden.linear.threads import Run
from kvant.golden.numeric.tensors import as_tensor, check_group, check_shape, group_count, to_groups

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def second_moment(x, group: int) -> torch.Tensor:
    """``X_g^T X_g`` of every group of inputs, summed over tokens.

    Parameters
    ----------
    x : [T, K], any float type
        Calibration activations. Moments of several batches add.
    group : int

    Returns
    -------
    f64 [ceil(K/G), G, G]
        Rows and columns beyond the elements of a short last group are 0.
    """
    x = to_groups(as_tensor(x, "x", _FLOATS, 2).to(torch.float64), check_group(group)).transpose(0, 1)
    return x.transpose(1, 2) @ x


def diagonal_moment(x) -> torch.Tensor:
    """``sum x^2`` over tokens of every input, f64 [K], of activations [T, K]."""
    return as_tensor(x, "x", _FLOATS, 2).to(torch.float64).square().sum(0)


def cut_moment(moment, group: int, smaller: int, inputs: int):
    """The moment for groups of *smaller* elements from one for groups of *group*: the blocks on its diagonal.

    A diagonal moment, None and the same group size need no change. *smaller* has to divide *group*.
    """
    if moment is None or smaller == group or moment.ndim == 1:
        return moment
    if group % smaller:
        raise TensorError(f"second_moment: groups of {group}; legal is a multiple of {smaller}")
    moment = as_tensor(moment, "second_moment", _FLOATS, 3)
    parts = group // smaller
    blocks = moment.unflatten(2, (parts, smaller)).unflatten(1, (parts, smaller))  # [groups, parts, g, parts, g]
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(0, 1)[: group_count(inputs, smaller)]


class Objective:
    """A squared error of groups, measured in float32 (to search) or float64 (to decide).

    Parameters
    ----------
    inputs, group : int
        K and G.
    moment : None, [K] or [ceil(K/G), G, G]
        None: the weight error. A vector: the diagonal of the activations' second moment. A stack of matrices: the
        full second moment of each group of inputs, shared by all outputs.
    run : Run
        How to take the roots of several groups.
    """

    def __init__(self, inputs: int, group: int, moment=None, run: Run = lambda work, items: [work(i) for i in items]):
        self._kind = "weight"
        self._root = None
        if moment is None:
            return
        moment = as_tensor(moment, "second_moment", _FLOATS).to(torch.float64)
        if not torch.isfinite(moment).all():
            raise TensorError("second_moment: NaN or infinity; legal are finite values")
        groups = group_count(inputs, group)
        if moment.dim() == 1:
            check_shape(moment, "second_moment", (inputs,))
            if (moment < 0).any():
                raise TensorError(f"second_moment: value {moment.min().item()}; legal is at least 0")
            self._kind = "diagonal"
            self._root = to_groups(moment.sqrt(), group)
        else:
            check_shape(moment, "second_moment", (groups, group, group))
            self._kind = "full"
            self._root = torch.zeros_like(moment)
            whole = inputs // group
            if whole:
                self._root[:whole] = torch.cat(run(_square_root, moment[:whole].split(4)))
            if short := inputs % group:
                self._root[-1:, :short, :short] = _square_root(moment[-1:, :short, :short])

    @property
    def signed(self) -> bool:
        """Whether the sign of an element's error matters (it does not in a weighted sum of squares)."""
        return self._kind == "full"

    @property
    def is_weight_error(self) -> bool:
        """Whether this is the plain weight error, whose ties and rounding the contract fixes."""
        return self._kind == "weight"

    def at(self, start: int, stop: int, length: int) -> "LocalObjective":
        """The objective of groups start..stop-1 along K, their first *length* elements."""
        if self._root is None:
            return LocalObjective(None, full=False)
        if self.signed:
            return LocalObjective(self._root[start:stop, :length, :length], full=True)
        return LocalObjective(self._root[start:stop, None, :length], full=False)


class LocalObjective:
    """An `Objective` restricted to some groups along K."""

    def __init__(self, root: torch.Tensor | None, full: bool):
        self._full = full
        self._wide = root
        self._single = None if root is None else root.to(torch.float32)

    def measure(self, error: torch.Tensor, work: torch.Tensor | None = None) -> torch.Tensor:
        """Objective [B, n] of errors [B, n, g], in the precision of *error*; *error* may be overwritten.

        *work* is a buffer of error's shape, to save an allocation.
        """
        if self._wide is not None:
            root = self._single if error.dtype == torch.float32 else self._wide
            error = torch.bmm(error, root, out=work) if self._full else torch.mul(error, root, out=error)
        return torch.linalg.vector_norm(error, dim=-1).square_()

    def measure_rows(self, error: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Objective [m] of single groups' errors [m, g], float64; *position* [m] says which group along K each is."""
        if self._wide is not None:
            root = self._wide[position]
            error = torch.bmm(error[:, None, :], root)[:, 0] if self._full else error * root[:, 0]
        return error.square().sum(-1)


def _square_root(moment: torch.Tensor) -> torch.Tensor:
    """R with ``R R^T`` = moment, [groups, G, G]; columns of eigenvectors, so that rank deficiency needs no care."""
    values, vectors = torch.linalg.eigh((moment + moment.transpose(1, 2)) / 2)
    return vectors * values.clamp(min=0).sqrt()[:, None, :]
