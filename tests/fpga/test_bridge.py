import random

import pytest
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from serial_host import talk
from served_components import Adder

from kvant.fpga.bridge import SerialBridge
from kvant.fpga.link import ACKNOWLEDGE, STATUS_REPLY, Host, Layout, LinkError

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")


def adder_bridge(pace=1, divisor=4):
    return SerialBridge(Adder(pace=pace), divisor=divisor, held=("a.user",))


def sums(data, user, gain=0):
    return [value + offset + gain for value, offset in zip(data, user, strict=True)]


def test_streams_cross_the_serial_port_unchanged():
    rng = random.Random(1)
    values = [rng.randrange(1 << 12) for _ in range(40)] + [0xFFF]
    users = [0x12345] * 20 + [0xFFFFF] * 21
    copies = [5, 0, 7]

    async def script(host, line, pump):
        host.send(host.layout.encode({"a": {"data": values, "user": users}, "b": {"": copies}}))
        await pump(lambda: host.idle and len(host.transfers["copy"][""]) == 3)

    host = talk(adder_bridge(), script)
    assert host.transfers["sum"]["data"] == sums(values, users)
    assert host.transfers["sum"]["last"] == [0] * 40 + [1]
    assert host.transfers["copy"][""] == copies


@pytest.mark.parametrize("divisor", [4, 5, 7, 12])
def test_every_bit_length_works(divisor):
    async def script(host, line, pump):
        host.send(host.layout.encode({"a": {"data": [0xAAA, 0x555], "user": [1, 2]}}))
        await pump(lambda: host.idle and len(host.transfers["sum"]["data"]) == 2)

    assert talk(adder_bridge(divisor=divisor), script).transfers["sum"]["data"] == [0xAAB, 0x557]


def test_nothing_is_lost_when_the_component_is_slower_than_the_line():
    values = list(range(270))

    async def script(host, line, pump):
        host.send(host.layout.encode({"a": {"data": values, "user": [0] * 270}}))
        host.send([host.layout.status_frame()])
        await pump(lambda: host.status is not None and host.idle)

    host = talk(adder_bridge(pace=250), script)
    assert host.transfers["sum"]["data"] == values
    assert host.status == {"flags": 0, "busy": host.status["busy"], "count": 270}


def test_plain_inputs_are_written_and_plain_outputs_read():
    async def script(host, line, pump):
        (gain,) = (channel for channel in host.layout.held if channel.name == "gain")
        host.send(host.layout.frames(gain, [(9,)]))
        host.send(host.layout.encode({"a": {"data": [1], "user": [2]}}))
        host.send([host.layout.status_frame()])
        await pump(lambda: host.status is not None and host.idle)

    host = talk(adder_bridge(), script)
    assert host.transfers["sum"]["data"] == [12]
    assert host.status["count"] == 1


def test_a_muted_stream_is_drained_silently():
    async def script(host, line, pump):
        host.send([host.layout.mute_frame(["sum"])])
        host.send(host.layout.encode({"a": {"data": [1, 2, 3], "user": [0, 0, 0]}, "b": {"": [6]}}))
        await pump(lambda: host.idle and host.transfers["copy"][""] == [6])

    assert talk(adder_bridge(), script).transfers["sum"]["data"] == []


def test_a_break_recovers_a_link_that_was_flooded():

    async def script(host, line, pump):
        frame = next(iter(host.layout.frames(host.layout.inputs[0], [(value,) for value in range(120)])))
        assert host.layout.window < 3 * len(frame), "more than the bridge can hold"
        line.write(frame * 3)  # regardless of the window, into a component that takes nothing
        await pump(lambda: not line.sending)
        line.send_break()
        await pump(lambda: not line.sending)
        host.send([host.layout.status_frame()])
        await pump(lambda: host.status is not None)

    assert talk(adder_bridge(pace=40_000), script).status["flags"] == 0


def test_an_unknown_opcode_is_flagged():
    async def script(host, line, pump):
        line.write(bytes([0x55]))
        host.send([host.layout.status_frame()])
        await pump(lambda: host.status is not None and host.idle)

    assert talk(adder_bridge(), script).status["flags"] == 0b100


def test_a_break_in_the_middle_of_a_frame_resets_link_and_component():
    async def script(host, line, pump):
        host.send(host.layout.encode({"a": {"data": [1], "user": [0xABCDE]}}))
        await pump(lambda: host.idle)
        line.write(bytes([1, 5, 7]))  # half a frame
        await pump(lambda: not line.sending)
        line.send_break()
        await pump(lambda: not line.sending)
        host.send([host.layout.status_frame()])
        host.send(host.layout.frames(host.layout.inputs[0], [(3,)]))
        await pump(lambda: host.idle and len(host.transfers["sum"]["data"]) == 2)

    host = talk(adder_bridge(), script)
    assert host.status == {"flags": 0, "busy": 0, "count": 0}
    assert host.transfers["sum"]["data"] == [1 + 0xABCDE, 3], "the held value is 0 again"


def test_layout_gives_every_field_whole_bytes():
    layout = Layout(Adder().signature, held=("a.user",))
    assert [(c.name, c.opcode, c.size) for c in layout.inputs] == [("a", 1, 2), ("b", 2, 1)]
    assert [(c.name, c.opcode, c.size) for c in layout.held] == [("a.user", 3, 3), ("gain", 4, 1)]
    assert [(c.name, c.opcode, c.size) for c in layout.outputs] == [("sum", 0x80, 4), ("copy", 0x81, 1)]
    assert list(layout.encode({"a": {"data": [0x123, 0xFFF], "user": [5, 5]}})) == [
        bytes([3, 0, 5, 0, 0]),
        bytes([1, 1, 0x23, 0x01, 0xFF, 0x0F]),
    ]


def test_layout_identity_changes_with_any_width():
    class Wider(wiring.Component):
        a: In(stream.Signature(9))
        o: Out(stream.Signature(9))

    class Narrower(wiring.Component):
        a: In(stream.Signature(8))
        o: Out(stream.Signature(9))

    assert Layout(Wider().signature).identity != Layout(Narrower().signature).identity
    assert Layout(Wider().signature).identity == Layout(Wider().signature).identity


def test_frames_never_exceed_half_the_window():
    layout = Layout(Adder().signature, held=("a.user",))
    frames = list(layout.frames(layout.inputs[0], [(1,)] * 1000))
    assert max(map(len, frames)) <= layout.window // 2
    assert sum(frame[1] + 1 for frame in frames) == 1000


def test_held_field_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"held = \['a.size'\]: no such field"):
        Layout(Adder().signature, held=("a.size",))


def test_host_keeps_to_the_window():
    layout = Layout(Adder().signature, held=("a.user",))
    host = Host(layout)
    host.send(layout.frames(layout.inputs[0], [(1,)] * 2000))
    sent = len(host.exchange())
    assert layout.window // 2 < sent <= layout.window
    assert host.exchange() == b""
    assert host.exchange(bytes([ACKNOWLEDGE]))


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (bytes([0x12]), "byte 0x12 starts no reply"),
        (bytes([ACKNOWLEDGE]), "acknowledgement of a frame that was not sent"),
        (bytes([STATUS_REPLY, 1, 2, 3, 4, 0, 0, 0, 0]), "built with another configuration: identity 0x04030201"),
    ],
)
def test_host_refuses_what_the_layout_does_not_promise(received, message):
    with pytest.raises(LinkError, match=message):
        Host(Layout(Adder().signature)).exchange(received)
