"""The queue behind a pipeline that cannot be stalled."""

from amaranth.hdl import Module, Shape, Signal, Value
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer


class ResultQueue(wiring.Component):
    """Collects the results of a pipeline without stalls, whose items come out in the order in which they went in.

    An item enters only while there is room for its result, so the pipeline itself knows no flow control. What has to
    travel along an item waits here, instead of in every stage.

    Parameters
    ----------
    result_shape : shape-like
    tag_shape : shape-like
        Of what travels along; may have no bits.
    depth : int
        Items under way and waiting. To sustain an item every n cycles it takes ``ceil((latency + 3) / n) + 1`` places,
        `latency` being the cycles from `enter` to `push`: see `depth_for`.

    Members
    -------
    enter, tag : in
        An item goes into the pipeline; only while `room`.
    room : out
        A register, 0 in reset.
    push, result : in
        The result of the oldest item under way.
    o : out stream
        {result, tag}, two cycles after `push` at the earliest.
    """

    latency = 2

    def __init__(self, result_shape, tag_shape, depth: int):
        self.depth = check_integer("depth", depth, 1)
        self.tag_bits = Shape.cast(tag_shape).width
        super().__init__(
            {
                "enter": In(1),
                "tag": In(tag_shape),
                "room": Out(1),
                "push": In(1),
                "result": In(result_shape),
                "o": Out(stream.Signature(data.StructLayout({"result": result_shape, "tag": tag_shape}))),
            }
        )

    @staticmethod
    def depth_for(latency: int, interval: int) -> int:
        """Places that a pipeline of this latency takes to sustain an item every *interval* cycles."""
        return -(-(latency + 3) // interval) + 1

    def elaborate(self, platform):
        m = Module()
        # One place more than items: a full memory may stand before an output register that is empty for a cycle.
        result = Value.cast(self.result)
        m.submodules.results = results = fifo.SyncFIFOBuffered(width=len(result), depth=self.depth + 1)
        count = Signal(range(self.depth + 1))
        next_count = Signal.like(count)
        leave = Signal()
        m.d.comb += [
            leave.eq(self.o.valid & self.o.ready),
            next_count.eq(count + self.enter - leave),
            results.w_en.eq(self.push),
            results.w_data.eq(result),
            results.r_en.eq(self.o.ready),
            self.o.valid.eq(results.r_rdy),
            Value.cast(self.o.payload.result).eq(results.r_data),
        ]
        m.d.sync += [count.eq(next_count), self.room.eq(next_count != self.depth)]
        if self.tag_bits:
            m.submodules.tags = tags = fifo.SyncFIFOBuffered(width=self.tag_bits, depth=self.depth + 1)
            m.d.comb += [
                tags.w_en.eq(self.enter),
                tags.w_data.eq(Value.cast(self.tag)),
                tags.r_en.eq(leave),
                Value.cast(self.o.payload.tag).eq(tags.r_data),
            ]
        return m
