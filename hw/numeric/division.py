"""Division of unsigned integers without restoring: single steps, and many divisions by one divisor side by side.

The remainder is kept in two's complement, one bit wider than the divisor. A step shifts the next digit of the dividend
into it and subtracts the divisor from a remainder that is not negative, else adds it. A quotient digit is 1 where the
new remainder is not negative; its *sign* is what is kept, straight from the end of the carry chain. So the digits that
come out are those of the complemented quotient.
"""

from collections.abc import Sequence

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.numeric.floating import add_with_carry
from kvant.hw.parameters import ParameterError, check_integer


def divide_steps(m: Module, remainder: Value, digits: Value, divisor: Value, steps: int) -> tuple[Value, Value]:
    """Some steps of a division.

    Parameters
    ----------
    m : Module
        Receives the logic.
    remainder : len(divisor) + 1
        At the beginning the upper part of the dividend, which must be less than the divisor.
    digits
        At the beginning the lower part of the dividend. In every step one of its digits leaves at the top and a
        complemented digit of the quotient enters at the bottom.
    divisor
    steps : int

    Returns
    -------
    (Value, Value)
        Remainder and digits. After as many steps as there are digits, ``~digits`` is the quotient, rounded down; see
        `has_rest`.
    """
    padded = Cat(divisor, Const(0, 1))
    for _ in range(steps):
        subtract = Signal()
        next_remainder = Signal(len(padded))
        m.d.comb += [
            subtract.eq(~remainder[-1]),
            next_remainder.eq(
                add_with_carry(Cat(digits[-1], remainder[:-1]), padded ^ subtract.replicate(len(padded)), subtract)
            ),
        ]
        remainder = next_remainder
        digits = Cat(remainder[-1], digits[:-1])
    return remainder, digits


def has_rest(remainder: Value, divisor: Value) -> Value:
    """Whether a finished division has a remainder: a negative one lacks one divisor."""
    restored = (remainder + divisor)[: len(remainder)]
    return Mux(remainder[-1], restored.any(), remainder.any())


class SharedDivisions(wiring.Component):
    """Quotients of several dividends and one divisor: a rigid pipeline whose stations are used for `stay` cycles.

    A division takes `CYCLES` cycles. A station makes one cycle's steps again and again; it keeps its division for
    `stay` cycles, as long as the distance of divisions allows, and hands it on. Far apart, one station does everything;
    a division per cycle takes `CYCLES` stations.

    Parameters
    ----------
    divisor_width : int
        Bits of the divisor, which is not 0.
    quotients : sequence of (int, int)
        Of each division the bits of dividend and quotient. A dividend is less than ``divisor << quotient bits``; the
        latter are a multiple of `CYCLES`.
    interval : int
        Least cycles from one `start` to the next.
    tag_bits : int
        Bits of what travels along, 0 or more.

    Attributes
    ----------
    stay : int
        Cycles that a division stays in a station; starts may be that close.
    latency : int
        Cycles from `start` to the quotients.

    Members
    -------
    start : in
        Divisor and dividends are there.
    divisor, dividends, tag : in
    done : out
        The results are there, in this cycle alone.
    quotients, o_tag : out
        Rounded down.
    rests : out
        Of each division, whether there is a remainder.

    Raises
    ------
    ParameterError
        When a width or the interval is not a positive integer, a quotient's bits are no multiple of `CYCLES`, or a
        dividend is shorter than its quotient or longer than quotient and divisor.
    """

    CYCLES = 8
    latency = CYCLES

    def __init__(self, divisor_width: int, quotients: Sequence[tuple[int, int]], interval: int, *, tag_bits: int = 0):
        self.divisor_width = check_integer("divisor_width", divisor_width, 1)
        self.stay = self.stay_of(interval)
        self.tag_bits = check_integer("tag_bits", tag_bits, 0)
        self.sizes = [tuple(size) for size in quotients]
        for dividend, quotient in self.sizes:
            check_integer("dividend bits", dividend, quotient, quotient + divisor_width)
            if quotient % self.CYCLES:
                raise ParameterError(f"quotient bits = {quotient}: legal are the multiples of {self.CYCLES}")
        super().__init__(
            {
                "start": In(1),
                "divisor": In(divisor_width),
                **{f"dividend_{k}": In(dividend) for k, (dividend, _) in enumerate(self.sizes)},
                "done": Out(1),
                **{f"quotient_{k}": Out(quotient) for k, (_, quotient) in enumerate(self.sizes)},
                "rests": Out(len(self.sizes)),
                "tag": In(tag_bits),
                "o_tag": Out(tag_bits),
            }
        )

    @classmethod
    def stay_of(cls, interval: int) -> int:
        """`stay` for divisions that are *interval* cycles apart: a power of two up to `CYCLES`."""
        return 1 << (min(check_integer("interval", interval, 1), cls.CYCLES).bit_length() - 1)

    @property
    def dividends(self) -> list[Value]:
        """The dividends in the order of the parameter."""
        return [getattr(self, f"dividend_{k}") for k in range(len(self.sizes))]

    @property
    def quotients(self) -> list[Value]:
        """The quotients in the order of the parameter."""
        return [getattr(self, f"quotient_{k}") for k in range(len(self.sizes))]

    def elaborate(self, platform):
        m = Module()
        tokens = Signal(self.CYCLES)  # a division is in its cycle k + 1
        m.d.sync += tokens.eq(Cat(self.start, tokens))
        arrivals = Cat(self.start, tokens)

        divisor, tag = self.divisor, self.tag
        state = []
        for dividend, (_, quotient) in zip(self.dividends, self.sizes, strict=True):
            upper = dividend[quotient:]
            state.append((Cat(upper, Const(0, self.divisor_width + 1 - len(upper))), dividend[:quotient]))
        for station in range(self.CYCLES // self.stay):
            arrives = arrivals[station * self.stay]
            held_divisor = Signal(self.divisor_width, name=f"divisor_{station}", reset_less=True)
            held_tag = Signal(self.tag_bits, name=f"tag_{station}", reset_less=True)
            with m.If(arrives):
                m.d.sync += [held_divisor.eq(divisor), held_tag.eq(tag)]
            used_divisor = divisor if self.stay == 1 else Mux(arrives, divisor, held_divisor)
            next_state = []
            for k, arriving in enumerate(state):
                held = [
                    Signal(len(value), name=f"{name}_{station}_{k}", reset_less=True)
                    for name, value in zip(("remainder", "digits"), arriving, strict=True)
                ]
                now = arriving
                if self.stay > 1:
                    now = [Mux(arrives, *pair) for pair in zip(arriving, held, strict=True)]
                after = divide_steps(m, *now, used_divisor, len(held[1]) // self.CYCLES)
                m.d.sync += [register.eq(value) for register, value in zip(held, after, strict=True)]
                next_state.append(held)
            divisor, tag, state = held_divisor, held_tag, next_state

        m.d.comb += [
            self.done.eq(tokens[-1]),
            self.o_tag.eq(tag),
            self.rests.eq(Cat(has_rest(remainder, divisor) for remainder, _ in state)),
            *(port.eq(~digits) for port, (_, digits) in zip(self.quotients, state, strict=True)),
        ]
        return m
