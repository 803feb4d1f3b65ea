"""Groups on their way into pages, and what the pages have to hold."""

from dataclasses import dataclass, field

import numpy as np

from kvant.golden.numeric.packing import pack_blocks
from kvant.hw.kvcache.packer import PackerInput
from kvant.hw.kvcache.parameters import BLOCK_GROUPS, ceil_div
from kvant.sim.kvcache.pages import UNWRITTEN


@dataclass
class Group:
    """A group as it goes in. Fields as in `PackerInput`; `codes` are as many as the group has elements."""

    codes: np.ndarray
    scale: int
    coefficient: int
    offset: int
    head: int = 0
    page: int = 0
    timestamp: int = 0
    flush: bool = False
    page_start: bool = False
    page_end: bool = False
    place: int = 0


def random_group(rng, elements, **fields):
    """A group of random contents."""
    return Group(
        rng.integers(0, 16, elements),
        int(rng.integers(0, 1 << 15)),
        int(rng.integers(0, 256)),
        int(rng.integers(-128, 128)),
        **fields,
    )


def page_of(rng, elements, count, **fields):
    """A page of *count* groups, the group k of ``elements[k % len(elements)]`` elements."""
    where = {"timestamp": int(rng.integers(0, 1 << 32)), "page": 0, "head": 0} | fields
    return [
        random_group(rng, elements[k % len(elements)], page_start=k == 0, page_end=k == count - 1, **where)
        for k in range(count)
    ]


def beats(p, groups):
    """The port words of *groups*. What is read with `last` alone is garbage elsewhere."""
    layout = PackerInput(p)
    no_place = (1 << layout["place"].width) - 1
    words = []
    for group in groups:
        count = ceil_div(len(group.codes), p.lanes)
        codes = np.concatenate((group.codes, np.zeros(count * p.lanes - len(group.codes), int)))
        for k in range(count):
            last = k == count - 1
            user = {"page": group.page, "head": group.head, "timestamp": group.timestamp}
            meta = {"scale": group.scale, "coefficient": group.coefficient, "offset": group.offset}
            words.append(
                layout.const(
                    {
                        "codes": [int(code) for code in codes[k * p.lanes : (k + 1) * p.lanes]],
                        "last": last,
                        "meta": meta if last else {"scale": 0xFFFF, "coefficient": 0xAA, "offset": -86},
                        "flush": group.flush if last else 1,
                        "page_start": group.page_start,
                        "place": group.place if group.page_start else no_place,
                        "page_end": group.page_end if last else 1,
                        "user": user,
                    }
                )
                .as_value()
                .value
            )
    return words


@dataclass
class Expectation:
    """What comes of some groups.

    Members
    -------
    pages : dict
        Of (head, page) its bytes.
    codes, meta : int
        Numbers of transfers.
    """

    pages: dict = field(default_factory=dict)
    codes: int = 0
    meta: int = 0


def expected(layout, word_bits, groups):
    """The pages after *groups*, from the golden model's packing."""
    result = Expectation()
    open_groups = {}
    for group in groups:
        key = group.head, group.page
        if group.page_start:
            open_groups[group.head] = []
        members = open_groups[group.head]
        members.append(group)
        page = result.pages.setdefault(key, bytearray([UNWRITTEN]) * layout.page_bytes)
        packed = _blocks(layout, members)
        block, place = divmod(len(members) - 1, BLOCK_GROUPS)
        base = block * layout.block_bytes
        start = place * layout.group_bytes
        page[base + start : base + start + layout.group_bytes] = packed[block][start : start + layout.group_bytes]
        result.codes += layout.code_words(word_bits)
        if group.flush or group.page_end:
            coefficient = group.coefficient if layout.shared_coeff else 0
            page[layout.trailer :] = group.timestamp.to_bytes(4, "little") + bytes([coefficient]) + bytes(11)
            result.meta += 1
        if group.flush or group.page_end or place == BLOCK_GROUPS - 1:
            metadata = layout.planes["scale"]
            page[base + metadata : base + layout.block_bytes] = packed[block][metadata:]
            result.meta += layout.block_meta_words
    return result


def _blocks(layout, groups):
    """The blocks of *groups* as bytes."""
    codes = np.zeros((len(groups), layout.group), np.uint8)
    for row, group in zip(codes, groups, strict=True):
        row[: len(group.codes)] = group.codes
    scale = np.array([group.scale for group in groups], np.uint16).view(np.float16)
    coefficient = np.array([group.coefficient for group in groups], np.uint8)
    blocks = []
    for k, block in enumerate(pack_blocks(codes, scale, coefficient).numpy()):
        text = block.tobytes()
        if layout.shared_coeff:
            text = text[:-BLOCK_GROUPS]
        if "offset" in layout.planes:
            members = groups[k * BLOCK_GROUPS : (k + 1) * BLOCK_GROUPS]
            text += np.array([group.offset for group in members], np.int8).tobytes().ljust(BLOCK_GROUPS, b"\0")
        assert len(text) == layout.block_bytes
        blocks.append(text)
    return blocks
