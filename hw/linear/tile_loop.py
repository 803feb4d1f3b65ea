"""Order of the weight tiles of a job."""

from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

COUNT_WIDTH = 16
"""Bits of every count in a job descriptor."""


class TileLoop(wiring.Component):
    """Walks the tiles of a job: ``for block of tiles: for group of K: for tile of the block``.

    A block is `interleave` tiles (the last one may have fewer). Taking a few tiles in turn puts other outputs
    between two groups of one output, which hides the latency of its fp32 accumulation.

    Members
    -------
    start : in
        Begin with the first tile of a job; `tiles`, `interleave` and `groups` are stable from here on.
    step : in
        Go on to the next tile.
    done : out
        All tiles of the job have been stepped over (also after reset).
    first_group, last_group : out
        The tile holds the first or the last group of K.
    last_of_round : out
        The next tile, if any, holds another group or belongs to another block.
    last_column_tile : out
        The tile holds the last columns of the matrix.
    last_tile : out
        No tile follows.
    """

    start: In(1)
    step: In(1)
    tiles: In(COUNT_WIDTH)
    interleave: In(COUNT_WIDTH)
    groups: In(COUNT_WIDTH)
    done: Out(1, init=1)
    first_group: Out(1)
    last_group: Out(1)
    last_of_round: Out(1)
    last_column_tile: Out(1)
    last_tile: Out(1)

    def elaborate(self, platform):
        m = Module()
        remaining = Signal(COUNT_WIDTH)  # tiles of this and all later blocks
        tile = Signal(COUNT_WIDTH)
        group = Signal(COUNT_WIDTH)
        m.d.comb += [
            self.first_group.eq(group == 0),
            self.last_group.eq(group + 1 == self.groups),
            self.last_column_tile.eq(tile + 1 == remaining),
            self.last_of_round.eq(self.last_column_tile | (tile + 1 == self.interleave)),
            self.last_tile.eq(self.last_group & self.last_column_tile),
        ]
        with m.If(self.start):
            m.d.sync += [remaining.eq(self.tiles), tile.eq(0), group.eq(0), self.done.eq(0)]
        with m.Elif(self.step):
            m.d.sync += [tile.eq(tile + 1), self.done.eq(self.last_tile)]
            with m.If(self.last_of_round):
                m.d.sync += [tile.eq(0), group.eq(group + 1)]
                with m.If(self.last_group):
                    m.d.sync += [group.eq(0), remaining.eq(remaining - self.interleave)]
        return m
