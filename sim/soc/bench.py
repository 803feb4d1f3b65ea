"""The accelerator's Verilog in a simulator, with a host program in Python in front of it.

The host program is a plain function ``program(host, **arguments)``; it runs beside the simulation and reaches it
through `kvant.sim.soc.host.Host`.
"""

import logging
import os
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvant.hw.soc.parameters import TopParameters
from kvant.sim import toolchain
from kvant.sim.errors import SimulationError, ToolError
from kvant.sim.simulate import build_model, cached_design

TOP = "kvant_top"
RUN_FOLDER = "KVANT_RUN_FOLDER"
TASK, OUTCOME = "task.pickle", "outcome.pickle"
LONGEST_RUN = 400_000
"""Cycles after which a run is given up."""


@dataclass(frozen=True)
class BenchOptions:
    """What surrounds the accelerator.

    Members
    -------
    memory_bytes : int
    port_bits, address_bits : int
        Of the accelerator.
    latency : int
        Of the memory, in cycles.
    stall : float
        Probability of a pause of each channel of memory, registers and streams, in each cycle.
    seed : int
    memory : "model" or "cocotbext"
        `kvant.sim.soc.memory.AxiMemory`, or the memory of cocotbext-axi (which has no latency and no errors).
    cycles : int
        Cycles after which the run is given up.
    """

    port_bits: int
    memory_bytes: int = 1 << 17
    latency: int = 20
    stall: float = 0.0
    seed: int = 0
    memory: str = "model"
    cycles: int = LONGEST_RUN


@dataclass(frozen=True)
class Task:
    """What the simulator's process runs."""

    program: Callable
    arguments: dict[str, Any]
    options: BenchOptions
    paths: list[str] = field(default_factory=list)


def run(
    p: TopParameters,
    program: Callable,
    *,
    simulator: str = "verilator",
    edit_verilog: Callable[[str], str] | None = None,
    options: dict[str, Any] | None = None,
    paths: list[str] | None = None,
    **arguments: Any,
) -> Any:
    """Run a host program against the accelerator; returns what it returns.

    Parameters
    ----------
    p : TopParameters
    program : function
        Importable by name; ``program(host, **arguments)``.
    simulator : "verilator" or "icarus"
    edit_verilog : callable, optional
        Changes the text before it is built, to see what a fault does.
    options : dict, optional
        Members of `BenchOptions`.
    paths : list of str, optional
        Folders from which *program* can be imported.
    arguments
        Of the program; they and the result must be picklable.

    Raises
    ------
    SimulationError
        The program raised something, or the accelerator breaks a rule of its buses.
    ToolError
        A simulator or cocotb is missing or unfit.
    """
    toolchain.check_cocotb()
    toolchain.version(simulator)
    from cocotb_tools.runner import get_runner

    from kvant.hw.soc.top import KvantTop

    design = cached_design(lambda: KvantTop(p), TOP, p)
    verilog = design.verilog if edit_verilog is None else edit_verilog(design.verilog)
    build = build_model(verilog, TOP, simulator, False)
    paths = list(paths or [])
    with tempfile.TemporaryDirectory(prefix="kvant-") as name:
        folder = Path(name)
        task = Task(program, arguments, BenchOptions(port_bits=p.soc.port_bits, **(options or {})), paths)
        (folder / TASK).write_bytes(pickle.dumps((paths, pickle.dumps(task))))
        runner = get_runner(simulator)
        runner.log.setLevel(logging.CRITICAL)
        log = folder / "log"
        failure = ""
        try:
            runner.test(
                test_module="kvant.sim.soc.host",
                hdl_toplevel=TOP,
                hdl_toplevel_lang="verilog",
                build_dir=build,
                test_dir=folder,
                results_xml=str(folder / "results.xml"),
                log_file=log,
                extra_env={RUN_FOLDER: str(folder), "COCOTB_LOG_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore"},
            )
        except (RuntimeError, SystemExit) as error:
            failure = str(error)
        if not (folder / OUTCOME).exists():
            text = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            raise ToolError(f"{simulator} failed: {failure} {' | '.join(text.splitlines()[-5:])}")
        ok, value = pickle.loads((folder / OUTCOME).read_bytes())
    if not ok:
        raise SimulationError(value)
    return value


def run_folder() -> Path:
    """Folder of the run, in the simulator's process."""
    return Path(os.environ[RUN_FOLDER])
