"""The weight search: exactly the least error, ties, extremes, outliers, tails, determinism."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.golden.errors import TensorError
from kvant.golden.linear.objective import Objective, cut_moment, diagonal_moment, second_moment
from kvant.golden.linear.search import quantize_weights
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS, INT8, LINEAR, decode, encode, grid_scale, levels
from kvant.golden.numeric.int8 import quantize_int8


def weights(seed, outputs, inputs, spread=0.02):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * spread


def groups_of(matrix, group):
    """Row, group number and elements of every group, row by row."""
    return [(n, g, part) for n, row in enumerate(matrix) for g, part in enumerate(row.split(group))]


def exhaustive(w, group, table, factors=(1.0,), measure=None):
    """Coefficient and scale of every group by trying all candidates one by one, in exact arithmetic or by *measure*."""
    scales, coefficients = [], []
    for _, g, x in groups_of(w, group):
        best = None
        for a in table:
            for factor in factors:
                s = grid_scale(x.abs().max(), a, factor)
                if torch.isinf(s):
                    continue
                level = decode(encode(x[None], s[None], a), a)[0]
                if measure is None:
                    scale = Fraction(s.item())
                    pairs = zip(x.tolist(), level.tolist(), strict=True)
                    error = sum((Fraction(value) - scale * i) ** 2 for value, i in pairs)
                else:
                    error = measure(x.double() - s.double() * level, g)
                if best is None or error < best[0]:
                    best = error, s, a
        scales.append(best[1])
        coefficients.append(best[2])
    shape = (len(w), -1)
    return torch.stack(scales).reshape(shape), torch.tensor(coefficients, dtype=torch.uint8).reshape(shape)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**31),
    st.integers(1, 3),
    st.integers(1, 20),
    st.integers(1, 9),
    st.lists(st.sampled_from([*range(128), LINEAR]), min_size=1, max_size=5),
    st.sampled_from([1e-6, 1e-3, 1.0, 3e4]),
)
def test_least_weight_error_by_exact_fractions(seed, outputs, inputs, group, table, spread):
    w = weights(seed, outputs, inputs, spread)
    found = quantize_weights(w, group, table)
    scale, coefficient = exhaustive(w, group, table)
    assert torch.equal(found.scale, scale) and torch.equal(found.coefficient, coefficient)


def test_default_table_and_scale_search_by_exact_fractions():
    w = weights(1, 6, 100)
    factors = (1.0, 0.9, 0.8)
    found = quantize_weights(w, 64, scale_factors=factors)
    scale, coefficient = exhaustive(w, 64, DEFAULT_COEFFICIENTS, factors)
    assert torch.equal(found.scale, scale) and torch.equal(found.coefficient, coefficient)


def test_codes_are_nearest_at_the_stored_scale():
    w = weights(2, 5, 150)
    found = quantize_weights(w, 64)
    for n, g, x in groups_of(w, 64):
        again = encode(x[None], found.scale[n, g][None], int(found.coefficient[n, g]))[0]
        assert torch.equal(found.codes[n, g * 64 : (g + 1) * 64], again)


@pytest.mark.parametrize("full", [False, True])
def test_calibrated_search_takes_the_least_output_error(full):
    w = weights(3, 8, 50)
    x = weights(4, 200, 50, 1.0) * torch.linspace(0.1, 3, 50)
    moment = second_moment(x, 16) if full else diagonal_moment(x)

    def measure(error, g):
        part = x[:, 16 * g : 16 * g + 16].double()
        return (part @ error).square().sum().item() if full else (part.square() @ error.square()).sum().item()

    found = quantize_weights(w, 16, second_moment=moment, scale_factors=(1.0, 0.85))
    scale, coefficient = exhaustive(w, 16, DEFAULT_COEFFICIENTS, (1.0, 0.85), measure)
    assert torch.equal(found.scale, scale) and torch.equal(found.coefficient, coefficient)
    error = w.double() - found.dequantize().double()
    total = sum(measure(e, g) for _, g, e in groups_of(error, 16))
    assert math.isclose(found.loss, total, rel_tol=1e-9)


def test_tie_goes_to_the_earliest_table_entry():
    """Groups that several grids hit exactly, and a repeated entry, whose twin must never appear."""
    w = torch.tensor([[1.0, -1.0], [0.5, 0.5]])  # one magnitude only: the largest level of any grid with an exact scale
    assert quantize_weights(w, 2, [0, 120, 0]).coefficient.flatten().tolist() == [0, 0]
    steps = torch.arange(8.0)[None]
    assert quantize_weights(steps, 8, [0, LINEAR, LINEAR]).coefficient.tolist() == [[LINEAR]]
    powers = torch.tensor([[1.0, 2, 4, 8, 16, 32, 64, 128]])
    assert quantize_weights(powers, 8, [5, 0, LINEAR, 0]).coefficient.tolist() == [[0]]
    assert quantize_weights(powers, 8, [0]).loss == 0.0


def test_every_grid_recovers_its_own_levels():
    for a in (0, 1, 17, 127, LINEAR):
        level = levels(a).to(torch.float32)
        w = torch.cat([level, -level])[None] * 0.25
        found = quantize_weights(w, 16, [60, 120, a])
        assert found.coefficient.tolist() == [[a]] and found.loss == 0.0
        assert torch.equal(found.dequantize(), w)


def test_all_zero_groups_are_zero_and_leave_the_others_alone():
    """Case 01."""
    w = weights(5, 4, 192)
    with_zeros = w.clone()
    with_zeros[1, 64:128] = 0
    plain, found = quantize_weights(w, 64), quantize_weights(with_zeros, 64)
    assert found.scale[1, 1] == 0 and found.coefficient[1, 1] == DEFAULT_COEFFICIENTS[0]
    assert not found.codes[1, 64:128].any() and not found.dequantize()[1, 64:128].any()
    others = torch.ones(4, 3, dtype=torch.bool)
    others[1, 1] = False
    assert torch.equal(found.scale[others], plain.scale[others])
    assert torch.equal(found.coefficient[others], plain.coefficient[others])
    keep = others.repeat_interleave(64, 1)
    assert torch.equal(found.codes[keep], plain.codes[keep])
    nothing = quantize_weights(torch.zeros(3, 100), 64, second_moment=torch.ones(100))
    assert not nothing.scale.any() and not nothing.codes.any() and nothing.loss == 0.0
    assert not quantize_weights(torch.full((1, 8), -0.0), 8, [LINEAR, 5]).codes.any()


@pytest.mark.parametrize("absmax", [1e-4, 1e-6, 6e-8, 1e-20, 1e-38, 1e-45])
def test_tiny_groups_stay_finite(absmax):
    """Case 02: scales among the subnormals keep their value; one that rounds to 0 makes the group exactly 0."""
    w = weights(6, 1, 64, 1.0)
    w *= absmax / w.abs().max()
    found = quantize_weights(w, 64)
    scale, coefficient = exhaustive(w, 64, DEFAULT_COEFFICIENTS)
    assert torch.equal(found.scale, scale) and torch.equal(found.coefficient, coefficient)
    value = found.dequantize()
    assert torch.isfinite(value).all() and math.isfinite(found.loss)
    if found.scale.item() == 0:
        assert not value.any() and not found.codes.any()
    else:
        assert absmax > 1e-7


def test_scale_that_underflows_for_one_coefficient_leaves_the_others():
    w = torch.tensor([[2.0**-22, -(2.0**-23)]])  # absmax / 7 is representable, absmax / 163 is not
    found = quantize_weights(w, 2, [5, LINEAR])
    assert found.coefficient.tolist() == [[LINEAR]] and found.scale.item() == 2.0**-24


def test_large_outlier_is_kept_within_half_its_step():
    """Case 03: one weight of 1e4 among small ones; neighbour groups untouched."""
    w = weights(7, 1, 192, 0.01)
    plain = quantize_weights(w, 64)
    w[0, 70] = 1e4
    found = quantize_weights(w, 64)
    a, s = int(found.coefficient[0, 1]), found.scale[0, 1].item()
    step = s * (levels(a)[7] - levels(a)[6]).item()
    assert abs(found.dequantize()[0, 70].item() - 1e4) <= step / 2
    small = found.codes[0, 64:128] & 7
    assert torch.cat([small[:6], small[7:]]).max() == 0
    assert torch.equal(found.codes[0, :64], plain.codes[0, :64])
    assert torch.equal(found.codes[0, 128:], plain.codes[0, 128:])


def test_coefficients_whose_scale_overflows_are_left_out():
    """Case 03: 1e6 is beyond 7 * 65504, so the linear type drops out; beyond every type the group is named."""
    w = torch.full((2, 128), 0.01)
    w[1, 100] = 1e6
    found = quantize_weights(w, 64, [LINEAR, 0], name="layer.w")
    assert found.coefficient[1].tolist() == [LINEAR, 0]
    assert torch.isfinite(found.scale).all()
    with pytest.raises(TensorError, match=r"^layer.w: group \[1, 1\] has absmax 1e\+06; legal is below 458640, or its"):
        quantize_weights(w, 64, [LINEAR], name="layer.w")
    w[1, 100] = 3e38
    with pytest.raises(TensorError, match=r"^w: group \[1, 1\] has absmax 3.*e\+38; legal is below"):
        quantize_weights(w.to(torch.bfloat16))
    edge = torch.tensor([[65519.0 * 7], [65520.0 * 7]])
    assert quantize_weights(edge[:1], 64, [LINEAR]).scale.item() == 65504
    with pytest.raises(TensorError, match=r"group \[0, 0\]"):
        quantize_weights(edge[1:], 64, [LINEAR])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_refused_with_name_and_group(value):
    """Case 03."""
    w = torch.zeros(3, 100, dtype=torch.float16)
    w[2, 70] = value
    with pytest.raises(
        TensorError, match=rf"^model.q\[2, 70\] = {value} \(group \[2, 1\]\): legal are finite elements$"
    ):
        quantize_weights(w, name="model.q")


@pytest.mark.parametrize(("inputs", "group"), [(192, 128), (288, 256), (100, 64), (24, 64), (1, 64), (1, 1)])
def test_a_tail_is_quantised_by_its_own_elements(inputs, group):
    """Case 04: the short last group equals the same elements as a group of their own."""
    w = weights(8, 3, inputs)
    found = quantize_weights(w, group)
    start = (inputs - 1) // group * group
    tail = quantize_weights(w[:, start:], max(1, inputs - start))
    assert found.codes.shape == w.shape and found.scale.shape == (3, -(-inputs // group))
    assert torch.equal(found.codes[:, start:], tail.codes)
    assert torch.equal(found.scale[:, -1:], tail.scale)
    assert torch.equal(found.coefficient[:, -1:], tail.coefficient)


@pytest.mark.parametrize("inputs", [100, 24])
def test_what_lies_beyond_a_tail_in_a_moment_does_not_matter(inputs):
    w = weights(9, 3, inputs)
    moment = second_moment(weights(10, 64, inputs, 1.0), 64)
    noise = moment.clone()
    short = inputs % 64
    noise[-1, short:, short:] = torch.eye(64 - short) * 1e6
    a, b = (quantize_weights(w, 64, second_moment=m) for m in (moment, noise))
    assert torch.equal(a.codes, b.codes)


def test_marked_outlier_groups_stay_int8():
    w = weights(11, 4, 150)
    w[2, 70] = 1.0
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[2, 1] = mask[0, 2] = True
    found, plain = quantize_weights(w, 64, outlier_groups=mask), quantize_weights(w, 64)
    assert torch.equal(found.coefficient == INT8, mask)
    keep = mask.repeat_interleave(64, 1)[:, :150]
    assert not found.codes[keep].any() and not found.int8[~keep].any()
    assert torch.equal(found.codes[~keep], plain.codes[~keep])
    reference = quantize_int8(w[2, 64:128].to(torch.float16), 64)
    assert (found.int8[2, 64:128] - reference.q).abs().max() <= 1  # fp16 elements there, f32 here
    error = (w - found.dequantize()).abs()
    assert error[2, 64:128].max() <= 1.0 / 127
    assert found.loss < plain.loss
    assert found.bits_per_element == (4 * 600 + 24 * 12 + 8 * (64 + 22)) / 600
    assert plain.int8 is None and plain.bits_per_element == (4 * 600 + 24 * 12) / 600


def test_int8_division_rule_ties_to_even():
    w = torch.tensor([[254.0, 1, 3, -1, -3]])
    found = quantize_weights(w, 8, outlier_groups=torch.ones(1, 1, dtype=torch.bool))
    assert found.int8.tolist() == [[127, 0, 2, 0, -2]] and found.scale.item() == 2.0


def test_outlier_threshold_compares_the_peak_with_the_root_mean_square():
    w = weights(12, 4, 150)
    w[2, 70] = 1.0
    w[3, 149] = 1.0  # in the tail, whose mean counts 22 elements
    found = quantize_weights(w, 64, outlier_groups=4.5)
    assert (found.coefficient == INT8).nonzero().tolist() == [[2, 1], [3, 2]]
    assert quantize_weights(w, 64, outlier_groups=100.0).int8 is None


def test_more_candidates_never_lose():
    """Nested tables and scales: the objective does not increase."""
    w = weights(13, 16, 128)
    moment = second_moment(weights(14, 300, 128, 1.0) @ weights(15, 128, 128, 1.0), 64)
    for kind in (None, moment):
        tables = (DEFAULT_COEFFICIENTS[:1], DEFAULT_COEFFICIENTS[:4], DEFAULT_COEFFICIENTS)
        losses = [quantize_weights(w, 64, table, second_moment=kind).loss for table in tables]
        losses += [
            quantize_weights(w, 64, second_moment=kind, scale_factors=f).loss
            for f in ((1.0, 0.9), (1.0, 0.95, 0.9, 0.85, 0.8))
        ]
        assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_calibrated_search_beats_the_weight_search_at_its_own_objective():
    w = weights(16, 32, 128)
    moment = second_moment(weights(17, 300, 128, 1.0) @ weights(18, 128, 128, 1.0), 64)
    objective = Objective(128, 64, moment).at(0, 2, 64)

    def output_error(found):
        error = (w.double() - found.dequantize().double()).reshape(32, 2, 64).transpose(0, 1)
        return objective.measure(error.contiguous()).sum().item()

    calibrated = quantize_weights(w, 64, second_moment=moment)
    assert math.isclose(output_error(calibrated), calibrated.loss, rel_tol=1e-9)
    assert calibrated.loss < output_error(quantize_weights(w, 64))


def test_results_do_not_depend_on_threads_nor_on_chunks(monkeypatch):
    w = weights(19, 300, 576)
    moment = second_moment(weights(20, 200, 576, 1.0), 64)
    threads = torch.get_num_threads()
    found = []
    for count, chunk in ((1, 1 << 16), (2, 1 << 16), (3, 1 << 12)):
        torch.set_num_threads(count)
        monkeypatch.setattr("kvant.golden.linear.search.CHUNK", chunk)
        found.append(quantize_weights(w, 64, second_moment=moment, scale_factors=(1.0, 0.9)))
        assert torch.get_num_threads() == count
    torch.set_num_threads(threads)
    for other in found[1:]:
        assert torch.equal(other.codes, found[0].codes) and torch.equal(other.scale, found[0].scale)
        assert torch.equal(other.coefficient, found[0].coefficient)
    assert found[0].loss == found[1].loss


def test_other_layouts_types_and_numpy_give_the_same_and_stay_unchanged():
    w = weights(21, 64, 40).to(torch.bfloat16)
    reference = quantize_weights(w.to(torch.float32), 16)
    wide = torch.zeros(64, 80, dtype=torch.bfloat16)
    wide[:, ::2] = w
    kept = wide.clone()
    needs_gradient = w.to(torch.float32).requires_grad_()
    for variant in (w, w.T.contiguous().T, wide[:, ::2], w.to(torch.float32).numpy(), needs_gradient):
        assert torch.equal(quantize_weights(variant, 16).codes, reference.codes)
    assert torch.equal(wide, kept)


def test_moment_of_smaller_groups_is_cut_from_the_diagonal_blocks():
    x = weights(22, 90, 100, 1.0)
    assert torch.equal(cut_moment(second_moment(x, 64), 64, 16, 100), second_moment(x, 16))
    with pytest.raises(TensorError, match=r"^second_moment: groups of 64; legal is a multiple of 48$"):
        cut_moment(second_moment(x, 64), 64, 48, 100)


def test_moments_of_batches_add():
    x = weights(23, 90, 100, 1.0)
    parts = second_moment(x[:30], 64) + second_moment(x[30:], 64)
    assert torch.allclose(parts, second_moment(x, 64), rtol=1e-12)
    assert parts.shape == (2, 64, 64) and not parts[1, 36:].any()
    assert torch.allclose(diagonal_moment(x)[:64], second_moment(x, 64)[0].diagonal())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 0}, r"^group = 0: legal is an integer from 1 to 256$"),
        ({"coefficients": [5, 128]}, r"^coefficients\[1\] = 128: legal is"),
        ({"scale_factors": ()}, r"^scale_factors = \(\): legal is at least one number above 0 and up to 2$"),
        ({"scale_factors": (1.0, -0.5)}, r"^scale_factors = \(1.0, -0.5\): legal is"),
        ({"outlier_groups": 0}, r"^outlier_groups = 0: legal is a number above 0$"),
        ({"outlier_groups": np.ones((2, 2), dtype=bool)}, r"^outlier_groups: shape \(2, 2\); legal is \(2, 1\)$"),
        ({"second_moment": np.ones(5)}, r"^second_moment: shape \(5,\); legal is \(8,\)$"),
        ({"second_moment": np.ones((1, 8, 8))}, r"^second_moment: shape \(1, 8, 8\); legal is \(1, 64, 64\)$"),
        ({"second_moment": -np.ones(8)}, r"^second_moment: value -1.0; legal is at least 0$"),
        ({"second_moment": np.full(8, np.nan)}, r"^second_moment: NaN or infinity; legal are finite values$"),
        ({"w": np.ones((2, 8))}, r"^w: dtype float64; legal: float16, bfloat16, float32$"),
        ({"w": torch.ones(8)}, r"^w: shape \(8,\); legal is 2 dimensions$"),
        ({"w": torch.ones(0, 8)}, r"^w: shape \(0, 8\); legal is at least one element$"),
    ],
)
def test_refusals_name_parameter_value_and_what_is_legal(options, message):
    with pytest.raises(TensorError, match=message):
        quantize_weights(**{"w": torch.ones(2, 8), **options})
