"""Training of codebooks from samples of keys or values.

Every head, or every layer, has its own codebook: k-means in all sub-spaces (`kmeans`), then entries rounded to INT8
with the scale that costs least. Source: MILLION (DAC 2025, section III) trains offline, by k-means.
"""

from collections.abc import Callable

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.rows import channel_vector
from kvant.golden.linear.threads import independent_threads
from kvant.golden.numeric.rounding import FP16_MAX, fp16
from kvant.golden.numeric.tensors import as_tensor
from kvant.golden.pq.codebook import Codebook, Partition
from kvant.golden.pq.kmeans import Clusters, kmeans

Progress = Callable[[int, int], None]
"""Called with codebooks done and codebooks in all."""

ITERATIONS = {1: 3, 2: 3, 4: 6, 8: 6}
"""Rounds of k-means by dimensions of a sub-space: twice as many gain 1 % of the squared error."""

SAMPLES_PER_CENTROID = {1: 64, 2: 64, 4: 256, 8: 128}
"""Samples per centroid that training uses of what it is given, by dimensions of a sub-space."""

INT8_MAX = 127
_SCALES = 64  # scales tried between half and all of what holds the largest centroid


def train_codebooks(
    samples,
    *,
    subspace: int = 2,
    nbits: int = 8,
    mean=None,
    shared: bool = False,
    seed: int = 0,
    iterations: int | None = None,
    most_samples: int | None = None,
    name: str = "samples",
    progress: Progress | None = None,
) -> Codebook:
    """Codebooks of heads.

    Parameters
    ----------
    samples : floating point [..., N, d]
        Vectors of each head; the caller's data are not modified.
    subspace : int
        Dimensions of a sub-space, d/M: 1, 2, 4 or 8.
    nbits : int
        Bits of a code, 4 to 8.
    mean : f16 [d] or [..., d], optional
        Subtracted from the vectors, as the cache will do.
    shared : bool
        One codebook for all heads along the last of the leading axes, a layer's.
    seed : int
        Decides which samples are used where there are more than needed, and which of them place the seeds.
    iterations : int, optional
        Rounds of k-means; default `ITERATIONS`.
    most_samples : int, optional
        Samples used per codebook; default `SAMPLES_PER_CENTROID` for each centroid.
    name : str
        What error messages call the samples.
    progress : callable, optional
        See `Progress`.

    Returns
    -------
    Codebook
        Leading axes as those of *samples*, without the last of them when shared.

    Raises
    ------
    TensorError
        For an illegal partition, a NaN or an infinity (with the sample's place), no samples.
    """
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    samples = as_tensor(samples, name, floats)
    if samples.dim() < 2 or (shared and samples.dim() < 3):
        axes = "[..., H, N, d]" if shared else "[..., N, d]"
        raise TensorError(f"{name}: shape {tuple(samples.shape)}; legal is {axes}")
    partition = Partition.of(samples.shape[-1], subspace, nbits)
    check_finite(samples, name)
    for what, value in (("iterations", iterations), ("most_samples", most_samples)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise TensorError(f"{what} = {value!r}: legal is an integer from 1")
    if mean is not None:
        mean = channel_vector(mean, "mean", samples).to(torch.float64).expand(*samples.shape[:-2], 1, -1)
        mean = mean.reshape(-1, samples.shape[-3] if shared else 1, 1, samples.shape[-1])
    leading = samples.shape[: -3 if shared else -2]
    heads = samples.reshape(-1, samples.shape[-3] if shared else 1, *samples.shape[-2:])
    total = heads.shape[1] * heads.shape[2]
    chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    chosen = chosen[: most_samples or SAMPLES_PER_CENTROID[subspace] * partition.centroids]
    iterations = iterations or ITERATIONS[subspace]
    head, row = chosen // heads.shape[2], chosen % heads.shape[2]
    done = 0

    def work(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal done
        vectors = heads[number, head, row].to(torch.float64)
        if mean is not None:
            vectors = vectors - mean[number, head, 0]
        points = partition.cut(vectors).transpose(0, 1).contiguous()
        book = quantize_centroids(kmeans(points, partition.centroids, iterations))
        done += 1
        if progress is not None:
            progress(done, len(heads))
        return book

    with independent_threads() as run:
        entries, scales = zip(*run(work, range(len(heads))), strict=True)
    shape = (partition.subspaces, partition.centroids, partition.dimensions)
    return Codebook(torch.stack(entries).view(*leading, *shape), torch.stack(scales).view(leading))


def check_finite(samples: torch.Tensor, name: str) -> None:
    """Refuse samples [..., N, d] with a NaN or an infinity, naming the first such place."""
    for where in (~torch.isfinite(samples)).nonzero()[:1].tolist():
        raise TensorError(f"{name}{where} = {samples[tuple(where)].item()}: legal are finite samples")


def quantize_centroids(clusters: Clusters) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 entries and the fp16 scale of one codebook.

    Of the scales between half and all of what holds the largest centroid, the one is taken that adds the least squared
    error to all samples; for samples that keep their centroid that is the count times the rounding error's square. On
    a tie the largest.

    Parameters
    ----------
    clusters : Clusters
        Of all sub-spaces: f64 [M, 2^nbits, d/M] and i64 [M, 2^nbits].

    Returns
    -------
    i8 [M, 2^nbits, d/M], f16 []
    """
    centroids, counts = clusters
    largest = centroids.abs().amax()
    if largest > FP16_MAX * INT8_MAX:
        raise TensorError(f"samples: magnitude {largest.item():g}; legal is at most {FP16_MAX * INT8_MAX:g}")
    weight = counts[..., None].to(torch.float64)
    best = None
    for step in range(_SCALES):
        scale = fp16(largest * (1 - 0.5 * step / _SCALES) / INT8_MAX)
        if scale == 0:
            continue
        s = scale.to(torch.float64)
        entries = torch.round(centroids / s).clamp_(-INT8_MAX, INT8_MAX)
        cost = ((centroids - entries * s).square() * weight).sum()
        if best is None or cost < best[0]:
            best = cost, entries, scale
    if best is None:
        return torch.zeros(centroids.shape, dtype=torch.int8), torch.zeros((), dtype=torch.float16)
    return best[1].to(torch.int8), best[2]
