"""Activations from memory or a stream to the activation port of the linear path."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.activation_buffer import activation_input
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.linear.tile_loop import COUNT_WIDTH
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.axi_reader import AxiReader, ReaderSignature
from kvant.hw.soc.descriptors import ErrorCode
from kvant.hw.soc.fault import Fault
from kvant.hw.soc.parameters import LONGEST_BURST, TopParameters
from kvant.hw.soc.run_cutter import RunCutter

HALF_BITS = 16
"""Bits of an activation."""

WAITING_PARTS = 16
LEAST_DEPTH = 64
"""Words read ahead, so that a memory's latency of some 50 cycles does not show."""


class ActivationJob(data.StructLayout):
    """Where the activations of a job are: from the stream, or rows in memory at `address`, `stride` words apart."""

    def __init__(self, p: TopParameters):
        super().__init__(
            {
                "from_stream": 1,
                "address": word_address_bits(p.soc),
                "stride": word_address_bits(p.soc),
                "tokens": COUNT_WIDTH,
                "groups": COUNT_WIDTH,
                "tail": COUNT_WIDTH,
                "slot": 1,
            }
        )


class ActivationReader(wiring.Component):
    """Brings the activations of jobs, group by group of K, all tokens of a group after each other.

    A *part* is one group of one token. In memory it is a few words of a row, one burst.

    Members
    -------
    job : in stream
        `ActivationJob`.
    port : Out(ReaderSignature)
        See `AxiReader`.
    stream : in stream
        Activations of jobs that take them from there, in the form and order of `x`.
    x : out stream
        To the engine.
    fault : out
        A word came back with an error: `x` ends until reset.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        super().__init__(
            {
                "job": In(stream.Signature(ActivationJob(p))),
                "port": Out(ReaderSignature(p.soc)),
                "stream": In(stream.Signature(activation_input(p.linear))),
                "x": Out(stream.Signature(activation_input(p.linear))),
                "fault": Out(Fault()),
            }
        )

    def elaborate(self, platform):
        p, linear = self.p, self.p.linear
        m = Module()
        word_halves = p.soc.port_bits // HALF_BITS
        word_bits = word_halves.bit_length() - 1
        group_words = ceil_div(linear.group, word_halves)
        depth = max(LEAST_DEPTH, 1 << (2 * group_words - 1).bit_length())
        m.submodules.reader = reader = AxiReader(p.soc, depth=depth, burst_beats=min(group_words, LONGEST_BURST))
        part_shape = data.StructLayout({"count": range(linear.group + 1), "from_stream": 1, "slot": 1})
        m.submodules.parts = parts = fifo.SyncFIFOBuffered(width=part_shape.size, depth=WAITING_PARTS)
        wiring.connect(m, reader.port, wiring.flipped(self.port))

        # Parts are asked for.
        job = Signal(ActivationJob(p))
        group_address = Signal(word_address_bits(p.soc))
        row_address = Signal.like(group_address)
        tokens_left, groups_left = Signal(COUNT_WIDTH), Signal(COUNT_WIDTH)
        asking, last_group, emit = Signal(), Signal(), Signal()
        next_part = Signal(part_shape)
        m.d.comb += [
            self.job.ready.eq(~asking),
            last_group.eq(groups_left == 1),
            next_part.count.eq(Mux(last_group, job.tail, linear.group)),
            next_part.from_stream.eq(job.from_stream),
            next_part.slot.eq(job.slot),
            emit.eq(asking & parts.w_rdy & (job.from_stream | reader.region.ready)),
            parts.w_data.eq(next_part),
            parts.w_en.eq(emit),
            reader.region.valid.eq(asking & parts.w_rdy & ~job.from_stream),
            reader.region.payload.address.eq(row_address),
            reader.region.payload.words.eq((next_part.count + word_halves - 1) >> word_bits),
        ]
        with m.If(self.job.valid & self.job.ready):
            m.d.sync += [
                job.eq(self.job.payload),
                asking.eq(1),
                group_address.eq(self.job.payload.address),
                row_address.eq(self.job.payload.address),
                tokens_left.eq(self.job.payload.tokens),
                groups_left.eq(self.job.payload.groups),
            ]
        with m.Elif(emit):
            m.d.sync += [row_address.eq(row_address + job.stride), tokens_left.eq(tokens_left - 1)]
            with m.If(tokens_left == 1):
                m.d.sync += [
                    tokens_left.eq(job.tokens),
                    groups_left.eq(groups_left - 1),
                    group_address.eq(group_address + group_words),
                    row_address.eq(group_address + group_words),
                    asking.eq(~last_group),
                ]

        # Parts are cut into transfers.
        m.submodules.cutter = cutter = RunCutter(p.soc, bits=HALF_BITS, lanes=linear.x_lanes, most=linear.group)
        wiring.connect(m, reader.o, cutter.words)
        part = Signal(part_shape)
        left = Signal(range(linear.group + 1))
        last = Signal()
        incoming = Signal(part_shape)
        m.d.comb += [
            incoming.eq(parts.r_data),
            last.eq(left <= linear.x_lanes),
            cutter.run.payload.eq(incoming.count),
            self.fault.code.eq(Mux(cutter.failed, ErrorCode.READ_X, ErrorCode.NONE)),
            self.fault.slot.eq(part.slot),
        ]
        with m.FSM():
            with m.State("NEXT"):
                m.d.comb += [
                    cutter.run.valid.eq(parts.r_rdy & ~incoming.from_stream),
                    parts.r_en.eq(incoming.from_stream | cutter.run.ready),
                ]
                with m.If(parts.r_rdy & parts.r_en):
                    m.d.sync += [part.eq(incoming), left.eq(incoming.count)]
                    m.next = "MEMORY"
                    with m.If(incoming.from_stream):
                        m.next = "STREAM"
            with m.State("STREAM"):
                m.d.comb += [
                    self.x.valid.eq(self.stream.valid),
                    self.x.payload.eq(self.stream.payload),
                    self.stream.ready.eq(self.x.ready),
                ]
                with m.If(self.x.valid & self.x.ready):
                    m.d.sync += left.eq(left - linear.x_lanes)
                    with m.If(last):
                        m.next = "NEXT"
            with m.State("MEMORY"):
                m.d.comb += [
                    self.x.valid.eq(cutter.o.valid),
                    self.x.payload.data.eq(cutter.o.payload.data),
                    cutter.o.ready.eq(self.x.ready),
                ]
                with m.If(self.x.valid & self.x.ready & cutter.o.payload.last):
                    m.next = "NEXT"
        return m
