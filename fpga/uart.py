"""Serial port: 8 data bits, no parity, 1 stop bit, least significant bit first."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.fpga.errors import TargetError

LEAST_DIVISOR = 4
"""Fewest clock cycles of a bit: the receiver has to find its middle."""

BAUD_ERROR = 0.02
"""Largest relative error of the bit rate: over the 9.5 bits of a byte the sampling point moves by a fifth of a bit."""


def divisor(frequency: float, baud: int) -> int:
    """Clock cycles of a bit.

    Parameters
    ----------
    frequency : float
        Clock in Hz.
    baud : int
        Bits per second.

    Raises
    ------
    TargetError
        If the clock cannot make this rate within `BAUD_ERROR`.
    """
    if baud < 300:
        raise TargetError(f"baud = {baud}: legal is an integer from 300")
    cycles = round(frequency / baud)
    if cycles < LEAST_DIVISOR or abs(frequency / cycles / baud - 1) > BAUD_ERROR:
        most = int(frequency / LEAST_DIVISOR)
        raise TargetError(
            f"baud = {baud}: a clock of {frequency / 1e6:.6g} MHz makes it only with more than "
            f"{BAUD_ERROR:.0%} error; legal are rates up to {most} that divide the clock nearly evenly, "
            f"for instance {int(frequency / max(cycles, LEAST_DIVISOR))}"
        )
    return cycles


class UartReceiver(wiring.Component):
    """Receives bytes.

    Parameters
    ----------
    divisor : int
        Clock cycles of a bit, at least `LEAST_DIVISOR`.

    Members
    -------
    rx : in
        The line, asynchronous, idle high; the caller synchronises it.
    data, valid : out
        A byte, for one cycle; there is no back-pressure.
    framing : out
        One cycle: a stop bit was missing, the byte is dropped.
    line_break : out
        One cycle: the line was low for a whole frame, stop bit included.
    """

    def __init__(self, divisor: int):
        self.divisor = divisor
        super().__init__(
            {
                "rx": In(1, init=1),
                "data": Out(8),
                "valid": Out(1),
                "framing": Out(1),
                "line_break": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        before = Signal()  # a line that is low at reset has to rise first
        timer = Signal(range(self.divisor))
        bits = Signal(range(10))
        shift = Signal(9)  # start bit and data
        m.d.sync += [before.eq(self.rx), self.valid.eq(0), self.framing.eq(0), self.line_break.eq(0)]
        m.d.comb += self.data.eq(shift[1:])
        with m.FSM():
            with m.State("IDLE"):
                m.d.sync += [timer.eq(self.divisor // 2 - 1), bits.eq(0)]
                with m.If(before & ~self.rx):
                    m.next = "BITS"
            with m.State("BITS"):
                m.d.sync += timer.eq(timer - 1)
                with m.If(timer == 0):
                    m.d.sync += timer.eq(self.divisor - 1)
                    with m.If(bits == 9):
                        m.next = "IDLE"
                        m.d.sync += [
                            self.valid.eq(self.rx),
                            self.framing.eq(~self.rx),
                            self.line_break.eq(~self.rx & (shift == 0)),
                        ]
                    with m.Else():
                        m.d.sync += [shift.eq(Cat(shift[1:], self.rx)), bits.eq(bits + 1)]
                        with m.If((bits == 0) & self.rx):  # a glitch, no start bit
                            m.next = "IDLE"
        return m


class UartTransmitter(wiring.Component):
    """Sends bytes, back to back when they come in time.

    Parameters
    ----------
    divisor : int
        Clock cycles of a bit.

    Members
    -------
    i : in stream
        Bytes.
    tx : out
        The line, idle high.
    """

    def __init__(self, divisor: int):
        self.divisor = divisor
        super().__init__({"i": In(stream.Signature(8)), "tx": Out(1, init=1)})

    def elaborate(self, platform):
        m = Module()
        timer = Signal(range(self.divisor))
        shift = Signal(9, init=0x1FF)  # data and stop bit
        bits = Signal(range(11))
        m.d.comb += self.i.ready.eq(bits == 0)
        with m.If(bits == 0):
            with m.If(self.i.valid):
                m.d.sync += [self.tx.eq(0), shift.eq(Cat(self.i.payload, 1)), bits.eq(10), timer.eq(self.divisor - 1)]
        with m.Elif(timer == 0):
            m.d.sync += [self.tx.eq(shift[0]), shift.eq(Cat(shift[1:], 1))]
            m.d.sync += [bits.eq(bits - 1), timer.eq(self.divisor - 1)]
        with m.Else():
            m.d.sync += timer.eq(timer - 1)
        return m
