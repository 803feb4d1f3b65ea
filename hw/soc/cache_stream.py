"""Keys and values of a sequence from its record and pages in memory to the attention engine."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_reader import word_port
from kvant.hw.kvcache.parameters import BLOCK_GROUPS
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.axi_reader import AxiReader, ReaderSignature
from kvant.hw.soc.cache_memory import CacheMemory
from kvant.hw.soc.descriptors import ErrorCode
from kvant.hw.soc.fault import Fault
from kvant.hw.soc.page_table import PageTable
from kvant.hw.soc.parameters import TopParameters

TABLE_DEPTH = 2
"""A page number is a word, and is asked for when it is needed."""


class StreamJob(data.StructLayout):
    """The cache of a sequence and head: word addresses, tokens in it, how many of them are sinks; the job's slot."""

    def __init__(self, p: TopParameters):
        addresses = dict.fromkeys(("record", "table", "key_pool", "value_pool"), word_address_bits(p.soc))
        super().__init__(
            {
                **addresses,
                "tokens": range(p.attention.tokens + 1),
                "sinks": range(p.attention.sinks + 2),
                "slot": 1,
            }
        )


class BlockCounts(data.StructLayout):
    """Blocks of key sinks, pages of keys, pages of values."""

    def __init__(self, p: TopParameters):
        attention = p.attention
        windows = range(attention.tokens // attention.group + 1)
        super().__init__({"sinks": range(attention.sink_blocks + 1), "keys": windows, "values": windows})


class CacheStream(wiring.Component):
    """Reads key sinks, pages of keys, pages of full windows of values, of one job after the other.

    The next job's are asked for while the words of the one before are taken.

    Members
    -------
    job : in stream
        `StreamJob`.
    ports : array of Out(ReaderSignature)
        Of sinks and pages; of the page table.
    keys, values : out streams
        `kvant.hw.attention.cache_reader.word_port`.
    faults : array of Fault
        A word of sinks or pages, or of the page table, came back with an error: nothing more comes until reset.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        words = word_port(p.attention)
        super().__init__(
            {
                "job": In(stream.Signature(StreamJob(p))),
                "ports": Out(ReaderSignature(p.soc)).array(2),
                "keys": Out(stream.Signature(words)),
                "values": Out(stream.Signature(words)),
                "faults": Out(Fault()).array(2),
            }
        )

    def elaborate(self, platform):
        p, soc = self.p, self.p.soc
        m = Module()
        depth = 1 << (soc.weight_words - 1).bit_length()
        m.submodules.reader = reader = AxiReader(soc, depth=depth, burst_beats=soc.burst_beats)
        m.submodules.numbers = numbers = AxiReader(soc, depth=TABLE_DEPTH, burst_beats=1)
        layout = CacheMemory(p.cache_shape, soc.port_bytes)
        page_bytes = (layout.keys.page_bytes, layout.values.page_bytes)
        m.submodules.table = table = PageTable(soc, page_bytes, 1)
        wiring.connect(m, reader.port, wiring.flipped(self.ports[0]))
        wiring.connect(m, numbers.port, wiring.flipped(self.ports[1]))
        wiring.connect(m, table.region, numbers.region)
        wiring.connect(m, numbers.o, table.words)
        words = {
            "sinks": layout.record.sink_block_bytes // soc.port_bytes,
            "keys": page_bytes[0] // soc.port_bytes,
            "values": page_bytes[1] // soc.port_bytes,
        }
        waits, starts = Signal(), Signal()  # the numbers of a job are not with the words yet
        counts = Signal(BlockCounts(p))  # of the newest job
        asked_slot, slot = Signal(), Signal()
        self._ask(m, reader, table, words, layout, counts, waits, asked_slot)
        with m.If(starts):
            m.d.sync += waits.eq(0)

        # Words go out.
        left = Signal(BlockCounts(p))
        word = Signal(range(max(words.values())))
        of_values, active, word_failed, takes = Signal(), Signal(), Signal(), Signal()
        last_word = Signal()
        m.d.comb += [
            of_values.eq((left.sinks == 0) & (left.keys == 0)),
            last_word.eq(
                word == Mux(left.sinks != 0, words["sinks"] - 1, Mux(of_values, words["values"] - 1, words["keys"] - 1))
            ),
            self.keys.valid.eq(active & reader.o.valid & ~of_values & ~word_failed),
            self.values.valid.eq(active & reader.o.valid & of_values & ~word_failed),
            self.keys.payload.data.eq(reader.o.payload.data),
            self.values.payload.data.eq(reader.o.payload.data),
            reader.o.ready.eq(active & ~word_failed & Mux(of_values, self.values.ready, self.keys.ready)),
            takes.eq(reader.o.valid & reader.o.ready),
            self.faults[0].code.eq(Mux(word_failed, ErrorCode.READ_ATTEND, ErrorCode.NONE)),
            self.faults[0].slot.eq(slot),
            self.faults[1].code.eq(Mux(table.failed, ErrorCode.READ_ATTEND, ErrorCode.NONE)),
            self.faults[1].slot.eq(asked_slot),
        ]
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += starts.eq(waits)
                m.d.sync += [left.eq(counts), slot.eq(asked_slot), word.eq(0)]
                with m.If(waits):
                    m.next = "WORDS"
            with m.State("WORDS"):
                m.d.comb += active.eq(1)
                with m.If(takes):
                    m.d.sync += [word.eq(word + 1), word_failed.eq(reader.o.payload.error)]
                    with m.If(last_word):
                        m.d.sync += word.eq(0)
                        with m.If(left.sinks != 0):
                            m.d.sync += left.sinks.eq(left.sinks - 1)
                        with m.Elif(left.keys != 0):
                            m.d.sync += left.keys.eq(left.keys - 1)
                        with m.Else():
                            m.d.sync += left.values.eq(left.values - 1)
                        with m.If((left.sinks == 0) & (left.keys + left.values == 1)):
                            m.next = "IDLE"
        return m

    def _ask(self, m: Module, reader, table, words: dict, layout, counts, waits, slot) -> None:
        """Asks for the sinks and pages of a job, whose numbers stay in *counts* and *slot*."""
        p, attention = self.p, self.p.attention
        key_sinks = layout.record.key_sinks.offset // p.soc.port_bytes
        group_bits, head_bits = (attention.group - 1).bit_length(), (attention.head_groups - 1).bit_length()
        given, job = self.job.payload, Signal(StreamJob(p))
        sinks_left = Signal.like(counts.sinks)
        address = Signal.like(job.record)
        region = reader.region.payload
        numbers = Signal(BlockCounts(p))

        # The next page is looked up while one is asked for.
        looks, values, found = Signal(), Signal(), Signal()
        window = Signal.like(counts.keys)
        page = Signal(data.StructLayout({"address": address.shape(), "values": 1, "last": 1}))
        last_window = window + 1 == Mux(values, counts.values, counts.keys)
        m.d.comb += [
            table.table.eq(job.table),
            table.pool.eq(Mux(values, job.value_pool, job.key_pool)),
            table.values.eq(values),
            table.windows[0].valid.eq(looks & ~found),
            table.windows[0].payload.eq(window),
        ]
        with m.If(table.known[0]):
            m.d.sync += [
                found.eq(1),
                page.address.eq(table.base),
                page.values.eq(values),
                window.eq(window + 1),
            ]
            ends = last_window & (values | (counts.values == 0))
            m.d.sync += [page.last.eq(ends), looks.eq(~ends)]
            with m.If(last_window):
                m.d.sync += [values.eq(1), window.eq(0)]

        m.d.comb += [
            numbers.sinks.eq(((given.sinks << head_bits) + (BLOCK_GROUPS - 1)) >> (BLOCK_GROUPS - 1).bit_length()),
            numbers.keys.eq((given.tokens + (attention.group - 1)) >> group_bits),
            numbers.values.eq(given.tokens >> group_bits),
            slot.eq(job.slot),
        ]
        with m.FSM(name="ask"):
            with m.State("IDLE"):
                m.d.comb += self.job.ready.eq(~waits)
                with m.If(self.job.valid & self.job.ready):
                    m.d.sync += [
                        job.eq(given),
                        counts.eq(numbers),
                        waits.eq(1),
                        sinks_left.eq(numbers.sinks),
                        address.eq(given.record + key_sinks),
                        looks.eq(1),
                        values.eq(0),
                        window.eq(0),
                    ]
                    m.next = "SINKS"
            with m.State("SINKS"):
                m.d.comb += [
                    reader.region.valid.eq(sinks_left != 0),
                    region.address.eq(address),
                    region.words.eq(words["sinks"]),
                ]
                with m.If(sinks_left == 0):
                    m.next = "PAGES"
                with m.Elif(reader.region.ready):
                    m.d.sync += [sinks_left.eq(sinks_left - 1), address.eq(address + words["sinks"])]
            with m.State("PAGES"):
                m.d.comb += [
                    reader.region.valid.eq(found),
                    region.address.eq(page.address),
                    region.words.eq(Mux(page.values, words["values"], words["keys"])),
                ]
                with m.If(found & reader.region.ready):
                    m.d.sync += found.eq(0)
                    with m.If(page.last):
                        m.next = "IDLE"
