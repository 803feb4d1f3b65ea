"""Signals of AXI4-Lite."""

from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

OKAY, SLVERR = 0, 2
"""Responses."""


class LiteSignature(wiring.Signature):
    """AXI4-Lite with 32 bits of data, seen by the master; ``awprot`` and ``arprot`` are left out."""

    def __init__(self, address_bits: int):
        super().__init__(
            {
                "awaddr": Out(address_bits),
                "awvalid": Out(1),
                "awready": In(1),
                "wdata": Out(32),
                "wstrb": Out(4),
                "wvalid": Out(1),
                "wready": In(1),
                "bresp": In(2),
                "bvalid": In(1),
                "bready": Out(1),
                "araddr": Out(address_bits),
                "arvalid": Out(1),
                "arready": In(1),
                "rdata": In(32),
                "rresp": In(2),
                "rvalid": In(1),
                "rready": Out(1),
            }
        )
