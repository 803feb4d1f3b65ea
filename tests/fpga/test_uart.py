import pytest

from kvant.fpga.errors import TargetError
from kvant.fpga.uart import divisor


@pytest.mark.parametrize(
    ("frequency", "baud", "cycles"),
    [
        (12e6, 1_000_000, 12),
        (12e6, 115_200, 104),
        (100e6, 1_000_000, 100),
        (100e6, 3_000_000, 33),
        (48e6, 12_000_000, 4),
    ],
)
def test_divisor_is_the_nearest_number_of_clock_cycles(frequency, baud, cycles):
    assert divisor(frequency, baud) == cycles


@pytest.mark.parametrize(("frequency", "baud"), [(12e6, 6_000_000), (12e6, 2_300_000), (100e6, 99_000_000)])
def test_a_rate_that_the_clock_cannot_make_is_refused(frequency, baud):
    with pytest.raises(TargetError, match=rf"baud = {baud}: a clock of {frequency / 1e6:g} MHz .* for instance \d+"):
        divisor(frequency, baud)


@pytest.mark.parametrize("baud", [0, -1, 299])
def test_a_rate_below_300_is_refused(baud):
    with pytest.raises(TargetError, match=f"baud = {baud}: legal is an integer from 300"):
        divisor(12e6, baud)
