"""Quantised weights as the array takes them: tiles of beats, and each column's scale and coefficient."""

from collections.abc import Iterator, Mapping

import numpy as np

from kvant.hw.linear.parameters import LinearParameters, ceil_div
from kvant.hw.numeric.codes import INT8


def metadata(p: LinearParameters, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Scale and coefficient of every column, u8 [groups, tiles, 3 * cols]; 0 past the last output.

    *arrays* are ``w_codes``, ``w_scale``, ``w_coeff`` and, where a coefficient is 254, ``w_int8``, as
    `kvant.sim.linear.engine.run` takes them.
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
        packed = []
        for plane in (high, low):
            # [tile, column, beat, row] -> [tile, beat, column, row]: one beat's nibbles in the order of the port
            nibbles = np.pad(plane[:, columns], pad).reshape(tiles, p.cols, beats, p.rows).transpose(0, 2, 1, 3)
            nibbles = nibbles.reshape(tiles, beats, p.lanes)
            if p.lanes % 2:
                nibbles = np.pad(nibbles, ((0, 0), (0, 0), (0, 1)))
            packed.append(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)
        yield packed[0], packed[1]
