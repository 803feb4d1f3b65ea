"""The linear path as a block of the product: generated, simulated with a user's tensors, compared."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvant import config
from kvant.blocks import Vectors
from kvant.config import Config
from kvant.errors import InputError
from kvant.fpga.linear_top import HELD
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.numeric.codes import INT8
from kvant.simulated import Run, SimulatedBlock, shape_arrays
from kvant.tensors import ArraySpec, check_arrays, scalar

if TYPE_CHECKING:
    from kvant.golden.linear.weights import QuantizedWeights

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


class LinearBlock(SimulatedBlock):
    """fp16 activations times M-ANT weights; see `kvant.hw.linear.engine.LinearEngine`."""

    summary = "fp16 activations times 4-bit M-ANT weights, fp32 outputs"
    fields = (*LinearParameters.model_fields, "coefficients")
    held = HELD

    def build(self, chosen: Config):
        """The component, anew at every call."""
        from kvant.hw.linear.engine import LinearEngine

        return LinearEngine(chosen.linear)

    def parameters(self, chosen: Config) -> Mapping[str, Any]:
        """The fields of `LinearParameters`."""
        return chosen.linear.model_dump()

    def facts(self, chosen: Config) -> Mapping[str, Any]:
        """Latency, throughput, stream orders and widths for the manifest."""
        from kvant.hw.linear.timing import LinearTiming

        p = chosen.linear
        timing = LinearTiming(p)
        return {
            "latency": {
                "last transfer of an activation group to its first xq word": timing.first_word,
                "last beat of a slot to its first output": timing.output,
                "least distance of two groups of one output": timing.spacing,
            },
            "throughput": {
                "multiply-accumulates per cycle": p.lanes,
                "activations per cycle": p.x_lanes,
                "outputs per cycle": p.units,
            },
            "streams": {
                "cmd": "one job descriptor per matrix product: tokens, groups = ceil(K/group), tail = elements of the "
                "last group, tiles = ceil(N/cols), last_cols = columns of the last tile, interleave = tiles that take "
                "turns (tokens * interleave <= accumulators)",
                "x": "for each group of K: for each token: ceil(n/lanes of the port) transfers of fp16 activations; a "
                "group begins a new transfer, surplus lanes of its last transfer are ignored",
                "w": "for each block of `interleave` tiles: for each group of K: for each tile of the block: the plane "
                "of high INT8 digits (only if a coefficient of the tile is 254), then the plane of codes or low "
                "digits; ceil(n/rows) beats each; data = codes, column 0 row 0 lowest; user = scale and coefficient "
                "of each column, the same in all beats of a tile",
                "xq": "the quantised activations in the order of x, in words of `rows` INT8 values; user = fp16 scale",
                "y": "for each block: for each tile: for each token: unit_cols steps; lane u of step s is column "
                "u * unit_cols + s of the tile; keep is 0 past the last column",
            },
            "widths": {
                "psum1": p.psum1_width,
                "psum2": p.psum2_width,
                "group result": p.result_width,
                "units": p.units,
                "unit_cols": p.unit_cols,
                "beats": p.beats,
            },
        }

    def vectors(self, chosen: Config, seed: int) -> Vectors:
        """A small random product with tails in K and N, a zero group and, where built for, INT8 groups."""
        from kvant.hw.linear.jobs import plan
        from kvant.sim.linear import engine

        p = chosen.linear
        arrays = random_case(chosen, tokens=3, outputs=p.cols + 1, inputs=p.group + max(1, p.group // 3), seed=seed)
        golden = golden_outputs(p, arrays)
        jobs = plan(p, tokens=3, inputs=arrays["x"].shape[1], outputs=p.cols + 1)
        return Vectors(
            stimulus=engine.stimulus(p, jobs, arrays),
            transfers=engine.expected(p, jobs, golden["y"], golden["x_q"], golden["x_scale"]),
            status={"nonfinite": 0, "error": 0},
        )

    def case(self, arrays: Mapping[str, np.ndarray], *, path: Path | None, overrides: Iterable[str]) -> Run:
        """*arrays*: see `ARRAYS`; ``w`` is quantised by least weight error with the configuration's table. The weights
        as used are among the results.
        """
        from kvant.sim.linear import engine

        group = scalar(arrays, "group")
        chosen = config.load(path, overrides, arrays={} if group is None else {"group": group})
        p = chosen.linear
        check_arrays(arrays, ARRAYS, group=p.group)
        weights = quantised_weights(arrays, chosen)
        tensors = {"x": arrays["x"], **weights}
        return Run(
            run=partial(engine.run, p, tensors),
            golden=partial(golden_outputs, p, tensors),
            extra=weights | shape_arrays(p.group, p.cols, p.rows),
        )


BLOCK = LinearBlock()


def random_case(chosen: Config, *, tokens: int, outputs: int, inputs: int, seed: int) -> dict[str, np.ndarray]:
    """Random activations and quantised weights of every kind the configuration can multiply."""
    p = chosen.linear
    rng = np.random.default_rng(seed)
    groups = -(-inputs // p.group)
    kinds = [*chosen.coefficients, *([INT8] if p.int8_groups else [])]
    coefficient = rng.choice(kinds, (outputs, groups)).astype(np.uint8)
    x = rng.standard_normal((tokens, inputs)) * np.exp(rng.standard_normal((tokens, inputs)))
    x[0, : p.group] = 0
    codes = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    codes[np.repeat(coefficient == INT8, p.group, axis=1)[:, :inputs]] = 0
    return {
        "x": x.astype(np.float16),
        "w_codes": codes,
        "w_scale": (rng.random((outputs, groups)) / 100).astype(np.float16),
        "w_coeff": coefficient,
        "w_int8": rng.integers(-128, 128, (outputs, inputs)).astype(np.int8),
    }


def golden_outputs(p: LinearParameters, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``y``, ``x_q`` and ``x_scale`` of the golden model."""
    from kvant.golden.linear.engine import linear
    from kvant.golden.numeric.int8 import quantize_int8

    x = quantize_int8(arrays["x"], p.group)
    weights = (arrays["w_codes"], arrays["w_scale"], arrays["w_coeff"], arrays.get("w_int8"))
    y = linear(x.q, x.scale, *weights, group=p.group)
    return {"y": y.numpy(), "x_q": x.q.numpy(), "x_scale": x.scale.numpy()}


def quantised_weights(arrays: dict[str, np.ndarray], chosen: Config) -> dict[str, np.ndarray]:
    """The quantised weights among *arrays*, or those of ``w``."""
    p = chosen.linear
    given = {name: arrays[name] for name in (*QUANTISED, "w_int8") if name in arrays}
    if "w" in arrays:
        if given:
            name = next(iter(given))
            raise InputError(f"array {name}: given together with w; legal is either w or {', '.join(QUANTISED)}")

        from kvant.golden.linear.search import quantize_weights

        return weight_arrays(quantize_weights(arrays["w"], p.group, chosen.coefficients, name="w"))
    for name in QUANTISED:
        if name not in arrays:
            raise InputError(f"array {name}: missing; legal is either w or {', '.join(QUANTISED)}")
    int8 = np.argwhere(given["w_coeff"] == INT8)
    if len(int8) and not p.int8_groups:
        raise InputError(f"w_coeff{int8[0].tolist()} = {INT8}: legal only with int8_groups = true")

    from kvant.golden.linear.engine import check_weights

    check_weights(**given, group=p.group, max_coefficient=p.max_coefficient)
    return given


def weight_arrays(weights: "QuantizedWeights") -> dict[str, np.ndarray]:
    """Quantised weights as `ARRAYS` names them."""
    arrays = {"w_codes": weights.codes, "w_scale": weights.scale, "w_coeff": weights.coefficient}
    if weights.int8 is not None:
        arrays["w_int8"] = weights.int8
    return {name: array.numpy() for name, array in arrays.items()}
