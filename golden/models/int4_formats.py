"""Weights that come in already quantised by GPTQ or AWQ, dequantised to float32.

Both store, for a matrix of N outputs and K inputs in groups of g along K, ``scales`` f16 [K/g, N] and integers packed
in int32 words; the value of an element is ``scale * (q - zero)``.

=========  ==========================  ===========================  ==========================================
format     ``qweight``                 ``qzeros``                   order of the fields of a word
=========  ==========================  ===========================  ==========================================
GPTQ       [K*bits/32, N], along K     [K/g, N*bits/32], along N    ascending; 2, 4 or 8 bits
AWQ        [K, N/8], along N           [K/g, N/8], along N          nibble j is column ``0 2 4 6 1 3 5 7``[j]
=========  ==========================  ===========================  ==========================================

GPTQ's ``g_idx`` [K], when present, names the group of every input. GPTQ files of version 1, the default, store every
zero point less one; a ``checkpoint_format`` of ``gptq_v2`` stores it as it is. AWQ stores it as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvant.golden.models.errors import ModelError

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned fields of int32 words, lowest first, as a new last dimension of 32/bits."""
    shifts = torch.arange(0, 32, bits)
    return (words.long().unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


@dataclass(frozen=True)
class QuantisedMatrix:
    """One matrix in GPTQ or AWQ packing.

    Parameters
    ----------
    base : str
        Common beginning of the names of its parts.
    method : str
        ``gptq`` or ``awq``.
    bits : int
        Bits of an integer.
    shape : tuple of int
        [N, K] of the dequantised matrix.
    parts : tuple of str
        Names of the tensors it is made of.
    zero_offset : int
        What is added to a stored zero point.
    """

    base: str
    method: str
    bits: int
    shape: tuple[int, int]
    parts: tuple[str, ...]
    zero_offset: int

    @property
    def stored(self) -> str:
        """The format in words."""
        return f"{self.method.upper()} {self.bits}-bit"

    def dequantize(self, raw: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Values in float32 [N, K]; *raw* gives a tensor of the file by name."""
        outputs, inputs = self.shape
        scales = raw(f"{self.base}.scales").float()
        words, zero_words = raw(f"{self.base}.qweight"), raw(f"{self.base}.qzeros")
        if self.method == "awq":
            order = torch.tensor(_AWQ_ORDER).argsort()
            q = _fields(words, 4)[..., order].reshape(inputs, outputs)
            zeros = _fields(zero_words, 4)[..., order].reshape(-1, outputs)
        else:
            q = _fields(words, self.bits).permute(0, 2, 1).reshape(inputs, outputs)
            zeros = _fields(zero_words, self.bits).reshape(-1, outputs)
        if f"{self.base}.g_idx" in self.parts:
            group = raw(f"{self.base}.g_idx").long()
        else:
            group = torch.arange(inputs) // -(-inputs // scales.shape[0])
        if not bool(((group >= 0) & (group < scales.shape[0])).all()):
            raise ModelError(f"{self.base}.g_idx: {int(group.max())} is no group; legal is 0 to {scales.shape[0] - 1}")
        return (scales[group] * (q - zeros[group] - self.zero_offset)).T.contiguous()


def find(shapes: dict[str, tuple[int, ...]], quantization: dict) -> dict[str, QuantisedMatrix]:
    """The quantised matrices among tensors of a file, by the name of the weight they stand for.

    Parameters
    ----------
    shapes : dict
        Name and shape of every tensor.
    quantization : dict
        ``quantization_config`` of the model, or empty. The packing is told by the shapes; only the meaning of GPTQ's
        zero points is read from here.

    Raises
    ------
    ModelError
        A matrix with a part missing, or with shapes that fit neither packing.
    """
    found = {}
    for name, shape in shapes.items():
        base, _, last = name.rpartition(".")
        if last != "qweight":
            continue
        for part in ("qzeros", "scales"):
            if f"{base}.{part}" not in shapes:
                raise ModelError(f"{base}.{part}: missing beside {name}")
        (rows, columns), zeros, scales = shape, shapes[f"{base}.qzeros"], shapes[f"{base}.scales"]
        outputs = scales[1]
        parts = tuple(
            f"{base}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx") if f"{base}.{part}" in shapes
        )
        if columns == outputs and zeros[1] and 32 * zeros[1] % outputs == 0 and 32 * zeros[1] // outputs in (2, 4, 8):
            bits = 32 * zeros[1] // outputs
            offset = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
            matrix = QuantisedMatrix(base, "gptq", bits, (outputs, rows * 32 // bits), parts, offset)
        elif columns * 8 == outputs and zeros[1] == columns:
            matrix = QuantisedMatrix(base, "awq", 4, (outputs, rows), parts, 0)
        else:
            raise ModelError(
                f"{name}: shape {shape} with scales {scales} and qzeros {zeros} is neither GPTQ (2, 4, 8 bits) nor AWQ"
            )
        found[f"{base}.weight"] = matrix
    return found
