"""The linear path as a compiled model: products of whole layers, bit for bit those of the golden model."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvant.hw.linear import tiles
from kvant.hw.linear.engine import LinearEngine
from kvant.hw.linear.jobs import plan, tile_order
from kvant.hw.linear.parameters import LinearParameters, ceil_div
from kvant.sim.compiled.build import Progress, storage_bytes
from kvant.sim.compiled.model import CompiledModel, records
from kvant.sim.errors import SimulationError
from kvant.sim.simulate import cached_design

TOP = "linear"
_SETTLE_CYCLES = 16
_COMMAND_BITS = 96


@dataclass(frozen=True, eq=False)
class StreamedWeights:
    """Quantised weights in the order in which the array takes them at one token.

    Attributes
    ----------
    inputs, outputs : int
    interleave : int
        Tiles that take turns in this order.
    beats : i64 [groups, tiles]
        Transfers of each tile.
    data, user : u8 [transfers, bytes]
        Codes, and scale and coefficient of every column, as the port's fields.
    code_bytes, metadata_bytes : int
        What a memory has to deliver for one pass: codes of every transfer, scales and coefficients once a tile.
    """

    inputs: int
    outputs: int
    interleave: int
    beats: np.ndarray
    data: np.ndarray
    user: np.ndarray
    code_bytes: int
    metadata_bytes: int

    def ordered(self, interleave: int) -> dict[str, np.ndarray]:
        """Fields of the port in the order of another number of tiles that take turns."""
        count = self.beats.shape[1]
        if min(interleave, count) == min(self.interleave, count):
            return {"data": self.data, "user": self.user}
        place = np.zeros(self.beats.shape, np.int64)  # of each tile's first transfer
        group, tile = tile_order(*self.beats.shape, self.interleave)
        lengths = self.beats[group, tile]
        place[group, tile] = np.cumsum(lengths) - lengths
        group, tile = tile_order(*self.beats.shape, interleave)
        index = _spans(place[group, tile], self.beats[group, tile])
        return {"data": self.data[index], "user": self.user[index]}


@dataclass(frozen=True, eq=False)
class Product:
    """A product that the RTL computed.

    Attributes
    ----------
    y : f32 [T, N]
    cycles : int
        First activation or weight transfer to the last output transfer.
    transfers : int
        Transfers of weights.
    """

    y: np.ndarray
    cycles: int
    transfers: int


class CompiledLinear:
    """The linear engine, compiled.

    Parameters
    ----------
    p : LinearParameters
    threads, stall, seed, progress
        See `CompiledModel`.
    """

    def __init__(
        self,
        p: LinearParameters,
        *,
        threads: int = 1,
        stall: float | Mapping[str, float] = 0.0,
        seed: int = 0,
        progress: Progress | None = None,
    ):
        self.p = p
        if progress is not None:
            progress("generate", 0, 1)
        design = cached_design(lambda: LinearEngine(p), TOP, p)
        self.model = CompiledModel(design, threads=threads, stall=stall, seed=seed, progress=progress)
        self.model.discard("xq")

    def close(self) -> None:
        """Free the model."""
        self.model.close()

    def pack(self, arrays: Mapping[str, np.ndarray]) -> StreamedWeights:
        """Weights in the order of the port.

        Parameters
        ----------
        arrays : mapping
            ``w_codes`` u8 [N, K], ``w_scale`` f16 and ``w_coeff`` u8 [N, ceil(K/G)], and ``w_int8`` i8 [N, K] where a
            coefficient is 254. Values are not checked, see `kvant.golden.linear.engine.check_weights`.

        Raises
        ------
        ParameterError
            Shapes that the engine cannot take, see `kvant.hw.linear.jobs.plan`.
        """
        p = self.p
        outputs, inputs = arrays["w_codes"].shape
        job = plan(p, tokens=1, inputs=inputs, outputs=outputs)[0]
        marked = tiles.int8_tiles(p, arrays["w_coeff"]).T
        length = np.full(job.groups, p.beats)
        length[-1] = ceil_div(job.tail, p.rows)
        beats = length[:, None] * (1 + marked)
        group, tile = tile_order(*beats.shape, job.interleave)
        lengths = beats[group, tile]
        place = np.zeros_like(beats)
        place[group, tile] = np.cumsum(lengths) - lengths

        data = np.zeros((int(lengths.sum()), storage_bytes(4 * p.lanes)), np.uint8)
        user = np.zeros((len(data), storage_bytes(24 * p.cols)), np.uint8)
        columns = tiles.metadata(p, arrays)
        user[:, : columns.shape[2]] = columns[np.repeat(group, lengths), np.repeat(tile, lengths)]
        for number, (high, low) in enumerate(tiles.planes(p, arrays)):
            step = np.arange(length[number])
            both = marked[number]
            data[(place[number, both, None] + step).ravel(), : high.shape[2]] = high[both].reshape(-1, high.shape[2])
            low_place = place[number] + np.where(both, length[number], 0)
            data[(low_place[:, None] + step).ravel(), : low.shape[2]] = low.reshape(-1, low.shape[2])
        return StreamedWeights(
            inputs=inputs,
            outputs=outputs,
            interleave=job.interleave,
            beats=beats,
            data=data,
            user=user,
            code_bytes=len(data) * ceil_div(p.lanes, 2),
            metadata_bytes=beats.size * 3 * p.cols,
        )

    def multiply(self, x: np.ndarray, weights: StreamedWeights) -> Product:
        """The product of activations f16 [T, K] with weights: several jobs where the tokens do not fit one.

        Raises
        ------
        SimulationError
            The engine refused something, or stopped.
        """
        p, model = self.p, self.model
        if x.dtype != np.float16 or x.ndim != 2 or x.shape[1] != weights.inputs or not len(x):
            raise ValueError(f"x: {x.dtype} {list(x.shape)}, legal is float16 [1 or more, {weights.inputs}]")
        jobs = plan(p, tokens=len(x), inputs=weights.inputs, outputs=weights.outputs)
        commands = records([job.descriptor() for job in jobs], _COMMAND_BITS)
        model.send("cmd", {"data": commands})
        passes: dict[int, dict[str, np.ndarray]] = {}
        outputs = []
        for job in jobs:
            if job.interleave not in passes:
                passes[job.interleave] = weights.ordered(job.interleave)
            model.send("w", passes[job.interleave])
            activations = tiles.activation_transfers(p, job, x).view(np.uint8)
            activations = np.pad(activations, ((0, 0), (0, storage_bytes(16 * p.x_lanes) - activations.shape[1])))
            model.send("x", {"data": activations})
            outputs.append(model.receive("y", job.tiles * job.tokens * p.unit_cols)["data"])
        counts = model.run()
        if model.read("error"):
            raise SimulationError("the linear engine raised its flag error: a job or a weight that it does not take")
        lanes = (buffer.view(np.float32) for buffer in outputs)
        y = np.concatenate([tiles.output_columns(p, job, part) for job, part in zip(jobs, lanes, strict=True)])
        cycles = counts["y"].last - min(counts["x"].first, counts["w"].first) + 1
        return Product(np.ascontiguousarray(y[:, : weights.outputs]), cycles, counts["w"].count)

    def status(self) -> dict[str, int]:
        """``nonfinite``, ``error``, ``busy_cycles`` since the beginning, once everything has come to rest.

        Raises
        ------
        SimulationError
            An output more than expected.
        """
        self.model.step(_SETTLE_CYCLES)
        return {name: self.model.read(name) for name in ("nonfinite", "error", "busy_cycles")}


def _spans(first: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Indices ``first[0], first[0] + 1, ...``, *length* of each, behind each other."""
    ends = np.cumsum(length)
    return np.arange(ends[-1]) + np.repeat(first - (ends - length), length)
