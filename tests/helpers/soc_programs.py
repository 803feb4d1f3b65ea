"""Host programs for the accelerator, and cases for them."""

import numpy as np

from kvant.sim.soc.driver import Accelerator

MEMORY = range(0x100, 1 << 17)


def layer(host, case, *, jobs_interleave=None, counters=False):
    """One linear layer; its outputs, and all counters."""
    accelerator = Accelerator(host, MEMORY)
    weights = accelerator.store_weights(
        case["w_codes"], case["w_scale"], case["w_coeff"], case["w_int8"], interleave=jobs_interleave
    )
    y = accelerator.linear(weights, case["x"])
    return (y, accelerator.counters()) if counters else y


def bits(y):
    return np.asarray(y, np.float32).view(np.uint32)
