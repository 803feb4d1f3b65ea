"""Packed weights from memory to the weight stream of the linear path."""

from amaranth.hdl import Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.linear.layouts import index_width
from kvant.hw.linear.tile_loop import COUNT_WIDTH, TileLoop
from kvant.hw.linear.weight_buffer import weight_input
from kvant.hw.numeric.codes import INT8
from kvant.hw.soc.axi_reader import AxiReader, ReaderSignature, Region
from kvant.hw.soc.descriptors import ErrorCode
from kvant.hw.soc.fault import Fault
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.unit_ring import UnitRing
from kvant.hw.soc.weight_layout import CODE_BITS, HEAD_BITS, unit_bits


class WeightJob(data.StructLayout):
    """Where the weights of a job are, and the numbers by which they are cut."""

    def __init__(self, p: TopParameters):
        super().__init__(
            {
                "region": Region(p.soc),
                "tiles": COUNT_WIDTH,
                "interleave": COUNT_WIDTH,
                "groups": COUNT_WIDTH,
                "tail_beats": index_width(p.linear.beats + 1),
                "slot": 1,
            }
        )


class WeightReader(wiring.Component):
    """Reads packed weights (`kvant.hw.soc.weight_layout`) and cuts them into the beats of the linear path.

    Weights of the next job are read while those of the running one wait for the engine. A word per cycle enters, a
    beat per cycle leaves, and a cycle per tile goes to its metadata.

    Members
    -------
    job : in stream
        `WeightJob`.
    port : Out(ReaderSignature)
        See `AxiReader`.
    w : out stream
        To the engine.
    fault : out
        A word that came back with an error, or a length that does not fit the tiles: `w` ends until reset.
    """

    def __init__(self, p: TopParameters):
        self.p = p
        super().__init__(
            {
                "job": In(stream.Signature(WeightJob(p))),
                "port": Out(ReaderSignature(p.soc)),
                "w": Out(stream.Signature(weight_input(p.linear))),
                "fault": Out(Fault()),
            }
        )

    def elaborate(self, platform):
        p, linear = self.p, self.p.linear
        m = Module()
        depth = 1 << (p.soc.weight_words - 1).bit_length()
        m.submodules.reader = reader = AxiReader(p.soc, depth=depth, burst_beats=p.soc.burst_beats)
        unit = unit_bits(p)
        head, beat = HEAD_BITS * linear.cols // unit, CODE_BITS * linear.lanes // unit
        word = p.soc.port_bits // unit
        m.submodules.ring = ring = UnitRing(unit, word, [head, beat])
        m.submodules.loop = loop = TileLoop(linear)
        wiring.connect(m, reader.port, wiring.flipped(self.port))

        # A job waits here while its words already come.
        waiting = Signal(WeightJob(p))
        waits = Signal()
        starts = Signal()
        m.d.comb += [
            reader.region.valid.eq(self.job.valid & ~waits),
            reader.region.payload.eq(self.job.payload.region),
            self.job.ready.eq(reader.region.ready & ~waits),
        ]
        with m.If(starts):
            m.d.sync += waits.eq(0)
        with m.If(self.job.valid & self.job.ready):
            m.d.sync += [waiting.eq(self.job.payload), waits.eq(1)]

        job = Signal(WeightJob(p))
        words_left = Signal.like(job.region.words)
        no_words = Signal(init=1)
        user = Signal(weight_input(linear)["user"].shape)
        planes_left = Signal()  # a plane follows this one
        beats_left = Signal(range(linear.beats + 1))
        plane_beats = Signal.like(beats_left)
        allowed, take_word, bad = Signal(), Signal(), Signal()
        fault = Signal(Fault())
        failed = Signal()
        m.d.comb += [
            self.fault.eq(fault),
            failed.eq(fault.code != ErrorCode.NONE),
            allowed.eq(~no_words & ~failed),
            ring.i.valid.eq(reader.o.valid & allowed),
            ring.i.payload.eq(reader.o.payload.data),
            reader.o.ready.eq(ring.i.ready & allowed),
            take_word.eq(reader.o.valid & reader.o.ready),
            self.w.payload.data.eq(ring.window[: CODE_BITS * linear.lanes]),
            self.w.payload.user.eq(user),
            loop.tiles.eq(job.tiles),
            loop.interleave.eq(job.interleave),
            loop.groups.eq(job.groups),
            plane_beats.eq(Mux(loop.last_group, job.tail_beats, linear.beats)),
        ]
        with m.If(take_word):
            m.d.sync += [words_left.eq(words_left - 1), no_words.eq(words_left == 1)]
        window_user = weight_input(linear)["user"].shape(ring.window[: HEAD_BITS * linear.cols])
        with m.FSM():
            with m.State("IDLE"):
                m.d.comb += [starts.eq(waits), ring.clear.eq(1)]
                with m.If(waits):
                    m.d.sync += job.eq(waiting)
                    m.next = "START"
            with m.State("START"):
                m.d.comb += loop.start.eq(1)
                m.d.sync += [words_left.eq(job.region.words), no_words.eq(0)]
                m.next = "HEAD"
            with m.State("HEAD"):
                with m.If(loop.done):
                    m.next = "END"
                with m.Elif(ring.available[0]):
                    m.d.comb += ring.take[0].eq(1)
                    m.d.sync += [
                        user.eq(window_user),
                        beats_left.eq(plane_beats),
                        planes_left.eq(
                            Cat(column.coefficient == INT8 for column in window_user).any() if linear.int8_groups else 0
                        ),
                    ]
                    m.next = "BEATS"
                with m.Elif(no_words):
                    m.d.comb += bad.eq(1)
            with m.State("BEATS"):
                m.d.comb += self.w.valid.eq(ring.available[1] & ~failed)
                with m.If(self.w.valid & self.w.ready):
                    m.d.comb += ring.take[1].eq(1)
                    m.d.sync += beats_left.eq(beats_left - 1)
                    with m.If(beats_left == 1):
                        m.d.sync += [beats_left.eq(plane_beats), planes_left.eq(0)]
                        with m.If(~planes_left):
                            m.d.comb += loop.step.eq(1)
                            m.next = "HEAD"
                with m.Elif(no_words & ~ring.available[1]):
                    m.d.comb += bad.eq(1)
            with m.State("END"):
                with m.If(~no_words | (ring.level >= word)):
                    m.d.comb += bad.eq(1)
                with m.Elif(~failed):
                    m.next = "IDLE"
        with m.If(~failed):
            with m.If(take_word & reader.o.payload.error):
                m.d.sync += [fault.code.eq(ErrorCode.READ_WEIGHTS), fault.slot.eq(job.slot)]
            with m.Elif(bad):
                m.d.sync += [fault.code.eq(ErrorCode.WEIGHT_LENGTH), fault.slot.eq(job.slot)]
        return m
