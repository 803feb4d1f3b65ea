"""Outputs of attention from the sums of its parts: coded values, INT8 rows, and the sum of all weights."""

from collections.abc import Sequence

from amaranth.hdl import Cat, Const, EnableInserter, Module, Mux, Signal, Value
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_shape import WEIGHT_BITS, CacheShape
from kvant.hw.attention.floating import FloatFromInteger, FloatProduct, fp16_to_fp32
from kvant.hw.attention.int8_rows import default_rows, row_sums
from kvant.hw.attention.layouts import SHIFT_BITS, read_output
from kvant.hw.numeric.floating import FP32_BIAS, FP32_MANTISSA, FloatAdder, Pipeline, add_with_carry
from kvant.hw.numeric.output_queue import OutputQueue
from kvant.hw.parameters import check_integer


def denominator_width(p: CacheShape) -> int:
    """Bits of the sum of the weights of all keys of a query."""
    return (((1 << WEIGHT_BITS) - 1) * (p.tokens + default_rows(p))).bit_length()


def choose(values: Sequence[Value], index: Value) -> Value:
    """The value with the number *index*, its lower bits if there are more, by a tree of multiplexers."""
    bits = min((len(values) - 1).bit_length(), len(index))  # values that no index has are left out
    values = values[: 1 << bits]
    values = [*values, *[values[-1]] * ((1 << bits) - len(values))]
    for k in range(bits):
        values = [Mux(index[k], high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


class NormalizeJob(data.StructLayout):
    """What is to be put together for `count` queries.

    has_coded, has_rows
        Which parts there are.
    codebook_scale
        fp16, of the values' codebook.
    shift
        Of the bins of each query.
    denominator
        Sum of all weights of each query; 0 for a query without keys.
    """

    def __init__(self, p: CacheShape):
        super().__init__(
            {
                "count": range(p.q_parallel + 1),
                "has_coded": 1,
                "has_rows": 1,
                "codebook_scale": 16,
                "shift": data.ArrayLayout(SHIFT_BITS, p.q_parallel),
                "denominator": data.ArrayLayout(denominator_width(p), p.q_parallel),
            }
        )


class Reciprocal(wiring.Component):
    """``fp32(1 / denominator)``, the exact quotient rounded once; 0 for 0. One at a time, a bit per cycle.

    A quotient that ends is a power of two, and every other one is no tie between two fp32 numbers: one bit behind the
    last decides.

    Parameters
    ----------
    width : int
        Bits of the denominator, 2 .. 96.

    Attributes
    ----------
    most_cycles : int
        Cycles from `start` to `done` at most.

    Members
    -------
    start : in
        Takes the denominator; not while a division runs.
    denominator : in
    done : out
        The result is there, in this cycle alone.
    y : out
        fp32; stays until the next start.
    """

    _DIGITS = FP32_MANTISSA + 2
    _STRIDE = 8

    def __init__(self, width: int):
        self.width = check_integer("width", width, 2, 96)
        self.most_cycles = 1 + width // self._STRIDE + self._STRIDE + self._DIGITS + 1
        super().__init__({"start": In(1), "denominator": In(width), "done": Out(1), "y": Out(32)})

    def elaborate(self, platform):
        m = Module()
        width, stride = self.width, min(self._STRIDE, self.width)
        divisor = Signal(width, reset_less=True)
        remainder = Signal(width, reset_less=True)
        quotient = Signal(self._DIGITS, reset_less=True)
        exponent = Signal(8, reset_less=True)
        digits = Signal(range(self._DIGITS + 1), reset_less=True)

        # A divisor at the top of its bits; the dividend is a power of two. A digit per cycle, without restoring the
        # remainder where it is not taken.
        doubled = Cat(Const(0, 1), remainder)
        trial = Signal(width + 2)
        m.d.comb += trial.eq(add_with_carry(doubled, ~Cat(divisor, Const(0, 1)), Const(1, 1)))
        fits = trial[width + 1]
        m.d.sync += self.done.eq(0)
        with m.FSM():
            with m.State("IDLE"):
                with m.If(self.start):
                    m.d.sync += [divisor.eq(self.denominator), exponent.eq((FP32_BIAS - width) % 256)]
                    with m.If(self.denominator.any()):
                        m.next = "SHIFT"
                    with m.Else():
                        m.d.sync += [self.y.eq(0), self.done.eq(1)]
            with m.State("SHIFT"):
                m.d.sync += [remainder.eq(1 << width >> 2), digits.eq(self._DIGITS)]
                with m.If(~divisor[-stride:].any()):
                    m.d.sync += [divisor.eq(divisor << stride), exponent.eq(exponent + stride)]
                with m.Elif(~divisor[-1]):
                    m.d.sync += [divisor.eq(divisor << 1), exponent.eq(exponent + 1)]
                with m.Else():
                    m.next = "DIVIDE"
            with m.State("DIVIDE"):
                m.d.sync += [
                    remainder.eq(Mux(fits, trial, doubled)),
                    quotient.eq(Cat(fits, quotient)),
                    digits.eq(digits - 1),
                ]
                with m.If(digits == 1):
                    m.next = "ROUND"
            with m.State("ROUND"):
                # Its first digit is that of a power of two alone.
                fraction = quotient[1:FP32_MANTISSA]
                number = Cat(fraction, (exponent + quotient[-1])[:8])
                m.d.sync += [self.y.eq((number + quotient[0])[:31]), self.done.eq(1)]
                m.next = "IDLE"
        return m


class Normalizer(wiring.Component):
    """``out[j] = fp32(fp32(coded[j] + rows[j]) * inv)``, with ``coded[j] = fp32(trunc(R[j]) * s_cb) * 2^shift``,
    ``rows[j]`` the nearest fp32 number of a sum of INT8 rows, and ``inv = fp32(1 / denominator)``.

    ::

        coded ──┬──> FloatFromInteger ──> FloatAdder ──> FloatProduct ──┬──> out
        rows ───┘                            ^               ^          │
                                             │               └── s_cb or inv
                                             └──────── sums (memory) <──┘

    One pipeline, an element per cycle, works twice. First the coded values of all queries go through it, 0 is added,
    and the products with the scale wait in the memory; meanwhile the reciprocals are made. Then the elements of the
    rows go through it in the order of the output. ``trunc`` keeps 24 significant bits.

    Parameters
    ----------
    p : CacheShape

    Attributes
    ----------
    latency : int
        Cycles from an element's entry to its transfer on `out`, if nothing is before it.

    Members
    -------
    job : in stream
        `NormalizeJob`.
    coded : in stream
        `kvant.hw.attention.layouts.read_output`, of a job with `has_coded`: every slice of every query, in any order;
        `last` with the last one.
    rows : in stream
        `kvant.hw.attention.int8_rows.row_sums`, of a job with `has_rows`: for each query, each transfer of a row. Taken
        when the coded values are through.
    out : out stream
        data : 32
            fp32; for each query, each of `head_dim` elements.
        empty : 1
            The query has no keys; data is 0.
        last : 1
            Last element of the query.

    Raises
    ------
    ParameterError
        See `CacheShape.check_pq`.
    """

    def __init__(self, p: CacheShape):
        self.p = p.check_pq()
        self._coded, self._rows = read_output(p), row_sums(p)
        width = max(layout["data"].shape.elem_shape.width for layout in (self._coded, self._rows))
        self._convert = FloatFromInteger(width, self._rows["exponent"].shape)
        # An element enters in cycle 0; cycles of its number, its sum, and its product.
        self._number_cycle = 2 + self._convert.latency
        self._sum_cycle = self._number_cycle + FloatAdder.latency + 1
        self._product_cycle = self._sum_cycle + FloatProduct.latency
        self.latency = self._product_cycle + 1
        result = data.StructLayout({"data": 32, "empty": 1, "last": 1})
        super().__init__(
            {
                "job": In(stream.Signature(NormalizeJob(p))),
                "coded": In(stream.Signature(self._coded)),
                "rows": In(stream.Signature(self._rows)),
                "out": Out(stream.Signature(result)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        p, queries, d = self.p, self.p.q_parallel, self.p.head_dim
        m.submodules.queue = queue = OutputQueue(self.out.payload.shape())
        wiring.connect(m, queue.o, wiring.flipped(self.out))
        advance = queue.advance
        pipeline = Pipeline(m, enable=advance)
        register = pipeline.register

        # A job. Its denominators leave one by one, for the reciprocals in the order of the queries.
        job = Signal(NormalizeJob(p), reset_less=True)
        scale = Signal(32, reset_less=True)
        take = Signal()
        ready = Signal()
        m.d.comb += [self.job.ready.eq(ready), take.eq(self.job.valid & ready)]
        m.d.sync += scale.eq(fp16_to_fp32(m, job.codebook_scale))
        width = denominator_width(p)
        m.submodules.reciprocal = reciprocal = Reciprocal(width)
        # Written before the first element of the output enters, read for those alone.
        vector_bits = (queries - 1).bit_length()
        m.submodules.inverses = inverses = memory.Memory(
            shape=32, depth=1 << max(1, vector_bits), init=[], attrs={"no_rw_check": 1}
        )
        inverse_write, inverse_read = inverses.write_port(), inverses.read_port()
        inverted = Signal(range(queries + 1))
        begin = Signal()  # a reciprocal, if there is one more
        m.d.comb += [
            reciprocal.start.eq(begin & (inverted != job.count)),
            reciprocal.denominator.eq(job.denominator[0]),
            inverse_write.addr.eq(inverted[: len(inverse_write.addr)]),
            inverse_write.data.eq(reciprocal.y),
            inverse_write.en.eq(reciprocal.done),
        ]
        m.d.sync += begin.eq(take | reciprocal.done)
        with m.If(take):
            m.d.sync += [job.eq(self.job.payload), inverted.eq(0)]
        with m.Else():
            with m.If(begin):
                m.d.sync += job.denominator.eq(job.denominator.as_value() >> width)
            with m.If(reciprocal.done):
                m.d.sync += inverted.eq(inverted + 1)

        # Elements of coded values enter in the first phase, those of the output in the second.
        coded, rows = self.coded.payload, self.rows.payload
        coded_enters, output_enters, outputs = Signal(), Signal(), Signal()
        lane = Signal(range(max(2, p.slice_bytes)))
        element, vector = Signal(range(max(2, d))), Signal(range(max(2, queries)))
        slice_ends, row_ends, query_ends = lane == p.slice_bytes - 1, Signal(), element == d - 1
        lane_bits = (p.lanes - 1).bit_length()
        m.d.comb += row_ends.eq(query_ends | element[:lane_bits].all())
        coded_last, output_last = coded.last & slice_ends, query_ends & (vector == (job.count - 1)[: len(vector)])
        m.d.comb += [
            self.coded.ready.eq(coded_enters & slice_ends),
            self.rows.ready.eq(output_enters & job.has_rows & row_ends),
        ]
        with m.If(coded_enters):
            m.d.sync += lane.eq(Mux(slice_ends, 0, lane + 1))
        with m.If(output_enters):
            m.d.sync += element.eq(Mux(query_ends, 0, element + 1))
            with m.If(query_ends):
                m.d.sync += vector.eq(Mux(output_last, 0, vector + 1))
        coded_number = choose([coded.data[k] for k in range(p.slice_bytes)], lane)
        row_number = choose([rows.data[k] for k in range(p.lanes)], element)
        shift = choose([job.shift[k] for k in range(queries)], coded.vector)
        # Cycle 0: the element of either part. Cycle 1: that of the part whose turn it is.
        outputs_1 = register(outputs, "outputs")
        coded_number = register(coded_number, "coded_number")
        row_number = register(Mux(job.has_rows, row_number, 0), "row_number")
        number = Signal(self._convert.number.shape())
        m.d.comb += number.eq(Mux(outputs_1, row_number, coded_number))
        element_bits = (d - 1).bit_length()
        coded_element = Cat(lane[: (p.slice_bytes - 1).bit_length()], coded.slice)[:element_bits]
        address = Cat(
            Mux(outputs, element, coded_element)[:element_bits], Mux(outputs, vector, coded.vector)[:vector_bits]
        )
        addresses = [address]
        for _ in range(self._product_cycle):
            addresses.append(register(addresses[-1], "address"))

        # Numbers.
        convert = self._convert
        m.submodules.convert = EnableInserter(advance)(convert)
        m.d.comb += [
            convert.number.eq(register(number, "number")),
            convert.exponent.eq(register(Mux(outputs, rows.exponent, shift), "exponent", cycles=2)),
            convert.truncate.eq(~register(outputs_1, "outputs")),
        ]

        # Sums with what waits in the memory. It is written in the first phase and read in the second.
        m.submodules.sums = sums = memory.Memory(
            shape=32, depth=max(2, ((queries - 1) << element_bits) + d), init=[], attrs={"no_rw_check": 1}
        )
        sums_write, sums_read = sums.write_port(), sums.read_port()
        look = self._number_cycle - 2
        m.submodules.adder = EnableInserter(advance)(adder := FloatAdder())
        waiting = register(outputs_1, "outputs", cycles=look) & job.has_coded
        m.d.comb += [
            sums_read.addr.eq(addresses[look]),
            sums_read.en.eq(advance & pipeline.valid(output_enters, cycles=look)),
            adder.a.eq(convert.y),
            adder.b.eq(register(Mux(waiting, sums_read.data, 0), "waiting")),
        ]

        # Products with scale or reciprocal.
        look = self._sum_cycle - 2
        m.submodules.product = EnableInserter(advance)(product := FloatProduct())
        inverse = register(outputs_1, "outputs", cycles=look)
        factor = register(Mux(inverse, inverse_read.data, scale), "factor")
        m.d.comb += [
            inverse_read.addr.eq(addresses[look][element_bits:]),
            inverse_read.en.eq(advance & pipeline.valid(output_enters, cycles=look)),
            product.a.eq(register(adder.y, "sum")),
            product.b.eq(factor),
            sums_write.addr.eq(addresses[-1]),
            sums_write.data.eq(product.p),
            sums_write.en.eq(advance & pipeline.valid(coded_enters, cycles=self._product_cycle)),
            queue.valid.eq(pipeline.valid(output_enters, cycles=self._product_cycle)),
            queue.payload.data.eq(product.p),
            queue.payload.empty.eq(register(~factor[23:31].any(), "empty", cycles=FloatProduct.latency)),
            queue.payload.last.eq(register(query_ends, "last", cycles=self._product_cycle)),
        ]

        left = advance & pipeline.valid(
            (coded_enters & coded_last) | (output_enters & output_last), cycles=self._product_cycle
        )
        with m.FSM():
            with m.State("JOB"):
                m.d.sync += ready.eq(~take)
                with m.If(take):
                    m.next = "CHOOSE"
            with m.State("CHOOSE"):
                with m.If(job.has_coded):
                    m.next = "CODED"
                with m.Else():
                    m.next = "RECIPROCALS"
            with m.State("CODED"):
                m.d.comb += coded_enters.eq(advance & self.coded.valid)
                with m.If(coded_enters & coded_last):
                    m.next = "CODED LEAVE"
            with m.State("CODED LEAVE"):
                with m.If(left):
                    m.next = "RECIPROCALS"
            with m.State("RECIPROCALS"):
                with m.If(inverted == job.count):
                    m.next = "OUTPUT"
            with m.State("OUTPUT"):
                m.d.comb += [outputs.eq(1), output_enters.eq(advance & (self.rows.valid | ~job.has_rows))]
                with m.If(output_enters & output_last):
                    m.next = "OUTPUT LEAVES"
            with m.State("OUTPUT LEAVES"):
                with m.If(left):
                    m.next = "JOB"
        return m
