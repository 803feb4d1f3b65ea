"""``kvant simulate``: a user's tensors through the simulated RTL."""

from pathlib import Path
from typing import Annotated

import typer

from kvant.blocks import BLOCKS
from kvant.options import ConfigOption, SetOption, Simulator, SimulatorOption


def register(app: typer.Typer):
    """Add the command to *app*."""

    @app.command()
    def simulate(
        block: Annotated[str, typer.Argument(metavar="BLOCK", help=f"Block to simulate: {', '.join(BLOCKS)}.")],
        data: Annotated[Path, typer.Option("--data", help="Input tensors, .npz.")],
        out: Annotated[Path, typer.Option("--out", help="Output tensors, .npz; written only if all went well.")],
        config: ConfigOption = None,
        overrides: SetOption = None,
        simulator: SimulatorOption = Simulator.VERILATOR,
        stall: Annotated[float, typer.Option(help="Probability that a stream pauses, in each cycle.")] = 0.0,
        seed: Annotated[int, typer.Option(help="Seed of the pauses.")] = 0,
        waves: Annotated[bool, typer.Option("--waves", help="Write waves beside the output (.fst or .vcd).")] = False,
        check: Annotated[bool, typer.Option(help="Compare with the golden model, bit for bit.")] = True,
    ):
        """Run a block's RTL on tensors of your own and write what comes out."""
        from rich.console import Console

        from kvant.blocks import get_block, note_without_effect
        from kvant.config import stated_fields
        from kvant.errors import InputError
        from kvant.sim.toolchain import wave_suffix
        from kvant.tensors import check_target, read_npz, write_npz

        if not 0 <= stall < 1:
            raise InputError(f"--stall {stall}: legal is a probability from 0 to below 1")
        if out.is_dir() or out.suffix != ".npz":
            raise InputError(f"--out {out}: legal is a file name that ends in .npz")
        if seed < 0:
            raise InputError(f"--seed {seed}: legal is an integer from 0")
        check_target(out)
        stated = stated_fields(config, overrides)
        implementation = get_block(block)
        arrays = read_npz(data)
        wave_file = out.with_suffix(wave_suffix(simulator.value)) if waves else None
        console = Console(stderr=True)
        with console.status(f"simulating {block} on {simulator.value}"):
            result = implementation.simulate(
                arrays,
                path=config,
                overrides=overrides or (),
                simulator=simulator.value,
                stall=stall,
                seed=seed,
                waves=wave_file,
                check=check,
            )
        write_npz(out, result)
        note_without_effect(block, stated)
        _report(console, block, simulator.value, result, stall=stall, seed=seed, check=check)
        if wave_file is not None:
            console.print(f"waves: {wave_file}", markup=False, highlight=False, soft_wrap=True)


def _report(console, block, simulator, result, *, stall, seed, check):
    cycles, busy = int(result["cycles"]), int(result["busy_cycles"])
    flags = [name for name in ("nonfinite", "error") if result[name]]
    parts = [
        f"{block} on {simulator}: {cycles} cycles, {busy} busy",
        f"stall {stall}, seed {seed}" if stall else "no stalls",
        "equal to the golden model, bit for bit" if check else "not compared",
        *([f"flags raised: {', '.join(flags)}"] if flags else []),
    ]
    console.print("; ".join(parts), markup=False, highlight=False, soft_wrap=True)
