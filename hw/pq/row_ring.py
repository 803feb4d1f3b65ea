"""The newest rows and the sinks of a product-quantised cache, kept in fp16, and what is coded of them when."""

from amaranth.hdl import Cat, Module, Mux, Signal, Value
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.layouts import replay_output
from kvant.hw.kvcache.coefficient import TableEntryWrite
from kvant.hw.kvcache.layouts import Table, TableWrite
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.ring_control import RingControl
from kvant.hw.pq.ring_layouts import (
    EncodeJob,
    ReplayRequest,
    RingShape,
    RingStatus,
    batch_rows,
    row_input,
)
from kvant.hw.pq.ring_readers import BatchSender, ReplayReader
from kvant.hw.pq.row_store import RowStore


class CodebookScales(wiring.Component):
    """The fp16 scales of all codebooks, kept at reset.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    write : in
        Changes a scale; other kinds are ignored.
    store, head, scale : in, in, out
        Two look-ups, each answered one cycle later.
    """

    LOOKS = 2

    def __init__(self, p: PqParameters):
        self.p = p
        super().__init__(
            {
                "write": In(TableEntryWrite()),
                "store": In(1).array(self.LOOKS),
                "head": In(8).array(self.LOOKS),
                "scale": Out(16).array(self.LOOKS),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        head_bits = (p.heads - 1).bit_length()
        m.submodules.scales = scales = memory.Memory(shape=16, depth=2 << head_bits, init=[])
        write = scales.write_port()
        item = self.write.data
        values = item.kind == Table.CODEBOOK_V
        m.d.comb += [
            write.addr.eq(Cat(item.head[:head_bits], values)),
            write.data.eq(item.value),
            write.en.eq(self.write.valid & (values | (item.kind == Table.CODEBOOK_K)) & (item.head < p.heads)),
        ]
        for number in range(self.LOOKS):
            read = scales.read_port(domain="comb")
            m.d.comb += read.addr.eq(Cat(self.head[number][:head_bits], self.store[number]))
            m.d.sync += self.scale[number].eq(read.data)
        return m


class RowRing(wiring.Component):
    """Rows of keys and values on their way into codes.

    ::

        x ──> RingControl ──> RowStore ──┬──> BatchSender ───> encode_job, rows   (to the codebook engine)
                  ^                      └──> ReplayReader ──> row_out            (to the attention)
                  └── coded

    Every row stays as fp16 (centred, if it is a key and `centred`) in the ring of its head and store until its batch is
    complete in memory; the first `sinks` rows of a sequence stay beside the ring. Batches of `batch_tokens` rows go to
    the encoder when they are older than the `recent` newest rows, and behind a `flush` what is older at once. The ring
    has ``recent + 2 * batch_tokens`` rows, so the encoder has the time of a whole batch before a row waits for it.
    See `RingControl` for the rules, `ReplayReader` for what a replay gives.

    Batches go out, and become complete, in the order of the rows that made them, over all heads and stores.

    Parameters
    ----------
    p : PqParameters

    Attributes
    ----------
    ring_rows : int
        Rows of a ring.
    latency : int
        Cycles from a row's last transfer to the first cycle in which it may be read.
    row_cycles : int
        Cycles between the first transfers of rows back to back.

    Members
    -------
    x : in stream
        See `row_input`; `user` is read in a row's first transfer.
    cfg : in stream of {data: `TableWrite`}
        Means (only if `centred`), scales of codebooks, ends of sequences (both stores of a head). Means change while no
        row of the head is under way, scales while no batch of it is; both are kept at reset.
    encode_job : out stream of `EncodeJob`
    rows : out stream, see `batch_rows`
        The rows of each job, in order, after it.
    coded : in
        In this cycle: the oldest job is complete in memory.
    replay : in stream of `ReplayRequest`
    row_out : out stream, see `replay_output`
        The answer to each request, in order. It goes before `rows` at the memory.
    status_store, status_head, status : in, in, out
        What is known of a head and store, two cycles later.
    busy : out
        Rows, table writes, batches or replays are under way.
    nonfinite : out
        Sticky: NaN (taken as 0) or an infinity (taken as +-65504) at the port.
    error : out
        Sticky: a row of a head that does not exist, or without a start where there is no sequence (it is dropped); a
        table write of a kind, head or entry that does not exist; a replay that is not legal; `coded` without a job.
    full : out
        The row at the port waits because its batch would exceed `tokens` coded tokens. It does until the sequence ends.
    stall_cycles : out, 32
        Cycles in which a row at the port waited for anything but its turn; wraps.

    Raises
    ------
    ParameterError
        When a ring cannot be built of *p*.
    """

    def __init__(self, p: PqParameters):
        self.p = p
        self.shape = shape = RingShape(p)
        self._store = RowStore(p, shape)
        self.ring_rows = shape.ring_rows
        self.latency = self._store.latency
        self.row_cycles = p.row_transfers + 3
        super().__init__(
            {
                "x": In(stream.Signature(row_input(p))),
                "cfg": In(stream.Signature(data.StructLayout({"data": TableWrite()}))),
                "encode_job": Out(stream.Signature(EncodeJob(p))),
                "rows": Out(stream.Signature(batch_rows(p))),
                "coded": In(1),
                "replay": In(stream.Signature(ReplayRequest(p))),
                "row_out": Out(stream.Signature(replay_output(p))),
                "status_store": In(1),
                "status_head": In(8),
                "status": Out(RingStatus(p, shape)),
                **dict.fromkeys(["busy", "nonfinite", "error", "full"], Out(1)),
                "stall_cycles": Out(32),
            }
        )

    def elaborate(self, platform):
        p, shape = self.p, self.shape
        m = Module()
        m.submodules.control = control = RingControl(p, shape, self.latency)
        m.submodules.store = store = self._store
        m.submodules.sender = sender = BatchSender(p, shape)
        m.submodules.replayer = replayer = ReplayReader(p, shape, self.latency)
        m.submodules.scales = scales = CodebookScales(p)
        wiring.connect(m, sender.job, wiring.flipped(self.encode_job))
        wiring.connect(m, sender.rows, wiring.flipped(self.rows))
        wiring.connect(m, wiring.flipped(self.replay), replayer.request)
        wiring.connect(m, replayer.o, wiring.flipped(self.row_out))

        running = Signal()  # not in reset, where nothing may be taken
        m.d.sync += running.eq(1)
        write, refused, writing = self._tables(m, running, control)
        m.d.comb += [store.write.eq(write), scales.write.eq(write)]

        m.d.comb += [
            control.offered.eq(self.x.valid),
            control.user.eq(self.x.payload.user),
            self.x.ready.eq(control.ready),
            # A row comes after the table writes before it.
            control.hold.eq(writing | replayer.hold),
            control.read_store.eq(replayer.store),
            control.read_head.eq(replayer.head),
            control.hold_slot.eq(replayer.hold_slot),
            control.hold_sequence.eq(replayer.hold_sequence),
            control.coded.eq(self.coded),
            control.batch_sent.eq(sender.sent),
            store.enter.eq(control.enter),
            store.data.eq(self.x.payload.data),
            store.row.eq(control.row),
            store.transfer.eq(control.transfer),
            store.row_end.eq(control.row_end),
            store.store.eq(control.store),
            store.head.eq(control.head),
            sender.batch.eq(control.batch),
            sender.valid.eq(control.batch_valid),
            replayer.running.eq(running),
            replayer.begins.eq(control.begins),
        ]

        # Replays go first: a decode waits for them.
        m.d.comb += [
            replayer.free.eq(1),
            sender.free.eq(~replayer.want),
            store.read.eq(replayer.want | sender.want),
            store.address.eq(Mux(replayer.want, replayer.address, sender.address)),
            replayer.word.eq(store.word),
            sender.word.eq(store.word),
        ]

        for number, (look_store, look_head) in enumerate(
            [(replayer.store, replayer.head), (self.status_store, self.status_head)]
        ):
            m.d.comb += [control.look_store[number].eq(look_store), control.look_head[number].eq(look_head)]
        for number, (look_store, look_head) in enumerate(
            [(sender.scale_store, sender.scale_head), (self.status_store, self.status_head)]
        ):
            m.d.comb += [scales.store[number].eq(look_store), scales.head[number].eq(look_head)]
        m.d.comb += [replayer.view.eq(control.view[0]), sender.scale.eq(scales.scale[0])]
        view = control.view[1]
        m.d.sync += [self.status.eq(0), self.status.scale.eq(scales.scale[1])]
        with m.If(view.open):
            m.d.sync += [
                self.status.open.eq(1),
                self.status.tokens.eq(view.sinks + view.rows),
                self.status.coded.eq(view.coded),
                self.status.queued.eq(view.queued),
            ]

        m.d.comb += [
            self.full.eq(control.full),
            self.busy.eq(
                self.x.valid
                | (control.transfer != 0)
                | ~store.idle
                | control.waiting
                | replayer.busy
                | self.cfg.valid
                | writing
            ),
        ]
        with m.If(store.nonfinite):
            m.d.sync += self.nonfinite.eq(1)
        with m.If(control.error | replayer.error | refused):
            m.d.sync += self.error.eq(1)
        with m.If(control.stalled):
            m.d.sync += self.stall_cycles.eq(self.stall_cycles + 1)
        return m

    def _tables(self, m: Module, running: Value, control: RingControl) -> tuple[Value, Value, Value]:
        """The table write of the cycle before, whether it is refused, whether one is on its way to its memory."""
        p = self.p
        write, again = Signal(TableEntryWrite()), Signal()
        taken = self.cfg.valid & self.cfg.ready
        m.d.comb += self.cfg.ready.eq(running)
        m.d.sync += [write.valid.eq(taken), write.data.eq(self.cfg.payload.data), again.eq(write.valid)]
        item = write.data
        legal = Signal()
        with m.Switch(item.kind):
            if p.centred:
                with m.Case(Table.MEAN):
                    m.d.comb += legal.eq(item.index < p.head_dim)
            with m.Case(Table.CODEBOOK_K, Table.CODEBOOK_V, Table.END):
                m.d.comb += legal.eq(1)
        m.d.comb += [control.end.eq(write.valid & (item.kind == Table.END)), control.end_head.eq(item.head)]
        return write, write.valid & ~(legal & (item.head < p.heads)), write.valid | again
