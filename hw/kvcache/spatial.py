"""The cache of keys grouped along the head: rows come in, their groups are quantised at once, pages go out."""

from amaranth.hdl import Cat, EnableInserter, Module, Mux, Signal, Value, signed
from amaranth.lib import data, fifo, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.block_queue import BlockQueue
from kvant.hw.kvcache.coefficient import CoefficientChoice, TableEntryWrite
from kvant.hw.kvcache.encoder import Encoder
from kvant.hw.kvcache.grid import GridFit, TaggedGrid
from kvant.hw.kvcache.layouts import GroupGrid, PageWrite, Table, TableWrite
from kvant.hw.kvcache.packer import META_BITS, BlockPacker, GroupMeta
from kvant.hw.kvcache.parameters import TABLE_ENTRIES, THRESHOLDS, CacheParameters, ceil_div
from kvant.hw.kvcache.sinks import sink_output
from kvant.hw.kvcache.spatial_control import KeyControl, KeyRow
from kvant.hw.kvcache.statistics import GroupStatistic
from kvant.hw.kvcache.variance import VarianceUnit
from kvant.hw.numeric.centring import Centring
from kvant.hw.numeric.codes import CODE_BITS
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.numeric.int8_quantizer import Int8Quantizer, quantizer_input
from kvant.hw.numeric.output_queue import OutputQueue


def key_input(p: CacheParameters) -> data.StructLayout:
    """Payload of the row port; `user` is read in a row's first transfer. See `SpatialCache`."""
    user = data.StructLayout({"start": 1, "flush": 1, "head": 8})
    return data.StructLayout({"data": data.ArrayLayout(16, p.lanes), "user": user})


class MeanStage(wiring.Component):
    """Takes the channels' means out of transfers on their way to the quantiser.

    Parameters
    ----------
    p : CacheParameters

    Attributes
    ----------
    latency : int
        Cycles from `i` to `o`, if nothing waits. One transfer per cycle.

    Members
    -------
    write : in
        Changes the means; other kinds are ignored.
    i, head, transfer : in stream, in
        A transfer of a row of the head, and its number in the row. ``ready`` is a register.
    o : out stream
    nonfinite : out
        A transfer that moved in this cycle had an element that was not finite.
    """

    _TO_CENTRING = 2
    latency = _TO_CENTRING + Centring.latency + 1

    def __init__(self, p: CacheParameters):
        self.p = p
        shape = quantizer_input(p.lanes)
        super().__init__(
            {
                "write": In(TableEntryWrite()),
                "i": In(stream.Signature(shape)),
                "head": In(8),
                "transfer": In(range(max(2, p.row_transfers))),
                "o": Out(stream.Signature(shape)),
                "nonfinite": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        shape = quantizer_input(p.lanes)
        m.submodules.queue = queue = OutputQueue(shape)
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        advance = queue.advance

        # The means of a head lie in as many words as a row has transfers.
        transfer_bits = (p.row_transfers - 1).bit_length()
        lane_bits = p.lanes.bit_length() - 1
        m.submodules.means = means = memory.Memory(
            shape=data.ArrayLayout(16, p.lanes), depth=max(2, p.heads << transfer_bits), init=[]
        )
        write, read = means.write_port(granularity=1), means.read_port()
        item = self.write.data
        chosen = Signal()
        lane = Signal(max(1, lane_bits))
        m.d.sync += [
            chosen.eq(self.write.valid & (item.kind == Table.MEAN) & (item.head < p.heads) & (item.index < p.head_dim)),
            lane.eq(item.index[:lane_bits]),
            write.addr.eq(Cat(item.index[lane_bits:][:transfer_bits], item.head)[: len(write.addr)]),
            *(write.data[k].eq(item.value) for k in range(p.lanes)),
        ]
        m.d.comb += [
            *(write.en[k].eq(chosen & (lane == k)) for k in range(p.lanes)),
            read.addr.eq(Cat(self.transfer[:transfer_bits], self.head)[: len(read.addr)]),
            read.en.eq(advance),
            self.i.ready.eq(advance),
        ]

        register = Pipeline(m, enable=advance).register

        valids = Signal(self.latency - 1)
        with m.If(advance):
            m.d.sync += valids.eq(Cat(self.i.valid, valids))
        m.submodules.centring = EnableInserter(advance)(centring := Centring(p.lanes))
        keep = register(self.i.payload.keep, "keep", cycles=self.latency - 1)
        m.d.comb += [
            centring.x.eq(register(self.i.payload.data, "x", cycles=self._TO_CENTRING)),
            centring.mean.eq(register(read.data, "mean")),
            queue.valid.eq(valids[-1]),
            queue.payload.data.eq(centring.y),
            queue.payload.keep.eq(keep),
            queue.payload.last.eq(register(self.i.payload.last, "last", cycles=self.latency - 1)),
            self.nonfinite.eq(
                advance & valids[-1] & Cat(centring.nonfinite[k] & (k < keep) for k in range(p.lanes)).any()
            ),
        ]
        return m


class GroupTag(data.StructLayout):
    """What goes with the sums of a group: its INT8 scale, its head, whether it belongs to a sink."""

    def __init__(self):
        super().__init__({"scale": 16, "head": 8, "sink": 1})


class SinkTag(data.StructLayout):
    """What goes with the grid of a group."""

    def __init__(self):
        super().__init__({"sink": 1})


class KeyGrids(wiring.Component):
    """From INT8 elements of groups to their grids: sums, statistic, choice of the coefficient, levels.

    ::

        i ──> VarianceUnit ──> GroupStatistic ──> CoefficientChoice ──> GridFit ──> o

    Parameters
    ----------
    p : CacheParameters

    Attributes
    ----------
    latency : int
        Cycles from a group's last transfer to its grid, if nothing is before it.

    Members
    -------
    write : in
        Changes the tables.
    i : in stream
        Transfers of groups, see `VarianceUnit`, with a `GroupTag`; on the average a group in `interval` cycles.
    o : out stream of `TaggedGrid` with a `SinkTag`
    """

    def __init__(self, p: CacheParameters):
        self.p = p
        self.interval = max(1, p.row_transfers // p.row_groups)
        # A row's last group may come in fewer cycles, right behind another.
        counts = {p.tail, *([p.group] if p.row_groups > 1 else [])}
        self._tag = data.StructLayout({"scale": 16, "peak": 8, "sink": 1})
        self._sums = VarianceUnit(p.lanes, p.group, adder=p.adder, tag_shape=GroupTag(), nvar=False)
        self._statistic = GroupStatistic(p, GroupTag(), counts=counts)
        self._choice = CoefficientChoice(p, self._tag, self.interval, counts=counts)
        self._grid = GridFit(p, SinkTag(), self.interval)
        parts = (self._sums, self._statistic, self._choice, self._grid)
        self.latency = sum(part.latency for part in parts)
        super().__init__(
            {
                "write": In(TableEntryWrite()),
                "i": In(stream.Signature(self._sums.i.payload.shape())),
                "o": Out(stream.Signature(TaggedGrid(SinkTag()))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.sums = sums = self._sums
        m.submodules.statistic = statistic = self._statistic
        m.submodules.choice = choice = self._choice
        m.submodules.grid = grid = self._grid
        wiring.connect(m, wiring.flipped(self.i), sums.i)
        wiring.connect(m, grid.o, wiring.flipped(self.o))
        summed, stated = sums.o.payload, statistic.i.payload
        known, asked = statistic.o.payload, choice.i.payload
        chosen, wanted = choice.o.payload, grid.i.payload
        m.d.comb += [
            statistic.i.valid.eq(sums.o.valid),
            sums.o.ready.eq(statistic.i.ready),
            *(stated.sums[name].eq(summed[name]) for name in ("sum", "sumsq", "maximum", "minimum", "count")),
            stated.tag.eq(summed.tag),
            choice.write.eq(self.write),
            choice.i.valid.eq(statistic.o.valid),
            statistic.o.ready.eq(choice.i.ready),
            asked.moment.eq(known.moment),
            asked.peak.eq(known.peak),
            asked.count.eq(known.count),
            asked.head.eq(known.tag.head),
            asked.tag.scale.eq(known.tag.scale),
            asked.tag.peak.eq(known.peak),
            asked.tag.sink.eq(known.tag.sink),
            grid.i.valid.eq(choice.o.valid),
            choice.o.ready.eq(grid.i.ready),
            wanted.scale.eq(chosen.tag.scale),
            wanted.peak.eq(chosen.tag.peak),
            wanted.coefficient.eq(chosen.coefficient),
            wanted.tag.sink.eq(chosen.tag.sink),
        ]
        return m


class CodedBeat(data.StructLayout):
    """A beat of codes: which of its row it is, and its group's metadata."""

    def __init__(self, p: CacheParameters):
        super().__init__(
            {
                "codes": data.ArrayLayout(CODE_BITS, p.lanes),
                "last": 1,
                "first_group": 1,
                "row_end": 1,
                "meta": GroupMeta(),
            }
        )


class KeyCoder(wiring.Component):
    """Codes of the elements that waited for their grids; sinks become code 0x0, scale and coefficient 0.

    Parameters
    ----------
    p : CacheParameters

    Attributes
    ----------
    latency : int
        Cycles from elements and grid to codes, if nothing waits. One beat per cycle.

    Members
    -------
    elements : in stream
        INT8 elements, `p.lanes` at a time, those of a row in its transfers.
    grids : in stream of `TaggedGrid`
        One for each group.
    o : out stream of `CodedBeat`
    error : out
        A grid with an error was used, not for a sink.
    """

    _REGISTERS = 1 + Encoder.latency
    latency = _REGISTERS + 1

    def __init__(self, p: CacheParameters):
        self.p = p
        super().__init__(
            {
                "elements": In(stream.Signature(data.ArrayLayout(signed(8), p.lanes))),
                "grids": In(stream.Signature(TaggedGrid(SinkTag()))),
                "o": Out(stream.Signature(CodedBeat(p))),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.queue = queue = OutputQueue(CodedBeat(p))
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        advance = queue.advance

        register = Pipeline(m, enable=advance).register

        row_beat, group_beat = Signal(range(max(2, p.row_transfers))), Signal(range(max(2, p.group_transfers)))
        in_first_group = Signal(init=1)
        valid, row_end, group_end, take = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            valid.eq(self.elements.valid & self.grids.valid),
            take.eq(valid & advance),
            row_end.eq(row_beat == p.row_transfers - 1),
            group_end.eq(row_end | (group_beat == p.group_transfers - 1)),
            self.elements.ready.eq(take),
            self.grids.ready.eq(take & group_end),
        ]
        with m.If(take):
            m.d.sync += [
                row_beat.eq(Mux(row_end, 0, row_beat + 1)),
                group_beat.eq(Mux(group_end, 0, group_beat + 1)),
            ]
            with m.If(group_end):
                m.d.sync += in_first_group.eq(row_end)

        # Both come straight from memories.
        given = self.grids.payload
        grid, meta = Signal(GroupGrid()), Signal(GroupMeta())
        m.d.comb += [
            grid.eq(given.grid),
            grid.zero.eq(given.grid.zero | given.tag.sink),
            meta.scale.eq(Mux(given.tag.sink, 0, given.grid.scale)),
            meta.coefficient.eq(Mux(given.tag.sink, 0, given.coefficient)),
        ]
        m.d.sync += self.error.eq(self.grids.valid & self.grids.ready & given.grid.error & ~given.tag.sink)
        m.submodules.encoder = EnableInserter(advance)(encoder := Encoder(p.lanes))
        valids = Signal(self._REGISTERS)
        with m.If(advance):
            m.d.sync += valids.eq(Cat(valid, valids))
        m.d.comb += encoder.grid.eq(register(grid, "grid"))
        tail_lanes = p.head_dim - (p.row_transfers - 1) * p.lanes
        for lane in range(p.lanes):
            element = self.elements.payload[lane]
            if lane >= tail_lanes:  # without an element in the row's last beat
                element = Mux(row_end, 0, element)
            m.d.comb += encoder.q[lane].eq(register(element, f"element_{lane}"))
        beat = queue.payload
        m.d.comb += [
            queue.valid.eq(valids[-1]),
            beat.codes.eq(encoder.codes),
            *(
                Value.cast(target).eq(register(source, name, cycles=self._REGISTERS))
                for name, target, source in (
                    ("last", beat.last, group_end),
                    ("first_group", beat.first_group, in_first_group),
                    ("row_end", beat.row_end, row_end),
                    ("meta", beat.meta, Value.cast(meta)),
                )
            ),
        ]
        return m


class SpatialCache(wiring.Component):
    """Keys grouped along the head: fp16 rows to pages of 4-bit groups, as they come. The block ``kcache``.

    ::

        k ──> KeyControl ──> MeanStage ──> Int8Quantizer ──┬──> BlockQueue ───────> KeyCoder ──> BlockPacker ──> codes
                            (if centred)                   ├──> KeyGrids ──────────────┘             └────────> meta
                                                           └──> sink

    A row is quantised to INT8 groups of `group` elements (the last one may be shorter), of whose sums the coefficient
    is chosen; then scale and codes follow in integers. Nothing waits for later rows: with all outputs ready a transfer
    is taken in every cycle, whatever the order of heads.

    A page holds the groups of `group` consecutive tokens of a head, token by token; a head has a ring of
    `CacheParameters.windows` pages. The metadata of a block of 16 groups are written when it is complete; `flush`
    writes at once what is there. Source: docs/numerics.md; M-ANT (HPCA 2025, section V).

    Parameters
    ----------
    p : CacheParameters
        `offset` and `shared_coeff` have no meaning here.

    Attributes
    ----------
    latency : int
        Cycles from the last transfer of a row to the last beat of its codes at the packer, if nothing waits or was
        before it. The word that a beat completes follows `BlockPacker.latency` cycles later.
    word_bits : int
        Width of a word of codes.

    Members
    -------
    k : in stream
        data : lanes * 16
            fp16 elements; `row_transfers` transfers a row, surplus lanes of the last one are ignored.
        user : {start 1, flush 1, head 8}
            Read in a row's first transfer: first row of a sequence (which ends the head's former one), write to memory
            what is known after this row, and the head.
    cfg : in stream of `TableWrite`
        Coefficients, thresholds, with `centred` means, the end of a sequence, and the position at which the head's
        next one goes on: pages that it began before stay as they are, but for the groups of its new rows, and the
        groups behind them in their blocks. Tables of a head change while no row of it is under way, and are kept at
        reset.
    sink : out stream
        The first `sinks` rows of a sequence as INT8; see `sink_output`.
    codes, meta : out stream of `PageWrite`
    busy : out
        Rows are under way, or their writes.
    nonfinite : out
        Sticky: NaN (taken as 0) or an infinity (taken as +-65504) at the port.
    error : out
        Sticky: a row of a head that does not exist, or without a start where there is no sequence (it is dropped); a
        table write of a kind, head or entry that does not exist; a coefficient that is none (the group counts 0).
    full : out
        The row at the port waits because its head holds `capacity` tokens.
    busy_cycles : out, 32
        Cycles in which the lanes of the quantiser worked on a transfer; wraps.

    Raises
    ------
    ParameterError
        When the parameters are not those of a cache, or a page of so many groups cannot be.
    """

    _DRAIN_BITS = 4

    def __init__(self, p: CacheParameters):
        self.p = p = p.check_cache().model_copy(update={"offset": False, "shared_coeff": False})
        self._means = MeanStage(p) if p.centred else None
        self._quantizer = Int8Quantizer(p.lanes, p.group)
        self._grids = KeyGrids(p)
        self._coder = KeyCoder(p)
        self._packer = BlockPacker(p, p.group * p.row_groups)
        self.word_bits = self._packer.word_bits
        self.layout = self._packer.layout
        # A row's last group is no faster than a full one before it.
        beats = min(p.group_transfers, p.row_transfers)
        self.latency = (
            1  # the port
            + (self._means.latency if self._means else 0)
            + self._quantizer.latency
            + beats
            - 1
            + self._grids.latency
            + beats
            - 1
            + self._coder.latency
        )
        super().__init__(
            {
                "k": In(stream.Signature(key_input(p))),
                "cfg": In(stream.Signature(data.StructLayout({"data": TableWrite()}))),
                "sink": Out(stream.Signature(sink_output(p))),
                "codes": Out(stream.Signature(PageWrite(self.word_bits))),
                "meta": Out(stream.Signature(PageWrite(META_BITS))),
                "busy": Out(1),
                "nonfinite": Out(1),
                "error": Out(1),
                "full": Out(1),
                "busy_cycles": Out(32),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.control = control = KeyControl(p)
        m.submodules.quantizer = quantizer = self._quantizer
        m.submodules.grids = grids = self._grids
        m.submodules.coder = coder = self._coder
        m.submodules.packer = packer = self._packer
        wiring.connect(m, packer.codes, wiring.flipped(self.codes))
        wiring.connect(m, packer.meta, wiring.flipped(self.meta))

        running = Signal()  # not in reset, where nothing may be taken
        m.d.sync += running.eq(1)
        write, refused = self._tables(m, running, control)
        m.d.comb += grids.write.eq(write)

        # The transfer at the port waits in a register.
        held = Signal(key_input(p), reset_less=True)
        held_valid, take = Signal(), Signal()
        # A row waits until the table writes before it are in their memories.
        written = Signal(3)
        m.d.sync += written.eq(Cat(self.cfg.valid & self.cfg.ready, written))
        m.d.comb += self.k.ready.eq(running & ~written.any() & (~held_valid | take))
        with m.If(self.k.ready):
            m.d.sync += [held_valid.eq(self.k.valid), held.eq(self.k.payload)]

        # Rows under way, for the two places that have to know of them.
        row_shape = data.StructLayout({"row": KeyRow(p), "flush": 1})
        source_shape = data.StructLayout({"head": 8, "sink": 1})
        depth = ceil_div(self.latency + self._quantizer.latency, p.row_transfers) + 6
        m.submodules.rows = rows = fifo.SyncFIFOBuffered(width=row_shape.size, depth=depth)
        m.submodules.sources = sources = fifo.SyncFIFOBuffered(width=source_shape.size, depth=depth)
        transfer, group_transfer = Signal(range(max(2, p.row_transfers))), Signal(range(max(2, p.group_transfers)))
        first, dropping, dropped, row_end, group_end, enters = (Signal() for _ in range(6))
        head = Signal(8)
        room, enters_ready = Signal(), Signal()
        m.d.comb += [
            first.eq(transfer == 0),
            control.start.eq(held.user.start),
            control.head.eq(held.user.head),
            dropped.eq(Mux(first, control.drop, dropping)),
            room.eq(~first | (control.granted & rows.w_rdy & sources.w_rdy)),
            take.eq(held_valid & room & (dropped | enters_ready)),
            control.take.eq(take & first),
            enters.eq(held_valid & room & ~dropped),
            row_end.eq(transfer == p.row_transfers - 1),
            group_end.eq(row_end | (group_transfer == p.group_transfers - 1)),
            rows.w_en.eq(take & first & ~dropped),
            rows.w_data.eq(Cat(control.row, held.user.flush)),
            sources.w_en.eq(rows.w_en),
            sources.w_data.eq(Cat(control.row.head, control.row.sink)),
        ]
        with m.If(take):
            m.d.sync += [
                transfer.eq(Mux(row_end, 0, transfer + 1)),
                group_transfer.eq(Mux(group_end, 0, group_transfer + 1)),
            ]
            with m.If(first):
                m.d.sync += [head.eq(held.user.head), dropping.eq(control.drop)]
        m.d.sync += self.full.eq(held_valid & first & ~control.granted)

        tail_lanes = p.head_dim - (p.row_transfers - 1) * p.lanes
        element = Signal(quantizer_input(p.lanes))
        m.d.comb += [
            element.data.eq(held.data),
            element.keep.eq(Mux(row_end, tail_lanes, p.lanes)),
            element.last.eq(group_end),
        ]
        into = quantizer.i
        if self._means:
            m.submodules.means = means = self._means
            wiring.connect(m, means.o, quantizer.i)
            into = means.i
            m.d.comb += [
                means.write.eq(write),
                means.head.eq(Mux(first, held.user.head, head)),
                means.transfer.eq(transfer),
            ]
        m.d.comb += [into.valid.eq(enters), into.payload.eq(element), enters_ready.eq(into.ready)]

        nonfinite = self._fork(m, sources, source_shape)
        if self._means:
            nonfinite = nonfinite | self._means.nonfinite

        # Codes meet their row.
        beat, row = coder.o.payload, data.View(row_shape, rows.r_data)
        packed = packer.i.payload
        row_done = Signal()
        m.d.comb += [
            packer.i.valid.eq(coder.o.valid & rows.r_rdy),
            coder.o.ready.eq(packer.i.ready & rows.r_rdy),
            row_done.eq(packer.i.valid & packer.i.ready & beat.row_end),
            rows.r_en.eq(row_done),
            packed.codes.eq(beat.codes),
            packed.last.eq(beat.last),
            packed.meta.eq(beat.meta),
            packed.flush.eq(row.flush & beat.row_end),
            packed.page_start.eq(row.row.first_of_page & beat.first_group),
            packed.place.eq(row.row.place),
            packed.page_end.eq(row.row.last_of_page & beat.row_end),
            packed.user.page.eq(row.row.page),
            packed.user.head.eq(row.row.head),
            packed.user.timestamp.eq(row.row.timestamp),
        ]

        # The packer's last write is offered soon after its last beat and after the write before.
        drain = Signal(self._DRAIN_BITS)
        active = held_valid | rows.r_rdy | (rows.level != 0) | self.codes.valid | self.meta.valid
        m.d.sync += drain.eq(Mux(active, (1 << self._DRAIN_BITS) - 1, Mux(drain == 0, 0, drain - 1)))
        m.d.comb += self.busy.eq(active | (drain != 0))
        with m.If(nonfinite):
            m.d.sync += self.nonfinite.eq(1)
        with m.If((control.take & control.drop) | coder.error | refused):
            m.d.sync += self.error.eq(1)
        with m.If(into.valid & into.ready):
            m.d.sync += self.busy_cycles.eq(self.busy_cycles + 1)
        return m

    def _tables(self, m: Module, running: Value, control: KeyControl) -> tuple[Value, Value]:
        """The table write of the cycle before, and whether it is refused; ends sequences, and says where they go on."""
        p = self.p
        write = Signal(TableEntryWrite())
        m.d.comb += self.cfg.ready.eq(running)
        m.d.sync += [write.valid.eq(self.cfg.valid & self.cfg.ready), write.data.eq(self.cfg.payload.data)]
        item = write.data
        legal = Signal()
        with m.Switch(item.kind):
            with m.Case(Table.COEFFICIENT):
                m.d.comb += legal.eq(item.index < TABLE_ENTRIES)
            with m.Case(Table.THRESHOLD):
                m.d.comb += legal.eq(item.index < THRESHOLDS)
            if p.centred:
                with m.Case(Table.MEAN):
                    m.d.comb += legal.eq(item.index < p.head_dim)
            with m.Case(Table.END, Table.POSITION):
                m.d.comb += legal.eq(1)
        m.d.comb += [
            control.end.eq(write.valid & (item.kind == Table.END)),
            control.end_head.eq(item.head),
            control.resume.eq(write.valid & (item.kind == Table.POSITION)),
            control.resume_head.eq(item.head),
            control.position.eq(Cat(item.value, item.index)),
        ]
        return write, write.valid & ~(legal & (item.head < p.heads))

    def _fork(self, m: Module, sources, source_shape) -> Value:
        """Quantised transfers go to their queue, to the sums and, of sinks, out; whether one was not finite."""
        p = self.p
        coder, grids, quantizer = self._coder, self._grids, self._quantizer
        # Elements wait for their group's end and its grid.
        depth = p.group_transfers + self._grids.latency + self._coder.latency + 2 * self._grids.interval + 4
        m.submodules.elements = elements = BlockQueue(data.ArrayLayout(signed(8), p.lanes), depth)
        wiring.connect(m, elements.o, coder.elements)
        wiring.connect(m, grids.o, coder.grids)
        source = data.View(source_shape, sources.r_data)
        transfer = Signal(range(max(2, p.row_transfers)))
        row_end, go, sink_free = Signal(), Signal(), Signal()
        tail_lanes = p.head_dim - (p.row_transfers - 1) * p.lanes
        result, sums = quantizer.o.payload, grids.i.payload
        m.d.comb += [
            row_end.eq(transfer == p.row_transfers - 1),
            sink_free.eq(~source.sink | ~self.sink.valid | self.sink.ready),
            go.eq(quantizer.o.valid & sources.r_rdy & elements.i.ready & grids.i.ready & sink_free),
            quantizer.o.ready.eq(go),
            sources.r_en.eq(go & row_end),
            elements.i.valid.eq(go),
            elements.i.payload.eq(result.q),
            grids.i.valid.eq(go),
            sums.data.eq(result.q),
            sums.keep.eq(Mux(row_end, tail_lanes, p.lanes)),
            sums.last.eq(result.last),
            sums.tag.scale.eq(result.scale),
            sums.tag.head.eq(source.head),
            sums.tag.sink.eq(source.sink),
        ]
        with m.If(go):
            m.d.sync += transfer.eq(Mux(row_end, 0, transfer + 1))
        with m.If(~self.sink.valid | self.sink.ready):
            m.d.sync += [
                self.sink.valid.eq(go & source.sink),
                self.sink.payload.data.eq(result.q),
                self.sink.payload.user.scale.eq(result.scale),
                self.sink.payload.user.head.eq(source.head),
                self.sink.payload.last.eq(row_end),
            ]
        return go & result.nonfinite
