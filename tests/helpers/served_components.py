"""Small components that stand in for a block on a board."""

from amaranth.hdl import Module, Signal
from amaranth.lib import data, memory, stream, wiring
from amaranth.lib.wiring import In, Out


class Adder(wiring.Component):
    """Every kind of port: sums of `a` and a held offset, a copy of `b`, a plain input and outputs."""

    def __init__(self, *, pace=1):
        self.pace = pace
        super().__init__(
            {
                "a": In(stream.Signature(data.StructLayout({"data": 12, "user": 20}))),
                "b": In(stream.Signature(3)),
                "gain": In(4),
                "sum": Out(stream.Signature(data.StructLayout({"data": 24, "last": 1}))),
                "copy": Out(stream.Signature(3)),
                "busy": Out(1),
                "count": Out(11),
            }
        )

    def elaborate(self, platform):
        m = Module()
        wait = Signal(range(self.pace + 1))
        go = Signal()
        m.d.comb += go.eq(wait == 0)
        m.d.sync += wait.eq(wait - ~go)
        with m.If(self.a.valid & self.a.ready):
            m.d.sync += [wait.eq(self.pace), self.count.eq(self.count + 1)]
        a, b = self.a.payload, self.b.payload
        m.d.comb += [
            self.sum.valid.eq(self.a.valid & go),
            self.a.ready.eq(self.sum.ready & go),
            self.sum.payload.data.eq(a.data + a.user + self.gain),
            self.sum.payload.last.eq(a.data == 0xFFF),
            self.copy.valid.eq(self.b.valid),
            self.b.ready.eq(self.copy.ready),
            self.copy.payload.eq(b),
            self.busy.eq(~go),
        ]
        return m


class Scratchpad(wiring.Component):
    """A block RAM with a multiplier behind it, for the flow."""

    def __init__(self, *, collision_free: bool = True, depth: int = 512):
        self.collision_free = collision_free
        self.depth = depth
        bits = (depth - 1).bit_length()
        super().__init__({"write": In(bits), "read": In(bits), "data": In(16), "enable": In(1), "product": Out(24)})

    def elaborate(self, platform):
        m = Module()
        attributes = {"no_rw_check": 1} if self.collision_free else {}
        m.submodules.words = words = memory.Memory(shape=16, depth=self.depth, init=[], attrs=attributes)
        write, read = words.write_port(), words.read_port()
        word = Signal(16)
        m.d.comb += [write.addr.eq(self.write), write.data.eq(self.data), write.en.eq(self.enable)]
        m.d.comb += [read.addr.eq(self.read), read.en.eq(1)]
        m.d.sync += [word.eq(read.data), self.product.eq(word * self.data[:8])]
        return m
