"""Golden sums of groups against Python's integers."""

from pathlib import Path

import numpy as np
import pytest

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.choice import group_statistics
from kvant.golden.kvcache.variance import group_sums

KNOWN_ANSWER = Path(__file__).parents[2] / "known_answers" / "variance.npz"

SEED = 28


def by_integers(group):
    """(sum, sumsq, maximum, minimum, absmax, nvar) of one group."""
    q = [int(value) for value in group]
    total, squares = sum(q), sum(value * value for value in q)
    return total, squares, max(q), min(q), max(map(abs, q)), len(q) * squares - total * total


def test_known_answers():
    with np.load(KNOWN_ANSWER) as archive:
        sums = group_sums(archive["in_q"])
        for name in ("sum", "sumsq", "absmax", "nvar"):
            np.testing.assert_array_equal(getattr(sums, name).numpy(), archive[f"out_{name}"], err_msg=name)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 100, 1000, 65536])
def test_case_28_large_means_are_exact_and_constant_groups_have_no_variance(n):
    rng = np.random.default_rng(SEED)
    constant = [np.full(n, value, np.int8) for value in (-128, -127, -1, 0, 1, 127)]
    almost = [
        np.concatenate([[one], np.full(n - 1, value)]).astype(np.int8) for value, one in ((127, 126), (-128, -127))
    ]
    groups = [
        *constant,
        *almost,
        rng.choice([-128, 127], n).astype(np.int8),
        rng.integers(-128, 128, n).astype(np.int8),
    ]
    sums = group_sums(np.stack(groups))
    assert list(zip(*(array.tolist() for array in sums), strict=True)) == [by_integers(group) for group in groups]
    assert not sums.nvar[: len(constant)].any()
    assert sums.nvar[6:8].tolist() == [n - 1] * 2, "one element that differs by 1: n - 1"


def test_the_choice_of_a_coefficient_uses_the_same_sums():
    q = np.random.default_rng(SEED).integers(-127, 128, (3, 5, 64)).astype(np.int8)
    sums, statistics = group_sums(q), group_statistics(q)
    assert sums.nvar.shape == (3, 5)
    assert (sums.nvar == statistics.variance).all() and (sums.absmax == statistics.peak).all()


@pytest.mark.parametrize(
    ("q", "words"),
    [
        (np.zeros((2, 0), np.int8), "at least one element"),
        (np.zeros((2, 65537), np.int8), "1 to 65536 elements"),
        (np.zeros((2, 4), np.int16), "int8"),
        (np.array(3, np.int8), "1 to 65536 elements"),
    ],
)
def test_groups_that_are_none_are_refused(q, words):
    with pytest.raises(TensorError, match=rf"^q: .*{words}"):
        group_sums(q)
