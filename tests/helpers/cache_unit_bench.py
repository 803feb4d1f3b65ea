"""`CacheUnit` at an AXI memory, by itself."""

import logging
import os
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from amaranth.hdl import Module, ResetInserter
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.soc.axi import MasterSignature, ReadSignature, WriteSignature
from kvant.hw.soc.axi_reader import ReadArbiter
from kvant.hw.soc.axi_writer import AxiWriter
from kvant.hw.soc.cache_job import CacheJob
from kvant.hw.soc.cache_unit import CacheUnit
from kvant.hw.soc.parameters import TopParameters
from kvant.sim.simulate import build_model, cached_design

TOP = "cache_unit_bench"
RUN_FOLDER = "KVANT_CACHE_UNIT_FOLDER"
TASK, OUTCOME = "task.pickle", "outcome.pickle"


class CacheUnitBench(wiring.Component):
    """The unit with a reader's and a writer's end of the port; `clear` resets all of it."""

    def __init__(self, p: TopParameters):
        self.p = p
        super().__init__(
            {
                "job": In(stream.Signature(CacheJob(p))),
                "m_axi": Out(MasterSignature(p.soc)),
                "stop": In(1),
                "clear": In(1),
                "owes": Out(1),
                "done": Out(1),
                "fault_code": Out(8),
                "fault_slot": Out(1),
                "write_error": Out(1),
                "saturated": Out(32),
                "nonfinite": Out(1),
                "error": Out(1),
            }
        )

    def elaborate(self, platform):
        p = self.p
        m = Module()
        unit, arbiter = CacheUnit(p), ReadArbiter(p.soc, 2)
        writer = AxiWriter(p.soc, depth=32, burst_beats=16)
        for name, part in {"unit": unit, "arbiter": arbiter, "writer": writer}.items():
            m.submodules[name] = ResetInserter(self.clear)(part)
        wiring.connect(m, wiring.flipped(self.job), unit.job)
        wiring.connect(m, unit.rows, arbiter.ports[0])
        wiring.connect(m, unit.memory, arbiter.ports[1])
        wiring.connect(m, unit.words, writer.i)
        for half, signature in ((arbiter.bus, ReadSignature(p.soc)), (writer.bus, WriteSignature(p.soc))):
            for name, member in signature.members.items():
                ours, theirs = getattr(self.m_axi, name), getattr(half, name)
                m.d.comb += ours.eq(theirs) if member.flow is Out else theirs.eq(ours)
        with m.If(writer.error):
            m.d.sync += self.write_error.eq(1)
        with m.If(self.clear):
            m.d.sync += self.write_error.eq(0)
        m.d.sync += self.saturated.eq(self.saturated + unit.saturated)
        m.d.comb += [
            arbiter.stop.eq(self.stop),
            writer.stop.eq(self.stop),
            self.owes.eq(arbiter.owes | writer.owes),
            writer.flush.eq(unit.flush),
            unit.written.eq(writer.idle),
            self.done.eq(unit.done),
            self.fault_code.eq(unit.fault.code),
            self.fault_slot.eq(unit.fault.slot),
            self.nonfinite.eq(unit.nonfinite),
            self.error.eq(unit.error),
        ]
        return m


@dataclass(frozen=True)
class Step:
    """A job, and what happens to it.

    Attributes
    ----------
    job : dict
        Members of `CacheJob`; addresses in words.
    stop_after : int, optional
        Cycles after which everything is stopped and cleared.
    fault : (kind, range), optional
        Accesses to these bytes are answered with an error: "read" or "write".
    """

    job: dict[str, int]
    stop_after: int | None = None
    fault: tuple[str, range] | None = None


@dataclass(frozen=True)
class End:
    """How a job ended: "done", "stopped", "fault" or "write", and what the unit said then."""

    how: str
    cycles: int
    code: int
    slot: int
    saturated: int
    nonfinite: int
    error: int


@dataclass(frozen=True)
class Task:
    """What the simulator's process runs."""

    port_bytes: int
    image: bytes
    steps: Sequence[tuple[int, Step]] = field(default_factory=list)  # payloads of jobs, and their steps
    latency: int = 20
    stall: float = 0.0
    seed: int = 0


def payload(p: TopParameters, job: dict[str, int]) -> int:
    """A transfer of `job`."""
    return sum(
        (value & ((1 << CacheJob(p)[name].width) - 1)) << CacheJob(p)[name].offset for name, value in job.items()
    )


def run(
    p: TopParameters,
    image: bytes,
    steps: Sequence[Step],
    *,
    simulator: str = "verilator",
    cached: bool = True,
    **options,
) -> tuple[bytes, list[End]]:
    """The memory after the jobs, and how each ended; *options* are those of `Task`.

    Not *cached*: the unit was changed, to see what a fault does.
    """
    from cocotb_tools.runner import get_runner

    key = (p, Path(__file__).read_bytes()) if cached else None
    design = cached_design(lambda: CacheUnitBench(p), TOP, key)
    build = build_model(design.verilog, TOP, simulator, False)
    with tempfile.TemporaryDirectory(prefix="kvant-") as name:
        folder = Path(name)
        task = Task(p.soc.port_bytes, image, [(payload(p, step.job), step) for step in steps], **options)
        (folder / TASK).write_bytes(pickle.dumps(task))
        runner = get_runner(simulator)
        runner.log.setLevel(logging.CRITICAL)
        log = folder / "log"
        runner.test(
            test_module="cache_unit_host",
            hdl_toplevel=TOP,
            hdl_toplevel_lang="verilog",
            build_dir=build,
            test_dir=folder,
            results_xml=str(folder / "results.xml"),
            log_file=log,
            extra_env={RUN_FOLDER: str(folder), "COCOTB_LOG_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore"},
        )
        if not (folder / OUTCOME).exists():
            raise AssertionError(log.read_text(errors="replace")[-2000:])
        ok, outcome = pickle.loads((folder / OUTCOME).read_bytes())
    if not ok:
        raise AssertionError(outcome)
    return outcome


def run_folder() -> Path:
    """Folder of the run, in the simulator's process."""
    return Path(os.environ[RUN_FOLDER])
