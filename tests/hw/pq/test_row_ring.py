"""The ring of rows against lists of rows, on random and on hand-made orders of rows, codings, replays and ends."""

import random

import pytest
from row_rings import Bench, Row

from kvant.hw.kvcache.layouts import Table
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.row_ring import RowRing

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20260630

SHAPES = {
    # Groups of two transfers; frames of 4 tokens, longer than a batch.
    "frames": PqParameters(
        head_dim=10, lanes=2, heads=2, group=4, sinks=1, recent=3, batch=2, port_bits=32, centred=True
    ),
    # A row is one transfer; a frame is one token.
    "one transfer": PqParameters(head_dim=8, lanes=8, group=8, batch=4, port_bits=32),
    # Surplus lanes; three heads; frames of 2 tokens, shorter than a batch.
    "batches": PqParameters(head_dim=24, lanes=16, heads=3, group=16, sinks=2, recent=5, batch=4, port_bits=64),
    # The least of everything.
    "least": PqParameters(head_dim=1, lanes=1, group=8, subspace=1, batch=1, port_bits=32),
}


def parameters(shape="frames", **changes):
    return PqParameters(**(dict(SHAPES[shape]) | changes))


def elements(p, rng):
    """A row's lanes: any fp16, special ones often."""
    special = [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E01, 0xFFFF, 0x7BFF, 0xFBFF, 0x0001, 0x8001]
    count = p.row_transfers * p.lanes
    return [rng.choice(special) if rng.random() < 0.05 else rng.getrandbits(16) for _ in range(count)]


def tables(p, rng):
    writes = [(Table.MEAN, head, k, rng.getrandbits(15) % 0x7C00) for head in range(p.heads) for k in range(p.head_dim)]
    scales = [(kind, head, 7, rng.getrandbits(15) % 0x7C00) for kind in (5, 6) for head in range(p.heads)]
    return (writes if p.centred else []) + scales


def random_rows(p, count, rng, *, flush=0.05, start=0.03, wrong=0.02):
    """Rows of all heads and stores, most in runs."""
    rows, begun, key = [], set(), (0, 0)
    for _ in range(count):
        if rng.random() < 0.3:
            key = rng.randrange(2), rng.randrange(p.heads)
        store, head = key
        starts = key not in begun or rng.random() < start
        begun.add(key)
        if rng.random() < wrong:
            head = rng.choice([p.heads, 255])
        rows.append(Row(store, head, elements(p, rng), int(starts), int(rng.random() < flush)))
    return rows


def one_sequence(p, count, rng, *, flush=(), store=0, head=0):
    return [Row(store, head, elements(p, rng), int(n == 0), int(n in flush)) for n in range(count)]


def play(p, rows, **options):
    options = {"tables": tables(p, random.Random(SEED))} | options
    return Bench(RowRing(p), rows, **options).run()


CODINGS = {
    "at once": lambda rng: 0,
    "soon": lambda rng: rng.randrange(40),
    "late": lambda rng: rng.randrange(100, 150),
}


def random_run(shape, coding, stall, seed, rows):
    p = parameters(shape)
    rng = random.Random(f"{seed}/{shape}/{coding}/{stall}")
    ends = {n: [(Table.END, rng.randrange(p.heads), 0, 0)] for n in rng.sample(range(5, rows), rows // 40)}
    options = {"replays": rng.choice([0.02, 0.2]), "writes": ends, "seed": seed, "limit": 100_000}
    rows = random_rows(p, rows, rng, flush=rng.choice([0.03, 0.2]))
    bench = play(p, rows, stall=stall, coding=CODINGS[coding], **options)
    assert bench.rows_taken == len(rows)
    return bench


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("stall", [0.0, 0.5])
def test_any_order_of_rows_replays_and_ends_gives_what_the_model_does(shape, coding, stall):
    bench = random_run(shape, coding, stall, SEED, 80)
    assert len(bench.jobs) > 3 and sum(bench.answers) > 10


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", SHAPES)
def test_many_orders_give_what_the_model_does(shape, seed):
    for coding in CODINGS:
        random_run(shape, coding, [0.0, 0.3, 0.9][seed % 3], seed, 160)
