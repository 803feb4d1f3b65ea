"""INT8 rows of values from a record in memory to the attention engine."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.layouts import index_range
from kvant.hw.attention.value_rows import row_port
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.axi_reader import AxiReader, ReaderSignature
from kvant.hw.soc.cache_memory import CacheMemory
from kvant.hw.soc.descriptors import ErrorCode
from kvant.hw.soc.fault import Fault
from kvant.hw.soc.parameters import LONGEST_BURST, TopParameters
from kvant.hw.soc.run_cutter import RunCutter

BYTE_BITS, HALF_BITS = 8, 16
DEPTH = 64
BURST = 16


class RowJob(data.StructLayout):
    """Rows of a record at a word address: its first *sinks*, then the first *staged* of its window; the job's slot."""

    def __init__(self, p: TopParameters):
        super().__init__(
            {
                "record": word_address_bits(p.soc),
                "sinks": range(p.attention.sinks + 2),
                "staged": range(p.attention.group),
                "slot": 1,
            }
        )


class ValueRowReader(wiring.Component):
    """Reads the rows of one job after the other; a job is read ahead while the engine has that before it.

    A sink's scales come before its elements: they lie behind them, and are asked for first. The scales of the channels
    are read once a job and stay in a small memory for all rows of the window.

    Members
    -------
    job : in stream
        `RowJob`.
    port : Out(ReaderSignature)
    rows : out stream
        `kvant.hw.attention.value_rows.row_port`.
    fault : out
        A word came back with an error: `rows` ends until reset.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        super().__init__(
            {
                "job": In(stream.Signature(RowJob(p))),
                "port": Out(ReaderSignature(p.soc)),
                "rows": Out(stream.Signature(row_port(p.attention))),
                "fault": Out(Fault()),
            }
        )

    def elaborate(self, platform):
        p, soc, attention = self.p, self.p.soc, self.p.attention
        m = Module()
        m.submodules.reader = reader = AxiReader(soc, depth=DEPTH, burst_beats=min(BURST, LONGEST_BURST))
        lanes, d = attention.lanes, attention.head_dim
        m.submodules.elements = elements = RunCutter(soc, bits=BYTE_BITS, lanes=lanes, most=d)
        m.submodules.channels = channels = RunCutter(soc, bits=HALF_BITS, lanes=lanes, most=d)
        wiring.connect(m, reader.port, wiring.flipped(self.port))
        waits, starts = Signal(), Signal()  # the numbers of a job are not with the rows yet
        asked = Signal(RowJob(p))  # the newest job
        self._ask(m, reader, asked, waits)
        with m.If(starts):
            m.d.sync += waits.eq(0)

        record = CacheMemory(p.cache_shape, soc.port_bytes).record
        scale_words = (record.sink_row_bytes - record.row_bytes) // soc.port_bytes
        job = Signal(RowJob(p))
        scales = Signal(soc.port_bits * scale_words)  # of the groups of a sink, the next one lowest
        word = Signal(range(scale_words + 1))
        transfer = Signal(index_range(attention.row_transfers))
        in_group = Signal(index_range(attention.group // lanes))
        of_groups, of_channels, gives, scales_failed, takes, failed = (Signal() for _ in range(6))
        # Written before the rows of the window are given, read while they are.
        m.submodules.channel_scales = channel_scales = memory.Memory(
            shape=HALF_BITS * lanes, depth=max(2, attention.row_transfers), init=[]
        )
        write, read = channel_scales.write_port(), channel_scales.read_port(domain="comb")
        sink = job.sinks != 0
        group_scale = scales[:HALF_BITS]
        m.d.comb += [
            takes.eq(of_groups & reader.o.valid & ~scales_failed),
            reader.o.ready.eq(
                (of_groups & ~scales_failed) | (of_channels & channels.words.ready) | (gives & elements.words.ready)
            ),
            channels.words.valid.eq(reader.o.valid & of_channels),
            elements.words.valid.eq(reader.o.valid & gives),
            channels.words.payload.eq(reader.o.payload),
            elements.words.payload.eq(reader.o.payload),
            channels.run.payload.eq(d),
            elements.run.payload.eq(d),
            channels.o.ready.eq(of_channels),
            write.en.eq(channels.o.valid & channels.o.ready),
            write.addr.eq(transfer),
            write.data.eq(channels.o.payload.data),
            read.addr.eq(transfer),
            self.rows.valid.eq(elements.o.valid & gives),
            elements.o.ready.eq(self.rows.ready & gives),
            self.rows.payload.data.eq(elements.o.payload.data),
            self.rows.payload.user.eq(Mux(sink, Cat(group_scale for _ in range(lanes)), read.data)),
            self.rows.payload.last.eq(elements.o.payload.last),
            failed.eq(scales_failed | channels.failed | elements.failed),
            self.fault.code.eq(Mux(failed, ErrorCode.READ_ATTEND, ErrorCode.NONE)),
            self.fault.slot.eq(job.slot),
        ]
        with m.If(takes):
            m.d.sync += [
                scales.eq(Cat(scales, reader.o.payload.data)[soc.port_bits :]),
                scales_failed.eq(reader.o.payload.error),
                word.eq(word + 1),
            ]
        moves = self.rows.valid & self.rows.ready
        with m.If(write.en | moves):
            m.d.sync += transfer.eq(transfer + 1)
        with m.If(moves & sink):
            m.d.sync += in_group.eq(in_group + 1)
            with m.If(in_group == attention.group // lanes - 1):
                m.d.sync += [in_group.eq(0), scales.eq(scales >> HALF_BITS)]
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += starts.eq(waits)
                m.d.sync += job.eq(asked)
                with m.If(waits):
                    m.next = "NEXT"
            with m.State("NEXT"):
                m.d.sync += [transfer.eq(0), in_group.eq(0), word.eq(0)]
                with m.If(sink):
                    m.next = "GROUPS"
                with m.Elif(job.staged != 0):
                    m.d.comb += channels.run.valid.eq(1)
                    m.next = "CHANNELS"
                with m.Else():
                    m.next = "IDLE"
            with m.State("GROUPS"):
                m.d.comb += of_groups.eq(1)
                with m.If(takes & (word == scale_words - 1)):
                    m.next = "ROW"
            with m.State("CHANNELS"):
                m.d.comb += of_channels.eq(1)
                with m.If(write.en & channels.o.payload.last):
                    m.next = "ROW"
            with m.State("ROW"):
                m.d.sync += transfer.eq(0)
                m.d.comb += elements.run.valid.eq(~failed)
                with m.If(elements.run.valid & elements.run.ready):
                    m.next = "ELEMENTS"
            with m.State("ELEMENTS"):
                m.d.comb += gives.eq(1)
                with m.If(moves & elements.o.payload.last):
                    with m.If(sink):
                        m.d.sync += job.sinks.eq(job.sinks - 1)
                        m.next = "NEXT"
                    with m.Else():
                        m.d.sync += job.staged.eq(job.staged - 1)
                        m.next = "ROW"
                        with m.If(job.staged == 1):
                            m.next = "IDLE"
        return m

    def _ask(self, m: Module, reader: AxiReader, job, waits) -> None:
        """Asks for the rows of a job, whose numbers stay in *job*."""
        p, port_bytes = self.p, self.p.soc.port_bytes
        record = CacheMemory(p.cache_shape, port_bytes).record
        row, sink_row = record.row_bytes // port_bytes, record.sink_row_bytes // port_bytes
        given, region = self.job.payload, reader.region.payload
        left = Signal.like(job.sinks)
        address = Signal.like(job.record)
        window_words = Signal(range(p.attention.group * row + 1))
        m.d.sync += window_words.eq(job.staged * row)
        with m.FSM(name="ask"):
            with m.State("IDLE"):
                m.d.comb += self.job.ready.eq(~waits)
                with m.If(self.job.valid & self.job.ready):
                    m.d.sync += [
                        job.eq(given),
                        waits.eq(1),
                        left.eq(given.sinks),
                        address.eq(given.record + record.value_sinks.offset // port_bytes),
                    ]
                    m.next = "SCALES"
            with m.State("SCALES"):
                m.d.comb += [region.address.eq(address + row), region.words.eq(sink_row - row)]
                with m.If(left == 0):
                    m.d.sync += address.eq(job.record + record.value_scales.offset // port_bytes)
                    m.next = "IDLE"
                    with m.If(job.staged != 0):
                        m.next = "CHANNELS"
                with m.Else():
                    m.d.comb += reader.region.valid.eq(1)
                    with m.If(reader.region.ready):
                        m.next = "SINK"
            with m.State("SINK"):
                m.d.comb += [reader.region.valid.eq(1), region.address.eq(address), region.words.eq(row)]
                with m.If(reader.region.ready):
                    m.d.sync += [left.eq(left - 1), address.eq(address + sink_row)]
                    m.next = "SCALES"
            with m.State("CHANNELS"):
                scale_words = record.value_scales.size // port_bytes
                m.d.comb += [reader.region.valid.eq(1), region.address.eq(address), region.words.eq(scale_words)]
                with m.If(reader.region.ready):
                    m.d.sync += address.eq(job.record + record.value_window.offset // port_bytes)
                    m.next = "WINDOW"
            with m.State("WINDOW"):
                m.d.comb += [reader.region.valid.eq(1), region.address.eq(address), region.words.eq(window_words)]
                with m.If(reader.region.ready):
                    m.next = "IDLE"
