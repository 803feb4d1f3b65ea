"""Codes of INT8 elements from the limits of their group."""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.layouts import GroupGrid
from kvant.hw.numeric.codes import CODE_BITS, MAGNITUDES
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.parameters import check_integer


class Encoder(wiring.Component):
    """Nearest codes of elements: the magnitude is the number of limits below ``|q|``, the sign that of q.

    The sign of 0 is positive, magnitude 0 of a linear group is code 0x0, and a grid that is `zero` gives code 0x0
    throughout: an element masked to 0 always becomes code 0x0. A plain pipeline without flow control.
    Source: docs/numerics.md, "Encoding".

    Parameters
    ----------
    lanes : int
        Elements per cycle.

    Attributes
    ----------
    latency : int
        Cycles from elements and grid to codes. One set per cycle.

    Members
    -------
    q : in, lanes * signed(9)
        Elements, offset taken out: -255 .. 255.
    grid : in
        `GroupGrid` of the group that all lanes belong to.
    codes : out, lanes * 4

    Raises
    ------
    ParameterError
        When *lanes* is not a positive integer.
    """

    latency = 3

    def __init__(self, lanes: int):
        self.lanes = check_integer("lanes", lanes, 1)
        super().__init__(
            {
                "q": In(data.ArrayLayout(signed(9), lanes)),
                "grid": In(GroupGrid()),
                "codes": Out(data.ArrayLayout(CODE_BITS, lanes)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register
        # Cycle 1: magnitudes, beside the limits. Cycle 2: comparisons. Cycle 3: how many of them hold.
        limits = register(self.grid.limits, "limits")
        zero = register(self.grid.zero, "zero", cycles=2)
        linear = register(self.grid.linear, "linear", cycles=2)
        for lane in range(self.lanes):
            q = self.q[lane]
            magnitude = register(Mux(q < 0, -q, q)[:8], f"magnitude_{lane}")
            sign = register(q < 0, f"sign_{lane}", cycles=2)
            above = register(Cat(magnitude > limits[k] for k in range(MAGNITUDES - 1)), f"above_{lane}")
            # Limits do not descend: ones, then zeros.
            count = Signal(CODE_BITS - 1, name=f"count_{lane}")
            m.d.comb += count.eq(
                Cat(
                    (above[0] & ~above[1]) | (above[2] & ~above[3]) | (above[4] & ~above[5]) | above[6],
                    (above[1] & ~above[3]) | above[5],
                    above[3],
                )
            )
            code = Mux(zero, 0, Cat(count, sign & ~(linear & ~above[0])))
            m.d.comb += self.codes[lane].eq(register(code, f"code_{lane}"))
        return m
