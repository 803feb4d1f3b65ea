"""External programs of the flow: where they are, and running them."""

import functools
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvant.fpga.errors import MissingToolError

ENVIRONMENT = {
    "yosys": "YOSYS",
    "nextpnr-ecp5": "NEXTPNR_ECP5",
    "nextpnr-ice40": "NEXTPNR_ICE40",
    "ecppack": "ECPPACK",
    "icepack": "ICEPACK",
}
"""Environment variable that names another program for a tool; the same ones that Amaranth reads."""


def find_tool(name: str) -> str:
    """Path of the program for tool *name*.

    The environment variable first, then the ``yowasp-`` program of this Python environment, then ``yowasp-`` and
    the plain name on the PATH.

    Raises
    ------
    MissingToolError
        If there is none, naming the tool and how to get it.
    """
    variable = ENVIRONMENT[name]
    chosen = os.environ.get(variable)
    if chosen:
        path = shutil.which(chosen)
        if path is None:
            raise MissingToolError(f"{name}: {variable} = {chosen!r} is not a program on PATH")
        return path
    beside = Path(sys.executable).parent / f"yowasp-{name}"
    if beside.exists():
        return str(beside)
    for candidate in (f"yowasp-{name}", name):
        path = shutil.which(candidate)
        if path:
            return path
    raise MissingToolError(f"{name}: not found, neither here nor on PATH: pip install 'kvant[fpga]', or set {variable}")


@functools.cache
def _version_of(path: str) -> str:
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()


def tool_version(name: str) -> str:
    """What the tool says about its version; part of every cache key."""
    return _version_of(find_tool(name))


@dataclass(frozen=True)
class Outcome:
    """How a tool ended: its exit code, all it said, and the seconds it took."""

    code: int
    log: str
    seconds: float


def run_tool(name: str, arguments: list[str], folder: Path) -> Outcome:
    """Run a tool in *folder*, its output kept in ``NAME.log`` there.

    File names in *arguments* are relative to *folder*: the programs run in a sandbox that sees little else. On a busy
    machine the sandbox was seen to die of a signal, once in hundreds of runs, in the middle of a design that passes
    before and after: a tool that does is run once more. If it ends so again, the log's last line says it.
    """
    start = time.monotonic()
    log_path = folder / f"{name}.log"
    for _ in range(2):
        with log_path.open("w", encoding="utf-8") as log:
            code = subprocess.run(
                [find_tool(name), *arguments], cwd=folder, stdout=log, stderr=subprocess.STDOUT, check=False
            ).returncode
        if code >= 0:
            break
        with log_path.open("a", encoding="utf-8") as log:
            log.write(f"\nERROR: stopped by signal {-code}\n")
    return Outcome(code, log_path.read_text(encoding="utf-8", errors="replace"), time.monotonic() - start)
