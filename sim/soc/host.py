"""The host of the accelerator in the simulator's process: a test module of cocotb."""

import pickle
import random
import sys
import traceback
from collections.abc import Iterator

import cocotb
from cocotb.clock import Clock
from cocotb.task import bridge, resume
from cocotb.triggers import ClockCycles, FallingEdge, First, RisingEdge, SimTimeoutError, with_timeout
from cocotbext.axi import (
    AxiBus,
    AxiLiteBus,
    AxiLiteMaster,
    AxiRam,
    AxiResp,
    AxiStreamBus,
    AxiStreamFrame,
    AxiStreamSink,
    AxiStreamSource,
)

from kvant.sim.errors import SimulationError
from kvant.sim.soc.bench import OUTCOME, TASK, BenchOptions, Task, run_folder
from kvant.sim.soc.driver import BusError
from kvant.sim.soc.memory import MASTER_SIGNALS, AxiMemory
from kvant.sim.streams import CLOCK_PERIOD_NS

RESET_CYCLES = 4


@cocotb.test()
async def play(dut) -> None:
    """Run the task; what goes wrong is an outcome, not a failure of the test."""
    folder = run_folder()
    paths, raw = pickle.loads((folder / TASK).read_bytes())
    sys.path[:0] = paths
    task: Task = pickle.loads(raw)
    try:
        outcome = (True, await _play(dut, task))
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome = (False, f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})")
    (folder / OUTCOME).write_bytes(pickle.dumps(outcome))


async def _play(dut, task: Task):
    host = Host(dut, task.options)
    server = await host.begin()
    program = cocotb.start_soon(bridge(task.program)(host, **task.arguments))
    timeout = task.options.cycles * CLOCK_PERIOD_NS
    try:
        return await with_timeout(First(program, server), timeout, "ns")
    except SimTimeoutError:
        raise SimulationError(f"not done after {task.options.cycles} cycles") from None


class Host:
    """What a program sees: a `kvant.sim.soc.driver.Bus`, the streams, the memory.

    Attributes
    ----------
    memory : AxiMemory or None
        The memory model; None with that of cocotbext-axi.
    """

    def __init__(self, dut, options: BenchOptions):
        self.dut, self.options = dut, options
        self.memory: AxiMemory | None = None

    async def begin(self):
        """Reset the accelerator and start what surrounds it; a task that ends with an error of the memory port."""
        dut, options = self.dut, self.options
        for name in ("arready", "rvalid", "awready", "wready", "bvalid"):
            getattr(dut, f"m_axi_{name}").value = 0
        dut.rst.value = 1
        Clock(dut.clk, CLOCK_PERIOD_NS, unit="ns").start()
        self.lite = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "s_axil"), dut.clk, dut.rst)
        self.x = AxiStreamSource(AxiStreamBus.from_prefix(dut, "s_axis_x"), dut.clk, dut.rst)
        self.y = AxiStreamSink(AxiStreamBus.from_prefix(dut, "m_axis_y"), dut.clk, dut.rst)
        if options.memory == "cocotbext":
            self.ram = AxiRam(AxiBus.from_prefix(dut, "m_axi"), dut.clk, dut.rst, size=options.memory_bytes)
        else:
            self.memory = AxiMemory(
                options.memory_bytes, options.port_bits // 8, options.latency, options.stall, options.seed
            )
        self._pause()
        await ClockCycles(dut.clk, RESET_CYCLES)
        await FallingEdge(dut.clk)
        dut.rst.value = 0
        await RisingEdge(dut.clk)
        return cocotb.start_soon(self._serve() if self.memory else self._forever())

    async def _forever(self) -> None:
        while True:
            await ClockCycles(self.dut.clk, 1000)

    def _pause(self) -> None:
        """Pauses of the buses that cocotbext-axi drives."""
        if not self.options.stall:
            return
        channels = {
            "aw": self.lite.write_if.aw_channel,
            "w": self.lite.write_if.w_channel,
            "b": self.lite.write_if.b_channel,
            "ar": self.lite.read_if.ar_channel,
            "r": self.lite.read_if.r_channel,
            "x": self.x,
            "y": self.y,
        }
        if self.memory is None:
            write, read = self.ram.write_if, self.ram.read_if
            channels |= {"maw": write.aw_channel, "mw": write.w_channel, "mb": write.b_channel}
            channels |= {"mar": read.ar_channel, "mr": read.r_channel}
        for name, channel in channels.items():
            channel.set_pause_generator(_pauses(self.options, name))

    async def _serve(self) -> None:
        """Connect the memory model to the port, cycle by cycle."""
        dut, memory = self.dut, self.memory
        seen_handles = {name: getattr(dut, f"m_axi_{name}") for name in (*MASTER_SIGNALS, "rready", "bready")}
        handles: dict[str, object] = {}
        before: dict[str, int] = {}
        rising, falling = RisingEdge(dut.clk), FallingEdge(dut.clk)
        while True:
            for name, value in memory.drive().items():
                if before.get(name) != value:
                    if name not in handles:
                        handles[name] = getattr(dut, f"m_axi_{name}")
                    handles[name].value = value
            before = dict(memory.driven)
            await falling
            seen = {}
            for name, handle in seen_handles.items():
                try:
                    seen[name] = int(handle.value)
                except ValueError:
                    if name.endswith(("valid", "ready")):
                        raise SimulationError(f"m_axi_{name} = {handle.value}: unknown") from None
                    seen[name] = -1  # a payload that nothing was written to yet
            if int(dut.rst.value):
                memory.reset()
            else:
                memory.sample(seen)
            await rising

    # Registers.

    def read32(self, offset: int) -> int:
        """Read a register."""
        data, response = self.read_any(offset, 4)
        if response:
            raise BusError(f"read of {offset:#x}: response {response}")
        return int.from_bytes(data, "little")

    def write32(self, offset: int, value: int) -> None:
        """Write a register."""
        if response := self.write_any(offset, value.to_bytes(4, "little")):
            raise BusError(f"write of {offset:#x}: response {response}")

    @resume
    async def read_any(self, offset: int, size: int) -> tuple[bytes, int]:
        """Bytes of registers and the response."""
        answer = await self.lite.read(offset, size)
        return answer.data, 0 if answer.resp == AxiResp.OKAY else int(answer.resp)

    @resume
    async def write_any(self, offset: int, data: bytes) -> int:
        """Write bytes of registers, strobed as they lie; the response."""
        answer = await self.lite.write(offset, data)
        return 0 if answer.resp == AxiResp.OKAY else int(answer.resp)

    # Memory.

    def read_memory(self, address: int, size: int) -> bytes:
        """Read the memory, at once."""
        if self.memory is None:
            return self.ram.read(address, size)
        return bytes(self.memory.data[address : address + size])

    def write_memory(self, address: int, data: bytes) -> None:
        """Write it, at once."""
        if self.memory is None:
            self.ram.write(address, data)
        else:
            self.memory.data[address : address + len(data)] = data

    # Time.

    @resume
    async def wait_interrupt(self) -> None:
        """Return when ``irq`` is high."""
        if not int(self.dut.irq.value):
            await RisingEdge(self.dut.irq)

    @property
    def irq(self) -> int:
        """Level of ``irq``."""
        return int(self.dut.irq.value)

    @resume
    async def idle(self, cycles: int) -> None:
        """Let time pass."""
        await ClockCycles(self.dut.clk, cycles)

    @resume
    async def reset(self) -> None:
        """Reset the accelerator, and what the memory owes with it."""
        self.dut.rst.value = 1
        await ClockCycles(self.dut.clk, RESET_CYCLES)
        self.dut.rst.value = 0
        await RisingEdge(self.dut.clk)

    # Streams.

    @resume
    async def send_x(self, transfers: bytes) -> None:
        """Queue transfers of ``s_axis_x``."""
        await self.x.send(AxiStreamFrame(transfers))

    @resume
    async def receive_y(self) -> tuple[bytes, list[int]]:
        """The transfers of ``m_axis_y`` up to `last`: all bytes, and a keep bit for each."""
        frame = await self.y.recv(compact=False)
        return bytes(frame.tdata), list(frame.tkeep)


def _pauses(options: BenchOptions, name: str) -> Iterator[bool]:
    source = random.Random(f"{options.seed} {name}")
    while True:
        yield source.random() < options.stall
