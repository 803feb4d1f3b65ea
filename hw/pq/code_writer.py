"""Codes of a batch of tokens, as the engine gives them, into words of frames as memory holds them."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.layouts import index_range
from kvant.hw.numeric.output_queue import OutputQueue
from kvant.hw.pq.codebook_jobs import codes_output
from kvant.hw.pq.parameters import PqParameters


def write_job(p: PqParameters) -> data.StructLayout:
    """Where a batch belongs: store (0 keys, 1 values), head, first token (a multiple of `p.frame`), tokens."""
    return data.StructLayout(
        {"store": 1, "head": 8, "first": index_range(p.tokens), "count": range(p.batch_tokens + 1)}
    )


def address_range(p: PqParameters) -> range:
    """Shape of the number of a word in the codes of one store and head."""
    return index_range(-(-p.tokens // p.frame) * p.frame_words)


def words_output(p: PqParameters) -> data.StructLayout:
    """A word of codes, the first in the lowest bits; its place; the end of the batch."""
    user = data.StructLayout({"address": address_range(p), "store": 1, "head": 8})
    return data.StructLayout({"data": p.word_codes * p.nbits, "user": user, "last": 1})


class CodeWriter(wiring.Component):
    """Collects the codes of a batch and writes them out as whole frames.

    Word k of a frame has, for each token of the frame, for each j below `run`, the code of sub-space ``k*run + j``.
    The codes of a slice of one token lie side by side in one word, since `slice_subspaces` divides `run`: there is a
    memory for each place that they can have. Codes of tokens behind the batch's last are 0.

    Collecting takes as long as the engine gives codes; then one word leaves per cycle. Meanwhile codes wait: those of
    the next batch come at the earliest when its first slice has been searched.

    Parameters
    ----------
    p : PqParameters

    Attributes
    ----------
    latency : int
        Cycles from the batch's last codes to its first word.

    Members
    -------
    job : in stream
        {store, head, first, count}: taken when its last word leaves the memory.
    codes : in stream
        See `codes_output`; taken when a job is there.
    words : out stream
        {data, user: {address, store, head}, last}: address counts the words of a store and head,
        ``frame * frame_words + k``.

    Raises
    ------
    ParameterError
        When no product-quantised cache can be built of *p*.
    """

    latency = 3

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        super().__init__(
            {
                "job": In(stream.Signature(write_job(p))),
                "codes": In(stream.Signature(codes_output(p))),
                "words": Out(stream.Signature(words_output(p))),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.queue = queue = OutputQueue(words_output(p))
        wiring.connect(m, queue.o, wiring.flipped(self.words))
        frames = p.batch_tokens // p.frame
        token_slices = p.run // p.slice_subspaces  # of one token in a word
        frame_bits, slice_bits = (p.frame - 1).bit_length(), (token_slices - 1).bit_length()
        word_shape, frame_shape = index_range(p.frame_words), index_range(frames)

        # Codes come while no word leaves.
        leaves = Signal()
        codes, job = self.codes.payload, self.job.payload
        take = Signal()
        m.d.comb += [self.codes.ready.eq(self.job.valid & ~leaves), take.eq(self.codes.valid & self.codes.ready)]

        # Words leave in cycles of `advance`: frame by frame.
        word, frame = Signal(word_shape), Signal(frame_shape)
        frame_base = Signal(range(p.batch_tokens + 1))  # its first token, within the batch
        address = Signal(address_range(p))
        word_end, job_end, moves = Signal(), Signal(), Signal()
        m.d.comb += [
            word_end.eq(word == p.frame_words - 1),
            job_end.eq(word_end & (frame_base + p.frame >= job.count)),
            moves.eq(leaves & queue.advance),
            self.job.ready.eq(moves & job_end),
        ]
        # frame_words is a constant: a few shifted numbers.
        number = job.first[frame_bits:]
        begin = Signal(address_range(p))
        m.d.comb += begin.eq(sum(number << k for k in range(p.frame_words.bit_length()) if p.frame_words >> k & 1))
        with m.If(take & codes.last):
            m.d.sync += [leaves.eq(1), address.eq(begin), word.eq(0), frame.eq(0), frame_base.eq(0)]
        with m.Elif(moves):
            m.d.sync += [leaves.eq(~job_end), address.eq(address + 1), word.eq(Mux(word_end, 0, word + 1))]
            with m.If(word_end):
                m.d.sync += [frame.eq(frame + 1), frame_base.eq(frame_base + p.frame)]

        # What is read was complete before.
        places = []
        for token in range(p.frame):
            for part in range(token_slices):
                words = memory.Memory(
                    shape=p.nbits * p.slice_subspaces,
                    depth=max(2, p.frame_words * frames),
                    init=[],
                    attrs={"no_rw_check": 1},
                )
                m.submodules[f"codes_{token}_{part}"] = words
                write, read = words.write_port(), words.read_port()
                here = (codes.vector[:frame_bits] == token) & (codes.slice[:slice_bits] == part)
                m.d.comb += [
                    write.addr.eq(self._place(codes.vector[frame_bits:], codes.slice[slice_bits:], frames)),
                    write.data.eq(codes.codes),
                    write.en.eq(take & here),
                    read.addr.eq(self._place(frame, word, frames)),
                    read.en.eq(moves),
                ]
                exists = Signal(name="exists")
                with m.If(moves):
                    m.d.sync += exists.eq(frame_base + token < job.count)
                places.append(Mux(exists, read.data, 0))

        valid = Signal()
        user, last = Signal(words_output(p).members["user"], reset_less=True), Signal(reset_less=True)
        with m.If(queue.advance):
            m.d.sync += [
                valid.eq(leaves),
                user.address.eq(address),
                user.store.eq(job.store),
                user.head.eq(job.head),
                last.eq(job_end),
            ]
        m.d.comb += [
            queue.valid.eq(valid),
            queue.payload.data.eq(Cat(places)),
            queue.payload.user.eq(user),
            queue.payload.last.eq(last),
        ]
        return m

    def _place(self, frame, word, frames: int):
        """Address of word *word* of frame *frame* of the batch."""
        bits = (frames - 1).bit_length()
        return Cat(frame[:bits], word)
