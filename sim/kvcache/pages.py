"""Pages of a cache in memory: what a driver of the hardware does with writes, and how it reads a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvant.hw.kvcache.layouts import PageAddress
from kvant.hw.kvcache.page import SCALE_BYTES, TIMESTAMP_BYTES, PageLayout
from kvant.hw.kvcache.parameters import BLOCK_GROUPS
from kvant.sim.errors import SimulationError

UNWRITTEN = 0xFF
"""What a byte of memory holds before it is written."""


@dataclass(frozen=True)
class Page:
    """Contents of a page of n groups.

    Attributes
    ----------
    codes : u8 [n, G]
    scale : f16 [n]
    coefficient : u8 [n], or [1] when shared
    offset : i8 [n]
        0 where the layout has none.
    timestamp : int
        Position of the page's first token.
    """

    codes: np.ndarray
    scale: np.ndarray
    coefficient: np.ndarray
    offset: np.ndarray
    timestamp: int


def unpack_page(layout: PageLayout, page: bytes, groups: int | None = None) -> Page:
    """The first *groups* groups (all, if not given) of the bytes of a page.

    Raises
    ------
    SimulationError
        When the page has another size, or fewer groups.
    """
    groups = layout.groups if groups is None else groups
    if len(page) != layout.page_bytes:
        raise SimulationError(f"page: {len(page)} bytes, legal is {layout.page_bytes}")
    if not 0 <= groups <= layout.groups:
        raise SimulationError(f"groups = {groups}: legal in this page are 0 to {layout.groups}")
    blocks = np.frombuffer(page, np.uint8, layout.trailer).reshape(layout.blocks, layout.block_bytes)
    trailer = bytes(page[layout.trailer :])

    def plane(name: str, size: int) -> np.ndarray:
        """The plane of all blocks, u8 [groups, size]."""
        start = layout.planes[name]
        return blocks[:, start : start + BLOCK_GROUPS * size].reshape(-1, size)[:groups]

    packed = plane("codes", layout.group_bytes)
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(groups, layout.group)
    if layout.shared_coeff:
        coefficient = np.frombuffer(trailer, np.uint8, 1, TIMESTAMP_BYTES).copy()
    else:
        coefficient = plane("coefficient", 1).reshape(-1)
    return Page(
        codes=codes,
        scale=np.ascontiguousarray(plane("scale", SCALE_BYTES)).view("<f2").reshape(-1).astype(np.float16),
        coefficient=coefficient,
        offset=plane("offset", 1).reshape(-1).view(np.int8) if "offset" in layout.planes else np.zeros(groups, np.int8),
        timestamp=int.from_bytes(trailer[:TIMESTAMP_BYTES], "little"),
    )


class PageMemory:
    """The memory of a cache's pages: each is filled with `UNWRITTEN` before the first write to it.

    Parameters
    ----------
    layout : PageLayout
    heads, slots : int
        Heads of the cache, and pages of a head's ring.

    Attributes
    ----------
    pages : dict
        Of (head, slot) the bytes of every page that was written to.
    """

    def __init__(self, layout: PageLayout, heads: int, slots: int):
        self.layout = layout
        self.heads = heads
        self.slots = slots
        self.pages: dict[tuple[int, int], bytearray] = {}

    def write(self, data: int, keep: int, user: int) -> None:
        """Apply one `PageWrite`.

        Raises
        ------
        SimulationError
            When it goes to a head or slot that the cache does not have, or outside the page, or writes nothing.
        """
        where = PageAddress().from_bits(user)
        name = f"write to head {where.head}, page {where.page}, address {where.address}"
        if where.head >= self.heads or where.page >= self.slots:
            raise SimulationError(f"{name}: legal are heads below {self.heads} and pages below {self.slots}")
        if not keep:
            raise SimulationError(f"{name}: no byte is written")
        if where.address + keep.bit_length() > self.layout.page_bytes:
            raise SimulationError(f"{name}: outside the page of {self.layout.page_bytes} bytes")
        page = self.pages.setdefault((where.head, where.page), bytearray([UNWRITTEN]) * self.layout.page_bytes)
        for place in range(keep.bit_length()):
            if keep >> place & 1:
                page[where.address + place] = data >> 8 * place & 0xFF

    def apply(self, transfers: Mapping[str, Sequence[int]]) -> None:
        """Apply the transfers of a stream of writes (fields ``data``, ``keep``, ``user``), in order."""
        for data, keep, user in zip(transfers["data"], transfers["keep"], transfers["user"], strict=True):
            self.write(data, keep, user)

    def read(self, head: int, slot: int, groups: int | None = None) -> Page:
        """`unpack_page` of a page.

        Raises
        ------
        SimulationError
            When nothing was written to it, too.
        """
        if (head, slot) not in self.pages:
            raise SimulationError(f"head {head}, page {slot}: never written")
        return unpack_page(self.layout, bytes(self.pages[head, slot]), groups)
