"""A delay of many bits by many cycles, in a small memory instead of a chain of registers."""

from amaranth.hdl import Module, Signal
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer


class DelayLine(wiring.Component):
    """What went in `cycles` cycles ago. Nothing is reset: a valid bit travels beside.

    Parameters
    ----------
    shape : shape-like
    cycles : int
        At least 2.

    Members
    -------
    i : in
    o : out
        Straight from the memory: register it before long logic.
    """

    def __init__(self, shape, cycles: int):
        self.cycles = check_integer("cycles", cycles, 2)
        super().__init__({"i": In(shape), "o": Out(shape)})

    def elaborate(self, platform):
        m = Module()
        bits = (self.cycles - 1).bit_length()
        # What is read was written at least one cycle before: the addresses never meet.
        m.submodules.words = words = memory.Memory(
            shape=self.i.shape(), depth=1 << bits, init=[], attrs={"no_rw_check": 1}
        )
        write, read = words.write_port(), words.read_port()
        place = Signal(bits)
        m.d.sync += place.eq(place + 1)
        m.d.comb += [
            write.addr.eq(place),
            write.data.eq(self.i),
            write.en.eq(1),
            read.addr.eq(place - (self.cycles - 1)),
            read.en.eq(1),
            self.o.eq(read.data),
        ]
        return m
