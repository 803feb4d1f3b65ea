"""Options that several commands share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", help="Configuration: a TOML file, or the name of a preset.", show_default="preset default"
    ),
]

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the configuration; repeatable."),
]


class Simulator(StrEnum):
    """Simulators that run the generated RTL."""

    VERILATOR = "verilator"
    ICARUS = "icarus"
    AMARANTH = "amaranth"


SimulatorOption = Annotated[Simulator, typer.Option("--simulator", help="Simulator that runs the RTL.")]
