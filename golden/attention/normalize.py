"""The output of attention from the sums of its parts: coded values, INT8 rows, and the sum of all weights.

    out[j] = fp32(fp32(coded[j] + rows[j]) * inv),    inv = fp32(1 / denominator)

All sums are in the same units, in which the denominator is an integer or a multiple of a power of two. Source:
docs/numerics.md, "Softmax" and "Attention engine".
"""

import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.rounding import fp32
from kvant.golden.numeric.tensors import as_tensor, check_scales, check_shape

SIGNIFICANT_BITS = 24
"""Bits that are kept of an integer sum of coded values, and of an fp32 number."""

LARGEST_DENOMINATOR = (1 << 62) - 1


def reciprocal(denominator: torch.Tensor) -> torch.Tensor:
    """``fp32(1 / denominator)``, the exact quotient rounded once, ties to even; 0 for 0.

    Parameters
    ----------
    denominator : i64 [...]
        0 to 2^62 - 1.

    Returns
    -------
    f32 [...]
    """
    if ((denominator < 0) | (denominator > LARGEST_DENOMINATOR)).any():
        values = f"{int(denominator.min())} to {int(denominator.max())}"
        raise TensorError(f"denominator: {values}; legal are 0 to {LARGEST_DENOMINATOR}")
    divisor = denominator.clamp(min=1)
    bits = torch.frexp(divisor.to(torch.float64)).exponent.to(torch.int64)
    # A long division, digit by digit: 2^(bits - 1) / divisor to 26 bits behind the point. The quotient is 1 for a power
    # of two; that of another number has no end: it is no tie, and one more bit below tells so.
    rest = torch.ones_like(divisor) << (bits - 1)
    quotient = torch.zeros_like(divisor)
    for digit in range(SIGNIFICANT_BITS + 3):
        rest = rest << (digit > 0)
        fits = rest >= divisor
        rest = torch.where(fits, rest - divisor, rest)
        quotient = (quotient << 1) | fits
    quotient = (quotient << 1) | (rest != 0)
    # 28 bits: exact in float64, which is rounded to float32 once
    inverse = fp32(torch.ldexp(quotient.to(torch.float64), -(bits + SIGNIFICANT_BITS + 2)))
    return torch.where(denominator > 0, inverse, 0.0)


def coded_values(sums, codebook_scale, shift) -> torch.Tensor:
    """Sums of coded values, ``fp32(trunc(R) * s_cb) * 2^shift``.

    ``trunc`` keeps the first 24 significant bits of the magnitude.

    Parameters
    ----------
    sums : i64 [..., B, d]
        R, the integers of the read-out of shifted bins, less than 2^53 in magnitude.
    codebook_scale : f16, broadcastable to [..., B]
        Of the values' codebook.
    shift : i64 [..., B]
        Of the bins, see `kvant.golden.attention.softmax.bin_shift`.

    Returns
    -------
    f32 [..., B, d]
    """
    sums = as_tensor(sums, "sums", (torch.int64,))
    scale = as_tensor(codebook_scale, "codebook_scale", (torch.float16,))
    check_scales(scale, "codebook_scale")
    magnitude = sums.abs()
    drop = (torch.frexp(magnitude.to(torch.float64)).exponent.to(torch.int64) - SIGNIFICANT_BITS).clamp_(min=0)
    cut = ((magnitude >> drop) << drop).to(torch.float64) * torch.sign(sums).to(torch.float64)
    # 24 and 11 bits; + 0.0 makes a zero of either sign +0
    product = fp32(cut * scale.to(torch.float64)[..., None]) + 0.0
    return torch.ldexp(product, shift[..., None])


def normalize(
    denominator,
    *,
    coded: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    staged: torch.Tensor | None = None,
    fraction: int = 0,
) -> torch.Tensor:
    """Outputs of queries: the parts that are there, added in this order, times the reciprocal.

    Parameters
    ----------
    denominator : i64 [..., B]
        Sum of all weights in units of ``2^-fraction``; 0 for a query without keys, whose output is 0.
    coded : f32 [..., B, d], optional
        Sums of coded values: `coded_values`, or those of the linear array.
    rows : f64 [..., B, d], optional
        Exact sums of INT8 rows, `kvant.golden.attention.int8_rows.RowSums.values`; rounded to fp32 here.
    staged : f64 [..., B, d], optional
        Exact sums of rows with a scale for every channel; rounded to fp32 here.
    fraction : int
        Fraction bits of the denominator.

    Returns
    -------
    f32 [..., B, d]

    Raises
    ------
    TensorError
        When all parts are missing, or shapes or dtypes do not fit.
    """
    denominator = as_tensor(denominator, "denominator", (torch.int64,))
    if coded is None and rows is None and staged is None:
        raise TensorError("coded, rows and staged: legal is at least one of them")
    numerator = None
    parts = ((coded, "coded", torch.float32), (rows, "rows", torch.float64), (staged, "staged", torch.float64))
    for given, name, dtype in parts:
        if given is None:
            continue
        part = as_tensor(given, name, (dtype,))
        check_shape(part, name, (*denominator.shape, part.shape[-1]))
        numerator = fp32(part) if numerator is None else numerator + fp32(part)
    inverse = torch.ldexp(reciprocal(denominator), torch.tensor(fraction))
    return torch.where(denominator[..., None] > 0, numerator * inverse[..., None] + 0.0, 0.0)
