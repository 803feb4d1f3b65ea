"""Time and quality of codebook training: all layers and heads of the real model, keys and values.

    python bench/codebook_training.py                        2 dimensions x 256, time of the whole model
    python bench/codebook_training.py --subspace 4           4 dimensions x 256
    python bench/codebook_training.py --layers 5,20 --study  held-out error by samples, rounds and seeding

The forward that collects keys and values is timed apart. CPU time stands beside wall time: on a machine that does other
work, the former divided by the cores is what an idle one would need. Training and held-out windows are disjoint parts
of a calibration text; the default is one that every Python carries.
"""

import argparse
import time

import torch

from kvant.commands.quantize import BUILTIN_TEXT, calibration_text
from kvant.golden.kvcache.calibration import KeysAndValues
from kvant.golden.kvcache.rows import centred
from kvant.golden.models.calibration import calibration_windows, observe_layers
from kvant.golden.models.checkpoint import open_model
from kvant.golden.numeric.rounding import fp16
from kvant.golden.pq.codebook import Partition
from kvant.golden.pq.encode import encode
from kvant.golden.pq.kmeans import GRID, hilbert_seeds, lloyd
from kvant.golden.pq.search import nearest
from kvant.golden.pq.train import train_codebooks

SINKS = 4


class Stopwatch:
    """Wall and CPU seconds since it was made."""

    def __init__(self):
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def __str__(self) -> str:
        return f"{time.perf_counter() - self.wall:.1f} s, {time.process_time() - self.cpu:.1f} s CPU"


def rows_of(observers: list, part: str) -> torch.Tensor:
    """Keys or values f16 [H, N, d] of windows, sinks left out."""
    return torch.cat([getattr(observer, part)[:, SINKS:] for observer in observers], dim=-2)


def relative_error(rows: torch.Tensor, book, mean: torch.Tensor | None) -> float:
    """Squared error of coded rows f16 [H, N, d] over their variance."""
    wanted = centred(rows, None if mean is None else mean[:, None]).float()
    error = (book.decode(encode(rows, book, mean=mean)) - wanted).square().sum()
    return float(error / (rows.float() - rows.float().mean(-2, keepdim=True)).square().sum())


def plus_plus(points: torch.Tensor, count: int) -> torch.Tensor:
    """Seeds of k-means++ f64 [B, K, D], for comparison."""
    generator = torch.Generator().manual_seed(0)
    chosen = [points[:, :1]]
    distance = torch.full(points.shape[:2], torch.inf, dtype=torch.float64)
    for _ in range(count - 1):
        distance = torch.minimum(distance, (points - chosen[-1]).square().sum(-1))
        chosen.append(
            points.gather(1, distance.multinomial(1, generator=generator)[..., None].expand(-1, -1, points.shape[2]))
        )
    return torch.cat(chosen, dim=1)


def study(rows: torch.Tensor, held: torch.Tensor, partition: Partition, mean: torch.Tensor | None) -> None:
    """Held-out error of one head by samples and seeding, after 0, 1, 2, ... rounds, before rounding to INT8."""
    generator = torch.Generator().manual_seed(0)

    def points_of(x: torch.Tensor) -> torch.Tensor:
        x = x.double() - (0 if mean is None else mean.double())
        return partition.cut(x).transpose(0, 1).contiguous()

    points, held = points_of(rows[torch.randperm(len(rows), generator=generator)]), points_of(held)
    unit = points.abs().amax((1, 2), keepdim=True) / GRID
    variance = (held - held.mean(1, keepdim=True)).square().sum()

    def error(centres: torch.Tensor) -> float:
        index = nearest(torch.round(held / unit), torch.round(centres))
        nearby = centres.gather(1, index[..., None].expand(*index.shape, partition.dimensions)) * unit
        return float((held - nearby).square().sum() / variance)

    for samples in (16, 32, 64, 96):
        used = torch.round(points[:, : samples * partition.centroids] / unit)
        for name, seeds in (("Hilbert", hilbert_seeds), ("k-means++", plus_plus)):
            watch = Stopwatch()
            centres = seeds(used[:, : 16 * partition.centroids], partition.centroids)
            text = f"  {samples} samples a centroid, {name:9} ({watch})"
            for rounds in (0, 1, 1, 1, 2, 5):
                if rounds:
                    centres = lloyd(used, centres, rounds).centroids
                text += f" {error(centres):.5f}"
            print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default=BUILTIN_TEXT, help="calibration text")
    parser.add_argument("--tokens", type=int, default=20480, help="tokens of it; a fifth is held out")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--subspace", type=int, default=2)
    parser.add_argument("--nbits", type=int, default=8)
    parser.add_argument("--iterations", type=int, help="rounds of k-means")
    parser.add_argument("--layers", help="some layers only, as in 5,20")
    parser.add_argument("--shared", action="store_true", help="a codebook per layer, not per head")
    parser.add_argument("--study", action="store_true", help="held-out error by samples, rounds and seeding")
    arguments = parser.parse_args()
    checkpoint = open_model(arguments.model)
    partition = Partition.of(checkpoint.config.head_dim, arguments.subspace, arguments.nbits)
    layers = range(checkpoint.config.layers)
    if arguments.layers:
        layers = [int(number) for number in arguments.layers.split(",")]
    windows = calibration_windows(checkpoint, calibration_text(arguments.text), arguments.tokens, arguments.window)
    held = max(1, len(windows) // 5)
    watch, rows = Stopwatch(), {}
    for number, observers in observe_layers(checkpoint, windows, KeysAndValues):
        if number in layers:
            rows[number] = [(rows_of(observers[held:], p), rows_of(observers[:held], p)) for p in ("keys", "values")]
    print(f"keys and values of {sum(map(len, windows))} tokens: {watch}", flush=True)
    for part, name in enumerate(("keys", "values")):
        mean = None
        samples = torch.stack([rows[number][part][0] for number in layers])
        if name == "keys":
            mean = fp16(samples.mean(-2, dtype=torch.float64))
        if arguments.study:
            for place, number in enumerate(layers):
                print(f"layer {number} {name}, head 0: held-out error of seeds and after 1, 2, 3, 5, 10 rounds")
                study(samples[place, 0], rows[number][part][1][0], partition, None if mean is None else mean[place, 0])
            continue
        watch = Stopwatch()
        books = train_codebooks(
            samples,
            subspace=arguments.subspace,
            nbits=arguments.nbits,
            mean=mean,
            shared=arguments.shared,
            iterations=arguments.iterations,
        )
        count = books.scale.numel()
        print(f"{name}: {count} codebooks of {partition.subspaces} x {partition.centroids}: {watch}", flush=True)
        errors = [
            relative_error(rows[number][part][1], books.at(place), None if mean is None else mean[place])
            for place, number in enumerate(layers)
        ]
        print(f"{name}: held-out squared error over variance {sum(errors) / len(errors):.5f}", flush=True)


if __name__ == "__main__":
    main()
