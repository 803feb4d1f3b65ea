"""A compiled design with its streams: host buffers in and out, the loop in C++."""

import ctypes
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvant.hw.emit import Design
from kvant.hw.parameters import ParameterError
from kvant.sim.compiled.build import Progress, library, memories, plain_ports, registers, storage_bytes
from kvant.sim.errors import SimulationError

IDLE_CYCLES = 20_000
"""Cycles without any transfer after which a run is given up."""

RESET_CYCLES = 2
SLICE_SECONDS = 0.1
"""Time after which the loop looks whether the user has interrupted."""

_DONE, _SLICE, _LIMIT, _IDLE, _FAULT = range(5)
FAULTS = {
    1: "valid dropped while it waited",
    2: "payload changed while it waited",
    3: "a transfer more than expected",
    4: "a burst crosses a multiple of 4 KB",
    5: "a burst of another size than the port's words, another type than INCR, or not at a word's address",
    6: "wlast at another word than the last",
}
"""How a rule of a bus can be broken, by the number that the player gives."""


@dataclass(frozen=True)
class StreamCount:
    """Transfers of a stream in a run.

    Attributes
    ----------
    count : int
    first, last : int or None
        Cycles of the first and of the last of them.
    queued : int
        Transfers that are still to come.
    """

    count: int
    first: int | None
    last: int | None
    queued: int


class CompiledModel:
    """A design as compiled C++.

    Transfers are queued with `send` and `receive`, then `run` plays until all of them are done. Nothing is copied when
    they are queued: the arrays are kept until they are used. Between two runs the clock stands still, so that the
    design cannot tell where one ends.

    Buffers of a field are u8 [transfers, bytes], little-endian, `record_bytes` bytes each: 1, 2, 4, 8, or above 64 bits
    a multiple of 4. Bits above the field's width are 0.

    Parameters
    ----------
    design : Design
        As `kvant.hw.emit.emit` makes it.
    threads : int
        Threads of the model.
    stall : float or mapping of str to float
        Probability of a pause in every cycle, of every stream and every channel of a memory, or by stream and memory.
    seed : int
        Pauses of a stream depend on seed and name alone. They are others than those of `kvant.sim.simulate`.
    progress : callable, optional
        See `kvant.sim.compiled.build.Progress`.

    Raises
    ------
    ToolError
        See `kvant.sim.compiled.build.library`.
    ParameterError
        An unknown stream, a probability outside 0 to below 1, an illegal number of threads.
    """

    def __init__(
        self,
        design: Design,
        *,
        threads: int = 1,
        stall: float | Mapping[str, float] = 0.0,
        seed: int = 0,
        progress: Progress | None = None,
    ):
        self.design = design
        widths = {port.name: port.width for port in design.ports}
        self._streams = {name: number for number, name in enumerate(design.streams)}
        self._fields = {
            name: {field: widths[port] for field, port in stream.fields.items() if port in widths}
            for name, stream in design.streams.items()
        }
        self._memories = {name: number for number, name in enumerate(memories(design))}
        self._registers = {name: number for number, name in enumerate(registers(design))}
        self._ports = {name: (number, widths[name]) for number, name in enumerate(plain_ports(design))}
        stalls = self._stalls(stall)
        self._library = _load(str(library(design, threads=threads, progress=progress)))
        self._player = self._library.kvant_open()
        self._kept: dict[str, list[np.ndarray]] = {name: [] for name in self._streams}
        for name, probability in stalls.items():
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            start = int.from_bytes(digest[:8], "little")
            if name in self._memories:
                self._library.kvant_memory_stall(self._player, self._memories[name], start, probability)
            else:
                self._library.kvant_stall(self._player, self._streams[name], start, probability)
        self._attached: dict[str, np.ndarray] = {}
        self.reset()

    def _stalls(self, stall: float | Mapping[str, float]) -> dict[str, float]:
        known = (*self._streams, *self._memories)
        stalls = dict(stall) if isinstance(stall, Mapping) else dict.fromkeys(known, stall)
        for name, probability in stalls.items():
            if name not in self._memories:
                self._number(name)
            if not 0 <= probability < 1:
                raise ParameterError(
                    f"stall of stream {name} = {probability!r}: legal is a probability from 0 to below 1"
                )
        return stalls

    def close(self) -> None:
        """Free the model; it can be used no more."""
        if self._player is not None:
            self._library.kvant_close(self._player)
            self._player = None

    def __enter__(self) -> "CompiledModel":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def cycle(self) -> int:
        """Cycles since reset."""
        return self._library.kvant_cycle(self._player)

    def _number(self, stream: str) -> int:
        if stream not in self._streams:
            raise ParameterError(f"stream {stream!r}: legal are {', '.join(self._streams)}")
        return self._streams[stream]

    def record_bytes(self, stream: str, field: str = "data") -> int:
        """Bytes of a transfer in the buffer of a field."""
        self._number(stream)
        return storage_bytes(self._fields[stream][field])

    def reset(self) -> None:
        """Reset the design, forget what is queued, and start counting cycles anew."""
        for stream, number in self._streams.items():
            self._library.kvant_drop(self._player, number)
            self._kept[stream].clear()
        self._library.kvant_reset(self._player, RESET_CYCLES)
        self._library.kvant_mark(self._player)

    def check(self, stream: str, fields: Mapping[str, np.ndarray]) -> int:
        """Number of transfers in buffers; refuses what does not fit the stream. `send` does not look at values.

        Raises
        ------
        ParameterError
            Another direction, fields, shapes or dtype, or bits above a field's width.
        """
        count = self._shapes(stream, fields, "input")
        for field, buffer in fields.items():
            width = self._fields[stream][field]
            whole, part = divmod(8 * buffer.shape[1] - width, 8)
            above = buffer[:, buffer.shape[1] - whole :].any()
            if above or (part and (buffer[:, -1 - whole] >> (8 - part)).any()):
                raise ParameterError(f"stream {stream}, field {field}: a value exceeds {width} bits")
        return count

    def _shapes(self, stream: str, fields: Mapping[str, np.ndarray], direction: str) -> int:
        self._number(stream)
        if self.design.streams[stream].direction != direction:
            raise ParameterError(
                f"stream {stream}: is an {self.design.streams[stream].direction}, legal is an {direction}"
            )
        legal = self._fields[stream]
        if set(fields) != set(legal):
            raise ParameterError(f"stream {stream}: fields {sorted(fields)} given, legal are {sorted(legal)}")
        counts = {len(buffer) for buffer in fields.values()}
        for field, buffer in fields.items():
            wanted = storage_bytes(legal[field])
            if buffer.dtype != np.uint8 or buffer.ndim != 2 or buffer.shape[1] != wanted or len(counts) > 1:
                raise ParameterError(
                    f"stream {stream}, field {field}: {buffer.dtype} {list(buffer.shape)}, "
                    f"legal is uint8 [transfers, {wanted}], as many transfers in all fields"
                )
            if not buffer.flags.c_contiguous:
                raise ParameterError(f"stream {stream}, field {field}: legal is a contiguous array")
        return counts.pop()

    def _push(self, stream: str, fields: Mapping[str, np.ndarray], count: int) -> None:
        buffers = [fields[field] for field in self._fields[stream]]
        self._kept[stream] += buffers
        pointers = (ctypes.c_void_p * max(1, len(buffers)))(*(buffer.ctypes.data for buffer in buffers))
        self._library.kvant_push(self._player, self._streams[stream], count, pointers)

    def send(self, stream: str, fields: Mapping[str, np.ndarray]) -> None:
        """Queue transfers of an input stream, behind those queued before.

        Raises
        ------
        ParameterError
            Another direction, fields, shapes or dtype. Values that exceed their width are not looked for, see `check`.
        """
        self._push(stream, fields, self._shapes(stream, fields, "input"))

    def receive(self, stream: str, count: int) -> dict[str, np.ndarray]:
        """Buffers, filled by the runs that follow, for so many transfers of an output stream.

        An output without room has to wait, unless it is discarded.
        """
        self._number(stream)
        fields = {
            name: np.zeros((count, storage_bytes(width)), np.uint8) for name, width in self._fields[stream].items()
        }
        self._shapes(stream, fields, "output")
        self._push(stream, fields, count)
        return fields

    def discard(self, stream: str, wanted: bool = True) -> None:
        """Take, and count, whatever an output stream gives, without keeping it."""
        if self.design.streams[stream].direction != "output":
            raise ParameterError(f"stream {stream}: is an input, legal is an output")
        self._library.kvant_discard(self._player, self._number(stream), wanted)

    def read(self, port: str) -> int:
        """Value of a plain output, or input, in the present cycle.

        Raises
        ------
        ParameterError
            No plain port of this name.
        """
        number, width = self._plain(port)
        value = ctypes.create_string_buffer(storage_bytes(width))
        self._library.kvant_read(self._player, number, value)
        return int.from_bytes(value.raw, "little")

    def write(self, port: str, value: int) -> None:
        """Set a plain input, from the next cycle on.

        Raises
        ------
        ParameterError
            No plain input of this name, or a value that does not fit.
        """
        number, width = self._plain(port)
        if self.design.port(port).direction != "input":
            raise ParameterError(f"port {port!r}: is an output, legal is an input")
        if not 0 <= value < 1 << width:
            raise ParameterError(f"port {port}: {value} does not fit {width} unsigned bits")
        self._library.kvant_write(self._player, number, value.to_bytes(storage_bytes(width), "little"))

    def _plain(self, port: str) -> tuple[int, int]:
        if port not in self._ports:
            raise ParameterError(f"port {port!r}: legal are {', '.join(self._ports) or 'none'}")
        return self._ports[port]

    def attach(self, memory: str, contents: np.ndarray, *, base: int = 0, latency: int = 0) -> None:
        """Put a memory behind an AXI4 master.

        The design reads and writes *contents* themselves, one word a cycle each way, bursts in their order. What lies
        elsewhere is answered with an error, as is everything before a memory is attached.

        Parameters
        ----------
        memory : str
            Name of the bus, as ``m_axi``.
        contents : u8 [bytes]
        base : int
            Address of the first of them.
        latency : int
            Cycles from the transfer of an address to the first word, and from the last word written to the answer.

        Raises
        ------
        ParameterError
            No such bus, or contents that are no contiguous array of bytes.
        """
        if memory not in self._memories:
            raise ParameterError(f"memory {memory!r}: legal are {', '.join(self._memories) or 'none'}")
        if contents.dtype != np.uint8 or contents.ndim != 1 or not contents.flags.c_contiguous:
            raise ParameterError(
                f"memory {memory}: {contents.dtype} {list(contents.shape)}; legal is contiguous uint8 [n]"
            )
        self._attached[memory] = contents
        self._library.kvant_memory(
            self._player, self._memories[memory], base, len(contents), contents.ctypes.data, latency
        )

    def memory_words(self, memory: str) -> tuple[int, int]:
        """Words read and written at an AXI4 master so far."""
        numbers = (ctypes.c_uint64 * 2)()
        self._library.kvant_memory_words(self._player, self._memories[memory], numbers)
        return numbers[0], numbers[1]

    def read_register(self, bus: str, address: int) -> tuple[int, int]:
        """Read through an AXI4-Lite slave, as ``s_axil``: the value and the response, 0 where all is well."""
        self._library.kvant_begin_read(self._player, self._register_bus(bus), address)
        return self._answer(bus)

    def write_register(self, bus: str, address: int, value: int) -> int:
        """Write through an AXI4-Lite slave; the response."""
        self._library.kvant_begin_write(self._player, self._register_bus(bus), address, value)
        return self._answer(bus)[1]

    def _register_bus(self, bus: str) -> int:
        if bus not in self._registers:
            raise ParameterError(f"registers {bus!r}: legal are {', '.join(self._registers) or 'none'}")
        return self._registers[bus]

    def _answer(self, bus: str) -> tuple[int, int]:
        outcome = _SLICE
        while outcome == _SLICE:
            outcome = self._library.kvant_run(self._player, 1 << 62, IDLE_CYCLES, SLICE_SECONDS)
        if outcome == _IDLE:
            raise SimulationError(f"registers {bus}: no answer for {IDLE_CYCLES} cycles, cycle {self.cycle}")
        self._check_fault()
        numbers = (ctypes.c_uint64 * 2)()
        self._library.kvant_answer(self._player, self._registers[bus], numbers)
        return numbers[0], numbers[1]

    def wait(self, port: str, *, limit: int | None = None, idle: int = IDLE_CYCLES) -> None:
        """Play until the lowest bit of a plain output is high.

        Parameters
        ----------
        port : str
        limit : int, optional
            Cycles of this run at most.
        idle : int
            Cycles without any transfer after which it is given up.

        Raises
        ------
        SimulationError
            A limit was reached, or a rule of a bus was broken.
        """
        number, _ = self._plain(port)
        self._library.kvant_mark(self._player)
        end, outcome = (1 << 62) if limit is None else self.cycle + limit, _SLICE
        while outcome == _SLICE:
            outcome = self._library.kvant_wait(self._player, number, end, idle, SLICE_SECONDS)
            time.sleep(0)  # an interrupt is seen here
        self._check_fault()
        if outcome != _DONE:
            reason = f"no transfer for {idle} cycles" if outcome == _IDLE else f"not high after {limit} cycles"
            raise SimulationError(f"port {port}: {reason}, cycle {self.cycle}")

    def step(self, cycles: int) -> None:
        """Play so many cycles, whatever is transferred: plain outputs settle, surplus transfers show.

        Raises
        ------
        SimulationError
            An output that waits without room, or a broken rule of the handshake.
        """
        self._library.kvant_steps(self._player, cycles)
        self._check_fault()
        for name, number in self._streams.items():
            if self.design.streams[name].direction == "output" and self._library.kvant_waits(self._player, number):
                raise SimulationError(f"stream {name}: a transfer more than expected, cycle {self.cycle}")

    def run(self, *, limit: int | None = None, idle: int = IDLE_CYCLES) -> dict[str, StreamCount]:
        """Play until everything queued is transferred.

        Parameters
        ----------
        limit : int, optional
            Cycles of this run at most.
        idle : int
            Cycles without any transfer after which it is given up.

        Returns
        -------
        dict of str to StreamCount
            By stream, of this run.

        Raises
        ------
        SimulationError
            A limit was reached (the streams that wait are named), or a stream broke a rule of the handshake.
        """
        player, play = self._player, self._library.kvant_run
        self._library.kvant_mark(player)
        begin = self.cycle
        end = (1 << 62) if limit is None else begin + limit
        outcome = _SLICE if any(count.queued for count in self.counts().values()) else _DONE
        while outcome == _SLICE:
            outcome = play(player, end, idle, SLICE_SECONDS)
            time.sleep(0)  # an interrupt is seen here
        counts = self.counts()
        if outcome in (_LIMIT, _IDLE):
            reason = f"no transfer for {idle} cycles" if outcome == _IDLE else f"not done after {limit} cycles"
            waiting = [
                f"{name} ({self.design.streams[name].direction}) {c.count} of {c.count + c.queued}"
                for name, c in counts.items()
                if c.queued
            ]
            raise SimulationError(f"{reason}, cycle {self.cycle}: waiting are {', '.join(waiting)}")
        self._check_fault()
        for kept in self._kept.values():
            kept.clear()
        return counts

    def counts(self) -> dict[str, StreamCount]:
        """Transfers since the beginning of the last run, by stream."""
        numbers = (ctypes.c_int64 * 4)()
        counts = {}
        for name, number in self._streams.items():
            self._library.kvant_stream(self._player, number, numbers)
            count, first, last, queued = numbers
            counts[name] = StreamCount(count, first if first >= 0 else None, last if last >= 0 else None, queued)
        return counts

    def _check_fault(self) -> None:
        if fault := self._library.kvant_fault(self._player):
            name = [*self._streams, *self._memories, *self._registers][(fault & 0xFFFF) - 1]
            kind = "stream" if name in self._streams else "bus"
            raise SimulationError(f"{kind} {name}: {FAULTS[fault >> 16]}, up to cycle {self.cycle}")


def records(words: Sequence[int], width: int) -> np.ndarray:
    """Unsigned integers of *width* bits as a buffer u8 [transfers, bytes]."""
    size = storage_bytes(width)
    return np.frombuffer(b"".join(word.to_bytes(size, "little") for word in words), np.uint8).reshape(-1, size)


def _load(path: str) -> ctypes.CDLL:
    """The library with the types of its functions."""
    pointer, integer, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    signatures = {
        "kvant_open": (pointer, []),
        "kvant_close": (None, [pointer]),
        "kvant_reset": (None, [pointer, integer]),
        "kvant_cycle": (wide, [pointer]),
        "kvant_fault": (integer, [pointer]),
        "kvant_run": (integer, [pointer, wide, wide, ctypes.c_double]),
        "kvant_steps": (None, [pointer, wide]),
        "kvant_mark": (None, [pointer]),
        "kvant_push": (None, [pointer, integer, ctypes.c_uint64, ctypes.POINTER(pointer)]),
        "kvant_drop": (None, [pointer, integer]),
        "kvant_discard": (None, [pointer, integer, integer]),
        "kvant_waits": (integer, [pointer, integer]),
        "kvant_stall": (None, [pointer, integer, ctypes.c_uint64, ctypes.c_double]),
        "kvant_stream": (None, [pointer, integer, ctypes.POINTER(wide)]),
        "kvant_read": (None, [pointer, integer, pointer]),
        "kvant_write": (None, [pointer, integer, ctypes.c_char_p]),
        "kvant_wait": (integer, [pointer, integer, wide, wide, ctypes.c_double]),
        "kvant_memory": (None, [pointer, integer, ctypes.c_uint64, ctypes.c_uint64, pointer, wide]),
        "kvant_memory_stall": (None, [pointer, integer, ctypes.c_uint64, ctypes.c_double]),
        "kvant_memory_words": (None, [pointer, integer, ctypes.POINTER(ctypes.c_uint64)]),
        "kvant_begin_write": (None, [pointer, integer, ctypes.c_uint64, ctypes.c_uint64]),
        "kvant_begin_read": (None, [pointer, integer, ctypes.c_uint64]),
        "kvant_answer": (None, [pointer, integer, ctypes.POINTER(ctypes.c_uint64)]),
    }
    library_ = ctypes.CDLL(path)
    for name, (result, arguments) in signatures.items():
        function = getattr(library_, name)
        function.restype, function.argtypes = result, arguments
    return library_
