"""Parallel-prefix adders: one component, and networks that trade depth, cells, wires and fan-out differently.

====================  =============================  ======================  =================================
network               depth, of n = width + 1        cells                   fan-out of a cell, wires
====================  =============================  ======================  =================================
`RippleCarry`         ``n - 1``                      ``n - 1``               1, shortest wires
`BrentKung`           ``2 * log2(n) - 1``            ``2 * n - 2 - log2(n)`` small
`HanCarlson`          ``log2(n) + 1``                ``n / 2 * log2(n)``     2, half the wires of Kogge-Stone
`Sklansky`            ``log2(n)``                    ``n / 2 * log2(n)``     up to ``n / 2``
`KoggeStone`          ``log2(n)``                    ``n * log2(n) - n + 1`` 2, most wires
====================  =============================  ======================  =================================

(n a power of two, logarithms rounded up otherwise; `KoggeStone` is in `kvant.hw.numeric.kogge_stone`.)

Where to use them: in standard cells, where logarithmic depth buys delay. FPGAs have a carry chain next to every LUT;
there ``+`` is several times smaller and faster (`kvant.hw.numeric.adders` makes it a choice).
"""

from amaranth.hdl import Cat, Const, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer

MAX_WIDTH = 1024
"""Widest adder that is built; far beyond anything in this project."""

Level = dict[int, int]
"""Cells of a prefix level: the place whose span grows, and the place at the top of the span right below it."""


class PrefixAdder(wiring.Component):
    """Adder of two words and a carry on a prefix network, which a subclass lays down.

    Bit k generates a carry (``g = a & b``) or propagates one (``p = a ^ b``). A cell joins the span of bits that ends
    at a place with the span right below it, ``(g, p) o (g', p') = (g | p & g', p & p')``; when every span reaches the
    bottom, every carry is known. The carry in is one more place below bit 0 that only generates, so that it needs no
    cell of its own: place 0 is the carry in, place k + 1 is bit k.

    Parameters
    ----------
    width : int
        Bits of the operands, 1 to 1024.
    stages : int
        Pipeline registers, 0 (combinational) to the number of prefix levels, spread evenly over them.

    Members
    -------
    a, b : In(width)
        Operands, unsigned or two's complement alike.
    carry_in : In(1)
        Added at weight 1.
    sum : Out(width)
        ``(a + b + carry_in) mod 2**width``.
    carry_out : Out(1)
        Bit `width` of the unsigned sum.
    overflow : Out(1)
        The sum of the operands read as two's complement does not fit `width` bits: the carries into and out of the
        top bit differ. At width 1 the operands are 0 and -1.

    Raises
    ------
    ParameterError
        For a width or a number of stages outside the ranges above.
    """

    def __init__(self, width: int, *, stages: int = 0):
        self.width = check_integer("width", width, 1, MAX_WIDTH)
        self.stages = check_integer("stages", stages, 0, self.depth, note=f" (prefix levels at width {width})")
        super().__init__(
            {
                "a": In(width),
                "b": In(width),
                "carry_in": In(1),
                "sum": Out(width),
                "carry_out": Out(1),
                "overflow": Out(1),
            }
        )

    @property
    def network(self) -> list[Level]:
        """The prefix levels. A cell reads what its places held before the level."""
        raise NotImplementedError

    @property
    def places(self) -> int:
        """The bits and the carry in."""
        return self.width + 1

    @property
    def depth(self) -> int:
        """Cells that a carry passes at most: prefix levels."""
        return len(self.network)

    @property
    def cells(self) -> int:
        """Prefix cells."""
        return sum(map(len, self.network))

    @property
    def latency(self) -> int:
        """Cycles from operands to sum."""
        return self.stages

    def elaborate(self, platform):
        m = Module()
        half_sum = Signal(self.width)
        m.d.comb += half_sum.eq(self.a ^ self.b)
        generate = list(Cat(self.carry_in, self.a & self.b))
        propagate = list(Cat(Const(0, 1), half_sum))
        registered = {self.depth * (stage + 1) // self.stages for stage in range(self.stages)}
        for level, cells in enumerate(self.network, start=1):
            # One bit for each cell.
            generated = Signal(len(cells), name=f"generate_{level}")
            propagated = Signal(len(cells), name=f"propagate_{level}")
            above = Cat(propagate[place] for place in cells)
            m.d.comb += [
                generated.eq(
                    Cat(generate[place] for place in cells) | (above & Cat(generate[k] for k in cells.values()))
                ),
                propagated.eq(above & Cat(propagate[k] for k in cells.values())),
            ]
            for index, place in enumerate(cells):
                generate[place], propagate[place] = generated[index], propagated[index]
            if level in registered:
                words = {"generate": Cat(generate), "propagate": Cat(propagate), "half_sum": half_sum}
                held = {
                    name: Signal(len(word), name=f"{name}_after_{level}", reset_less=True)
                    for name, word in words.items()
                }
                m.d.sync += [held[name].eq(word) for name, word in words.items()]
                generate, propagate, half_sum = list(held["generate"]), list(held["propagate"]), held["half_sum"]
        carries = Cat(generate)
        m.d.comb += [
            self.sum.eq(half_sum ^ carries[: self.width]),
            self.carry_out.eq(carries[self.width]),
            self.overflow.eq(carries[self.width] ^ carries[self.width - 1]),
        ]
        return m


class RippleCarry(PrefixAdder):
    """The carry passes one place after the other: fewest cells, and a depth of `width`."""

    @property
    def network(self) -> list[Level]:
        """One cell a level."""
        return [{place: place - 1} for place in range(1, self.places)]


class Sklansky(PrefixAdder):
    """Blocks double from level to level: all places of an upper half join the top of the lower half.

    Least depth with few cells, for a fan-out that doubles with the blocks. Source: J. Sklansky, "Conditional-Sum
    Addition Logic", IRE Trans. Electronic Computers EC-9 (1960).
    """

    @property
    def network(self) -> list[Level]:
        """The upper halves of blocks of 2, 4, 8, ... places."""
        return [
            {place: (place >> level << level) - 1 for place in range(self.places) if place >> level & 1}
            for level in range(self.width.bit_length())
        ]


class BrentKung(PrefixAdder):
    """A tree up to the top of each block of a power of two, and one down to the places between.

    Fewest cells of logarithmic depth and no fan-out to speak of, at almost twice the depth. Source: R. P. Brent and
    H. T. Kung, "A Regular Layout for Parallel Adders", IEEE Trans. Computers C-31 (1982).
    """

    @property
    def network(self) -> list[Level]:
        """Spans of 2, 4, 8, ... places at their multiples, then what lies halfway between known carries."""
        distances = [1 << level for level in range(self.width.bit_length())]
        up = [self._halfway(distance, 2 * distance - 1) for distance in distances]
        down = [self._halfway(distance, 3 * distance - 1) for distance in reversed(distances)]
        return [cells for cells in up + down if cells]

    def _halfway(self, distance: int, first: int) -> Level:
        return {place: place - distance for place in range(first, self.places, 2 * distance)}


class HanCarlson(PrefixAdder):
    """A Kogge-Stone network over every other place, and one level more for the places between.

    Half the cells and wires for one level. Source: T. Han and D. A. Carlson, "Fast Area-Efficient VLSI Adders", IEEE
    Symposium on Computer Arithmetic (1987).
    """

    @property
    def network(self) -> list[Level]:
        """Pairs, spans of 2, 4, 8, ... at the odd places, then the even places."""
        odd = range(1, self.places, 2)
        levels = [
            {place: place - distance for place in odd if place >= distance}
            for distance in (1 << level for level in range(self.width.bit_length()))
        ]
        levels.append({place: place - 1 for place in range(2, self.places, 2)})
        return [cells for cells in levels if cells]
