"""A component alone on a device: no board, no pins, a constrained clock."""

from amaranth.back import rtlil
from amaranth.lib import wiring

from kvant.fpga.devices import Device
from kvant.fpga.flow import Design
from kvant.fpga.harness import ScanHarness


class BarePlatform:
    """What a component may ask of its platform: the part it is built for, so that it can choose its cells."""

    def __init__(self, device: Device):
        self.device = device.part


def bare_design(
    component: wiring.Component, device: Device, mhz: float, *, name: str, parameters: dict | None = None
) -> Design:
    """Design that measures *component* on *device* at *mhz*, its ports behind registers (see `ScanHarness`)."""
    harness = ScanHarness(component)
    text = rtlil.convert(harness, name="top", platform=BarePlatform(device), emit_src=False)
    if device.family == "ecp5":
        constraints = f'FREQUENCY PORT "clk" {mhz * 1e6:.0f} HZ;\n'
    else:
        constraints = f"set_frequency clk {mhz:.6f}\n"
    return Design(
        name=name,
        rtlil=text,
        constraints=constraints,
        clocks={"clk": mhz},
        device=device,
        target=device.name,
        harness={"FF": harness.input_bits + harness.output_bits, "LUT4": harness.output_bits},
        parameters=parameters or {},
    )
