"""The manifest of a generated design: everything an integrator needs to know, as JSON."""

from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from kvant import __version__

if TYPE_CHECKING:
    from kvant.blocks import Block
    from kvant.config import Config
    from kvant.hw.emit import Design

FORMAT = 1
"""Version of the manifest's own structure."""

BLOCK_GROUPS = 16
"""Groups of a storage block."""


def storage(group: int) -> dict[str, Any]:
    """Layout of M-ANT groups in memory.

    Blocks of 16 groups with separate planes, so that a 128-bit port streams without realigning: codes, scales,
    coefficients; 304, 560, 1072 bytes for groups of 32, 64, 128 elements.

    Parameters
    ----------
    group : int
        Elements of a group.
    """
    codes = BLOCK_GROUPS * group // 2
    return {
        "unit": f"block of {BLOCK_GROUPS} groups; a short last block is filled up with groups of scale 0",
        "groups": BLOCK_GROUPS,
        "group": group,
        "bytes": codes + 3 * BLOCK_GROUPS,
        "bits_per_element": 4 + 24 / group,
        "planes": [
            {
                "name": "codes",
                "offset": 0,
                "bytes": codes,
                "element": "4 bits: sign in bit 3, i in bits 2..0",
                "order": "group by group, elements in order; two to a byte, the earlier one in bits 3..0",
            },
            {
                "name": "scales",
                "offset": codes,
                "bytes": 2 * BLOCK_GROUPS,
                "element": "IEEE 754 binary16, little endian",
                "order": "group by group",
            },
            {
                "name": "coefficients",
                "offset": codes + 2 * BLOCK_GROUPS,
                "bytes": BLOCK_GROUPS,
                "element": "0..127: M-ANT, 255: linear, 254: INT8 group (codes 0x0, elements in a plane of their own)",
                "order": "group by group",
            },
        ],
        "int8_plane": "INT8 weight groups: one two's complement byte an element, in element order, beside the blocks",
    }


def make_manifest(design: "Design", block_name: str, block: "Block", config: "Config") -> dict[str, Any]:
    """The manifest of *design*, as JSON can hold it; neither date nor path in it."""
    from kvant.hw.emit import yosys_version

    facts: Mapping[str, Any] = block.facts(config)
    orders: Mapping[str, Any] = facts.get("streams", {})
    return {
        "manifest": FORMAT,
        "name": design.name,
        "block": block_name,
        "summary": block.summary,
        "generator": {"kvant": __version__, "amaranth": metadata.version("amaranth"), "yosys": yosys_version()},
        "clock": {"port": "clk", "edge": "rising"},
        "reset": {"port": "rst", "active": "high", "synchronous": True},
        "configuration": config.as_dict(),
        "parameters": dict(block.parameters(config)),
        "widths": dict(facts.get("widths", {})),
        "latency": facts.get("latency", {}),
        "throughput": facts.get("throughput", {}),
        "ports": [
            {
                "name": port.name,
                "direction": port.direction,
                "width": port.width,
                "description": port.description,
                "fields": [
                    {"name": field.name, "offset": field.offset, "width": field.width, "signed": field.signed}
                    for field in port.fields
                ],
            }
            for port in design.ports
        ],
        "streams": {
            name: {
                "direction": stream.direction,
                "valid": stream.valid,
                "ready": stream.ready,
                "fields": dict(stream.fields),
                "order": orders.get(name, ""),
            }
            for name, stream in design.streams.items()
        },
        "memory": facts.get("memory", storage(config.linear.group)),
    }
