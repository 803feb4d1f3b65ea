import re

import pytest
from amaranth.build import Attrs, Clock, Pins, PinsN, Resource, Subsignal
from amaranth.vendor import LatticeECP5Platform
from served_components import Adder

from kvant.fpga import boards
from kvant.fpga.board_top import board_design
from kvant.fpga.boards import BOARDS, Board, default_mhz, find_board, make_platform, with_uart
from kvant.fpga.errors import TargetError

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

WITHOUT_UART = {"icebreaker-bitsy", "tinyfpga-bx"}


def design(name, *, mhz=None, baud=115_200, uart=None):
    board = find_board(name)
    if uart:
        board = with_uart(board, uart)
    mhz = mhz or default_mhz(make_platform(board), board)
    return board_design(Adder(), board, mhz=mhz, baud=baud, held=("a.user",), name="adder")


@pytest.mark.parametrize("name", sorted(set(BOARDS) - WITHOUT_UART))
def test_every_board_elaborates_with_constrained_pins_and_clock(name):
    made, top = design(name)
    assert re.search(r"uart_0__rx", made.constraints)
    assert re.search(r"uart_0__tx", made.constraints)
    assert re.search(r"FREQUENCY PORT|set_frequency", made.constraints) or top.board.name == "upduino"
    assert made.clocks == {"core_clk": pytest.approx(top.clock.frequency / 1e6)}


@pytest.mark.parametrize("name", sorted(WITHOUT_UART))
def test_a_board_without_uart_is_refused_by_name(name):
    with pytest.raises(TargetError, match=rf"board {name}: has no UART, .* --uart RX,TX"):
        design(name)


def test_a_board_without_uart_takes_named_pins():
    made, _ = design("tinyfpga-bx", uart="a2,A1")
    assert "set_io kvant_uart_0__rx__io A2" in made.constraints
    assert "set_io kvant_uart_0__tx__io A1" in made.constraints


@pytest.mark.parametrize("text", ["", "A1", "A1,A1", "A1,", "A-1,B2", "1,2,3"])
def test_uart_pins_that_are_not_two_pins_are_refused(text):
    with pytest.raises(TargetError, match=r"uart = .*two package pins RX,TX"):
        with_uart(find_board("ulx3s"), text)


def test_default_clock_is_the_boards_own_or_a_pll_on_ecp5():
    names = ("ulx3s", "ecpix5", "icebreaker", "upduino")
    mhz = {name: default_mhz(make_platform(BOARDS[name]), BOARDS[name]) for name in names}
    assert mhz == {"ulx3s": 100.0, "ecpix5": 100.0, "icebreaker": 12.0, "upduino": 12.0}


@pytest.mark.parametrize(
    ("name", "cell"), [("ulx3s", "EHXPLLL"), ("icebreaker", "SB_PLL40_PAD"), ("upduino", "SB_PLL40_CORE")]
)
def test_another_clock_than_the_boards_comes_from_the_pll(name, cell):
    made, top = design(name, mhz=30, baud=1_000_000)
    assert f"\\{cell}" in made.rtlil
    assert top.clock.frequency == pytest.approx(30e6, rel=0.01)


def test_the_internal_oscillator_divides_without_a_pll():
    made, top = design("upduino", mhz=24)
    assert "SB_PLL40" not in made.rtlil
    assert re.search(r'CLKHF_DIV "0b01"', made.rtlil)
    assert top.clock.frequency == 24e6


def test_the_boards_own_clock_needs_no_pll():
    made, top = design("ulx3s", mhz=25)
    assert "EHXPLLL" not in made.rtlil
    assert top.clock.frequency == 25e6


def test_a_led_that_shares_a_pin_with_the_uart_is_left_out():
    _, top = design("colorlight-5a75b")
    assert top.missing == ["LED for busy"]


def test_unknown_board_lists_the_known_ones():
    with pytest.raises(
        TargetError, match=r"board = 'ulx3': unknown \(did you mean ulx3s\?\); legal: ulx3s, .*icebreaker"
    ):
        find_board("ulx3")


class _TestPlatform(LatticeECP5Platform):
    device, package, speed = "LFE5U-25F", "BG256", "6"
    default_clk = None
    default_rst = None
    connectors = ()
    clock = Resource("clk", 0, Pins("P6", dir="i"), Clock(50e6), Attrs(IO_TYPE="LVCMOS33"))
    uart = Resource("uart", 0, Subsignal("rx", Pins("A1", dir="i")), Subsignal("tx", PinsN("A2", dir="o")))
    resources = (clock, uart)


class _NoClock(_TestPlatform):
    pass


class _Inverting(_TestPlatform):
    default_clk, default_rst = "clk", "rst"
    resources = (
        *_TestPlatform.resources,
        Resource("rst", 0, PinsN("B1", dir="i")),
        Resource("led", 1, PinsN("C1", dir="o")),
    )


def use(monkeypatch, platform):
    monkeypatch.setattr(boards, "make_platform", lambda board: platform())
    monkeypatch.setattr("kvant.fpga.board_top.make_platform", lambda board: platform())
    return Board("mine", "mine", platform.__name__)


def test_a_board_without_default_clock_is_refused_by_name():
    with pytest.raises(TargetError, match="board mine: has no default clock"):
        default_mhz(_NoClock(), Board("mine", "mine", "_NoClock"))


def test_inverted_pins_are_inverted_once_and_leds_may_start_at_one(monkeypatch):
    board = use(monkeypatch, _Inverting)
    made, top = board_design(Adder(), board, mhz=50, baud=115_200, held=("a.user",), name="adder")
    assert top.missing == []
    assert 'LOCATE COMP "led_1__io" SITE "C1"' in made.constraints
    # Each buffer is an exclusive or with whether its pin is inverted.
    for buffer, inverted in {"tx_buffer": True, "busy_buffer": True, "reset_buffer": True, "rx_buffer": False}.items():
        module = re.search(rf"^module \\top\S*\.{buffer}$.*?^end$", made.rtlil, re.MULTILINE | re.DOTALL)[0]
        assert (r"connect \B 1'1" in module) == inverted, buffer
