"""Rounding: an exact real to the nearest integer, binary16 or binary32, once, ties to even.

A float64 holds every value the contract rounds exactly (or, for a quotient of such values, closely enough that
no tie can be missed: see `fp16`). Subnormal results are kept.
"""

import torch

FP16_MAX = 65504.0
"""Largest finite binary16 value."""

FP16_OVERFLOW = 65520.0
"""Least magnitude that rounds to an infinite binary16: halfway between `FP16_MAX` and the next power of two."""

_FP16_MANTISSA = 10  # stored fraction bits
_FP16_MIN_EXPONENT = -14  # of the smallest normal number
_FP16_BEYOND = 131072.0  # rounds to infinity, as does everything larger
_FP64_MANTISSA = 52
_FP64_BIAS = 1023


def rne(v: torch.Tensor) -> torch.Tensor:
    """*v* rounded to the nearest integer, ties to even; same dtype."""
    return torch.round(v)


def fp16(v: torch.Tensor) -> torch.Tensor:
    """float64 rounded once to binary16, ties to even; beyond the largest finite value (65520 and up) infinite.

    torch converts float64 to float16 through float32, which rounds twice (1 + 2^-11 + 2^-40 would become 1).
    Here the value is brought to units in the last place of its result, an exact scaling by a power of two, and
    rounded there; the conversion that follows has nothing left to round.

    For a *quotient* p/q the float64 division has rounded before. That changes no result as long as p, and the
    product of q with a tie point of binary16 (12 significant bits), have so few bits that an inexact quotient keeps
    a distance from every tie that float64 resolves. All quotients of the contract (fp32 by an integer below 2^10,
    fp16 by fp16) do.
    """
    v = v.to(torch.float64).clamp(-_FP16_BEYOND, _FP16_BEYOND)
    _, exponent = torch.frexp(v)  # v = m * 2**exponent, 0.5 <= |m| < 1
    place = torch.clamp(exponent - 1, min=_FP16_MIN_EXPONENT) - _FP16_MANTISSA
    unit = ((place.to(torch.int64) + _FP64_BIAS) << _FP64_MANTISSA).view(torch.float64)  # 2**place, exactly
    return (torch.round(v / unit) * unit).to(torch.float16)


def fp32(v: torch.Tensor) -> torch.Tensor:
    """float64 rounded once to binary32, ties to even."""
    return v.to(torch.float64).to(torch.float32)


def fp16_to_bits(x: torch.Tensor) -> torch.Tensor:
    """The 16 bits of each binary16 value as int32 in 0..65535."""
    return x.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF


def fp16_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Binary16 values from integers in 0..65535."""
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16).view(torch.float16)
