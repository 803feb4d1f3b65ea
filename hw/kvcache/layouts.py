"""Signals that the cache blocks share: tables written at run time, sums of a group, its grid, writes to memory."""

from amaranth.hdl import signed
from amaranth.lib import data, enum

from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.numeric.codes import MAGNITUDES


class Table(enum.IntEnum):
    """What a `TableWrite` changes."""

    COEFFICIENT = 0
    """Entry `index` of the head's coefficient table."""

    THRESHOLD = 1
    """Threshold between the entries `index` and `index + 1`."""

    MEAN = 2
    """fp16 mean of the channel `index`."""

    FLOOR = 3
    """fp16 floor of the largest magnitude of the channel `index`."""

    END = 4
    """Ends the head's sequence; `index` and `value` are ignored."""

    CODEBOOK_K = 5
    """fp16 scale of the head's codebook of keys; `index` is ignored."""

    CODEBOOK_V = 6
    """fp16 scale of the head's codebook of values; `index` is ignored."""

    POSITION = 7
    """The next sequence of the head is one that was begun before: its first row has this position (high half in
    `index`, low half in `value`)."""

    WINDOW = 8
    """As POSITION, but its first row is the first one of the window of this position: rows before the position were
    rows of the sequence before."""


class TableWrite(data.StructLayout):
    """A transfer of the table port.

    Members
    -------
    value : 16
        Coefficient byte, threshold, or fp16 number.
    index : 16
        Entry or channel.
    head : 8
    kind : 8
        A `Table`; another one is an error.
    """

    def __init__(self):
        super().__init__({"value": 16, "index": 16, "head": 8, "kind": 8})


class GroupSums(data.StructLayout):
    """What is known of a complete group of INT8 elements.

    Members
    -------
    sum : signed
    sumsq : unsigned
    maximum, minimum : signed(8)
    count : 1 .. group
    """

    def __init__(self, p: CacheParameters):
        super().__init__(
            {
                "sum": signed(p.sum_width),
                "sumsq": p.sumsq_width,
                "maximum": signed(8),
                "minimum": signed(8),
                "count": range(p.group + 1),
            }
        )


class GroupGrid(data.StructLayout):
    """The levels of a group as its encoder needs them.

    Members
    -------
    limits : (MAGNITUDES - 1) * 8
        The magnitude of an element is the number of limits below ``|q|``.
    scale : 16
        Stored fp16 scale.
    zero : 1
        Every code is 0x0.
    linear : 1
        Magnitude 0 is code 0x0 for negative elements too.
    error : 1
        The coefficient is reserved, or larger than the datapath was built for.
    """

    def __init__(self):
        super().__init__(
            {"limits": data.ArrayLayout(8, MAGNITUDES - 1), "scale": 16, "zero": 1, "linear": 1, "error": 1}
        )


class PageAddress(data.StructLayout):
    """Where a write to the cache's memory goes.

    Members
    -------
    address : 24
        Bytes from the beginning of the page.
    page : 24
        Slot of the page in the head's ring.
    head : 8
    timestamp : 32
        Position in the sequence of the page's first token.
    """

    def __init__(self):
        super().__init__({"address": 24, "page": 24, "head": 8, "timestamp": 32})


class PageWrite(data.StructLayout):
    """Payload of a stream of writes to the cache's memory.

    Members
    -------
    data : bits
    keep : bits / 8
        Byte strobes.
    user : PageAddress
    last : 1
        Last write of the page on this stream.
    """

    def __init__(self, bits: int):
        super().__init__({"data": bits, "keep": bits // 8, "user": PageAddress(), "last": 1})
