"""Bins times the codebook: pieces of bins on their way to the multipliers, and sums of what comes back.

Source: docs/numerics.md, "Product quantisation"; the bins are MILLION's value path (DAC 2025, section III).
"""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.layouts import BIN_BITS, SHIFT_BITS, out_width, read_output
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.pq.codebook_jobs import PIECE_BITS, Step, bins_input
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.product_array import PRODUCT_BITS
from kvant.hw.pq.reserved_queue import ReservedQueue


class BinPieces(wiring.Component):
    """``bin >> shift`` in two pieces, the lower one first: one shifter of `PIECE_BITS` bits makes either.

    Members
    -------
    lower, upper : in
        `bins` are there, and their lower piece is wanted; the upper piece of the same bins is wanted, one cycle later.
    shift : in
        With either; the shifted bins have at most `BIN_BITS` bits.
    bins : in
    pieces : out
        One cycle later; 0 where none was wanted.
    """

    def __init__(self, p: PqParameters):
        self.p = p
        super().__init__(
            {
                "lower": In(1),
                "upper": In(1),
                "shift": In(SHIFT_BITS),
                "bins": In(bins_input(p)),
                "pieces": Out(data.ArrayLayout(PIECE_BITS, p.slice_subspaces)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        register = Pipeline(m).register
        most = max(0, p.bin_width - BIN_BITS)  # of a shift
        pieces = []
        for bins in self.bins:
            above = Signal(p.bin_width - PIECE_BITS, reset_less=True, name="above")
            m.d.sync += above.eq(Mux(self.lower, bins[PIECE_BITS:], above))
            window = Mux(self.upper, above, bins)[: PIECE_BITS + most]
            for k in reversed(range(most.bit_length())):
                shifted = Signal(len(window), name="shifted")
                m.d.comb += shifted.eq(Mux(self.shift[k], window[1 << k :], window))
                window = shifted
            pieces.append(register(Mux(self.lower | self.upper, window[:PIECE_BITS], 0), "piece"))
        m.d.comb += self.pieces.eq(Cat(pieces))
        return m


class ReadOut(wiring.Component):
    """Adds up, channel by channel, the products of bins with the elements of the centroids of a slice.

    The products of a bin's two pieces come in two cycles and add as one. A sum is read, and written back two cycles
    later: two cycles pass until the same query returns. No address is read and written in one cycle.

    Members
    -------
    valid, step, products : in
        A step of this mode, and what the multipliers made of it.
    count, reserve : in
        Places for the sums of so many queries are reserved.
    free : out
        Places for sums.
    o : out stream
        See `read_output`.
    """

    def __init__(self, p: PqParameters):
        self.p = p
        self._queue = ReservedQueue(read_output(p), p.q_parallel)
        super().__init__(
            {
                "valid": In(1),
                "step": In(Step(p)),
                "products": In(data.ArrayLayout(signed(PRODUCT_BITS), p.slice_bytes)),
                "free": Out(self._queue.free.shape()),
                "reserve": In(1),
                "count": In(self._queue.count.shape()),
                "o": Out(stream.Signature(read_output(p))),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        register = Pipeline(m).register
        m.submodules.queue = queue = self._queue
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        m.d.comb += [
            self.free.eq(queue.free),
            queue.reserve.eq(self.reserve),
            queue.count.eq(self.count),
        ]
        width = out_width(p)
        step = register(self.step, "step")
        adds = Signal()
        m.d.sync += adds.eq(self.valid & self.step.upper)

        # Cycle 0: a bin's product from those of its pieces.
        addends = []
        for product in self.products:
            lower = register(product, "lower")
            top = ((lower >> PIECE_BITS) + product)[: width - PIECE_BITS]
            addends.append(register(Cat(lower[:PIECE_BITS], top).as_signed(), "addend"))

        # Cycle 1: the sum so far is there.
        totals = [Signal(width, name="total") for _ in addends]
        if p.q_parallel == 1:
            # The end of a slice leaves 0 for the next one: a reset of the registers, which takes no logic.
            sums = Signal(data.ArrayLayout(width, p.slice_bytes))
            with m.If(adds):
                m.d.sync += sums.eq(Mux(step.final, 0, Cat(totals)))
        else:
            m.submodules.sums = words = memory.Memory(
                shape=data.ArrayLayout(width, p.slice_bytes), depth=p.q_parallel, init=[], attrs={"no_rw_check": 1}
            )
            write, read = words.write_port(), words.read_port()
            m.d.comb += [
                read.addr.eq(self.step.vector),
                read.en.eq(self.valid & self.step.upper),
                write.addr.eq(step.vector),
                write.data.eq(Cat(totals)),
                write.en.eq(adds),
            ]
            sums = [Mux(step.first, 0, so_far) for so_far in read.data]
        m.d.comb += [
            *(total.eq(so_far + addend) for total, so_far, addend in zip(totals, sums, addends, strict=True)),
            queue.push.eq(adds & step.final),
            queue.result.data.eq(Cat(totals)),
            queue.result.vector.eq(step.vector),
            queue.result.slice.eq(step.slice),
            queue.result.last.eq(step.last_vector & step.last_slice),
        ]
        return m
