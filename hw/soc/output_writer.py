"""Outputs of the linear path to memory or a stream."""

import itertools

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.engine import output
from kvant.hw.linear.tile_loop import COUNT_WIDTH
from kvant.hw.soc.axi_writer import write_word
from kvant.hw.soc.parameters import TopParameters

WORD_BITS = 32
"""Bits of an output."""


def output_address_bits(p: TopParameters) -> int:
    """Bits of an address that counts outputs."""
    return p.soc.address_bits - 2


class OutputJob(data.StructLayout):
    """Where the outputs of a job go: to the stream, or to rows in memory at `address`, `stride` outputs apart."""

    def __init__(self, p: TopParameters):
        super().__init__(
            {
                "to_stream": 1,
                "address": output_address_bits(p),
                "stride": output_address_bits(p),
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
    words : out stream
        `write_word` of the memory.
    flush : out
        No more words will come: bursts may end.
    written : in
        All words are in memory.
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
                "words": Out(stream.Signature(write_word(p.soc))),
                "flush": Out(1),
                "written": In(1),
                "done": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.columns = columns = ColumnSequence(p)
        lanes = p.soc.port_bits // WORD_BITS
        lane_bits = lanes.bit_length() - 1
        job = Signal(OutputJob(p))
        tile_address = Signal(output_address_bits(p))  # of the first column of the tile, token 0
        row_address = Signal.like(tile_address)  # of the first column of the tile, this token
        address = Signal.like(tile_address)
        tokens_left = Signal(COUNT_WIDTH)
        one_token = Signal()

        held = Signal(data.ArrayLayout(WORD_BITS, lanes))
        strobes = Signal(lanes)
        column = columns.o.payload
        lane = address[:lane_bits] if lanes > 1 else 0
        word_strobes = Signal(lanes)
        leaves, room, take = Signal(), Signal(), Signal()
        m.d.comb += [
            columns.y.payload.eq(self.y.payload),
            columns.o.ready.eq(room),
            room.eq(~self.words.valid | self.words.ready),
            take.eq(columns.o.valid & room),
            word_strobes.eq(strobes | (column.keep << lane)),
            # A word leaves when it is full, when a row is left, and at the end.
            leaves.eq((column.keep & (lane == lanes - 1)) | (column.end & ~one_token) | column.last),
        ]
        with m.If(self.words.ready):
            m.d.sync += self.words.valid.eq(0)
        with m.If(take):
            merged = [Mux(column.keep & (lane == number), column.value, held[number]) for number in range(lanes)]
            m.d.sync += [
                Cat(*(held[number] for number in range(lanes))).eq(Cat(merged)),
                strobes.eq(Mux(leaves, 0, word_strobes)),
                address.eq(address + column.keep),
            ]
            with m.If(leaves):
                m.d.sync += [
                    self.words.valid.eq(word_strobes.any()),
                    self.words.payload.address.eq(address >> lane_bits),
                    self.words.payload.data.eq(Cat(merged)),
                    self.words.payload.strobes.eq(Cat(strobe.replicate(4) for strobe in word_strobes)),
                ]
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
                m.d.comb += self.flush.eq(~self.words.valid)
                with m.If(self.flush & self.written):
                    m.d.comb += self.done.eq(1)
                    m.next = "IDLE"
        return m
