"""What the units of attention know of the cache whose rows, scores and sums they work on."""

from typing import Protocol, Self

INT8_MAGNITUDE = 128
"""Largest magnitude of an INT8 number that comes from outside."""

WEIGHT_BITS = 24
"""Bits of an attention weight, unsigned: the largest weight of a query is ``2^24 - 1``."""


class CacheShape(Protocol):
    """Shape of a cache in front of attention; `kvant.hw.pq.parameters.PqParameters` has it.

    Attributes
    ----------
    head_dim, lanes, row_transfers : int
        Elements of a vector, of a transfer; transfers of a vector.
    group : int
        Channels of an INT8 group.
    sinks, recent, batch_tokens : int
        First and newest tokens that are not coded, and tokens that are coded together.
    q_parallel : int
        Queries at once.
    tokens : int
        Coded tokens at most.
    frame : int
        Coded tokens whose scores come at once, a power of two.
    slices, slice_bytes : int
        Parts in which sums of coded values come, and their channels.
    score_width, bin_width : int
        Bits of a signed score of a coded key; of the unsigned sum of all coded tokens' weights.
    """

    head_dim: int
    lanes: int
    group: int
    sinks: int
    recent: int
    q_parallel: int

    @property
    def row_transfers(self) -> int: ...
    @property
    def batch_tokens(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def frame(self) -> int: ...
    @property
    def slices(self) -> int: ...
    @property
    def slice_bytes(self) -> int: ...
    @property
    def score_width(self) -> int: ...
    @property
    def bin_width(self) -> int: ...

    def check_pq(self) -> Self:
        """These parameters, if a cache can be built of them.

        Raises
        ------
        ParameterError
            Otherwise.
        """
