"""Runs descriptors: hands jobs to the clients, keeps order, stops on errors."""

from amaranth.hdl import Array, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.engine import Job
from kvant.hw.soc.activation_reader import ActivationJob
from kvant.hw.soc.attend_job import AttendJob
from kvant.hw.soc.cache_job import CacheJob
from kvant.hw.soc.descriptor_check import CheckedDescriptor, fields_of
from kvant.hw.soc.descriptor_reader import INDEX_BITS
from kvant.hw.soc.descriptors import (
    ATTEND,
    CACHE,
    JOB_FIELDS,
    LINEAR,
    DescriptorKind,
    ErrorCode,
    Flag,
    Opcode,
    Rule,
    kinds_of,
)
from kvant.hw.soc.fault import Fault
from kvant.hw.soc.output_writer import OutputJob
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.weight_reader import WeightJob

OPCODE_BITS = 8

IN_WORDS = (Rule.ADDRESS, Rule.STRIDE, Rule.LENGTH)
"""Fields that count bytes, and words in a job."""

_CLIENTS = {
    Opcode.LINEAR: ("weights", "x", "command", "y"),
    Opcode.CACHE: ("cache",),
    Opcode.ATTEND: ("attend",),
}
"""Streams of jobs that a descriptor fills, each once."""

_WRITE_CODES = {
    Opcode.LINEAR: ErrorCode.WRITE_Y,
    Opcode.CACHE: ErrorCode.WRITE_CACHE,
    Opcode.ATTEND: ErrorCode.WRITE_ATTEND,
}


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

    Each has a *slot*, 0 and 1 in turn. A job goes to the clients of its opcode one by one, each as soon as it can take
    it. LINEAR comes under way behind anything: its weights are read ahead, and with the flag WAIT its activations are
    not. ATTEND does behind another ATTEND, if it has no flag WAIT; all others wait until nothing is under way. A
    client of several descriptors finishes them in turn, and outputs of LINEAR behind another opcode are held back, so
    that whatever is written to memory belongs to the oldest descriptor. A fault ends the run when everything older than
    the faulty descriptor is done. Whatever ends the run, `stop` then rises, and when nothing is owed by the memory
    port, `reset` clears all clients for a cycle.

    Parameters
    ----------
    p : TopParameters
    faults : int
        Clients that report faults.

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
        Jobs of the clients of LINEAR.
    cache : out stream
        `CacheJob`, in a design with caches.
    attend : out stream
        `AttendJob`, in a design with attention.
    engine_busy : in
        The engine has a job.
    engine_reset : out
        For a cycle before each command: the engine forgets its flags.
    linear_done, cache_done, attend_done : in
        For a cycle: the outputs of the oldest job of the opcode are where they belong.
    write_error : in
        An answer of a write reported an error.
    faults : array of In(Fault)
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

    def __init__(self, p: TopParameters, faults: int):
        self.p = p
        self._opcodes = [opcode for opcode in _CLIENTS if opcode in {kind.opcode for kind in kinds_of(p)}]
        optional = {} if p.cache is None else {"cache": Out(stream.Signature(CacheJob(p)))}
        optional |= {} if p.attention is None else {"attend": Out(stream.Signature(AttendJob(p)))}
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
                **optional,
                **{f"{opcode.name.lower()}_done": In(1) for opcode in self._opcodes},
                "write_error": In(1),
                "faults": In(Fault()).array(faults),
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
        opcodes = Array(Signal(OPCODE_BITS, name=f"opcode_{number}") for number in range(2))
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

        oldest_opcode = Signal(OPCODE_BITS)
        done = Signal()
        m.d.comb += oldest_opcode.eq(opcodes[oldest])
        for opcode in self._opcodes:
            with m.If(oldest_opcode == opcode):
                m.d.comb += done.eq(getattr(self, f"{opcode.name.lower()}_done"))

        clients = [name for opcode in self._opcodes for name in _CLIENTS[opcode]]
        pending = Signal(data.StructLayout(dict.fromkeys(clients, 1)))
        for name in clients:
            port = getattr(self, name)
            with m.If(port.valid & port.ready):
                m.d.sync += pending[name].eq(0)
        self._give_linear(m, job, pending, ~slot, oldest, oldest_opcode)
        if self.p.cache is not None:
            self._give_cache(m, job, pending, ~slot)
        if self.p.attention is not None:
            self._give_attend(m, job, pending, ~slot)

        incoming = self.descriptor.payload
        common = fields_of(incoming.bits, LINEAR)
        flags, opcode = common.flags, common.opcode
        may_begin, is_job = Signal(), Signal()
        m.d.comb += [
            may_begin.eq(
                none_under_way
                | (opcode == Opcode.LINEAR)
                | ((opcode == Opcode.ATTEND) & (oldest_opcode == Opcode.ATTEND) & (flags & Flag.WAIT.value == 0))
            ),
            is_job.eq(Cat(opcode == each for each in self._opcodes).any()),
        ]
        fault = Signal(StopReport())
        faulty, ends = Signal(), Signal()
        self._find_fault(m, fault, faulty, none_under_way, index, oldest, oldest_opcode)
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
                    retire.eq(done & ~none_under_way),
                ]
                with m.If(~pending.as_value().any() & ~under_way[slot] & ~halting & self.descriptor.valid):
                    with m.If(incoming.code != ErrorCode.NONE):
                        m.d.comb += ends.eq(none_under_way)
                    with m.Elif(may_begin):
                        m.d.comb += self.descriptor.ready.eq(1)
                        m.d.sync += [
                            job.eq(incoming),
                            under_way[slot].eq(1),
                            index[slot].eq(incoming.index),
                            interrupt[slot].eq(flags & Flag.INTERRUPT.value != 0),
                            opcodes[slot].eq(opcode),
                            slot.eq(~slot),
                        ]
                        for each in self._opcodes:
                            with m.If(opcode == each):
                                m.d.sync += [pending[name].eq(1) for name in _CLIENTS[each]]
                        with m.If(~is_job):
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
                with m.If(fields_of(job.bits, LINEAR).opcode == Opcode.END):
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

    def _give_linear(self, m: Module, job, pending, slot, oldest, oldest_opcode) -> None:
        """Jobs of the clients of LINEAR, each offered until it is taken; `slot` is that of *job*."""
        fields = fields_of(job.bits, LINEAR)
        low = self.p.soc.align_bits
        flags = fields.flags
        from_stream, to_stream, waits = (flags & flag.value != 0 for flag in (Flag.X_STREAM, Flag.Y_STREAM, Flag.WAIT))
        ready_engine = Signal()  # it has forgotten the flags of the job before
        weights, x, y = (port.payload for port in (self.weights, self.x, self.y))
        m.d.comb += [
            self.weights.valid.eq(pending.weights),
            weights.region.address.eq(fields.weights >> low),
            weights.region.words.eq(fields.weight_bytes >> low),
            weights.tiles.eq(fields.tiles),
            weights.interleave.eq(fields.interleave),
            weights.groups.eq(fields.groups),
            weights.tail_beats.eq(job.tail_beats),
            weights.slot.eq(slot),
            self.x.valid.eq(pending.x & (~waits | (slot == oldest))),
            x.from_stream.eq(from_stream),
            x.address.eq(fields.x >> low),
            x.stride.eq(fields.x_stride >> low),
            x.tokens.eq(fields.tokens),
            x.groups.eq(fields.groups),
            x.tail.eq(fields.tail),
            x.slot.eq(slot),
            self.command.valid.eq(pending.command & ready_engine),
            self.engine_reset.eq(pending.command & ~ready_engine & ~self.engine_busy),
            self.y.valid.eq(pending.y & ((slot == oldest) | (oldest_opcode == Opcode.LINEAR))),
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

    def _give_cache(self, m: Module, job, pending, slot) -> None:
        """The job of CACHE."""
        flags = fields_of(job.bits, CACHE).flags
        given = self.cache.payload
        m.d.comb += [
            self.cache.valid.eq(pending.cache),
            given.slot.eq(slot),
            given.values.eq(flags & Flag.VALUES.value != 0),
            given.first.eq(flags & Flag.FIRST.value != 0),
        ]
        m.d.comb += self._copied(CACHE, job.bits, given, row_stride="stride")

    def _give_attend(self, m: Module, job, pending, slot) -> None:
        """The job of ATTEND."""
        m.d.comb += [self.attend.valid.eq(pending.attend), self.attend.payload.slot.eq(slot)]
        m.d.comb += self._copied(ATTEND, job.bits, self.attend.payload)

    def _copied(self, kind: DescriptorKind, bits, target, **names: str) -> list:
        """The fields of a descriptor in a job of the same names (or *names*); bytes become words of the port."""
        fields = fields_of(bits, kind)
        low = self.p.soc.align_bits
        return [
            target[names.get(field.name, field.name)].eq(fields[field.name] >> (low if field.rule in IN_WORDS else 0))
            for field in kind.fields
        ]

    def _find_fault(self, m: Module, fault, faulty, none_under_way, index, oldest, oldest_opcode) -> None:
        """A fault of the oldest descriptor; faults of younger ones wait."""
        m.d.comb += fault.index.eq(index[oldest])
        with m.If(self.write_error):
            m.d.comb += [faulty.eq(1), fault.write.eq(1)]
            for opcode in self._opcodes:
                with m.If(oldest_opcode == opcode):
                    m.d.comb += fault.code.eq(_WRITE_CODES[opcode])
        for source in self.faults:
            with m.Elif(~none_under_way & (source.code != ErrorCode.NONE) & (source.slot == oldest)):
                length = source.code == ErrorCode.WEIGHT_LENGTH
                m.d.comb += [
                    faulty.eq(1),
                    fault.descriptor.eq(length),
                    fault.read.eq(~length),
                    fault.code.eq(source.code),
                ]
                with m.If(length):
                    m.d.comb += fault.field.eq(LINEAR.offset("weight_bytes"))
