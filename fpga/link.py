"""The byte protocol between a host and the streams of a component, host side.

Host to board, frames of ``opcode, transfers - 1, payload...``:

- one opcode per input stream, then one per *held* value (a field of an input stream that keeps its value over many
  transfers, or a plain input): up to 256 transfers a frame, each in the order of the fields, every field in whole
  bytes, low byte first;
- ``MUTE``: one byte per eight output streams; a stream whose bit is set is drained and not reported;
- ``STATUS``: no payload.

Board to host:

- ``ACKNOWLEDGE`` when a frame has been consumed to its last transfer. No more than `Layout.window` bytes may be on
  their way unacknowledged; with that, nothing is ever lost, however long the component makes the host wait;
- ``0x80 + n`` and one transfer of output stream *n*, as soon as there is one;
- ``STATUS_REPLY``, the layout's identity (4 bytes), link flags, and the plain outputs, each in whole bytes.

A break on the line resets link and component.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from amaranth.hdl import Shape
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In

from kvant.fpga.errors import TargetError

STATUS = 0x7F
MUTE = 0x7E
OUTPUT = 0x80
ACKNOWLEDGE = 0xFE
STATUS_REPLY = 0xFF
LARGEST_FRAME = 256
"""Transfers of a frame."""

FLAGS = ("overrun", "framing", "unknown_opcode")
"""Link flags of the status reply, bit 0 first, sticky until reset: a byte found the receive queue full; a byte
without stop bit; a frame with an opcode that does not exist."""


@dataclass(frozen=True)
class Field:
    """A value on the link: its name (empty for a payload without fields), bits, and first byte in its transfer."""

    name: str
    width: int
    offset: int

    @property
    def size(self) -> int:
        """Bytes."""
        return (self.width + 7) // 8


@dataclass(frozen=True)
class Channel:
    """One opcode: a stream, or a held value of ``stream.field`` or of a plain input."""

    name: str
    opcode: int
    fields: tuple[Field, ...]

    @property
    def size(self) -> int:
        """Bytes of a transfer."""
        return sum(field.size for field in self.fields)

    def encode(self, values: Sequence[int]) -> bytes:
        """A transfer's bytes."""
        return b"".join(value.to_bytes(field.size, "little") for field, value in zip(self.fields, values, strict=True))

    def decode(self, raw: bytes) -> dict[str, int]:
        """Values of the fields."""
        return {
            field.name: int.from_bytes(raw[field.offset : field.offset + field.size], "little")
            & ((1 << field.width) - 1)
            for field in self.fields
        }


def _fields(members: Iterable[tuple[str, int]]) -> tuple[Field, ...]:
    result, offset = [], 0
    for name, width in members:
        result.append(Field(name, width, offset))
        offset += result[-1].size
    return tuple(result)


def _payload(signature: stream.Signature) -> list[tuple[str, int]]:
    shape = signature.members["payload"].shape
    if isinstance(shape, data.StructLayout):
        return [(name, field.width) for name, field in shape]
    return [("", Shape.cast(shape).width)]


class Layout:
    """What travels over the link for a component of a given signature.

    Parameters
    ----------
    signature : wiring.Signature
        Streams and plain ports, as the component has them.
    held : collection of str
        ``stream.field`` names of input fields that are sent once and kept.

    Raises
    ------
    TargetError
        A member is a bus.

    Attributes
    ----------
    inputs, held, outputs : tuple of Channel
        Input streams without their held fields; held fields and plain inputs; output streams.
    status : Channel
        Payload of the status reply behind the identity: flags and plain outputs.
    """

    def __init__(self, signature: wiring.Signature, *, held: Iterable[str] = ()):
        held = tuple(held)
        inputs, outputs, registers, status = [], [], [], [("flags", len(FLAGS))]
        for name, member in signature.members.items():
            if member.is_port:
                width = Shape.cast(member.shape).width
                if member.flow is In:
                    registers.append((name, [("", width)]))
                else:
                    status.append((name, width))
                continue
            source = member.signature.flip() if member.flow is In else member.signature
            if not isinstance(source, stream.Signature):
                raise TargetError(f"port {name}: a bus; behind a serial port, streams and plain ports are legal")
            members = _payload(member.signature)
            if member.flow is In:
                inputs.append((name, [item for item in members if f"{name}.{item[0]}" not in held]))
                registers += [(f"{name}.{item[0]}", [item]) for item in members if f"{name}.{item[0]}" in held]
            else:
                outputs.append((name, members))
        unknown = set(held) - {name for name, _ in registers}
        if unknown:
            raise ValueError(f"held = {sorted(unknown)}: no such field of an input stream")
        self.inputs = tuple(Channel(name, 1 + n, _fields(members)) for n, (name, members) in enumerate(inputs))
        first = 1 + len(inputs)
        self.held = tuple(Channel(name, first + n, _fields(members)) for n, (name, members) in enumerate(registers))
        self.outputs = tuple(Channel(name, OUTPUT + n, _fields(members)) for n, (name, members) in enumerate(outputs))
        self.status = Channel("status", STATUS_REPLY, _fields(status))
        self.mute = Channel("mute", MUTE, _fields([("", max(1, len(outputs)))]))

    @property
    def identity(self) -> int:
        """32-bit number that two layouts share only if they are the same: a host checks that it knows its board."""
        parts = [self.inputs, self.held, self.outputs, (self.status,)]
        text = repr([[(c.name, c.opcode, [(f.name, f.width) for f in c.fields]) for c in part] for part in parts])
        return zlib.crc32(text.encode())

    @property
    def largest_input(self) -> int:
        """Bytes of the largest transfer to the board."""
        return max(channel.size for channel in (*self.inputs, *self.held, self.mute))

    @property
    def largest_output(self) -> int:
        """Bytes of the largest reply behind its first byte."""
        return max([channel.size for channel in self.outputs] + [4 + self.status.size])

    @property
    def window(self) -> int:
        """Bytes that the board can hold: 512, or the power of two that holds two frames of one transfer."""
        return max(512, 1 << (2 * (2 + self.largest_input) - 1).bit_length())

    def frames(self, channel: Channel, transfers: Iterable[Sequence[int]]) -> Iterator[bytes]:
        """Frames that carry *transfers*, each at most half a window, so that two can be under way."""
        most = max(1, min(LARGEST_FRAME, (self.window // 2 - 2) // channel.size))
        transfers = iter(transfers)
        while chunk := list(islice(transfers, most)):
            yield bytes([channel.opcode, len(chunk) - 1]) + b"".join(map(channel.encode, chunk))

    def encode(self, inputs: Mapping[str, Mapping[str, Sequence[int]]]) -> Iterator[bytes]:
        """Frames of whole streams, one stream after the other.

        Parameters
        ----------
        inputs : dict
            Stream -> field -> values, one per transfer. A held field is sent whenever its value changes.

        Raises
        ------
        KeyError
            For a stream or field that the layout does not have.
        """
        channels = {channel.name: channel for channel in self.inputs}
        for name, values in inputs.items():
            channel = channels[name]
            registers = [register for register in self.held if register.name.startswith(f"{name}.")]
            columns = zip(*(values[field.name] for field in channel.fields), strict=True)
            if not registers:
                yield from self.frames(channel, columns)
                continue
            kept = zip(*(values[register.fields[0].name] for register in registers), strict=True)
            for state, run in groupby(zip(kept, columns, strict=True), key=lambda row: row[0]):
                for register, value in zip(registers, state, strict=True):
                    yield from self.frames(register, [(value,)])
                yield from self.frames(channel, (transfer for _, transfer in run))

    def mute_frame(self, streams: Iterable[str]) -> bytes:
        """The frame that silences these output streams and no other."""
        names = [channel.name for channel in self.outputs]
        mask = sum(1 << names.index(name) for name in streams)
        return next(self.frames(self.mute, [(mask,)]))

    @staticmethod
    def status_frame() -> bytes:
        """The frame that asks for the status."""
        return bytes([STATUS, 0])


class LinkError(RuntimeError):
    """What came over the link is not what the layout promises."""


class Host:
    """The host's end of the link, without any port of its own: bytes in, bytes out.

    Parameters
    ----------
    layout : Layout

    Attributes
    ----------
    transfers : dict
        Output stream -> field -> values, in the order of arrival.
    status : dict or None
        Newest status: flags and plain outputs.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self.transfers = {channel.name: {field.name: [] for field in channel.fields} for channel in self.layout.outputs}
        self.status: dict[str, int] | None = None
        self._waiting: list[bytes] = []
        self._under_way: list[int] = []
        self._received = bytearray()
        self._sizes = {channel.opcode: channel.size for channel in layout.outputs}
        self._sizes |= {ACKNOWLEDGE: 0, STATUS_REPLY: 4 + layout.status.size}

    @property
    def idle(self) -> bool:
        """Everything sent has been consumed."""
        return not self._waiting and not self._under_way

    def send(self, frames: Iterable[bytes]):
        """Queue frames."""
        self._waiting += frames

    def exchange(self, received: bytes = b"") -> bytes:
        """Take what has been received, give what may be sent now.

        Raises
        ------
        LinkError
            For a byte that starts no reply, an acknowledgement of nothing, or a board with another layout.
        """
        self._received += received
        while self._received and self._reply():
            pass
        ready = bytearray()
        while self._waiting and sum(self._under_way) + len(self._waiting[0]) <= self.layout.window:
            frame = self._waiting.pop(0)
            self._under_way.append(len(frame))
            ready += frame
        return bytes(ready)

    def _reply(self) -> bool:
        tag = self._received[0]
        if tag not in self._sizes:
            raise LinkError(f"byte {tag:#04x} starts no reply: is the bit rate right?")
        size = 1 + self._sizes[tag]
        if len(self._received) < size:
            return False
        body = bytes(self._received[1:size])
        del self._received[:size]
        if tag == ACKNOWLEDGE:
            if not self._under_way:
                raise LinkError("acknowledgement of a frame that was not sent: send a break to start anew")
            self._under_way.pop(0)
        elif tag == STATUS_REPLY:
            identity = int.from_bytes(body[:4], "little")
            if identity != self.layout.identity:
                raise LinkError(
                    f"the board was built with another configuration: identity {identity:#010x}, "
                    f"expected {self.layout.identity:#010x}"
                )
            self.status = self.layout.status.decode(body[4:])
        else:
            channel = self.layout.outputs[tag - OUTPUT]
            for name, value in channel.decode(body).items():
                self.transfers[channel.name][name].append(value)
        return True
