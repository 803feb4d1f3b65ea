"""Layouts of the codebook engine's ports and of the steps inside."""

from amaranth.hdl import signed, unsigned
from amaranth.lib import data, enum

from kvant.hw.attention.cache_shape import INT8_MAGNITUDE
from kvant.hw.attention.layouts import SHIFT_BITS, index_range
from kvant.hw.pq.grid_position import POSITION_MAX
from kvant.hw.pq.parameters import PqParameters

PIECE_BITS = 16
"""Bits of a bin that are multiplied in one step."""


class Mode(enum.Enum, shape=2):
    """What a word of a codebook is multiplied with."""

    NEAREST = 0
    TABLE = 1
    READ_OUT = 2


def vector_range(p: PqParameters) -> range:
    """Shape of the number of a vector of any job."""
    return index_range(max(p.q_parallel, p.batch_tokens))


def encode_job(p: PqParameters) -> data.StructLayout:
    """A batch to encode: tokens, and the fp16 scale of the codebook."""
    return data.StructLayout({"count": range(p.batch_tokens + 1), "scale": 16})


def query_job(p: PqParameters) -> data.StructLayout:
    """Tables to build: queries."""
    return data.StructLayout({"count": range(p.q_parallel + 1)})


def read_job(p: PqParameters) -> data.StructLayout:
    """Bins to read out: queries, and the right shift of the bins of each."""
    shifts = data.ArrayLayout(SHIFT_BITS, p.q_parallel)
    return data.StructLayout({"count": range(p.q_parallel + 1), "shift": shifts})


def row_input(p: PqParameters, element) -> data.StructLayout:
    """A transfer of a row; lanes behind the row's end are ignored."""
    return data.StructLayout({"data": data.ArrayLayout(element, p.lanes), "last": 1})


def word_input(p: PqParameters) -> data.StructLayout:
    """A word of the memory port."""
    return data.StructLayout({"data": p.port_bits})


def codes_output(p: PqParameters) -> data.StructLayout:
    """Codes of the sub-spaces of one slice of one token; `last` ends the job."""
    return data.StructLayout(
        {
            "codes": data.ArrayLayout(p.nbits, p.slice_subspaces),
            "vector": index_range(p.batch_tokens),
            "slice": index_range(p.slices),
            "last": 1,
        }
    )


def table_output(p: PqParameters) -> data.StructLayout:
    """Products of a query with one centroid of every sub-space of a slice; `last` ends the job."""
    return data.StructLayout(
        {
            "valid": 1,
            "vector": index_range(p.q_parallel),
            "slice": index_range(p.slices),
            "centroid": p.nbits,
            "values": data.ArrayLayout(signed(p.lut_width), p.slice_subspaces),
            "last": 1,
        }
    )


def bin_read(p: PqParameters) -> data.StructLayout:
    """A request for the bins of one centroid of every sub-space of a slice."""
    return data.StructLayout(
        {
            "valid": 1,
            "vector": index_range(p.q_parallel),
            "slice": index_range(p.slices),
            "centroid": p.nbits,
        }
    )


def bins_input(p: PqParameters) -> data.ArrayLayout:
    """Bins of one centroid of every sub-space of a slice."""
    return data.ArrayLayout(unsigned(p.bin_width), p.slice_subspaces)


def modes() -> data.StructLayout:
    """A bit for each mode."""
    return data.StructLayout({"nearest": 1, "table": 1, "read_out": 1})


def key_width(p: PqParameters) -> int:
    """Bits of the signed key ``8*||C||^2 - u.C`` of a centroid."""
    largest = p.subspace * INT8_MAGNITUDE * (8 * INT8_MAGNITUDE + POSITION_MAX)
    return largest.bit_length() + 1


class Step(data.StructLayout):
    """One use of the multipliers: a word of a codebook and a vector.

    Members
    -------
    mode : Mode
    norm : 1
        NEAREST: the word is multiplied with itself; comes once, before the word's vectors.
    upper : 1
        READ_OUT: the upper piece of the bins; comes behind the lower one of the same vector.
    vector, slice, centroid
        What is multiplied.
    first, final : 1
        The slice's first and last centroid.
    last_vector, last_slice : 1
        The job's last vector, and last slice.
    shift
        READ_OUT: right shift of the bins.
    """

    def __init__(self, p: PqParameters):
        super().__init__(
            {
                "mode": Mode,
                "norm": 1,
                "upper": 1,
                "vector": vector_range(p),
                "slice": index_range(p.slices),
                "centroid": p.nbits,
                "first": 1,
                "final": 1,
                "last_vector": 1,
                "last_slice": 1,
                "shift": SHIFT_BITS,
            }
        )
