"""Every field of a descriptor is looked at before anything is done for it."""

from collections.abc import Iterator

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.job_sizes import JobSizes
from kvant.hw.linear.layouts import index_width
from kvant.hw.soc.descriptor_reader import INDEX_BITS, FetchedDescriptor
from kvant.hw.soc.descriptors import (
    CACHE,
    COMMON_BYTES,
    COMMON_FIELDS,
    DESCRIPTOR_BYTES,
    LINEAR,
    DescriptorField,
    DescriptorKind,
    ErrorCode,
    Flag,
    Opcode,
    Rule,
    kinds_of,
)
from kvant.hw.soc.parameters import TopParameters

Fault = tuple[object, ErrorCode, int]
"""Whether something is wrong, its code, and the byte offset that is named."""


def descriptor_layout(fields: tuple[DescriptorField, ...] = COMMON_FIELDS) -> data.Layout:
    """Fields as they lie in the bits of a descriptor."""
    return data.FlexibleLayout(
        8 * DESCRIPTOR_BYTES, {field.name: data.Field(field.width, 8 * field.offset) for field in fields}
    )


def fields_of(bits, kind: DescriptorKind) -> data.View:
    """The fields of a descriptor of *kind*, by name."""
    return data.View(descriptor_layout(kind.all_fields), bits)


class CheckedDescriptor(data.StructLayout):
    """A descriptor, and what is wrong with it.

    Members
    -------
    bits : 512
        See `fields_of`.
    index : 16
        Place in the ring.
    code : 8
        `ErrorCode`; NONE: it may be done.
    field : 8
        Byte offset of the offending field.
    tail_beats
        Of LINEAR: beats of a plane of the last group of K.
    """

    def __init__(self, p: TopParameters):
        super().__init__(
            {
                "bits": 8 * DESCRIPTOR_BYTES,
                "index": INDEX_BITS,
                "code": 8,
                "field": 8,
                "tail_beats": index_width(p.linear.beats + 1),
            }
        )


class DescriptorCheck(wiring.Component):
    """Checks descriptors, one at a time; a job takes ``24 + beats`` cycles at most, hidden behind the one before.

    Members
    -------
    i : in stream
        `FetchedDescriptor`.
    o : out stream
        `CheckedDescriptor`. Of several faults the first one in the order of the descriptor is named; the products
        ``tokens * groups`` and ``tokens * interleave`` of LINEAR come last.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        super().__init__(
            {
                "i": In(stream.Signature(FetchedDescriptor())),
                "o": Out(stream.Signature(CheckedDescriptor(p))),
            }
        )

    def _limits(self, kind: DescriptorKind, fields: data.View) -> dict[str, object]:
        """The largest legal value of fields that have one, by name."""
        linear, attention = self.p.linear, self.p.attention
        if kind is LINEAR:
            return {"tail": linear.group, "last_cols": linear.cols}
        if kind is CACHE:
            # The last row's position has 32 bits. FIRST says that the position is 0.
            last = Mux(fields.flags & Flag.FIRST.value != 0, 0, (1 << 32) - fields.tokens)
            return {"position": last}
        if kind.opcode is Opcode.ATTEND:
            sinks = Mux(fields.tokens < attention.sinks, fields.tokens, attention.sinks)
            return {"queries": attention.queries, "tokens": attention.tokens, "sinks": sinks}
        return {}

    def _faults_of_field(self, field: DescriptorField, fields: data.View, limits: dict) -> Iterator[Fault]:
        """What is wrong with a field by its rule."""
        soc, value, at = self.p.soc, fields[field.name], field.offset
        if field.unused_with is not None:
            unused = fields.flags & field.unused_with.value != 0
            yield unused & value.any(), ErrorCode.RESERVED, at
        if field.rule in (Rule.COUNT, Rule.LENGTH):
            yield value == 0, ErrorCode.SIZE, at
        if field.name in limits:
            yield value > limits[field.name], ErrorCode.SIZE, at
        if field.rule in (Rule.ADDRESS, Rule.STRIDE, Rule.LENGTH):
            yield value[: soc.align_bits].any(), ErrorCode.ALIGNMENT, at
        if field.rule is Rule.ADDRESS and field.width > soc.address_bits:
            yield value[soc.address_bits :].any(), ErrorCode.ADDRESS, at

    def _faults(self, kind: DescriptorKind, bits) -> list[Fault]:
        """What is wrong with a descriptor of *kind*, in the order in which it is named."""
        fields = fields_of(bits, kind)
        limits = self._limits(kind, fields)
        end = COMMON_FIELDS[-1].offset + 1
        faults = [
            ((fields.flags & (255 - kind.flags)).any(), ErrorCode.RESERVED, 1),
            (bits[8 * end : 8 * COMMON_BYTES].any(), ErrorCode.RESERVED, end),
        ]
        end = COMMON_BYTES
        for field in (*kind.fields, None):
            offset = DESCRIPTOR_BYTES if field is None else field.offset
            if offset > end:
                faults.append((bits[8 * end : 8 * offset].any(), ErrorCode.RESERVED, end))
            if field is not None:
                faults += self._faults_of_field(field, fields, limits)
                end = offset + field.width // 8
        return faults

    def elaborate(self, platform):
        m = Module()
        m.submodules.sizes = sizes = JobSizes(self.p.linear)
        checked = self.o.payload
        kinds = kinds_of(self.p)
        opcode = fields_of(checked.bits, kinds[0]).opcode
        job = fields_of(checked.bits, LINEAR)
        faults = [self._faults(kind, checked.bits) for kind in kinds]
        seen = Signal(max(len(each) for each in faults))  # by their places in the lists
        first = Signal(range(len(seen)))
        unknown, wrong = Signal(), Signal()
        m.d.sync += unknown.eq(1)
        for kind, each in zip(kinds, faults, strict=True):
            with m.If(opcode == kind.opcode):
                m.d.sync += [unknown.eq(0), seen.eq(Cat(fault for fault, _, _ in each))]
        m.d.comb += [
            sizes.tokens.eq(job.tokens),
            sizes.tail.eq(job.tail),
            sizes.groups.eq(job.groups),
            sizes.interleave.eq(job.interleave),
            sizes.drop.eq(sizes.too_many_groups | sizes.too_many_accumulators),
            checked.tail_beats.eq(sizes.tail_beats),
        ]
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += self.i.ready.eq(1)
                with m.If(self.i.valid):
                    m.d.sync += [
                        checked.bits.eq(self.i.payload.bits),
                        checked.index.eq(self.i.payload.index),
                        checked.code.eq(self.i.payload.code),
                        checked.field.eq(0),
                    ]
                    with m.If(self.i.payload.code != ErrorCode.NONE):
                        m.next = "GIVE"
                    with m.Else():
                        m.next = "LOOK"
            with m.State("LOOK"):
                m.next = "RANK"
            with m.State("RANK"):
                m.d.sync += wrong.eq(unknown | seen.any())
                for number in reversed(range(len(seen))):
                    with m.If(seen[number]):
                        m.d.sync += first.eq(number)
                m.next = "NAME"
            with m.State("NAME"):
                m.next = "GIVE"
                with m.If(unknown):
                    m.d.sync += checked.code.eq(ErrorCode.OPCODE)
                with m.Elif(wrong):
                    for kind, each in zip(kinds, faults, strict=True):
                        with m.If(opcode == kind.opcode), m.Switch(first):
                            for number, (_, code, field) in enumerate(each):
                                with m.Case(number):
                                    m.d.sync += [checked.code.eq(code), checked.field.eq(field)]
                with m.Elif(opcode == Opcode.LINEAR):
                    m.d.comb += sizes.start.eq(1)
                    m.next = "SIZES"
            with m.State("SIZES"):
                with m.If(sizes.verdict & sizes.drop):
                    name = Mux(sizes.too_many_groups, LINEAR.offset("groups"), LINEAR.offset("interleave"))
                    m.d.sync += [checked.code.eq(ErrorCode.SIZE), checked.field.eq(name)]
                    m.next = "GIVE"
                with m.If(sizes.done):
                    m.next = "GIVE"
            with m.State("GIVE"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.next = "IDLE"
        return m
