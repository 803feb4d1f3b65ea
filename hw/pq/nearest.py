"""The nearest centroid of every sub-space of a slice, found as the codebook's words come by.

The encoder takes the least ``sum_j (u_j - 16 C_j)^2``, the lowest index on a tie. That sum is
``|u|^2 - 32 u.C + 256 |C|^2 = |u|^2 + 32 * (8 |C|^2 - u.C)``, and |u|^2 is the same for all centroids: so the least
*key* ``8 |C|^2 - u.C`` names the same centroids, ties included. Source: docs/numerics.md, "Product quantisation".
"""

from amaranth.hdl import Cat, Const, Module, Mux, Signal, signed
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.numeric.floating import Pipeline
from kvant.hw.pq.codebook_jobs import Step, codes_output, key_width
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.reserved_queue import ReservedQueue


class NearestSearch(wiring.Component):
    """Keeps the best centroid so far of every vector and sub-space of the slice that is being searched.

    The sums of a word with itself come first and are kept; the sums with the vectors follow. A vector's best is read,
    compared and written back two cycles after it was read, so a vector may return after two cycles: a word takes at
    least that long, since its norm takes one. No address is read and written in one cycle.

    Parameters
    ----------
    p : PqParameters
    sum_shape : signed
        Of a sum.

    Members
    -------
    valid, step, sums : in
        A step of this mode, and what the multipliers made of it.
    count, reserve : in
        Places for the codes of so many vectors are reserved.
    free : out
        Places for codes.
    codes : out stream
        See `codes_output`: three cycles after the last word's step, if nothing waits.
    idle : out
        No codes are awaited.
    """

    def __init__(self, p: PqParameters, sum_shape):
        self.p = p
        self.sum_shape = sum_shape
        self._queue = ReservedQueue(codes_output(p), p.batch_tokens)
        super().__init__(
            {
                "valid": In(1),
                "step": In(Step(p)),
                "sums": In(data.ArrayLayout(sum_shape, p.slice_subspaces)),
                "free": Out(self._queue.free.shape()),
                "reserve": In(1),
                "count": In(self._queue.count.shape()),
                "codes": Out(stream.Signature(codes_output(p))),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        register = Pipeline(m).register
        m.submodules.queue = queue = self._queue
        wiring.connect(m, queue.o, wiring.flipped(self.codes))
        m.d.comb += [
            self.free.eq(queue.free),
            self.idle.eq(queue.idle),
            queue.reserve.eq(self.reserve),
            queue.count.eq(self.count),
        ]
        best = data.StructLayout({"key": signed(key_width(p)), "code": p.nbits})
        address_bits = (p.batch_tokens - 1).bit_length()
        address = self.step.vector[:address_bits]
        step, held_address = register(self.step, "step"), register(address, "address")
        compares, collects = Signal(), Signal()
        m.d.sync += [compares.eq(self.valid & ~self.step.norm), collects.eq(compares & step.final)]

        codes = []
        for subspace in range(p.slice_subspaces):
            words = memory.Memory(shape=best, depth=max(2, p.batch_tokens), init=[], attrs={"no_rw_check": 1})
            m.submodules[f"best_{subspace}"] = words
            write, read = words.write_port(), words.read_port()

            # Cycle 0: the norm, which stays for the word's vectors, or a key; the best so far is read.
            total = self.sums[subspace]
            norm = Signal(self.sum_shape, reset_less=True, name="norm")
            with m.If(self.valid & self.step.norm):
                m.d.sync += norm.eq(total)
            key = register((Cat(Const(0, 3), norm).as_signed() - total)[: key_width(p)].as_signed(), "key")
            m.d.comb += [read.addr.eq(address), read.en.eq(self.valid & ~self.step.norm)]

            # Cycle 1: the earlier one stays where keys are equal.
            nearer = Signal(name="nearer")
            m.d.comb += [
                nearer.eq(step.first | (key < read.data.key)),
                write.addr.eq(held_address),
                write.data.key.eq(key),
                write.data.code.eq(step.centroid),
                write.en.eq(compares & nearer),
            ]
            codes.append(register(Mux(nearer, step.centroid, read.data.code), "code"))

        # Cycle 2: those of the last centroid are the codes.
        step = register(step, "step")
        m.d.comb += [
            queue.push.eq(collects),
            queue.result.codes.eq(Cat(codes)),
            queue.result.vector.eq(step.vector),
            queue.result.slice.eq(step.slice),
            queue.result.last.eq(step.last_vector & step.last_slice),
        ]
        return m
