"""The registers behind Wishbone."""

from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.soc.axi_lite import OKAY, LiteSignature

_WORD_BITS = 2


class WishboneSignature(wiring.Signature):
    """Wishbone B4, classic cycles, 32 bits with a select of bytes, word addresses; seen by the master."""

    def __init__(self, address_bits: int):
        super().__init__(
            {
                "cyc": Out(1),
                "stb": Out(1),
                "we": Out(1),
                "adr": Out(address_bits - _WORD_BITS),
                "sel": Out(4),
                "dat_w": Out(32),
                "dat_r": In(32),
                "ack": In(1),
                "err": In(1),
            }
        )


class WishboneBridge(wiring.Component):
    """A Wishbone slave in front of AXI4-Lite registers (`RegisterFile.bus`, ``s_axil`` of the top).

    A cycle ends with `ack`, or with `err` where the registers answer SLVERR.
    A cycle that the master gives up (``cyc`` falls) is still finished at the registers, without an answer.

    Parameters
    ----------
    address_bits : int
        Bits of a byte address.

    Members
    -------
    wb : In(WishboneSignature)
    bus : Out(LiteSignature)
    """

    def __init__(self, address_bits: int):
        super().__init__({"wb": In(WishboneSignature(address_bits)), "bus": Out(LiteSignature(address_bits))})

    def elaborate(self, platform):
        m = Module()
        wb, bus = self.wb, self.bus
        wanted = Signal()  # the master has not given up the cycle
        m.d.sync += [wb.ack.eq(0), wb.err.eq(0)]
        for channel in ("aw", "w", "ar"):
            with m.If(getattr(bus, f"{channel}ready")):
                m.d.sync += getattr(bus, f"{channel}valid").eq(0)
        m.d.comb += [bus.bready.eq(1), bus.rready.eq(1)]
        with m.FSM():
            with m.State("IDLE"):
                # In the cycle of an answer the master's strobe is still that of the cycle it ends.
                with m.If(wb.cyc & wb.stb & ~wb.ack & ~wb.err):
                    m.d.sync += [
                        wanted.eq(1),
                        bus.awaddr.eq(wb.adr << _WORD_BITS),
                        bus.araddr.eq(wb.adr << _WORD_BITS),
                        bus.wdata.eq(wb.dat_w),
                        bus.wstrb.eq(wb.sel),
                        bus.awvalid.eq(wb.we),
                        bus.wvalid.eq(wb.we),
                        bus.arvalid.eq(~wb.we),
                    ]
                    m.next = "ANSWER"
            with m.State("ANSWER"):
                with m.If(~wb.cyc):
                    m.d.sync += wanted.eq(0)
                with m.If(bus.bvalid):
                    m.d.sync += [
                        wb.ack.eq(wanted & wb.cyc & (bus.bresp == OKAY)),
                        wb.err.eq(wanted & wb.cyc & (bus.bresp != OKAY)),
                    ]
                    m.next = "IDLE"
                with m.If(bus.rvalid):
                    m.d.sync += [
                        wb.ack.eq(wanted & wb.cyc & (bus.rresp == OKAY)),
                        wb.err.eq(wanted & wb.cyc & (bus.rresp != OKAY)),
                        wb.dat_r.eq(bus.rdata),
                    ]
                    m.next = "IDLE"
        return m
