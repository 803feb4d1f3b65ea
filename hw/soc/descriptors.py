"""Descriptors: what the sequencer reads from memory, field by field, little endian."""

import enum
import struct
from dataclasses import dataclass

DESCRIPTOR_BYTES = 64


class Opcode(enum.IntEnum):
    """Opcodes of this design; see `RESERVED_OPCODES` for those to come. 0, as in cleared memory, is none."""

    FENCE = 1
    """Does nothing itself (a NOP): what follows it starts only when all descriptors before it are done."""

    LINEAR = 2
    """A job of the linear path."""

    END = 3
    """Stops the accelerator once all descriptors before it are done."""


RESERVED_OPCODES = {"CACHE": 4, "ATTEND": 5}
"""Opcodes that are kept free for the caches and for attention; refused until they are built."""


class Flag(enum.IntFlag):
    """Bits of the byte `flags`."""

    INTERRUPT = 1
    """Set IRQ_STATUS.done when the descriptor is done."""

    WAIT = 2
    """Read activations only when all descriptors before it are done; weights are read ahead all the same."""

    X_STREAM = 4
    """Activations come from ``s_axis_x``; address and stride of x are 0."""

    Y_STREAM = 8
    """Outputs go to ``m_axis_y``; address and stride of y are 0."""


class ErrorCode(enum.IntEnum):
    """What stopped the accelerator."""

    NONE = 0
    """No error, or an abort."""

    OPCODE = 1
    """An unknown opcode."""

    RESERVED = 2
    """A reserved bit or an unused field is not 0."""

    SIZE = 3
    """A size is 0, or beyond what the buffers hold."""

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


@dataclass(frozen=True)
class DescriptorField:
    """A field at a byte offset; *width* in bits, a multiple of 8."""

    name: str
    offset: int
    width: int
    doc: str


FIELDS = tuple(
    DescriptorField(*field)
    for field in (
        ("opcode", 0, 8, "what to do"),
        ("flags", 1, 8, "bits, see the flags"),
        ("tokens", 4, 16, "rows of x and y, from 1; tokens * interleave up to `accumulators`"),
        ("groups", 6, 16, "groups of K, ceil(K / group); tokens * groups up to `stored_groups`"),
        ("tail", 8, 16, "elements of the last group, 1 to group"),
        ("tiles", 10, 16, "weight tiles, ceil(N / cols)"),
        ("last_cols", 12, 16, "columns of the last tile, 1 to cols"),
        ("interleave", 14, 16, "tiles that take turns; the weights are packed for it"),
        ("weights", 16, 64, "address of the packed weights"),
        ("x", 24, 64, "address of the first row of activations, fp16"),
        ("y", 32, 64, "address of the first row of outputs, fp32"),
        ("x_stride", 40, 32, "bytes from a row of x to the next"),
        ("y_stride", 44, 32, "bytes from a row of y to the next"),
        ("weight_bytes", 48, 32, "bytes of the packed weights, a multiple of the word of the port"),
    )
)
"""All fields; bytes that none covers are reserved and 0. FENCE and END use `opcode` and `flags` alone."""

JOB_FIELDS = ("tokens", "groups", "tail", "tiles", "last_cols", "interleave")
"""Fields that go to the linear path as they are."""

_FORMAT = struct.Struct("<BBxxHHHHHHQQQIIIxxxxxxxxxxxx")
assert _FORMAT.size == DESCRIPTOR_BYTES


@dataclass(frozen=True)
class Descriptor:
    """A descriptor; members are `FIELDS`."""

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

    def encode(self) -> bytes:
        """Its 64 bytes in memory."""
        return _FORMAT.pack(*(getattr(self, field.name) for field in FIELDS))

    @classmethod
    def decode(cls, raw: bytes) -> "Descriptor":
        """The inverse of `encode`; reserved bytes are ignored."""
        return cls(*_FORMAT.unpack(raw))
