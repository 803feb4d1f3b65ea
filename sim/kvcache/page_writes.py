"""The writes that a packer makes of groups, in order: what a memory has to see."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvant.hw.kvcache.layouts import PageAddress
from kvant.hw.kvcache.packer import META_BITS
from kvant.hw.kvcache.page import PageLayout
from kvant.hw.kvcache.parameters import BLOCK_GROUPS, UNIT_BYTES

_ADDRESS = {name: field.offset for name, field in PageAddress()}


@dataclass(frozen=True)
class StoredGroup:
    """A group on its way into a page.

    Attributes
    ----------
    codes : u8 [n]
    scale : int
        fp16 bits.
    coefficient, offset : int
    page, head, timestamp : int
    place : int
        Its number in the page.
    page_end, flush : bool
        It is the page's last one; bring the memory up to date.
    """

    codes: np.ndarray
    scale: int
    coefficient: int
    page: int
    head: int
    timestamp: int
    place: int
    page_end: bool
    flush: bool
    offset: int = 0


def _no_writes() -> dict[str, list[int]]:
    return {"data": [], "keep": [], "user": [], "last": []}


@dataclass
class Writes:
    """Transfers of the streams `codes` and `meta`, by field."""

    codes: dict[str, list[int]] = field(default_factory=_no_writes)
    meta: dict[str, list[int]] = field(default_factory=_no_writes)


def page_writes(layout: PageLayout, word_bits: int, groups: Iterable[StoredGroup]) -> Writes:
    """The writes of *groups*, which come in the order of a `BlockPacker`'s input.

    Parameters
    ----------
    layout : PageLayout
    word_bits : int
        Width of a word of codes, as the packer has it.
    groups : iterable of StoredGroup
    """
    writes = Writes()
    open_blocks: dict[int, list[StoredGroup]] = {}
    for group in groups:
        block, place = divmod(group.place, BLOCK_GROUPS)
        members = open_blocks[group.head] = [*(open_blocks[group.head] if place else []), group]
        _code_words(layout, word_bits, group, block, writes.codes)
        if place == BLOCK_GROUPS - 1 or group.page_end or group.flush:
            base = block * layout.block_bytes + layout.planes["scale"]
            text = _metadata(layout, members)
            for start in range(0, len(text), UNIT_BYTES):
                _append(writes.meta, group, base + start, text[start : start + UNIT_BYTES], META_BITS)
        if group.page_end or group.flush:
            trailer = group.timestamp.to_bytes(4, "little") + bytes([group.coefficient * layout.shared_coeff])
            _append(writes.meta, group, layout.trailer, trailer.ljust(UNIT_BYTES, b"\0"), META_BITS, group.page_end)
    return writes


def _code_words(layout: PageLayout, word_bits: int, group: StoredGroup, block: int, fields: dict[str, list[int]]):
    codes = np.pad(group.codes, (0, layout.group - len(group.codes)))
    text = (codes[0::2] | codes[1::2] << 4).astype(np.uint8).tobytes()
    size = min(word_bits // 8, len(text))
    unit = min(word_bits // 8, UNIT_BYTES)
    base = block * layout.block_bytes
    for start in range(0, len(text), size):
        offset = group.place % BLOCK_GROUPS * layout.group_bytes + start
        within = offset % unit
        # Groups that share a unit of addresses: the strobes choose among copies.
        word = text[start : start + size] * max(1, unit // len(text))
        keep = ((1 << size) - 1) << within
        last = group.page_end and start + size >= len(text)
        _append(fields, group, base + offset - within, word, word_bits, last, keep=keep)


def _metadata(layout: PageLayout, members: list[StoredGroup]) -> bytes:
    scales = np.array([group.scale for group in members], "<u2").tobytes().ljust(2 * BLOCK_GROUPS, b"\0")
    text = scales
    for name in ("coefficient", "offset"):
        if name in layout.planes:
            plane = bytes(getattr(group, name) & 0xFF for group in members)
            text += plane.ljust(BLOCK_GROUPS, b"\0")
    return text


def _append(
    fields: dict[str, list[int]],
    group: StoredGroup,
    address: int,
    text: bytes,
    bits: int,
    last: bool = False,
    *,
    keep: int | None = None,
):
    user = {"address": address, "page": group.page, "head": group.head, "timestamp": group.timestamp}
    fields["data"].append(int.from_bytes(text, "little"))
    fields["keep"].append((1 << bits // 8) - 1 if keep is None else keep)
    fields["user"].append(sum(value << _ADDRESS[name] for name, value in user.items()))
    fields["last"].append(int(last))
