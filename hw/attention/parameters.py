"""Configuration of attention over M-ANT and INT8 caches: one validated object, every width derived here."""

from functools import cached_property
from typing import Literal, Self

from pydantic import Field

from kvant.hw.attention.cache_shape import INT8_MAGNITUDE, WEIGHT_BITS
from kvant.hw.kvcache.parameters import BLOCK_GROUPS, CAPACITY_GROUPS, LEAST_GROUP, UNIT_BYTES, CacheParameters
from kvant.hw.linear.parameters import LinearParameters, ceil_div, signed_width
from kvant.hw.linear.tile_loop import COUNT_WIDTH
from kvant.hw.numeric.adders import AdderName
from kvant.hw.parameters import ParameterError, Parameters

X_SHIFT = 9
"""A weight w is the fp16 number nearest to ``w * 2^-9``, below 2^15, where it becomes an INT8 element."""

UNIT_BITS = 24
"""A denominator counts ``2^-24``, the least fp16 number, where ``2^9`` is the weight 1."""

WIDEST_PORT = 128
"""Widest port that reads a cache, in bits: a plane of coefficients, or a trailer, is a word of it."""

_LARGEST = {"accumulators": 1024, "activation_words": 65536, "tiles": (1 << COUNT_WIDTH) - 1}
"""What a job of the linear path and its buffers can be."""


class AttentionParameters(Parameters):
    """Shape of `AttentionEngine`: the inner array, the queries of a command, the cache that it reads.

    Groups lie in storage blocks of 16. A *tile* is `cols` of them that the array works on together: for scores those
    of `cols` tokens, for values those of `cols` channels.
    """

    group: int = LinearParameters.model_fields["group"]
    rows: int = LinearParameters.model_fields["rows"]
    cols: int = LinearParameters.model_fields["cols"]
    max_coefficient: int = LinearParameters.model_fields["max_coefficient"]
    quant_lanes: int | None = LinearParameters.model_fields["quant_lanes"]
    multiplier: Literal["lut", "dsp", "ecp5_dsp"] = LinearParameters.model_fields["multiplier"]
    adder: AdderName = LinearParameters.model_fields["adder"]
    head_dim: int = CacheParameters.model_fields["head_dim"]
    lanes: int = CacheParameters.model_fields["lanes"]
    sinks: int = CacheParameters.model_fields["sinks"]
    capacity: int | None = CacheParameters.model_fields["capacity"]
    queries: int = Field(
        2, ge=1, le=64, description="Queries of a command at most: query heads of a KV head times query tokens."
    )
    weight_planes: Literal[1, 2] = Field(
        2,
        description="INT8 groups that the weights of a window become in attention: one, or one more of what it leaves.",
    )
    time_keys: bool = Field(
        False,
        description="Build attention for keys along time (M-ANT, one coefficient a window, offsets), too.",
    )
    port_bits: Literal[32, 64, 128, 256, 512] = CacheParameters.model_fields["port_bits"]

    def check_attention(self) -> Self:
        """These parameters, if an attention engine can be built of them.

        Raises
        ------
        ParameterError
            When `group` is no power of two, heads are not whole groups, or tiles no parts of a storage block; `rows` or
            `lanes` do not fit a group, or the port; buffers are too large for a job.
        """
        if self.port_bits > WIDEST_PORT:
            raise ParameterError(f"port_bits = {self.port_bits}: legal in attention are 32, 64 and {WIDEST_PORT}")
        if self.group < LEAST_GROUP or self.group & (self.group - 1):
            raise ParameterError(
                f"group = {self.group}: legal in attention are the powers of two from {LEAST_GROUP} to 256"
            )
        if self.head_dim > self.group and self.head_dim % self.group:
            raise ParameterError(
                f"head_dim = {self.head_dim}: legal in attention are 1 to {self.group} and the multiples of group = "
                f"{self.group}"
            )
        most = min(BLOCK_GROUPS, self.group * self.head_groups)  # groups of a block of a page of keys
        if most % (self.cols * self.head_groups):
            raise ParameterError(
                f"cols = {self.cols}: legal are numbers whose product with ceil(head_dim / group) = {self.head_groups} "
                f"divides {most}, the groups of a storage block"
            )
        part = 8 * self.rows
        if self.rows & (self.rows - 1) or part > self.port_bits or self.rows > self.group:
            legal = min(self.port_bits // 8, self.group)
            raise ParameterError(f"rows = {self.rows}: legal in attention are the powers of two up to {legal}")
        if self.lanes > self.group or self.lanes & (self.lanes - 1):
            raise ParameterError(
                f"lanes = {self.lanes}: legal in attention are the powers of two up to group = {self.group}"
            )
        if self.tokens % self.group:
            raise ParameterError(f"capacity = {self.capacity}: legal are the multiples of group = {self.group}")
        if self.sinks > self.tokens:
            raise ParameterError(f"sinks = {self.sinks}: legal is 0 to {self.tokens}, the capacity")
        for name, value in self._sizes.items():
            if value > _LARGEST[name]:
                raise ParameterError(
                    f"capacity = {self.tokens} with queries = {self.queries}: needs {value} {name}, legal is 1 to "
                    f"{_LARGEST[name]}"
                )
        if self.time_keys and self.group * self.head_groups < BLOCK_GROUPS:
            raise ParameterError(
                f"group = {self.group}: legal with time_keys and ceil(head_dim / group) = {self.head_groups} are the "
                f"powers of two from {BLOCK_GROUPS // self.head_groups}"
            )
        self.linear  # noqa: B018 - its own checks
        return self

    @property
    def tokens(self) -> int:
        """Most tokens of a cache."""
        return self.group * CAPACITY_GROUPS if self.capacity is None else self.capacity

    @property
    def head_groups(self) -> int:
        """Groups of a key."""
        return ceil_div(self.head_dim, self.group)

    @property
    def head_tail(self) -> int:
        """Elements of the last group of a key."""
        return self.head_dim - (self.head_groups - 1) * self.group

    @property
    def row_transfers(self) -> int:
        """Transfers of an INT8 row of `lanes` elements."""
        return ceil_div(self.head_dim, self.lanes)

    @property
    def key_tiles(self) -> int:
        """Tiles of tokens of a full storage block of keys, which take turns in the array."""
        return BLOCK_GROUPS // (self.head_groups * self.cols)

    @property
    def page_blocks(self) -> int:
        """Blocks of a page of keys."""
        return ceil_div(self.group * self.head_groups, BLOCK_GROUPS)

    @property
    def page_key_tiles(self) -> int:
        """Tiles of a block of a page of keys: fewer than `key_tiles` where a page is less than a block."""
        return min(self.key_tiles, self.group // self.cols)

    @property
    def value_tiles(self) -> int:
        """Tiles of channels."""
        return ceil_div(self.head_dim, self.cols)

    @property
    def value_blocks(self) -> int:
        """Blocks of a page of values."""
        return ceil_div(self.head_dim, BLOCK_GROUPS)

    @property
    def sink_blocks(self) -> int:
        """Most INT8 blocks of key sinks."""
        return ceil_div(self.sinks * self.head_groups, BLOCK_GROUPS)

    @property
    def staged_blocks(self) -> int:
        """Most INT8 blocks of the open window of keys along time."""
        return ceil_div((self.group - 1) * self.head_groups, BLOCK_GROUPS) if self.time_keys else 0

    @property
    def window_tiles(self) -> int:
        """Tiles of tokens of a window of keys along time."""
        return self.group // self.cols

    @property
    def query_sets(self) -> int:
        """Most sets of queries of a job: of keys along time one for every window, the sinks, and the open window."""
        return 2 + self.tokens // self.group if self.time_keys else 1

    @property
    def unit_words(self) -> int:
        """Words of the port that 16 bytes take: a plane of coefficients, a trailer."""
        return 8 * UNIT_BYTES // self.port_bits

    @property
    def code_words(self) -> int:
        """Words of the port that the codes of a block take; INT8 elements take twice as many."""
        return BLOCK_GROUPS * 4 * self.group // self.port_bits

    @property
    def _sizes(self) -> dict[str, int]:
        """Sizes of the largest jobs."""
        keys, values = self.query_sets * self.head_groups, self.weight_planes * (self.tokens // self.group)
        return {
            "accumulators": self.queries * max(self.key_tiles, self.weight_planes * self.value_tiles),
            "activation_words": self.queries * max(keys, values) * (self.group // self.rows),
            "tiles": (self.sink_blocks + self.staged_blocks) * self.key_tiles + ceil_div(self.tokens, self.cols),
        }

    @cached_property
    def linear(self) -> LinearParameters:
        """The inner array, large enough for every job."""
        return LinearParameters(
            group=self.group,
            rows=self.rows,
            cols=self.cols,
            max_coefficient=self.max_coefficient,
            quant_lanes=self.quant_lanes,
            multiplier=self.multiplier,
            adder=self.adder,
            accumulators=self._sizes["accumulators"],
            activation_words=self._sizes["activation_words"],
        )

    @property
    def x_lanes(self) -> int:
        """fp16 elements of a transfer of queries, and weights that are made per cycle."""
        return self.linear.x_lanes

    @property
    def staged_width(self) -> int:
        """Bits of the signed sum of a channel's staged elements under their weights."""
        return signed_width(INT8_MAGNITUDE * ((1 << WEIGHT_BITS) - 1) * self.group)

    @property
    def total_width(self) -> int:
        """Bits of the unsigned sum of the weights of INT8 rows."""
        return (self.tokens * ((1 << WEIGHT_BITS) - 1)).bit_length()

    @property
    def denominator_width(self) -> int:
        """Bits of the unsigned denominator, in units of ``2^-UNIT_BITS``.

        A weight is at most ``2^(WEIGHT_BITS - X_SHIFT)``, and its group's INT8 form is less than 1/64 above it: the
        scale is rounded by less than 2^-11 of itself, elements by half a unit of 127.
        """
        return (self.tokens << (WEIGHT_BITS - X_SHIFT + UNIT_BITS)).bit_length() + 1
