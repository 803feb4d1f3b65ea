"""Signals of the AXI4 memory port."""

from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.soc.parameters import SocParameters

ID_BITS = 4
"""Bits of an identifier: one for each client of the read arbiter."""

INCR = 1
"""Burst type: addresses grow."""

CACHE = 0b0011
"""Normal memory, not cached, bufferable."""


def word_address_bits(p: SocParameters) -> int:
    """Bits of an address that counts words of the port."""
    return p.address_bits - p.align_bits


class Burst(data.StructLayout):
    """Words that lie one behind the other within 4 KB.

    Members
    -------
    address : word address of the first
    beats : 8
        Words, less one.
    """

    def __init__(self, p: SocParameters):
        super().__init__({"address": word_address_bits(p), "beats": 8})


def _address_channel(prefix: str, p: SocParameters) -> dict[str, wiring.Member]:
    return {
        f"{prefix}id": Out(ID_BITS),
        f"{prefix}addr": Out(p.address_bits),
        f"{prefix}len": Out(8),
        f"{prefix}size": Out(3, init=p.align_bits),
        f"{prefix}burst": Out(2, init=INCR),
        f"{prefix}cache": Out(4, init=CACHE),
        f"{prefix}prot": Out(3),
        f"{prefix}valid": Out(1),
        f"{prefix}ready": In(1),
    }


class ReadSignature(wiring.Signature):
    """Read half of AXI4, seen by the master."""

    def __init__(self, p: SocParameters):
        super().__init__(
            {
                **_address_channel("ar", p),
                "rid": In(ID_BITS),
                "rdata": In(p.port_bits),
                "rresp": In(2),
                "rlast": In(1),
                "rvalid": In(1),
                "rready": Out(1),
            }
        )


class WriteSignature(wiring.Signature):
    """Write half of AXI4, seen by the master."""

    def __init__(self, p: SocParameters):
        super().__init__(
            {
                **_address_channel("aw", p),
                "wdata": Out(p.port_bits),
                "wstrb": Out(p.port_bytes),
                "wlast": Out(1),
                "wvalid": Out(1),
                "wready": In(1),
                "bid": In(ID_BITS),
                "bresp": In(2),
                "bvalid": In(1),
                "bready": Out(1),
            }
        )


class MasterSignature(wiring.Signature):
    """AXI4, seen by the master; ``lock``, ``qos`` and ``region`` are left out."""

    def __init__(self, p: SocParameters):
        super().__init__({**dict(WriteSignature(p).members), **dict(ReadSignature(p).members)})
