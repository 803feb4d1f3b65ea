"""Rows of a job on their way into the codebook engine, and the memory in which it keeps them."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.layouts import index_range
from kvant.hw.parameters import ParameterError, check_integer
from kvant.hw.pq.codebook_jobs import row_input
from kvant.hw.pq.parameters import PqParameters


class Pieces:
    """How rows of a job are cut.

    Parameters
    ----------
    p : PqParameters
    element : shape-like
        Of an element.
    lanes : int
        Elements of a piece: a power of two up to `p.lanes` and `p.slice_bytes`.
    vectors : int
        Most rows of a job.

    Attributes
    ----------
    parts : int
        Pieces of a slice.
    elements : data.ArrayLayout
        A piece.
    place : data.StructLayout
        Where it belongs: `vector`, `slice`, and `part` of the slice.

    Raises
    ------
    ParameterError
        When *lanes* is not legal, or *vectors* not positive.
    """

    def __init__(self, p: PqParameters, element, lanes: int, vectors: int):
        self.p = p
        self.element = element
        self.lanes = check_integer("piece", lanes, 1, min(p.lanes, p.slice_bytes))
        if lanes & (lanes - 1):
            raise ParameterError(f"piece = {lanes}: legal are the powers of two")
        self.vectors = check_integer("vectors", vectors, 1)
        self.parts = p.slice_bytes // lanes
        self.elements = data.ArrayLayout(element, lanes)
        self.place = data.StructLayout(
            {"vector": index_range(vectors), "slice": index_range(p.slices), "part": index_range(self.parts)}
        )


class RowLoader(wiring.Component):
    """Cuts the rows of a job into pieces, one a cycle.

    Parameters
    ----------
    pieces : Pieces

    Members
    -------
    start, count : in
        Take the next `count` rows; only while not `busy`.
    busy : out
        Rows are missing, or pieces still come.
    i : in stream
        {data: p.lanes elements, last: end of a row}.
    valid, elements, place : out
        A piece, and where it belongs. Pieces behind the end of a row are left out.
    """

    def __init__(self, pieces: Pieces):
        self.pieces = pieces
        super().__init__(
            {
                "start": In(1),
                "count": In(range(pieces.vectors + 1)),
                "busy": Out(1),
                "i": In(stream.Signature(row_input(pieces.p, pieces.element))),
                "valid": Out(1),
                "elements": Out(pieces.elements),
                "place": Out(pieces.place),
            }
        )

    def elaborate(self, platform):
        p, lanes, parts = self.pieces.p, self.pieces.lanes, self.pieces.parts
        m = Module()
        of_transfer = p.lanes // lanes
        part_bits = (parts - 1).bit_length()
        width = self.elements.shape().size

        # The transfer that is being cut, its next piece at the bottom.
        held = Signal(p.lanes * width // lanes, reset_less=True)
        held_last = Signal(reset_less=True)
        holds, wanted = Signal(), Signal()
        number = Signal(index_range(of_transfer))
        row_place = Signal(index_range(p.row_transfers * of_transfer))
        vector = Signal(index_range(self.pieces.vectors))
        last_vector = Signal.like(vector)
        transfer_end, row_end, take = Signal(), Signal(), Signal()
        m.d.comb += [
            transfer_end.eq(holds & (number == of_transfer - 1)),
            row_end.eq(transfer_end & held_last),
            # Rows of the next job are not taken behind the last one of this.
            self.i.ready.eq(wanted & (~holds | (transfer_end & ~(held_last & (vector == last_vector))))),
            take.eq(self.i.valid & self.i.ready),
            self.valid.eq(holds & (row_place < p.head_dim // lanes)),
            self.elements.eq(held[:width]),
            self.place.vector.eq(vector),
            self.place.part.eq(row_place[:part_bits]),
            self.place.slice.eq(row_place[part_bits:]),
            self.busy.eq(wanted),
        ]
        with m.If(self.start):
            m.d.sync += [wanted.eq(1), vector.eq(0), last_vector.eq(self.count - 1)]
        with m.Elif(row_end):
            m.d.sync += [vector.eq(vector + 1), wanted.eq(vector != last_vector)]
        with m.If(take):
            m.d.sync += [held.eq(self.i.payload.data), held_last.eq(self.i.payload.last), holds.eq(1), number.eq(0)]
        with m.Elif(holds):
            m.d.sync += [number.eq(number + 1), holds.eq(~transfer_end)]
            if of_transfer > 1:
                m.d.sync += held.eq(held[width:])
        with m.If(row_end):
            m.d.sync += row_place.eq(0)
        with m.Elif(holds):
            m.d.sync += row_place.eq(row_place + 1)
        return m


class VectorMemory(wiring.Component):
    """The vectors of a job, written in pieces, read by slices.

    A job's vectors are complete before the first is read, and the next job's come when the last has been read: no
    address is read and written in one cycle.

    Parameters
    ----------
    pieces : Pieces

    Members
    -------
    write, elements, place : in
        A piece, and where it belongs.
    read, vector, slice : in
        What is read.
    o : out
        Its elements, one cycle later, straight from the memory.
    """

    def __init__(self, pieces: Pieces):
        self.pieces = pieces
        super().__init__(
            {
                "write": In(1),
                "elements": In(pieces.elements),
                "place": In(pieces.place),
                "read": In(1),
                "vector": In(index_range(pieces.vectors)),
                "slice": In(index_range(pieces.p.slices)),
                "o": Out(data.ArrayLayout(pieces.element, pieces.p.slice_bytes)),
            }
        )

    def elaborate(self, platform):
        pieces = self.pieces
        m = Module()
        bits = (pieces.vectors - 1).bit_length()

        def address(slice_, vector):
            return Cat(vector[:bits], slice_)

        read_parts = []
        # A memory for each part, since a block RAM has no write enable for a few bits.
        for part in range(pieces.parts):
            words = memory.Memory(
                shape=self.elements.shape().size,
                depth=max(2, pieces.p.slices << bits),
                init=[],
                attrs={"no_rw_check": 1},
            )
            m.submodules[f"part_{part}"] = words
            write, read = words.write_port(), words.read_port()
            m.d.comb += [
                write.addr.eq(address(self.place.slice, self.place.vector)),
                write.data.eq(self.elements),
                write.en.eq(self.write & (self.place.part == part)),
                read.addr.eq(address(self.slice, self.vector)),
                read.en.eq(self.read),
            ]
            read_parts.append(read.data)
        m.d.comb += self.o.eq(Cat(read_parts))
        return m
