"""The second phase of a cache along time: closed windows become codes, channel by channel."""

from amaranth.hdl import Cat, Module, Mux, Signal, Value, signed
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.coefficient import (
    CoefficientChoice,
    SharedChoice,
    TableEntryWrite,
)
from kvant.hw.kvcache.control import POSITION_BITS
from kvant.hw.kvcache.encoder import Encoder
from kvant.hw.kvcache.grid import GridFit, TaggedGrid
from kvant.hw.kvcache.layouts import GroupGrid
from kvant.hw.kvcache.packer import GroupMeta, PackerInput, PageOwner
from kvant.hw.kvcache.parameters import CacheParameters, ceil_div
from kvant.hw.kvcache.result_queue import ResultQueue
from kvant.hw.kvcache.running import ChannelSums
from kvant.hw.kvcache.statistics import GroupStatistic, TaggedSums
from kvant.hw.kvcache.window_buffer import WindowBuffer
from kvant.hw.numeric.codes import CODE_BITS
from kvant.hw.numeric.floating import Pipeline


class ClosedWindow(data.StructLayout):
    """A window whose rows are complete.

    Members
    -------
    head : 8
    base : 0 .. ring_rows - 1
        Ring row of its first row.
    page : 24
    timestamp : 32
        Position of its first token.
    """

    def __init__(self, ring_rows: int):
        super().__init__({"head": 8, "base": range(ring_rows), "page": 24, "timestamp": POSITION_BITS})


class ChannelTag(data.StructLayout):
    """What goes with the sums of a channel: its INT8 scale, its head, whether it is the window's last one."""

    def __init__(self):
        super().__init__({"scale": 16, "head": 8, "last": 1})


class SumsReader(wiring.Component):
    """Takes the sums of closed windows out of memory, one channel per cycle; windows follow without a bubble.

    A word of `p.lanes` channels stays at the memories' outputs while they are picked one after the other.

    Parameters
    ----------
    p : CacheParameters
    slots : int
        Of `RunningSums`.

    Attributes
    ----------
    latency : int
        Cycles from a window to its first channel. With fewer than two lanes a channel takes more than one cycle.

    Members
    -------
    i : in stream
        {head 8, slot} of a window.
    read_enable, read_address, read_slot : out
        To `RunningSums` and `ChannelScales`, which answer one cycle later.
    sums, scales : in
    o : out stream of `TaggedSums` with a `ChannelTag`
    """

    latency = 4
    _PICKED_AT_ONCE = 4

    def __init__(self, p: CacheParameters, slots: int):
        self.p = p
        self.slots = slots
        window = data.StructLayout({"head": 8, "slot": range(slots)})
        super().__init__(
            {
                "i": In(stream.Signature(window)),
                "read_enable": Out(1),
                "read_address": Out(range(max(2, p.heads * p.row_transfers))),
                "read_slot": Out(range(slots)),
                "sums": In(data.ArrayLayout(ChannelSums(p), p.lanes)),
                "scales": In(data.ArrayLayout(16, p.lanes)),
                "o": Out(stream.Signature(TaggedSums(p, ChannelTag()))),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        step = Signal()
        m.d.comb += step.eq(~self.o.valid | self.o.ready)

        register = Pipeline(m, enable=step).register

        def choose(values, index):
            """The one of *values*, a power of two of them, that *index* names."""
            for bit in index:
                values = [Mux(bit, odd, even) for even, odd in zip(values[::2], values[1::2], strict=True)]
            return values[0]

        # Cycle 0: which channel; the first one of a word reads it.
        active, last, word_end = Signal(), Signal(), Signal()
        lane, word = Signal(range(max(2, p.lanes))), Signal(range(max(2, p.row_transfers)))
        address, slot, head = Signal.like(self.read_address), Signal.like(self.read_slot), Signal(8)
        tail_lanes = p.head_dim - (p.row_transfers - 1) * p.lanes
        m.d.comb += [
            last.eq((word == p.row_transfers - 1) & (lane == tail_lanes - 1)),
            word_end.eq(last | (lane == p.lanes - 1)),
            self.i.ready.eq(step & (~active | last)),
            self.read_enable.eq(step & active & (lane == 0)),
            self.read_address.eq(address),
            self.read_slot.eq(slot),
        ]
        with m.If(step & active):
            m.d.sync += lane.eq(Mux(word_end, 0, lane + 1))
            with m.If(word_end):
                m.d.sync += [word.eq(word + 1), address.eq(address + 1)]
        with m.If(self.i.ready):
            m.d.sync += active.eq(self.i.valid)
            m.d.sync += [word.eq(0), slot.eq(self.i.payload.slot), head.eq(self.i.payload.head)]
            m.d.sync += address.eq(self.i.payload.head * p.row_transfers)

        # Cycle 1: one of each four lanes. Cycle 2: one of them.
        valids = Signal(3)
        with m.If(step):
            m.d.sync += valids.eq(Cat(active, valids))
        tag = data.StructLayout({"last": 1, "head": 8})
        flags = register(register(register(Cat(last, head), "flags"), "flags"), "flags")
        lane_1 = register(lane, "lane")
        channels = [
            Cat(Value.cast(sums), scale)
            for sums, scale in zip((self.sums[k] for k in range(p.lanes)), self.scales, strict=True)
        ]
        width = len(channels[0])
        near = min(self._PICKED_AT_ONCE, p.lanes)
        near_bits = near.bit_length() - 1
        picked = [
            register(choose(channels[k : k + near], lane_1[:near_bits]), "picked") for k in range(0, p.lanes, near)
        ]
        lane_2 = register(lane_1[near_bits : p.lanes.bit_length() - 1], "lane")
        channel = register(choose(picked, lane_2), "channel")

        sums = data.View(ChannelSums(p), channel[: width - 16])
        out = self.o.payload
        m.d.comb += [
            self.o.valid.eq(valids[-1]),
            *(out.sums[name].eq(sums[name]) for name in ("sum", "sumsq", "maximum", "minimum")),
            out.sums.count.eq(p.group),
            out.tag.scale.eq(channel[width - 16 :]),
            out.tag.head.eq(data.View(tag, flags).head),
            out.tag.last.eq(data.View(tag, flags).last),
        ]
        return m


class GridTag(data.StructLayout):
    """What goes with the grid of a channel: its offset."""

    def __init__(self):
        super().__init__({"offset": signed(8)})


class GridChain(wiring.Component):
    """From the sums of channels to their grids: statistic, choice of the coefficient, levels.

    ::

        i ──> GroupStatistic ──> CoefficientChoice ─┬──> queue of channels ─────────┬──> GridFit ──> o
                                                    └──> SharedChoice (if shared) ──┘

    With one coefficient per window its channels wait until the last of them has voted; meanwhile those of the window
    before go on. So the choice works at one channel per cycle there.

    Parameters
    ----------
    p : CacheParameters

    Attributes
    ----------
    latency : int
        Cycles from the first channel of a window to its grid.

    Members
    -------
    write : in
        Changes the tables.
    i : in stream of `TaggedSums` with a `ChannelTag`
    o : out stream of `TaggedGrid` with a `GridTag`
        One channel in ``group / lanes`` cycles.
    """

    _VOTES = 4  # windows whose coefficient is known

    def __init__(self, p: CacheParameters):
        self.p = p
        interval = p.group_transfers
        self._peak = data.StructLayout({"scale": 16, "peak": 8, "offset": signed(8), "last": 1})
        tag = data.StructLayout({"channel": self._peak, "head": 8}) if p.shared_coeff else self._peak
        self._statistic = GroupStatistic(p, ChannelTag())
        self._choice = CoefficientChoice(p, tag, 1 if p.shared_coeff else interval)
        self._grid = GridFit(p, GridTag(), interval)
        self._shared = SharedChoice(p, 0) if p.shared_coeff else None
        self.latency = self.latency_of(p)
        # A window's channels wait while the rest of the one before still goes out.
        self.waiting = p.head_dim + ceil_div(self.latency + p.head_dim, interval) + 4
        super().__init__(
            {
                "write": In(TableEntryWrite()),
                "i": In(stream.Signature(TaggedSums(p, ChannelTag()))),
                "o": Out(stream.Signature(TaggedGrid(GridTag()))),
            }
        )

    @staticmethod
    def latency_of(p: CacheParameters) -> int:
        """The latency of a chain for these parameters."""
        latency = GroupStatistic.latency + CoefficientChoice.latency + GridFit.latency
        if p.shared_coeff:
            # All channels, at the rate of `SumsReader`; then the vote and its queue.
            latency += p.head_dim * (1 if p.lanes > 2 else 3) + SharedChoice.latency + 2
        return latency

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.statistic = statistic = self._statistic
        m.submodules.choice = choice = self._choice
        m.submodules.grid = grid = self._grid
        wiring.connect(m, wiring.flipped(self.i), statistic.i)
        wiring.connect(m, grid.o, wiring.flipped(self.o))

        known, asked = statistic.o.payload, choice.i.payload
        channel = asked.tag.channel if p.shared_coeff else asked.tag
        m.d.comb += [
            choice.write.eq(self.write),
            choice.i.valid.eq(statistic.o.valid),
            statistic.o.ready.eq(choice.i.ready),
            asked.moment.eq(known.moment),
            asked.peak.eq(known.peak),
            asked.count.eq(known.count),
            asked.head.eq(known.tag.head),
            channel.scale.eq(known.tag.scale),
            channel.peak.eq(known.peak),
            channel.offset.eq(known.offset),
            channel.last.eq(known.tag.last),
        ]
        if p.shared_coeff:
            m.d.comb += asked.tag.head.eq(known.tag.head)
            channel, valid, ready, coefficient = self._share(m, choice)
        else:
            channel, coefficient = choice.o.payload.tag, choice.o.payload.coefficient
            valid, ready = choice.o.valid, choice.o.ready
        wanted = grid.i.payload
        m.d.comb += [
            grid.i.valid.eq(valid),
            ready.eq(grid.i.ready),
            wanted.scale.eq(channel.scale),
            wanted.peak.eq(channel.peak),
            wanted.coefficient.eq(coefficient),
            wanted.tag.offset.eq(channel.offset),
        ]
        return m

    def _share(self, m: Module, choice: CoefficientChoice):
        """Channels with their window's coefficient: channel, valid, ready, coefficient."""
        m.submodules.shared = shared = self._shared
        m.submodules.channels = channels = fifo.SyncFIFOBuffered(width=self._peak.size, depth=self.waiting)
        m.submodules.coefficients = coefficients = fifo.SyncFIFOBuffered(width=8, depth=self._VOTES)
        chosen, vote = choice.o.payload, shared.i.payload
        valid, ready = Signal(), Signal()
        channel = data.View(self._peak, channels.r_data)
        m.d.comb += [
            shared.write.eq(self.write),
            choice.o.ready.eq(shared.i.ready & channels.w_rdy),
            shared.i.valid.eq(choice.o.valid & channels.w_rdy),
            channels.w_en.eq(choice.o.valid & shared.i.ready),
            channels.w_data.eq(chosen.tag.channel.as_value()),
            vote.index.eq(chosen.index),
            vote.alive.eq(chosen.tag.channel.peak != 0),
            vote.head.eq(chosen.tag.head),
            vote.last.eq(chosen.tag.channel.last),
            coefficients.w_en.eq(shared.o.valid),
            shared.o.ready.eq(coefficients.w_rdy),
            coefficients.w_data.eq(shared.o.payload.coefficient),
            valid.eq(channels.r_rdy & coefficients.r_rdy),
            channels.r_en.eq(valid & ready),
            coefficients.r_en.eq(valid & ready & channel.last),
        ]
        return channel, valid, ready, coefficients.r_data


class WindowEncoder(wiring.Component):
    """Reads the rows of closed windows channel by channel, encodes them and gives the rows free.

    ``group / lanes`` beats a channel, channels and windows back to back as long as their grids are there. Codes of
    sinks are 0x0.

    Parameters
    ----------
    p : CacheParameters
    ring_rows : int

    Attributes
    ----------
    latency : int
        Cycles from a reading to its codes.
    windows_inside : int
        Most windows that are read or whose codes have not left.

    Members
    -------
    windows : in stream of `ClosedWindow`
    grids : in stream of `TaggedGrid` with a `GridTag`
        Of the windows' channels, in order.
    hold, hold_head, hold_base : in
        Do not begin the window of this head that begins at this row of the ring.
    read, read_address, read_lane : out
        To `WindowBuffer`.
    q : in
        Its answer.
    release, release_head : out
        The rows of the head's oldest window are read.
    o : out stream of `PackerInput`
    error : out
        One cycle: a channel's coefficient is not legal.
    """

    _GRIDS = 8
    """Channels whose grid waits: more than are under way to the encoder and back at one channel per cycle."""

    def __init__(self, p: CacheParameters, ring_rows: int):
        self.p = p
        self.ring_rows = ring_rows
        self.depth = p.heads * p.row_transfers * ring_rows
        # A reading, the offset, the encoder.
        self.latency = WindowBuffer.read_latency + 1 + Encoder.latency
        self._codes = ResultQueue.depth_for(self.latency, 1) + 2
        self._under_way = self._codes + self.latency
        self.windows_inside = 3 + ceil_div(self._under_way, p.group_transfers * p.head_dim)
        elements = data.ArrayLayout(signed(8), p.lanes)
        super().__init__(
            {
                "windows": In(stream.Signature(ClosedWindow(ring_rows))),
                "grids": In(stream.Signature(TaggedGrid(GridTag()))),
                "hold": In(1),
                "hold_head": In(8),
                "hold_base": In(range(ring_rows)),
                "read": Out(1),
                "read_address": Out(range(max(2, self.depth))),
                "read_lane": Out(range(p.lanes)),
                "q": In(elements),
                "release": Out(1),
                "release_head": Out(8),
                "o": Out(stream.Signature(PackerInput(p))),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        register = Pipeline(m).register
        tag_shape = data.StructLayout({"last": 1, "page_start": 1, "page_end": 1})
        m.submodules.codes = codes = ResultQueue(data.ArrayLayout(CODE_BITS, p.lanes), tag_shape, self._codes)

        # Grids wait twice: their levels for the elements, what is stored of them for the codes.
        levels_shape = data.StructLayout({"grid": GroupGrid(), "offset": signed(8)})
        m.submodules.levels = levels = fifo.SyncFIFOBuffered(width=levels_shape.size, depth=self._GRIDS)
        m.submodules.metas = metas = fifo.SyncFIFOBuffered(
            width=GroupMeta().size, depth=self._GRIDS + ceil_div(self._under_way, p.group_transfers) + 1
        )
        m.submodules.owners = owners = fifo.SyncFIFOBuffered(width=PageOwner().size, depth=self.windows_inside - 1)
        given = self.grids.payload
        meta, level = Signal(GroupMeta()), Signal(levels_shape)
        take_grid = Signal()
        m.d.comb += [
            self.grids.ready.eq(levels.w_rdy & metas.w_rdy),
            take_grid.eq(self.grids.valid & self.grids.ready),
            self.error.eq(take_grid & given.grid.error),
            level.grid.eq(given.grid),
            level.offset.eq(given.tag.offset),
            meta.scale.eq(given.grid.scale),
            meta.coefficient.eq(given.coefficient),
            meta.offset.eq(given.tag.offset),
            levels.w_en.eq(take_grid),
            levels.w_data.eq(level),
            metas.w_en.eq(take_grid),
            metas.w_data.eq(meta),
        ]

        # Reading: window, word of channels, channel, beat of `lanes` rows.
        active, begin = Signal(), Signal()
        window = Signal(ClosedWindow(self.ring_rows))
        word_address = Signal(range(max(2, self.depth)))
        word, lane = Signal(range(max(2, p.row_transfers))), Signal(range(max(2, p.lanes)))
        beat, row = Signal(range(max(2, p.group_transfers))), Signal(range(self.ring_rows))
        available = Signal(range(self._GRIDS + 1))  # channels whose grid is here and that are not read
        beat_end, word_end, window_end, channel_end = Signal(), Signal(), Signal(), Signal()
        tail_lanes = p.head_dim - (p.row_transfers - 1) * p.lanes
        in_last_word = word == p.row_transfers - 1
        next_window = self.windows.payload
        held = self.hold & (self.hold_head == next_window.head) & (self.hold_base == next_window.base)
        m.d.comb += [
            self.read.eq(active & (available != 0) & codes.room),
            self.read_address.eq(word_address + row),
            self.read_lane.eq(lane),
            beat_end.eq(beat == p.group_transfers - 1),
            channel_end.eq(self.read & beat_end),
            word_end.eq(lane == Mux(in_last_word, tail_lanes - 1, p.lanes - 1)),
            window_end.eq(channel_end & word_end & in_last_word),
            self.release.eq(window_end),
            self.release_head.eq(window.head),
            self.windows.ready.eq((~active | window_end) & owners.w_rdy & ~held),
            begin.eq(self.windows.valid & self.windows.ready),
        ]
        m.d.sync += available.eq(available + take_grid - channel_end)
        with m.If(self.read):
            m.d.sync += [
                beat.eq(Mux(beat_end, 0, beat + 1)),
                row.eq(Mux(beat_end, window.base, Mux(row == self.ring_rows - p.lanes, 0, row + p.lanes))),
            ]
        with m.If(channel_end):
            m.d.sync += lane.eq(Mux(word_end, 0, lane + 1))
            with m.If(word_end):
                m.d.sync += [word.eq(word + 1), word_address.eq(word_address + self.ring_rows)]
        with m.If(window_end):
            m.d.sync += active.eq(0)
        coming = self.windows.payload
        owner = Signal(PageOwner())
        m.d.comb += [
            owner.page.eq(coming.page),
            owner.head.eq(coming.head),
            owner.timestamp.eq(coming.timestamp),
            owners.w_en.eq(begin),
            owners.w_data.eq(owner),
        ]
        with m.If(begin):
            m.d.sync += [
                active.eq(1),
                window.eq(coming),
                word.eq(0),
                row.eq(coming.base),
                word_address.eq(coming.head * (p.row_transfers * self.ring_rows)),
            ]

        # What goes with a beat.
        m.d.comb += [
            codes.enter.eq(self.read),
            codes.tag.last.eq(beat_end),
            codes.tag.page_start.eq((word == 0) & (lane == 0)),
            codes.tag.page_end.eq(word_end & in_last_word),
        ]
        valid, last = Signal(self.latency), Signal(WindowBuffer.read_latency)
        m.d.sync += [valid.eq(Cat(self.read, valid)), last.eq(Cat(beat_end, last))]

        # The elements arrive: offset out, sinks to 0.
        now = data.View(levels_shape, levels.r_data)
        arrived = valid[WindowBuffer.read_latency - 1]
        m.submodules.encoder = encoder = Encoder(p.lanes)
        sinks = self._sinks(m, coming.timestamp, begin, beat_end)
        m.d.comb += [
            levels.r_en.eq(arrived & last[-1]),
            encoder.grid.eq(register(now.grid, "grid")),
            codes.push.eq(valid[-1]),
            codes.result.eq(encoder.codes),
        ]
        for k in range(p.lanes):
            element = Mux(sinks > k, 0, self.q[k] - now.offset) if p.sinks else self.q[k] - now.offset
            m.d.comb += encoder.q[k].eq(register(element[:9].as_signed(), "element"))

        # The codes leave.
        out, owned = self.o.payload, data.View(PageOwner(), owners.r_data)
        m.d.comb += [
            self.o.valid.eq(codes.o.valid & metas.r_rdy & owners.r_rdy),
            codes.o.ready.eq(self.o.ready & metas.r_rdy & owners.r_rdy),
            out.codes.eq(codes.o.payload.result),
            out.last.eq(codes.o.payload.tag.last),
            out.page_start.eq(codes.o.payload.tag.page_start),
            out.page_end.eq(codes.o.payload.tag.page_end),
            out.meta.eq(data.View(GroupMeta(), metas.r_data)),
            out.user.eq(owned),
            metas.r_en.eq(self.o.valid & self.o.ready & out.last),
            owners.r_en.eq(metas.r_en & out.page_end),
        ]
        return m

    def _sinks(self, m: Module, timestamp: Value, begin: Value, beat_end: Value) -> Value:
        """How many lanes, from lane 0 on, of the elements that arrive belong to sinks."""
        p = self.p
        if not p.sinks:
            return None
        of_window, left, coming = (Signal(range(p.group + 1)) for _ in range(3))
        with m.If(timestamp < p.sinks):
            rest = p.sinks - timestamp[: p.sinks.bit_length()]  # a window begins at a multiple of the group
            m.d.comb += coming.eq(Mux(rest > p.group, p.group, rest))
        with m.If(self.read):
            m.d.sync += left.eq(Mux(beat_end, of_window, Mux(left > p.lanes, left - p.lanes, 0)))
        with m.If(begin):
            m.d.sync += [of_window.eq(coming), left.eq(coming)]
        return Pipeline(m).register(left, "sinks", cycles=WindowBuffer.read_latency)
