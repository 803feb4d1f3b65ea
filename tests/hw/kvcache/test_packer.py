"""Block packer: pages equal to the golden model's packing byte for byte, one beat per cycle, stalls, reset."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from page_groups import beats, expected, page_of, random_group
from verilog_checks import lint, yosys

from kvant.hw.emit import emit
from kvant.hw.kvcache import packer
from kvant.hw.kvcache.layouts import PageAddress
from kvant.hw.kvcache.packer import BlockPacker
from kvant.hw.kvcache.page import PageLayout
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.sim.errors import SimulationError
from kvant.sim.kvcache.pages import PageMemory
from kvant.sim.simulate import simulate
from kvant.sim.streams import Reset, Stimulus

# A component whose parameters are refused is never elaborated.
pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20261130
SLOTS = 4


def pack(p, groups, page_groups, *, along_head=True, simulator="amaranth", **options):
    """The trace of *groups* through a packer, after the memory was compared byte for byte."""
    layout = PageLayout(p, page_groups)
    word_bits = BlockPacker(p, page_groups, along_head=along_head).word_bits
    expectation = expected(layout, word_bits, groups)
    trace = simulate(
        lambda: BlockPacker(p, page_groups, along_head=along_head),
        "block_packer",
        Stimulus({"i": {"data": beats(p, groups)}}, expect={"codes": expectation.codes, "meta": expectation.meta}),
        simulator=simulator,
        **options,
    )
    memory = PageMemory(layout, p.heads, SLOTS)
    for stream in ("codes", "meta"):
        memory.apply(trace.transfers[stream])
    assert memory.pages == expectation.pages
    return trace


def rows_of(p):
    """Lengths of the groups of a row along the head."""
    return [p.group] * (p.row_groups - 1) + [p.tail]


def interleaved(*sequences):
    """One element of each sequence in turn."""
    return [element for turn in itertools.zip_longest(*sequences) for element in turn if element is not None]


def two_pages(p, rng, count, *, along_head=True):
    """Two pages of each head, the heads taking turns: row by row, or group by group where every group is full."""
    lengths = rows_of(p) if along_head else [p.group]
    heads = []
    for head in range(p.heads):
        groups = [g for page in (0, 1) for g in page_of(rng, lengths, count, head=head, page=(head + page) % SLOTS)]
        heads.append([groups[k : k + len(lengths)] for k in range(0, len(groups), len(lengths))])
    return list(itertools.chain.from_iterable(interleaved(*heads)))


def gaps(trace):
    """Cycles in which the input waited, while it was offered without a pause."""
    cycles = trace.cycles["i"]
    return cycles[-1] - cycles[0] + 1 - len(cycles)


@pytest.mark.parametrize("head_dim", [64, 65, 80, 96, 100, 128])
@pytest.mark.parametrize("lanes", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 4, 16)), 8, 32, 64])
def test_rows_along_the_head_never_wait(lanes, head_dim):
    p = CacheParameters(lanes=lanes, head_dim=head_dim)
    rng = np.random.default_rng(SEED + lanes + head_dim)
    count = p.row_groups * (24 if lanes >= 8 else 8)
    trace = pack(p, two_pages(p, rng, count), count)
    assert gaps(trace) == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(pytest.param({name: True}, marks=pytest.mark.long) for name in ("offset", "shared_coeff")),
        {"offset": True, "shared_coeff": True},
    ],
)
@pytest.mark.parametrize(
    ("group", "lanes"),
    [(64, 8), (32, 32), (8, 8), *(pytest.param(*x, marks=pytest.mark.long) for x in ((128, 4), (8, 1)))],
)
def test_full_groups_of_several_heads_never_wait(group, lanes, options):
    p = CacheParameters(group=group, lanes=lanes, heads=3, **options)
    rng = np.random.default_rng(SEED + group + lanes)
    count = 34 if group // lanes < 8 else 17
    trace = pack(p, two_pages(p, rng, count, along_head=False), count, along_head=False)
    assert gaps(trace) == 0


@pytest.mark.parametrize("stall", [0.0, 0.5])
@pytest.mark.parametrize("options", [{}, {"offset": True, "shared_coeff": True}])
@pytest.mark.parametrize("lanes", [2, 8])
def test_a_page_that_is_written_in_pieces_is_the_page_that_is_written_at_once(lanes, options, stall):
    p = CacheParameters(group=8, lanes=lanes, head_dim=40, heads=2, **options)
    rng, count = np.random.default_rng(SEED), 40
    layout = PageLayout(p, count)
    whole, heads = [], []
    for head in range(p.heads):
        page = page_of(rng, [p.group], count, head=head, page=head)
        page[-1].page_end = False
        page[-1].flush = True
        whole += page
        cuts = [0, *sorted(rng.choice(np.arange(1, count), 9, replace=False).tolist()), count]
        pieces = []
        for begin, end in itertools.pairwise(cuts):
            piece = [replace(group) for group in page[begin:end]]
            piece[0].page_start, piece[0].place, piece[-1].flush = True, begin, True
            pieces.append(piece)
        heads.append(pieces)
    groups = list(itertools.chain.from_iterable(interleaved(*heads)))
    blocks = sum(len({g.place // 16 for g in _placed(piece)}) for pieces in heads for piece in pieces)
    trailers = sum(map(len, heads))
    trace = simulate(
        lambda: BlockPacker(p, count),
        "block_packer",
        Stimulus(
            {"i": {"data": beats(p, groups)}},
            expect={"codes": len(groups), "meta": blocks * layout.block_meta_words + trailers},
        ),
        simulator="amaranth",
        stall=stall,
        seed=1,
    )
    memory = PageMemory(layout, p.heads, SLOTS)
    memory.apply(trace.transfers["codes"])
    meta = trace.transfers["meta"]
    kept = [place for place, keep in enumerate(meta["keep"]) if keep]
    memory.apply({name: [values[place] for place in kept] for name, values in meta.items()})
    assert memory.pages == expected(layout, BlockPacker(p, count).word_bits, whole).pages


def _placed(piece):
    """Groups of a piece with their places."""
    return [replace(group, place=piece[0].place + number) for number, group in enumerate(piece)]


@pytest.mark.parametrize("head_dim", [1, 5, 8, 17])
@pytest.mark.parametrize("lanes", [1, 8, 64])
def test_rows_shorter_than_a_group_never_wait(lanes, head_dim):
    p = CacheParameters(lanes=lanes, head_dim=head_dim)
    groups = two_pages(p, np.random.default_rng(SEED), 40)
    trace = pack(p, groups, 40)
    # Single beats bring more metadata than a port takes; codes alone keep pace.
    assert gaps(trace) == 0 or p.row_transfers == 1


@pytest.mark.parametrize("port_bits", [32, 128, 512, *(pytest.param(n, marks=pytest.mark.long) for n in (64, 256))])
@pytest.mark.parametrize(("group", "lanes"), [(8, 2), (16, 16), (64, 8), (256, 256)])
def test_every_width_of_the_port(port_bits, group, lanes):
    p = CacheParameters(group=group, lanes=lanes, port_bits=port_bits, heads=2, offset=True, head_dim=group)
    trace = pack(p, two_pages(p, np.random.default_rng(SEED + group), 19), 19)
    assert gaps(trace) == 0
    word_bytes = BlockPacker(p, 19).word_bits // 8
    addresses = [PageAddress().from_bits(user).address for user in trace.transfers["codes"]["user"]]
    assert not any(address % min(16, word_bytes) for address in addresses)
    assert word_bytes * 8 == max(port_bits, 4 * lanes)


STALLS = [0.3, 0.9, {"codes": 0.9}, {"meta": 0.95}, {"codes": [0] + [1] * 60, "meta": 0.5}]


@pytest.mark.parametrize(
    ("simulator", "stall"),
    [*(("amaranth", stall) for stall in STALLS), ("icarus", 0.3), ("verilator", 0.3), ("verilator", {"meta": 0.95})],
)
def test_stalls_change_nothing(simulator, stall):
    p = CacheParameters(group=16, lanes=8, head_dim=25, heads=2, offset=True, port_bits=32)
    groups = two_pages(p, np.random.default_rng(SEED), 34)
    pack(p, groups, 34, simulator=simulator, stall=stall, seed=3)


@pytest.mark.parametrize("simulator", ["icarus", "verilator"])
def test_groups_of_many_heads(simulator):
    p = CacheParameters(lanes=16, head_dim=80, heads=5, offset=True, shared_coeff=True)
    trace = pack(p, two_pages(p, np.random.default_rng(SEED), 22), 22, simulator=simulator)
    assert gaps(trace) == 0


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("flushed", [(0,), (3, 4, 5), (15,), (14, 16, 17, 20), range(21)])
def test_flush_brings_the_memory_up_to_date(flushed, heads):
    p = CacheParameters(group=16, lanes=8, heads=heads, offset=True)
    rng = np.random.default_rng(SEED)
    pages = [page_of(rng, [16], 40, head=head)[:21] for head in range(heads)]
    for page in pages:
        for k in flushed:
            page[k].flush = True
    pack(p, interleaved(*pages), 40, along_head=False)
    pack(p, interleaved(*pages), 40, along_head=False, stall={"meta": 0.9})


@pytest.mark.parametrize("count", [1, 15, 16, 17, 32])
def test_a_page_may_end_early(count):
    p = CacheParameters(group=16, lanes=8)
    rng = np.random.default_rng(SEED + count)
    groups = [g for page in range(SLOTS) for g in page_of(rng, [16], count, page=page)]
    trace = pack(p, groups, 40)
    for stream, per_page in (("codes", count), ("meta", 3 * -(-count // 16) + 1)):
        last = trace.transfers[stream]["last"]
        assert last == ([0] * (per_page - 1) + [1]) * SLOTS


@pytest.mark.parametrize("count", [1, 2, 16, 17, 33])
def test_blocks_may_end_in_cycles_that_follow_each_other(count):
    """A group a cycle, and a page whose last block has one group: metadata of two blocks are queued at once."""
    p = CacheParameters(group=8, lanes=8, head_dim=8)
    rng = np.random.default_rng(SEED + count)
    groups = [g for page in range(SLOTS) for g in page_of(rng, [8], count, page=page)]
    for group in groups[::3]:
        group.flush = True
    pack(p, groups, count)
    pack(p, groups, count, stall={"meta": 0.8})


@pytest.mark.parametrize("stall", [0.0, 0.8])
@pytest.mark.parametrize("dropped_at", [1, 7, 16, 20])
def test_a_page_that_begins_drops_what_was_open(dropped_at, stall):
    p = CacheParameters(group=16, lanes=16, heads=2)
    rng = np.random.default_rng(SEED)
    first = [page_of(rng, [16], 40, head=head)[:dropped_at] for head in range(2)]
    first[0][-1].flush = True
    second = [page_of(rng, [16], 18, head=head, page=1) for head in range(2)]
    pack(p, interleaved(*first) + interleaved(*second), 40, stall=stall, seed=1)


@pytest.mark.parametrize("again_at", [9, 40, 133])
def test_reset_in_the_middle_starts_anew(again_at):
    p = CacheParameters(group=16, lanes=4, head_dim=24, heads=2)
    groups = two_pages(p, np.random.default_rng(SEED), 20)
    pack(p, groups, 20, reset=Reset(again_at=again_at, hold_valid=True), stall=0.2)


def test_a_word_of_codes_leaves_after_the_stated_latency():
    p = CacheParameters()
    trace = pack(p, page_of(np.random.default_rng(SEED), [64], 16), 16)
    word_beats = 4  # 128 bits
    complete = trace.cycles["i"][word_beats - 1 :: word_beats]
    assert {out - taken for taken, out in zip(complete, trace.cycles["codes"], strict=True)} == {BlockPacker.latency}


def test_extremes_of_all_fields():
    p = CacheParameters(offset=True, heads=256, group=8, lanes=8)
    user = {"page": SLOTS - 1, "head": 255, "timestamp": 0xFFFFFFFF}
    full = random_group(np.random.default_rng(0), 8, page_start=True, **user)
    full.codes[:] = 15
    full.scale, full.coefficient, full.offset = 0xFFFF, 255, -128
    empty = random_group(np.random.default_rng(0), 8, page_end=True, **user)
    empty.codes[:] = 0
    empty.scale, empty.coefficient, empty.offset = 0, 0, 0
    pack(p, [full, empty], 2)


def test_a_metadata_set_reused_too_early_is_caught(monkeypatch):
    """A packer that never waits for metadata overwrites them, and the comparison sees it."""

    class Hasty(packer.MetaWords):
        def elaborate(self, platform):
            m = super().elaborate(platform)
            m.d.comb += self.busy.eq(0)
            return m

    monkeypatch.setattr(packer, "MetaWords", Hasty)
    p = CacheParameters(group=8, lanes=8)
    with pytest.raises((AssertionError, SimulationError)):
        pack(p, page_of(np.random.default_rng(SEED), [8], 400), 400, stall={"meta": 0.97})


@pytest.mark.parametrize("options", [{}, {"heads": 4, "offset": True, "lanes": 64}, {"group": 8, "shared_coeff": True}])
def test_verilog_is_clean(options, tmp_path):
    p = CacheParameters(**options)
    design = emit(BlockPacker(p, 64), "block_packer")
    (tmp_path / "block_packer.sv").write_text(design.verilog)
    assert lint(tmp_path, "block_packer.sv", top="block_packer") == ""
    result = yosys(
        tmp_path, "read_verilog -sv block_packer.sv; hierarchy -check -top block_packer; proc; check -assert"
    )
    assert result.returncode == 0, result.stdout + result.stderr
