"""Softmax in base 2 and fixed point, over any number of parts with one common reference.

Every key gets a logarithm ``z``, the base-2 logarithm of its weight up to a constant, in units of 2^-16; the largest z
of a query over all parts is the reference; a weight is about ``2^24 * 2^-(reference - z)``, an integer of 24 bits.
Nothing is ever rescaled, so results do not depend on how keys are cut into parts or chunks. Source: docs/numerics.md,
"Softmax".
"""

import math
from fractions import Fraction
from functools import cache

import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.rounding import fp32
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

_SEGMENT_BITS = 6
_REST_BITS = LOG_FRACTION - _SEGMENT_BITS
_INT64_SAFE = 2.0**60


def softmax_constant(head_dim: int) -> torch.Tensor:
    """c, the fp32 number nearest to ``log2(e) / sqrt(head_dim)``, f32 []."""
    if isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 1:
        raise TensorError(f"head_dim = {head_dim!r}: legal is an integer from 1")
    return torch.tensor(math.log2(math.e) / math.sqrt(head_dim), dtype=torch.float64).to(torch.float32)


def score_factor(query_scale, codebook_scale, head_dim: int) -> torch.Tensor:
    """``K = fp32(c * s_q * s_cb)``, what turns integer scores into z; the exact product, rounded once.

    Parameters
    ----------
    query_scale, codebook_scale : f16 [...]
        Of shapes that go together.
    head_dim : int

    Returns
    -------
    f32 [...]
    """
    # 24, 11 and 11 bits: exact in float64
    scales = _scale(query_scale, "query_scale") * _scale(codebook_scale, "codebook_scale")
    return fp32(softmax_constant(head_dim).to(torch.float64) * scales)


def logarithms(scores: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``z = rne(score * factor * 2^16)``, at most `LOG_LIMIT` in magnitude.

    Parameters
    ----------
    scores : integers or f32 [...]
        Integers up to 2^29 in magnitude, or fp32 numbers.
    factor : f32 [...]
        `score_factor` for integer scores of coded keys, `softmax_constant` for fp32 scores of INT8 rows.

    Returns
    -------
    i64 [...]
    """
    # float64 holds the product of 29 (or 24) and 24 bits, and of it and a power of two
    z = torch.round(scores.to(torch.float64) * (factor.to(torch.float64) * float(1 << LOG_FRACTION)))
    return z.clamp_(-_INT64_SAFE, _INT64_SAFE).to(torch.int64).clamp_(-LOG_LIMIT, LOG_LIMIT)


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


def _scale(scale, name: str) -> torch.Tensor:
    """fp16 scales in float64, or a refusal."""
    scale = as_tensor(scale, name, (torch.float16,))
    check_scales(scale, name)
    return scale.to(torch.float64)


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
