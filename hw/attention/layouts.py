"""What a cache in front of the attention sends: rows that are not coded, scores of coded keys, sums of coded values."""

from amaranth.hdl import signed
from amaranth.lib import data

from kvant.hw.attention.cache_shape import INT8_MAGNITUDE, CacheShape

SHIFT_BITS = 5
"""Bits of the shift that brings bins to `BIN_BITS`."""

BIN_BITS = 32
"""Bits of a bin in the read-out, shifted; the bins of a sub-space together stay below ``2^BIN_BITS``."""


def index_range(count: int) -> range:
    """Shape of an index below *count*, at least one bit."""
    return range(max(2, count))


def replay_output(p: CacheShape) -> data.StructLayout:
    """Payload of replayed rows.

    Members
    -------
    data : lanes * 16
        Finite fp16 elements; surplus ones are 0.
    keep : 0 .. lanes
        Elements of this transfer.
    group_last : 1
        End of a group of `group` channels.
    last : 1
        End of the row.
    final : 1
        Transfer of the last row.
    empty : 1
        There is no row: the only transfer of the answer, with all ends set.
    """
    return data.StructLayout(
        {
            "data": data.ArrayLayout(16, p.lanes),
            "keep": range(p.lanes + 1),
            "group_last": 1,
            "last": 1,
            "final": 1,
            "empty": 1,
        }
    )


class FrameScores(data.StructLayout):
    """Scores of the tokens of a frame, for each query."""

    def __init__(self, p: CacheShape):
        per_token = data.ArrayLayout(signed(p.score_width), p.q_parallel)
        super().__init__({"scores": data.ArrayLayout(per_token, p.frame), "count": range(p.frame + 1), "last": 1})


def out_width(p: CacheShape) -> int:
    """Bits of a signed element of the read-out: at most ``(2^w - 1) * 128`` with bins of w bits in all."""
    return min(p.bin_width, BIN_BITS) + INT8_MAGNITUDE.bit_length()


def read_output(p: CacheShape) -> data.StructLayout:
    """The read-out of one slice of one query; `last` ends the job."""
    return data.StructLayout(
        {
            "data": data.ArrayLayout(signed(out_width(p)), p.slice_bytes),
            "vector": index_range(p.q_parallel),
            "slice": index_range(p.slices),
            "last": 1,
        }
    )
