"""Plays streams on Amaranth's simulator."""

import shutil
import tempfile
from pathlib import Path

from amaranth.sim import Simulator

from kvant.hw.emit import FlatTop
from kvant.sim.streams import CLOCK_PERIOD_NS, Plan, Player, Trace


def play(top: FlatTop, plan: Plan, waves: Path | None = None) -> Trace:
    """Simulate a component behind the ports it has in Verilog.

    Parameters
    ----------
    top : FlatTop
        Made with a clock domain of its own.
    plan : Plan
    waves : Path, optional
        Where to write a VCD file.

    Raises
    ------
    SimulationError
        See `Player`.
    """
    signals = top.signals | {"rst": top.domain.rst}
    traces: list[Trace] = []

    async def bench(ctx) -> None:
        def write(port: str, value: int) -> None:
            ctx.set(signals[port], value)

        def read(port: str) -> int:
            return ctx.get(signals[port])

        player = Player(plan, write, read)
        while True:
            player.drive()
            if player.sample():  # the simulator settles after every write: no need to wait for the falling edge
                break
            await ctx.tick()
        traces.append(player.trace())

    simulator = Simulator(top)
    simulator.add_clock(CLOCK_PERIOD_NS * 1e-9)
    simulator.add_testbench(bench)
    if waves is None:
        simulator.run()
    else:
        with tempfile.TemporaryDirectory(prefix="kvant-") as folder:
            dump = Path(folder) / waves.name
            with simulator.write_vcd(str(dump)):
                simulator.run()
            shutil.move(dump, waves)
    return traces[0]
