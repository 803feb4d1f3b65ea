"""Formats of other articles: levels and rules as published, and what each is good for."""

import math
from itertools import pairwise

import pytest
import torch

from kvant.golden.formats.base import nearest
from kvant.golden.formats.baselines import ANT_MAGNITUDES, FLINT4, INT2_ASYMMETRIC, INT4, INT8_ASYMMETRIC, POT4
from kvant.golden.formats.bitmod import BITMOD, SPECIAL_VALUES
from kvant.golden.formats.coarse import Coarse
from kvant.golden.formats.dictionaries import centroids
from kvant.golden.formats.gobo import GOBO, GOBO3, outliers
from kvant.golden.formats.mant import FORMATS, MANT, MANT_BISECTION, MANT_OUTLIERS
from kvant.golden.formats.mant_bisection import MantBisection
from kvant.golden.formats.mokey import LEVELS, MAGNITUDES, MOKEY, MOKEY_TENSOR
from kvant.golden.formats.olive import ABFLOAT_MAGNITUDES, OLIVE
from kvant.golden.linear.objective import diagonal_moment
from kvant.golden.linear.search import quantize_weights
from kvant.golden.models import slice as model_slice


def gaussian(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flint_magnitudes(bits: int) -> list[int]:
    """Values of unsigned flint by its decoder (ANT, section IV-B): the place of the first one is the exponent.

    With a leading zero the rest is read as it stands, a float whose mantissa shrinks as the exponent grows; with a
    leading one the number of zeros behind it counts the exponent upwards.
    """
    values = []
    for code in range(1 << bits):
        if code < 1 << (bits - 1):
            values.append(code)
            continue
        rest = code - (1 << (bits - 1))
        width = bits - 1
        if rest == 0:
            values.append(1 << (2 * width))
            continue
        zeros = width - rest.bit_length()
        mantissa_bits = width - zeros - 1
        mantissa = rest - (1 << mantissa_bits)
        values.append((1 << (width + zeros)) + (mantissa << (width + zeros - mantissa_bits)))
    return sorted(values)


def test_flint_levels_follow_from_its_decoder():
    assert flint_magnitudes(4) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32, 64]  # the article's table
    assert flint_magnitudes(3) == list(ANT_MAGNITUDES["flint"])


@pytest.mark.parametrize(("format_", "name"), [(POT4, "pot"), (FLINT4, "flint")])
def test_types_of_ant_alone_hold_their_levels(format_, name):
    m = torch.tensor(ANT_MAGNITUDES[name], dtype=torch.float32)
    group = torch.cat([m, -m])[None]
    assert torch.equal(format_.quantize(group, 16).values, group)


def test_asymmetric_integers_of_any_width_span_minimum_to_maximum():
    assert torch.equal(
        INT2_ASYMMETRIC.quantize(torch.tensor([[5.0, 6, 7, 8]]), 4).values, torch.tensor([[5.0, 6, 7, 8]])
    )
    w = torch.arange(-100.0, 156.0)[None]
    assert torch.equal(INT8_ASYMMETRIC.quantize(w, 256).values, w)


def test_one_scale_covers_a_row_or_a_tensor():
    w = torch.tensor([[7.0, 1, 0.4, -3], [70, 10, 4, -30]])
    by_row, by_tensor = (Coarse(INT4, whole).quantize(w, 2).values for whole in ("channel", "tensor"))
    assert by_row.tolist() == [[7, 1, 0, -3], [70, 10, 0, -30]]
    assert by_tensor.tolist() == [[10, 0, 0, 0], [70, 10, 0, -30]]


def test_type_is_chosen_for_what_shares_a_scale():
    pot = [0.0, 1, 2, 4, 8, 16, 32, 64]
    w = torch.tensor([pot, [0.0, 1, 2, 3, 4, 5, 6, 7]])
    assert torch.equal(FORMATS["ant_channel"].quantize(w, 8).values, w)
    assert not torch.equal(FORMATS["ant_tensor"].quantize(w, 8).values, w)


@pytest.mark.parametrize("name", ["int4", "ant", "olive"])
def test_finer_scales_lose_less(name):
    w = gaussian(0, 32, 256) * (1 + 3 * gaussian(1, 32, 1).abs())
    losses = [FORMATS[n].quantize(w, 64).loss for n in (name, f"{name}_channel", f"{name}_tensor")]
    assert losses == sorted(losses)


def test_abfloat_is_the_float_right_above_the_integers():
    values = sorted((2 + m) << (e + 2) for e in range(4) for m in range(2))
    assert values == [8, *ABFLOAT_MAGNITUDES]


def test_outlier_takes_its_victims_code():
    w = torch.tensor([[1.0, -2, 3, 0, -1, 96, 2, 1, 24, 16, 0, -7, 5, 16, -12, -64]])
    stored = OLIVE.candidates(w, (1.0,))
    # at a scale of 1, which no candidate has to have: 7 is the reach
    scaled = [approximate(w) for approximate in stored]
    reach = (w.mean().abs() + 3 * w.std(correction=0)).item()
    assert all(torch.isfinite(x).all() for x in scaled)
    u = w / (reach / 7)
    best = scaled[0] / (reach / 7)
    for j in range(0, 16, 2):
        pair, kept = u[0, j : j + 2], best[0, j : j + 2]
        if pair.abs().max() > 9.5:
            larger = int(pair.abs().argmax())
            assert abs(kept[larger]) >= 11.9 and kept[1 - larger] == 0
        else:
            assert (kept - pair.clamp(-7, 7)).abs().max() <= 2.5


def exact_olive(u: torch.Tensor) -> torch.Tensor:
    """Pairs f32 [n, 2] in steps of the integers, by the rule, one at a time."""
    levels = torch.tensor([0.0, *range(1, 8), *ABFLOAT_MAGNITUDES])
    out = torch.zeros_like(u)
    for row, pair in enumerate(u.tolist()):
        level = [float(levels[(levels - abs(v)).abs().argmin()]) for v in pair]
        if max(level) > 7:
            larger = 0 if abs(pair[0]) >= abs(pair[1]) else 1
            out[row, larger] = math.copysign(level[larger], pair[larger])
        else:
            out[row] = torch.tensor([math.copysign(v, x) for v, x in zip(level, pair, strict=True)])
    return out


def test_pairs_follow_the_rule_one_by_one():
    w = gaussian(3, 1, 256) * torch.where(gaussian(4, 1, 256) > 1.8, 6.0, 1.0)
    w[0, 40:42] = torch.tensor([30.0, -40])  # two outliers, the second is the larger
    w[0, 42:44] = torch.tensor([-35.0, 35])  # two alike: the first stays
    stored = OLIVE.candidates(w, (1.0,))[0](w)
    assert (stored[0, 40:44] != 0).tolist() == [False, True, True, False]
    scale = ((w.mean().abs() + 3 * w.std(correction=0)) / 7).half().float()
    expected = exact_olive((w / scale).view(-1, 2)).view(1, -1) * scale
    assert (w.abs() / scale > 9.5).any()
    assert torch.equal(stored, expected)


def test_outliers_survive_where_integers_lose_all_others():
    w = gaussian(5, 8, 64) * 0.1
    w[:, 10] = 8.0
    small = torch.ones(64, dtype=torch.bool)
    small[10:12] = False  # the outlier and its victim
    lost = [(f.quantize(w, 64).values - w)[:, small].square().sum() for f in (OLIVE, INT4)]
    assert lost[0] < 0.8 * lost[1]
    assert OLIVE.quantize(w, 64).loss < INT4.quantize(w, 64).loss


def test_odd_last_element_is_its_own_pair():
    w = torch.tensor([[0.1, -0.1, 5.0]])
    assert OLIVE.quantize(w, 3).values[0, 2] == pytest.approx(5, rel=0.15)


def test_gobo_keeps_improbable_weights_and_clusters_the_rest():
    w = gaussian(6, 64, 128) * 0.02
    w[3, 5] = 0.5
    density = -0.5 * ((0.5 - w.mean()) / w.std(correction=0)) ** 2 - w.std(correction=0).log() - 0.919
    assert density < -4 and outliers(w)[3, 5]
    assert outliers(w).float().mean() < 0.001  # "typically 99.9 % of the weights" are no outliers
    for format_, levels in ((GOBO, 16), (GOBO3, 8)):
        stored = format_.quantize(w)
        assert stored.values[3, 5] == 0.5
        rest = stored.values[~outliers(w)]
        assert len(rest.unique()) == levels
        bits = math.log2(levels) + (int(outliers(w).sum()) * 64 + 32 * levels) / w.numel()
        assert stored.bits == pytest.approx(bits)
    assert GOBO.quantize(w).loss < FORMATS["int4_tensor"].quantize(w).loss


def test_centroids_are_means_and_refinement_never_loses():
    x = gaussian(7, 5000)
    start = torch.stack([part.mean() for part in x.sort().values.tensor_split(16)])
    found = centroids(x, 16, 50)
    assert (x - nearest(x, found)).abs().mean() < (x - nearest(x, start)).abs().mean()
    assert torch.equal(centroids(torch.tensor([2.0, 2, 5, 5]), 2, 9), torch.tensor([2.0, 5]))
    assert centroids(torch.tensor([3.0]), 4, 9).unique().tolist() == [3]
    assert centroids(torch.zeros(0), 4, 9).tolist() == [0] * 4


def test_golden_dictionary_is_the_published_curve():
    assert len(LEVELS) == 16 and list(LEVELS) == sorted(LEVELS)
    assert MAGNITUDES[0] == pytest.approx(0.023) and MAGNITUDES[7] == pytest.approx(1.179**7 - 0.977)
    ratios = [(b + 0.977) / (a + 0.977) for a, b in pairwise(MAGNITUDES)]
    assert ratios == pytest.approx([1.179] * 7)


def test_mokey_suits_gaussians_and_has_a_dictionary_for_the_rest():
    w = gaussian(8, 64, 256) * 0.02 + 0.005
    assert MOKEY_TENSOR.quantize(w).loss < FORMATS["int4_tensor"].quantize(w).loss
    w[0, :4] = torch.tensor([1.0, -1.5, 2.0, 3.0])
    stored = MOKEY_TENSOR.quantize(w)
    assert (stored.values[0, :4] - w[0, :4]).abs().max() < 0.3
    assert stored.bits > 4
    constant = torch.full((2, 8), 0.3)
    assert torch.equal(MOKEY.quantize(constant, 8).values, constant.half().float())
    assert torch.equal(MOKEY_TENSOR.quantize(constant).values, constant)


@pytest.mark.parametrize("special", SPECIAL_VALUES)
def test_special_value_fills_the_second_zero(special):
    group = torch.tensor([[-6.0, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6, special]])
    assert torch.equal(BITMOD.quantize(group, 16).values, group)


def test_special_values_never_lose_to_the_plain_float():
    w = gaussian(9, 64, 128)
    plain = FORMATS["nf4"].quantize(w, 64)
    assert BITMOD.quantize(w, 64).loss < plain.loss * 1.2
    one_table = type(BITMOD)("e2m1", [BITMOD._tables[0].tolist()])
    assert BITMOD.quantize(w, 64).loss < one_table.quantize(w, 64).loss


def test_evident_outlier_groups_stay_int8():
    w = gaussian(10, 16, 128)
    w[2, 70] = 40.0
    stored, plain = MANT_OUTLIERS.quantize(w, 64), MANT.quantize(w, 64)
    assert stored.loss < plain.loss
    assert stored.bits == pytest.approx(4.375 + 8 * 64 / w.numel())
    assert torch.equal(stored.values[:2], plain.values[:2])


def test_bisection_ends_at_a_coefficient_of_the_table_and_never_beats_the_full_search():
    w = gaussian(11, 32, 128) * gaussian(12, 32, 1).exp()
    full, bisected = MANT.quantize(w, 64), MANT_BISECTION.quantize(w, 64)
    assert full.loss <= bisected.loss < 1.1 * full.loss
    one = MantBisection([30]).quantize(w, 64)
    assert torch.equal(one.values, quantize_weights(w, 64, [30]).dequantize())


@pytest.mark.parametrize("tile", ["L5_q_proj", "L20_down_proj"])
def test_bisection_on_real_weights_ends_near_the_full_search(tile):
    real = model_slice.load().tiles[tile]
    w = torch.from_numpy(real.weight.copy())
    moment = diagonal_moment(torch.from_numpy(real.activations.astype("float32")))
    for options in ({}, {"second_moment": moment}):
        full, bisected = MANT.quantize(w, 64, **options).loss, MANT_BISECTION.quantize(w, 64, **options).loss
        assert full <= bisected * (1 + 1e-6) and bisected < 1.5 * full
