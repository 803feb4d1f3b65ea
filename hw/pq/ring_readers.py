"""Who reads the rows of a product-quantised cache: batches for the encoder, and replays for the attention."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.layouts import replay_output
from kvant.hw.kvcache.result_queue import ResultQueue
from kvant.hw.parameters import check_integer
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.ring_control import ContextView, QueuedBatch
from kvant.hw.pq.ring_layouts import EncodeJob, ReplayRequest, RingShape, batch_rows
from kvant.hw.pq.row_store import RowStore
from kvant.hw.pq.row_walker import RowWalker


class BatchSender(wiring.Component):
    """Sends batches, one after the other: the job, then its rows.

    Parameters
    ----------
    p : PqParameters
    shape : RingShape

    Members
    -------
    batch, valid, sent : in, in, out
        The oldest batch that is not sent; its last word is read.
    scale_store, scale_head, scale : out, out, in
        Look-up of the codebook's scale, which answers one cycle later.
    want, address, free, word : out, out, in, in
        A word to read, which is read if `free`; it comes `RowStore.read_latency` cycles later.
    job : out stream of `EncodeJob`
    rows : out stream, see `batch_rows`
        A transfer per cycle, if the cycles are free.
    """

    def __init__(self, p: PqParameters, shape: RingShape):
        self.p = p
        self.shape = shape
        rows = batch_rows(p)
        super().__init__(
            {
                "batch": In(QueuedBatch(p, shape)),
                "valid": In(1),
                "sent": Out(1),
                "scale_store": Out(1),
                "scale_head": Out(8),
                "scale": In(16),
                "want": Out(1),
                "address": Out(range(max(2, shape.words))),
                "free": In(1),
                "word": In(data.ArrayLayout(16, p.lanes)),
                "job": Out(stream.Signature(EncodeJob(p))),
                "rows": Out(stream.Signature(rows)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.walker = walker = RowWalker(p, self.shape)
        latency = RowStore.read_latency
        m.submodules.queue = queue = ResultQueue(self.word.shape(), 1, ResultQueue.depth_for(latency, 1))
        batch = self.batch
        read, offered = Signal(), Signal(latency)
        m.d.comb += [
            self.scale_store.eq(batch.store),
            self.scale_head.eq(batch.head),
            self.job.payload.count.eq(batch.count),
            self.job.payload.scale.eq(self.scale),
            self.job.payload.store.eq(batch.store),
            self.job.payload.head.eq(batch.head),
            self.job.payload.first.eq(batch.first),
            walker.start.eq(self.job.valid & self.job.ready),
            walker.store.eq(batch.store),
            walker.head.eq(batch.head),
            walker.place.eq(batch.slot),
            walker.rows.eq(batch.count),
            self.want.eq(walker.valid & queue.room),
            self.address.eq(walker.address),
            read.eq(self.want & self.free),
            walker.step.eq(read),
            self.sent.eq(walker.done),
            queue.enter.eq(read),
            queue.tag.eq(walker.last),
            queue.push.eq(offered[-1]),
            queue.result.eq(self.word),
            self.rows.valid.eq(queue.o.valid),
            queue.o.ready.eq(self.rows.ready),
            self.rows.payload.data.eq(queue.o.payload.result),
            self.rows.payload.last.eq(queue.o.payload.tag),
        ]
        m.d.sync += offered.eq(Cat(read, offered))
        with m.FSM():
            with m.State("IDLE"):
                with m.If(self.valid):
                    m.next = "JOB"  # where the scale is known
            with m.State("JOB"):
                m.d.comb += self.job.valid.eq(1)
                with m.If(self.job.ready):
                    m.next = "ROWS"
            with m.State("ROWS"):
                with m.If(walker.done):
                    m.next = "IDLE"
        return m


class ReplayReader(wiring.Component):
    """Answers requests for the rows of a context that a reader does not take from coded memory.

    It answers for the rows that were complete when the request was taken, sinks first, then the history from the
    request's `history` on, oldest first, once as many tokens are coded. Later rows go on coming; only those that would
    overwrite a row that is still to be read wait. A request is legal if there is a sequence, `history` is at most the
    tokens that are coded or in batches, and less than `ring_rows` rows follow it. One that is not raises `error` and is
    answered as if there were no row.

    Parameters
    ----------
    p : PqParameters
    shape : RingShape
    delay : int
        Cycles after a row's last transfer from which on it can be read.

    Members
    -------
    running : in
        Requests may be taken.
    request : in stream of `ReplayRequest`
    store, head, view : out, out, in
        Of the request under way; the look-up's answer, one cycle later.
    hold, hold_slot, hold_sequence, begins : out, out, out, in
        To and from `RingControl`.
    want, address, free, word : out, out, in, in
        See `BatchSender`.
    o : out stream
        See `replay_output`. A transfer per cycle, if the cycles are free.
    busy : out
        A request is under way or its rows wait.
    error : out
        One cycle: the request is not legal.
    """

    def __init__(self, p: PqParameters, shape: RingShape, delay: int):
        self.p = p
        self.shape = shape
        self.delay = check_integer("delay", delay, 1)
        super().__init__(
            {
                "running": In(1),
                "request": In(stream.Signature(ReplayRequest(p))),
                "store": Out(1),
                "head": Out(8),
                "view": In(ContextView(p, shape)),
                **dict.fromkeys(["hold", "hold_slot", "hold_sequence"], Out(1)),
                "begins": In(1),
                "want": Out(1),
                "address": Out(range(max(2, shape.words))),
                "free": In(1),
                "word": In(data.ArrayLayout(16, p.lanes)),
                "o": Out(stream.Signature(replay_output(p))),
                "busy": Out(1),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p, shape, view = self.p, self.shape, self.view
        ring_rows = shape.ring_rows
        m = Module()
        m.submodules.walker = walker = RowWalker(p, shape)
        latency = RowStore.read_latency
        tag = data.StructLayout({"keep": range(p.lanes + 1), "group_last": 1, "last": 1, "final": 1, "empty": 1})
        depth = ResultQueue.depth_for(latency, 1)
        m.submodules.queue = queue = ResultQueue(self.word.shape(), tag, depth)

        history = Signal.like(self.request.payload.history)
        rest = Signal(range(self.delay + 1))
        sinks, rows, behind = Signal(range(p.sinks + 1)), Signal(range(ring_rows)), Signal(range(ring_rows + 1))
        slot, place = Signal(range(ring_rows)), Signal(range(ring_rows))
        legal, reached = Signal(), Signal()
        active, in_sinks, empty, read, row_read = (Signal() for _ in range(5))
        enter, entered, waiting = Signal(), Signal(latency), Signal(range(depth + 1))
        leaves = self.o.valid & self.o.ready

        following = view.rows - history
        start_place = slot - rows
        m.d.sync += [
            reached.eq(view.coded >= history),
            place.eq(Mux(start_place < 0, start_place + ring_rows, start_place)),
            entered.eq(Cat(enter, entered)),
            waiting.eq(waiting + enter - leaves),
        ]
        m.d.comb += [
            self.want.eq(walker.valid & queue.room),
            self.address.eq(walker.address),
            read.eq(self.want & self.free),
            walker.step.eq(read),
            row_read.eq(read & walker.last & ~in_sinks),
            walker.store.eq(self.store),
            walker.head.eq(self.head),
            walker.place.eq(Mux(in_sinks, ring_rows, place)),
            walker.rows.eq(Mux(in_sinks, sinks, rows)),
            enter.eq(read | (empty & queue.room)),
            queue.enter.eq(enter),
            queue.tag.keep.eq(Mux(empty, 0, walker.keep)),
            queue.tag.group_last.eq(empty | walker.group_last),
            queue.tag.last.eq(empty | walker.last),
            queue.tag.final.eq(empty | (walker.final & ~(in_sinks & (rows != 0)))),
            queue.tag.empty.eq(empty),
            queue.push.eq(entered[-1]),
            queue.result.eq(self.word),
            self.o.valid.eq(queue.o.valid),
            queue.o.ready.eq(self.o.ready),
            self.o.payload.keep.eq(queue.o.payload.tag.keep),
            self.o.payload.group_last.eq(queue.o.payload.tag.group_last),
            self.o.payload.last.eq(queue.o.payload.tag.last),
            self.o.payload.final.eq(queue.o.payload.tag.final),
            self.o.payload.empty.eq(queue.o.payload.tag.empty),
            *(
                self.o.payload.data[lane].eq(Mux(queue.o.payload.tag.empty, 0, queue.o.payload.result[lane]))
                for lane in range(p.lanes)
            ),
            self.hold_sequence.eq(active),
            self.hold_slot.eq(active & (behind == ring_rows)),
            self.busy.eq(active | (waiting != 0)),
        ]
        with m.If(rest != 0):
            m.d.sync += rest.eq(rest - 1)
        # Rows from the oldest that is still to be read to the newest, which may have just begun.
        with m.If(self.begins & ~row_read):
            m.d.sync += behind.eq(behind + 1)
        with m.If(row_read & ~self.begins):
            m.d.sync += behind.eq(behind - 1)
        with m.FSM() as fsm:
            with m.State("IDLE"):
                m.d.comb += self.request.ready.eq(self.running)
                m.d.sync += [
                    self.store.eq(self.request.payload.store),
                    self.head.eq(self.request.payload.head),
                    history.eq(self.request.payload.history),
                    rest.eq(self.delay),
                ]
                with m.If(self.request.valid & self.running):
                    m.next = "FIND"
            with m.State("FIND"):
                m.d.comb += self.hold.eq(1)
                m.next = "CHECK"
            with m.State("CHECK"):
                m.d.comb += self.hold.eq(1)
                m.d.sync += [
                    sinks.eq(view.sinks),
                    rows.eq(following),
                    slot.eq(view.slot),
                    behind.eq(following + view.entering),
                    legal.eq(view.known & view.open & (history <= view.queued) & (following < ring_rows)),
                ]
                m.next = "PLACE"
            with m.State("PLACE"):
                m.d.comb += self.hold.eq(1)  # `behind` is known from here on
                with m.If(legal):
                    m.next = "WAIT"
                with m.Else():
                    m.d.comb += self.error.eq(1)
                    m.d.sync += behind.eq(0)
                    m.next = "EMPTY"
            with m.State("WAIT"):
                with m.If((rest == 0) & reached):
                    with m.If(sinks != 0):
                        m.next = "START_SINKS"
                    with m.Elif(rows != 0):
                        m.next = "START_ROWS"
                    with m.Else():
                        m.next = "EMPTY"
            with m.State("START_SINKS"):
                m.d.comb += [in_sinks.eq(1), walker.start.eq(1)]
                m.next = "SINKS"
            with m.State("SINKS"):
                m.d.comb += in_sinks.eq(1)
                with m.If(walker.done):
                    m.next = "START_ROWS"
                    with m.If(rows == 0):
                        m.next = "IDLE"
            with m.State("START_ROWS"):
                m.d.comb += walker.start.eq(1)
                m.next = "ROWS"
            with m.State("ROWS"):
                with m.If(walker.done):
                    m.next = "IDLE"
            with m.State("EMPTY"):
                m.d.comb += empty.eq(1)
                with m.If(queue.room):
                    m.next = "IDLE"
        m.d.comb += active.eq(~fsm.ongoing("IDLE"))
        return m
