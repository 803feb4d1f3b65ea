"""A small piece of the real model, committed so that demo and tests need no download.

Made by `kvant.golden.models.make_slice`; origin and licence are in ``data/README.md``.
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvant.golden.models.errors import ModelError

PATH = Path(__file__).parent / "data" / "smollm2_slice.npz"


@dataclass(frozen=True)
class Tile:
    """The first rows of a linear weight with inputs it really met.

    Parameters
    ----------
    name : str
        Name of the weight in the model.
    weight : ndarray
        f32 [128, K], exactly as in the model.
    activations : ndarray
        f16 [64, K], the layer's input at the last 64 tokens of the text.
    """

    name: str
    weight: np.ndarray
    activations: np.ndarray


@dataclass(frozen=True)
class AttentionSlice:
    """What the attention of one layer saw.

    Parameters
    ----------
    keys, values : ndarray
        f16 [Hkv, T, d] of tokens 0 to T-1; keys after RoPE.
    queries : ndarray
        f16 [Hq, Tq, d] of the last Tq tokens, after RoPE. Query head h uses KV head ``h * Hkv // Hq``.
    """

    keys: np.ndarray
    values: np.ndarray
    queries: np.ndarray


@dataclass(frozen=True)
class ModelSlice:
    """The committed piece.

    Parameters
    ----------
    tiles : dict of str to Tile
        By short name: ``L5_q_proj``, ``L5_down_proj``, ``L20_q_proj``, ``L20_down_proj``.
    attention : dict of int to AttentionSlice
        By layer: 5 and 20.
    tokens : ndarray
        i32 [T], the text.
    """

    tiles: dict[str, Tile]
    attention: dict[int, AttentionSlice]
    tokens: np.ndarray


def load(path: Path = PATH) -> ModelSlice:
    """Read the piece; arrays are read-only.

    Raises
    ------
    ModelError
        The file is missing, damaged or lacks an array.
    """
    try:
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{path}: not readable ({error}); `python -m kvant.golden.models.make_slice` makes it"
        ) from None
    for array in arrays.values():
        array.flags.writeable = False
    try:
        tiles = {
            name.removesuffix("_w"): Tile(str(arrays[f"{name[:-2]}_name"]), array, arrays[f"{name[:-2]}_x"])
            for name, array in arrays.items()
            if name.endswith("_w")
        }
        layers = sorted(int(name[1:].partition("_")[0]) for name in arrays if name.endswith("_keys"))
        attention = {
            number: AttentionSlice(*(arrays[f"L{number}_{part}"] for part in ("keys", "values", "queries")))
            for number in layers
        }
        return ModelSlice(tiles, attention, arrays["tokens"])
    except KeyError as error:
        raise ModelError(f"{path}: array {error} is missing") from None
