"""Buffers of transfers from arrays and back, without a loop over words."""

import numpy as np

from kvant.hw.kvcache.layouts import PageAddress
from kvant.hw.kvcache.page import PageLayout
from kvant.sim.compiled.build import storage_bytes
from kvant.sim.kvcache.pages import UNWRITTEN

_ADDRESS = {name: (field.offset, field.width) for name, field in PageAddress()}


def lanes_of(rows: np.ndarray, lanes: int) -> np.ndarray:
    """Rows [n, d] as transfers of *lanes* elements, u8 [n * ceil(d / lanes), bytes]; surplus lanes are 0."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % lanes))).reshape(-1, lanes)
    data = np.ascontiguousarray(padded).view(np.uint8).reshape(len(padded), lanes * rows.itemsize)
    return np.ascontiguousarray(np.pad(data, ((0, 0), (0, storage_bytes(8 * data.shape[1]) - data.shape[1]))))


def rows_of(buffer: np.ndarray, length: int, lanes: int, dtype) -> np.ndarray:
    """Rows [n, length] in transfers of *lanes* elements: the inverse of `lanes_of`."""
    dtype = np.dtype(dtype)
    elements = np.ascontiguousarray(buffer[:, : lanes * dtype.itemsize]).view(dtype)
    return elements.reshape(-1, -(-length // lanes) * lanes)[:, :length]


def numbers(values: np.ndarray, width: int) -> np.ndarray:
    """Unsigned integers of up to 64 bits as records u8 [n, bytes] of a field of *width* bits."""
    size = storage_bytes(width)
    data = np.ascontiguousarray(values, "<u8").view(np.uint8).reshape(-1, 8)[:, :size]
    return np.ascontiguousarray(np.pad(data, ((0, 0), (0, size - data.shape[1]))))


def words(data: bytes | np.ndarray, size: int) -> np.ndarray:
    """Bytes as words u8 [n, size]."""
    return np.frombuffer(data, np.uint8).reshape(-1, size)


def bits(buffer: np.ndarray, offset: int, width: int) -> np.ndarray:
    """The field of *width* (up to 56) bits at *offset* of every record, i64 [n]."""
    first, shift = divmod(offset, 8)
    part = buffer[:, first : first + (shift + width + 7) // 8]
    whole = np.pad(part, ((0, 0), (0, 8 - part.shape[1])))
    number = np.ascontiguousarray(whole).view("<u8")[:, 0] >> np.uint64(shift)
    return (number & np.uint64((1 << width) - 1)).astype(np.int64)


class HostPages:
    """The memory of the pages of a cache, on the host.

    Parameters
    ----------
    layout : PageLayout
    heads, slots : int

    Attributes
    ----------
    pages : u8 [heads, slots, bytes of a page]
        Filled with `UNWRITTEN` before it is written to.
    """

    def __init__(self, layout: PageLayout, heads: int, slots: int):
        self.pages = np.full((heads, slots, layout.page_bytes), UNWRITTEN, np.uint8)

    def apply(self, fields: dict[str, np.ndarray]) -> int:
        """Apply the writes of a stream in order: buffers ``data``, ``keep``, ``user``; returns the bytes written."""
        user = {name: bits(fields["user"], *place) for name, place in _ADDRESS.items()}
        base = np.ravel_multi_index((user["head"], user["page"], user["address"]), self.pages.shape)
        data = fields["data"]
        kept = np.unpackbits(fields["keep"], axis=1, bitorder="little")[:, : data.shape[1]].astype(bool)
        place = base[:, None] + np.arange(data.shape[1])
        self.pages.reshape(-1)[place[kept]] = data[kept]
        return int(kept.sum())
