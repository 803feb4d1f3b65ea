"""What chooses a group's coefficient, from its sums: offset, largest magnitude and second moment, exact."""

from collections.abc import Collection

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.layouts import GroupSums
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.parameters import ParameterError, check_integer


class TaggedSums(data.StructLayout):
    """`GroupSums` and what travels along."""

    def __init__(self, p: CacheParameters, tag_shape):
        super().__init__({"sums": GroupSums(p), "tag": tag_shape})


class Statistic(data.StructLayout):
    """Statistic of a complete group of ``count`` elements q.

    Members
    -------
    offset : signed(8)
        ``o``, the mean that is taken out, rounded to the nearest integer, ties to even; 0 without that option.
    peak : 8
        ``m``, the largest ``|q - o|``.
    moment
        Second moment times ``count^2``.
    count : 1 .. group
    tag
    """

    def __init__(self, p: CacheParameters, tag_shape):
        super().__init__(
            {
                "offset": signed(8),
                "peak": 8,
                "moment": p.moment_limit.bit_length(),
                "count": range(p.group + 1),
                "tag": tag_shape,
            }
        )


def check_counts(p: CacheParameters, counts: Collection[int] | None) -> tuple[int, ...]:
    """The numbers of elements that a group may have, ascending; None stands for full groups alone."""
    if counts is None:
        return (p.group,)
    return tuple(sorted({check_integer("count", count, 1, p.group) for count in counts}))


def times_count(value: Value, count: Value, counts: tuple[int, ...]) -> Value:
    """``value * count``, where only *counts* occur: a choice between products by constants, most of them shifts."""
    *others, product = [value * number for number in counts]
    for number, other in zip(counts, others, strict=False):
        product = Mux(count == number, other, product)
    return product


class GroupStatistic(wiring.Component):
    """Offset, peak and second moment of groups of n INT8 elements, from ``S = sum q`` and ``Q = sum q^2``.

    ======================  ==============================  =====================================
    ``p.statistic``         moment without an offset        moment with an offset o
    ======================  ==============================  =====================================
    "variance"              ``n*Q - S^2``                   the same: the mean does not matter
    "moment"                ``n*Q``                         ``n*(Q - 2*o*S + n*o^2)``
    ======================  ==============================  =====================================

    Source: docs/numerics.md, "Choosing the coefficient"; M-ANT (HPCA 2025, section V) estimates the variance so.

    Parameters
    ----------
    p : CacheParameters
        `offset` and `statistic` choose the formulas.
    tag_shape : shape-like
        Of what travels along.
    counts : collection of int, optional
        Numbers of elements that groups have. Default: `p.group` alone, the case of groups along time. An offset is
        taken out of full groups only, whose size is then a power of two.

    Attributes
    ----------
    latency : int
        Cycles from a transfer of `i` to `o`. One group per cycle.

    Members
    -------
    i : in stream of `TaggedSums`
        Of elements from -127 to 127.
    o : out stream of `Statistic`

    Raises
    ------
    ParameterError
        For a count outside 1 .. group; with an offset, for another count than a power of two.
    """

    latency = 4

    def __init__(self, p: CacheParameters, tag_shape, *, counts: Collection[int] | None = None):
        self.p = p
        self.counts = check_counts(p, counts)
        if p.offset and (len(self.counts) > 1 or self.counts[0] & (self.counts[0] - 1)):
            raise ParameterError(f"counts = {self.counts}: legal with an offset is one power of two")
        super().__init__(
            {
                "i": In(stream.Signature(TaggedSums(p, tag_shape))),
                "o": Out(stream.Signature(Statistic(p, tag_shape))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        advance = Signal()
        valids = Signal(self.latency)
        m.d.comb += [
            advance.eq(~self.o.valid | self.o.ready),
            self.i.ready.eq(advance),
            self.o.valid.eq(valids[-1]),
        ]
        with m.If(advance):
            m.d.sync += valids.eq(Cat(self.i.valid, valids))

        register = Pipeline(m, enable=advance).register

        # Cycle 1.
        sums = register(self.i.payload.sums, "sums")
        total, squares, count = sums.sum, sums.sumsq, sums.count

        # Cycle 2: the offset.
        offset = register(self._offset(total), "offset")
        high, low = register(sums.maximum, "maximum"), register(sums.minimum, "minimum")
        total_2, squares_2, count_2 = (
            register(value, name) for value, name in ((total, "sum"), (squares, "sumsq"), (count, "count"))
        )

        # Cycle 3: the products.
        above, below = high - offset, offset - low
        peak = register(Mux(above > below, above, below)[:8], "peak", cycles=2)
        scaled = register(times_count(squares_2, count_2, self.counts), "scaled")
        subtrahend = register(self._subtrahend(total_2, offset), "subtrahend")

        # Cycle 4: their difference.
        moment = register((scaled - subtrahend)[: len(self.o.payload.moment)], "moment")
        m.d.comb += [
            self.o.payload.offset.eq(register(offset, "offset", cycles=2)),
            self.o.payload.peak.eq(peak),
            self.o.payload.moment.eq(moment),
            self.o.payload.count.eq(register(count_2, "count", cycles=2)),
            Value.cast(self.o.payload.tag).eq(register(Value.cast(self.i.payload.tag), "tag", cycles=self.latency)),
        ]
        return m

    def _offset(self, total: Value) -> Value:
        """``rne(total / n)`` for a power of two n, or 0."""
        if not self.p.offset:
            return Const(0, signed(8))
        places = self.counts[0].bit_length() - 1
        if places == 0:
            return total[:8].as_signed()
        whole, half = total[places:].as_signed(), total[places - 1]
        rest = total[: places - 1].any() if places > 1 else 0
        return (whole + (half & (rest | whole[0])))[:8].as_signed()

    def _subtrahend(self, total: Value, offset: Value) -> Value:
        """What the moment lacks of ``n*Q``."""
        if self.p.statistic == "variance":
            return total * total
        if not self.p.offset:
            return Const(0, 1)
        n = self.counts[0]
        return n * (offset * (2 * total - n * offset))
