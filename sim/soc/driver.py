"""Drives the accelerator over any bus: a simulator, a compiled model, a board.

It stands beside the simulators because each of its users (benches, compiled models, boards) builds on this package;
it needs none of them itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.linear.parameters import LinearParameters, ceil_div
from kvant.hw.parameters import ParameterError
from kvant.hw.soc.cache_memory import CacheMemory
from kvant.hw.soc.descriptors import DESCRIPTOR_BYTES, Descriptor, EncodedDescriptor, ErrorCode, Flag, Opcode
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.hw.soc.registers import COUNTERS, IDENTIFICATION, STOPPING_ERRORS, Register, register_map
from kvant.hw.soc.weight_layout import pack_weights, stored_interleave

X_BYTES, Y_BYTES = 2, 4
"""Bytes of an activation and of an output in memory."""

LEAST_ALIGNMENT = 64
"""What is allocated begins at a multiple of this, or of a word of the port if that is more."""


class AcceleratorError(Exception):
    """The accelerator is another one, ran out of memory, or stopped with an error; the text is one line.

    Attributes
    ----------
    code : ErrorCode or None
    index : int or None
        Place of the offending descriptor in the ring.
    field : int or None
        Byte offset of the offending field.
    """

    def __init__(self, text: str, code: ErrorCode | None = None, index: int | None = None, field: int | None = None):
        super().__init__(text)
        self.code, self.index, self.field = code, index, field


class Bus(Protocol):
    """How a host reaches the accelerator. An access that is answered with an error raises `BusError`."""

    def read32(self, offset: int) -> int:
        """Read a register."""

    def write32(self, offset: int, value: int) -> None:
        """Write a register."""

    def read_memory(self, address: int, size: int) -> bytes:
        """Read the memory that the accelerator sees."""

    def write_memory(self, address: int, data: bytes) -> None:
        """Write it."""

    def wait_interrupt(self) -> None:
        """Return when ``irq`` is high; raise `TimeoutError` when that takes too long."""


class BusError(Exception):
    """An access to a register was answered with an error."""


@dataclass(frozen=True)
class StoredWeights:
    """Packed weights in the accelerator's memory."""

    address: int
    size: int
    interleave: int
    outputs: int
    inputs: int


@dataclass(frozen=True)
class Rows:
    """A matrix in the accelerator's memory; a row begins at a word of the port."""

    address: int
    stride: int


@dataclass(frozen=True)
class AttentionLimits:
    """Queries of a descriptor at most, and tokens of a sequence."""

    queries: int
    tokens: int


class Accelerator:
    """An accelerator behind a bus.

    Parameters
    ----------
    bus : Bus
    memory : range of addresses
        Memory that is free to use; what it holds is allocated from its beginning.
    ring : int
        Places of the ring of descriptors.

    Attributes
    ----------
    p : TopParameters
        As read from the registers, without caches and attention.
    cache : CacheMemory or None
        Layouts of caches in memory, for `kvant.sim.soc.caches`.
    attention : AttentionLimits or None

    Raises
    ------
    AcceleratorError
        Something else answers at the bus, or the memory is too small.
    """

    def __init__(self, bus: Bus, memory: range, *, ring: int = 64):
        self.bus = bus
        identification = bus.read32(0)
        if identification != IDENTIFICATION:
            raise AcceleratorError(
                f"ID = {identification:#010x}: no accelerator here, its ID is {IDENTIFICATION:#010x}"
            )
        self.registers = register_map(TopParameters(LinearParameters(), SocParameters()))
        self.p = self._parameters()
        self.cache = self._cache_memory()
        self.attention = self._attention_limits()
        self._free, self._memory = memory.start, memory
        self.ring = ring
        self.ring_address = self.allocate(ring * DESCRIPTOR_BYTES)
        self.write("RING_BASE_LO", self.ring_address & 0xFFFFFFFF)
        self.write("RING_BASE_HI", self.ring_address >> 32)
        self.write("RING_COUNT", ring)
        self.tail = self.read("RING_HEAD")
        if self.tail >= ring:
            self.tail = 0
            self.write("RING_HEAD", 0)
        self.write("RING_TAIL", self.tail)
        self.write("IRQ_ENABLE", 0b111)

    def _parameters(self) -> TopParameters:
        shape, ports, capacity = self.fields("SHAPE"), self.fields("PORTS"), self.fields("CAPACITY")
        features, stored = self.fields("FEATURES"), self.read("GROUPS")
        rows, group = shape["rows"], shape["group"]
        return TopParameters(
            LinearParameters(
                rows=rows,
                cols=shape["cols"],
                group=group,
                quant_lanes=ports["x_lanes"],
                accumulators=capacity["accumulators"],
                activation_words=stored * ceil_div(group, rows),
                int8_groups=bool(features["int8_groups"]),
                max_coefficient=features["max_coefficient"],
            ),
            SocParameters(port_bits=ports["port_bits"], address_bits=ports["address_bits"]),
        )

    def _cache_memory(self) -> CacheMemory | None:
        shape, options = self.fields("CACHE_SHAPE"), self.fields("CACHE_OPTIONS")
        if not shape["head_dim"]:
            return None
        flags = {name: bool(options[name]) for name in ("centred", "offset", "shared_coeff")}
        p = CacheParameters(lanes=1, **shape, sinks=options["sinks"], **flags)
        return CacheMemory(p, self.p.soc.port_bytes)

    def _attention_limits(self) -> AttentionLimits | None:
        queries = self.fields("ATTENTION")["queries"]
        return AttentionLimits(queries, self.read("ATTENTION_TOKENS")) if queries else None

    def read(self, name: str) -> int:
        """A register by its name."""
        return self.bus.read32(self.registers[name].offset)

    def write(self, name: str, value: int) -> None:
        """Write a register by its name."""
        self.bus.write32(self.registers[name].offset, value)

    def fields(self, name: str) -> dict[str, int]:
        """All fields of a register."""
        return split(self.registers[name], self.read(name))

    def command(self, name: str) -> None:
        """Give a command of the register CONTROL."""
        self.write("CONTROL", self.registers["CONTROL"].field(name).mask)

    def counters(self) -> dict[str, int]:
        """All counters by name."""
        return {name: self.read(f"{name}_LO") | self.read(f"{name}_HI") << 32 for name in COUNTERS}

    def allocate(self, size: int) -> int:
        """Address of *size* free bytes."""
        step = max(LEAST_ALIGNMENT, self.p.soc.port_bytes)
        address = ceil_div(self._free, step) * step
        if address + size > self._memory.stop:
            raise AcceleratorError(f"{size} bytes: {self._memory.stop - address} of {len(self._memory)} bytes are free")
        self._free = address + size
        return address

    def mark(self) -> int:
        """What `release` gives back to."""
        return self._free

    def release(self, mark: int) -> None:
        """Free what was allocated since `mark`."""
        self._free = mark

    def allocate_rows(self, rows: int, row_bytes: int) -> Rows:
        """Memory for a matrix."""
        stride = ceil_div(row_bytes, self.p.soc.port_bytes) * self.p.soc.port_bytes
        return Rows(self.allocate(rows * stride), stride)

    def store_rows(self, array: np.ndarray) -> Rows:
        """A matrix in memory."""
        raw = np.ascontiguousarray(array).view(np.uint8)
        rows = self.allocate_rows(*raw.shape)
        self.bus.write_memory(rows.address, np.pad(raw, ((0, 0), (0, rows.stride - raw.shape[1]))).tobytes())
        return rows

    def store_weights(
        self,
        codes: np.ndarray,
        scale: np.ndarray,
        coefficient: np.ndarray,
        int8: np.ndarray | None = None,
        *,
        interleave: int | None = None,
    ) -> StoredWeights:
        """Pack quantised weights into memory; see `kvant.hw.soc.weight_layout.pack_weights`."""
        outputs, inputs = codes.shape
        interleave = stored_interleave(self.p.linear, inputs) if interleave is None else interleave
        raw = pack_weights(self.p, codes, scale, coefficient, int8, interleave=interleave)
        address = self.allocate(len(raw))
        self.bus.write_memory(address, raw)
        return StoredWeights(address, len(raw), interleave, outputs, inputs)

    def linear_descriptors(
        self, weights: StoredWeights, tokens: int, x: Rows | None, y: Rows | None, flags: int = 0
    ) -> list[Descriptor]:
        """Descriptors of ``y = x @ w.T``: as many as the buffers ask for; None stands for the stream.

        Raises
        ------
        ParameterError
            A row of x is longer than the activation buffer.
        """
        p = self.p.linear
        groups, tiles = ceil_div(weights.inputs, p.group), ceil_div(weights.outputs, p.cols)
        if groups > p.stored_groups:
            raise ParameterError(f"inputs = {weights.inputs}: legal is 1 to {p.stored_groups * p.group}")
        most = min(p.accumulators // weights.interleave, p.stored_groups // groups)
        streams = (Flag.X_STREAM if x is None else Flag(0)) | (Flag.Y_STREAM if y is None else Flag(0))
        descriptors = []
        for first in range(0, tokens, most):
            descriptors.append(
                Descriptor(
                    opcode=Opcode.LINEAR,
                    flags=flags | streams,
                    tokens=min(most, tokens - first),
                    groups=groups,
                    tail=weights.inputs - (groups - 1) * p.group,
                    tiles=tiles,
                    last_cols=weights.outputs - (tiles - 1) * p.cols,
                    interleave=weights.interleave,
                    weights=weights.address,
                    weight_bytes=weights.size,
                    x=0 if x is None else x.address + first * x.stride,
                    x_stride=0 if x is None else x.stride,
                    y=0 if y is None else y.address + first * y.stride,
                    y_stride=0 if y is None else y.stride,
                )
            )
        return descriptors

    def submit(self, descriptors: Iterable[EncodedDescriptor | bytes]) -> None:
        """Write descriptors behind those of the ring and ring the doorbell; bytes are written as they are.

        Raises
        ------
        AcceleratorError
            They do not fit into the ring.
        """
        raw = [each if isinstance(each, bytes) else each.encode() for each in descriptors]
        room = (self.read("RING_HEAD") - self.tail - 1) % self.ring
        if len(raw) > room:
            raise AcceleratorError(f"{len(raw)} descriptors: {room} of {self.ring} places are free")
        for each in raw:
            self.bus.write_memory(self.ring_address + self.tail * DESCRIPTOR_BYTES, each)
            self.tail = (self.tail + 1) % self.ring
        self.write("RING_TAIL", self.tail)

    def start(self) -> None:
        """Run the ring."""
        self.command("start")

    def wait(self) -> dict[str, int]:
        """Wait for an event, clear it and return the fields of IRQ_STATUS.

        Raises
        ------
        AcceleratorError
            The accelerator stopped with an error.
        """
        self.bus.wait_interrupt()
        raised = self.read("IRQ_STATUS")
        self.write("IRQ_STATUS", raised)
        events = split(self.registers["IRQ_STATUS"], raised)
        if events["error"]:
            self.raise_error()
        return events

    def raise_error(self) -> None:
        """Raise what the error registers say, if a stopping error is pending."""
        errors = self.fields("ERROR")
        if not any(errors[name] for name in STOPPING_ERRORS):
            return
        report, index = self.fields("ERROR_CODE"), self.read("ERROR_INDEX")
        code = ErrorCode(report["code"])
        raise AcceleratorError(
            f"descriptor {index} of the ring: {code.name}, byte {report['field']}", code, index, report["field"]
        )

    def recover(self, *, skip: bool = False) -> None:
        """Clear all errors and events; with *skip*, go on behind the descriptor that was not done."""
        self.write("ERROR", 0xFFFFFFFF)
        self.write("IRQ_STATUS", 0xFFFFFFFF)
        if skip:
            self.write("RING_HEAD", (self.read("RING_HEAD") + 1) % self.ring)

    def clear_ring(self) -> None:
        """Forget all descriptors that are not done; while stopped."""
        self.tail = self.read("RING_HEAD")
        self.write("RING_TAIL", self.tail)

    def run(self, descriptors: Iterable[EncodedDescriptor | bytes]) -> None:
        """Run descriptors to their end.

        Raises
        ------
        AcceleratorError
            See `wait`.
        """
        self.submit([*descriptors, Descriptor(Opcode.END)])
        self.start()
        while not self.wait()["idle"]:
            pass

    def linear(self, weights: StoredWeights, x: np.ndarray) -> np.ndarray:
        """``x @ w.T``.

        Parameters
        ----------
        weights : StoredWeights
            Of `store_weights`.
        x : f16 [T, K]

        Returns
        -------
        f32 [T, N]
        """
        mark = self.mark()
        rows = self.store_rows(x)
        results = self.allocate_rows(len(x), weights.outputs * Y_BYTES)
        self.run(self.linear_descriptors(weights, len(x), rows, results))
        y = self.load_rows(results, len(x), weights.outputs)
        self.release(mark)
        return y

    def load_rows(self, rows: Rows, count: int, columns: int) -> np.ndarray:
        """Outputs in memory as f32 [count, columns]."""
        raw = np.frombuffer(self.bus.read_memory(rows.address, count * rows.stride), np.uint8)
        return raw.reshape(count, rows.stride)[:, : columns * Y_BYTES].copy().view(np.float32)


def split(register: Register, value: int) -> dict[str, int]:
    """The fields of a register's value."""
    return {field.name: (value & field.mask) >> field.lsb for field in register.fields}
