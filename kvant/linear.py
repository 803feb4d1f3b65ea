"""The linear path with a user's tensors: checked, quantised where they are not, simulated, compared."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvant import config
from kvant.errors import ComparisonError, InputError
from kvant.tensors import ArraySpec, check_arrays, scalar

ARRAYS = [
    ArraySpec("x", "float16", ("T", "K"), required=True),
    ArraySpec("w", "float32", ("N", "K")),
    ArraySpec("w_codes", "uint8", ("N", "K")),
    ArraySpec("w_scale", "float16", ("N", "K/G")),
    ArraySpec("w_coeff", "uint8", ("N", "K/G")),
    ArraySpec("w_int8", "int8", ("N", "K")),
    ArraySpec("group", "integer"),
]
"""What ``kvant simulate linear`` takes: activations, and weights either in fp32 or quantised."""

QUANTISED = ("w_codes", "w_scale", "w_coeff")


def simulate(
    arrays: dict[str, np.ndarray],
    *,
    path: Path | None = None,
    overrides: Iterable[str] = (),
    simulator: str = "verilator",
    stall: float = 0.0,
    seed: int = 0,
    waves: Path | None = None,
    check: bool = True,
) -> dict[str, np.ndarray]:
    """Multiply *arrays* in the simulated RTL of a configuration.

    Parameters
    ----------
    arrays : dict
        See `ARRAYS`; ``w`` is quantised by least weight error with the configuration's table.
    path, overrides
        Configuration, see `kvant.config.load`; ``group`` among the arrays replaces the configuration's.
    simulator, stall, seed, waves
        See `kvant.sim.simulate.simulate`.
    check : bool
        Compare the outputs with the golden model.

    Returns
    -------
    dict
        See `kvant.sim.linear.engine.run`, with the weights as used and 0-d i64 ``group``, ``rows``, ``cols``,
        ``lanes``.

    Raises
    ------
    InputError
        For an illegal array.
    ComparisonError
        If an output differs from the golden model.
    """
    group = scalar(arrays, "group")
    chosen = config.load(path, [*overrides, *([] if group is None else [f"group={group}"])])
    p = chosen.linear
    check_arrays(arrays, ARRAYS, group=p.group)
    weights = _weights(arrays, chosen)

    from kvant.sim.linear import engine

    tensors = {"x": arrays["x"], **weights}
    result = engine.run(p, tensors, simulator=simulator, stall=stall, seed=seed, waves=waves)
    if check:
        _compare(p, tensors, result)
    shape = {"group": p.group, "rows": p.rows, "cols": p.cols, "lanes": p.lanes}
    return result | weights | {name: np.array(value, np.int64) for name, value in shape.items()}


def _weights(arrays: dict[str, np.ndarray], chosen: config.Config) -> dict[str, np.ndarray]:
    p = chosen.linear
    given = [name for name in (*QUANTISED, "w_int8") if name in arrays]
    if "w" in arrays:
        if given:
            raise InputError(f"array {given[0]}: given together with w; legal is either w or {', '.join(QUANTISED)}")

        from kvant.golden.linear.search import quantize_weights

        quantised = quantize_weights(arrays["w"], p.group, chosen.coefficients, name="w")
        return {
            "w_codes": quantised.codes.numpy(),
            "w_scale": quantised.scale.numpy(),
            "w_coeff": quantised.coefficient.numpy(),
        }
    for name in QUANTISED:
        if name not in arrays:
            raise InputError(f"array {name}: missing; legal is either w or {', '.join(QUANTISED)}")

    from kvant.golden.linear.engine import check_weights

    check_weights(**{name: arrays[name] for name in given}, group=p.group, max_coefficient=p.max_coefficient)
    if "w_int8" not in arrays and p.int8_groups is False:
        return {name: arrays[name] for name in given}
    return {name: arrays[name] for name in given}


def _compare(p, tensors: dict[str, np.ndarray], result: dict[str, np.ndarray]) -> None:
    """Hold the RTL's outputs against the golden model, bit for bit."""
    from kvant.golden.linear.engine import linear
    from kvant.golden.numeric.int8 import quantize_int8

    x = quantize_int8(tensors["x"], p.group)
    golden = {"x_q": x.q.numpy(), "x_scale": x.scale.numpy()}
    y = linear(
        golden["x_q"],
        golden["x_scale"],
        tensors["w_codes"],
        tensors["w_scale"],
        tensors["w_coeff"],
        tensors.get("w_int8"),
        group=p.group,
    )
    golden["y"] = y.numpy()
    for name, expected in golden.items():
        differs = np.argwhere(result[name].view(f"u{expected.itemsize}") != expected.view(f"u{expected.itemsize}"))
        if len(differs):
            index = tuple(int(i) for i in differs[0])
            raise ComparisonError(
                f"{name}{list(index)} = {result[name][index]!r} in the RTL, {expected[index]!r} in the golden model "
                f"({len(differs)} of {expected.size} values differ)"
            )
