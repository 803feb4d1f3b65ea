"""Weights of windows as two INT8 groups: what the first one leaves becomes another."""

from amaranth.hdl import Cat, EnableInserter, Module, Mux, Signal, signed
from amaranth.lib import memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.floating import shift_up
from kvant.hw.attention.layouts import index_range
from kvant.hw.attention.normalize import choose
from kvant.hw.attention.parameters import UNIT_BITS, AttentionParameters
from kvant.hw.linear.activation_buffer import activation_input, quantized_output
from kvant.hw.numeric.floating import FP16_MANTISSA, Pipeline, leading_zeros, shift_left
from kvant.hw.numeric.output_queue import OutputQueue

FIXED_BITS = UNIT_BITS + 16
"""Bits of a weight up to 2^15 in units of 2^-24."""


class Residual(wiring.Component):
    """``fp16(x - s * q)``, the exact difference rounded once, ties to even; subnormals are kept.

    Attributes
    ----------
    latency : int
        Cycles to the result, a register. One per cycle.

    Members
    -------
    x : in
        fp16, 0 to 2^15.
    scale : in
        fp16, finite, its sign ignored; ``127 * scale`` is less than 2^16.
    q : in, signed(8)
    r : out
        fp16.
    """

    latency = 8

    def __init__(self):
        super().__init__({"x": In(16), "scale": In(16), "q": In(signed(8)), "r": Out(16)})

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register

        # Both as integers of 2^-24. A subnormal has exponent 1.
        parts = []
        for number in (self.x, self.scale):
            normal = number[10:15].any()
            parts.append((Cat(number[:10], normal), Mux(normal, number[10:15] - 1, 0)[:5]))
        (x, x_shift), (scale, scale_shift) = parts
        magnitude = Mux(self.q < 0, -self.q, self.q)[:8]

        x, product = register(x, "x"), register(scale * magnitude, "product")
        x_shift, scale_shift = register(x_shift, "x_shift"), register(scale_shift, "scale_shift")
        number = shift_up(m, pipeline, x, x_shift, width=FIXED_BITS, name="x")
        product = shift_up(m, pipeline, product, scale_shift, width=FIXED_BITS, name="product")

        # Their difference: sign and magnitude.
        negative = register(self.q < 0, "negative", cycles=3)
        difference = Signal(signed(FIXED_BITS + 2))
        m.d.comb += difference.eq(Mux(negative, number + product, number - product))
        difference = register(difference, "difference")
        sign = register(difference < 0, "sign", cycles=3)
        number = register(Mux(difference < 0, -difference, difference)[:FIXED_BITS], "number")

        # Normalised, but no farther than the least exponent allows; rounded.
        zeros = leading_zeros(m, number)
        most = FIXED_BITS - FP16_MANTISSA
        places = register(Mux((zeros > most) | ~number.any(), most, zeros), "places")
        number = register(number, "number")
        normal = register(shift_left(m, number, places), "normal")
        exponent = register((most + 1 - places)[:5], "exponent")
        fraction, half, rest = normal[most:-1], normal[most - 1], normal[: most - 1].any()
        exponent = Mux(normal[-1], exponent, 0)
        rounded = (Cat(fraction, exponent) + (half & (rest | fraction[0])))[:15]
        m.d.comb += self.r.eq(register(Cat(rounded, sign), "r"))
        return m


class WeightPlanes(wiring.Component):
    """Sends the weights of a window, and then what their INT8 groups leave, as activations of the value job.

    ::

        i ──┬──────────────────────> o ──> linear path
            └──> weights (memory) ──> Residual ──> o        │
        xq ────> elements (memory) ──────^  <───────────────┘

    One INT8 group has steps of 1/127 of a window's largest weight, which the sum of many lesser ones shows. With the
    group of what it leaves the steps are 1/16129.

    Parameters
    ----------
    p : AttentionParameters

    Members
    -------
    start : in
        A value job begins.
    count : in
        Its queries.
    i : in stream
        `activation_input`: for each window, for each query: its tokens.
    valid, xq : in
        `quantized_output` of the linear path as it is taken.
    o : out stream
        For each window the transfers of `i`, then as many of what the groups leave.
    """

    _entry = 2  # cycle in which a number enters `Residual`

    def __init__(self, p: AttentionParameters):
        self.p = p
        super().__init__(
            {
                "start": In(1),
                "count": In(range(p.queries + 1)),
                "i": In(stream.Signature(activation_input(p.linear))),
                "valid": In(1),
                "xq": In(quantized_output(p.linear)),
                "o": Out(stream.Signature(activation_input(p.linear))),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        words, beats = p.group // p.x_lanes, p.group // p.rows
        word_bits, beat_bits = (words - 1).bit_length(), (beats - 1).bit_length()
        part_bits = word_bits - beat_bits
        # A window's first plane is written before its second one is read.
        m.submodules.weights = weights = memory.Memory(
            shape=16 * p.x_lanes, depth=max(2, p.queries * words), init=[], attrs={"no_rw_check": 1}
        )
        m.submodules.elements = elements = memory.Memory(
            shape=8 * p.rows, depth=max(2, p.queries * beats), init=[], attrs={"no_rw_check": 1}
        )
        m.submodules.scales = scales = memory.Memory(shape=16, depth=max(2, p.queries), init=[])
        weight_write, weight_read = weights.write_port(), weights.read_port()
        element_write, element_read = elements.write_port(), elements.read_port()
        scale_write, scale_read = scales.write_port(), scales.read_port(domain="comb")

        # What the first groups became.
        query, second = Signal(index_range(p.queries)), Signal()
        beat = Signal(range(max(2, beats)))
        written = Signal(range(p.queries * beats + 1))  # of the window
        store = self.valid & ~second
        query_end = query + 1 == self.count
        of_query = Cat(beat[:beat_bits], query)
        m.d.comb += [
            element_write.addr.eq(of_query),
            element_write.data.eq(self.xq.data),
            element_write.en.eq(store),
            scale_write.addr.eq(query),
            scale_write.data.eq(self.xq.user),
            scale_write.en.eq(store),
        ]
        with m.If(self.start):
            m.d.sync += [query.eq(0), second.eq(0), beat.eq(0)]
        with m.Elif(self.valid):
            m.d.sync += beat.eq(Mux(self.xq.last, 0, beat + 1))
            with m.If(self.xq.last):
                m.d.sync += [query.eq(Mux(query_end, 0, query + 1)), second.eq(second ^ query_end)]

        # Which plane is sent.
        m.submodules.queue = queue = OutputQueue(activation_input(p.linear))
        advance = queue.advance
        pipeline = Pipeline(m, enable=advance)
        register = pipeline.register
        resends = Signal()
        place, left = Signal(range(p.queries * words + 1)), Signal(range(p.queries * words + 1))
        all_words = Signal(range(p.queries * words + 1))
        sent = self.o.valid & self.o.ready
        plane_end = sent & (left == 1)
        enters = Signal()
        m.d.comb += [
            all_words.eq(Cat(self.count * words)),
            enters.eq(resends & (place != all_words) & ((place >> part_bits) < written)),
            self.o.valid.eq(Mux(resends, queue.o.valid, self.i.valid)),
            self.o.payload.eq(Mux(resends, queue.o.payload.as_value(), self.i.payload.as_value())),
            queue.o.ready.eq(resends & self.o.ready),
            self.i.ready.eq(~resends & self.o.ready),
            weight_write.addr.eq(place),
            weight_write.data.eq(self.i.payload.data),
            weight_write.en.eq(self.i.valid & self.i.ready),
        ]
        with m.If(self.start):
            m.d.sync += [resends.eq(0), place.eq(0), left.eq(all_words), written.eq(0)]
        with m.Elif(plane_end):
            m.d.sync += [resends.eq(~resends), place.eq(0), left.eq(all_words)]
            with m.If(resends):
                m.d.sync += written.eq(0)
            with m.Else():
                m.d.sync += written.eq(written + store)
        with m.Else():
            m.d.sync += [
                place.eq(place + Mux(resends, enters & advance, sent)),
                left.eq(left - sent),
                written.eq(written + store),
            ]

        # Cycle 1: the memories answer. Cycle 2: one part of a word of elements.
        m.d.comb += [
            weight_read.addr.eq(place),
            weight_read.en.eq(enters & advance),
            element_read.addr.eq(place >> part_bits),
            element_read.en.eq(enters & advance),
            scale_read.addr.eq(place >> word_bits),
            queue.valid.eq(pipeline.valid(enters, cycles=self._entry + Residual.latency)),
        ]
        x = register(weight_read.data, "x")
        word = Signal(8 * p.rows)
        m.d.comb += word.eq(element_read.data)
        part = register(place[:part_bits], "part")
        size = 8 * p.x_lanes
        q = register(choose([word[k * size : (k + 1) * size] for k in range(1 << part_bits)], part), "q")
        scale = register(scale_read.data, "scale", cycles=self._entry)
        for lane in range(p.x_lanes):
            m.submodules[f"residual_{lane}"] = EnableInserter(advance)(residual := Residual())
            m.d.comb += [
                residual.x.eq(x[16 * lane : 16 * lane + 16]),
                residual.scale.eq(scale),
                residual.q.eq(q[8 * lane : 8 * lane + 8].as_signed()),
                queue.payload.data[lane].eq(residual.r),
            ]
        return m
