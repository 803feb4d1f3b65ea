"""kvant: RTL generator for low-bit LLM inference."""

from importlib.metadata import version

__version__ = version("kvant")
