"""What quantised weights cost a model: M-ANT and other formats with the same calibration and search.

    python bench/weight_loss.py smollm2 --calibrate calibration.txt --windows windows.npy
    python bench/weight_loss.py smollm2 --calibrate calibration.txt --text test.txt --group 128 --formats mant nf4

`--windows` takes token numbers, one window a row; `--text` cuts a text into windows. Activations stay float32. The loss
is relative, (perplexity - reference) / reference; the divergence from the reference is in nats per token. `--dither`
moves the weights of a model that comes on a 4-bit grid (blocks of 32 between their extremes, as GGUF's Q4_1) off that
grid by seeded uniform noise of one step, and takes the dithered model as the reference: on its own grid such a model
flatters formats that happen to share it.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from kvant.commands.quantize import SCALE_FACTORS
from kvant.golden.formats.mant import FORMATS
from kvant.golden.models.calibration import calibrate, calibration_windows
from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.evaluate import evaluate, split_windows
from kvant.golden.models.llama import Llama
from kvant.golden.models.tokenizer import encode, load_tokenizer


class RememberingLlama(Llama):
    """A reference whose logits are computed once per window."""

    def logits(self, tokens, observe=None):
        key = tokens.numpy().tobytes()
        if key not in self.__dict__.setdefault("_remembered", {}):
            self._remembered[key] = super().logits(tokens, observe)
        return self._remembered[key]


def dithered(w: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """A weight moved off its 4-bit grid."""
    blocks = w.unflatten(1, (-1, 32))
    step = (blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)) / 15
    return (blocks + step * (torch.rand(blocks.shape, generator=random) - 0.5)).flatten(1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what `kvant quantize` takes")
    parser.add_argument("--calibrate", type=Path, required=True, metavar="TEXT")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--windows", type=Path, help="int32 [windows, tokens] .npy")
    source.add_argument("--text", type=Path)
    parser.add_argument("--window", type=int, default=512, help="tokens of a window of --text and of calibration")
    parser.add_argument("--count", type=int, help="windows evaluated; default all")
    parser.add_argument("--tokens", type=int, default=16384, help="calibration tokens")
    parser.add_argument("--group", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--formats", nargs="+", default=["mant", "nf4"], choices=sorted(FORMATS))
    parser.add_argument("--objective", choices=("full", "diagonal", "weight"), default="full")
    parser.add_argument("--no-scale-search", action="store_true")
    parser.add_argument("--dither", action="store_true")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    return parser.parse_args()


def measure(name: str, group: int, weights: dict, moments: dict, factors: tuple[float, ...]) -> tuple[dict, dict]:
    """Weights as a format stores them, by name, and what that took."""
    wall, cpu = time.perf_counter(), time.process_time()
    stored = {
        tensor: FORMATS[name].quantize(w, group, second_moment=moments.get(tensor), scale_factors=factors, name=tensor)
        for tensor, w in weights.items()
    }
    row = {
        "format": name,
        "group": group,
        "bits": sum(s.bits for s in stored.values()) / len(stored),
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
    }
    return {tensor: s.values for tensor, s in stored.items()}, row


def main() -> None:
    arguments = parse()
    checkpoint = open_model(arguments.model)
    if arguments.windows:
        windows = [torch.from_numpy(row) for row in np.load(arguments.windows)]
    else:
        text = arguments.text.read_text(encoding="utf-8")
        windows = split_windows(encode(load_tokenizer(checkpoint), text), arguments.window)
    windows = windows[: arguments.count]
    names = [info.name for info in checkpoint.linear_weights]
    weights = {name: checkpoint.weight(name) for name in names}
    if arguments.dither:
        random = torch.Generator().manual_seed(0)
        weights = {name: dithered(w, random) for name, w in weights.items()}
    reference = RememberingLlama(checkpoint, weights)
    base = evaluate(reference, windows)
    print(f"reference: perplexity {base.perplexity:.3f}; {base.protocol}", flush=True)

    text = arguments.calibrate.read_text(encoding="utf-8")
    calibration = calibration_windows(checkpoint, text, arguments.tokens, arguments.window)
    factors = (1.0,) if arguments.no_scale_search else SCALE_FACTORS
    rows = []
    for group in arguments.group:
        moments = {}
        if arguments.objective != "weight":
            diagonal = arguments.objective == "diagonal"
            moments = calibrate(checkpoint, calibration, group, diagonal=diagonal, names=names).moments
        for name in arguments.formats:
            values, row = measure(name, group, weights, moments, factors)
            result = evaluate(Llama(checkpoint, values), windows, reference)
            row |= {
                "perplexity": result.perplexity,
                "relative_loss": result.perplexity / base.perplexity - 1,
                "kl": result.kl,
            }
            rows.append(row)
            print(
                f"{name:16} g{group:<4} {row['bits']:.3f} bits  search {row['seconds']:.0f} s "
                f"({row['cpu_seconds']:.0f} s CPU)  perplexity {row['perplexity']:.3f}  "
                f"relative loss {row['relative_loss']:.4f}  KL {row['kl']:.4f}",
                flush=True,
            )
    if arguments.json:
        setup = {key: str(value) for key, value in vars(arguments).items()}
        figures = {"setup": setup, "reference": base.perplexity, "rows": rows}
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
