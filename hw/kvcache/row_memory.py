"""Words that the transfers of rows read, change and write back, one transfer per cycle."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import memory, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.numeric.floating import Pipeline
from kvant.hw.parameters import check_integer


class RowMemory(wiring.Component):
    """A memory with a word for each transfer of a row, and a pipeline that updates it.

    An access reads in cycle 0, decides in cycle 2 and writes in cycle 3. The same word comes round after as many
    cycles as a row has transfers; where that is fewer than four, what is on its way is forwarded. No address is read
    and written in one cycle by an access.

    Parameters
    ----------
    shape : ShapeLike
        Of a word.
    depth : int
        Words.
    spacing : int
        Fewest cycles between two accesses to a word: the transfers of a row.
    looks : int
        Further read ports. Who uses one keeps away from words that an access is about to write.

    Attributes
    ----------
    decision : int
        Cycle of an access in which `old` is there and `new` and `write` are read.

    Members
    -------
    valid, address : in
        An access, in its cycle 0.
    old : out
        The word as all earlier accesses leave it, in cycle 2.
    new, write : in
        The word to write back, if `write` is high, in cycle 2.
    look_enable, look_address : in, array of `looks`
        Read beside the accesses.
    look : out, array of `looks`
        One cycle later; stays until the next reading of this port.
    """

    decision = 2
    _LOOP = 4

    def __init__(self, shape, depth: int, spacing: int, *, looks: int = 0):
        self.shape = shape
        self.depth = check_integer("depth", depth, 1)
        self.spacing = check_integer("spacing", spacing, 1)
        self.looks = check_integer("looks", looks, 0)
        address = range(max(2, depth))
        ports = {"valid": In(1), "address": In(address), "old": Out(shape), "new": In(shape), "write": In(1)}
        if looks:
            ports |= {
                "look_enable": In(1).array(looks),
                "look_address": In(address).array(looks),
                "look": Out(shape).array(looks),
            }
        super().__init__(ports)

    def elaborate(self, platform):
        m = Module()
        register = Pipeline(m).register
        # The collision logic of a block RAM is left out: see the class.
        m.submodules.words = words = memory.Memory(
            shape=self.shape, depth=max(2, self.depth), init=[], attrs={"no_rw_check": 1}
        )
        write, read = words.write_port(), words.read_port()

        addresses = [self.address]
        for _ in range(self._LOOP):
            addresses.append(register(addresses[-1], "address_held"))
        writes = [self.write]
        for _ in range(2):
            held = Signal(name="write_held")
            m.d.sync += held.eq(writes[-1])
            writes.append(held)
        new_3 = register(self.new, "new_held")
        m.d.comb += [
            read.addr.eq(self.address),
            read.en.eq(self.valid),
            write.addr.eq(addresses[3]),
            write.data.eq(new_3),
            write.en.eq(writes[1]),
        ]
        fetched = read.data
        if self.spacing <= 3:
            # The word written in this very cycle is not read but forwarded.
            m.d.comb += read.en.eq(self.valid & ~(writes[1] & (self.address == addresses[3])))
            new_4 = register(new_3, "new_held")
            fetched = Mux(writes[2] & (addresses[1] == addresses[4]), new_4, fetched)
        if self.spacing <= 2:
            fetched = Mux(writes[1] & (addresses[1] == addresses[3]), new_3, fetched)
        old = register(fetched, "old_held")
        if self.spacing == 1:
            old = Mux(writes[1] & (addresses[2] == addresses[3]), new_3, old)
        m.d.comb += self.old.eq(old)

        for number in range(self.looks):
            look = words.read_port()
            m.d.comb += [
                look.addr.eq(self.look_address[number]),
                look.en.eq(self.look_enable[number]),
                self.look[number].eq(look.data),
            ]
        return m
