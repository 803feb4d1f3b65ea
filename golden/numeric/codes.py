"""The 4-bit M-ANT code: levels, table of coefficients, encoding and decoding.

A code is sign (bit 3) and ``i`` (bits 2..0). A group shares a coefficient byte ``a``; the level of a code is
``+-(a*i + 2^i)`` for ``a`` in 0..127 and ``+-i`` for 255 (the linear type). Byte 254 marks a group of INT8 weights,
128..253 are reserved. Source: docs/numerics.md, "Codes" and "Encoding"; the type is M-ANT's (HPCA 2025, section IV),
with the published signed shift corrected to a shift by ``i`` with the sign applied afterwards.
"""

import numbers

import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.rounding import fp16
from kvant.golden.numeric.tensors import as_tensor, check_scales, check_shape

LINEAR = 255
"""Coefficient byte of the linear type, the limit of a growing coefficient."""

INT8 = 254
"""Coefficient byte of a weight group whose elements are INT8, in a side plane."""

LARGEST_COEFFICIENT = 127
"""Largest coefficient of an M-ANT group."""

TABLE_SIZE = 16
"""Most entries of a table of coefficients."""

DEFAULT_COEFFICIENTS = (5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 100, 120, LINEAR)
"""Default table of coefficients."""

DEFAULT_THRESHOLDS = (
    400, 700, 1100, 1700, 2600, 6970, 7915, 8542, 9251, 10320, 10890, 12551, 12980, 13684, 17162,
)  # fmt: skip
"""Thresholds of the default table: unsigned 16-bit fractions of the normalised variance."""


def is_grid(coefficient) -> bool:
    """Whether *coefficient* names a grid of 4-bit levels: 0..127 or 255."""
    if isinstance(coefficient, bool) or not isinstance(coefficient, numbers.Integral):
        return False
    return 0 <= coefficient <= LARGEST_COEFFICIENT or coefficient == LINEAR


def check_table(coefficients) -> tuple[int, ...]:
    """A table of coefficients as a tuple of ints: 1 to 16 entries of 0..127 or 255, in any order, repeats included."""
    table = tuple(coefficients.tolist() if hasattr(coefficients, "tolist") else coefficients)
    if not 1 <= len(table) <= TABLE_SIZE:
        raise TensorError(f"coefficients: {len(table)} entries; legal is 1 to {TABLE_SIZE}")
    for index, entry in enumerate(table):
        if not is_grid(entry):
            raise TensorError(f"coefficients[{index}] = {entry!r}: legal is an integer from 0 to 127, or 255 (linear)")
    return tuple(int(entry) for entry in table)


def levels(coefficient: int) -> torch.Tensor:
    """Level magnitudes of the codes' ``i`` = 0..7, strictly ascending, int32 [8]."""
    if not is_grid(coefficient):
        raise TensorError(f"coefficient = {coefficient!r}: legal is an integer from 0 to 127, or 255 (linear)")
    i = torch.arange(8, dtype=torch.int32)
    return i if coefficient == LINEAR else int(coefficient) * i + (1 << i)


def level_table(coefficients) -> torch.Tensor:
    """Level magnitudes of a table's entries, int32 [C, 8]."""
    return torch.stack([levels(a) for a in check_table(coefficients)])


def largest_level(coefficient) -> int | torch.Tensor:
    """Largest level magnitude M: ``7a + 128``, 7 (linear) or 127 (INT8 group); of an int, or elementwise as int32."""
    if isinstance(coefficient, torch.Tensor):
        a = coefficient.to(torch.int32)
        return torch.where(a == LINEAR, 7, torch.where(a == INT8, 127, 7 * a + 128))
    return 127 if coefficient == INT8 else int(levels(coefficient)[-1])


def decode(codes, coefficient) -> torch.Tensor:
    """Signed integer levels of codes.

    Parameters
    ----------
    codes : u8 [...]
        0..15.
    coefficient : int or u8, broadcastable to *codes*
        0..127 or 255.

    Returns
    -------
    int32 [...]
        The value of an element is its group's scale times this.
    """
    codes = as_tensor(codes, "codes", (torch.uint8,))
    if int(codes.max()) > 15:
        raise TensorError(f"codes: value {int(codes.max())}; legal is 0 to 15")
    a = _grid_coefficients(coefficient)
    return unchecked_decode(codes, a)


def _grid_coefficients(coefficient) -> torch.Tensor:
    if isinstance(coefficient, numbers.Integral | float):
        levels(coefficient)
        return torch.tensor(coefficient, dtype=torch.uint8)
    a = as_tensor(coefficient, "coefficient", (torch.uint8,))
    bad = (a > LARGEST_COEFFICIENT) & (a != LINEAR)
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        raise TensorError(f"coefficient{list(where)} = {int(a[where])}: legal is 0 to 127, or 255 (linear)")
    return a


def unchecked_decode(codes: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
    """`decode` of tensors already known to be legal."""
    a = coefficient.to(torch.int32)
    i = (codes & 7).to(torch.int32)
    magnitude = torch.where(a == LINEAR, i, a * i + torch.bitwise_left_shift(torch.ones_like(i), i))
    return torch.where(codes >= 8, -magnitude, magnitude)


def grid_scale(absmax: torch.Tensor, coefficient, factor: float = 1.0) -> torch.Tensor:
    """The stored scale of a group, ``fp16(factor * absmax / M)``; infinite where it would overflow.

    Parameters
    ----------
    absmax : float32 or float64 [...]
        Largest magnitude of the group.
    coefficient : int, or u8 broadcastable to *absmax*
    factor : float
        1 (the contract's scale), or another when scales are searched as well.
    """
    largest = largest_level(coefficient)
    return fp16(absmax.to(torch.float64) * factor / largest)


def encode(x, scale, coefficient) -> torch.Tensor:
    """Nearest codes relative to the stored scale: the rule of software.

    The magnitude is ``#{k : 2|x| > s * (L_k + L_(k+1))}``: on a tie the smaller one. The sign of 0 is positive,
    magnitude 0 of a linear group is always code 0x0, and with scale 0 every code is 0x0. All comparisons are exact:
    both sides fit the 24 bits of a float32.

    Parameters
    ----------
    x : f16, bf16 or f32 [..., n]
        Elements of groups, finite.
    scale : f16 [...]
        One stored scale per group.
    coefficient : int or u8 [...]
        One coefficient byte per group, 0..127 or 255.

    Returns
    -------
    u8 [..., n]
    """
    x = as_tensor(x, "x", (torch.float16, torch.bfloat16, torch.float32)).to(torch.float32)
    scale = as_tensor(scale, "scale", (torch.float16,))
    check_shape(scale, "scale", tuple(x.shape[:-1]))
    check_scales(scale, "scale")
    if not torch.isfinite(x).all():
        raise TensorError("x: NaN or infinity; legal are finite elements")
    a = _grid_coefficients(coefficient)
    return unchecked_encode(x, scale, a.expand(scale.shape))


def unchecked_encode(x: torch.Tensor, scale: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
    """`encode` of float32 elements with scales and coefficients already known to be legal."""
    s = scale.to(torch.float32)
    # |x| > s/2 * sum of neighbours, not 2|x| > s * sum: halving s is exact (it has 11 bits), doubling x may overflow
    code = _count_thresholds(x.abs(), s / 2, coefficient)
    negative = x < 0
    return _finish_codes(code, negative, coefficient, s == 0)


def encode_int8(q, largest, coefficient) -> torch.Tensor:
    """Nearest codes of a group that is already INT8, in integers only: the rule of hardware.

    The magnitude is ``#{k : 2*|q|*M > m * (L_k + L_(k+1))}`` with ``M`` the largest level; on a tie the smaller one.

    Parameters
    ----------
    q : i8, i16 or i32 [..., n]
        Elements; with an offset taken out they have nine bits.
    largest : same dtypes [...]
        ``m``, the largest ``|q|`` of each group.
    coefficient : int or u8 [...]
        One coefficient byte per group, 0..127 or 255.

    Returns
    -------
    u8 [..., n]
    """
    integers = (torch.int8, torch.int16, torch.int32)
    q = as_tensor(q, "q", integers).to(torch.int32)
    m = as_tensor(largest, "largest", integers).to(torch.int32)
    check_shape(m, "largest", tuple(q.shape[:-1]))
    a = _grid_coefficients(coefficient).expand(m.shape)
    code = _count_thresholds(2 * q.abs() * largest_level(a)[..., None], m, a)
    return _finish_codes(code, q < 0, a, m == 0)


def _count_thresholds(x: torch.Tensor, unit: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
    """``#{k : x > unit * (L_k + L_(k+1))}`` as u8 [..., n]; unit and coefficient are per group."""
    count, above = torch.zeros_like(x), torch.empty_like(x)  # of x's type: torch vectorises only such comparisons
    a = coefficient.to(torch.int32)
    for k in range(7):
        neighbours = torch.where(a == LINEAR, 2 * k + 1, a * (2 * k + 1) + 3 * (1 << k))  # L_k + L_(k+1)
        count += torch.gt(x, (unit * neighbours)[..., None], out=above)
    return count.to(torch.uint8)


def _finish_codes(
    code: torch.Tensor, negative: torch.Tensor, coefficient: torch.Tensor, empty: torch.Tensor
) -> torch.Tensor:
    """Signs onto magnitudes; linear zeros and groups of scale 0 are code 0x0."""
    signed = negative & ((code != 0) | (coefficient != LINEAR)[..., None])
    code |= signed.to(torch.uint8) << 3
    return code.masked_fill_(empty[..., None], 0)


def requantized_scale(int8_scale: torch.Tensor, largest: torch.Tensor, coefficient) -> torch.Tensor:
    """Stored scale of an INT8 group that became 4-bit codes: ``fp16(s8 * m / M)``, the exact quotient rounded once.

    Parameters
    ----------
    int8_scale : f16 [...]
        ``s8``.
    largest : integer [...]
        ``m``, the largest ``|q|`` of each group.
    coefficient : int or u8 [...]
    """
    return fp16(int8_scale.to(torch.float64) * largest.to(torch.float64) / largest_level(coefficient))
