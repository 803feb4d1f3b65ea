"""The end of a pipeline: results wait for their receiver, and the pipeline learns from a register when to stop."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out


class OutputQueue(wiring.Component):
    """Two results between a pipeline that only moves in cycles of `advance` and a stream.

    `advance` goes to every register of the pipeline, so it is a register itself: it is high in cycles in which fewer
    than two results wait, and low in reset. While results are taken it is high in every cycle.

    Parameters
    ----------
    shape
        A result.

    Members
    -------
    advance : Out(1)
        The pipeline moves.
    valid : In(1)
        A result leaves the pipeline, if it moves.
    payload : In(shape)
    o : Out(stream)
    """

    def __init__(self, shape):
        self.shape = shape
        super().__init__({"advance": Out(1), "valid": In(1), "payload": In(shape), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform):
        m = Module()
        second = Signal(self.shape, reset_less=True)
        waiting = Signal(range(3))
        next_waiting = Signal.like(waiting)
        push, pop = Signal(), Signal()
        m.d.comb += [
            push.eq(self.advance & self.valid),
            self.o.valid.eq(waiting != 0),
            pop.eq(self.o.valid & self.o.ready),
            next_waiting.eq(waiting + push - pop),
        ]
        m.d.sync += [waiting.eq(next_waiting), self.advance.eq(next_waiting != 2)]
        # What is no result is taken, too, and overwritten: so the registers' enables and the choice are short logic,
        # and that of `second` does not wait for `ready`, which comes from far.
        with m.If(self.o.ready | (waiting == 0)):
            m.d.sync += self.o.payload.eq(Mux(waiting == 2, second, self.payload))
        with m.If(self.advance):
            m.d.sync += second.eq(self.payload)
        return m
