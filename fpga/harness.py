"""A component with many ports on a device with few pins."""

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class ScanHarness(wiring.Component):
    """Puts every port of a component behind a register, and the registers in two chains of one pin each.

    This measures the component alone on a bare device: nothing is optimised away, every path from and to a port
    starts or ends in a register, and no pin has to be found for it. It costs `input_bits` flip-flops, and
    `output_bits` flip-flops with one LUT each; reports state that share. It is no way to use the component.

    Parameters
    ----------
    component : wiring.Component
        What is measured.

    Members
    -------
    scan_in : in
        First bit of the chain that drives the inputs.
    scan_out : out
        Parity that runs along all outputs.
    """

    def __init__(self, component: wiring.Component):
        self.component = component
        inputs, outputs = [], []
        for _, member, value in component.signature.flatten(component):
            (inputs if member.flow is In else outputs).append(value)
        self._inputs, self._outputs = inputs, outputs
        self.input_bits = sum(len(value.as_value() if hasattr(value, "as_value") else value) for value in inputs)
        self.output_bits = sum(len(value.as_value() if hasattr(value, "as_value") else value) for value in outputs)
        super().__init__({"scan_in": In(1), "scan_out": Out(1)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.component = self.component
        source = Signal(self.input_bits, reset_less=True)
        m.d.sync += source.eq(Cat(self.scan_in, source))
        position = 0
        for value in self._inputs:
            width = len(Cat(value))
            m.d.comb += Cat(value).eq(source[position : position + width])
            position += width
        parity = Signal(self.output_bits, reset_less=True)
        observed = Cat(*(Cat(value) for value in self._outputs))
        m.d.sync += parity.eq(observed ^ Cat(source[-1:], parity))
        m.d.comb += self.scan_out.eq(parity[-1:])
        return m
