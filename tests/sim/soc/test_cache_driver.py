"""The host's side of caches, over registers and a memory that do nothing: addresses, pages, refusals."""

import numpy as np
import pytest

from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.parameters import ParameterError
from kvant.hw.soc.cache_memory import CacheMemory
from kvant.hw.soc.descriptors import AttendDescriptor, CacheDescriptor, Flag
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.hw.soc.registers import register_map
from kvant.sim.soc.caches import Caches
from kvant.sim.soc.driver import Accelerator, AcceleratorError

SHAPE = {"group": 16, "head_dim": 12, "sinks": 2}
P = TopParameters(
    LinearParameters(),
    SocParameters(),
    cache=CacheParameters(**SHAPE, centred=True),
    attention=AttentionParameters(**SHAPE, rows=4, cols=2, capacity=64, queries=2),
)
TABLES = ([5, 40], [3000])


class IdleBus:
    """Registers that keep what is written, and a ring that is done at once."""

    def __init__(self, p):
        self.map = register_map(p)
        self.registers = {register.offset: register.reset for register in self.map}
        self.memory = bytearray(1 << 16)

    def read32(self, offset):
        return self.registers[offset]

    def write32(self, offset, value):
        self.registers[offset] = value
        if offset == self.map["CONTROL"].offset:
            self.registers[self.map["RING_HEAD"].offset] = self.registers[self.map["RING_TAIL"].offset]
            self.registers[self.map["IRQ_STATUS"].offset] = self.map["IRQ_STATUS"].field("idle").mask

    def read_memory(self, address, size):
        return bytes(self.memory[address : address + size])

    def write_memory(self, address, data):
        self.memory[address : address + len(data)] = data

    def wait_interrupt(self):
        pass


def make(p=P, **options):
    accelerator = Accelerator(IdleBus(p), range(0x100, 1 << 16))
    return accelerator, Caches(accelerator, **{"heads": 2, "pages": 5} | options)


def rows(tokens, heads=2, d=12):
    return np.arange(heads * tokens * d).reshape(heads, tokens, d).astype(np.float16)


def test_the_layouts_come_from_the_registers():
    accelerator, _ = make()
    assert accelerator.cache.description == CacheMemory(P.cache, P.soc.port_bytes).description
    assert (accelerator.attention.queries, accelerator.attention.tokens) == (2, 64)


def test_pages_are_taken_when_windows_begin_and_given_back():
    accelerator, caches = make()
    sequence = caches.sequence(windows=4)
    sequence.append(rows(17), rows(17))
    assert sequence.pages == [0, 1] and caches.free_pages == [4, 3, 2]
    sequence.append(rows(15), rows(15))
    assert sequence.tokens == 32 and len(sequence.pages) == 2
    other = caches.sequence(windows=4)
    other.append(rows(1), rows(1))
    sequence.append(rows(1), rows(1))
    assert (sequence.pages, other.pages) == ([0, 1, 3], [2])
    table = accelerator.bus.read_memory(sequence.table, 12)
    assert np.frombuffer(table, np.uint32).tolist() == [0, 1, 3]
    sequence.free()
    assert sorted(caches.free_pages) == [0, 1, 3, 4] and sequence.tokens == 0


def test_values_of_an_open_window_lie_before_the_new_ones():
    accelerator, caches = make(heads=1)
    sequence = caches.sequence(windows=4)
    v = rows(24, heads=1)
    sequence.append(v[:, :19], v[:, :19])
    keys, values = sequence.append_descriptors(v[:, 19:], v[:, 19:])
    assert isinstance(keys, CacheDescriptor) and (keys.flags, values.flags) == (0, Flag.VALUES)
    assert (keys.position, values.position, keys.tokens) == (19, 19, 5)
    for descriptor, first in ((keys, 19), (values, 16)):
        raw = accelerator.bus.read_memory(descriptor.rows, descriptor.row_stride * (24 - first))
        stored = np.frombuffer(raw, np.float16).reshape(24 - first, -1)[:, :12]
        assert np.array_equal(stored, v[0, first:])


def test_queries_are_cut_into_descriptors_and_these_into_rings():
    accelerator, caches = make(heads=3)
    accelerator.ring = 5
    sequence = caches.sequence(windows=1)
    sequence.append(rows(1, heads=3), rows(1, heads=3))
    assert sequence.attend(rows(5, heads=3)).shape == (3, 5, 12)
    descriptors, _ = sequence.attend_descriptors(rows(5, heads=3))
    assert all(isinstance(each, AttendDescriptor) for each in descriptors)
    assert [each.queries for each in descriptors] == [2, 2, 1] * 3
    assert all(each.sinks == 1 and each.tokens == 1 for each in descriptors)
    assert descriptors[1].q - descriptors[0].q == 2 * descriptors[0].query_stride


def test_what_cannot_be_is_one_line():
    _, caches = make()
    sequence = caches.sequence(windows=2)
    with pytest.raises(ParameterError, match=r"v: float16 \[2, 2, 12\]; legal is float16 \[2, T, 12\], T from 1"):
        sequence.append(rows(3), rows(2))
    with pytest.raises(ParameterError, match=r"k: float32"):
        sequence.append(rows(3).astype(np.float32), rows(3))
    with pytest.raises(AcceleratorError, match=r"33 tokens: 3 pages, the table has room for 2"):
        sequence.append(rows(33), rows(33))
    with pytest.raises(AcceleratorError, match=r"0 tokens: the attention of the accelerator takes 1 to 64"):
        sequence.attend(rows(1))
    with pytest.raises(AcceleratorError, match="the accelerator has no caches"):
        make(TopParameters(P.linear, P.soc))


def test_a_calibration_is_where_descriptors_say():
    accelerator, caches = make()
    floor = np.linspace(0, 1, 12).astype(np.float16)
    caches.calibrate(1, TABLES, TABLES, floor=floor)
    layout = accelerator.cache.value_calibration
    raw = accelerator.bus.read_memory(caches.heads[1].value_calibration, layout.calibration_bytes)
    assert raw == layout.encode(*TABLES, floor.tobytes())
