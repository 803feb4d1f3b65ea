"""Block RAMs without collision logic: simulation stops where one address is read and written in one cycle."""

import contextlib

from amaranth.hdl import Assert, Module, Value
from amaranth.lib import memory


@contextlib.contextmanager
def asserted_memories():
    """Within, every memory that is elaborated with the attribute ``no_rw_check`` watches its ports.

    Yields
    ------
    list
        The memories that do.
    """
    original = memory.Memory.elaborate
    watched = []

    def elaborate(self, platform):
        if "no_rw_check" not in self.attrs:
            return original(self, platform)
        m = Module()
        m.submodules.storage = original(self, platform)
        watched.append(self)
        for read in self.read_ports:
            for write in self.write_ports:
                meet = read.en & Value.cast(write.en).any() & (read.addr == write.addr)
                m.d.sync += Assert(~meet, "one address is read and written")
        return m

    memory.Memory.elaborate = elaborate
    try:
        yield watched
    finally:
        memory.Memory.elaborate = original
