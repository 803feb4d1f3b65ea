"""Tensors as the ports of the linear path carry them: weights in tiles of beats, activations, outputs."""

from collections.abc import Iterator, Mapping

import numpy as np

from kvant.hw.linear.jobs import JobNumbers
from kvant.hw.linear.parameters import LinearParameters, ceil_div
from kvant.hw.numeric.codes import INT8


def metadata(p: LinearParameters, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Scale and coefficient of every column, u8 [groups, tiles, 3 * cols]; 0 past the last output.

    *arrays* are ``w_codes`` u8 [N, K], ``w_scale`` f16 and ``w_coeff`` u8 [N, ceil(K/G)], and, where a coefficient is
    254, ``w_int8`` i8 [N, K].
    """
    coefficient = arrays["w_coeff"]
    outputs, groups = coefficient.shape
    tiles = ceil_div(outputs, p.cols)
    columns = np.zeros((tiles * p.cols, groups, 3), np.uint8)
    columns[:outputs, :, :2] = np.ascontiguousarray(arrays["w_scale"]).view(np.uint8).reshape(outputs, groups, 2)
    columns[:outputs, :, 2] = coefficient
    return columns.reshape(tiles, p.cols, groups, 3).transpose(2, 0, 1, 3).reshape(groups, tiles, -1)


def int8_tiles(p: LinearParameters, coefficient: np.ndarray) -> np.ndarray:
    """Which tiles stream a plane of high digits, bool [tiles, groups]."""
    outputs, groups = coefficient.shape
    tiles = ceil_div(outputs, p.cols)
    marked = np.zeros((tiles * p.cols, groups), bool)
    marked[:outputs] = coefficient == INT8
    return p.int8_groups & marked.reshape(tiles, p.cols, groups).any(axis=1)


def planes(p: LinearParameters, arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of every group the plane of high digits and that of codes or low digits, u8 [tiles, beats, ceil(lanes / 2)].

    Arguments as in `metadata`. Column 0, row 0 is in the lowest bits.
    """
    for pair in nibble_planes(p, arrays):
        even = [np.pad(plane, ((0, 0), (0, 0), (0, 1))) for plane in pair] if p.lanes % 2 else pair
        high, low = (plane[..., 0::2] | plane[..., 1::2] << 4 for plane in even)
        yield high, low


def nibble_planes(p: LinearParameters, arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """As `planes`, with one nibble in a byte, u8 [tiles, beats, lanes]."""
    low, coefficient = arrays["w_codes"], arrays["w_coeff"]
    outputs, inputs = low.shape
    groups, tiles = coefficient.shape[1], ceil_div(outputs, p.cols)
    extra = tiles * p.cols - outputs
    high = np.zeros_like(low)
    marked = coefficient == INT8
    if marked.any():
        elements = np.repeat(marked, p.group, axis=1)[:, :inputs]
        bytes_ = arrays["w_int8"].view(np.uint8)
        low = np.where(elements, bytes_ & 15, low)
        high = np.where(elements, bytes_ >> 4, high)
    for group in range(groups):
        columns = slice(group * p.group, min((group + 1) * p.group, inputs))
        beats = ceil_div(columns.stop - columns.start, p.rows)
        pad = ((0, extra), (0, beats * p.rows - (columns.stop - columns.start)))
        ordered = []
        for plane in (high, low):
            # [tile, column, beat, row] -> [tile, beat, column, row]: one beat's nibbles in the order of the port
            nibbles = np.pad(plane[:, columns], pad).reshape(tiles, p.cols, beats, p.rows).transpose(0, 2, 1, 3)
            ordered.append(nibbles.reshape(tiles, beats, p.lanes))
        yield ordered[0], ordered[1]


def activation_transfers(p: LinearParameters, job: JobNumbers, x: np.ndarray) -> np.ndarray:
    """Transfers of the port x for a job on activations f16 [T, K]: f16 [transfers, x_lanes], 0 in surplus lanes."""
    rows = x[job.first_token : job.first_token + job.tokens]
    parts = []
    for group in range(job.groups):
        part = rows[:, group * p.group : (group + 1) * p.group]
        part = np.pad(part, ((0, 0), (0, -part.shape[1] % p.x_lanes)))
        parts.append(part.reshape(-1, p.x_lanes))
    return np.ascontiguousarray(np.concatenate(parts))


def output_columns(p: LinearParameters, job: JobNumbers, lanes: np.ndarray) -> np.ndarray:
    """Outputs [tokens, tiles * cols] in the transfers [transfers, units] of the port y for a job."""
    # transfer [tile, token, step] lane [unit] is column unit * unit_cols + step of the tile
    part = lanes.reshape(job.tiles, job.tokens, p.unit_cols, p.units).transpose(1, 0, 3, 2)
    return part.reshape(job.tokens, job.tiles, -1)[:, :, : p.cols].reshape(job.tokens, -1)
