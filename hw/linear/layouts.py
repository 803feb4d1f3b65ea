"""Signals that travel through the linear path beside each other: beat, slot and result layouts."""

from amaranth.hdl import signed
from amaranth.lib import data

from kvant.hw.linear.parameters import LinearParameters


def index_width(count: int) -> int:
    """Bits of an index into *count* places; one even where a single place needs none (no zero-width ports)."""
    return max(1, (count - 1).bit_length())


class Beat(data.StructLayout):
    """What enters the array in one cycle.

    Members
    -------
    valid : 1
        The beat carries work; the other members are don't-care otherwise.
    first, last : 1
        First beat of a plane; last beat of the slot, after which the slot's results come out.
    high : 1
        The beat belongs to the plane of high INT8 digits. It precedes the code plane and exists only in slots
        with an INT8 column; columns that are not INT8 idle in it.
    x : rows * signed(8)
        Activations, shared by all columns, zero where the group has no element.
    codes : cols * rows * 4
        4-bit codes; of an INT8 column, the signed high digit (``w >> 4``) or the unsigned low one (``w & 15``).
    """

    def __init__(self, p: LinearParameters):
        super().__init__(
            {
                "valid": 1,
                "first": 1,
                "last": 1,
                "high": 1,
                "x": data.ArrayLayout(signed(8), p.rows),
                "codes": data.ArrayLayout(data.ArrayLayout(4, p.rows), p.cols),
            }
        )


class Slot(data.StructLayout):
    """What belongs to all beats of a slot, stable from its first to its last beat.

    Members
    -------
    coefficient : cols * 8
        Coefficient byte of each column's group.
    w_scale : cols * 16
        fp16 scale of each column's group.
    x_scale : 16
        fp16 scale of the activation group.
    address : index of an accumulator
        Which fp32 accumulator of every column the result adds to.
    first_group, last_group : 1
        First group of an output (the accumulator starts from +0); last one (the sum is complete).
    """

    def __init__(self, p: LinearParameters):
        super().__init__(
            {
                "coefficient": data.ArrayLayout(8, p.cols),
                "w_scale": data.ArrayLayout(16, p.cols),
                "x_scale": 16,
                "address": index_width(p.accumulators),
                "first_group": 1,
                "last_group": 1,
            }
        )


class GroupSum(data.StructLayout):
    """Integer sums of one group of one column, from the array to a group accumulator; no back-pressure.

    Members
    -------
    valid : 1
        One result per cycle; the columns of a unit follow each other without a gap.
    psum1, psum2 : signed
        Partial sums; ``a * psum1 + psum2`` for M-ANT, ``psum1`` for the linear type, ``psum1 + psum2`` for INT8.
    coefficient, w_scale, x_scale, address, first_group, last_group
        As in `Slot`, of this column.
    column : index within the unit
        Column ``unit * unit_cols + column`` of the array.
    """

    def __init__(self, p: LinearParameters):
        super().__init__(
            {
                "valid": 1,
                "psum1": signed(p.psum1_width),
                "psum2": signed(p.psum2_width),
                "coefficient": 8,
                "w_scale": 16,
                "x_scale": 16,
                "address": index_width(p.accumulators),
                "column": index_width(p.unit_cols),
                "first_group": 1,
                "last_group": 1,
            }
        )


class Output(data.StructLayout):
    """A finished fp32 output of a group accumulator; no back-pressure.

    Members
    -------
    valid : 1
        One output per cycle at most.
    y : 32
        IEEE 754 binary32.
    column, address
        As in `GroupSum`.
    """

    def __init__(self, p: LinearParameters):
        super().__init__(
            {
                "valid": 1,
                "y": 32,
                "column": index_width(p.unit_cols),
                "address": index_width(p.accumulators),
            }
        )
