"""Outputs of attention: the array's sums, those of INT8 rows, and the reciprocal of the sum of all weights."""

from amaranth.hdl import Cat, Const, EnableInserter, Module, Mux, Signal, Value, signed
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.block_sums import GUARD_BITS, PLACE_OFFSET
from kvant.hw.attention.floating import FloatFromInteger, FloatProduct
from kvant.hw.attention.layouts import index_range
from kvant.hw.attention.normalize import Reciprocal, choose
from kvant.hw.attention.parameters import UNIT_BITS, X_SHIFT, AttentionParameters
from kvant.hw.attention.value_rows import HALF_WEIGHT, RowPart, ValueRows
from kvant.hw.linear.engine import output
from kvant.hw.numeric.floating import FP16_LSB, FP16_MANTISSA, FloatAdder, Pipeline
from kvant.hw.numeric.output_queue import OutputQueue


def attention_output() -> data.StructLayout:
    """Payload of the output: an fp32 element; `user`: its query sees no key; `last`: the query's last element."""
    return data.StructLayout({"data": 32, "user": 1, "last": 1})


class AttentionOutputs(wiring.Component):
    """``out = fp32(fp32(fp32(lin + groups) + channels) * inv)``, of what there is; ``inv = fp32(1 / denominator)``.

    With two planes of weights, ``lin`` is the fp32 sum of the value job's outputs under either.

    ::

        ValueRows ──> FloatFromInteger ──> FloatAdder ──┬──> FloatProduct ──> out
                                               ^        v         ^
        y ───────────────────────────────> sums (memory)          └── reciprocals

    The value job's outputs wait in the memory. A pass over all elements adds those of the second plane, one the rows
    with a scale a group, if there are any; the last one adds those with a scale a channel and multiplies. Every part is
    rounded to fp32 once, in units in which a weight w counts ``w * 2^-9``, as it does in the array.

    Parameters
    ----------
    p : AttentionParameters
    rows : ValueRows
        Whose sums are read: its word.

    Attributes
    ----------
    latency : int
        Cycles from an element's entry to its transfer on `out`, if nothing is before it.

    Members
    -------
    start : in
        A value job begins whose outputs come at `y`.
    count : in
        Queries; stable from `start` to `done`.
    y : in stream
        Outputs of the value job.
    summed : out
        They are in the memory; low from `start` on.
    go : in
        Starts the output; `has_sums`, `has_groups`, `has_channels` are stable from here on until `done`.
    has_sums, has_groups, has_channels : in
        There are windows; rows with a scale a group; rows with a scale a channel.
    total_query, total : out, in
        A query's denominator in units of 2^-24, in the same cycle.
    look_enable, look_part, look_transfer, look_query : out
    look, scales : in
        See `ValueRows`.
    out : out stream
        `attention_output`: for each query, each of `head_dim` elements.
    done : out
        High for one cycle: the last element is on its way out.
    """

    _entry = 5  # cycle in which a number enters FloatFromInteger
    _number = _entry + FloatFromInteger.latency
    _sum = _number + FloatAdder.latency + 1
    _product = _sum + FloatProduct.latency
    latency = _product + 1

    def __init__(self, p: AttentionParameters, rows: ValueRows):
        self.p = p
        word = rows.sums.word
        self.width = word["sums"].shape.elem_shape.width
        super().__init__(
            {
                "start": In(1),
                "count": In(range(p.queries + 1)),
                "y": In(stream.Signature(output(p.linear))),
                "summed": Out(1),
                "go": In(1),
                "has_sums": In(1),
                "has_groups": In(1),
                "has_channels": In(1),
                "total_query": Out(index_range(p.queries)),
                "total": In(p.denominator_width),
                "look_enable": Out(1),
                "look_part": Out(RowPart),
                "look_transfer": Out(index_range(p.row_transfers)),
                "look_query": Out(index_range(p.queries)),
                "look": In(word),
                "scales": In(data.ArrayLayout(16, p.lanes)),
                "out": Out(stream.Signature(attention_output())),
                "done": Out(1),
            }
        )

    def elaborate(self, platform):
        p, d = self.p, self.p.head_dim
        m = Module()
        # A word holds what all units of the array give in a cycle. Written by the value job, then read and written at a
        # distance by the passes.
        units, words = p.linear.units, p.value_tiles * p.linear.unit_cols
        shape, depth = data.ArrayLayout(32, units), ((p.queries - 1) << (words - 1).bit_length()) + words
        m.submodules.sums = sums = memory.Memory(shape=shape, depth=max(2, depth), init=[], attrs={"no_rw_check": 1})
        write, read = sums.write_port(granularity=1), sums.read_port()
        second_write = None
        if p.weight_planes > 1:
            m.submodules.second = second = memory.Memory(
                shape=shape, depth=sums.depth, init=[], attrs={"no_rw_check": 1}
            )
            second_write, second_read = second.write_port(), second.read_port()
        m.submodules.inverses = inverses = memory.Memory(
            shape=32, depth=max(2, p.queries), init=[], attrs={"no_rw_check": 1}
        )
        inverse_write, inverse_read = inverses.write_port(), inverses.read_port()
        inverted = Signal()
        self._collect(m, write, second_write)
        self._invert(m, inverse_write, inverted)

        m.submodules.queue = queue = OutputQueue(attention_output())
        wiring.connect(m, queue.o, wiring.flipped(self.out))
        advance = queue.advance
        pipeline = Pipeline(m, enable=advance)
        register = pipeline.register

        # Elements of both passes; with channels an element takes two cycles: low sums, high sums.
        enters, outputs, high = Signal(), Signal(), Signal()
        planes = Signal()  # the pass adds the second plane
        element, query = Signal(range(max(2, d))), Signal(index_range(p.queries))
        step = Signal()  # to the next element
        query_end = element == d - 1
        pass_end = step & query_end & (query + 1 == self.count)
        both = outputs & self.has_channels
        m.d.comb += step.eq(enters & advance & (high | ~both))
        with m.If(enters & advance):
            m.d.sync += high.eq(both & ~high)
        with m.If(step):
            m.d.sync += element.eq(Mux(query_end, 0, element + 1))
            with m.If(query_end):
                m.d.sync += query.eq(Mux(pass_end, 0, query + 1))
        lane_bits = (p.lanes - 1).bit_length()
        left = Signal()
        with m.FSM():
            with m.State("IDLE"):
                with m.If(self.go):
                    m.next = "CHOOSE"
            with m.State("CHOOSE"):
                with m.If(self.has_sums & (p.weight_planes > 1)):
                    m.next = "PLANES"
                with m.Elif(self.has_groups):
                    m.next = "GROUPS"
                with m.Else():
                    m.next = "INVERT"
            with m.State("PLANES"):
                m.d.comb += [enters.eq(1), planes.eq(1)]
                with m.If(pass_end):
                    m.next = "PLANES LEAVE"
            with m.State("PLANES LEAVE"):
                with m.If(left):
                    m.next = "CHOOSE ROWS"
            with m.State("CHOOSE ROWS"):
                with m.If(self.has_groups):
                    m.next = "GROUPS"
                with m.Else():
                    m.next = "INVERT"
            with m.State("GROUPS"):
                m.d.comb += enters.eq(1)
                with m.If(pass_end):
                    m.next = "LEAVE"
            with m.State("LEAVE"):
                with m.If(left):
                    m.next = "INVERT"
            with m.State("INVERT"):
                with m.If(inverted):
                    m.next = "OUTPUT"
            with m.State("OUTPUT"):
                m.d.comb += [enters.eq(1), outputs.eq(1)]
                with m.If(pass_end):
                    m.next = "OUTPUT LEAVES"
            with m.State("OUTPUT LEAVES"):
                with m.If(left):
                    m.d.comb += self.done.eq(1)
                    m.next = "IDLE"
        valid = enters & (high | ~both)

        # Cycle 0: the sums are asked for. Cycle 1: an element of them.
        part = Mux(outputs, Mux(high, RowPart.HIGH.value, RowPart.LOW.value), RowPart.GROUPS.value)
        m.d.comb += [
            self.look_enable.eq(enters & advance),
            self.look_part.as_value().eq(part),
            self.look_transfer.eq(element >> lane_bits),
            self.look_query.eq(query),
        ]
        lane = register(element[:lane_bits] if lane_bits else Const(0, 1), "lane")
        number = register(choose([self.look.sums[k] for k in range(p.lanes)], lane), "number").as_signed()
        scale = register(choose([self.scales[k] for k in range(p.lanes)], lane), "scale")
        place = register(self.look.place, "place")

        # Cycle 2: the two halves of an exact sum make one. Nothing of either lies in the guard bits.
        of_channels = register(outputs, "of_channels", cycles=2)
        absent = register(outputs & ~self.has_channels, "absent", cycles=2)
        low = register(number >> GUARD_BITS, "low")
        exact = Signal(signed(self.width))
        m.d.comb += exact.eq(low + ((number >> GUARD_BITS) << HALF_WEIGHT))
        value = register(Mux(absent, 0, Mux(of_channels, exact, number))[: self.width].as_signed(), "value")
        normal = scale[10:15].any()
        mantissa = register(Mux(of_channels, Cat(scale[:10], normal), 1)[:FP16_MANTISSA], "mantissa")
        exponent = Signal(signed(7))
        scale_exponent = Cat(scale[10] | ~normal, scale[11:15])
        m.d.comb += exponent.eq(
            Mux(of_channels, scale_exponent + (FP16_LSB - X_SHIFT), place.as_unsigned() - (PLACE_OFFSET + X_SHIFT))
        )
        exponent = register(exponent, "exponent", cycles=3)

        # Cycles 3 and 4: times the scale.
        split = self.width // 2
        mantissa = Cat(mantissa, Const(0, 1)).as_signed()
        lower = register(Cat(value[:split], Const(0, 1)).as_signed() * mantissa, "lower")
        upper = register(value[split:].as_signed() * mantissa, "upper")
        total = Signal(signed(self.width + FP16_MANTISSA))
        m.d.comb += total.eq(lower + (upper << split))

        # Cycle 5: to fp32.
        m.submodules.convert = EnableInserter(advance)(
            convert := FloatFromInteger(self.width + FP16_MANTISSA, signed(7))
        )
        m.d.comb += [convert.number.eq(register(total, "total")), convert.exponent.eq(exponent)]

        # The sum with what waits in the memory; without windows, not before a first pass has been.
        waiting = self.has_sums | (outputs & self.has_groups)
        address, unit = self._place(element, query)
        addresses, unit_numbers = [address], [unit]
        for _ in range(self._sum):
            addresses.append(register(addresses[-1], "address"))
            unit_numbers.append(register(unit_numbers[-1], "unit"))
        look = self._number - 2
        present = register(waiting, "present", cycles=look + 1)

        def of_unit(word):
            return choose([word[k] for k in range(units)], unit_numbers[look + 1])

        m.submodules.adder = EnableInserter(advance)(adder := FloatAdder())
        added = convert.y
        if p.weight_planes > 1:
            m.d.comb += [
                second_read.addr.eq(addresses[look]),
                second_read.en.eq(advance & pipeline.valid(valid & planes, cycles=look)),
            ]
            of_planes = register(planes, "of_planes", cycles=self._number)
            added = Mux(of_planes, register(of_unit(second_read.data), "second"), convert.y)
        m.d.comb += [
            read.addr.eq(addresses[look]),
            read.en.eq(advance & pipeline.valid(valid, cycles=look)),
            adder.a.eq(added),
            adder.b.eq(register(Mux(present, of_unit(read.data), 0), "waiting")),
        ]
        sum_ = register(adder.y, "sum")
        of_first = advance & pipeline.valid(valid & ~outputs, cycles=self._sum)
        with m.If(of_first):
            m.d.comb += [
                write.addr.eq(addresses[-1]),
                *(number.eq(sum_) for number in write.data),
                write.en.eq(1 << unit_numbers[-1]),
            ]

        # The product with the reciprocal.
        look = self._sum - 2
        m.submodules.product = EnableInserter(advance)(product := FloatProduct())
        inverse = register(inverse_read.data, "inverse")
        m.d.comb += [
            inverse_read.addr.eq(register(query, "query", cycles=look)),
            inverse_read.en.eq(advance & pipeline.valid(valid & outputs, cycles=look)),
            product.a.eq(sum_),
            product.b.eq(inverse),
            queue.valid.eq(pipeline.valid(valid & outputs, cycles=self._product)),
            queue.payload.data.eq(product.p),
            queue.payload.user.eq(register(~inverse[23:31].any(), "empty", cycles=FloatProduct.latency)),
            queue.payload.last.eq(register(query_end, "last", cycles=self._product)),
            left.eq(advance & pipeline.valid(pass_end, cycles=self._product)),
        ]
        return m

    def _place(self, element: Value, query: Value) -> tuple[Value, Value]:
        """Word of the memories that holds an element of a query, and the unit of the array that gave it."""
        p, linear = self.p, self.p.linear
        step_bits, unit_bits = (linear.unit_cols - 1).bit_length(), (linear.units - 1).bit_length()
        element_bits = (p.value_tiles * p.cols - 1).bit_length()
        whole = Cat(element, Const(0, element_bits))[:element_bits]
        word = Cat(whole[:step_bits], whole[step_bits + unit_bits :], query[: (p.queries - 1).bit_length()])
        return word, whole[step_bits : step_bits + unit_bits]

    def _collect(self, m: Module, write, second_write):
        """Outputs of the value job into the memories, those of all units in a cycle: tile, plane, query, step."""
        p, linear = self.p, self.p.linear
        step, query = Signal(range(max(2, linear.unit_cols))), Signal(index_range(p.queries))
        tile = Signal(range(max(2, p.value_tiles)))
        step_end = step == linear.unit_cols - 1
        second = Signal()  # plane
        plane_end = step_end & (query + 1 == self.count)
        tile_end = plane_end if second_write is None else plane_end & second
        y = self.y.payload
        elements = []
        for unit in range(linear.units):
            column = Cat(step[: (linear.unit_cols - 1).bit_length()], Const(unit, (linear.units - 1).bit_length()))
            elements.append(Cat(column, tile))
        held = Cat(element < p.head_dim for element in elements)
        m.d.comb += [
            self.y.ready.eq(1),
            write.addr.eq(self._place(elements[0], query)[0]),
            write.data.eq(y.data),
            write.en.eq(held & (self.y.valid & ~second).replicate(linear.units)),
        ]
        if second_write is not None:
            m.d.comb += [
                second_write.addr.eq(write.addr),
                second_write.data.eq(y.data),
                second_write.en.eq(self.y.valid & second),
            ]
            with m.If(self.start):
                m.d.sync += second.eq(0)
            with m.Elif(self.y.valid & plane_end):
                m.d.sync += second.eq(~second)
        with m.If(self.start):
            m.d.sync += [step.eq(0), query.eq(0), tile.eq(0), self.summed.eq(0)]
        with m.Elif(self.y.valid):
            m.d.sync += step.eq(Mux(step_end, 0, step + 1))
            with m.If(y.last):
                m.d.sync += self.summed.eq(1)
            with m.If(step_end):
                m.d.sync += query.eq(Mux(plane_end, 0, query + 1))
            with m.If(tile_end):
                m.d.sync += tile.eq(tile + 1)

    def _invert(self, m: Module, write, inverted: Signal):
        """Reciprocals of all queries, one after the other. They count in units of 2^24."""
        p = self.p
        m.submodules.reciprocal = reciprocal = Reciprocal(p.denominator_width)
        query, begin = Signal(range(p.queries + 1)), Signal()
        end = query + 1 == self.count
        m.d.comb += [
            self.total_query.eq(query),
            reciprocal.denominator.eq(self.total),
            reciprocal.start.eq(begin),
            write.addr.eq(query),
            write.data.eq(Cat(reciprocal.y[:23], (reciprocal.y[23:31] + UNIT_BITS)[:8], 0)),
            write.en.eq(reciprocal.done),
        ]
        with m.If(~reciprocal.y[23:31].any()):
            m.d.comb += write.data.eq(0)
        m.d.sync += begin.eq(self.go | (reciprocal.done & ~end))
        with m.If(self.go):
            m.d.sync += [query.eq(0), inverted.eq(0)]
        with m.Elif(reciprocal.done):
            m.d.sync += [query.eq(query + 1), inverted.eq(end)]
