"""From words of memory to tiles of the array: M-ANT pages and INT8 blocks of a cache as weights of the linear path."""

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, fifo, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.normalize import choose
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.page import TIMESTAMP_BYTES
from kvant.hw.kvcache.parameters import BLOCK_GROUPS
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.linear.weight_buffer import weight_input
from kvant.hw.numeric.codes import INT8
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.numeric.output_queue import OutputQueue

FP16_ONE = 0x3C00
"""1 in fp16."""


class ReaderJob(data.StructLayout):
    """What `CacheReader` is to read.

    Members
    -------
    values : 1
        From the port of values, pages of values; else keys.
    int8 : 1
        Keys behind the sinks are INT8 blocks, not pages.
    sink_blocks
        INT8 blocks of sinks before the keys; 0 with `values`.
    pages
        Pages, or INT8 blocks.
    tiles
        Tiles of keys behind the sinks that are sent; what the last page has besides is dropped. Not for `values`, and
        not with `time`.
    time : 1
        The pages are windows of keys along time. The scales of the channels come first; `sink_blocks` are the INT8
        blocks of the open window and of the sinks. Only with `AttentionParameters.time_keys`.
    """

    def __init__(self, p: AttentionParameters):
        most_pages = ceil_div(p.tokens * p.head_groups, min(BLOCK_GROUPS, p.group))
        super().__init__(
            {
                "values": 1,
                "int8": 1,
                "sink_blocks": range(p.sink_blocks + p.staged_blocks + 2),
                "pages": range(most_pages + 1),
                "tiles": range(max(ceil_div(p.tokens, p.cols), p.value_tiles) + 1),
                **({"time": 1} if p.time_keys else {}),
            }
        )


class BlockPlan(data.StructLayout):
    """A block that lies complete in the buffer: its tiles to send, whether it is INT8, whether it is of values.

    With *time*, whether it is a whole window of keys along time, of which all tiles are sent.
    """

    def __init__(self, *, time: bool = False):
        super().__init__({"tiles": range(BLOCK_GROUPS + 1), "int8": 1, "values": 1, **({"time": 1} if time else {})})


class ChannelWord(data.StructLayout):
    """A word of the scales of channels, or of offsets, on its way from a page to where queries are folded.

    Members
    -------
    data : port_bits
    place
        Which word of a block of 16 channels: the scales' words, then those of the offsets.
    block
        Block of the head.
    last : 1
        The last one of the static scales, or of a page.
    """

    def __init__(self, p: AttentionParameters):
        super().__init__(
            {"data": p.port_bits, "place": range(3 * p.unit_words), "block": range(max(2, p.value_blocks)), "last": 1}
        )


def word_port(p: AttentionParameters) -> data.StructLayout:
    """Payload of a port that reads memory: a word, the byte of the lowest address lowest."""
    return data.StructLayout({"data": p.port_bits})


class CacheReader(wiring.Component):
    """Takes storage blocks of a cache word by word and sends their tiles to the array.

    A word of the port has `parts` pieces of `rows` nibbles, mostly neighbours in one group; a beat of the array wants
    one such piece of each of `cols` groups. Pieces lie in as many banks as a word has: piece e of a block (group by
    group, beat by beat) in the bank that is the exclusive or of the digits of e to the base `parts`. So the pieces of
    a word are in different banks, and likewise those of any aligned set that differs in neighbouring bits of e, as
    the pieces of one beat of the columns of a tile do, whatever the stride between their groups. Bytes of an INT8
    block are cut into high and low nibbles, which make two planes: the bank of a high one differs in its first bit,
    so that the pieces of a word of bytes are in different banks, too.

    Two blocks fit. While one is sent the other is filled: a word per cycle, but for a few cycles a block, as long as
    the array takes a block's tiles in fewer cycles than it has words.

    A window of keys along time is a page of values with another use: its groups are channels, the array multiplies
    `rows` channels of each of `cols` tokens. It is stored whole, and read as values are, a piece of `rows` tokens of
    each of several channels in a cycle; what a beat needs of the pieces is only another order of their nibbles. There
    is room for three windows then: one is filled, one waits for its folded queries, one is sent.

    Parameters
    ----------
    p : AttentionParameters

    Attributes
    ----------
    parts : int
        Pieces of a word, and banks.
    columns : int
        Columns that are read in one cycle: all, or `parts` of them.
    channels : int
        Channels of keys along time that are read in one cycle.
    slots : int
        Blocks, or windows of keys along time, that fit.
    latency : int
        Cycles from the last word of a block to its first transfer, if nothing was before it.

    Members
    -------
    job : in stream
        `ReaderJob`; taken when the words of the job before have been taken.
    keys, values : in stream
        `word_port`: blocks and trailers as they lie in memory.
    w : out stream
        `weight_input` of the linear path: of each block, for every group of the head (values: once), for every tile,
        for INT8 the plane of high nibbles, then that of low nibbles or codes: its beats. Column c of a tile is group
        ``(tile * cols + c) * stride + g`` of the block, the stride that of the head groups or 1. Of a window of keys
        along time: for every `key_tiles` tiles, for every group of the head, for each of these tiles its beats; column
        c is a token, the scale is 1.

    With `AttentionParameters.time_keys` also:

    channel_words : out stream
        `ChannelWord`, of the static scales or of a page.
    """

    latency = 6

    def __init__(self, p: AttentionParameters):
        self.p = p.check_attention()
        self.parts = p.port_bits // (4 * p.rows)
        self.columns = min(self.parts, p.cols)
        self.channels = min(self.parts, p.rows)
        self.slots = 3 if p.time_keys else 2
        self._block_bits = (p.value_blocks - 1).bit_length() if p.time_keys else 0
        self._digit = (self.parts - 1).bit_length()
        self._beat_bits = (p.group // p.rows - 1).bit_length()
        self._piece_bits = self._beat_bits + (BLOCK_GROUPS - 1).bit_length()
        super().__init__(
            {
                "job": In(stream.Signature(ReaderJob(p))),
                "keys": In(stream.Signature(word_port(p))),
                "values": In(stream.Signature(word_port(p))),
                "w": Out(stream.Signature(weight_input(p.linear))),
                **({"channel_words": Out(stream.Signature(ChannelWord(p)))} if p.time_keys else {}),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        metadata = [
            [Signal(p.port_bits, name=f"metadata_{slot}_{k}", reset_less=True) for k in range(3 * p.unit_words)]
            for slot in range(self.slots)
        ]
        shared = [Signal(8, name=f"coefficient_{slot}", reset_less=True) for slot in range(self.slots)]
        row_bits = self._piece_bits - self._digit + max(1, self._block_bits)  # of a slot: a block has two planes
        # A slot is read after it was filled and filled again after it was read: no address is both at once.
        banks = []
        for k in range(self.parts):
            m.submodules[f"bank_{k}"] = bank = memory.Memory(
                shape=4 * p.rows, depth=self.slots << row_bits, init=[], attrs={"no_rw_check": 1}
            )
            banks.append(bank)
        plan = Signal(BlockPlan(time=p.time_keys))
        plan_valid, plan_taken, released = Signal(), Signal(), Signal()
        self._fill(m, banks, metadata, shared, plan, plan_valid, plan_taken, released)
        self._send(m, banks, metadata, shared, plan, plan_valid, plan_taken, released)
        return m

    def _next(self, slot: Value) -> Value:
        """The slot behind *slot*."""
        return ~slot if self.slots == 2 else Mux(slot == self.slots - 1, 0, slot + 1)

    def _of_slot(self, items: list[Value], slot: Value) -> Value:
        """What belongs to *slot*."""
        return Mux(slot, items[1], items[0]) if self.slots == 2 else Array(items)[slot]

    def _hash(self, number: Value) -> Value:
        """Exclusive or of the digits of *number* to the base `parts`."""
        total = Const(0, self._digit)
        for k in range(0, len(number), self._digit):
            total = total ^ number[k : k + self._digit]
        return total[: self._digit]

    def _permuted(self, m: Module, items: list[Value], index: Value) -> list[Value]:
        """Item ``k ^ index`` in place k."""
        for bit in range(self._digit):
            swapped = [Signal(len(item), name=f"swapped_{bit}") for item in items]
            for k, item in enumerate(swapped):
                m.d.comb += item.eq(Mux(index[bit], items[k ^ (1 << bit)], items[k]))
            items = swapped
        return items

    def _fill(self, m: Module, banks, metadata, shared, plan, plan_valid, plan_taken, released):
        """Words into the slot that is free."""
        p = self.p
        job = Signal(ReaderJob(p), reset_less=True)
        time = job.time if p.time_keys else Const(0)
        of_sinks = Signal()  # the block is one of sinks
        block_tiles = Signal(range(BLOCK_GROUPS + 1))
        in_page = Signal(range(max(p.page_blocks, p.value_blocks) + 1))  # block of the page
        word = Signal(range(2 * p.code_words))
        of_window = time & ~of_sinks
        slot, held = Signal(range(self.slots)), Signal(range(self.slots + 1))  # slots that are filled or being sent
        int8 = of_sinks | (job.int8 & ~job.values)
        per_block = BLOCK_GROUPS // p.cols
        m.d.comb += block_tiles.eq(Mux(job.values, Mux(job.tiles < per_block, job.tiles, per_block), p.key_tiles))
        key_limit = Mux(job.int8, p.key_tiles, p.page_key_tiles)
        with m.If(~job.values & ~of_sinks & ~time):
            m.d.comb += block_tiles.eq(Mux(job.tiles < key_limit, job.tiles, key_limit))
        wanted = of_window | (block_tiles != 0)
        last_in_page = in_page == Mux(job.values | time, p.value_blocks - 1, p.page_blocks - 1)

        # The port of the job. Nothing that is dropped waits for room.
        static, codes, scales, trailer = Signal(), Signal(), Signal(), Signal()
        port = Signal(word_port(p))
        valid, ready, take = Signal(), Signal(), Signal()
        room = (held != self.slots) | ~wanted
        channels_room = self.channel_words.ready | ~(static | (scales & of_window)) if p.time_keys else Const(1)
        m.d.comb += [
            port.eq(Mux(job.values, self.values.payload, self.keys.payload)),
            valid.eq(Mux(job.values, self.values.valid, self.keys.valid)),
            ready.eq((((codes | scales) & room) | trailer | static) & channels_room),
            self.keys.ready.eq(ready & ~job.values),
            self.values.ready.eq(ready & job.values),
            take.eq(valid & ready),
        ]
        codes_end = word == Mux(int8, 2 * p.code_words, p.code_words) - 1
        scales_end = word == Mux(int8, 2 * p.unit_words, 3 * p.unit_words) - 1
        trailer_end = word == p.unit_words - 1
        page_end, next_block, job_end = Signal(), Signal(), Signal()
        # Keys along time may have no pages.
        m.d.comb += job_end.eq(
            page_end & Mux(of_sinks, time & (job.sink_blocks == 1) & (job.pages == 0), job.pages == 1)
        )
        static_end = (word == 2 * p.unit_words - 1) & last_in_page
        with m.If(take):
            m.d.sync += word.eq(word + 1)
        with m.FSM(name="fill"):
            with m.State("JOB"):
                m.d.comb += self.job.ready.eq(1)
                m.d.sync += [
                    job.eq(self.job.payload),
                    of_sinks.eq(self.job.payload.sink_blocks != 0),
                    in_page.eq(0),
                    word.eq(0),
                ]
                with m.If(self.job.payload.values):
                    m.d.sync += job.tiles.eq(p.value_tiles)
                with m.If(self.job.valid):
                    m.next = "CODES"
                    if p.time_keys:
                        with m.If(self.job.payload.time):
                            m.next = "STATIC"
            if p.time_keys:
                with m.State("STATIC"):
                    m.d.comb += static.eq(1)
                    with m.If(take & (word == 2 * p.unit_words - 1)):
                        m.d.sync += [word.eq(0), in_page.eq(Mux(static_end, 0, in_page + 1))]
                        with m.If(static_end):
                            m.next = "CODES"
            with m.State("CODES"):
                m.d.comb += codes.eq(1)
                with m.If(take & codes_end):
                    m.d.sync += word.eq(0)
                    m.next = "SCALES"
            with m.State("SCALES"):
                m.d.comb += scales.eq(1)
                with m.If(take & scales_end):
                    m.d.comb += next_block.eq(1)
                    m.d.sync += word.eq(0)
                    with m.If(int8):
                        m.d.comb += page_end.eq(1)
                        with m.If(job_end):
                            m.next = "JOB"
                        with m.Else():
                            m.next = "CODES"
                    with m.Elif(last_in_page):
                        m.next = "TRAILER"
                    with m.Else():
                        m.next = "CODES"
            with m.State("TRAILER"):
                m.d.comb += trailer.eq(1)
                with m.If(take & trailer_end):
                    m.d.comb += page_end.eq(1)
                    m.d.sync += word.eq(0)
                    with m.If(job_end):
                        m.next = "JOB"
                    with m.Else():
                        m.next = "CODES"
        with m.If(next_block):
            m.d.sync += in_page.eq(Mux(int8 | last_in_page, 0, in_page + 1))
            with m.If(~of_sinks):
                m.d.sync += job.tiles.eq(job.tiles - block_tiles)
        if p.time_keys:
            m.d.comb += [
                self.channel_words.valid.eq(valid & (static | (scales & of_window & room))),
                self.channel_words.payload.data.eq(port.data),
                self.channel_words.payload.place.eq(word),
                self.channel_words.payload.block.eq(in_page),
                self.channel_words.payload.last.eq(Mux(static, static_end, scales_end & last_in_page)),
            ]
            trailer_word, trailer_bit = divmod(8 * TIMESTAMP_BYTES, p.port_bits)
            for number, register in enumerate(shared):
                with m.If(take & trailer & of_window & (slot == number) & (word == trailer_word)):
                    m.d.sync += register.eq(port.data[trailer_bit : trailer_bit + 8])
        with m.If(page_end):
            with m.If(of_sinks):
                m.d.sync += [job.sink_blocks.eq(job.sink_blocks - 1), of_sinks.eq(job.sink_blocks != 1)]
            with m.Else():
                m.d.sync += job.pages.eq(job.pages - 1)
                with m.If(job.values):
                    m.d.sync += job.tiles.eq(p.value_tiles)

        # A block is announced with its last word. The one before it has been begun by then: at most one waits.
        sends = Mux(of_window, page_end, next_block & wanted)
        m.d.sync += held.eq(held + sends - released)
        now = Signal.like(plan, name="plan_now")
        m.d.comb += [now.tiles.eq(block_tiles), now.int8.eq(int8), now.values.eq(job.values)]
        with m.If(sends):
            m.d.sync += slot.eq(self._next(slot))
        if p.time_keys:  # one more may wait, for its queries
            m.submodules.plans = plans = fifo.SyncFIFO(width=plan.shape().size, depth=2)
            m.d.comb += [
                now.time.eq(of_window),
                plans.w_data.eq(now),
                plans.w_en.eq(sends),
                plan.eq(plans.r_data),
                plan_valid.eq(plans.r_rdy),
                plans.r_en.eq(plan_taken),
            ]
        else:
            with m.If(sends):
                m.d.sync += [plan_valid.eq(1), plan.eq(now)]
            with m.Elif(plan_taken):
                m.d.sync += plan_valid.eq(0)

        for number, registers in enumerate(metadata):
            for k, register in enumerate(registers):
                with m.If(take & scales & wanted & (slot == number) & (word == k)):
                    m.d.sync += register.eq(port.data)

        # The pieces of the word, in the order of the banks; a cycle later they are written.
        part_bits = 4 * p.rows
        pieces = [port.data[k * part_bits : (k + 1) * part_bits] for k in range(self.parts)]
        nibbles = [port.data[4 * k : 4 * k + 4] for k in range(p.port_bits // 4)]
        per_plane = self.parts // 2
        planes = [
            Cat(*nibbles[2 * k * p.rows + plane : 2 * (k + 1) * p.rows : 2])
            for plane in range(2)
            for k in range(per_plane)
        ]
        row_bits = self._piece_bits - self._digit
        row = Mux(int8, word >> 1, word)[:row_bits]
        block = Mux(of_window, in_page[: self._block_bits], 0) if self._block_bits else Const(0, 0)
        odd = int8 & word[0]
        place = Signal(self._digit, name="place")
        m.d.comb += place.eq(self._hash(Cat(row, block)) ^ (odd << (self._digit - 1)))
        pieces = [Mux(int8, byte, code) for byte, code in zip(planes, pieces, strict=True)]
        written = Signal()
        m.d.sync += written.eq(take & codes & wanted)
        for k, piece in enumerate(self._permuted(m, pieces, place)):
            write = banks[k].write_port()
            held_piece = Signal(part_bits, name=f"piece_{k}", reset_less=True)
            high = int8 & (place[-1] ^ (k >> (self._digit - 1)))
            held_row = Signal(len(write.addr), name=f"row_{k}", reset_less=True)
            m.d.sync += [held_piece.eq(piece), held_row.eq(Cat(self._plane(row, block, high), slot))]
            m.d.comb += [write.en.eq(written), write.addr.eq(held_row), write.data.eq(held_piece)]

    def _plane(self, row: Value, block: Value, high: Value) -> Value:
        """Address within a slot: of a block with two planes, or of a window's block."""
        row = row[: self._piece_bits - self._digit]
        if not self._block_bits:
            return Cat(row, high)
        return Cat(row, block[0] | high, block[1:])

    def _send(self, m: Module, banks, metadata, shared, next_plan, plan_valid, plan_taken, released):
        """Tiles of the slot that is full."""
        p = self.p
        m.submodules.queue = queue = OutputQueue(weight_input(p.linear))
        wiring.connect(m, queue.o, wiring.flipped(self.w))
        advance = queue.advance
        pipeline = Pipeline(m, enable=advance)
        register = pipeline.register
        beats = p.group // p.rows
        key_beats = ceil_div(min(p.group, p.head_dim), p.rows)
        turns = p.cols // self.columns
        channel_turns, token_turns = p.rows // self.channels, max(1, p.cols // p.rows)
        time_turns = channel_turns * token_turns if p.time_keys else 1
        time_blocks = p.window_tiles // p.key_tiles if p.time_keys else 1

        # Where the sending stands.
        plan, active, slot = Signal(next_plan.shape(), reset_less=True), Signal(), Signal(range(self.slots))
        time = plan.time if p.time_keys else Const(0)
        turn, beat = Signal(range(max(2, turns, time_turns))), Signal(range(max(2, beats)))
        low_plane = Signal()
        tile, head_group = Signal(range(BLOCK_GROUPS)), Signal(range(max(2, p.head_groups)))
        tile_block = Signal(range(max(2, time_blocks)))  # of a window
        turn_end = turn == Mux(time, time_turns - 1, turns - 1)
        beat_end = turn_end & (beat == Mux(plan.values, beats - 1, key_beats - 1))
        plane_end = beat_end & (low_plane | ~plan.int8)
        tile_end = plane_end & (tile + 1 == plan.tiles)
        round_end = tile_end & (plan.values | (head_group == p.head_groups - 1))
        block_end = Signal()
        m.d.comb += [
            block_end.eq(active & round_end & (~time | (tile_block == time_blocks - 1))),
            plan_taken.eq(plan_valid & (~active | (advance & block_end))),
        ]
        with m.If(advance & block_end):
            m.d.sync += slot.eq(self._next(slot))
        with m.If(plan_taken):
            m.d.sync += [active.eq(1), plan.eq(next_plan), tile_block.eq(0)]
            m.d.sync += [turn.eq(0), beat.eq(0), low_plane.eq(0), tile.eq(0), head_group.eq(0)]
        with m.Elif(advance & active):
            m.d.sync += turn.eq(Mux(turn_end, 0, turn + 1))
            with m.If(turn_end):
                m.d.sync += beat.eq(Mux(beat_end, 0, beat + 1))
            with m.If(beat_end):
                m.d.sync += low_plane.eq(plan.int8 & ~low_plane)
            with m.If(plane_end):
                m.d.sync += tile.eq(Mux(tile_end, 0, tile + 1))
            with m.If(tile_end):
                m.d.sync += head_group.eq(Mux(round_end, 0, head_group + 1))
            with m.If(round_end):
                m.d.sync += tile_block.eq(tile_block + 1)
            with m.If(block_end):
                m.d.sync += active.eq(0)

        # Cycle 0: the first column's piece, and with it where every bank has its own.
        row_bits = self._piece_bits - self._digit
        piece_bits = self._piece_bits + self._block_bits
        column_bits = (self.columns - 1).bit_length()
        strides = [(p.head_groups - 1).bit_length(), 0]  # of keys and of values
        bases, offsets = [], []
        for values, stride in enumerate(strides):
            group = Cat(
                *([] if values else [head_group[:stride]]), Const(0, column_bits), turn[: (turns - 1).bit_length()]
            )
            bases.append(Cat(beat[: self._beat_bits], group, tile)[: self._piece_bits])
            offsets.append((self._beat_bits + stride, column_bits))
        sub_piece = Const(0, 0)
        if p.time_keys:
            window_tile = Cat(tile[: (p.key_tiles - 1).bit_length()], tile_block[: (time_blocks - 1).bit_length()])
            cut = (max(1, p.rows // p.cols) - 1).bit_length()  # a piece has the tokens of several tiles
            sub_piece, window_tile = window_tile[:cut], window_tile[cut:]
            channel_bits, turn_bits = (self.channels - 1).bit_length(), (channel_turns - 1).bit_length()
            piece = Cat(turn[turn_bits : turn_bits + (token_turns - 1).bit_length()], window_tile)
            channel = Cat(Const(0, channel_bits), turn[:turn_bits], beat[: self._beat_bits], head_group[: strides[0]])
            bases.append(Cat(piece[: self._beat_bits], channel)[:piece_bits])
            offsets.append((self._beat_bits, channel_bits))
        kind = Cat(plan.values, time)
        base = Signal(piece_bits)
        high = plan.int8 & ~low_plane
        first = Signal(self._digit)  # bank of the first column's piece
        m.d.comb += [
            base.eq(choose(bases, kind)),
            first.eq(self._hash(base) ^ (high << (self._digit - 1))),
        ]
        asks = advance & pipeline.valid(active, cycles=1)
        reads = []
        for k, bank in enumerate(banks):
            read = bank.read_port()
            other = first ^ k
            rows = []
            for offset, bits in offsets:
                row = [Const(0, 1)] * (piece_bits - self._digit)
                for j in range(bits):
                    if offset + j >= self._digit:
                        row[offset + j - self._digit] = other[(offset + j) % self._digit]
                rows.append(Cat(*row))
            row = base[self._digit :] | choose(rows, kind)
            plane = self._plane(row, Mux(time, row[row_bits:], 0) if self._block_bits else Const(0, 0), high)
            m.d.comb += [
                read.addr.eq(register(Cat(plane, slot), f"read_row_{k}")),
                read.en.eq(asks),
            ]
            # Cycle 1: the bank is asked. Cycle 2: it answers, cycle 3: in order of the columns.
            reads.append(register(read.data, f"read_{k}"))
        first = register(first, "first", cycles=3)
        values, of_time = register(plan.values, "of_values", cycles=3), register(time, "of_time", cycles=3)
        sub_piece = register(sub_piece, "sub_piece", cycles=3) if len(sub_piece) else sub_piece
        ordered = self._permuted(m, reads, first)
        pieces = []
        for c in range(max(self.columns, self.channels) if p.time_keys else self.columns):
            places = [
                sum((c >> j & 1) << ((offset + j) % self._digit) for j in range(self._digit)) for offset, _ in offsets
            ]
            along_head, of_channel = ordered[places[0]], ordered[places[1]]
            pieces.append(along_head if places[0] == places[1] else Mux(values | of_time, of_channel, along_head))
        # What earlier turns of the beat read comes before it.
        history = [pieces]
        for _ in range(max(turns, time_turns) - 1):
            earlier = []
            for k, piece in enumerate(history[0]):
                held = Signal(len(piece), name=f"earlier_{k}", reset_less=True)
                with m.If(advance):
                    m.d.sync += held.eq(piece)
                earlier.append(held)
            history.insert(0, earlier)
        now = Cat(piece for turn_pieces in history[-turns:] for piece in turn_pieces[: self.columns])
        if p.time_keys:
            now = Mux(of_time, self._transposed(history[-time_turns:], sub_piece), now)
        m.d.comb += [
            queue.valid.eq(pipeline.valid(active & turn_end, cycles=4)),
            queue.payload.data.eq(register(now, "now")),
            released.eq(advance & pipeline.valid(block_end, cycles=4)),
        ]

        # Scales and coefficients of the tile, a cycle before they leave.
        tile, head_group = register(tile, "tile", cycles=3), register(head_group, "head_group", cycles=3)
        of_slot = register(slot, "of_slot", cycles=3)
        int8 = register(plan.int8, "of_int8", cycles=3)
        numbers = Signal(
            data.StructLayout(
                {"scales": data.ArrayLayout(16, BLOCK_GROUPS), "coefficients": data.ArrayLayout(8, BLOCK_GROUPS)}
            )
        )
        m.d.comb += numbers.eq(self._of_slot([Cat(*registers) for registers in metadata], of_slot))
        scales, coefficients = (
            [part[k] for k in range(BLOCK_GROUPS)] for part in (numbers.scales, numbers.coefficients)
        )
        user = Signal(weight_input(p.linear)["user"].shape)
        # A window is no INT8 group, whatever its coefficient says: that would change the number of its planes.
        coefficient = Signal(8)
        m.d.comb += coefficient.eq(self._of_slot(shared, of_slot))
        with m.If(self._of_slot(shared, of_slot) == INT8):
            m.d.comb += coefficient.eq(INT8 - 1)
        for c in range(p.cols):
            index = Signal(range(BLOCK_GROUPS), name=f"group_{c}")
            column = Const(c, (p.cols - 1).bit_length())
            key_group = Cat(head_group[: strides[0]], column, tile)[: len(index)]
            m.d.comb += [
                index.eq(Mux(values, Cat(column, tile)[: len(index)], key_group)),
                user[c].scale.eq(Mux(of_time, FP16_ONE, choose(scales, index))),
                user[c].coefficient.eq(Mux(int8, INT8, Mux(of_time, coefficient, choose(coefficients, index)))),
            ]
        m.d.comb += queue.payload.user.eq(register(user.as_value(), "user"))

    def _transposed(self, history: list[list[Value]], sub_piece: Value) -> Value:
        """A beat of keys along time: of `cols` tokens the codes of `rows` channels.

        Parameters
        ----------
        history : list of lists
            For every turn a piece of `rows` tokens of each of `channels` channels; turns of channels go before turns of
            tokens.
        sub_piece
            Where a piece has the tokens of several tiles: which of them.
        """
        p = self.p
        turns = p.rows // self.channels

        def code(token: int, channel: int) -> Value:
            piece = history[channel // self.channels + turns * (token // p.rows)][channel % self.channels]
            place = 4 * (token % p.rows)
            return piece[place : place + 4]

        tiles = max(1, p.rows // p.cols)
        beats = [
            Cat(code(tile * p.cols + column, row) for column in range(p.cols) for row in range(p.rows))
            for tile in range(tiles)
        ]
        return choose(beats, sub_piece) if tiles > 1 else beats[0]
