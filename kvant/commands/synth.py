"""`kvant synth`: area, clock and bitstream with the open tools."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.errors import ComparisonError, InputError
from kvant.options import ConfigOption, SetOption

if TYPE_CHECKING:
    from rich.console import Console

    from kvant.config import Config
    from kvant.fpga.flow import Build, Design
    from kvant.fpga.report import Report

ADVICE = {
    "LUT4": "rows or cols, or choose multiplier=dsp",
    "logic cells": "rows or cols, then quant_lanes and int8_groups=false",
    "FF": "rows or cols",
    "LUT RAM": "accumulators",
    "DSP (MULT18X18D)": "rows or cols, or choose multiplier=lut",
    "DSP (SB_MAC16)": "rows or cols, or choose multiplier=lut",
    "block RAM (DP16KD)": "activation_words or accumulators",
    "block RAM (4 kbit)": "activation_words or accumulators",
}
"""Which parameter of the linear path to turn down when a resource runs out."""

MOST_MHZ = 400.0
"""No clock of these devices is faster."""


class Block(StrEnum):
    """Blocks that can be synthesised."""

    LINEAR = "linear"


def register(app: typer.Typer):
    """Add the command to *app*."""

    @app.command()
    def synth(
        block: Annotated[Block, typer.Argument(help="What to build.")] = Block.LINEAR,
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
        console = Console(highlight=False)
        try:
            if board is not None:
                if speed is not None:
                    raise InputError(f"--speed {speed}: a board has its own speed grade; legal with --device only")
                design = _board(console, board, config_path, overrides, freq, baud, uart)
            else:
                if uart is not None:
                    raise InputError(f"--uart {uart}: a bare device has no pins; legal with --board only")
                design = _device(device, config_path, overrides, freq, speed)
            folder = out or Path("build") / f"{block.value}-{design.target}"
            build, every = _run(console, design, chosen_seeds, bitstream=board is not None)
        except (errors.TargetError, errors.MissingToolError) as error:
            raise InputError(str(error)) from None
        except (errors.ToolError, errors.ConstraintError) as error:
            raise ComparisonError(str(error)) from None
        _show(console, build.report, every)
        if not build.report.met and not allow_fail_timing:
            raise ComparisonError(_timing_failure(build.report))
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
    name: str,
    config_path: Path | None,
    overrides: list[str] | None,
    freq: float | None,
    baud: int,
    uart: str | None,
) -> "Design":
    from kvant import config
    from kvant.blocks import note_without_effect
    from kvant.fpga import boards
    from kvant.fpga.linear_top import HELD, board_design
    from kvant.hw.linear.engine import LinearEngine

    board = boards.find_board(name)
    if uart is not None:
        board = boards.with_uart(board, uart)
    chosen = config.load(config_path or board.preset, overrides)
    note_without_effect("linear", chosen)
    mhz = freq or boards.default_mhz(boards.make_platform(board), board)
    design, top = board_design(
        LinearEngine(chosen.linear),
        board,
        mhz=mhz,
        baud=baud,
        held=HELD,
        name="linear",
        parameters=chosen.linear.model_dump(),
    )
    _headline(console, chosen, design)
    for missing in top.missing:
        console.print(f"board {board.name}: no {missing}, built without")
    if board.note:
        console.print(f"board {board.name}: {board.note}", soft_wrap=True)
    return design


def _device(
    name: str, config_path: Path | None, overrides: list[str] | None, freq: float | None, speed: str | None
) -> "Design":
    from kvant import config
    from kvant.blocks import note_without_effect
    from kvant.fpga.bare import bare_design
    from kvant.fpga.devices import find_device
    from kvant.hw.linear.engine import LinearEngine

    device = find_device(name)
    if speed is not None:
        device = device.with_speed(speed)
    chosen = config.load(config_path, overrides)
    note_without_effect("linear", chosen)
    return bare_design(
        LinearEngine(chosen.linear),
        device,
        freq or device.default_mhz,
        name="linear",
        parameters=chosen.linear.model_dump(),
    )


def _headline(console: "Console", chosen: "Config", design: "Design"):
    p = chosen.linear
    clock = ", ".join(f"{mhz:.6g} MHz" for mhz in design.clocks.values())
    console.print(
        f"linear on {design.target} ({design.device.name}), preset {chosen.preset}: "
        f"{p.rows} x {p.cols} lanes, G = {p.group}, clock {clock}",
        soft_wrap=True,
    )


def _run(console: "Console", design: "Design", seeds: list[int], *, bitstream: bool) -> "tuple[Build, list[Report]]":
    from kvant.fpga.flow import Flow

    def progress(stage: str, seconds: float | None):
        if seconds is None:
            console.print(f"  {stage} ... ", end="")
        elif seconds == 0:
            console.print(f"  {stage} ... cached")
        else:
            console.print(f"{seconds:.1f} s")

    return Flow(design, advice=ADVICE, progress=progress).run(seeds, bitstream=bitstream)


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


def _timing_failure(report: "Report") -> str:
    clock = min(report.clocks, key=lambda clock: clock.achieved / clock.constraint)
    return (
        f"clock {clock.name}: {clock.achieved:.2f} MHz reached, {clock.constraint:.2f} MHz required; nothing was "
        "written. Try --seeds 1,2,3, a lower --freq, fewer rows or cols, or --allow-fail-timing"
    )


def _write(console: "Console", build: "Build", folder: Path):
    from kvant.fpga.flow import write_products

    for path in write_products(build, folder, build.report.design):
        console.print(f"wrote {path}", soft_wrap=True)
