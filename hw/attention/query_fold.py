"""Queries on their way to the array: plain, or with the scales of keys along time folded into them."""

from amaranth.hdl import Cat, Const, EnableInserter, Module, Mux, Signal, signed
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_reader import FP16_ONE, ChannelWord
from kvant.hw.attention.floating import HalfProduct
from kvant.hw.attention.layouts import index_range
from kvant.hw.attention.normalize import choose
from kvant.hw.attention.offset_sums import WINDOWS_AHEAD
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.attention.query_memory import query_transfer
from kvant.hw.kvcache.parameters import BLOCK_GROUPS
from kvant.hw.linear.activation_buffer import activation_input
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.numeric.int8_quantizer import FP16_MAX
from kvant.hw.numeric.output_queue import OutputQueue

ENTRIES = 4
"""Sets of scales that are kept: of the windows that `CacheReader` holds, and of one that comes in."""


class QueryFold(wiring.Component):
    """Sends the queries of a command once for every set of keys that needs them in its own form.

    ::

        channel_words ──> scales, offsets (memories) ──┐
        i ──> port rule ───────────────────────────────┴──> HalfProduct ──> o
                 └──> offsets, place (to OffsetSums)

    For keys along time: the queries times the static scales; if there are sinks, the queries themselves; then for every
    window the queries times its scales. For other keys: the queries themselves. A set is sent when its scales have
    come, and that of a window when the static set has been kept (`kept`) and the windows before it are scored but for
    `WINDOWS_AHEAD`.

    Parameters
    ----------
    p : AttentionParameters

    Members
    -------
    start : in
        A command begins. The inputs below are stable from here on; scales may have come before.
    time, with_sinks, windows : in
        Keys along time; there are sinks among them; their windows.
    go : in
        The queries are in, the sets may be sent; once a command.
    channel_words : in stream
        `ChannelWord`.
    send : out
        Asks `QueryMemory` for all queries.
    i : in stream
        `query_transfer`.
    o : out stream
        `activation_input`: fp16, finite.
    kept : in
        See `OffsetSums`.
    scored : in
        All scores of a window are in.
    enable, window_valid, window, query, place, group_last, offsets : out
        To `OffsetSums`.
    nonfinite : out
        In this cycle a query has a NaN, taken as 0, or an infinity, taken as 65504.
    error : out
        In this cycle a scale is negative or not finite: it counts 0.
    """

    _entry = 2  # cycle in which a number enters `HalfProduct`

    def __init__(self, p: AttentionParameters):
        self.p = p
        super().__init__(
            {
                "start": In(1),
                "time": In(1),
                "with_sinks": In(1),
                "windows": In(range(p.tokens // p.group + 1)),
                "go": In(1),
                "channel_words": In(stream.Signature(ChannelWord(p))),
                "send": Out(1),
                "i": In(stream.Signature(query_transfer(p))),
                "o": Out(stream.Signature(activation_input(p.linear))),
                "kept": In(1),
                "scored": In(1),
                "enable": Out(1),
                "window_valid": Out(1),
                "window": Out(range(WINDOWS_AHEAD)),
                "query": Out(index_range(p.queries)),
                "place": Out(index_range(ceil_div(p.head_dim, p.x_lanes))),
                "group_last": Out(1),
                "offsets": Out(data.ArrayLayout(signed(8), p.x_lanes)),
                "nonfinite": Out(1),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.queue = queue = OutputQueue(activation_input(p.linear))
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        advance = queue.advance
        pipeline = Pipeline(m, enable=advance)
        register = pipeline.register

        # Scales and offsets, in memories of a word of each block. An entry is written before it is read, and not again
        # before it is used up.
        block_bits = (p.value_blocks - 1).bit_length()
        entry = Signal(range(ENTRIES))  # that is written
        known = Signal(range(ENTRIES + 1))  # entries that are complete and not yet used up
        words = []
        writes = self.channel_words.valid & self.channel_words.ready
        m.d.comb += self.channel_words.ready.eq(known != ENTRIES)
        for k in range(3 * p.unit_words):
            m.submodules[f"words_{k}"] = words_of = memory.Memory(
                shape=p.port_bits, depth=ENTRIES << block_bits, init=[], attrs={"no_rw_check": 1}
            )
            write = words_of.write_port()
            m.d.comb += [
                write.addr.eq(Cat(self.channel_words.payload.block[:block_bits], entry)),
                write.data.eq(self.channel_words.payload.data),
                write.en.eq(writes & (self.channel_words.payload.place == k)),
            ]
            words.append(words_of.read_port())
        complete = writes & self.channel_words.payload.last

        # Which set is sent.
        used = Signal.like(entry)  # the entry that is read
        done = Signal()  # the last transfer of a set is taken
        plain, window_set = Signal(), Signal()
        windows_left, window = Signal.like(self.windows), Signal(range(WINDOWS_AHEAD))
        ahead = Signal(range(WINDOWS_AHEAD + 1))  # windows whose scores are not all in
        sinks_left = Signal()
        may = (known != 0) & (~window_set | (self.kept & (ahead != WINDOWS_AHEAD)))
        uses = done & ~plain
        with m.If(self.start):
            m.d.sync += window.eq(0)
        with m.Else():
            m.d.sync += window.eq(window + (uses & window_set))
        m.d.sync += [
            entry.eq(entry + complete),
            known.eq(known + complete - uses),
            used.eq(used + uses),
            ahead.eq(ahead + (uses & window_set) - self.scored),
        ]
        with m.FSM(name="set"):
            with m.State("IDLE"):
                m.d.sync += [
                    plain.eq(~self.time),
                    window_set.eq(0),
                    sinks_left.eq(self.time & self.with_sinks),
                    windows_left.eq(Mux(self.time, self.windows, 0)),
                ]
                with m.If(self.go):
                    m.next = "WAIT"
            with m.State("WAIT"):
                with m.If(plain | may):
                    m.d.comb += self.send.eq(1)
                    m.next = "SEND"
            with m.State("SEND"):
                with m.If(done):
                    m.d.sync += [plain.eq(sinks_left), sinks_left.eq(0), window_set.eq(~sinks_left)]
                    with m.If(window_set):
                        m.d.sync += windows_left.eq(windows_left - 1)
                    with m.If(sinks_left | (windows_left != window_set)):
                        m.next = "WAIT"
                    with m.Else():
                        m.next = "IDLE"

        # Cycle 0: the memories are asked, the elements pass the port rule.
        item = self.i.payload
        enters = self.i.valid & advance
        per_block = BLOCK_GROUPS // p.x_lanes
        part_bits = (per_block - 1).bit_length()
        transfers = ceil_div(p.head_dim, p.x_lanes)
        tail = p.head_dim - (transfers - 1) * p.x_lanes
        block = (item.place >> part_bits)[:block_bits] if block_bits else Const(0, 0)
        last_place = item.place == transfers - 1
        m.d.comb += [
            self.i.ready.eq(advance),
            done.eq(enters & item.last),
            self.enable.eq(advance),
            self.window_valid.eq(self.i.valid & window_set & ~plain),
            self.window.eq(window),
            self.query.eq(item.query),
            self.place.eq(item.place),
            self.group_last.eq(item.group_last),
        ]
        for read in words:
            m.d.comb += [read.addr.eq(Cat(block, used)), read.en.eq(enters & ~plain)]
        elements, keeps, wrong = [], [], []
        for lane in range(p.x_lanes):
            number = item.data[lane]
            keep = 1 if lane < tail else ~last_place
            nonfinite = number[10:15].all()
            magnitude = Mux(nonfinite, Mux(number[:10].any(), 0, FP16_MAX), number[:15])
            elements.append(register(Mux(keep, Cat(magnitude, number[15]), 0), "element", cycles=self._entry))
            keeps.append(register(keep, "keep", cycles=self._entry) if lane >= tail else Const(1))
            wrong.append(nonfinite & keep)
        m.d.comb += [
            self.nonfinite.eq(enters & Cat(*wrong).any()),
            queue.valid.eq(pipeline.valid(self.i.valid, cycles=self._entry + HalfProduct.latency)),
        ]

        # Cycle 1: they answer; 2: scales and offsets of the transfer's channels.
        part = register(item.place[:part_bits], "part") if part_bits else Const(0, 1)
        plain_now = register(plain, "plain", cycles=self._entry)
        scale_words, offset_words = Signal(16 * BLOCK_GROUPS), Signal(8 * BLOCK_GROUPS)
        m.d.comb += [
            scale_words.eq(Cat(read.data for read in words[: 2 * p.unit_words])),
            offset_words.eq(Cat(read.data for read in words[2 * p.unit_words :])),
        ]
        scales, offsets = (
            register(choose([part_of[k * size : (k + 1) * size] for k in range(per_block)], part), name)
            for part_of, size, name in (
                (scale_words, 16 * p.x_lanes, "scales"),
                (offset_words, 8 * p.x_lanes, "offsets"),
            )
        )
        illegal = []
        for lane in range(p.x_lanes):
            scale = scales[16 * lane : 16 * lane + 16]
            bad = scale[10:15].all() | (scale[15] & scale[:15].any())
            illegal.append(bad & keeps[lane])
            m.submodules[f"product_{lane}"] = EnableInserter(advance)(product := HalfProduct())
            m.d.comb += [
                product.a.eq(elements[lane]),
                product.b.eq(Mux(plain_now, FP16_ONE, Mux(bad, 0, scale))),
                queue.payload.data[lane].eq(product.product),
                self.offsets[lane].eq(Mux(keeps[lane], offsets[8 * lane : 8 * lane + 8], 0)),
            ]
        folds = pipeline.valid(self.i.valid & ~plain, cycles=self._entry)
        m.d.comb += self.error.eq(advance & folds & Cat(*illegal).any())
        return m
