"""Area and delay of combinational components in a standard-cell library, by Yosys and ABC; cached.

Mapping is a compromise of area and delay, and none of ABC's recipes wins for every circuit. A component is therefore
mapped by all of `RECIPES`; of the results, the fastest and the smallest are told. Delay is that of ABC's static timing
analysis at the library's own corner, from ideal inputs through gates that are sized for their fan-out, without wires.
"""

import hashlib
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from amaranth.back import rtlil
from amaranth.lib import wiring

from kvant.fpga.errors import TargetError, ToolError
from kvant.fpga.tools import run_tool, tool_version
from kvant.sim.toolchain import cache_folder, move_in

DEFAULT_LIBERTY = Path("/usr/share/qflow/tech/osu018/osu018_stdcells.lib")
"""Library that Debian ships: 180 nm, of Oklahoma State University."""

HOW_TO_GET_ONE = "Debian's package qflow-tech-osu018 brings one (apt-get install qflow-tech-osu018)"

_SIZE = "topo; buffer -c -N 8; upsize; dnsize"
_SIZE_FOR_DELAY = "topo; buffer -c -N 8; upsize -D 1; dnsize -D 1"

RECIPES = {
    "plain": f"strash; map -B 0.9; {_SIZE}",
    "plain, for delay": f"strash; map -D 1; {_SIZE_FOR_DELAY}",
    "choices": f"strash; dch; map; {_SIZE}",
    "choices, for delay": f"strash; dch; map -D 1; {_SIZE_FOR_DELAY}",
    "optimised": f"strash; ifraig; scorr; dc2; dch -f; map -B 0.9; {_SIZE}",
    "area flow": f"strash; &get -n; &dch -f; &nf; &put; {_SIZE}",
}
"""Commands of ABC by name: from the gates as they are written to gates that are restructured."""


@dataclass(frozen=True)
class Mapping:
    """A component in cells.

    Attributes
    ----------
    area : float
        In the library's unit.
    gates : float
        Area over that of the library's smallest two-input NAND: gate equivalents.
    delay : float
        Nanoseconds of the slowest path.
    recipe : str
        Key of `RECIPES`.
    """

    area: float
    gates: float
    delay: float
    recipe: str


class CellLibrary:
    """A Liberty file.

    Parameters
    ----------
    path : Path, optional
        None: `DEFAULT_LIBERTY`.

    Raises
    ------
    TargetError
        The file is not there, or holds no two-input NAND to count in.
    """

    def __init__(self, path: Path | None = None):
        self.path = path or DEFAULT_LIBERTY
        try:
            self.text = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise TargetError(f"--liberty {self.path}: {error.strerror}; {HOW_TO_GET_ONE}") from None
        self.nand_area = self._nand_area()

    @property
    def name(self) -> str:
        """As the file says it."""
        found = re.search(r"^\s*library\s*\(\s*\"?([^\")]+)", self.text, re.MULTILINE)
        return found[1].strip() if found else self.path.stem

    def _nand_area(self) -> float:
        areas = []
        for cell in re.split(r"^\s*cell\s*\(", self.text, flags=re.MULTILINE)[1:]:
            area = re.search(r"\barea\s*:\s*([\d.eE+-]+)", cell)
            if re.match(r"\s*\"?\w*nand2", cell, re.IGNORECASE) and area:
                areas.append(float(area[1]))
        if not areas:
            raise TargetError(f"--liberty {self.path}: no two-input NAND; legal is a standard-cell library in Liberty")
        return min(areas)

    def map(self, component: wiring.Component, *, cache: Path | None = None) -> list[Mapping]:
        """*component*, which has no registers, mapped by every recipe; fastest first.

        Raises
        ------
        ToolError
            Yosys or ABC refuses component or library.
        """
        text = rtlil.convert(component, name="top", emit_src=False)
        return sorted(
            (self._map(text, recipe, cache or cache_folder() / "synth") for recipe in RECIPES),
            key=lambda mapping: (mapping.delay, mapping.area),
        )

    def _map(self, text: str, recipe: str, cache: Path) -> Mapping:
        script = (
            "read_rtlil top.il; synth -flatten -top top; abc -liberty cells.lib -script abc.script; opt_clean; "
            "tee -q -o stat.json stat -liberty cells.lib -json"
        )
        commands = "\n".join([*RECIPES[recipe].split("; "), "stime -d", ""])
        key = "\0".join((text, self.text, script, commands, tool_version("yosys")))
        final = cache / f"cells-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
        if not final.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=".work-", dir=cache))
            try:
                (work / "top.il").write_text(text, encoding="utf-8")
                (work / "cells.lib").write_text(self.text, encoding="utf-8")
                (work / "abc.script").write_text(commands, encoding="utf-8")
                outcome = run_tool("yosys", ["-Q", "-q", "-p", script], work)
                if outcome.code or not (work / "stats.txt").exists():
                    lines = [line for line in outcome.log.splitlines() if line.startswith("ERROR: ")]
                    reason = lines[-1].removeprefix("ERROR: ") if lines else "ABC cannot map to this library"
                    raise ToolError(f"yosys: {reason}")
                (work / "cells.lib").unlink()
                move_in(work, final)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        area = json.loads((final / "stat.json").read_text())["design"]["area"]
        # ABC's "stime -d": name, inputs, outputs, cells, area, picoseconds
        picoseconds = float((final / "stats.txt").read_text().split()[5])
        return Mapping(area, area / self.nand_area, picoseconds / 1000, recipe)
