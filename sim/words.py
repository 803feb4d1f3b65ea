"""Port words of several lanes each: arrays to Python integers and back."""

from collections.abc import Mapping, Sequence

import numpy as np

from kvant.sim.errors import SimulationError
from kvant.sim.streams import Trace


def struct_word(layout, fields: Mapping[str, int]) -> int:
    """The bits of a struct; members that are not among *fields* are 0.

    Parameters
    ----------
    layout : amaranth.lib.data.StructLayout
    fields : mapping of str to int
        Unsigned.

    Raises
    ------
    SimulationError
        A value that does not fit its member.
    """
    places = dict(iter(layout))
    for name, value in fields.items():
        if not 0 <= value < 1 << places[name].width:
            raise SimulationError(f"{name} = {value}: legal are {places[name].width} unsigned bits")
    return sum(int(value) << places[name].offset for name, value in fields.items())


def pack_words(lanes: np.ndarray, width: int) -> list[int]:
    """Integers of several lanes each, the first lane in the low bits.

    Parameters
    ----------
    lanes : integer array [words, n]
        Negative values become two's complement of *width* bits; bits above *width* are cut.
    width : int
        Bits of a lane, 1 to 64.
    """
    lanes = np.asarray(lanes)
    if lanes.ndim != 2:
        raise ValueError(f"lanes: shape {lanes.shape}, legal is [words, n]")
    words, n = lanes.shape
    full = np.ascontiguousarray(lanes.astype("<u8" if lanes.dtype.kind == "u" else "<i8"))
    bits = np.unpackbits(full.view(np.uint8).reshape(words, n, 8), axis=2, bitorder="little")
    rows = np.packbits(bits[:, :, :width].reshape(words, n * width), axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in rows]


def unpack_words(words: Sequence[int], n: int, width: int, *, signed: bool = False) -> np.ndarray:
    """The inverse of `pack_words`: an array [words, n] of int64 (*signed*) or uint64."""
    size = (n * width + 7) // 8
    buffer = b"".join(word.to_bytes(size, "little") for word in words)
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8).reshape(len(words), size), axis=1, bitorder="little")
    bits = bits[:, : n * width].reshape(len(words), n, width)
    full = np.zeros((len(words), n, 64), np.uint8)
    full[:, :, :width] = bits
    if signed:
        full[:, :, width:] = bits[:, :, -1:]
    return np.packbits(full, axis=2, bitorder="little").view("<i8" if signed else "<u8").reshape(len(words), n)


def trace_arrays(trace: Trace, widths: Mapping[str, Mapping[str, int]]) -> dict[str, np.ndarray]:
    """A trace as named arrays, for an ``.npz`` archive that ``kvant diff`` understands.

    Parameters
    ----------
    trace : Trace
    widths : dict
        Of each stream the width of each field in bits.

    Returns
    -------
    dict
        ``STREAM.FIELD`` u8 [transfers, bytes], the low byte first; ``STREAM.cycle`` i64 [transfers]; every plain
        output i64 [] (its low 63 bits).
    """
    arrays = {}
    for stream, fields in trace.transfers.items():
        for name, values in fields.items():
            size = (widths[stream][name] + 7) // 8
            text = b"".join(value.to_bytes(size, "little") for value in values)
            arrays[f"{stream}.{name}"] = np.frombuffer(text, np.uint8).reshape(len(values), size)
        arrays[f"{stream}.cycle"] = np.array(trace.cycles[stream], np.int64)
    for name, value in trace.status.items():
        arrays[name] = np.array(value & ((1 << 63) - 1), np.int64)
    return arrays
