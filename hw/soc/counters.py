"""The counters behind the registers."""

from amaranth.hdl import Cat, Const, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.registers import COUNTER_BITS, COUNTERS

_WORDS = ("BYTES_READ", "BYTES_WRITTEN")
"""Counters of bytes whose events are words of the port."""


class Counters(wiring.Component):
    """48-bit counters, named as in `COUNTERS` in lower case. Without a cache there is none of saturations.

    Members
    -------
    clear : in
        All become 0, events of that cycle included.
    NAME_event : in
        Counts, two cycles later; of saturations there may be as many as lanes of the cache.
    NAME : out
    """

    def __init__(self, p: TopParameters):
        self.p = p.soc
        absent = ("SATURATIONS",) if p.cache is None else ()
        self.names = [name.lower() for name in COUNTERS if name not in absent]
        members = {name: Out(COUNTER_BITS) for name in self.names}
        lanes = {} if p.cache is None else {"saturations": range(p.cache.lanes + 1)}
        events = {f"{name}_event": In(lanes.get(name, 1)) for name in self.names}
        super().__init__({"clear": In(1), **members, **events})

    def elaborate(self, platform):
        m = Module()
        for name in self.names:
            low = self.p.align_bits if name.upper() in _WORDS else 0
            count = Signal(COUNTER_BITS - low, name=f"{name}_count")
            event = Signal.like(getattr(self, f"{name}_event"), name=f"{name}_seen")
            m.d.sync += [event.eq(getattr(self, f"{name}_event")), count.eq(count + event)]
            with m.If(self.clear):
                m.d.sync += [event.eq(0), count.eq(0)]
            m.d.comb += getattr(self, name).eq(Cat(Const(0, low), count))
        return m
