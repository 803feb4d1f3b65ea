"""Sums of INT8 rows under their weights, in block floating point: one exponent for the channels of a group."""

from amaranth.hdl import Module, Mux, Signal, signed
from amaranth.lib import data, memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.cache_shape import INT8_MAGNITUDE
from kvant.hw.attention.row_factor import FACTOR_BITS, PLACE_BITS
from kvant.hw.linear.parameters import signed_width
from kvant.hw.numeric.floating import FP16_LSB, Pipeline

GUARD_BITS = 8
"""Bits of a sum below the last bit of its largest product."""

PLACE_OFFSET = FACTOR_BITS + GUARD_BITS - FP16_LSB
"""A sum of place E counts units of ``2^(E - PLACE_OFFSET)``."""

SPACING = 7
"""Fewest cycles between two turns that meet in a sum: those of one query and transfer in two rows."""


def sum_width(rows: int) -> int:
    """Bits of a signed block-floating sum of so many rows."""
    return signed_width(rows * (INT8_MAGNITUDE * ((1 << FACTOR_BITS) - 1) << GUARD_BITS))


class BlockSums(wiring.Component):
    """Memory of block-floating sums: words of `lanes` integers that share an exponent, and a pipeline that adds.

    A turn adds ``product << GUARD_BITS``, in units of its own place, to the word of its address. The word's place
    becomes the larger one; of the two addends the one with the smaller place is shifted down by the difference and
    rounded to minus infinity. A turn reads its word in cycle 0 and writes it in cycle 6, so two turns of one address
    are `SPACING` cycles apart, and no address is read and written in one cycle.

    Parameters
    ----------
    lanes, depth : int
        Sums of a word, words.
    width : int
        Bits of a sum, signed; no sum may exceed them.

    Attributes
    ----------
    place_delay, product_delay : int
        Cycles of a turn in which `place` and `products` are read.
    latency : int
        Cycles from a turn until its word can be read.

    Members
    -------
    valid, address : in
        A turn, in its cycle 0.
    first : in
        The word is 0 with place 0 before, in cycle 0.
    place : in
        Place of the products, in cycle 2.
    products : in, array of `lanes`
        Signed elements times factor, in cycle 3.
    look_enable, look_address : in
        Read a word while no turn is under way.
    look : out
        {place, sums}, one cycle later; stays until the next reading.
    """

    place_delay = 2
    product_delay = 3
    latency = SPACING

    PRODUCT = signed(FACTOR_BITS + 8)

    def __init__(self, lanes: int, depth: int, width: int):
        self.lanes = lanes
        self.depth = max(2, depth)
        self.width = width
        self.word = data.StructLayout({"place": PLACE_BITS, "sums": data.ArrayLayout(signed(width), lanes)})
        address = range(self.depth)
        super().__init__(
            {
                "valid": In(1),
                "address": In(address),
                "first": In(1),
                "place": In(PLACE_BITS),
                "products": In(data.ArrayLayout(self.PRODUCT, lanes)),
                "look_enable": In(1),
                "look_address": In(address),
                "look": Out(self.word),
            }
        )

    def elaborate(self, platform):
        m = Module()
        pipeline = Pipeline(m)
        register = pipeline.register
        # The collision logic of a block RAM is left out: see the class.
        m.submodules.words = words = memory.Memory(shape=self.word, depth=self.depth, init=[], attrs={"no_rw_check": 1})
        write, read = words.write_port(), words.read_port()
        m.d.comb += [
            read.en.eq(self.valid | self.look_enable),
            read.addr.eq(Mux(self.look_enable, self.look_address, self.address)),
            self.look.eq(read.data),
        ]

        # Cycle 1: a new sum begins at 0, whatever the memory holds.
        first = register(self.first, "first")
        fetched = read.data.as_value()
        old = data.View(self.word, register(Mux(first, 0, fetched)[: len(fetched)], "old"))

        # Cycle 2: which of the two has to come down, and how far. That is less than 64, for a product of a weight and a
        # scale has places 2 to 65; place 0 is that of 0, which may come down by any distance.
        grows = self.place > old.place
        amount = Mux(grows, self.place - old.place, old.place - self.place)[:6]
        grows = register(grows, "grows")
        amount = register(amount, "amount")
        place = register(Mux(self.place > old.place, self.place, old.place), "place", cycles=4)
        olds = [register(old.sums[lane], "old_sum") for lane in range(self.lanes)]

        # Cycles 3 and 4: shift it down. Cycle 5: add.
        low_amount = register(amount[:3], "low_amount")
        results = []
        for lane in range(self.lanes):
            added = Signal(signed(self.width), name=f"added_{lane}")
            falls = Signal(signed(self.width), name=f"falls_{lane}")
            m.d.comb += [
                added.eq(self.products[lane] << GUARD_BITS),
                falls.eq(Mux(grows, olds[lane], added)),
            ]
            stays = register(register(Mux(grows, added, olds[lane]), "stays"), "stays")
            number = register(self._shift(m, falls, [(amount[k], 1 << k) for k in (5, 4, 3)]), "falling")
            number = register(self._shift(m, number, [(low_amount[k], 1 << k) for k in (2, 1, 0)]), "falling")
            total = Signal(signed(self.width), name=f"total_{lane}")
            m.d.comb += total.eq(stays + number)
            results.append(register(total, "sum"))

        # Cycle 6: write.
        m.d.comb += [
            write.en.eq(pipeline.valid(self.valid, cycles=6)),
            write.addr.eq(register(self.address, "address", cycles=6)),
            write.data.place.eq(place),
            *(write.data.sums[lane].eq(result) for lane, result in enumerate(results)),
        ]
        return m

    @staticmethod
    def _shift(m: Module, number: Signal, steps) -> Signal:
        """Signed *number* over powers of two, rounded to minus infinity: shifted by each step whose bit is set."""
        for bit, places in steps:
            shifted = Signal.like(number, name="shifted")
            m.d.comb += shifted.eq(Mux(bit, number >> places, number))
            number = shifted
        return number
