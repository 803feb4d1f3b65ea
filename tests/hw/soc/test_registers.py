"""The registers: one description; what the hardware makes of it, on its bus, with stalls."""

import random
import subprocess
from pathlib import Path

import pytest
from amaranth.sim import Simulator

from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.emit import emit
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.parameters import ParameterError
from kvant.hw.soc import register_file, register_text
from kvant.hw.soc.axi_lite import OKAY, SLVERR
from kvant.hw.soc.descriptors import (
    COMMON_BYTES,
    KINDS,
    AttendDescriptor,
    CacheDescriptor,
    Descriptor,
    Flag,
    Opcode,
)
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.hw.soc.register_file import RegisterFile, port_name
from kvant.hw.soc.registers import COUNTERS, IDENTIFICATION, Access, register_map

P = TopParameters(LinearParameters(), SocParameters())


async def write(ctx, bus, address, data, strobes=15, *, rng=None, data_first=False):
    """One write; the order of address and data, and the wait for the response, may be chosen."""
    parts = {"aw": {"awaddr": address}, "w": {"wdata": data, "wstrb": strobes}}
    left = ["w", "aw"] if data_first else ["aw", "w"]
    shown = list(left)
    if rng is not None:
        shown = left[:1]
    while left:
        for name in left:
            on = name in shown
            ctx.set(getattr(bus, f"{name}valid"), on)
            for key, value in parts[name].items():
                ctx.set(getattr(bus, key), value if on else 0)
        ready = {name: ctx.get(getattr(bus, f"{name}ready")) for name in shown}
        await ctx.tick()
        for name, is_ready in ready.items():
            if is_ready:
                ctx.set(getattr(bus, f"{name}valid"), 0)
                left.remove(name)
        shown = [name for name in left if name in shown or rng is None or rng.random() < 0.4]
    return await _response(ctx, bus, "b", "bresp", rng)


async def read(ctx, bus, address, *, rng=None):
    """One read: data and response."""
    ctx.set(bus.araddr, address)
    ctx.set(bus.arvalid, 1)
    while not ctx.get(bus.arready):
        await ctx.tick()
    await ctx.tick()
    ctx.set(bus.arvalid, 0)
    return await _response(ctx, bus, "r", "rdata", rng), ctx.get(bus.rresp)


async def _response(ctx, bus, channel, payload, rng):
    valid, ready = getattr(bus, f"{channel}valid"), getattr(bus, f"{channel}ready")
    seen = None
    for _ in range(100):
        ctx.set(ready, rng is None or rng.random() < 0.3)
        if ctx.get(valid):
            now = ctx.get(getattr(bus, payload))
            assert seen is None or seen == now, f"{payload} changed while it waited"
            seen = now
            if ctx.get(ready):
                await ctx.tick()
                ctx.set(ready, 0)
                return seen
        else:
            assert seen is None, f"{channel}valid dropped"
        await ctx.tick()
    raise AssertionError(f"no {channel}valid")


def run(bench):
    dut = RegisterFile(register_map(P))
    simulator = Simulator(dut)
    simulator.add_clock(1e-8)

    async def process(ctx):
        await bench(ctx, dut)

    simulator.add_testbench(process)
    simulator.run()


def test_reset_values_are_those_of_the_description():
    async def bench(ctx, dut):
        for register in dut.registers:
            data, response = await read(ctx, dut.bus, register.offset)
            assert (data, response) == (register.reset, OKAY), register.name

    run(bench)


def test_addresses_without_a_register_are_answered_with_an_error():
    async def bench(ctx, dut):
        known = {register.offset for register in dut.registers}
        for address in range(0, 1 << 12, 4):
            if address not in known and (address < 0x200 or address % 256 == 0):
                assert await read(ctx, dut.bus, address) == (0, SLVERR)
                assert await write(ctx, dut.bus, address, 0xFFFFFFFF) == SLVERR
        for register in dut.registers:
            assert await read(ctx, dut.bus, register.offset) == (register.reset, OKAY), register.name

    run(bench)


@pytest.mark.parametrize("seed", range(2))
def test_writable_fields_keep_the_bytes_that_were_strobed(seed):
    async def bench(ctx, dut):
        rng = random.Random(seed)
        control = [r for r in dut.registers if any(f.access is Access.CONTROL for f in r.fields)]
        model = {register.name: register.reset for register in control}
        for _ in range(60):
            register = rng.choice(control)
            mask = sum(f.mask for f in register.fields if f.access is Access.CONTROL)
            data, strobes = rng.getrandbits(32), rng.getrandbits(4)
            stalled = rng if rng.random() < 0.5 else None
            answer = await write(
                ctx, dut.bus, register.offset, data, strobes, rng=stalled, data_first=rng.random() < 0.5
            )
            assert answer == OKAY
            enabled = sum(255 << 8 * byte for byte in range(4) if strobes >> byte & 1) & mask
            model[register.name] = model[register.name] & ~enabled | data & enabled
            other = rng.choice(control)
            assert await read(ctx, dut.bus, other.offset, rng=stalled) == (model[other.name], OKAY)

    run(bench)


def test_commands_last_one_cycle_and_need_their_byte():
    async def bench(ctx, dut):
        pulses = []

        async def count():
            pulses.append((ctx.get(dut.control_start), ctx.get(dut.control_stop), ctx.get(dut.control_clear_counters)))

        bus = dut.bus
        for strobes in (15, 14):
            ctx.set(bus.awvalid, 1)
            ctx.set(bus.wvalid, 1)
            ctx.set(bus.bready, 1)
            ctx.set(bus.awaddr, dut.registers["CONTROL"].offset)
            ctx.set(bus.wdata, 0b1001)
            ctx.set(bus.wstrb, strobes)
            await ctx.tick()
            ctx.set(bus.awvalid, 0)
            ctx.set(bus.wvalid, 0)
            for _ in range(5):
                await count()
                await ctx.tick()
        assert pulses.count((1, 0, 1)) == 1 and pulses.count((0, 0, 0)) == 9

    run(bench)


def test_sticky_bits_are_cleared_by_ones_and_an_event_at_the_same_time_wins():
    async def bench(ctx, dut):
        error = dut.registers["ERROR"]
        for name in ("error_read_set", "error_write_set", "error_nonfinite_set"):
            ctx.set(getattr(dut, name), 1)
        await ctx.tick()
        ctx.set(dut.error_read_set, 0)
        ctx.set(dut.error_nonfinite_set, 0)
        assert (await read(ctx, dut.bus, error.offset))[0] == 0b10110
        await write(ctx, dut.bus, error.offset, 0b00110)  # write_set is still high
        assert (await read(ctx, dut.bus, error.offset))[0] == 0b10100
        ctx.set(dut.error_write_set, 0)
        await write(ctx, dut.bus, error.offset, 0xFF, 0b1110)  # no strobe on the byte
        assert (await read(ctx, dut.bus, error.offset))[0] == 0b10100
        await write(ctx, dut.bus, error.offset, 0xFF)
        assert (await read(ctx, dut.bus, error.offset))[0] == 0

    run(bench)


def test_shared_fields_hand_the_merged_word_to_the_hardware():
    async def bench(ctx, dut):
        ctx.set(dut.ring_head_index, 0x1234)
        seen = []

        await write(ctx, dut.bus, dut.registers["RING_HEAD"].offset, 0xABCD, 0b0010)
        seen.append(ctx.get(dut.ring_head_index_data))
        assert seen == [0xAB34]
        assert (await read(ctx, dut.bus, dut.registers["RING_HEAD"].offset))[0] == 0x1234

    run(bench)


def test_status_fields_read_what_the_hardware_says():
    async def bench(ctx, dut):
        for register in dut.registers:
            fields = [field for field in register.fields if field.access is Access.STATUS]
            for field in fields:
                ctx.set(getattr(dut, port_name(register, field)), (1 << field.width) - 1)
            if fields:
                expected = sum(field.mask for field in fields)
                assert await read(ctx, dut.bus, register.offset) == (expected, OKAY), register.name

    run(bench)


def test_a_counter_is_read_in_one_piece():
    async def bench(ctx, dut):
        for name in COUNTERS:
            low, high = dut.registers[f"{name}_LO"].offset, dut.registers[f"{name}_HI"].offset
            ctx.set(getattr(dut, name.lower()), 0x0001_FFFF_FFFF)
            assert (await read(ctx, dut.bus, low))[0] == 0xFFFF_FFFF
            ctx.set(getattr(dut, name.lower()), 0x0002_0000_0000)
            assert (await read(ctx, dut.bus, high))[0] == 1
            assert (await read(ctx, dut.bus, low))[0] == 0
            assert (await read(ctx, dut.bus, high))[0] == 2

    run(bench)


@pytest.mark.parametrize(
    ("kind", "start"), [(Descriptor, ""), (CacheDescriptor, "cache_"), (AttendDescriptor, "attend_")]
)
def test_the_c_header_compiles_and_says_what_the_description_says(tmp_path, kind, start):
    registers = register_map(P)
    fields = kind.kind.all_fields
    descriptor = kind(
        **{field.name: (0xF1E2D3C4B5A69788 + field.offset) & ((1 << field.width) - 1) for field in fields}
    )
    values = ", ".join(
        f".{field.name} = {getattr(descriptor, field.name)}u" + "ll" * (field.width > 32) for field in fields
    )
    checks = "".join(f"    assert(KVANT_{r.name} == {r.offset});\n" for r in registers)
    (tmp_path / "kvant_registers.h").write_text(register_text.c_header(registers))
    (tmp_path / "main.c").write_text(
        '#include <assert.h>\n#include <stdio.h>\n#include "kvant_registers.h"\nint main(void)\n{\n'
        f"{checks}    struct kvant_{start}descriptor d = {{{values}}};\n    uint8_t raw[KVANT_DESCRIPTOR_BYTES];\n"
        f'    kvant_{start}encode(&d, raw);\n    for (int i = 0; i < 64; i++)\n        printf("%02x", raw[i]);\n'
        "    return 0;\n}\n"
    )
    command = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "main.c", "-o", "main"]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    printed = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    assert bytes.fromhex(printed) == descriptor.encode()
    assert kind.decode(descriptor.encode()) == descriptor


@pytest.mark.parametrize("kind", KINDS)
def test_fields_lie_in_order_and_none_on_another(kind):
    end = 0
    for field in kind.all_fields:
        assert field.offset >= end and field.width % 8 == 0
        end = field.offset + field.width // 8
    assert end <= 64 and all(field.offset >= COMMON_BYTES for field in kind.fields)


def test_a_design_knows_the_opcodes_it_was_built_with():
    shape = {"group": 8, "head_dim": 8, "sinks": 2}
    cache = CacheParameters(**shape, centred=True)
    attention = AttentionParameters(**shape, rows=4, cols=2, capacity=32, queries=3)
    for parts, opcodes in (({}, 0b1110), ({"cache": cache}, 0b11110), ({"attention": attention}, 0b101110)):
        registers = register_map(TopParameters(LinearParameters(), SocParameters(), **parts))
        assert registers["FEATURES"].field("opcodes").reset == opcodes
        assert registers["CACHE_SHAPE"].reset == (8 << 16 | 8 if parts else 0)
    assert registers["ATTENTION"].reset == 3 and registers["ATTENTION_TOKENS"].reset == 32


def test_the_python_module_has_the_same_numbers():
    names = {}
    exec(register_text.python_module(register_map(P)), names)
    assert names["ID"] == 0 and names["ERROR_CODE"] == 0x34 and names["RING_HEAD_INDEX_MASK"] == 0xFFFF
    assert names["OPCODE_LINEAR"] == Opcode.LINEAR and names["FLAG_Y_STREAM"] == Flag.Y_STREAM


def test_constants_follow_the_parameters():
    p = TopParameters(LinearParameters(rows=3, cols=5, group=32), SocParameters(port_bits=64, address_bits=40))
    shape = register_map(p)["SHAPE"]
    assert shape.reset == 32 << 16 | 5 << 8 | 3
    assert register_map(p)["PORTS"].field("port_bits").reset == 64
    assert register_map(p)["ID"].reset == IDENTIFICATION == int.from_bytes(b"KVNT", "big")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port_bits": 100}, "port_bits = 100"),
        ({"port_bits": True}, "port_bits = True"),
        ({"address_bits": 65}, "address_bits = 65"),
        ({"burst_beats": 257}, "burst_beats = 257"),
        ({"burst_beats": 64, "weight_words": 127}, "weight_words = 127: legal with burst_beats = 64"),
    ],
)
def test_illegal_parameters_are_one_line(values, words):
    with pytest.raises(ParameterError) as error:
        SocParameters(**values)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_groups_that_are_no_whole_words_are_refused():
    with pytest.raises(ParameterError, match=r"group = 20: legal in the top with port_bits = 128 are multiples of 8"):
        TopParameters(LinearParameters(group=20), SocParameters())


def test_two_emissions_are_equal():
    texts = [emit(RegisterFile(register_map(P)), "registers").verilog for _ in range(2)]
    assert texts[0] == texts[1]


def test_the_page_of_the_registers_is_up_to_date():
    page = (Path(__file__).parents[3] / "docs" / "registers.md").read_text(encoding="utf-8")
    assert page == register_text.markdown(register_map(P)), "write it anew: kvant.hw.soc.register_text.markdown"


def test_a_file_that_answers_every_address_is_caught(monkeypatch):
    monkeypatch.setattr(register_file, "SLVERR", OKAY)
    with pytest.raises(AssertionError):
        test_addresses_without_a_register_are_answered_with_an_error()
