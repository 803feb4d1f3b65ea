"""Carry-save arithmetic: any number of words of any weights become two, without a carry that propagates.

A `Heap` collects words by weight. A level of full adders turns three words into two, so that the depth of a sum of n
words is logarithmic in n and independent of their width; one adder at the end resolves the two words that are left.
Source: C. S. Wallace, "A Suggestion for a Fast Multiplier", IEEE Trans. Electronic Computers EC-13 (1964).
"""

from collections.abc import Iterable, Sequence

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value

Row = tuple[Value, int]
"""An unsigned number and the exponent of its weight."""


def product_rows(a: Value, b: Value) -> list[Row]:
    """Rows whose sum is the product of two unsigned numbers, one for each bit of *a*."""
    return [(Mux(bit, b, 0)[: len(b)], weight) for weight, bit in enumerate(a)]


def folded(x: Value) -> Value:
    """Magnitude of a two's complement number, for `square_rows`: complemented where it is negative, ``|x| - sign``."""
    return Mux(x[-1], ~x[:-1], x[:-1])[: len(x) - 1]


def square_rows(sign: Value, y: Value) -> list[Row]:
    """Rows whose sum is the square of a number of which sign and `folded` magnitude are given.

    It is ``y**2 + sign * (1 + 2*y)``. Products of two different bits occur twice in a square, so that each is one bit
    of twice the weight: half the bits of a product, and none of them negative.
    """
    rows = [(Mux(sign, Cat(Const(1, 1), y), 0)[: len(y) + 1], 0)]
    for i, bit in enumerate(y):
        above = y[i + 1 :]
        row = Cat(Const(1, 1), Const(0, 1), above) if len(above) else Const(1, 1)
        rows.append((Mux(bit, row, 0)[: len(row)], 2 * i))
    return rows


class Heap:
    """A sum modulo ``2**width``, as words by weight.

    Parameters
    ----------
    width : int
        Bits of the sum; what lies above is dropped.
    """

    def __init__(self, width: int):
        self.width = width
        self._rows: list[Row] = []
        self._constant = 0

    def add(self, rows: Iterable[Row]) -> None:
        """Add weighted numbers."""
        self._rows += [(value[: self.width - weight], weight) for value, weight in rows if weight < self.width]

    def subtract(self, rows: Iterable[Row]) -> None:
        """Subtract weighted numbers: ``-b`` is ``~b + 1 - 2**len(b)``, whose constants add up to one for all."""
        for value, weight in rows:
            self.add([(~value, weight)])
            self._constant += (1 << weight) - (1 << weight + len(value))

    def words(self) -> list[Value]:
        """Words of `width` bits with the same sum, as few as there can be: rows that do not overlap share one."""
        constant = self._constant % (1 << self.width)
        rows = [*self._rows, *([(Const(constant, self.width), 0)] if constant else [])]
        words: list[list[Value]] = []
        ends: list[int] = []
        for value, weight in sorted(rows, key=lambda row: row[1]):
            place = next((index for index, end in enumerate(ends) if end <= weight), len(words))
            if place == len(words):
                words.append([])
                ends.append(0)
            words[place] += [Const(0, weight - ends[place]), value]
            ends[place] = weight + len(value)
        return [Cat(*word, Const(0, self.width - end)) for word, end in zip(words, ends, strict=True)]


def full_adders(m: Module, name: str, words: Sequence[Value], width: int) -> tuple[Value, Value]:
    """Two words with the sum of three, modulo ``2**width``."""
    a, b, c = words
    half, carry = Signal(width, name=f"{name}_sum"), Signal(width, name=f"{name}_carry")
    m.d.comb += [half.eq(a ^ b ^ c), carry.eq(((a & b) | (c & (a | b))) << 1)]
    return half, carry


def level(m: Module, name: str, words: Sequence[Value], width: int) -> list[Value]:
    """One level of full adders: words with the same sum modulo ``2**width``, two for each three."""
    whole = len(words) - len(words) % 3
    reduced: list[Value] = []
    for start in range(0, whole, 3):
        reduced += full_adders(m, f"{name}_{start // 3}", words[start : start + 3], width)
    return reduced + list(words[whole:])


def levels_of(words: int) -> int:
    """Levels of full adders that turn so many words into two."""
    levels = 0
    while words > 2:
        words -= words // 3
        levels += 1
    return levels


class CarrySaveTree:
    """Words to two, with registers between the levels.

    The last level is always registered; where the levels of a stage do not divide all of them, the first stage is
    the shorter one, since the bits of products come late in a cycle.

    Parameters
    ----------
    words : int
        How many.
    levels_per_stage : int
        Levels of full adders between registers.

    Attributes
    ----------
    latency : int
        Cycles from words to sum; 0 where there are no more than two.
    """

    def __init__(self, words: int, *, levels_per_stage: int):
        self.words = words
        self.levels_per_stage = levels_per_stage
        self.latency = -(-levels_of(words) // levels_per_stage)

    def build(self, m: Module, name: str, words: Sequence[Value], width: int) -> tuple[Value, Value]:
        """Two words with the sum of *words*, modulo ``2**width``, `latency` cycles later, from logic in *m*."""
        remaining = levels_of(self.words)
        words = list(words)
        while remaining:
            words = level(m, f"{name}_{remaining}", words, width)
            remaining -= 1
            if remaining % self.levels_per_stage == 0:
                held = [Signal(width, name=f"{name}_{remaining}_held", reset_less=True) for _ in words]
                m.d.sync += [register.eq(word) for register, word in zip(held, words, strict=True)]
                words = held
        return tuple([*words, Const(0, width), Const(0, width)][:2])
