"""Packs groups of codes into the pages of a cache: words of codes as they come, and the metadata of a block at its end.

Two streams of writes leave: codes, which need no memory inside, and words of metadata, which are gathered per head
until a block of 16 groups is complete. So groups of several heads may take turns.
"""

from amaranth.hdl import Array, Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, fifo, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.layouts import PageWrite
from kvant.hw.kvcache.page import ADDRESS_BITS, SCALE_BYTES, TIMESTAMP_BYTES, PageLayout
from kvant.hw.kvcache.parameters import BLOCK_GROUPS, UNIT_BYTES, CacheParameters, ceil_div
from kvant.hw.numeric.codes import CODE_BITS

META_BITS = 8 * UNIT_BYTES
"""Width of a metadata word."""

LEAST_WORD_BITS = 32

_MAX_BANKS = 8  # what a word of scales needs


class GroupMeta(data.StructLayout):
    """Members: `scale` 16, `coefficient` 8, `offset` signed(8) of a group."""

    def __init__(self):
        super().__init__({"scale": 16, "coefficient": 8, "offset": signed(8)})


class PageOwner(data.StructLayout):
    """Members: `page` 24, `head` 8, `timestamp` 32; see `PageAddress`."""

    def __init__(self):
        super().__init__({"page": 24, "head": 8, "timestamp": 32})


class PackerInput(data.StructLayout):
    """A beat of codes.

    Members
    -------
    codes : P * 4
        Codes in storage order; 0x0 in the lanes of a last beat that has fewer.
    last : 1
        Last beat of its group.
    meta : GroupMeta
        Read with `last`.
    flush : 1
        Read with `last`: bring the memory up to date, the open block's metadata and the trailer included.
    page_start : 1
        The group is its page's first one, or the first one of those that are written of it now. Whatever is still open
        of the head is dropped. (Constant over a group.)
    place
        With `page_start`: number of the group in its page. Bytes of the groups before it stay as they are.
    page_end : 1
        Read with `last`: the group is its page's last one, which need not be full.
    user : PageOwner
        Constant over a page.
    """

    def __init__(self, p: CacheParameters):
        super().__init__(
            {
                "codes": data.ArrayLayout(CODE_BITS, p.lanes),
                "last": 1,
                "meta": GroupMeta(),
                "flush": 1,
                "page_start": 1,
                "place": range(max(p.group * p.row_groups, p.head_dim, 2)),
                "page_end": 1,
                "user": PageOwner(),
            }
        )


def _buffers(layout: PageLayout) -> int:
    """Blocks of a head whose metadata may be on their way. Two hide the writing of one behind the other's arrival; if
    the last block of a page is short, four, since then it takes longer to write a block than that one takes.
    """
    return 2 if layout.blocks == 1 or layout.groups % BLOCK_GROUPS == 0 else 4


class _Open(data.StructLayout):
    """What is known of a head's open block.

    Members
    -------
    group : groups complete, or before `first`
    first : the first group whose metadata are known
    base : offset in the page, in units of `UNIT_BYTES`
    buffer : which of the head's `_buffers` its metadata go to
    """

    def __init__(self, layout: PageLayout):
        super().__init__(
            {
                "group": range(BLOCK_GROUPS),
                "first": range(BLOCK_GROUPS),
                "base": range(layout.trailer // UNIT_BYTES),
                "buffer": range(_buffers(layout)),
            }
        )


class _Job(data.StructLayout):
    """Metadata to be written: of a block from its first known group to `last_group`, then of the page if `trailer`."""

    def __init__(self, p: CacheParameters, layout: PageLayout):
        super().__init__(
            {
                "open": _Open(layout),
                "last_group": range(BLOCK_GROUPS),
                "user": PageOwner(),
                "coefficient": 8 if p.shared_coeff else 0,
                "trailer": 1,
                "page_end": 1,
            }
        )


class CodeWords(wiring.Component):
    """Collects beats of codes into words of a page.

    A group fills whole words; a shorter one is filled up with 0x0, in words that leave while the next group's first
    word is still incomplete.

    Members
    -------
    accept : in
        The beat is taken; only while `ready`.
    ready : out
        A word that the beat completes has a place.
    codes, last, page_end, user : in
        Of the beat; see `PackerInput`.
    open : in
        The block of its group, and the group's place in it.
    o : out stream
        `PageWrite`.
    """

    def __init__(self, p: CacheParameters, layout: PageLayout, word_bits: int):
        self.p = p
        self.layout = layout
        self.word_bits = word_bits
        super().__init__(
            {
                "accept": In(1),
                "ready": Out(1),
                "codes": In(CODE_BITS * p.lanes),
                "last": In(1),
                "page_end": In(1),
                "user": In(PageOwner()),
                "open": In(_Open(layout)),
                "o": Out(stream.Signature(PageWrite(word_bits))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        beat_bits = len(self.codes)
        filled_bits = min(self.word_bits, 8 * self.layout.group_bytes)  # of a word
        words = self.layout.code_words(self.word_bits)
        slots = filled_bits // beat_bits
        unit = min(self.word_bits // 8, UNIT_BYTES)
        places = max(1, unit // self.layout.group_bytes)  # groups that share a unit of addresses

        slot = Signal(range(slots))
        word = Signal(range(words))
        zero_words = Signal(range(words))  # that still have to follow
        ends_page = Signal()
        collected = Signal((slots - 1) * beat_bits)  # 0 where there is nothing yet
        free = Signal()
        complete = Signal()
        m.d.comb += [
            free.eq(~self.o.valid | self.o.ready),
            complete.eq(self.last | (slot == slots - 1)),
            self.ready.eq(~complete | (free & (zero_words == 0))),
        ]
        placed = Cat(Mux(slot == k, self.codes, 0) for k in range(slots))
        filled = (placed | collected)[:filled_bits]
        with m.If(self.accept):
            with m.If(complete):
                m.d.sync += [collected.eq(0), slot.eq(0), word.eq(Mux(self.last, 0, word + 1))]
            with m.Else():
                m.d.sync += [collected.eq(filled), slot.eq(slot + 1)]

        # In bytes from the beginning of the block; all factors are powers of two.
        offset = self.open.group * self.layout.group_bytes + word * (filled_bits // 8)
        address = (self.open.base * UNIT_BYTES + offset // unit * unit)[:ADDRESS_BITS]
        payload = self.o.payload
        if places > 1:
            place = self.open.group[: (places - 1).bit_length()]
            unit_data = filled.replicate(places)
            keep = Cat((place == k).replicate(self.layout.group_bytes) for k in range(places))
        else:
            unit_data, keep = filled, (1 << filled_bits // 8) - 1
        with m.If(free):
            m.d.sync += self.o.valid.eq(0)
            with m.If(zero_words != 0):
                m.d.sync += [
                    self.o.valid.eq(1),
                    zero_words.eq(zero_words - 1),
                    payload.data.eq(0),
                    payload.last.eq(ends_page & (zero_words == 1)),
                    payload.user.address.eq(payload.user.address + filled_bits // 8),
                ]
        with m.If(self.accept & complete):
            m.d.sync += [
                self.o.valid.eq(1),
                payload.data.eq(unit_data),
                payload.keep.eq(keep),
                payload.user.address.eq(address),
                payload.user.page.eq(self.user.page),
                payload.user.head.eq(self.user.head),
                payload.user.timestamp.eq(self.user.timestamp),
                payload.last.eq(self.page_end & self.last & (word == words - 1)),
                ends_page.eq(self.page_end),
            ]
            with m.If(self.last):
                m.d.sync += zero_words.eq(words - 1 - word)
        return m


class MetaWords(wiring.Component):
    """Gathers the metadata of groups and writes them as words: scales, coefficients, offsets, trailer.

    Entries of a block lie in a memory of *banks* banks, so that many are read at once.

    Parameters
    ----------
    p : CacheParameters
    layout : PageLayout
    block_cycles : int
        Cycles from one block to the next that have to suffice, if possible; they decide the number of banks.

    Members
    -------
    write : in
        Store the metadata `meta` of group `open.group` of the block.
    push : in
        With `write`: queue the block's metadata for writing, up to this group.
    head, open, meta, user, trailer, page_end : in
        Of the group.
    busy : out
        Metadata of head `head` and buffer `open.buffer` are queued. While they are, neither `push` nor the first
        `write` of a block is legal for them.
    o : out stream
        `PageWrite`.
    """

    _READ_LATENCY = 2  # from the address to masked entries in a register

    def __init__(self, p: CacheParameters, layout: PageLayout, block_cycles: int):
        self.p = p
        self.layout = layout
        self.kinds = ["scale", "scale", *(name for name in ("coefficient", "offset") if name in layout.planes)]
        """Of each word of a block, what it holds."""
        self.banks = 1
        while self.banks < _MAX_BANKS and self._job_cycles() > block_cycles:
            self.banks *= 2
        super().__init__(
            {
                "write": In(1),
                "push": In(1),
                "head": In(range(p.heads)),
                "open": In(_Open(layout)),
                "meta": In(GroupMeta()),
                "user": In(PageOwner()),
                "trailer": In(1),
                "page_end": In(1),
                "busy": Out(1),
                "o": Out(stream.Signature(PageWrite(META_BITS))),
            }
        )

    def _steps(self, kind: str) -> int:
        """Cycles that it takes to read what a word holds."""
        entries = BLOCK_GROUPS // SCALE_BYTES if kind == "scale" else BLOCK_GROUPS
        return entries // self.banks

    def _job_cycles(self) -> int:
        """Cycles of a block, with its page's trailer, from one to the next."""
        return sum(map(self._steps, self.kinds)) + 1 + self._READ_LATENCY

    def elaborate(self, platform):
        p, banks = self.p, self.banks
        m = Module()
        index_bits = (BLOCK_GROUPS // banks - 1).bit_length()
        bank_bits = (banks - 1).bit_length()
        names = ("scale", "coefficient", "offset")
        entry = data.StructLayout({name: GroupMeta()[name].shape for name in names if name in self.layout.planes})

        # At most one job for each buffer, and one place more, since a full memory may stand before an output register
        # that is empty for a cycle: the queue is never full.
        buffers = _buffers(self.layout) * p.heads
        m.submodules.jobs = jobs = fifo.SyncFIFOBuffered(width=_Job(p, self.layout).size, depth=buffers + 1)
        new = Signal(_Job(p, self.layout))
        m.d.comb += [
            new.open.eq(self.open),
            new.last_group.eq(self.open.group),
            new.user.eq(self.user),
            new.trailer.eq(self.trailer),
            new.page_end.eq(self.page_end),
            jobs.w_data.eq(new),
            jobs.w_en.eq(self.write & self.push),
        ]
        if p.shared_coeff:
            m.d.comb += new.coefficient.eq(self.meta.coefficient)
        job = data.View(_Job(p, self.layout), jobs.r_data)
        job_head = job.user.head[: len(self.head)]
        done = Signal()
        pending = Signal(buffers)
        written, wanted = Cat(self.open.buffer, self.head), Cat(job.open.buffer, job_head)
        m.d.comb += [self.busy.eq((pending >> written)[0]), jobs.r_en.eq(done)]
        with m.If(done):
            m.d.sync += pending.bit_select(wanted, 1).eq(0)
        with m.If(self.write & self.push):
            m.d.sync += pending.bit_select(written, 1).eq(1)

        # Ask for the next entries of a word. All of this moves while the output is free.
        advance = Signal()
        m.d.comb += advance.eq(~self.o.valid | self.o.ready)
        word = Signal(range(len(self.kinds) + 1))
        step = Signal(range(BLOCK_GROUPS))
        asked = Signal()  # all of the job's entries
        active = Signal()
        first_entry = Signal(range(BLOCK_GROUPS))  # of those asked for
        word_end, job_end, is_trailer = Signal(), Signal(), Signal()
        m.d.comb += [
            active.eq(jobs.r_rdy & ~asked),
            is_trailer.eq(word == len(self.kinds)),
            first_entry.eq(step << bank_bits),
            job_end.eq(word_end & (is_trailer | ((word == len(self.kinds) - 1) & ~job.trailer))),
        ]
        with m.Switch(word):
            for k, kind in enumerate(self.kinds):
                with m.Case(k):
                    m.d.comb += word_end.eq(step == self._steps(kind) - 1)
                    if k == 1:  # the upper half of the scales
                        m.d.comb += first_entry.eq(step << bank_bits | BLOCK_GROUPS // SCALE_BYTES)
            with m.Default():
                m.d.comb += word_end.eq(1)
        with m.If(advance):
            with m.If(active):
                m.d.sync += step.eq(step + 1)
                with m.If(word_end):
                    m.d.sync += [step.eq(0), word.eq(word + 1)]
                with m.If(job_end):
                    m.d.sync += [word.eq(0), asked.eq(1)]
            with m.If(done):
                m.d.sync += asked.eq(0)

        # Entries beyond the last group count 0. They are not read: another group may be written there meanwhile.
        # (The others are not written before the job is done, so the two ports never meet at one address.)
        entries = []
        for bank in range(banks):
            storage = memory.Memory(
                shape=entry, depth=buffers * (BLOCK_GROUPS // banks), init=[], attrs={"no_rw_check": 1}
            )
            m.submodules[f"bank_{bank}"] = storage
            write, read = storage.write_port(), storage.read_port()
            known = Signal(name="known")
            m.d.comb += [
                write.en.eq(self.write & (self.open.group[:bank_bits] == bank)),
                write.addr.eq(Cat(self.open.group[bank_bits:], written)),
                *(write.data[name].eq(self.meta[name]) for name in entry.members),
                known.eq(first_entry + bank <= job.last_group),
                read.en.eq(advance & active & known),
                read.addr.eq(Cat(first_entry[bank_bits:][:index_bits], wanted)),
            ]
            was_known = Signal(name="was_known")
            held = Signal(entry, name="entry", reset_less=True)
            with m.If(advance):
                m.d.sync += [was_known.eq(known), held.eq(Mux(was_known, read.data.as_value(), 0))]
            entries.append(held)
        step_fields = {"word": len(word), "word_end": 1, "job_end": 1}
        asked_step, read_step = Signal(data.StructLayout(step_fields)), Signal(data.StructLayout(step_fields))
        asked_valid, read_valid = Signal(), Signal()
        with m.If(advance):
            m.d.sync += [
                asked_valid.eq(active),
                asked_step.word.eq(word),
                asked_step.word_end.eq(word_end),
                asked_step.job_end.eq(job_end),
                read_valid.eq(asked_valid),
                read_step.eq(asked_step),
            ]

        # Shift them into the word, which leaves when it is complete.
        payload = self.o.payload
        m.d.comb += done.eq(advance & read_valid & read_step.job_end)
        shifted = Signal(META_BITS)
        metadata_unit = self.layout.planes["scale"] // UNIT_BYTES
        address = Signal(ADDRESS_BITS)
        # Bytes of groups before the first known one are not touched.
        known_groups = Signal(BLOCK_GROUPS)
        keep = Signal(UNIT_BYTES)
        m.d.comb += known_groups.eq(Cat(job.open.first <= number for number in range(BLOCK_GROUPS)))
        m.d.comb += address.eq((job.open.base + (read_step.word + metadata_unit)) * UNIT_BYTES)
        with m.Switch(read_step.word):
            for k, kind in enumerate(self.kinds):
                with m.Case(k):
                    incoming = Cat(held[kind] for held in entries)
                    m.d.comb += shifted.eq(Cat(payload.data[len(incoming) :], incoming))
                    if kind == "scale":
                        of_word = known_groups[k * BLOCK_GROUPS // SCALE_BYTES :][: BLOCK_GROUPS // SCALE_BYTES]
                        m.d.comb += keep.eq(Cat(bit.replicate(SCALE_BYTES) for bit in of_word))
                    else:
                        m.d.comb += keep.eq(known_groups)
            with m.Default():
                timestamp = Cat(job.user.timestamp, Const(0, 8 * TIMESTAMP_BYTES - len(job.user.timestamp)))
                m.d.comb += [
                    shifted.eq(Cat(timestamp, job.coefficient)),
                    address.eq(self.layout.trailer),
                    keep.eq((1 << UNIT_BYTES) - 1),
                ]
        with m.If(advance):
            m.d.sync += self.o.valid.eq(read_valid & read_step.word_end)
            with m.If(read_valid):
                m.d.sync += [
                    payload.data.eq(shifted),
                    payload.keep.eq(keep),
                    payload.last.eq(read_step.job_end & job.page_end),
                    payload.user.address.eq(address),
                    payload.user.page.eq(job.user.page),
                    payload.user.head.eq(job.user.head),
                    payload.user.timestamp.eq(job.user.timestamp),
                ]
        return m


class BlockPacker(wiring.Component):
    """Writes groups into pages, laid out as `PageLayout` says; one beat per cycle.

    A group is G/P beats, or fewer where it is shorter than G. Its beats follow each other; groups of different heads
    may take turns. Every group begins a word of codes. The metadata of a block are written when it is complete, and,
    as far as they are known, with `flush` and `page_end`, which write the trailer too.

    The input waits only for its outputs: for a place for a word of codes, or for the metadata of the block before the
    last (of this head), or for those of the last `flush` of this block.

    Parameters
    ----------
    p : CacheParameters
    page_groups : int
        Groups of a page.
    along_head : bool
        Groups come in rows along the head, whose last one has `tail` elements: where a group is filled up in time only
        with wider words, these are wider. False: every group is full. (Shorter ones are packed too, but may wait.)

    Attributes
    ----------
    layout : PageLayout
    word_bits : int
        Width of a word of codes: `port_bits`, 4 P or 32, the largest of them, or more (see *along_head*).
    latency : int
        Cycles from the beat that completes a word of codes to that word, while nothing waits.

    Members
    -------
    i : in stream
        `PackerInput`.
    codes : out stream
        `PageWrite` of `word_bits`. Its address is that of the word's first byte, a multiple of the word's size or of
        16, whichever is less; strobes say where within that unit a group of less stands, and that a word wider than
        a group is not full. `last`: last word of the page.
    meta : out stream
        `PageWrite` of 128 bits, aligned; all bytes are strobed but those of groups before the first `place`, which may
        be all. `last`: last word (the trailer) of the page.

    Raises
    ------
    ParameterError
        When the parameters are not those of a cache, or *page_groups* is not legal.
    """

    latency = 2

    @staticmethod
    def word_bits_along_time(p: CacheParameters) -> int:
        """Bits of a word of codes where all groups are full; along the head it may be wider."""
        return max(p.port_bits, CODE_BITS * p.lanes, LEAST_WORD_BITS)

    def __init__(self, p: CacheParameters, page_groups: int, *, along_head: bool = True):
        self.p = p
        self.layout = PageLayout(p, page_groups)
        self.along_head = along_head
        self.word_bits = self.word_bits_along_time(p)
        while along_head and not self._fills_in_time():
            self.word_bits *= 2
        super().__init__(
            {
                "i": In(stream.Signature(PackerInput(p))),
                "codes": Out(stream.Signature(PageWrite(self.word_bits))),
                "meta": Out(stream.Signature(PageWrite(META_BITS))),
            }
        )

    def _fills_in_time(self) -> bool:
        """Whether the zero words behind a row's last group leave before the next row's first word."""
        p = self.p
        group_bits = CODE_BITS * p.group
        words = self.layout.code_words(self.word_bits)
        word_beats = min(group_bits, self.word_bits) // (CODE_BITS * p.lanes)
        tail_beats = ceil_div(p.tail, p.lanes)
        zero_words = words - ceil_div(tail_beats, word_beats)
        next_beats = min(word_beats, p.group_transfers if p.row_groups > 1 else tail_beats)
        return zero_words < next_beats

    @property
    def block_cycles(self) -> int:
        """Cycles from block to block at least, on the average over full pages."""
        p, layout = self.p, self.layout
        if self.along_head:
            return layout.groups * p.row_transfers // (p.row_groups * layout.blocks)
        return layout.groups * p.group_transfers // layout.blocks

    def elaborate(self, platform):
        p, layout = self.p, self.layout
        m = Module()
        m.submodules.code_words = codes = CodeWords(p, layout, self.word_bits)
        m.submodules.meta_words = meta = MetaWords(p, layout, self.block_cycles)
        wiring.connect(m, codes.o, wiring.flipped(self.codes))
        wiring.connect(m, meta.o, wiring.flipped(self.meta))

        beat = Signal(PackerInput(p), reset_less=True)
        beat_valid, accept = Signal(), Signal()
        first, first_base = Signal(range(BLOCK_GROUPS)), Signal(_Open(layout)["base"].shape)
        block_bits = (BLOCK_GROUPS - 1).bit_length()
        m.d.comb += self.i.ready.eq(~beat_valid | accept)
        with m.If(self.i.ready):
            m.d.sync += [
                beat_valid.eq(self.i.valid),
                beat.eq(self.i.payload),
                first.eq(self.i.payload.place),
                first_base.eq((self.i.payload.place >> block_bits) * (layout.block_bytes // UNIT_BYTES)),
            ]

        # The head's open block, looked up and brought up to date in one cycle: the next beat may belong to it.
        head = beat.user.head[: len(meta.head)]
        known, open_block, next_open = Signal(_Open(layout)), Signal(_Open(layout)), Signal(_Open(layout))
        store = Signal()
        if p.heads == 1:
            with m.If(store):
                m.d.sync += known.eq(next_open)
        else:
            m.submodules.open = table = memory.Memory(shape=_Open(layout), depth=p.heads, init=[])
            write, read = table.write_port(), table.read_port(domain="comb")
            m.d.comb += [
                read.addr.eq(head),
                known.eq(read.data),
                write.addr.eq(head),
                write.data.eq(next_open),
                write.en.eq(store),
            ]
        # The buffers take turns whatever the pages do, so they alone need a beginning, which a memory may not have.
        buffers = Array(Signal(range(_buffers(layout)), name=f"buffer_{number}") for number in range(p.heads))
        for number, buffer in enumerate(buffers):
            with m.If(store & (head == number)):
                m.d.sync += buffer.eq(next_open.buffer)
        closes = Signal()
        m.d.comb += [
            open_block.group.eq(Mux(beat.page_start, first, known.group)),
            open_block.first.eq(Mux(beat.page_start, first, known.first)),
            open_block.base.eq(Mux(beat.page_start, first_base, known.base)),
            open_block.buffer.eq(buffers[head]),
            closes.eq((open_block.group == BLOCK_GROUPS - 1) | beat.page_end),
            next_open.group.eq(Mux(closes, 0, open_block.group + 1)),
            next_open.first.eq(Mux(closes, 0, open_block.first)),
            next_open.base.eq(open_block.base + Mux(closes, layout.block_bytes // UNIT_BYTES, 0)),
            next_open.buffer.eq(open_block.buffer + closes),
            store.eq(accept & beat.last),
        ]
        waits = Signal()  # for metadata that are still to be written
        m.d.comb += [
            waits.eq(beat.last & meta.busy & (meta.push | beat.page_start | (open_block.group == 0))),
            accept.eq(beat_valid & codes.ready & ~waits),
            codes.accept.eq(accept),
            codes.codes.eq(beat.codes),
            codes.last.eq(beat.last),
            codes.page_end.eq(beat.page_end),
            codes.user.eq(beat.user),
            codes.open.eq(open_block),
            meta.write.eq(store),
            meta.push.eq(closes | beat.flush),
            meta.head.eq(head),
            meta.open.eq(open_block),
            meta.meta.eq(beat.meta),
            meta.user.eq(beat.user),
            meta.trailer.eq(beat.page_end | beat.flush),
            meta.page_end.eq(beat.page_end),
        ]
        return m
