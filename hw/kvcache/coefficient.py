"""The choice of a group's coefficient from tables that are written at run time, without division."""

import itertools
from collections.abc import Collection

from amaranth.hdl import Cat, Const, Module, Mux, Signal, Value
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.layouts import Table, TableWrite
from kvant.hw.kvcache.parameters import TABLE_ENTRIES, THRESHOLDS, CacheParameters
from kvant.hw.kvcache.result_queue import ResultQueue
from kvant.hw.kvcache.statistics import check_counts, times_count
from kvant.hw.numeric.floating import Pipeline, add_with_carry
from kvant.hw.parameters import check_integer

INDEX_BITS = (TABLE_ENTRIES - 1).bit_length()


class TableEntryWrite(data.StructLayout):
    """A `TableWrite` in the cycles in which `valid` is 1: every unit that holds tables listens."""

    def __init__(self):
        super().__init__({"valid": 1, "data": TableWrite()})


class TableMemory(wiring.Component):
    """The entries of one kind of table of all heads, 16 each.

    A read in the cycle of a write to the same address returns the old entry.

    Attributes
    ----------
    latency : int
        Cycles from `head` and `index` to `entry`.

    Members
    -------
    write : in
        Other kinds, and heads that there are none of, are ignored.
    head, index : in
    entry : out
    """

    latency = 2

    def __init__(self, p: CacheParameters, kind: Table, width: int):
        self.p = p
        self.kind = kind
        super().__init__(
            {
                "write": In(TableEntryWrite()),
                "head": In(8),
                "index": In(INDEX_BITS),
                "entry": Out(width),
            }
        )

    def elaborate(self, platform):
        m = Module()
        width = len(self.entry)
        m.submodules.table = table = memory.Memory(shape=width, depth=TABLE_ENTRIES * self.p.heads, init=[])
        write, read = table.write_port(), table.read_port()
        item = self.write.data
        # What decides on a write waits in a register beside what is written.
        take = Signal()
        m.d.sync += [
            take.eq(
                self.write.valid & (item.kind == self.kind) & (item.head < self.p.heads) & (item.index < TABLE_ENTRIES)
            ),
            write.addr.eq(Cat(item.index[:INDEX_BITS], item.head)[: len(write.addr)]),
            write.data.eq(item.value[:width]),
        ]
        m.d.comb += [
            write.en.eq(take),
            read.addr.eq(Cat(self.index, self.head)[: len(read.addr)]),
            # A block memory answers late in the cycle.
            self.entry.eq(Pipeline(m).register(read.data, "entry")),
        ]
        return m


class Choice(data.StructLayout):
    """A chosen table entry: its index, which is also the number of thresholds passed, and the coefficient there."""

    def __init__(self, tag_shape):
        super().__init__({"index": INDEX_BITS, "coefficient": 8, "tag": tag_shape})


def result_queue(tag_shape, depth: int) -> ResultQueue:
    """A queue of choices."""
    return ResultQueue(data.StructLayout({"index": INDEX_BITS, "coefficient": 8}), tag_shape, depth)


def connect_choice(m: Module, queue: ResultQueue, o) -> None:
    """Offer what a `result_queue` holds on the stream *o* of `Choice`."""
    result = queue.o.payload.result
    m.d.comb += [
        o.valid.eq(queue.o.valid),
        queue.o.ready.eq(o.ready),
        o.payload.index.eq(result.index),
        o.payload.coefficient.eq(result.coefficient),
        Value.cast(o.payload.tag).eq(Value.cast(queue.o.payload.tag)),
    ]


class Moment(data.StructLayout):
    """What a choice depends on: second moment (times ``count^2``), peak and size of a group, its head, and a tag."""

    def __init__(self, p: CacheParameters, tag_shape):
        super().__init__(
            {
                "moment": p.moment_limit.bit_length(),
                "peak": 8,
                "count": range(p.group + 1),
                "head": 8,
                "tag": tag_shape,
            }
        )


class ThresholdSearch(wiring.Component):
    """Some steps of the binary search for the number of thresholds that a group passes.

    A group circulates in a ring of `LENGTH` slots, one step a round; a group whose steps are done leaves, and its slot
    takes another.

    Parameters
    ----------
    p : CacheParameters
    first, steps : int
        The steps that are made, of ``log2(16)``.

    Attributes
    ----------
    latency : int
        Cycles from `i` to `o`. Slots take turns, so a group may enter in ``1 / steps`` of the cycles, on average.

    Members
    -------
    write : in
        Changes the thresholds.
    i : in
        valid, index, limit, moment, head: a group with what earlier steps made of its index, and
        ``limit = (count * peak)^2``.
    ready : out
        It is taken; does not depend on ``i.valid``.
    o : out
        The group afterwards.
    """

    LENGTH = 5

    def __init__(self, p: CacheParameters, first: int, steps: int):
        self.p = p
        self.first = first
        self.steps = steps
        self.latency = self.LENGTH * steps
        bits = p.moment_limit.bit_length()
        group = {"valid": 1, "index": INDEX_BITS, "limit": bits, "moment": bits, "head": 8}
        super().__init__(
            {
                "write": In(TableEntryWrite()),
                "i": In(data.StructLayout(group)),
                "ready": Out(1),
                "o": Out(data.StructLayout(group)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register
        m.submodules.thresholds = thresholds = TableMemory(self.p, Table.THRESHOLD, 16)
        m.d.comb += thresholds.write.eq(self.write)

        # Slot 0: the thresholds below `index` are passed; that of `bit` more is asked.
        entered = Signal(self.i.shape(), reset_less=True)
        bit = Signal(INDEX_BITS, reset_less=True)
        valids = Signal(self.LENGTH)
        m.d.comb += [
            thresholds.head.eq(entered.head),
            thresholds.index.eq(entered.index | (bit - 1)[:INDEX_BITS]),
        ]

        # Slots 2 and 3: threshold times limit, in two halves; slot 4: their sum. ``moment * 2^16 >= product`` if the
        # moment is not less than the product without its last 16 bits, rounded up.
        threshold = thresholds.entry
        limit = register(entered.limit, "limit", cycles=2)
        low = register(threshold * limit[:16], "low")
        high = register(threshold * limit[16:], "high")
        needed = register((low[16:] + high)[: len(limit)], "needed")
        more = register(low[:16].any(), "more")

        # The round ends.
        ended = register(entered, "ended", cycles=self.LENGTH - 1)
        ended_bit = register(bit, "ended_bit", cycles=self.LENGTH - 1)
        passed = add_with_carry(ended.moment, ~needed, ~more)[-1]
        index = ended.index | (ended_bit & passed.replicate(INDEX_BITS))
        last = ended_bit[INDEX_BITS - self.first - self.steps]
        first_bit = 1 << (INDEX_BITS - self.first - 1)
        goes_on = Signal()
        m.d.comb += [
            goes_on.eq(valids[-1] & ~last),
            self.ready.eq(~goes_on),
            self.o.eq(ended),
            self.o.valid.eq(valids[-1] & last),
            self.o.index.eq(index),
        ]
        m.d.sync += valids.eq(Cat(goes_on | self.i.valid, valids))
        with m.If(goes_on):
            m.d.sync += [entered.eq(ended), entered.index.eq(index), bit.eq(ended_bit >> 1)]
        with m.Else():
            m.d.sync += [entered.eq(self.i), bit.eq(first_bit)]
        return m


class CoefficientChoice(wiring.Component):
    """Chooses table entry ``#{k : moment * 2^16 >= T_k * count^2 * peak^2}`` of each group's head.

    The thresholds do not descend, so four comparisons of a binary search find the number among 15. They are made one
    after the other by `ThresholdSearch`, in as many rings as the rate takes; nothing is divided. A group of zeros
    passes every threshold. Software fills a table of fewer than 16 coefficients up with its last one and thresholds of
    65535 (then it does not matter whether they are passed).

    Source: docs/numerics.md, "Choosing the coefficient".

    Parameters
    ----------
    p : CacheParameters
    tag_shape : shape-like
        Of what travels along.
    interval : int
        Cycles per group that are sustained.
    counts : collection of int, optional
        Numbers of elements that groups have. Default: `p.group` alone.

    Attributes
    ----------
    latency : int
        Cycles from a transfer of `i` to `o`, when nothing is before it.

    Members
    -------
    write : in
        Changes tables; those of a head that has groups under way must not change if its choices are to be foreseen.
        At reset the tables keep what they hold; at power-up they hold zeros.
    i : in stream of `Moment`
        ``head`` is below `p.heads`.
    o : out stream of `Choice`
        In the order of `i`.

    Raises
    ------
    ParameterError
        For an interval that is not a positive integer, or a count outside 1 .. group.
    """

    # Two cycles for the limit, the search, the coefficient.
    _to_queue = 2 + INDEX_BITS * ThresholdSearch.LENGTH + TableMemory.latency
    latency = _to_queue + ResultQueue.latency

    def __init__(self, p: CacheParameters, tag_shape, interval: int, *, counts: Collection[int] | None = None):
        self.p = p
        self.interval = check_integer("interval", interval, 1)
        self.counts = check_counts(p, counts)
        self.tag_shape = tag_shape
        self.rings = {1: 4, 2: 2, 3: 2}.get(interval, 1)
        super().__init__(
            {
                "write": In(TableEntryWrite()),
                "i": In(stream.Signature(Moment(p, tag_shape))),
                "o": Out(stream.Signature(Choice(tag_shape))),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        register = Pipeline(m).register
        # A ring full of groups makes one more wait for up to its length.
        depth = ResultQueue.depth_for(self._to_queue + ThresholdSearch.LENGTH, self.interval)
        m.submodules.queue = queue = result_queue(self.tag_shape, depth)
        connect_choice(m, queue, self.o)

        # The limit (count * peak)^2 in two cycles, which wait for a free slot.
        steps = INDEX_BITS // self.rings
        searches = []
        for number in range(self.rings):
            m.submodules[f"search_{number}"] = search = ThresholdSearch(p, number * steps, steps)
            m.d.comb += search.write.eq(self.write)
            searches.append(search)
        first = searches[0]
        valids = Signal(2)
        advance, take = Signal(), Signal()
        m.d.comb += [
            advance.eq(~valids[1] | first.ready),
            self.i.ready.eq(queue.room & advance),
            take.eq(self.i.valid & self.i.ready),
            queue.enter.eq(take),
            Value.cast(queue.tag).eq(Value.cast(self.i.payload.tag)),
        ]
        item = self.i.payload
        reach = Signal((p.group * p.peak_limit).bit_length(), reset_less=True)
        limit = Signal(len(first.i.limit), reset_less=True)
        moments = [Signal(len(item.moment), name=f"moment_{k}", reset_less=True) for k in range(2)]
        heads = [Signal(8, name=f"head_{k}", reset_less=True) for k in range(2)]
        with m.If(advance):
            m.d.sync += [
                valids.eq(Cat(take, valids)),
                reach.eq(times_count(item.peak, item.count, self.counts)),
                limit.eq(reach * reach),
                moments[0].eq(item.moment),
                moments[1].eq(moments[0]),
                heads[0].eq(item.head),
                heads[1].eq(heads[0]),
            ]
        m.d.comb += [
            first.i.valid.eq(valids[1]),
            first.i.index.eq(0),
            first.i.limit.eq(limit),
            first.i.moment.eq(moments[1]),
            first.i.head.eq(heads[1]),
        ]

        # All rings have one length and as many rounds: where a group leaves one, the next has a free slot.
        for search, following in itertools.pairwise(searches):
            m.d.comb += following.i.eq(search.o)
        m.submodules.coefficients = coefficients = TableMemory(p, Table.COEFFICIENT, 8)
        found = searches[-1].o
        m.d.comb += [
            coefficients.write.eq(self.write),
            coefficients.head.eq(found.head),
            coefficients.index.eq(found.index),
            queue.push.eq(Pipeline(m).valid(found.valid, cycles=coefficients.latency)),
            queue.result.index.eq(register(found.index, "index", cycles=coefficients.latency)),
            queue.result.coefficient.eq(coefficients.entry),
        ]
        return m


class Vote(data.StructLayout):
    """A channel's part in the choice of a window.

    Members
    -------
    index : 4
        Its own choice: the thresholds that it passes.
    alive : 1
        It is not all zero.
    head : 8
    last : 1
        Last channel of the window.
    tag
    """

    def __init__(self, tag_shape):
        super().__init__({"index": INDEX_BITS, "alive": 1, "head": 8, "last": 1, "tag": tag_shape})


class SharedChoice(wiring.Component):
    """One table entry for all channels of a window: ``#{k : 2 * P_k >= D}``.

    D channels are not all zero, P_k of them pass the threshold k. With D = 0 it is the last entry.
    Source: docs/numerics.md, option ``shared_coeff``.

    Parameters
    ----------
    p : CacheParameters
    tag_shape : shape-like
        Of what travels along.

    Attributes
    ----------
    latency : int
        Cycles from the transfer of a window's last channel to `o`. One channel per cycle, windows back to back.

    Members
    -------
    write : in
        Changes the coefficient tables, as in `CoefficientChoice`.
    i : in stream of `Vote`
        The channels of one window, then those of the next, at most `p.head_dim` each.
    o : out stream of `Choice`
        One a window, with the tag of its last channel.
    """

    _to_queue = 3 + TableMemory.latency
    latency = _to_queue + ResultQueue.latency

    def __init__(self, p: CacheParameters, tag_shape):
        self.p = p
        self.tag_shape = tag_shape
        super().__init__(
            {
                "write": In(TableEntryWrite()),
                "i": In(stream.Signature(Vote(tag_shape))),
                "o": Out(stream.Signature(Choice(tag_shape))),
            }
        )

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register
        vote = self.i.payload
        depth = ResultQueue.depth_for(self._to_queue, self.p.head_dim)
        m.submodules.queue = queue = result_queue(self.tag_shape, depth)
        connect_choice(m, queue, self.o)
        take = Signal()
        m.d.comb += [
            self.i.ready.eq(queue.room),
            take.eq(self.i.valid & self.i.ready),
            queue.enter.eq(take & vote.last),
            Value.cast(queue.tag).eq(Value.cast(vote.tag)),
        ]

        # Cycle 1: count. A window's first channel starts anew.
        first = Signal(init=1)
        with m.If(take):
            m.d.sync += first.eq(vote.last)

        def count(bit, name):
            counter = Signal(range(self.p.head_dim + 1), name=name, reset_less=True)
            with m.If(take):
                m.d.sync += counter.eq(Mux(first, 0, counter) + bit)
            return counter

        alive = count(vote.alive, "alive")
        votes = [count(vote.alive & (vote.index > k), f"votes_{k}") for k in range(THRESHOLDS)]

        # Cycle 2: compare. The votes do not ascend with k, so the results are ones, then zeros.
        passed = register(Cat((number << 1) >= alive for number in votes), "passed")
        # Cycle 3: the first threshold that is not passed.
        index = Const(TABLE_ENTRIES - 1, INDEX_BITS)
        for k in reversed(range(THRESHOLDS)):
            index = Mux(passed[k], index, k)
        index = register(index, "index")

        # From there on: its coefficient.
        m.submodules.coefficients = coefficients = TableMemory(self.p, Table.COEFFICIENT, 8)
        m.d.comb += [
            coefficients.write.eq(self.write),
            coefficients.head.eq(register(vote.head, "head", cycles=3)),
            coefficients.index.eq(index),
            queue.push.eq(Pipeline(m).valid(queue.enter, cycles=self._to_queue)),
            queue.result.index.eq(register(index, "index", cycles=coefficients.latency)),
            queue.result.coefficient.eq(coefficients.entry),
        ]
        return m
