"""Sinks: the first tokens of a sequence, which stay INT8 groups along the head."""

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.parameters import CacheParameters, ceil_div
from kvant.hw.numeric.int8_quantizer import Int8Quantizer, quantizer_input
from kvant.hw.parameters import check_integer


def sink_output(p: CacheParameters) -> data.StructLayout:
    """Payload of the sink port: a transfer of a row, the scale of its group and its head, the end of the row."""
    user = data.StructLayout({"scale": 16, "head": 8})
    return data.StructLayout({"data": data.ArrayLayout(signed(8), p.lanes), "user": user, "last": 1})


class SinkRows(wiring.Component):
    """Quantises rows along the head and sends them out with their head.

    Rows come from a pipeline that cannot wait. So room for a transfer is reserved before it enters that pipeline.

    Parameters
    ----------
    p : CacheParameters
    delay : int
        Most cycles from `reserve` to the transfer.

    Members
    -------
    room : out
        There is room for one more transfer.
    reserve, first, head : in
        A transfer of a sink's row enters the pipeline, the first of its row.
    valid, elements : in
        fp16 elements of the oldest transfer that has room, finite; those in surplus lanes of a last one are ignored.
    o : out stream
        See `sink_output`.
    idle : out
        Nothing is under way.
    """

    def __init__(self, p: CacheParameters, delay: int):
        self.p = p
        # A transfer leaves two cycles after it has come, if nothing waits; the room is seen one cycle later.
        self.places = 1 << (check_integer("delay", delay, 0) + 4).bit_length()
        self._quantizer = Int8Quantizer(p.lanes, p.group)
        super().__init__(
            {
                "room": Out(1),
                "reserve": In(1),
                "first": In(1),
                "head": In(8),
                "valid": In(1),
                "elements": In(data.ArrayLayout(16, p.lanes)),
                "o": Out(stream.Signature(sink_output(p))),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.quantizer = quantizer = self._quantizer
        m.submodules.queue = queue = fifo.SyncFIFOBuffered(width=16 * p.lanes, depth=self.places)
        # A row's head waits until the row has left; as many rows are under way as transfers have places here and in
        # the quantiser.
        rows = ceil_div(self.places + quantizer.depth + quantizer.latency, p.row_transfers) + 2
        m.submodules.heads = heads = fifo.SyncFIFOBuffered(width=8, depth=rows)

        reserved = Signal(range(self.places + 1))
        next_reserved = Signal.like(reserved)
        leaves = quantizer.i.valid & quantizer.i.ready
        m.d.comb += next_reserved.eq(reserved + self.reserve - leaves)
        m.d.sync += [
            reserved.eq(next_reserved),
            self.room.eq((next_reserved != self.places) & (heads.level < rows - 1)),
        ]

        transfer, group_transfer = Signal(range(max(2, p.row_transfers))), Signal(range(max(2, p.group_transfers)))
        row_end, group_end = Signal(), Signal()
        tail_lanes = p.head_dim - (p.row_transfers - 1) * p.lanes
        group = Signal(quantizer_input(p.lanes))
        m.d.comb += [
            queue.w_en.eq(self.valid),
            queue.w_data.eq(self.elements),
            heads.w_en.eq(self.reserve & self.first),
            heads.w_data.eq(self.head),
            row_end.eq(transfer == p.row_transfers - 1),
            group_end.eq(row_end | (group_transfer == p.group_transfers - 1)),
            group.data.eq(queue.r_data),
            group.keep.eq(Mux(row_end, tail_lanes, p.lanes)),
            group.last.eq(group_end),
            quantizer.i.payload.eq(group),
            quantizer.i.valid.eq(queue.r_rdy),
            queue.r_en.eq(quantizer.i.ready),
        ]
        with m.If(leaves):
            m.d.sync += [
                transfer.eq(Mux(row_end, 0, transfer + 1)),
                group_transfer.eq(Mux(group_end, 0, group_transfer + 1)),
            ]

        left = Signal(range(max(2, p.row_transfers)))
        m.d.comb += [
            self.o.valid.eq(quantizer.o.valid & heads.r_rdy),
            quantizer.o.ready.eq(self.o.ready & heads.r_rdy),
            self.o.payload.data.eq(quantizer.o.payload.q),
            self.o.payload.user.scale.eq(quantizer.o.payload.scale),
            self.o.payload.user.head.eq(heads.r_data),
            self.o.payload.last.eq(left == p.row_transfers - 1),
            heads.r_en.eq(self.o.valid & self.o.ready & self.o.payload.last),
            self.idle.eq((reserved == 0) & ~heads.r_rdy & (heads.level == 0)),
        ]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += left.eq(Mux(self.o.payload.last, 0, left + 1))
        return m
