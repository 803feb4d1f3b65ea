"""A ring of rows against lists of rows: the model keeps every row, and looks at nothing but transfers."""

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from amaranth.hdl import ResetInserter, Signal
from amaranth.sim import Simulator
from memory_collisions import asserted_memories

from kvant.hw.kvcache.layouts import Table

FP16_MAX = 0x7BFF
PATIENCE = 12
"""Cycles within which a row must be taken that nothing holds back."""


def finite(bits):
    """The port rule, in bits; zeros are +0."""
    if bits & 0x7C00 == 0x7C00:
        bits = 0 if bits & 0x3FF else bits & 0x8000 | FP16_MAX
    return 0 if bits == 0x8000 else bits


def difference(bits, mean):
    """fp16(x - mean), saturated; the difference of two fp16 numbers is exact in float64."""
    x, mu = (np.array(value, np.uint16).view(np.float16).astype(np.float64) for value in (finite(bits), mean))
    with np.errstate(over="ignore"):
        result = (x - mu).astype(np.float16)
    return finite(int(result.view(np.uint16)))


@dataclass
class Row:
    """A row at the port: elements as they are offered, surplus lanes included."""

    store: int
    head: int
    elements: list[int]
    start: int = 0
    flush: int = 0


@dataclass
class Sequence:
    """Of one head and store."""

    rows: list = field(default_factory=list)  # complete ones, as they are kept
    open: bool = False
    base: int = 0  # tokens of the history that are in whole frames of batches
    queued: int = 0
    freed: int = 0
    coded: int = 0


@dataclass
class Batch:
    sequence: Sequence
    job: dict
    rows: list


class Model:
    """What the ring promises."""

    def __init__(self, p):
        self.p = p
        self.ring_rows = p.recent + 2 * p.batch_tokens
        self.means = {(head, channel): 0 for head in range(p.heads) for channel in range(p.head_dim)}
        self.scales = {}
        self.reset()

    def reset(self):
        self.sequences = {(store, head): Sequence() for store in (0, 1) for head in range(self.p.heads)}
        self.batches = []  # all
        self.sent = self.complete = 0
        self.error = self.nonfinite = False
        self.row = None

    def history(self, sequence):
        return max(0, len(sequence.rows) - self.p.sinks)

    def legal(self, row):
        return row.head < self.p.heads and bool(row.start or self.sequences[row.store, row.head].open)

    def next_batch(self, sequence, flush):
        """Tokens of the batch that the next row makes, or 0."""
        p = self.p
        if len(sequence.rows) < p.sinks:
            return 0
        total = self.history(sequence) + 1
        older = total - p.recent
        if flush:
            return older - sequence.base if older > sequence.queued else 0
        return p.batch_tokens if total - sequence.base == p.recent + p.batch_tokens else 0

    def exceeds(self, row):
        sequence = Sequence() if row.start else self.sequences[row.store, row.head]
        count = self.next_batch(sequence, row.flush)
        return count > 0 and sequence.base + count > self.p.tokens

    def may_begin(self, row):
        """Whether nothing but replays holds the row back."""
        if not self.legal(row):
            return True
        sequence = self.sequences[row.store, row.head]
        if row.start:
            return sequence.queued == sequence.coded
        if len(sequence.rows) < self.p.sinks:
            return True
        makes = self.next_batch(sequence, row.flush)
        under_way = len(self.batches) - self.complete
        if makes and (self.exceeds(row) or under_way >= 4 * self.p.heads):
            return False
        return self.history(sequence) - sequence.freed < self.ring_rows

    def begin(self, row):
        """First transfer of a row."""
        assert self.may_begin(row)
        self.row = None
        if not self.legal(row):
            self.error = True
            return
        if row.start:
            self.sequences[row.store, row.head] = Sequence(open=True)
        self.row = row, self.sequences[row.store, row.head]

    def end_row(self):
        """Last transfer of a row."""
        if self.row is None:
            return
        p = self.p
        row, sequence = self.row
        self.row = None
        elements = row.elements[: p.head_dim]
        self.nonfinite |= any(bits & 0x7C00 == 0x7C00 for bits in elements)
        if p.centred and row.store == 0:
            kept = [difference(bits, self.means[row.head, channel]) for channel, bits in enumerate(elements)]
        else:
            kept = [finite(bits) for bits in elements]
        count = self.next_batch(sequence, row.flush)
        sequence.rows.append(kept)
        if count:
            first = sequence.base
            job = {"count": count, "store": row.store, "head": row.head, "first": first}
            job["scale"] = self.scales[row.store, row.head]
            history = sequence.rows[p.sinks :]
            self.batches.append(Batch(sequence, job, history[first : first + count]))
            sequence.queued = first + count
            sequence.base += count - count % p.chunk_tokens

    def coded(self):
        if self.complete == self.sent:
            self.error = True
            return
        batch = self.batches[self.complete]
        self.complete += 1
        end = batch.job["first"] + batch.job["count"]
        batch.sequence.coded = end
        batch.sequence.freed = end - end % self.p.chunk_tokens

    def replay(self, store, head, history):
        """Rows of the answer, and the sequence and tokens for which they wait."""
        sequence = self.sequences.get((store, head), Sequence())
        following = self.history(sequence) - history
        if not sequence.open or history > sequence.queued or following >= self.ring_rows:
            self.error = True
            return [], None, 0
        return sequence.rows[: self.p.sinks] + sequence.rows[self.p.sinks + history :], sequence, history

    def write(self, kind, head, index, value):
        legal = head < self.p.heads and (
            kind in (Table.CODEBOOK_K, Table.CODEBOOK_V, Table.END)
            or (self.p.centred and kind == Table.MEAN and index < self.p.head_dim)
        )
        self.error |= not legal
        if not legal:
            return
        if kind == Table.MEAN:
            self.means[head, index] = value
        elif kind == Table.END:
            for store in (0, 1):
                self.sequences[store, head].open = False
        else:
            self.scales[int(kind == Table.CODEBOOK_V), head] = value

    def status(self, store, head):
        sequence = self.sequences.get((store, head), Sequence())
        scale = {"scale": self.scales.get((store, head), 0)}
        if not sequence.open:
            return {"open": 0, "tokens": 0, "coded": 0, "queued": 0} | scale
        rows = len(sequence.rows)
        return {"open": 1, "tokens": rows, "coded": sequence.coded, "queued": sequence.queued} | scale


class Bench:
    """Plays rows, table writes and replays, and codes batches; every transfer is held against the model.

    Parameters
    ----------
    ring : RowRing
        Not elaborated yet.
    rows : list of Row
    stall : float
        Probability of a pause of every stream, in every cycle.
    coding : callable(random) -> int
        Cycles that the encoder takes for a batch after its last row; None: for ever.
    replays : float
        Probability of a random request in every cycle.
    tables : list
        Writes (kind, head, index, value) before all rows.
    writes : dict
        Writes that are offered when so many rows are taken.
    reset_at : int
        Cycle of a reset; the rows then start anew.
    requests_at : dict
        Requests that are offered when so many rows, and transfers of the next one, are taken.
    ends_at : dict
        Cycles in which the end of a head's sequence is offered.
    extra_codings : range
        Cycles with a pulse of `coded` whatever is under way.
    row_out_pause : range
        Cycles in which no replayed row is taken.

    Attributes
    ----------
    rows_taken : int
    row_cycles : list
        Cycles of the rows' first transfers.
    jobs : list of dict
    answers : list
        Number of rows of each replay's answer.
    """

    def __init__(
        self,
        ring,
        rows,
        *,
        stall=0.0,
        coding=lambda rng: 5,
        replays=0.0,
        tables=(),
        writes=None,
        reset_at=None,
        requests_at=None,
        ends_at=None,
        extra_codings=range(0),
        row_out_pause=range(0),
        seed=0,
        limit=20_000,
    ):
        self.ring, self.p = ring, ring.p
        self.model = Model(self.p)
        self.rows, self.stall, self.coding, self.replays = rows, stall, coding, replays
        self.tables, self.writes, self.reset_at, self.limit = list(tables), dict(writes or {}), reset_at, limit
        self.row_out_pause, self.extra_codings = row_out_pause, extra_codings
        self.requests_at, self.ends_at = dict(requests_at or {}), dict(ends_at or {})
        self.rng = random.Random(seed)

    def run(self):
        with asserted_memories() as watched:
            reset = Signal()
            simulator = Simulator(ResetInserter(reset)(self.ring))
        simulator.add_clock(1e-6)

        async def bench(ctx):
            await self._play(ctx, reset)

        simulator.add_testbench(bench)
        simulator.run()
        assert watched
        return self

    # What is offered

    def _request(self):
        """A request for a replay: legal ones mostly."""
        model, p, rng = self.model, self.p, self.rng
        store, head = rng.randrange(2), rng.randrange(p.heads + (rng.random() < 0.05))
        sequence = model.sequences.get((store, head), Sequence())
        history = model.history(sequence)
        lowest = max(0, history - self.model.ring_rows + 1)
        choice = rng.random()
        if choice < 0.3:
            wanted = sequence.queued
        elif choice < 0.5:
            wanted = lowest
        elif choice < 0.9:
            wanted = rng.randint(min(lowest, sequence.queued), sequence.queued)
        else:
            wanted = rng.randint(0, p.tokens)
        return store, head, wanted

    async def _play(self, ctx, reset):
        self._cold()
        self.request, self.cfg_queue = None, deque(self.tables)
        self.cycle = idle = 0
        while True:
            if self.cycle == self.reset_at:
                await self._reset(ctx, reset)
                continue
            self._offer(ctx)
            busy = self._busy()
            if busy and (self.offered["x"] or self.at_work or self.row_words):
                assert ctx.get(self.ring.busy)
            self.snapshots.append({key: self.model.status(*key) for key in self.model.sequences})
            moved = self._take(ctx)
            self._check_status(ctx)
            idle = 0 if moved else idle + 1
            if idle > 60 and (not busy or self._nothing_will_come()):
                break
            assert idle < 2000, "nothing moves"
            assert self.cycle < self.limit, "too long"
            await ctx.tick()
            self.cycle += 1
        ring, model = self.ring, self.model
        assert ctx.get(ring.error) == model.error
        assert ctx.get(ring.nonfinite) == model.nonfinite
        assert ctx.get(ring.full) == bool(self.offered["x"] and model.legal(self.row) and model.exceeds(self.row))
        assert ctx.get(ring.busy) == busy

    def _cold(self):
        """Nothing is under way."""
        self.model.reset()
        self.rows_taken = self.transfer = self.waited = self.jobs_taken = 0
        self.offered = dict.fromkeys(["x", "cfg", "replay"], False)
        self.at_work = deque()  # of each job at the encoder the cycle in which it is complete
        self.batch_words, self.row_words = deque(), deque()  # what the outputs must give
        self.snapshots, self.asked = deque(maxlen=6), deque(maxlen=3)
        self.jobs, self.answers, self.row_cycles = [], [], []

    async def _reset(self, ctx, reset):
        for port in (self.ring.x, self.ring.cfg, self.ring.replay):
            ctx.set(port.valid, 0)
        ctx.set(self.ring.coded, 0)
        ctx.set(reset, 1)
        await ctx.tick()
        ctx.set(reset, 0)
        self._cold()
        self.request = None
        self.cycle += 1

    def _busy(self):
        """Something is still to be done."""
        waiting = (self.cfg_queue, self.requests_at, self.ends_at, self.at_work, self.batch_words, self.row_words)
        ahead = self.rows_taken < len(self.rows) or self.jobs_taken < len(self.model.batches)
        return any(map(bool, waiting)) or ahead or self.request is not None

    def _nothing_will_come(self):
        """The row at the port waits, and nothing that could help it is on its way."""
        helps = self.ends_at or self.cfg_queue or any(cycles is not None for cycles in self.at_work)
        return self.offered["x"] and not self.model.may_begin(self.row) and not helps

    def _offer(self, ctx):
        """Inputs of this cycle."""
        ring, p, rng = self.ring, self.p, self.rng
        offered = self.offered

        def offer(name, possible):
            offered[name] = offered[name] or (bool(possible) and rng.random() >= self.stall)
            ctx.set(getattr(ring, name).valid, offered[name])

        if self.transfer == 0 and not offered["x"]:
            self.cfg_queue.extend(self.writes.pop(self.rows_taken, ()))
        if self.request is None and len(self.model.scales) == 2 * p.heads:
            place = self.rows_taken, self.transfer
            if place in self.requests_at:
                self.request = self.requests_at.pop(place)
            elif self.rows_taken < len(self.rows) and rng.random() < self.replays:
                self.request = self._request()
        if self.cycle in self.ends_at:
            self.cfg_queue.append((Table.END, self.ends_at.pop(self.cycle), 0, 0))
        offer("x", self.rows_taken < len(self.rows) and (self.transfer or not self.cfg_queue))
        offer("cfg", self.cfg_queue)
        offer("replay", self.request is not None)
        if offered["x"]:
            self.row = row = self.rows[self.rows_taken]
            user = {"start": row.start, "flush": row.flush, "store": row.store, "head": row.head}
            if self.transfer:  # is not looked at
                user = {"start": rng.randrange(2), "flush": 1, "store": 1 - row.store, "head": rng.randrange(256)}
            part = row.elements[self.transfer * p.lanes :][: p.lanes]
            ctx.set(ring.x.payload, {"data": part, "user": user})
        if offered["cfg"]:
            kind, head, index, value = self.cfg_queue[0]
            ctx.set(ring.cfg.payload.data, {"kind": kind, "head": head, "index": index, "value": value})
        if offered["replay"]:
            store, head, history = self.request
            ctx.set(ring.replay.payload, {"store": store, "head": head, "history": history})
        for port in (ring.encode_job, ring.rows, ring.row_out):
            paused = port is ring.row_out and self.cycle in self.row_out_pause
            ctx.set(port.ready, not paused and rng.random() >= self.stall)
        done = bool(self.at_work) and self.at_work[0] is not None and self.at_work[0] <= self.cycle
        # A batch counts as sent when its last word is read, which is before it leaves: nothing odd comes between.
        self.codes = done or (self.cycle in self.extra_codings and self.model.sent == len(self.model.batches))
        ctx.set(ring.coded, self.codes)
        look = rng.randrange(2), rng.randrange(p.heads + 1)
        ctx.set(ring.status_store, look[0])
        ctx.set(ring.status_head, look[1])
        self.asked.append(look)

    def _take(self, ctx):
        """Transfers of this cycle, in the order in which they count; whether there was one."""
        ring, model = self.ring, self.model

        def moves(port):
            return bool(ctx.get(port.valid) and ctx.get(port.ready))

        written, asked, job, sent, answered = map(
            moves, (ring.cfg, ring.replay, ring.encode_job, ring.rows, ring.row_out)
        )
        moved = written or asked or job or self.codes or sent or answered
        if self.offered["x"]:
            moved |= self._take_row(moves(ring.x))
        if asked:
            answer, sequence, tokens = model.replay(*self.request)
            self.row_words.extend((word, sequence, tokens) for word in self._answer_words(answer))
            self.answers.append(len(answer))
            self.offered["replay"], self.request = False, None
        if written:
            model.write(*self.cfg_queue.popleft())
            self.offered["cfg"] = False
        if job:
            self._take_job(ctx.get(ring.encode_job.payload))
        if self.codes:
            if self.at_work:
                self.at_work.popleft()
            model.coded()
        if sent:
            assert self.batch_words, "a row of a batch too many"
            expected, batch_end = self.batch_words.popleft()
            payload = ctx.get(ring.rows.payload)
            assert ([*payload.data], payload.last) == expected
            if batch_end:
                model.sent += 1
                cycles = self.coding(self.rng)
                self.at_work.append(None if cycles is None else self.cycle + 1 + cycles)
        if answered:
            assert self.row_words, "a replayed row too many"
            expected, sequence, tokens = self.row_words.popleft()
            payload = ctx.get(ring.row_out.payload)
            found = {name: getattr(payload, name) for name in expected if name != "data"}
            assert found | {"data": [*payload.data]} == expected
            assert sequence is None or sequence.coded >= tokens, "a replay before its tokens are coded"
        return moved

    def _take_row(self, ready):
        """A transfer of a row is offered; whether it is taken."""
        first, model = self.transfer == 0, self.model
        if not ready:
            held = first and (not model.may_begin(self.row) or self.row_words or self.request or self.cfg_queue)
            self.waited = 0 if held else self.waited + 1
            assert self.waited <= PATIENCE, "a row waits for nothing"
            return False
        self.offered["x"], self.waited = False, 0
        if first:
            self.row_cycles.append(self.cycle)
            model.begin(self.row)
        self.transfer += 1
        if self.transfer == self.p.row_transfers:
            self.rows_taken, self.transfer = self.rows_taken + 1, 0
            model.end_row()
        return True

    def _take_job(self, job):
        assert self.jobs_taken < len(self.model.batches), "a job too many"
        batch = self.model.batches[self.jobs_taken]
        assert {name: getattr(job, name) for name in batch.job} == batch.job
        self.jobs.append(batch.job)
        self.jobs_taken += 1
        words = [word for kept in batch.rows for word in self._row_words(kept)]
        self.batch_words.extend((word, index == len(words) - 1) for index, word in enumerate(words))

    def _row_words(self, kept):
        lanes = self.p.lanes
        padded = kept + [0] * (-len(kept) % lanes)
        starts = range(0, len(padded), lanes)
        return [(padded[start : start + lanes], int(start == starts[-1])) for start in starts]

    def _answer_words(self, rows):
        p = self.p
        if not rows:
            ends = dict.fromkeys(["group_last", "last", "final", "empty"], 1)
            return [{"data": [0] * p.lanes, "keep": 0} | ends]
        words = []
        for number, kept in enumerate(rows):
            for index, (elements, last) in enumerate(self._row_words(kept)):
                end = (index + 1) * p.lanes
                words.append(
                    {
                        "data": elements,
                        "keep": min(p.lanes, p.head_dim - index * p.lanes),
                        "group_last": int(last or end % p.group == 0),
                        "last": last,
                        "final": int(number == len(rows) - 1),
                        "empty": 0,
                    }
                )
        return words

    def _check_status(self, ctx):
        """The status of what was asked two cycles ago; it may be as old as the snapshots."""
        if len(self.asked) < 3 or len(self.snapshots) < 6:
            return
        key, status = self.asked[0], ctx.get(self.ring.status)
        if key[1] >= self.p.heads:
            assert status.open == status.tokens == status.coded == status.queued == 0
            return
        for name in ("open", "tokens", "queued", "coded", "scale"):
            assert getattr(status, name) in {snapshot[key][name] for snapshot in self.snapshots}, name
