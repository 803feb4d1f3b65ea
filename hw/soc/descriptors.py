"""Descriptors: what the sequencer reads from memory, field by field, little endian."""

import enum
from dataclasses import dataclass
from typing import ClassVar, Self

from kvant.hw.soc.parameters import TopParameters

DESCRIPTOR_BYTES = 64


class Opcode(enum.IntEnum):
    """What a descriptor asks for; a design refuses those it was built without. 0, as in cleared memory, is none."""

    FENCE = 1
    """Does nothing itself (a NOP): what follows it starts only when all descriptors before it are done."""

    LINEAR = 2
    """A job of the linear path."""

    END = 3
    """Stops the accelerator once all descriptors before it are done."""

    CACHE = 4
    """Appends keys or values of a KV head to the cache of a sequence."""

    ATTEND = 5
    """Attention of queries over the cache of a sequence and KV head."""


class Flag(enum.IntFlag):
    """Bits of the byte `flags`."""

    INTERRUPT = 1
    """Set IRQ_STATUS.done when the descriptor is done."""

    WAIT = 2
    """Read activations or queries only when all descriptors before it are done; weights are read ahead all the same."""

    X_STREAM = 4
    """Activations come from ``s_axis_x``; address and stride of x are 0."""

    Y_STREAM = 8
    """Outputs go to ``m_axis_y``; address and stride of y are 0."""

    VALUES = 16
    """Rows are values, cached along time; without it they are keys, cached along the head."""

    FIRST = 32
    """The rows begin their sequence: `position` is 0."""


class ErrorCode(enum.IntEnum):
    """What stopped the accelerator."""

    NONE = 0
    """No error, or an abort."""

    OPCODE = 1
    """An unknown opcode, or one that the design was built without."""

    RESERVED = 2
    """A reserved bit or an unused field is not 0."""

    SIZE = 3
    """A size is 0, or beyond what the buffers hold; or numbers do not fit each other."""

    ALIGNMENT = 4
    """An address or a stride is no multiple of the bytes of a word of the port."""

    ADDRESS = 5
    """An address has bits beyond `address_bits`."""

    RING = 6
    """RING_HEAD or RING_TAIL is not below RING_COUNT, or RING_BASE has bits beyond `address_bits`."""

    FETCH = 16
    """The memory answered the read of a descriptor with an error."""

    READ_WEIGHTS = 17
    """The memory answered a read of weights with an error."""

    READ_X = 18
    """The memory answered a read of activations with an error."""

    WRITE_Y = 19
    """The memory answered a write of outputs with an error."""

    WEIGHT_LENGTH = 20
    """`weight_bytes` is not what the tiles of the job take."""

    READ_CACHE = 21
    """The memory answered a read of CACHE (rows, page table, record, calibration) with an error."""

    WRITE_CACHE = 22
    """The memory answered a write of CACHE (pages, record) with an error."""

    READ_ATTEND = 23
    """The memory answered a read of ATTEND (queries, page table, pages, record) with an error."""

    WRITE_ATTEND = 24
    """The memory answered a write of the outputs of ATTEND with an error."""


class Rule(enum.Enum):
    """What values a field may have, whatever the design; see also `kvant.hw.soc.descriptor_check`."""

    NUMBER = "any number"
    COUNT = "a number from 1"
    ADDRESS = "an address of a word of the port"
    STRIDE = "a multiple of the bytes of a word of the port"
    LENGTH = "a multiple of the bytes of a word of the port, not 0"


@dataclass(frozen=True)
class DescriptorField:
    """A field at a byte offset; *width* in bits, a multiple of 8.

    Members
    -------
    name, offset, width, doc
    rule : Rule
    unused_with : Flag or None
        The field is 0 where this flag is set.
    """

    name: str
    offset: int
    width: int
    doc: str
    rule: Rule = Rule.NUMBER
    unused_with: Flag | None = None


COMMON_FIELDS = (DescriptorField("opcode", 0, 8, "what to do"), DescriptorField("flags", 1, 8, "bits, see the flags"))
"""Fields of every descriptor; FENCE and END use these alone."""

COMMON_BYTES = 4
"""Bytes before the fields of a kind. Those behind `flags` are reserved in every descriptor."""


@dataclass(frozen=True)
class DescriptorKind:
    """Descriptors of one opcode: their flags, and their fields behind `COMMON_FIELDS`, in order of the offsets.

    Bytes that no field covers are reserved and 0.
    """

    opcode: Opcode
    flags: Flag
    fields: tuple[DescriptorField, ...] = ()

    @property
    def all_fields(self) -> tuple[DescriptorField, ...]:
        """The fields, and those that all descriptors have."""
        return COMMON_FIELDS + self.fields

    def offset(self, name: str) -> int:
        """Offset of the field called *name*."""
        return next(field.offset for field in self.all_fields if field.name == name)


def _fields(*rows: tuple) -> tuple[DescriptorField, ...]:
    return tuple(DescriptorField(*row) for row in rows)


JOB_FIELDS = ("tokens", "groups", "tail", "tiles", "last_cols", "interleave")
"""Fields of LINEAR that go to the linear path as they are."""

LINEAR = DescriptorKind(
    Opcode.LINEAR,
    Flag.INTERRUPT | Flag.WAIT | Flag.X_STREAM | Flag.Y_STREAM,
    _fields(
        ("tokens", 4, 16, "rows of x and y, from 1; tokens * interleave up to `accumulators`", Rule.COUNT),
        ("groups", 6, 16, "groups of K, ceil(K / group); tokens * groups up to `stored_groups`", Rule.COUNT),
        ("tail", 8, 16, "elements of the last group, 1 to group", Rule.COUNT),
        ("tiles", 10, 16, "weight tiles, ceil(N / cols)", Rule.COUNT),
        ("last_cols", 12, 16, "columns of the last tile, 1 to cols", Rule.COUNT),
        ("interleave", 14, 16, "tiles that take turns; the weights are packed for it", Rule.COUNT),
        ("weights", 16, 64, "address of the packed weights", Rule.ADDRESS),
        ("x", 24, 64, "address of the first row of activations, fp16", Rule.ADDRESS, Flag.X_STREAM),
        ("y", 32, 64, "address of the first row of outputs, fp32", Rule.ADDRESS, Flag.Y_STREAM),
        ("x_stride", 40, 32, "bytes from a row of x to the next", Rule.STRIDE, Flag.X_STREAM),
        ("y_stride", 44, 32, "bytes from a row of y to the next", Rule.STRIDE, Flag.Y_STREAM),
        ("weight_bytes", 48, 32, "bytes of the packed weights, a multiple of the word of the port", Rule.LENGTH),
    ),
)

CACHE = DescriptorKind(
    Opcode.CACHE,
    Flag.INTERRUPT | Flag.WAIT | Flag.VALUES | Flag.FIRST,
    _fields(
        ("tokens", 4, 16, "new rows, from 1", Rule.COUNT),
        ("row_stride", 6, 16, "bytes from a row to the next", Rule.STRIDE),
        ("position", 8, 32, "position of the first new row in its sequence; 0 with FIRST"),
        (
            "rows",
            16,
            64,
            "address of the fp16 row of `position`; with VALUES of the first row of its window, that of position - "
            "position mod group",
            Rule.ADDRESS,
        ),
        ("pool", 24, 64, "address of the pool of pages", Rule.ADDRESS),
        ("table", 32, 64, "address of the page table", Rule.ADDRESS),
        ("record", 40, 64, "address of the record", Rule.ADDRESS),
        ("calibration", 48, 64, "address of the calibration", Rule.ADDRESS),
    ),
)

ATTEND = DescriptorKind(
    Opcode.ATTEND,
    Flag.INTERRUPT | Flag.WAIT,
    _fields(
        ("queries", 4, 16, "queries, 1 to `queries`", Rule.COUNT),
        ("query_stride", 6, 16, "bytes from a query record to the next", Rule.STRIDE),
        ("tokens", 8, 32, "tokens in the cache, 1 to `tokens`", Rule.COUNT),
        ("sinks", 12, 16, "the first of them that are sinks, up to `sinks`"),
        ("out_stride", 14, 16, "bytes from a row of outputs to the next", Rule.STRIDE),
        ("q", 16, 64, "address of the first query record", Rule.ADDRESS),
        ("key_pool", 24, 64, "address of the pool of pages of keys", Rule.ADDRESS),
        ("value_pool", 32, 64, "address of the pool of pages of values", Rule.ADDRESS),
        ("table", 40, 64, "address of the page table", Rule.ADDRESS),
        ("record", 48, 64, "address of the record", Rule.ADDRESS),
        ("out", 56, 64, "address of the first row of outputs, fp32", Rule.ADDRESS),
    ),
)

KINDS = (
    DescriptorKind(Opcode.FENCE, Flag.INTERRUPT),
    LINEAR,
    DescriptorKind(Opcode.END, Flag.INTERRUPT),
    CACHE,
    ATTEND,
)
"""All kinds of descriptors."""


@dataclass(frozen=True)
class EncodedDescriptor:
    """A descriptor as the host makes it; its members are the fields of `kind`."""

    kind: ClassVar[DescriptorKind]

    def encode(self) -> bytes:
        """Its 64 bytes in memory."""
        raw = bytearray(DESCRIPTOR_BYTES)
        for field in self.kind.all_fields:
            size = field.width // 8
            raw[field.offset : field.offset + size] = getattr(self, field.name).to_bytes(size, "little")
        return bytes(raw)

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """The inverse of `encode`; reserved bytes are ignored."""
        return cls(
            **{
                field.name: int.from_bytes(raw[field.offset : field.offset + field.width // 8], "little")
                for field in cls.kind.all_fields
            }
        )


@dataclass(frozen=True)
class Descriptor(EncodedDescriptor):
    """A descriptor of FENCE, LINEAR or END."""

    kind = LINEAR

    opcode: int
    flags: int = 0
    tokens: int = 0
    groups: int = 0
    tail: int = 0
    tiles: int = 0
    last_cols: int = 0
    interleave: int = 0
    weights: int = 0
    x: int = 0
    y: int = 0
    x_stride: int = 0
    y_stride: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True)
class CacheDescriptor(EncodedDescriptor):
    """A descriptor of CACHE."""

    kind = CACHE

    tokens: int
    row_stride: int
    position: int
    rows: int
    pool: int
    table: int
    record: int
    calibration: int
    flags: int = 0
    opcode: int = Opcode.CACHE


@dataclass(frozen=True)
class AttendDescriptor(EncodedDescriptor):
    """A descriptor of ATTEND."""

    kind = ATTEND

    queries: int
    query_stride: int
    tokens: int
    sinks: int
    out_stride: int
    q: int
    key_pool: int
    value_pool: int
    table: int
    record: int
    out: int
    flags: int = 0
    opcode: int = Opcode.ATTEND


def kinds_of(p: TopParameters) -> tuple[DescriptorKind, ...]:
    """The kinds of descriptors that a design runs."""
    absent = {Opcode.CACHE: p.cache is None, Opcode.ATTEND: p.attention is None}
    return tuple(kind for kind in KINDS if not absent.get(kind.opcode, False))
