"""The one description of the registers: hardware, headers, driver and documentation are made from it."""

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from kvant.hw.soc.descriptors import ErrorCode, kinds_of
from kvant.hw.soc.parameters import TopParameters

REGISTER_BYTES = 4
COUNTER_BITS = 48
IDENTIFICATION = 0x4B564E54
"""``KVNT`` in ASCII."""


class Access(enum.Enum):
    """What reads and writes of a field do."""

    CONSTANT = "constant"
    """Reads a number of the build, which is its reset value."""

    STATUS = "read"
    """Reads what the hardware says."""

    CONTROL = "read, write"
    """Keeps what was written."""

    SHARED = "read, write; hardware changes it"
    """The hardware keeps it."""

    COMMAND = "write 1"
    """Writing 1 starts something, reads as 0."""

    STICKY = "read, write 1 to clear"
    """Set by the hardware; an event in the cycle of the write wins."""

    COUNTER = "read; keeps the high word"
    """Low word of a counter. Reading it keeps the high word of the same moment."""

    HIGH = "read, as it was kept"
    """High word of the counter whose low word was read last."""


@dataclass(frozen=True)
class Field:
    """Bits of a register.

    Members
    -------
    name : str
        Lower case.
    lsb, width : int
    access : Access
    doc : str
        One line.
    reset : int
        Value after reset; of a constant, its value.
    """

    name: str
    lsb: int
    width: int
    access: Access
    doc: str
    reset: int = 0

    @property
    def mask(self) -> int:
        """Its bits in the register."""
        return ((1 << self.width) - 1) << self.lsb


@dataclass(frozen=True)
class Register:
    """32 bits at a byte offset; bits that no field covers read as 0 and ignore writes."""

    name: str
    offset: int
    doc: str
    fields: tuple[Field, ...]

    def field(self, name: str) -> Field:
        """The field called *name*."""
        return next(field for field in self.fields if field.name == name)

    @property
    def reset(self) -> int:
        """Value after reset."""
        return sum(field.reset << field.lsb for field in self.fields)


@dataclass(frozen=True)
class RegisterMap:
    """All registers of a design, in order of their offsets."""

    name: str
    registers: tuple[Register, ...]
    address_bits: int

    def __post_init__(self):
        offsets = [register.offset for register in self.registers]
        names = [register.name for register in self.registers]
        assert offsets == sorted(set(offsets)) and len(set(names)) == len(names)
        assert all(offset % REGISTER_BYTES == 0 and offset < 1 << self.address_bits for offset in offsets)
        for register in self.registers:
            taken = 0
            for field in register.fields:
                assert not taken & field.mask and field.mask < 1 << 32 and 0 <= field.reset < 1 << field.width
                taken |= field.mask

    def __getitem__(self, name: str) -> Register:
        return next(register for register in self.registers if register.name == name)

    def __iter__(self) -> Iterator[Register]:
        return iter(self.registers)

    def as_dict(self) -> dict:
        """For JSON."""
        return {
            "name": self.name,
            "bytes": 1 << self.address_bits,
            "registers": [
                {
                    "name": register.name,
                    "offset": register.offset,
                    "reset": register.reset,
                    "description": register.doc,
                    "fields": [
                        {
                            "name": field.name,
                            "lsb": field.lsb,
                            "width": field.width,
                            "access": field.access.value,
                            "reset": field.reset,
                            "description": field.doc,
                        }
                        for field in register.fields
                    ],
                }
                for register in self.registers
            ],
        }


COUNTERS = {
    "CYCLES_BUSY": "cycles in which a descriptor was under way",
    "CYCLES_LANES": "cycles in which at least one lane of the array worked",
    "CYCLES_INPUT": "cycles in which the engine waited for weights or activations of its job",
    "CYCLES_OUTPUT": "cycles in which an output of the engine waited",
    "BYTES_READ": "bytes read from memory",
    "BYTES_WRITTEN": "bytes of the words written to memory, whatever their strobes",
    "SATURATIONS": "cached values that were clamped; 0 in a design without a cache",
    "DESCRIPTORS": "descriptors done",
}
"""48-bit counters, each a pair of registers ``NAME_LO``, ``NAME_HI``."""

STOPPING_ERRORS = ("descriptor", "read", "write")
"""Fields of ERROR that stop the accelerator, and keep it from starting until they are cleared."""


def _constant(name: str, lsb: int, width: int, value: int, doc: str) -> Field:
    return Field(name, lsb, width, Access.CONSTANT, doc, value)


def _cache_registers(p: TopParameters) -> list[Register]:
    """What software has to know of caches and attention; all 0 in a design without them."""
    constant, shape, attention = _constant, p.cache_shape, p.attention

    def of_shape(name: str) -> int:
        return 0 if shape is None else int(getattr(shape, name))

    return [
        Register(
            "CACHE_SHAPE",
            0x60,
            "Caches in memory, of one head.",
            (
                constant("group", 0, 16, of_shape("group"), "elements of a group, tokens of a window"),
                constant("head_dim", 16, 16, of_shape("head_dim"), "elements of a key or value"),
            ),
        ),
        Register(
            "CACHE_OPTIONS",
            0x64,
            "Caches in memory, of one head.",
            (
                constant("sinks", 0, 16, of_shape("sinks"), "first tokens of a sequence that stay INT8"),
                constant("centred", 16, 1, of_shape("centred"), "a mean is taken out of keys"),
                constant("offset", 17, 1, of_shape("offset"), "groups of values have offsets"),
                constant("shared_coeff", 18, 1, of_shape("shared_coeff"), "one coefficient for a page of values"),
            ),
        ),
        Register(
            "ATTENTION",
            0x68,
            "What a descriptor ATTEND may take.",
            (constant("queries", 0, 8, 0 if attention is None else attention.queries, "limit of `queries`"),),
        ),
        Register(
            "ATTENTION_TOKENS",
            0x6C,
            "What a descriptor ATTEND may take.",
            (constant("tokens", 0, 32, 0 if attention is None else attention.tokens, "limit of `tokens`"),),
        ),
    ]


def register_map(p: TopParameters) -> RegisterMap:
    """The registers of the top."""
    linear, soc, constant = p.linear, p.soc, _constant
    major, minor, patch = (int(part) for part in re.findall(r"\d+", metadata.version("kvant"))[:3])

    def bits(access: Access, **docs: str) -> tuple[Field, ...]:
        return tuple(Field(name, lsb, 1, access, doc) for lsb, (name, doc) in enumerate(docs.items()))

    low_address = max(6, soc.align_bits)
    events = {
        "done": "a descriptor with the flag `interrupt` is done",
        "idle": "stopped by the opcode END, or by CONTROL.stop with nothing under way",
        "error": "stopped by an error, see ERROR, or by CONTROL.abort",
    }
    registers = [
        Register(
            "ID",
            0x00,
            "Identification.",
            (constant("value", 0, 32, IDENTIFICATION, "`KVNT` in ASCII, 0x4B564E54"),),
        ),
        Register(
            "VERSION",
            0x04,
            "Version of the generator.",
            (
                constant("patch", 0, 8, patch, "third number"),
                constant("minor", 8, 8, minor, "second number"),
                constant("major", 16, 8, major, "first number"),
            ),
        ),
        Register(
            "SHAPE",
            0x08,
            "The array.",
            (
                constant("rows", 0, 8, linear.rows, "lanes of a dot product"),
                constant("cols", 8, 8, linear.cols, "outputs in parallel"),
                constant("group", 16, 16, linear.group, "elements of a group"),
            ),
        ),
        Register(
            "PORTS",
            0x0C,
            "Widths of the ports.",
            (
                constant("port_bits", 0, 16, soc.port_bits, "bits of a word of the memory port"),
                constant("address_bits", 16, 8, soc.address_bits, "bits of a byte address at the memory port"),
                constant("x_lanes", 24, 8, linear.x_lanes, "activations in a transfer of `s_axis_x`"),
            ),
        ),
        Register(
            "CAPACITY",
            0x10,
            "What a job of the linear path may take.",
            (
                constant("accumulators", 0, 16, linear.accumulators, "limit of `tokens * interleave`"),
                constant("units", 16, 8, linear.units, "outputs in a transfer of `m_axis_y`"),
            ),
        ),
        Register(
            "GROUPS",
            0x14,
            "What the activation buffer holds.",
            (constant("stored", 0, 32, linear.stored_groups, "limit of `tokens * groups`"),),
        ),
        Register(
            "FEATURES",
            0x18,
            "What was built in.",
            (
                constant("opcodes", 0, 16, sum(1 << kind.opcode for kind in kinds_of(p)), "bit i: opcode i is known"),
                constant("int8_groups", 16, 1, int(linear.int8_groups), "INT8 weight groups (coefficient 254)"),
                constant("max_coefficient", 24, 8, linear.max_coefficient, "largest coefficient byte"),
            ),
        ),
        Register(
            "CONTROL",
            0x20,
            "Commands. Each bit acts by itself; several may be written at once.",
            bits(
                Access.COMMAND,
                start="run the ring from RING_HEAD on; without effect while running or while ERROR has a stopping bit",
                stop="fetch no further descriptor; those under way are finished",
                abort="drop what is under way; RING_HEAD stays at the first descriptor that was not done",
                clear_counters="set all counters to 0",
            ),
        ),
        Register(
            "STATUS",
            0x24,
            "State.",
            bits(
                Access.STATUS,
                running="started, and not stopped by END, stop, abort or an error",
                busy="a descriptor is under way",
                draining="after an abort or an error: the memory port still owes transfers",
            ),
        ),
        Register("IRQ_ENABLE", 0x28, "Events that raise `irq`.", bits(Access.CONTROL, **events)),
        Register("IRQ_STATUS", 0x2C, "Events since they were cleared.", bits(Access.STICKY, **events)),
        Register(
            "ERROR",
            0x30,
            "Errors since they were cleared. `descriptor`, `read` and `write` stop the accelerator.",
            bits(
                Access.STICKY,
                descriptor="a descriptor is not legal, or the ring is not; nothing was read or written for it",
                read="a read was answered with an error",
                write="a write was answered with an error",
                weights="a reserved coefficient, or an illegal scale, of weights or in a cache: the group counted 0",
                nonfinite="a NaN or an infinity among activations, rows of a cache, or queries",
            ),
        ),
        Register(
            "ERROR_CODE",
            0x34,
            "Of the newest error that stopped the accelerator.",
            (
                Field("code", 0, 8, Access.STATUS, "see the error codes", ErrorCode.NONE),
                Field("field", 8, 8, Access.STATUS, "byte offset of the offending field within the descriptor"),
            ),
        ),
        Register(
            "ERROR_INDEX",
            0x38,
            "Of the newest error that stopped the accelerator.",
            (Field("index", 0, 16, Access.STATUS, "place of the offending descriptor in the ring"),),
        ),
        Register(
            "RING_BASE_LO",
            0x40,
            "Address of the ring of descriptors. To be changed while stopped, as all of RING but RING_TAIL.",
            (Field("address", low_address, 32 - low_address, Access.CONTROL, "low word; lower bits are 0"),),
        ),
        Register(
            "RING_BASE_HI",
            0x44,
            "Address of the ring of descriptors.",
            (Field("address", 0, 32, Access.CONTROL, "high word; bits from `address_bits` on must be 0"),),
        ),
        Register(
            "RING_COUNT",
            0x48,
            "Places of the ring.",
            (Field("count", 0, 16, Access.CONTROL, "2 to 65535; one place stays free"),),
        ),
        Register(
            "RING_HEAD",
            0x4C,
            "First descriptor that is not done. To be written while stopped.",
            (Field("index", 0, 16, Access.SHARED, "below RING_COUNT"),),
        ),
        Register(
            "RING_TAIL",
            0x50,
            "Doorbell: place behind the last descriptor. The ring is empty where it equals RING_HEAD.",
            (Field("index", 0, 16, Access.CONTROL, "below RING_COUNT"),),
        ),
    ]
    registers += _cache_registers(p)
    for number, (name, doc) in enumerate(COUNTERS.items()):
        low = Field("low", 0, 32, Access.COUNTER, f"{doc}: low word")
        high = Field("high", 0, COUNTER_BITS - 32, Access.HIGH, "high word, as it was when a low word was read last")
        registers += [
            Register(f"{name}_LO", 0x80 + 8 * number, f"Counter: {doc}.", (low,)),
            Register(f"{name}_HI", 0x84 + 8 * number, f"Counter: {doc}.", (high,)),
        ]
    return RegisterMap("kvant", tuple(registers), address_bits=12)
