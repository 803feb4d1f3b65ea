"""Jobs for `CacheUnitBench`, in the simulator's process: a test module of cocotb."""

import pickle
import traceback

import cocotb
from cache_unit_bench import OUTCOME, TASK, End, Task, run_folder
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge, RisingEdge

from kvant.sim.soc.memory import MASTER_SIGNALS, AxiMemory

LONGEST_JOB = 60_000


@cocotb.test()
async def play(dut):
    """Run the task; what goes wrong is an outcome, not a failure of the test."""
    folder = run_folder()
    task: Task = pickle.loads((folder / TASK).read_bytes())
    try:
        outcome = (True, await Bench(dut, task).run())
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = (False, f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})")
    (folder / OUTCOME).write_bytes(pickle.dumps(outcome))


class Bench:
    """Serves the memory, cycle by cycle, and gives the jobs."""

    def __init__(self, dut, task: Task):
        self.dut, self.task = dut, task
        self.memory = AxiMemory(len(task.image), task.port_bytes, task.latency, task.stall, task.seed)
        self.memory.data[:] = task.image
        self.before = {}
        self.seen = {name: getattr(dut, f"m_axi_{name}") for name in (*MASTER_SIGNALS, "rready", "bready")}

    def drive(self):
        for name, value in self.memory.drive().items():
            if self.before.get(name) != value:
                getattr(self.dut, f"m_axi_{name}").value = value
        self.before = dict(self.memory.driven)

    def sample(self):
        values = {}
        for name, handle in self.seen.items():
            try:
                values[name] = int(handle.value)
            except ValueError:
                if name.endswith(("valid", "ready")):
                    raise
                values[name] = -1  # a payload that nothing was written to yet
        self.memory.sample(values)

    async def cycle(self, serves=True):
        """Up to just behind the next rising edge."""
        await FallingEdge(self.dut.clk)
        if serves:
            self.sample()
        await RisingEdge(self.dut.clk)
        self.drive()

    async def run(self):
        dut = self.dut
        for name in ("s_axis_job_tvalid", "s_axis_job_tdata", "stop", "clear"):
            getattr(dut, name).value = 0
        self.drive()
        dut.rst.value = 1
        Clock(dut.clk, 10, unit="ns").start()
        for _ in range(3):
            await self.cycle(serves=False)
        dut.rst.value = 0
        ends = [await self.job(number, payload, step) for number, (payload, step) in enumerate(self.task.steps)]
        return bytes(self.memory.data), ends

    async def job(self, number, payload, step):
        dut = self.dut
        kind, place = step.fault or ("", range(0))
        self.memory.fault = lambda asked, address: asked == kind and address in place
        saturated = int(dut.saturated.value)
        dut.s_axis_job_tdata.value = payload
        dut.s_axis_job_tvalid.value = 1
        how, taken = None, False
        for cycle in range(LONGEST_JOB):
            await FallingEdge(dut.clk)
            taken = taken or int(dut.s_axis_job_tready.value) == 1
            ends = {"write": dut.write_error, "fault": dut.fault_code, "done": dut.done}
            how = next((name for name, handle in ends.items() if int(handle.value)), None)
            if step.stop_after is not None and cycle >= step.stop_after:
                how = how or "stopped"
            code, slot = int(dut.fault_code.value), int(dut.fault_slot.value)
            nonfinite, error = int(dut.nonfinite.value), int(dut.error.value)
            self.sample()
            await RisingEdge(dut.clk)
            self.drive()
            if taken:
                dut.s_axis_job_tvalid.value = 0
            if how:
                break
        else:
            raise AssertionError(f"job {number} is not done after {LONGEST_JOB} cycles")
        await self.cycle()
        await self.cycle()
        end = End(how, cycle, code, slot, int(dut.saturated.value) - saturated & 0xFFFFFFFF, nonfinite, error)
        if how != "done":
            dut.s_axis_job_tvalid.value = 0
            dut.stop.value = 1
            await self.cycle()
            await self.cycle()
            while int(dut.owes.value):
                await self.cycle()
            dut.clear.value = 1
            await self.cycle()
            dut.clear.value = 0
            dut.stop.value = 0
            await self.cycle()
        return end
