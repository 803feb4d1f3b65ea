"""A queue behind a rigid pipeline: places are reserved before what fills them goes into the pipeline."""

from amaranth.hdl import Module, Mux, Shape, Signal
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer


class ReservedQueue(wiring.Component):
    """Results of a pipeline that cannot wait.

    Parameters
    ----------
    shape : shape-like
        A result.
    places : int
        Most results that are reserved at once. One place is a register, more are a memory.

    Members
    -------
    free : out
        Places that are not reserved. A register.
    reserve, count : in
        Takes `count` places; only where so many are free.
    push, result : in
        A result for a place that was reserved.
    o : out stream
        The results. Whoever takes one frees its place.
    idle : out
        No place is reserved.
    """

    def __init__(self, shape, places: int):
        self.shape = shape
        self.places = check_integer("places", places, 1)
        super().__init__(
            {
                "free": Out(range(places + 1), init=places),
                "reserve": In(1),
                "count": In(range(places + 1)),
                "push": In(1),
                "result": In(shape),
                "o": Out(stream.Signature(shape)),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        taken = Signal()
        m.d.comb += [taken.eq(self.o.valid & self.o.ready), self.idle.eq(self.free == self.places)]
        m.d.sync += self.free.eq(self.free + taken - Mux(self.reserve, self.count, 0))
        if self.places == 1:
            held = Signal(self.shape, reset_less=True)
            holds = Signal()
            m.d.comb += [self.o.valid.eq(holds), self.o.payload.eq(held)]
            with m.If(self.push):
                m.d.sync += [held.eq(self.result), holds.eq(1)]
            with m.Elif(taken):
                m.d.sync += holds.eq(0)
            return m
        # One place more than results: the memory may be full before an output register that is empty for a cycle.
        width = Shape.cast(self.shape).width
        m.submodules.queue = queue = fifo.SyncFIFOBuffered(width=width, depth=self.places + 1)
        m.d.comb += [
            queue.w_en.eq(self.push),
            queue.w_data.eq(self.result),
            queue.r_en.eq(self.o.ready),
            self.o.valid.eq(queue.r_rdy),
            self.o.payload.eq(queue.r_data),
        ]
        return m
