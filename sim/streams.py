"""Stream transfers of a simulation, and the player that all simulators share.

Sampling discipline. Everything the bench drives changes just after a rising clock edge; everything it looks at is
sampled at the falling edge, when the design has settled. What is valid and ready there is transferred at the rising
edge that follows. Nothing is ever read or written at the edge itself, so the order in which a simulator runs its
processes cannot matter.

Cycle 0 is the first cycle after reset.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvant.sim.errors import SimulationError

CLOCK_PERIOD_NS = 10

Stall = float | Sequence[int] | Literal["after_valid"]
"""When a stream pauses: with this probability in every cycle; in the cycles of a repeated pattern that hold a 1; or
(outputs only) whenever valid was not high in the cycle before, so that ready always follows valid."""


@dataclass(frozen=True)
class Stimulus:
    """What a simulation plays.

    Parameters
    ----------
    inputs : dict
        Of each input stream the list of values of each field, as unsigned integers of the port's width. Input streams
        that are not named stay idle.
    expect : dict
        Of each output stream the number of transfers after which the run is complete. Output streams that are not
        named are read and recorded, whatever comes.
    status : sequence of str
        Plain outputs that are sampled at the end.
    constants : dict
        Plain inputs, held through the run; those that are not named are 0.
    after : dict
        Of an input stream another stream and the number of its transfers before which the first offers nothing.
    echo : dict
        Of an input stream, as a memory behind the design would serve it, an output stream and the numbers of those of
        its transfers whose payload is offered, each once it has been seen. Fields of both have the same names; the
        stream has no other inputs.
    """

    inputs: Mapping[str, Mapping[str, Sequence[int]]]
    expect: Mapping[str, int] = field(default_factory=dict)
    status: Sequence[str] = ()
    constants: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    echo: Mapping[str, tuple[str, Sequence[int]]] = field(default_factory=dict)


@dataclass
class Trace:
    """What a simulation saw.

    Members
    -------
    transfers : dict
        Of each stream, inputs and outputs, the list of values of each field, as unsigned integers.
    cycles : dict
        Of each stream, inputs and outputs, the cycle of each transfer.
    status : dict
        The plain outputs asked for, sampled `drain_cycles` after the last transfer.
    """

    transfers: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    cycles: dict[str, list[int]] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Reset:
    """When reset is asserted.

    Parameters
    ----------
    cycles : int
        Length of each reset, at least 1.
    again_at : int or None
        Cycle in which a second reset begins, in the middle of the run. All streams then start anew, and what was
        transferred before is forgotten: the trace is that of a cold start if the design resets as it should.
    hold_valid : bool
        Offer the first transfer of every input during reset, instead of holding valid low.
    """

    cycles: int = 2
    again_at: int | None = None
    hold_valid: bool = False


@dataclass(frozen=True)
class StreamPorts:
    """Ports of a stream; `valid` or `ready` is None where the signal is constantly 1.

    `fields` are (field, port, width).
    """

    name: str
    valid: str | None
    ready: str | None
    fields: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True)
class Plan:
    """Everything a run needs, in ports and numbers: plain data that can be handed to a simulator's process."""

    inputs: tuple[StreamPorts, ...]
    outputs: tuple[StreamPorts, ...]
    values: Mapping[str, Sequence[tuple[int, ...]]]
    expect: Mapping[str, int]
    status: tuple[str, ...]
    constants: Mapping[str, int]
    after: Mapping[str, tuple[str, int]]
    echo: Mapping[str, tuple[str, Sequence[int]]]
    stall: Mapping[str, Stall]
    seed: int
    reset: Reset
    timeout_cycles: int
    drain_cycles: int


class UnknownValueError(ValueError):
    """A signal holds bits that are neither 0 nor 1."""

    def __init__(self, port: str, bits: str):
        super().__init__(f"{port} = {bits}")
        self.port = port
        self.bits = bits


def _pauses(stall: Stall, seed: int, stream: str) -> Iterator[bool] | None:
    """Whether the stream pauses, cycle by cycle; None: never.

    The generator of a stream depends on seed and name alone and is drawn from once per cycle: the same on every
    simulator, whatever the other streams do.
    """
    if isinstance(stall, str) or stall == 0:
        return None
    if isinstance(stall, (int, float)):
        draw = random.Random(f"{seed}/{stream}").random
        return (draw() < stall for _ in itertools.repeat(None))
    return itertools.cycle([bool(value) for value in stall])


class _Source:
    """Plays one input stream: a transfer once offered stays until it is taken."""

    def __init__(self, ports: StreamPorts, values: Sequence[tuple[int, ...]], pauses: Iterator[bool] | None):
        self.name = ports.name
        self.valid = ports.valid
        self.ready = ports.ready
        self.fields = tuple(name for name, _, _ in ports.fields)
        self.ports = tuple(port for _, port, _ in ports.fields)
        # While valid is low the payload shows the complement of what was last there: a design that looks fails.
        self.masks = tuple((1 << width) - 1 for _, _, width in ports.fields)
        self.values = values
        self.count = len(values)
        self.pauses = pauses
        self.next = 0
        self.offering = False
        self.shown = (0,) * len(self.ports)
        self.valid_high = False
        self.cycles: list[int] = []

    def clear(self, write: Callable[[str, int], Any]) -> None:
        """Drive everything to 0."""
        if self.valid:
            write(self.valid, 0)
        for port in self.ports:
            write(port, 0)

    def offer(self, write: Callable[[str, int], Any], pause: bool) -> None:
        """Show the next transfer, or none."""
        payload = None if pause else self.payload()
        if payload is not None:
            self.offering = True
            if not self.valid_high:
                self.valid_high = True
                if self.valid:
                    write(self.valid, 1)
        elif self.valid_high:
            self.valid_high = False
            if self.valid:
                write(self.valid, 0)
            payload = tuple(value ^ mask for value, mask in zip(self.shown, self.masks, strict=True))
        if payload is not None:
            for port, value, before in zip(self.ports, payload, self.shown, strict=True):
                if value != before:
                    write(port, value)
            self.shown = payload

    def payload(self) -> tuple[int, ...] | None:
        """The next transfer, if there is one."""
        return self.values[self.next] if self.next < self.count else None


class _Echo(_Source):
    """Plays what an output stream has given before."""

    def __init__(self, ports: StreamPorts, sink: "_Sink", numbers: Sequence[int], pauses: Iterator[bool] | None):
        super().__init__(ports, [], pauses)
        self.count = len(numbers)
        self.numbers = numbers
        self.sink = sink
        self.columns = [sink.fields.index(name) for name in self.fields]

    def payload(self) -> tuple[int, ...] | None:
        if self.next >= self.count or self.numbers[self.next] >= len(self.sink.taken):
            return None
        if self.next == len(self.values):
            taken = self.sink.taken[self.numbers[self.next]]
            self.values.append(tuple(taken[column] for column in self.columns))
        return self.values[self.next]


class _Sink:
    """Takes one output stream and watches that nothing changes while it stalls."""

    def __init__(self, ports: StreamPorts, expect: int | None, pauses: Iterator[bool] | None, after_valid: bool):
        self.name = ports.name
        self.valid = ports.valid
        self.ready = ports.ready
        self.fields = tuple(name for name, _, _ in ports.fields)
        self.ports = tuple(port for _, port, _ in ports.fields)
        self.expect = expect
        self.pauses = pauses
        self.after_valid = after_valid
        self.is_ready = ports.ready is None
        self.waiting: tuple[int, ...] | None = None
        self.taken: list[tuple[int, ...]] = []
        self.cycles: list[int] = []


class Player:
    """Plays a `Plan`: `drive` just after every rising edge, `sample` at every falling edge.

    Parameters
    ----------
    plan : Plan
    write : callable(port, value)
        Sets an input.
    read : callable(port) -> int
        Raises `UnknownValueError` where a bit is neither 0 nor 1.
    """

    def __init__(self, plan: Plan, write: Callable[[str, int], Any], read: Callable[[str], int]):
        self._plan = plan
        self._write = write
        self._read = read
        self._elapsed = -1
        self._may_restart = plan.reset.again_at is not None
        self._status: dict[str, int] = {}
        self._start()

    def _start(self) -> None:
        plan = self._plan

        def pauses(name: str) -> Iterator[bool] | None:
            return _pauses(plan.stall.get(name, 0.0), plan.seed, name)

        self._sinks = [
            _Sink(ports, plan.expect.get(ports.name), pauses(ports.name), plan.stall.get(ports.name) == "after_valid")
            for ports in plan.outputs
        ]
        sinks = {sink.name: sink for sink in self._sinks}

        def source(ports: StreamPorts) -> _Source:
            if ports.name in plan.echo:
                sink, numbers = plan.echo[ports.name]
                return _Echo(ports, sinks[sink], numbers, pauses(ports.name))
            return _Source(ports, plan.values[ports.name], pauses(ports.name))

        self._sources = [source(ports) for ports in plan.inputs]
        streams = {stream.name: stream for stream in (*self._sources, *self._sinks)}
        self._held = {
            stream: (streams[other], count) for stream, (other, count) in plan.after.items() if stream in streams
        }
        self._missing = sum(source.count for source in self._sources) + sum(plan.expect.values())
        self._cycle = -plan.reset.cycles - 1
        self._last_progress = 0

    def drive(self) -> None:
        """Set the inputs of the cycle that begins."""
        self._elapsed += 1
        self._cycle += 1
        if self._may_restart and self._cycle == self._plan.reset.again_at:
            self._may_restart = False
            self._start()
            self._cycle += 1
        cycle, write = self._cycle, self._write
        if cycle < 0:
            if cycle == -self._plan.reset.cycles:
                self._enter_reset()
            return
        if cycle == 0:
            write("rst", 0)
        for source in self._sources:
            pause = source.pauses is not None and next(source.pauses)
            if not source.offering:
                source.offer(write, pause or self._is_held(source))
        for sink in self._sinks:
            if sink.ready is None:
                continue
            paused = sink.pauses is not None and next(sink.pauses)
            ready = not paused and (sink.waiting is not None or not sink.after_valid)
            if ready != sink.is_ready:
                sink.is_ready = ready
                write(sink.ready, ready)

    def _is_held(self, source: _Source) -> bool:
        """Whether *source* has to wait for another stream's transfers."""
        if source.name not in self._held:
            return False
        other, count = self._held[source.name]
        if len(other.cycles) < count:
            return True
        del self._held[source.name]
        return False

    def _enter_reset(self) -> None:
        write = self._write
        write("rst", 1)
        for port, value in self._plan.constants.items():
            write(port, value)
        for source in self._sources:
            source.clear(write)
            if self._plan.reset.hold_valid and not self._is_held(source):
                source.offer(write, False)
        for sink in self._sinks:
            if sink.ready:
                write(sink.ready, 0)

    def sample(self) -> bool:
        """Look at the outputs; True when the run is complete."""
        try:
            if self._cycle >= 0:
                return self._sample_run()
            for stream in (*self._sinks, *self._sources):  # known from the first cycle of reset on
                port = stream.ready if isinstance(stream, _Source) else stream.valid
                if port:
                    self._read(port)
        except UnknownValueError as error:
            unknown = sum(bit not in "01" for bit in error.bits)
            text = f"signal {error.port} is unknown ({unknown} of {len(error.bits)} bits) {self._when()}"
            raise SimulationError(text) from None
        return False

    def _sample_run(self) -> bool:
        read, cycle, missing = self._read, self._cycle, self._missing
        for source in self._sources:
            if source.offering and (source.ready is None or read(source.ready)):
                source.offering = False
                source.next += 1
                source.cycles.append(cycle)
                missing -= 1
        missing -= self._sample_sinks()
        if missing != self._missing:
            self._missing = missing
            self._last_progress = cycle
        elif missing:
            if cycle - self._last_progress >= self._plan.timeout_cycles:
                raise SimulationError(self._timeout())
        elif cycle - self._last_progress >= self._plan.drain_cycles:
            self._status = {port: read(port) for port in self._plan.status}
            return True
        return False

    def _sample_sinks(self) -> int:
        """Take what the outputs offer; the number of expected transfers among it."""
        read, cycle, received = self._read, self._cycle, 0
        for sink in self._sinks:
            if sink.valid is None or read(sink.valid):
                payload = tuple([read(port) for port in sink.ports])
                if sink.waiting is not None and payload != sink.waiting:
                    raise SimulationError(f"stream {sink.name}: payload changed while it waited {self._when()}")
                if sink.is_ready:
                    sink.waiting = None
                    sink.taken.append(payload)
                    sink.cycles.append(cycle)
                    if sink.expect is not None:
                        if len(sink.taken) > sink.expect:
                            raise SimulationError(
                                f"stream {sink.name}: more than the {sink.expect} transfers expected {self._when()}"
                            )
                        received += 1
                else:
                    sink.waiting = payload
            elif sink.waiting is not None:
                raise SimulationError(f"stream {sink.name}: valid dropped while it waited {self._when()}")
        return received

    def _when(self) -> str:
        time = self._elapsed * CLOCK_PERIOD_NS + CLOCK_PERIOD_NS // 2
        return f"at {time} ns, cycle {self._cycle}" if self._cycle >= 0 else f"at {time} ns, in reset"

    def _timeout(self) -> str:
        counts = [f"{source.name} {source.next} of {source.count} sent" for source in self._sources]
        counts += [
            f"{sink.name} {len(sink.taken)} of {sink.expect} received"
            for sink in self._sinks
            if sink.expect is not None
        ]
        return f"no transfer for {self._plan.timeout_cycles} cycles: {', '.join(counts)} ({self._when()})"

    def trace(self) -> Trace:
        """What was seen; to be called when `sample` has returned True."""
        trace = Trace(status=self._status)
        for stream in (*self._sources, *self._sinks):
            values = stream.values if isinstance(stream, _Source) else stream.taken
            columns = list(zip(*values, strict=True)) if values else [()] * len(stream.fields)
            trace.transfers[stream.name] = {
                name: list(column) for name, column in zip(stream.fields, columns, strict=True)
            }
            trace.cycles[stream.name] = stream.cycles
        return trace
