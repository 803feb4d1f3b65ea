"""Attention through descriptors: cycles of a descriptor, and how much of the memory port it uses.

Usage: python bench/attention_memory.py [TOKENS] [LATENCY] [QUERIES]

Descriptors behind each other over a cache of zeros (time does not depend on the data), in Verilator.
"""

import sys
from pathlib import Path

from kvant import config
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.soc.descriptors import AttendDescriptor
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.sim.soc import bench
from kvant.sim.soc.driver import Accelerator

FOLDER = str(Path(__file__).parent)
DEFAULTS = [512, 50, 1]
MEMORY_BYTES = 1 << 18
COUNTS = (2, 10)
"""Descriptors of the runs whose difference counts."""


def program(host, tokens, queries):
    """Cycles and words of a descriptor."""
    accelerator = Accelerator(host, range(MEMORY_BYTES))
    layout = accelerator.cache
    # Windows all lie in page 0 of the pools.
    addresses = {
        "q": accelerator.allocate(queries * layout.query.query_bytes),
        "key_pool": accelerator.allocate(layout.keys.page_bytes),
        "value_pool": accelerator.allocate(layout.values.page_bytes),
        "table": accelerator.allocate(4 * (tokens // layout.record.group + 1)),
        "record": accelerator.allocate(layout.record.record_bytes),
        "out": accelerator.allocate(queries * 4 * layout.record.head_dim),
    }
    descriptor = AttendDescriptor(
        queries=queries,
        query_stride=layout.query.query_bytes,
        tokens=tokens,
        sinks=layout.record.sinks,
        out_stride=4 * layout.record.head_dim,
        **addresses,
    )
    counters = []
    for count in COUNTS:
        accelerator.command("clear_counters")
        accelerator.run([descriptor] * count)
        counters.append(accelerator.counters())
    more = COUNTS[1] - COUNTS[0]
    cycles, read = ((counters[1][name] - counters[0][name]) / more for name in ("CYCLES_BUSY", "BYTES_READ"))
    return cycles, read / accelerator.p.soc.port_bytes


def main(tokens: int, latency: int, queries: int) -> None:
    chosen = config.load(None, ["rows=2", "cols=2", "accumulators=8", "activation_words=64"])
    attention = AttentionParameters(sinks=4, capacity=1024, queries=2)
    p = TopParameters(chosen.linear, SocParameters(), attention=attention)
    options = {"latency": latency, "memory_bytes": MEMORY_BYTES}
    cycles, words = bench.run(p, program, options=options, paths=[FOLDER], tokens=tokens, queries=queries)
    what = f"{queries} queries, {tokens} tokens, latency {latency}"
    print(f"{what}: {cycles:.0f} cycles, {words:.0f} words, {words / cycles:.3f} a cycle")


if __name__ == "__main__":
    sys.path.insert(0, FOLDER)
    import attention_memory  # the simulator's process finds the program by this name

    attention_memory.main(*([int(text) for text in sys.argv[1:]] + DEFAULTS[len(sys.argv) - 1 :]))
