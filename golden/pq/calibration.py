"""Codebooks of a whole model from calibration text, and the maps ahead of them: per layer, keys or values, and head.

Windows of the text should be as long as the use, and the text another than that of the evaluation.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import to_port
from kvant.golden.kvcache.calibration import Activations
from kvant.golden.kvcache.maps import apply, covariance, mapped_mean, output_gram, score_metric, second_moments
from kvant.golden.kvcache.rows import centred, check_sinks
from kvant.golden.linear.threads import independent_threads
from kvant.golden.numeric.rounding import fp16
from kvant.golden.pq.cache import check_recent
from kvant.golden.pq.codebook import Codebook, Partition
from kvant.golden.pq.train import check_finite, train_codebooks
from kvant.golden.pq.transform import transform

_MODEL_SAMPLES = 4096  # tokens of a layer that the codebook of a whole model is trained with

ROWS = ("key", "value")
"""What codebooks are of."""


@dataclass(frozen=True)
class Kind:
    """One sort of codebook.

    Parameters
    ----------
    rows : str
        ``key`` or ``value``.
    subspace : int
        Dimensions of a sub-space.
    nbits : int
        Bits of a code.
    shared : str
        What has one codebook: a ``head``, all heads of a ``layer``, or of the ``model``.
    """

    rows: str
    subspace: int
    nbits: int
    shared: str = "head"

    @classmethod
    def of(cls, name: str) -> "Kind":
        """The kind called ``key_2x8``, dimensions times bits; ``key_2x8_layer`` and ``key_2x8_model`` are shared.

        Raises
        ------
        TensorError
            For another name.
        """
        found = re.fullmatch(r"(key|value)_([1248])x([4-8])(?:_(layer|model))?", name)
        if found is None:
            raise TensorError(
                f"codebooks {name!r}: legal is key_ or value_, then dimensions x bits, as in key_2x8, then nothing, "
                "_layer or _model"
            )
        return cls(found[1], int(found[2]), int(found[3]), found[4] or "head")

    @property
    def name(self) -> str:
        """As `of` takes it."""
        return f"{self.rows}_{self.subspace}x{self.nbits}" + ("" if self.shared == "head" else f"_{self.shared}")

    def sharing(self, layers: int, heads: int) -> int:
        """Heads of a model that have one codebook in common."""
        return {"head": 1, "layer": heads, "model": layers * heads}[self.shared]


@dataclass(frozen=True)
class ModelCodebooks:
    """Codebooks of a model of L layers with H KV heads of d elements.

    Attributes
    ----------
    sinks : int
        First tokens of a sequence that took no part.
    key_mean : f16 [L, H, d]
        Of the keys as the model makes them; `mean` gives what is subtracted before they are cached.
    books : dict of str to Codebook
        By name of the kind; leading axes [L, H].
    transforms : dict of str to f16 [L, H, d, d]
        By name of the kind, the map A that vectors take before they are cached; a kind without one takes them as they
        are. See `kvant.golden.pq.transform`.
    """

    sinks: int
    key_mean: torch.Tensor
    books: dict[str, Codebook]
    transforms: dict[str, torch.Tensor] = field(default_factory=dict)

    def mean(self, kind: str) -> torch.Tensor | None:
        """What is subtracted from (mapped) vectors of a kind, f16 [L, H, d]; None for values."""
        if Kind.of(kind).rows != "key":
            return None
        return mapped_mean(self.key_mean, self.transforms.get(kind))

    def layers(self, kind: str) -> tuple[Codebook, ...]:
        """The codebooks of a kind, by layer.

        Raises
        ------
        TensorError
            A kind that was not trained.
        """
        if kind not in self.books:
            raise TensorError(f"codebooks {kind!r}: not trained; there are {', '.join(self.books)}")
        book = self.books[kind]
        return tuple(book.at(layer) for layer in range(book.leading[0]))


class CodebookCalibrator:
    """Trains codebooks, layer by layer, from what `kvant.golden.models.calibration.observe_layers` shows.

    Parameters
    ----------
    kinds : sequence of str
        See `Kind.of`.
    sinks : int
        First tokens of every window that are left out, as they will be INT8 sinks.
    maps : bool
        Find maps ahead of the codebooks of heads; else, and ahead of shared ones, vectors are coded as they are.
    recent : int
        Newest tokens that queries are taken to meet as INT8 rows, where errors of keys are weighed for the maps.
    output : callable, optional
        Gives the output projection f32 [hidden, Hq * d] of a layer's number, which weighs errors for the maps; default
        identity.
    seed, iterations, most_samples
        As in `train_codebooks`.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        *,
        sinks: int = 4,
        maps: bool = True,
        recent: int = 64,
        output: Callable[[int], torch.Tensor] | None = None,
        seed: int = 0,
        iterations: int | None = None,
        most_samples: int | None = None,
    ):
        self._kinds = [Kind.of(name) for name in dict.fromkeys(kinds)]
        if not self._kinds:
            raise TensorError("codebooks: no kind; legal is one or more, as in key_2x8")
        self._sinks, self._recent = check_sinks(sinks), check_recent(recent)
        self._output = output
        self._mapped = [kind for kind in self._kinds if maps and kind.shared == "head"]
        self._options = {"seed": seed, "iterations": iterations, "most_samples": most_samples}
        self._means: list[torch.Tensor] = []
        self._books: dict[str, list[Codebook]] = {kind.name: [] for kind in self._kinds}
        self._transforms: dict[str, list[torch.Tensor]] = {kind.name: [] for kind in self._mapped}
        # what the codebook of a whole model is trained with, by name of the kind and layer: f16 [H, N, d]
        self._samples: dict[str, list[torch.Tensor]] = {kind.name: [] for kind in self._kinds if kind.shared == "model"}

    @staticmethod
    def observer() -> Activations:
        """An observer of one layer on one window."""
        return Activations()

    def check(self, head_dim: int) -> None:
        """Refuse kinds that do not cut *head_dim*, before the work."""
        for kind in self._kinds:
            Partition.of(head_dim, kind.subspace, kind.nbits)

    def add(self, observers: Iterable[Activations]) -> None:
        """Train the codebooks of the next layer.

        Raises
        ------
        TensorError
            When no window is longer than the sinks.
        """
        observers = [observer for observer in observers if observer.keys.shape[-2] > self._sinks]
        if not observers:
            raise TensorError(f"calibration windows: legal is more than sinks = {self._sinks} tokens")
        keys, values = (
            torch.cat([getattr(observer, part)[:, self._sinks :] for observer in observers], dim=-2)
            for part in ("keys", "values")
        )
        layer = len(self._means)
        rows = {"key": keys, "value": values}
        for part, x in rows.items():
            check_finite(x, f"layer {layer} {part}s")
        mean = fp16(keys.mean(-2, dtype=torch.float64))
        self._means.append(mean)
        found = self._find_maps(layer, observers, rows) if self._mapped else {}
        for kind in self._kinds:
            x, matrix = rows[kind.rows], found.get(kind.name)
            centre = mapped_mean(mean, matrix) if kind.rows == "key" else None
            if matrix is not None:
                x = to_port(apply(matrix, x))
                self._transforms[kind.name].append(matrix)
            if kind.shared == "model":
                some = torch.randperm(x.shape[-2], generator=torch.Generator().manual_seed(layer))[:_MODEL_SAMPLES]
                self._samples[kind.name].append(centred(x[:, some], None if centre is None else centre[:, None]))
                continue
            shared = kind.shared == "layer"
            options = self._options | {"subspace": kind.subspace, "nbits": kind.nbits, "shared": shared}
            book = train_codebooks(x, mean=centre, name=f"layer {layer} {kind.rows}s", **options)
            self._books[kind.name].append(_everywhere(book, x.shape[0]) if shared else book)

    def _find_maps(
        self, layer: int, observers: list[Activations], rows: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Maps f16 [H, d, d] of the layer by name of the kind."""
        kv_heads, heads = rows["key"].shape[0], observers[0].queries.shape[0]
        gram = None if self._output is None else output_gram(self._output(layer), heads)
        wanted = {kind.rows for kind in self._mapped}

        def cost(observer: Activations) -> torch.Tensor:
            window = observer.queries, observer.keys, observer.values
            return score_metric(*window, gram, sinks=self._sinks, recent=self._recent)

        def one(job: tuple[Kind, int]) -> torch.Tensor:
            kind, head = job
            queries = energies[head] if kind.rows == "key" else None
            return transform(metrics[kind.rows][head], spreads[kind.rows][head], kind.subspace, queries)

        with independent_threads() as run:
            dim = rows["key"].shape[-1]
            metrics = {"value": torch.eye(dim, dtype=torch.float64).expand(kv_heads, dim, dim)}
            if gram is not None:
                metrics["value"] = gram.unflatten(0, (kv_heads, -1)).sum(1, dtype=torch.float64)
            if "key" in wanted:
                metrics["key"] = sum(run(cost, observers))
                energies = sum(run(lambda o: second_moments(o.queries, kv_heads), observers)) / len(observers)
            spreads = {part: torch.stack(run(covariance, rows[part])) for part in wanted}
            jobs = [(kind, head) for kind in self._mapped for head in range(kv_heads)]
            matrices = run(one, jobs)
        return {
            kind.name: torch.stack(matrices[number * kv_heads : (number + 1) * kv_heads])
            for number, kind in enumerate(self._mapped)
        }

    def result(self) -> ModelCodebooks:
        """Codebooks of the layers added so far."""
        for kind in self._kinds:
            if kind.shared == "model":
                samples = self._samples[kind.name]
                options = self._options | {"subspace": kind.subspace, "nbits": kind.nbits, "shared": True}
                book = train_codebooks(torch.cat(samples)[None], name=f"{kind.rows}s of all layers", **options)
                self._books[kind.name] = [_everywhere(book.at(0), samples[0].shape[0])] * len(samples)
        books = {
            name: Codebook(torch.stack([b.entries for b in layers]), torch.stack([b.scale for b in layers]))
            for name, layers in self._books.items()
        }
        transforms = {name: torch.stack(layers) for name, layers in self._transforms.items()}
        return ModelCodebooks(self._sinks, torch.stack(self._means), books, transforms)


def _everywhere(book: Codebook, heads: int) -> Codebook:
    """One codebook as that of every head."""
    return Codebook(book.entries.expand(heads, *book.entries.shape), book.scale.expand(heads))
