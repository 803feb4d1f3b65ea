"""The accelerator as a compiled model: the driver's calls, memory and registers, and what breaks a rule of AXI."""

import numpy as np
import pytest
import torch
from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import Out

from kvant.golden.linear.engine import multiply
from kvant.golden.linear.search import quantize_weights
from kvant.golden.numeric.int8 import quantize_int8
from kvant.hw.emit import emit
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.parameters import ParameterError
from kvant.hw.soc.axi import MasterSignature
from kvant.hw.soc.descriptors import ErrorCode
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.sim.compiled.accelerator import CompiledBus
from kvant.sim.compiled.model import CompiledModel
from kvant.sim.errors import SimulationError
from kvant.sim.soc.driver import Accelerator, AcceleratorError, BusError

P = TopParameters(LinearParameters(rows=4, cols=4, group=32), SocParameters(port_bits=64))
MEMORY = 1 << 18
TOKENS, INPUTS, OUTPUTS = 5, 70, 19


@pytest.fixture(scope="module")
def product():
    """Quantised weights, activations f16, and the product of the golden model."""
    generator = torch.Generator().manual_seed(4)
    w = quantize_weights(torch.randn(OUTPUTS, INPUTS, generator=generator), 32, (5, 20, 60, 255), name="w")
    x = torch.randn(TOKENS, INPUTS, generator=generator).half()
    groups = quantize_int8(x, 32)
    return w, x.numpy(), multiply(groups.q, groups.scale, w).numpy()


def store(accelerator, w):
    return accelerator.store_weights(w.codes.numpy(), w.scale.numpy(), w.coefficient.numpy())


@pytest.mark.parametrize(("stall", "latency"), [(0.0, 0), (0.0, 50), (0.6, 7)])
def test_the_driver_gets_the_bits_of_the_golden_model(product, stall, latency):
    w, x, expected = product
    with CompiledBus(P, MEMORY, stall=stall, latency=latency, seed=2) as bus:
        accelerator = Accelerator(bus, range(MEMORY))
        weights = store(accelerator, w)
        for _ in range(2):
            assert np.array_equal(accelerator.linear(weights, x).view(np.uint32), expected.view(np.uint32))
        counters = accelerator.counters()
        read, written = bus.model.memory_words("m_axi")
    assert (counters["BYTES_READ"], counters["BYTES_WRITTEN"]) == (8 * read, 8 * written)


def test_equal_seeds_take_equal_cycles(product):
    w, x, _ = product
    cycles = []
    for seed in (1, 1, 2):
        with CompiledBus(P, MEMORY, stall=0.5, seed=seed) as bus:
            accelerator = Accelerator(bus, range(MEMORY))
            accelerator.linear(store(accelerator, w), x)
            cycles.append(bus.model.cycle)
    assert cycles[0] == cycles[1] != cycles[2]


def test_an_access_beyond_the_memory_stops_the_accelerator_which_then_goes_on(product):
    w, x, expected = product
    with CompiledBus(P, MEMORY) as bus:
        accelerator = Accelerator(bus, range(MEMORY))
        weights = store(accelerator, w)
        mark = accelerator.mark()
        rows, results = accelerator.store_rows(x), accelerator.allocate_rows(TOKENS, 4 * OUTPUTS)
        descriptors = accelerator.linear_descriptors(weights, TOKENS, rows, results)
        beyond = type(descriptors[0])(**{**vars(descriptors[0]), "weights": MEMORY})
        with pytest.raises(AcceleratorError) as raised:
            accelerator.run([beyond])
        assert raised.value.code == ErrorCode.READ_WEIGHTS
        accelerator.recover()
        accelerator.clear_ring()
        accelerator.release(mark)
        assert np.array_equal(accelerator.linear(weights, x), expected)


def test_registers_that_do_not_exist_are_an_error_of_the_bus():
    with CompiledBus(P, MEMORY) as bus:
        with pytest.raises(BusError, match="read of 0xffc: response 2"):
            bus.read32(0xFFC)
        with pytest.raises(BusError, match="write of 0xffc: response 2"):
            bus.write32(0xFFC, 1)


def test_an_interrupt_that_never_comes_is_given_up():
    with CompiledBus(P, MEMORY) as bus, pytest.raises(TimeoutError, match="port irq: no transfer for"):
        bus.wait_interrupt()


def test_reset_forgets_what_the_memory_owes(product):
    w, x, expected = product
    with CompiledBus(P, MEMORY, latency=200) as bus:
        accelerator = Accelerator(bus, range(MEMORY))
        weights = store(accelerator, w)
        rows, results = accelerator.store_rows(x), accelerator.allocate_rows(TOKENS, 4 * OUTPUTS)
        accelerator.submit(accelerator.linear_descriptors(weights, TOKENS, rows, results))
        accelerator.start()
        bus.model.step(430)
        bus.model.reset()
        assert Accelerator(bus, range(MEMORY)).fields("STATUS")["busy"] == 0
        accelerator = Accelerator(bus, range(MEMORY))
        assert np.array_equal(accelerator.linear(store(accelerator, w), x), expected)


@pytest.mark.parametrize("size", [0, (1 << 32) + 1])
def test_a_memory_beyond_the_addresses_is_refused(size):
    with pytest.raises(ParameterError, match="memory_bytes = "):
        CompiledBus(P, size)


class Master(wiring.Component):
    """Asks for bursts as it should not."""

    def __init__(self, address: int, beats: int, size: int | None = None, *, drops: bool = False):
        self.address, self.beats, self.size, self.drops = address, beats, size, drops
        super().__init__({"m_axi": Out(MasterSignature(P.soc)), "words": Out(8)})

    def elaborate(self, platform):
        m = Module()
        bus, asked = self.m_axi, Signal()
        m.d.comb += [
            bus.araddr.eq(self.address),
            bus.arlen.eq(self.beats - 1),
            bus.arsize.eq(P.soc.align_bits if self.size is None else self.size),
            bus.rready.eq(1),
        ]
        m.d.sync += bus.arvalid.eq(~asked)
        if self.drops:
            m.d.sync += bus.arvalid.eq(~bus.arvalid)
        with m.If(bus.arvalid & bus.arready):
            m.d.sync += [asked.eq(1), bus.arvalid.eq(0)]
        with m.If(bus.rvalid):
            m.d.sync += self.words.eq(self.words + 1)
        return m


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((4096 - 8, 2), "a burst crosses a multiple of 4 KB"),
        ((4, 1), "not at a word's address"),
        ((0, 1, 2), "a burst of another size"),
    ],
)
def test_bursts_that_break_a_rule_are_named(arguments, text):
    with CompiledModel(emit(Master(*arguments), "master")) as model:
        model.attach("m_axi", np.zeros(8192, np.uint8))
        with pytest.raises(SimulationError, match=f"bus m_axi: .*{text}"):
            model.step(40)


def test_an_address_that_is_withdrawn_is_a_fault():
    with CompiledModel(emit(Master(0, 1, drops=True), "master"), stall=0.9) as model:
        model.attach("m_axi", np.zeros(64, np.uint8))
        with pytest.raises(SimulationError, match="bus m_axi: valid dropped while it waited"):
            model.step(60)


def test_a_burst_comes_back_whole():
    with CompiledModel(emit(Master(64, 5), "master")) as model:
        model.attach("m_axi", np.zeros(8192, np.uint8), latency=3)
        model.step(40)
        assert model.read("words") == 5 and model.memory_words("m_axi") == (5, 0)


def test_buses_and_memories_that_do_not_fit_are_refused():
    with CompiledModel(emit(Master(0, 1), "master")) as model:
        with pytest.raises(ParameterError, match="memory 'x': legal are m_axi"):
            model.attach("x", np.zeros(8, np.uint8))
        with pytest.raises(ParameterError, match=r"memory m_axi: int16 \[8\]; legal is contiguous uint8"):
            model.attach("m_axi", np.zeros(8, np.int16))
        with pytest.raises(ParameterError, match="registers 's_axil': legal are none"):
            model.read_register("s_axil", 0)
