"""`AxiMemory` at the port of a component in Amaranth's simulator."""

from kvant.sim.soc.memory import MASTER_SIGNALS


def memory_process(bus, memory, *, cycles=None):
    """Testbench that serves *bus* (`MasterSignature`, or half of it) from *memory* for ever, or for *cycles*."""
    master = [name for name in (*MASTER_SIGNALS, "rready", "bready") if hasattr(bus, name)]
    absent = dict.fromkeys((*MASTER_SIGNALS, "rready", "bready"), 0)

    async def process(ctx):
        while cycles is None or memory.cycle < cycles:
            for name, value in memory.drive().items():
                if hasattr(bus, name):
                    ctx.set(getattr(bus, name), value & ((1 << len(getattr(bus, name))) - 1))
            await ctx.delay(0)
            memory.sample(absent | {name: ctx.get(getattr(bus, name)) for name in master})
            await ctx.tick()

    return process
