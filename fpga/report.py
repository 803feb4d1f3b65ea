"""What came out of place and route: area, clocks, memories, and the verdict."""

import json
import re
from dataclasses import asdict, dataclass, field

from kvant.fpga.devices import Device
from kvant.fpga.errors import ConstraintError

TOLERANCE = 2e-3
"""Relative difference below which two frequencies count as the same: tools round periods to whole picoseconds."""


@dataclass(frozen=True)
class Resource:
    """Use of one kind of resource."""

    name: str
    used: int
    available: int

    @property
    def percent(self) -> float:
        """Share used, in percent."""
        return 100 * self.used / self.available if self.available else 0.0


@dataclass(frozen=True)
class Clock:
    """One clock: what it reached, and what it had to reach, in MHz."""

    net: str
    achieved: float
    constraint: float

    @property
    def met(self) -> bool:
        """Whether the constraint is met."""
        return self.achieved >= self.constraint


@dataclass(frozen=True)
class Memory:
    """How one memory of the design was mapped."""

    name: str
    kind: str


@dataclass(frozen=True)
class PathStep:
    """A step of the critical path: where it goes, over which net, and its nanoseconds."""

    kind: str
    where: str
    delay: float


@dataclass(frozen=True)
class Report:
    """Area and timing of one build.

    Attributes
    ----------
    design, target, device : str
        What was built, for which board or device, and the device itself.
    seed : int
        Seed of place and route.
    resources : tuple of Resource
        In the order of the table.
    clocks : tuple of Clock
        Every clock of the design.
    memories : tuple of Memory
        Every memory and what it became.
    critical : tuple of PathStep
        Slowest register-to-register path of the slowest clock against its constraint.
    harness : dict
        Flip-flops and LUTs that only serve to measure a bare component; empty on a board.
    parameters : dict
        Parameters of the design.
    """

    design: str
    target: str
    device: str
    seed: int
    resources: tuple[Resource, ...]
    clocks: tuple[Clock, ...]
    memories: tuple[Memory, ...] = ()
    critical: tuple[PathStep, ...] = ()
    harness: dict = field(default_factory=dict)
    parameters: dict = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether every clock meets its constraint."""
        return all(clock.met for clock in self.clocks)

    @property
    def slack_ratio(self) -> float:
        """Smallest achieved frequency over constraint of all clocks: what the best of several seeds maximises."""
        return min(clock.achieved / clock.constraint for clock in self.clocks)

    def as_dict(self) -> dict:
        """For JSON: all fields, and the verdict."""
        values = asdict(self)
        for entry, resource in zip(values["resources"], self.resources, strict=True):
            entry["percent"] = round(resource.percent, 1)
        for entry, clock in zip(values["clocks"], self.clocks, strict=True):
            entry["met"] = clock.met
        return {**values, "met": self.met}


ROWS = {
    "ecp5": (
        ("LUT4", "TRELLIS_COMB", None),
        ("FF", "TRELLIS_FF", None),
        ("carry (CCU2C)", "TRELLIS_COMB", ("CCU2C",)),
        ("LUT RAM", "TRELLIS_RAMW", None),
        ("DSP (MULT18X18D)", "MULT18X18D", None),
        ("block RAM (DP16KD)", "DP16KD", None),
        ("PLL", "EHXPLLL", None),
    ),
    "ice40": (
        ("logic cells", "ICESTORM_LC", None),
        ("LUT4", "ICESTORM_LC", ("SB_LUT4",)),
        ("FF", "ICESTORM_LC", ("SB_DFF*",)),
        ("carry (SB_CARRY)", "ICESTORM_LC", ("SB_CARRY",)),
        ("DSP (SB_MAC16)", "ICESTORM_DSP", None),
        ("block RAM (4 kbit)", "ICESTORM_RAM", None),
        ("SPRAM (256 kbit)", "ICESTORM_SPRAM", None),
        ("PLL", "ICESTORM_PLL", None),
    ),
}
"""Rows of the table: name, bel that bounds it, and the netlist cells to count where the bel also holds others."""


def resource_name(family: str, bel: str) -> str:
    """Name of the first row that *bel* stands for, or *bel* itself."""
    return next((name for name, kind, cells in ROWS[family] if kind == bel and cells is None), bel)


def resources(family: str, utilization: dict, cells: dict[str, int]) -> tuple[Resource, ...]:
    """Rows of the table.

    Parameters
    ----------
    family : str
        Device family.
    utilization : dict
        ``utilization`` of nextpnr's report: bel -> {used, available}.
    cells : dict
        Netlist cells by type, from Yosys.
    """
    table = []
    for name, bel, patterns in ROWS[family]:
        if bel not in utilization:
            continue
        used, available = utilization[bel]["used"], utilization[bel]["available"]
        if patterns is not None:
            used = sum(
                count
                for cell, count in cells.items()
                for pattern in patterns
                if re.fullmatch(pattern.replace("*", ".*"), cell)
            )
            if name.startswith("carry (CCU2C)"):
                available //= 2  # one CCU2C spans two LUT positions
        table.append(Resource(name, used, available))
    return tuple(table)


def netlist_cells(stat: dict) -> dict[str, int]:
    """Cells by type of Yosys' ``stat -json`` of a flat design."""
    return dict(stat["design"]["num_cells_by_type"])


_MAPPED = re.compile(r"^mapping memory (\S+) via (\S+)$", re.MULTILINE)
_FLIP_FLOPS = re.compile(r"^using FF mapping for memory (\S+)$", re.MULTILINE)
_KINDS = (("DPR", "LUT RAM"), ("SPRAM", "SPRAM"), ("16KD", "block RAM"), ("RAM4K", "block RAM"))
"""What the name of a memory primitive stands for: first match wins."""


def memories(log: str) -> tuple[Memory, ...]:
    """Every memory and its mapping, from the log of Yosys."""
    found = {}
    for name, kind in _MAPPED.findall(log):
        found[name] = next((what for part, what in _KINDS if part in kind), kind)
    for name in _FLIP_FLOPS.findall(log):
        found[name] = "flip-flops"
    return tuple(Memory(name, kind) for name, kind in sorted(found.items()))


def clocks(fmax: dict, expected: dict[str, float]) -> tuple[Clock, ...]:
    """Every clock, checked to have been held to its own constraint.

    Parameters
    ----------
    fmax : dict
        ``fmax`` of nextpnr's report: net -> {achieved, constraint} in MHz.
    expected : dict
        Clock net, as named in the design, -> MHz. nextpnr decorates the names (``$glbnet$clk``).

    Raises
    ------
    ConstraintError
        If an expected clock is missing, or any clock was held to another frequency than the one asked for
        (nextpnr takes its default of 12 MHz for a clock it finds no constraint for).
    """
    result = []
    missing = dict(expected)
    for net, value in sorted(fmax.items()):
        wanted = [mhz for name, mhz in expected.items() if name in net]
        if not wanted:
            raise ConstraintError(
                f"clock {net}: has no constraint, it was held to the default of {value['constraint']:.6g} MHz"
            )
        if not any(abs(value["constraint"] / mhz - 1) < TOLERANCE for mhz in wanted):
            raise ConstraintError(
                f"clock {net}: held to {value['constraint']:.6g} MHz instead of {wanted[0]:.6g} MHz: "
                "the constraint was ignored"
            )
        for name in expected:
            if name in net:
                missing.pop(name, None)
        result.append(Clock(net, round(value["achieved"], 3), round(value["constraint"], 3)))
    if missing:
        name, mhz = next(iter(missing.items()))
        raise ConstraintError(
            f"clock {name}: constrained to {mhz:.6g} MHz, but no register of the design runs on a net of that name"
        )
    return tuple(result)


def critical_path(report: dict, net: str) -> tuple[PathStep, ...]:
    """Slowest path within the clock *net*."""
    for path in report.get("critical_paths", ()):
        if path["from"] == f"posedge {net}" and path["to"] == f"posedge {net}":
            return tuple(
                PathStep(step["type"], f"{step['from']['cell']}.{step['from']['port']}", round(step["delay"], 3))
                for step in path["path"]
                if step["delay"] > 0
            )
    return ()


def parse(
    nextpnr: str,
    stat: str,
    yosys_log: str,
    *,
    device: Device,
    design: str,
    target: str,
    seed: int,
    expected: dict[str, float],
    harness: dict,
    parameters: dict,
) -> Report:
    """Report from the JSON texts of nextpnr and Yosys.

    Raises
    ------
    ConstraintError
        See `clocks`.
    """
    raw = json.loads(nextpnr)
    found = clocks(raw["fmax"], expected)
    worst = min(found, key=lambda clock: clock.achieved / clock.constraint)
    return Report(
        design=design,
        target=target,
        device=device.name,
        seed=seed,
        resources=resources(device.family, raw["utilization"], netlist_cells(json.loads(stat))),
        clocks=found,
        memories=memories(yosys_log),
        critical=critical_path(raw, worst.net),
        harness=harness,
        parameters=parameters,
    )
