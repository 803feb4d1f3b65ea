"""Layout of pages and the memory that holds them."""

import json

import numpy as np
import pytest

from kvant.golden.numeric.packing import block_bytes, pack_blocks
from kvant.hw.kvcache.layouts import PageAddress
from kvant.hw.kvcache.page import PageLayout
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.parameters import ParameterError
from kvant.sim.errors import SimulationError
from kvant.sim.kvcache.pages import PageMemory, unpack_page

SEED = 20261130


def user(address, *, head=0, page=0):
    return PageAddress().const({"address": address, "head": head, "page": page, "timestamp": 0}).as_value().value


@pytest.mark.parametrize("group", [8, 32, 64, 128, 256])
@pytest.mark.parametrize(("offset", "shared_coeff"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_planes_stand_where_the_blocks_of_weights_have_them(group, offset, shared_coeff):
    p = CacheParameters(group=group, offset=bool(offset), shared_coeff=bool(shared_coeff))
    layout = PageLayout(p, 17)
    assert layout.blocks == 2
    assert layout.block_bytes == block_bytes(group) + 16 * offset - 16 * shared_coeff
    assert layout.planes["scale"] == 8 * group
    assert layout.trailer == 2 * layout.block_bytes and layout.page_bytes == layout.trailer + 16
    assert not any(start % 16 for start in (*layout.planes.values(), layout.block_bytes))
    assert layout.block_meta_words == 3 + offset - shared_coeff


def test_the_description_is_plain_json():
    layout = PageLayout(CacheParameters(offset=True), 64)
    described = json.loads(json.dumps(layout.description))
    assert described["page_bytes"] == layout.page_bytes == 4 * (560 + 16) + 16
    assert [plane["name"] for plane in described["blocks"]["planes"]] == ["codes", "scale", "coefficient", "offset"]
    assert [field["name"] for field in described["trailer"]["fields"]] == ["timestamp"]
    shared = PageLayout(CacheParameters(shared_coeff=True), 64).description
    assert shared["trailer"]["fields"][1] == {"name": "coefficient", "offset": 4, "type": "u8"}


def test_a_page_of_packed_blocks_reads_back():
    rng = np.random.default_rng(SEED)
    layout = PageLayout(CacheParameters(), 20)
    codes = rng.integers(0, 16, (20, 64)).astype(np.uint8)
    scale = rng.integers(0, 1 << 15, 20).astype(np.uint16).view(np.float16)
    coefficient = rng.integers(0, 256, 20).astype(np.uint8)
    trailer = (123456789).to_bytes(4, "little") + bytes(12)
    page = unpack_page(layout, pack_blocks(codes, scale, coefficient).numpy().tobytes() + trailer)
    assert (page.codes == codes).all() and (page.coefficient == coefficient).all()
    assert (page.scale.view(np.uint16) == scale.view(np.uint16)).all() and page.scale.dtype == np.float16
    assert page.timestamp == 123456789 and not page.offset.any() and page.offset.dtype == np.int8
    assert unpack_page(layout, bytes(layout.page_bytes), 3).codes.shape == (3, 64)


def test_bytes_without_a_strobe_are_kept():
    layout = PageLayout(CacheParameters(offset=True, shared_coeff=True), 1)
    memory = PageMemory(layout, 2, 3)
    memory.write(0x44332211, 0b0101, user(16, head=1, page=2))
    assert memory.pages[1, 2][15:21] == bytes([0xFF, 0x11, 0xFF, 0x33, 0xFF, 0xFF])
    page = memory.read(1, 2)
    assert page.offset[0] == -1 and page.coefficient[0] == 0xFF and page.timestamp == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("keep", "where", "message"),
    [
        (1, {"address": 592 + 16}, "outside the page of 592 bytes"),
        (0x1FFFF, {"address": 576}, "outside the page of 592 bytes"),
        (1, {"address": 0, "head": 2}, "legal are heads below 2 and pages below 3"),
        (1, {"address": 0, "page": 3}, "legal are heads below 2 and pages below 3"),
        (0, {"address": 0}, "no byte is written"),
    ],
)
def test_illegal_writes_are_refused(keep, where, message):
    layout = PageLayout(CacheParameters(offset=True), 1)
    assert layout.page_bytes == 592
    with pytest.raises(SimulationError, match=message):
        PageMemory(layout, 2, 3).write(0, keep, user(**where))


def test_what_cannot_be_read_is_refused():
    layout = PageLayout(CacheParameters(), 1)
    with pytest.raises(SimulationError, match="head 0, page 1: never written"):
        PageMemory(layout, 1, 2).read(0, 1)
    with pytest.raises(SimulationError, match="page: 3 bytes, legal is 576"):
        unpack_page(layout, b"abc")
    with pytest.raises(SimulationError, match="groups = 2: legal in this page are 0 to 1"):
        unpack_page(layout, bytes(576), 2)


def test_pages_larger_than_an_address_reaches_are_refused():
    with pytest.raises(ParameterError, match=r"groups of a page = 500000: .* bytes, legal are 16777216"):
        PageLayout(CacheParameters(), 500_000)


def test_pages_that_are_none_are_refused():
    with pytest.raises(ParameterError, match="groups of a page = 0: legal is an integer from 1"):
        PageLayout(CacheParameters(), 0)
    with pytest.raises(ParameterError, match="group = 48: legal in a cache are the powers of two"):
        PageLayout(CacheParameters(group=48), 4)
