"""Perplexity, and divergence from a reference model, over windows of text."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch

from kvant.golden.models.errors import ModelError
from kvant.golden.models.llama import Llama


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and how.

    Parameters
    ----------
    nll : float
        Mean negative logarithm of the predicted tokens' probability, nats.
    kl : float or None
        Mean divergence of the model's distribution from the reference's at the same positions, nats; None without a
        reference.
    tokens : int
        Tokens predicted.
    windows : int
        Windows evaluated.
    window : int
        Tokens of the longest window.
    dtype : str
        Type of the arithmetic.
    """

    nll: float
    kl: float | None
    tokens: int
    windows: int
    window: int
    dtype: str = "float32"

    @property
    def perplexity(self) -> float:
        """``exp(nll)``."""
        return math.exp(self.nll)

    @property
    def protocol(self) -> str:
        """How it was measured, in words."""
        return (
            f"{self.windows} windows of up to {self.window} tokens, stride = window, no BOS, first token of a window "
            f"not predicted, {self.tokens} tokens counted, {self.dtype}"
        )


def split_windows(tokens: Sequence[int], length: int) -> list[torch.Tensor]:
    """Cut a text into consecutive windows of *length* tokens; the last may be shorter, but has two tokens at least.

    Raises
    ------
    ModelError
        A text of fewer than two tokens, or a window that predicts nothing.
    """
    if length < 2:
        raise ModelError(f"window = {length}: legal is 2 or more, a window's first token is not predicted")
    if len(tokens) < 2:
        raise ModelError(f"text of {len(tokens)} tokens: at least 2 are needed to predict one")
    pieces = [torch.as_tensor(tokens[start : start + length]) for start in range(0, len(tokens), length)]
    return [piece for piece in pieces if len(piece) > 1]


def evaluate(model: Llama, windows: Iterable[torch.Tensor], reference: Llama | None = None) -> Evaluation:
    """Predict tokens 1, 2, ... of every window from those before.

    Parameters
    ----------
    model : Llama
        What is measured.
    windows : iterable of tensor
        Token numbers, one 1-D tensor (or row) a window, of any lengths from 2; every predicted token weighs the same.
    reference : Llama, optional
        Model whose distributions the divergence is taken from.

    Raises
    ------
    ModelError
        No window, a window too short, or a loss that is not finite, with the window's number.
    """
    nll, kl, tokens, count, longest = 0.0, 0.0, 0, 0, 0
    for number, tokens_of_window in enumerate(windows):
        window = torch.as_tensor(tokens_of_window).long()
        if window.ndim != 1 or len(window) < 2:
            raise ModelError(f"window {number}: shape {tuple(window.shape)}; legal is 1-D with 2 tokens or more")
        logarithms = model.logits(window[None])[0, :-1].log_softmax(-1)
        loss = -logarithms.gather(1, window[1:, None]).sum(dtype=torch.float64)
        if not bool(loss.isfinite()):
            raise ModelError(f"window {number}: the loss is {loss.item()}; the model's logits are not finite")
        nll += loss.item()
        if reference is not None:
            expected = reference.logits(window[None])[0, :-1].log_softmax(-1)
            kl += (expected.exp() * (expected - logarithms)).sum(dtype=torch.float64).item()
        tokens += len(window) - 1
        count += 1
        longest = max(longest, len(window))
    if not count:
        raise ModelError("text: no window to evaluate")
    return Evaluation(nll / tokens, kl / tokens if reference is not None else None, tokens, count, longest)


CHUNK = 128
"""Positions whose distributions are compared at a time: a vocabulary makes them large."""


@dataclass(frozen=True)
class Window:
    """Tokens that a model sees together.

    Parameters
    ----------
    tokens : tensor
        i64 [T], token numbers.
    first : int
        First position whose token is predicted and counted, from 1 on.
    """

    tokens: torch.Tensor
    first: int = 1

    @property
    def counted(self) -> int:
        """Tokens predicted and counted."""
        return len(self.tokens) - self.first


def cut_windows(tokens: Sequence[int], length: int, stride: int | None = None, bos: int | None = None) -> list[Window]:
    """Cut a text into windows of *length* tokens in all, so that every token is counted once at most.

    Parameters
    ----------
    tokens : sequence of int
        The text.
    length : int
        Tokens of a window; the last one may be shorter.
    stride : int, optional
        Tokens of the text from one window's begin to the next; default all of a window. A smaller one gives the tokens
        of later windows more to look back on, a larger one takes samples of a long text.
    bos : int, optional
        Token number put before every window, so that its first token of text is predicted too.

    Raises
    ------
    ModelError
        A text of fewer than two tokens, a window that predicts nothing, or a stride below 1.
    """
    head = [] if bos is None else [bos]
    content = length - len(head)
    if length < 2:
        raise ModelError(f"window = {length}: legal is 2 or more, a window's first token is not predicted")
    stride = content if stride is None else stride
    if stride < 1:
        raise ModelError(f"stride = {stride}: legal is 1 or more")
    if len(tokens) + len(head) < 2:
        raise ModelError(f"text of {len(tokens)} tokens: at least 2 are needed to predict one")
    windows, end = [], 0
    for start in range(0, len(tokens), stride):
        piece = torch.tensor([*head, *tokens[start : start + content]], dtype=torch.long)
        first = max(end - start + len(head), 1)
        if first < len(piece):
            windows.append(Window(piece, first))
        end = max(end, start + content)
    return windows


@dataclass(frozen=True)
class Losses:
    """Sums over predicted tokens, which may be added.

    Parameters
    ----------
    tokens : int
        Tokens predicted.
    nll : float
        Negative logarithms of their probabilities, nats.
    delta, delta_square : float
        What these exceed the reference's by, token by token, and its square.
    kl, kl_square : float
        Divergence of the model's distribution from the reference's, and its square.
    """

    tokens: int = 0
    nll: float = 0.0
    delta: float = 0.0
    delta_square: float = 0.0
    kl: float = 0.0
    kl_square: float = 0.0

    def __add__(self, other: "Losses") -> "Losses":
        return Losses(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss."""
        return math.exp(self.nll / self.tokens)

    @property
    def dnll(self) -> tuple[float, float]:
        """Mean loss above the reference's on the same tokens, and its standard error."""
        return self._mean(self.delta, self.delta_square)

    @property
    def divergence(self) -> tuple[float, float]:
        """Mean divergence, and its standard error."""
        return self._mean(self.kl, self.kl_square)

    def _mean(self, total: float, squares: float) -> tuple[float, float]:
        """Mean, and its standard error as of independent tokens."""
        mean = total / self.tokens
        variance = max(squares / self.tokens - mean * mean, 0.0) / max(self.tokens - 1, 1)
        return mean, math.sqrt(variance)


def reference_states(reference: Llama, window: Window) -> torch.Tensor:
    """Last hidden states f32 [counted, hidden] of the positions that predict the counted tokens."""
    return reference.hidden(window.tokens[None])[0, window.first - 1 : len(window.tokens) - 1]


@torch.no_grad()
def window_losses(
    reference: Llama,
    models: Mapping[str, Llama],
    window: Window,
    step: Callable[[], None] = lambda: None,
    expected_states: torch.Tensor | None = None,
) -> dict[str, Losses]:
    """Losses of several models on one window, beside a reference whose distributions are made once.

    Parameters
    ----------
    reference : Llama
        What `Losses.delta` and `Losses.kl` are measured against.
    models : mapping of str to Llama
        What is measured, by name; the reference itself may be among them.
    window : Window
    step : callable
        Called when a model has been run.
    expected_states : f32 [counted, hidden], optional
        The reference's `reference_states` of the window, where they are known already.

    Raises
    ------
    ModelError
        A loss that is not finite, with the model's name.
    """
    tokens, positions = window.tokens[None], slice(window.first - 1, len(window.tokens) - 1)
    if expected_states is None:
        expected_states = reference_states(reference, window)
    states = {}
    for name, model in models.items():
        states[name] = expected_states if model is reference else model.hidden(tokens)[0, positions]
        step()
    targets = window.tokens[window.first :, None]
    losses = dict.fromkeys(models, Losses())
    for first in range(0, window.counted, CHUNK):
        part = slice(first, first + CHUNK)
        expected = reference.head(expected_states[part]).log_softmax(-1)
        for name, model in models.items():
            found = expected if model is reference else model.head(states[name][part]).log_softmax(-1)
            nll = -found.gather(1, targets[part])[:, 0].double()
            delta = nll + expected.gather(1, targets[part])[:, 0].double()
            kl = (expected.exp() * (expected - found)).sum(-1, dtype=torch.float64)
            sums = (nll.sum(), delta.sum(), delta.square().sum(), kl.sum(), kl.square().sum())
            losses[name] += Losses(len(nll), *(float(value) for value in sums))
    for name, found in losses.items():
        if not all(math.isfinite(value) for value in astuple(found)):
            raise ModelError(f"{name}: the loss is {found.nll}; the model's logits are not finite")
    return losses
