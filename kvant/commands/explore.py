"""`kvant explore`: design points measured side by side."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvant.fpga.devices import Device
    from kvant.fpga.report import Report
    from kvant.fpga.standard_cells import CellLibrary, Mapping
    from kvant.hw.numeric.adders import StrategyAdder

DEFAULT_WIDTHS = "16,32,48,64"

FASTEST_MHZ = 400.0
"""What place and route aims at: faster than any of the adders, so that it does not rest early."""

SUFFIXES = (".csv", ".md")


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    explore = typer.Typer(help="Measure design points side by side: area and delay.", no_args_is_help=True)
    app.add_typer(explore, name="explore")

    @explore.callback()
    def group() -> None:
        """Measure design points side by side: area and delay."""

    @explore.command()
    def adders(
        widths: Annotated[str, typer.Option(metavar="A,B,C", help="Widths in bits.")] = DEFAULT_WIDTHS,
        names: Annotated[
            str | None, typer.Option("--adders", metavar="A,B,C", help="Adder strategies.", show_default="all")
        ] = None,
        liberty: Annotated[
            Path | None,
            typer.Option(help="Standard-cell library.", show_default="OSU 180 nm, where Debian's package is installed"),
        ] = None,
        ecp5: Annotated[bool, typer.Option(help="Place and route on an ECP5.")] = True,
        device: Annotated[str, typer.Option(help="Which ECP5.")] = "ecp5-25k",
        out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the table too, as .csv or .md.")] = None,
    ) -> None:
        """Area and delay of every adder strategy in standard cells and on an ECP5."""
        from rich.console import Console

        from kvant.errors import InputError
        from kvant.files import replaced
        from kvant.tensors import check_target

        chosen_widths = _widths(widths)
        chosen_names = _names(names)
        if out is not None:
            if out.suffix not in SUFFIXES:
                raise InputError(f"--out {out}: legal is a file name that ends in {' or '.join(SUFFIXES)}")
            check_target(out)
        console = Console(stderr=True, highlight=False)
        chosen_device = _ecp5(device) if ecp5 else None
        library = _library(liberty, console, needed=not ecp5)
        points = _measure(console, chosen_names, chosen_widths, library, chosen_device)
        rows = [_row(point) for point in points]
        _print(rows, _caption(library, chosen_device))
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with replaced(out) as temporary:
                temporary.write_text(_text(rows, out.suffix), encoding="utf-8")
            console.print(f"wrote {out}", soft_wrap=True)


@dataclass(frozen=True)
class Point:
    """An adder of one width: its prefix network, None for `plus`, and what was measured of it."""

    name: str
    width: int
    network: tuple[int, int] | None
    mappings: "list[Mapping]"
    report: "Report | None"


def _widths(text: str) -> list[int]:
    from kvant.errors import InputError
    from kvant.hw.numeric.prefix_adders import MAX_WIDTH

    widths = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= MAX_WIDTH:
            raise InputError(f"--widths {part.strip()!r}: legal are integers from 1 to {MAX_WIDTH}, joined by commas")
        widths.append(int(part))
    return list(dict.fromkeys(widths))


def _names(text: str | None) -> list[str]:
    from kvant.errors import InputError
    from kvant.hw.numeric.adders import ADDERS

    names = list(ADDERS) if text is None else [part.strip() for part in text.split(",")]
    for name in names:
        if name not in ADDERS:
            raise InputError(f"--adders {name!r}: legal are {', '.join(ADDERS)}, joined by commas")
    return list(dict.fromkeys(names))


def _ecp5(name: str) -> "Device":
    from kvant.errors import InputError
    from kvant.fpga.devices import DEVICES

    legal = [device for device in DEVICES.values() if device.family == "ecp5"]
    for device in legal:
        if device.name == name:
            return device
    raise InputError(f"--device {name!r}: legal is one of {', '.join(device.name for device in legal)}")


def _library(path: Path | None, console: "Console", *, needed: bool) -> "CellLibrary | None":
    """The cell library. None, with a note, where none is named or installed and there is something else to do."""
    from kvant.errors import InputError
    from kvant.fpga.errors import TargetError
    from kvant.fpga.standard_cells import DEFAULT_LIBERTY, HOW_TO_GET_ONE, CellLibrary

    try:
        if path is None and not needed and not DEFAULT_LIBERTY.exists():
            console.print(f"kvant: note: no standard-cell library, none measured: {HOW_TO_GET_ONE}, or give --liberty")
            return None
        return CellLibrary(path)
    except TargetError as error:
        raise InputError(str(error)) from None


def _measure(
    console: "Console", names: list[str], widths: list[int], library: "CellLibrary | None", device: "Device | None"
) -> list[Point]:
    from kvant.errors import ComparisonError, InputError
    from kvant.fpga import errors
    from kvant.hw.numeric.adders import NETWORKS, StrategyAdder

    points = []
    combinations = [(name, width) for width in widths for name in names]
    try:
        for index, (name, width) in enumerate(combinations, start=1):
            what = f"{index} of {len(combinations)}: {name}, {width} bits"
            with console.status(what):
                mappings = library.map(StrategyAdder(width, name)) if library else []
                report = _place_and_route(StrategyAdder(width, name), device) if device else None
            network = NETWORKS[name](width) if name in NETWORKS else None
            points.append(Point(name, width, network and (network.depth, network.cells), mappings, report))
            console.print(what)
    except (errors.TargetError, errors.MissingToolError) as error:
        raise InputError(str(error)) from None
    except (errors.ToolError, errors.ConstraintError) as error:
        raise ComparisonError(str(error)) from None
    return points


def _place_and_route(component: "StrategyAdder", device: "Device") -> "Report":
    """Report of *component* between registers."""
    from kvant.fpga.bare import bare_design
    from kvant.fpga.flow import Flow

    design = bare_design(component, device, FASTEST_MHZ, name=f"{component.adder}-{component.width}")
    return Flow(design).run(bitstream=False)[0].report


def _row(point: Point) -> dict[str, str]:
    """Columns of the table, by heading."""
    depth, cells = point.network or ("", "")
    row = {"bits": str(point.width), "adder": point.name, "depth": str(depth), "cells": str(cells)}
    if point.mappings:
        fastest, smallest = point.mappings[0], min(point.mappings, key=lambda mapping: (mapping.area, mapping.delay))
        for which, mapping in (("fastest", fastest), ("smallest", smallest)):
            row |= {f"{which} GE": f"{mapping.gates:.0f}", f"{which} ns": f"{mapping.delay:.2f}"}
    if point.report:
        used = {resource.name: resource.used for resource in point.report.resources}
        row |= {
            "LUT4": str(used["LUT4"] - point.report.harness["LUT4"]),
            "of them carry": str(2 * used["carry (CCU2C)"]),
            "MHz": f"{point.report.clocks[0].achieved:.0f}",
        }
    return row


def _caption(library: "CellLibrary | None", device: "Device | None") -> str:
    parts = ["depth, cells: of the prefix network"]
    if library:
        parts.append(
            f"GE, ns: {library.name}, gate equivalents and slowest path without wires (Yosys and ABC), of the fastest "
            "and of the smallest of several mappings"
        )
    if device:
        parts.append(f"LUT4, MHz: {device.name}, speed grade {device.speed}, between registers (nextpnr, seed 1)")
    return "; ".join(parts)


def _print(rows: list[dict[str, str]], caption: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Adders with carry in", caption=caption)
    for heading in rows[0]:
        is_name = heading == "adder"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for before, row in zip([rows[0], *rows], rows, strict=False):
        if row["bits"] != before["bits"]:
            table.add_section()
        table.add_row(*row.values())
    Console(highlight=False).print(table)


def _text(rows: list[dict[str, str]], suffix: str) -> str:
    """The table as CSV or Markdown."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    if suffix == ".csv":
        return "".join(",".join(line) + "\n" for line in lines)
    lines.insert(1, ["---" if heading == "adder" else "---:" for heading in rows[0]])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
