"""Outputs of the linear path to memory or a stream."""

import itertools

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.engine import output
from kvant.hw.linear.tile_loop import COUNT_WIDTH
from kvant.hw.soc.output_packer import WORD_BITS, OutputPacker, output_address_bits
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.write_arbiter import WriterSignature


class OutputJob(data.StructLayout):
    """Where the outputs of a job go: to the stream, or to rows in memory at `address`, `stride` outputs apart."""

    def __init__(self, p: TopParameters):
        super().__init__(
            {
                "to_stream": 1,
                "address": output_address_bits(p.soc),
                "stride": output_address_bits(p.soc),
                "tokens": COUNT_WIDTH,
            }
        )


class ColumnSequence(wiring.Component):
    """Outputs of a transfer of the engine, one column after the other, in order.

    With one accumulator unit that is the order in which they come. With several, the outputs of a tile and token are
    collected first, and leave one per cycle.

    Members
    -------
    y : in stream
        From the engine.
    o : out stream
        `value`; `keep`: it is an output; `end`: last column of the tile, for this token; `last`: of the job too.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        column = data.StructLayout({"value": WORD_BITS, "keep": 1, "end": 1, "last": 1})
        super().__init__(
            {"y": In(stream.Signature(output(p.linear))), "o": Out(stream.Signature(column))},
        )

    def elaborate(self, platform):
        p = self.p.linear
        m = Module()
        y, o = self.y, self.o
        step = Signal(range(max(2, p.unit_cols)))
        last_step = step == p.unit_cols - 1
        if p.units == 1:
            m.d.comb += [
                o.valid.eq(y.valid),
                y.ready.eq(o.ready),
                o.payload.value.eq(y.payload.data[0]),
                o.payload.keep.eq(y.payload.keep[0]),
                o.payload.end.eq(last_step),
                o.payload.last.eq(y.payload.last),
            ]
            with m.If(y.valid & y.ready):
                m.d.sync += step.eq(Mux(last_step, 0, step + 1))
            return m
        column = data.StructLayout({"value": WORD_BITS, "keep": 1})
        columns = [Signal(column, name=f"column_{number}") for number in range(p.units * p.unit_cols)]
        full, last = Signal(), Signal()
        left = Signal(range(len(columns) + 1))
        m.d.comb += y.ready.eq(~full)
        with m.If(y.valid & y.ready):
            m.d.sync += [step.eq(Mux(last_step, 0, step + 1)), full.eq(last_step), last.eq(y.payload.last)]
            m.d.sync += left.eq(len(columns))
            for unit in range(p.units):
                for number in range(p.unit_cols):
                    with m.If(step == number):
                        m.d.sync += columns[unit * p.unit_cols + number].eq(
                            Cat(y.payload.data[unit], y.payload.keep[4 * unit])
                        )
        m.d.comb += [
            o.valid.eq(full),
            o.payload.value.eq(columns[0].value),
            o.payload.keep.eq(columns[0].keep),
            o.payload.end.eq(left == 1),
            o.payload.last.eq(last & (left == 1)),
        ]
        with m.If(o.valid & o.ready):
            m.d.sync += [left.eq(left - 1), full.eq(left != 1)]
            for here, following in itertools.pairwise(columns):
                m.d.sync += here.eq(following)
        return m


class OutputWriter(wiring.Component):
    """Takes the outputs of one job after the other.

    Rows in memory are written tile by tile, one output per cycle; outputs that share a word of the port share a write
    where they follow each other.

    Members
    -------
    job : in stream
        `OutputJob`; the next one is taken when the outputs of the one before are in memory.
    y : in stream
        From the engine.
    stream : out stream
        Outputs of jobs that send them there, as the engine gives them.
    memory : Out(WriterSignature)
        To the `WriteArbiter`.
    done : out
        The last output of a job is in memory, or has been taken from the stream.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        super().__init__(
            {
                "job": In(stream.Signature(OutputJob(p))),
                "y": In(stream.Signature(output(p.linear))),
                "stream": Out(stream.Signature(output(p.linear))),
                "memory": Out(WriterSignature(p.soc)),
                "done": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.columns = columns = ColumnSequence(p)
        m.submodules.packer = packer = OutputPacker(p.soc)
        wiring.connect(m, packer.words, wiring.flipped(self.memory.words))
        job = Signal(OutputJob(p))
        tile_address = Signal(output_address_bits(p.soc))  # of the first column of the tile, token 0
        row_address = Signal.like(tile_address)  # of the first column of the tile, this token
        address = Signal.like(tile_address)
        tokens_left = Signal(COUNT_WIDTH)
        one_token = Signal()

        column, placed = columns.o.payload, packer.i.payload
        take = Signal()
        m.d.comb += [
            columns.y.payload.eq(self.y.payload),
            columns.o.ready.eq(packer.i.ready),
            packer.i.valid.eq(columns.o.valid),
            take.eq(columns.o.valid & columns.o.ready),
            placed.value.eq(column.value),
            placed.keep.eq(column.keep),
            placed.address.eq(address),
            # Where a row is left, and at the end.
            placed.leaves.eq((column.end & ~one_token) | column.last),
        ]
        with m.If(take):
            m.d.sync += address.eq(address + column.keep)
            with m.If(column.end & ~one_token):
                next_tile = tile_address + p.linear.cols
                next_row = row_address + job.stride
                with m.If(tokens_left == 1):
                    m.d.sync += [
                        tokens_left.eq(job.tokens),
                        tile_address.eq(next_tile),
                        row_address.eq(next_tile),
                        address.eq(next_tile),
                    ]
                with m.Else():
                    m.d.sync += [
                        tokens_left.eq(tokens_left - 1),
                        row_address.eq(next_row),
                        address.eq(next_row),
                    ]
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.job.ready.eq(1)
                given = self.job.payload
                with m.If(self.job.valid):
                    m.d.sync += [
                        job.eq(given),
                        tile_address.eq(given.address),
                        row_address.eq(given.address),
                        address.eq(given.address),
                        tokens_left.eq(given.tokens),
                        one_token.eq(given.tokens == 1),
                    ]
                    with m.If(given.to_stream):
                        m.next = "STREAM"
                    with m.Else():
                        m.next = "MEMORY"
            with m.State("STREAM"):
                m.d.comb += [
                    self.stream.valid.eq(self.y.valid),
                    self.stream.payload.eq(self.y.payload),
                    self.y.ready.eq(self.stream.ready),
                ]
                with m.If(self.y.valid & self.y.ready & self.y.payload.last):
                    m.d.comb += self.done.eq(1)
                    m.next = "IDLE"
            with m.State("MEMORY"):
                m.d.comb += [columns.y.valid.eq(self.y.valid), self.y.ready.eq(columns.y.ready)]
                with m.If(take & column.last):
                    m.next = "FLUSH"
            with m.State("FLUSH"):
                m.d.comb += self.memory.flush.eq(~packer.words.valid)
                with m.If(self.memory.flush & self.memory.written):
                    m.d.comb += self.done.eq(1)
                    m.next = "IDLE"
        return m
