"""The variance unit in a simulator: groups in, their sums out."""

from collections.abc import Mapping, Sequence

import numpy as np
from amaranth.hdl import Shape
from amaranth.lib import data

from kvant.hw.kvcache.variance import VarianceBlock, variance_fields
from kvant.sim.simulate import simulate
from kvant.sim.streams import Stimulus, Trace
from kvant.sim.words import pack_words

OUTPUTS = ("sum", "sumsq", "absmax", "nvar")
"""Arrays that `run` gives; the block's results have more fields."""


def run(
    q: np.ndarray,
    *,
    lanes: int,
    adder: str = "plus",
    name: str = "variance",
    simulator: str = "verilator",
    stall: float = 0.0,
    seed: int = 0,
    waves=None,
) -> dict[str, np.ndarray]:
    """Groups through the simulated RTL, built for their length.

    Parameters
    ----------
    q : i8 [B, n]
        One group per row.
    lanes, adder
        See `kvant.hw.kvcache.variance.VarianceBlock`.
    name, simulator, stall, seed, waves
        See `kvant.sim.simulate.simulate`.

    Returns
    -------
    dict
        i64 [B] ``sum``, ``sumsq``, ``absmax``, ``nvar``; 0-d i64 ``cycles`` from the first input to the last output
        transfer, ``busy_cycles``, ``nonfinite`` (0: the elements are integers), ``error``.
    """
    n = q.shape[1]
    trace = simulate(
        lambda: VarianceBlock(lanes, n, adder=adder),
        name,
        stimulus(q, lanes=lanes),
        simulator=simulator,
        stall=stall,
        seed=seed,
        waves=waves,
        design_key=("variance", lanes, n, adder),
    )
    return collect(trace, group=n)


def stimulus(groups: Sequence[np.ndarray], *, lanes: int) -> Stimulus:
    """The transfers of groups, i8 [n] each. Lanes past a group's end hold what must not count: -128."""
    lengths = np.array([len(group) for group in groups])
    transfers = -(-lengths // lanes)
    elements = np.full((transfers.sum(), lanes), -128, np.int8)
    ends = np.cumsum(transfers)
    for group, start in zip(groups, (ends - transfers).tolist(), strict=True):
        elements.reshape(-1)[start * lanes : start * lanes + len(group)] = group
    counts = np.full(len(elements), lanes)
    counts[ends - 1] = lengths - (transfers - 1) * lanes
    last = np.zeros(len(elements), int)
    last[ends - 1] = 1
    return Stimulus(
        inputs={
            "q": {
                "data": pack_words(elements, 8),
                "keep": [(1 << count) - 1 for count in counts.tolist()],
                "last": last.tolist(),
            }
        },
        expect={"y": len(groups)},
        status=["busy_cycles", "error"],
    )


def collect(trace: Trace, *, group: int) -> dict[str, np.ndarray]:
    """The arrays in the transfers of a unit built for groups of up to *group* elements."""
    results = fields(trace.transfers["y"]["data"], group=group)
    numbers = {"cycles": trace.cycles["y"][-1] - trace.cycles["q"][0] + 1, "nonfinite": 0, **trace.status}
    return {name: np.array(results[name], np.int64) for name in OUTPUTS} | {
        name: np.array(value, np.int64) for name, value in numbers.items()
    }


def fields(words: list[int], *, group: int) -> dict[str, list[int]]:
    """All fields of the block's results, by name."""
    layout = data.StructLayout(variance_fields(group))
    constants = [layout.from_bits(word) for word in words]
    return {name: [constant[name] for constant in constants] for name in layout.members}


def expected(sums: Mapping[str, Sequence[int]], *, group: int) -> list[int]:
    """The words of the output stream for the values of all fields: the inverse of `fields`."""
    layout = data.StructLayout(variance_fields(group))
    words = [0] * len(sums["count"])
    for name, field in layout:
        mask = (1 << Shape.cast(field.shape).width) - 1
        words = [word | (int(value) & mask) << field.offset for word, value in zip(words, sums[name], strict=True)]
    return words
