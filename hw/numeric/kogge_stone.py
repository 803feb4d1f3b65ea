"""Kogge-Stone parallel-prefix adder."""

from amaranth.hdl import Cat, Const, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer

MAX_WIDTH = 1024
"""Widest adder that is built; far beyond anything in this project."""


class KoggeStone(wiring.Component):
    """Adder of two words and a carry, with a carry depth of ``ceil(log2(width + 1))`` prefix cells.

    Bit k generates a carry (``g = a & b``) or propagates one (``p = a ^ b``). Every level combines each bit's span
    with the span that ends right below it, ``(g, p) o (g', p') = (g | p & g', p & p')``, and doubles the spans. The
    carry in is one more place below bit 0 that only generates, so that it needs no cell of its own. Source: P. M. Kogge
    and H. S. Stone, "A Parallel Algorithm for the Efficient Solution of a General Class of Recurrence Equations",
    IEEE Trans. Computers C-22 (1973).

    Where to use it: in standard cells, where logarithmic depth buys delay. FPGAs have a carry chain next to every
    LUT; there ``+`` is several times smaller and faster (`kvant.hw.numeric.adders` makes it a choice).

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
        self.stages = check_integer("stages", stages, 0, len(self.spans), note=f" (prefix levels at width {width})")
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
    def spans(self) -> list[int]:
        """Distance that each prefix level reaches: 1, 2, 4, ... until every carry is known."""
        return [1 << level for level in range(self.width.bit_length())]

    @property
    def latency(self) -> int:
        """Cycles from operands to sum."""
        return self.stages

    def elaborate(self, platform):
        m = Module()
        places = self.width + 1  # the carry in and the bits
        half_sum = Signal(self.width)
        generate = Signal(places)
        propagate = Signal(places)
        m.d.comb += [
            half_sum.eq(self.a ^ self.b),
            generate.eq(Cat(self.carry_in, self.a & self.b)),
            propagate.eq(Cat(Const(0, 1), half_sum)),
        ]
        levels = len(self.spans)
        registered = {levels * (stage + 1) // self.stages for stage in range(self.stages)}
        for level, span in enumerate(self.spans, start=1):
            domain = m.d.sync if level in registered else m.d.comb
            generate_next = Signal(places, name=f"generate_{level}", reset_less=True)
            propagate_next = Signal(places, name=f"propagate_{level}", reset_less=True)
            # Zeros come in from below: a span that already reaches the carry in propagates nothing.
            domain += [
                generate_next.eq(generate | (propagate & (generate << span)[:places])),
                propagate_next.eq(propagate & (propagate << span)[:places]),
            ]
            generate, propagate = generate_next, propagate_next
            if level in registered:
                delayed = Signal(self.width, name=f"half_sum_{level}", reset_less=True)
                m.d.sync += delayed.eq(half_sum)
                half_sum = delayed
        m.d.comb += [
            self.sum.eq(half_sum ^ generate[: self.width]),
            self.carry_out.eq(generate[self.width]),
            self.overflow.eq(generate[self.width] ^ generate[self.width - 1]),
        ]
        return m
