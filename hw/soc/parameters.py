"""Configuration of the accelerator's top: its memory port, and how it fits the engines behind it."""

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.parameters import ParameterError, Parameters

PAGE_BYTES = 4096
"""No burst crosses a multiple of this (AXI4, A3.4.1)."""

LONGEST_BURST = 256
"""Beats of an AXI4 INCR burst."""


class SocParameters(Parameters):
    """The memory port of the top."""

    port_bits: Literal[32, 64, 128, 256, 512] = CacheParameters.model_fields["port_bits"]
    address_bits: int = Field(32, ge=16, le=64, description="Bits of a byte address at the memory port of the top.")
    burst_beats: int = Field(
        64, ge=1, le=LONGEST_BURST, description="Longest burst of weights, in beats; a 4 KB boundary ends it earlier."
    )
    weight_words: int = Field(
        512, ge=4, le=8192, description="Weights read ahead, in words of the port; room for two bursts at least."
    )
    attention: bool = Field(
        False, description="Caches in memory and attention over them, behind descriptors of the top."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weight_words < 2 * self.burst_beats:
            raise ParameterError(
                f"weight_words = {self.weight_words}: legal with burst_beats = {self.burst_beats} is an integer from "
                f"{2 * self.burst_beats} to 8192"
            )
        return self

    @property
    def port_bytes(self) -> int:
        """Bytes of a word of the memory port."""
        return self.port_bits // 8

    @property
    def align_bits(self) -> int:
        """Low bits of a byte address that are 0 at a word of the port."""
        return self.port_bytes.bit_length() - 1


@dataclass(frozen=True)
class TopParameters:
    """Everything the top depends on.

    Parameters
    ----------
    linear : LinearParameters
    soc : SocParameters
    cache : CacheParameters, optional
        Caches of keys and values behind the descriptors CACHE; `heads`, `capacity` and `evict` do not count, because
        every state of a sequence lies in memory.
    attention : AttentionParameters, optional
        Attention over such caches behind the descriptors ATTEND.

    Raises
    ------
    ParameterError
        A group of activations in memory would not be whole words of the port; the port of the caches or of the
        attention has another width; they differ in a parameter that both have; the caches write what attention cannot
        read.
    """

    linear: LinearParameters
    soc: SocParameters
    cache: CacheParameters | None = None
    attention: AttentionParameters | None = None

    def __post_init__(self):
        step = max(1, self.soc.port_bytes // 2)
        if self.linear.group % step:
            raise ParameterError(
                f"group = {self.linear.group}: legal in the top with port_bits = {self.soc.port_bits} are multiples of "
                f"{step}"
            )
        for name, section in {"caches": self.cache, "attention": self.attention}.items():
            if section is not None and section.port_bits != self.soc.port_bits:
                raise ParameterError(
                    f"port_bits = {section.port_bits} of the {name}: legal is {self.soc.port_bits}, that of the top"
                )
        if self.attention is not None:
            self._check_attention()

    def _check_attention(self) -> None:
        self.attention.check_attention()
        if self.cache is None:
            return
        for name in ("group", "head_dim", "sinks"):
            ours, theirs = getattr(self.attention, name), getattr(self.cache, name)
            if ours != theirs:
                raise ParameterError(f"{name} = {ours} of the attention: legal is {theirs}, that of the caches")
        for name in ("offset", "shared_coeff"):
            if getattr(self.cache, name):
                raise ParameterError(f"{name} = true: legal in a top with attention is false")

    @property
    def cache_shape(self) -> CacheParameters | None:
        """What caches in memory look like: `cache`, or what the attention says of it; None without either."""
        if self.cache is not None or self.attention is None:
            return self.cache
        names = ("group", "head_dim", "sinks", "port_bits")
        return CacheParameters(**{name: getattr(self.attention, name) for name in names})
