"""The linear path behind a serial port, as a host sees it."""

import numpy as np
import pytest
from serial_host import talk

from kvant.fpga.bridge import SerialBridge
from kvant.fpga.linear_top import HELD, linear_layout
from kvant.hw.linear.engine import LinearEngine
from kvant.hw.linear.jobs import plan
from kvant.hw.linear.parameters import LinearParameters
from kvant.sim.linear import engine as transfers
from kvant.sim.streams import Trace

golden = pytest.importorskip("kvant.golden.linear.engine")
int8 = pytest.importorskip("kvant.golden.numeric.int8")

pytestmark = pytest.mark.filterwarnings("ignore::amaranth.hdl.UnusedElaboratable")

TOKENS, INPUTS, OUTPUTS = 2, 11, 3


def tensors(p, seed):
    rng = np.random.default_rng(seed)
    groups = -(-INPUTS // p.group)
    coefficient = rng.choice(np.array([0, 5, 40, 127, 255], np.uint8), (OUTPUTS, groups))
    coefficient[1, 0] = 254
    return {
        "x": rng.normal(size=(TOKENS, INPUTS)).astype(np.float16),
        "w_codes": rng.integers(0, 16, (OUTPUTS, INPUTS), np.uint8),
        "w_scale": rng.uniform(0.001, 2, (OUTPUTS, groups)).astype(np.float16),
        "w_coeff": coefficient,
        "w_int8": rng.integers(-127, 128, (OUTPUTS, INPUTS), np.int8),
    }


def multiply_over_the_line(p, arrays, *, engine=None, mute=()):
    """Send the jobs of a product, one after the other, and collect what comes back."""
    jobs = plan(p, tokens=TOKENS, inputs=INPUTS, outputs=OUTPUTS)
    stimuli = [transfers.stimulus(p, [job], arrays) for job in jobs]
    expected = sum(stimulus.expect["y"] for stimulus in stimuli)

    async def script(host, line, pump):
        host.send([host.layout.mute_frame(mute)])
        for stimulus in stimuli:
            host.send(host.layout.encode(stimulus.inputs))
        await pump(lambda: host.idle and len(host.transfers["y"]["data"]) == expected)
        host.send([host.layout.status_frame()])
        await pump(lambda: host.status is not None)

    bridge = SerialBridge(engine or LinearEngine(p), divisor=4, held=HELD)
    assert bridge.layout.identity == linear_layout(p).identity
    host = talk(bridge, script)
    trace = Trace(transfers=host.transfers, cycles={name: [0, 0] for name in ("cmd", "x", "w", "xq", "y")})
    trace.status = {name: host.status[name] for name in stimuli[0].status}
    return host, (None if mute else transfers.collect(p, jobs, trace, tokens=TOKENS, inputs=INPUTS, outputs=OUTPUTS))


@pytest.mark.parametrize(
    "p",
    [
        LinearParameters(group=8, rows=2, cols=2, quant_lanes=1, activation_words=16, accumulators=4),
        LinearParameters(group=8, rows=4, cols=3, activation_words=8, accumulators=8),
    ],
    ids=["2x2", "4x3"],
)
def test_a_product_over_the_serial_port_equals_the_golden_model(p):
    arrays = tensors(p, seed=p.rows)
    host, result = multiply_over_the_line(p, arrays)
    quantized = int8.quantize_int8(arrays["x"], p.group)
    np.testing.assert_array_equal(result["x_q"], quantized.q.numpy())
    weights = [arrays[name] for name in ("w_codes", "w_scale", "w_coeff", "w_int8")]
    y = golden.linear(quantized.q, quantized.scale, *weights, group=p.group).numpy()
    np.testing.assert_array_equal(result["y"].view(np.uint32), y.view(np.uint32))
    assert host.status["flags"] == host.status["error"] == host.status["nonfinite"] == 0
    assert host.status["busy_cycles"] > 0


def test_outputs_alone_come_back_when_the_activations_are_muted():
    p = LinearParameters(group=8, rows=2, cols=2, quant_lanes=1, activation_words=16, accumulators=4)
    arrays = tensors(p, seed=1)
    every, _ = multiply_over_the_line(p, arrays)
    outputs, _ = multiply_over_the_line(p, arrays, mute=["xq"])
    assert outputs.transfers["xq"]["data"] == []
    assert outputs.transfers["y"] == every.transfers["y"]


def test_a_job_that_the_engine_refuses_shows_in_the_status():
    p = LinearParameters(group=8, rows=2, cols=2, quant_lanes=1, activation_words=16, accumulators=4)

    async def script(host, line, pump):
        host.send(host.layout.encode({"cmd": {"data": [0]}}))  # a job of zero tokens
        await pump(lambda: host.idle)
        host.send([host.layout.status_frame()])
        await pump(lambda: host.status is not None)

    assert talk(SerialBridge(LinearEngine(p), divisor=4, held=HELD), script).status["error"] == 1
