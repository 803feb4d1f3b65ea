"""A linear layer on the accelerator in a simulator: tensors in, tensors out."""

import numpy as np

from kvant.hw.linear.parameters import ceil_div
from kvant.hw.soc.parameters import TopParameters
from kvant.sim.soc import bench
from kvant.sim.soc.driver import Accelerator

LATENCY = 20
"""Cycles of the memory."""

RING = 4
CYCLES_PER_WEIGHT = 8
"""More than any job takes: a run of more cycles hangs."""


def program(
    host, arrays: dict[str, np.ndarray], memory_bytes: int
) -> tuple[np.ndarray, dict[str, int], dict[str, int]]:
    """Host program: outputs, counters, and the fields of ERROR."""
    accelerator = Accelerator(host, range(memory_bytes), ring=RING)
    weights = accelerator.store_weights(arrays["w_codes"], arrays["w_scale"], arrays["w_coeff"], arrays.get("w_int8"))
    # Few descriptors at a time, so that a small ring serves any number of tokens.
    tokens = max(1, accelerator.p.linear.accumulators // weights.interleave)
    tokens = min(tokens, accelerator.p.linear.stored_groups // ceil_div(weights.inputs, accelerator.p.linear.group))
    parts = [
        accelerator.linear(weights, arrays["x"][first : first + tokens]) for first in range(0, len(arrays["x"]), tokens)
    ]
    return np.concatenate(parts), accelerator.counters(), accelerator.fields("ERROR")


def run(
    p: TopParameters, arrays: dict[str, np.ndarray], *, simulator: str = "verilator", stall: float = 0.0, seed: int = 0
) -> dict[str, np.ndarray]:
    """Multiply on the simulated accelerator, through descriptors in memory.

    Parameters
    ----------
    p : TopParameters
    arrays : dict
        As of `kvant.sim.linear.engine.run`.
    simulator : "verilator" or "icarus"
    stall : float
        Probability of a pause of each channel of memory and registers, in each cycle.
    seed : int

    Returns
    -------
    dict
        ``y`` f32 [T, N]; 0-d i64: ``cycles`` in which a descriptor was under way, ``busy_cycles``, ``bytes_read``,
        ``bytes_written``, ``nonfinite``, ``error``.
    """
    tokens, inputs = arrays["x"].shape
    outputs = len(arrays["w_codes"])
    # Codes and metadata, rows of x and y of one part, each with its padding.
    padded = (inputs + p.linear.group) * (outputs + p.linear.cols)
    size = 4 * padded + 8 * p.linear.accumulators * (inputs + outputs + 2 * p.soc.port_bytes) + (1 << 16)
    cycles = CYCLES_PER_WEIGHT * (tokens * padded + (1 << 14)) / (1 - stall)
    y, counters, errors = bench.run(
        p,
        program,
        simulator=simulator,
        options={"latency": LATENCY, "stall": stall, "seed": seed, "memory_bytes": size, "cycles": int(cycles)},
        arrays=arrays,
        memory_bytes=size,
    )
    numbers = {
        "cycles": counters["CYCLES_BUSY"],
        "busy_cycles": counters["CYCLES_LANES"],
        "bytes_read": counters["BYTES_READ"],
        "bytes_written": counters["BYTES_WRITTEN"],
        "nonfinite": errors["nonfinite"],
        "error": errors["weights"],
    }
    return {"y": y} | {name: np.array(value, np.int64) for name, value in numbers.items()}
