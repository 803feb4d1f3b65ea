"""Nibbles and blocks of 16 groups."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.golden.errors import TensorError
from kvant.golden.numeric.packing import block_bytes, pack_blocks, pack_nibbles, unpack_blocks, unpack_nibbles


@pytest.mark.parametrize(("group", "size"), [(32, 304), (64, 560), (128, 1072)])
def test_block_sizes(group, size):
    assert block_bytes(group) == size and size % 16 == 0


def test_earlier_element_is_the_low_nibble_and_an_unused_one_is_zero():
    assert pack_nibbles(torch.tensor([0x1, 0x2, 0xF], dtype=torch.uint8)).tolist() == [0x21, 0x0F]


def test_planes_of_a_block_lie_where_the_layout_says():
    codes = torch.arange(17 * 4, dtype=torch.uint8).reshape(17, 4) % 16
    scale = torch.arange(1, 18, dtype=torch.int16).view(torch.float16)
    coefficient = torch.arange(100, 117, dtype=torch.uint8)
    blocks = pack_blocks(codes, scale, coefficient)
    assert blocks.shape == (2, 80)
    assert blocks[0, :2].tolist() == [0x10, 0x32]
    assert blocks[0, 32:36].tolist() == [1, 0, 2, 0]  # little endian
    assert blocks[0, 64:].tolist() == list(range(100, 116))
    assert blocks[1, :2].tolist() == codes[16, ::2].add(codes[16, 1::2] * 16).tolist()
    assert blocks[1, 34:64].sum() == 0 and blocks[1, 65:].sum() == 0 and blocks[1, 2:32].sum() == 0


@settings(deadline=None, max_examples=80)
@given(st.integers(1, 50), st.integers(1, 40), st.integers(0, 2**31))
def test_unpacking_is_the_exact_inverse(count, group, seed):
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (count, group), generator=random, dtype=torch.uint8)
    scale = torch.randint(0, 0x7C00, (count,), generator=random).to(torch.int16).view(torch.float16)
    coefficient = torch.randint(256, (count,), generator=random, dtype=torch.uint8)
    blocks = pack_blocks(codes, scale, coefficient)
    assert blocks.shape == (-(-count // 16), 8 * group + 48)
    groups = unpack_blocks(blocks, count, group)
    assert torch.equal(groups.codes, codes)
    assert torch.equal(groups.scale.view(torch.int16), scale.view(torch.int16))
    assert torch.equal(groups.coefficient, coefficient)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), group), codes)


def test_refusals():
    codes = torch.zeros(2, 4, dtype=torch.uint8)
    scale = torch.zeros(2, dtype=torch.float16)
    with pytest.raises(TensorError, match=r"^codes: value 255; legal is 0 to 15$"):
        pack_nibbles(codes - 1)
    with pytest.raises(TensorError, match=r"^coefficient: shape \(3,\); legal is \(2,\)$"):
        pack_blocks(codes, scale, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(TensorError, match=r"^blocks: shape \(1, 79\); legal is \(1, 80\)$"):
        unpack_blocks(torch.zeros(1, 79, dtype=torch.uint8), 2, 4)
