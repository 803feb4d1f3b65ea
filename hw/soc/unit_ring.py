"""Words of one width to pieces of others."""

from collections.abc import Sequence

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.parameters import ceil_div


class UnitRing(wiring.Component):
    """A ring of units that whole words enter and pieces of several sizes leave; a word and a piece per cycle.

    A word always lands at a multiple of its own size, so only what leaves is multiplexed.

    Parameters
    ----------
    unit : int
        Bits of a unit.
    word : int
        Units of a word.
    pieces : sequence of int
        Sizes of pieces, in units.

    Members
    -------
    i : in stream
        Words, the first unit lowest.
    window : out
        What comes next, as much as the largest piece.
    available : out
        Of each size whether so much is here.
    take : in
        Of one size at most: the piece leaves; what is taken beyond the units that are here is undefined.
    clear : in
        Forget everything; no word is taken meanwhile.
    level : out
        Units that are here.
    """

    def __init__(self, unit: int, word: int, pieces: Sequence[int]):
        self.unit, self.word, self.pieces = unit, word, tuple(pieces)
        largest = max(pieces)
        # A word may enter while one unit less than the largest piece waits behind a word just taken.
        self.words = ceil_div(largest - 1 + 2 * word, word)
        self.size = self.words * word
        super().__init__(
            {
                "i": In(stream.Signature(unit * word)),
                "window": Out(unit * largest),
                "available": Out(len(pieces)),
                "take": In(len(pieces)),
                "clear": In(1),
                "level": Out(range(self.size + 1)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        size, word = self.size, self.word
        units = [Signal(self.unit, name=f"unit_{number}", reset_less=True) for number in range(size)]
        slot = Signal(range(max(2, self.words)))
        read = Signal(range(size))
        taken = Signal(range(max(self.pieces) + 1))
        enters = Signal()
        m.d.comb += [
            self.i.ready.eq((self.level <= size - word) & ~self.clear),
            enters.eq(self.i.valid & self.i.ready),
            self.available.eq(Cat(self.level >= piece for piece in self.pieces)),
        ]
        for number, piece in enumerate(self.pieces):
            with m.If(self.take[number]):
                m.d.comb += taken.eq(piece)
        with m.If(enters):
            m.d.sync += slot.eq(_wrapped(slot, 1, self.words))
            with m.Switch(slot):
                for number in range(self.words):
                    with m.Case(number):
                        m.d.sync += Cat(units[number * word : (number + 1) * word]).eq(self.i.payload)
        m.d.sync += [
            self.level.eq(self.level + enters * word - taken),
            read.eq(_wrapped(read, taken, size)),
        ]
        with m.If(self.clear):
            m.d.sync += [self.level.eq(0), read.eq(0), slot.eq(0)]
        with m.Switch(read):
            for start in range(size):
                with m.Case(start):
                    places = [(start + number) % size for number in range(max(self.pieces))]
                    m.d.comb += self.window.eq(Cat(units[place] for place in places))
        return m


def _wrapped(position, step, size: int):
    """``(position + step) % size`` for a step of at most *size*."""
    total = position + step
    if size & (size - 1) == 0:
        return total[: size.bit_length() - 1]
    return Mux(total >= size, total - size, total)
