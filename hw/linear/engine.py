"""The linear path: fp16 activations times M-ANT weights, streamed, to fp32 outputs."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, fifo, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.accumulate import GroupAccumulator
from kvant.hw.linear.activation_buffer import ActivationBuffer, activation_input, quantized_output
from kvant.hw.linear.array import LinearArray
from kvant.hw.linear.job_sizes import JobSizes
from kvant.hw.linear.layouts import index_width
from kvant.hw.linear.parameters import LinearParameters, ceil_div
from kvant.hw.linear.sequencer import Sequencer
from kvant.hw.linear.tile_loop import COUNT_WIDTH, job_ports
from kvant.hw.linear.timing import LinearTiming
from kvant.hw.linear.weight_buffer import WeightBuffer, weight_input


class Job(data.StructLayout):
    """A matrix product ``y[tokens, N] = x[tokens, K] @ w[N, K].T``.

    Members
    -------
    tokens : 1 ..
        Rows of x.
    groups : 1 ..
        Groups of K, ``ceil(K / group)``.
    tail : 1 .. group
        Elements of the last group.
    tiles : 1 ..
        Weight tiles, ``ceil(N / cols)``.
    last_cols : 1 .. cols
        Columns of the last tile.
    interleave : 1 ..
        Tiles that take turns; ``tokens * interleave`` accumulators are used.
    """

    def __init__(self):
        names = ["tokens", "groups", "tail", "tiles", "last_cols", "interleave"]
        super().__init__(dict.fromkeys(names, COUNT_WIDTH))


def output(p: LinearParameters) -> data.StructLayout:
    """Payload of the output port: one fp32 value per accumulator unit, 4 keep bits each, the end of the job."""
    return data.StructLayout({"data": data.ArrayLayout(32, p.units), "keep": 4 * p.units, "last": 1})


class JobCheck(wiring.Component):
    """Takes job descriptors and refuses what the buffers cannot hold, before anything is loaded.

    Takes at most ``COUNT_WIDTH + 2 + beats`` cycles a job; see `JobSizes`.

    Members
    -------
    cmd : in stream
        Descriptors; the next is taken when the running job is `finished`.
    job, tail_beats : out
        The running job; beats of a plane of its last group of K.
    start : out
        One cycle: the job is legal and begins.
    refused : out
        One cycle: the job is not legal and is dropped.
    finished : in
        The running job needs its descriptor no more.
    idle : out
        No job is checked or running.
    stored : out
        ``tokens * groups`` of the running job.
    """

    def __init__(self, p: LinearParameters):
        self.p = p
        super().__init__(
            {
                "cmd": In(stream.Signature(data.StructLayout({"data": Job()}))),
                "job": Out(Job()),
                "tail_beats": Out(index_width(p.beats + 1)),
                "start": Out(1),
                "refused": Out(1),
                "finished": In(1),
                "idle": Out(1),
                "stored": Out(range(p.stored_groups + 1)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        job = self.job
        m.submodules.sizes = sizes = JobSizes(p)
        given = self.cmd.payload.data
        legal = Signal()
        m.d.comb += [
            legal.eq(
                (job.tokens != 0)
                & (job.groups != 0)
                & (job.tail != 0)
                & (job.tail <= p.group)
                & (job.tiles != 0)
                & (job.last_cols != 0)
                & (job.last_cols <= p.cols)
                & (job.interleave != 0)
                & ~sizes.too_many_accumulators
                & ~sizes.too_many_groups
            ),
            sizes.start.eq(self.cmd.valid & self.cmd.ready),
            sizes.tokens.eq(given.tokens),
            sizes.tail.eq(given.tail),
            sizes.groups.eq(job.groups),
            sizes.interleave.eq(job.interleave),
            sizes.drop.eq(~legal),
            self.tail_beats.eq(sizes.tail_beats),
            self.stored.eq(sizes.stored),
        ]
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += [self.idle.eq(1), self.cmd.ready.eq(1)]
                with m.If(self.cmd.valid):
                    m.d.sync += job.eq(given)
                    m.next = "SIZES"
            with m.State("SIZES"):
                with m.If(sizes.verdict & ~legal):
                    m.d.comb += self.refused.eq(1)
                    m.next = "IDLE"
                with m.If(sizes.done):
                    m.next = "START"
            with m.State("START"):
                m.d.comb += self.start.eq(1)
                m.next = "RUN"
            with m.State("RUN"):
                with m.If(self.finished):
                    m.next = "IDLE"
        return m


class OutputQueue(wiring.Component):
    """Collects the outputs of all units into one stream and gives room to slots before they start.

    Members
    -------
    reserve : in
        A slot whose outputs are final starts; `last_column_tile` and `last_slot` describe it.
    room : out
        There is room for the outputs of one more slot.
    last_cols : in
        Columns of the last tile.
    units : in
        One output per unit and cycle, all units at once.
    y : out stream
        Column ``unit * unit_cols + step`` of a tile in lane *unit*, 0 past the last column; ``unit_cols`` transfers a
        slot.
    empty : out
        Nothing is reserved or waiting.
    """

    def __init__(self, p: LinearParameters, *, latency: int):
        self.p = p
        # Enough that a receiver that is always ready never delays a slot: a slot's room comes back `latency`
        # cycles after it starts.
        self.slots = ceil_div(latency, p.unit_cols) + 2
        lane = data.StructLayout({"valid": 1, "y": 32})
        super().__init__(
            {
                "reserve": In(1),
                "last_column_tile": In(1),
                "last_slot": In(1),
                "room": Out(1),
                **job_ports(p, "last_cols"),
                "units": In(data.ArrayLayout(lane, p.units)),
                "y": Out(stream.Signature(output(p))),
                "empty": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.flags = flags = fifo.SyncFIFOBuffered(width=2, depth=self.slots)
        m.submodules.queue = queue = fifo.SyncFIFOBuffered(width=output(p).size, depth=self.slots * p.unit_cols)

        reserved = Signal(range(self.slots + 1))
        out_step = Signal(range(max(2, p.unit_cols)))
        out_end = Signal()  # the last output of a slot leaves
        taken = self.y.valid & self.y.ready
        m.d.comb += [
            out_end.eq(taken & (out_step == p.unit_cols - 1)),
            self.room.eq(reserved != self.slots),
            self.empty.eq(reserved == 0),
            flags.w_data.eq(Cat(self.last_column_tile, self.last_slot)),
            flags.w_en.eq(self.reserve),
        ]
        m.d.sync += reserved.eq(reserved + self.reserve - out_end)
        with m.If(taken):
            m.d.sync += out_step.eq(Mux(out_end, 0, out_step + 1))

        step = Signal(range(max(2, p.unit_cols)))
        step_end = step == p.unit_cols - 1
        last_column_tile, last_slot = flags.r_data
        columns = Mux(last_column_tile, self.last_cols, p.cols)
        row = Signal(output(p))
        m.d.comb += [
            queue.w_data.eq(row),
            queue.w_en.eq(self.units[0].valid),
            flags.r_en.eq(queue.w_en & step_end),
            row.last.eq(last_slot & step_end),
        ]
        for unit in range(p.units):
            keep = unit * p.unit_cols + step < columns
            m.d.comb += [
                row.data[unit].eq(Mux(keep, self.units[unit].y, 0)),
                row.keep[4 * unit : 4 * unit + 4].eq(keep.replicate(4)),
            ]
        with m.If(queue.w_en):
            m.d.sync += step.eq(Mux(step_end, 0, step + 1))
        # The queue answers late in the cycle: what leaves is a register.
        free = ~self.y.valid | self.y.ready
        m.d.comb += queue.r_en.eq(free)
        with m.If(free):
            m.d.sync += [self.y.valid.eq(queue.r_rdy), self.y.payload.eq(queue.r_data)]
        return m


class LinearEngine(wiring.Component):
    """Matrix products of streamed M-ANT weights with fp16 activations, bit-exact.

    ::

        x ──> Int8Quantizer ──> ActivationBuffer ─┐            ┌─> GroupAccumulator ─┐
                                    (xq)          ├─> Array ───┤        ...          ├─> OutputQueue ──> y
        w ────────────────────> WeightBuffer ─────┘     ^      └─> GroupAccumulator ─┘
        cmd ──> JobCheck ──> Sequencer ─────────────────┘

    Weights stream once per job and are used for all its tokens. With all streams ready the array works every
    cycle from the first activation group's arrival on; see `kvant.hw.linear.cycles` for the exact count.

    Parameters
    ----------
    p : LinearParameters

    Members
    -------
    cmd : in stream
        `Job` descriptors. One that the buffers cannot hold, or with a zero or an illegal tail, raises `error` and is
        dropped: nothing is loaded for it.
    x : in stream
        fp16 activations; for each group of K, all tokens; each group begins a new transfer.
    w : in stream
        Weight tiles; see `WeightBuffer`. Columns past the last output are ignored (any legal coefficient).
    xq : out stream
        Activations as quantised; must be taken for the job to proceed.
    y : out stream
        fp32 outputs in the order block of tiles, tile, token, column step; see `OutputQueue`.
    busy : out
        A job is under way or outputs wait.
    nonfinite : out
        Sticky: NaN (taken as 0) or an infinity (taken as +-65504) at the fp16 port.
    error : out
        Sticky: a refused job, a reserved coefficient, or a negative or non-finite weight scale (the group counts 0).
    busy_cycles : out
        Cycles in which at least one lane worked, since reset.

    With *sets* a job may have several sets of activations, of ``tokens * groups`` groups each, which follow each other
    at `x`: a block of `interleave` tiles meets the set of its turn. All sets fit in the buffer; nothing checks it.

    sets : in
        1 or more; stable while a job runs, as is `skip`.
    skip : in
        The first set is quantised, and seen at `xq`, but no block meets it.
    set_blocks, next_set : in, out
        See `kvant.hw.linear.sequencer.set_ports`; with `sets` 1 all blocks meet the one set.
    """

    def __init__(self, p: LinearParameters, *, sets: bool = False):
        self.p = p
        self.with_sets = sets
        more = {"sets": In(COUNT_WIDTH), "skip": In(1), "set_blocks": In(COUNT_WIDTH), "next_set": Out(1)}
        super().__init__(
            {
                "cmd": In(stream.Signature(data.StructLayout({"data": Job()}))),
                "x": In(stream.Signature(activation_input(p))),
                "w": In(stream.Signature(weight_input(p))),
                "xq": Out(stream.Signature(quantized_output(p))),
                "y": Out(stream.Signature(output(p))),
                "busy": Out(1),
                "nonfinite": Out(1),
                "error": Out(1),
                "busy_cycles": Out(32),
                **(more if sets else {}),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        timing = LinearTiming(p)
        m.submodules.activations = activations = ActivationBuffer(p, sets=self.with_sets)
        m.submodules.job_check = check = JobCheck(p)
        m.submodules.weights = weights = WeightBuffer(p)
        m.submodules.sequencer = sequencer = Sequencer(p, spacing=timing.spacing, sets=self.with_sets)
        m.submodules.array = array = LinearArray(p)
        m.submodules.queue = queue = OutputQueue(p, latency=timing.slot)

        wiring.connect(m, wiring.flipped(self.cmd), check.cmd)
        wiring.connect(m, wiring.flipped(self.x), activations.x)
        wiring.connect(m, wiring.flipped(self.w), weights.w)
        wiring.connect(m, activations.xq, wiring.flipped(self.xq))
        wiring.connect(m, queue.y, wiring.flipped(self.y))

        job = check.job
        m.d.comb += [
            activations.start.eq(check.start),
            activations.tokens.eq(job.tokens),
            activations.groups.eq(job.groups),
            activations.tail.eq(job.tail),
            weights.start.eq(check.start),
            weights.tiles.eq(job.tiles),
            weights.interleave.eq(job.interleave),
            weights.groups.eq(job.groups),
            weights.tail_beats.eq(check.tail_beats),
            sequencer.start.eq(check.start),
            sequencer.tokens.eq(job.tokens),
            sequencer.tiles.eq(job.tiles),
            sequencer.interleave.eq(job.interleave),
            sequencer.groups.eq(job.groups),
            sequencer.tail_beats.eq(check.tail_beats),
            # The descriptor still names the columns of the job's last outputs.
            check.finished.eq(sequencer.done & queue.empty),
            queue.last_cols.eq(job.last_cols),
        ]

        if self.with_sets:
            m.d.comb += [
                activations.sets.eq(self.sets),
                sequencer.separate.eq(self.sets != 1),
                sequencer.first_group.eq(Mux(self.skip, check.stored, 0)),
                sequencer.set_blocks.eq(self.set_blocks),
                self.next_set.eq(sequencer.next_set),
            ]

        m.d.comb += [
            sequencer.head_valid.eq(weights.head_valid),
            sequencer.high_plane.eq(weights.head.high_plane),
            sequencer.written.eq(activations.written),
            sequencer.newest.eq(activations.newest),
            sequencer.room.eq(queue.room),
            weights.read.eq(sequencer.beat_valid),
            weights.slot_end.eq(sequencer.slot_end),
            weights.release.eq(sequencer.plan.last_token),
            activations.read.eq(sequencer.beat_valid),
            activations.word_address.eq(sequencer.word_address),
            activations.group_address.eq(sequencer.plan.group_address),
            queue.reserve.eq(sequencer.finishing),
            queue.last_column_tile.eq(sequencer.plan.last_column_tile),
            queue.last_slot.eq(sequencer.plan.last_slot),
        ]

        # The buffers answer one cycle after they are asked; what goes with the beat waits as long.
        beat, slot = array.beat, array.slot
        with m.If(sequencer.beat_valid):
            m.d.sync += [
                slot.address.eq(sequencer.plan.address),
                slot.first_group.eq(sequencer.plan.first_group),
                slot.last_group.eq(sequencer.plan.last_group),
            ]
            for column, head in enumerate(weights.head.columns):
                m.d.sync += [slot.coefficient[column].eq(head.coefficient), slot.w_scale[column].eq(head.scale)]
        m.d.sync += [
            beat.valid.eq(sequencer.beat_valid),
            beat.first.eq(sequencer.first),
            beat.last.eq(sequencer.last),
            beat.high.eq(sequencer.high),
        ]
        m.d.comb += [
            beat.x.eq(activations.word),
            beat.codes.eq(weights.codes),
            slot.x_scale.eq(activations.scale),
        ]

        errors = [check.refused]
        for unit in range(p.units):
            m.submodules[f"accumulator_{unit}"] = accumulator = GroupAccumulator(p)
            m.d.comb += [
                accumulator.i.eq(array.results[unit]),
                queue.units[unit].valid.eq(accumulator.o.valid),
                queue.units[unit].y.eq(accumulator.o.y),
            ]
            errors.append(accumulator.error)
        with m.If(Cat(*errors).any()):
            m.d.sync += self.error.eq(1)
        m.d.comb += [
            self.nonfinite.eq(activations.nonfinite),
            self.busy.eq(~check.idle),
        ]
        with m.If(beat.valid):
            m.d.sync += self.busy_cycles.eq(self.busy_cycles + 1)
        return m
