"""The 4-bit M-ANT code: its levels, and what a coefficient byte means.

A code is ``sign`` (bit 3) and magnitude ``i`` (bits 2..0); a group shares one coefficient byte and one scale:

======================  ==========================================  ==========================
coefficient byte        level of a code                             largest level
======================  ==========================================  ==========================
0 .. 127 (M-ANT)        ``(-1)**sign * (coefficient * i + 2**i)``   ``7 * coefficient + 128``
255 (linear)            ``(-1)**sign * i``                          7
254 (INT8 group)        none: elements are 8-bit integers           127
128 .. 253              reserved                                    none
======================  ==========================================  ==========================

Magnitude 0 of an M-ANT group is not zero: codes 0x0 and 0x8 are +1 and -1.
"""

from typing import TYPE_CHECKING, NamedTuple

from kvant.hw.parameters import ParameterError, check_integer, is_integer

if TYPE_CHECKING:
    from amaranth.hdl import Value

LINEAR = 255
"""Coefficient byte of a linear group."""

INT8 = 254
"""Coefficient byte of a group of 8-bit integers."""

MAX_COEFFICIENT = 127
"""Largest coefficient byte of an M-ANT group."""

CODE_BITS = 4
"""Bits of a code."""

MAGNITUDES = 1 << (CODE_BITS - 1)
"""Magnitudes of a code: ``i`` is 0 to 7."""


def levels(coefficient: int) -> tuple[int, ...]:
    """Level magnitudes of the codes 0x0 to 0x7, ascending; 0x8 to 0xF have the same with a minus sign.

    Raises
    ------
    ParameterError
        If the coefficient is not 0 .. 127 or 255: an INT8 group (254) has no 4-bit levels.
    """
    if is_integer(coefficient, LINEAR, LINEAR):
        return tuple(range(MAGNITUDES))
    if not is_integer(coefficient, 0, MAX_COEFFICIENT):
        raise ParameterError(
            f"coefficient = {coefficient!r}: legal is an integer from 0 to {MAX_COEFFICIENT}, or {LINEAR} (linear)"
        )
    return tuple(coefficient * i + (1 << i) for i in range(MAGNITUDES))


def level(coefficient: int, code: int) -> int:
    """Signed level of a code, 0x0 to 0xF.

    Raises
    ------
    ParameterError
        As `levels`, or if the code is not 0 .. 15.
    """
    check_integer("code", code, 0, 2 * MAGNITUDES - 1)
    magnitude = levels(coefficient)[code % MAGNITUDES]
    return -magnitude if code >= MAGNITUDES else magnitude


class CoefficientClass(NamedTuple):
    """One-bit expressions, exactly one of them 1: what kind of group a coefficient byte announces."""

    mant: "Value"
    linear: "Value"
    int8: "Value"
    illegal: "Value"


def decode_coefficient(
    coefficient: "Value", *, max_coefficient: int = MAX_COEFFICIENT, int8_groups: bool = True
) -> CoefficientClass:
    """Hardware decoder of a coefficient byte.

    Parameters
    ----------
    coefficient : 8-bit value
    max_coefficient : int
        Largest M-ANT coefficient that the datapath is built for; what lies between it and 254 is illegal.
    int8_groups : bool
        The datapath has INT8 groups; without them 254 is illegal.
    """
    from amaranth.hdl import Const  # here, so that software that only wants the numbers does not load Amaranth

    mant = coefficient <= max_coefficient
    linear = coefficient == LINEAR
    int8 = coefficient == INT8 if int8_groups else Const(0, 1)
    return CoefficientClass(mant=mant, linear=linear, int8=int8, illegal=~(mant | linear | int8))
