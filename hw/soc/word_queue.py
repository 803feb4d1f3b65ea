"""A queue of words in block RAM."""

from amaranth.hdl import Module, Shape, Signal
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer


class WordQueue(wiring.Component):
    """A queue whose words leave from a register.

    A word that enters an empty queue leaves three cycles later; one word per cycle.

    Parameters
    ----------
    shape : shape-like
        A word.
    depth : int
        Words it holds, a power of two. The output register and that of the memory hold up to two more.

    Members
    -------
    i : in stream
    o : out stream
    left : out
        High in the cycle in which a word leaves the memory, and so frees its place.
    """

    def __init__(self, shape, depth: int):
        self.shape = shape
        self.depth = check_integer("depth", depth, 2)
        assert depth & (depth - 1) == 0
        super().__init__(
            {"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape)), "left": Out(1)},
        )

    def elaborate(self, platform):
        m = Module()
        # What is read was written in an earlier cycle: no address is read and written at once.
        m.submodules.words = words = memory.Memory(
            shape=Shape.cast(self.shape).width, depth=self.depth, init=[], attrs={"no_rw_check": 1}
        )
        write, read = words.write_port(), words.read_port()
        stored = Signal(range(self.depth + 1))
        in_memory_register = Signal()
        free, push = Signal(), Signal()
        m.d.comb += [
            self.i.ready.eq(stored != self.depth),
            push.eq(self.i.valid & self.i.ready),
            write.en.eq(push),
            write.data.eq(self.i.payload),
            free.eq(~self.o.valid | self.o.ready),
            read.en.eq((stored != 0) & (~in_memory_register | free)),
            self.left.eq(read.en),
        ]
        m.d.sync += [
            stored.eq(stored + push - read.en),
            write.addr.eq(write.addr + push),
            read.addr.eq(read.addr + read.en),
            in_memory_register.eq(read.en | (in_memory_register & ~free)),
        ]
        with m.If(free):
            m.d.sync += [self.o.valid.eq(in_memory_register), self.o.payload.eq(read.data)]
        return m
