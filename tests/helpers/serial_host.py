"""A host on the serial port of a simulated board."""

from amaranth.hdl import ClockDomain, Elaboratable, Module, ResetSignal
from amaranth.sim import Simulator

from kvant.fpga.link import Host


class Board(Elaboratable):
    """A bridge whose domain restarts when the host asks for it, as on a board."""

    def __init__(self, bridge):
        self.bridge = bridge

    def elaborate(self, platform):
        m = Module()
        m.domains.sync = ClockDomain()
        m.submodules.bridge = self.bridge
        m.d.comb += ResetSignal("sync").eq(self.bridge.restart)
        return m


class Line:
    """Bit-level serial port in a testbench, both directions; times are clock cycles."""

    def __init__(self, ctx, bridge):
        self.ctx, self.bridge, self.divisor = ctx, bridge, bridge.divisor
        self.received = bytearray()
        self._sending = [1]  # bit levels still to send; a line is idle before it is used
        self._cycle = 0
        self._listening = None  # cycle in which the start bit began

    def write(self, data: bytes):
        for byte in data:
            self._sending += [0, *((byte >> bit) & 1 for bit in range(8)), 1]

    def send_break(self):
        self._sending += [0] * 12 + [1] * 2

    @property
    def sending(self) -> bool:
        return bool(self._sending)

    async def step(self):
        """One clock cycle."""
        ctx = self.ctx
        if self._cycle % self.divisor == 0:
            ctx.set(self.bridge.rx, self._sending.pop(0) if self._sending else 1)
        await ctx.tick()
        self._cycle += 1
        level = ctx.get(self.bridge.tx)
        if self._listening is None:
            if level == 0:
                self._listening, self._bits = self._cycle, []
        elif self._cycle - self._listening == len(self._bits) * self.divisor + self.divisor // 2:
            self._bits.append(level)
            if len(self._bits) == 10:
                assert self._bits[0] == 0
                assert self._bits[9] == 1, "stop bit"
                self.received.append(sum(bit << place for place, bit in enumerate(self._bits[1:9])))
                self._listening = None


def talk(bridge, script, *, timeout=200_000):
    """Simulate *bridge* with the async function ``script(host, line, pump)``.

    ``await pump(condition)`` runs clock cycles, moving bytes between host and line, until ``condition()`` holds.
    """
    host = Host(bridge.layout)

    async def bench(ctx):
        line = Line(ctx, bridge)

        async def pump(condition):
            for _ in range(timeout):
                received, line.received = bytes(line.received), bytearray()
                line.write(host.exchange(received))
                if condition():
                    return
                await line.step()
            raise AssertionError("timeout")

        await script(host, line, pump)

    simulator = Simulator(Board(bridge))
    simulator.add_clock(1e-8)
    simulator.add_testbench(bench)
    simulator.run()
    return host
