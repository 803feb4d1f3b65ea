"""Configuration of the cache blocks: one validated object, every width derived here."""

from typing import Literal, Self

from pydantic import Field, model_validator

from kvant.hw.linear.parameters import LinearParameters, ceil_div, signed_width
from kvant.hw.numeric.adders import AdderName
from kvant.hw.parameters import ParameterError, Parameters

TABLE_ENTRIES = 16
"""Entries of a coefficient table in hardware; a shorter one is filled up with its last entry."""

THRESHOLDS = TABLE_ENTRIES - 1
"""Thresholds between the entries; those that fill up a shorter table are `THRESHOLD_LIMIT`."""

THRESHOLD_LIMIT = 65535
"""Largest threshold: an unsigned 16-bit fraction of ``n^2 * m^2``."""

BLOCK_GROUPS = 16
"""Groups of a storage block."""

UNIT_BYTES = 16
"""Alignment of all planes of a storage block, and the unit of addresses within a page."""

LEAST_GROUP = 8
"""Smallest group of a cache."""

CAPACITY_GROUPS = 64
"""Windows that a cache holds where the configuration does not say."""

INT8_MAX = 127
"""Largest magnitude of an INT8 element of a cache."""


class CacheParameters(Parameters):
    """Shape and options of the cache blocks (variance unit, cache along the head, cache along time).

    A *row* is one vector of `head_dim` fp16 elements: the key or the value of one token and one head. It takes
    `row_transfers` transfers of `lanes` elements; a row begins a new transfer, surplus lanes of its last one are
    ignored.
    """

    group: int = LinearParameters.model_fields["group"]
    max_coefficient: int = LinearParameters.model_fields["max_coefficient"]
    adder: AdderName = LinearParameters.model_fields["adder"]
    lanes: int = Field(8, ge=1, le=256, description="Elements per cycle of the cache and attention blocks (P).")
    head_dim: int = Field(64, ge=1, le=1024, description="Elements of a key or value vector (head size).")
    heads: int = Field(
        1, ge=1, le=256, description="Heads (of any number of sequences) whose rows take turns in one cache block."
    )
    statistic: Literal["variance", "moment"] = Field(
        "variance", description="Second moment that chooses a coefficient: about the mean, or about zero."
    )
    sinks: int = Field(0, ge=0, le=256, description="First tokens of a sequence that stay INT8 in keys and values.")
    centred: bool = Field(False, description="Subtract a calibrated mean from every channel of the keys.")
    offset: bool = Field(False, description="Take the mean out of every group of a cache along time.")
    shared_coeff: bool = Field(False, description="One coefficient per window and head in a cache along time.")
    capacity: int | None = Field(
        None, ge=1, le=1 << 24, description="Tokens a cache holds, a multiple of group. None: 64 groups."
    )
    evict: bool = Field(False, description="A full cache along time gives up its oldest window instead of stopping.")
    port_bits: Literal[32, 64, 128, 256, 512] = Field(128, description="Width of the memory port, in bits.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.capacity is not None and self.capacity % self.group:
            raise ParameterError(f"capacity = {self.capacity}: legal are the multiples of group = {self.group}")
        return self

    def check_cache(self) -> Self:
        """These parameters, if a cache can be built of them.

        Raises
        ------
        ParameterError
            When `group` is no power of two from 8 on, or `lanes` none up to `group`: pages are written in whole words,
            and the groups of a cache along time are read across its lanes.
        """
        if self.group < LEAST_GROUP or self.group & (self.group - 1):
            raise ParameterError(f"group = {self.group}: legal in a cache are the powers of two from {LEAST_GROUP} on")
        if self.lanes > self.group or self.lanes & (self.lanes - 1):
            raise ParameterError(
                f"lanes = {self.lanes}: legal in a cache are the powers of two up to group = {self.group}"
            )
        return self

    @property
    def row_transfers(self) -> int:
        """Transfers of a row, and the fewest cycles it takes."""
        return ceil_div(self.head_dim, self.lanes)

    @property
    def row_groups(self) -> int:
        """Groups of a row that is grouped along the head."""
        return ceil_div(self.head_dim, self.group)

    @property
    def tail(self) -> int:
        """Elements of the last group along the head."""
        return self.head_dim - (self.row_groups - 1) * self.group

    @property
    def group_transfers(self) -> int:
        """Transfers of a full group."""
        return ceil_div(self.group, self.lanes)

    @property
    def windows(self) -> int:
        """Windows of `group` tokens that a cache holds."""
        return CAPACITY_GROUPS if self.capacity is None else self.capacity // self.group

    @property
    def sum_width(self) -> int:
        """Bits of the signed sum of a group of INT8 elements."""
        return signed_width((INT8_MAX + 1) * self.group)

    @property
    def sumsq_width(self) -> int:
        """Bits of the sum of squares of a group of INT8 elements."""
        return ((INT8_MAX + 1) ** 2 * self.group).bit_length()

    @property
    def moment_limit(self) -> int:
        """Largest second moment, ``(n * m)^2``; with an offset, ``m`` reaches twice the INT8 range."""
        return (self.group * self.peak_limit) ** 2

    @property
    def peak_limit(self) -> int:
        """Largest magnitude ``m`` of an element whose offset, if any, is taken out."""
        return 2 * INT8_MAX if self.offset else INT8_MAX
