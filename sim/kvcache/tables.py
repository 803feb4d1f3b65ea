"""Tables of a cache as its port takes them: what software writes before the first row."""

from collections.abc import Iterable, Sequence

import numpy as np

from kvant.hw.kvcache.layouts import Table, TableWrite
from kvant.hw.kvcache.parameters import TABLE_ENTRIES, THRESHOLD_LIMIT, THRESHOLDS

_OFFSETS = {name: field.offset for name, field in TableWrite()}


def table_write(kind: Table, head: int, index: int = 0, value: int = 0) -> int:
    """A transfer of the stream ``cfg``."""
    fields = {"kind": int(kind), "head": head, "index": index, "value": value}
    return sum(number << _OFFSETS[name] for name, number in fields.items())


def filled_up(coefficients: Sequence[int], thresholds: Sequence[int]) -> tuple[list[int], list[int]]:
    """A table of 16 coefficients, and the 15 thresholds between them, that chooses as a shorter one does.

    The last coefficient is repeated, behind thresholds of 65535: whether those are passed does not matter.
    """
    table = [int(entry) for entry in coefficients]
    limits = [int(entry) for entry in thresholds]
    return (
        table + [table[-1]] * (TABLE_ENTRIES - len(table)),
        limits + [THRESHOLD_LIMIT] * (THRESHOLDS - len(limits)),
    )


def choice_writes(head: int, coefficients: Sequence[int], thresholds: Sequence[int]) -> list[int]:
    """Transfers that give *head* a table of coefficients."""
    table, limits = filled_up(coefficients, thresholds)
    writes = [table_write(Table.COEFFICIENT, head, index, value) for index, value in enumerate(table)]
    return writes + [table_write(Table.THRESHOLD, head, index, value) for index, value in enumerate(limits)]


def channel_writes(kind: Table, head: int, values: np.ndarray) -> list[int]:
    """Transfers that give *head* a vector, f16 [d]: the kind `Table.MEAN` or `Table.FLOOR`."""
    bits: Iterable[int] = np.ascontiguousarray(values, np.float16).view(np.uint16).tolist()
    return [table_write(kind, head, index, value) for index, value in enumerate(bits)]
