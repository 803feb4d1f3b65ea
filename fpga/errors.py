"""Errors of the synthesis flow; the text is one line that names what is wrong and what is legal."""


class TargetError(ValueError):
    """A board, device, pin, frequency or design that cannot be built: unknown, missing, out of range or too large."""


class ToolError(RuntimeError):
    """A tool that stopped for a reason the flow cannot put down to the user's input."""


class MissingToolError(ToolError):
    """A tool that is not installed."""


class ConstraintError(RuntimeError):
    """A timing constraint that place and route did not apply: its verdict on the clock would be worthless."""
