"""Sequences in one memory: their rows, calibrations, page tables, and what every call of `CacheUnit` leaves there."""

from dataclasses import dataclass

import numpy as np

from kvant.golden.kvcache.choice import Tables
from kvant.golden.kvcache.spatial import spatial_cache
from kvant.golden.kvcache.temporal import temporal_cache
from kvant.hw.kvcache.page import SCALE_BYTES, TIMESTAMP_BYTES, PageLayout
from kvant.hw.kvcache.parameters import BLOCK_GROUPS, ceil_div
from kvant.hw.soc.cache_memory import CacheMemory
from kvant.hw.soc.parameters import TopParameters

FILL = 0xA5
"""What memory holds before."""


@dataclass
class Head:
    """A KV head, of one layer: what its sequences share."""

    tables: dict[bool, tuple[list[int], list[int]]]  # of values, or keys: coefficients, thresholds
    mean: np.ndarray | None
    floor: np.ndarray
    pools: dict[bool, int]
    calibrations: dict[bool, int]


@dataclass
class Sequence:
    """A sequence and head: rows in memory, and where its state lies."""

    head: Head
    rows: dict[bool, np.ndarray]  # f16 [T, d]
    addresses: dict[bool, int]
    stride: int
    record: int
    table: int
    pages: list[int]
    prefill: int = 0
    position: dict[bool, int] | None = None


class Scene:
    """A memory with heads and sequences whose rows are there, and nothing else.

    Parameters
    ----------
    p : TopParameters
        With `cache`.
    seed : int
    lengths : list of int
        Tokens of each sequence.
    heads : int
    """

    def __init__(self, p: TopParameters, seed: int, lengths: list[int], heads: int = 1, scale: float = 3.0):
        self.p, self.cache = p, p.cache
        self.rng = np.random.default_rng(seed)
        self.layout = CacheMemory(p.cache, p.soc.port_bytes)
        self.image = bytearray()
        cache, rng = self.cache, self.rng
        windows = sum(ceil_div(length, cache.group) for length in lengths)
        numbers = rng.permutation(windows + 3).tolist()
        self.heads = []
        for _ in range(heads):
            mean = (rng.standard_normal(cache.head_dim) * 2).astype(np.float16) if cache.centred else None
            floor = np.abs(rng.standard_normal(cache.head_dim)).astype(np.float16)
            tables = {}
            for values in (False, True):
                count = int(rng.integers(2, 17))
                tables[values] = (
                    np.sort(rng.choice(128, count, replace=False)).tolist(),
                    np.sort(rng.integers(3000, 30000, count - 1)).tolist(),
                )
            sizes = {False: self.layout.keys.page_bytes, True: self.layout.values.page_bytes}
            pools = {values: self._place((windows + 3) * size) for values, size in sizes.items()}
            head = Head(tables, mean, floor, pools, {})
            for values, layout, vector in (
                (False, self.layout.key_calibration, mean),
                (True, self.layout.value_calibration, floor),
            ):
                raw = layout.encode(*tables[values], b"" if vector is None else vector.tobytes())
                head.calibrations[values] = self._place(len(raw), raw)
            self.heads.append(head)
        self.sequences = []
        for length in lengths:
            pages = [numbers.pop() for _ in range(ceil_div(length, cache.group))]
            table = self._place(4 * len(pages), np.array(pages, "<u4").tobytes())
            for head in self.heads:
                self.sequences.append(self._sequence(head, length, pages, table, scale))
        self.image += bytes([FILL]) * 64

    def _place(self, size: int, content: bytes | None = None) -> int:
        """Room for *size* bytes at a word that has nothing to do with 4 KB."""
        step = self.p.soc.port_bytes
        self.image += bytes([FILL]) * (step * int(self.rng.integers(0, 9)) + -len(self.image) % step)
        at = len(self.image)
        raw = bytes([FILL]) * size if content is None else content
        self.image += raw + bytes([FILL]) * (-len(raw) % step)
        return at

    def _sequence(self, head: Head, length: int, pages: list[int], table: int, scale: float) -> Sequence:
        cache, rng, step = self.cache, self.rng, self.p.soc.port_bytes
        row_bytes = ceil_div(2 * cache.head_dim, step) * step
        stride = row_bytes + step * int(rng.integers(0, 3))
        rows, addresses = {}, {}
        for values in (False, True):
            spread = np.exp2(rng.uniform(-scale, scale, (length, 1)))
            rows[values] = (rng.standard_normal((length, cache.head_dim)) * spread).astype(np.float16)
            raw = bytearray([FILL]) * (stride * length)
            for number, row in enumerate(rows[values]):
                raw[number * stride : number * stride + 2 * cache.head_dim] = row.tobytes()
            addresses[values] = self._place(len(raw), bytes(raw))
        record = self._place(self.layout.record.record_bytes)
        return Sequence(head, rows, addresses, stride, record, table, pages, position={False: 0, True: 0})

    def job(self, sequence: Sequence, values: bool, tokens: int) -> dict[str, int]:
        """The job of a call, whose effect on memory `image` then shows."""
        cache, step = self.cache, self.p.soc.port_bytes
        head, position = sequence.head, sequence.position[values]
        before = position % cache.group if values else 0
        job = {
            "values": int(values),
            "first": int(position == 0),
            "tokens": tokens,
            "position": position,
            "stride": sequence.stride // step,
            "rows": (sequence.addresses[values] + (position - before) * sequence.stride) // step,
            "pool": head.pools[values] // step,
            "table": sequence.table // step,
            "record": sequence.record // step,
            "calibration": head.calibrations[values] // step,
            "slot": int(self.rng.integers(0, 2)),
        }
        if values:
            self._append_values(sequence, position, tokens)
        else:
            self._append_keys(sequence, position, tokens)
        sequence.position[values] = position + tokens
        return job

    def _write(self, at: int, content: bytes | np.ndarray) -> None:
        raw = content if isinstance(content, bytes) else np.ascontiguousarray(content).tobytes()
        self.image[at : at + len(raw)] = raw

    def _append_keys(self, sequence: Sequence, position: int, tokens: int) -> None:
        cache, head, layout = self.cache, sequence.head, self.layout.keys
        golden = spatial_cache(
            sequence.rows[False][: position + tokens],
            group=cache.group,
            tables=Tables.of(*head.tables[False], cache.statistic),
            mean=head.mean,
            sinks=cache.sinks,
        )
        groups = cache.row_groups
        for t in range(position, position + tokens):
            window, row = divmod(t, cache.group)
            page = head.pools[False] + sequence.pages[window] * layout.page_bytes
            codes = np.zeros(groups * cache.group, np.uint8)
            codes[: cache.head_dim] = golden.codes[t].numpy()
            for g in range(groups):
                packed = codes[g * cache.group : (g + 1) * cache.group]
                meta = (golden.scale[t, g].numpy(), golden.coefficient[t, g].numpy())
                self._write_group(layout, page, row * groups + g, packed, *meta)
            if row == cache.group - 1 or t == position + tokens - 1:
                for place in range(row * groups + groups, ceil_div((row + 1) * groups, BLOCK_GROUPS) * BLOCK_GROUPS):
                    self._write_meta(layout, page, place, np.float16(0), np.uint8(0))
                self._write_trailer(layout, page, window * cache.group)
            if t < cache.sinks:
                self._write_key_sink(sequence, t, golden.sink[t].numpy(), golden.sink_scale[t].numpy())

    def _write_group(self, layout: PageLayout, page: int, place: int, codes, scale, coefficient, offset=None) -> None:
        block, in_block = divmod(place, BLOCK_GROUPS)
        at = page + block * layout.block_bytes + in_block * layout.group_bytes
        self._write(at, (codes[0::2] | codes[1::2] << 4).astype(np.uint8))
        self._write_meta(layout, page, place, scale, coefficient, offset)

    def _write_meta(self, layout: PageLayout, page: int, place: int, scale, coefficient, offset=None) -> None:
        block, in_block = divmod(place, BLOCK_GROUPS)
        base = page + block * layout.block_bytes
        self._write(base + layout.planes["scale"] + SCALE_BYTES * in_block, scale)
        if "coefficient" in layout.planes:
            self._write(base + layout.planes["coefficient"] + in_block, coefficient)
        if "offset" in layout.planes:
            self._write(base + layout.planes["offset"] + in_block, np.int8(0) if offset is None else offset)

    def _write_trailer(self, layout: PageLayout, page: int, timestamp: int, coefficient: int = 0) -> None:
        raw = timestamp.to_bytes(TIMESTAMP_BYTES, "little") + bytes([coefficient])
        self._write(page + layout.trailer, raw.ljust(16, b"\0"))

    def _write_key_sink(self, sequence: Sequence, t: int, elements: np.ndarray, scales: np.ndarray) -> None:
        cache, layout = self.cache, self.layout.record
        padded = np.zeros(cache.row_groups * cache.group, np.int8)
        padded[: cache.head_dim] = elements
        for g in range(cache.row_groups):
            block, place = divmod(t * cache.row_groups + g, BLOCK_GROUPS)
            at = sequence.record + layout.key_sinks.offset + block * layout.sink_block_bytes
            self._write(at + place * cache.group, padded[g * cache.group : (g + 1) * cache.group])
            plane = bytes(SCALE_BYTES * (BLOCK_GROUPS - place - 1))
            self._write(at + layout.sink_scales + SCALE_BYTES * place, scales[g].tobytes() + plane)

    def _row(self, elements: np.ndarray, limit: int) -> bytes:
        """A row's bytes with the zeros behind it, up to the end of its last transfer, or of the part."""
        size = elements.itemsize
        written = min(limit, size * self.cache.row_transfers * self.cache.lanes)
        return elements.tobytes().ljust(written, b"\0")

    def _append_values(self, sequence: Sequence, position: int, tokens: int) -> None:
        cache, head, layout, record = self.cache, sequence.head, self.layout.values, self.layout.record
        if position == 0:
            sequence.prefill = tokens
        end = position + tokens
        golden = temporal_cache(
            sequence.rows[True][:end],
            sequence.prefill,
            group=cache.group,
            tables=Tables.of(*head.tables[True], cache.statistic),
            floor=head.floor,
            sinks=cache.sinks,
            offset=cache.offset,
            shared_coefficient=cache.shared_coeff,
        )
        for window in range(position // cache.group, end // cache.group):
            page = head.pools[True] + sequence.pages[window] * layout.page_bytes
            rows = golden.codes[window * cache.group : (window + 1) * cache.group].numpy()
            coefficients = np.broadcast_to(golden.coefficient[window].numpy(), cache.head_dim)
            for channel in range(cache.head_dim):
                meta = (
                    golden.scale[window, channel].numpy(),
                    coefficients[channel],
                    golden.offset[window, channel].numpy(),
                )
                self._write_group(layout, page, channel, rows[:, channel], *meta)
            for place in range(cache.head_dim, layout.blocks * BLOCK_GROUPS):
                self._write_meta(layout, page, place, np.float16(0), np.uint8(0))
            shared = int(coefficients[0]) if cache.shared_coeff else 0
            self._write_trailer(layout, page, window * cache.group, shared)
        base = sequence.record
        for t in range(position, min(end, cache.sinks)):
            at = base + record.value_sinks.offset + t * record.sink_row_bytes
            self._write(at, self._row(golden.sink[t].numpy(), record.row_bytes))
            scales = golden.sink_scale[t].numpy().tobytes()
            self._write(at + record.row_bytes, scales.ljust(record.sink_row_bytes - record.row_bytes, b"\0"))
        if position == 0:
            scales = self._row(golden.staged_scale.numpy(), record.value_scales.size)
            self._write(base + record.value_scales.offset, scales)
        open_begin = end - end % cache.group
        for t in range(max(open_begin, position), end):
            at = base + record.value_window.offset + t % cache.group * record.row_bytes
            self._write(at, self._row(golden.staged[t - open_begin].numpy(), record.row_bytes))

    def saturated(self, sequence: Sequence) -> int:
        """Values of the sequence that were clamped, so far."""
        cache = self.cache
        if not sequence.position[True]:
            return 0
        golden = temporal_cache(
            sequence.rows[True][: sequence.position[True]],
            sequence.prefill,
            group=cache.group,
            tables=Tables.of(*sequence.head.tables[True], cache.statistic),
            floor=sequence.head.floor,
            sinks=cache.sinks,
        )
        return int(golden.saturated)
