"""Second moments of every linear layer's input, from text run through the unquantised model.

They turn a weight error ``e`` into the output error it causes, ``e^T (X^T X) e``. A group sees its own part, the G x G
block ``X_g^T X_g``; the diagonal alone is the cheaper, coarser objective.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvant.golden.linear.objective import diagonal_moment, second_moment
from kvant.golden.linear.threads import independent_threads
from kvant.golden.models.checkpoint import Checkpoint
from kvant.golden.models.errors import ModelError
from kvant.golden.models.evaluate import split_windows
from kvant.golden.models.llama import Llama, Observer
from kvant.golden.models.tokenizer import encode, load_tokenizer
from kvant.golden.numeric.tensors import to_groups

Progress = Callable[[int, int], None]
"""Called with layers done and layers in all."""


@dataclass(frozen=True)
class Calibration:
    """Second moments by weight.

    Parameters
    ----------
    moments : dict of str to tensor
        f32 by name of the weight: [ceil(K/G), G, G] (``X_g^T X_g / tokens``, the last group padded with zeros), or
        [K] (its diagonal).
    tokens : int
        Tokens they were taken over.
    """

    moments: dict[str, torch.Tensor]
    tokens: int


def calibration_windows(checkpoint: Checkpoint, text: str, tokens: int, window: int) -> list[torch.Tensor]:
    """The first *tokens* tokens of a text, cut into windows; shorter texts give what they have.

    Raises
    ------
    ModelError
        A text of fewer than two tokens, a window outside the model's context, no tokenizer.
    """
    if not 2 <= window <= checkpoint.config.context:
        raise ModelError(f"window = {window}: legal is 2 to {checkpoint.config.context}, the model's context")
    return split_windows(encode(load_tokenizer(checkpoint), text)[:tokens], window)


def digest(windows: Sequence[torch.Tensor]) -> str:
    """SHA-256 of the tokens of windows and of where they are cut: names a calibration."""
    state = hashlib.sha256()
    for window in windows:
        state.update(len(window).to_bytes(8, "little"))
        state.update(window.to(torch.int32).numpy().tobytes())
    return state.hexdigest()


def observe_layers(
    checkpoint: Checkpoint,
    windows: Sequence[torch.Tensor],
    make_observer: Callable[[], Observer],
    progress: Progress | None = None,
) -> Iterator[tuple[int, list[Observer]]]:
    """Run the unquantised model layer by layer, so that one layer's weights are in memory at a time.

    Parameters
    ----------
    checkpoint : Checkpoint
        Unquantised model.
    windows : sequence of tensor
        1-D token numbers.
    make_observer : callable
        Gives the observer of one layer on one window; called in the main thread.
    progress : callable, optional
        See `Progress`.

    Yields
    ------
    number, observers : int, list
        Of every layer, its number and what observed it, in the order of the windows.

    Raises
    ------
    ModelError
        No text, a model that the forward does not know, or an activation that is not finite, with its layer.
    """
    if not windows:
        raise ModelError("calibration text: no tokens")
    embedding = Llama(checkpoint)
    hidden = [embedding.embed(torch.as_tensor(window)[None]) for window in windows]
    del embedding
    for number in range(checkpoint.config.layers):
        with independent_threads() as run:
            model = Llama(checkpoint)  # keeps the weights of this layer for all windows, then lets them go
            observers = [make_observer() for _ in windows]

            def step(job: tuple[torch.Tensor, Observer], number=number, model=model) -> torch.Tensor:
                with torch.no_grad():  # a setting of the thread
                    return model.layer(number, *job)

            with torch.no_grad():
                model.layer(number, hidden[0][:, :1])  # reads the weights, before the threads meet
            hidden = run(step, zip(hidden, observers, strict=True))
        if not all(bool(state.isfinite().all()) for state in hidden):
            raise ModelError(f"layer {number}: activations of the calibration text are not finite")
        if progress is not None:
            progress(number + 1, checkpoint.config.layers)
        yield number, observers


def calibrate(
    checkpoint: Checkpoint,
    windows: Sequence[torch.Tensor],
    group: int,
    *,
    diagonal: bool = False,
    names: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Collect second moments of the inputs of linear layers.

    Parameters
    ----------
    checkpoint, windows, progress
        As in `observe_layers`, which also says what is refused.
    group : int
        Elements of a group, G.
    diagonal : bool
        Keep the diagonals only.
    names : iterable of str, optional
        Weights wanted; default all linear weights of the decoder layers.
    """
    moments = Moments(group, diagonal=diagonal, names=names)
    for _, observers in observe_layers(checkpoint, windows, moments.observer, progress):
        moments.add(observers)
    return moments.result(sum(len(window) for window in windows))


class Moments:
    """Adds up what the observers of all layers and windows saw. Parameters as in `calibrate`."""

    def __init__(self, group: int, *, diagonal: bool = False, names: Iterable[str] | None = None):
        self._group, self._diagonal = group, diagonal
        self._wanted = None if names is None else set(names)
        self._sums: dict[str, torch.Tensor] = {}

    def observer(self) -> "_Moments":
        """An observer of one layer on one window."""
        return _Moments(self._group, self._diagonal, self._wanted)

    def add(self, observers: Iterable["_Moments"]) -> None:
        """Take over what observers of a layer saw."""
        for observer in observers:
            for name, moment in observer.moments.items():
                self._sums[name] = self._sums[name] + moment if name in self._sums else moment

    def result(self, tokens: int) -> Calibration:
        """Means over *tokens* tokens."""
        return Calibration({name: (total / tokens).float() for name, total in self._sums.items()}, tokens)


class _Moments:
    """Observer of a layer on one window that adds up second moments."""

    def __init__(self, group: int, diagonal: bool, wanted: set[str] | None):
        self.moments: dict[str, torch.Tensor] = {}
        self._moment = diagonal_moment if diagonal else lambda x: second_moment(x, group)
        self._wanted = wanted
        self._latest = (None, None)  # an input and its moment: q, k, v share their input, and so do gate and up

    def __call__(self, name: str, value: torch.Tensor) -> None:
        if not name.endswith(".weight") or (self._wanted is not None and name not in self._wanted):
            return
        if value is not self._latest[0]:
            self._latest = value, self._moment(value.flatten(0, -2))
        self.moments[name] = self._latest[1]


def output_energy(w: torch.Tensor, moment: torch.Tensor, group: int) -> float:
    """Output energy that a weight, or a weight error, [N, K] causes group by group: the sum of ``w_g^T M_g w_g``.

    Parameters
    ----------
    w : tensor
        f32 [N, K].
    moment : tensor
        f32 [ceil(K/G), G, G] or [K], as in `Calibration`.
    group : int
        G.
    """
    if moment.ndim == 1:
        return float((w.square().sum(0, dtype=torch.float64) * moment.double()).sum())
    groups = to_groups(w, group).transpose(0, 1)
    return float(((groups @ moment) * groups).sum(dtype=torch.float64))
