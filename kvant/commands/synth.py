"""`kvant synth`: area, clock and bitstream with the open tools."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.blocks import BLOCKS, get_block, note_without_effect
from kvant.errors import ComparisonError, InputError
from kvant.options import ConfigOption, SetOption

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.console import Console

    from kvant.config import Config
    from kvant.fpga.flow import Build, Design
    from kvant.fpga.report import Report

_LOGIC = {
    "rows": "rows",
    "cols": "cols",
    "quant_lanes": "quant_lanes",
    "int8_groups": "int8_groups=false",
    "lanes": "lanes",
    "heads": "heads",
    "centred": "centred=false",
}
_MULTIPLIERS = {
    "rows": "rows",
    "cols": "cols",
    "multiplier": "multiplier=lut",
    "lanes": "lanes",
    "port_bits": "port_bits",
}
_MEMORY = {
    "activation_words": "activation_words",
    "accumulators": "accumulators",
    "heads": "heads",
    "head_dim": "head_dim",
    "q_parallel": "q_parallel",
    "recent": "recent",
}
ADVICE: dict[str, dict[str, str]] = {
    "LUT4": _LOGIC | {"multiplier": "multiplier=dsp"},
    "logic cells": _LOGIC,
    "FF": _LOGIC,
    "LUT RAM": _MEMORY,
    "DSP (MULT18X18D)": _MULTIPLIERS,
    "DSP (SB_MAC16)": _MULTIPLIERS,
    "block RAM (DP16KD)": _MEMORY,
    "block RAM (4 kbit)": _MEMORY,
}
"""Of each resource the fields of the configuration that decide how much of it a design takes, with what to set."""

MOST_MHZ = 400.0
"""No clock of these devices is faster."""


def advice(fields: "Collection[str]") -> dict[str, str]:
    """Of each resource what to turn down when it runs out, for a block that reads *fields* of the configuration."""
    result = {}
    for resource, settings in ADVICE.items():
        words = [setting for field, setting in settings.items() if field in fields]
        if words:
            result[resource] = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    return result


def register(app: typer.Typer):
    """Add the command to *app*."""

    @app.command()
    def synth(
        block: Annotated[str, typer.Argument(help=f"What to build: {', '.join(BLOCKS)}.")] = "linear",
        board: Annotated[
            str | None, typer.Option(help="Board: a bitstream of the block behind the board's serial port.")
        ] = None,
        device: Annotated[
            str | None, typer.Option(help="Bare device: the block alone, without pins; no bitstream.")
        ] = None,
        out: Annotated[
            Path | None, typer.Option("--out", "-o", help="Folder for report and bitstream.", show_default="build")
        ] = None,
        config_path: ConfigOption = None,
        overrides: SetOption = None,
        freq: Annotated[
            float | None,
            typer.Option(help="Clock in MHz.", show_default="the board's own, on ECP5 boards at least 100 by PLL"),
        ] = None,
        seed: Annotated[int, typer.Option(help="Seed of place and route.")] = 1,
        seeds: Annotated[
            str | None, typer.Option(metavar="A,B,C", help="Place and route with each seed, keep the fastest.")
        ] = None,
        speed: Annotated[str | None, typer.Option(help="Speed grade of a bare ECP5.", show_default="6")] = None,
        baud: Annotated[int, typer.Option(help="Bit rate of the board's serial port.")] = 1_000_000,
        uart: Annotated[
            str | None, typer.Option(metavar="RX,TX", help="Package pins of the serial port, if not the board's own.")
        ] = None,
        allow_fail_timing: Annotated[
            bool, typer.Option("--allow-fail-timing", help="Write the bitstream although it misses its clock.")
        ] = False,
    ):
        """Synthesise, place and route; show area and clock, write the bitstream."""
        from rich.console import Console

        from kvant.fpga import errors

        if (board is None) == (device is None):
            raise InputError("synth: give either --board NAME or --device NAME, see docs/synth.md for both lists")
        if freq is not None and not 0 < freq <= MOST_MHZ:
            raise InputError(f"--freq {freq:g}: legal is a number of MHz above 0, to {MOST_MHZ:g}")
        chosen_seeds = _seeds(seed, seeds)
        implementation = get_block(block)
        console = Console(highlight=False)
        try:
            if board is not None:
                if speed is not None:
                    raise InputError(f"--speed {speed}: a board has its own speed grade; legal with --device only")
                design = _board(console, block, board, config_path, overrides, freq, baud, uart)
            else:
                if uart is not None:
                    raise InputError(f"--uart {uart}: a bare device has no pins; legal with --board only")
                design = _device(console, block, device, config_path, overrides, freq, speed)
            folder = out or Path("build") / f"{block}-{design.target}"
            turn_down = advice(implementation.fields)
            build, every = _run(console, design, turn_down, chosen_seeds, bitstream=board is not None)
        except (errors.TargetError, errors.MissingToolError) as error:
            raise InputError(str(error)) from None
        except (errors.ToolError, errors.ConstraintError) as error:
            raise ComparisonError(str(error)) from None
        _show(console, build.report, every)
        if not build.report.met and not allow_fail_timing:
            raise ComparisonError(_timing_failure(build.report, turn_down))
        _write(console, build, folder)


def _seeds(seed: int, seeds: str | None) -> list[int]:
    texts = [str(seed)] if seeds is None else seeds.split(",")
    result = []
    for text in texts:
        if not text.strip().isdecimal() or int(text) >= 1 << 31:
            name = "--seed" if seeds is None else "--seeds"
            raise InputError(f"{name} {text!r}: legal is an integer from 0 to {(1 << 31) - 1}")
        result.append(int(text))
    return list(dict.fromkeys(result))


def _board(
    console: "Console",
    block: str,
    name: str,
    config_path: Path | None,
    overrides: list[str] | None,
    freq: float | None,
    baud: int,
    uart: str | None,
) -> "Design":
    from kvant import config
    from kvant.fpga import boards
    from kvant.fpga.board_top import board_design

    board = boards.find_board(name)
    if uart is not None:
        board = boards.with_uart(board, uart)
    chosen = config.load(config_path or board.preset, overrides)
    note_without_effect(block, chosen.stated)
    implementation = get_block(block)
    mhz = freq or boards.default_mhz(boards.make_platform(board), board)
    design, top = board_design(
        implementation.build(chosen),
        board,
        mhz=mhz,
        baud=baud,
        held=implementation.held,
        name=block,
        parameters=dict(implementation.parameters(chosen)),
    )
    _headline(console, chosen, design)
    for missing in top.missing:
        console.print(f"board {board.name}: no {missing}, built without")
    if board.note:
        console.print(f"board {board.name}: {board.note}", soft_wrap=True)
    return design


def _device(
    console: "Console",
    block: str,
    name: str,
    config_path: Path | None,
    overrides: list[str] | None,
    freq: float | None,
    speed: str | None,
) -> "Design":
    from kvant import config
    from kvant.fpga.bare import bare_design
    from kvant.fpga.devices import find_device

    device = find_device(name)
    if speed is not None:
        device = device.with_speed(speed)
    chosen = config.load(config_path, overrides)
    note_without_effect(block, chosen.stated)
    implementation = get_block(block)
    design = bare_design(
        implementation.build(chosen),
        device,
        freq or device.default_mhz,
        name=block,
        parameters=dict(implementation.parameters(chosen)),
    )
    _headline(console, chosen, design)
    return design


def _headline(console: "Console", chosen: "Config", design: "Design"):
    clock = ", ".join(f"{mhz:.6g} MHz" for mhz in design.clocks.values())
    parameters = ", ".join(f"{name} = {value}" for name, value in design.parameters.items() if value is not None)
    console.print(
        f"{design.name} on {design.target} ({design.device.name}), preset {chosen.preset}, clock {clock}: {parameters}",
        soft_wrap=True,
    )


def _run(
    console: "Console", design: "Design", turn_down: dict[str, str], seeds: list[int], *, bitstream: bool
) -> "tuple[Build, list[Report]]":
    from kvant.fpga.flow import Flow

    def progress(stage: str, seconds: float | None):
        if seconds is None:
            console.print(f"  {stage} ... ", end="")
        elif seconds == 0:
            console.print(f"  {stage} ... cached")
        else:
            console.print(f"{seconds:.1f} s")

    return Flow(design, advice=turn_down, progress=progress).run(seeds, bitstream=bitstream)


def _show(console: "Console", report: "Report", every: "list[Report]"):
    from rich.table import Table

    area = Table("resource", title=f"{report.design} on {report.target} ({report.device}), seed {report.seed}")
    for heading in ("used", "available", "%"):
        area.add_column(heading, justify="right")
    for resource in report.resources:
        area.add_row(resource.name, str(resource.used), str(resource.available), f"{resource.percent:.1f}")
    console.print(area)
    if report.harness:
        share = " and ".join(f"{count} {name}" for name, count in report.harness.items())
        console.print(f"of these, {share} only hold the ports for this measurement", soft_wrap=True)

    timing = Table("clock")
    for heading in ("achieved MHz", "required MHz", ""):
        timing.add_column(heading, justify="right")
    for clock in report.clocks:
        verdict = "pass" if clock.met else "FAIL"
        timing.add_row(clock.name, f"{clock.achieved:.2f}", f"{clock.constraint:.2f}", verdict)
    console.print(timing)
    if len(every) > 1:
        console.print("  ".join(f"seed {r.seed}: {min(c.achieved for c in r.clocks):.2f} MHz" for r in every))

    kinds: dict[str, list[str]] = {}
    for memory in report.memories:
        kinds.setdefault(memory.kind, []).append(memory.name.removeprefix("top."))
    for kind, names in kinds.items():
        console.print(f"{kind}: {', '.join(names)}", soft_wrap=True)


def _timing_failure(report: "Report", turn_down: dict[str, str]) -> str:
    clock = min(report.clocks, key=lambda clock: clock.achieved / clock.constraint)
    smaller = f"turning down {turn_down['FF']}, " if "FF" in turn_down else ""
    return (
        f"clock {clock.name}: {clock.achieved:.2f} MHz reached, {clock.constraint:.2f} MHz required; nothing was "
        f"written. Try --seeds 1,2,3, a lower --freq, {smaller}or --allow-fail-timing"
    )


def _write(console: "Console", build: "Build", folder: Path):
    from kvant.fpga.flow import write_products

    for path in write_products(build, folder, build.report.design):
        console.print(f"wrote {path}", soft_wrap=True)
