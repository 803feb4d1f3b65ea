"""Array use of the linear path on shapes of real layers, by the cycle model that the tests hold equal to the RTL.

    python bench/array_use.py                       every preset
    python bench/array_use.py --set rows=16         one configuration

Array use is multiply-accumulates over cycles and lanes, from the first input transfer to the last output transfer, on
streams that never pause.
"""

import argparse

from rich.console import Console
from rich.table import Table

from kvant import config
from kvant.hw.linear.cycles import linear_cycles

LAYERS = {"query projection": (576, 128), "down projection": (1536, 576), "7B projection": (4096, 4096)}
"""Inputs K and outputs N of layers."""

TOKENS = (1, 64)


def table(name: str, chosen: config.Config) -> Table:
    """Cycles and array use of every layer and token count in one configuration."""
    p = chosen.linear
    result = Table(title=f"{name}: {p.rows} x {p.cols} lanes, groups of {p.group}", title_justify="left")
    for heading in ("layer", "K", "N", "tokens", "cycles", "array use"):
        result.add_column(heading, justify="left" if heading == "layer" else "right")
    for layer, (inputs, outputs) in LAYERS.items():
        for tokens in TOKENS:
            cycles = linear_cycles(p, tokens=tokens, inputs=inputs, outputs=outputs)
            numbers = (inputs, outputs, tokens, cycles.total)
            result.add_row(layer, *map(str, numbers), f"{100 * cycles.utilisation:.1f} %")
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="TOML file or preset")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    arguments = parser.parse_args()
    console = Console()
    if arguments.config or arguments.set:
        console.print(table(arguments.config or "default", config.load(arguments.config, arguments.set)))
        return
    for preset in config.presets():
        console.print(table(preset, config.load(preset)))


if __name__ == "__main__":
    main()
