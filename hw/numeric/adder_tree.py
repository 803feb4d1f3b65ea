"""Sums of many lanes, pair by pair, a register after every addition."""

from collections.abc import Sequence

from amaranth.hdl import Value

from kvant.hw.numeric.floating import Pipeline


def tree_levels(count: int) -> int:
    """Cycles that `tree_sum` takes for *count* values."""
    return (count - 1).bit_length()


def tree_sum(pipeline: Pipeline, values: Sequence[Value], name: str) -> Value:
    """Sum of *values*, a power of two of them, `tree_levels` cycles later and as many bits wider."""
    while len(values) > 1:
        values = [pipeline.register(left + right, name) for left, right in zip(values[::2], values[1::2], strict=True)]
    return values[0]
