"""Small stream components for the tests of emission and simulation."""

from amaranth.hdl import Cat, Module, Signal, signed
from amaranth.lib import data, fifo, memory, stream, wiring
from amaranth.lib.wiring import In, Out


class Scale(wiring.Component):
    """A lane: ``o`` is ``factor * i``, one cycle later."""

    def __init__(self, factor):
        self.factor = factor
        super().__init__({"i": In(signed(8)), "o": Out(signed(16)), "is_zero": Out(1)})

    def elaborate(self, platform):
        m = Module()
        m.d.sync += [self.o.eq(self.i * self.factor), self.is_zero.eq(self.i == 0)]
        return m


class Accumulator(wiring.Component):
    """Adds three times all lanes of a packet; one result a packet, with the tag of its last transfer.

    `packets` counts results that were taken.
    """

    def __init__(self, lanes=4, depth=4):
        self.lanes = lanes
        self.depth = depth
        super().__init__(
            {
                "x": In(
                    stream.Signature(
                        data.StructLayout({"data": data.ArrayLayout(signed(8), lanes), "user": 4, "last": 1})
                    )
                ),
                "y": Out(stream.Signature(data.StructLayout({"data": signed(32), "user": 4, "last": 1}))),
                "packets": Out(16),
                "bias": In(8),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.queue = queue = fifo.SyncFIFOBuffered(width=36, depth=self.depth)
        room = Signal()
        valid, last, tag = Signal(), Signal(), Signal(4)
        total = Signal(signed(32))
        scaled = []
        for lane in range(self.lanes):
            m.submodules[f"scale_{lane}"] = scale = Scale(3)
            m.d.comb += scale.i.eq(self.x.payload.data[lane])
            scaled.append(scale.o)
        # Two transfers may be on their way to the queue when it is seen full.
        m.d.comb += [room.eq(queue.level + 2 < self.depth), self.x.ready.eq(room)]
        m.d.sync += [
            valid.eq(self.x.valid & room),
            last.eq(self.x.payload.last),
            tag.eq(self.x.payload.user),
        ]
        with m.If(valid):
            m.d.sync += total.eq(total + sum(scaled))
            with m.If(last):
                m.d.sync += total.eq(0)
        m.d.comb += [
            queue.w_en.eq(valid & last),
            queue.w_data.eq(Cat((total + sum(scaled) + self.bias)[:32], tag)),
            self.y.valid.eq(queue.r_rdy),
            self.y.payload.data.eq(queue.r_data[:32]),
            self.y.payload.user.eq(queue.r_data[32:]),
            self.y.payload.last.eq(1),
            queue.r_en.eq(self.y.ready),
        ]
        with m.If(self.y.valid & self.y.ready):
            m.d.sync += self.packets.eq(self.packets + 1)
        return m

    @staticmethod
    def expected(lanes, last, bias=0):
        """Result of each packet, from lanes [transfers, lanes]."""
        results, total = [], 0
        for values, is_last in zip(lanes, last, strict=True):
            total += 3 * int(sum(values))
            if is_last:
                results.append((total + bias) & 0xFFFFFFFF)
                total = 0
        return results


class Ram(wiring.Component):
    """A memory behind a stream of commands; a read answers with the word, a write with the address."""

    def __init__(self, depth=16, width=8):
        self.depth = depth
        self.width = width
        command = data.StructLayout({"write": 1, "address": range(depth), "value": width})
        super().__init__(
            {
                "cmd": In(stream.Signature(data.StructLayout({"data": command}))),
                "word": Out(stream.Signature(width)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.storage = storage = memory.Memory(shape=self.width, depth=self.depth, init=[])
        write, read = storage.write_port(), storage.read_port()
        command = self.cmd.payload.data
        busy, wrote, address = Signal(), Signal(), Signal(self.width)
        take = Signal()
        m.d.comb += [
            self.cmd.ready.eq(~busy | self.word.ready),
            take.eq(self.cmd.valid & self.cmd.ready),
            write.addr.eq(command.address),
            write.data.eq(command.value),
            write.en.eq(take & command.write),
            read.addr.eq(command.address),
            read.en.eq(take),
            self.word.valid.eq(busy),
            self.word.payload.eq(read.data),
        ]
        with m.If(wrote):
            m.d.comb += self.word.payload.eq(address)
        with m.If(take):
            m.d.sync += [busy.eq(1), wrote.eq(command.write), address.eq(command.address)]
        with m.Elif(self.word.ready):
            m.d.sync += busy.eq(0)
        return m


class Merge(wiring.Component):
    """Passes on the transfers of two streams, those of `first` first, and counts them."""

    def __init__(self):
        super().__init__(
            {
                "first": In(stream.Signature(data.StructLayout({"data": 8}))),
                "second": In(stream.Signature(data.StructLayout({"data": 8}))),
                "o": Out(stream.Signature(data.StructLayout({"data": 8}))),
                "merged": Out(8),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.d.comb += [
            self.o.valid.eq(self.first.valid | self.second.valid),
            self.first.ready.eq(self.o.ready),
            self.second.ready.eq(self.o.ready & ~self.first.valid),
            self.o.payload.eq(self.second.payload),
        ]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += self.merged.eq(self.merged + 1)
        with m.If(self.first.valid):
            m.d.comb += self.o.payload.eq(self.first.payload)
        return m
