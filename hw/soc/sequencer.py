"""Runs descriptors: hands jobs to the clients, keeps order, stops on errors."""

from amaranth.hdl import Array, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.engine import Job
from kvant.hw.soc.activation_reader import ActivationJob
from kvant.hw.soc.descriptor_check import CheckedDescriptor
from kvant.hw.soc.descriptor_reader import INDEX_BITS
from kvant.hw.soc.descriptors import FIELDS, JOB_FIELDS, ErrorCode, Flag, Opcode
from kvant.hw.soc.output_writer import OutputJob
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.weight_reader import Fault, WeightJob

_WEIGHT_BYTES = next(field for field in FIELDS if field.name == "weight_bytes")


class StopReport(data.StructLayout):
    """Why the accelerator stopped.

    Members
    -------
    descriptor, read, write : 1
        Fields of ERROR to set; none for an abort or a plain end.
    code, field, index
        See the registers ERROR_CODE and ERROR_INDEX.
    """

    def __init__(self):
        super().__init__({"descriptor": 1, "read": 1, "write": 1, "code": 8, "field": 8, "index": INDEX_BITS})


class Sequencer(wiring.Component):
    """At most two descriptors are under way: one that runs, and one whose weights are read ahead.

    Each has a *slot*, 0 and 1 in turn. A job goes to the clients one by one, each as soon as it can take it: weights,
    activations (with the flag WAIT only when nothing older is under way), the engine's command, outputs. It is done
    when its outputs are. A fault ends the run when everything older than the faulty descriptor is done. Whatever ends
    the run, `stop` then rises, and when nothing is owed by the memory port, `reset` clears all clients for a cycle.

    Members
    -------
    start, halt, abort : in
        Commands, for one cycle.
    may_start : in
        No stopping error is pending.
    ring_legal : in
        Head and tail are places of the ring and its address is legal.
    head_write, head_data : in
        The host writes `head`; without effect while running.
    count : in
        Places of the ring.
    head : out
        First descriptor that is not done.
    fetch : out
        Descriptors may be read.
    descriptor : in stream
        `CheckedDescriptor`.
    weights, x, command, y : out streams
        Jobs of the clients.
    engine_busy : in
        The engine has a job.
    engine_reset : out
        For a cycle before each command: the engine forgets its flags.
    output_done : in
        The outputs of the oldest job are where they belong.
    write_error : in
        An answer of a write reported an error.
    weight_fault, x_fault : in
    owes : in
        The memory port owes a transfer.
    stop, reset : out
    running, busy, draining : out
        See the register STATUS.
    retired : out
        A descriptor is done, for a cycle; `retired_interrupt`: it has the flag INTERRUPT.
    stopped : out
        For a cycle: the run has ended, and `report` says why.
    failed : out
        With `stopped`: by an error or an abort.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        super().__init__(
            {
                "start": In(1),
                "halt": In(1),
                "abort": In(1),
                "may_start": In(1),
                "ring_legal": In(1),
                "head_write": In(1),
                "head_data": In(INDEX_BITS),
                "head": Out(INDEX_BITS),
                "count": In(INDEX_BITS),
                "fetch": Out(1),
                "descriptor": In(stream.Signature(CheckedDescriptor(p))),
                "weights": Out(stream.Signature(WeightJob(p))),
                "x": Out(stream.Signature(ActivationJob(p))),
                "command": Out(stream.Signature(data.StructLayout({"data": Job()}))),
                "y": Out(stream.Signature(OutputJob(p))),
                "engine_busy": In(1),
                "engine_reset": Out(1),
                "output_done": In(1),
                "write_error": In(1),
                "weight_fault": In(Fault()),
                "x_fault": In(Fault()),
                "owes": In(1),
                "stop": Out(1),
                "reset": Out(1),
                "running": Out(1),
                "busy": Out(1),
                "draining": Out(1),
                "retired": Out(1),
                "retired_interrupt": Out(1),
                "stopped": Out(1),
                "failed": Out(1),
                "report": Out(StopReport()),
            }
        )

    def elaborate(self, platform):
        m = Module()
        job = Signal(CheckedDescriptor(self.p))  # the newest descriptor that is under way
        slot = Signal()  # of the next one
        oldest = Signal()
        under_way = Array(Signal(name=f"under_way_{number}") for number in range(2))
        index = Array(Signal(INDEX_BITS, name=f"index_{number}") for number in range(2))
        interrupt = Array(Signal(name=f"interrupt_{number}") for number in range(2))
        none_under_way = Signal()
        halting = Signal()
        m.d.comb += [none_under_way.eq(~under_way[0] & ~under_way[1]), self.busy.eq(~none_under_way)]

        retire, retired_index = Signal(), Signal(INDEX_BITS)
        m.d.sync += [self.retired.eq(retire), self.retired_interrupt.eq(retire & interrupt[oldest])]
        m.d.comb += retired_index.eq(index[oldest])
        with m.If(retire):
            m.d.sync += [
                under_way[oldest].eq(0),
                oldest.eq(~oldest),
                self.head.eq(Mux(retired_index + 1 == self.count, 0, retired_index + 1)),
            ]

        self._distribute(m, job, ~slot, oldest)
        pending = self._pending
        all_given = ~pending.any()

        incoming = self.descriptor.payload
        flags, is_job = incoming.bits.flags, incoming.bits.opcode == Opcode.LINEAR
        fault = Signal(StopReport())
        faulty, ends = Signal(), Signal()
        self._find_fault(m, fault, faulty, none_under_way, index, oldest)
        with m.FSM() as fsm:
            with m.State("IDLE"):
                with m.If(self.head_write):
                    m.d.sync += self.head.eq(self.head_data)
                m.d.sync += [halting.eq(0), oldest.eq(0), slot.eq(0)]
                with m.If(self.start & self.may_start):
                    with m.If(self.ring_legal):
                        m.next = "RUN"
                    with m.Else():
                        m.d.sync += [
                            self.report.eq(0),
                            self.report.descriptor.eq(1),
                            self.report.code.eq(ErrorCode.RING),
                            self.report.index.eq(self.head),
                            self.failed.eq(1),
                        ]
                        m.next = "STOPPED"
            with m.State("RUN"):
                with m.If(self.halt):
                    m.d.sync += halting.eq(1)
                m.d.comb += [
                    self.fetch.eq(~halting),
                    retire.eq(self.output_done),
                ]
                with m.If(all_given & ~under_way[slot] & ~halting & self.descriptor.valid):
                    with m.If(incoming.code != ErrorCode.NONE):
                        m.d.comb += ends.eq(none_under_way)
                    with m.Elif(is_job | none_under_way):
                        m.d.comb += self.descriptor.ready.eq(1)
                        m.d.sync += [
                            job.eq(incoming),
                            under_way[slot].eq(1),
                            index[slot].eq(incoming.index),
                            interrupt[slot].eq(flags & Flag.INTERRUPT.value != 0),
                            slot.eq(~slot),
                        ]
                        with m.If(is_job):
                            m.d.sync += pending.eq(-1)
                        with m.Else():
                            # FENCE and END are under way for one cycle, so that they are done like any other.
                            m.next = "PASS"
                with m.If(self.abort):
                    m.d.sync += [self.report.eq(0), self.report.index.eq(self.head), self.failed.eq(1)]
                    m.next = "DRAIN"
                with m.Elif(faulty | ends):
                    m.d.sync += [self.report.eq(fault), self.failed.eq(1)]
                    with m.If(ends & ~faulty):
                        m.d.sync += [
                            self.report.descriptor.eq(incoming.code != ErrorCode.FETCH),
                            self.report.read.eq(incoming.code == ErrorCode.FETCH),
                            self.report.write.eq(0),
                            self.report.code.eq(incoming.code),
                            self.report.field.eq(incoming.field),
                            self.report.index.eq(incoming.index),
                        ]
                    m.next = "DRAIN"
                with m.Elif(halting & none_under_way):
                    m.d.sync += [self.report.eq(0), self.report.index.eq(self.head), self.failed.eq(0)]
                    m.next = "DRAIN"
            with m.State("PASS"):
                m.d.comb += [self.fetch.eq(~halting), retire.eq(1)]
                m.next = "RUN"
                with m.If(self.halt):
                    m.d.sync += halting.eq(1)
                with m.If(job.bits.opcode == Opcode.END):
                    m.d.sync += halting.eq(1)
                with m.If(self.abort):
                    m.d.comb += retire.eq(0)
                    m.d.sync += [self.report.eq(0), self.report.index.eq(self.head), self.failed.eq(1)]
                    m.next = "DRAIN"
            with m.State("DRAIN"):
                # `stop` reaches the port in this cycle; what it owes is known a cycle later.
                m.d.comb += self.stop.eq(1)
                m.next = "OWED"
            with m.State("OWED"):
                m.d.comb += self.stop.eq(1)
                with m.If(~self.owes):
                    m.next = "CLEAR"
            with m.State("CLEAR"):
                m.d.comb += [self.stop.eq(1), self.reset.eq(1)]
                m.d.sync += [under_way[0].eq(0), under_way[1].eq(0), pending.eq(0)]
                m.next = "STOPPED"
            with m.State("STOPPED"):
                m.d.comb += self.stopped.eq(1)
                m.next = "IDLE"
        m.d.comb += [
            self.running.eq(fsm.ongoing("RUN") | fsm.ongoing("PASS")),
            self.draining.eq(fsm.ongoing("DRAIN") | fsm.ongoing("OWED") | fsm.ongoing("CLEAR")),
        ]
        return m

    def _distribute(self, m: Module, job, slot, oldest) -> None:
        """Jobs of the clients, each offered until it is taken; `slot` is that of *job*."""
        fields = job.bits
        low = self.p.soc.align_bits
        flags = fields.flags
        from_stream, to_stream, waits = (flags & flag.value != 0 for flag in (Flag.X_STREAM, Flag.Y_STREAM, Flag.WAIT))
        ports = (self.weights, self.x, self.command, self.y)
        self._pending = pending = Signal(len(ports))
        for number, port in enumerate(ports):
            with m.If(port.valid & port.ready):
                m.d.sync += pending[number].eq(0)
        ready_engine = Signal()  # it has forgotten the flags of the job before
        weights, x, y = (port.payload for port in (self.weights, self.x, self.y))
        m.d.comb += [
            self.weights.valid.eq(pending[0]),
            weights.region.address.eq(fields.weights >> low),
            weights.region.words.eq(fields.weight_bytes >> low),
            weights.tiles.eq(fields.tiles),
            weights.interleave.eq(fields.interleave),
            weights.groups.eq(fields.groups),
            weights.tail_beats.eq(job.tail_beats),
            weights.slot.eq(slot),
            self.x.valid.eq(pending[1] & (~waits | (slot == oldest))),
            x.from_stream.eq(from_stream),
            x.address.eq(fields.x >> low),
            x.stride.eq(fields.x_stride >> low),
            x.tokens.eq(fields.tokens),
            x.groups.eq(fields.groups),
            x.tail.eq(fields.tail),
            x.slot.eq(slot),
            self.command.valid.eq(pending[2] & ready_engine),
            self.engine_reset.eq(pending[2] & ~ready_engine & ~self.engine_busy),
            self.y.valid.eq(pending[3]),
            y.to_stream.eq(to_stream),
            y.address.eq(fields.y >> 2),
            y.stride.eq(fields.y_stride >> 2),
            y.tokens.eq(fields.tokens),
        ]
        m.d.comb += [self.command.payload.data[name].eq(fields[name]) for name in JOB_FIELDS]
        with m.If(self.engine_reset):
            m.d.sync += ready_engine.eq(1)
        with m.Elif((self.command.valid & self.command.ready) | self.reset):
            m.d.sync += ready_engine.eq(0)

    def _find_fault(self, m: Module, fault, faulty, none_under_way, index, oldest) -> None:
        """A fault of the oldest descriptor; faults of younger ones wait."""
        m.d.comb += fault.index.eq(index[oldest])
        clients = [
            (~none_under_way & (source.code != ErrorCode.NONE) & (source.slot == oldest), source)
            for source in (self.weight_fault, self.x_fault)
        ]
        with m.If(self.write_error):
            m.d.comb += [faulty.eq(1), fault.write.eq(1), fault.code.eq(ErrorCode.WRITE_Y)]
        for present, source in clients:
            with m.Elif(present):
                length = source.code == ErrorCode.WEIGHT_LENGTH
                m.d.comb += [
                    faulty.eq(1),
                    fault.descriptor.eq(length),
                    fault.read.eq(~length),
                    fault.code.eq(source.code),
                ]
                with m.If(length):
                    m.d.comb += fault.field.eq(_WEIGHT_BYTES.offset)
