"""Sums of groups of INT8 elements: sum, sum of squares, extremes, and ``n * sumsq - sum**2``, all exact."""

from collections.abc import Sequence

from amaranth.hdl import Cat, Const, EnableInserter, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.parameters import INT8_LIMIT, signed_width
from kvant.hw.numeric.adders import adder_strategy
from kvant.hw.numeric.carry_save import CarrySaveTree, Heap, folded, level, product_rows, square_rows
from kvant.hw.numeric.floating import Pipeline
from kvant.hw.numeric.output_queue import OutputQueue
from kvant.hw.parameters import check_integer

MAX_LANES = 256

MAX_GROUP = 65536
"""Largest group: all that is derived from one stays below 64 bits."""

BIAS = INT8_LIMIT
"""Added to every element, so that elements are not negative while they are summed up."""


NO_TAG = unsigned(0)
"""Shape of the tag where there is nothing to travel along."""


def nvar_width(group: int) -> int:
    """Bits of ``n * sumsq - sum**2`` of up to *group* elements; it is largest with half of them at either extreme."""
    return ((2 * INT8_LIMIT - 1) ** 2 * group**2 // 4).bit_length()


def variance_input(lanes: int, tag_shape) -> data.StructLayout:
    """Payload of the input of a `VarianceUnit`; see there."""
    return data.StructLayout(
        {"data": data.ArrayLayout(signed(8), lanes), "keep": range(lanes + 1), "last": 1, "tag": tag_shape}
    )


def variance_fields(group: int, *, nvar: bool = True) -> dict:
    """Fields of a layout: what a `VarianceUnit` says of a group of up to *group* elements; see there."""
    return {
        "sum": signed(signed_width(INT8_LIMIT * group)),
        "sumsq": (INT8_LIMIT**2 * group).bit_length(),
        "maximum": signed(8),
        "minimum": signed(8),
        "absmax": 8,
        **({"nvar": nvar_width(group)} if nvar else {}),
        "count": range(group + 1),
    }


class ElementSquare(wiring.Component):
    """The square of an INT8 element, as words that a carry-save tree adds up.

    Members
    -------
    x : in, signed(8)
    words : out
        `WORDS` unsigned numbers of `WIDTH` bits, whose sum is ``x**2``.
    """

    WIDTH = (INT8_LIMIT**2).bit_length()
    WORDS = 5

    def __init__(self):
        super().__init__({"x": In(signed(8)), "words": Out(data.ArrayLayout(self.WIDTH, self.WORDS))})

    def elaborate(self, platform):
        m = Module()
        magnitude = Signal(7)
        m.d.comb += magnitude.eq(folded(self.x))
        heap = Heap(self.WIDTH)
        heap.add(square_rows(self.x[-1], magnitude))
        m.d.comb += [port.eq(word) for port, word in zip(self.words, heap.words(), strict=True)]
        return m


class VariancePipeline(wiring.Component):
    """`VarianceUnit` without flow control: fixed latency, a transfer and at most a group per cycle.

    ::

        data ──┬──> squares ──> carry-save tree ──> sum so far, two words ──> adder ──> sumsq ──┬──────────────> o
               ├──> q + 128 ──> carry-save tree ──> sum so far, two words ──> adder ──> sum ────┤                ^
               ├──> comparison tree ──────────────> extremes so far ──────────────────> absmax  │                │
               └──> ──────────────────────────────> count so far ──────────────────────> n ─────┤                │
                                                                                                v                │
                                                                 n * sumsq - sum**2, carry-save tree ──> adder ──┘

    No carry propagates but in the adders at the end, for which `adder` chooses the strategy. Elements are summed up as
    ``q + 128``; the count takes this out again in the adder of the sum.

    Members
    -------
    valid, data, keep, last, tag : in
        As in the input stream of a `VarianceUnit`.
    o_valid, o : out
        A complete group, as in its output stream.
    error : out
        As in a `VarianceUnit`.

    Attributes
    ----------
    latency : int
        Cycles from a group's last transfer to `o`.
    """

    LEVELS_PER_STAGE = 4
    """Levels of full adders between registers."""

    COMPARISONS_PER_STAGE = 2
    """Levels of the comparison tree between registers."""

    def __init__(self, lanes: int, group: int, *, adder: str = "plus", tag_shape=NO_TAG, nvar: bool = True):
        self.lanes = check_integer("lanes", lanes, 1, MAX_LANES)
        self.group = check_integer("group", group, 1, MAX_GROUP)
        self.adder = adder_strategy(adder)
        self.nvar = nvar
        self.fields = variance_fields(group, nvar=nvar)
        layout = variance_input(lanes, tag_shape)
        super().__init__(
            {
                "valid": In(1),
                **{name: In(layout[name].shape) for name in ("data", "keep", "last", "tag")},
                "o_valid": Out(1),
                "o": Out(data.StructLayout(self.fields | {"tag": tag_shape})),
                "error": Out(1),
            }
        )
        # The depth of a tree depends on the widths alone, for which these signals stand.
        self._square_tree = self._tree(self._squares([[Signal(ElementSquare.WIDTH)] * ElementSquare.WORDS] * lanes))
        self._biased_tree = self._tree(self._biased([Signal(8)] * lanes))
        self._comparisons = (lanes - 1).bit_length()
        self._front = max(
            self._square_tree.latency,
            self._biased_tree.latency,
            -(-self._comparisons // self.COMPARISONS_PER_STAGE),
        )
        self.latency = 1 + self._front + 2  # the input, the trees, the group so far, its sums
        if nvar:
            widths = group.bit_length(), self.fields["sumsq"], 1, self.fields["sum"].width - 1
            self._nvar_tree = self._tree(self._nvar(*map(Signal, widths)))
            self.latency += self._nvar_tree.latency + 1

    def _tree(self, heap: Heap) -> CarrySaveTree:
        return CarrySaveTree(len(heap.words()), levels_per_stage=self.LEVELS_PER_STAGE)

    def _squares(self, words: Sequence[Sequence[Value]]) -> Heap:
        """The squares of a transfer's elements, each in words of its own."""
        heap = Heap(self.fields["sumsq"])
        for square in words:
            heap.add((word, 0) for word in square)
        return heap

    def _biased(self, elements: Sequence[Value]) -> Heap:
        """A transfer's elements plus `BIAS`."""
        heap = Heap(self.fields["sum"].width)
        heap.add((x, 0) for x in elements)
        return heap

    def _nvar(self, count: Value, sumsq: Value, sign: Value, magnitude: Value) -> Heap:
        """``count * sumsq - sum**2``, which is never negative, of a sum's sign and `folded` magnitude."""
        heap = Heap(self.fields["nvar"])
        heap.add(product_rows(count, sumsq))
        heap.subtract(square_rows(sign, magnitude))
        return heap

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register

        # The input: lanes without an element are 0 for the squares, and below and above all others for the extremes.
        squared, biased, inverted = [], [], []
        for lane in range(self.lanes):
            kept = lane < self.keep
            x = self.data[lane]
            m.submodules[f"square_{lane}"] = square = ElementSquare()
            m.d.comb += square.x.eq(register(Mux(kept, x, 0)[:8], f"x_{lane}"))
            squared.append([square.words[index] for index in range(square.WORDS)])
            biased.append(register(Mux(kept, Cat(x[:7], ~x[7]), 0), f"biased_{lane}"))
            inverted.append(register(Mux(kept, Cat(~x[:7], x[7]), 0), f"inverted_{lane}"))
        legal_keep = register((self.keep != 0) & (self.keep <= self.lanes), "legal_keep")

        # The sums and extremes of a transfer; of paths of different lengths the shorter ones wait at their ends.
        front = self._front

        def summed(name: str, tree: CarrySaveTree, heap: Heap) -> list[Value]:
            pair = tree.build(m, name, heap.words(), heap.width)
            return [register(word, f"{name}_word", cycles=front - tree.latency) for word in pair]

        squares = summed("squares", self._square_tree, self._squares(squared))
        sums = summed("biased", self._biased_tree, self._biased(biased))
        largest = self._largest(m, "largest", biased)
        smallest = self._largest(m, "smallest", inverted)
        valid = pipeline.valid(self.valid, cycles=1 + front)
        last = register(self.last, "last", cycles=1 + front)
        keep = register(self.keep, "keep", cycles=1 + front)
        legal_keep = register(legal_keep, "legal_keep", cycles=front)
        tag = register(self.tag, "tag", cycles=1 + front)

        # The group so far, in registers that hold a complete group for the one cycle after its last transfer.
        first = Signal(init=1)

        def so_far(name: str, shape) -> tuple[Signal, Value]:
            """A register, and what it holds of this group."""
            held = Signal(shape, name=name, reset_less=True)
            before = Signal(shape, name=f"{name}_before")
            m.d.comb += before.eq(Mux(first, 0, held))
            return held, before

        def accumulate(name: str, words: list[Value], width: int) -> list[Signal]:
            held, before = zip(*(so_far(f"{name}_{part}", width) for part in range(2)), strict=True)
            words = [*level(m, f"{name}_upper", [*words, before[0]], width), before[1]]
            words = level(m, f"{name}_lower", words, width)
            with m.If(valid):
                m.d.sync += [register.eq(word) for register, word in zip(held, words, strict=True)]
            return list(held)

        sumsq_words = accumulate("sumsq", squares, self.fields["sumsq"])
        sum_words = accumulate("sum", sums, self.fields["sum"].width)
        count, count_before = so_far("count", range(self.group + (1 << len(self.keep))))
        maximum, maximum_before = so_far("maximum", 8)
        minimum, minimum_before = so_far("minimum", 8)
        too_long, legal, checked, done = Signal(), Signal(reset_less=True), Signal(), Signal()
        m.d.comb += too_long.eq(count > self.group)
        with m.If(valid):
            m.d.sync += [
                first.eq(last),
                count.eq(Mux(~first & too_long, count, count_before + keep)),  # too long it stays, and does not wrap
                maximum.eq(Mux(largest > maximum_before, largest, maximum_before)),
                minimum.eq(Mux(smallest > minimum_before, smallest, minimum_before)),
                legal.eq(legal_keep),
            ]
        m.d.sync += [checked.eq(valid), done.eq(valid & last), self.error.eq(checked & (too_long | ~legal))]

        # The sums of a complete group.
        highest, lowest = Cat(maximum[:7], ~maximum[7]).as_signed(), Cat(~minimum[:7], minimum[7]).as_signed()
        bias = Signal(self.fields["sum"].width)
        m.d.comb += bias.eq(count * BIAS)
        unbiased = level(m, "unbiased", [*sum_words, ~bias], len(bias))
        values = {
            "sum": self._add(m, "add_sum", unbiased, carry=Const(1, 1)),
            "sumsq": self._add(m, "add_sumsq", sumsq_words).as_unsigned(),
            "maximum": highest,
            "minimum": lowest,
            "absmax": Mux(highest + lowest < 0, -lowest, highest)[:8],
            "count": count[: self.group.bit_length()],
            "tag": register(tag, "tag"),
        }
        values = {name: register(value, name) for name, value in values.items()}
        valid = pipeline.valid(done, cycles=1)
        if self.nvar:
            magnitude = Signal(self.fields["sum"].width - 1, name="sum_magnitude")
            m.d.comb += magnitude.eq(folded(values["sum"]))
            heap = self._nvar(values["count"], values["sumsq"], values["sum"][-1], magnitude)
            words = self._nvar_tree.build(m, "nvar", heap.words(), heap.width)
            nvar = register(self._add(m, "add_nvar", words).as_unsigned(), "nvar")
            cycles = self._nvar_tree.latency + 1
            values = {name: register(value, name, cycles=cycles) for name, value in values.items()} | {"nvar": nvar}
            valid = pipeline.valid(valid, cycles=cycles)
        m.d.comb += [self.o_valid.eq(valid), *(self.o[name].eq(value) for name, value in values.items())]
        return m

    def _add(self, m: Module, name: str, words: Sequence[Value], carry: Value | None = None) -> Value:
        """The sum of two words and a carry, modulo their width."""
        a, b = (word.as_signed() for word in words)
        return self.adder.add(m, name, a, b, width=len(a), carry=carry)

    def _largest(self, m: Module, name: str, values: Sequence[Value]) -> Value:
        """The largest of a transfer's values, by a tree of comparisons, as late as the carry-save trees."""
        register = Pipeline(m).register
        waits = self._front
        for remaining in reversed(range(self._comparisons)):
            larger = []
            for index, (a, b) in enumerate(zip(values[::2], values[1::2], strict=False)):
                value = Signal(8, name=f"{name}_{remaining}_{index}")
                m.d.comb += value.eq(Mux(a < b, b, a))
                larger.append(value)
            values = larger + list(values[2 * len(larger) :])
            if remaining % self.COMPARISONS_PER_STAGE == 0:
                values = [register(value, f"{name}_held") for value in values]
                waits -= 1
        return register(values[0], name, cycles=waits)


class VarianceUnit(wiring.Component):
    """Sum, sum of squares, extremes and ``n * sumsq - sum**2`` of groups of INT8 elements, without any rounding.

    Groups of any lengths follow each other without a bubble: one transfer per cycle, and a result per cycle where
    groups are no longer than a transfer. The variance of a group is ``nvar / n**2``; no division is done here.

    Parameters
    ----------
    lanes : int
        Elements per transfer, 1 to 256.
    group : int
        Most elements of a group, 1 to 65536.
    adder : str
        Strategy of the adders that end the carry-save sums, a key of `kvant.hw.numeric.adders.ADDERS`.
    tag_shape
        Travels along with a group: that of its last transfer.
    nvar : bool
        False leaves `nvar` and the cycles it takes out.

    Attributes
    ----------
    latency : int
        Cycles from a group's last transfer to its result, when the receiver is ready.

    Members
    -------
    i : in stream
        data : lanes * signed(8)
            Elements, -128 .. 127.
        keep : 1 .. lanes
            How many lanes from lane 0 on hold elements. Any transfer may be short.
        last : 1
            Last transfer of the group.
        tag : tag_shape
    o : out stream
        sum : signed
        sumsq : unsigned
            Sum of squares.
        maximum, minimum : signed(8)
        absmax : 8
            Largest magnitude; that of -128 is 128.
        nvar : unsigned
            ``count * sumsq - sum**2``.
        count : 1 .. group
            Elements of the group.
        tag : tag_shape
    error : out
        A transfer had no elements or claimed more than there are lanes, or a group grew longer than `group`: high for
        one cycle, or as long as the receiver then stalls. Its result has no meaning; the next group is not affected.

    Raises
    ------
    ParameterError
        For lanes or a group outside the ranges above, or an adder that does not exist.
    """

    def __init__(self, lanes: int, group: int, *, adder: str = "plus", tag_shape=NO_TAG, nvar: bool = True):
        self._pipeline = VariancePipeline(lanes, group, adder=adder, tag_shape=tag_shape, nvar=nvar)
        self.lanes = lanes
        self.group = group
        self.fields = self._pipeline.fields
        self.latency = self._pipeline.latency + 1
        super().__init__(
            {
                "i": In(stream.Signature(variance_input(lanes, tag_shape))),
                "o": Out(stream.Signature(data.StructLayout(self.fields | {"tag": tag_shape}))),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        pipeline = self._pipeline
        m.submodules.queue = queue = OutputQueue(self.o.payload.shape())
        m.submodules.pipeline = EnableInserter(queue.advance)(pipeline)
        m.d.comb += [
            self.i.ready.eq(queue.advance),
            pipeline.valid.eq(self.i.valid),
            *(getattr(pipeline, name).eq(self.i.payload[name]) for name in ("data", "keep", "last", "tag")),
            queue.valid.eq(pipeline.o_valid),
            queue.payload.eq(pipeline.o),
            self.error.eq(pipeline.error),
        ]
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        return m


class VarianceBlock(wiring.Component):
    """The block ``variance``: a `VarianceUnit` behind AXI4-Stream ports, with a counter and a flag.

    Parameters
    ----------
    lanes, group, adder
        See `VarianceUnit`.

    Attributes
    ----------
    latency : int
        As of a `VarianceUnit`.

    Members
    -------
    q : in stream
        data : lanes * signed(8)
        keep : lanes
            One bit per byte: lanes that hold an element, without a gap from lane 0 on.
        last : 1
            Last transfer of a group.
    y : out stream
        data
            `variance_fields`: one transfer per group.
    busy_cycles : out, 32
        Transfers taken; wraps.
    error : out
        Sticky: a transfer without elements or with a gap between them, or a group of more than `group` elements.
    """

    def __init__(self, lanes: int, group: int, *, adder: str = "plus"):
        self._unit = VarianceUnit(lanes, group, adder=adder)
        self.lanes = lanes
        self.group = group
        self.fields = self._unit.fields
        self.latency = self._unit.latency
        element = data.StructLayout({"data": data.ArrayLayout(signed(8), lanes), "keep": lanes, "last": 1})
        super().__init__(
            {
                "q": In(stream.Signature(element)),
                "y": Out(stream.Signature(data.StructLayout({"data": data.StructLayout(self.fields)}))),
                "busy_cycles": Out(32),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.unit = unit = self._unit
        q, keep = self.q.payload, self.q.payload.keep
        # The end of the ones is at one lane alone; the count's bits say at which.
        ends = [keep[lane] & ~(keep[lane + 1] if lane + 1 < self.lanes else 0) for lane in range(self.lanes)]
        counted = [
            Cat(end for lane, end in enumerate(ends) if (lane + 1) >> bit & 1).any()
            for bit in range(self.lanes.bit_length())
        ]
        gap = Signal()
        m.d.comb += [
            gap.eq((keep & (keep + 1)[: self.lanes]).any()),
            unit.i.valid.eq(self.q.valid),
            self.q.ready.eq(unit.i.ready),
            unit.i.payload.data.eq(q.data),
            unit.i.payload.keep.eq(Cat(counted)),
            unit.i.payload.last.eq(q.last),
            self.y.valid.eq(unit.o.valid),
            unit.o.ready.eq(self.y.ready),
            *(self.y.payload.data[name].eq(unit.o.payload[name]) for name in self.fields),
        ]
        taken = self.q.valid & self.q.ready
        m.d.sync += [
            self.busy_cycles.eq(self.busy_cycles + taken),
            self.error.eq(self.error | (taken & gap) | unit.error),
        ]
        return m
