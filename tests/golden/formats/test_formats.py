"""Number formats behind one interface: published levels, scales, bits, and a search that is the same for all."""

import numpy as np
import pytest
import torch

from kvant.golden.errors import TensorError
from kvant.golden.formats.base import nearest
from kvant.golden.formats.baselines import (
    ANT,
    ANT_MAGNITUDES,
    INT4,
    INT4_ASYMMETRIC,
    INT8,
    MXFP4,
    NF4,
    NF4_LEVELS,
    NVFP4,
    e2m1,
)
from kvant.golden.formats.mant import FORMATS, MANT
from kvant.golden.linear.objective import diagonal_moment, second_moment
from kvant.golden.linear.search import quantize_weights
from kvant.golden.models import slice as model_slice

FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def weights(seed, outputs, inputs, spread=0.02):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * spread


def test_names_and_bits_per_element():
    bits = {name: f.bits(4096, 64) for name, f in FORMATS.items()}
    whole_row = 16 / 4096
    assert bits == {
        "mant": 4.375, "mant_bisection": 4.375, "mant_outliers": 4.375, "int4": 4.25, "int4_asymmetric": 4.5,
        "int4_channel": 4 + whole_row, "int4_tensor": 4, "int4_asymmetric_channel": 4 + 2 * whole_row,
        "int4_asymmetric_tensor": 4, "int2_asymmetric": 2.5, "nf4": 4.25, "ant": 4.28125,
        "ant_channel": 4 + 18 / 4096, "ant_tensor": 4, "pot4": 4.25, "flint4": 4.25, "olive": 4.25,
        "olive_channel": 4 + whole_row, "olive_tensor": 4, "gobo": 4, "gobo3": 3, "mokey": 4.5, "mokey_tensor": 4,
        "bitmod": 4 + 18 / 64, "mxfp4": 4.25, "nvfp4": 4.5, "int8": 8.25, "int8_asymmetric": 8.5,
        "int8_channel": 8 + whole_row, "int8_tensor": 8, "int8_asymmetric_channel": 8 + 2 * whole_row,
        "int8_asymmetric_tensor": 8,
    }  # fmt: skip
    assert MANT.bits(4096, 128) == 4.1875
    assert NF4.bits(100, 64) == 4 + 16 * 2 / 100


DICTIONARIES = ("gobo", "gobo3", "mokey_tensor")
"""Formats with a dictionary of the tensor: its bits depend on the data."""

NO_ZERO = (*DICTIONARIES, "int4_asymmetric_tensor", "int8_asymmetric_tensor")
"""Formats without an exact zero where the tensor has other values."""


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in DICTIONARIES])
def test_bits_are_those_of_the_approximation(name):
    assert FORMATS[name].quantize(weights(0, 3, 100), 64).bits == pytest.approx(FORMATS[name].bits(100, 64))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("inputs", [1, 24, 100, 128])
def test_any_length_zero_groups_and_loss(name, inputs):
    w = weights(1, 4, inputs)
    w[1] = 0
    stored = FORMATS[name].quantize(w, 64)
    assert stored.values.dtype == torch.float32 and stored.values.shape == w.shape
    assert torch.isfinite(stored.values).all()
    assert name in NO_ZERO or not stored.values[1].any()
    error = (w.double() - stored.values.double()).square().sum().item()
    assert stored.loss == pytest.approx(error, rel=1e-9)


def test_int4_levels():
    w = torch.tensor([[-7.0, -6.5, -0.5, 0.5, 1.5, 3.4, 6.6, 0]])
    assert INT4.quantize(w, 8).values.tolist() == [[-7, -6, 0, 0, 2, 3, 7, 0]]
    clipped = INT4.quantize(w, 8, scale_factors=(6 / 7,)).values
    assert clipped.min() >= -8 * 6 / 7 - 1e-3


def test_int4_asymmetric_spans_minimum_to_maximum():
    w = torch.arange(1.0, 17.0)[None]
    assert torch.equal(INT4_ASYMMETRIC.quantize(w, 16).values, w)


def test_int8_error_is_within_half_a_step():
    w = weights(2, 8, 64)
    error = (w - INT8.quantize(w, 64).values).abs().amax(1)
    assert (error <= w.abs().amax(1) / 127 * 0.51).all()


def test_nf4_levels_are_the_published_ones_and_the_nearest_is_taken():
    table = torch.tensor(NF4_LEVELS)
    assert len(NF4_LEVELS) == 16 and list(NF4_LEVELS) == sorted(NF4_LEVELS) and NF4_LEVELS[7] == 0
    exact = torch.tensor([NF4_LEVELS])
    assert torch.equal(NF4.quantize(exact, 16).values, exact)
    u = torch.linspace(-1.2, 1.2, 1001)
    brute = table[(u[:, None] - table).abs().argmin(1)]
    assert torch.equal(nearest(u, table), brute)


def test_ant_takes_the_best_of_its_types():
    for magnitudes in ANT_MAGNITUDES.values():
        m = torch.tensor(magnitudes, dtype=torch.float32)
        group = torch.cat([m, -m])[None]
        assert torch.equal(ANT.quantize(group, 16).values, group)
    assert ANT_MAGNITUDES["flint"] == (0, 1, 2, 3, 4, 6, 8, 16)


def test_e2m1_rounds_ties_to_the_even_mantissa_and_saturates():
    u = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 100.0, 0.24, 2.51])
    assert e2m1(u).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 6, 0, 3]
    assert e2m1(-u).tolist() == [-v for v in e2m1(u).tolist()]
    assert torch.equal(e2m1(torch.tensor(E2M1)), torch.tensor(E2M1))


@pytest.mark.parametrize(("absmax", "scale"), [(6.0, 1.0), (4.0, 1.0), (7.9, 1.0), (8.0, 2.0), (3.99, 0.5)])
def test_mxfp4_scale_is_a_power_of_two_below_the_maximum(absmax, scale):
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 1] = absmax, scale * 1.4
    assert MXFP4.quantize(w).values[0, 1].item() == scale * 1.5


def test_nvfp4_scales_are_e4m3_under_one_of_the_tensor():
    w = weights(3, 4, 64)
    values = NVFP4.quantize(w).values.reshape(-1, 16)
    tensor_scale = w.abs().max() / (6 * 448)
    scale = (w.reshape(-1, 16).abs().amax(1) / (6 * tensor_scale)).to(torch.float8_e4m3fn).to(torch.float32)
    u = values / (scale * tensor_scale)[:, None]
    assert (u.abs()[..., None] - torch.tensor(E2M1)).abs().amin(-1).max() < 1e-5


@pytest.mark.parametrize("name", FORMATS)
def test_search_never_loses_and_uses_the_moment(name):
    w = weights(4, 16, 128)
    moment = second_moment(weights(5, 300, 128, 1.0) @ weights(6, 128, 128, 1.0), 64)
    plain = FORMATS[name].quantize(w, 64, second_moment=moment)
    searched = FORMATS[name].quantize(w, 64, second_moment=moment, scale_factors=FACTORS)
    assert searched.loss <= plain.loss
    if not name.startswith(("int8", "gobo")) and name not in ("mxfp4", "olive_tensor"):
        assert searched.loss < plain.loss
    diagonal = FORMATS[name].quantize(w, 64, second_moment=moment.diagonal(dim1=1, dim2=2).flatten())
    assert diagonal.loss != plain.loss


def test_mant_is_the_search_itself():
    w = weights(7, 8, 100)
    moment = diagonal_moment(weights(8, 50, 100, 1.0))
    stored = MANT.quantize(w, 64, second_moment=moment, scale_factors=FACTORS)
    assert torch.equal(stored.values, quantize_weights(w, 64, second_moment=moment, scale_factors=FACTORS).dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_refusals_name_the_tensor(name):
    w = torch.ones(2, 8)
    w[1, 1] = float("nan")
    with pytest.raises(TensorError, match=r"^layer.k.*legal are finite elements$"):
        FORMATS[name].quantize(w, name="layer.k")
    with pytest.raises(TensorError, match=r"^layer.k: dtype float64; legal"):
        FORMATS[name].quantize(np.ones((2, 8)), name="layer.k")


@pytest.mark.parametrize("tile", ["L5_q_proj", "L5_down_proj", "L20_q_proj", "L20_down_proj"])
def test_mant_loses_less_than_nf4_on_real_weights_with_the_same_calibration_and_search(tile):
    """Off their 4-bit grid (a seeded dither of the model's own step), judged on tokens that calibration did not see.

    The moment is diagonal: 32 tokens do not fill a full one of 64 x 64.
    """
    real = model_slice.load().tiles[tile]
    w, x = torch.from_numpy(real.weight.copy()), torch.from_numpy(real.activations.astype(np.float32))
    blocks = w.reshape(len(w), -1, 32)
    step = (blocks.amax(-1) - blocks.amin(-1)) / 15
    dither = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(9)) - 0.5
    w = (blocks + step[..., None] * dither).reshape(w.shape)
    seen, unseen = x[::2], x[1::2]

    def loss(stored):
        return ((unseen @ (w - stored.values).T).square().sum() / (unseen @ w.T).square().sum()).item()

    options = {"second_moment": diagonal_moment(seen), "scale_factors": FACTORS}
    assert loss(MANT.quantize(w, 64, **options)) < loss(NF4.quantize(w, 64, **options))
    assert loss(MANT.quantize(w, 64)) < loss(INT4.quantize(w, 64))
