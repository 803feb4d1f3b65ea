"""The byte protocol of `kvant.fpga.link`, board side: a serial port to the streams of a component."""

from amaranth.hdl import Cat, Const, Module, Mux, Signal
from amaranth.lib import fifo, wiring
from amaranth.lib.wiring import In, Out

from kvant.fpga.link import ACKNOWLEDGE, OUTPUT, STATUS, STATUS_REPLY, Layout
from kvant.fpga.uart import UartReceiver, UartTransmitter


class SerialBridge(wiring.Component):
    """Puts the streams and plain ports of a component behind a serial port.

    Parameters
    ----------
    component : wiring.Component
        What is served; becomes a submodule. Its members are streams and plain ports.
    divisor : int
        Clock cycles of a bit, see `kvant.fpga.uart.divisor`.
    held : collection of str
        See `Layout`.

    Members
    -------
    rx : in
        Serial line from the host, already synchronised.
    tx : out
        Serial line to the host.
    restart : out
        One cycle: the host sent a break; belongs on the reset of the whole domain.
    """

    def __init__(self, component: wiring.Component, *, divisor: int, held=()):
        self.component = component
        self.divisor = divisor
        self.layout = Layout(component.signature, held=held)
        super().__init__({"rx": In(1, init=1), "tx": Out(1, init=1), "restart": Out(1)})

    def elaborate(self, platform):
        layout, component = self.layout, self.component
        m = Module()
        m.submodules.component = component
        m.submodules.receiver = receiver = UartReceiver(self.divisor)
        m.submodules.transmitter = transmitter = UartTransmitter(self.divisor)
        m.submodules.queue = queue = fifo.SyncFIFOBuffered(width=8, depth=layout.window)
        flags = Signal(3)  # FLAGS of the link
        m.d.comb += [
            receiver.rx.eq(self.rx),
            self.tx.eq(transmitter.tx),
            self.restart.eq(receiver.line_break),
            queue.w_data.eq(receiver.data),
            queue.w_en.eq(receiver.valid),
        ]
        with m.If(receiver.valid & ~queue.w_rdy):
            m.d.sync += flags[0].eq(1)
        with m.If(receiver.framing):
            m.d.sync += flags[1].eq(1)

        acknowledge, report = Signal(), Signal()  # replies that wait for the transmitter
        muted = Signal(len(layout.outputs))
        self._receive(m, queue, flags, muted, acknowledge, report)
        self._transmit(m, transmitter, flags, muted, acknowledge, report)
        return m

    def _receive(self, m, queue, flags, muted, acknowledge, report):
        """Frames from the receive queue to streams and held values."""
        layout, component = self.layout, self.component
        word = Signal(8 * layout.largest_input)  # a transfer: its last byte ends up on top
        bytes_left = Signal(range(layout.largest_input + 1))
        transfers_left = Signal(8)
        channels = (*layout.inputs, *layout.held, layout.mute)
        chosen = Signal(range(len(channels)))
        size = Signal.like(bytes_left)
        with m.Switch(chosen):
            for n, channel in enumerate(channels):
                with m.Case(n):
                    m.d.comb += size.eq(channel.size)

        def fields(channel):
            base = layout.largest_input - channel.size
            for field in channel.fields:
                start = 8 * (base + field.offset)
                yield field.name, word[start : start + field.width]

        values = {}
        for channel in layout.held:
            (_, bits), *_ = fields(channel)
            values[channel.name] = Signal(len(bits), name="held_" + channel.name.replace(".", "_"))
        taken = Signal()
        hand_over = Signal()
        with m.Switch(chosen):
            for n, channel in enumerate(channels):
                with m.Case(n):
                    if channel in layout.inputs:
                        port = getattr(component, channel.name)
                        m.d.comb += [port.valid.eq(hand_over), taken.eq(port.ready)]
                    else:
                        target = muted if channel is layout.mute else values[channel.name]
                        m.d.comb += taken.eq(1)
                        with m.If(hand_over):
                            (_, bits), *_ = fields(channel)
                            m.d.sync += target.eq(bits)
        for channel in layout.inputs:
            payload = getattr(component, channel.name).payload
            for name, bits in fields(channel):
                m.d.comb += Cat(payload[name] if name else payload).eq(bits)
        for name, value in values.items():
            stream, dot, field = name.partition(".")
            port = getattr(component, stream)
            m.d.comb += Cat(port.payload[field] if dot else port).eq(value)

        # A register behind the queue: a block RAM is slow to read, and opcodes take a while to tell apart.
        octet, full, take = Signal(8), Signal(), Signal()
        m.d.comb += queue.r_en.eq(~full | take)
        with m.If(queue.r_en):
            m.d.sync += [octet.eq(queue.r_data), full.eq(queue.r_rdy)]

        with m.FSM(name="receive"):
            with m.State("OPCODE"):
                m.d.comb += take.eq(~acknowledge & ~report)
                with m.If(full & take):
                    m.next = "UNKNOWN"
                    with m.Switch(octet):
                        for n, channel in enumerate(channels):
                            with m.Case(channel.opcode):
                                m.d.sync += chosen.eq(n)
                                m.next = "COUNT"
                        with m.Case(STATUS):
                            m.next = "REPORT"
            with m.State("UNKNOWN"):
                m.d.sync += flags[2].eq(1)
                m.next = "OPCODE"
            with m.State("COUNT"):
                m.d.comb += take.eq(1)
                m.d.sync += [transfers_left.eq(octet), bytes_left.eq(size)]
                with m.If(full):
                    m.next = "BYTES"
            with m.State("BYTES"):
                m.d.comb += take.eq(1)
                with m.If(full):
                    m.d.sync += [word.eq(Cat(word[8:], octet)), bytes_left.eq(bytes_left - 1)]
                    with m.If(bytes_left == 1):
                        m.next = "HAND OVER"
            with m.State("HAND OVER"):
                m.d.comb += hand_over.eq(1)
                with m.If(taken):
                    m.d.sync += [transfers_left.eq(transfers_left - 1), bytes_left.eq(size)]
                    m.next = "BYTES"
                    with m.If(transfers_left == 0):
                        m.d.sync += acknowledge.eq(1)
                        m.next = "OPCODE"
            with m.State("REPORT"):  # the count byte is there for uniformity
                m.d.comb += take.eq(1)
                with m.If(full):
                    m.d.sync += [acknowledge.eq(1), report.eq(1)]
                    m.next = "OPCODE"

    def _transmit(self, m, transmitter, flags, muted, acknowledge, report):
        """Replies, one whole reply after the other: status, acknowledgement, then the streams in their order.

        A reply is sent straight from the port it reports, which a stream holds until its last byte is taken.
        """
        layout, component = self.layout, self.component
        ports = [getattr(component, channel.name) for channel in layout.outputs]

        def octets(tag, fields=(), values=(), head=()):
            parts = [Const(tag, 8), *head]
            for field, value in zip(fields, values, strict=True):
                bits = Cat(value)
                parts.append(Cat(bits, Const(0, 8 * field.size - len(bits))))
            return Cat(*parts)

        plain = [flags, *(getattr(component, field.name) for field in layout.status.fields[1:])]
        replies = [
            octets(STATUS_REPLY, layout.status.fields, plain, [Const(layout.identity, 32)]),
            octets(ACKNOWLEDGE),
        ]
        for n, (channel, port) in enumerate(zip(layout.outputs, ports, strict=True)):
            values = [port.payload[field.name] if field.name else port.payload for field in channel.fields]
            replies.append(octets(OUTPUT + n, channel.fields, values))

        active = Signal()
        chosen = Signal(range(len(replies)))
        position = Signal(range(1 + layout.largest_output))
        last = Signal()
        taken = Signal()
        m.d.comb += [transmitter.i.valid.eq(active), taken.eq(active & transmitter.i.ready)]
        with m.Switch(chosen):
            for n, reply in enumerate(replies):
                with m.Case(n):
                    m.d.comb += last.eq(position == len(reply) // 8 - 1)
                    m.d.comb += transmitter.i.payload.eq(reply.word_select(position, 8))
        with m.If(taken):
            m.d.sync += position.eq(Mux(last, 0, position + 1))
            with m.If(last):
                m.d.sync += active.eq(0)

        waiting = [report, acknowledge, *(port.valid & ~muted[n] for n, port in enumerate(ports))]
        with m.If(~active):
            m.d.sync += active.eq(Cat(*waiting).any())
            for n in reversed(range(len(waiting))):  # the first of those that wait
                with m.If(waiting[n]):
                    m.d.sync += chosen.eq(n)
        done = taken & last
        with m.If(done & (chosen == 0)):
            m.d.sync += report.eq(0)
        with m.If(done & (chosen == 1)):
            m.d.sync += acknowledge.eq(0)
        for n, port in enumerate(ports):
            sending = active & (chosen == 2 + n)
            m.d.comb += port.ready.eq(Mux(sending, done, muted[n]))
