"""The linear engine against published answers, exact integers and a plain model of the contract."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.golden.errors import TensorError
from kvant.golden.linear.engine import check_weights, linear, multiply, partial_sums, quantized_linear
from kvant.golden.linear.weights import QuantizedWeights
from kvant.golden.numeric.codes import INT8, LINEAR, decode
from kvant.golden.numeric.int8 import quantize_int8

KNOWN_ANSWERS = Path(__file__).parents[2] / "known_answers"
COEFFICIENTS = [0, 1, 5, 17, 64, 120, 127, LINEAR]


def random_operands(seed, tokens, outputs, inputs, group, coefficients=(*COEFFICIENTS, INT8)):
    random = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)

    def integers(low, high, shape, dtype):
        return torch.randint(low, high, shape, generator=random, dtype=dtype)

    return {
        "x_q": integers(-128, 128, (tokens, inputs), torch.int8),
        "x_scale": torch.rand(tokens, groups, generator=random).to(torch.float16),
        "w_codes": integers(0, 16, (outputs, inputs), torch.uint8),
        "w_scale": (torch.rand(outputs, groups, generator=random) * 0.01).to(torch.float16),
        "w_coeff": torch.tensor(coefficients, dtype=torch.uint8)[
            integers(0, len(coefficients), (outputs, groups), torch.int64)
        ],
        "w_int8": integers(-128, 128, (outputs, inputs), torch.int8),
    }


def contract(x_q, x_scale, w_codes, w_scale, w_coeff, w_int8, group) -> np.ndarray:
    """One output at a time: a shift, a product and exact fractions, as the contract words it."""
    tokens, inputs = x_q.shape
    y = np.zeros((tokens, len(w_codes)), dtype=np.float32)
    for t in range(tokens):
        for n in range(len(w_codes)):
            total = np.float32(0)
            for g, a in enumerate(w_coeff[n].tolist()):
                psum1 = psum2 = whole = 0
                for k in range(g * group, min((g + 1) * group, inputs)):
                    x, code = int(x_q[t, k]), int(w_codes[n, k])
                    sign, i = (-1 if code & 8 else 1), code & 7
                    psum1 += x * (sign * i)
                    psum2 += sign * (x << i)
                    whole += x * int(w_int8[n, k])
                r = {LINEAR: psum1, INT8: whole}.get(a, a * psum1 + psum2)
                exact = r * Fraction(x_scale[t, g].item()) * Fraction(w_scale[n, g].item())
                total = np.float32(total + nearest_fp32(exact))
            y[t, n] = total
    return y


def nearest_fp32(value: Fraction) -> np.float32:
    if not value:
        return np.float32(0)
    place = Fraction(1)
    while abs(value) / place < 2**23:
        place /= 2
    while abs(value) / place >= 2**24:
        place *= 2
    return np.float32(float(round(value / place) * place))


@pytest.mark.parametrize("path", sorted(KNOWN_ANSWERS.glob("linear_*.npz")), ids=lambda path: path.stem)
def test_known_answers_bit_for_bit(path):
    with np.load(path) as arrays:
        known = dict(arrays)
    group = int(known.get("in_group", 64))
    x = quantize_int8(known["in_x"], group)
    assert np.array_equal(x.q.numpy(), known["out_x_q"])
    assert np.array_equal(x.scale.numpy().view(np.uint16), known["out_x_scale"].view(np.uint16))
    weights = (known["in_w_codes"], known["in_w_scale"], known["in_w_coeff"], known.get("in_w_int8"))
    y = linear(x.q, x.scale, *weights, group=group)
    assert y.dtype == torch.float32
    assert np.array_equal(y.numpy().view(np.uint32), known["out_y"].view(np.uint32))
    assert torch.equal(quantized_linear(known["in_x"], QuantizedWeights(*weights, group)), y)


def test_known_answers_are_there():
    assert len(list(KNOWN_ANSWERS.glob("linear_*.npz"))) == 5


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 3), st.integers(1, 30), st.integers(1, 13))
def test_any_shape_equals_the_contract(seed, tokens, outputs, inputs, group):
    """Tails, K < G, K = 1, every kind of group, operands down to -128."""
    operands = random_operands(seed, tokens, outputs, inputs, group)
    assert np.array_equal(linear(**operands, group=group).numpy(), contract(**operands, group=group))


@pytest.mark.parametrize(("inputs", "group"), [(192, 128), (288, 256), (100, 64), (24, 64), (1, 64)])
def test_a_tail_equals_the_unpadded_reference(inputs, group):
    """Case 04."""
    operands = random_operands(inputs, 2, 3, inputs, group)
    assert np.array_equal(linear(**operands, group=group).numpy(), contract(**operands, group=group))


@pytest.mark.parametrize(("x", "code", "sum_"), [(-128, 0x7, -16662528), (127, 0x7, 16532352), (-128, 0xF, 16662528)])
def test_largest_group_sums_do_not_wrap(x, code, sum_):
    """G = 128, a = 127: the largest magnitude the datapath is built for."""
    x_q = torch.full((1, 128), x, dtype=torch.int8)
    codes = torch.full((1, 128), code, dtype=torch.uint8)
    one = torch.ones(1, 1, dtype=torch.float16)
    coefficient = torch.tensor([[127]], dtype=torch.uint8)
    assert linear(x_q, one, codes, one, coefficient, group=128).item() == sum_
    psum1, psum2 = partial_sums(x_q, codes, coefficient, 128)
    assert 127 * psum1.item() + psum2.item() == sum_


def test_partial_sums_give_the_group_result():
    operands = random_operands(7, 3, 4, 50, 16, COEFFICIENTS)
    psum1, psum2 = partial_sums(operands["x_q"], operands["w_codes"], operands["w_coeff"], 16)
    a = operands["w_coeff"].to(torch.int64)
    result = torch.where(a == LINEAR, psum1, a * psum1 + psum2)
    level = decode(operands["w_codes"], operands["w_coeff"].repeat_interleave(16, 1)[:, :50]).to(torch.int64)
    for g in range(4):
        part = slice(16 * g, 16 * g + 16)
        assert torch.equal(result[:, :, g], operands["x_q"][:, part].to(torch.int64) @ level[:, part].T)


def test_groups_add_in_storage_order():
    """2^24 + 1 - 2^24: the 1 is lost in this order, and only in this order."""
    x_q = torch.tensor([[1, 1, 1]], dtype=torch.int8)
    x_scale = torch.ones(1, 3, dtype=torch.float16)
    int8 = torch.tensor([[127, 1, -127]], dtype=torch.int8)
    coefficient = torch.full((1, 3), INT8, dtype=torch.uint8)
    codes = torch.zeros(1, 3, dtype=torch.uint8)
    scale = torch.tensor([[1.0, 2.0**-24, 1.0]], dtype=torch.float16)
    assert linear(x_q, x_scale, codes, scale, coefficient, int8, group=1).item() == 0.0
    order = [0, 2, 1]
    assert linear(x_q, x_scale, codes, scale[:, order], coefficient, int8[:, order], group=1).item() == 2.0**-24


def test_product_of_result_and_scales_is_rounded_once():
    """A 24-bit result times a 22-bit scale product has more bits than fp32: ``t`` itself must not be rounded."""
    operands = random_operands(11, 4, 4, 256, 256, [127])
    operands["x_scale"] = (torch.rand(4, 1, generator=torch.Generator().manual_seed(1)) + 1).to(torch.float16)
    assert np.array_equal(linear(**operands, group=256).numpy(), contract(**operands, group=256))


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_scales_give_positive_zero(zero):
    operands = random_operands(3, 2, 2, 8, 8)
    operands["w_scale"].fill_(zero)
    y = linear(**operands, group=8)
    assert torch.equal(y, torch.zeros(2, 2)) and not torch.signbit(y).any()


def test_results_do_not_depend_on_threads():
    operands = random_operands(5, 33, 65, 576, 64)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(linear(**operands, group=64))
    torch.set_num_threads(threads)
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_kept_levels_give_the_same():
    operands = random_operands(6, 2, 3, 20, 8)
    weights = QuantizedWeights(*(operands[f"w_{f}"] for f in ("codes", "scale", "coeff", "int8")), 8)
    x = operands["x_q"], operands["x_scale"]
    assert torch.equal(multiply(*x, weights, weights.levels()), multiply(*x, weights))


def test_coefficients_beyond_the_datapath_are_refused():
    operands = random_operands(0, 1, 2, 20, 8, [64, 100, INT8, LINEAR])
    del operands["x_q"], operands["x_scale"]
    operands["w_coeff"][1, 1] = 101
    check_weights(**operands, group=8, max_coefficient=101)
    with pytest.raises(
        TensorError, match=r"^w_coeff\[1, 1\] = 101: legal is 0 to 100 \(max_coefficient\), 254 or 255$"
    ):
        check_weights(**operands, group=8, max_coefficient=100)


@pytest.mark.parametrize(
    ("array", "change", "message"),
    [
        ("w_coeff", lambda a: a.fill_(128), r"^w_coeff\[0, 0\] = 128: legal is 0 to 127, 254 \(INT8 group\) or 255"),
        ("w_coeff", lambda a: a.fill_(253), r"^w_coeff\[0, 0\] = 253: "),
        (
            "w_scale",
            lambda a: a.fill_(float("nan")),
            r"^w_scale\[0, 0\] = nan: legal is a finite value of at least",
        ),
        ("w_scale", lambda a: a.fill_(float("inf")), r"^w_scale\[0, 0\] = inf"),
        ("w_scale", lambda a: a.fill_(-1.0), r"^w_scale\[0, 0\] = -1.0"),
        ("x_scale", lambda a: a.fill_(-(2.0**-24)), r"^x_scale\[0, 0\] = -5.9.*e-08"),
        ("w_codes", lambda a: a.fill_(16), r"^w_codes: value 16; legal is 0 to 15$"),
        ("w_codes", lambda a: a[:, :-1], r"^w_int8: shape \(2, 20\); legal is \(2, 19\)$"),
        ("x_q", lambda a: a[:, :-1], r"^x_q: shape \(2, 19\); legal is \(2, 20\)$"),
        ("x_q", lambda a: a[:0], r"^x_q: shape \(0, 20\); legal is at least one element$"),
        ("x_q", lambda a: a.to(torch.int16), r"^x_q: dtype int16; legal: int8$"),
        ("w_scale", lambda a: a[:, :-1], r"^w_scale: shape \(2, 2\); legal is \(2, 3\)$"),
        ("w_coeff", lambda a: a[0], r"^w_coeff: shape \(3,\); legal is 2 dimensions$"),
        ("w_int8", lambda a: None, r"^w_int8: missing, though w_coeff\[\d, \d\] = 254; legal is i8 \[2, 20\]$"),
    ],
)
def test_refusals_name_tensor_value_and_what_is_legal(array, change, message):
    operands = random_operands(0, 2, 2, 20, 8, [INT8])
    operands[array] = change(operands[array])
    with pytest.raises(TensorError, match=message):
        linear(**operands, group=8)
