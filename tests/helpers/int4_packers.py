"""GPTQ and AWQ packing, written element by element from the formats' descriptions."""

import torch

AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
"""Column of an AWQ word's nibble j, least significant nibble first."""


def word(fields: list[int], bits: int) -> int:
    """An int32 of unsigned fields, the first in the low bits."""
    value = sum(field << (bits * place) for place, field in enumerate(fields))
    return value - (1 << 32) if value >= 1 << 31 else value


def pack_gptq(q, zeros, bits: int, zero_offset: int = 1):
    """q [K, N], zeros [K/g, N] integers to qweight [K*bits/32, N] and qzeros [K/g, N*bits/32]."""
    inputs, outputs = q.shape
    per_word = 32 // bits
    qweight = [
        [word([int(q[row + i, n]) for i in range(per_word)], bits) for n in range(outputs)]
        for row in range(0, inputs, per_word)
    ]
    qzeros = [
        [word([int(line[n + i]) - zero_offset for i in range(per_word)], bits) for n in range(0, outputs, per_word)]
        for line in zeros
    ]
    return torch.tensor(qweight, dtype=torch.int32), torch.tensor(qzeros, dtype=torch.int32)


def pack_awq(matrix):
    """Integers [rows, N] to int32 [rows, N/8]."""
    return torch.tensor(
        [[word([int(row[n + column]) for column in AWQ_COLUMNS], 4) for n in range(0, len(row), 8)] for row in matrix],
        dtype=torch.int32,
    )


def random_matrix(inputs: int, outputs: int, group: int, bits: int):
    random = torch.Generator().manual_seed(inputs + outputs + bits)
    q = torch.randint(0, 1 << bits, (inputs, outputs), generator=random)
    zeros = torch.randint(1, 1 << bits, (inputs // group, outputs), generator=random)
    scales = (0.01 + torch.rand(inputs // group, outputs, generator=random)).half()
    return q, zeros, scales
