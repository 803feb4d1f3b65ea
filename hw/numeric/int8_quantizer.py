"""Quantisation of fp16 streams to INT8 groups: ``scale = fp16(absmax / 127)``, ``q = rne(127 * x / absmax)``, exact.

Inside, a finite fp16 magnitude is held as `Magnitude`, whose value is ``mantissa * 2**(exponent - 25)``.
"""

from amaranth.hdl import Cat, Const, EnableInserter, Module, Mux, Shape, Signal, Value, signed
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.numeric.division import divide_steps, has_rest
from kvant.hw.numeric.floating import FP16_MANTISSA, Pipeline, shift_right_sticky
from kvant.hw.numeric.output_queue import OutputQueue
from kvant.hw.parameters import check_integer

FP16_MAX = 0x7BFF
"""Magnitude of 65504, the largest finite fp16 number."""


class Magnitude(data.StructLayout):
    """Magnitude of a finite fp16 number; all its bits read as one integer order magnitudes.

    Members
    -------
    mantissa : 11
        Fraction and, above it, the hidden bit: 1 for a normal number, 0 for a subnormal one or 0.
    exponent : 5
        1 .. 30, that of a subnormal being 1.
    """

    def __init__(self):
        super().__init__({"mantissa": FP16_MANTISSA, "exponent": 5})


def unpack(magnitude: Value) -> data.View:
    """`Magnitude` of 15 bits of a finite fp16 number."""
    normal = magnitude[10:15].any()
    return data.View(Magnitude(), Cat(magnitude[:10], normal, magnitude[10] | ~normal, magnitude[11:15]))


class Int8Scale(wiring.Component):
    """``fp16(absmax / 127)``, the exact quotient rounded once, subnormal results included.

    With ``mantissa = 127*a + b`` the quotient is ``a + b/127``, and ``b/127`` in binary is the seven bits of b
    repeated for ever. So the quotient's digits are a, b, b, ... and only need to be cut off at the right place. The
    rest is never exactly a half: b would have to be 0, and then there is no rest.

    Attributes
    ----------
    latency : int
        Cycles from absmax to scale.

    Members
    -------
    absmax : in
        A `Magnitude`.
    scale : out
        fp16, never negative. 0 for absmax up to 63 units of the last place of a subnormal.
    """

    latency = 2

    def __init__(self):
        super().__init__({"absmax": In(Magnitude()), "scale": Out(16)})

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register

        # Cycle 0: quotient a and remainder b of the mantissa, which is 128 * high + low = 127 * high + (high + low).
        low, high = self.absmax.mantissa[:7], self.absmax.mantissa[7:]
        rest = (low + high)[:8]
        rest_plus_1 = (rest + 1)[:8]
        carry = rest_plus_1[7]  # rest >= 127
        a = register((high + carry)[:5], "a")
        b = register(Mux(carry, rest_plus_1[:7], rest[:7]), "b")
        exponent = register(self.absmax.exponent, "exponent")

        # Cycle 1: a normal result takes 11 digits from the first one of a on, the fourth (a < 16) or the fifth; a
        # subnormal one ends at the place of weight 2**-24, fewer digits further down.
        places = Mux(a[4], 6, 7)  # of b, in a normal result
        normal = exponent > places
        kept = Mux(normal, places, exponent - 1)[:3]
        digits = (Cat(b[6], b, a) >> ~kept)[:12]  # one digit more than kept; ~kept = 7 - kept
        scale = Cat(digits[1:11], Mux(normal, exponent - places, 0)[:5]) + digits[0]
        m.d.comb += self.scale.eq(register(scale[:16], "scale"))
        return m


class Int8Ratio(wiring.Component):
    """One lane of the quantiser: ``rne(127 * x / absmax)`` of fp16 numbers, exact, by division without restoring.

    With mantissas X, A and the difference d of the exponents the quotient is ``127*X/A * 2**-d``. Division gives
    eight digits of ``254*X/A`` (d = 0) or ``127*X/A`` (else), both below 256, and whether there is a remainder; a
    shift by ``d - 1`` follows, and rounding of what is then an integer, a half and a rest.

    Attributes
    ----------
    latency : int
        Cycles from x to q, which leaves the rounding logic without a register behind it.

    Members
    -------
    x : in
        Finite fp16 number, in cycle 0.
    exponent : in
        Exponent of absmax, in cycle 2. ``|x| <= absmax``.
    mantissas : in
        Mantissa of absmax in cycles 3 to 7, as a shared pipeline holds it: element k is read in cycle 3 + k.
    nonzero : in
        The group's scale is not zero, in cycle 8; otherwise q is 0.
    q : out, signed
        -127 .. 127, in cycle 8.
    """

    STEPS = 8
    STEPS_PER_CYCLE = 2
    DIVISION_CYCLES = STEPS // STEPS_PER_CYCLE
    latency = 4 + DIVISION_CYCLES

    def __init__(self):
        super().__init__(
            {
                "x": In(16),
                "exponent": In(5),
                "mantissas": In(FP16_MANTISSA).array(self.DIVISION_CYCLES + 1),
                "nonzero": In(1),
                "q": Out(signed(8)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register

        # Cycle 1: 127 times the mantissa.
        x = register(self.x, "x")
        magnitude = unpack(x[:15])
        exponent = register(magnitude.exponent, "exponent")
        dividend = register((Cat(Const(0, 7), magnitude.mantissa) - magnitude.mantissa)[:18], "dividend")
        sign = register(x[15], "sign", cycles=self.latency - 1)

        # Cycle 2: dividend and later shift. A shift by 8 or more (of eight digits) leaves less than a half: q = 0.
        same = Signal()
        further = Signal(5)  # d - 1, unless the exponents are the same
        m.d.comb += [
            same.eq(self.exponent == exponent),
            further.eq(self.exponent + ~exponent),
        ]
        shift = Mux(same, 0, Cat(further[:3], further[3:].any()))
        shift = register(shift, "shift", cycles=self.DIVISION_CYCLES + 1)
        dividend = Mux(same, Cat(Const(0, 1), dividend), dividend)
        remainder = register(Cat(dividend[self.STEPS :], Const(0, 1)), "remainder")  # in two's complement
        digits = register(dividend[: self.STEPS], "digits")  # of the dividend; the signs follow

        # Cycles 3 to 6: divide.
        for cycle in range(self.DIVISION_CYCLES):
            remainder, digits = divide_steps(m, remainder, digits, self.mantissas[cycle], self.STEPS_PER_CYCLE)
            remainder, digits = register(remainder, "remainder"), register(digits, "digits")

        # Cycle 7: shift.
        inexact = has_rest(remainder, self.mantissas[self.DIVISION_CYCLES])
        shifted, lost = shift_right_sticky(m, ~digits, shift)
        shifted, rest = register(shifted, "shifted"), register(inexact | lost, "rest")

        # Cycle 8: ties to even; -(k + 1) = ~k.
        half, whole = shifted[0], shifted[1:]
        increment = half & (rest | whole[0])
        q = Cat(whole, Const(0, 1)) ^ sign.replicate(8)
        m.d.comb += self.q.eq(((q + (increment ^ sign))[:8] & self.nonzero.replicate(8)).as_signed())
        return m


class GroupDivider(wiring.Component):
    """Divides transfers of a group by the group's largest magnitude: a plain pipeline, stalled from outside.

    Attributes
    ----------
    latency : int
        Cycles from x to q, which leaves its logic without a register behind it.
    absmax_delay : int
        Cycles after x in which absmax is read.

    Members
    -------
    x, last : in
        Finite fp16 numbers of one group, and a flag that travels along, in cycle 0.
    absmax, nonfinite : in
        The group's largest magnitude, and a flag that travels along, in cycle `absmax_delay`.
    q, scale, o_last, o_nonfinite : out
        In cycle `latency`.
    """

    absmax_delay = 2
    latency = 1 + Int8Ratio.latency

    def __init__(self, lanes: int):
        self.lanes = lanes
        super().__init__(
            {
                "x": In(data.ArrayLayout(16, lanes)),
                "last": In(1),
                "absmax": In(Magnitude()),
                "nonfinite": In(1),
                "q": Out(data.ArrayLayout(signed(8), lanes)),
                "scale": Out(16),
                "o_last": Out(1),
                "o_nonfinite": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register
        m.submodules.scale = scale = Int8Scale()
        # x and absmax come from memories whose answer is slow: both are registered before anything else.
        x = register(self.x.as_value(), "x")
        absmax = data.View(Magnitude(), register(self.absmax.as_value(), "absmax"))  # cycle 3, a lane's cycle 2
        mantissa, mantissas = absmax.mantissa, []
        for _ in range(Int8Ratio.DIVISION_CYCLES + 1):
            mantissa = register(mantissa, "mantissa")
            mantissas.append(mantissa)
        m.d.comb += scale.absmax.eq(absmax)
        waits = self.latency - (self.absmax_delay + 1) - scale.latency
        early_scale = register(scale.scale, "scale", cycles=waits - 1)
        m.d.comb += self.scale.eq(register(early_scale, "scale"))
        nonzero = register(early_scale.any(), "nonzero")
        m.d.comb += [
            self.o_last.eq(register(self.last, "last", cycles=self.latency)),
            self.o_nonfinite.eq(register(self.nonfinite, "nonfinite", cycles=self.latency - self.absmax_delay)),
        ]
        for lane in range(self.lanes):
            ratio = Int8Ratio()
            m.submodules[f"ratio_{lane}"] = ratio
            m.d.comb += [
                ratio.x.eq(x.word_select(lane, 16)),
                ratio.exponent.eq(absmax.exponent),
                ratio.nonzero.eq(nonzero),
                self.q[lane].eq(ratio.q),
                *(port.eq(held) for port, held in zip(ratio.mantissas, mantissas, strict=True)),
            ]
        return m


class GroupMaximum(wiring.Component):
    """Largest magnitude and non-finite flag of each group of a stream of transfers, by a tree of comparisons.

    Attributes
    ----------
    latency : int
        Cycles from a group's last transfer to its maximum, which leaves its logic without a register behind it.

    Members
    -------
    valid, last : in
        A transfer, the last one of its group.
    magnitudes : in
        Finite fp16 magnitudes, 0 in lanes without an element.
    nonfinite : in
        The transfer had an element that was not finite.
    tag : in
        Travels along.
    o_valid, o_tag, absmax, o_nonfinite : out
        A group's maximum, a `Magnitude`, with the tag of its last transfer.
    """

    @staticmethod
    def cycles(lanes: int) -> int:
        """The latency for *lanes* elements per transfer: one level of the tree per cycle but for the last one."""
        return max(0, (lanes - 1).bit_length() - 1)

    def __init__(self, lanes: int, tag_shape: Shape):
        self.lanes = lanes
        self.latency = self.cycles(lanes)
        super().__init__(
            {
                "valid": In(1),
                "last": In(1),
                "magnitudes": In(data.ArrayLayout(15, lanes)),
                "nonfinite": In(1),
                "tag": In(tag_shape),
                "o_valid": Out(1),
                "o_tag": Out(tag_shape),
                "absmax": Out(Magnitude()),
                "o_nonfinite": Out(1),
            }
        )

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register

        def larger(a, b):
            result = Signal(Magnitude().size, name="larger")
            m.d.comb += result.eq(Mux(a < b, b, a))
            return result

        def level(values):
            pairs = [larger(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
            return pairs + values[2 * len(pairs) :]

        values = [unpack(self.magnitudes[lane]).as_value() for lane in range(self.lanes)]
        valid = self.valid
        for _ in range(self.latency):
            values = [register(value, "maximum") for value in level(values)]
            held = Signal(name="valid")
            m.d.sync += held.eq(valid)
            valid = held
        last = register(self.last, "last", cycles=self.latency)
        nonfinite = register(self.nonfinite, "nonfinite", cycles=self.latency)
        tag = register(self.tag, "tag", cycles=self.latency)

        # One or two values are left to compare with the largest of the group so far, which is 0 between groups. Three
        # comparisons side by side are faster than two behind each other.
        running = Signal(Magnitude().size)
        running_nonfinite = Signal()
        one, *other = values
        absmax = larger(running, one)
        if other:
            absmax = Mux(one < other[0], larger(running, other[0]), absmax)
        m.d.comb += [
            self.absmax.eq(absmax),
            self.o_nonfinite.eq(running_nonfinite | nonfinite),
            self.o_valid.eq(valid & last),
            self.o_tag.eq(tag),
        ]
        with m.If(valid):
            m.d.sync += [
                running.eq(Mux(last, 0, self.absmax)),
                running_nonfinite.eq(self.o_nonfinite & ~last),
            ]
        return m


def quantizer_input(lanes: int) -> data.StructLayout:
    """Payload of the quantiser's fp16 port; see `Int8Quantizer`."""
    return data.StructLayout({"data": data.ArrayLayout(16, lanes), "keep": range(lanes + 1), "last": 1})


def quantizer_output(lanes: int) -> data.StructLayout:
    """Payload of the quantiser's INT8 port; see `Int8Quantizer`."""
    return data.StructLayout({"q": data.ArrayLayout(signed(8), lanes), "scale": 16, "last": 1, "nonfinite": 1})


class Int8Quantizer(wiring.Component):
    """Quantises groups of fp16 numbers to INT8 with one fp16 scale per group.

    ``scale = fp16(absmax / 127)`` and ``q = rne(127 * x / absmax)``, both exact; ``q`` is -127 .. 127. If absmax is 0
    or the scale rounds to 0, all of the group is 0. NaN counts as 0 and an infinity as 65504 of its sign; either sets
    the group's `nonfinite`.

    ::

        i ──> port rule ──┬──> words (memory) ──────────────> GroupDivider ──> queue of two ──> o
                          │                                        ^
                          └──> GroupMaximum ──> maxima (memory) ───┘

    A group waits in memory until its maximum is known and is divided while the next ones arrive: `lanes` elements per
    cycle, groups of any lengths behind each other without a bubble.

    Parameters
    ----------
    lanes : int
        Elements per transfer, at least 1.
    group : int
        Most elements of a group, at least 1.

    Attributes
    ----------
    latency : int
        Cycles from the transfer that ends a group to the group's first result, when nothing is before it.
    depth : int
        Transfers that wait inside at most, not counting those in the division pipeline.

    Members
    -------
    i : in stream
        data : lanes * 16
            fp16 elements, the earlier one in the lower lane.
        keep : 1 .. lanes
            How many lanes from lane 0 on hold elements: all, except in a group's last transfer.
        last : 1
            Last transfer of the group. A group has at most `group` elements.
    o : out stream
        q : lanes * signed(8)
            Quantised elements, one transfer for each of the input; 0 in lanes without an element.
        scale : 16
            fp16 scale of the group.
        last : 1
            Last transfer of the group.
        nonfinite : 1
            The group had a NaN or an infinity.

    Raises
    ------
    ParameterError
        When *lanes* or *group* is not a positive integer.
    """

    def __init__(self, lanes: int, group: int):
        self.lanes = check_integer("lanes", lanes, 1)
        self.group = check_integer("group", group, 1)
        # A word keeps its place while the rest of its group arrives, `GroupMaximum` works, and for four cycles more,
        # until its maximum is read; with the next power of two there is always room while results are taken.
        longest_stay = -(-group // lanes) + GroupMaximum.cycles(lanes) + 4
        self._address_bits = (longest_stay - 1).bit_length()
        self.depth = 1 << self._address_bits
        self._maximum = GroupMaximum(lanes, Shape(self._address_bits))
        self.latency = self.latency_of(lanes)
        super().__init__(
            {
                "i": In(stream.Signature(quantizer_input(lanes))),
                "o": Out(stream.Signature(quantizer_output(lanes))),
            }
        )

    @staticmethod
    def latency_of(lanes: int) -> int:
        """The latency of a quantiser of so many lanes."""
        return 1 + GroupMaximum.cycles(lanes) + 2 + GroupDivider.latency + 1

    def elaborate(self, platform):
        m = Module()
        lanes, depth = self.lanes, self.depth
        m.submodules.maximum = maximum = self._maximum
        # A word is read at the earliest two cycles after it is written, and its place is free only after the read of
        # its maximum: no address is read and written in one cycle. Maxima need as many places as words: before a
        # place comes round, each group between has left a word that waits behind the ones in need of the old maximum.
        word_shape = data.StructLayout({"x": data.ArrayLayout(16, lanes), "group": self._address_bits, "last": 1})
        maximum_shape = data.StructLayout({"absmax": Magnitude(), "nonfinite": 1})
        m.submodules.words = words = memory.Memory(shape=word_shape, depth=depth, init=[], attrs={"no_rw_check": 1})
        m.submodules.maxima = maxima = memory.Memory(
            shape=maximum_shape, depth=depth, init=[], attrs={"no_rw_check": 1}
        )
        word_write, word_read = words.write_port(), words.read_port()
        maximum_write, maximum_read = maxima.write_port(), maxima.read_port()

        # Take a transfer where a word is free. `ready` is a register and low in reset: nothing is taken and lost.
        ready = Signal()
        used = Signal(range(depth + 1))
        next_used = Signal.like(used)
        take, release = Signal(), Signal()
        m.d.comb += [
            self.i.ready.eq(ready),
            take.eq(self.i.valid & ready),
            next_used.eq(used + take - release),
        ]
        m.d.sync += [used.eq(next_used), ready.eq(next_used != depth)]

        # Port rule.
        valid = Signal()
        last = Signal(reset_less=True)
        nonfinite = Signal(lanes, reset_less=True)
        x = Signal(data.ArrayLayout(16, lanes), reset_less=True)
        m.d.sync += [valid.eq(take), last.eq(self.i.payload.last)]
        for lane in range(lanes):
            element = self.i.payload.data[lane]
            kept = lane < self.i.payload.keep
            special = element[10:15].all()
            magnitude = Mux(special, Mux(element[:10].any(), 0, FP16_MAX), element[:15])
            m.d.sync += [
                nonfinite[lane].eq(kept & special),
                x[lane].eq(Mux(kept, Cat(magnitude, element[15]), 0)),
            ]

        # Store the word, with the place of its group's maximum. Word addresses have one more bit, which tells a full
        # memory from an empty one.
        write_address = Signal(self._address_bits + 1)
        group = Signal(self._address_bits)
        m.d.comb += [
            word_write.en.eq(valid),
            word_write.addr.eq(write_address[:-1]),
            word_write.data.x.eq(x),
            word_write.data.group.eq(group),
            word_write.data.last.eq(last),
            maximum.valid.eq(valid),
            maximum.last.eq(last),
            maximum.magnitudes.eq(Cat(x[lane][:15] for lane in range(lanes))),
            maximum.nonfinite.eq(nonfinite.any()),
            maximum.tag.eq(group),
        ]
        with m.If(valid):
            m.d.sync += [write_address.eq(write_address + 1), group.eq(group + last)]

        # Store the maximum: from now on the group's words may be read.
        complete = Signal(self._address_bits + 1)  # address after the last word of the last complete group
        end = Pipeline(m).register(write_address, "end", cycles=maximum.latency)
        m.d.comb += [
            maximum_write.en.eq(maximum.o_valid),
            maximum_write.addr.eq(maximum.o_tag),
            maximum_write.data.absmax.eq(maximum.absmax),
            maximum_write.data.nonfinite.eq(maximum.o_nonfinite),
        ]
        with m.If(maximum.o_valid):
            m.d.sync += complete.eq(end + 1)

        # Read words of complete groups, then the maximum of their group; divide. All of this moves in cycles of
        # `advance`.
        m.submodules.queue = queue = OutputQueue(quantizer_output(lanes))
        wiring.connect(m, queue.o, wiring.flipped(self.o))
        advance = queue.advance
        m.submodules.divider = EnableInserter(advance)(divider := GroupDivider(lanes))
        read_address = Signal(self._address_bits + 1)
        valids = Signal(1 + divider.latency)  # of the word in cycle k + 1 after it was asked for
        start = Signal()
        group_read = Signal(self._address_bits, reset_less=True)
        m.d.comb += [
            start.eq(read_address != complete),
            word_read.en.eq(advance & start),
            word_read.addr.eq(read_address[:-1]),
            divider.x.eq(word_read.data.x),
            divider.last.eq(word_read.data.last),
            maximum_read.en.eq(release),
            maximum_read.addr.eq(group_read),
            divider.absmax.eq(maximum_read.data.absmax),
            divider.nonfinite.eq(maximum_read.data.nonfinite),
            release.eq(advance & valids[1]),
        ]
        with m.If(advance):
            m.d.sync += [
                read_address.eq(read_address + start),
                valids.eq(Cat(start, valids)),
                group_read.eq(word_read.data.group),
            ]

        result = queue.payload
        m.d.comb += [
            result.q.eq(divider.q),
            result.scale.eq(divider.scale),
            result.last.eq(divider.o_last),
            result.nonfinite.eq(divider.o_nonfinite),
            queue.valid.eq(valids[-1]),
        ]
        return m
