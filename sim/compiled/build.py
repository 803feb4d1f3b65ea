"""A design and its player as a shared library, from the cache where it holds one.

The library is the design's Verilog behind a wrapper, translated by Verilator, and `player.cpp`, compiled by g++. The
wrapper holds every input in a register that the player loads: reset and payloads reach most of the logic of a design,
and Verilator would evaluate all of that again at either clock level when they are ports.
"""

import hashlib
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from kvant.hw.emit import Design
from kvant.hw.parameters import ParameterError
from kvant.sim import toolchain
from kvant.sim.errors import ToolError

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the parts done and the parts in all."""

PLAYER = ("player.cpp", "agent.h", "axi.h")
"""Its sources; the first is completed by `bindings`."""

MEMORY_PORTS = (
    *("arid", "araddr", "arlen", "arsize", "arburst", "arvalid", "arready"),
    *("rid", "rdata", "rresp", "rlast", "rvalid", "rready"),
    *("awid", "awaddr", "awlen", "awsize", "awburst", "awvalid", "awready"),
    *("wdata", "wstrb", "wlast", "wvalid", "wready", "bid", "bresp", "bvalid", "bready"),
)
"""Ports of an AXI4 master, which is joined to a memory, behind the name of the bus."""

REGISTER_PORTS = (
    *("awaddr", "awvalid", "awready", "wdata", "wstrb", "wvalid", "wready", "bresp", "bvalid", "bready"),
    *("araddr", "arvalid", "arready", "rdata", "rresp", "rvalid", "rready"),
)
"""Ports of an AXI4-Lite slave, which is joined to a host, behind the name of the bus."""

WRAPPER = "driven"
LIBRARY = "model.so"
MAX_THREADS = 8

VERILATOR_OPTIONS = (
    "--cc",
    "-O3",
    "--x-assign",
    "fast",
    "--x-initial",
    "fast",
    "--no-timing",
    "--no-assert",
    "-fno-dfg-scoped",  # would look through the ports of shared modules, whose instances then differ
    "-Wno-fatal",
    "-Wno-lint",
)
COMMON_FLAGS = ("-std=c++17", "-w", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-DVL_TIME_CONTEXT")
FAST_FLAGS = ("-O2", "-march=native", "-fno-strict-aliasing")
SLOW_FLAGS = ("-O0",)  # what runs once, at the beginning
RUNTIME_FLAGS = ("-O2",)

SHARED_INSTANCES = 4
SHARED_LINES = 200
"""A module with so many instances in one place, and so many lines with all it holds, is compiled once for them all."""

_RUNTIME = ("verilated.cpp", "verilated_threads.cpp")
_POLL_SECONDS = 0.05


def storage_bytes(width: int) -> int:
    """Bytes in which Verilator keeps a port of *width* bits: 1, 2, 4, 8, and above 64 bits words of 4."""
    if width > 64:
        return 4 * -(-width // 32)
    return next(size for size in (1, 2, 4, 8) if width <= 8 * size)


def library(design: Design, *, threads: int = 1, progress: Progress | None = None) -> Path:
    """Path of the compiled design.

    Parameters
    ----------
    design : Design
        With a clock; every stream of it has ports.
    threads : int
        Threads of the model.
    progress : callable, optional
        See `Progress`; not called where the cache holds the library.

    Raises
    ------
    ToolError
        Verilator or g++ is missing, or refuses the design.
    ParameterError
        *threads* outside 1 to 8, or a design without clock.
    """
    if not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise ParameterError(f"threads = {threads!r}: legal is an integer from 1 to {MAX_THREADS}")
    if "clk" not in {port.name for port in design.ports}:
        raise ParameterError(f"design {design.name}: has no clock; legal is a clocked one")
    version = toolchain.version("verilator")
    sources = {name: Path(__file__).with_name(name).read_text(encoding="utf-8") for name in PLAYER}
    texts = {
        "design.sv": design.verilog + wrapper(design),
        "shared.vlt": sharing(design),
        "player.cpp": sources.pop("player.cpp") + bindings(design),
        **sources,
    }
    options = repr((VERILATOR_OPTIONS, COMMON_FLAGS, FAST_FLAGS, SLOW_FLAGS, threads))
    key = "\0".join([version, _compiler(), options, *texts.values()])
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    final = toolchain.cache_folder() / "compiled" / f"{design.name}-{digest}"
    if not (final / LIBRARY).exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=final.parent) as name:
            whole = Path(name) / "whole"
            whole.mkdir()
            work = Path(name) / "work"
            work.mkdir()
            for file, text in texts.items():
                (work / file).write_text(text, encoding="utf-8")
            _build(work, whole / LIBRARY, threads, version, progress or (lambda *_: None))
            toolchain.move_in(whole, final)
    return final / LIBRARY


def wrapper(design: Design) -> str:
    """A module of the same ports that holds every input but the clock in a register."""
    ports, registers, connections = [], [], []
    for port in design.ports:
        size = f"[{port.width - 1}:0] " if port.width > 1 else ""
        ports.append(f"  {port.direction} logic {size}{port.name}")
        inner = port.name
        if port.direction == "input" and port.name != "clk":
            inner = f"{port.name}_held"
            registers.append(f"  logic {size}{inner} = 0;\n  always_ff @(posedge clk) {inner} <= {port.name};")
        connections.append(f"    .{port.name}({inner})")
    return "\n".join(
        [
            "",
            f"module {WRAPPER}(",
            ",\n".join(ports),
            ");",
            *registers,
            f"  {design.name} {design.name}_inside(",
            ",\n".join(connections),
            "  );",
            "endmodule",
            "",
        ]
    )


def sharing(design: Design) -> str:
    """Verilator control file that keeps the code of modules with many instances together.

    Left alone, Verilator writes all instances out, which for a large array is more code than caches hold. Their inputs
    are made readable from outside, lest the instances differ in the signals that their ports stand for.
    """
    bodies = dict(re.findall(r"^module (\w+)\b(.*?)^endmodule", design.verilog, re.MULTILINE | re.DOTALL))
    children = {
        name: Counter(kind for kind in re.findall(r"^ +(\w+) \w+ \($", body, re.MULTILINE) if kind in bodies)
        for name, body in bodies.items()
    }

    @cache
    def lines(name: str) -> int:
        return bodies[name].count("\n") + sum(count * lines(kind) for kind, count in children[name].items())

    shared: list[str] = []

    def visit(name: str) -> None:
        for kind, count in children[name].items():
            if count < SHARED_INSTANCES or lines(kind) < SHARED_LINES:
                visit(kind)
            elif kind not in shared:
                shared.append(kind)

    visit(design.name)
    text = ["`verilator_config"]
    for kind in sorted(shared):
        text.append(f'no_inline -module "{kind}"')
        ports = re.findall(r"^ *input\b[^;]*?(\w+);$", bodies[kind], re.MULTILINE)
        text += [f'public_flat_rd -module "{kind}" -var "{port}"' for port in ports if port != "clk"]
    return "\n".join([*text, ""])


def memories(design: Design) -> list[str]:
    """Names of the AXI4 masters of a design, as ``m_axi``."""
    return _buses(design, MEMORY_PORTS, "output")


def registers(design: Design) -> list[str]:
    """Names of the AXI4-Lite slaves of a design, as ``s_axil``."""
    return [name for name in _buses(design, REGISTER_PORTS, "input") if name not in memories(design)]


def _buses(design: Design, ports: Sequence[str], direction: str) -> list[str]:
    directions = {port.name: port.direction for port in design.ports}
    names = [name.removesuffix("_arvalid") for name, way in directions.items() if name.endswith("_arvalid")]
    return [
        name
        for name in names
        if directions[f"{name}_arvalid"] == direction and all(f"{name}_{port}" in directions for port in ports)
    ]


def plain_ports(design: Design) -> list[str]:
    """Ports that belong to no stream and no bus, without clock and reset, in their order."""
    taken = {name for s in design.streams.values() for name in (s.valid, s.ready, *s.fields.values())}
    buses = tuple(f"{name}_" for name in (*memories(design), *registers(design)))
    return [
        port.name
        for port in design.ports
        if port.name not in taken and port.name not in ("clk", "rst") and not (buses and port.name.startswith(buses))
    ]


def bindings(design: Design) -> str:
    """The part of the player that knows the design's ports: streams, buses and plain ports in their order."""
    widths = {port.name: port.width for port in design.ports}

    def field(port: str) -> str:
        return f"field(model->{port}, {widths[port]})"

    def bit(port: str | None) -> str:
        return "nullptr" if port is None else f"at(model->{port})"

    lines = ["    rst = at(model->rst);"] if "rst" in widths else []
    for stream in design.streams.values():
        kind = "Source" if stream.direction == "input" else "Sink"
        fields = ", ".join(field(port) for port in stream.fields.values() if port in widths)
        lines.append(f"    add<{kind}>({bit(stream.valid)}, {bit(stream.ready)}, {{{fields}}});")
    for kind, names, ports in (
        ("memories", memories(design), MEMORY_PORTS),
        ("registers", registers(design), REGISTER_PORTS),
    ):
        for name in names:
            fields = ", ".join(field(f"{name}_{port}") for port in ports)
            lines.append(f"    add({kind}, {{{fields}}});")
    lines += [f"    plain.push_back({field(port)});" for port in plain_ports(design)]
    return "\n".join(["", "void Player::bind() {", *lines, "}", ""])


@cache
def _compiler() -> str:
    """Version of g++ and what ``-march=native`` means on this machine."""
    command = ["g++", "-march=native", "-Q", "--help=target", "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _build(folder: Path, result: Path, threads: int, version: str, progress: Progress) -> None:
    root = toolchain.verilator_root()
    progress("translate", 0, 1)
    translate = [
        str(root / "bin" / "verilator_bin"),
        *VERILATOR_OPTIONS,
        *(["--threads", str(threads)] if threads > 1 else []),
        *["--top-module", WRAPPER, "--prefix", "Vmodel", "--Mdir", str(folder)],
        *[str(folder / "shared.vlt"), str(folder / "design.sv")],
    ]
    _run_all([translate], folder, "Verilator", lambda done, total: progress("translate", done, total))
    includes = [f"-I{folder}", f"-I{root / 'include'}", f"-I{root / 'include' / 'vltstd'}"]
    flags = [*COMMON_FLAGS, *includes, f"-DKVANT_THREADS={threads}"]

    def compile_(source: Path, options: Sequence[str]) -> list[str]:
        return ["g++", *flags, *options, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]

    # A precompiled header is only taken by compilations with the same options.
    header = folder / "Vmodel__pch.h"
    headers = {name: folder / f"{name}.h" for name in ("fast", "slow")}
    for copy in headers.values():
        copy.write_text(f'#include "{header.name}"\n')
    kinds = {"fast": FAST_FLAGS, "slow": SLOW_FLAGS}
    commands = [["g++", *flags, *kinds[kind], "-x", "c++-header", str(copy)] for kind, copy in headers.items()]
    sources = sorted(folder.glob("Vmodel*.cpp"), key=lambda file: -file.stat().st_size)  # the longest first
    runtime = _runtime(version)
    known = runtime.exists()  # looked at once: another build may bring it meanwhile
    rest = [] if known else [compile_(root / "include" / name, RUNTIME_FLAGS) for name in _RUNTIME]
    rest.append(compile_(folder / "player.cpp", FAST_FLAGS))
    for source in sources:
        kind = "slow" if "Slow" in source.name else "fast"
        rest.append(compile_(source, (*kinds[kind], "-include", str(headers[kind]))))
    total = len(commands) + len(rest) + 1
    _run_all(commands, folder, "g++", lambda done, _: progress("compile", done, total))
    _run_all(rest, folder, "g++", lambda done, _: progress("compile", len(commands) + done, total))
    objects = [*folder.glob("*.o"), *(runtime.glob("*.o") if known else ())]
    link = ["g++", "-shared", "-Wl,-Bsymbolic", *map(str, sorted(objects)), "-pthread", "-latomic"]
    _run_all([[*link, "-o", str(result)]], folder, "g++", lambda *_: progress("compile", total, total))
    if not known:
        whole = folder / "runtime"
        whole.mkdir()
        for name in _RUNTIME:
            (folder / name).with_suffix(".o").rename((whole / name).with_suffix(".o"))
        toolchain.move_in(whole, runtime)


def _runtime(version: str) -> Path:
    """Where the compiled runtime library of Verilator is kept; it depends on no design."""
    key = "\0".join([version, _compiler(), repr((COMMON_FLAGS, RUNTIME_FLAGS))])
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    return toolchain.cache_folder() / "compiled" / f"verilator-runtime-{digest}"


def _run_all(commands: list[list[str]], folder: Path, tool: str, done: Callable[[int, int], None]) -> None:
    """Run commands, as many at a time as there are processors; all end when one fails or the user interrupts."""
    environment = os.environ | {"VERILATOR_ROOT": str(toolchain.verilator_root())}
    waiting, running, finished = list(reversed(commands)), {}, 0
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                log = (folder / f"log{len(waiting)}").open("w+")
                command = waiting.pop()
                running[subprocess.Popen(command, stdout=log, stderr=log, env=environment)] = log
            for process in [p for p in running if p.poll() is not None]:
                log = running.pop(process)
                finished += 1
                if process.returncode:
                    log.seek(0)
                    raise ToolError(f"{tool} failed: {_first_error(log.read())}")
                log.close()
                done(finished, len(commands))
            time.sleep(_POLL_SECONDS)
    except FileNotFoundError as error:
        raise ToolError(f"{tool} failed: {error.filename} not found") from None
    finally:
        for process, log in running.items():
            process.terminate()
            process.wait()
            log.close()


def _first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)] or lines
    return errors[0] if errors else "no output"
