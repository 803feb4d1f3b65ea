"""Processing element: the dot product of one output column."""

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.numeric.adders import AdderTree, adder_strategy
from kvant.hw.numeric.multipliers import lane_multiplier

DIGIT_BITS = 4
"""A high INT8 digit weighs ``2**4`` low ones."""


class ProcessingElement(wiring.Component):
    """Dot product of `rows` lanes that share two accumulators.

    ::

        x, codes -> rows lanes -+-> adder tree -> psum1        first/last/... travel beside the data
                                +-> adder tree -> psum2

    Every cycle takes a beat: `rows` activations and codes of one group. `first` starts the sums anew, `last` marks the
    beat whose sums are complete; both travel with the data. There is no flow control: gaps between beats are beats
    with ``valid = 0``, and a slot may follow another without a gap.

    INT8 columns take two planes, high digits first. At the first beat of the second plane both sums become
    ``16 * sum + ...`` (Horner); M-ANT and linear columns ignore the plane of high digits.

    Parameters
    ----------
    p : LinearParameters
        `rows`, `group` (accumulator widths), `multiplier`, `adder` and `int8_groups` matter here.

    Members
    -------
    valid : In(1)
        The cycle carries a beat; the inputs below are don't-care otherwise.
    first, last : In(1)
        First beat of a plane; last beat of the slot.
    high : In(1)
        Beat of the plane of high INT8 digits.
    int8 : In(1)
        The column's group is an INT8 group. Constant over a slot. `high` and `int8` are ignored without `int8_groups`.
    x : In(rows * signed(8))
        Activations, 0 where the group has no element.
    codes : In(rows * 4)
        Codes, or digits of INT8 weights.
    done : Out(1)
        High for one cycle per slot: the sums of its group are complete, and stay until the next beat's arrive.
    psum1, psum2 : Out(signed(psum1_width)), Out(signed(psum2_width))
        Partial sums, exact for every x including -128; see `kvant.hw.numeric.multipliers`.

    Notes
    -----
    Throughput: one beat per cycle.
    """

    def __init__(self, p: LinearParameters):
        self.p = p
        super().__init__(
            {
                "valid": In(1),
                "first": In(1),
                "last": In(1),
                "high": In(1),
                "int8": In(1),
                "x": In(data.ArrayLayout(signed(8), p.rows)),
                "codes": In(data.ArrayLayout(4, p.rows)),
                "done": Out(1),
                "psum1": Out(signed(p.psum1_width)),
                "psum2": Out(signed(p.psum2_width)),
            }
        )

    @staticmethod
    def latency_of(p: LinearParameters) -> int:
        """Cycles from the last beat at the inputs to `done`: products, sums, accumulators."""
        return lane_multiplier(p.multiplier).latency + AdderTree.latency_of(p.rows) + 1

    @property
    def latency(self) -> int:
        """As `latency_of`."""
        return self.latency_of(self.p)

    def elaborate(self, platform):
        m = Module()
        p = self.p
        lane_class = lane_multiplier(p.multiplier)
        m.submodules.tree1 = tree1 = AdderTree(p.rows, lane_class.product_width, adder=p.adder)
        m.submodules.tree2 = tree2 = AdderTree(p.rows, lane_class.shifted_width, adder=p.adder)
        for row in range(p.rows):
            m.submodules[f"lane_{row}"] = lane = lane_class(int8_groups=p.int8_groups, adder=p.adder)
            m.d.comb += [
                lane.x.eq(self.x[row]),
                lane.code.eq(self.codes[row]),
                lane.int8.eq(self.int8),
                lane.high.eq(self.high),
                tree1.i[row].value.eq(lane.product.value),
                tree1.i[row].carry.eq(lane.product.carry),
                tree2.i[row].value.eq(lane.shifted.value),
                tree2.i[row].carry.eq(lane.shifted.carry),
            ]

        step = data.StructLayout({"enable": 1, "clear": 1, "promote": 1, "last": 1})
        control = Signal(step)
        if p.int8_groups:
            second_plane = self.int8 & ~self.high
            m.d.comb += [
                control.enable.eq(self.valid & (self.int8 | ~self.high)),
                control.clear.eq(self.first & ~second_plane),
                control.promote.eq(self.first & second_plane),
            ]
        else:
            m.d.comb += [control.enable.eq(self.valid), control.clear.eq(self.first)]
        m.d.comb += control.last.eq(self.valid & self.last)
        for stage in range(self.latency - 1):
            delayed = Signal(step, name=f"control_{stage}")
            m.d.sync += delayed.eq(control)
            control = delayed

        adder = adder_strategy(p.adder)
        for name, psum, tree in (("accumulate1", self.psum1, tree1), ("accumulate2", self.psum2, tree2)):
            width = len(psum)
            kept = Signal(signed(width), name=f"{name}_kept")
            m.d.comb += kept.eq(Mux(control.clear, 0, psum))
            if p.int8_groups:
                with m.If(control.promote):
                    m.d.comb += kept.eq(psum << DIGIT_BITS)
            total = adder.add(m, name, kept, tree.o.value, carry=tree.o.carry, width=width)
            with m.If(control.enable):
                m.d.sync += psum.eq(total)
        m.d.sync += self.done.eq(control.last)
        return m
