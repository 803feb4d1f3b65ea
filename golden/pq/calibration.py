"""Codebooks of a whole model from calibration text: per layer, keys or values, and head.

Windows of the text should be as long as the use, and the text another than that of the evaluation.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.calibration import KeysAndValues
from kvant.golden.kvcache.rows import check_sinks
from kvant.golden.numeric.rounding import fp16
from kvant.golden.pq.codebook import Codebook, Partition
from kvant.golden.pq.train import train_codebooks

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
    """

    rows: str
    subspace: int
    nbits: int

    @classmethod
    def of(cls, name: str) -> "Kind":
        """The kind called ``key_2x8``, dimensions times bits.

        Raises
        ------
        TensorError
            For another name.
        """
        found = re.fullmatch(r"(key|value)_([1248])x([4-8])", name)
        if found is None:
            raise TensorError(f"codebooks {name!r}: legal is key_ or value_, then dimensions x bits, as in key_2x8")
        return cls(found[1], int(found[2]), int(found[3]))

    @property
    def name(self) -> str:
        """As `of` takes it."""
        return f"{self.rows}_{self.subspace}x{self.nbits}"


@dataclass(frozen=True)
class ModelCodebooks:
    """Codebooks of a model of L layers with H KV heads of d elements.

    Attributes
    ----------
    sinks : int
        First tokens of a sequence that took no part.
    key_mean : f16 [L, H, d]
        Subtracted from keys before they are cached.
    books : dict of str to Codebook
        By name of the kind; leading axes [L, H].
    """

    sinks: int
    key_mean: torch.Tensor
    books: dict[str, Codebook]

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
    seed, iterations, most_samples
        As in `train_codebooks`.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        *,
        sinks: int = 4,
        seed: int = 0,
        iterations: int | None = None,
        most_samples: int | None = None,
    ):
        self._kinds = [Kind.of(name) for name in dict.fromkeys(kinds)]
        if not self._kinds:
            raise TensorError("codebooks: no kind; legal is one or more, as in key_2x8")
        self._sinks = check_sinks(sinks)
        self._options = {"seed": seed, "iterations": iterations, "most_samples": most_samples}
        self._means: list[torch.Tensor] = []
        self._books: dict[str, list[Codebook]] = {kind.name: [] for kind in self._kinds}

    @staticmethod
    def observer() -> KeysAndValues:
        """An observer of one layer on one window."""
        return KeysAndValues()

    def check(self, head_dim: int) -> None:
        """Refuse kinds that do not cut *head_dim*, before the work."""
        for kind in self._kinds:
            Partition.of(head_dim, kind.subspace, kind.nbits)

    def add(self, observers: Iterable[KeysAndValues]) -> None:
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
        mean = fp16(keys.mean(-2, dtype=torch.float64))
        self._means.append(mean)
        for kind in self._kinds:
            rows, centre = (keys, mean) if kind.rows == "key" else (values, None)
            name = f"layer {len(self._means) - 1} {kind.rows}s"
            self._books[kind.name].append(
                train_codebooks(rows, subspace=kind.subspace, nbits=kind.nbits, mean=centre, name=name, **self._options)
            )

    def result(self) -> ModelCodebooks:
        """Codebooks of the layers added so far."""
        books = {
            name: Codebook(torch.stack([b.entries for b in layers]), torch.stack([b.scale for b in layers]))
            for name, layers in self._books.items()
        }
        return ModelCodebooks(self._sinks, torch.stack(self._means), books)
