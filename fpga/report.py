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
    """One clock: its name in the design, its net in the tools' reports, what it reached and had to reach, in MHz."""

    name: str
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
    """Every memory of the design and its mapping, from the log of Yosys, without constant tables of its own making."""
    found = {}
    for name, kind in _MAPPED.findall(log):
        found[name] = next((what for part, what in _KINDS if part in kind), kind)
    for name in _FLIP_FLOPS.findall(log):
        found[name] = "flip-flops"
    return tuple(Memory(name, kind) for name, kind in sorted(found.items()) if "$" not in name)


def net_aliases(netlist: dict, name: str) -> frozenset[str]:
    """All names of the net called *name* in Yosys' JSON netlist: tools report it under any of them.

    A hierarchical name matches when it ends in ``.name``.

    Raises
    ------
    ConstraintError
        If there is no such net.
    """
    nets = netlist["modules"]["top"]["netnames"]
    bits = [net["bits"] for full, net in nets.items() if full == name or full.endswith("." + name)]
    if not bits:
        raise ConstraintError(f"clock {name}: the netlist has no net of that name")
    return frozenset(full for full, net in nets.items() if net["bits"] == bits[0])


_DECORATION = re.compile(r"^\$glbnet\$|\$TRELLIS_IO_IN$|\$SB_IO_IN(_\$glb_clk)?$|_\$glb_clk$")


def undecorated(net: str) -> str:
    """The name of a net without what nextpnr adds to it when it inserts pads and promotes it to a global net."""
    while (plain := _DECORATION.sub("", net)) != net:
        net = plain
    return net


def clocks(fmax: dict, expected: dict[str, tuple[float, frozenset[str]]]) -> tuple[Clock, ...]:
    """Every clock, checked to have been held to its own constraint.

    Parameters
    ----------
    fmax : dict
        ``fmax`` of nextpnr's report: net -> {achieved, constraint} in MHz.
    expected : dict
        Clock -> (MHz, names of its net).

    Raises
    ------
    ConstraintError
        If an expected clock is missing, or any clock was held to another frequency than the one asked for
        (nextpnr takes a default for a clock it finds no constraint for).
    """
    result = []
    missing = dict(expected)
    for net, value in sorted(fmax.items()):
        held = value["constraint"]
        name = next((name for name, (_, names) in expected.items() if undecorated(net) in names), None)
        if name is None:
            raise ConstraintError(f"clock {net}: has no constraint, it was held to the default of {held:.6g} MHz")
        mhz = expected[name][0]
        if abs(held / mhz - 1) > TOLERANCE:
            raise ConstraintError(
                f"clock {name}: held to {held:.6g} MHz instead of {mhz:.6g} MHz: the constraint was ignored"
            )
        missing.pop(name, None)
        result.append(Clock(name, net, round(value["achieved"], 3), round(held, 3)))
    if missing:
        name, (mhz, _) = next(iter(missing.items()))
        raise ConstraintError(f"clock {name}: constrained to {mhz:.6g} MHz, but no register of the design runs on it")
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
    netlist: str,
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
    """Report from the JSON texts of nextpnr (report) and Yosys (netlist, ``stat``) and the log of Yosys.

    Raises
    ------
    ConstraintError
        See `net_aliases` and `clocks`.
    """
    raw = json.loads(nextpnr)
    nets = json.loads(netlist)
    found = clocks(raw["fmax"], {name: (mhz, net_aliases(nets, name)) for name, mhz in expected.items()})
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
