"""Every field of a descriptor is looked at before anything is done for it."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.layouts import index_width
from kvant.hw.linear.tile_loop import COUNT_WIDTH
from kvant.hw.soc.descriptor_reader import INDEX_BITS, FetchedDescriptor
from kvant.hw.soc.descriptors import DESCRIPTOR_BYTES, FIELDS, JOB_FIELDS, ErrorCode, Flag, Opcode
from kvant.hw.soc.parameters import TopParameters


def descriptor_layout() -> data.Layout:
    """The fields as they lie in the bits of a descriptor, and the reserved bytes as ``reserved_OFFSET``."""
    layout = {field.name: data.Field(field.width, 8 * field.offset) for field in FIELDS}
    at = 0
    for field in (*FIELDS, None):
        offset = DESCRIPTOR_BYTES if field is None else field.offset
        if offset > at:
            layout[f"reserved_{at}"] = data.Field(8 * (offset - at), 8 * at)
        at = offset if field is None else offset + field.width // 8
    return data.FlexibleLayout(8 * DESCRIPTOR_BYTES, layout)


class CheckedDescriptor(data.StructLayout):
    """A descriptor, and what is wrong with it.

    Members
    -------
    bits
        See `descriptor_layout`.
    index : 16
        Place in the ring.
    code : 8
        `ErrorCode`; NONE: it may be done.
    field : 8
        Byte offset of the offending field.
    tail_beats
        Beats of a plane of the last group of K.
    """

    def __init__(self, p: TopParameters):
        super().__init__(
            {
                "bits": descriptor_layout(),
                "index": INDEX_BITS,
                "code": 8,
                "field": 8,
                "tail_beats": index_width(p.linear.beats + 1),
            }
        )


class DescriptorCheck(wiring.Component):
    """Checks descriptors, one at a time; a job takes ``20 + beats`` cycles at most, hidden behind the one before.

    Members
    -------
    i : in stream
        `FetchedDescriptor`.
    o : out stream
        `CheckedDescriptor`. Of several faults the first one in the order of the descriptor is named; the products
        ``tokens * groups`` and ``tokens * interleave`` come last.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        super().__init__(
            {
                "i": In(stream.Signature(FetchedDescriptor())),
                "o": Out(stream.Signature(CheckedDescriptor(p))),
            }
        )

    def _faults(self, fields) -> list[tuple]:
        """(fault, code, field) in the order in which they are named."""
        linear, soc = self.p.linear, self.p.soc
        is_job = fields.opcode == Opcode.LINEAR
        reserved_flags = Mux(is_job, Const(255 - sum(Flag), 8), Const(255 - Flag.INTERRUPT, 8))
        x_stream, y_stream = (fields.flags & flag != 0 for flag in (Flag.X_STREAM.value, Flag.Y_STREAM.value))
        offsets = {field.name: field.offset for field in FIELDS}
        known = Cat(fields.opcode == opcode for opcode in Opcode).any()
        bits = fields.as_value()
        faults = [
            (~known, ErrorCode.OPCODE, 0),
            ((fields.flags & reserved_flags) != 0, ErrorCode.RESERVED, 1),
            (fields.reserved_2.any(), ErrorCode.RESERVED, 2),
            (~is_job & bits[32:].any(), ErrorCode.RESERVED, 4),
        ]

        def job(fault, code: ErrorCode, name: str):
            faults.append((is_job & fault, code, offsets[name]))

        limits = {"tail": linear.group, "last_cols": linear.cols}
        for name in JOB_FIELDS:
            value = fields[name]
            job((value == 0) | (value > limits[name] if name in limits else 0), ErrorCode.SIZE, name)
        low = soc.align_bits
        streams = {"x": x_stream, "y": y_stream, "x_stride": x_stream, "y_stride": y_stream}
        for name in ("weights", "x", "y", "x_stride", "y_stride"):
            value = fields[name]
            if name in streams:
                job(streams[name] & value.any(), ErrorCode.RESERVED, name)
            job(value[:low].any(), ErrorCode.ALIGNMENT, name)
            if len(value) > soc.address_bits:
                job(value[soc.address_bits :].any(), ErrorCode.ADDRESS, name)
        job(fields.weight_bytes == 0, ErrorCode.SIZE, "weight_bytes")
        job(fields.weight_bytes[:low].any(), ErrorCode.ALIGNMENT, "weight_bytes")
        faults.append((is_job & fields.reserved_52.any(), ErrorCode.RESERVED, 52))
        return faults

    def elaborate(self, platform):
        linear = self.p.linear
        m = Module()
        checked = self.o.payload
        fields = checked.bits
        faults = self._faults(fields)
        seen = Signal(len(faults))
        multiplier = Signal(COUNT_WIDTH)
        bit = Signal(range(COUNT_WIDTH))
        accumulators = Signal(range(linear.accumulators + 1))
        groups = Signal(range(linear.stored_groups + 1))
        too_many_accumulators, too_many_groups = Signal(), Signal()
        left = Signal(COUNT_WIDTH)
        next_accumulators = (accumulators << 1) + Mux(multiplier[-1], fields.interleave, 0)
        next_groups = (groups << 1) + Mux(multiplier[-1], fields.groups, 0)
        m.d.sync += seen.eq(Cat(fault for fault, _, _ in faults))
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.i.ready.eq(1)
                with m.If(self.i.valid):
                    m.d.sync += [
                        fields.as_value().eq(self.i.payload.bits),
                        checked.index.eq(self.i.payload.index),
                        checked.code.eq(self.i.payload.code),
                        checked.field.eq(0),
                        checked.tail_beats.eq(0),
                    ]
                    with m.If(self.i.payload.code != ErrorCode.NONE):
                        m.next = "GIVE"
                    with m.Else():
                        m.next = "LOOK"
            with m.State("LOOK"):
                m.next = "NAME"
            with m.State("NAME"):
                m.next = "GIVE"
                with m.If(fields.opcode == Opcode.LINEAR):
                    m.next = "MULTIPLY"
                m.d.sync += [
                    multiplier.eq(fields.tokens),
                    left.eq(fields.tail),
                    bit.eq(0),
                    accumulators.eq(0),
                    groups.eq(0),
                    too_many_accumulators.eq(0),
                    too_many_groups.eq(0),
                ]
                for number in reversed(range(len(faults))):
                    _, code, field = faults[number]
                    with m.If(seen[number]):
                        m.d.sync += [checked.code.eq(code), checked.field.eq(field)]
                        m.next = "GIVE"
            with m.State("MULTIPLY"):
                # A product past its limit only grows, so it need not be kept.
                m.d.sync += [
                    multiplier.eq(multiplier << 1),
                    accumulators.eq(next_accumulators),
                    groups.eq(next_groups),
                    bit.eq(bit + 1),
                ]
                with m.If(next_accumulators > linear.accumulators):
                    m.d.sync += too_many_accumulators.eq(1)
                with m.If(next_groups > linear.stored_groups):
                    m.d.sync += too_many_groups.eq(1)
                with m.If(bit == COUNT_WIDTH - 1):
                    m.next = "TAIL"
            with m.State("TAIL"):
                m.d.sync += [checked.tail_beats.eq(checked.tail_beats + 1), left.eq(left - linear.rows)]
                with m.If(left <= linear.rows):
                    m.next = "GIVE"
                offsets = {field.name: field.offset for field in FIELDS}
                with m.If(too_many_groups):
                    m.d.sync += [checked.code.eq(ErrorCode.SIZE), checked.field.eq(offsets["groups"])]
                with m.Elif(too_many_accumulators):
                    m.d.sync += [checked.code.eq(ErrorCode.SIZE), checked.field.eq(offsets["interleave"])]
            with m.State("GIVE"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.next = "IDLE"
        return m
