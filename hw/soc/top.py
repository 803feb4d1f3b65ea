"""The accelerator: the shell and the engine behind it."""

from amaranth.hdl import Module, ResetInserter
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.activation_buffer import activation_input
from kvant.hw.linear.engine import LinearEngine, output
from kvant.hw.soc.axi import MasterSignature
from kvant.hw.soc.axi_lite import LiteSignature
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.registers import register_map
from kvant.hw.soc.shell import Shell


class KvantTop(wiring.Component):
    """An accelerator that runs a ring of descriptors in memory: a `Shell` around a `LinearEngine`.

    Parameters
    ----------
    p : TopParameters

    Members
    -------
    s_axil : In(LiteSignature)
        Registers, see `kvant.hw.soc.registers`.
    m_axi : Out(MasterSignature)
        Memory.
    x : in stream
        Activations of jobs with the flag X_STREAM, as the engine takes them.
    y : out stream
        Outputs of jobs with the flag Y_STREAM, as the engine gives them.
    irq : out
        Level: an enabled event is pending.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        super().__init__(
            {
                "s_axil": In(LiteSignature(register_map(p).address_bits)),
                "m_axi": Out(MasterSignature(p.soc)),
                "x": In(stream.Signature(activation_input(p.linear))),
                "y": Out(stream.Signature(output(p.linear))),
                "irq": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.shell = shell = Shell(p)
        engine = LinearEngine(p.linear)
        m.submodules.engine = ResetInserter(shell.engine.reset)(engine)
        wiring.connect(m, wiring.flipped(self.s_axil), shell.s_axil)
        wiring.connect(m, shell.m_axi, wiring.flipped(self.m_axi))
        wiring.connect(m, wiring.flipped(self.x), shell.x)
        wiring.connect(m, shell.y, wiring.flipped(self.y))
        wiring.connect(m, shell.engine.cmd, engine.cmd)
        wiring.connect(m, shell.engine.x, engine.x)
        wiring.connect(m, shell.engine.w, engine.w)
        wiring.connect(m, engine.y, shell.engine.y)
        m.d.comb += [
            engine.xq.ready.eq(1),
            shell.engine.busy.eq(engine.busy),
            shell.engine.error.eq(engine.error),
            shell.engine.nonfinite.eq(engine.nonfinite),
            shell.engine.busy_cycles.eq(engine.busy_cycles),
            self.irq.eq(shell.irq),
        ]
        return m
