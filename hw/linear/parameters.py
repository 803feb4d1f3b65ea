"""Configuration of the linear path: one validated object, every width derived here."""

from typing import Literal, Self

from pydantic import Field, model_validator

from kvant.hw.numeric.adders import AdderName
from kvant.hw.numeric.codes import MAGNITUDES, MAX_COEFFICIENT
from kvant.hw.parameters import ParameterError, Parameters

INT8_LIMIT = 128
"""Largest magnitude of an INT8 operand; -128 is never produced but must multiply exactly."""

MAGNITUDE_LIMIT = MAGNITUDES - 1
"""Largest magnitude ``i`` of a 4-bit code."""


def signed_width(limit: int) -> int:
    """Bits of a signed number whose magnitude reaches *limit* (both +limit and -limit fit)."""
    return limit.bit_length() + 1


def ceil_div(numerator: int, denominator: int) -> int:
    """Quotient of two positive integers, rounded up."""
    return -(-numerator // denominator)


class LinearParameters(Parameters):
    """Shape and strategies of the linear path.

    The array is `cols` dot products of `rows` lanes each. A *slot* is the work of the array on one group of K
    for one token and one tile of `cols` outputs; it takes `beats` cycles (`2 * beats` when an INT8 weight group
    is among the tile's columns), never fewer than `unit_cols`.
    """

    group: int = Field(64, ge=1, le=256, description="Elements of a quantisation group (G).")
    rows: int = Field(8, ge=1, le=64, description="Lanes of one dot product, along K.")
    cols: int = Field(8, ge=1, le=64, description="Outputs computed in parallel.")
    max_coefficient: int = Field(
        MAX_COEFFICIENT,
        ge=0,
        le=MAX_COEFFICIENT,
        description="Largest M-ANT coefficient byte the datapath is built for; widths follow.",
    )
    int8_groups: bool = Field(True, description="Build the datapath for INT8 weight groups (coefficient 254).")
    quant_lanes: int | None = Field(
        None, ge=1, le=64, description="Activations quantised per cycle; divides rows. None: as many as rows."
    )
    multiplier: Literal["lut", "dsp", "ecp5_dsp"] = Field(
        "lut",
        description="Lane arithmetic: shift and add in LUTs, both products from one packed 8x18 multiplication, or the "
        "latter on the registers of an ECP5 MULT18X18D.",
    )
    adder: AdderName = Field(
        "plus",
        description="Adders of the lanes and integer accumulators: the tool's own, or a prefix adder on this network.",
    )
    accumulators: int = Field(
        64, ge=1, le=1024, description="fp32 accumulators per column: tokens times interleaved tiles of one pass."
    )
    activation_words: int = Field(
        8192, ge=1, le=65536, description="Capacity of the activation buffer in words of `rows` INT8 values."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quant_lanes is not None and self.rows % self.quant_lanes:
            divisors = [n for n in range(1, self.rows + 1) if self.rows % n == 0]
            raise ParameterError(
                f"quant_lanes = {self.quant_lanes}: legal are the divisors of rows = {self.rows}: {divisors}"
            )
        if self.activation_words < self.beats:
            raise ParameterError(
                f"activation_words = {self.activation_words}: legal is an integer from {self.beats} "
                f"(one group of {self.group} on {self.rows} rows) to 65536"
            )
        return self

    @property
    def x_lanes(self) -> int:
        """Activations per transfer at the fp16 port."""
        return self.rows if self.quant_lanes is None else self.quant_lanes

    @property
    def lanes(self) -> int:
        """Multiply-accumulates per cycle."""
        return self.rows * self.cols

    @property
    def beats(self) -> int:
        """Cycles a full group of 4-bit codes takes on one dot product."""
        return ceil_div(self.group, self.rows)

    @property
    def tile_beats(self) -> int:
        """Most beats of a weight tile, of all its planes."""
        return self.beats * (2 if self.int8_groups else 1)

    @property
    def stored_groups(self) -> int:
        """Activation groups that fit in the buffer."""
        return self.activation_words // self.beats

    @property
    def word_transfers(self) -> int:
        """Transfers of the fp16 port that make a word of `rows` activations."""
        return self.rows // self.x_lanes

    @property
    def units(self) -> int:
        """Group accumulators (fp32 units): as few as keep up with full groups."""
        return ceil_div(self.cols, self.beats)

    @property
    def unit_cols(self) -> int:
        """Columns that share one group accumulator, one result per cycle: unit u has columns u*unit_cols, ..."""
        return ceil_div(self.cols, self.units)

    @property
    def psum1_width(self) -> int:
        """Bits of the sum of integer products ``x * (+-i)`` of a group; with INT8 groups, of their low digits too."""
        limit = INT8_LIMIT * MAGNITUDE_LIMIT * self.group
        if self.int8_groups:
            limit *= 17  # a digit of weight 1 and one of weight 16
        return signed_width(limit)

    @property
    def psum2_width(self) -> int:
        """Bits of the sum of shifted operands ``+-(x << i)`` of a group (the INT8 digits' top bits fit as well)."""
        return signed_width(INT8_LIMIT * (1 << MAGNITUDE_LIMIT) * self.group)

    @property
    def result_limit(self) -> int:
        """Largest magnitude of a group's integer result ``a * psum1 + psum2``."""
        return INT8_LIMIT * (MAGNITUDE_LIMIT * self.max_coefficient + (1 << MAGNITUDE_LIMIT)) * self.group

    @property
    def result_width(self) -> int:
        """Bits of a group's integer result."""
        return signed_width(self.result_limit)
