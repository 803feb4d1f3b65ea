"""Array of dot products: `cols` output columns that share the activations of a beat."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.layouts import Beat, GroupSum, Slot
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.linear.pe import ProcessingElement
from kvant.hw.numeric.codes import decode_coefficient

COMMON_METADATA = ("x_scale", "address", "first_group", "last_group")
"""Members of a slot that are the same for all its columns."""


class LinearArray(wiring.Component):
    """`cols` dot products of `rows` lanes each, and the way out to `units` group accumulators.

    ::

        beat -> register -+-> PE 0 -> hold 0 --> results[0]
                          +-> PE 1 -> hold 1 -^             (hold registers of a unit shift towards column 0)
                          +-> ...
        slot -> metadata -------------^

    When a slot is complete, its sums move into the hold registers, all columns at once, and the columns of a unit leave
    one per cycle while the next slot already accumulates. There is no flow control: beats may come in every cycle, with
    gaps (``valid = 0``) anywhere.

    The *first* beats of two slots are at least `unit_cols` cycles apart. A slot of fewer beats (the short last group
    of a row) may end while the columns of the slot before still leave; its sums then wait in the accumulators, which
    the next slot touches late enough.

    Parameters
    ----------
    p : LinearParameters

    Members
    -------
    beat : In(Beat(p))
        Activations and codes of a cycle.
    slot : In(Slot(p))
        What belongs to all beats of a slot; stable from its first to its last beat.
    results : Out(GroupSum(p)).array(units)
        Group sums with their metadata. Unit `u` has columns ``u * unit_cols`` onwards, one per cycle in ascending
        order; where the last unit has fewer, ``valid`` is 0 in the remaining cycles.
    """

    def __init__(self, p: LinearParameters):
        self.p = p
        super().__init__({"beat": In(Beat(p)), "slot": In(Slot(p)), "results": Out(GroupSum(p)).array(p.units)})

    @staticmethod
    def latency_of(p: LinearParameters) -> int:
        """Cycles from a slot's last beat to the results of each unit's column 0: a last beat at the inputs in cycle c
        gives ``results[u].valid`` in cycle ``c + latency``, or `unit_cols` cycles after the slot before where that is
        later."""
        return 1 + ProcessingElement.latency_of(p) + 1

    @property
    def latency(self) -> int:
        """As `latency_of`."""
        return self.latency_of(self.p)

    @property
    def _metadata_offsets(self) -> list[int]:
        """Cycles after a slot's first beat in which its metadata move one register on.

        A register keeps a slot's metadata until the next slot's arrive, at least `unit_cols` cycles later, so one
        register bridges that many cycles of the pipeline: one is enough for long slots, slots of one beat need one
        per stage. The last register changes in the very cycle in which the accumulators do.
        """
        depth = ProcessingElement.latency_of(self.p)
        return [0, *reversed(range(depth, 0, -self.p.unit_cols))]

    def elaborate(self, platform):
        m = Module()
        p = self.p
        elements = self._dot_products(m)
        slot = self._metadata(m)

        done = elements[0].done  # all of them raise it together
        last_column = p.unit_cols - 1
        column = Signal(range(max(2, p.unit_cols)), init=last_column)  # that leaves in this cycle
        free = column == last_column
        waiting = Signal()
        load = Signal()
        m.d.comb += load.eq((done | waiting) & free)
        m.d.sync += waiting.eq((done | waiting) & ~free)
        with m.If(load):
            m.d.sync += column.eq(0)
        with m.Elif(~free):
            m.d.sync += column.eq(column + 1)

        common = {name: Signal.like(slot[name], name=name, reset_less=True) for name in COMMON_METADATA}
        with m.If(load):
            m.d.sync += [register.eq(slot[name]) for name, register in common.items()]
        for unit, result in enumerate(self.results):
            first = unit * p.unit_cols
            columns = range(first, min(first + p.unit_cols, p.cols))
            self._hold(m, result, load, [(elements[c], slot.coefficient[c], slot.w_scale[c]) for c in columns])
            m.d.comb += [result[name].eq(register) for name, register in common.items()]
            m.d.comb += result.column.eq(column)
        return m

    def _hold(self, m, result, load, columns):
        """Hold registers of a unit: all its columns enter at `load`, then move towards the result one per cycle."""
        layout = GroupSum(self.p)
        names = ("psum1", "psum2", "coefficient", "w_scale")
        valid = Signal(len(columns))
        m.d.sync += valid.eq(Mux(load, ~0, valid >> 1))
        following = None
        for element, coefficient, w_scale in reversed(columns):
            held = Signal(data.StructLayout({name: layout[name].shape for name in names}), reset_less=True)
            if following is not None:
                m.d.sync += held.eq(following)
            with m.If(load):
                m.d.sync += [
                    held.psum1.eq(element.psum1),
                    held.psum2.eq(element.psum2),
                    held.coefficient.eq(coefficient),
                    held.w_scale.eq(w_scale),
                ]
            following = held
        m.d.comb += [result.valid.eq(valid[0]), *[result[name].eq(following[name]) for name in names]]

    def _dot_products(self, m):
        """Broadcast register and processing elements; returns the latter."""
        p = self.p
        control = Signal(data.StructLayout({"valid": 1, "first": 1, "last": 1, "high": 1}), name="beat_control")
        x = Signal.like(self.beat.x, name="beat_x", reset_less=True)
        m.d.sync += [
            control.valid.eq(self.beat.valid),
            control.first.eq(self.beat.first),
            control.last.eq(self.beat.last),
            control.high.eq(self.beat.high),
            x.eq(self.beat.x),
        ]
        elements = [ProcessingElement(p) for _ in range(p.cols)]
        for column, element in enumerate(elements):
            m.submodules[f"pe_{column}"] = element
            codes = Signal.like(element.codes, name=f"beat_codes_{column}", reset_less=True)
            int8 = Signal(name=f"beat_int8_{column}")
            kind = decode_coefficient(self.slot.coefficient[column], int8_groups=p.int8_groups)
            m.d.sync += [codes.eq(self.beat.codes[column]), int8.eq(kind.int8)]
            m.d.comb += [
                element.valid.eq(control.valid),
                element.first.eq(control.first),
                element.last.eq(control.last),
                element.high.eq(control.high),
                element.int8.eq(int8),
                element.x.eq(x),
                element.codes.eq(codes),
            ]
        return elements

    def _metadata(self, m):
        """Slot metadata, delayed until the accumulators have the slot's sums."""
        offsets = self._metadata_offsets
        in_slot = Signal()
        with m.If(self.beat.valid):
            m.d.sync += in_slot.eq(~self.beat.last)
        started = Signal(offsets[-1] + 1)  # bit k: a slot started k cycles ago
        history = Signal(offsets[-1])
        m.d.comb += started.eq(Cat(self.beat.valid & ~in_slot, history))
        m.d.sync += history.eq(started)
        slot = self.slot
        for stage, offset in enumerate(offsets):
            register = Signal(Slot(self.p), name=f"slot_{stage}", reset_less=True)
            with m.If(started[offset]):
                m.d.sync += register.eq(slot)
            slot = register
        return slot
