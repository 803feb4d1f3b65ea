"""The accelerator as a block of the product: generated with its register map, simulated through its descriptors."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvant import config
from kvant.blocks import Vectors
from kvant.config import Config
from kvant.errors import InputError
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.parameters import ParameterError
from kvant.hw.soc.parameters import SocParameters, TopParameters
from kvant.linear import ARRAYS, LinearBlock, golden_outputs, quantised_weights
from kvant.simulated import Run, SimulatedBlock, shape_arrays
from kvant.tensors import check_arrays, scalar


def top_parameters(chosen: Config) -> TopParameters:
    """Parameters of the top.

    Raises
    ------
    InputError
        The linear path, the memory port, the caches and the attention do not fit each other.
    """
    try:
        if not chosen.soc.attention:
            return TopParameters(chosen.linear, chosen.soc)
        return TopParameters(chosen.linear, chosen.soc, cache=chosen.cache, attention=chosen.attention)
    except ParameterError as error:
        raise InputError(str(error)) from None


class TopBlock(SimulatedBlock):
    """Registers, memory port and sequencer around the engines; see `kvant.hw.soc.top.KvantTop`."""

    summary = "accelerator: AXI4-Lite registers, descriptors in memory over AXI4, the linear path; caches and attention"
    fields = tuple(
        dict.fromkeys(
            (
                *LinearParameters.model_fields,
                *SocParameters.model_fields,
                *CacheParameters.model_fields,
                *AttentionParameters.model_fields,
                "coefficients",
            )
        )
    )
    held = ()

    def build(self, chosen: Config):
        """The component, anew at every call."""
        from kvant.hw.soc.top import KvantTop

        return KvantTop(top_parameters(chosen))

    def parameters(self, chosen: Config) -> Mapping[str, Any]:
        """The fields of `LinearParameters` and `SocParameters`, and with attention those of caches and attention."""
        p = top_parameters(chosen)
        parts = [part for part in (p.linear, p.soc, p.cache, p.attention) if part is not None]
        return {name: value for part in parts for name, value in part.model_dump().items()}

    def facts(self, chosen: Config) -> Mapping[str, Any]:
        """Throughput, stream orders, widths, and what lies in memory, for the manifest."""
        from kvant.hw.soc import weight_layout
        from kvant.hw.soc.cache_memory import CacheMemory
        from kvant.hw.soc.descriptors import DESCRIPTOR_BYTES, kinds_of

        p = top_parameters(chosen)
        linear = LinearBlock().facts(chosen)
        step = p.soc.port_bytes
        caches = {} if p.cache is None else {"caches": CacheMemory(p.cache, step).description}
        return {
            "throughput": {
                "bytes per cycle at the memory port": step,
                "multiply-accumulates per cycle": p.linear.lanes,
                "outputs per cycle to memory": 1,
            },
            "streams": {name: linear["streams"][name] for name in ("x", "y")},
            "widths": linear["widths"],
            "memory": {
                "descriptors": {
                    "bytes": DESCRIPTOR_BYTES,
                    "byte_order": "little endian",
                    "kinds": {
                        kind.opcode.name: [
                            {"name": field.name, "offset": field.offset, "bits": field.width, "description": field.doc}
                            for field in kind.all_fields
                        ]
                        for kind in kinds_of(p)
                    },
                },
                "weights": weight_layout.layout(p),
                "x": {"element": "IEEE 754 binary16", "order": f"rows; each begins at a multiple of {step} bytes"},
                "y": {"element": "IEEE 754 binary32", "order": f"rows; each begins at a multiple of {step} bytes"},
                **caches,
            },
        }

    def files(self, chosen: Config, name: str) -> Mapping[str, str]:
        """The register map: C header and driver, Python module, page, JSON."""
        import json

        from kvant.hw.soc import register_text
        from kvant.hw.soc.registers import register_map

        registers = register_map(top_parameters(chosen))
        return {
            f"{name}_registers.h": register_text.c_header(registers),
            f"{name}_driver.h": register_text.c_driver(f"{name}_registers.h"),
            f"{name}_registers.py": register_text.python_module(registers),
            f"{name}_registers.md": register_text.markdown(registers),
            f"{name}_registers.json": json.dumps(registers.as_dict(), indent=2) + "\n",
        }

    def vectors(self, chosen: Config, seed: int) -> Vectors:
        """Refused: the generated bench plays streams, and the top is driven over its buses."""
        raise InputError("--bench: legal for blocks with streams alone; `kvant simulate top` runs the top")

    def case(self, arrays: Mapping[str, np.ndarray], *, path: Path | None, overrides: Iterable[str]) -> Run:
        """*arrays*: as of `kvant.linear.LinearBlock`. Weights and activations lie in memory; descriptors run them."""
        group = scalar(arrays, "group")
        chosen = config.load(path, overrides, arrays={} if group is None else {"group": group})
        linear = chosen.linear
        check_arrays(arrays, ARRAYS, group=linear.group)
        weights = quantised_weights(arrays, chosen)
        tensors = {"x": arrays["x"], **weights}
        return Run(
            run=partial(_run, top_parameters(chosen), tensors),
            golden=lambda: {"y": golden_outputs(linear, tensors)["y"]},
            extra=weights | shape_arrays(linear.group, linear.cols, linear.rows),
        )


BLOCK = TopBlock()


def _run(
    p: TopParameters, tensors: Mapping[str, np.ndarray], *, simulator: str, stall: float, seed: int, waves: Path | None
) -> dict[str, np.ndarray]:
    """A layer on the simulated accelerator, which needs a bus bench of cocotb."""
    from kvant.sim.soc import layer

    if simulator == "amaranth":
        raise InputError("--simulator amaranth: legal for top are verilator, icarus")
    if waves is not None:
        raise InputError("--waves: not offered for top")
    return layer.run(p, tensors, simulator=simulator, stall=stall, seed=seed)
