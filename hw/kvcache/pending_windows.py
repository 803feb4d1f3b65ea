"""Windows that wait for their second phase."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.window_encoder import ClosedWindow
from kvant.hw.parameters import check_integer


class PendingWindows(wiring.Component):
    """Keeps closed windows in the order in which they were closed; those of the first heads pass all others.

    Parameters
    ----------
    p : CacheParameters
    ring_rows : int
        Rows of a head's ring, which limit its windows.
    latency : int
        Cycles after which the rows of a window that is closed are in the buffer.
    first_heads : int
        Windows of the heads below this number go first.

    Members
    -------
    close, window : in
        The row that completes a window is taken. There is always a place.
    o : out stream of `ClosedWindow`
        Windows whose rows are in the buffer. Another one may take the place of a window that is offered and not taken.
    empty : out
        No window is waiting.
    """

    def __init__(self, p: CacheParameters, ring_rows: int, latency: int, *, first_heads: int = 0):
        self.p = p
        self.ring_rows = ring_rows
        self.latency = check_integer("latency", latency, 2)
        self.first_heads = check_integer("first_heads", first_heads, 0, p.heads)
        window = ClosedWindow(ring_rows)
        super().__init__({"close": In(1), "window": In(window), "o": Out(stream.Signature(window)), "empty": Out(1)})

    def elaborate(self, platform):
        m = Module()
        classes = {"first": self.first_heads, "other": self.p.heads - self.first_heads}
        is_first = self.window.head < self.first_heads
        waiting, before = [], 0  # whether a window of a class before is offered
        for name, heads in classes.items():
            if not heads:
                continue
            belongs = 1 if heads == self.p.heads else is_first if name == "first" else ~is_first
            depth = heads * (self.ring_rows // self.p.group)
            m.submodules[f"{name}_windows"] = queue = fifo.SyncFIFOBuffered(width=self.window.shape().size, depth=depth)
            closes, offered, leaves = Signal(), Signal(), Signal()
            arriving = Signal(self.latency - 1)
            arrived = Signal(range(depth + 1))
            m.d.comb += [
                closes.eq(self.close & belongs),
                queue.w_en.eq(closes),
                queue.w_data.eq(self.window),
                offered.eq(queue.r_rdy & (arrived != 0)),
                leaves.eq(offered & ~before & self.o.ready),
                queue.r_en.eq(leaves),
            ]
            m.d.sync += [arriving.eq(Cat(closes, arriving)), arrived.eq(arrived + arriving[-1] - leaves)]
            waiting.append((offered, queue))
            before = before | offered
        payload = waiting[-1][1].r_data
        if len(waiting) > 1:
            payload = Mux(waiting[0][0], waiting[0][1].r_data, payload)
        m.d.comb += [
            self.o.valid.eq(before),
            self.o.payload.eq(payload),
            self.empty.eq(Cat(queue.level == 0 for _, queue in waiting).all()),
        ]
        return m
