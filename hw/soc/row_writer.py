"""Outputs of attention to rows in memory."""

from amaranth.hdl import Cat, Const, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.outputs import attention_output
from kvant.hw.soc.axi import word_address_bits
from kvant.hw.soc.output_packer import WORD_BITS, OutputPacker
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.write_arbiter import WriterSignature


class OutputRows(data.StructLayout):
    """Rows of outputs at a word address, `stride` words apart."""

    def __init__(self, p: TopParameters):
        address = word_address_bits(p.soc)
        super().__init__({"address": address, "stride": address, "queries": range(p.attention.queries + 1)})


class RowWriter(wiring.Component):
    """Writes the outputs of one job after the other.

    Members
    -------
    job : in stream
        `OutputRows`; the next one is taken when the outputs of the one before are in memory.
    out : in stream
        `kvant.hw.attention.outputs.attention_output`.
    memory : Out(WriterSignature)
        To the `WriteArbiter`.
    done : out
        For a cycle: the outputs of a job are in memory.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        super().__init__(
            {
                "job": In(stream.Signature(OutputRows(p))),
                "out": In(stream.Signature(attention_output())),
                "memory": Out(WriterSignature(p.soc)),
                "done": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        soc = self.p.soc
        m.submodules.packer = packer = OutputPacker(soc)
        wiring.connect(m, packer.words, wiring.flipped(self.memory.words))
        lane_bits = (soc.port_bits // WORD_BITS - 1).bit_length()
        job = Signal(OutputRows(self.p))
        address = Signal.like(packer.i.payload.address)
        active, moves = Signal(), Signal()
        output, placed = self.out.payload, packer.i.payload
        next_row = job.address + job.stride
        m.d.comb += [
            packer.i.valid.eq(self.out.valid & active),
            self.out.ready.eq(packer.i.ready & active),
            moves.eq(self.out.valid & self.out.ready),
            placed.value.eq(output.data),
            placed.keep.eq(1),
            placed.address.eq(address),
            placed.leaves.eq(output.last),
        ]
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.job.ready.eq(1)
                m.d.sync += [job.eq(self.job.payload), address.eq(Cat(Const(0, lane_bits), self.job.payload.address))]
                with m.If(self.job.valid):
                    m.next = "ROWS"
            with m.State("ROWS"):
                m.d.comb += active.eq(1)
                with m.If(moves):
                    m.d.sync += address.eq(address + 1)
                    with m.If(output.last):
                        m.d.sync += [
                            address.eq(Cat(Const(0, lane_bits), next_row)),
                            job.address.eq(next_row),
                            job.queries.eq(job.queries - 1),
                        ]
                        with m.If(job.queries == 1):
                            m.next = "FLUSH"
            with m.State("FLUSH"):
                m.d.comb += self.memory.flush.eq(~packer.words.valid)
                with m.If(self.memory.flush & self.memory.written):
                    m.d.comb += self.done.eq(1)
                    m.next = "IDLE"
        return m
