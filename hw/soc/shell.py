"""The accelerator without its engines: registers, memory port, sequencer, readers and writers."""

from amaranth.hdl import Cat, Module, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.activation_buffer import activation_input
from kvant.hw.linear.engine import Job, output
from kvant.hw.linear.weight_buffer import weight_input
from kvant.hw.soc.activation_reader import ActivationReader
from kvant.hw.soc.attend_unit import AttendUnit
from kvant.hw.soc.axi import MasterSignature, ReadSignature, WriteSignature, word_address_bits
from kvant.hw.soc.axi_lite import LiteSignature
from kvant.hw.soc.axi_reader import ReadArbiter
from kvant.hw.soc.axi_writer import AxiWriter
from kvant.hw.soc.cache_unit import CacheUnit
from kvant.hw.soc.counters import Counters
from kvant.hw.soc.descriptor_check import DescriptorCheck
from kvant.hw.soc.descriptor_reader import DescriptorReader
from kvant.hw.soc.output_writer import OutputWriter
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.register_file import RegisterFile
from kvant.hw.soc.registers import STOPPING_ERRORS, register_map
from kvant.hw.soc.sequencer import Sequencer
from kvant.hw.soc.weight_reader import WeightReader
from kvant.hw.soc.write_arbiter import WriteArbiter

WRITE_DEPTH = 32
WRITE_BURST = 16
"""Outputs are few: one for every K weights."""


class EngineSignature(wiring.Signature):
    """What joins a `kvant.hw.linear.engine.LinearEngine` to the shell, seen by the shell.

    Members
    -------
    cmd, x, w, y, busy, error, nonfinite, busy_cycles
        As at the engine.
    reset : out
        The engine is to be reset.
    """

    def __init__(self, p: TopParameters):
        linear = p.linear
        super().__init__(
            {
                "cmd": Out(stream.Signature(data.StructLayout({"data": Job()}))),
                "x": Out(stream.Signature(activation_input(linear))),
                "w": Out(stream.Signature(weight_input(linear))),
                "y": In(stream.Signature(output(linear))),
                "busy": In(1),
                "error": In(1),
                "nonfinite": In(1),
                "busy_cycles": In(32),
                "reset": Out(1),
            }
        )


class Shell(wiring.Component):
    """Runs a ring of descriptors in memory for an engine, and for units that have all they need in memory.

    ::

        s_axil ──> RegisterFile ──> Sequencer <── DescriptorCheck <── DescriptorReader ─┐
                                        │ jobs                                          ├─ ReadArbiter ── m_axi
        x ─────────────────> ActivationReader ──> engine.x ─────────────────────────────┤
                             WeightReader ──────> engine.w ─────────────────────────────┘
                             CacheUnit, AttendUnit ─────────────────────────────────────────────┘
        y <───────────────── OutputWriter <────── engine.y          (readers)
                                  └── WriteArbiter ──> AxiWriter ── m_axi

    A *client* is a reader or writer with a stream of jobs from the sequencer, identifiers at the `ReadArbiter`, and
    faults. Another one joins by its opcode in `kvant.hw.soc.descriptors`, its jobs in `Sequencer`, and its readers and
    writers here.

    Parameters
    ----------
    p : TopParameters

    Members
    -------
    s_axil, m_axi, x, y, irq
        See `kvant.hw.soc.top.KvantTop`.
    engine : Out(EngineSignature)
    """

    def __init__(self, p: TopParameters):
        self.p = p
        self.registers = register_map(p)
        super().__init__(
            {
                "s_axil": In(LiteSignature(self.registers.address_bits)),
                "m_axi": Out(MasterSignature(p.soc)),
                "x": In(stream.Signature(activation_input(p.linear))),
                "y": Out(stream.Signature(output(p.linear))),
                "irq": Out(1),
                "engine": Out(EngineSignature(p)),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        m.submodules.registers = registers = RegisterFile(self.registers)
        m.submodules.counters = counters = Counters(p)
        parts = self._parts(p)
        faults = self._faults(parts)
        m.submodules.sequencer = sequencer = Sequencer(p, faults=len(faults))
        for theirs, ours in zip(sequencer.faults, faults, strict=True):
            m.d.comb += theirs.eq(ours)
        self._join(m, p, sequencer, parts)
        self._connect_registers(m, registers, sequencer, parts["descriptors"])
        self._count(m, registers, counters, sequencer, parts)
        return m

    def _parts(self, p: TopParameters) -> dict[str, wiring.Component]:
        """Everything that a reset by the sequencer clears, in the order of the identifiers at the memory port."""
        parts = {
            "descriptors": DescriptorReader(p.soc),
            "weights": WeightReader(p),
            "activations": ActivationReader(p),
            "check": DescriptorCheck(p),
            "outputs": OutputWriter(p),
            "writer": AxiWriter(p.soc, depth=WRITE_DEPTH, burst_beats=WRITE_BURST),
        }
        if p.cache is not None:
            parts["cache"] = CacheUnit(p)
        if p.attention is not None:
            parts["attend"] = AttendUnit(p)
        parts["arbiter"] = ReadArbiter(p.soc, len(self._readers(parts)))
        writers = [name for name in ("outputs", "cache", "attend") if name in parts]
        parts["writes"] = WriteArbiter(p.soc, len(writers))
        return parts

    def _readers(self, parts: dict[str, wiring.Component]) -> list:
        """Ports of all readers of memory; the places are their identifiers."""
        readers = [parts[name].port for name in ("descriptors", "weights", "activations")]
        if "cache" in parts:
            readers += [parts["cache"].rows, parts["cache"].memory]
        if "attend" in parts:
            readers += list(parts["attend"].readers)
        return readers

    def _faults(self, parts: dict[str, wiring.Component]) -> list:
        """Faults of all clients."""
        faults = [parts["weights"].fault, parts["activations"].fault]
        if "cache" in parts:
            faults.append(parts["cache"].fault)
        if "attend" in parts:
            faults += list(parts["attend"].faults)
        return faults

    def _join(self, m: Module, p: TopParameters, sequencer: Sequencer, parts: dict[str, wiring.Component]) -> None:
        """Connects the clients with the sequencer, the memory port and the engine."""
        engine = self.engine
        for name, part in parts.items():
            m.submodules[name] = ResetInserter(sequencer.reset)(part)
        m.d.comb += engine.reset.eq(sequencer.reset | sequencer.engine_reset)
        arbiter, writer, writes, outputs = (parts[name] for name in ("arbiter", "writer", "writes", "outputs"))
        for theirs, reader in zip(arbiter.ports, self._readers(parts), strict=True):
            wiring.connect(m, reader, theirs)
        ports = iter(writes.ports)
        wiring.connect(m, outputs.memory, next(ports))
        for half, signature in ((arbiter.bus, ReadSignature(p.soc)), (writer.bus, WriteSignature(p.soc))):
            for name, member in signature.members.items():
                ours, theirs = getattr(self.m_axi, name), getattr(half, name)
                m.d.comb += ours.eq(theirs) if member.flow is Out else theirs.eq(ours)

        wiring.connect(m, parts["descriptors"].o, parts["check"].i)
        wiring.connect(m, parts["check"].o, sequencer.descriptor)
        wiring.connect(m, sequencer.weights, parts["weights"].job)
        wiring.connect(m, sequencer.x, parts["activations"].job)
        wiring.connect(m, sequencer.y, outputs.job)
        wiring.connect(m, sequencer.command, wiring.flipped(engine.cmd))
        wiring.connect(m, parts["weights"].w, wiring.flipped(engine.w))
        wiring.connect(m, parts["activations"].x, wiring.flipped(engine.x))
        wiring.connect(m, wiring.flipped(self.x), parts["activations"].stream)
        wiring.connect(m, wiring.flipped(engine.y), outputs.y)
        wiring.connect(m, writes.o, writer.i)
        # What has been offered outside stays until it is taken, also when everything behind it is cleared.
        free = Signal()
        m.d.comb += [free.eq(~self.y.valid | self.y.ready), outputs.stream.ready.eq(free)]
        with m.If(free):
            m.d.sync += [self.y.valid.eq(outputs.stream.valid), self.y.payload.eq(outputs.stream.payload)]

        m.d.comb += [
            arbiter.stop.eq(sequencer.stop),
            writer.stop.eq(sequencer.stop),
            writer.flush.eq(writes.flush),
            writes.idle.eq(writer.idle),
            sequencer.owes.eq(arbiter.owes | writer.owes),
            sequencer.engine_busy.eq(engine.busy),
            sequencer.linear_done.eq(outputs.done),
            sequencer.write_error.eq(writer.error),
        ]
        if "cache" in parts:
            cache, port = parts["cache"], next(ports)
            wiring.connect(m, sequencer.cache, cache.job)
            wiring.connect(m, cache.words, port.words)
            m.d.comb += [
                port.flush.eq(cache.flush),
                cache.written.eq(port.written),
                sequencer.cache_done.eq(cache.done),
            ]
        if "attend" in parts:
            attend = parts["attend"]
            wiring.connect(m, sequencer.attend, attend.job)
            wiring.connect(m, attend.memory, next(ports))
            m.d.comb += sequencer.attend_done.eq(attend.done)

    def _connect_registers(self, m: Module, registers, sequencer: Sequencer, descriptors) -> None:
        p = self.p
        wiring.connect(m, wiring.flipped(self.s_axil), registers.bus)
        report = sequencer.report
        address_high = registers.ring_base_hi_address
        low = self.registers["RING_BASE_LO"].field("address").lsb
        base = Signal(p.soc.address_bits)
        base_legal = Signal()
        if p.soc.address_bits <= 32:
            m.d.comb += base.eq(registers.ring_base_lo_address << low)
            beyond = registers.ring_base_lo_address[p.soc.address_bits - low :]
            m.d.comb += base_legal.eq(~beyond.any() & ~address_high.any())
        else:
            m.d.comb += [
                base.eq((registers.ring_base_lo_address << low) | (address_high << 32)),
                base_legal.eq(~address_high[p.soc.address_bits - 32 :].any()),
            ]
        stopping = Signal()
        for name in STOPPING_ERRORS:
            with m.If(getattr(registers, f"error_{name}")):
                m.d.comb += stopping.eq(1)
        m.d.sync += sequencer.ring_legal.eq(
            base_legal
            & (sequencer.head < registers.ring_count_count)
            & (registers.ring_tail_index < registers.ring_count_count)
        )
        events = {
            "done": sequencer.retired_interrupt,
            "idle": sequencer.stopped & ~sequencer.failed,
            "error": sequencer.stopped & sequencer.failed,
        }
        pending = 0
        for name, event in events.items():
            m.d.comb += getattr(registers, f"irq_status_{name}_set").eq(event)
            pending |= getattr(registers, f"irq_status_{name}") & getattr(registers, f"irq_enable_{name}")
        m.d.sync += self.irq.eq(pending)
        for name in STOPPING_ERRORS:
            m.d.comb += getattr(registers, f"error_{name}_set").eq(sequencer.stopped & getattr(report, name))
        with m.If(sequencer.stopped & sequencer.failed):
            m.d.sync += [
                registers.error_code_code.eq(report.code),
                registers.error_code_field.eq(report.field),
                registers.error_index_index.eq(report.index),
            ]
        m.d.comb += [
            sequencer.start.eq(registers.control_start),
            sequencer.halt.eq(registers.control_stop),
            sequencer.abort.eq(registers.control_abort),
            sequencer.may_start.eq(~stopping),
            sequencer.head_write.eq(registers.ring_head_index_write),
            sequencer.head_data.eq(registers.ring_head_index_data),
            sequencer.count.eq(registers.ring_count_count),
            registers.ring_head_index.eq(sequencer.head),
            registers.status_running.eq(sequencer.running),
            registers.status_busy.eq(sequencer.busy),
            registers.status_draining.eq(sequencer.draining),
            descriptors.run.eq(sequencer.fetch),
            descriptors.base.eq(base >> p.soc.align_bits),
            descriptors.count.eq(registers.ring_count_count),
            descriptors.head.eq(sequencer.head),
            descriptors.tail.eq(registers.ring_tail_index),
        ]
        assert descriptors.base.shape().width == word_address_bits(p.soc)

    def _count(self, m: Module, registers, counters: Counters, sequencer: Sequencer, parts) -> None:
        engine = self.engine
        flags = {"weights": [engine.error], "nonfinite": [engine.nonfinite]}
        # The engine counts for one job only: here, each change of its count.
        parity = Signal()
        m.d.sync += parity.eq(engine.busy_cycles[0] & ~engine.reset)
        events = {
            "cycles_busy": [sequencer.busy],
            "cycles_lanes": [engine.busy_cycles[0] ^ parity],
            "cycles_input": [engine.w.ready & ~engine.w.valid, engine.x.ready & ~engine.x.valid],
            "cycles_output": [engine.y.valid & ~engine.y.ready],
            "bytes_read": [parts["arbiter"].received],
            "bytes_written": [parts["writer"].sent],
            "descriptors": [sequencer.retired],
        }
        if "cache" in parts:
            flags["weights"].append(parts["cache"].error)
            flags["nonfinite"].append(parts["cache"].nonfinite)
        if "attend" in parts:
            attend = parts["attend"]
            flags["weights"].append(attend.error)
            flags["nonfinite"].append(attend.nonfinite)
            events["cycles_lanes"].append(attend.works)
            events["cycles_input"].append(attend.waits_input)
            events["cycles_output"].append(attend.waits_output)
        # Engines keep their flags until their next job: an event is where one rises.
        for name, each in flags.items():
            now, before = Signal(len(each), name=f"{name}_flags"), Signal(len(each), name=f"{name}_before")
            m.d.comb += now.eq(Cat(*each))
            m.d.sync += before.eq(now)
            m.d.comb += getattr(registers, f"error_{name}_set").eq((now & ~before).any())
        if "cache" in parts:
            m.d.comb += [
                counters.saturations_event.eq(parts["cache"].saturated),
                registers.saturations.eq(counters.saturations),
            ]
        m.d.comb += counters.clear.eq(registers.control_clear_counters)
        for name, each in events.items():
            m.d.comb += [
                getattr(counters, f"{name}_event").eq(Cat(*each).any()),
                getattr(registers, name).eq(getattr(counters, name)),
            ]
