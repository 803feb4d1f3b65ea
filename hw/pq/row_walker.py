"""Addresses of the words of consecutive rows of a context."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.ring_layouts import RingShape


class RowWalker(wiring.Component):
    """Goes through the words of some rows, from any place of a context on, round the end of its ring.

    Parameters
    ----------
    p : PqParameters
    shape : RingShape

    Members
    -------
    start, store, head, place, rows : in
        Go through so many rows, at least one, from this place on: a slot of the ring, or ``ring_rows`` and a number
        among the sinks. Only while nothing is under way.
    valid, address : out
        The word to read, three cycles after the start at the earliest.
    keep : out
        Elements of that word.
    group_last, last, final : out
        It is the last one of a group of channels; of a row; it belongs to the last row.
    step : in
        It is read; only while `valid`.
    done : out
        It was the last one of all.
    """

    def __init__(self, p: PqParameters, shape: RingShape):
        self.p = p
        self.shape = shape
        super().__init__(
            {
                "start": In(1),
                "store": In(1),
                "head": In(8),
                "place": In(range(shape.context_rows)),
                "rows": In(range(1, max(shape.ring_rows, p.sinks) + 1)),
                "valid": Out(1),
                "address": Out(range(max(2, shape.words))),
                "keep": Out(range(p.lanes + 1)),
                "group_last": Out(1),
                "last": Out(1),
                "final": Out(1),
                "step": In(1),
                "done": Out(1),
            }
        )

    def elaborate(self, platform):
        p, shape = self.p, self.shape
        m = Module()
        dense = Signal(range(shape.contexts))
        row, first_row = Signal(range(shape.contexts * shape.context_rows)), Signal(range(max(2, shape.words)))
        place, left = Signal(range(shape.context_rows)), Signal.like(self.rows)
        transfer = Signal(range(max(2, p.row_transfers)))
        group_transfers = -(-p.group // p.lanes)
        group_transfer = Signal(range(max(2, group_transfers)))
        ring_end = Signal()
        m.d.comb += [
            self.last.eq(transfer == p.row_transfers - 1),
            self.group_last.eq(self.last | (group_transfer == group_transfers - 1)),
            self.final.eq(left == 1),
            self.keep.eq(Mux(self.last, p.head_dim - (p.row_transfers - 1) * p.lanes, p.lanes)),
            self.done.eq(self.step & self.last & self.final),
            ring_end.eq(place == shape.ring_rows - 1),
        ]
        m.d.sync += [
            row.eq(dense * shape.context_rows + place),
            first_row.eq(dense * (shape.context_rows * p.row_transfers)),
        ]
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [
                    dense.eq(self.head + Mux(self.store, p.heads, 0)),
                    place.eq(self.place),
                    left.eq(self.rows),
                ]
                with m.If(self.start):
                    m.next = "ROW"
            with m.State("ROW"):
                m.next = "WORD"
            with m.State("WORD"):
                m.d.sync += [self.address.eq(row * p.row_transfers), transfer.eq(0), group_transfer.eq(0)]
                m.next = "WALK"
            with m.State("WALK"):
                m.d.comb += self.valid.eq(1)
                with m.If(self.step):
                    m.d.sync += [
                        transfer.eq(Mux(self.last, 0, transfer + 1)),
                        group_transfer.eq(Mux(self.group_last, 0, group_transfer + 1)),
                        self.address.eq(Mux(self.last & ring_end, first_row, self.address + 1)),
                    ]
                    with m.If(self.last):
                        m.d.sync += [left.eq(left - 1), place.eq(Mux(ring_end, 0, place + 1))]
                    with m.If(self.done):
                        m.next = "IDLE"
        return m
