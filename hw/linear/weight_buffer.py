"""Weight tiles on their way to the array: a ring of codes and a queue of tile heads."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, fifo, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.linear.tile_loop import TileLoop, job_ports
from kvant.hw.numeric.codes import INT8


def weight_input(p: LinearParameters) -> data.StructLayout:
    """Payload of the weight port: codes of one beat, scale and coefficient of every column (constant over a tile)."""
    column = data.StructLayout({"scale": 16, "coefficient": 8})
    return data.StructLayout(
        {
            "data": data.ArrayLayout(data.ArrayLayout(4, p.rows), p.cols),
            "user": data.ArrayLayout(column, p.cols),
        }
    )


class TileHead(data.StructLayout):
    """What is known of a complete tile: its columns' metadata, and whether it has a plane of high INT8 digits."""

    def __init__(self, p: LinearParameters):
        super().__init__({"columns": weight_input(p)["user"].shape, "high_plane": 1})


class WeightBuffer(wiring.Component):
    """Takes weight tiles as they stream in and holds each until all tokens of the job have used it.

    Members
    -------
    start : in
        Expect the tiles of a job; its numbers are stable from a cycle before.
    tiles, interleave, groups : in
        See `TileLoop`.
    tail_beats : in
        Beats of a plane of the last group of K (other groups have `LinearParameters.beats`).
    w : in stream
        Tiles in the order of `TileLoop`, planes (high digits first, where a coefficient is 254), beats.
    head_valid, head : out
        The oldest complete tile.
    read : in
        Read the tile's next beat.
    slot_end, release : in
        The tile has been read to its end, in this cycle at the latest, and is read again from its beginning; or, with
        `release` too, not again: the next head follows in the next cycle.
    codes : out
        The codes of the beat, one cycle after `read`.
    """

    HEADS = 8
    """Complete tiles that may wait; enough to run single-beat tiles without a bubble."""

    def __init__(self, p: LinearParameters):
        self.p = p
        self.depth = max(self.HEADS, 1 << (4 * p.tile_beats - 1).bit_length())
        """Beats that fit; a power of two, so that addresses wrap by themselves."""
        super().__init__(
            {
                "start": In(1),
                **job_ports(p, "tiles", "interleave", "groups", "tail_beats"),
                "w": In(stream.Signature(weight_input(p))),
                "head_valid": Out(1),
                "head": Out(TileHead(p)),
                "read": In(1),
                "slot_end": In(1),
                "release": In(1),
                "codes": Out(4 * p.lanes),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.loop = loop = TileLoop(p)
        # A beat is read only after its tile is complete, and freed after its last read.
        m.submodules.ring = ring = memory.Memory(shape=4 * p.lanes, depth=self.depth, init=[], attrs={"no_rw_check": 1})
        m.submodules.heads = heads = fifo.SyncFIFOBuffered(width=TileHead(p).size, depth=self.HEADS)
        write, read = ring.write_port(), ring.read_port()

        # Pointers have one more bit than addresses, which tells a full ring from an empty one.
        write_pointer = Signal(range(2 * self.depth))
        read_pointer = Signal.like(write_pointer)
        base = Signal.like(write_pointer)  # of the oldest tile
        full = Signal()
        beat = Signal(range(p.beats))
        plane_is_high = Signal()
        first_plane_beat_done = Signal()  # the tile's first plane is known to be this one
        take = Signal()
        # A transfer waits in a register, so that what decides on it does not add to the path from the port.
        beat_in = Signal(weight_input(p))
        beat_valid = Signal()
        columns_int8 = Signal()
        with m.If(self.w.ready):
            m.d.sync += [beat_valid.eq(self.w.valid), beat_in.eq(self.w.payload)]
            if p.int8_groups:
                m.d.sync += columns_int8.eq(Cat(column.coefficient == INT8 for column in self.w.payload.user).any())
        with m.Elif(take):
            m.d.sync += beat_valid.eq(0)
        high = Signal()
        m.d.comb += high.eq(Mux(first_plane_beat_done, plane_is_high, columns_int8))

        # Whether a beat is the last of its plane is a register for either length: what it decides is a long way.
        ends_group = Signal(init=p.beats == 1)
        ends_tail = Signal()
        plane_end = Signal()
        tile_end = Signal()
        job_end = Signal()
        m.d.comb += [
            full.eq(write_pointer ^ base == self.depth),
            take.eq(beat_valid & ~loop.done & ~full & heads.w_rdy),
            job_end.eq(tile_end & loop.last_of_round & loop.last_group & loop.last_block),
            # The next job's weights wait outside until it begins.
            self.w.ready.eq(~loop.done & (~beat_valid | (take & ~job_end))),
            plane_end.eq(Mux(loop.last_group, ends_tail, ends_group)),
            tile_end.eq(plane_end & ~high),
            loop.start.eq(self.start),
            loop.step.eq(take & tile_end),
            loop.tiles.eq(self.tiles),
            loop.interleave.eq(self.interleave),
            loop.groups.eq(self.groups),
            write.addr.eq(write_pointer[:-1]),
            write.data.eq(beat_in.data),
            write.en.eq(take),
        ]
        had_high_plane = Signal()
        head_in = Signal(TileHead(p))
        m.d.comb += [
            head_in.columns.eq(beat_in.user),
            head_in.high_plane.eq(had_high_plane),
            heads.w_data.eq(head_in),
            heads.w_en.eq(take & tile_end),
        ]
        with m.If(self.start):
            m.d.sync += ends_tail.eq(self.tail_beats == 1)
        with m.Elif(take):
            m.d.sync += [
                ends_group.eq(Mux(plane_end, p.beats == 1, beat + 2 == p.beats)),
                ends_tail.eq(Mux(plane_end, self.tail_beats == 1, beat + 2 == self.tail_beats)),
            ]
        with m.If(take):
            m.d.sync += [
                write_pointer.eq(write_pointer + 1),
                beat.eq(Mux(plane_end, 0, beat + 1)),
                plane_is_high.eq(high & ~plane_end),
                first_plane_beat_done.eq(~tile_end),
                had_high_plane.eq(Mux(tile_end, 0, had_high_plane | high)),
            ]

        following = Signal.like(write_pointer)  # where reading goes on
        m.d.comb += [
            self.head_valid.eq(heads.r_rdy),
            self.head.eq(heads.r_data),
            heads.r_en.eq(self.slot_end & self.release),
            read.en.eq(self.read),
            read.addr.eq(read_pointer[:-1]),
            self.codes.eq(read.data),
            following.eq(read_pointer + self.read),
        ]
        m.d.sync += read_pointer.eq(Mux(self.slot_end & ~self.release, base, following))
        with m.If(self.slot_end & self.release):
            m.d.sync += base.eq(following)
        return m
