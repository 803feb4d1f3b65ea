"""What goes wrong in a simulation, each as one line."""


class SimulationError(Exception):
    """The design misbehaved: an unknown value, a broken handshake, a missing or surplus transfer."""


class ToolError(Exception):
    """A simulator is missing, of a wrong version, or failed to build; the text says what to install or to look at."""
