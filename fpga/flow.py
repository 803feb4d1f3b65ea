"""The open flow: RTLIL to netlist (Yosys), to a routed design (nextpnr), to a bitstream; each step cached.

A step is looked up by the hash of everything that determines it: its input text, options, and the tool's version.
What a step makes appears in the cache whole or not at all.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvant.fpga import report as reports
from kvant.fpga.devices import Device
from kvant.fpga.errors import ConstraintError, TargetError, ToolError
from kvant.fpga.report import Report
from kvant.fpga.tools import Outcome, find_tool, run_tool, tool_version
from kvant.sim.toolchain import cache_folder, move_in

Progress = Callable[[str, float | None], None]
"""Called with (stage, None) when a stage starts and (stage, seconds) when it is done; 0 seconds: it was cached."""


@dataclass(frozen=True)
class Design:
    """What is built.

    Attributes
    ----------
    name : str
        Name in reports and of the files.
    rtlil : str
        The design; its top module is called ``top``.
    constraints : str
        Pins and clocks, in the language of the family (LPF or PCF).
    clocks : dict
        Clock -> MHz: what every clock must turn out to have been held to. The name is that of its net in the design, at
        any depth of the hierarchy.
    device : Device
        What it is built for.
    target : str
        Board or device, as the user knows it.
    harness : dict
        See `Report.harness`.
    parameters : dict
        See `Report.parameters`.
    """

    name: str
    rtlil: str
    constraints: str
    clocks: dict[str, float]
    device: Device
    target: str
    harness: dict = field(default_factory=dict)
    parameters: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Build:
    """A finished build: its report, and its files by suffix (``.bit`` or ``.bin``, ``.svf``) in the cache."""

    report: Report
    files: dict[str, Path]


class Flow:
    """Runs the steps for one design.

    Parameters
    ----------
    design : Design
        What is built.
    advice : dict
        Resource name (see `report.ROWS`) -> what to turn down when it runs out.
    dsp : bool
        Let Yosys put products into multipliers (ECP5 and iCE40 UltraPlus).
    cache : Path, optional
        Cache folder.
    progress : callable, optional
        See `Progress`.
    """

    def __init__(
        self,
        design: Design,
        *,
        advice: dict[str, str] | None = None,
        dsp: bool = True,
        cache: Path | None = None,
        progress: Progress | None = None,
    ):
        self.design = design
        self.advice = advice or {}
        self.dsp = dsp
        self.cache = cache or cache_folder() / "synth"
        self.progress = progress or (lambda stage, seconds: None)

    @property
    def _nextpnr(self) -> str:
        return f"nextpnr-{self.design.device.family}"

    @property
    def _packer(self) -> str:
        return {"ecp5": "ecppack", "ice40": "icepack"}[self.design.device.family]

    def check_tools(self):
        """Find every tool before any work.

        Raises
        ------
        MissingToolError
            For the first that is missing.
        """
        for name in ("yosys", self._nextpnr, self._packer):
            find_tool(name)

    @contextlib.contextmanager
    def _step(self, stage: str, kind: str, key: Sequence[str]) -> Iterator[tuple[Path, Path | None]]:
        """Yield (folder of the finished step, None), or (.., folder to make it in), which then becomes the former."""
        digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:24]
        final = self.cache / f"{kind}-{digest}"
        if final.is_dir():
            self.progress(stage, 0.0)
            yield final, None
            return
        self.cache.mkdir(parents=True, exist_ok=True)
        self.progress(stage, None)
        work = Path(tempfile.mkdtemp(prefix=".work-", dir=self.cache))
        try:
            yield final, work
            move_in(work, final)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def synthesise(self) -> Path:
        """Netlist of the design: folder with ``top.json``, ``stat.json`` and ``yosys.log``.

        Raises
        ------
        ToolError
            If Yosys stops.
        """
        design = self.design
        rtlil = unambiguous_names(without_collision_logic(design.rtlil))
        if design.device.family == "ecp5":
            synth = "synth_ecp5 -top top"
            if not self.dsp:
                synth += " -nodsp"
        else:
            model = "u" if design.device.option == "--up5k" else design.device.option[2:4]
            synth = f"synth_ice40 -device {model} -top top"
            if self.dsp and model == "u":
                synth += " -dsp"
        script = "; ".join(
            (
                "read_rtlil top.il",
                synth,
                "write_json top.json",
                "tee -q -o stat.json stat -json",
            )
        )
        with self._step("synthesis (Yosys)", "netlist", (rtlil, script, tool_version("yosys"))) as (final, work):
            if work is not None:
                (work / "top.il").write_text(rtlil, encoding="utf-8")
                outcome = run_tool("yosys", ["-Q", "-p", script], work)
                if outcome.code:
                    raise ToolError(f"yosys: {_last_error(outcome)}")
                self.progress("synthesis (Yosys)", outcome.seconds)
        return final

    def place_and_route(self, netlist: Path, seed: int) -> tuple[Path, Report]:
        """Routed design and its report.

        Raises
        ------
        TargetError
            If the design is too large for the device; the text names resource, use and what to turn down.
        ConstraintError
            If a clock was not held to its constraint.
        ToolError
            If nextpnr stops for another reason.
        """
        design, device = self.design, self.design.device
        stage = f"place and route (nextpnr, seed {seed})"
        arguments = [device.option, "--package", device.package, "--json", "top.json", "--seed", str(seed)]
        arguments += ["--report", "report.json", "--timing-allow-fail"]
        # Clocks that lack a constraint would be held to 12 MHz: make the default strict, then check each clock.
        arguments += ["--freq", f"{max(design.clocks.values()):.6f}"]
        if device.family == "ecp5":
            arguments += ["--speed", device.speed, "--lpf", "top.lpf", "--lpf-allow-unconstrained"]
            arguments += ["--textcfg", "top.config"]
            constraints = "top.lpf"
        else:
            arguments += ["--pcf", "top.pcf", "--pcf-allow-unconstrained", "--asc", "top.asc"]
            constraints = "top.pcf"
        key = (netlist.name, " ".join(arguments), design.constraints, tool_version(self._nextpnr))
        with self._step(stage, "route", key) as (final, work):
            if work is not None:
                shutil.copyfile(netlist / "top.json", work / "top.json")
                (work / constraints).write_text(design.constraints, encoding="utf-8")
                outcome = run_tool(self._nextpnr, arguments, work)
                if outcome.code:
                    self._explain(outcome)
                ignored = ignored_constraint(outcome.log)
                if ignored:
                    raise ConstraintError(f"{self._nextpnr} ignored a constraint: {ignored}")
                self._report(netlist, work, seed)  # a run whose report is refused does not enter the cache
                (work / "top.json").unlink()
                self.progress(stage, outcome.seconds)
        return final, self._report(netlist, final, seed)

    def _report(self, netlist: Path, routed: Path, seed: int) -> Report:
        design = self.design
        return reports.parse(
            (routed / "report.json").read_text(encoding="utf-8"),
            (netlist / "top.json").read_text(encoding="utf-8"),
            (netlist / "stat.json").read_text(encoding="utf-8"),
            (netlist / "yosys.log").read_text(encoding="utf-8"),
            device=design.device,
            design=design.name,
            target=design.target,
            seed=seed,
            expected=design.clocks,
            harness=design.harness,
            parameters=design.parameters,
        )

    def _explain(self, outcome: Outcome):
        """Raise what a failed run of nextpnr means."""
        for bel, used, available in overfull(outcome.log):
            name = reports.resource_name(self.design.device.family, bel)
            advice = self.advice.get(name)
            raise TargetError(
                f"{self.design.name} does not fit {self.design.device.name}: {name} {used} of {available}"
                + (f"; turn down {advice}" if advice else "")
            )
        raise ToolError(f"{self._nextpnr}: {_last_error(outcome)}")

    def pack(self, routed: Path) -> dict[str, Path]:
        """Bitstream files by suffix.

        Raises
        ------
        ToolError
            If the packer stops.
        """
        family = self.design.device.family
        if family == "ecp5":
            source, arguments = "top.config", ["--compress", "top.config", "top.bit", "--svf", "top.svf"]
            products = {".bit": "top.bit", ".svf": "top.svf"}
        else:
            source, arguments = "top.asc", ["top.asc", "top.bin"]
            products = {".bin": "top.bin"}
        key = (routed.name, " ".join(arguments), tool_version(self._packer))
        with self._step(f"bitstream ({self._packer})", "bitstream", key) as (final, work):
            if work is not None:
                shutil.copyfile(routed / source, work / source)
                outcome = run_tool(self._packer, arguments, work)
                if outcome.code:
                    raise ToolError(f"{self._packer}: {_last_error(outcome)}")
                (work / source).unlink()
                self.progress(f"bitstream ({self._packer})", outcome.seconds)
        return {suffix: final / name for suffix, name in products.items()}

    def run(self, seeds: Sequence[int] = (1,), *, bitstream: bool = True) -> tuple[Build, list[Report]]:
        """Build with every seed and keep the best.

        Returns
        -------
        best : Build
            Of the seed with the largest ratio of achieved clock to constraint; the first of equals.
        all : list of Report
            One per seed, in the order given.
        """
        self.check_tools()
        netlist = self.synthesise()
        results = [self.place_and_route(netlist, seed) for seed in seeds]
        routed, best = max(results, key=lambda result: result[1].slack_ratio)
        files = self.pack(routed) if bitstream else {}
        return Build(best, files), [result for _, result in results]


_MODULE = re.compile(r"^module .*?^end$", re.MULTILINE | re.DOTALL)
_EXEMPT = re.compile(r"^  attribute \\no_rw_check 1\n(?:  attribute .*\n)*  memory .*\\(\S+)$", re.MULTILINE)
_READ_PORT = re.compile(r"^  cell \$memrd_v2 .*?^  end$", re.MULTILINE | re.DOTALL)


def without_collision_logic(rtlil: str) -> str:
    """Mark the read ports of every memory with the attribute ``no_rw_check``: what they read is free on a collision.

    Yosys honours the attribute only on read ports that it infers from Verilog, not on those that are synchronous
    from the start, and would surround each block RAM with logic that returns the old word on a collision. (Verilog
    is no way round: a memory's initial words become one assignment each, which takes minutes to read back.)
    """

    def in_module(module: re.Match) -> str:
        exempt = set(_EXEMPT.findall(module[0]))

        def in_port(port: re.Match) -> str:
            memory = re.search(r'parameter \\MEMID "\\\\(.*)"', port[0])[1]
            if memory not in exempt:
                return port[0]
            return re.sub(
                r"(parameter \\COLLISION_X_MASK \d+')(0+)$",
                lambda mask: mask[1] + "1" * len(mask[2]),
                port[0],
                flags=re.MULTILINE,
            )

        return _READ_PORT.sub(in_port, module[0])

    return _MODULE.sub(in_module, rtlil)


_IDENTIFIER = re.compile(r'\\[^\s"]+')


def unambiguous_names(rtlil: str) -> str:
    """Names of elements of arrays with a point in place of brackets: ``x.0``, not ``x[0]``.

    Technology mapping hands signals to ABC bit by bit, under names like ``x[0]``. A signal of several bits that is
    itself called so, as an element of the array ``x`` is, stops it (an assertion, or no message at all).
    """
    return _IDENTIFIER.sub(lambda name: re.sub(r"\[(\d+)\]", r".\1", name[0]), rtlil)


_UTILISATION = re.compile(r"^Info:\s+(\w+):\s*(\d+)/\s*(\d+)\s+\d+%", re.MULTILINE)
_NO_BEL = re.compile(r"no Bels remaining of type '?(\w+)'?")


def overfull(log: str) -> list[tuple[str, int, int]]:
    """(bel, used, available) of each resource that ran out, from a log of nextpnr."""
    table = {bel: (int(used), int(available)) for bel, used, available in _UTILISATION.findall(log)}
    full = [(bel, used, available) for bel, (used, available) in table.items() if used > available]
    if not full:
        # Placement may also run out of a kind that the table shows as just full.
        full = [(bel, *table[bel]) for bel in _NO_BEL.findall(log) if bel in table]
    return full


_IGNORED = re.compile(r"^(?:Warning|ERROR): (.*(?:ignor|does not exist|no (?:such )?net|unmatched).*)$", re.MULTILINE)


def ignored_constraint(log: str) -> str | None:
    """First warning of nextpnr about a constraint it did not apply."""
    match = _IGNORED.search(log)
    return match.group(1) if match else None


def _last_error(outcome: Outcome) -> str:
    """The line of a log that says why a tool stopped; its last one and the exit code if none does."""
    lines = [line.strip() for line in outcome.log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    if errors:
        return errors[-1].removeprefix("ERROR: ")
    return f"exit code {outcome.code} without an error message, after: {(lines or ['nothing'])[-1]}"


def write_products(build: Build, folder: Path, stem: str) -> list[Path]:
    """Copy bitstream and report to *folder* as ``STEM.bit`` (``.bin``, ``.svf``) and ``STEM.json``, each atomically.

    Returns
    -------
    list of Path
        What was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    text = json.dumps(build.report.as_dict(), indent=2) + "\n"
    contents = {suffix: path.read_bytes() for suffix, path in build.files.items()} | {".json": text.encode()}
    for suffix, content in contents.items():
        final = folder / (stem + suffix)
        handle, temporary = tempfile.mkstemp(prefix=f".{final.name}-", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(final)
        except BaseException:
            Path(temporary).unlink()
            raise
        written.append(final)
    return written
