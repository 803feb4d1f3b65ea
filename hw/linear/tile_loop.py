"""Order of the weight tiles of a job."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.layouts import index_width
from kvant.hw.linear.parameters import LinearParameters

COUNT_WIDTH = 16
"""Bits of every count in a job descriptor."""


def job_ports(p: LinearParameters, *names: str) -> dict[str, wiring.Member]:
    """Inputs for numbers of a job, as wide as those of a job that the buffers hold.

    Parameters
    ----------
    p : LinearParameters
    names : of ``tokens``, ``groups``, ``tail``, ``tail_beats``, ``tiles``, ``last_cols``, ``interleave``
    """
    largest = {
        "tokens": p.accumulators,
        "groups": p.stored_groups,
        "tail": p.group,
        "tail_beats": p.beats,
        "tiles": (1 << COUNT_WIDTH) - 1,
        "last_cols": p.cols,
        "interleave": p.accumulators,
    }
    return {name: In(index_width(largest[name] + 1)) for name in names}


class TileLoop(wiring.Component):
    """Walks the tiles of a job: ``for block of tiles: for group of K: for tile of the block``.

    A block is `interleave` tiles (the last one may have fewer). Taking a few tiles in turn puts other outputs
    between two groups of one output, which hides the latency of its fp32 accumulation.

    All counters count down and all flags are registers, computed one step ahead: what a tile is decides at once what
    the sequencer does with it.

    Members
    -------
    start : in
        Begin with the first tile of a job; `tiles`, `interleave` and `groups` are stable from a cycle before.
    step : in
        Go on to the next tile.
    done : out
        All tiles of the job have been stepped over (also after reset).
    first_group, last_group : out
        The tile holds the first or the last group of K.
    last_of_round : out
        The next tile, if any, holds another group or belongs to another block.
    last_block : out
        The tile belongs to the last block.
    """

    def __init__(self, p: LinearParameters):
        super().__init__(
            {
                "start": In(1),
                "step": In(1),
                **job_ports(p, "tiles", "interleave", "groups"),
                "done": Out(1, init=1),
                "first_group": Out(1),
                "last_group": Out(1),
                "last_of_round": Out(1),
                "last_block": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        tiles_left = Signal.like(self.interleave)  # of the round, after this tile
        groups_left = Signal.like(self.groups)  # after this one
        block_tiles = Signal.like(self.interleave)  # of this block, less one
        block_is_one = Signal()
        behind = Signal(COUNT_WIDTH)  # tiles of later blocks
        behind_fits = Signal()  # they are one block, or none

        new_block = Signal()
        tiles, fits = Signal(COUNT_WIDTH), Signal()  # yet to come before the new block
        next_tiles, next_is_one = Signal.like(self.interleave), Signal()  # of the new block, less one
        m.d.comb += [
            new_block.eq(self.start | (self.step & self.last_of_round & self.last_group)),
            tiles.eq(Mux(self.start, self.tiles, behind)),
            fits.eq(Mux(self.start, self.tiles <= self.interleave, behind_fits)),
            next_tiles.eq(Mux(fits, tiles, self.interleave) - 1),
            next_is_one.eq(Mux(fits, tiles == 1, self.interleave == 1)),
        ]
        with m.If(new_block):
            m.d.sync += [
                self.done.eq(self.last_block & ~self.start),
                self.last_block.eq(fits),
                self.first_group.eq(1),
                self.last_group.eq(self.groups == 1),
                self.last_of_round.eq(next_is_one),
                groups_left.eq(self.groups - 1),
                tiles_left.eq(next_tiles),
                block_tiles.eq(next_tiles),
                block_is_one.eq(next_is_one),
                behind.eq(tiles - self.interleave),
                behind_fits.eq(tiles <= self.interleave << 1),
            ]
        with m.Elif(self.step & self.last_of_round):
            m.d.sync += [
                self.first_group.eq(0),
                self.last_group.eq(groups_left == 1),
                self.last_of_round.eq(block_is_one),
                groups_left.eq(groups_left - 1),
                tiles_left.eq(block_tiles),
            ]
        with m.Elif(self.step):
            m.d.sync += [self.last_of_round.eq(tiles_left == 1), tiles_left.eq(tiles_left - 1)]
        return m
