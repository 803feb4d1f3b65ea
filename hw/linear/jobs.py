"""How a matrix product is cut into jobs of the linear path."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from kvant.hw.linear.parameters import LinearParameters, ceil_div
from kvant.hw.linear.tile_loop import COUNT_WIDTH
from kvant.hw.parameters import ParameterError


@dataclass(frozen=True)
class JobNumbers:
    """The fields of a `kvant.hw.linear.engine.Job`, and the first token it covers."""

    first_token: int
    tokens: int
    groups: int
    tail: int
    tiles: int
    last_cols: int
    interleave: int

    def descriptor(self) -> int:
        """The bits of the command stream."""
        fields = [value for name, value in asdict(self).items() if name != "first_token"]
        return sum(value << (COUNT_WIDTH * place) for place, value in enumerate(fields))

    def tile_order(self) -> Iterator[tuple[int, int]]:
        """The job's tiles as ``(group, tile)``, in the order in which they stream."""
        return zip(*(part.tolist() for part in tile_order(self.groups, self.tiles, self.interleave)), strict=True)


def tile_order(groups: int, tiles: int, interleave: int) -> tuple[np.ndarray, np.ndarray]:
    """Groups and tiles in the order of the stream: blocks of *interleave* tiles, in each block by group, then tile."""
    group, tile = np.divmod(np.arange(groups * tiles), tiles)
    order = np.lexsort((tile, group, tile // interleave))
    return group[order], tile[order]


def plan(p: LinearParameters, *, tokens: int, inputs: int, outputs: int) -> list[JobNumbers]:
    """Jobs that compute ``y[tokens, outputs] = x[tokens, inputs] @ w[outputs, inputs].T``.

    Each job takes as many tokens as the buffers hold, and lets as many tiles take turns as there are accumulators.

    Raises
    ------
    ParameterError
        When one token's activations do not fit, or a count exceeds the descriptor's fields.
    """
    limit = (1 << COUNT_WIDTH) - 1
    capacity = p.stored_groups
    largest = {"tokens": None, "inputs": min(capacity, limit) * p.group, "outputs": limit * p.cols}
    for name, value in {"tokens": tokens, "inputs": inputs, "outputs": outputs}.items():
        if value < 1 or (largest[name] is not None and value > largest[name]):
            legal = "at least 1" if largest[name] is None else f"1 to {largest[name]}"
            hint = f" (activation_words = {p.activation_words})" if name == "inputs" else ""
            raise ParameterError(f"{name} = {value}: legal is {legal}{hint}")
    groups = ceil_div(inputs, p.group)
    tiles = ceil_div(outputs, p.cols)
    most_tokens = min(p.accumulators, capacity // groups, tokens)
    jobs = []
    for first in range(0, tokens, most_tokens):
        count = min(most_tokens, tokens - first)
        jobs.append(
            JobNumbers(
                first_token=first,
                tokens=count,
                groups=groups,
                tail=inputs - (groups - 1) * p.group,
                tiles=tiles,
                last_cols=outputs - (tiles - 1) * p.cols,
                interleave=min(tiles, p.accumulators // count),
            )
        )
    return jobs
