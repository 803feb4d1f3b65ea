"""Packed weights: how the weights of a job lie in memory, and the packer.

A run of bits without gaps, lowest bit of the lowest byte first, filled up with zeros to a whole word of the port. Tiles
follow each other in the order of the stream ``w`` (block of `interleave` tiles, group of K, tile). A tile is its
metadata, a scale (16 bits) and a coefficient (8 bits) of each column, and then its beats, `rows * cols` codes of 4 bits
each, column by column; where a coefficient is 254 the plane of high INT8 digits comes before the plane of codes.
"""

from math import gcd
from typing import Any

import numpy as np

from kvant.hw.linear.jobs import tile_order
from kvant.hw.linear.parameters import LinearParameters, ceil_div
from kvant.hw.linear.tiles import int8_tiles, metadata, nibble_planes
from kvant.hw.linear.timing import LinearTiming
from kvant.hw.numeric.codes import INT8
from kvant.hw.parameters import ParameterError
from kvant.hw.soc.parameters import TopParameters

HEAD_BITS = 24
"""Metadata of a column: scale, coefficient."""

CODE_BITS = 4


def unit_bits(p: TopParameters) -> int:
    """Bits that divide words of the port, metadata and beats of a tile."""
    linear = p.linear
    return gcd(p.soc.port_bits, gcd(HEAD_BITS * linear.cols, CODE_BITS * linear.lanes))


def stored_interleave(p: LinearParameters, inputs: int) -> int:
    """Fewest tiles that have to take turns so that the array never waits for its accumulators, whatever the tokens.

    Packed weights serve jobs of up to ``accumulators // interleave`` tokens.
    """
    tail = inputs - (ceil_div(inputs, p.group) - 1) * p.group
    slot = max(p.unit_cols, min(p.beats, ceil_div(tail, p.rows)))
    return min(ceil_div(LinearTiming(p).spacing, slot), p.accumulators)


def layout(p: TopParameters) -> dict[str, Any]:
    """The layout for the manifest."""
    linear = p.linear
    head, beat = HEAD_BITS * linear.cols, CODE_BITS * linear.lanes
    return {
        "order": "for each block of `interleave` tiles: for each group of K: for each tile of the block: the tile",
        "tile": {
            "metadata_bits": head,
            "metadata": "of each column, column 0 lowest: fp16 scale in bits 15..0, coefficient in bits 23..16",
            "beat_bits": beat,
            "beats": "ceil(n / rows) for a group of n elements; code of column c, row r in bits 4*(c*rows + r) and on",
            "planes": "codes; before them, where a coefficient of the tile is 254, the plane of high INT8 digits",
            "full_tile_bits": head + linear.beats * beat,
        },
        "bits_per_weight": (head + linear.beats * beat) / (linear.cols * linear.group),
        "padding": f"columns up to a multiple of {linear.cols} and elements of the last group up to a multiple of "
        f"{linear.rows} are 0; the whole is filled up with zeros to a multiple of {p.soc.port_bytes} bytes",
        "alignment": p.soc.port_bytes,
        "interleave": "as in the descriptor; the packed weights serve up to accumulators // interleave tokens a job",
    }


def pack_weights(
    p: TopParameters,
    codes: np.ndarray,
    scale: np.ndarray,
    coefficient: np.ndarray,
    int8: np.ndarray | None = None,
    *,
    interleave: int,
) -> bytes:
    """Weights as they lie in memory.

    Parameters
    ----------
    p : TopParameters
    codes : u8 [N, K]
    scale : f16 [N, ceil(K/G)]
    coefficient : u8 [N, ceil(K/G)]
    int8 : i8 [N, K], optional
        Elements of the groups whose coefficient is 254.
    interleave : int
        Tiles that take turns, see `stored_interleave`.

    Raises
    ------
    ParameterError
        Arrays whose shapes do not fit each other, an INT8 group that the design or the call lacks, an interleave
        outside 1 to `accumulators`.
    """
    linear = p.linear
    outputs, inputs = codes.shape
    groups, tiles = ceil_div(inputs, linear.group), ceil_div(outputs, linear.cols)
    for name, array in {"scale": scale, "coefficient": coefficient}.items():
        if array.shape != (outputs, groups):
            raise ParameterError(f"{name}: shape {list(array.shape)}; legal is {[outputs, groups]}")
    if type(interleave) is not int or not 1 <= interleave <= linear.accumulators:
        raise ParameterError(f"interleave = {interleave!r}: legal is an integer from 1 to {linear.accumulators}")
    if (coefficient == INT8).any() and (int8 is None or not linear.int8_groups):
        what = "the array int8 is missing" if linear.int8_groups else "the design has int8_groups = false"
        raise ParameterError(f"coefficient = {INT8}: {what}")

    arrays = {"w_codes": codes, "w_scale": scale, "w_coeff": coefficient, "w_int8": int8}
    heads = metadata(linear, arrays)
    heads = np.stack([heads & 15, heads >> 4], axis=-1).reshape(groups, tiles, -1)  # nibbles, the low one first
    marked, planes = int8_tiles(linear, coefficient), list(nibble_planes(linear, arrays))
    nibbles = []
    for group, tile in zip(*tile_order(groups, tiles, interleave), strict=True):
        high, low = (plane[tile].reshape(-1) for plane in planes[group])
        nibbles += [heads[group, tile], *([high] if marked[tile, group] else []), low]
    nibbles = np.concatenate(nibbles)
    nibbles = np.pad(nibbles, (0, -len(nibbles) % (2 * p.soc.port_bytes)))
    return (nibbles[0::2] | nibbles[1::2] << 4).astype(np.uint8).tobytes()
