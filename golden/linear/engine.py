"""Linear layer on quantised weights and activations, bit for bit what the hardware computes.

Per group an exact integer ``r`` (the dot product of INT8 activations and weight levels), then fp32 accumulation over
the groups of a row in storage order, from +0: ``y <- fp32(y + fp32(r * t))`` with ``t = s_x * s_w`` exact. Every
float64 below is exact: ``|r| < 2^26`` for G <= 256 and t has 22 bits, 48 together.
Source: docs/numerics.md, "Group dot product".
"""

import torch

from kvant.golden.errors import TensorError
from kvant.golden.linear.weights import QuantizedWeights
from kvant.golden.numeric.codes import LARGEST_COEFFICIENT, LINEAR
from kvant.golden.numeric.int8 import quantize_int8
from kvant.golden.numeric.rounding import fp32
from kvant.golden.numeric.tensors import as_tensor, check_group, check_scales, check_shape, group_count, to_groups


def linear(x_q, x_scale, w_codes, w_scale, w_coeff, w_int8=None, *, group: int) -> torch.Tensor:
    """Outputs of a linear layer from quantised operands.

    Parameters
    ----------
    x_q : i8 [T, K]
        Activations; -128 is exact too.
    x_scale : f16 [T, ceil(K/G)]
    w_codes : u8 [N, K]
    w_scale : f16 [N, ceil(K/G)]
    w_coeff : u8 [N, ceil(K/G)]
    w_int8 : i8 [N, K], optional
        Elements of the groups whose coefficient is 254 (their codes are not looked at).
    group : int
        G; a short last group (and K < G) has only its real elements.

    Returns
    -------
    f32 [T, N]

    Raises
    ------
    TensorError
        For shapes or dtypes that do not fit, reserved coefficients, scales that are negative or not finite.
    """
    return multiply(x_q, x_scale, check_weights(w_codes, w_scale, w_coeff, w_int8, group=group))


def check_weights(
    w_codes, w_scale, w_coeff, w_int8=None, *, group: int, max_coefficient: int = LARGEST_COEFFICIENT
) -> QuantizedWeights:
    """Weights that the engine takes, or a `TensorError` that says why it does not.

    Parameters
    ----------
    w_codes, w_scale, w_coeff, w_int8, group
        As `linear` takes them.
    max_coefficient : int
        Largest coefficient of an M-ANT group that the datapath is built for.
    """
    weights = QuantizedWeights(w_codes, w_scale, w_coeff, w_int8, group)
    a = weights.coefficient
    beyond = (a > max_coefficient) & (a <= LARGEST_COEFFICIENT)
    if beyond.any():
        where = beyond.nonzero()[0].tolist()
        raise TensorError(
            f"w_coeff{where} = {int(a[tuple(where)])}: legal is 0 to {max_coefficient} (max_coefficient), 254 or 255"
        )
    return weights


def quantized_linear(x, weights: QuantizedWeights) -> torch.Tensor:
    """fp16 activations [T, K], quantised to INT8 groups, times quantised weights: f32 [T, N]."""
    groups = quantize_int8(x, weights.group)
    return multiply(groups.q, groups.scale, weights)


def multiply(x_q, x_scale, weights: QuantizedWeights, levels: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` on a record of weights; *levels* are ``weights.levels()``, for callers that keep them between calls."""
    outputs, inputs = weights.shape
    x_q = as_tensor(x_q, "x_q", (torch.int8,), 2)
    check_shape(x_q, "x_q", (x_q.shape[0], inputs))
    x_scale = as_tensor(x_scale, "x_scale", (torch.float16,), 2)
    check_shape(x_scale, "x_scale", (x_q.shape[0], group_count(inputs, weights.group)))
    check_scales(x_scale, "x_scale")
    level = to_groups(weights.levels() if levels is None else levels, weights.group)
    x = to_groups(x_q, weights.group)
    s_x, s_w = x_scale.to(torch.float64), weights.scale.to(torch.float64)
    y = torch.zeros(x_q.shape[0], outputs, dtype=torch.float32)
    for g in range(x_scale.shape[1]):  # the contract's order of addition; each step is all tokens and outputs
        r = x[:, g].to(torch.float64) @ level[:, g].to(torch.float64).T
        y += fp32(r * (s_x[:, g, None] * s_w[:, g]))
    return y


def partial_sums(x_q, w_codes, w_coeff, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two sums a dot product of the array keeps, of 4-bit groups.

    ``psum1 = sum x * (+-i)``, ``psum2 = sum +-(x << i)``, the sign acting in both; the group's result is
    ``a * psum1 + psum2``, or ``psum1`` for the linear type.

    Parameters
    ----------
    x_q : i8 [T, K]
    w_codes : u8 [N, K]
    w_coeff : u8 [N, ceil(K/G)]
        0..127 or 255: where it is 255, ``psum2`` is 0 as the hardware never uses it.
    group : int

    Returns
    -------
    psum1, psum2 : i64 [T, N, ceil(K/G)]
    """
    x = to_groups(as_tensor(x_q, "x_q", (torch.int8,), 2), check_group(group)).to(torch.float64)
    codes = to_groups(as_tensor(w_codes, "w_codes", (torch.uint8,), 2), group)
    coefficient = as_tensor(w_coeff, "w_coeff", (torch.uint8,), 2)
    if x.shape[1:] != codes.shape[1:]:
        raise TensorError(f"x_q: {x_q.shape[1]} inputs; legal is {w_codes.shape[1]}, as w_codes has")
    check_shape(coefficient, "w_coeff", tuple(codes.shape[:2]))
    sign = torch.where(codes >= 8, -1.0, 1.0).to(torch.float64)
    i = (codes & 7).to(torch.float64)
    psum1 = torch.einsum("tgk,ngk->tng", x, sign * i)
    psum2 = torch.einsum("tgk,ngk->tng", x, sign * torch.exp2(i))
    psum2 = torch.where(coefficient == LINEAR, 0.0, psum2)
    return psum1.to(torch.int64), psum2.to(torch.int64)
