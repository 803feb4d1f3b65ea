"""Configuration of the product-quantised cache: one validated object, every width derived here."""

from math import gcd
from typing import Literal, Self

from pydantic import Field

from kvant.hw.attention.cache_shape import INT8_MAGNITUDE, WEIGHT_BITS
from kvant.hw.kvcache.parameters import CAPACITY_GROUPS, CacheParameters, ceil_div
from kvant.hw.linear.parameters import signed_width
from kvant.hw.parameters import ParameterError, Parameters


class PqParameters(Parameters):
    """Shape and options of the product-quantised cache, its tables and its attention.

    A head vector of `head_dim` elements is `subspaces` sub-vectors of `subspace` elements, each coded by the index of
    one of ``2^nbits`` centroids. A codebook is read *centroid-major*: for each slice of `slice_bytes` channels, for
    each centroid, one word of the port whose low `slice_bytes` bytes are the centroid's INT8 elements of these
    channels. So one word has an element of `slice_subspaces` sub-spaces, which lie in as many banks of tables and bins.

    Codes lie in memory in *frames* of `frame` tokens. Word k of a frame has ``word_codes`` codes of `nbits` bits, the
    first in the lowest bits: for each token of the frame, for each j below `run`, the code of sub-space
    ``k*run + j``. So lane l of the `word_codes` lanes only ever meets the sub-spaces ``k*run + l % run``: whatever M
    is, no two codes of a word want one bank. Codes of 5 to 7 bits are packed without gaps into words of the port: only
    `chunk_tokens` tokens are whole words again, and coding begins at multiples of these.
    """

    head_dim: int = CacheParameters.model_fields["head_dim"]
    lanes: int = CacheParameters.model_fields["lanes"]
    heads: int = CacheParameters.model_fields["heads"]
    group: int = CacheParameters.model_fields["group"]
    sinks: int = CacheParameters.model_fields["sinks"]
    centred: bool = CacheParameters.model_fields["centred"]
    capacity: int | None = CacheParameters.model_fields["capacity"]
    port_bits: Literal[32, 64, 128, 256, 512] = CacheParameters.model_fields["port_bits"]
    recent: int = Field(0, ge=0, le=65536, description="Newest tokens that stay INT8 in a product-quantised cache.")
    subspace: Literal[1, 2, 4, 8] = Field(2, description="Elements of a sub-vector of product quantisation.")
    nbits: int = Field(8, ge=4, le=8, description="Bits of a product-quantisation code.")
    q_parallel: int = Field(1, ge=1, le=64, description="Query heads whose look-up tables are held at once.")
    batch: Literal[1, 2, 4, 8, 16, 32] = Field(8, description="Tokens that are coded in one pass over a codebook.")
    decode_tokens: int = Field(
        0, ge=0, le=16777216, description="Longest history whose codes can be read as INT8 rows; 0: not built."
    )

    def check_pq(self) -> Self:
        """These parameters, if a product-quantised cache can be built of them.

        Raises
        ------
        ParameterError
            When `subspace` does not divide `head_dim`, a sub-vector is wider than the port, `lanes` is no power of
            two, a transfer has elements of two groups, or more tokens can be decoded than are coded.
        """
        if self.head_dim % self.subspace:
            raise ParameterError(f"subspace = {self.subspace}: legal are divisors of head_dim = {self.head_dim}")
        if self.subspace > self.port_bytes:
            raise ParameterError(f"subspace = {self.subspace}: legal with port_bits = {self.port_bits} is 1 to 4")
        if self.lanes & (self.lanes - 1):
            raise ParameterError(f"lanes = {self.lanes}: legal in a product-quantised cache are the powers of two")
        if self.group % self.lanes and self.group < self.head_dim:
            raise ParameterError(
                f"group = {self.group}: legal in a product-quantised cache are multiples of lanes = {self.lanes}, and "
                f"all from head_dim = {self.head_dim} on"
            )
        if self.decode_tokens > self.tokens:
            raise ParameterError(f"decode_tokens = {self.decode_tokens}: legal is 0 to capacity = {self.tokens}")
        return self

    @property
    def subspaces(self) -> int:
        """M, sub-vectors of a head vector and codes of a token."""
        return self.head_dim // self.subspace

    @property
    def centroids(self) -> int:
        """Centroids of a sub-space."""
        return 1 << self.nbits

    @property
    def port_bytes(self) -> int:
        """Bytes of a word of the memory port, and multipliers of the codebook engine."""
        return self.port_bits // 8

    @property
    def slice_bytes(self) -> int:
        """Channels of a slice: elements of a centroid in a word of a codebook, a power of two."""
        return gcd(self.head_dim, self.port_bytes)

    @property
    def slice_subspaces(self) -> int:
        """Sub-spaces of a slice."""
        return self.slice_bytes // self.subspace

    @property
    def slices(self) -> int:
        """Slices of a head vector."""
        return self.head_dim // self.slice_bytes

    @property
    def codebook_words(self) -> int:
        """Words of the port that a codebook takes."""
        return self.slices * self.centroids

    @property
    def row_transfers(self) -> int:
        """Transfers of a row of `lanes` elements, surplus lanes of the last one ignored."""
        return ceil_div(self.head_dim, self.lanes)

    @property
    def line_channels(self) -> int:
        """Channels of a line of the centroid memories: a slice, or a transfer if that is wider; a power of two."""
        return max(self.slice_bytes, self.lanes)

    @property
    def lines(self) -> int:
        """Lines of a head vector, the last one perhaps with surplus channels."""
        return ceil_div(self.head_dim, self.line_channels)

    @property
    def word_codes(self) -> int:
        """Codes that are looked up in one cycle, a power of two. Words of 5 to 7 bits a code exceed the port."""
        fit = self.port_bits // self.nbits
        below = 1 << (fit.bit_length() - 1)
        return below if self.nbits in (4, 8) else 2 * below

    @property
    def run(self) -> int:
        """Sub-spaces of one token in a word, a power of two."""
        return gcd(self.subspaces, self.word_codes)

    @property
    def frame(self) -> int:
        """Tokens of a frame, a power of two."""
        return self.word_codes // self.run

    @property
    def frame_words(self) -> int:
        """Words of a frame."""
        return self.subspaces // self.run

    @property
    def bank_entries(self) -> int:
        """Entries of the bank of one lane, for one query and one head."""
        return self.frame_words * self.centroids

    @property
    def frame_bits(self) -> int:
        """Bits of a frame's codes."""
        return self.frame_words * self.word_codes * self.nbits

    @property
    def chunk_tokens(self) -> int:
        """Fewest tokens whose codes are whole frames and whole words of the port, a power of two."""
        return self.frame * (self.port_bits // gcd(self.port_bits, self.frame_bits))

    @property
    def chunk_words(self) -> int:
        """Words of the port that the codes of `chunk_tokens` tokens take."""
        return self.chunk_tokens // self.frame * self.frame_bits // self.port_bits

    @property
    def batch_tokens(self) -> int:
        """Tokens that are coded together: `batch`, or a chunk if that is longer."""
        return max(self.batch, self.chunk_tokens)

    @property
    def tokens(self) -> int:
        """Coded tokens that the score buffer holds."""
        return self.group * CAPACITY_GROUPS if self.capacity is None else self.capacity

    @property
    def lut_width(self) -> int:
        """Bits of a signed entry of a score table."""
        return signed_width(INT8_MAGNITUDE**2 * self.subspace)

    @property
    def score_width(self) -> int:
        """Bits of a signed score."""
        return signed_width(INT8_MAGNITUDE**2 * self.head_dim)

    @property
    def bin_width(self) -> int:
        """Bits of an unsigned bin: the sum of all weights fits."""
        return (((1 << WEIGHT_BITS) - 1) * self.tokens).bit_length()
