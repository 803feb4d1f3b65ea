"""Clock and reset of a board: the board's oscillator, straight or through the device's PLL."""

from dataclasses import dataclass

from amaranth.hdl import ClockDomain, ClockSignal, Const, Elaboratable, Instance, Module, ResetSignal, Signal
from amaranth.lib import io
from amaranth.lib.cdc import FFSynchronizer

from kvant.fpga.errors import TargetError

SAME = 1e-6
"""Relative difference below which a requested clock is the board's own."""

CLOCK = "core_clk"
"""Name of the clock's net, which reports look for."""

RESET_SECONDS = 20e-6
"""Time in reset after configuration: iCE40 block RAMs read zeros in the first microseconds."""

OSCILLATOR_RESET_SECONDS = 100e-6
"""The same where an internal oscillator has to settle first."""


@dataclass(frozen=True)
class Pll:
    """Dividers of a PLL, and the frequencies of its oscillator and its output in Hz.

    The oscillator runs at ``source / reference * feedback``.
    """

    reference: int
    feedback: int
    output: int
    oscillator: float
    frequency: float


ECP5_FEEDBACK_OUTPUT = 8
"""Divider of the EHXPLLL's output that only closes the loop: 50 to 100 MHz over the oscillator's range."""


def ecp5_pll(source: float, wanted: float) -> Pll:
    """Dividers of an EHXPLLL whose loop is closed through an output of its own.

    The phase detector runs at ``source / reference`` (3.125 to 400 MHz), the oscillator at ``feedback`` times that (400
    to 800 MHz; `feedback` is a multiple of `ECP5_FEEDBACK_OUTPUT`), the output at ``1 / output`` of the oscillator
    (3.125 to 400 MHz).
    Source: Lattice FPGA-DS-02012, sysCLOCK PLL timing.

    Raises
    ------
    TargetError
        If no setting comes within 1 %.
    """
    best = None
    for reference in range(1, 129):
        detector = source / reference
        if not 3.125e6 <= detector <= 400e6:
            continue
        for feedback in range(ECP5_FEEDBACK_OUTPUT, 80 * ECP5_FEEDBACK_OUTPUT + 1, ECP5_FEEDBACK_OUTPUT):
            oscillator = detector * feedback
            if not 400e6 <= oscillator <= 800e6:
                continue
            output = min(max(round(oscillator / wanted), 1), 128)
            frequency = oscillator / output
            # the nearest frequency; of equals, the oscillator nearest to the middle of its range
            key = round(abs(frequency / wanted - 1), 9), abs(oscillator - 600e6)
            if 3.125e6 <= frequency <= 400e6 and (best is None or key < best[0]):
                best = key, Pll(reference, feedback, output, oscillator, frequency)
    return _checked(best, source, wanted, "3.125 to 400 MHz")


def ice40_pll(source: float, wanted: float) -> Pll:
    """Dividers of an SB_PLL40 in simple feedback: DIVR + 1, DIVF + 1 and DIVQ (a power of two).

    The phase detector runs at ``source / reference`` (10 to 133 MHz), the oscillator at ``feedback`` times that (533
    to 1066 MHz), the output at ``2 ** -output`` of it (16 to 275 MHz).
    Source: Lattice FPGA-TN-02052, iCE40 sysCLOCK PLL.

    Raises
    ------
    TargetError
        If no setting comes within 1 %.
    """
    best = None
    for reference in range(1, 17):
        detector = source / reference
        if not 10e6 <= detector <= 133e6:
            continue
        for feedback in range(1, 129):
            if not 533e6 <= detector * feedback <= 1066e6:
                continue
            for output in range(1, 7):
                frequency = detector * feedback / 2**output
                key = round(abs(frequency / wanted - 1), 9), reference
                if 16e6 <= frequency <= 275e6 and (best is None or key < best[0]):
                    best = key, Pll(reference, feedback, output, detector * feedback, frequency)
    return _checked(best, source, wanted, "16 to 275 MHz")


def _checked(best, source: float, wanted: float, span: str) -> Pll:
    if best is None or best[0][0] > 0.01:
        near = f", nearest {best[1].frequency / 1e6:.6g} MHz" if best else ""
        raise TargetError(
            f"freq = {wanted / 1e6:.6g}: the PLL makes {span} from {source / 1e6:.6g} MHz{near}; "
            f"or take the board's own {source / 1e6:.6g} MHz"
        )
    return best[1]


class ClockGenerator(Elaboratable):
    """Drives the clock of the domain ``sync`` from the board's default clock, and its reset after configuration.

    The domain itself is the caller's.

    Parameters
    ----------
    platform : amaranth.build.Platform
        The board; must have a default clock.
    frequency : float
        Wanted clock in Hz.

    Attributes
    ----------
    pll : Pll or None
        The PLL's setting; None when the board's clock is taken as it is.
    frequency : float
        The clock that is made, in Hz.
    restart : Signal
        In: reset the domain.

    Raises
    ------
    TargetError
        If the PLL cannot make the frequency.
    """

    def __init__(self, platform, frequency: float):
        if platform.default_clk == "SB_HFOSC":  # divides by itself
            platform.hfosc_div = next((n for n in range(4) if abs(48e6 / 2**n / frequency - 1) < SAME), 0)
        source = platform.default_clk_frequency
        self.pll = None
        self.frequency = source
        if abs(frequency / source - 1) > SAME:
            make = ecp5_pll if _is_ecp5(platform) else ice40_pll
            self.pll = make(source, frequency)
            self.frequency = self.pll.frequency
        self.restart = Signal()

    def elaborate(self, platform):
        m = Module()
        locked = Signal()
        clock = Signal(name=CLOCK, attrs={"keep": 1})
        oscillator = platform.default_clk.startswith(("SB_", "OSC"))
        if self.pll is None:
            m.d.comb += [clock.eq(self._source(m, platform)), locked.eq(1)]
        elif _is_ecp5(platform):
            m.submodules.pll = self._ecp5(platform, self._source(m, platform), clock, locked)
        elif oscillator:
            m.submodules.pll = self._ice40(
                "CORE", ("i", "REFERENCECLK", self._source(m, platform)), clock, locked, platform
            )
        else:
            pin = platform.request(platform.default_clk, dir="-")
            m.submodules.pll = self._ice40("PAD", ("io", "PACKAGEPIN", pin.io), clock, locked, platform)
        m.d.comb += ClockSignal("sync").eq(clock)

        # A timer without reset, started by configuration, restarted while the PLL is unlocked or the button pressed.
        m.domains.power_on = ClockDomain(reset_less=True, local=True)
        m.d.comb += ClockSignal("power_on").eq(clock)
        hold = Signal()
        if platform.default_rst is not None:
            pin = platform.request(platform.default_rst, dir="-")
            m.submodules.reset_buffer = buffer = io.Buffer("i", pin)
            m.d.comb += hold.eq(~locked | buffer.i)
        else:
            m.d.comb += hold.eq(~locked)
        held = Signal()
        m.submodules.hold = FFSynchronizer(hold, held, o_domain="power_on")
        last = int(self.frequency * (OSCILLATOR_RESET_SECONDS if oscillator else RESET_SECONDS))
        timer = Signal(range(last + 1))
        reset = Signal(init=1)
        with m.If(held):
            m.d.power_on += timer.eq(0)
        with m.Elif(timer != last):
            m.d.power_on += timer.eq(timer + 1)
        m.d.power_on += reset.eq((timer != last) | self.restart)
        m.d.comb += ResetSignal("sync").eq(reset)
        return m

    def _source(self, m, platform):
        if platform.default_clk == "SB_HFOSC":
            clock = Signal()
            m.submodules.oscillator = Instance(
                "SB_HFOSC", p_CLKHF_DIV=f"0b{platform.hfosc_div:02b}", i_CLKHFEN=1, i_CLKHFPU=1, o_CLKHF=clock
            )
            return clock
        if platform.default_clk.startswith(("SB_", "OSC")):
            raise TargetError(f"{type(platform).__name__}: its default clock {platform.default_clk} is not supported")
        pin = platform.request(platform.default_clk, dir="-")
        m.submodules.clock_buffer = buffer = io.Buffer("i", pin)
        return buffer.i

    def _ecp5(self, platform, source, clock, locked):
        pll = self.pll
        loop = Signal(name="pll_loop")
        return Instance(
            "EHXPLLL",
            a_FREQUENCY_PIN_CLKI=f"{platform.default_clk_frequency / 1e6:.6f}",
            a_FREQUENCY_PIN_CLKOP=f"{pll.oscillator / ECP5_FEEDBACK_OUTPUT / 1e6:.6f}",
            a_FREQUENCY_PIN_CLKOS=f"{pll.frequency / 1e6:.6f}",
            a_ICP_CURRENT="12",
            a_LPF_RESISTOR="8",
            p_PLLRST_ENA="DISABLED",
            p_INTFB_WAKE="DISABLED",
            p_STDBY_ENABLE="DISABLED",
            p_DPHASE_SOURCE="DISABLED",
            p_OUTDIVIDER_MUXA="DIVA",
            p_CLKOP_ENABLE="ENABLED",
            p_CLKOP_DIV=ECP5_FEEDBACK_OUTPUT,
            p_CLKOP_CPHASE=ECP5_FEEDBACK_OUTPUT - 1,
            p_CLKOP_FPHASE=0,
            p_OUTDIVIDER_MUXB="DIVB",
            p_CLKOS_ENABLE="ENABLED",
            p_CLKOS_DIV=pll.output,
            p_CLKOS_CPHASE=pll.output - 1,
            p_CLKOS_FPHASE=0,
            p_FEEDBK_PATH="CLKOP",
            p_CLKI_DIV=pll.reference,
            p_CLKFB_DIV=pll.feedback // ECP5_FEEDBACK_OUTPUT,
            i_CLKI=source,
            i_CLKFB=loop,
            i_RST=Const(0),
            i_STDBY=Const(0),
            i_PHASESEL0=Const(0),
            i_PHASESEL1=Const(0),
            i_PHASEDIR=Const(1),
            i_PHASESTEP=Const(1),
            i_PHASELOADREG=Const(1),
            i_PLLWAKESYNC=Const(0),
            i_ENCLKOP=Const(0),
            o_CLKOP=loop,
            o_CLKOS=clock,
            o_LOCK=locked,
        )

    def _ice40(self, kind, source, clock, locked, platform):
        pll = self.pll
        detector = platform.default_clk_frequency / pll.reference
        limits = (17e6, 26e6, 44e6, 66e6, 101e6)
        return Instance(
            f"SB_PLL40_{kind}",
            source,
            p_FEEDBACK_PATH="SIMPLE",
            p_DIVR=Const(pll.reference - 1, 4),
            p_DIVF=Const(pll.feedback - 1, 7),
            p_DIVQ=Const(pll.output, 3),
            p_FILTER_RANGE=Const(1 + sum(detector >= limit for limit in limits), 3),
            i_RESETB=Const(1),
            i_BYPASS=Const(0),
            o_PLLOUTGLOBAL=clock,
            o_LOCK=locked,
        )


def _is_ecp5(platform) -> bool:
    return platform.device.startswith("LFE5")
