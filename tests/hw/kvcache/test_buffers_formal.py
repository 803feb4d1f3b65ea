"""Bounded proofs of the buffers of a cache: queues, the packer of pages, the buffer of staged rows."""

import pytest
from amaranth.hdl import Array, Assert, Assume, Cat, Cover, Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In
from formal import check, mutant

from kvant.hw.kvcache import packer
from kvant.hw.kvcache.block_queue import BlockQueue
from kvant.hw.kvcache.control import WindowControl
from kvant.hw.kvcache.packer import BlockPacker
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.pending_windows import PendingWindows
from kvant.hw.kvcache.result_queue import ResultQueue
from kvant.hw.kvcache.window_buffer import WindowBuffer
from kvant.hw.kvcache.window_encoder import ClosedWindow, WindowEncoder

COUNT = 6
"""Bits of the counters of a proof: they do not wrap within its depth."""


def constant(m, chosen, begun):
    """A number that is *chosen* freely in the first cycle, in which nothing else may happen."""
    kept = Signal.like(chosen)
    m.d.sync += kept.eq(Mux(begun, kept, chosen))
    return kept


def offered_until_taken(m, stream, statement):
    """*statement* (Assert or Assume) that a transfer that is offered stays as it is until it is taken."""
    waited, was = Signal(), Signal.like(stream.payload)
    m.d.sync += [waited.eq(stream.valid & ~stream.ready), was.eq(stream.payload)]
    same = stream.payload == was if isinstance(stream.payload, Signal) else stream.payload.as_value() == was.as_value()
    m.d.comb += statement(~waited | (stream.valid & same))


class QueueProof(wiring.Component):
    """Any transfer, the `chosen`-th, comes out once, as it went in, at its place; and all come out in the end."""

    def __init__(self, queue, patience):
        self.queue, self.patience = queue, patience
        super().__init__({"valid": In(1), "payload": In(4), "ready": In(1), "chosen": In(COUNT)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.queue = queue = self.queue
        begun = Signal()
        m.d.sync += begun.eq(1)
        chosen = constant(m, self.chosen, begun)
        entered, left, value, idle = Signal(COUNT), Signal(COUNT), Signal(4), Signal(COUNT)
        enters, leaves = queue.i.valid & queue.i.ready, queue.o.valid & queue.o.ready
        m.d.comb += [
            queue.i.valid.eq(self.valid & begun),
            queue.i.payload.eq(self.payload),
            queue.o.ready.eq(self.ready),
            Assert(~queue.o.valid | (left < entered)),
            Assert(~leaves | (left != chosen) | (queue.o.payload == value)),
            Assert(entered - left <= queue.depth + 1),
            Assert(idle <= self.patience),
            Cover((entered - left == queue.depth + 1) & ~queue.i.ready),
            Cover((left == queue.depth + 1) & (left == chosen) & leaves),
            Cover((left == entered) & (entered == 3)),
        ]
        offered_until_taken(m, queue.o, Assert)
        m.d.sync += [
            entered.eq(entered + enters),
            left.eq(left + leaves),
            idle.eq(Mux((left != entered) & ~queue.o.valid, idle + 1, 0)),
        ]
        with m.If(enters & (entered == chosen)):
            m.d.sync += value.eq(queue.i.payload)
        return m


class ResultQueueProof(wiring.Component):
    """As `QueueProof`, of results that come `latency` cycles after their items entered, and their tags.

    Items enter whenever there is room and the environment likes.
    """

    def __init__(self, latency, depth):
        self.latency, self.depth = latency, depth
        super().__init__({"wish": In(1), "tag": In(4), "ready": In(1), "chosen": In(COUNT)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.queue = queue = ResultQueue(4, 4, self.depth)
        begun, under_way = Signal(), Signal(self.latency)
        m.d.sync += begun.eq(1)
        chosen = constant(m, self.chosen, begun)
        entered, left, value = Signal(COUNT), Signal(COUNT), Signal(4)
        values = Signal(4 * self.latency)
        enters, leaves = Signal(), queue.o.valid & queue.o.ready
        m.d.comb += [
            enters.eq(queue.room & self.wish & begun),
            queue.enter.eq(enters),
            queue.tag.eq(self.tag),
            queue.push.eq(under_way[-1]),
            queue.result.eq(values[-4:]),
            queue.o.ready.eq(self.ready),
            Assert(~queue.o.valid | (left < entered)),
            Assert(~leaves | (queue.o.payload.result == ~queue.o.payload.tag)),
            Assert(~leaves | (left != chosen) | (queue.o.payload.tag == value)),
            Cover((entered - left == self.depth) & ~queue.room),
            Cover((left == self.depth + 1) & leaves),
        ]
        offered_until_taken(m, queue.o, Assert)
        m.d.sync += [
            under_way.eq(Cat(enters, under_way)),
            values.eq(Cat(~self.tag, values)),
            entered.eq(entered + enters),
            left.eq(left + leaves),
        ]
        with m.If(enters & (entered == chosen)):
            m.d.sync += value.eq(self.tag)
        return m


class PackerProof(wiring.Component):
    """Any group's words of codes and any block's words of metadata leave once, at their place, as they should be.

    Groups of two heads take turns at will; pages of two groups; groups may be short, and flushed.
    """

    GROUPS = 2
    BEATS = 4
    PATIENCE = 9
    """Cycles that a beat may wait while the outputs are taken at once."""

    def __init__(self, *, waits=False):
        self.waits = waits  # the outputs are taken at once, and the beat must be, too
        self.p = CacheParameters(group=16, lanes=4, port_bits=32, heads=2)
        beat = data.StructLayout({"codes": 16, "scale": 16, "coefficient": 8, "head": 1, "last": 1, "flush": 1})
        super().__init__(
            {
                "valid": In(1),
                "beat": In(beat),
                "codes_ready": In(1),
                "meta_ready": In(1),
                "chosen": In(data.StructLayout({"group": COUNT, "block": COUNT})),
            }
        )

    def elaborate(self, platform):
        p, beat = self.p, self.beat
        m = Module()
        m.submodules.dut = dut = BlockPacker(p, self.GROUPS, along_head=False)
        begun = Signal()
        m.d.sync += begun.eq(1)
        chosen = constant(m, self.chosen, begun)

        # The environment: an orderly sequence of groups per head.
        number, group_head = Signal(range(self.BEATS)), Signal()
        groups = Array(Signal(range(self.GROUPS), name=f"groups_{h}") for h in range(p.heads))
        pages = Array(Signal(COUNT, name=f"pages_{h}") for h in range(p.heads))
        group, page = Signal(range(self.GROUPS)), Signal(COUNT)
        i = dut.i.payload
        accept = Signal()
        m.d.comb += [
            group.eq(groups[beat.head]),
            page.eq(pages[beat.head]),
            dut.i.valid.eq(self.valid & begun),
            i.codes.as_value().eq(beat.codes),
            i.last.eq(beat.last | (number == self.BEATS - 1)),
            i.meta.scale.eq(beat.scale),
            i.meta.coefficient.eq(beat.coefficient),
            i.flush.eq(beat.flush),
            i.page_start.eq(group == 0),
            i.page_end.eq(group == self.GROUPS - 1),
            i.user.page.eq(page),
            i.user.head.eq(beat.head),
            i.user.timestamp.eq(~page),
            accept.eq(dut.i.valid & dut.i.ready),
            Assume((number == 0) | (beat.head == group_head)),
            dut.codes.ready.eq(self.codes_ready | self.waits),
            dut.meta.ready.eq(self.meta_ready | self.waits),
        ]
        offered_until_taken(m, dut.i, Assume)

        # Codes: two words a group, each of two beats.
        done = Signal(COUNT)
        words = [Signal(32, name=f"word_{k}") for k in range(2)]
        owner = Signal(data.StructLayout({"head": 1, "page": COUNT, "group": 1, "last": 1}))
        with m.If(accept):
            m.d.sync += [number.eq(Mux(i.last, 0, number + 1)), group_head.eq(beat.head), done.eq(done + i.last)]
            with m.If(i.last):
                m.d.sync += groups[beat.head].eq(group + 1)
                with m.If(i.page_end):
                    m.d.sync += pages[beat.head].eq(page + 1)
            with m.If(done == chosen.group):
                m.d.sync += [owner.head.eq(beat.head), owner.page.eq(page), owner.group.eq(group)]
                with m.If(i.last):
                    m.d.sync += owner.last.eq(i.page_end)
                for k in range(self.BEATS):
                    with m.If(number == k):
                        m.d.sync += words[k // 2][16 * (k % 2) : 16 * (k % 2 + 1)].eq(beat.codes)
        word = Signal(COUNT)
        codes_taken, out = dut.codes.valid & dut.codes.ready, dut.codes.payload
        m.d.sync += word.eq(word + codes_taken)
        m.d.comb += Assert(~dut.codes.valid | (word < 2 * done + (number > 1)))
        for k in range(2):
            with m.If(dut.codes.valid & (word == 2 * chosen.group + k)):
                m.d.comb += [
                    Assert(out.data == words[k]),
                    Assert(out.keep == 0b1111),
                    Assert(out.user.address == 8 * owner.group + 4 * k),
                    Assert(out.user.page == owner.page),
                    Assert(out.user.head == owner.head),
                    Assert(out.last == (owner.last if k == 1 else 0)),
                ]
        offered_until_taken(m, dut.codes, Assert)

        # Metadata: three words of a block and the trailer.
        meta = data.StructLayout({"scale": 16, "coefficient": 8})
        firsts = Array(Signal(meta, name=f"first_{h}") for h in range(p.heads))
        blocks = Signal(COUNT)
        first, second = Signal(meta), Signal(meta)
        block_owner = Signal(data.StructLayout({"head": 1, "page": COUNT, "last": 1}))
        given = Cat(beat.scale, beat.coefficient)
        with m.If(accept & i.last):
            with m.If(group == 0):
                m.d.sync += firsts[beat.head].eq(given)
            with m.If(i.flush | i.page_end):
                m.d.sync += blocks.eq(blocks + 1)
                with m.If(blocks == chosen.block):
                    m.d.sync += [
                        block_owner.head.eq(beat.head),
                        block_owner.page.eq(page),
                        block_owner.last.eq(i.page_end),
                        first.eq(Mux(group == 0, given, firsts[beat.head])),
                        second.eq(Mux(group == 0, 0, given)),
                    ]
        meta_word = Signal(COUNT + 2)
        meta_taken, out = dut.meta.valid & dut.meta.ready, dut.meta.payload
        m.d.sync += meta_word.eq(meta_word + meta_taken)
        m.d.comb += Assert(~dut.meta.valid | (meta_word[2:] < blocks))
        planes = dut.layout.planes
        timestamp = Signal(32)
        m.d.comb += timestamp.eq(~block_owner.page)
        expected = [
            (Cat(first.scale, second.scale), planes["scale"]),
            (0, planes["scale"] + 16),
            (Cat(first.coefficient, second.coefficient), planes["coefficient"]),
            (timestamp, dut.layout.trailer),
        ]
        for k, (content, address) in enumerate(expected):
            with m.If(dut.meta.valid & (meta_word == Cat(k & 1, k >> 1, chosen.block)[: COUNT + 2])):
                m.d.comb += [
                    Assert(out.data == content),
                    Assert(out.keep.all()),
                    Assert(out.user.address == address),
                    Assert(out.user.page == block_owner.page),
                    Assert(out.user.head == block_owner.head),
                    Assert(out.last == (block_owner.last if k == 3 else 0)),
                ]
        offered_until_taken(m, dut.meta, Assert)

        if self.waits:
            waited, codes_due, meta_due = (Signal(COUNT) for _ in range(3))
            m.d.sync += [
                waited.eq(Mux(dut.i.valid & ~dut.i.ready, waited + 1, 0)),
                codes_due.eq(Mux((word < 2 * done) & ~dut.codes.valid, codes_due + 1, 0)),
                meta_due.eq(Mux((meta_word[2:] < blocks) & ~dut.meta.valid, meta_due + 1, 0)),
            ]
            m.d.comb += [Assert(count <= self.PATIENCE) for count in (waited, codes_due, meta_due)]
        else:
            m.d.comb += [
                Cover(dut.i.valid & ~dut.i.ready & (meta_word == 0) & codes_taken),
                Cover(accept & (done == 3) & (page == 1)),
                Cover(codes_taken & (owner.head == 1) & (word == 3) & (chosen.group == 1) & (words[1] == 0)),
                Cover(meta_taken & out.last & (chosen.block == 1) & (second.scale != 0)),
                Cover(meta_taken & ~out.last & (meta_word == 3)),
            ]
        return m


class WindowBufferProof(wiring.Component):
    """Any element is read as it was last written, by row and by channel, if it was written early enough."""

    def __init__(self, p, ring_rows, *, dut_class=WindowBuffer):
        self.p = p
        self.dut = dut_class(p, ring_rows)
        words = range(p.heads * p.row_transfers)
        lane = range(p.lanes)
        place = data.StructLayout({"word": words, "row": range(ring_rows)})
        super().__init__(
            {
                "write": In(1),
                "written": In(place),
                "q": In(data.ArrayLayout(signed(8), p.lanes)),
                "read": In(1),
                "read_row": In(1),
                "wanted": In(place),
                "lane": In(lane),
                "chosen": In(data.StructLayout({"word": words, "row": range(ring_rows), "lane": lane})),
            }
        )

    def elaborate(self, platform):
        p, dut = self.p, self.dut
        ring_rows, latency = dut.ring_rows, dut.read_latency
        m = Module()
        m.submodules.dut = dut
        begun = Signal()
        m.d.sync += begun.eq(1)
        chosen = constant(m, self.chosen, begun)
        limit = p.heads * p.row_transfers
        hit = (self.wanted.row == chosen.row) & self.read_row
        block = self.wanted.row[: p.lanes.bit_length() - 1] == 0
        near = (
            (self.wanted.row[p.lanes.bit_length() - 1 :] == chosen.row[p.lanes.bit_length() - 1 :])
            & ~self.read_row
            & (self.lane == chosen.lane)
        )
        for place in (self.written, self.wanted, self.chosen):
            m.d.comb += Assume((place.word < limit) & (place.row < ring_rows))
        m.d.comb += [
            Assume(~self.read | self.read_row | block),
            dut.write.eq(self.write & begun),
            dut.write_address.eq(self.written.word * ring_rows + self.written.row),
            dut.write_q.eq(self.q),
            dut.read.eq(self.read & begun),
            dut.read_row.eq(self.read_row),
            dut.read_address.eq(self.wanted.word * ring_rows + self.wanted.row),
            dut.read_lane.eq(self.lane),
        ]
        # Its last value, and how long ago it was written.
        known, value, age = Signal(), Signal(signed(8)), Signal(range(dut.write_latency + 1))
        m.d.sync += age.eq(Mux(age == dut.write_latency, age, age + 1))
        with m.If(dut.write & (self.written.word == chosen.word) & (self.written.row == chosen.row)):
            m.d.sync += [known.eq(1), value.eq(Array(self.q)[chosen.lane]), age.eq(1)]
        settled = known & (age == dut.write_latency)
        seen = Signal(latency)
        lanes = [Signal(range(p.lanes), name=f"lane_{k}") for k in range(latency)]
        values = [Signal(signed(8), name=f"value_{k}") for k in range(latency)]
        reads = dut.read & (self.wanted.word == chosen.word) & (hit | near) & settled
        m.d.sync += [
            seen.eq(Cat(reads, seen)),
            lanes[0].eq(Mux(self.read_row, chosen.lane, chosen.row)),
            values[0].eq(value),
        ]
        for k in range(1, latency):
            m.d.sync += [lanes[k].eq(lanes[k - 1]), values[k].eq(values[k - 1])]
        m.d.comb += [
            Assert(~seen[-1] | (Array(dut.q)[lanes[-1]] == values[-1])),
            Cover(seen[-1] & (values[-1] == -128) & (chosen.row != 0) & (chosen.lane == p.lanes - 1)),
        ]
        return m


class WindowReadsProof(wiring.Component):
    """From the admission of rows to the readings of the encoder: any row of the ring is read where it stands written.

    `WindowControl`, `PendingWindows` and `WindowEncoder` as in the cache; a row is in the buffer `WRITTEN` cycles
    after it was taken, grids and the packer's patience are free. A row that is in no window, or not yet there, is never
    read; one that is in a window is read once for every channel, and is not written again before.
    """

    WRITTEN = 3

    def __init__(self, *, latency=WRITTEN + 1):
        self.p = CacheParameters(group=2, lanes=2, head_dim=2, capacity=4, evict=True)
        self.ring_rows = 6
        self.latency = latency
        super().__init__(
            {
                "scan": In(1),
                "start": In(1),
                "row": In(1),
                "grid": In(1),
                "ready": In(1),
                "chosen": In(range(self.ring_rows)),
            }
        )

    def elaborate(self, platform):
        p, ring_rows = self.p, self.ring_rows
        m = Module()
        m.submodules.control = control = WindowControl(p, ring_rows)
        m.submodules.pending = pending = PendingWindows(p, ring_rows, self.latency)
        m.submodules.encoder = encoder = WindowEncoder(p, ring_rows)
        begun = Signal()
        m.d.sync += begun.eq(1)
        chosen = constant(m, self.chosen, begun)
        wiring.connect(m, pending.o, encoder.windows)
        take, staged, plan = Signal(), Signal(), control.plan
        m.d.comb += [
            Assume(self.chosen < ring_rows),
            control.request.scan.eq(self.scan),
            control.request.start.eq(self.start),
            control.offered.eq(self.row & begun),
            take.eq(control.offered & control.granted),
            control.take.eq(take),
            staged.eq(take & ~plan.drop & ~plan.scan),
            pending.close.eq(take & plan.last_of_window),
            pending.window.base.eq(plan.base),
            pending.window.timestamp.eq(plan.timestamp),
            pending.window.page.eq(plan.page),
            encoder.grids.valid.eq(self.grid),
            encoder.o.ready.eq(self.ready),
            control.release.eq(encoder.release),
            control.release_head.eq(encoder.release_head),
        ]
        coming = Signal(self.WRITTEN)
        written, readings = Signal(), Signal(range(p.head_dim + 1))
        reads = encoder.read & (encoder.read_address[1:] == chosen[1:])  # two rows from an even one on
        window = Signal(ClosedWindow(ring_rows))  # that is being read
        with m.If(encoder.windows.valid & encoder.windows.ready):
            m.d.sync += window.eq(encoder.windows.payload)
        inside = (chosen == window.base) | (chosen == window.base + 1)
        takes_chosen = staged & (plan.row == chosen)
        m.d.sync += coming.eq(Cat(takes_chosen, coming))
        m.d.comb += [
            Assert(~takes_chosen | ~(written | coming.any())),
            Assert(~reads | (written & inside)),
            Assert(~(encoder.release & inside) | (readings + reads == p.head_dim)),
            Assert(~encoder.read | (encoder.read_address < ring_rows)),
        ]
        with m.If(coming[-1]):
            m.d.sync += written.eq(1)
        with m.If(reads):
            m.d.sync += readings.eq(readings + 1)
        with m.If(encoder.release & inside):
            m.d.sync += [written.eq(0), readings.eq(0)]
        with m.If(take & plan.scan_first):  # the open window of the former sequence is given up
            m.d.sync += [written.eq(0), coming.eq(0)]
        m.d.comb += [
            Cover(encoder.release & inside & (chosen == ring_rows - 1)),
            Cover(reads & (window.timestamp == p.group * 3)),
        ]
        return m


@pytest.mark.parametrize("depth", [2, pytest.param(4, marks=pytest.mark.long)])
def test_block_queue_keeps_every_transfer(tmp_path, depth):
    passed, report = check(QueueProof(BlockQueue(4, depth), 2), tmp_path, mode="bmc", depth=14)
    assert passed, report


def test_block_queue_proof_reaches_the_interesting_states(tmp_path):
    passed, report = check(QueueProof(BlockQueue(4, 2), 2), tmp_path, mode="cover", depth=14)
    assert passed, report


@pytest.mark.parametrize(("latency", "depth"), [(1, 2), (3, 4)])
@pytest.mark.parametrize("mode", ["bmc", "cover"])
def test_result_queue_has_room_for_what_is_under_way(tmp_path, latency, depth, mode):
    passed, report = check(ResultQueueProof(latency, depth), tmp_path, mode=mode, depth=14)
    assert passed, report


@pytest.mark.parametrize(
    ("waits", "mode", "depth"),
    [
        (False, "bmc", 10),
        (False, "cover", 22),
        pytest.param(False, "bmc", 13, marks=pytest.mark.long),
        pytest.param(True, "bmc", 13, marks=pytest.mark.long),
    ],
)
def test_packer_loses_and_exchanges_nothing(tmp_path, waits, mode, depth):
    passed, report = check(PackerProof(waits=waits), tmp_path, mode=mode, depth=depth)
    assert passed, report


@pytest.mark.parametrize("mode", ["bmc", "cover"])
@pytest.mark.parametrize(("lanes", "head_dim"), [(2, 4), (4, 4)])
def test_window_buffer_returns_what_was_written(tmp_path, lanes, head_dim, mode):
    p = CacheParameters(group=8, lanes=lanes, head_dim=head_dim)
    passed, report = check(WindowBufferProof(p, 2 * lanes), tmp_path, mode=mode, depth=10)
    assert passed, report


QUEUE_FAULTS = {
    "a transfer is taken though the queue is full": ("next_level != self.depth", "next_level != self.depth + 1"),
    "a transfer that waits is replaced": (
        "read.en.eq((level != 0) & (~self.o.valid | self.o.ready))",
        "read.en.eq(level != 0)",
    ),
    "the last transfer stays inside": ("1, level != 0)", "1, level > 1)"),
}


@pytest.mark.parametrize("fault", QUEUE_FAULTS)
def test_seeded_fault_of_the_queue_is_found(tmp_path, fault):
    queue = mutant(BlockQueue, *QUEUE_FAULTS[fault])
    passed, _ = check(QueueProof(queue(4, 2), 2), tmp_path, mode="bmc", depth=10)
    assert not passed


PACKER_FAULTS = {
    "a word replaces one that waits": (
        "CodeWords",
        "self.ready.eq(~complete | (free & (zero_words == 0)))",
        "self.ready.eq(~complete | (zero_words == 0))",
        False,
    ),
    "beats of two groups share a word": ("CodeWords", "slot == slots - 1", "slot == slots", False),
    "metadata leave before they are complete": ("MetaWords", "job_head)", "job_head ^ 1)", False),
    "metadata of a flush are late": ("MetaWords", "was_known, read.data", "known, read.data", False),
}


@pytest.mark.parametrize("fault", PACKER_FAULTS)
def test_seeded_fault_of_the_packer_is_found(tmp_path, monkeypatch, fault):
    name, old, new, waits = PACKER_FAULTS[fault]
    monkeypatch.setattr(packer, name, mutant(getattr(packer, name), old, new))
    passed, report = check(PackerProof(waits=waits), tmp_path, mode="bmc", depth=14)
    assert not passed, report


def test_seeded_fault_of_the_window_buffer_is_found(tmp_path):
    dut_class = mutant(WindowBuffer, "turn.eq(-Mux(", "turn.eq(Mux(")
    proof = WindowBufferProof(CacheParameters(group=8, lanes=4, head_dim=4), 8, dut_class=dut_class)
    passed, _ = check(proof, tmp_path, mode="bmc", depth=10)
    assert not passed


@pytest.mark.parametrize(
    ("mode", "depth"), [("bmc", 13), ("cover", 24), pytest.param("bmc", 18, marks=pytest.mark.long)]
)
def test_no_row_is_read_before_it_is_written(tmp_path, mode, depth):
    passed, report = check(WindowReadsProof(), tmp_path, mode=mode, depth=depth)
    assert passed, report


def test_a_window_that_is_offered_too_early_is_found(tmp_path):
    passed, report = check(WindowReadsProof(latency=WindowReadsProof.WRITTEN - 1), tmp_path, mode="bmc", depth=13)
    assert not passed
    assert "written & inside" in report
