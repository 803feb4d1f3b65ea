"""The registers behind Wishbone."""

import random

from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In
from amaranth.sim import Simulator

from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.hw.soc.register_file import RegisterFile
from kvant.hw.soc.registers import IDENTIFICATION, register_map
from kvant.hw.soc.wishbone import WishboneBridge, WishboneSignature

REGISTERS = register_map(TopParameters(LinearParameters(), SocParameters()))


class WishboneRegisters(wiring.Component):
    """The register file behind the bridge."""

    wb: In(WishboneSignature(REGISTERS.address_bits))

    def elaborate(self, platform):
        m = Module()
        m.submodules.bridge = bridge = WishboneBridge(REGISTERS.address_bits)
        m.submodules.file = file = RegisterFile(REGISTERS)
        wiring.connect(m, wiring.flipped(self.wb), bridge.wb)
        wiring.connect(m, bridge.bus, file.bus)
        return m


async def access(ctx, wb, offset, value=None, sel=15, gap=0):
    """One classic cycle: data, and "ack" or "err"."""
    ctx.set(wb.cyc, 1)
    ctx.set(wb.stb, 1)
    ctx.set(wb.we, value is not None)
    ctx.set(wb.adr, offset >> 2)
    ctx.set(wb.sel, sel)
    ctx.set(wb.dat_w, value or 0)
    for _ in range(20):
        await ctx.tick()
        if ctx.get(wb.ack) or ctx.get(wb.err):
            answer = ctx.get(wb.dat_r), "ack" if ctx.get(wb.ack) else "err"
            await ctx.tick()
            ctx.set(wb.cyc, 0)
            ctx.set(wb.stb, 0)
            for _ in range(gap):
                assert not ctx.get(wb.ack) and not ctx.get(wb.err)
                await ctx.tick()
            return answer
    raise AssertionError("no answer")


def run(bench):
    dut = WishboneRegisters()
    simulator = Simulator(dut)
    simulator.add_clock(1e-8)

    async def process(ctx):
        await bench(ctx, dut.wb)

    simulator.add_testbench(process)
    simulator.run()


def test_registers_are_read_and_written_byte_by_byte():
    async def bench(ctx, wb):
        rng = random.Random(1)
        assert await access(ctx, wb, REGISTERS["ID"].offset) == (IDENTIFICATION, "ack")
        offset, model = REGISTERS["RING_BASE_HI"].offset, 0
        for _ in range(20):
            value, sel = rng.getrandbits(32), rng.getrandbits(4)
            assert (await access(ctx, wb, offset, value, sel, gap=rng.randrange(3)))[1] == "ack"
            mask = sum(255 << 8 * byte for byte in range(4) if sel >> byte & 1)
            model = model & ~mask | value & mask
            assert await access(ctx, wb, offset, gap=rng.randrange(3)) == (model, "ack")

    run(bench)


def test_addresses_without_a_register_end_with_an_error():
    async def bench(ctx, wb):
        for offset in (0x1C, 0xC0, 0xFFC):
            assert (await access(ctx, wb, offset))[1] == "err"
            assert (await access(ctx, wb, offset, 1))[1] == "err"
        assert await access(ctx, wb, REGISTERS["ID"].offset) == (IDENTIFICATION, "ack")

    run(bench)


def test_a_cycle_that_is_given_up_leaves_no_answer_behind():
    async def bench(ctx, wb):
        for pause in range(1, 10):
            ctx.set(wb.adr, REGISTERS["SHAPE"].offset >> 2)
            for name in ("cyc", "stb"):
                ctx.set(getattr(wb, name), 1)
            await ctx.tick()
            for name in ("cyc", "stb"):
                ctx.set(getattr(wb, name), 0)
            for _ in range(pause):
                await ctx.tick()
                assert not ctx.get(wb.ack) and not ctx.get(wb.err)
            assert await access(ctx, wb, REGISTERS["ID"].offset, gap=3) == (IDENTIFICATION, "ack")

    run(bench)
