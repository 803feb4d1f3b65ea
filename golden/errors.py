"""Errors of the golden model."""


class TensorError(ValueError):
    """A tensor that cannot be used; the text is one line that names it, its value and what is legal."""
