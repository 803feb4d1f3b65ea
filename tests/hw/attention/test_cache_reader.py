"""Tiles of the array from words of memory: every shape of array and port, pages, INT8 blocks, both kinds of jobs."""

from contextlib import nullcontext

import numpy as np
import pytest
from group_streams import words
from memory_collisions import asserted_memories

from kvant.hw.attention.cache_reader import CacheReader, ReaderJob
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.linear.weight_buffer import weight_input
from kvant.hw.numeric.codes import INT8
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

SEED = 20261130

SHAPES = [
    {"group": 8, "head_dim": 8, "rows": 8, "cols": 8, "sinks": 2},
    {"group": 16, "head_dim": 12, "rows": 2, "cols": 2, "port_bits": 64},
    {"group": 32, "head_dim": 64, "rows": 16, "cols": 4, "sinks": 3},
    {"group": 8, "head_dim": 32, "rows": 1, "cols": 4},
    {"group": 8, "head_dim": 64, "rows": 4, "cols": 2, "port_bits": 32},
]
"""One group a token or several; more columns than banks; beats of words that begin in the middle of a word."""


class Block:
    """A random block: u4 or u8 elements [16, G], scales, coefficients; as bytes of memory."""

    def __init__(self, rng, p, *, int8):
        self.int8 = int8
        self.elements = rng.integers(0, 256 if int8 else 16, (16, p.group), dtype=np.uint8)
        self.scale = rng.integers(0, 1 << 16, 16, dtype=np.uint16)
        self.coefficient = np.full(16, INT8, np.uint8) if int8 else rng.integers(0, 256, 16, dtype=np.uint8)

    def data(self):
        """The bytes."""
        if self.int8:
            return self.elements.tobytes() + self.scale.tobytes()
        flat = self.elements.reshape(-1)
        return (flat[0::2] | flat[1::2] << 4).tobytes() + self.scale.tobytes() + self.coefficient.tobytes()

    def beats(self, p, tiles, *, values):
        """Transfers of the tiles."""
        head_groups = 1 if values else p.head_groups
        count = ceil_div(p.group if values else min(p.group, p.head_dim), p.rows)
        for g in range(head_groups):
            for tile in range(tiles):
                columns = [(tile * p.cols + c) * head_groups + g for c in range(p.cols)]
                user = [{"scale": int(self.scale[n]), "coefficient": int(self.coefficient[n])} for n in columns]
                elements = self.elements[columns]
                for plane in [elements >> 4, elements & 15] if self.int8 else [elements]:
                    for beat in range(count):
                        yield {"data": plane[:, beat * p.rows :][:, : p.rows].tolist(), "user": user}


def job(rng, p, *, values=False, int8=False, sinks=0, tokens=0):
    """A job's fields, the bytes of its port, and its transfers."""
    memory, transfers = b"", []
    sink_blocks = ceil_div(sinks * p.head_groups, 16) if sinks else 0
    for _ in range(sink_blocks):
        block = Block(rng, p, int8=True)
        memory += block.data()
        transfers += block.beats(p, p.key_tiles, values=False)
    tiles = ceil_div(tokens, p.cols)
    left = tiles
    if values:
        pages = tokens // p.group
    elif int8:
        pages = ceil_div(tokens * p.head_groups, 16)
    else:
        pages = ceil_div(tokens, p.group)
    for _ in range(pages):
        left = p.value_tiles if values else left
        per_page = p.value_blocks if values else 1 if int8 else p.page_blocks
        per_block = 16 // p.cols if values else p.key_tiles if int8 else p.page_key_tiles
        for _ in range(per_page):
            block = Block(rng, p, int8=int8)
            memory += block.data()
            transfers += block.beats(p, min(left, per_block), values=values)
            left -= min(left, per_block)
        if not int8:
            memory += rng.bytes(16)
    fields = {"values": int(values), "int8": int(int8), "sink_blocks": sink_blocks, "pages": pages}
    return fields | {"tiles": 0 if values else tiles}, memory, transfers


def time_job(rng, p, *, tokens, sinks=0):
    """Keys along time: the fields of the job, the bytes of its port, its transfers, words of channels."""
    windows, staged = divmod(tokens, p.group)
    int8_blocks = ceil_div(staged * p.head_groups, 16) + ceil_div(sinks * p.head_groups, 16)
    channels = p.value_blocks * 16
    memory = rng.bytes(2 * channels)
    metadata, transfers = [memory], []
    for _ in range(int8_blocks):
        block = Block(rng, p, int8=True)
        memory += block.data()
        transfers += block.beats(p, p.key_tiles, values=False)
    for _ in range(windows):
        codes = rng.integers(0, 16, (channels, p.group), dtype=np.uint8)
        for block in codes.reshape(-1, 16 * p.group):
            memory += (block[0::2] | block[1::2] << 4).tobytes()
            metadata.append(rng.bytes(48))
            memory += metadata[-1]
        coefficient = int(rng.integers(0, 254))
        memory += rng.bytes(4) + bytes([coefficient]) + rng.bytes(11)
        transfers += time_beats(p, codes, coefficient)
    fields = {"values": 0, "int8": 0, "time": 1, "sink_blocks": int8_blocks, "pages": windows, "tiles": 0}
    return fields, memory, transfers, b"".join(metadata)


def time_beats(p, codes, coefficient):
    """Transfers of a window: codes u8 [channels, G]."""
    user = [{"scale": 0x3C00, "coefficient": coefficient}] * p.cols
    for first in range(0, p.window_tiles, p.key_tiles):
        for head_group in range(p.head_groups):
            for tile in range(first, first + p.key_tiles):
                for beat in range(ceil_div(min(p.group, p.head_dim), p.rows)):
                    rows = codes[head_group * p.group + beat * p.rows :][: p.rows]
                    yield {"data": rows[:, tile * p.cols :][:, : p.cols].T.tolist(), "user": user}


def play(p, jobs, **options):
    """The trace of the jobs."""
    size = p.port_bits // 8
    ports = {"keys": b"", "values": b""}
    for fields, memory, *_ in jobs:
        ports["values" if fields["values"] else "keys"] += memory
    inputs = {
        name: {"data": [int.from_bytes(text[k : k + size], "little") for k in range(0, len(text), size)]}
        for name, text in ports.items()
    }
    inputs["job"] = {"data": words(ReaderJob(p), [fields for fields, *_ in jobs])}
    count = sum(len(transfers) for _, _, transfers, *_ in jobs)
    stimulus = Stimulus(inputs, {"w": count})
    watched = asserted_memories if options.get("simulator", "amaranth") == "amaranth" else nullcontext
    options = {"simulator": "amaranth", "drain_cycles": 300} | options
    with watched():
        trace = simulate(lambda: CacheReader(p), "cache_reader", stimulus, **options)
    assert {name: len(trace.transfers[name]["data"]) for name in inputs} == {
        name: len(part["data"]) for name, part in inputs.items()
    }
    return trace


def expected(p, jobs):
    """The transfers of all jobs: data and user."""
    layout = weight_input(p.linear)
    rows = [row for _, _, transfers, *_ in jobs for row in transfers]
    return words(layout["data"].shape, [row["data"] for row in rows]), words(
        layout["user"].shape, [row["user"] for row in rows]
    )


def some_jobs(rng, p):
    """Jobs of both kinds, with tokens that end anywhere."""
    return [
        job(rng, p, tokens=p.group + 1, sinks=p.sinks),
        job(rng, p, values=True, tokens=p.group),
        job(rng, p, tokens=p.cols + 1, int8=True),
    ]


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_tiles_are_those_of_memory(number):
    p = AttentionParameters(capacity=4 * SHAPES[number]["group"], lanes=4, **SHAPES[number])
    jobs = some_jobs(np.random.default_rng(SEED), p)
    stall = (0, 0.3, 0.9)[number % 3]
    trace = play(p, jobs, stall=stall)
    data, user = expected(p, jobs)
    assert trace.transfers["w"]["data"] == data
    assert trace.transfers["w"]["user"] == user


@pytest.mark.parametrize(
    "shape",
    [
        {"group": 16, "head_dim": 16, "rows": 8, "cols": 8, "sinks": 2},
        {"group": 16, "head_dim": 32, "rows": 4, "cols": 2, "port_bits": 64},
        {"group": 32, "head_dim": 64, "rows": 16, "cols": 4, "sinks": 3},
        {"group": 8, "head_dim": 32, "rows": 1, "cols": 4},
        {"group": 16, "head_dim": 12, "rows": 4, "cols": 2, "port_bits": 32},
        {"group": 64, "head_dim": 20, "rows": 8, "cols": 16},
    ],
)
@pytest.mark.parametrize("stall", [0, 0.3])
def test_tiles_of_keys_along_time_are_transposed_windows(shape, stall):
    """As many rows as columns, more, fewer; channels that are no whole blocks; jobs of other kinds around."""
    p = AttentionParameters(capacity=4 * shape["group"], lanes=4, time_keys=True, **shape)
    rng = np.random.default_rng(SEED)
    jobs = [
        time_job(rng, p, tokens=2 * p.group + 3, sinks=p.sinks),
        job(rng, p, values=True, tokens=p.group),
        time_job(rng, p, tokens=4 * p.group),
        job(rng, p, tokens=p.group + 1),
        time_job(rng, p, tokens=1),
        job(rng, p, tokens=p.cols + 1, int8=True),
    ]
    jobs = [(fields | {"time": fields.get("time", 0)}, *rest) for fields, *rest in jobs]
    trace = play(p, jobs, stall=stall)
    data, user = expected(p, jobs)
    assert trace.transfers["w"]["data"] == data
    assert trace.transfers["w"]["user"] == user
    size = p.port_bits // 8
    text = b"".join(rest[0] for _, _, _, *rest in jobs if rest)
    mask = (1 << p.port_bits) - 1  # the payload's other members lie above
    assert [word & mask for word in trace.transfers["channel_words"]["data"]] == [
        int.from_bytes(text[k : k + size], "little") for k in range(0, len(text), size)
    ]


def test_a_reset_in_the_middle_leaves_nothing_behind():
    p = AttentionParameters(capacity=64, lanes=4, **SHAPES[1])
    jobs = some_jobs(np.random.default_rng(SEED), p)
    trace = play(p, jobs, reset=Reset(again_at=77))
    assert trace.transfers["w"]["data"] == expected(p, jobs)[0]


def test_a_word_is_taken_in_nearly_every_cycle():
    p = AttentionParameters(group=16, head_dim=16, capacity=64, lanes=4, rows=8, cols=4)
    jobs = [job(np.random.default_rng(SEED), p, tokens=64), job(np.random.default_rng(SEED), p, tokens=64, int8=True)]
    cycles = play(p, jobs).cycles["keys"]
    assert cycles[-1] - cycles[0] < 1.04 * len(cycles)


def test_a_fault_is_seen(monkeypatch):
    p = AttentionParameters(capacity=64, lanes=4, **SHAPES[1])
    jobs = some_jobs(np.random.default_rng(SEED), p)
    original = CacheReader._hash
    monkeypatch.setattr(CacheReader, "_hash", lambda self, number: original(self, number[1:]))
    assert play(p, jobs).transfers["w"]["data"] != expected(p, jobs)[0]
