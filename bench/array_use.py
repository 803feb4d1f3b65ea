"""Array use of the linear path: simulated RTL beside the cycle model.

``python bench/array_use.py [--set FIELD=VALUE ...] [--no-rtl]``
"""

import argparse
import time

from kvant import config
from kvant.hw.linear.cycles import linear_cycles
from kvant.linear import random_case
from kvant.sim.linear import engine

SIMULATED = [(1, 576, 128), (64, 576, 128)]
MODELLED = [(1, 4096, 4096), (64, 4096, 4096)]
SEED = 0


def main():
    """Print cycles and array use (multiply-accumulates over cycles * rows * cols)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="overrides")
    parser.add_argument("--no-rtl", action="store_true", help="the cycle model alone")
    options = parser.parse_args()
    chosen = config.load(None, ["int8_groups=false", *options.overrides])
    p = chosen.linear
    print(f"{p.rows} x {p.cols} lanes, G = {p.group}, seed {SEED}")
    print("     T      K      N |  model cycles      use |    RTL cycles      use   seconds")
    for tokens, inputs, outputs in SIMULATED + MODELLED:
        model = linear_cycles(p, tokens=tokens, inputs=inputs, outputs=outputs)
        line = f"{tokens:6} {inputs:6} {outputs:6} | {model.total:13,} {model.utilisation:8.5f}"
        if (tokens, inputs, outputs) in SIMULATED and not options.no_rtl:
            arrays = random_case(chosen, tokens=tokens, outputs=outputs, inputs=inputs, seed=SEED)
            begin = time.perf_counter()
            cycles = int(engine.run(p, arrays)["cycles"])
            use = tokens * inputs * outputs / (cycles * p.lanes)
            line += f" | {cycles:13,} {use:8.5f} {time.perf_counter() - begin:9.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
