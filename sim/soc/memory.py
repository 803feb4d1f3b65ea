"""A memory at an AXI4 port, cycle by cycle, for any simulator; it checks what the master does."""

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvant.sim.errors import SimulationError

PAGE = 4096
INCR = 1
OKAY, SLVERR = 0, 2

_STABLE = {
    "ar": ("arid", "araddr", "arlen", "arsize", "arburst"),
    "aw": ("awid", "awaddr", "awlen", "awsize", "awburst"),
    "w": ("wdata", "wstrb", "wlast"),
}
MASTER_SIGNALS = tuple(f"{channel}valid" for channel in _STABLE) + tuple(
    name for names in _STABLE.values() for name in names
)
"""What a master drives, but for the readies of its answers."""


@dataclass
class _Answer:
    due: int
    identifier: int
    address: int = 0
    last: bool = False


@dataclass
class _Write:
    identifier: int
    address: int
    beats: int
    error: bool = False


@dataclass
class AxiMemory:
    """Memory of *size* bytes from address 0.

    `drive` gives what the memory drives in a cycle, after the rising edge that begins it; `sample` takes what the
    master drives then, before the edge that ends it.

    Parameters
    ----------
    size : int
        Bytes; accesses beyond are answered with an error.
    port_bytes : int
    latency : int
        Cycles from the transfer of an address to the first word, and from the last word written to the answer. Bursts
        are pipelined.
    stall : float
        Probability of a pause of each channel in each cycle.
    seed : int
    mixed : bool
        Words of different identifiers come back in any order.
    fault : callable
        ``fault("read" or "write", address)``: whether the access to a word is answered with an error.

    Attributes
    ----------
    data : bytearray
    reads, writes : list of (address, beats)
        Bursts, in the order of their addresses' transfers.
    """

    size: int
    port_bytes: int
    latency: int = 0
    stall: float = 0.0
    seed: int = 0
    mixed: bool = True
    fault: Callable[[str, int], bool] = lambda kind, address: False
    reads: list[tuple[int, int]] = field(default_factory=list)
    writes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self):
        self.data = bytearray(self.size)
        self.cycle = 0
        self._random = random.Random(self.seed)
        self._read_answers: dict[int, deque[_Answer]] = {}
        self._writes: deque[_Write] = deque()
        self._words: deque[tuple[int, int, int]] = deque()  # whose address is not known yet
        self._answers: deque[_Answer] = deque()
        self._shown: dict[str, _Answer | None] = {"r": None, "b": None}
        self._driven: dict[str, int] = {}
        self._held: dict[str, tuple[int, ...]] = {}
        self.transferred = {"r": 0, "w": 0}

    @property
    def busy(self) -> bool:
        """An answer is owed."""
        return any(self._read_answers.values()) or bool(self._writes or self._answers) or any(self._shown.values())

    def _pause(self) -> bool:
        return self.stall > 0 and self._random.random() < self.stall

    def drive(self) -> dict[str, int]:
        """The memory's signals in this cycle."""
        if self._shown["r"] is None and not self._pause():
            due = [q for q in self._read_answers.values() if q and q[0].due <= self.cycle]
            if due:
                queue = self._random.choice(due) if self.mixed else min(due, key=lambda q: q[0].due)
                self._shown["r"] = queue.popleft()
        if self._shown["b"] is None and self._answers and self._answers[0].due <= self.cycle and not self._pause():
            self._shown["b"] = self._answers.popleft()
        r, b = self._shown["r"], self._shown["b"]
        garbage = (1 << 8 * self.port_bytes) - 1
        values = {
            "arready": int(not self._pause()),
            "awready": int(not self._pause()),
            "wready": int(not self._pause()),
            "rvalid": int(r is not None),
            "rid": r.identifier if r else 3,
            "rdata": garbage,
            "rresp": SLVERR,
            "rlast": int(r.last) if r else 1,
            "bvalid": int(b is not None),
            "bid": b.identifier if b else 3,
            "bresp": SLVERR if b is None or b.last else OKAY,
        }
        if r is not None and not self._bad("read", r.address):
            values["rresp"] = OKAY
            values["rdata"] = int.from_bytes(self.data[r.address : r.address + self.port_bytes], "little")
        self._driven = values
        return values

    def _bad(self, kind: str, address: int) -> bool:
        return address + self.port_bytes > self.size or self.fault(kind, address)

    def sample(self, seen: Mapping[str, int]) -> None:
        """Take the master's signals of this cycle: `MASTER_SIGNALS`, ``rready`` and ``bready``.

        Raises
        ------
        SimulationError
            The master breaks a rule of AXI4.
        """
        driven = self._driven
        for channel, names in _STABLE.items():
            valid, payload = seen[f"{channel}valid"], tuple(seen[name] for name in names)
            held = self._held.get(channel)
            if held is not None and (not valid or payload != held):
                raise SimulationError(f"{channel} changed while it waited, cycle {self.cycle}: {held} to {payload}")
            taken = valid and driven[f"{channel}ready"]
            self._held[channel] = payload if valid and not taken else None
            if taken:
                getattr(self, f"_take_{channel}")(*payload)
        if self._shown["r"] is not None and seen["rready"]:
            self._shown["r"] = None
            self.transferred["r"] += 1
        if self._shown["b"] is not None and seen["bready"]:
            self._shown["b"] = None
        self.cycle += 1

    def _check_burst(self, what: str, address: int, length: int, size: int, burst: int) -> int:
        beats = length + 1
        if 1 << size != self.port_bytes or burst != INCR or address % self.port_bytes:
            raise SimulationError(f"{what} burst at {address:#x}: size {size}, type {burst}")
        if address // PAGE != (address + beats * self.port_bytes - 1) // PAGE:
            raise SimulationError(f"{what} burst at {address:#x}: {beats} beats cross a multiple of {PAGE}")
        return beats

    def _take_ar(self, identifier: int, address: int, length: int, size: int, burst: int) -> None:
        beats = self._check_burst("read", address, length, size, burst)
        self.reads.append((address, beats))
        queue = self._read_answers.setdefault(identifier, deque())
        for beat in range(beats):
            due = self.cycle + 1 + self.latency
            queue.append(_Answer(due, identifier, address + beat * self.port_bytes, beat == beats - 1))

    def _take_aw(self, identifier: int, address: int, length: int, size: int, burst: int) -> None:
        beats = self._check_burst("write", address, length, size, burst)
        self.writes.append((address, beats))
        self._writes.append(_Write(identifier, address, beats))
        self._early_words()

    def _take_w(self, word: int, strobes: int, last: int) -> None:
        self.transferred["w"] += 1
        self._words.append((word, strobes, last))
        self._early_words()

    def _early_words(self) -> None:
        """Write the words whose address is known."""
        words = self._words
        while words and self._writes:
            word, strobes, last = words.popleft()
            write = self._writes[0]
            write.beats -= 1
            if bool(last) != (write.beats == 0):
                raise SimulationError(f"write burst: wlast = {last} with {write.beats} words to come")
            if self._bad("write", write.address):
                write.error = True
            else:
                for byte in range(self.port_bytes):
                    if strobes >> byte & 1:
                        self.data[write.address + byte] = word >> 8 * byte & 255
            write.address += self.port_bytes
            if last:
                self._writes.popleft()
                self._answers.append(_Answer(self.cycle + 1 + self.latency, write.identifier, last=write.error))
