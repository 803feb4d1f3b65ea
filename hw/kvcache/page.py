"""Layout of a page: the groups of G tokens of one head, in blocks of separate planes, and a trailer.

A block holds 16 groups in storage order: their codes, two a byte, the earlier element in the low nibble; 16 fp16
scales, little endian; 16 coefficient bytes; with `offset`, 16 signed offset bytes. Without offset that is the block
in which weights are stored. With `shared_coeff` there is no plane of coefficients: the page has one, in its trailer.
The trailer is 16 bytes: the timestamp (position in the sequence of the page's first token, u32, little endian), the
shared coefficient (else 0), zeros. Source: docs/numerics.md, "Storage".
"""

from collections.abc import Mapping
from functools import cached_property

from kvant.hw.kvcache.parameters import BLOCK_GROUPS, UNIT_BYTES, CacheParameters, ceil_div
from kvant.hw.parameters import ParameterError, check_integer

SCALE_BYTES = 2
TIMESTAMP_BYTES = 4

ADDRESS_BITS = 24
"""Bits of a byte address within a page."""


class PageLayout:
    """Where everything stands in a page.

    Every plane and the trailer begin at a multiple of `UNIT_BYTES`. Groups that a last block lacks have scale 0 (and
    coefficient 0 and offset 0); the bytes of their codes have no meaning.

    Parameters
    ----------
    p : CacheParameters
        Of which `group`, `offset` and `shared_coeff` count.
    groups : int
        Groups of a page: ``group * row_groups`` where they run along the head, `head_dim` where they run along time.

    Attributes
    ----------
    blocks : int
        Blocks of a page, the last of which may be short.
    group_bytes, block_bytes, page_bytes : int
    planes : dict
        Of each plane ("codes", "scale", "coefficient", "offset"; those that a block has) the offset within a block.
    trailer : int
        Offset of the trailer within the page.

    Raises
    ------
    ParameterError
        When `group` does not fit a cache, *groups* is less than 1, or the page is larger than an address reaches.
    """

    def __init__(self, p: CacheParameters, groups: int):
        p.check_cache()
        self.group = p.group
        self.groups = check_integer("groups of a page", groups, 1)
        self.group_bytes = p.group // 2
        sizes = {
            "codes": BLOCK_GROUPS * self.group_bytes,
            "scale": BLOCK_GROUPS * SCALE_BYTES,
            "coefficient": 0 if p.shared_coeff else BLOCK_GROUPS,
            "offset": BLOCK_GROUPS if p.offset else 0,
        }
        self.planes: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            if size:
                self.planes[name] = end
            end += size
        self.block_bytes = end
        self.blocks = ceil_div(groups, BLOCK_GROUPS)
        self.trailer = self.blocks * self.block_bytes
        self.page_bytes = self.trailer + UNIT_BYTES
        if self.page_bytes > 1 << ADDRESS_BITS:
            raise ParameterError(f"groups of a page = {groups}: {self.page_bytes} bytes, legal are {1 << ADDRESS_BITS}")

    @property
    def shared_coeff(self) -> bool:
        """The trailer holds the page's one coefficient."""
        return "coefficient" not in self.planes

    def code_words(self, word_bits: int) -> int:
        """Words of *word_bits* (a power of two from 32 on) that the codes of a group take."""
        return ceil_div(8 * self.group_bytes, word_bits)

    @property
    def block_meta_words(self) -> int:
        """Words of `UNIT_BYTES` that the other planes of a block take; the trailer is one more."""
        return (self.block_bytes - self.planes["scale"]) // UNIT_BYTES

    @cached_property
    def description(self) -> Mapping[str, object]:
        """The layout in numbers and words, for the manifest of a design; plain JSON."""
        sizes = {"codes": self.group_bytes, "scale": SCALE_BYTES, "coefficient": 1, "offset": 1}
        types = {"codes": "u4, the earlier element in the low nibble", "scale": "f16", "coefficient": "u8"}
        return {
            "page_bytes": self.page_bytes,
            "groups": self.groups,
            "elements_of_group": self.group,
            "byte_order": "little",
            "blocks": {
                "count": self.blocks,
                "bytes": self.block_bytes,
                "groups": BLOCK_GROUPS,
                "planes": [
                    {"name": name, "offset": offset, "bytes_per_group": sizes[name], "type": types.get(name, "i8")}
                    for name, offset in self.planes.items()
                ],
            },
            "trailer": {
                "offset": self.trailer,
                "bytes": UNIT_BYTES,
                "fields": [
                    {"name": "timestamp", "offset": 0, "type": "u32"},
                    *([{"name": "coefficient", "offset": TIMESTAMP_BYTES, "type": "u8"}] if self.shared_coeff else []),
                ],
            },
        }
