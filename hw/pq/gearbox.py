"""Words of codes and words of the memory port: for codes of 5 to 7 bits a contiguous stream of bits.

A word of codes of 5, 6 or 7 bits is 5/4, 6/4 or 7/4 of a port word, codes of 4 or 8 bits fill a port word: in quarters
of a port word, both are small integers.
"""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.pq.parameters import PqParameters

_PORT_QUARTERS = 4


def _word(bits: int) -> data.StructLayout:
    return data.StructLayout({"data": bits, "last": 1})


class _Gearbox(wiring.Component):
    """Sizes in quarters of a port word."""

    def __init__(self, p: PqParameters, code_words: wiring.Flow):
        self.p = p.check_pq()
        self.quarter = p.port_bits // _PORT_QUARTERS
        self.word_quarters = p.word_codes * p.nbits // self.quarter
        word, port = (stream.Signature(_word(bits)) for bits in (p.word_codes * p.nbits, p.port_bits))
        super().__init__({"i": In(word if code_words is In else port), "o": Out(port if code_words is In else word)})

    def _quarters(self, value) -> list:
        """*value*, cut."""
        return [value[place : place + self.quarter] for place in range(0, len(value), self.quarter)]

    def _choose(self, m: Module, select: Signal, choices: dict, name: str):
        """The quarter that belongs to *select*; 0 for another."""
        chosen = Signal(self.quarter, name=name)
        with m.Switch(select):
            for value, choice in choices.items():
                with m.Case(value):
                    m.d.comb += chosen.eq(choice)
        return chosen


class WordPacker(_Gearbox):
    """Words of codes to port words.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    i : in, stream of {data: word_codes * nbits, last}
    o : out, stream of {data: port_bits, last}
        The bits of `i` without gaps, the earlier ones lower; after a word with `last` the port word is filled up with
        zeros and has `last`. For codes of 4 and 8 bits the words of `i`, in the same cycle; otherwise a port word per
        cycle while words come.
    """

    def __init__(self, p: PqParameters):
        super().__init__(p, In)

    def elaborate(self, platform):
        m = Module()
        if self.word_quarters == _PORT_QUARTERS:
            wiring.connect(m, wiring.flipped(self.i), wiring.flipped(self.o))
            return m
        size = self.word_quarters + _PORT_QUARTERS - 1
        held = [Signal(self.quarter, name=f"held_{number}") for number in range(size)]  # 0 from `level` on
        level = Signal(range(size + 1))
        ending = Signal()  # the last word is held
        take, give = Signal(), Signal()
        m.d.comb += [
            self.o.valid.eq((level >= _PORT_QUARTERS) | ending),
            self.o.payload.data.eq(Cat(*held[:_PORT_QUARTERS])),
            self.o.payload.last.eq(ending & (level <= _PORT_QUARTERS)),
            give.eq(self.o.valid & self.o.ready),
            # Less than a port word is left over when a word is taken: the position of its first quarter is level % 4.
            self.i.ready.eq(~ending & ((level < _PORT_QUARTERS) | (self.o.ready & (level < 2 * _PORT_QUARTERS)))),
            take.eq(self.i.valid & self.i.ready),
        ]
        with m.If(take):
            m.d.sync += [ending.eq(self.i.payload.last), level.eq(level[:2] + self.word_quarters)]
        with m.Elif(give):
            m.d.sync += level.eq(level - _PORT_QUARTERS)
            with m.If(self.o.payload.last):
                m.d.sync += [ending.eq(0), level.eq(0)]
        word = self._quarters(self.i.payload.data)
        for number, quarter in enumerate(held):
            above = number + _PORT_QUARTERS
            kept = Mux(give, held[above] if above < size else Const(0, self.quarter), quarter)
            choices = {
                start: word[number - start] if number >= start else kept
                for start in range(_PORT_QUARTERS)
                if number - start < self.word_quarters
            }
            with m.If(take):
                m.d.sync += quarter.eq(self._choose(m, level[:2], choices, f"next_{number}"))
            with m.Elif(give):
                m.d.sync += quarter.eq(kept)
        return m


class WordUnpacker(_Gearbox):
    """Port words to words of codes, the reverse of `WordPacker`.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    i : in, stream of {data: port_bits, last}
    o : out, stream of {data: word_codes * nbits, last}
        The bits of `i` cut into words; what is left over after a port word with `last`, less than a word, is dropped,
        and the word before has `last`. For codes of 4 and 8 bits the words of `i`, in the same cycle; otherwise a port
        word is taken per cycle while words are, and a word comes one cycle after its last bits.
    """

    def __init__(self, p: PqParameters):
        super().__init__(p, Out)

    def elaborate(self, platform):
        m = Module()
        if self.word_quarters == _PORT_QUARTERS:
            wiring.connect(m, wiring.flipped(self.i), wiring.flipped(self.o))
            return m
        size = self.word_quarters
        rest = [Signal(self.quarter, name=f"rest_{number}", reset_less=True) for number in range(size - 1)]
        level = Signal(range(size))  # quarters in `rest`
        complete, room, take = Signal(), Signal(), Signal()
        m.d.comb += [
            complete.eq(level >= size - _PORT_QUARTERS),
            room.eq(~self.o.valid | self.o.ready),
            self.i.ready.eq(~complete | room),
            take.eq(self.i.valid & self.i.ready),
        ]
        with m.If(room):
            m.d.sync += self.o.valid.eq(self.i.valid & complete)
        with m.If(take):
            with m.If(self.i.payload.last):
                m.d.sync += level.eq(0)
            with m.Elif(complete):
                m.d.sync += level.eq(level - (size - _PORT_QUARTERS))
            with m.Else():
                m.d.sync += level.eq(level + _PORT_QUARTERS)
        port = self._quarters(self.i.payload.data)
        word = []
        for number in range(size):
            choices = {
                start: port[number - start] if number >= start else rest[number]
                for start in range(size - _PORT_QUARTERS, size)
                if number - start < _PORT_QUARTERS
            }
            word.append(self._choose(m, level, choices, f"word_{number}"))
        for number, quarter in enumerate(rest):
            # After a complete word the quarters from `size` on; else those of the port word behind the ones held.
            choices = {}
            for start in range(size):
                source = number - start if start < size - _PORT_QUARTERS else size - start + number
                if 0 <= source < _PORT_QUARTERS:
                    choices[start] = port[source]
            if not choices:
                continue
            keep = Signal(name=f"keep_{number}")
            m.d.comb += keep.eq(~complete & (level > number))
            chosen = self._choose(m, level, choices, f"left_{number}")
            with m.If(take & ~keep):
                m.d.sync += quarter.eq(chosen)
        with m.If(take & complete):
            m.d.sync += [self.o.payload.data.eq(Cat(*word)), self.o.payload.last.eq(self.i.payload.last)]
        return m
