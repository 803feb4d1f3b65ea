"""Storage: nibbles, and blocks of 16 groups with separate planes.

A block holds the codes of 16 groups (earlier element in the low nibble), then 16 fp16 scales (little endian), then 16
coefficient bytes: 8*G + 48 bytes, that is 304, 560, 1072 for G = 32, 64, 128, all of them multiples of 16, so
that a 128-bit port streams without realigning. Source: docs/numerics.md, "Storage".
"""

from typing import NamedTuple

import torch

from kvant.golden.errors import TensorError
from kvant.golden.numeric.tensors import as_tensor, check_group, check_shape, group_count, to_groups

BLOCK_GROUPS = 16
"""Groups of a block."""


def pack_nibbles(codes) -> torch.Tensor:
    """Two codes a byte: u8 [..., n] of 0..15 to u8 [..., ceil(n/2)]; an unused high nibble is 0."""
    codes = as_tensor(codes, "codes", (torch.uint8,))
    if int(codes.max()) > 15:
        raise TensorError(f"codes: value {int(codes.max())}; legal is 0 to 15")
    pairs = to_groups(codes, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed, count: int) -> torch.Tensor:
    """Inverse of `pack_nibbles`: u8 [..., ceil(n/2)] to u8 [..., n], *count* = n."""
    packed = as_tensor(packed, "packed", (torch.uint8,))
    check_shape(packed, "packed", (*packed.shape[:-1], group_count(count, 2)))
    return torch.stack((packed & 15, packed >> 4), dim=-1).reshape(*packed.shape[:-1], -1)[..., :count]


def block_bytes(group: int) -> int:
    """Bytes of a block of 16 groups of G elements."""
    return BLOCK_GROUPS * (check_group(group) + 6) // 2


class Groups(NamedTuple):
    """Groups in storage order: codes u8 [n, G], scale f16 [n], coefficient u8 [n]."""

    codes: torch.Tensor
    scale: torch.Tensor
    coefficient: torch.Tensor


def pack_blocks(codes, scale, coefficient) -> torch.Tensor:
    """Pack groups into blocks.

    Parameters
    ----------
    codes : u8 [n, G]
        0..15, in storage order; a group shorter than G is filled up with code 0x0.
    scale : f16 [n]
    coefficient : u8 [n]

    Returns
    -------
    u8 [ceil(n/16), 8*G + 48]
        A short last block is filled up with groups of scale 0, code 0x0 and coefficient 0.
    """
    codes = as_tensor(codes, "codes", (torch.uint8,), 2)
    count, group = codes.shape
    check_group(group)
    scale = as_tensor(scale, "scale", (torch.float16,), 1)
    check_shape(scale, "scale", (count,))
    coefficient = as_tensor(coefficient, "coefficient", (torch.uint8,), 1)
    check_shape(coefficient, "coefficient", (count,))
    blocks = group_count(count, BLOCK_GROUPS)
    fill = blocks * BLOCK_GROUPS - count
    codes = torch.nn.functional.pad(codes, (0, 0, 0, fill)).reshape(blocks, BLOCK_GROUPS * group)
    scale = torch.nn.functional.pad(scale, (0, fill)).reshape(blocks, BLOCK_GROUPS).view(torch.uint8)
    coefficient = torch.nn.functional.pad(coefficient, (0, fill)).reshape(blocks, BLOCK_GROUPS)
    return torch.cat((pack_nibbles(codes), scale, coefficient), dim=1)


def unpack_blocks(blocks, count: int, group: int) -> Groups:
    """Inverse of `pack_blocks`: the first *count* groups of u8 [ceil(n/16), 8*G + 48]."""
    blocks = as_tensor(blocks, "blocks", (torch.uint8,), 2)
    check_shape(blocks, "blocks", (group_count(count, BLOCK_GROUPS), block_bytes(group)))
    codes, scale, coefficient = blocks.split((BLOCK_GROUPS * group // 2, 2 * BLOCK_GROUPS, BLOCK_GROUPS), dim=1)
    codes = unpack_nibbles(codes, BLOCK_GROUPS * group).reshape(-1, group)
    scale = scale.contiguous().view(torch.float16).reshape(-1)
    return Groups(codes[:count], scale[:count], coefficient.reshape(-1)[:count])
