"""Keys along time and values through one requantiser, keys first."""

from amaranth.hdl import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.layouts import PageWrite, TableWrite
from kvant.hw.kvcache.packer import META_BITS
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.requantizer import Requantizer, row_input
from kvant.hw.kvcache.sinks import sink_output
from kvant.hw.kvcache.staged_reader import StagedRequest, staged_output
from kvant.hw.parameters import ParameterError

NO_HEAD = 255
"""Head of a row that names one that does not exist."""


def unit_parameters(p: CacheParameters) -> CacheParameters:
    """The parameters of the one unit: the heads of the keys, then as many of the values."""
    return CacheParameters(**dict(p) | {"heads": 2 * p.heads})


class RowArbiter(wiring.Component):
    """Two streams of rows into one, keys first, row by row.

    Between rows a key is chosen whenever there is one. While the chosen row has to wait (its ring of pages is full,
    say) and the other stream has one too, they are offered in turn, so that neither blocks the other. A row that has
    begun goes through to its end.

    No latency: the ready of both ports follows that of the output in the same cycle.

    Parameters
    ----------
    p : CacheParameters
        With the heads of either stream.

    Members
    -------
    k, v : in stream
        Rows; see `row_input`. Heads from 0 on.
    o : out stream
        Rows: of keys with their head, of values with `p.heads` added to it, of one that does not exist with
        `NO_HEAD`. A row that is offered may be exchanged for another as long as its first transfer is not taken.
    """

    def __init__(self, p: CacheParameters):
        self.p = p
        rows = stream.Signature(row_input(p))
        super().__init__({"k": In(rows), "v": In(rows), "o": Out(rows)})

    def elaborate(self, platform):
        p, k, v, o = self.p, self.k, self.v, self.o
        m = Module()
        in_row, owner, other_turn, use_k = Signal(), Signal(), Signal(), Signal()
        transfer = Signal(range(max(2, p.row_transfers)))
        row_end = transfer == p.row_transfers - 1
        m.d.comb += [
            use_k.eq(Mux(in_row, owner, k.valid & ~(other_turn & v.valid))),
            o.valid.eq(Mux(use_k, k.valid, v.valid)),
            o.payload.eq(Mux(use_k, k.payload, v.payload)),
            k.ready.eq(o.ready & use_k),
            v.ready.eq(o.ready & ~use_k),
        ]
        head = Mux(use_k, k.payload.user.head, v.payload.user.head)
        known = head < p.heads
        m.d.comb += o.payload.user.head.eq(Mux(known, head + Mux(use_k, 0, p.heads), NO_HEAD))
        with m.If(o.valid & o.ready):
            m.d.sync += [
                in_row.eq(~row_end),
                owner.eq(use_k),
                other_turn.eq(0),
                transfer.eq(Mux(row_end, 0, transfer + 1)),
            ]
        with m.Elif(~in_row):
            # A key that waits lets a value try; a value that waits in its turn, a key.
            m.d.sync += other_turn.eq(o.valid & use_k)
        return m


class SharedCache(wiring.Component):
    """One `Requantizer` for keys (along time) and values; keys go first.

    Inside, and on all ports but `k` and `v`, the heads 0 .. H-1 are the keys' and H .. 2H-1 the values'. Keys go
    first twice: a key's row is taken before any value's row that has not begun, and a window of keys is encoded before
    any window of values that has not been begun. What a key may have to wait for is therefore one row of values at the
    port, and at most two windows of values (one that is encoded and one whose channels are already in the chain before
    the encoder) between its last row and its page.

    Options (`offset`, `shared_coeff`, `centred`, `sinks`) hold for both; the mean of a values' head is written as 0, or
    not at all. Rows of keys and values that together come back to back, a transfer per cycle, never wait, other than
    for one another.

    Parameters
    ----------
    p : CacheParameters
        With H = `p.heads`, at most 127: of keys, and as many of values.

    Members
    -------
    k, v : in stream
        Rows of keys and of values; see `Requantizer.v`. Heads 0 .. H-1 in either.
    k_stall_cycles, v_stall_cycles : out
        Cycles in which a row of keys, of values, was offered and not taken, modulo 2^32; those in which the port was
        given to the other one included.
    cfg, sink, peek, staged, codes, meta, busy, nonfinite, error, full, saturated, busy_cycles
        See `Requantizer`.

    Raises
    ------
    ParameterError
        When a cache cannot be built of *p*, or `heads` is too large.
    """

    MAX_HEADS = 127

    def __init__(self, p: CacheParameters):
        if p.heads > self.MAX_HEADS:
            raise ParameterError(
                f"heads = {p.heads}: legal where keys and values share a unit are 1 to {self.MAX_HEADS}"
            )
        self.p = p
        self.requantizer = Requantizer(unit_parameters(p), first_heads=p.heads)
        both = self.requantizer.p
        super().__init__(
            {
                "cfg": In(stream.Signature(data.StructLayout({"data": TableWrite()}))),
                "k": In(stream.Signature(row_input(p))),
                "v": In(stream.Signature(row_input(p))),
                "sink": Out(stream.Signature(sink_output(both))),
                "peek": In(stream.Signature(data.StructLayout({"data": StagedRequest()}))),
                "staged": Out(stream.Signature(staged_output(both))),
                "codes": Out(stream.Signature(PageWrite(self.requantizer.packer.word_bits))),
                "meta": Out(stream.Signature(PageWrite(META_BITS))),
                **dict.fromkeys(["busy", "nonfinite", "error", "full"], Out(1)),
                **dict.fromkeys(["saturated", "k_stall_cycles", "v_stall_cycles", "busy_cycles"], Out(32)),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.arbiter = arbiter = RowArbiter(self.p)
        m.submodules.requantizer = cache = self.requantizer
        wiring.connect(m, wiring.flipped(self.k), arbiter.k)
        wiring.connect(m, wiring.flipped(self.v), arbiter.v)
        wiring.connect(m, arbiter.o, cache.v)
        for name in ("cfg", "peek"):
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(cache, name))
        for name in ("sink", "staged", "codes", "meta"):
            wiring.connect(m, getattr(cache, name), wiring.flipped(getattr(self, name)))
        for name in ("busy", "nonfinite", "error", "full", "saturated", "busy_cycles"):
            m.d.comb += getattr(self, name).eq(getattr(cache, name))
        for port, count in ((self.k, self.k_stall_cycles), (self.v, self.v_stall_cycles)):
            with m.If(port.valid & ~port.ready):
                m.d.sync += count.eq(count + 1)
        return m
