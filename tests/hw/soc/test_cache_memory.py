"""Layouts of caches in memory: parts in order, whole words, nothing twice; what does not fit is refused."""

import json
import struct

import numpy as np
import pytest

from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.parameters import ParameterError
from kvant.hw.soc.cache_memory import CacheMemory, Calibration, QueryRecord

SHAPES = [
    {"group": 64, "head_dim": 64, "sinks": 4},
    {"group": 8, "head_dim": 5, "lanes": 1},
    {"group": 16, "head_dim": 72, "sinks": 33, "centred": True},
    {"group": 8, "head_dim": 1, "lanes": 8, "sinks": 1},
]


@pytest.mark.parametrize("port_bytes", [4, 8, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_follow_each_other_in_whole_words(port_bytes, shape):
    p = CacheParameters(**shape)
    memory = CacheMemory(p, port_bytes)
    record = memory.record
    layouts = {
        record.record_bytes: [record.key_sinks, record.value_sinks, record.value_scales, record.value_window],
        memory.query.query_bytes: [memory.query.header, memory.query.elements],
    }
    for calibration in (memory.key_calibration, memory.value_calibration):
        parts = [calibration.coefficients, calibration.thresholds, calibration.numbers]
        layouts[calibration.calibration_bytes] = parts
    for size, parts in layouts.items():
        end = 0
        for part in parts:
            assert part.offset == end and part.size % port_bytes == 0
            end = part.end
        assert end == size
    assert record.key_sinks.size == -(-p.sinks * p.row_groups // 16) * 16 * (p.group + 2)
    assert record.value_sinks.size == p.sinks * record.sink_row_bytes
    assert record.value_window.size == p.group * record.row_bytes and record.row_bytes >= p.head_dim
    assert record.value_scales.size >= 2 * p.head_dim
    assert memory.keys.page_bytes % port_bytes == memory.values.page_bytes % port_bytes == 0
    assert json.loads(json.dumps(memory.description)) == memory.description


def test_a_calibration_holds_a_shorter_table_filled_up():
    layout = Calibration(3, 8)
    numbers = np.array([1, -2, 0.5], np.float16).tobytes()
    raw = layout.encode([7, 9], [100], numbers)
    assert len(raw) == layout.calibration_bytes == 56
    assert raw[:16] == bytes([7] + [9] * 15)
    assert struct.unpack("<15H", raw[16:46]) == (100, *[65535] * 14)
    assert raw[48:54] == numbers and not any(raw[46:48]) and not any(raw[54:])


@pytest.mark.parametrize(
    ("coefficients", "thresholds", "numbers", "words"),
    [
        ([], [], 6, ["coefficients", "0 entries", "1 to 16"]),
        ([1] * 17, [1] * 16, 6, ["coefficients", "17 entries"]),
        ([1, 2], [], 6, ["thresholds", "0 entries"]),
        ([1], [], 4, ["numbers", "4 bytes", "6"]),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused(coefficients, thresholds, numbers, words):
    with pytest.raises(ParameterError) as error:
        Calibration(3, 8).encode(coefficients, thresholds, bytes(numbers))
    assert all(word in str(error.value) for word in words)


def test_a_query_begins_with_what_it_sees():
    query = QueryRecord(3, 4)
    elements = np.arange(3, dtype=np.float16).tobytes()
    raw = query.encode(5, 1 << 31, struct.pack("<e", 0.25), elements)
    assert struct.unpack_from("<IIe", raw) == (5, 1 << 31, 0.25)
    assert raw[16:22] == elements and len(raw) == query.query_bytes == 24
    with pytest.raises(ParameterError, match="elements: 4 bytes, legal is 6"):
        query.encode(0, 1, b"\0\0", bytes(4))


def test_a_wide_port_is_refused():
    with pytest.raises(ParameterError, match="port_bits = 256"):
        CacheMemory(CacheParameters(), 32)
