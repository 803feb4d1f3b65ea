"""Perplexity, and divergence from a reference model, over windows of text."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
