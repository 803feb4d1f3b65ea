"""Carry-save arithmetic: any number of bits of any weights become two words, without a carry that propagates.

A `BitHeap` collects bits by weight. A level of full adders turns three words into two, so that the depth of a sum of
n words is logarithmic in n and independent of their width; one adder at the end resolves the two words that are
left. Source: C. S. Wallace, "A Suggestion for a Fast Multiplier", IEEE Trans. Electronic Computers EC-13 (1964).
"""

from collections.abc import Iterable, Sequence

from amaranth.hdl import Cat, Const, Module, Signal, Value

Term = tuple[Value, int]
"""A bit and its weight, as the exponent of two."""


def product_terms(a: Value, b: Value) -> list[Term]:
    """Bits whose weighted sum is the product of two unsigned numbers."""
    return [(a[i] & b[j], i + j) for i in range(len(a)) for j in range(len(b))]


def square_terms(x: Value) -> list[Term]:
    """Bits whose weighted sum is the square of a two's complement number.

    Complemented where it is negative, x has the magnitude ``|x| - sign``, and its square is that of this magnitude y
    plus ``sign * (2*y + 1)``. Products of two different bits occur twice in a square, so that each is one bit of
    twice the weight: half the bits of a product, and none of them negative.
    """
    sign = x[-1]
    y = [bit ^ sign for bit in x[:-1]]
    terms = [(sign, 0)]
    for i, bit in enumerate(y):
        terms += [(bit, 2 * i), (sign & bit, i + 1)]
        terms += [(bit & y[j], i + j + 1) for j in range(i + 1, len(y))]
    return terms


class BitHeap:
    """A sum modulo ``2**width``, as bits by weight.

    Parameters
    ----------
    width : int
        Bits of the sum; what lies above is dropped.
    """

    def __init__(self, width: int):
        self.width = width
        self._columns: list[list[Value]] = [[] for _ in range(width)]
        self._constant = 0

    def add(self, terms: Iterable[Term]) -> None:
        """Add weighted bits."""
        for bit, weight in terms:
            if weight < self.width:
                self._columns[weight].append(bit)

    def subtract(self, terms: Iterable[Term]) -> None:
        """Subtract weighted bits: ``-b`` is ``~b - 1``, and the ones of all bits are one constant."""
        for bit, weight in terms:
            self.add([(~bit, weight)])
            self._constant -= 1 << weight

    def add_word(self, value: Value, *, weight: int = 0) -> None:
        """Add an unsigned number times ``2**weight``."""
        self.add((bit, weight + place) for place, bit in enumerate(value))

    def words(self) -> list[Value]:
        """Words of `width` bits with the same sum: as many as the highest column has bits, the emptiest last."""
        columns = [list(column) for column in self._columns]
        for weight, column in enumerate(columns):
            if self._constant >> weight & 1:
                column.append(Const(1, 1))
        height = max(map(len, columns), default=0)
        return [Cat(column[k] if k < len(column) else Const(0, 1) for column in columns) for k in range(height)]


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
