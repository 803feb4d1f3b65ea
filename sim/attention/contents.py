"""What the attention engine reads of a cache, in bytes of memory and INT8 rows, and what the bytes mean."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.page import TIMESTAMP_BYTES, PageLayout
from kvant.hw.kvcache.parameters import BLOCK_GROUPS, UNIT_BYTES, CacheParameters
from kvant.hw.numeric.codes import LINEAR
from kvant.sim.kvcache.pages import UNWRITTEN, unpack_page


@dataclass(frozen=True)
class Int8Rows:
    """Rows of INT8 groups along the head: i8 [n, d], f16 [n, ceil(d/G)]."""

    q: np.ndarray
    scale: np.ndarray


@dataclass(frozen=True)
class MantKeys:
    """Keys along the head: the pages of a sequence as they lie in memory, and its sinks."""

    pages: Sequence[bytes]
    sinks: Int8Rows


@dataclass(frozen=True)
class TimeKeys:
    """Keys along time: the pages of full windows, the rows of the open one (i8 [n, d], f16 [d]), sinks."""

    pages: Sequence[bytes]
    staged: np.ndarray
    staged_scale: np.ndarray
    sinks: Int8Rows


@dataclass(frozen=True)
class MantValues:
    """Values along time: the pages of full windows, the rows of the open one (i8 [n, d], f16 [d]), sinks."""

    pages: Sequence[bytes]
    staged: np.ndarray
    staged_scale: np.ndarray
    sinks: Int8Rows


@dataclass(frozen=True)
class Contents:
    """A cache of *tokens* tokens of one head."""

    tokens: int
    keys: MantKeys | TimeKeys | Int8Rows
    values: MantValues | Int8Rows

    @property
    def sinks(self) -> int:
        """Tokens that are sinks, in keys or values."""
        parts = [part for part in (self.keys, self.values) if not isinstance(part, Int8Rows)]
        return max((len(part.sinks.q) for part in parts), default=0)


def page_layouts(p: AttentionParameters) -> tuple[PageLayout, PageLayout]:
    """Layouts of a page of keys and of a page of values."""
    cache = CacheParameters(group=p.group)
    return PageLayout(cache, p.group * p.head_groups), PageLayout(cache, p.head_dim)


def time_layout(p: AttentionParameters) -> PageLayout:
    """Layout of a page of keys along time."""
    return PageLayout(CacheParameters(group=p.group, offset=True, shared_coeff=True), p.head_dim)


def packed_keys(
    p: AttentionParameters, codes: np.ndarray, scale: np.ndarray, coefficient: np.ndarray, sinks: Int8Rows
) -> MantKeys:
    """Keys u8 [T, d] with scales f16 and coefficients u8 [T, ceil(d/G)] in pages, 0xFF where nothing is written."""
    layout = page_layouts(p)[0]
    width = p.head_groups * p.group
    codes = np.pad(codes, ((0, 0), (0, width - p.head_dim)))
    pages = []
    for first in range(0, len(codes), p.group):
        held = slice(first, first + p.group)
        groups = codes[held].reshape(-1, p.group), scale[held].reshape(-1), coefficient[held].reshape(-1)
        pages.append(_packed_page(layout, *groups, first))
    return MantKeys(pages, sinks)


def packed_windows(
    p: AttentionParameters,
    codes: np.ndarray,
    scale: np.ndarray,
    coefficient: np.ndarray,
    offset: np.ndarray | None = None,
) -> list[bytes]:
    """Windows u8 [W*G, d] with scales f16 [W, d] in pages.

    Coefficients are u8 [W, d]; of keys along time, which have offsets i8 [W, d], u8 [W, 1].
    """
    layout = page_layouts(p)[1] if offset is None else time_layout(p)
    windows = codes.reshape(len(scale), p.group, p.head_dim).transpose(0, 2, 1)
    planes = (windows, scale, coefficient, *([] if offset is None else [offset]))
    groups = enumerate(zip(*planes, strict=True))
    return [_packed_page(layout, *window[:3], number * p.group, *window[3:]) for number, window in groups]


def _packed_page(
    layout: PageLayout,
    codes: np.ndarray,
    scale: np.ndarray,
    coefficient: np.ndarray,
    timestamp: int,
    offset: np.ndarray | None = None,
) -> bytes:
    """The bytes of a page of n groups, u8 [n, G], f16 [n], u8 [n]; with offsets i8 [n] the coefficient is u8 [1]."""
    page = np.full(layout.page_bytes, UNWRITTEN, np.uint8)
    blocks = page[: layout.trailer].reshape(layout.blocks, layout.block_bytes)
    planes = {
        "codes": codes[:, 0::2] | codes[:, 1::2] << 4,
        "scale": np.ascontiguousarray(scale).astype("<f2").view(np.uint8).reshape(-1, 2),
    }
    if offset is None:
        planes["coefficient"] = coefficient[:, None]
    else:
        planes["offset"] = np.ascontiguousarray(offset).view(np.uint8)[:, None]
    for start in range(0, len(codes), BLOCK_GROUPS):
        for name, groups in planes.items():
            part = groups[start : start + BLOCK_GROUPS]
            if name != "codes":  # groups that a block lacks have scale 0
                part = np.pad(part, ((0, BLOCK_GROUPS - len(part)), (0, 0)))
            place = layout.planes[name]
            blocks[start // BLOCK_GROUPS, place : place + part.size] = part.reshape(-1)
    page[layout.trailer :] = np.frombuffer(timestamp.to_bytes(UNIT_BYTES, "little"), np.uint8)
    if layout.shared_coeff:
        page[layout.trailer + TIMESTAMP_BYTES] = coefficient[0]
    return page.tobytes()


def int8_blocks(p: AttentionParameters, rows: Int8Rows) -> bytes:
    """Storage blocks of INT8 groups, token by token: 16 groups of elements, then their scales."""
    count = len(rows.q) * p.head_groups
    fill = -count % BLOCK_GROUPS
    width = p.head_groups * p.group
    elements = np.pad(rows.q, ((0, 0), (0, width - p.head_dim))).reshape(count, p.group)
    elements = np.pad(elements, ((0, fill), (0, 0))).reshape(-1, BLOCK_GROUPS * p.group).view(np.uint8)
    scales = np.pad(rows.scale.reshape(count), (0, fill)).astype("<f2").reshape(-1, BLOCK_GROUPS).view(np.uint8)
    return np.concatenate((elements, scales), axis=1).tobytes()


def key_bytes(p: AttentionParameters, contents: Contents) -> bytes:
    """What the port of keys carries for a command: sinks always come first, in INT8 blocks of their own."""
    keys = contents.keys
    if isinstance(keys, Int8Rows):
        sinks = Int8Rows(keys.q[: contents.sinks], keys.scale[: contents.sinks])
        return int8_blocks(p, sinks) + int8_blocks(p, keys)
    if isinstance(keys, TimeKeys):
        channels = np.pad(keys.staged_scale, (0, -p.head_dim % BLOCK_GROUPS)).astype("<f2")
        ones = np.ones((len(keys.staged), p.head_groups), np.float16)
        staged = int8_blocks(p, Int8Rows(keys.staged, ones))
        return channels.tobytes() + staged + int8_blocks(p, keys.sinks) + b"".join(keys.pages)
    return int8_blocks(p, keys.sinks) + b"".join(keys.pages)


def value_bytes(contents: Contents) -> bytes:
    """What the port of values carries for a command."""
    return b"" if isinstance(contents.values, Int8Rows) else b"".join(contents.values.pages)


def value_rows(p: AttentionParameters, contents: Contents) -> tuple[np.ndarray, np.ndarray]:
    """Rows of values, i8 [n, d], with a scale for every channel, f16 [n, d]."""
    values = contents.values
    if isinstance(values, Int8Rows):
        return values.q, _per_channel(p, values.scale)
    scales = np.broadcast_to(values.staged_scale, values.staged.shape)
    return np.concatenate((values.sinks.q, values.staged)), np.concatenate(
        (_per_channel(p, values.sinks.scale), scales)
    )


def used_keys(p: AttentionParameters, contents: Contents) -> np.ndarray:
    """Keys f32 [T, d] as the engine reads them."""
    keys = contents.keys
    if isinstance(keys, Int8Rows):
        return _dequantized(p, keys)
    if isinstance(keys, TimeKeys):
        return _used_windows(p, time_layout(p), keys)
    layout = page_layouts(p)[0]
    rows = []
    for number, text in enumerate(keys.pages):
        count = min(p.group, contents.tokens - number * p.group)
        page = unpack_page(layout, bytes(text), count * p.head_groups)
        elements = _levels(page.codes, page.coefficient[:, None]) * page.scale[:, None].astype(np.float32)
        rows.append(elements.reshape(count, -1)[:, : p.head_dim])
    rows = np.concatenate(rows)
    rows[: len(keys.sinks.q)] = _dequantized(p, keys.sinks)
    return rows


def used_values(p: AttentionParameters, contents: Contents) -> np.ndarray:
    """Values f32 [T, d] as the engine reads them."""
    values = contents.values
    if isinstance(values, Int8Rows):
        return _dequantized(p, values)
    return _used_windows(p, page_layouts(p)[1], values)


def _used_windows(p: AttentionParameters, layout: PageLayout, cache: TimeKeys | MantValues) -> np.ndarray:
    """Rows f32 [T, d] of a cache along time; products and sums are exact in float64 and rounded once."""
    parts = []
    static = cache.staged_scale.astype(np.float64)
    for text in cache.pages:
        page = unpack_page(layout, bytes(text))
        levels = _levels(page.codes, page.coefficient[:, None]) * page.scale[:, None].astype(np.float64)
        parts.append((levels + (page.offset * static)[:, None]).T.astype(np.float32))
    parts.append(cache.staged * cache.staged_scale.astype(np.float32))
    rows = np.concatenate(parts)
    rows[: len(cache.sinks.q)] = _dequantized(p, cache.sinks)
    return rows


def _per_channel(p: AttentionParameters, scale: np.ndarray) -> np.ndarray:
    """Scales of groups, f16 [n, ceil(d/G)], for each channel."""
    return np.repeat(scale, p.group, axis=1)[:, : p.head_dim]


def _dequantized(p: AttentionParameters, rows: Int8Rows) -> np.ndarray:
    return rows.q * _per_channel(p, rows.scale).astype(np.float32)


def _levels(codes: np.ndarray, coefficient: np.ndarray) -> np.ndarray:
    """Signed levels f32 of codes; coefficients of groups go along."""
    i, a = (codes & 7).astype(np.int32), coefficient.astype(np.int32)
    level = np.where(a == LINEAR, i, a * i + (1 << i))
    return np.where(codes >= 8, -level, level).astype(np.float32)
