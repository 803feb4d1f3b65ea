"""Speed of the compiled linear engine, and the tokens per second of a decoder that it bounds.

``python bench/compiled_linear.py [--set FIELD=VALUE ...] [--threads N]``
"""

import argparse
import time

from kvant import config
from kvant.hw.linear.cycles import linear_cycles
from kvant.linear import random_case
from kvant.sim.compiled.linear import CompiledLinear

SMOLLM2 = {  # outputs, inputs: how often, in a token of SmolLM2-135M
    (576, 576): 2 * 30,
    (192, 576): 2 * 30,
    (1536, 576): 2 * 30,
    (576, 1536): 30,
    (49152, 576): 1,
}
MEASURED = (1536, 576)
MEASURED_SECONDS = 10.0
SEED = 0


def main():
    """Print seconds of the build, cycles per second, and what they mean for SmolLM2-135M."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="overrides")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    chosen = config.load(None, options.overrides)
    p = chosen.linear
    begin, first = time.perf_counter(), {}
    engine = CompiledLinear(
        p, threads=options.threads, progress=lambda step, *_: first.setdefault(step, time.perf_counter() - begin)
    )
    total = time.perf_counter() - begin
    steps = ", ".join(f"{step} from {seconds:.1f} s on" for step, seconds in first.items())
    print(f"{p.rows} x {p.cols} lanes, {options.threads} thread(s): ready after {total:.1f} s ({steps or 'cached'})")
    outputs, inputs = MEASURED
    arrays = random_case(chosen, tokens=1, outputs=outputs, inputs=inputs, seed=SEED)
    arrays["w_coeff"][arrays["w_coeff"] == 254] = 17
    weights = engine.pack(arrays)
    wall, cpu, cycles = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - wall < MEASURED_SECONDS:
        cycles += engine.multiply(arrays["x"], weights).cycles
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    token = sum(count * linear_cycles(p, tokens=1, inputs=k, outputs=n).total for (n, k), count in SMOLLM2.items())
    print(f"{cycles:,} cycles: {cycles / wall:,.0f} a second, {cycles / cpu:,.0f} a second of processor time")
    print(f"SmolLM2-135M: {token:,} cycles a token, {cycles / wall / token:.3f} tokens/s at most")


if __name__ == "__main__":
    main()
