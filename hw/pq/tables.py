"""Scores of coded keys: tables of products in banks, read by the codes of a word at once."""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.layouts import FrameScores
from kvant.hw.numeric.adder_tree import tree_levels, tree_sum
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.numeric.output_queue import OutputQueue
from kvant.hw.pq.codebook_jobs import table_output
from kvant.hw.pq.parameters import PqParameters


class ScanWord(data.StructLayout):
    """A word of codes as it lies in memory, the number of tokens that its frame has, and whether the scan ends."""

    def __init__(self, p: PqParameters):
        super().__init__(
            {"data": data.ArrayLayout(p.nbits, p.word_codes), "count": range(p.frame + 1), "last": 1},
        )


class ScoreTables(wiring.Component):
    """Scores of tokens by look-up: ``sum_m LUT[m][code[m]]``, exact, one word of codes per cycle for any M.

    There is a bank for each of the `word_codes` lanes and each query. Lane l only meets the sub-spaces
    ``k*run + l % run``, k the word of the frame, so no two codes of a word want one bank, and ``LUT[m][c]`` lies in
    the lanes ``l % run == m % run`` at ``(m // run)*2^nbits + c``. Every bank holds two tables: one is filled while
    the other is read. The sums of a frame's `frame` tokens are each a tree over `run` lanes and an accumulator over
    `frame_words` words.

    Parameters
    ----------
    p : PqParameters

    Attributes
    ----------
    latency : int
        Cycles from the last word of a frame until its scores are offered, if nobody waits.

    Members
    -------
    entry : in, see `kvant.hw.pq.codebook_jobs.table_output`
        Writes the entries of a slice, in any order, one (query, slice, centroid) per cycle; `last` comes with the last
        entry of the last query and hands the table over. What is not written (queries that a job does not have) keeps
        its old value. Only while `writable` is high, or between the first entry of a table and its last.
    writable : out
        A table may be filled.
    filled : out
        A complete table waits, or is being read.
    words : in, stream of `ScanWord`
        Codes of the tokens in order, `frame_words` words a frame; `count` is read in a frame's last word. They are read
        with the oldest filled table, which `last`, in the last word of a frame, gives back. Waits for a table.
    scores : out, stream of `FrameScores`
        One transfer per frame, `count` and `last` of its last word. Scores of tokens from `count` on mean nothing.
    """

    def __init__(self, p: PqParameters):
        self.p = p.check_pq()
        self.latency = 5 + tree_levels(p.run)
        super().__init__(
            {
                "entry": In(table_output(p)),
                "writable": Out(1),
                "filled": Out(1),
                "words": In(stream.Signature(ScanWord(p))),
                "scores": Out(stream.Signature(FrameScores(p))),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        frame_words = p.frame_words
        row_shape = range(2 * frame_words)  # rows of 2^nbits entries in a bank: those of one table, then the other's

        # A buffer's flag is set when its last entry is written, and cleared when its last word is read.
        full = Signal(2)
        fill_buffer, scan_buffer = Signal(), Signal()
        fill_done, filled_buffer = Signal(), Signal()
        scan_done, scanned_buffer = Signal(), Signal()
        m.d.comb += [
            self.writable.eq(~Mux(fill_buffer, full[1], full[0])),
            self.filled.eq(Mux(scan_buffer, full[1], full[0])),
        ]
        for number in range(2):
            with m.If(fill_done & (filled_buffer == number)):
                m.d.sync += full[number].eq(1)
            with m.Elif(scan_done & (scanned_buffer == number)):
                m.d.sync += full[number].eq(0)

        # Filling: an entry goes to all lanes of its sub-spaces, one cycle later.
        parts = p.run // p.slice_subspaces  # slices that share a row
        part_bits = parts.bit_length() - 1
        entry = self.entry
        fill = Pipeline(m)
        values = fill.register(entry.values, "values")
        write_row = Signal(row_shape)
        m.d.comb += write_row.eq((entry.slice >> part_bits) + Mux(fill_buffer, frame_words, 0))
        write_address = fill.register(Cat(entry.centroid, write_row), "write_address")
        enables = Signal(parts * p.q_parallel)
        for part in range(parts):
            for query in range(p.q_parallel):
                here = entry.valid & (entry.vector == query)
                if parts > 1:
                    here = here & (entry.slice[:part_bits] == part)
                m.d.sync += enables[part * p.q_parallel + query].eq(here)
        m.d.sync += [fill_done.eq(entry.valid & entry.last), filled_buffer.eq(fill_buffer)]
        with m.If(entry.valid & entry.last):
            m.d.sync += fill_buffer.eq(~fill_buffer)

        # Reading, in steps of the output queue.
        m.submodules.queue = queue = OutputQueue(FrameScores(p))
        scan = Pipeline(m, enable=queue.advance)
        word = self.words.payload
        take, frame_end = Signal(), Signal()
        row = Signal(row_shape)
        first = Signal(init=1)
        m.d.comb += [
            self.words.ready.eq(queue.advance & self.filled),
            take.eq(self.words.valid & self.filled),
            frame_end.eq(row == Mux(scan_buffer, 2 * frame_words - 1, frame_words - 1)),
        ]
        with m.If(take & queue.advance):
            m.d.sync += [row.eq(row + 1), first.eq(frame_end)]
            with m.If(word.last):
                m.d.sync += [scan_buffer.eq(~scan_buffer), row.eq(Mux(scan_buffer, 0, frame_words))]
            with m.Elif(frame_end):
                m.d.sync += row.eq(Mux(scan_buffer, frame_words, 0))
        codes = scan.register(word.data, "codes")
        read_row = scan.register(row, "read_row")
        valid = scan.valid(take, cycles=1)
        m.d.comb += [
            scan_done.eq(queue.advance & valid & scan.register(word.last, "scan_last")),
            scanned_buffer.eq(scan.register(scan_buffer, "scan_buffer_held")),
        ]

        levels = tree_levels(p.run)
        starts = scan.register(first, "first", cycles=3 + levels)
        present = scan.valid(take, cycles=3 + levels)
        for token in range(p.frame):
            for query in range(p.q_parallel):
                looked_up = []
                for j in range(p.run):
                    lane = token * p.run + j
                    # The table that is read is not the one that is filled: no address is read and written in one cycle.
                    m.submodules[f"bank_{lane}_{query}"] = bank = memory.Memory(
                        shape=signed(p.lut_width),
                        depth=2 * p.bank_entries,
                        init=[],
                        attrs={"no_rw_check": 1},
                    )
                    write, read = bank.write_port(), bank.read_port()
                    part, place = divmod(j, p.slice_subspaces)
                    m.d.comb += [
                        write.addr.eq(write_address),
                        write.data.eq(values[place]),
                        write.en.eq(enables[part * p.q_parallel + query]),
                        read.addr.eq(Cat(codes[lane], read_row)),
                        read.en.eq(queue.advance & valid),
                    ]
                    looked_up.append(scan.register(read.data, "entry"))
                total = tree_sum(scan, looked_up, "sum")
                score = Signal(signed(p.score_width), name=f"score_{token}_{query}", reset_less=True)
                with m.If(queue.advance & present):
                    m.d.sync += score.eq(total if frame_words == 1 else Mux(starts, 0, score) + total)
                m.d.comb += queue.payload.scores[token][query].eq(score)
        m.d.comb += [
            queue.valid.eq(scan.valid(take & frame_end, cycles=4 + levels)),
            queue.payload.count.eq(scan.register(word.count, "count", cycles=4 + levels)),
            queue.payload.last.eq(scan.register(word.last, "last", cycles=4 + levels)),
        ]
        wiring.connect(m, queue.o, wiring.flipped(self.scores))
        return m
