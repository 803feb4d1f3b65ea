"""The accelerator as a compiled model: what a driver needs of a bus, at the speed of compiled C++."""

import numpy as np

from kvant.hw.parameters import ParameterError
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.top import KvantTop
from kvant.sim.compiled.build import Progress
from kvant.sim.compiled.model import CompiledModel
from kvant.sim.errors import SimulationError
from kvant.sim.simulate import cached_design
from kvant.sim.soc.driver import BusError

TOP = "kvant_top"
MEMORY, REGISTERS = "m_axi", "s_axil"
LATENCY = 20
"""Cycles of the memory, where nothing else is said."""


class CompiledBus:
    """A `kvant.sim.soc.driver.Bus`: `Accelerator(CompiledBus(p, memory_bytes), range(memory_bytes))`.

    Parameters
    ----------
    p : TopParameters
    memory_bytes : int
        Of the memory, from address 0 on. It is taken from the system when it is touched.
    latency : int
        Of the memory, in cycles.
    stall : float
        Probability of a pause of each channel of the memory, and of each stream, in each cycle.
    seed : int
    threads : int
        Threads of the model.
    progress : callable, optional
        See `kvant.sim.compiled.build.Progress`.

    Attributes
    ----------
    model : CompiledModel
        For its streams and counts.
    memory : u8 [memory_bytes]
        What accelerator and host both see.

    Raises
    ------
    ParameterError
        A memory beyond the addresses of the accelerator.
    ToolError
        See `kvant.sim.compiled.build.library`.
    """

    def __init__(
        self,
        p: TopParameters,
        memory_bytes: int,
        *,
        latency: int = LATENCY,
        stall: float = 0.0,
        seed: int = 0,
        threads: int = 1,
        progress: Progress | None = None,
    ):
        if not 1 <= memory_bytes <= 1 << p.soc.address_bits:
            raise ParameterError(f"memory_bytes = {memory_bytes}: legal is 1 to {1 << p.soc.address_bits}")
        design = cached_design(lambda: KvantTop(p), TOP, p)
        self.model = CompiledModel(design, stall=stall, seed=seed, threads=threads, progress=progress)
        self.memory = np.zeros(memory_bytes, np.uint8)
        self.model.attach(MEMORY, self.memory, latency=latency)

    def close(self) -> None:
        """Free the model; it can be used no more."""
        self.model.close()

    def __enter__(self) -> "CompiledBus":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def read32(self, offset: int) -> int:
        """Read a register."""
        value, response = self.model.read_register(REGISTERS, offset)
        if response:
            raise BusError(f"read of {offset:#x}: response {response}")
        return value

    def write32(self, offset: int, value: int) -> None:
        """Write a register."""
        if response := self.model.write_register(REGISTERS, offset, value):
            raise BusError(f"write of {offset:#x}: response {response}")

    def read_memory(self, address: int, size: int) -> bytes:
        """Read the memory."""
        return self.memory[address : address + size].tobytes()

    def write_memory(self, address: int, data: bytes) -> None:
        """Write it."""
        self.memory[address : address + len(data)] = np.frombuffer(data, np.uint8)

    def wait_interrupt(self) -> None:
        """Return when ``irq`` is high.

        Raises
        ------
        TimeoutError
            Nothing has moved at any bus for long.
        """
        try:
            self.model.wait("irq")
        except SimulationError as error:
            if "no transfer" in str(error):
                raise TimeoutError(str(error)) from None
            raise
