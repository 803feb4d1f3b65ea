import pytest

from kvant.fpga.clock import ECP5_FEEDBACK_OUTPUT, ecp5_pll, ice40_pll
from kvant.fpga.errors import TargetError


@pytest.mark.parametrize("source", [12e6, 25e6, 30e6, 48e6, 100e6])
@pytest.mark.parametrize("wanted", [10e6, 50e6, 75e6, 100e6, 120e6, 125e6, 200e6, 400e6])
def test_ecp5_dividers_stay_within_the_limits_of_the_data_sheet(source, wanted):
    pll = ecp5_pll(source, wanted)
    assert pll.frequency == pytest.approx(wanted, rel=0.01)
    assert pll.frequency == pytest.approx(source / pll.reference * pll.feedback / pll.output)
    assert 3.125e6 <= source / pll.reference <= 400e6
    assert 400e6 <= pll.oscillator <= 800e6
    assert pll.oscillator == pytest.approx(source / pll.reference * pll.feedback)
    assert pll.feedback % ECP5_FEEDBACK_OUTPUT == 0
    assert 1 <= pll.reference <= 128
    assert 1 <= pll.feedback // ECP5_FEEDBACK_OUTPUT <= 80
    assert 1 <= pll.output <= 128


@pytest.mark.parametrize("source", [12e6, 16e6, 48e6, 100e6])
@pytest.mark.parametrize("wanted", [16e6, 18e6, 24e6, 30e6, 48e6, 96e6])
def test_ice40_dividers_stay_within_the_limits_of_the_data_sheet(source, wanted):
    pll = ice40_pll(source, wanted)
    assert pll.frequency == pytest.approx(wanted, rel=0.01)
    assert 10e6 <= source / pll.reference <= 133e6
    assert 533e6 <= source / pll.reference * pll.feedback <= 1066e6
    assert pll.frequency == pytest.approx(source / pll.reference * pll.feedback / 2**pll.output)
    assert 1 <= pll.reference <= 16
    assert 1 <= pll.feedback <= 128
    assert 1 <= pll.output <= 6


def test_an_exact_setting_is_found_when_there_is_one():
    assert ecp5_pll(25e6, 100e6).frequency == 100e6
    assert ecp5_pll(48e6, 100e6).frequency == 100e6
    assert ecp5_pll(48e6, 50e6).frequency == 50e6
    assert ice40_pll(12e6, 24e6).frequency == 24e6


@pytest.mark.parametrize(
    ("make", "source", "wanted", "legal"),
    [
        (ecp5_pll, 25e6, 2e6, "3.125 to 400 MHz from 25 MHz"),
        (ecp5_pll, 25e6, 500e6, "3.125 to 400 MHz from 25 MHz"),
        (ice40_pll, 12e6, 14e6, "16 to 275 MHz from 12 MHz"),
        (ice40_pll, 12e6, 300e6, "16 to 275 MHz from 12 MHz"),
    ],
)
def test_a_frequency_out_of_range_is_refused_with_the_range(make, source, wanted, legal):
    with pytest.raises(TargetError, match=f"freq = {wanted / 1e6:g}: the PLL makes {legal}"):
        make(source, wanted)
