"""From words of memory to tiles of the array: M-ANT pages and INT8 blocks of a cache as weights of the linear path."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.normalize import choose
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import BLOCK_GROUPS
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.linear.weight_buffer import weight_input
from kvant.hw.numeric.codes import INT8
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.numeric.output_queue import OutputQueue


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
        Tiles of keys behind the sinks that are sent; what the last page has besides is dropped. Not for `values`.
    """

    def __init__(self, p: AttentionParameters):
        most_pages = ceil_div(p.tokens * p.head_groups, min(BLOCK_GROUPS, p.group))
        super().__init__(
            {
                "values": 1,
                "int8": 1,
                "sink_blocks": range(p.sink_blocks + 2),
                "pages": range(most_pages + 1),
                "tiles": range(max(ceil_div(p.tokens, p.cols), p.value_tiles) + 1),
            }
        )


class BlockPlan(data.StructLayout):
    """A block that lies complete in the buffer: its tiles to send, whether it is INT8, whether it is of values."""

    def __init__(self):
        super().__init__({"tiles": range(BLOCK_GROUPS + 1), "int8": 1, "values": 1})


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

    Parameters
    ----------
    p : AttentionParameters

    Attributes
    ----------
    parts : int
        Pieces of a word, and banks.
    columns : int
        Columns that are read in one cycle: all, or `parts` of them.
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
        ``(tile * cols + c) * stride + g`` of the block, the stride that of the head groups or 1.
    """

    latency = 6

    def __init__(self, p: AttentionParameters):
        self.p = p.check_attention()
        self.parts = p.port_bits // (4 * p.rows)
        self.columns = min(self.parts, p.cols)
        self._digit = (self.parts - 1).bit_length()
        self._beat_bits = (p.group // p.rows - 1).bit_length()
        self._piece_bits = self._beat_bits + (BLOCK_GROUPS - 1).bit_length()
        super().__init__(
            {
                "job": In(stream.Signature(ReaderJob(p))),
                "keys": In(stream.Signature(word_port(p))),
                "values": In(stream.Signature(word_port(p))),
                "w": Out(stream.Signature(weight_input(p.linear))),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        metadata = [
            [Signal(p.port_bits, name=f"metadata_{half}_{k}", reset_less=True) for k in range(3 * p.unit_words)]
            for half in range(2)
        ]
        row_bits = self._piece_bits - self._digit
        # A half is read after it was filled and filled again after it was read: no address is both at once.
        banks = []
        for k in range(self.parts):
            m.submodules[f"bank_{k}"] = bank = memory.Memory(
                shape=4 * p.rows, depth=1 << (2 + row_bits), init=[], attrs={"no_rw_check": 1}
            )
            banks.append(bank)
        plan, plan_valid, plan_taken, released = Signal(BlockPlan()), Signal(), Signal(), Signal()
        self._fill(m, banks, metadata, plan, plan_valid, plan_taken, released)
        self._send(m, banks, metadata, plan, plan_valid, plan_taken, released)
        return m

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

    def _fill(self, m: Module, banks, metadata, plan, plan_valid, plan_taken, released):
        """Words into the half that is free."""
        p = self.p
        job = Signal(ReaderJob(p), reset_less=True)
        of_sinks = Signal()  # the block is one of sinks
        block_tiles = Signal(range(BLOCK_GROUPS + 1))
        in_page = Signal(range(max(p.page_blocks, p.value_blocks) + 1))  # block of the page
        word = Signal(range(2 * p.code_words))
        half, held = Signal(), Signal(range(3))  # halves that are filled or being sent
        int8 = of_sinks | (job.int8 & ~job.values)
        per_block = BLOCK_GROUPS // p.cols
        m.d.comb += block_tiles.eq(Mux(job.values, Mux(job.tiles < per_block, job.tiles, per_block), p.key_tiles))
        key_limit = Mux(job.int8, p.key_tiles, p.page_key_tiles)
        with m.If(~job.values & ~of_sinks):
            m.d.comb += block_tiles.eq(Mux(job.tiles < key_limit, job.tiles, key_limit))
        wanted = block_tiles != 0
        last_in_page = in_page == Mux(job.values, p.value_blocks - 1, p.page_blocks - 1)

        # The port of the job. Nothing that is dropped waits for room.
        codes, scales, trailer = Signal(), Signal(), Signal()
        port = Signal(word_port(p))
        valid, ready, take = Signal(), Signal(), Signal()
        room = (held != 2) | ~wanted
        m.d.comb += [
            port.eq(Mux(job.values, self.values.payload, self.keys.payload)),
            valid.eq(Mux(job.values, self.values.valid, self.keys.valid)),
            ready.eq(((codes | scales) & room) | trailer),
            self.keys.ready.eq(ready & ~job.values),
            self.values.ready.eq(ready & job.values),
            take.eq(valid & ready),
        ]
        codes_end = word == Mux(int8, 2 * p.code_words, p.code_words) - 1
        scales_end = word == Mux(int8, 2 * p.unit_words, 3 * p.unit_words) - 1
        trailer_end = word == p.unit_words - 1
        page_end, next_block, job_end = Signal(), Signal(), Signal()
        m.d.comb += job_end.eq(page_end & ~of_sinks & (job.pages == 1))
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
        with m.If(page_end):
            with m.If(of_sinks):
                m.d.sync += [job.sink_blocks.eq(job.sink_blocks - 1), of_sinks.eq(job.sink_blocks != 1)]
            with m.Else():
                m.d.sync += job.pages.eq(job.pages - 1)
                with m.If(job.values):
                    m.d.sync += job.tiles.eq(p.value_tiles)

        # A block is announced with its last word. The one before it has been begun by then: at most one waits.
        sends = next_block & wanted
        m.d.sync += held.eq(held + sends - released)
        with m.If(sends):
            m.d.sync += [
                half.eq(~half),
                plan_valid.eq(1),
                plan.tiles.eq(block_tiles),
                plan.int8.eq(int8),
                plan.values.eq(job.values),
            ]
        with m.Elif(plan_taken):
            m.d.sync += plan_valid.eq(0)

        for number, registers in enumerate(metadata):
            for k, register in enumerate(registers):
                with m.If(take & scales & wanted & (half == number) & (word == k)):
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
        odd = int8 & word[0]
        place = Signal(self._digit, name="place")
        m.d.comb += place.eq(self._hash(row) ^ (odd << (self._digit - 1)))
        pieces = [Mux(int8, byte, code) for byte, code in zip(planes, pieces, strict=True)]
        written = Signal()
        m.d.sync += written.eq(take & codes & wanted)
        for k, piece in enumerate(self._permuted(m, pieces, place)):
            write = banks[k].write_port()
            held_piece = Signal(part_bits, name=f"piece_{k}", reset_less=True)
            held_row = Signal(row_bits + 2, name=f"row_{k}", reset_less=True)
            high = int8 & (place[-1] ^ (k >> (self._digit - 1)))
            m.d.sync += [held_piece.eq(piece), held_row.eq(Cat(row, high, half))]
            m.d.comb += [write.en.eq(written), write.addr.eq(held_row), write.data.eq(held_piece)]

    def _send(self, m: Module, banks, metadata, next_plan, plan_valid, plan_taken, released):
        """Tiles of the half that is full."""
        p = self.p
        m.submodules.queue = queue = OutputQueue(weight_input(p.linear))
        wiring.connect(m, queue.o, wiring.flipped(self.w))
        advance = queue.advance
        pipeline = Pipeline(m, enable=advance)
        register = pipeline.register
        beats = p.group // p.rows
        key_beats = ceil_div(min(p.group, p.head_dim), p.rows)
        turns = p.cols // self.columns

        # Where the sending stands.
        plan, active, half = Signal(BlockPlan(), reset_less=True), Signal(), Signal()
        turn, beat = Signal(range(max(2, turns))), Signal(range(max(2, beats)))
        low_plane = Signal()
        tile, head_group = Signal(range(BLOCK_GROUPS)), Signal(range(max(2, p.head_groups)))
        turn_end = turn == turns - 1
        beat_end = turn_end & (beat == Mux(plan.values, beats - 1, key_beats - 1))
        plane_end = beat_end & (low_plane | ~plan.int8)
        tile_end = plane_end & (tile + 1 == plan.tiles)
        block_end = Signal()
        m.d.comb += [
            block_end.eq(active & tile_end & (plan.values | (head_group == p.head_groups - 1))),
            plan_taken.eq(plan_valid & (~active | (advance & block_end))),
        ]
        with m.If(plan_taken):
            m.d.sync += [active.eq(1), plan.eq(next_plan), half.eq(half ^ active)]
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
                m.d.sync += head_group.eq(head_group + 1)
            with m.If(block_end):
                m.d.sync += [active.eq(0), half.eq(~half)]

        # Cycle 0: the first column's piece, and with it where every bank has its own.
        row_bits = self._piece_bits - self._digit
        column_bits = (self.columns - 1).bit_length()
        strides = [(p.head_groups - 1).bit_length(), 0]  # of keys and of values
        bases, offsets = [], []
        for values, stride in enumerate(strides):
            group = Cat(
                *([] if values else [head_group[:stride]]), Const(0, column_bits), turn[: (turns - 1).bit_length()]
            )
            bases.append(Cat(beat[: self._beat_bits], group, tile)[: self._piece_bits])
            offsets.append(self._beat_bits + stride)
        base = Signal(self._piece_bits)
        high = plan.int8 & ~low_plane
        first = Signal(self._digit)  # bank of the first column's piece
        m.d.comb += [
            base.eq(Mux(plan.values, bases[1], bases[0])),
            first.eq(self._hash(base) ^ (high << (self._digit - 1))),
        ]
        asks = advance & pipeline.valid(active, cycles=1)
        reads = []
        for k, bank in enumerate(banks):
            read = bank.read_port()
            other = first ^ k
            rows = []
            for offset in offsets:
                row = [Const(0, 1)] * row_bits
                for j in range(column_bits):
                    if offset + j >= self._digit:
                        row[offset + j - self._digit] = other[(offset + j) % self._digit]
                rows.append(Cat(*row))
            row = base[self._digit :] | Mux(plan.values, rows[1], rows[0])
            m.d.comb += [
                read.addr.eq(register(Cat(row[:row_bits], high, half), f"read_row_{k}")),
                read.en.eq(asks),
            ]
            # Cycle 1: the bank is asked. Cycle 2: it answers, cycle 3: in order of the columns.
            reads.append(register(read.data, f"read_{k}"))
        first = register(first, "first", cycles=3)
        values = register(plan.values, "of_values", cycles=3)
        ordered = self._permuted(m, reads, first)
        columns = []
        for c in range(self.columns):
            places = [
                sum((c >> j & 1) << ((offset + j) % self._digit) for j in range(column_bits)) for offset in offsets
            ]
            columns.append(
                Mux(values, ordered[places[1]], ordered[places[0]]) if places[0] != places[1] else ordered[places[0]]
            )
        now = Cat(*columns)
        if turns > 1:
            earlier = Signal(len(now) * (turns - 1), reset_less=True)
            with m.If(advance):
                m.d.sync += earlier.eq(Cat(earlier, now)[len(now) :])
            now = Cat(earlier, now)
        m.d.comb += [
            queue.valid.eq(pipeline.valid(active & turn_end, cycles=4)),
            queue.payload.data.eq(register(now, "now")),
            released.eq(advance & pipeline.valid(block_end, cycles=4)),
        ]

        # Scales and coefficients of the tile, a cycle before they leave.
        tile, head_group = register(tile, "tile", cycles=3), register(head_group, "head_group", cycles=3)
        of_half = register(half, "of_half", cycles=3)
        int8 = register(plan.int8, "of_int8", cycles=3)
        numbers = Signal(
            data.StructLayout(
                {"scales": data.ArrayLayout(16, BLOCK_GROUPS), "coefficients": data.ArrayLayout(8, BLOCK_GROUPS)}
            )
        )
        m.d.comb += numbers.eq(Mux(of_half, Cat(*metadata[1]), Cat(*metadata[0])))
        scales, coefficients = (
            [part[k] for k in range(BLOCK_GROUPS)] for part in (numbers.scales, numbers.coefficients)
        )
        user = Signal(weight_input(p.linear)["user"].shape)
        for c in range(p.cols):
            index = Signal(range(BLOCK_GROUPS), name=f"group_{c}")
            column = Const(c, (p.cols - 1).bit_length())
            key_group = Cat(head_group[: strides[0]], column, tile)[: len(index)]
            m.d.comb += [
                index.eq(Mux(values, Cat(column, tile)[: len(index)], key_group)),
                user[c].scale.eq(choose(scales, index)),
                user[c].coefficient.eq(Mux(int8, INT8, choose(coefficients, index))),
            ]
        m.d.comb += queue.payload.user.eq(register(user.as_value(), "user"))
