"""The cache along time: rows of values, or of centred keys, staged as INT8 and requantised window by window."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.channel_scales import ChannelScales, ChannelTable
from kvant.hw.kvcache.coefficient import TableEntryWrite
from kvant.hw.kvcache.control import RowPlan, WindowControl
from kvant.hw.kvcache.layouts import PageWrite, Table, TableWrite
from kvant.hw.kvcache.packer import META_BITS, BlockPacker
from kvant.hw.kvcache.parameters import TABLE_ENTRIES, THRESHOLDS, CacheParameters, ceil_div
from kvant.hw.kvcache.pending_windows import PendingWindows
from kvant.hw.kvcache.running import RunningSums
from kvant.hw.kvcache.sinks import SinkRows, sink_output
from kvant.hw.kvcache.staged_reader import StagedReader, StagedRequest, staged_output
from kvant.hw.kvcache.staging import StagingLane
from kvant.hw.kvcache.window_buffer import WindowBuffer
from kvant.hw.kvcache.window_encoder import ClosedWindow, GridChain, SumsReader, WindowEncoder
from kvant.hw.numeric.centring import Centring
from kvant.hw.numeric.delay_line import DelayLine
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.numeric.int8_quantizer import FP16_MAX
from kvant.hw.numeric.output_queue import OutputQueue
from kvant.hw.parameters import check_integer


def row_input(p: CacheParameters) -> data.StructLayout:
    """Payload of the port of rows; see `Requantizer`."""
    user = data.StructLayout({"start": 1, "scan": 1, "head": 8})
    return data.StructLayout({"data": data.ArrayLayout(16, p.lanes), "user": user})


class Timing:
    """Cycles of the pipeline from a transfer of a row to the buffer, and rows that hide what follows.

    Cycle 0 is the one after the transfer at the port.

    Attributes
    ----------
    scales : int
        The scale unit gets the transfer's address.
    elements : int
        The finite, centred elements are there.
    lanes : int
        Elements and scales enter the staging lanes.
    staged : int
        q enters the window buffer; its address entered the running sums a cycle before.
    written : int
        The encoder may read what the transfer left.
    first_read : int
        Of the transfer that completes a window: the encoder reads the window's first channel, if no other window is
        before it.
    ring_rows : int
        Rows of a head's ring: two windows, and as many as arrive until `first_read`.
    windows : int
        Windows that wait between the reader of their sums and the encoder: as many as become full meanwhile, at least.
    """

    _QUEUES = 10
    """From a window's completion to the reader of sums, from there to the chain of grids, and from a grid to the
    reading that it allows."""

    def __init__(self, p: CacheParameters):
        port_rule = Centring.latency if p.centred else 0
        self.elements = 1 + ChannelTable.latency + port_rule
        self.scales = self.elements - ChannelScales.magnitude_delay
        self.lanes = self.scales + ChannelScales.latency
        self.staged = self.lanes + StagingLane.latency
        self.written = self.staged + max(WindowBuffer.write_latency, RunningSums.latency - 1)
        self.first_read = self.written + self._QUEUES + SumsReader.latency + GridChain.latency_of(p)
        rows = 2 * p.group + ceil_div(self.first_read + 4, p.row_transfers)
        self.ring_rows = ceil_div(rows, p.lanes) * p.lanes
        self.windows = 3 + ceil_div(self.first_read, p.group * p.row_transfers)


class Requantizer(wiring.Component):
    """Two-phase, double-buffered cache along time.

    A sequence begins with a scan of its prefill, which fixes an INT8 scale for every channel; then all its rows are
    staged against these scales, sums growing row by row. When `group` rows are there, coefficient, scale and codes of
    every channel are made while the next window fills: rows that come back to back, a transfer per cycle, never wait,
    whatever their number. Rows of several heads may take turns.

    ::

        v ─> control ─> port rule, mean ─┬─> ChannelScales ─> StagingLane ─┬─> WindowBuffer ─> WindowEncoder ─> packer
                                         └─> SinkRows ─> sink              └─> RunningSums ──> GridChain ─┘

    Source: docs/numerics.md, "The V cache"; M-ANT (HPCA 2025, section V).

    Parameters
    ----------
    p : CacheParameters
        `group` and `lanes` powers of two.
    first_heads : int
        Closed windows of the heads below this number are encoded before all others.

    Attributes
    ----------
    timing : Timing
    packer : BlockPacker
        Whose `layout` describes the pages, one window each.

    Members
    -------
    cfg : in stream
        data : `TableWrite`
            Tables, the end of a head's sequence, and, unless the cache is centred, the position at which its next one
            goes on: a window that becomes full is right if all its rows come; rows that are repeated count no more as
            `saturated` and do not leave as sinks. Not while rows of that head are under way. What there is no place for
            raises `error`.
    v : in stream
        data : lanes * 16
            fp16 elements of a row, the earlier one in the lower lane; `p.row_transfers` transfers a row, surplus lanes
            of its last one are ignored.
        user : start 1, scan 1, head 8
            Read with a row's first transfer. `scan`: row of the first pass of the prefill; `start`: the first of these.
            Then the rows of the sequence follow, those of the prefill again. The scan of a sequence that goes on (see
            `cfg`) is one row, whose elements are the scales of the channels.
    sink : out stream
        See `sink_output`: the rows of the first `p.sinks` tokens.
    peek : in stream, staged : out stream
        Rows of the open window: see `StagedReader`.
    codes, meta : out stream of `PageWrite`
        See `BlockPacker`.
    busy : out
        A row or a window is under way.
    nonfinite : out
        Sticky: NaN or an infinity at the fp16 port.
    error : out
        Sticky: a row or table entry out of order or out of range, a reserved coefficient, a request for a window that
        is not open.
    full : out
        The row at the port waits because every page of its head is taken.
    saturated : out
        Elements that were clamped while they were staged, modulo 2^32.
    stall_cycles : out
        Cycles in which a row was offered and not taken, modulo 2^32.
    busy_cycles : out
        Cycles in which a row was taken in or a window encoded, modulo 2^32.

    Raises
    ------
    ParameterError
        When a cache cannot be built of *p*.
    """

    def __init__(self, p: CacheParameters, *, first_heads: int = 0):
        self.p = p.check_cache()
        self.first_heads = check_integer("first_heads", first_heads, 0, p.heads)
        self.timing = Timing(p)
        self.packer = BlockPacker(p, p.head_dim, along_head=False)
        super().__init__(
            {
                "cfg": In(stream.Signature(data.StructLayout({"data": TableWrite()}))),
                "v": In(stream.Signature(row_input(p))),
                "sink": Out(stream.Signature(sink_output(p))),
                "peek": In(stream.Signature(data.StructLayout({"data": StagedRequest()}))),
                "staged": Out(stream.Signature(staged_output(p))),
                "codes": Out(stream.Signature(PageWrite(self.packer.word_bits))),
                "meta": Out(stream.Signature(PageWrite(META_BITS))),
                "busy": Out(1),
                "nonfinite": Out(1),
                "error": Out(1),
                "full": Out(1),
                "saturated": Out(32),
                "stall_cycles": Out(32),
                "busy_cycles": Out(32),
            }
        )

    def elaborate(self, platform):
        p, timing = self.p, self.timing
        ring_rows = timing.ring_rows
        m = Module()
        register = Pipeline(m).register
        pending_limit = ring_rows // p.group
        slots = 1 << max(1, (pending_limit - 1).bit_length())
        words = p.heads * p.row_transfers
        m.submodules.control = control = WindowControl(p, ring_rows)
        m.submodules.scales = scales = ChannelScales(p, looks=2)
        m.submodules.sums = sums = RunningSums(p, slots)
        m.submodules.buffer = buffer = WindowBuffer(p, ring_rows)
        m.submodules.reader = reader = SumsReader(p, slots)
        m.submodules.chain = chain = GridChain(p)
        m.submodules.encoder = encoder = WindowEncoder(p, ring_rows)
        m.submodules.packer = packer = self.packer
        m.submodules.peeks = peeks = StagedReader(p, ring_rows, timing.written + 2)
        errors = [control.error, encoder.error, peeks.error]

        # Table port
        write = Signal(TableEntryWrite())
        started = Signal()  # low in reset, in which nothing may be taken
        m.d.sync += started.eq(1)
        ended, resumed, misplaced = self._tables(m, write, started)
        errors.append(misplaced)
        m.d.comb += [
            control.end.eq(ended),
            control.end_head.eq(write.data.head),
            control.resume.eq(resumed),
            control.resume_head.eq(write.data.head),
            control.position.eq(Cat(write.data.value, write.data.index)),
            control.repeats.eq(write.data.kind == Table.WINDOW),
            scales.write.eq(write),
            chain.write.eq(write),
        ]

        # Port of rows. Only a row's first transfer may have to wait for more than the sinks.
        in_row, take = Signal(), Signal()
        word = Signal(range(max(2, p.row_transfers)))
        held_plan, plan = Signal(RowPlan(p, ring_rows)), Signal(RowPlan(p, ring_rows))
        user = self.v.payload.user
        sink_row, sink_room, held_back = Signal(), Signal(init=1), Signal()
        row_end = word == p.row_transfers - 1
        m.d.comb += [
            control.request.start.eq(user.start),
            control.request.scan.eq(user.scan),
            control.request.head.eq(user.head),
            control.offered.eq(started & self.v.valid & ~in_row),
            control.take.eq(control.offered & take),
            plan.eq(Mux(in_row, held_plan, control.plan)),
            sink_row.eq(plan.sink & ~plan.scan & ~plan.drop & ~plan.repeated),
            # A row that is still to be read must not be overwritten by the next sequence.
            held_back.eq(peeks.hold & user.start & (user.head == peeks.hold_head)),
            self.v.ready.eq(started & (in_row | (control.granted & ~held_back)) & (sink_room | ~sink_row)),
            take.eq(self.v.valid & self.v.ready),
            self.full.eq(control.full),
        ]
        with m.If(take):
            m.d.sync += [in_row.eq(~row_end), word.eq(Mux(row_end, 0, word + 1))]
            with m.If(~in_row):
                m.d.sync += held_plan.eq(control.plan)
        with m.If(self.v.valid & ~self.v.ready & started):
            m.d.sync += self.stall_cycles.eq(self.stall_cycles + 1)

        # Closed windows wait here until their last row has arrived in the buffer.
        closed = Signal(ClosedWindow(ring_rows))
        m.submodules.pending = pending = PendingWindows(p, ring_rows, timing.written + 2, first_heads=self.first_heads)
        m.d.comb += [
            closed.head.eq(plan.head),
            closed.base.eq(plan.base),
            closed.page.eq(plan.page),
            closed.timestamp.eq(plan.timestamp),
            pending.window.eq(closed),
            pending.close.eq(take & plan.last_of_window & row_end),
        ]

        # Cycle 0: the transfer. What takes effect is reset: bit k of `staging` is a transfer in cycle k.
        staging = Signal(timing.written + 1)
        scanning = Signal(timing.lanes + 1)
        enters = take & ~plan.drop
        m.d.sync += [
            staging.eq(Cat(enters & ~plan.scan, staging)),
            scanning.eq(Cat(enters & plan.scan, scanning)),
        ]
        tail_lanes = p.head_dim - (p.row_transfers - 1) * p.lanes
        row = register(plan, "row")
        row_word, tail = register(word, "word"), register(row_end, "tail")
        x = Signal(data.ArrayLayout(16, p.lanes), reset_less=True)
        for lane in range(p.lanes):
            surplus = row_end if lane >= tail_lanes else 0
            m.d.sync += x[lane].eq(Mux(surplus, 0, self.v.payload.data[lane]))

        # Cycle 1: addresses; and, before the mean is taken out, the tail of the pipeline's tags.
        address = Signal(range(max(2, words)), reset_less=True)
        m.d.sync += address.eq(row.head * p.row_transfers + row_word)
        elements, special = self._elements(m, write, x, address, staging[1] | scanning[1])
        early = timing.scales - 1
        row_1, tail_1 = register(row, "row"), register(tail, "tail")
        row_early, tail_early = register(row_1, "row", cycles=early), register(tail_1, "tail", cycles=early)
        to_elements = timing.elements - timing.scales
        sink = register(row_early.sink, "sink", cycles=to_elements)
        repeated = register(row_early.repeated, "repeated", cycles=to_elements)
        at_tail = register(tail_early, "tail", cycles=to_elements)
        finite = Signal(data.ArrayLayout(16, p.lanes))
        for lane in range(p.lanes):
            surplus = at_tail if lane >= tail_lanes else 0
            m.d.comb += finite[lane].eq(Mux(surplus, 0, elements[lane]))
        with m.If(special.any() & (staging[timing.elements] | scanning[timing.elements])):
            m.d.sync += self.nonfinite.eq(1)

        # Scales, and the division by them.
        m.d.comb += [
            scales.valid.eq(staging[timing.scales] | scanning[timing.scales]),
            scales.address.eq(register(address, "address", cycles=early)),
            scales.scan.eq(scanning[timing.scales]),
            scales.first.eq(row_early.scan_first),
            scales.loads.eq(row_early.scales),
            scales.skip.eq(row_early.sink),
            scales.tail.eq(tail_early),
        ]
        clamped, counts = Signal(p.lanes), Signal()
        for lane in range(p.lanes):
            m.submodules[f"staging_{lane}"] = staging_lane = StagingLane()
            element = register(Mux(sink, 0, finite[lane]), "element", cycles=timing.lanes - timing.elements)
            m.d.comb += [
                scales.magnitudes[lane].eq(finite[lane][:15]),
                staging_lane.v.eq(element),
                staging_lane.scale.eq(scales.scales[lane]),
                sums.q[lane].eq(staging_lane.q),
                buffer.write_q[lane].eq(staging_lane.q),
                clamped[lane].eq(staging_lane.clamped & counts),
            ]
        count = register(sum(clamped[lane] for lane in range(p.lanes)), "count")
        m.d.sync += self.saturated.eq(self.saturated + count)

        # What the staged elements need to know travels in a memory.
        place_shape = data.StructLayout(
            {
                "address": range(max(2, words)),
                "row_address": range(max(2, words * ring_rows)),
                "first": 1,
                "last": 1,
                "slot": range(slots),
                "repeated": 1,
            }
        )
        place = Signal(place_shape, reset_less=True)
        window_bits = p.group.bit_length() - 1
        m.d.sync += [
            place.address.eq(address),
            place.row_address.eq(address * ring_rows + row_1.row),
            place.first.eq(row_1.first_of_window),
            place.last.eq(row_1.last_of_window),
            place.slot.eq(row_1.timestamp[window_bits:]),
            place.repeated.eq(row_1.repeated),
        ]
        m.submodules.places = places = DelayLine(place_shape, timing.staged - 4)
        m.d.comb += places.i.eq(place)
        staged_place = register(places.o, "place")
        m.d.comb += [
            sums.valid.eq(staging[timing.staged - 1]),
            sums.address.eq(staged_place.address),
            sums.first.eq(staged_place.first),
            sums.last.eq(staged_place.last),
            sums.slot.eq(staged_place.slot),
            buffer.write.eq(staging[timing.staged]),
            counts.eq(staging[timing.staged] & ~register(staged_place.repeated, "repeated")),
            buffer.write_address.eq(register(staged_place.row_address, "row_address")),
        ]

        # Closed windows go to the reader of their sums and, behind it, to the encoder.
        m.submodules.windows = windows = fifo.SyncFIFOBuffered(width=closed.shape().size, depth=timing.windows)
        window, hand_over = pending.o.payload, Signal()
        m.d.comb += [
            reader.i.valid.eq(pending.o.valid & windows.w_rdy),
            hand_over.eq(reader.i.valid & reader.i.ready),
            pending.o.ready.eq(reader.i.ready & windows.w_rdy),
            reader.i.payload.head.eq(window.head),
            reader.i.payload.slot.eq(window.timestamp[window_bits:]),
            windows.w_en.eq(hand_over),
            windows.w_data.eq(window),
            encoder.windows.valid.eq(windows.r_rdy),
            windows.r_en.eq(encoder.windows.ready),
            encoder.windows.payload.eq(window.shape()(windows.r_data)),
            sums.read_enable.eq(reader.read_enable),
            sums.read_address.eq(reader.read_address),
            sums.read_slot.eq(reader.read_slot),
            reader.sums.eq(sums.sums),
            scales.look_enable[0].eq(reader.read_enable),
            scales.look_address[0].eq(reader.read_address),
            reader.scales.eq(scales.look[0]),
        ]
        # The chain's `ready` depends on much of it: it ends at a register.
        m.submodules.read_sums = read_sums = OutputQueue(reader.o.payload.shape())
        m.d.comb += [
            read_sums.valid.eq(reader.o.valid),
            read_sums.payload.eq(reader.o.payload),
            reader.o.ready.eq(read_sums.advance),
        ]
        wiring.connect(m, read_sums.o, chain.i)
        wiring.connect(m, chain.o, encoder.grids)
        wiring.connect(m, encoder.o, packer.i)
        wiring.connect(m, packer.codes, wiring.flipped(self.codes))
        wiring.connect(m, packer.meta, wiring.flipped(self.meta))
        m.d.comb += [control.release.eq(encoder.release), control.release_head.eq(encoder.release_head)]

        # The buffer is read by the encoder and, where that does not, for the port of staged rows.
        m.d.comb += [
            peeks.request.valid.eq(self.peek.valid & started),
            peeks.request.payload.eq(self.peek.payload),
            self.peek.ready.eq(peeks.request.ready & started),
        ]
        wiring.connect(m, peeks.o, wiring.flipped(self.staged))
        m.d.comb += [
            control.status_head.eq(peeks.status_head),
            peeks.status.eq(control.status),
            peeks.drained.eq(~staging.any()),
            peeks.free.eq(~encoder.read),
            peeks.q.eq(buffer.q),
            peeks.scales.eq(scales.look[1]),
            scales.look_enable[1].eq(peeks.scale_read),
            scales.look_address[1].eq(peeks.scale_address),
            encoder.hold.eq(peeks.hold_window),
            encoder.hold_head.eq(peeks.hold_head),
            encoder.hold_base.eq(peeks.hold_base),
            encoder.q.eq(buffer.q),
            buffer.read.eq(encoder.read | peeks.read),
            buffer.read_row.eq(~encoder.read),
            buffer.read_address.eq(Mux(encoder.read, encoder.read_address, peeks.read_address)),
            buffer.read_lane.eq(encoder.read_lane),
        ]

        # Sinks
        sinks_idle = 1
        if p.sinks:
            m.submodules.sinks = sinks = SinkRows(p, timing.elements + 1)
            sinks_idle = sinks.idle
            wiring.connect(m, sinks.o, wiring.flipped(self.sink))
            m.d.comb += [
                sink_room.eq(sinks.room),
                sinks.reserve.eq(take & sink_row),
                sinks.first.eq(~in_row),
                sinks.head.eq(plan.head),
                sinks.valid.eq(staging[timing.elements] & sink & ~repeated),
                sinks.elements.eq(finite),
            ]

        # Status
        open_pages = []  # windows that were handed over and are not written to their end
        for port in (self.codes, self.meta):
            written = port.valid & port.ready & port.payload.last
            pages = Signal(range(encoder.windows_inside + windows.depth + 2), name="open_pages")
            m.d.sync += pages.eq(pages + hand_over - written)
            open_pages.append(pages)
        under_way = [in_row, staging.any(), scanning.any(), ~pending.empty, *(pages != 0 for pages in open_pages)]
        m.d.comb += self.busy.eq(Cat(under_way).any() | ~sinks_idle)
        with m.If(take | encoder.read):
            m.d.sync += self.busy_cycles.eq(self.busy_cycles + 1)
        with m.If(Cat(errors).any()):
            m.d.sync += self.error.eq(1)
        return m

    def _tables(self, m: Module, write: Signal, started: Signal):
        """Takes table writes: whether a sequence is ended, whether the next goes on, and whether one had no place."""
        p = self.p
        ended, resumed, misplaced = Signal(), Signal(), Signal()
        m.d.comb += self.cfg.ready.eq(started)
        m.d.sync += [write.valid.eq(self.cfg.valid & started), write.data.eq(self.cfg.payload.data)]
        item = write.data
        limits = {
            Table.COEFFICIENT: TABLE_ENTRIES,
            Table.THRESHOLD: THRESHOLDS,
            Table.MEAN: p.head_dim if p.centred else 0,
            Table.FLOOR: p.head_dim,
        }
        fits = Signal()
        with m.Switch(item.kind):
            for kind, limit in limits.items():
                with m.Case(kind):
                    m.d.comb += fits.eq(item.index < limit if limit else 0)
            with m.Case(Table.END):
                m.d.comb += [fits.eq(1), ended.eq(write.valid)]
            if not p.centred:  # which would take a mean out of the scales
                with m.Case(Table.POSITION, Table.WINDOW):
                    m.d.comb += [fits.eq(1), resumed.eq(write.valid)]
        m.d.comb += misplaced.eq(write.valid & ~(fits & (item.head < p.heads)))
        return ended, resumed, misplaced

    def _elements(self, m: Module, write, x, address, entered):
        """Finite elements, the mean taken out, in cycle `timing.elements`; and which were not finite.

        *x* is of cycle 0, *address* of cycle 1, *entered* tells whether there is a transfer in cycle 1.
        """
        p = self.p
        register = Pipeline(m).register
        if p.centred:
            m.submodules.means = means = ChannelTable(p, Table.MEAN)
            m.submodules.centring = centring = Centring(p.lanes)
            m.d.comb += [
                means.write.eq(write),
                means.enable.eq(entered),
                means.address.eq(address),
                centring.x.eq(register(x, "x", cycles=1 + ChannelTable.latency)),
                centring.mean.eq(means.numbers),
            ]
            return centring.y, centring.nonfinite
        elements = Signal(data.ArrayLayout(16, p.lanes))
        special = Signal(p.lanes)
        for lane in range(p.lanes):
            m.d.comb += special[lane].eq(x[lane][10:15].all())
            magnitude = Mux(special[lane], Mux(x[lane][:10].any(), 0, FP16_MAX), x[lane][:15])
            m.d.comb += elements[lane].eq(Cat(magnitude[:15], x[lane][15]))
        cycles = self.timing.elements
        return register(elements, "elements", cycles=cycles), register(special, "special", cycles=cycles)
