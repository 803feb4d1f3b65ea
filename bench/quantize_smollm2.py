"""Time to quantise every linear weight of the real model: 16 coefficients, full output error.

    python bench/quantize_smollm2.py                 G = 64, all 210 weights
    python bench/quantize_smollm2.py --scale-search  five scales per coefficient

The calibration pass is timed apart. CPU time stands beside wall time: on a machine that does other work, the former
divided by the cores is what an idle one would need. `bench/weight_search.py` needs no model.
"""

import argparse
import time

from kvant import config
from kvant.commands.quantize import BUILTIN_TEXT, SCALE_FACTORS, Recipe, calibration_text, quantize_tensors
from kvant.golden.models.calibration import calibrate, calibration_windows
from kvant.golden.models.checkpoint import open_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--scale-search", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096, help="calibration tokens")
    arguments = parser.parse_args()
    recipe = Recipe(
        group=arguments.group,
        coefficients=config.load().coefficients,
        objective="full",
        scale_factors=SCALE_FACTORS if arguments.scale_search else (1.0,),
    )
    checkpoint = open_model(arguments.model)
    chosen = checkpoint.linear_weights
    wall, cpu = time.perf_counter(), time.process_time()
    windows = calibration_windows(checkpoint, calibration_text(BUILTIN_TEXT), arguments.tokens, 512)
    moments = calibrate(checkpoint, windows, recipe.group).moments
    print(f"calibration: {time.perf_counter() - wall:.1f} s, {time.process_time() - cpu:.1f} s CPU", flush=True)
    wall, cpu = time.perf_counter(), time.process_time()
    reports = list(quantize_tensors(checkpoint, chosen, recipe, moments))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    elements = sum(report.weights.codes.numel() for report in reports)
    print(f"{len(reports)} weights, {elements:,} elements: {wall:.1f} s, {cpu:.1f} s CPU")
    print(f"mean output error {sum(report.output_loss for report in reports) / len(reports):.4e}")


if __name__ == "__main__":
    main()
