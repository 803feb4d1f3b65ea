"""Which row of a product-quantised cache goes where, and which rows are coded when."""

from amaranth.hdl import Array, Cat, Module, Mux, Signal
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import check_integer
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.ring_layouts import RingShape, RowUser


class ContextView(data.StructLayout):
    """The state of a context as others see it.

    Members
    -------
    known, open : 1
        The head exists; and has a sequence.
    sinks : 0 .. p.sinks
        Rows among the sinks.
    rows : 0 .. tokens + ring_rows
        Rows of the history that were taken.
    slot : 0 .. ring_rows - 1
        Where the next one goes.
    queued, coded : 0 .. tokens
        See `RingStatus`.
    entering : 1
        A row of the history has begun and is not complete.
    """

    def __init__(self, p: PqParameters, shape: RingShape):
        super().__init__(
            {
                "known": 1,
                "open": 1,
                "sinks": range(p.sinks + 1),
                "rows": range(p.tokens + shape.ring_rows + 1),
                "slot": range(shape.ring_rows),
                "queued": range(p.tokens + 1),
                "coded": range(p.tokens + 1),
                "entering": 1,
            }
        )


class QueuedBatch(data.StructLayout):
    """A batch on its way from the rows to memory.

    Members
    -------
    store, head
    count, first
        See `EncodeJob`.
    slot : 0 .. ring_rows - 1
        Where its first row lies.
    """

    def __init__(self, p: PqParameters, shape: RingShape):
        super().__init__(
            {
                "store": 1,
                "head": 8,
                "count": range(p.batch_tokens + 1),
                "first": range(max(2, p.tokens)),
                "slot": range(shape.ring_rows),
            }
        )


class BatchQueue(wiring.Component):
    """Batches in the order of the rows that completed them: first to be sent, then to become complete in memory.

    Parameters
    ----------
    p : PqParameters
    shape : RingShape
    delay : int
        Cycles after `push` before which a batch is not offered.

    Members
    -------
    push, batch : in
        Only while `room`.
    room : out
        A register, which knows of a push two cycles later.
    next, next_valid, sent : out, out, in
        The oldest batch that is not sent; it is sent now.
    coded : in
        The oldest batch that is sent is complete in memory. Any number of pulses, one per cycle.
    oldest, complete, take : out, out, in
        The oldest batch, when it is complete; it is forgotten now.
    waiting : out
        There is a batch.
    error : out
        One cycle: `coded` without a batch that is sent; it is ignored.
    """

    def __init__(self, p: PqParameters, shape: RingShape, delay: int):
        self.shape = shape
        self.delay = check_integer("delay", delay, 1)
        batch = QueuedBatch(p, shape)
        super().__init__(
            {
                "push": In(1),
                "batch": In(batch),
                "room": Out(1),
                "next": Out(batch),
                "next_valid": Out(1),
                "sent": In(1),
                "coded": In(1),
                "oldest": Out(batch),
                "complete": Out(1),
                "take": In(1),
                "waiting": Out(1),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        jobs = self.shape.jobs
        m = Module()
        m.submodules.batches = batches = memory.Memory(shape=self.batch.shape(), depth=jobs, init=[])
        write = batches.write_port()
        send, finish = batches.read_port(domain="comb"), batches.read_port(domain="comb")
        settled = Signal(self.delay)
        m.d.sync += settled.eq(Cat(self.push, settled))
        legal = Signal()

        def count(name, up, down):
            number = Signal(range(jobs + 1), name=name)
            m.d.sync += number.eq(number + up - down)
            return number

        held = count("held", self.push, self.take)
        to_send = count("to_send", settled[-1], self.sent)
        at_work = count("at_work", self.sent, legal)
        done = count("done", legal, self.take)
        for port, step in ((write, self.push), (send, self.sent), (finish, self.take)):
            with m.If(step):
                m.d.sync += port.addr.eq(Mux(port.addr == jobs - 1, 0, port.addr + 1))
        m.d.comb += [
            write.data.eq(self.batch),
            write.en.eq(self.push),
            self.next.eq(send.data),
            self.next_valid.eq(to_send != 0),
            legal.eq(self.coded & (at_work != 0)),
            self.error.eq(self.coded & (at_work == 0)),
            self.oldest.eq(finish.data),
            self.complete.eq(done != 0),
            self.waiting.eq(held != 0),
        ]
        m.d.sync += self.room.eq(held != jobs)
        return m


class RingControl(wiring.Component):
    """Admits rows, one at a time, says where each goes, and makes batches of them.

    The tokens of a sequence after its first `sinks` are its *history*. Rows of the history lie in the ring of their
    context, row h in slot ``h mod ring_rows``. Everything before `base` (a multiple of `chunk_tokens`) is coded for good
    or about to be. A row makes a batch when

    - ``recent + batch_tokens`` rows from `base` on are there: of the oldest `batch_tokens` of them; or
    - it asks to `flush` and a row older than the `recent` newest is in no batch yet: of all these from `base` on.

    `base` then advances by the whole chunks of the batch. The rows of a chunk that is not full stay: the next batch
    codes them again. Which batches there are depends on the rows alone, not on the time.

    A slot is free when its row's batch, whole chunks of it, is complete in memory. A row waits while

    - there is no free slot for it;
    - it makes a batch and that would exceed `tokens` coded tokens (`full`), or all places of batches are taken;
    - it starts a sequence and a batch of the context's former one is under way;
    - a reader holds its slot, or its context's sequence (`hold_slot`, `hold_sequence`), or all rows (`hold`).

    A row that breaks the order is dropped and raises `error`: of a head that does not exist, or without a start where
    there is no sequence.

    A row takes ``row_transfers + 3`` cycles. `view` answers one cycle after its head.

    Parameters
    ----------
    p : PqParameters
    shape : RingShape
    delay : int
        Cycles after a row's last transfer from which on it can be read.

    Members
    -------
    offered, user, ready : in, in, out
        A transfer at the port, and that it may be taken. `ready` does not depend on them in the same cycle.
    enter : out
        It is taken and belongs to a row that is kept.
    row, transfer, row_end : out
        The row's place in the memory; number of the transfer; whether it is the row's last.
    store, head : out
        Of the row.
    hold : in
        No row may begin: with `end` and in the cycle after it; and until the cycle in which `hold_slot` and
        `hold_sequence` are known, which are looked at one cycle later.
    read_store, read_head, hold_slot, hold_sequence : in
        A reader: it still needs the row that the next one of its context would overwrite; or the sequence.
    begins : out
        A row of the history of that context begins in this cycle.
    end, end_head : in
        The sequences of the head end in both stores. A row that has begun still belongs to its sequence.
    look_store, look_head, view : in, in, out
        Two look-ups: what was known at the beginning of the cycle before.
    batch, batch_valid, batch_sent : out, out, in
        The next batch to send, whose rows can be read; it was sent.
    coded : in
        The oldest batch is complete in memory.
    waiting : out
        Batches are under way.
    stalled : out
        The transfer at the port waits for something else than its turn.
    full : out
        Registered: it waits because of `tokens`.
    error : out
        One cycle: a row is dropped, or `coded` without a batch.
    """

    LOOKS = 2

    def __init__(self, p: PqParameters, shape: RingShape, delay: int):
        self.p = p
        self.shape = shape
        self.queue = BatchQueue(p, shape, delay)
        view = ContextView(p, shape)
        super().__init__(
            {
                "offered": In(1),
                "user": In(RowUser()),
                "ready": Out(1),
                "enter": Out(1),
                "row": Out(range(shape.contexts * shape.context_rows)),
                "transfer": Out(range(max(2, p.row_transfers))),
                "row_end": Out(1),
                "store": Out(1),
                "head": Out(8),
                "hold": In(1),
                "read_store": In(1),
                "read_head": In(8),
                "hold_slot": In(1),
                "hold_sequence": In(1),
                "begins": Out(1),
                "end": In(1),
                "end_head": In(8),
                "look_store": In(1).array(self.LOOKS),
                "look_head": In(8).array(self.LOOKS),
                "view": Out(view).array(self.LOOKS),
                "batch": Out(QueuedBatch(p, shape)),
                "batch_valid": Out(1),
                "batch_sent": In(1),
                "coded": In(1),
                "waiting": Out(1),
                "stalled": Out(1),
                "full": Out(1),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p, shape = self.p, self.shape
        ring_rows, window = shape.ring_rows, p.recent + p.batch_tokens
        m = Module()
        m.submodules.queue = queue = self.queue
        head_bits = (p.heads - 1).bit_length()
        contexts = 2 << head_bits

        def context_of(head, store):
            return Cat(head[:head_bits], store)

        # What a start does not set is never read, so the memories need no reset. One has all that rows change, the
        # other all that batches change when they are complete; so each has one writer.
        row_state = data.StructLayout(
            {
                "sinks": range(p.sinks + 1),
                "slot": range(ring_rows),  # of the next row
                "base": range(p.tokens + 1),
                "base_slot": range(ring_rows),
                "rows": range(window + 1),  # from `base` on
                "queued": range(p.tokens + 1),
            }
        )
        base_bits = ring_rows.bit_length()
        code_state = data.StructLayout({"base": base_bits, "coded": range(p.tokens + 1)})
        m.submodules.row_states = row_states = memory.Memory(shape=row_state, depth=contexts, init=[])
        m.submodules.code_states = code_states = memory.Memory(shape=code_state, depth=contexts, init=[])
        row_write, code_write = row_states.write_port(), code_states.write_port()
        row_read, code_read = row_states.read_port(domain="comb"), code_states.read_port(domain="comb")
        opened = Array(Signal(name=f"open_{number}") for number in range(contexts))
        used = Array(Signal(name=f"used_{number}") for number in range(contexts))

        # The row at the port, known from the cycle LOOK on.
        context = Signal(range(contexts))
        start, flush, known = Signal(), Signal(), Signal()
        old, now, after = Signal(row_state), Signal(row_state), Signal(row_state)
        done = Signal(code_state)
        sink, makes_batch, exceeds = Signal(), Signal(), Signal()
        count, rows = Signal(range(p.batch_tokens + 1)), Signal(range(window + 1))
        batch = Signal(QueuedBatch(p, shape))
        m.d.comb += [
            row_read.addr.eq(context_of(self.user.head, self.user.store)),
            code_read.addr.eq(context),
            now.eq(Mux(start, 0, old)),
        ]
        m.d.sync += done.eq(code_read.data)

        # Conditions that change while the row waits; they may look a little back, which makes it wait longer at most.
        free, matched = Signal(), Signal()
        held = Signal(base_bits)
        m.d.comb += held.eq(old.rows + (old.base[:base_bits] - done.base)[:base_bits])
        m.d.sync += [free.eq(held != ring_rows), matched.eq(done.coded == old.queued)]

        legal, granted, waiting_row = Signal(), Signal(), Signal()
        first, transfer_end, dropping, dropped, take = (Signal() for _ in range(5))
        begin, commit = Signal(), Signal()
        same = Signal()
        # These are looked at one cycle late. It makes no difference: after an end, and before a reader holds anything,
        # no row may begin for long enough (`hold`); and a row that begins changes them for the next one at most.
        is_open, was_used, slot_held, sequence_held = Signal(), Signal(), Signal(), Signal()
        m.d.sync += [
            is_open.eq(opened[context]),
            was_used.eq(used[context]),
            slot_held.eq(same & self.hold_slot),
            sequence_held.eq(same & self.hold_sequence),
        ]
        m.d.comb += [
            same.eq((self.store == self.read_store) & (self.head == self.read_head)),
            legal.eq(known & (start | is_open)),
            transfer_end.eq(self.transfer == p.row_transfers - 1),
            self.row_end.eq(transfer_end),
            dropped.eq(Mux(first, ~legal, dropping)),
            take.eq(self.offered & self.ready),
            begin.eq(take & first & ~dropped),
            commit.eq(take & transfer_end & ~dropped),
            self.enter.eq(take & ~dropped),
            self.begins.eq(begin & ~sink & same),
            self.error.eq((take & first & dropped) | queue.error),
        ]
        with m.If(start):
            m.d.comb += waiting_row.eq((was_used & ~matched) | sequence_held)
        with m.Else():
            m.d.comb += waiting_row.eq(~sink & (~free | slot_held))
        m.d.comb += granted.eq(~self.hold & (~legal | ~(waiting_row | (makes_batch & (exceeds | ~queue.room)))))

        dense = Signal(range(shape.contexts))
        with m.FSM():
            with m.State("LOOK"):
                m.d.sync += [
                    self.store.eq(self.user.store),
                    self.head.eq(self.user.head),
                    context.eq(context_of(self.user.head, self.user.store)),
                    start.eq(self.user.start),
                    flush.eq(self.user.flush),
                    known.eq(self.user.head < p.heads),
                    old.eq(row_read.data),
                    dense.eq(self.user.head + Mux(self.user.store, p.heads, 0)),
                ]
                with m.If(self.offered):
                    m.next = "COUNT"
            with m.State("COUNT"):
                # Rows from `base` on with this one, and how many of them are older than the newest `recent`.
                total = now.rows + 1
                older = total - p.recent
                place = Mux(now.sinks != p.sinks, ring_rows + now.sinks, now.slot)
                m.d.sync += [
                    sink.eq(now.sinks != p.sinks),
                    rows.eq(total),
                    count.eq(older),
                    # Every row of the history adds one, so that a flush always finds one that is in no batch.
                    makes_batch.eq((now.sinks == p.sinks) & Mux(flush, total > p.recent, total == window)),
                    self.row.eq(dense * shape.context_rows + place),
                ]
                m.next = "PLAN"
            with m.State("PLAN"):
                whole = Signal(range(p.batch_tokens + 1))
                next_slot = Mux(now.slot == ring_rows - 1, 0, now.slot + 1)
                next_base_slot = now.base_slot + whole
                m.d.comb += whole.eq(Mux(makes_batch, count & ~(p.chunk_tokens - 1), 0))
                m.d.sync += [
                    exceeds.eq(now.base + count > p.tokens),
                    batch.store.eq(self.store),
                    batch.head.eq(self.head),
                    batch.count.eq(count),
                    batch.first.eq(now.base),
                    batch.slot.eq(now.base_slot),
                    after.eq(now),
                ]
                with m.If(sink):
                    m.d.sync += after.sinks.eq(now.sinks + 1)
                with m.Else():
                    m.d.sync += [
                        after.slot.eq(next_slot),
                        after.base.eq(now.base + whole),
                        after.base_slot.eq(
                            Mux(next_base_slot >= ring_rows, next_base_slot - ring_rows, next_base_slot)
                        ),
                        after.rows.eq(rows - whole),
                    ]
                    with m.If(makes_batch):
                        m.d.sync += after.queued.eq(now.base + count)
                m.d.sync += first.eq(1)
                m.next = "MOVE"
            with m.State("MOVE"):
                m.d.comb += [self.ready.eq(~first | granted), self.stalled.eq(self.offered & ~self.ready)]
                with m.If(take):
                    m.d.sync += [first.eq(0), dropping.eq(dropped)]
                    m.d.sync += self.transfer.eq(Mux(transfer_end, 0, self.transfer + 1))
                    with m.If(transfer_end):
                        m.next = "LOOK"
        m.d.sync += self.full.eq(self.stalled & legal & makes_batch & exceeds)

        # A start empties the context at once; the row counts when it is complete.
        starts = Signal()
        m.d.comb += [
            starts.eq(begin & start),
            row_write.addr.eq(context),
            row_write.data.eq(Mux(commit, after, 0)),
            row_write.en.eq(commit | starts),
            queue.push.eq(commit & makes_batch),
            queue.batch.eq(batch),
            # Batches that are complete wait for a start, if need be.
            queue.take.eq(queue.complete & ~starts),
            queue.coded.eq(self.coded),
            queue.sent.eq(self.batch_sent),
            self.batch.eq(queue.next),
            self.batch_valid.eq(queue.next_valid),
            self.waiting.eq(queue.waiting),
        ]
        finished = queue.oldest
        coded = Signal(code_state)
        m.d.comb += [
            coded.coded.eq(finished.first + finished.count),
            coded.base.eq(finished.first + (finished.count & ~(p.chunk_tokens - 1))),
            code_write.addr.eq(Mux(starts, context, context_of(finished.head, finished.store))),
            code_write.data.eq(Mux(starts, 0, coded)),
            code_write.en.eq(starts | queue.take),
        ]
        for number in range(contexts):
            ends = self.end & ((self.end_head == number % (1 << head_bits)) if head_bits else (self.end_head == 0))
            with m.If(ends):
                m.d.sync += opened[number].eq(0)
            with m.Elif(starts & (context == number)):
                m.d.sync += [opened[number].eq(1), used[number].eq(1)]

        entering = Signal()
        m.d.comb += entering.eq((self.transfer != 0) & ~dropping & ~sink)
        for number in range(self.LOOKS):
            look_row, look_code = row_states.read_port(domain="comb"), code_states.read_port(domain="comb")
            store, head, view = self.look_store[number], self.look_head[number], self.view[number]
            place = context_of(head, store)
            m.d.comb += [look_row.addr.eq(place), look_code.addr.eq(place)]
            m.d.sync += [
                view.known.eq(head < p.heads),
                view.open.eq((head < p.heads) & opened[place]),
                view.sinks.eq(look_row.data.sinks),
                view.rows.eq(look_row.data.base + look_row.data.rows),
                view.slot.eq(look_row.data.slot),
                view.queued.eq(look_row.data.queued),
                view.coded.eq(look_code.data.coded),
                view.entering.eq(entering & (store == self.store) & (head == self.head)),
            ]
        return m
