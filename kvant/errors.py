"""Errors a user meets: one line each, and the exit code that goes with them."""


class InputError(Exception):
    """Bad input: the text names what is wrong, its value and what is legal. Exit code 2."""


class ComparisonError(Exception):
    """A comparison that failed. Exit code 1."""
