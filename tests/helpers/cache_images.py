"""Caches and queries in memory, as the descriptors of the accelerator find them."""

import numpy as np

from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.soc.cache_memory import CacheMemory
from kvant.sim.attention.contents import Contents, int8_blocks
from kvant.sim.attention.engine import Attend


def record(p: AttentionParameters, memory: CacheMemory, contents: Contents, fill: int = 0xA5) -> bytes:
    """The record of a cache; what no row or scale is written to holds *fill*."""
    layout = memory.record
    raw = bytearray([fill]) * layout.record_bytes
    blocks = int8_blocks(p, contents.keys.sinks)
    raw[layout.key_sinks.offset : layout.key_sinks.offset + len(blocks)] = blocks
    values = contents.values
    for number, (elements, scale) in enumerate(zip(values.sinks.q, values.sinks.scale, strict=True)):
        at = layout.value_sinks.offset + number * layout.sink_row_bytes
        put(raw, at, elements)
        put(raw, at + layout.row_bytes, scale)
    put(raw, layout.value_scales.offset, values.staged_scale)
    for number, elements in enumerate(values.staged):
        put(raw, layout.value_window.offset + number * layout.row_bytes, elements)
    return bytes(raw)


def put(raw: bytearray, at: int, array: np.ndarray) -> None:
    """The bytes of an array at an offset."""
    content = np.ascontiguousarray(array).tobytes()
    raw[at : at + len(content)] = content


def queries(memory: CacheMemory, attend: Attend) -> list[bytes]:
    """Query records."""
    return [
        memory.query.encode(first, end, slope.to_bytes(2, "little"), np.ascontiguousarray(row, np.float16).tobytes())
        for row, (first, end, slope) in zip(attend.queries, attend.limits, strict=True)
    ]
