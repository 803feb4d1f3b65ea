"""RTLIL text between Amaranth and Yosys: conventional names, and one module for all identical instances.

Amaranth writes one module per instance. Instances of one component then differ only in the order, the names and the
borders of their ports, which follow the nets of the surrounding design. `merge_modules` brings every module to a
canonical form and keeps one of each.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvant.hw.verilog import KEYWORDS

_KEPT_ATTRIBUTES = frozenset(
    {"init", "keep", "no_rw_check", "ram_style", "syn_ramstyle", "rom_style", "romstyle", "ramstyle"}
)
"""Attributes that mean something to a synthesis tool; all others are notes of the front end."""

_AUTOMATIC = "\\port$"
"""Start of the names of ports that Amaranth made from nets without a signal of just these bits."""

_NAME = re.compile(r"[\\$]\S+")
_WIRE = re.compile(r"wire width (\d+)( signed)?(?: (input|output|inout) \d+ )?(?: (signed))? (\S+)$")
_CHUNK = re.compile(r"(?P<name>[\\$]\S+)(?: \[(?P<high>\d+)(?::(?P<low>\d+))?\])?|(?P<width>\d+)'(?P<bits>[01xzm-]*)")


@dataclass
class _Wire:
    name: str
    width: int
    signed: bool
    direction: str | None
    attributes: list[str]


@dataclass
class _Line:
    """A line of a module's body.

    `kind` is "cell" (`head`: type, `spec`: name), "pin" (a port connection of a cell; `head`: port, `spec`: signal),
    "memory" (`spec`: name), "memid" (a cell parameter that names a memory), "connect" (`head`: nothing, `spec`: both
    sides), "text" (no names of this module) or "other" (processes, ends).
    """

    kind: str
    head: str
    spec: str


@dataclass
class _Module:
    name: str
    wires: dict[str, _Wire] = field(default_factory=dict)
    body: list[_Line] = field(default_factory=list)

    def ports(self) -> list[_Wire]:
        return [wire for wire in self.wires.values() if wire.direction]


@dataclass(frozen=True)
class _Part:
    """Bits `low` to `low + width - 1` of a wire; of a constant `name` holds the bits and `low` is -1."""

    name: str
    low: int
    width: int

    def __str__(self) -> str:
        if self.low < 0:
            return f"{self.width}'{self.name}"
        if self.width == 1:
            return f"{self.name} [{self.low}]"
        return f"{self.name} [{self.low + self.width - 1}:{self.low}]"


def _parse(text: str) -> Iterator[_Module]:
    module, attributes, nesting = None, [], []
    for raw in text.splitlines():
        words = raw.split()
        if not words:
            continue
        line = raw.strip()
        word = words[0]
        if word == "module":
            module, attributes = _Module(words[1]), []
        elif word == "attribute":
            if words[1].lstrip("\\") in _KEPT_ATTRIBUTES:
                attributes.append(line)
        elif word == "wire":
            width, signed, direction, port_signed, name = _WIRE.match(line).groups()
            module.wires[name] = _Wire(name, int(width), bool(signed or port_signed), direction, attributes)
            attributes = []
        elif word == "end" and not nesting:
            yield module
        else:
            module.body += [_Line("text", attribute, "") for attribute in attributes]
            attributes = []
            in_cell = bool(nesting) and nesting[-1] == "cell"
            if word in ("cell", "process", "switch"):
                nesting.append(word)
            elif word == "end":
                nesting.pop()
            if word == "cell":
                module.body.append(_Line("cell", words[1], words[2]))
            elif word == "memory":
                module.body.append(_Line("memory", " ".join(words[:-1]), words[-1]))
            elif word == "parameter":
                memory = words[1] == "\\MEMID"
                head, spec = (" ".join(words[:2]), words[2].strip('"').replace("\\\\", "\\")) if memory else (line, "")
                module.body.append(_Line("memid" if memory else "text", head, spec))
            elif word == "connect" and in_cell:
                module.body.append(_Line("pin", words[1], line.split(" ", 2)[2]))
            elif word == "connect":
                module.body.append(_Line("connect", "", line.split(" ", 1)[1]))
            else:
                module.body.append(_Line("other", "", line))


def _parts(spec: str, wires: dict[str, _Wire]) -> list[_Part]:
    """The parts of a signal specification, most significant first."""
    parts = []
    for match in _CHUNK.finditer(spec):
        name = match["name"]
        if name is None:
            parts.append(_Part(match["bits"], -1, int(match["width"])))
        elif match["high"] is None:
            parts.append(_Part(name, 0, wires[name].width))
        else:
            high = int(match["high"])
            low = high if match["low"] is None else int(match["low"])
            parts.append(_Part(name, low, high - low + 1))
    return parts


def _slice(parts: list[_Part], low: int, width: int) -> list[_Part]:
    """Bits *low* to *low + width - 1* of a concatenation."""
    result, at = [], 0
    for part in reversed(parts):
        start, stop = max(low - at, 0), min(low + width - at, part.width)
        if start < stop:
            if part.low < 0:
                result.append(_Part(part.name[part.width - stop : part.width - start], -1, stop - start))
            else:
                result.append(_Part(part.name, part.low + start, stop - start))
        at += part.width
    return result[::-1]


def _spec(parts: list[_Part]) -> str:
    return str(parts[0]) if len(parts) == 1 else "{ " + " ".join(map(str, parts)) + " }"


def _rewrite(spec: str, replace: Callable[[re.Match], list[_Part] | None]) -> str:
    """Replace wire references of a line, with braces where one becomes several outside a concatenation."""
    out, at, braces = [], 0, 0
    for match in re.finditer(r"[{}](?= |$)|" + _CHUNK.pattern, spec):
        if match[0] in ("{", "}"):
            braces += 1 if match[0] == "{" else -1
        elif match["name"] is not None and (parts := replace(match)) is not None:
            out += [spec[at : match.start()], " ".join(map(str, parts)) if braces else _spec(parts)]
            at = match.end()
    return "".join([*out, spec[at:]])


def _drop_empty(module: _Module) -> None:
    """Drop wires without bits, and what drives them: Verilog has no such thing."""
    empty = {wire.name for wire in module.wires.values() if not wire.width}
    if not empty:
        return
    body: list[_Line] = []
    start = None  # where the cell that is being read begins
    drop = False
    for line in module.body:
        if line.kind == "cell":
            start, drop = len(body), False
        if line.kind == "pin" and line.spec in empty:
            drop = True
        elif line.kind in ("connect", "other") and empty.intersection(_NAME.findall(line.spec)):
            continue
        body.append(line)
        if start is not None and line.spec == "end":
            if drop:
                del body[start:]
            start = None
    module.body = body
    module.wires = {name: wire for name, wire in module.wires.items() if wire.width}


def _split_ports(module: _Module) -> dict[str, list[_Part]]:
    """Split the ports that Amaranth joined from neighbouring nets back into the signals of the module.

    Where a wire of the module repeats some bits of such a port, this wire becomes the port. Without this, instances
    that get two operands from neighbouring bits of one wire differ from those that do not.

    Returns
    -------
    dict
        Of a former port its parts, least significant first: new name, position in the former port, width.
    """
    aliases: dict[str, list[_Part]] = {}
    for line in module.body:
        if line.kind == "connect":
            target, *source = _parts(line.spec, module.wires)
            whole = target.low == 0 and target.width == module.wires[target.name].width
            if whole and len(source) == 1 and source[0].name.startswith(_AUTOMATIC):
                aliases.setdefault(source[0].name, []).append(_Part(target.name, source[0].low, source[0].width))
    covers: dict[str, list[_Part]] = {}
    for port in module.ports():
        taken: list[_Part] = []
        for alias in sorted(aliases.get(port.name, ()), key=lambda part: -part.width):
            if all(alias.low + alias.width <= other.low or other.low + other.width <= alias.low for other in taken):
                taken.append(alias)
        if not taken:
            continue
        cover, at = [], 0
        for part in [*sorted(taken, key=lambda part: part.low), _Part("", port.width, 0)]:
            if at < part.low:
                cover.append(_Part(f"{port.name}${at}", at, part.low - at))
            if part.width:
                cover.append(part)
            at = part.low + part.width
        covers[port.name] = cover
    if not covers:
        return {}

    def replace(match: re.Match) -> list[_Part] | None:
        if match["name"] not in covers:
            return None
        (whole,) = _parts(match[0], module.wires)
        parts = []
        for part in reversed(covers[whole.name]):
            start = max(whole.low, part.low)
            stop = min(whole.low + whole.width, part.low + part.width)
            if start < stop:
                parts.append(_Part(part.name, start - part.low, stop - start))
        return parts

    body = []
    for line in module.body:
        if line.kind in ("pin", "connect", "other"):
            if line.kind == "connect":
                target, *source = _parts(line.spec, module.wires)
                if len(source) == 1 and _Part(target.name, source[0].low, source[0].width) in covers.get(
                    source[0].name, ()
                ):
                    continue  # the wire has become the port
            spec = _rewrite(line.spec, replace)
            body.append(_Line(line.kind, line.head, spec))
        else:
            body.append(line)
    module.body = body
    for name, cover in covers.items():
        port = module.wires.pop(name)
        for part in cover:
            module.wires.pop(part.name, None)
            module.wires[part.name] = _Wire(part.name, part.width, False, port.direction, [])
    return covers


def _drop_unread(module: _Module, *, fields_only: bool = False) -> None:
    """Drop wires that only repeat another one and are not read: lint would call them unused.

    Most are the fields of a structure (*fields_only*: no others), which never are outputs in another instance.
    """
    reads: dict[str, int] = {}
    aliases: dict[str, int] = {}
    for number, line in enumerate(module.body):
        if line.kind in ("pin", "connect", "other"):
            names = _NAME.findall(line.spec)
            if line.kind == "connect" and module.wires[names[0]].direction is None:
                aliases.setdefault(names[0], number)
                names = names[1:]
            for name in names:
                reads[name] = reads.get(name, 0) + 1
    dropped: set[int] = set()
    if fields_only:
        aliases = {name: number for name, number in aliases.items() if "." in name or "[" in name}
    waiting = [name for name in aliases if not reads.get(name)]
    while waiting:
        name = waiting.pop()
        dropped.add(aliases[name])
        del module.wires[name]
        for source in _NAME.findall(module.body[aliases[name]].spec)[1:]:
            reads[source] -= 1
            if not reads[source] and source in aliases:
                waiting.append(source)
    module.body = [line for number, line in enumerate(module.body) if number not in dropped]


def _unique(base: str, taken: set[str]) -> str:
    """*base*, or with the first free number behind it."""
    name, number = base, 1
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    taken.add(name)
    return name


def _plain(name: str) -> str:
    """A conventional identifier for an RTLIL one: no ``$``, dots or brackets, no reserved word."""
    name = re.sub(r"\$\d+", "", name.lstrip("\\"))
    name = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_") or "u"
    if name in KEYWORDS:
        return f"{name}_"
    return f"u{name}" if name[0].isdigit() else name


def _new_names(module: _Module) -> dict[str, str]:
    """Conventional names of all public wires, memories and cells; the same whether or not an output is used outside."""
    uses: dict[str, int] = {}
    for line in module.body:
        for name in _NAME.findall(line.spec):
            uses.setdefault(name, len(uses))

    def order(wire: _Wire) -> tuple[bool, bool, str, int]:
        automatic = wire.name.startswith(_AUTOMATIC)
        return automatic, wire.direction != "input", "" if automatic else wire.name, uses.get(wire.name, -1)

    names, taken = {}, set()
    wires = [wire.name for wire in sorted(module.wires.values(), key=order)]
    for name in wires + [line.spec for line in module.body if line.kind in ("cell", "memory")]:
        if name.startswith("\\"):
            names[name] = "\\" + _unique(_plain(name), taken)
    return names


def _render(module: _Module, names: dict[str, str], ports: list[str]) -> str:
    """The text of a module behind its first line, with *ports* (new names) in this order."""

    def renamed(spec: str) -> str:
        return _NAME.sub(lambda match: names.get(match[0], match[0]), spec)

    lines = []
    numbers = {name: number for number, name in enumerate(ports, 1)}
    wires = [(names.get(wire.name, wire.name), wire) for wire in module.wires.values()]
    for name, wire in sorted(wires, key=lambda item: (numbers.get(item[0], len(numbers) + 1), item[0])):
        direction = f" {wire.direction} {numbers[name]}" if name in numbers else ""
        lines += [*wire.attributes, f"wire width {wire.width}{direction}{' signed' if wire.signed else ''} {name}"]
    pins: list[str] = []
    for line in module.body:
        if line.kind == "pin":  # in alphabetical order: Amaranth's follows the nets of the design
            pins.append(f"connect {line.head} {renamed(line.spec)}")
            continue
        lines += sorted(pins)
        pins = []
        if line.kind == "text":
            lines.append(line.head)
        elif line.kind == "memid":
            lines.append(f'{line.head} "{names[line.spec].replace(chr(92), chr(92) * 2)}"')
        elif line.kind == "cell":
            lines.append(f"cell {line.head} {renamed(line.spec)}")
        elif line.kind == "connect":
            lines.append(f"connect {renamed(line.spec)}")
        else:
            lines.append(f"{line.head} {renamed(line.spec)}".strip())
    return "\n".join([*lines, "end", ""])


@dataclass
class _Kind:
    """Modules that are one: its new name, one of them, its new names, and the ports that any of them has."""

    name: str
    module: _Module
    names: dict[str, str]
    inputs: list[str]
    outputs: set[str]

    @property
    def ports(self) -> list[str]:
        return [*self.inputs, *sorted(self.outputs)]


def _connect_children(
    module: _Module,
    kinds: dict[str, _Kind],
    covers: dict[str, dict[str, list[_Part]]],
    names: dict[str, dict[str, str]],
) -> None:
    """Adapt cells to the new names of their modules and ports."""
    body, child = [], None
    for line in module.body:
        if line.kind == "cell":
            child = line.head if line.head in kinds else None
            body.append(_Line("cell", line.head if child is None else kinds[child].name, line.spec))
        elif line.kind == "pin" and child is not None:
            cover = covers[child].get(line.head)
            if cover is None:
                body.append(_Line("pin", names[child][line.head], line.spec))
            else:
                parts = _parts(line.spec, module.wires)
                body += [
                    _Line("pin", names[child][part.name], _spec(_slice(parts, part.low, part.width))) for part in cover
                ]
        else:
            body.append(line)
    module.body = body


def _complete_pins(kind: _Kind, kinds: dict[str, _Kind]) -> None:
    """Connect the outputs that this instance leaves open, but another instance of the same module uses."""
    body, cell, pins = [], None, set()
    for line in kind.module.body:
        if line.kind == "cell":
            cell, pins = line, set()
        elif line.kind == "pin":
            pins.add(line.head)
        elif cell is not None and line.spec == "end":
            child = kinds.get(cell.head)
            for port in sorted(child.outputs - pins) if child is not None else ():
                wire = next(wire for name, wire in child.module.wires.items() if child.names.get(name) == port)
                taken = set(kind.names.values())
                open_end = _unique(f"{cell.spec}_{port[1:]}", taken)
                kind.names[open_end] = open_end
                kind.module.wires[open_end] = _Wire(open_end, wire.width, False, None, [])
                body.append(_Line("pin", port, _spec([_Part(open_end, 0, wire.width)])))
            cell = None
        body.append(line)
    kind.module.body = body


def merge_modules(text: str, top: str, ports: list[str]) -> str:
    """Keep one module of each kind, with conventional names, all of them starting with the name of the top.

    Modules are one if they differ only in which of their signals are used outside.

    Parameters
    ----------
    text : str
        RTLIL as Amaranth writes it: children named ``<parent>.<child>``.
    top : str
        Name of the top module. The other modules become ``<top>_<instance>``, without a trailing index of the
        instance; modules that differ in spite of equal names are numbered.
    ports : list of str
        The ports of the top in the order wanted.

    Returns
    -------
    str
        RTLIL of an equivalent design, the top first. Equal input gives equal output.
    """
    modules = {module.name: module for module in _parse(text)}
    kinds: dict[str, _Kind] = {}  # by the name in *text*
    names: dict[str, dict[str, str]] = {}
    covers: dict[str, dict[str, list[_Part]]] = {}
    by_content: dict[str, _Kind] = {}
    taken = {top}

    def visit(module: _Module) -> None:
        for line in module.body:
            if line.kind == "cell" and line.head in modules and line.head not in kinds:
                visit(modules[line.head])
        is_top = module.name == f"\\{top}"
        _drop_empty(module)
        covers[module.name] = {} if is_top else _split_ports(module)
        _connect_children(module, kinds, covers, names)
        _drop_unread(module, fields_only=True)
        own = names[module.name] = _new_names(module)
        inputs = sorted(own[port.name] for port in module.ports() if port.direction == "input")
        outputs = {own[port.name] for port in module.ports() if port.direction == "output"}
        content = _render(module, own, inputs)
        if content not in by_content:
            leaf = re.sub(r"_\d+$", "", _plain(module.name.rsplit(".", 1)[-1]))
            name = module.name if is_top else "\\" + _unique(f"{top}_{leaf}", taken)
            by_content[content] = _Kind(name, module, own, inputs, outputs)
        kind = kinds[module.name] = by_content[content]
        kind.outputs |= outputs

    visit(modules[f"\\{top}"])
    by_name = {kind.name: kind for kind in by_content.values()}
    texts = {}
    for kind in by_name.values():
        for wire in kind.module.wires.values():
            if kind.names.get(wire.name) in kind.outputs:
                wire.direction = "output"
        _complete_pins(kind, by_name)
        _drop_unread(kind.module)
        is_top = kind.name == f"\\{top}"
        texts[kind.name] = _render(kind.module, kind.names, [f"\\{port}" for port in ports] if is_top else kind.ports)
    texts = {f"\\{top}": texts.pop(f"\\{top}")} | texts
    return "\n".join(f"module {name}\n{rendered}" for name, rendered in texts.items())
