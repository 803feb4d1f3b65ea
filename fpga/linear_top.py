"""What a host needs to know of a board that multiplies."""

from kvant.fpga.link import Layout
from kvant.hw.linear.engine import LinearEngine
from kvant.hw.linear.parameters import LinearParameters

HELD = ("w.user",)
"""Scales and coefficients are constant over a weight tile: they are sent once a tile."""


def linear_layout(p: LinearParameters) -> Layout:
    """What travels over the link of a board that was built with *p*."""
    return Layout(LinearEngine(p).signature, held=HELD)
