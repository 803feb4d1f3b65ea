"""A board that serves a block: any component behind the board's serial port."""

from amaranth.hdl import ClockDomain, Elaboratable, Module, Signal
from amaranth.lib.cdc import FFSynchronizer

from kvant.fpga.boards import Board, buffer, device_of, make_platform, request_leds, request_uart
from kvant.fpga.bridge import SerialBridge
from kvant.fpga.clock import CLOCK, ClockGenerator
from kvant.fpga.flow import Design
from kvant.fpga.uart import divisor


class BoardTop(Elaboratable):
    """Any component behind the serial port of any board.

    Two LEDs show the component's outputs ``busy`` and ``error``, where both sides have them.

    Parameters
    ----------
    component : wiring.Component
        What is served; see `SerialBridge`.
    platform : amaranth.build.Platform
        The board.
    board : Board
        Its entry in the catalogue.
    frequency : float
        Clock in Hz.
    baud : int
        Bits per second of the serial port.
    held : collection of str
        See `kvant.fpga.link.Layout`.

    Attributes
    ----------
    clock : ClockGenerator
        Holds the frequency that is really made.
    missing : list of str
        What the board lacks that the top can do without.

    Raises
    ------
    TargetError
        At construction: for a clock or a bit rate that cannot be made. At elaboration: for a missing UART.
    """

    def __init__(self, component, platform, board: Board, *, frequency: float, baud: int, held=()):
        self.component = component
        self.board = board
        self.clock = ClockGenerator(platform, frequency)
        self.divisor = divisor(self.clock.frequency, baud)
        self.held = held
        self.missing: list[str] = []

    def elaborate(self, platform):
        m = Module()
        m.domains.sync = ClockDomain()
        m.submodules.clock = self.clock
        m.submodules.bridge = bridge = SerialBridge(self.component, divisor=self.divisor, held=self.held)
        receive, transmit = request_uart(platform, self.board)
        receive_pin = buffer(m, "rx_buffer", "i", receive)
        transmit_pin = buffer(m, "tx_buffer", "o", transmit)
        m.submodules.rx_synchronizer = FFSynchronizer(receive_pin.i, bridge.rx, init=1)
        m.d.comb += [transmit_pin.o.eq(bridge.tx), self.clock.restart.eq(bridge.restart)]

        lights = [name for name in ("busy", "error") if name in self.component.signature.members]
        ports = request_leds(platform)
        self.missing = [f"LED for {name}" for name in lights[len(ports) :]]
        for name, port in zip(lights, ports, strict=False):
            light = Signal(name=f"led_{name}")
            m.d.sync += light.eq(getattr(self.component, name))
            m.d.comb += buffer(m, f"{name}_buffer", "o", port).o.eq(light)
        return m


def board_design(
    component, board: Board, *, mhz: float, baud: int, held=(), name: str, parameters: dict | None = None
) -> tuple[Design, BoardTop]:
    """Design of *component* on *board*: elaborated, pins and clocks constrained, nothing built yet.

    Raises
    ------
    TargetError
        See `BoardTop`.
    """
    platform = make_platform(board)
    top = BoardTop(component, platform, board, frequency=mhz * 1e6, baud=baud, held=held)
    plan = platform.prepare(top, "top", emit_src=False)
    device = device_of(platform, mhz)
    constraints = plan.files["top.lpf" if device.family == "ecp5" else "top.pcf"]
    if isinstance(constraints, bytes):
        constraints = constraints.decode()
    rtlil = plan.files["top.il"]
    design = Design(
        name=name,
        rtlil=rtlil.decode() if isinstance(rtlil, bytes) else rtlil,
        constraints=constraints,
        clocks={CLOCK: top.clock.frequency / 1e6},
        device=device,
        target=board.name,
        parameters=parameters or {},
    )
    return design, top
