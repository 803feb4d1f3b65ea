"""The INT8 quantiser."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.golden.errors import TensorError
from kvant.golden.numeric.int8 import quantize_int8
from kvant.golden.numeric.rounding import fp16_from_bits, fp16_to_bits


def exact_q(x: float, absmax: float) -> int:
    return round(127 * Fraction(x) / Fraction(absmax))  # half to even


def test_division_is_exact_for_many_pairs_of_patterns():
    """Pairs with one binade's full mantissa range against selected maxima, ties among them."""
    for pattern in (0x3C00, 0x3C01, 0x3FFF, 0x3BF8, 0x0400, 0x03FF, 0x00FE):
        absmax = fp16_from_bits(torch.tensor(pattern)).item()
        x = fp16_from_bits(torch.arange(max(0, pattern - 3000), pattern + 1))
        rows = torch.stack([x, torch.full_like(x, absmax)], dim=1)
        q = quantize_int8(rows, 2).q[:, 0].tolist()
        scale = quantize_int8(rows, 2).scale[0, 0].item()
        if scale:
            assert q == [exact_q(value, absmax) for value in x.tolist()]


def test_ties_go_to_even_with_both_signs():
    """Case 08: 127 * x / 254 is a half for odd x."""
    x = torch.tensor([[254.0, 1, 3, 5, -1, -3, -5]], dtype=torch.float16)
    assert quantize_int8(x, 7).q.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


def test_minus_128_never_arises():
    x = torch.tensor([[-65504.0, 65504.0, -1.0]], dtype=torch.float16)
    assert quantize_int8(x, 3).q.tolist() == [[-127, 127, 0]]


def test_port_rule_for_nan_and_infinities():
    x = torch.tensor([[float("nan"), float("inf"), float("-inf"), 32752.0]], dtype=torch.float16)
    groups = quantize_int8(x, 4)
    assert groups.nonfinite
    assert groups.q.tolist() == [[0, 127, -127, 64]]  # 127/2 = 63.5, to even
    assert torch.equal(groups.scale, quantize_int8(torch.tensor([[65504.0]], dtype=torch.float16), 4).scale)
    assert not quantize_int8(torch.ones(1, 4, dtype=torch.float16), 4).nonfinite


def test_scale_that_rounds_to_zero_zeroes_the_group():
    """Cases 01, 02: absmax 0, and absmax up to 63 units of the smallest subnormal."""
    tiny = fp16_from_bits(torch.tensor([[63, 1, 0, 0], [64, 1, 0x8020, 0], [0, 0, 0, 0x8000]]))
    groups = quantize_int8(tiny, 4)
    assert fp16_to_bits(groups.scale).tolist() == [[0], [1], [0]]
    assert groups.q.tolist() == [[0, 0, 0, 0], [127, 2, -64, 0], [0, 0, 0, 0]]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40),
    st.integers(1, 17),
)
def test_any_length_and_group(patterns, group):
    x = fp16_from_bits(torch.tensor([patterns]))
    groups = quantize_int8(x, group)
    clean = torch.nan_to_num(x, nan=0.0, posinf=65504.0, neginf=-65504.0)[0].tolist()
    assert groups.q.shape == x.shape and groups.scale.shape == (1, -(-len(patterns) // group))
    for g, scale in enumerate(groups.scale[0].tolist()):
        part = clean[g * group : (g + 1) * group]
        absmax = max(abs(v) for v in part)
        assert scale == np.float16(absmax / 127)
        expected = [exact_q(v, absmax) if scale else 0 for v in part]
        assert groups.q[0, g * group : (g + 1) * group].tolist() == expected


def test_input_is_left_alone_and_other_layouts_give_the_same():
    torch.manual_seed(0)
    wide = torch.randn(8, 20).to(torch.float16)
    kept = wide.clone()
    strided = wide[:, ::2]
    a, b = quantize_int8(strided, 4), quantize_int8(strided.contiguous().numpy(), 4)
    assert torch.equal(a.q, b.q) and torch.equal(a.scale, b.scale)
    assert torch.equal(wide, kept)


@pytest.mark.parametrize(
    ("x", "group", "message"),
    [
        (torch.zeros(2, 2), 64, r"^x: dtype float32; legal: float16$"),
        (torch.zeros(2, 0, dtype=torch.float16), 64, r"^x: shape \(2, 0\); legal is at least one element$"),
        ([1.0], 64, r"^x: list; legal is a torch tensor or a numpy array$"),
        (np.zeros(2, dtype="datetime64[s]"), 64, r"^x: dtype datetime64\[s\]; legal: float16$"),
        (torch.zeros(2, 2, dtype=torch.float16), 0, r"^group = 0: legal is an integer from 1 to 256$"),
        (torch.zeros(2, 2, dtype=torch.float16), 64.0, r"^group = 64.0: legal is an integer from 1 to 256$"),
        (torch.zeros(2, 2, dtype=torch.float16), True, r"^group = True: legal is an integer from 1 to 256$"),
    ],
)
def test_refusals_name_tensor_value_and_what_is_legal(x, group, message):
    with pytest.raises(TensorError, match=message):
        quantize_int8(x, group)
