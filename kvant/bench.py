"""Self-checking bench of a generated design: plays vectors.json and compares every transfer.

Needs cocotb 2.1 or a later 2.x and nothing else. Inputs change just after a rising clock edge, everything is sampled
at the falling edge; what is valid and ready there is transferred at the next rising edge.
"""

import json
import random
from pathlib import Path

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import Combine, FallingEdge, RisingEdge

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
IDLE_LIMIT = 20000
"""Cycles without a transfer on a stream after which it counts as stuck."""


def known(dut, port: str) -> int:
    """Value of a port; an unknown bit fails the test by name."""
    bits = str(getattr(dut, port).value)
    assert set(bits) <= {"0", "1"}, f"{port} is unknown: {bits}"
    return int(bits, 2)


def transfers(stream: dict) -> list[dict[str, int]]:
    """Value of each port, transfer by transfer."""
    columns = {stream["ports"][field]: values for field, values in stream["transfers"].items()}
    return [{port: int(values[i], 16) for port, values in columns.items()} for i in range(stream["count"])]


async def play(dut, name: str, stream: dict, stall: float, pick: random.Random, done: dict[str, int]) -> None:
    """Offer all transfers of an input; valid stays until ready. It begins when `after` says so."""
    other, count = stream.get("after", (name, 0))
    while done[other] < count:
        await RisingEdge(dut.clk)
    for values in transfers(stream):
        while pick.random() < stall:
            await RisingEdge(dut.clk)
        for port, value in values.items():
            getattr(dut, port).value = value
        if stream["valid"]:
            getattr(dut, stream["valid"]).value = 1
        for _ in range(IDLE_LIMIT):
            await FallingEdge(dut.clk)
            taken = known(dut, stream["ready"]) if stream["ready"] else 1
            await RisingEdge(dut.clk)
            if taken:
                break
        else:
            raise AssertionError(f"stream {name}: not ready for {IDLE_LIMIT} cycles")
        done[name] += 1
        if stream["valid"]:
            getattr(dut, stream["valid"]).value = 0


async def check(dut, name: str, stream: dict, stall: float, pick: random.Random, done: dict[str, int]) -> None:
    """Take all transfers of an output and compare them."""
    for index, expected in enumerate(transfers(stream)):
        for _ in range(IDLE_LIMIT):
            ready = pick.random() >= stall
            if stream["ready"]:
                getattr(dut, stream["ready"]).value = ready
            await FallingEdge(dut.clk)
            seen = None
            if ready and (known(dut, stream["valid"]) if stream["valid"] else 1):
                seen = {port: known(dut, port) for port in expected}
            await RisingEdge(dut.clk)
            if seen is not None:
                break
        else:
            raise AssertionError(f"stream {name}: not valid for {IDLE_LIMIT} cycles, {index} transfers seen")
        done[name] += 1
        for port, value in expected.items():
            assert seen[port] == value, f"{port}, transfer {index}: {seen[port]:#x} instead of {value:#x}"
    if stream["ready"]:
        getattr(dut, stream["ready"]).value = 0


@cocotb.test()
@cocotb.parametrize(stall=[0.0, 0.5])
async def streams_match_vectors(dut, stall: float) -> None:
    """Every output transfer and every plain output equals the golden model's, with and without stalls."""
    for port, value in VECTORS["constants"].items():
        getattr(dut, port).value = int(value, 16)
    for stream in VECTORS["streams"].values():
        driven = stream["valid"] if stream["direction"] == "input" else stream["ready"]
        if driven:
            getattr(dut, driven).value = 0
    dut.rst.value = 1
    Clock(dut.clk, 10, unit="ns").start(start_high=False)
    for _ in range(3):
        await RisingEdge(dut.clk)
    dut.rst.value = 0
    await RisingEdge(dut.clk)
    tasks, done = [], dict.fromkeys(VECTORS["streams"], 0)
    for name, stream in VECTORS["streams"].items():
        work = play if stream["direction"] == "input" else check
        tasks.append(cocotb.start_soon(work(dut, name, stream, stall, random.Random(name), done)))
    await Combine(*tasks)
    for _ in range(16):
        await RisingEdge(dut.clk)
    await FallingEdge(dut.clk)
    for stream_name, stream in VECTORS["streams"].items():
        if stream["direction"] == "output" and stream["valid"]:
            assert not known(dut, stream["valid"]), f"stream {stream_name}: more than {stream['count']} transfers"
    for port, value in VECTORS["status"].items():
        seen = known(dut, port)
        assert seen == int(value, 16), f"{port}: {seen:#x} instead of {value}"
