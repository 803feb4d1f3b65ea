"""Codebooks and codes as they lie in memory, in words of the port."""

from collections.abc import Sequence

import numpy as np

from kvant.hw.pq.parameters import PqParameters
from kvant.sim.words import pack_words


def codebook_array(p: PqParameters, entries: np.ndarray) -> np.ndarray:
    """A codebook i8 [M, 2^nbits, d/M] as words u8 [n, port_bytes]: slice by slice, centroid by centroid; see
    `PqParameters`.
    """
    centroids = np.asarray(entries, np.int8).transpose(1, 0, 2).reshape(p.centroids, p.slices, p.slice_bytes)
    slices = centroids.transpose(1, 0, 2).reshape(-1, p.slice_bytes)
    return np.pad(slices, ((0, 0), (0, p.port_bytes - p.slice_bytes))).view(np.uint8)


def codebook_words(p: PqParameters, entries: np.ndarray) -> list[int]:
    """The words of `codebook_array` as integers."""
    return pack_words(codebook_array(p, entries), 8)


def frames_of(p: PqParameters, tokens: int) -> int:
    """Frames that hold the codes of *tokens* tokens."""
    return -(-tokens // p.frame)


def code_words(p: PqParameters, codes: np.ndarray) -> list[int]:
    """Words of the port with codes u8 [T, M], from a multiple of `PqParameters.chunk_tokens` on."""
    frames = frames_of(p, len(codes))
    padded = np.zeros((frames * p.frame, p.subspaces), np.uint8)
    padded[: len(codes)] = codes
    order = padded.reshape(frames, p.frame, p.frame_words, p.run).transpose(0, 2, 1, 3)
    bits = np.unpackbits(order.reshape(-1, 1), axis=1, bitorder="little")[:, : p.nbits].reshape(-1)
    bits = np.pad(bits, (0, -len(bits) % p.port_bits))
    return [
        int.from_bytes(row.tobytes(), "little")
        for row in np.packbits(bits.reshape(-1, p.port_bits), axis=1, bitorder="little")
    ]


def read_codes(p: PqParameters, words: Sequence[int], tokens: int) -> np.ndarray:
    """Codes u8 [tokens, M] in words of the port: the inverse of `code_words`."""
    frames = frames_of(p, tokens)
    count = frames * p.frame * p.subspaces
    data = b"".join(word.to_bytes(p.port_bits // 8, "little") for word in words)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: count * p.nbits].reshape(count, p.nbits)
    order = np.packbits(bits, axis=1, bitorder="little").reshape(frames, p.frame_words, p.frame, p.run)
    return order.transpose(0, 2, 1, 3).reshape(-1, p.subspaces)[:tokens]
