"""How busy the ports of the attention engine are: words of keys and values per cycle, commands behind each other.

Usage: python bench/attention_ports.py QUERIES PLANES TOKENS [FIELD=VALUE ...]

With time_keys=1 the keys are along time.
"""

import sys

import numpy as np

from kvant.hw.attention.parameters import AttentionParameters
from kvant.sim.attention.contents import Contents, Int8Rows, MantKeys, MantValues, TimeKeys, page_layouts, time_layout
from kvant.sim.attention.engine import Attend, play

COMMANDS = 3


def contents(p: AttentionParameters, tokens: int) -> Contents:
    """A cache of zeros: what it holds does not change the cycles."""
    keys, values = (layout.page_bytes for layout in page_layouts(p))
    none = Int8Rows(np.zeros((0, p.head_dim), np.int8), np.zeros((0, p.head_groups), np.float16))
    staged = np.zeros((tokens % p.group, p.head_dim), np.int8)
    pages = [bytes(keys)] * -(-tokens // p.group), [bytes(values)] * (tokens // p.group)
    scale = np.zeros(p.head_dim, np.float16)
    held = MantKeys(pages[0], none)
    if p.time_keys:
        held = TimeKeys([bytes(time_layout(p).page_bytes)] * (tokens // p.group), staged, scale, none)
    return Contents(tokens, held, MantValues(pages[1], staged, scale, none))


def main(queries: int, planes: int, tokens: int, **fields: int):
    """Print cycles of a command in the middle, and words per cycle."""
    fields["time_keys"] = bool(fields.get("time_keys", 0))
    capacity = -(-tokens // fields.get("group", 64)) * fields.get("group", 64)
    p = AttentionParameters(**{"queries": queries, "weight_planes": planes, "capacity": capacity} | fields)
    command = Attend(contents(p, tokens), np.ones((queries, p.head_dim), np.float16))
    trace = play(p, [command] * COMMANDS, simulator="verilator")
    words = sum(len(trace.cycles[port]) for port in ("keys", "values")) // COMMANDS
    keys = trace.cycles["keys"]
    cycles = keys[2 * len(keys) // COMMANDS] - keys[len(keys) // COMMANDS]
    print(f"{queries} queries, {planes} planes, {tokens} tokens: {cycles} cycles, {words} words, {words / cycles:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), **{k: int(v) for k, v in (field.split("=") for field in sys.argv[4:])})
