"""A queue in a block memory."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer


class BlockQueue(wiring.Component):
    """First in, first out, in a memory without collision logic: the place that is read is never the one written.

    Parameters
    ----------
    shape : shape-like
    depth : int
        Least number of places; the next power of two is built.

    Attributes
    ----------
    latency : int
        Cycles from `i` to `o`, if nothing waits.

    Members
    -------
    i : in stream
    o : out stream
        Straight from the memory: register it before long logic.
    """

    latency = 2

    def __init__(self, shape, depth: int):
        self.shape = shape
        self.depth = 1 << (check_integer("depth", depth, 2) - 1).bit_length()
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform):
        m = Module()
        m.submodules.places = places = memory.Memory(
            shape=self.shape, depth=self.depth, init=[], attrs={"no_rw_check": 1}
        )
        write, read = places.write_port(), places.read_port()
        level = Signal(range(self.depth + 1))  # in the memory, what stands at its output not included
        next_level = Signal.like(level)
        ready = Signal()
        m.d.comb += [
            self.i.ready.eq(ready),
            write.data.eq(self.i.payload),
            write.en.eq(self.i.valid & ready),
            read.en.eq((level != 0) & (~self.o.valid | self.o.ready)),
            next_level.eq(level + write.en - read.en),
            self.o.payload.eq(read.data),
        ]
        m.d.sync += [
            level.eq(next_level),
            ready.eq(next_level != self.depth),
            write.addr.eq(write.addr + write.en),
            read.addr.eq(read.addr + read.en),
            self.o.valid.eq(Mux(self.o.valid & ~self.o.ready, 1, level != 0)),
        ]
        return m
