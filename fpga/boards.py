"""Boards by the names of ``--board``, what a top needs of them, and what to say when it is missing."""

import difflib
import importlib
from dataclasses import dataclass, replace

from amaranth.build import Attrs, Pins, Resource, ResourceError, Subsignal
from amaranth.lib import io

from kvant.fpga.devices import Device, device_of_platform
from kvant.fpga.errors import TargetError

OSCILLATOR_MHZ = 12.0
"""Clock on iCE40 boards that have the internal oscillator only, which makes 48, 24, 12 or 6 MHz."""

PREFERRED_MHZ = 100.0
"""Clock on ECP5 boards whose oscillator is slower: made by the PLL."""


@dataclass(frozen=True)
class Board:
    """A board.

    Attributes
    ----------
    name : str
        As in ``--board``.
    module, platform : str
        Module and class of amaranth-boards.
    preset : str or None
        Configuration that fits it.
    uart : tuple of str or None
        Package pins (receive, transmit) of a serial port on headers, where the board itself has none.
    note : str
        What its user has to know.
    """

    name: str
    module: str
    platform: str
    preset: str | None = None
    uart: tuple[str, str] | None = None
    note: str = ""


BOARDS: dict[str, Board] = {
    board.name: board
    for board in (
        Board("ulx3s", "ulx3s", "ULX3S_85F_Platform", "ulx3s-85f"),
        Board("ulx3s-12f", "ulx3s", "ULX3S_12F_Platform", "ulx3s-25f"),
        Board("ulx3s-25f", "ulx3s", "ULX3S_25F_Platform", "ulx3s-25f"),
        Board("ulx3s-45f", "ulx3s", "ULX3S_45F_Platform", "ulx3s-25f"),
        Board("ulx3s-85f", "ulx3s", "ULX3S_85F_Platform", "ulx3s-85f"),
        Board(
            "orangecrab",
            "orangecrab_r0_2",
            "OrangeCrabR0_2_25FPlatform",
            "orangecrab-25f",
            ("N17", "M18"),
            "serial port on header pins 0 (receive) and 1 (transmit)",
        ),
        Board(
            "orangecrab-85f",
            "orangecrab_r0_2",
            "OrangeCrabR0_2_85FPlatform",
            "ulx3s-85f",
            ("N17", "M18"),
            "serial port on header pins 0 (receive) and 1 (transmit)",
        ),
        Board("ecpix5", "ecpix5", "ECPIX585Platform", "ulx3s-85f"),
        Board("ecpix5-45f", "ecpix5", "ECPIX545Platform", "ulx3s-25f"),
        Board("icesugar-pro", "icesugar_pro", "ICESugarProPlatform", "ulx3s-25f"),
        Board(
            "colorlight-5a75b",
            "colorlight_5a75b_r7_0",
            "Colorlight_5A75B_R70Platform",
            "ulx3s-25f",
            note="the serial port takes the pin of the LED and that of the button",
        ),
        Board("versa", "versa_ecp5", "VersaECP5Platform", "ulx3s-25f"),
        Board("ecp5-5g-evn", "ecp5_5g_evn", "ECP55GEVNPlatform", "ulx3s-85f"),
        Board("icebreaker", "icebreaker", "ICEBreakerPlatform", "icebreaker"),
        Board("icesugar", "icesugar", "ICESugarPlatform", "icebreaker"),
        Board("icebreaker-bitsy", "icebreaker_bitsy", "ICEBreakerBitsyPlatform", "icebreaker"),
        Board(
            "upduino",
            "upduino_v3",
            "UpduinoV3Platform",
            "icebreaker",
            ("28", "38"),
            "serial port on header pins gpio_28 (receive) and gpio_38 (transmit); the internal oscillator is only "
            "good to 10 %, a host may have to adapt its bit rate",
        ),
        Board("hx8k-evn", "ice40_hx8k_b_evn", "ICE40HX8KBEVNPlatform", "icebreaker"),
        Board("tinyfpga-bx", "tinyfpga_bx", "TinyFPGABXPlatform", "icebreaker"),
    )
}
"""Boards of ``--board``."""


def find_board(name: str) -> Board:
    """The board of that name (any case, ``_`` for ``-``).

    Raises
    ------
    TargetError
        If there is none; the text lists all.
    """
    key = name.strip().lower().replace("_", "-")
    if key not in BOARDS:
        near = difflib.get_close_matches(key, BOARDS, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise TargetError(f"board = {name!r}: unknown{hint}; legal: {', '.join(BOARDS)}")
    return BOARDS[key]


def with_uart(board: Board, pins: str) -> Board:
    """The board with its serial port on these package pins, ``RX,TX``.

    Raises
    ------
    TargetError
        If the text is not two different pins.
    """
    receive, _, transmit = (part.strip() for part in pins.partition(","))
    if not receive.isalnum() or not transmit.isalnum() or receive == transmit:
        raise TargetError(f"uart = {pins!r}: legal are two package pins RX,TX, for instance N17,M18")
    return replace(board, uart=(receive.upper(), transmit.upper()))


def make_platform(board: Board):
    """A fresh platform of amaranth-boards; each can be prepared once."""
    module = importlib.import_module(f"amaranth_boards.{board.module}")
    return getattr(module, board.platform)()


def default_mhz(platform, board: Board) -> float:
    """The board's own clock; on ECP5 at least `PREFERRED_MHZ`, from an iCE40's own oscillator `OSCILLATOR_MHZ`.

    Raises
    ------
    TargetError
        If the board has no default clock.
    """
    if platform.default_clk is None:
        raise TargetError(f"board {board.name}: has no default clock, which the top needs")
    if platform.default_clk == "SB_HFOSC":
        return OSCILLATOR_MHZ
    own = platform.default_clk_frequency / 1e6
    return max(own, PREFERRED_MHZ) if platform.device.startswith("LFE5") else own


def device_of(platform, mhz: float) -> Device:
    """The device on the board, see `device_of_platform`."""
    return device_of_platform(platform, mhz)


def request_uart(platform, board: Board):
    """Ports ``rx`` and ``tx`` of the board's serial port.

    Raises
    ------
    TargetError
        If it has none, or its pins are taken.
    """
    if board.uart is not None:
        receive, transmit = board.uart
        attributes = Attrs(IO_TYPE="LVCMOS33") if platform.device.startswith("LFE5") else Attrs(IO_STANDARD="SB_LVCMOS")
        platform.add_resources(
            [
                Resource(
                    "kvant_uart",
                    0,
                    Subsignal("rx", Pins(receive, dir="i")),
                    Subsignal("tx", Pins(transmit, dir="o")),
                    attributes,
                )
            ]
        )
        name = "kvant_uart"
    else:
        name = "uart"
        if (name, 0) not in platform.resources:
            raise TargetError(
                f"board {board.name}: has no UART, which the top needs; name two package pins with --uart RX,TX"
            )
    try:
        group = platform.request(name, 0, dir=_raw(platform.lookup(name, 0)))
    except ResourceError as error:
        raise TargetError(f"board {board.name}: its UART cannot be used: {error}") from None
    return group.rx, group.tx


def request_leds(platform) -> list:
    """Up to two single LEDs, or green and red of an RGB LED; fewer where the board has fewer or they share a pin."""
    ports = []
    for name, number in sorted(key for key in platform.resources if key[0] == "led"):
        try:
            ports.append(platform.request(name, number, dir="-"))
        except ResourceError:
            continue  # the pin is in use, or on an extension board
        if len(ports) == 2:
            return ports
    if not ports and ("rgb_led", 0) in platform.resources:
        try:
            colours = platform.request("rgb_led", 0, dir=_raw(platform.lookup("rgb_led", 0)))
        except ResourceError:
            return ports
        ports = [colours.g, colours.r]
    return ports


def _raw(resource):
    """The direction argument that asks for bare ports of every part of *resource*."""
    return {part.name: "-" for part in resource.ios} if isinstance(resource.ios[0], Subsignal) else "-"


def buffer(m, name: str, direction: str, port):
    """An input or output buffer on *port*, inverted where the board inverts."""
    m.submodules[name] = cell = io.Buffer(direction, port)
    return cell
