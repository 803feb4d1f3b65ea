"""Errors about models as a whole."""

from kvant.golden.errors import TensorError


class ModelError(TensorError):
    """A model that cannot be found, read or run; the text is one line that says what, and what would do.

    A model is read as tensors, so whoever handles `TensorError` handles these too.
    """
