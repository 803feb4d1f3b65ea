"""The ring of rows against lists of rows, on random and on hand-made orders of rows, codings, replays and ends."""

import random
from itertools import pairwise

import pytest
from formal import mutant
from row_rings import Bench, Row
from verilog_checks import lint, yosys

from kvant.hw.emit import emit
from kvant.hw.kvcache.layouts import Table, TableWrite
from kvant.hw.parameters import ParameterError
from kvant.hw.pq import ring_control, ring_readers, row_ring
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.ring_layouts import ReplayRequest, RowUser
from kvant.hw.pq.row_ring import RowRing
from kvant.sim.simulate import simulate
from kvant.sim.streams import Stimulus

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

SEED = 20260630

SHAPES = {
    # Groups of two transfers; frames of 4 tokens, longer than a batch.
    "frames": PqParameters(
        head_dim=10, lanes=2, heads=2, group=4, sinks=1, recent=3, batch=2, port_bits=32, centred=True
    ),
    # Codes of 6 bits: a frame of 2 tokens is four words and a half of the port, a chunk is two frames.
    "chunks": PqParameters(
        head_dim=12, lanes=4, group=4, sinks=1, recent=2, subspace=1, nbits=6, batch=2, port_bits=32
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


def random_rows(p, count, rng, *, flush=0.05, start=0.015, wrong=0.02):
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
    options = {"replays": rng.choice([0.02, 0.1]), "writes": ends, "seed": seed, "limit": 100_000}
    rows = random_rows(p, rows, rng, flush=rng.choice([0.03, 0.2]))
    bench = play(p, rows, stall=stall, coding=CODINGS[coding], **options)
    assert bench.rows_taken == len(rows)
    return bench


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("coding", "stall"), [("at once", 0.3), ("soon", 0.0), ("late", 0.5)])
def test_any_order_of_rows_replays_and_ends_gives_what_the_model_does(shape, coding, stall):
    bench = random_run(shape, coding, stall, SEED, 30 * RowRing(parameters(shape)).shape.contexts)
    assert bench.jobs and sum(bench.answers) > 3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", SHAPES)
def test_many_orders_give_what_the_model_does(shape, seed):
    for coding in CODINGS:
        random_run(shape, coding, [0.0, 0.3, 0.9][seed % 3], seed, 160)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_come_at_full_rate_until_the_ring_is_full_though_nothing_is_coded(shape):
    p = parameters(shape)
    room = p.sinks + p.recent + 2 * p.batch_tokens
    rows = one_sequence(p, room + 3, random.Random(SEED), store=1)
    bench = play(p, rows, coding=lambda rng: None)
    assert bench.rows_taken == room
    assert {after - before for before, after in pairwise(bench.row_cycles)} == {RowRing(p).row_cycles}


@pytest.mark.parametrize("shape", ["frames", "batches"])
def test_rows_never_wait_for_an_encoder_that_takes_the_time_of_a_batch(shape):
    p = parameters(shape, batch=32)
    ring = RowRing(p)
    # A batch has the time of its rows, less its way from the port to the outputs and that of `coded` to free slots.
    cycles = p.batch_tokens * ring.row_cycles - (ring.latency + p.batch_tokens * p.row_transfers + 15)
    rows = one_sequence(p, p.sinks + p.recent + 4 * p.batch_tokens, random.Random(SEED))
    bench = play(p, rows, coding=lambda rng: cycles)
    assert bench.rows_taken == len(rows)
    assert {after - before for before, after in pairwise(bench.row_cycles)} == {ring.row_cycles}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coding", ["at once", "late"])
def test_a_flush_codes_all_but_the_recent_rows_at_every_length(shape, coding):
    p = parameters(shape)
    rng = random.Random(SEED)
    lengths = range(1, p.sinks + p.recent + 2 * p.batch_tokens + 3)
    rows = [row for n in lengths for row in one_sequence(p, n, rng, flush=[n - 1], store=n % 2)]
    bench = play(p, rows, coding=CODINGS[coding], replays=0.02)
    assert bench.rows_taken == len(rows)
    ends = {job["first"] + job["count"] for job in bench.jobs}
    assert ends == {n - p.sinks - p.recent for n in lengths if n > p.sinks + p.recent}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_may_flush(shape):
    p = parameters(shape)
    count = p.sinks + p.recent + 3 * p.batch_tokens
    rows = one_sequence(p, count, random.Random(SEED), flush=range(count))
    bench = play(p, rows, coding=CODINGS["soon"], replays=0.05)
    assert [job["first"] + job["count"] for job in bench.jobs] == list(range(1, count - p.sinks - p.recent + 1))
    assert all(job["first"] % p.chunk_tokens == 0 for job in bench.jobs)


def test_rows_of_a_frame_that_is_not_full_are_coded_again_with_it():
    p = parameters("frames")
    assert (p.chunk_tokens, p.batch_tokens, p.recent, p.sinks) == (4, 4, 3, 1)
    bench = play(p, one_sequence(p, 16, random.Random(SEED), flush=[4, 9, 11, 13]))
    batches = [(job["first"], job["count"]) for job in bench.jobs]
    # Rows are flushed with 4, 9, 11 and 13 tokens of the history.
    assert batches == [(0, 1), (0, 4), (4, 2), (4, 4), (8, 2), (8, 4)]


def test_a_replay_that_is_not_taken_holds_its_rows_and_nothing_else():
    p = parameters("frames")
    ring_rows = p.recent + 2 * p.batch_tokens
    rng = random.Random(SEED)
    rows = one_sequence(p, 40, rng, store=1)
    pause = range(1500)
    # The request comes when the ring has some rows; from then on none of the replayed ones leaves.
    bench = play(p, rows, requests_at={(6, 0): (1, 0, 0)}, row_out_pause=pause)
    assert bench.answers == [6]
    late = [number for number, cycle in enumerate(bench.row_cycles) if cycle >= pause.stop]
    # Of the sink and the rows of the history 0 .. 4, some are on their way out; the others hold their slots.
    assert p.sinks + ring_rows <= late[0] <= p.sinks + ring_rows + 5


def test_a_replay_in_the_middle_of_a_row_keeps_the_next_one_from_its_rows():
    p = parameters("frames")
    rows = one_sequence(p, 30, random.Random(SEED))
    # All rows that a replay may ask for, with a row under way that takes the last slot.
    taken = p.sinks + 14
    history = 14 - (p.recent + 2 * p.batch_tokens - 1)
    bench = play(p, rows, requests_at={(taken, 2): (0, 0, history)}, row_out_pause=range(1000))
    assert bench.answers == [taken - history]
    assert sum(cycle < 1000 for cycle in bench.row_cycles) == taken + 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_replay_sees_the_row_that_ends_right_before_it(shape):
    p = parameters(shape, centred=True)
    for taken in range(1, 4):
        rows = one_sequence(p, 3, random.Random(SEED))
        assert play(p, rows, requests_at={(taken, 0): (0, 0, 0)}).answers == [taken]


def test_a_flush_of_the_first_row_sends_it():
    p = parameters("frames", recent=0, sinks=0)
    assert play(p, one_sequence(p, 1, random.Random(SEED), flush=[0])).jobs[0]["count"] == 1


def test_a_sequence_starts_after_the_replay_of_the_former_one():
    p = parameters("frames")
    rng = random.Random(SEED)
    rows = one_sequence(p, 8, rng) + one_sequence(p, 12, rng)
    bench = play(p, rows, requests_at={(8, 0): (0, 0, 4)}, row_out_pause=range(1000))
    assert bench.answers == [4]
    assert bench.row_cycles[8] > 1000 > bench.row_cycles[7]


@pytest.mark.parametrize("seed", [4, 5])
def test_short_sequences_of_which_every_row_is_flushed(seed):
    """Starts and completions of batches meet in one cycle (with the first seed)."""
    p = parameters("one transfer", heads=3, batch=1)
    rows = random_rows(p, 60, random.Random(seed), start=0.6, flush=0.8)
    assert play(p, rows, coding=lambda rng: rng.randrange(20), seed=seed).rows_taken == len(rows)


@pytest.mark.parametrize("count", [1, 3, 30])
def test_rows_of_a_full_cache_wait_for_the_end_of_the_sequence(count):
    p = parameters("frames", capacity=12)
    rng = random.Random(SEED)
    held = p.sinks + 12 + p.recent + p.batch_tokens - 1
    rows = one_sequence(p, held + count, rng) + one_sequence(p, 3, rng)
    bench = play(p, rows)
    assert bench.rows_taken == held  # and `full` is high
    late = play(p, rows, ends_at={1000: 0})
    assert late.rows_taken == len(rows)
    assert late.model.error  # rows of the ended sequence were dropped
    assert max(job["first"] + job["count"] for job in late.jobs) == 12


@pytest.mark.parametrize("shape", SHAPES)
def test_reset_in_the_middle_equals_a_cold_start(shape):
    p = parameters(shape)
    rows = random_rows(p, 30, random.Random(SEED))
    cold = play(p, rows, coding=CODINGS["at once"])
    for reset_at in (60, 151):
        again = play(p, rows, coding=CODINGS["at once"], reset_at=reset_at)
        assert again.rows_taken == cold.rows_taken == len(rows)
        assert again.jobs == cold.jobs
        # Tables are kept, so that the rows need not wait for them again.
        waits = [[after - before for before, after in pairwise(bench.row_cycles)] for bench in (again, cold)]
        assert waits[0] == waits[1]


@pytest.mark.parametrize("reset_at", [97, 233])
def test_reset_in_the_middle_of_replays_and_batches_forgets_them(reset_at):
    p = parameters("frames")
    rows = random_rows(p, 15, random.Random(SEED), flush=0.3)
    options = {"coding": CODINGS["soon"], "replays": 0.05, "stall": 0.3}
    assert play(p, rows, reset_at=reset_at, **options).rows_taken == len(rows)


@pytest.mark.parametrize(
    "write",
    [
        *[(kind, 0, 0, 1) for kind in (0, 1, 3, 7, 255)],
        *[(kind, head, 0, 1) for kind in (2, 4, 5, 6) for head in (2, 255)],
        (2, 0, 10, 1),
    ],
)
def test_table_writes_that_are_not_legal_raise_error_and_change_nothing(write):
    p = parameters("frames")
    assert play(p, one_sequence(p, 9, random.Random(SEED)), writes={5: [write]}).model.error


def test_legal_tables_and_rows_raise_no_error():
    p = parameters("frames")
    assert not play(p, random_rows(p, 30, random.Random(SEED), wrong=0)).model.error


def test_means_are_refused_where_nothing_is_centred():
    p = parameters("batches")
    assert play(p, [], writes={0: [(Table.MEAN, 0, 0, 0x3C00)]}).model.error


def test_replays_that_are_not_legal_raise_error_and_are_answered_as_empty():
    p = parameters("frames")
    rows = one_sequence(p, 9, random.Random(SEED))
    for request in ((0, 0, 5), (0, 1, 0), (1, 0, 0), (0, 2, 0), (0, 255, 0)):
        bench = play(p, rows, requests_at={(8, 0): (0, 0, 0), (9, 0): request})
        assert bench.answers == [8, 0]
        assert bench.model.error


def test_coded_without_a_job_raises_error_and_changes_nothing():
    p = parameters("frames")
    rng = random.Random(SEED)
    rows = random_rows(p, 60, rng, wrong=0, flush=0.2)
    bench = play(p, rows, extra_codings=range(0, 400, 3), coding=CODINGS["soon"])
    assert bench.model.error
    assert bench.rows_taken == len(rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"group": 5},
            "group = 5: legal in a product-quantised cache are multiples of lanes = 2, and all from head_dim = 10 on",
        ),
        ({"subspace": 4}, "subspace = 4: legal are divisors of head_dim = 10"),
        ({"lanes": 3}, "lanes = 3: legal in a product-quantised cache are the powers of two"),
    ],
)
def test_parameters_that_are_not_legal_are_refused(changes, message):
    with pytest.raises(ParameterError, match=f"^{message}$"):
        RowRing(parameters("frames", **changes))


# The Verilog.


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tool_is_silent(shape, tmp_path):
    (tmp_path / "ring.sv").write_text(emit(RowRing(parameters(shape)), "ring").verilog)
    assert lint(tmp_path, "ring.sv", top="ring") == ""
    result = yosys(tmp_path, "read_verilog -sv ring.sv; hierarchy -check -top ring; proc; check -assert")
    assert result.returncode == 0, result.stderr


def test_simulators_agree_in_every_cycle_and_nothing_is_unknown():
    p = parameters("frames")
    rng = random.Random(SEED)
    rows = one_sequence(p, p.sinks + p.recent + 2 * p.batch_tokens - 1, rng)
    writes = [
        TableWrite().const(dict(zip(("kind", "head", "index", "value"), write, strict=True)))
        for write in tables(p, rng)
    ]
    user = {
        "data": [
            sum(e << 16 * k for k, e in enumerate(row.elements[t : t + 2])) for row in rows for t in range(0, 10, 2)
        ],
        "user": [RowUser().const({"start": row.start}).as_bits() for row in rows for _ in range(5)],
    }
    stimulus = Stimulus(
        inputs={
            "cfg": {"data": [write.as_bits() for write in writes]},
            "x": user,
            "replay": {"data": [ReplayRequest(p).const({"history": 0}).as_bits()] * 2},
        },
        expect={"encode_job": 1, "rows": 20},
        status=["error", "nonfinite", "full"],
        after={"x": ("cfg", len(writes)), "replay": ("x", 45)},
    )
    traces = [
        simulate(lambda: RowRing(p), "ring", stimulus, simulator=name, stall=0.3, seed=1)
        for name in ("amaranth", "icarus")
    ]
    assert traces[0] == traces[1]
    assert traces[0].status["error"] == 0


# Seeded faults: each makes a test above fail.


def random_orders():
    for seed in range(3):
        random_run("frames", "soon", 0.3, seed, 100)


def full_rate():
    test_rows_come_at_full_rate_until_the_ring_is_full_though_nothing_is_coded("frames")


def short_sequences():
    test_short_sequences_of_which_every_row_is_flushed(4)


def row_before_a_replay():
    test_a_replay_sees_the_row_that_ends_right_before_it("one transfer")


CONTROL = ring_control, "RingControl", row_ring
QUEUE = ring_control, "BatchQueue", ring_control
READER = row_ring, "ReplayReader", row_ring
STORE = row_ring, "RowStore", row_ring
WALKER = ring_readers, "RowWalker", ring_readers
FAULTS = [
    (CONTROL, "free.eq(held != ring_rows)", "free.eq(1)", full_rate),
    (CONTROL, "free.eq(held != ring_rows)", "free.eq(held < ring_rows - 1)", full_rate),
    (CONTROL, "total > p.recent", "total >= p.recent", random_orders),
    (CONTROL, "total == window", "total == window - 1", random_orders),
    (CONTROL, "after.rows.eq(rows - whole)", "after.rows.eq(rows - Mux(makes_batch, count, 0))", random_orders),
    (CONTROL, "(was_used & ~matched)", "0", short_sequences),
    (CONTROL, "queue.complete & ~starts", "queue.complete", short_sequences),
    (CONTROL, "same & self.hold_slot", "0", test_a_replay_that_is_not_taken_holds_its_rows_and_nothing_else),
    (CONTROL, "same & self.hold_sequence", "0", test_a_sequence_starts_after_the_replay_of_the_former_one),
    (QUEUE, "self.coded & (at_work != 0)", "self.coded", test_coded_without_a_job_raises_error_and_changes_nothing),
    (QUEUE, "settled[-1], self.sent", "self.push, self.sent", test_a_flush_of_the_first_row_sends_it),
    (
        READER,
        "following + view.entering",
        "following",
        test_a_replay_in_the_middle_of_a_row_keeps_the_next_one_from_its_rows,
    ),
    (READER, "(rest == 0) & reached", "rest == 0", random_orders),
    (READER, "(rest == 0) & reached", "reached", row_before_a_replay),
    (READER, "(following < ring_rows)", "1", random_orders),
    (STORE, "Mux(values[1], 0, read.data[k])", "read.data[k]", random_orders),
    (WALKER, "self.last & ring_end", "0", random_orders),
]


@pytest.mark.parametrize(
    ("part", "old", "new", "scenario"), FAULTS, ids=[f"{old} -> {new}" for _, old, new, _ in FAULTS]
)
def test_a_fault_is_seen(part, old, new, scenario, monkeypatch):
    module, name, user = part
    monkeypatch.setattr(user, name, mutant(getattr(module, name), old, new))
    with pytest.raises((AssertionError, KeyError)):
        scenario()
