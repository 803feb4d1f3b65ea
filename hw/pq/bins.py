"""Values by bins: the attention weight of a token adds into the bins that its codes name."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_shape import WEIGHT_BITS
from kvant.hw.numeric.adder_tree import tree_levels, tree_sum
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.pq.codebook_jobs import bin_read, bins_input
from kvant.hw.pq.parameters import PqParameters


class CodeWord(data.StructLayout):
    """A word of codes as it lies in memory, and whether the scan ends."""

    def __init__(self, p: PqParameters):
        super().__init__({"data": data.ArrayLayout(p.nbits, p.word_codes), "last": 1})


class FrameWeights(data.StructLayout):
    """Weights of the tokens of a frame, for each query."""

    def __init__(self, p: PqParameters):
        per_token = data.ArrayLayout(WEIGHT_BITS, p.q_parallel)
        super().__init__({"weights": data.ArrayLayout(per_token, p.frame)})


class _Bank(wiring.Component):
    """Bins of one lane, those of all queries in one word: read in cycle 0, added to in cycle 2, written in cycle 3.

    An access to an address of which an earlier one has not been written yet takes that one's result: `hits` says in
    cycle 0 of the accesses 1, 2 and 3 cycles before which were to the same address. The nearest counts.
    """

    def __init__(self, p: PqParameters):
        self.p = p
        self.distances = tuple(k for k in (1, 2, 3) if k >= p.frame_words)
        address = range(p.bank_entries)
        super().__init__(
            {
                "access": In(1),
                "address": In(address),
                "hits": In(1).array(3),
                "old": Out(data.ArrayLayout(p.bin_width, p.q_parallel)),
                "zero": In(1),
                "weights": In(data.ArrayLayout(WEIGHT_BITS, p.q_parallel)),
                "write": In(1),
                "write_address": In(address),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        register = Pipeline(m).register
        word = data.ArrayLayout(p.bin_width, p.q_parallel)
        # The word that is written in the cycle of an access is not read but forwarded: the addresses never meet.
        m.submodules.words = words = memory.Memory(shape=word, depth=p.bank_entries, init=[], attrs={"no_rw_check": 1})
        write, read = words.write_port(), words.read_port()
        sums = Signal(word, reset_less=True)
        # The block RAM's output goes straight to a register; what is forwarded meets it in front of the adder.
        base = old = register(read.data, "old")
        hit_2, hit_3 = (register(self.hits[k], "hit") if k + 1 in self.distances else Const(0, 1) for k in (1, 2))
        if 3 in self.distances:
            earlier = Signal.like(sums, name="earlier", reset_less=True)
            held = register(sums, "sums_held")
            m.d.sync += earlier.eq(Mux(hit_2, sums, held) if 2 in self.distances else held)
            base = Mux(register(hit_2 | hit_3, "forward"), earlier, base)
        if 1 in self.distances:
            base = Mux(register(self.hits[0], "hit_1", cycles=2), sums, base)
        added = Signal(word)
        m.d.comb += added.as_value().eq(base)
        with m.If(self.zero):
            m.d.sync += sums.as_value().eq(0)
        with m.Else():
            m.d.sync += [sums[query].eq(added[query] + self.weights[query]) for query in range(p.q_parallel)]
        m.d.comb += [
            read.addr.eq(self.address),
            read.en.eq(self.access & ~self.hits[2] if 3 in self.distances else self.access),
            self.old.eq(old),
            write.addr.eq(self.write_address),
            write.data.eq(sums),
            write.en.eq(self.write),
        ]
        return m


class ValueBins(wiring.Component):
    """Bins of values: every word of codes adds the weights of its tokens into ``bin[m][code[m]]``, one per cycle.

    There is a bank for each of the `word_codes` lanes, which holds the bins of the sub-spaces ``k*run + l % run``, k
    the word of the frame: a bin is the sum of `frame` copies. Codes may repeat as they like, for ever too: what is on
    its way to a bank is forwarded. After reset a pass of `bank_entries` cycles clears the bins.

    Parameters
    ----------
    p : PqParameters

    Attributes
    ----------
    bin_latency : int
        Cycles from `bin_read` to `bin_values`.

    Members
    -------
    words : in, stream of `CodeWord`
        Codes of the tokens in order, `frame_words` words a frame; `last` in the last word of the last frame. Waits for
        the frame's weights, for the pass after reset, and in the cycle of a reading and three more.
    weights : in, stream of `FrameWeights`
        One transfer per frame, taken with its last word. A token that does not exist has weight 0.
    bin_read : in, see `kvant.hw.pq.codebook_jobs.bin_read`
        Reads bins, one request per cycle, only while `drained` is high.
    clear : in
        This reading also clears: the bins read become 0, those of the other queries of the same centroid and slice
        too, so it comes with the last reading of a centroid and slice. They are 0 four cycles later.
    bin_values : out
        Bins of the slice's sub-spaces, `bin_latency` cycles after their request. Exact, if the weights of no query add
        up to more than ``(2^24 - 1) * p.tokens``.
    drained : out
        No scan is under way and all of its words are in the bins, and the pass after reset is over.
    """

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        self.bin_latency = 4 + tree_levels(p.frame)
        super().__init__(
            {
                "words": In(stream.Signature(CodeWord(p))),
                "weights": In(stream.Signature(FrameWeights(p))),
                "bin_read": In(bin_read(p)),
                "clear": In(1),
                "bin_values": Out(bins_input(p)),
                "drained": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register
        word, request = self.words.payload, self.bin_read
        parts = p.run // p.slice_subspaces  # slices that share a row
        part_bits = parts.bit_length() - 1
        part = request.slice[:part_bits]

        # What happens in this cycle: the pass after reset, a reading, or a word.
        clearing = Signal(init=1)
        place = Signal(range(p.bank_entries))
        with m.If(clearing):
            m.d.sync += [place.eq(place + 1), clearing.eq(place != p.bank_entries - 1)]
        reading, take = Signal(), Signal()
        reads = Signal(3)  # accesses on their way that are forwarded to nobody
        idle = Signal()
        row, row_end = Signal(range(p.frame_words)), Signal()
        m.d.comb += [
            reading.eq(request.valid & ~clearing),
            idle.eq(~(clearing | request.valid | reads.any())),
            row_end.eq(row == p.frame_words - 1 if p.frame_words > 1 else 1),
            self.words.ready.eq(idle & self.weights.valid),
            self.weights.ready.eq(idle & self.words.valid & row_end),
            take.eq(idle & self.words.valid & self.weights.valid),
        ]
        m.d.sync += reads.eq(Cat(reading | clearing, reads))
        if p.frame_words > 1:
            with m.If(take):
                m.d.sync += row.eq(Mux(row_end | word.last, 0, row + 1))

        # Cycle 0 of the banks.
        request_row = request.slice >> part_bits
        place_row = place >> p.nbits
        rows = [register(Mux(clearing, place_row, Mux(reading, request_row, row))[: len(row)], "row")]
        zeros = register(~take, "zero", cycles=3)
        weights = register(self.weights.payload.weights, "weights", cycles=3)
        taken = [pipeline.valid(take | clearing, cycles=1)]
        for _ in range(3):
            rows.append(register(rows[-1], "row"))
            taken.append(pipeline.valid(taken[-1], cycles=1))
        access, write = Signal(parts), Signal(parts)
        for number in range(parts):
            here = reading if parts == 1 else reading & (part == number)
            m.d.sync += [
                access[number].eq(take | clearing | here),
                write[number].eq(take | clearing | (here & self.clear)),
            ]
        writes = Signal.like(write)
        write_1, write_2 = Signal.like(write), Signal.like(write)
        m.d.sync += [write_1.eq(write), write_2.eq(write_1), writes.eq(write_2)]
        same_row = []
        for distance in range(3):
            same = Signal(name=f"same_row_{distance + 1}")
            m.d.comb += same.eq(take & taken[distance] & (row == rows[distance] if p.frame_words > 1 else 1))
            same_row.append(same)

        olds = []
        for lane in range(p.word_codes):
            m.submodules[f"bank_{lane}"] = bank = _Bank(p)
            code = word.data[lane]
            codes = [register(Mux(clearing, place[: p.nbits], Mux(reading, request.centroid, code)), "code")]
            for _ in range(3):
                codes.append(register(codes[-1], "code"))
            number = lane % p.run // p.slice_subspaces
            m.d.comb += [
                bank.access.eq(access[number]),
                bank.address.eq(Cat(codes[0], rows[0])),
                bank.zero.eq(zeros),
                bank.weights.eq(weights[lane // p.run]),
                bank.write.eq(writes[number]),
                bank.write_address.eq(Cat(codes[3], rows[3])),
            ]
            for distance in bank.distances:
                hit = same_row[distance - 1] & (code == codes[distance - 1])
                m.d.comb += bank.hits[distance - 1].eq(register(hit, f"hit_{distance}"))
            olds.append(bank.old)

        # Readings: the banks' words of cycle 2, chosen by part and query, their copies added up.
        part_2 = register(part, "part", cycles=3)
        vector_2 = register(request.vector, "vector", cycles=3)
        for sub in range(p.slice_subspaces):
            copies = []
            for copy in range(p.frame):
                chosen = Signal(p.bin_width, name=f"chosen_{sub}_{copy}", reset_less=True)
                with m.Switch(Cat(vector_2, part_2)):
                    for number in range(parts):
                        for query in range(p.q_parallel):
                            old = olds[copy * p.run + number * p.slice_subspaces + sub][query]
                            with m.Case(number << len(vector_2) | query):
                                m.d.sync += chosen.eq(old)
                copies.append(chosen)
            m.d.comb += self.bin_values[sub].eq(tree_sum(pipeline, copies, "bin"))

        scanning = Signal()
        with m.If(take):
            m.d.sync += scanning.eq(~word.last)
        m.d.comb += self.drained.eq(~(clearing | scanning | Cat(*taken).any()))
        return m
