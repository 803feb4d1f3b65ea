"""Named arrays of a user: read, checked against what a block takes, written whole or not at all."""

import os
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvant.errors import InputError
from kvant.files import replaced


@dataclass(frozen=True)
class ArraySpec:
    """An array a block takes.

    Parameters
    ----------
    name : str
    dtype : str
        NumPy name of the one legal dtype; ``"integer"`` for any integer type, ``"str"`` for text (scalars only).
    dims : tuple of str
        A symbol a dimension, equal symbols have equal lengths in all arrays; ``"K/G"`` is ``ceil(K / G)``, and
        ``"C-1"``, one less than C, may be 0; ``"1"`` is a fixed length. The array with the plain symbol comes first.
        Empty for a 0-d array.
    required : bool
    """

    name: str
    dtype: str
    dims: tuple[str, ...] = ()
    required: bool = False


_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What NumPy and zipfile raise for a file that is damaged, encrypted or of an unknown compression."""


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an ``.npz`` file; pickled objects are refused."""
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{path}: a single array; legal is an .npz archive of named arrays")
        with archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except _UNREADABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: not a readable .npz archive ({reason})") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # NumPy hands out the bytes of a member that is no array
            raise InputError(f"{path}: {name} is no array; legal is an .npz archive of named arrays")
    return arrays


def check_target(path: Path) -> None:
    """Refuse a file that could not be written, before any work is done for it.

    Raises
    ------
    InputError
        Its folder, or the one in which its folder would be made, is none or not writable.
    """
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"{path}: {folder} is a file; legal is a path in a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path}: folder {folder} is not writable")


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write an ``.npz`` archive; an existing file is replaced only by a complete one. Same arrays, same bytes."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from None


def scalar(arrays: dict[str, np.ndarray], name: str) -> int | None:
    """The value of an optional 0-d integer array.

    Raises
    ------
    InputError
        It is not one.
    """
    if name not in arrays:
        return None
    _check_one(ArraySpec(name, "integer"), arrays[name], {}, 1)
    return int(arrays[name])


def check_arrays(arrays: dict[str, np.ndarray], specs: list[ArraySpec], *, group: int) -> dict[str, int]:
    """Check names, dtypes and shapes.

    Returns
    -------
    dict
        Length of every symbol.

    Raises
    ------
    InputError
        For the first array that is unknown, missing, or of another dtype or shape.
    """
    known = {spec.name: spec for spec in specs}
    for name in arrays:
        if name not in known:
            raise InputError(f"array {name}: unknown; legal are {', '.join(known)}")
    lengths: dict[str, int] = {}
    for spec in specs:
        if spec.name not in arrays:
            if spec.required:
                raise InputError(f"array {spec.name}: missing; legal is {_wanted(spec)}")
            continue
        _check_one(spec, arrays[spec.name], lengths, group)
    return lengths


def _wanted(spec: ArraySpec) -> str:
    return f"{spec.dtype} [{', '.join(spec.dims)}]" if spec.dims else f"a 0-d {spec.dtype}"


def _check_one(spec: ArraySpec, array: np.ndarray, lengths: dict[str, int], group: int) -> None:
    kinds = {"integer": "iu", "str": "U"}.get(spec.dtype)
    if not (array.dtype.kind in kinds if kinds else array.dtype == np.dtype(spec.dtype)):
        raise InputError(f"array {spec.name}: dtype {array.dtype}; legal is {_wanted(spec)}")
    if array.ndim != len(spec.dims):
        raise InputError(f"array {spec.name}: shape {array.shape}; legal is {_wanted(spec)}")
    for symbol, length in zip(spec.dims, array.shape, strict=True):
        if symbol.isdigit():
            expected, because = int(symbol), f"a length of {symbol}"
        elif symbol.endswith("/G"):
            whole = lengths[symbol.removesuffix("/G")]
            expected = -(-whole // group)
            because = f"{symbol} = ceil({whole} / {group}) = {expected}"
        elif symbol.endswith("-1"):
            expected = lengths[symbol.removesuffix("-1")] - 1
            because = f"{symbol} = {expected}"
        else:
            expected = lengths.setdefault(symbol, length)
            because = f"{symbol} = {expected}"
        if length < 1 and not symbol.endswith("-1"):
            raise InputError(f"array {spec.name}: shape {array.shape}; legal is {_wanted(spec)}, no length of zero")
        if length != expected:
            raise InputError(f"array {spec.name}: shape {array.shape}; legal is {_wanted(spec)} with {because}")
