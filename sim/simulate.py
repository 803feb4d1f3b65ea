"""Play streams through a component on Verilator, Icarus or Amaranth's simulator, with identical results.

Verilator and Icarus run the Verilog that `emit` writes, under cocotb; Amaranth's simulator runs the component itself,
behind the same ports. See `kvant.sim.streams` for the sampling discipline. Builds are kept in the user's cache
(`kvant.sim.toolchain.cache_folder`) under a hash of the Verilog text, the options and the versions of the tools.
"""

import hashlib
import logging
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from amaranth.hdl import ClockDomain, Fragment
from amaranth.lib import wiring

import kvant.hw
from kvant.hw.emit import Design, FlatTop, Port, Stream, emit, yosys_version
from kvant.hw.parameters import ParameterError
from kvant.sim import toolchain
from kvant.sim.errors import SimulationError, ToolError
from kvant.sim.streams import Plan, Reset, Stall, Stimulus, StreamPorts, Trace

TIMEOUT_CYCLES = 20_000
DRAIN_CYCLES = 16


def simulate(
    component_factory: Callable[[], wiring.Component],
    name: str,
    stimulus: Stimulus,
    *,
    simulator: str = "verilator",
    stall: float | Mapping[str, Stall] = 0.0,
    seed: int = 0,
    waves: str | Path | None = None,
    reset: Reset | None = None,
    timeout_cycles: int = TIMEOUT_CYCLES,
    drain_cycles: int = DRAIN_CYCLES,
    edit_verilog: Callable[[str], str] | None = None,
    design_key: object = None,
) -> Trace:
    """Simulate a component.

    Parameters
    ----------
    component_factory : callable
        Makes the component, anew at every call.
    name : str
        Name of the top module.
    stimulus : Stimulus
    simulator : "verilator", "icarus" or "amaranth"
    stall : float or dict
        Probability of a pause in every cycle of every stream, or of each stream a probability or a pattern. Equal
        seeds give equal pauses on all simulators.
    seed : int
    waves : path, optional
        Where to write the waves: ``.fst`` from Verilator and Icarus, ``.vcd`` from Amaranth's simulator.
    reset : Reset, optional
        Two cycles at the start if not given.
    timeout_cycles : int
        Cycles without any transfer after which the run is given up.
    drain_cycles : int
        Cycles after the last transfer expected, in which a surplus one is still noticed and plain outputs settle.
    edit_verilog : callable, optional
        Changes the text before it is built, to see what a fault does; not for Amaranth's simulator.
    design_key : object, optional
        The parameters of the component, if it belongs to `kvant.hw` and depends on nothing else: a Verilog text made
        before from these sources and parameters (their ``repr``) is then used again. Converting a large array takes
        seconds.

    Raises
    ------
    SimulationError
        An unknown value (with signal and time), a payload or valid that changes while it waits, a surplus transfer,
        or none at all for too long (with the counts of every stream).
    ToolError
        A simulator or cocotb is missing or unfit.
    ParameterError
        The stimulus does not fit the component, or an argument is not legal.
    """
    if simulator not in toolchain.SIMULATORS:
        raise ParameterError(f"simulator = {simulator!r}: legal are {', '.join(toolchain.SIMULATORS)}")
    waves = _wave_path(waves, simulator)
    toolchain.version(simulator)

    def plan_for(streams: Mapping[str, Stream], ports: Iterable[Port]) -> Plan:
        return make_plan(streams, ports, stimulus, stall, seed, reset or Reset(), timeout_cycles, drain_cycles)

    if simulator == "amaranth":
        from kvant.sim.amaranth_player import play

        if edit_verilog is not None:
            raise ParameterError("edit_verilog: Amaranth's simulator does not run Verilog")
        top = FlatTop(component_factory(), domain=ClockDomain("sync"))
        try:
            plan = plan_for(top.streams, top.ports)
        except ParameterError:
            Fragment.get(top, None)  # Amaranth warns of components that are made and not elaborated
            raise
        return play(top, plan, waves)
    design = cached_design(component_factory, name, design_key)
    verilog = design.verilog if edit_verilog is None else edit_verilog(design.verilog)
    return run_verilog(verilog, design.name, plan_for(design.streams, design.ports), simulator, waves)


def _wave_path(waves: str | Path | None, simulator: str) -> Path | None:
    if waves is None:
        return None
    path = Path(waves).absolute()
    suffix = toolchain.wave_suffix(simulator)
    if path.suffix != suffix:
        raise ParameterError(f"waves = {str(waves)!r}: {simulator} writes {suffix} files")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def cached_design(component_factory: Callable[[], wiring.Component], name: str, key: object) -> Design:
    """The emitted component, from the cache if *key* is given and it is there."""
    if key is None:
        return emit(component_factory(), name)
    folder = Path(kvant.hw.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    for text in (kvant.__version__, metadata.version("amaranth"), yosys_version(), name, type(key).__name__, repr(key)):
        digest.update(text.encode() + b"\0")
    path = toolchain.cache_folder() / "designs" / f"{name}-{digest.hexdigest()[:24]}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    design = emit(component_factory(), name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(pickle.dumps(design))
    os.replace(file.name, path)
    return design


def make_plan(
    streams: Mapping[str, Stream],
    ports: Iterable[Port],
    stimulus: Stimulus,
    stall: float | Mapping[str, Stall] = 0.0,
    seed: int = 0,
    reset: Reset = Reset(),  # noqa: B008 - immutable
    timeout_cycles: int = TIMEOUT_CYCLES,
    drain_cycles: int = DRAIN_CYCLES,
) -> Plan:
    """Check a stimulus against the ports of a top and write it out for the player.

    Raises
    ------
    ParameterError
        An unknown stream, field, port or pause; lists of different lengths; a value that does not fit its port.
    """
    by_name = {port.name: port for port in ports}

    def stream_ports(stream: Stream) -> StreamPorts:
        fields = tuple((field, port, by_name[port].width) for field, port in stream.fields.items())
        return StreamPorts(stream.name, stream.valid, stream.ready, fields)

    inputs = {name: stream_ports(stream) for name, stream in streams.items() if stream.direction == "input"}
    outputs = {name: stream_ports(stream) for name, stream in streams.items() if stream.direction == "output"}
    for kind, given, legal in (("input", stimulus.inputs, inputs), ("output", stimulus.expect, outputs)):
        if unknown := sorted(set(given) - set(legal)):
            raise ParameterError(f"stream {unknown[0]!r}: legal {kind} streams are {', '.join(legal) or 'none'}")
    taken = {name for s in streams.values() for name in (s.valid, s.ready, *s.fields.values())}
    plain = {name: port for name, port in by_name.items() if name not in taken and name not in ("clk", "rst")}
    for port in stimulus.status:
        if port not in plain or plain[port].direction != "output":
            raise ParameterError(f"status {port!r}: no plain output of this name")
    constants = {name: 0 for name, port in plain.items() if port.direction == "input"}
    for port, value in stimulus.constants.items():
        if port not in constants:
            raise ParameterError(f"constant {port!r}: no plain input of this name")
        _check_width(port, value, plain[port].width)
        constants[port] = value
    for name, (other, _) in stimulus.after.items():
        if name not in inputs:
            raise ParameterError(f"stream {name!r}: legal input streams are {', '.join(inputs) or 'none'}")
        if other not in inputs and other not in outputs:
            raise ParameterError(f"stream {other!r}: legal streams are {', '.join((*inputs, *outputs))}")
    for name, (other, _) in stimulus.echo.items():
        fields = {each.name: {field for field, _, _ in each.fields} for each in outputs.values()}
        if name not in inputs or name in stimulus.inputs or other not in outputs:
            raise ParameterError(f"echo of {other!r} on {name!r}: legal is an output stream on an input without values")
        if not {field for field, _, _ in inputs[name].fields} <= fields[other]:
            raise ParameterError(f"echo of {other!r} on {name!r}: the fields differ")
    return Plan(
        inputs=tuple(inputs.values()),
        outputs=tuple(outputs.values()),
        values={name: _transfers(ports, stimulus.inputs.get(name)) for name, ports in inputs.items()},
        expect=dict(stimulus.expect),
        status=tuple(stimulus.status),
        constants=constants,
        after=dict(stimulus.after),
        echo=dict(stimulus.echo),
        stall=_check_stall(stall, inputs, outputs),
        seed=seed,
        reset=reset,
        timeout_cycles=timeout_cycles,
        drain_cycles=drain_cycles,
    )


def _check_stall(
    stall: float | Mapping[str, Stall], inputs: Mapping[str, Any], outputs: Mapping[str, Any]
) -> dict[str, Stall]:
    stalls = dict(stall) if isinstance(stall, Mapping) else dict.fromkeys((*inputs, *outputs), stall)
    for name, pause in stalls.items():
        if name not in inputs and name not in outputs:
            raise ParameterError(f"stall of stream {name!r}: no such stream")
        if isinstance(pause, str):
            fits = pause == "after_valid" and name in outputs
        elif isinstance(pause, (int, float)):
            fits = 0 <= pause < 1
        else:
            fits = len(pause) > 0 and not all(pause)
        if not fits:
            raise ParameterError(
                f"stall of stream {name} = {pause!r}: legal is a probability from 0 to below 1, "
                "a pattern with at least one 0, or 'after_valid' for an output"
            )
    return stalls


def _transfers(ports: StreamPorts, given: Mapping[str, Any] | None) -> list[tuple[int, ...]]:
    if given is None:
        return []
    names = [name for name, _, _ in ports.fields]
    if set(given) != set(names):
        raise ParameterError(f"stream {ports.name}: fields {sorted(given)} given, legal are {sorted(names)}")
    columns = [[int(value) for value in given[name]] for name in names]
    if len({len(column) for column in columns}) > 1:
        raise ParameterError(f"stream {ports.name}: fields have {', '.join(str(len(c)) for c in columns)} values")
    for column, (name, _, width) in zip(columns, ports.fields, strict=True):
        if column and (min(column) < 0 or max(column).bit_length() > width):
            bad = next(value for value in column if value < 0 or value.bit_length() > width)
            _check_width(f"stream {ports.name}, field {name}", bad, width)
    return list(zip(*columns, strict=True))


def _check_width(what: str, value: int, width: int) -> None:
    if value < 0 or value.bit_length() > width:
        raise ParameterError(f"{what}: {value} does not fit {width} unsigned bits")


def run_verilog(verilog: str, top: str, plan: Plan, simulator: str, waves: Path | None = None) -> Trace:
    """Play *plan* on a Verilog text under cocotb.

    Parameters
    ----------
    verilog : str
        Modules, among them *top* with the ports that the plan names.
    top : str
    plan : Plan
    simulator : "verilator" or "icarus"
    waves : Path, optional
        Absolute, ending in ``.fst``.

    Raises
    ------
    SimulationError, ToolError
        See `simulate`.
    """
    # Imported here: cocotb's runner is an optional dependency, and its version is checked first.
    toolchain.check_cocotb()
    from cocotb_tools.runner import get_runner

    from kvant.sim.cocotb_player import OUTCOME, PLAN, RUN_FOLDER

    build = build_model(verilog, top, simulator, waves is not None)
    with tempfile.TemporaryDirectory(prefix="kvant-") as folder_name:
        folder = Path(folder_name)
        (folder / PLAN).write_bytes(pickle.dumps(plan))
        runner = get_runner(simulator)
        runner.log.setLevel(logging.CRITICAL)
        dump = folder / f"waves{toolchain.wave_suffix(simulator)}"
        wave_options: dict[str, Any] = {}
        if waves is not None and simulator == "icarus":
            wave_options = {"waves": True, "plusargs": [f"+dumpfile_path={dump}"]}
        elif waves is not None:
            wave_options = {"waves": True, "test_args": ["--trace-file", str(dump)]}
        log = folder / "log"
        failure = ""
        try:
            runner.test(
                test_module="kvant.sim.cocotb_player",
                hdl_toplevel=top,
                hdl_toplevel_lang="verilog",
                build_dir=build,
                test_dir=folder,
                results_xml=str(folder / "results.xml"),
                log_file=log,
                extra_env={RUN_FOLDER: str(folder), "COCOTB_LOG_LEVEL": "WARNING"},
                **wave_options,
            )
        except (RuntimeError, SystemExit) as error:
            failure = str(error)  # whether it matters, the outcome tells
        if not (folder / OUTCOME).exists():
            raise ToolError(f"{simulator} failed: {_last_lines(log)} {failure}".rstrip())
        outcome = pickle.loads((folder / OUTCOME).read_bytes())
        if waves is not None:
            if not dump.exists():
                raise ToolError(f"{simulator} wrote no waves: {_last_lines(log)}")
            shutil.move(dump, waves)
    if isinstance(outcome, str):
        raise SimulationError(outcome)
    return outcome


def _last_lines(log: Path, count: int = 3) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()] if log.exists() else []
    wanted = [line for line in lines if "rror" in line] or lines
    return " | ".join(wanted[-count:]) or "no output"


def build_model(verilog: str, top: str, simulator: str, waves: bool) -> Path:
    """Folder of the built model, from the cache where it holds one."""
    arguments = _verilator_arguments(waves) if simulator == "verilator" else []
    version = toolchain.check_cocotb()
    libraries = str(find_spec("cocotb").origin)  # a model finds cocotb's libraries where they were when it was built
    key = [toolchain.version(simulator), version, libraries, top, repr((arguments, waves)), verilog]
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:24]
    final = toolchain.cache_folder() / "builds" / f"{top}-{simulator}-{digest}"
    if final.exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=final.parent) as folder_name:
        folder = Path(folder_name) / "build"
        folder.mkdir()
        (folder / f"{top}.sv").write_text(verilog)
        _run_build(folder, top, simulator, waves, arguments)
        if simulator == "verilator":
            toolchain.keep_verilator_runtime(folder, waves)
        for file in folder.iterdir():
            if file.name not in (f"{top}.sv", top, "sim.vvp"):
                file.unlink()
        toolchain.move_in(folder, final)
    return final


def _verilator_arguments(waves: bool) -> list[str]:
    # cocotb's runner makes every signal public, which keeps Verilator from optimising: models grow several times.
    # Only the ports are of use here, see `_public_ports`.
    return ["-Wno-fatal", "-O3", "--no-public-flat-rw", *(["--trace-fst"] if waves else [])]


def _public_ports(verilog: str, top: str) -> str:
    """Verilator control file that lets cocotb reach the ports of *top*, and nothing else."""
    body = re.search(rf"^module {re.escape(top)}\b.*?^endmodule", verilog, re.MULTILINE | re.DOTALL)
    ports = re.findall(r"^\s*(?:input|output)\b[^;]*?(\w+);$", body[0], re.MULTILINE) if body else []
    return "\n".join(["`verilator_config", *(f'public_flat_rw -module "{top}" -var "{port}"' for port in ports), ""])


def _run_build(folder: Path, top: str, simulator: str, waves: bool, arguments: list[str]) -> None:
    from cocotb_tools.runner import VerilatorControlFile, get_runner

    log = folder / "log"
    source = folder / f"{top}.sv"
    sources: list[Path | VerilatorControlFile] = [source]
    if simulator == "verilator":
        control = folder / f"{top}.vlt"
        control.write_text(_public_ports(source.read_text(), top))
        sources.append(VerilatorControlFile(control))
    before = dict(os.environ)
    try:
        # The runner takes the environment of this process, and Verilator needs some of it changed.
        if simulator == "verilator":
            os.environ.update(toolchain.verilator_environment(waves))
        runner = get_runner(simulator)
        runner.log.setLevel(logging.CRITICAL)
        runner.build(
            sources=sources,
            hdl_toplevel=top,
            build_dir=folder,
            build_args=arguments,
            waves=waves,
            timescale=("1ns", "1ps"),
            log_file=log,
        )
    except (RuntimeError, SystemExit) as error:
        raise ToolError(f"{simulator} could not build {top}: {_last_lines(log)} ({error})") from None
    finally:
        os.environ.clear()
        os.environ.update(before)
