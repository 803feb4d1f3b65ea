"""Softmax in base 2 and fixed point, over any number of parts with one common reference.

Every key gets a logarithm ``z``, the base-2 logarithm of its weight up to a constant, in units of 2^-16; the largest z
of a query over all parts is the reference; a weight is about ``2^24 * 2^-(reference - z)``, an integer of 24 bits.
Nothing is ever rescaled, so results do not depend on how keys are cut into parts or chunks. Source: docs/numerics.md,
"Softmax".
"""

import math
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.rounding import fp16_to_bits
from kvant.golden.numeric.tensors import as_tensor, check_scales

LOG_FRACTION = 16
"""Fraction bits of a logarithm z."""

LOG_LIMIT = (1 << 55) - 1
"""Largest magnitude of a logarithm; what is larger saturates."""

NO_KEY = -LOG_LIMIT - 1
"""Reference of a query without keys: less than every logarithm."""

WEIGHT_BITS = 24
"""Bits of a weight; the largest of a query is ``2^24 - 1``."""

BIN_BITS = 32
"""Bits of a bin that the read-out takes."""

CONSTANT_BITS = 24
"""Significant bits of `softmax_constant`."""

LARGEST_DISTANCE = 1 << 22
"""Largest distance of a key that a position bias is exact for."""

_FP16_FRACTION = 24  # every fp16 number is a multiple of 2^-24

_SEGMENT_BITS = 6
_REST_BITS = LOG_FRACTION - _SEGMENT_BITS
_LIMB_BITS = 23
_LEAST_SHIFT = 3  # factors are multiples of no more than 2^(3 - LOG_FRACTION)


class Factor(NamedTuple):
    """What turns integer scores into logarithms, exactly: ``mantissa * 2^exponent``.

    Attributes
    ----------
    mantissa : i64 [...]
        24 + 11 + 11 = 46 bits; 0 where a scale is 0.
    exponent : i64 [...]
        At most ``3 - LOG_FRACTION``.
    """

    mantissa: torch.Tensor
    exponent: torch.Tensor


def softmax_constant(head_dim: int) -> torch.Tensor:
    """c, the fp32 number nearest to ``log2(e) / sqrt(head_dim)``, f32 []."""
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 1:
        raise TensorError(f"head_dim = {head_dim!r}: legal is an integer from 1")
    return torch.tensor(math.log2(math.e) / math.sqrt(head_dim), dtype=torch.float64).to(torch.float32)


def score_factor(query_scale, scale, head_dim: int) -> Factor:
    """``F = c * s_q * s``, exact: no rounding, so that all parts of a cache share the one rounding of c.

    Parameters
    ----------
    query_scale : f16 [...]
        s_q of the query.
    scale : f16 [...]
        s of the keys: of their codebook, or of a group of an INT8 row. Shapes go together.
    head_dim : int
    """
    constant, exponent = torch.frexp(softmax_constant(head_dim).to(torch.float64))
    mantissa = torch.ldexp(constant, torch.tensor(CONSTANT_BITS)).to(torch.int64)
    exponent = exponent.to(torch.int64) - CONSTANT_BITS
    for given, name in ((query_scale, "query_scale"), (scale, "scale")):
        part = as_tensor(given, name, (torch.float16,))
        check_scales(part, name)
        bits = fp16_to_bits(part).to(torch.int64)
        stored = bits >> 10 & 31
        mantissa = mantissa * (torch.where(stored > 0, 1 << 10, 0) | bits & 1023)
        exponent = exponent + stored.clamp(min=1) - 25
    return Factor(mantissa, exponent)


def logarithms(scores: torch.Tensor, factor: Factor) -> torch.Tensor:
    """``z = rne(score * factor * 2^16)``, the exact product rounded once, at most `LOG_LIMIT` in magnitude.

    Parameters
    ----------
    scores : integers [...]
        Up to 2^25 in magnitude.
    factor : Factor [...]

    Returns
    -------
    i64 [...]
    """
    # Of a float64 product, which 53 bits are left of, the nearest integer is right unless a tie is as near as the
    # product's error; from 2^51 on everything is in doubt.
    product = scores.to(torch.float64) * torch.ldexp(factor.mantissa.to(torch.float64), factor.exponent + LOG_FRACTION)
    nearest = product.round()
    z = nearest.to(torch.int64)
    if z.numel():
        least, most = product.aminmax()
        error = torch.maximum(-least, most) * 2.0**-52
        doubt = (product.sub_(nearest).abs_() >= 0.5 - error).nonzero(as_tuple=True)
        parts = (part.expand(z.shape)[doubt] for part in (scores, *factor))
        z[doubt] = _wide_logarithms(*parts)
    return z


def score_logarithms(scores: torch.Tensor, head_dim: int) -> torch.Tensor:
    """``z = rne(score * c * 2^16)`` of fp32 scores, the exact product rounded once, at most `LOG_LIMIT` in magnitude.

    Parameters
    ----------
    scores : f32 [...]
        Finite.
    head_dim : int

    Returns
    -------
    i64 [...]
    """
    # 24 bits each: the product is exact in float64, as is what `round` makes of it
    product = scores.to(torch.float64) * softmax_constant(head_dim).to(torch.float64)
    z = torch.ldexp(product, torch.tensor(LOG_FRACTION)).round_().clamp_(NO_KEY, -NO_KEY)
    return z.to(torch.int64).clamp_(-LOG_LIMIT, LOG_LIMIT)


def distance_logarithms(slope, distance: torch.Tensor) -> torch.Tensor:
    """What linear position biases take from logarithms, ``rne(slope * distance * 2^16)``, exact but for the rounding.

    Parameters
    ----------
    slope : f16 [...]
        At least 0, in base-2 logarithms a token.
    distance : i64 [...]
        Tokens between key and query, 0 to 2^22.

    Returns
    -------
    i64 [...]
    """
    slope = as_tensor(slope, "slope", (torch.float16,))
    check_scales(slope, "slope")
    if distance.numel() and ((distance < 0) | (distance > LARGEST_DISTANCE)).any():
        values = f"{int(distance.min())} to {int(distance.max())}"
        raise TensorError(f"distance: {values}; legal are 0 to {LARGEST_DISTANCE}")
    # a slope is an integer of 40 bits times 2^-24: eight bits of the product lie behind the last one of z
    units = torch.ldexp(slope.to(torch.float64), torch.tensor(_FP16_FRACTION)).to(torch.int64)
    product, behind = units * distance, _FP16_FRACTION - LOG_FRACTION
    return (product + (1 << (behind - 1)) - 1 + (product >> behind & 1)) >> behind


def reference(z: torch.Tensor, present: torch.Tensor | None = None) -> torch.Tensor:
    """Largest logarithm of each query in a part; of several parts, take `torch.maximum`.

    Parameters
    ----------
    z : i64 [..., T]
        T may be 0.
    present : bool [..., T], optional
        Keys that the query meets; all by default.

    Returns
    -------
    i64 [...]
        `NO_KEY` where there is none.
    """
    if z.shape[-1] == 0:
        return torch.full(z.shape[:-1], NO_KEY, dtype=torch.int64)
    if present is not None:
        z = torch.where(present, z, NO_KEY)
    return z.amax(-1)


def weights(z: torch.Tensor, largest: torch.Tensor, present: torch.Tensor | None = None) -> torch.Tensor:
    """Weights of the keys of a part.

    Parameters
    ----------
    z : i64 [..., T]
    largest : i64 [...]
        `reference` over all parts, at least every z of a key that is present.
    present : bool [..., T], optional
        Other keys have weight 0.

    Returns
    -------
    i64 [..., T]
        0 to ``2^24 - 1``. Their sum is the part's share of the denominator.
    """
    w = exponential((largest[..., None] - z).clamp_(min=0))
    return w if present is None else torch.where(present, w, 0)


def exponential(x: torch.Tensor) -> torch.Tensor:
    """About ``2^24 * 2^-x``, never larger for a larger x, ``2^24 - 1`` for x = 0.

    With integer part I of x, k the upper 6 and r the lower 10 of its fraction bits, and the table of `_bases`,
    ``floor(v / 2^(10 + I) + 1/2)`` with ``v = B[k] * 2^10 - (B[k] - B[k+1]) * r``. Relative error at most 2^-16, and
    half a unit of the last place besides.

    Parameters
    ----------
    x : i64 [...]
        Not negative, 16 fraction bits.

    Returns
    -------
    i64 [...]
    """
    octave = _octave()[x & ((1 << LOG_FRACTION) - 1)]
    return ((octave >> (x >> LOG_FRACTION).clamp_(max=WEIGHT_BITS + 1)) + 1) >> 1


def bin_shift(total: torch.Tensor) -> torch.Tensor:
    """Places by which bins are shifted right before the read-out, ``max(0, bits(total) - 32)``.

    Parameters
    ----------
    total : i64 [...]
        Sum of the weights of coded tokens, below 2^48.
    """
    return (torch.frexp(total.to(torch.float64)).exponent.to(torch.int64) - BIN_BITS).clamp_(min=0)


def _wide_logarithms(scores: torch.Tensor, mantissa: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """`logarithms` in integers of two limbs; all three of one shape."""
    scores = scores.to(torch.int64)
    magnitude = scores.abs()
    # The product of 26 and 46 bits is upper * 2^23 + lower; then five bits to the left: at most three for a factor's
    # exponent, and two behind the last bit of z, which tell how to round.
    lower = magnitude * (mantissa & ((1 << _LIMB_BITS) - 1))
    upper = (magnitude * (mantissa >> _LIMB_BITS)).add_(lower >> _LIMB_BITS)
    limb = _LIMB_BITS + _LEAST_SHIFT + 2
    lower = lower.bitwise_and_((1 << _LIMB_BITS) - 1).bitwise_left_shift_(_LEAST_SHIFT + 2)
    # Down by so many places, in two steps: the first joins the limbs. An upper limb that is too large for that is far
    # above the limit, and stays there.
    shift = (_LEAST_SHIFT - LOG_FRACTION) - exponent
    first = shift.clamp(max=limb)
    rest = shift - first
    joined = torch.minimum(upper, 1 << (first + 30)).bitwise_left_shift_(limb - first).add_(lower >> first)
    lost = (lower & ((1 << first) - 1)).bitwise_or_(joined & ((1 << rest) - 1)) != 0
    joined = joined.bitwise_right_shift_(rest).bitwise_or_(lost)
    z = (joined + 1).add_(joined >> 2 & 1).bitwise_right_shift_(2).clamp_(max=LOG_LIMIT)
    return z.mul_(scores.sign())


def _bases() -> list[int]:
    """``B[k] = rne(2^24 * 2^(-k/64))``, k = 0 .. 64, exact; but ``B[0] = 2^24 - 1``."""
    segments, bases = 1 << _SEGMENT_BITS, [(1 << WEIGHT_BITS) - 1]
    for k in range(1, segments + 1):
        # the float64 power is within a few of the integers that are compared: 2*B - 1 <= 2 * 2^(24 - k/64) < 2*B + 1
        base = round(2.0 ** (WEIGHT_BITS - k / segments))
        power = Fraction(1 << ((WEIGHT_BITS + 1) * segments - k))
        while (2 * base - 1) ** segments > power:
            base -= 1
        while (2 * base + 1) ** segments <= power:
            base += 1
        bases.append(base)
    return bases


@cache
def _octave() -> torch.Tensor:
    """``floor(v / 2^9)`` for every fraction of x: weights of an octave with one more bit, i64 [65536]."""
    bases = torch.tensor(_bases(), dtype=torch.int64)
    rest = torch.arange(1 << _REST_BITS)
    v = (bases[:-1, None] << _REST_BITS) - (bases[:-1] - bases[1:])[:, None] * rest
    return (v >> (_REST_BITS - 1)).flatten()
