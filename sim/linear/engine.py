"""The linear path in a simulator: tensors in, tensors out."""

import numpy as np

from kvant.hw.linear import tiles
from kvant.hw.linear.engine import LinearEngine
from kvant.hw.linear.jobs import JobNumbers, plan
from kvant.hw.linear.parameters import LinearParameters, ceil_div
from kvant.sim.simulate import simulate
from kvant.sim.streams import Stimulus, Trace


def run(
    p: LinearParameters,
    arrays: dict[str, np.ndarray],
    *,
    name: str = "linear",
    simulator: str = "verilator",
    stall: float = 0.0,
    seed: int = 0,
    waves=None,
) -> dict[str, np.ndarray]:
    """Multiply in the simulated RTL.

    Parameters
    ----------
    p : LinearParameters
    arrays : dict
        ``x`` f16 [T, K], ``w_codes`` u8 [N, K], ``w_scale`` f16 [N, ceil(K/G)], ``w_coeff`` u8 [N, ceil(K/G)], and
        ``w_int8`` i8 [N, K] where a coefficient is 254.
    name, simulator, stall, seed, waves
        See `kvant.sim.simulate.simulate`.

    Returns
    -------
    dict
        ``y`` f32 [T, N], ``x_q`` i8 [T, K], ``x_scale`` f16 [T, ceil(K/G)]; 0-d i64: ``cycles`` from the first
        activation or weight transfer to the last output transfer, ``busy_cycles``, ``nonfinite``, ``error``.
    """
    return play(p, arrays, name=name, simulator=simulator, stall=stall, seed=seed, waves=waves, design_key=p)[0]


def play(
    p: LinearParameters, arrays: dict[str, np.ndarray], *, name: str = "linear", **options
) -> tuple[dict[str, np.ndarray], Trace]:
    """As `run`, with the trace; *options* are those of `kvant.sim.simulate.simulate`."""
    tokens, inputs = arrays["x"].shape
    outputs = arrays["w_codes"].shape[0]
    jobs = plan(p, tokens=tokens, inputs=inputs, outputs=outputs)
    trace = simulate(lambda: LinearEngine(p), name, stimulus(p, jobs, arrays), **options)
    return collect(p, jobs, trace, tokens=tokens, inputs=inputs, outputs=outputs), trace


def stimulus(p: LinearParameters, jobs: list[JobNumbers], arrays: dict[str, np.ndarray]) -> Stimulus:
    """The transfers of *jobs*."""
    x, w, user = [], {"data": [], "user": []}, None
    beats_of = _weight_tiles(p, arrays)
    for job in jobs:
        x += _to_integers(tiles.activation_transfers(p, job, arrays["x"]).view(np.uint8))
        for group, tile in job.tile_order():
            beats, user = beats_of[group, tile]
            w["data"] += beats
            w["user"] += [user] * len(beats)
    words = sum(job.tokens * ((job.groups - 1) * p.beats + ceil_div(job.tail, p.rows)) for job in jobs)
    steps = sum(job.tokens * job.tiles * p.unit_cols for job in jobs)
    return Stimulus(
        inputs={
            "cmd": {"data": [job.descriptor() for job in jobs]},
            "x": {"data": x},
            "w": w,
        },
        expect={"xq": words, "y": steps},
        status=["nonfinite", "error", "busy_cycles"],
    )


def _to_integers(rows: np.ndarray) -> list[int]:
    """Each row of a byte matrix as one integer, first byte lowest."""
    width = rows.shape[1]
    raw = np.ascontiguousarray(rows).tobytes()
    return [int.from_bytes(raw[start : start + width], "little") for start in range(0, len(raw), width)]


def _weight_tiles(p: LinearParameters, arrays: dict[str, np.ndarray]) -> dict[tuple[int, int], tuple[list[int], int]]:
    """Beats and metadata of every tile ``(group, tile)``."""
    marked, columns = tiles.int8_tiles(p, arrays["w_coeff"]), tiles.metadata(p, arrays)
    result = {}
    for group, (high, low) in enumerate(tiles.planes(p, arrays)):
        user = _to_integers(columns[group])
        for tile in range(len(low)):
            transfers = _to_integers(low[tile])
            if marked[tile, group]:
                transfers = _to_integers(high[tile]) + transfers
            result[group, tile] = transfers, user[tile]
    return result


def _from_integers(values: list[int], width: int) -> np.ndarray:
    """Integers as rows of *width* bytes."""
    return np.frombuffer(b"".join(value.to_bytes(width, "little") for value in values), np.uint8).reshape(-1, width)


def collect(
    p: LinearParameters, jobs: list[JobNumbers], trace: Trace, *, tokens: int, inputs: int, outputs: int
) -> dict[str, np.ndarray]:
    """The tensors in the transfers of *jobs*."""
    groups = ceil_div(inputs, p.group)
    y = np.zeros((tokens, outputs), np.float32)
    x_q = np.zeros((tokens, inputs), np.int8)
    x_scale = np.zeros((tokens, groups), np.float16)

    words = _from_integers(trace.transfers["xq"]["data"], p.rows).view(np.int8)
    scales = np.array(trace.transfers["xq"]["user"], np.uint16).view(np.float16)
    position = 0
    for job in jobs:
        rows = slice(job.first_token, job.first_token + job.tokens)
        for group in range(job.groups):
            columns = slice(group * p.group, min((group + 1) * p.group, inputs))
            beats = ceil_div(columns.stop - columns.start, p.rows)
            part = slice(position, position + job.tokens * beats)
            x_q[rows, columns] = words[part].reshape(job.tokens, -1)[:, : columns.stop - columns.start]
            x_scale[rows, group] = scales[part][::beats]
            position = part.stop

    lanes = _from_integers(trace.transfers["y"]["data"], 4 * p.units).view(np.float32)
    position = 0
    for job in jobs:
        count = job.tiles * job.tokens * p.unit_cols
        part = tiles.output_columns(p, job, lanes[position : position + count])
        y[job.first_token : job.first_token + job.tokens] = part[:, :outputs]
        position += count

    first = min(trace.cycles["x"][0], trace.cycles["w"][0])
    numbers = {"cycles": trace.cycles["y"][-1] - first + 1, **trace.status}
    return {"y": y, "x_q": x_q, "x_scale": x_scale} | {key: np.array(value, np.int64) for key, value in numbers.items()}


def expected(
    p: LinearParameters, jobs: list[JobNumbers], y: np.ndarray, x_q: np.ndarray, x_scale: np.ndarray
) -> dict[str, dict[str, list[int]]]:
    """The transfers of the output streams that carry these tensors: the inverse of `collect`."""
    xq: dict[str, list[int]] = {"data": [], "user": [], "last": []}
    out: dict[str, list[int]] = {"data": [], "keep": [], "last": []}
    for job in jobs:
        rows = slice(job.first_token, job.first_token + job.tokens)
        for group in range(job.groups):
            part = x_q[rows, group * p.group : (group + 1) * p.group]
            part = np.pad(part, ((0, 0), (0, -part.shape[1] % p.rows)))
            beats = part.shape[1] // p.rows
            xq["data"] += _to_integers(part.reshape(-1, p.rows).view(np.uint8))
            xq["user"] += np.repeat(x_scale[rows, group].view(np.uint16), beats).tolist()
            xq["last"] += ([0] * (beats - 1) + [1]) * job.tokens

        columns = np.pad(y[rows].view(np.uint32), ((0, 0), (0, job.tiles * p.cols - y.shape[1])))
        kept = np.arange(job.tiles * p.cols) < y.shape[1]
        out["data"] += _to_integers(_lanes(p, columns).view(np.uint8))
        nibbles = np.where(_lanes(p, np.tile(kept, (job.tokens, 1))), 15, 0)
        out["keep"] += [sum(int(keep) << 4 * unit for unit, keep in enumerate(row)) for row in nibbles]
        out["last"] += [0] * (job.tiles * job.tokens * p.unit_cols - 1) + [1]
    return {"xq": xq, "y": out}


def _lanes(p: LinearParameters, columns: np.ndarray) -> np.ndarray:
    """Columns [token, tiles * cols] in the order of the output port: [tile, token, step] rows of [unit]."""
    tokens = columns.shape[0]
    by_tile = columns.reshape(tokens, -1, p.cols)
    by_tile = np.pad(by_tile, ((0, 0), (0, 0), (0, p.units * p.unit_cols - p.cols)))
    return by_tile.reshape(tokens, -1, p.units, p.unit_cols).transpose(1, 0, 3, 2).reshape(-1, p.units)
