"""Caches of sequences in the accelerator's memory, from the host's side: pools of pages, page tables, records.

The host owns all addresses and counts of tokens; the accelerator keeps nothing from one descriptor to the next. See
`kvant.hw.soc.cache_memory` for what lies where.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np

from kvant.hw.linear.parameters import ceil_div
from kvant.hw.parameters import ParameterError
from kvant.hw.soc.cache_memory import PAGE_NUMBER_BYTES, Calibration
from kvant.hw.soc.descriptors import AttendDescriptor, CacheDescriptor, EncodedDescriptor, Flag
from kvant.sim.soc.driver import Y_BYTES, Accelerator, AcceleratorError, Rows

HALF_BYTES = 2


@dataclass(frozen=True)
class HeadMemory:
    """Addresses of what all sequences share of a layer and KV head."""

    key_pool: int
    value_pool: int
    key_calibration: int
    value_calibration: int


class Caches:
    """Memory for the caches of several heads (of any layers), whose pages sequences share.

    Parameters
    ----------
    accelerator : Accelerator
        With caches.
    heads : int
    pages : int
        Of each pool.

    Attributes
    ----------
    heads : list of HeadMemory
    free_pages : list of int
        Numbers of pages that no sequence has; the last one goes first.

    Raises
    ------
    AcceleratorError
        The accelerator was built without caches, or the memory is too small.
    """

    def __init__(self, accelerator: Accelerator, heads: int, pages: int):
        if accelerator.cache is None:
            raise AcceleratorError("the accelerator has no caches")
        self.accelerator = accelerator
        layout = self.layout = accelerator.cache
        self.heads = [
            HeadMemory(
                key_pool=accelerator.allocate(pages * layout.keys.page_bytes),
                value_pool=accelerator.allocate(pages * layout.values.page_bytes),
                key_calibration=accelerator.allocate(layout.key_calibration.calibration_bytes),
                value_calibration=accelerator.allocate(layout.value_calibration.calibration_bytes),
            )
            for _ in range(heads)
        ]
        self.free_pages = list(range(pages))[::-1]

    def calibrate(
        self,
        head: int,
        keys: tuple[Items[int], Items[int]],
        values: tuple[Items[int], Items[int]],
        *,
        mean: np.ndarray | None = None,
        floor: np.ndarray | None = None,
    ) -> None:
        """Write the calibration of a head.

        Parameters
        ----------
        head : int
        keys, values : (coefficients, thresholds)
            The tables to choose from.
        mean : f16 [d], optional
            Taken out of keys, in a design that is centred; 0 by default.
        floor : f16 [d], optional
            Least of the largest magnitudes of channels of values; 0 by default.
        """
        layout, memory = self.layout, self.heads[head]
        self._write_calibration(memory.key_calibration, layout.key_calibration, keys, mean)
        self._write_calibration(memory.value_calibration, layout.value_calibration, values, floor)

    def _write_calibration(self, address: int, layout: Calibration, table, numbers: np.ndarray | None) -> None:
        numbers = np.zeros(layout.channels, np.float16) if numbers is None else np.asarray(numbers, np.float16)
        self.accelerator.bus.write_memory(address, layout.encode(*table, numbers.tobytes()))

    def sequence(self, windows: int) -> "Sequence":
        """A sequence without tokens, with room for *windows* windows."""
        return Sequence(self, windows)


class Sequence:
    """A sequence in the caches of all heads.

    Attributes
    ----------
    tokens : int
    pages : list of int
        Numbers of the pages of its windows.
    table : int
    records : list of int
        Addresses, of each head.
    """

    def __init__(self, caches: Caches, windows: int):
        self.caches = caches
        accelerator, layout = caches.accelerator, caches.layout
        self.windows = windows
        self.tokens = 0
        self.pages: list[int] = []
        self.table = accelerator.allocate(windows * PAGE_NUMBER_BYTES)
        self.records = [accelerator.allocate(layout.record.record_bytes) for _ in caches.heads]
        self._open = np.zeros((len(caches.heads), 0, layout.record.head_dim), np.float16)  # values of the open window

    def _take_pages(self, tokens: int) -> None:
        """Pages for *tokens* more tokens, and their numbers in the table."""
        needed = ceil_div(self.tokens + tokens, self.caches.layout.record.group)
        free = self.caches.free_pages
        if needed > self.windows or needed - len(self.pages) > len(free):
            raise AcceleratorError(
                f"{self.tokens + tokens} tokens: {needed} pages, the table has room for {self.windows}, and "
                f"{len(self.pages)} are here and {len(free)} free"
            )
        while len(self.pages) < needed:
            self.pages.append(free.pop())
        numbers = np.array(self.pages, "<u4").tobytes()
        self.caches.accelerator.bus.write_memory(self.table, numbers)

    def append_descriptors(self, k: np.ndarray, v: np.ndarray, flags: int = 0) -> list[CacheDescriptor]:
        """Descriptors that append keys and values, f16 [H, T, d]; their rows are written to memory.

        Values of the open window are written again, before the new ones: an accelerator reads a window as a whole when
        it becomes full. `appended` says that the descriptors are done.

        Raises
        ------
        ParameterError
            Arrays that are not those of the heads.
        AcceleratorError
            The table or the pools have no room for so many tokens.
        """
        heads, head_dim = len(self.caches.heads), self.caches.layout.record.head_dim
        for name, array in {"k": k, "v": v}.items():
            if array.dtype != np.float16 or array.shape != (heads, k.shape[1], head_dim) or not array.size:
                raise ParameterError(
                    f"{name}: {array.dtype} {list(array.shape)}; legal is float16 [{heads}, T, {head_dim}], T from 1"
                )
        tokens = k.shape[1]
        self._take_pages(tokens)
        accelerator = self.caches.accelerator
        first = Flag.FIRST if self.tokens == 0 else Flag(0)
        descriptors = []
        for head, memory in enumerate(self.caches.heads):
            sides = (
                (k[head], Flag(0), memory.key_pool, memory.key_calibration),
                (
                    np.concatenate((self._open[head], v[head])),
                    Flag.VALUES,
                    memory.value_pool,
                    memory.value_calibration,
                ),
            )
            for array, side, pool, calibration in sides:
                rows = accelerator.store_rows(array)
                descriptors.append(
                    CacheDescriptor(
                        tokens=tokens,
                        row_stride=rows.stride,
                        position=self.tokens,
                        rows=rows.address,
                        pool=pool,
                        table=self.table,
                        record=self.records[head],
                        calibration=calibration,
                        flags=flags | side | first,
                    )
                )
        return descriptors

    def appended(self, v: np.ndarray) -> None:
        """The tokens of `append_descriptors` are in the caches."""
        self.tokens += v.shape[1]
        rows = np.concatenate((self._open, v), axis=1)
        self._open = rows[:, rows.shape[1] - self.tokens % self.caches.layout.record.group :]

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Append keys and values, f16 [H, T, d], and wait.

        Raises
        ------
        AcceleratorError, ParameterError
            See `append_descriptors` and `Accelerator.wait`.
        """
        accelerator = self.caches.accelerator
        mark = accelerator.mark()
        self._run(self.append_descriptors(k, v))
        accelerator.release(mark)
        self.appended(v)

    def attend_descriptors(
        self, q: np.ndarray, *, first=0, end=None, slope=0.0, flags: int = 0
    ) -> tuple[list[AttendDescriptor], list[Rows]]:
        """Descriptors of attention, and where the outputs of each head go; see `attend`.

        Raises
        ------
        AcceleratorError
            The accelerator was built without attention, or for fewer tokens.
        """
        accelerator, layout = self.caches.accelerator, self.caches.layout
        limits = accelerator.attention
        if limits is None or not 1 <= self.tokens <= limits.tokens:
            raise AcceleratorError(
                f"{self.tokens} tokens: the attention of the accelerator takes 1 to "
                f"{0 if limits is None else limits.tokens}"
            )
        heads, count, _ = q.shape
        first, end, slope = (
            np.broadcast_to(value, (heads, count)) for value in (first, self.tokens if end is None else end, slope)
        )
        slopes = np.ascontiguousarray(slope, np.float16)
        descriptors, results = [], []
        for head, memory in enumerate(self.caches.heads):
            records = [
                layout.query.encode(
                    int(first[head, n]), int(end[head, n]), slopes[head, n].tobytes(), q[head, n].tobytes()
                )
                for n in range(count)
            ]
            address = accelerator.allocate(sum(len(record) for record in records))
            accelerator.bus.write_memory(address, b"".join(records))
            rows = accelerator.allocate_rows(count, layout.record.head_dim * Y_BYTES)
            results.append(rows)
            for start in range(0, count, limits.queries):
                descriptors.append(
                    AttendDescriptor(
                        queries=min(limits.queries, count - start),
                        query_stride=layout.query.query_bytes,
                        tokens=self.tokens,
                        sinks=min(layout.record.sinks, self.tokens),
                        out_stride=rows.stride,
                        q=address + start * layout.query.query_bytes,
                        key_pool=memory.key_pool,
                        value_pool=memory.value_pool,
                        table=self.table,
                        record=self.records[head],
                        out=rows.address + start * rows.stride,
                        flags=flags,
                    )
                )
        return descriptors, results

    def attend(self, q: np.ndarray, *, first=0, end=None, slope=0.0) -> np.ndarray:
        """Attention of queries over the caches.

        Parameters
        ----------
        q : f16 [H, n, d]
            Queries of each KV head.
        first, end : int, broadcastable to [H, n]
            A query sees the keys ``first <= t < end``; all by default.
        slope : f16, broadcastable to [H, n]
            Of a linear position bias, see `kvant.hw.attention.engine.AttentionEngine`.

        Returns
        -------
        f32 [H, n, d]
        """
        accelerator = self.caches.accelerator
        mark = accelerator.mark()
        descriptors, results = self.attend_descriptors(q, first=first, end=end, slope=slope)
        self._run(descriptors)
        out = [accelerator.load_rows(rows, q.shape[1], q.shape[2]) for rows in results]
        accelerator.release(mark)
        return np.stack(out)

    def _run(self, descriptors: Items[EncodedDescriptor]) -> None:
        """Run descriptors, as many at a time as the ring holds beside END."""
        accelerator = self.caches.accelerator
        most = accelerator.ring - 2
        for start in range(0, len(descriptors), most):
            accelerator.run(descriptors[start : start + most])

    def free(self) -> None:
        """Give the pages back; the sequence has no tokens any more."""
        self.caches.free_pages += self.pages[::-1]
        self.pages, self.tokens = [], 0
        self._open = self._open[:, :0]
