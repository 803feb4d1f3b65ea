"""Attention over caches in memory: the engine with its readers and its writer."""

from amaranth.hdl import Module, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.attention.engine import AttentionEngine
from kvant.hw.soc.attend_job import AttendJob
from kvant.hw.soc.axi_reader import ReaderSignature
from kvant.hw.soc.cache_stream import CacheStream
from kvant.hw.soc.fault import Fault
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.query_reader import QueryReader
from kvant.hw.soc.row_writer import RowWriter
from kvant.hw.soc.value_row_reader import ValueRowReader
from kvant.hw.soc.write_arbiter import WriterSignature

READERS = 4
"""Identifiers at the read arbiter."""

FAULTS = 4


class AttendUnit(wiring.Component):
    """Runs jobs of attention, one after the other; the next one's queries and keys are read while the one before ends.

    ::

        job ──┬─> QueryReader ────> q ──────────────┐
              ├─> CacheStream ────> keys, values ───┤
              ├─> ValueRowReader ─> rows ───────────┼─> AttentionEngine ──> out ──> RowWriter ──> memory
              └─> command ──────────────────────────┘

    Nothing is kept from a job to the next: what there is of a sequence lies in memory (`kvant.hw.soc.cache_memory`).
    The flags of the engine are cleared where it has nothing to do, so that each of its busy times shows its own.

    Parameters
    ----------
    p : TopParameters
        With `attention`.

    Members
    -------
    job : in stream
        `AttendJob`, legal.
    readers : array of Out(ReaderSignature)
    memory : Out(WriterSignature)
    done : out
        For a cycle: the outputs of the oldest job are in memory.
    faults : array of Fault
        A word came back with an error; the unit works no further until reset.
    nonfinite, error : out
        Flags of the engine.
    works, waits_input, waits_output : out
        The array works; the engine waits for a stream, or an output waits.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        self.engine = AttentionEngine(p.attention)
        super().__init__(
            {
                "job": In(stream.Signature(AttendJob(p))),
                "readers": Out(ReaderSignature(p.soc)).array(READERS),
                "memory": Out(WriterSignature(p.soc)),
                "done": Out(1),
                "faults": Out(Fault()).array(FAULTS),
                "nonfinite": Out(1),
                "error": Out(1),
                "works": Out(1),
                "waits_input": Out(1),
                "waits_output": Out(1),
            }
        )

    def elaborate(self, platform):
        p, attention = self.p, self.p.attention
        m = Module()
        m.submodules.queries = queries = QueryReader(p)
        m.submodules.cache = cache = CacheStream(p)
        m.submodules.rows = rows = ValueRowReader(p)
        m.submodules.writer = writer = RowWriter(p)
        engine, forget = self.engine, Signal()
        m.submodules.engine = ResetInserter(forget)(engine)

        job = Signal(AttendJob(p))
        given = {"queries": queries.job, "cache": cache.job, "rows": rows.job, "engine": engine.cmd, "out": writer.job}
        pending = Signal(data.StructLayout(dict.fromkeys(given, 1)))
        m.d.comb += self.job.ready.eq(~pending.as_value().any())
        for name, port in given.items():
            m.d.comb += port.valid.eq(pending[name])
            with m.If(port.valid & port.ready):
                m.d.sync += pending[name].eq(0)
        with m.If(self.job.valid & self.job.ready):
            m.d.sync += [job.eq(self.job.payload), pending.as_value().eq(-1)]
        m.d.comb += [
            queries.job.payload.address.eq(job.q),
            queries.job.payload.stride.eq(job.query_stride),
            queries.job.payload.queries.eq(job.queries),
            queries.job.payload.slot.eq(job.slot),
            *(
                cache.job.payload[name].eq(job[name])
                for name in ("record", "table", "key_pool", "value_pool", "tokens", "sinks", "slot")
            ),
            rows.job.payload.record.eq(job.record),
            rows.job.payload.sinks.eq(job.sinks),
            rows.job.payload.staged.eq(job.tokens[: (attention.group - 1).bit_length()]),
            rows.job.payload.slot.eq(job.slot),
            *(engine.cmd.payload.data[name].eq(job[name]) for name in ("queries", "tokens", "sinks")),
            writer.job.payload.address.eq(job.out),
            writer.job.payload.stride.eq(job.out_stride),
            writer.job.payload.queries.eq(job.queries),
        ]

        wiring.connect(m, queries.q, engine.q)
        wiring.connect(m, cache.keys, engine.keys)
        wiring.connect(m, cache.values, engine.values)
        wiring.connect(m, rows.rows, engine.rows)
        wiring.connect(m, engine.out, writer.out)
        wiring.connect(m, writer.memory, wiring.flipped(self.memory))
        ports = (queries.port, cache.ports[0], cache.ports[1], rows.port)
        for ours, theirs in zip(self.readers, ports, strict=True):
            wiring.connect(m, theirs, wiring.flipped(ours))
        for ours, theirs in zip(self.faults, (queries.fault, *cache.faults, rows.fault), strict=True):
            m.d.comb += ours.eq(theirs)

        parity = Signal()
        m.d.sync += parity.eq(engine.busy_cycles[0] & ~forget)
        inputs = (engine.q, engine.keys, engine.values, engine.rows)
        waits = [Signal(name=f"waits_{number}") for number in range(len(inputs))]
        m.d.comb += [wait.eq(port.ready & ~port.valid) for wait, port in zip(waits, inputs, strict=True)]
        for wait in waits:
            with m.If(wait):
                m.d.comb += self.waits_input.eq(1)
        m.d.comb += [
            forget.eq(~engine.busy & (engine.nonfinite | engine.error) & ~pending.engine),
            self.done.eq(writer.done),
            self.nonfinite.eq(engine.nonfinite),
            self.error.eq(engine.error),
            self.works.eq(engine.busy_cycles[0] ^ parity),
            self.waits_output.eq(engine.out.valid & ~engine.out.ready),
        ]
        return m
