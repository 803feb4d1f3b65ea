"""kvant: RTL generator for low-bit LLM inference."""

__version__ = "0.1.0"
