"""Plays streams under cocotb: the test module that the simulator's process imports.

The plan comes from, and the outcome goes to, pickle files next to each other in the run's folder.
"""

import os
import pickle
from pathlib import Path

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge, RisingEdge, Timer

from kvant.sim.errors import SimulationError
from kvant.sim.streams import CLOCK_PERIOD_NS, Plan, Player, Trace, UnknownValueError

RUN_FOLDER = "KVANT_RUN_FOLDER"
"""Environment variable that names the folder of plan and outcome."""

PLAN, OUTCOME = "plan.pickle", "outcome.pickle"


@cocotb.test()
async def play(dut) -> None:
    """Run the plan; a `SimulationError` is an outcome, not a failure of the test."""
    folder = Path(os.environ[RUN_FOLDER])
    plan = pickle.loads((folder / PLAN).read_bytes())
    try:
        outcome = await _play(dut, plan)
    except SimulationError as error:
        outcome = str(error)
    (folder / OUTCOME).write_bytes(pickle.dumps(outcome))


async def _play(dut, plan: Plan) -> Trace:
    handles: dict[str, object] = {}

    def handle(port: str):
        if port not in handles:
            handles[port] = getattr(dut, port)
        return handles[port]

    def write(port: str, value: int) -> None:
        handle(port).value = int(value)

    def read(port: str) -> int:
        bits = str(handle(port).value)
        try:
            return int(bits, 2)
        except ValueError:
            raise UnknownValueError(port, bits) from None

    half = Timer(CLOCK_PERIOD_NS // 2, unit="ns")
    dut.clk.value = 0
    player = Player(plan, write, read)
    player.drive()
    await half
    player.sample()
    await half
    Clock(dut.clk, CLOCK_PERIOD_NS, unit="ns", impl="gpi").start(start_high=True)
    rising, falling = RisingEdge(dut.clk), FallingEdge(dut.clk)
    while True:
        await rising
        player.drive()
        await falling
        if player.sample():
            return player.trace()
