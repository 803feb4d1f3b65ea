"""A register between the two ends of a stream that are far apart on a chip and in no hurry."""

from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out


class StreamRegister(wiring.Component):
    """One register: a transfer waits in it until it is taken, and then the next one may come.

    Neither `valid` nor `ready` goes through, and the payload has no choice before its register: where a transfer every
    second cycle is enough, this takes half the flip-flops of `kvant.hw.numeric.output_queue.OutputQueue` and none of
    its logic.

    Parameters
    ----------
    shape
        Payload.

    Members
    -------
    i : in stream
    o : out stream
        A cycle later; a transfer every second cycle at most.
    """

    def __init__(self, shape):
        self.shape = shape
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform):
        m = Module()
        ready = Signal()  # low in reset, where nothing may be taken
        m.d.comb += self.i.ready.eq(ready)
        with m.If(ready):
            m.d.sync += self.o.payload.eq(self.i.payload)
        with m.If(ready & self.i.valid):
            m.d.sync += [self.o.valid.eq(1), ready.eq(0)]
        with m.Elif(~self.o.valid | self.o.ready):
            m.d.sync += [self.o.valid.eq(0), ready.eq(1)]
        return m
