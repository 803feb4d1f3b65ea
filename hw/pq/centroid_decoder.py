"""Codes to rows: every code reads its centroid, and the centroids of a token are an INT8 row."""

from amaranth.hdl import Array, Cat, Module, Mux, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.row_quantizer import row_output
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.numeric.output_queue import OutputQueue
from kvant.hw.pq.codebook_jobs import index_range, word_input
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.tables import ScanWord


def transfer_codes(p: PqParameters) -> int:
    """Codes of a transfer of a row; one where several transfers share it. A power of two."""
    return max(1, p.lanes // p.subspace)


def _cut(index, count: int):
    """A position in *count*, a power of two, and the index of the whole."""
    bits = count.bit_length() - 1
    return index[:bits], index[bits:]


def _choose(value, index, bits: int):
    """The *bits* of *value* at a multiple of them."""
    words = [value[place : place + bits] for place in range(0, len(value), bits)]
    return Array(words)[index] if len(words) > 1 else words[0]


class CodebookMemory(wiring.Component):
    """The INT8 centroids of one codebook, filled from words of the port and looked up by the codes of a transfer.

    A *line* is `line_channels` channels, a whole number of slices and of transfers. There is a bank for each sub-space
    of a line, with the centroids of one sub-space of every line at ``line * 2^nbits + code``. So a word of the port
    writes one word of some banks, a transfer reads one word of some banks, and nothing ever waits for a bank.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    words : in stream, see `kvant.hw.pq.codebook_jobs.word_input`
        A codebook, `codebook_words` words; the next one is taken after `release`.
    filled : out
        A codebook may be looked up: from two cycles after its last word until `release`.
    enable : in
        The look-up moves: registers and memory keep their contents in other cycles.
    look : in
        Look up in this cycle; only while `filled`.
    line : in
    codes : in
        One for each sub-space of a transfer (one if a transfer is narrower than a sub-space).
    release : in
        The look-up of this cycle is the codebook's last.
    channels : out
        The line, two enabled cycles later: right where the look-up's transfer lies in it.
    """

    look_latency = 2

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        self.banks = p.line_channels // p.subspace
        self.transfer_codes = transfer_codes(p)
        super().__init__(
            {
                "words": In(stream.Signature(word_input(p))),
                "filled": Out(1),
                "enable": In(1),
                "look": In(1),
                "line": In(index_range(p.lines)),
                "codes": In(data.ArrayLayout(p.nbits, self.transfer_codes)),
                "release": In(1),
                "channels": Out(8 * p.line_channels),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        take, last_word = Signal(), Signal()
        whole = Signal()  # all words are taken
        centroid, slice_ = Signal(p.nbits), Signal(index_range(p.slices))
        m.d.comb += [
            self.words.ready.eq(~whole),
            take.eq(self.words.valid & ~whole),
            last_word.eq(take & (slice_ == p.slices - 1) & (centroid == p.centroids - 1)),
        ]
        with m.If(take):
            m.d.sync += centroid.eq(centroid + 1)
            with m.If(centroid == p.centroids - 1):
                m.d.sync += slice_.eq(Mux(last_word, 0, slice_ + 1))
        ends = self.enable & self.look & self.release
        with m.If(last_word):
            m.d.sync += whole.eq(1)
        with m.Elif(ends):
            m.d.sync += whole.eq(0)
        fill = Pipeline(m)
        with m.If(fill.valid(last_word, cycles=1)):
            m.d.sync += self.filled.eq(1)
        with m.Elif(ends):
            m.d.sync += self.filled.eq(0)

        # A word is written one cycle after it is taken.
        parts = p.line_channels // p.slice_bytes  # slices of a line
        part, line = _cut(slice_, parts)
        word = fill.register(self.words.payload.data[: 8 * p.slice_bytes], "word")
        write_address = fill.register(Cat(centroid, line), "write_address")
        enables = [fill.valid(take & (part == number) if parts > 1 else take, cycles=1) for number in range(parts)]

        look = Pipeline(m, enable=self.enable)
        bits = 8 * p.subspace
        for bank in range(self.banks):
            # Words are taken after the last look-up of a codebook, and looked up after the last word: no address is
            # read and written in one cycle.
            m.submodules[f"bank_{bank}"] = centroids = memory.Memory(
                shape=bits, depth=p.lines << p.nbits, init=[], attrs={"no_rw_check": 1}
            )
            write, read = centroids.write_port(), centroids.read_port()
            which, place = divmod(bank, p.slice_subspaces)
            m.d.comb += [
                write.addr.eq(write_address),
                write.data.eq(word[bits * place : bits * (place + 1)]),
                write.en.eq(enables[which]),
                read.addr.eq(Cat(self.codes[bank % self.transfer_codes], self.line)),
                read.en.eq(self.enable & self.look),
                self.channels[bits * bank : bits * (bank + 1)].eq(look.register(read.data, "centroid")),
            ]
        return m


class FrameBuffer(wiring.Component):
    """Two frames of codes: words come in the order of memory, and leave as the codes of a token's transfers.

    Parameters
    ----------
    p : PqParameters

    Members
    -------
    words : in stream of `ScanWord`
        `frame_words` words a frame; `count` and `last` are read in its last word.
    full : out
        A frame is complete.
    count, last : out
        Of the oldest frame.
    enable : in
        The reading moves; registers keep their contents in other cycles.
    token, transfer : in
        What to read of the oldest frame.
    drop : in
        What is read in this cycle is the last of its frame; only with `enable`.
    codes : out
        Those of the transfer, two enabled cycles later; of sub-spaces that do not exist they mean nothing.
    """

    latency = 2

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        super().__init__(
            {
                "words": In(stream.Signature(ScanWord(p))),
                "full": Out(1),
                "count": Out(range(p.frame + 1)),
                "last": Out(1),
                "enable": In(1),
                "token": In(index_range(p.frame)),
                "transfer": In(index_range(p.row_transfers)),
                "drop": In(1),
                "codes": Out(data.ArrayLayout(p.nbits, transfer_codes(p))),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        codes = transfer_codes(p)
        # A transfer has its codes in `wide` words that lie side by side, or in a part of one.
        wide = max(1, codes // p.run)
        parts = max(1, p.run // codes)
        rows = -(-p.frame_words // wide)

        # Words of the two frames in turn.
        word = self.words.payload
        full = Signal(2)
        counts = Signal(data.ArrayLayout(range(p.frame + 1), 2), reset_less=True)
        lasts = Signal(2, reset_less=True)
        write_half, read_half = Signal(), Signal()
        place = Signal(index_range(p.frame_words))
        column, row = _cut(place, wide)
        take, frame_end, drops = Signal(), Signal(), Signal()
        m.d.comb += [
            self.words.ready.eq(~Mux(write_half, full[1], full[0])),
            take.eq(self.words.valid & self.words.ready),
            frame_end.eq(place == p.frame_words - 1),
            drops.eq(self.drop & self.enable),
            self.full.eq(Mux(read_half, full[1], full[0])),
            self.count.eq(Mux(read_half, counts[1], counts[0])),
            self.last.eq(Mux(read_half, lasts[1], lasts[0])),
        ]
        with m.If(take):
            m.d.sync += [place.eq(Mux(frame_end, 0, place + 1)), write_half.eq(write_half ^ frame_end)]
        with m.If(drops):
            m.d.sync += read_half.eq(~read_half)
        for half in range(2):
            with m.If(take & frame_end & (write_half == half)):
                m.d.sync += [full[half].eq(1), counts[half].eq(word.count), lasts[half].eq(word.last)]
            with m.Elif(drops & (read_half == half)):
                m.d.sync += full[half].eq(0)

        # A sub-space that is wider than a transfer has its code in several transfers.
        _, step = _cut(self.transfer, max(1, p.subspace // p.lanes))
        part, read_row = _cut(step, parts)
        register = Pipeline(m, enable=self.enable).register
        row_bits = (rows - 1).bit_length()
        token = register(self.token[: (p.frame - 1).bit_length()], "token")
        part = register(part, "part")
        chosen = []
        for number in range(wide):
            # A few words, read in the cycle in which they are asked for: LUT RAM.
            m.submodules[f"words_{number}"] = words = memory.Memory(
                shape=p.word_codes * p.nbits, depth=2 << row_bits, init=[]
            )
            write, read = words.write_port(), words.read_port(domain="comb")
            m.d.comb += [
                write.addr.eq(Cat(row[:row_bits], write_half)),
                write.data.eq(word.data),
                write.en.eq(take & (column == number) if wide > 1 else take),
                read.addr.eq(Cat(read_row[:row_bits], read_half)),
            ]
            held = register(read.data, "held")
            chosen.append(_choose(held, Cat(part, token), p.nbits * min(codes, p.run)))
        m.d.comb += self.codes.eq(register(Cat(*chosen), "codes"))
        return m


class CentroidDecoder(wiring.Component):
    """Codes of the history to INT8 rows, whose groups all have the scale of the codebook.

    ::

        words ──> FrameBuffer ──codes──> CodebookMemory of the keys   ──┬──> rows
                                    └──> CodebookMemory of the values ──┘

    A row leaves every ``max(d/P, M/W)`` cycles, tokens in order, whatever M is: the codes of a transfer lie in as many
    banks.

    Parameters
    ----------
    p : PqParameters

    Attributes
    ----------
    latency : int
        Cycles from the last word of a frame until its first transfer is offered, if nobody waits.

    Members
    -------
    keys, values : in stream, see `kvant.hw.pq.codebook_jobs.word_input`
        Codebooks. The next one of a kind is taken when the last row of the one before has been looked up, so that the
        keys' next codebook comes while values are read.
    words : in stream of `ScanWord`
        Codes of a pass; `last` in the last word of its last frame. They wait for their codebook.
    store, scale : in
        Codebook of the pass (0: keys, 1: values) and its fp16 scale, stable until the last row has left.
    rows : out stream, see `kvant.hw.attention.row_quantizer.row_output`
        `final` with the last transfer of the pass; `empty` never.
    """

    latency = 3 + FrameBuffer.latency + CodebookMemory.look_latency

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        codebooks = stream.Signature(word_input(p))
        super().__init__(
            {
                "keys": In(codebooks),
                "values": In(codebooks),
                "words": In(stream.Signature(ScanWord(p))),
                "store": In(1),
                "scale": In(16),
                "rows": Out(stream.Signature(row_output(p))),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.frames = frames = FrameBuffer(p)
        m.submodules.key_memory = key_memory = CodebookMemory(p)
        m.submodules.value_memory = value_memory = CodebookMemory(p)
        memories = (key_memory, value_memory)
        m.submodules.queue = queue = OutputQueue(row_output(p))
        pipeline = Pipeline(m, enable=queue.advance)
        wiring.connect(m, wiring.flipped(self.words), frames.words)
        for codebook, words in zip(memories, (self.keys, self.values), strict=True):
            wiring.connect(m, wiring.flipped(words), codebook.words)

        # A step reads one transfer of a token. The next pass begins when the last look-up of this one is made.
        token, transfer = Signal(index_range(p.frame)), Signal(index_range(p.row_transfers))
        steps, row_end, frame_end, final, looked_up = Signal(), Signal(), Signal(), Signal(), Signal()
        ending = Signal()
        m.d.comb += [
            steps.eq(frames.full & Mux(self.store, value_memory.filled, key_memory.filled) & ~ending),
            row_end.eq(transfer == p.row_transfers - 1),
            frame_end.eq(row_end & (token + 1 == frames.count)),
            final.eq(frame_end & frames.last),
            frames.enable.eq(queue.advance),
            frames.token.eq(token),
            frames.transfer.eq(transfer),
            frames.drop.eq(steps & frame_end),
        ]
        with m.If(queue.advance & steps):
            m.d.sync += transfer.eq(Mux(row_end, 0, transfer + 1))
            with m.If(row_end):
                m.d.sync += token.eq(Mux(frame_end, 0, token + 1))
            with m.If(final):
                m.d.sync += ending.eq(1)
        with m.If(looked_up):
            m.d.sync += ending.eq(0)

        slot, line = _cut(transfer, p.line_channels // p.lanes)
        look = pipeline.valid(steps, cycles=FrameBuffer.latency)
        release = pipeline.register(final, "release", cycles=FrameBuffer.latency)
        line = pipeline.register(line, "line", cycles=FrameBuffer.latency)
        m.d.comb += looked_up.eq(queue.advance & look & release)
        for store, codebook in enumerate(memories):
            m.d.comb += [
                codebook.enable.eq(queue.advance),
                codebook.look.eq(look & (self.store == store)),
                codebook.release.eq(release),
                codebook.line.eq(line),
                codebook.codes.eq(frames.codes),
            ]

        to_line = FrameBuffer.latency + CodebookMemory.look_latency
        slot = pipeline.register(slot, "slot", cycles=to_line)
        channels = Mux(self.store, value_memory.channels, key_memory.channels)
        m.d.comb += [
            queue.valid.eq(pipeline.valid(steps, cycles=to_line + 1)),
            queue.payload.data.as_value().eq(pipeline.register(_choose(channels, slot, 8 * p.lanes), "elements")),
            queue.payload.scale.eq(self.scale),
            queue.payload.last.eq(pipeline.register(row_end, "last", cycles=to_line + 1)),
            queue.payload.final.eq(pipeline.register(final, "final", cycles=to_line + 1)),
        ]
        wiring.connect(m, queue.o, wiring.flipped(self.rows))
        return m
