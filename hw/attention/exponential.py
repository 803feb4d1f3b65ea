"""Attention weights from base-2 logarithms: ``2^-x`` in fixed point by a table and a straight line between its entries.

The table holds ``B[k] = rne(2^24 * 2^(-k/64))`` for k = 1 .. 64 and ``B[0] = 2^24 - 1``. With integer part I and 16
fraction bits of x, of which the upper 6 are k and the lower 10 are r,

    w = floor(v / 2^(10 + I) + 1/2),    v = B[k] * 2^10 - (B[k] - B[k+1]) * r.

`v` falls everywhere, also from segment to segment and from octave to octave, so a larger x never has a larger weight.
A chord lies above the curve by at most ``(ln 2 / 64)^2 / 8 < 2^-16`` of it. Source: docs/numerics.md, "Softmax".
"""

from itertools import pairwise
from math import isqrt

from amaranth.hdl import Array, Cat, Const, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_shape import WEIGHT_BITS
from kvant.hw.attention.scaler import LOG_FRACTION, LOG_WIDTH
from kvant.hw.numeric.floating import Pipeline

SEGMENT_BITS = 6
"""Bits of the number of a segment of an octave."""

_REST_BITS = LOG_FRACTION - SEGMENT_BITS
_SHIFT_BITS = WEIGHT_BITS.bit_length()  # so many bits of the integer part tell all weights that are not 0


def exponential_table() -> list[int]:
    """``B[0]`` to ``B[64]``, by integer square roots: six of them make the 64th root, rounded down."""
    segments = 1 << SEGMENT_BITS
    table = []
    for k in range(segments + 1):
        root = 1 << ((WEIGHT_BITS + 1) * segments - k)
        for _ in range(SEGMENT_BITS):
            root = isqrt(root)
        table.append((root + 1) // 2)  # of twice the number, which is no tie: it is irrational or even
    table[0] -= 1
    return table


class Exponential(wiring.Component):
    """``w``, about ``2^24 * 2^-x``: never larger for a larger x, ``2^24 - 1`` for x = 0, and 0 for x from 25 on.

    Relative error at most 2^-16, and half a unit of the last place besides.

    Attributes
    ----------
    latency : int
        Cycles from x to w. One result per cycle.

    Members
    -------
    x : in
        Unsigned, `LOG_WIDTH` bits, `LOG_FRACTION` of them behind the point.
    w : out
        `WEIGHT_BITS` bits, a register.
    """

    latency = 6

    def __init__(self):
        super().__init__({"x": In(LOG_WIDTH), "w": Out(WEIGHT_BITS)})

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register
        table = exponential_table()

        # Cycle 0: parts of x.
        rest = register(self.x[:_REST_BITS], "rest", cycles=2)
        segment = register(self.x[_REST_BITS:LOG_FRACTION], "segment")
        shift = register(self.x[LOG_FRACTION:][:_SHIFT_BITS], "shift", cycles=4)
        vanishes = register(self.x[LOG_FRACTION + _SHIFT_BITS :].any(), "vanishes", cycles=4)

        # Cycle 1: the segment. The first bit of a base is always set.
        bases, slopes = table[:-1], [high - low for high, low in pairwise(table)]
        slope_bits = max(slopes).bit_length()
        entries = Array(
            [
                Const(base | slope << WEIGHT_BITS, WEIGHT_BITS + slope_bits)
                for base, slope in zip(bases, slopes, strict=True)
            ]
        )
        entry = Signal(WEIGHT_BITS + slope_bits)
        m.d.comb += entry.eq(entries[segment])
        entry = register(entry, "entry")

        # Cycle 2: the way down from its beginning. Cycle 3: v, of which one bit behind the weight's last is kept.
        base = register(entry[:WEIGHT_BITS], "base")
        drop = register(entry[WEIGHT_BITS:] * rest, "drop")
        value = (Cat(Const(0, _REST_BITS), base) - drop)[_REST_BITS - 1 : _REST_BITS + WEIGHT_BITS]
        value = register(value, "value")

        # Cycle 4: shifted. Cycle 5: rounded, ties up; 2^24 cannot arise.
        shifted = Signal(len(value))
        m.d.comb += shifted.eq((value >> shift) & ~vanishes.replicate(len(value)))
        shifted = register(shifted, "shifted")
        m.d.comb += self.w.eq(register((shifted[1:] + shifted[0])[:WEIGHT_BITS], "weight"))
        return m
