"""Group accumulation: integer group sums become scaled fp32 products and add up over the groups of an output."""

from amaranth.hdl import Cat, Module, Mux, Signal, signed
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.layouts import GroupSum, Output
from kvant.hw.linear.parameters import INT8_LIMIT, MAGNITUDE_LIMIT, LinearParameters, signed_width
from kvant.hw.numeric.codes import decode_coefficient
from kvant.hw.numeric.floating import FloatAdder, Pipeline, ScaledProduct


class GroupResult(wiring.Component):
    """The integer result of a group from its two partial sums, as its coefficient byte says.

    ::

        coefficient 0 .. max_coefficient    r = coefficient * psum1 + psum2
                    254 (INT8 group)        r = psum1 + psum2
                    255 (linear)            r = psum1
                    any other               r = 0

    A group whose weight scale is infinite, not a number or negative counts 0 as well. (-0 is a zero.)

    Attributes
    ----------
    latency : int
        Cycles from the sums to r. One result per cycle.

    Members
    -------
    valid : in
        The other inputs are a group's.
    psum1, psum2, coefficient, w_scale : in
        As in `GroupSum`. ``|r|`` must not exceed ``p.result_limit``, which sums of a group never do.
    r : out, signed
        Exact result, `p.result_width` bits.
    error : out
        High for one cycle when a group's coefficient or scale is not legal, one cycle after its `valid`.
    """

    latency = 3

    def __init__(self, p: LinearParameters):
        self.p = p
        super().__init__(
            {
                "valid": In(1),
                "psum1": In(signed(p.psum1_width)),
                "psum2": In(signed(p.psum2_width)),
                "coefficient": In(8),
                "w_scale": In(16),
                "r": Out(signed(p.result_width)),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        register = Pipeline(m).register

        # Cycle 0: what the coefficient asks for.
        kind = decode_coefficient(self.coefficient, max_coefficient=p.max_coefficient, int8_groups=p.int8_groups)
        mant, linear, int8, scale_legal = Signal(), Signal(), Signal(), Signal()
        m.d.comb += [
            mant.eq(kind.mant),
            linear.eq(kind.linear),
            int8.eq(kind.int8),
            scale_legal.eq(~self.w_scale[10:15].all() & (~self.w_scale[15] | ~self.w_scale[:15].any())),
        ]
        m.d.sync += self.error.eq(self.valid & ~(scale_legal & (mant | linear | int8)))
        coefficient = register(Mux(scale_legal & mant, self.coefficient, 0)[:7], "coefficient")
        with_psum1 = register(scale_legal & (linear | int8), "with_psum1")
        with_psum2 = register(scale_legal & (mant | int8), "with_psum2")
        psum1 = register(self.psum1, "psum1")
        psum2 = register(self.psum2, "psum2")

        # Cycle 1: one multiplier, which the sums of INT8 digits, wider than those of codes, pass by.
        code_sum = Signal(signed(signed_width(INT8_LIMIT * MAGNITUDE_LIMIT * p.group)))
        addend = Signal(signed(p.result_width))
        m.d.comb += [
            code_sum.eq(psum1),
            addend.eq(Mux(with_psum1, psum1, 0) + Mux(with_psum2, psum2, 0)),
        ]
        product = register(coefficient * code_sum, "product")
        addend = register(addend, "addend")

        # Cycle 2.
        r = Signal(signed(p.result_width))
        m.d.comb += r.eq(product + addend)
        m.d.comb += self.r.eq(register(r, "r"))
        return m


class GroupAccumulator(wiring.Component):
    """fp32 outputs of `unit_cols` columns: ``y <- fp32(y + fp32(r * x_scale * w_scale))`` over the groups.

    ::

        i ──> GroupResult ──> ScaledProduct ──────────────┐
          │                                               v
          └──────────────> accumulator memory ──(y)──> FloatAdder ──┬──> o
                                   ^                                │
                                   └────────────────────────────────┘

    Fully pipelined: one group sum per cycle, no flow control. An accumulator's sum is written `loop_latency - 1`
    cycles after it is read, so the next group of the same output may come `loop_latency` cycles after the last one
    and no sooner; other outputs fill the cycles between. When this is kept, no word is read and written in one
    cycle. Memory: ``accumulators * unit_cols`` words of 32 bits (each accumulator's columns rounded up to a power of
    two), one synchronous read and one write port, never cleared: an output's first group ignores what it holds.

    Parameters
    ----------
    p : LinearParameters

    Attributes
    ----------
    latency : int
        Cycles from a last group's `i.valid` to `o.valid`.
    loop_latency : int
        Fewest cycles between two group sums of one column and address.

    Members
    -------
    i : in
        Group sums.
    o : out
        Sums of outputs whose last group came in.
    error : out
        High for one cycle for each group with a reserved coefficient byte (128 .. 253), one above `max_coefficient`,
        an INT8 group the datapath is not built for, or a weight scale that is negative, infinite or not a number.
        The group counts 0.
    """

    # The memory answers one cycle after it is asked and its word is registered, since block RAM is slow.
    READ_CYCLES = 2
    loop_latency = READ_CYCLES + FloatAdder.latency + 1
    latency = GroupResult.latency + ScaledProduct.latency + FloatAdder.latency + 1

    def __init__(self, p: LinearParameters):
        self.p = p
        super().__init__({"i": In(GroupSum(p)), "o": Out(Output(p)), "error": Out(1)})

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.result = result = GroupResult(p)
        m.submodules.product = product = ScaledProduct(p.result_width)
        m.submodules.adder = adder = FloatAdder()
        column_bits = (p.unit_cols - 1).bit_length()
        m.submodules.sums = sums = memory.Memory(
            shape=32, depth=((p.accumulators - 1) << column_bits) + p.unit_cols, init=[], attrs={"no_rw_check": 1}
        )
        register = Pipeline(m).register
        i = self.i
        m.d.comb += [
            result.valid.eq(i.valid),
            result.psum1.eq(i.psum1),
            result.psum2.eq(i.psum2),
            result.coefficient.eq(i.coefficient),
            result.w_scale.eq(i.w_scale),
            self.error.eq(result.error),
            product.r.eq(result.r),
            product.x_scale.eq(register(i.x_scale, "x_scale", cycles=result.latency)),
            product.w_scale.eq(register(i.w_scale, "w_scale", cycles=result.latency)),
        ]

        def valid_after(valid, cycles):
            for _ in range(cycles):
                delayed = Signal(name="valid")
                m.d.sync += delayed.eq(valid)
                valid = delayed
            return valid

        # Read, so that the sum so far meets the product at the adder.
        meet = result.latency + product.latency
        before = meet - self.READ_CYCLES
        valid = valid_after(i.valid, before)
        address = register(i.address, "address", cycles=before)
        column = register(i.column, "column", cycles=before)
        first_group = register(i.first_group, "first_group", cycles=before + 1)
        last_group = register(i.last_group, "last_group", cycles=meet + adder.latency)
        read, write = sums.read_port(), sums.write_port()
        m.d.comb += [
            read.addr.eq(Cat(column[:column_bits], address)),
            read.en.eq(valid),
            adder.a.eq(register(Mux(first_group, 0, read.data), "sum")),
            adder.b.eq(product.p),
        ]

        # Write, and send a finished sum out.
        after = self.READ_CYCLES + adder.latency
        valid = valid_after(valid, after)
        address = register(address, "address", cycles=after)
        column = register(column, "column", cycles=after)
        m.d.comb += [
            write.addr.eq(Cat(column[:column_bits], address)),
            write.data.eq(adder.y),
            write.en.eq(valid),
            self.o.y.eq(register(adder.y, "y")),
            self.o.column.eq(register(column, "column")),
            self.o.address.eq(register(address, "address")),
            self.o.valid.eq(valid_after(valid & last_group, 1)),
        ]
        return m
