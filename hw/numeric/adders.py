"""Adders as a choice: lanes, adder trees and integer accumulators ask an adder strategy for their sums."""

from typing import Literal

from amaranth.hdl import Cat, Const, Module, Signal, Value, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.numeric.kogge_stone import KoggeStone
from kvant.hw.numeric.prefix_adders import MAX_WIDTH, BrentKung, HanCarlson, PrefixAdder, RippleCarry, Sklansky
from kvant.hw.parameters import ParameterError, check_integer


class Plus:
    """The synthesis tool's own adder: carry chains on an FPGA."""

    def add(self, m: Module, name: str, a: Value, b: Value, *, width: int, carry: Value | None = None) -> Value:
        """Sum of two signed values and a carry.

        Parameters
        ----------
        m : Module
            Where logic that the sum needs is put.
        name : str
            Unique in `m`.
        a, b : signed values
            Sign-extended to `width` where shorter.
        width : int
            Bits of the result, which is ``(a + b + carry) mod 2**width`` as a signed value.
        carry : 1-bit value or None
            Added at weight 1.
        """
        if carry is None:
            return (a + b)[:width].as_signed()
        # One place below bit 0 turns the carry into the chain's own: three-operand sums map to two adders.
        return (Cat(Const(1, 1), a).as_signed() + Cat(carry, b).as_signed())[1 : width + 1].as_signed()


class Prefix:
    """A prefix adder for every sum; same interface as `Plus`.

    Parameters
    ----------
    network : type
        `PrefixAdder` with its network.
    """

    def __init__(self, network: type[PrefixAdder]):
        self.network = network

    def add(self, m: Module, name: str, a: Value, b: Value, *, width: int, carry: Value | None = None) -> Value:
        """Sum of two signed values and a carry, as in `Plus.add`, from a submodule `name`."""
        adder = self.network(width)
        m.submodules[name] = adder
        m.d.comb += [adder.a.eq(a), adder.b.eq(b), adder.carry_in.eq(0 if carry is None else carry)]
        return adder.sum.as_signed()


AdderName = Literal["plus", "kogge_stone", "ripple", "brent_kung", "sklansky", "han_carlson"]
"""Legal values of a parameter `adder`."""

NETWORKS: dict[str, type[PrefixAdder]] = {
    "kogge_stone": KoggeStone,
    "ripple": RippleCarry,
    "brent_kung": BrentKung,
    "sklansky": Sklansky,
    "han_carlson": HanCarlson,
}
"""Prefix adders by name."""

ADDERS: dict[str, Plus | Prefix] = {"plus": Plus(), **{name: Prefix(network) for name, network in NETWORKS.items()}}
"""Adder strategies by the name that a parameter `adder` gives them."""


def adder_strategy(name: str) -> Plus | Prefix:
    """The strategy called *name*.

    Raises
    ------
    ParameterError
        If there is none of that name.
    """
    if name not in ADDERS:
        raise ParameterError(f"adder = {name!r}: legal is one of {', '.join(map(repr, ADDERS))}")
    return ADDERS[name]


class StrategyAdder(wiring.Component):
    """A strategy's sum as a component of its own, combinational: what is measured when strategies are compared.

    Parameters
    ----------
    width : int
        Bits of operands and sum, 1 to 1024.
    adder : str
        A key of `ADDERS`.

    Members
    -------
    a, b : In(width)
    carry_in : In(1)
    sum : Out(width)
        ``(a + b + carry_in) mod 2**width``.

    Raises
    ------
    ParameterError
        For another width or an adder that does not exist.
    """

    def __init__(self, width: int, adder: str):
        self.width = check_integer("width", width, 1, MAX_WIDTH)
        self.adder = adder
        self._strategy = adder_strategy(adder)
        super().__init__({"a": In(width), "b": In(width), "carry_in": In(1), "sum": Out(width)})

    def elaborate(self, platform):
        m = Module()
        a, b = self.a.as_signed(), self.b.as_signed()
        m.d.comb += self.sum.eq(self._strategy.add(m, "adder", a, b, width=self.width, carry=self.carry_in))
        return m


class Term(data.StructLayout):
    """A summand ``value + carry``: two's complement negation is a complement and a carry, and the adder that sums two
    terms takes one carry at no cost, leaving the other to the next adder.

    Members
    -------
    value : signed(width)
    carry : 1
    """

    def __init__(self, width: int):
        super().__init__({"value": signed(width), "carry": 1})
        self.width = width


class AdderTree(wiring.Component):
    """Balanced, pipelined sum of `count` terms.

    A level adds neighbours, an odd last term passes through. Each of the ``count - 1`` adders takes one of the
    `count` carries; the last carry leaves with the sum. A level is one bit wider than the one before: nothing wraps.

    Parameters
    ----------
    count : int
        Terms, at least 1.
    width : int
        Bits of a term's value.
    adder : str
        Adder strategy, a key of `ADDERS`.

    Members
    -------
    i : In(Term(width)).array(count)
    o : Out(Term(width + levels))

    Raises
    ------
    ParameterError
        When *count* or *width* is not a positive integer, or there is no such adder.
    """

    LEVELS_PER_STAGE = 2
    """Levels between registers. The last level is always registered; where they do not divide, the first stage is the
    shorter one: products come late in a cycle."""

    def __init__(self, count: int, width: int, *, adder: str = "plus"):
        self.count = check_integer("count", count, 1)
        self.width = check_integer("width", width, 1)
        self.adder = adder_strategy(adder)
        self.levels = self.levels_of(count)
        super().__init__({"i": In(Term(width)).array(count), "o": Out(Term(width + self.levels))})

    @staticmethod
    def levels_of(count: int) -> int:
        """Adders that each of *count* terms passes."""
        return (count - 1).bit_length()

    @classmethod
    def latency_of(cls, count: int) -> int:
        """Cycles from *count* terms to their sum."""
        return -(-cls.levels_of(count) // cls.LEVELS_PER_STAGE)

    @property
    def latency(self) -> int:
        """Cycles from terms to sum."""
        return self.latency_of(self.count)

    def elaborate(self, platform):
        m = Module()
        terms = list(self.i)
        for level in range(1, self.levels + 1):
            layout = Term(self.width + level)
            last_of_stage = (self.levels - level) % self.LEVELS_PER_STAGE == 0
            domain = m.d.sync if last_of_stage else m.d.comb
            sums = []
            for index in range(0, len(terms), 2):
                total = Signal(layout, name=f"sum_{level}_{index // 2}", reset_less=True)
                if index + 1 < len(terms):
                    a, b = terms[index : index + 2]
                    name = f"add_{level}_{index // 2}"
                    value = self.adder.add(m, name, a.value, b.value, carry=a.carry, width=layout.width)
                    domain += [total.value.eq(value), total.carry.eq(b.carry)]
                else:
                    domain += [total.value.eq(terms[index].value), total.carry.eq(terms[index].carry)]
                sums.append(total)
            terms = sums
        m.d.comb += [self.o.value.eq(terms[0].value), self.o.carry.eq(terms[0].carry)]
        return m
