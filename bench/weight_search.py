"""Time of the weight search on a whole model: seeded random weights in the shapes of SmolLM2-135M.

    python bench/weight_search.py            all 30 layers, 106 million weights
    python bench/weight_search.py --quick    one layer, extrapolated

Calibration (the second moments) is not counted. CPU time stands beside wall time: on a machine that does other work the
former divided by the cores is what an idle one would need.
"""

import argparse
import time

import torch

from kvant.golden.linear.objective import diagonal_moment, second_moment
from kvant.golden.linear.search import quantize_weights
from kvant.golden.numeric.codes import DEFAULT_COEFFICIENTS

LAYERS = 30
SHAPES = {  # outputs, inputs
    "q": (576, 576),
    "k": (192, 576),
    "v": (192, 576),
    "o": (576, 576),
    "gate": (1536, 576),
    "up": (1536, 576),
    "down": (576, 1536),
}
TOKENS = 512


def layer(index: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Weights (heavier-tailed than a Gaussian, as real ones are) and calibration activations of one layer."""
    random = torch.Generator().manual_seed(index)
    tensors = {}
    for name, (outputs, inputs) in SHAPES.items():
        w = torch.randn(outputs, inputs, generator=random)
        w *= 0.03 * (0.5 + torch.rand(outputs, inputs, generator=random))
        x = torch.randn(TOKENS, inputs, generator=random) * (0.1 + torch.rand(inputs, generator=random))
        tensors[name] = (w, x)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one layer only")
    parser.add_argument("--objective", choices=("weight", "diagonal", "full"), default="full")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0], help="scale factors tried")
    parser.add_argument("--threads", type=int, help="threads of torch; default: its own choice")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    moments = {
        "weight": lambda x: None,
        "diagonal": diagonal_moment,
        "full": lambda x: second_moment(x, arguments.group),
    }
    layers = 1 if arguments.quick else LAYERS
    elements, wall, cpu, loss = 0, 0.0, 0.0, 0.0
    for index in range(layers):
        for w, x in layer(index).values():
            moment = moments[arguments.objective](x)
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            weights = quantize_weights(w, arguments.group, second_moment=moment, scale_factors=arguments.scales)
            wall += time.perf_counter() - wall_start
            cpu += time.process_time() - cpu_start
            elements += w.numel()
            loss += weights.loss
    print(
        f"{elements / 1e6:.1f} M weights, {len(DEFAULT_COEFFICIENTS)} coefficients, {len(arguments.scales)} scales, "
        f"G = {arguments.group}, objective {arguments.objective}, {torch.get_num_threads()} threads: "
        f"{wall:.1f} s wall, {cpu:.1f} s CPU, loss {loss:.6g}"
    )
    if arguments.quick:
        print(f"all {LAYERS} layers: about {LAYERS * wall:.0f} s wall, {LAYERS * cpu:.0f} s CPU")


if __name__ == "__main__":
    main()
