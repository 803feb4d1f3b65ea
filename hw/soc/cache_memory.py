"""Where the caches of sequences lie in memory: pools of pages, page tables, records, calibrations, query records.

All state of a sequence lies in memory. The same layouts serve the RTL, the manifest and the driver:

*Pool*
    The pages of one layer, KV head and side (keys or values): page n lies at ``pool + n * page_bytes``; see
    `kvant.hw.kvcache.page.PageLayout`.
*Page table*
    Of a sequence: the number of the page of its window w, u32, at ``table + 4 * w``. It serves all layers, heads and
    sides: window w lies in the page of the same number in each of their pools.
*Record*
    Of a sequence, layer and KV head: what is not in pages; see `CacheRecord`.
*Calibration*
    Of a layer, KV head and side: the table of coefficients, and an fp16 number per channel; see `Calibration`.
*Query record*
    A query of attention and what it sees; see `QueryRecord`.

Everything is little endian, and every part begins at a multiple of the port's bytes.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvant.hw.kvcache.page import SCALE_BYTES, PageLayout
from kvant.hw.kvcache.parameters import (
    BLOCK_GROUPS,
    TABLE_ENTRIES,
    THRESHOLD_LIMIT,
    THRESHOLDS,
    UNIT_BYTES,
    CacheParameters,
    ceil_div,
)
from kvant.hw.parameters import ParameterError

HALF_BYTES = 2
"""Bytes of an fp16 number, or of a threshold."""

PAGE_NUMBER_BYTES = 4
"""Bytes of an entry of a page table."""

WIDEST_PORT_BYTES = UNIT_BYTES
"""Widest port that serves caches: pages, and planes in them, begin at multiples of `UNIT_BYTES`."""


@dataclass(frozen=True)
class Part:
    """Bytes of a record: from *offset* on, *size* of them, which is a multiple of the port's bytes."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset behind the part."""
        return self.offset + self.size


def _parts(sizes: Mapping[str, int], port_bytes: int) -> dict[str, Part]:
    """Parts one behind the other, each filled up to whole words of the port."""
    parts: dict[str, Part] = {}
    end = 0
    for name, size in sizes.items():
        parts[name] = Part(end, ceil_div(size, port_bytes) * port_bytes)
        end = parts[name].end
    return parts


class CacheRecord:
    """Record of a sequence, layer and KV head.

    ============  =====================================================================================
    key_sinks     sinks of the keys: INT8 storage blocks, 16 groups each, token by token: 16 * G bytes
                  of elements (0 behind the end of a shorter group), 16 fp16 scales (0 where no group is)
    value_sinks   sinks of the values: of each a row (see *value_window*), then an fp16 scale for each
                  group of `group` channels, both filled up to words
    value_scales  fp16 scale of each channel, under which rows of values are staged
    value_window  the open window: the row of position t is number ``t mod G``; `head_dim` INT8 bytes, filled
                  up to words
    ============  =====================================================================================

    What fills parts up is 0 where the accelerator writes it.

    Parameters
    ----------
    p : CacheParameters
        Of which `group`, `head_dim` and `sinks` count.
    port_bytes : int

    Attributes
    ----------
    key_sinks, value_sinks, value_scales, value_window : Part
    sink_block_bytes : int
        Of a block of key sinks, whose scales begin at `sink_scales`.
    row_bytes : int
        Of an INT8 row of values.
    sink_row_bytes : int
        Of a row of value sinks with its scales, which begin at `row_bytes`.
    record_bytes : int
    """

    def __init__(self, p: CacheParameters, port_bytes: int):
        self.group, self.head_dim, self.sinks = p.group, p.head_dim, p.sinks
        self.sink_scales = BLOCK_GROUPS * p.group
        self.sink_block_bytes = self.sink_scales + BLOCK_GROUPS * SCALE_BYTES
        self.sink_blocks = ceil_div(p.sinks * p.row_groups, BLOCK_GROUPS)
        row = _parts({"elements": p.head_dim, "scales": SCALE_BYTES * p.row_groups}, port_bytes)
        self.row_bytes = row["elements"].size
        self.sink_row_bytes = row["scales"].end
        parts = _parts(
            {
                "key_sinks": self.sink_blocks * self.sink_block_bytes,
                "value_sinks": p.sinks * self.sink_row_bytes,
                "value_scales": HALF_BYTES * p.head_dim,
                "value_window": p.group * self.row_bytes,
            },
            port_bytes,
        )
        self.key_sinks, self.value_sinks = parts["key_sinks"], parts["value_sinks"]
        self.value_scales, self.value_window = parts["value_scales"], parts["value_window"]
        self.record_bytes = self.value_window.end

    @cached_property
    def description(self) -> dict[str, object]:
        """The layout in numbers and words, for a manifest; plain JSON."""
        return {
            "record_bytes": self.record_bytes,
            "key_sinks": {
                "offset": self.key_sinks.offset,
                "blocks": self.sink_blocks,
                "block_bytes": self.sink_block_bytes,
                "groups": BLOCK_GROUPS,
                "elements": {"offset": 0, "bytes_per_group": self.group, "type": "i8"},
                "scale": {"offset": self.sink_scales, "bytes_per_group": SCALE_BYTES, "type": "f16"},
            },
            "value_sinks": {
                "offset": self.value_sinks.offset,
                "rows": self.sinks,
                "row_bytes": self.sink_row_bytes,
                "elements": {"offset": 0, "count": self.head_dim, "type": "i8"},
                "scale": {"offset": self.row_bytes, "count": ceil_div(self.head_dim, self.group), "type": "f16"},
            },
            "value_scales": {"offset": self.value_scales.offset, "count": self.head_dim, "type": "f16"},
            "value_window": {
                "offset": self.value_window.offset,
                "rows": self.group,
                "row_bytes": self.row_bytes,
                "elements": {"offset": 0, "count": self.head_dim, "type": "i8"},
            },
        }


class Calibration:
    """Calibration of a layer, KV head and side: 16 coefficients u8, 15 thresholds u16, an fp16 number per channel.

    The numbers are the means of keys (only with `centred`), or the floors of values.

    Parameters
    ----------
    channels : int
        Numbers, 0 for none.
    port_bytes : int

    Attributes
    ----------
    coefficients, thresholds, numbers : Part
    calibration_bytes : int
    """

    def __init__(self, channels: int, port_bytes: int):
        self.channels = channels
        sizes = {
            "coefficients": TABLE_ENTRIES,
            "thresholds": HALF_BYTES * THRESHOLDS,
            "numbers": HALF_BYTES * channels,
        }
        parts = _parts(sizes, port_bytes)
        self.coefficients, self.thresholds, self.numbers = (parts[name] for name in sizes)
        self.calibration_bytes = self.numbers.end

    def encode(self, coefficients: Sequence[int], thresholds: Sequence[int], numbers: bytes = b"") -> bytes:
        """A calibration as it lies in memory.

        Parameters
        ----------
        coefficients, thresholds : sequence of int
            1 to 16 coefficients and the thresholds between them; filled up with the last coefficient and thresholds
            of 65535, which changes no choice.
        numbers : bytes
            fp16 numbers, little endian, one per channel.

        Raises
        ------
        ParameterError
            When their numbers do not fit.
        """
        table, limits = list(coefficients), list(thresholds)
        if not 1 <= len(table) <= TABLE_ENTRIES:
            raise ParameterError(f"coefficients: {len(table)} entries, legal are 1 to {TABLE_ENTRIES}")
        if len(limits) != len(table) - 1:
            raise ParameterError(f"thresholds: {len(limits)} entries, legal with {len(table)} coefficients is one less")
        if len(numbers) != HALF_BYTES * self.channels:
            raise ParameterError(f"numbers: {len(numbers)} bytes, legal is {HALF_BYTES * self.channels}")
        table += table[-1:] * (TABLE_ENTRIES - len(table))
        limits += [THRESHOLD_LIMIT] * (THRESHOLDS - len(limits))
        raw = bytearray(self.calibration_bytes)
        parts = (
            (self.coefficients, bytes(table)),
            (self.thresholds, struct.pack(f"<{THRESHOLDS}H", *limits)),
            (self.numbers, numbers),
        )
        for part, content in parts:
            raw[part.offset : part.offset + len(content)] = content
        return bytes(raw)

    @cached_property
    def description(self) -> dict[str, object]:
        """The layout in numbers, for a manifest; plain JSON."""
        parts = {
            "coefficients": (self.coefficients, TABLE_ENTRIES, "u8"),
            "thresholds": (self.thresholds, THRESHOLDS, "u16"),
            "numbers": (self.numbers, self.channels, "f16"),
        }
        return {
            "calibration_bytes": self.calibration_bytes,
            **{
                name: {"offset": part.offset, "count": count, "type": kind}
                for name, (part, count, kind) in parts.items()
            },
        }


class QueryRecord:
    """A query of attention: it sees the keys ``first <= t < end``; `slope` as at `AttentionEngine`; `head_dim` fp16.

    Attributes
    ----------
    header, elements : Part
        The header: first u32, end u32, slope fp16, zeros.
    query_bytes : int
    """

    FIRST, END, SLOPE = 0, 4, 8
    """Offsets in the header."""

    HEADER_BYTES = 16

    _HEADER = struct.Struct("<II2s6x")

    def __init__(self, head_dim: int, port_bytes: int):
        self.head_dim = head_dim
        parts = _parts({"header": self.HEADER_BYTES, "elements": HALF_BYTES * head_dim}, port_bytes)
        self.header, self.elements = parts["header"], parts["elements"]
        self.query_bytes = self.elements.end

    def encode(self, first: int, end: int, slope: bytes, elements: bytes) -> bytes:
        """A query as it lies in memory; *slope* and *elements* are fp16, little endian.

        Raises
        ------
        ParameterError
            When there are not `head_dim` elements.
        """
        if len(elements) != HALF_BYTES * self.head_dim:
            raise ParameterError(f"elements: {len(elements)} bytes, legal is {HALF_BYTES * self.head_dim}")
        header = self._HEADER.pack(first, end, slope)
        return header.ljust(self.elements.offset, b"\0") + elements.ljust(self.elements.size, b"\0")

    @cached_property
    def description(self) -> dict[str, object]:
        """The layout in numbers, for a manifest; plain JSON."""
        return {
            "query_bytes": self.query_bytes,
            "first": {"offset": self.FIRST, "type": "u32"},
            "end": {"offset": self.END, "type": "u32"},
            "slope": {"offset": self.SLOPE, "type": "f16"},
            "elements": {"offset": self.elements.offset, "count": self.head_dim, "type": "f16"},
        }


class CacheMemory:
    """Layouts of everything that a cache has in memory.

    Parameters
    ----------
    p : CacheParameters
    port_bytes : int
        Of the memory port.

    Attributes
    ----------
    keys, values : PageLayout
        Pages of the two pools.
    record : CacheRecord
    key_calibration, value_calibration : Calibration
    query : QueryRecord

    Raises
    ------
    ParameterError
        When a cache cannot be built of *p*, or the port is wider than a page allows.
    """

    def __init__(self, p: CacheParameters, port_bytes: int):
        if port_bytes > WIDEST_PORT_BYTES:
            raise ParameterError(
                f"port_bits = {8 * port_bytes}: legal in a top with caches are 32, 64 and {8 * WIDEST_PORT_BYTES}"
            )
        self.keys = PageLayout(p.model_copy(update={"offset": False, "shared_coeff": False}), p.group * p.row_groups)
        self.values = PageLayout(p, p.head_dim)
        self.record = CacheRecord(p, port_bytes)
        self.key_calibration = Calibration(p.head_dim if p.centred else 0, port_bytes)
        self.value_calibration = Calibration(p.head_dim, port_bytes)
        self.query = QueryRecord(p.head_dim, port_bytes)

    @cached_property
    def description(self) -> dict[str, object]:
        """All layouts, for a manifest; plain JSON."""
        return {
            "page_table": {"bytes_per_window": PAGE_NUMBER_BYTES, "type": "u32"},
            "keys": self.keys.description,
            "values": self.values.description,
            "record": self.record.description,
            "key_calibration": self.key_calibration.description,
            "value_calibration": self.value_calibration.description,
            "query": self.query.description,
        }
