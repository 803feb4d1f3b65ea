"""The open window of a cache along time, read row by row beside everything else."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.control import HeadStatus, SequenceState
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.result_queue import ResultQueue
from kvant.hw.kvcache.window_buffer import WindowBuffer
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.parameters import check_integer


class StagedRequest(data.StructLayout):
    """A row of the open window to read.

    Members
    -------
    row : 16
        0 is the window's first row.
    head : 8
    """

    def __init__(self):
        super().__init__({"row": 16, "head": 8})


def staged_output(p: CacheParameters) -> data.StructLayout:
    """Payload of the port of staged rows: a transfer of a row, the scales of its channels, the end of the row."""
    return data.StructLayout(
        {"data": data.ArrayLayout(signed(8), p.lanes), "user": data.ArrayLayout(16, p.lanes), "last": 1}
    )


class StagedReader(wiring.Component):
    """Answers requests for rows of open windows, one after the other, in cycles in which nobody else reads.

    A request sees every row that was taken before it. While it waits, the window that it asks for may become full;
    the encoder then holds that window back (`hold_window`), so that its rows stay, and a row that starts a sequence of
    the head waits (`hold`). The elements of a row that the window does
    not have are 0; of a head without a staged row in its sequence the scales are 0 too, and `error` rises.

    Parameters
    ----------
    p : CacheParameters
    ring_rows : int
    drain : int
        Cycles after which a row that was taken can be read.

    Members
    -------
    request : in stream of {data: `StagedRequest`}
    status_head, status : out, in
        To and from `WindowControl`, which answers one cycle later.
    drained : in
        No row is on its way to the buffer.
    hold, hold_head : out
        A request is under way.
    hold_window, hold_base : out
        The window of the head that begins at this row of the ring is still to be read.
    free : in
        This cycle may be used to read.
    read, read_address : out
        To `WindowBuffer`, a row; only while `free`.
    scale_read, scale_address : out
        To `ChannelScales`.
    q, scales : in
        Their answers.
    o : out stream
        See `staged_output`. A transfer per cycle, if the cycles are free.
    error : out
        One cycle: a request for a head that has no sequence, or whose prefill is still scanned.
    """

    def __init__(self, p: CacheParameters, ring_rows: int, drain: int):
        self.p = p
        self.ring_rows = ring_rows
        self.drain = check_integer("drain", drain, 1)
        self.words = p.heads * p.row_transfers
        super().__init__(
            {
                "request": In(stream.Signature(data.StructLayout({"data": StagedRequest()}))),
                "status_head": Out(8),
                "status": In(HeadStatus(p, ring_rows)),
                "drained": In(1),
                "hold": Out(1),
                "hold_head": Out(8),
                "hold_window": Out(1),
                "hold_base": Out(range(ring_rows)),
                "free": In(1),
                "read": Out(1),
                "read_address": Out(range(max(2, self.words * ring_rows))),
                "scale_read": Out(1),
                "scale_address": Out(range(max(2, self.words))),
                "q": In(data.ArrayLayout(signed(8), p.lanes)),
                "scales": In(data.ArrayLayout(16, p.lanes)),
                "o": Out(stream.Signature(staged_output(p))),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        row, head, ring_row = Signal(16), Signal(8), Signal(range(self.ring_rows))
        missing, closed = Signal(), Signal()  # no such row; no such window
        rest = Signal(range(self.drain + 1))
        word = Signal(range(max(2, p.row_transfers)))
        word_end = word == p.row_transfers - 1
        read = Signal()  # or, of a missing row, the cycle in which it would be read

        latency = WindowBuffer.read_latency
        shape = data.StructLayout({"q": self.q.shape(), "scales": self.scales.shape()})
        m.submodules.queue = queue = ResultQueue(shape, 1, ResultQueue.depth_for(latency, 1))
        m.d.comb += [
            self.hold_head.eq(head),
            self.status_head.eq(self.request.payload.data.head),
            self.read.eq(read & ~missing),
            self.scale_read.eq(read & ~closed),
            queue.enter.eq(read),
            queue.tag.eq(word_end),
        ]
        with m.If(rest != 0):
            m.d.sync += rest.eq(rest - 1)
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += [
                    self.request.ready.eq(1),
                    self.hold.eq(self.request.valid),
                    self.hold_head.eq(self.request.payload.data.head),
                ]
                m.d.sync += [row.eq(self.request.payload.data.row), head.eq(self.request.payload.data.head)]
                m.d.sync += [rest.eq(self.drain), word.eq(0)]
                with m.If(self.request.valid):
                    m.next = "FIND"
            with m.State("FIND"):
                # The rows of a window do not wrap round more than once.
                # A window that becomes full in these cycles is not with the encoder before they are over.
                m.d.comb += self.hold.eq(1)
                place = self.status.base + row[: len(self.status.staged)]
                m.d.sync += [
                    self.hold_base.eq(self.status.base),
                    missing.eq(row >= self.status.staged),
                    closed.eq(self.status.state != SequenceState.OPEN),
                    ring_row.eq(Mux(place >= self.ring_rows, place - self.ring_rows, place)),
                ]
                m.next = "PLACE"
            with m.State("PLACE"):
                m.d.comb += [self.hold.eq(1), self.hold_window.eq(1), self.error.eq(closed)]
                m.d.sync += [
                    self.scale_address.eq(head * p.row_transfers),
                    self.read_address.eq(head * (p.row_transfers * self.ring_rows) + ring_row),
                ]
                m.next = "DRAIN"
            with m.State("DRAIN"):
                m.d.comb += [self.hold.eq(1), self.hold_window.eq(1)]
                with m.If((rest == 0) | self.drained):
                    m.next = "READ"
            with m.State("READ"):
                m.d.comb += [self.hold.eq(1), self.hold_window.eq(1), read.eq(self.free & queue.room)]
                with m.If(read):
                    m.d.sync += [
                        word.eq(word + 1),
                        self.scale_address.eq(self.scale_address + 1),
                        self.read_address.eq(self.read_address + self.ring_rows),
                    ]
                    with m.If(word_end):
                        m.next = "IDLE"
        # The scales answer first.
        valid, no_row, no_scales = Signal(latency), Signal(latency), Signal(latency)
        m.d.sync += [
            valid.eq(Cat(read, valid)),
            no_row.eq(Cat(missing, no_row)),
            no_scales.eq(Cat(closed, no_scales)),
        ]
        scales = Pipeline(m).register(self.scales.as_value(), "scales", cycles=latency - 1)
        tail_lanes = p.head_dim - (p.row_transfers - 1) * p.lanes
        result, out = queue.result, self.o.payload
        for lane in range(p.lanes):
            m.d.comb += [
                result.q[lane].eq(Mux(no_row[-1], 0, self.q[lane])),
                result.scales[lane].eq(Mux(no_scales[-1], 0, scales.word_select(lane, 16))),
            ]
            surplus = queue.o.payload.tag if lane >= tail_lanes else Const(0)
            m.d.comb += [
                out.data[lane].eq(Mux(surplus, 0, queue.o.payload.result.q[lane])),
                out.user[lane].eq(Mux(surplus, 0, queue.o.payload.result.scales[lane])),
            ]
        m.d.comb += [
            queue.push.eq(valid[-1]),
            out.last.eq(queue.o.payload.tag),
            self.o.valid.eq(queue.o.valid),
            queue.o.ready.eq(self.o.ready),
        ]
        return m
