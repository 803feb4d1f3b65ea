"""The memory of `matvec.sv` before and after: a ring, weights, activations, and room for outputs.

usage: python image.py FOLDER [--seed N] [FIELD=VALUE ...]

Writes FOLDER/image.hex, and FOLDER/after.hex as the golden model says, for a design that was generated with the same
fields (`kvant generate top --set FIELD=VALUE ...`).
"""

import argparse
from pathlib import Path

import torch

from kvant import config
from kvant.golden.linear.engine import multiply
from kvant.golden.linear.search import quantize_weights
from kvant.golden.numeric.int8 import quantize_int8
from kvant.hw.linear.parameters import ceil_div
from kvant.hw.soc.descriptors import DESCRIPTOR_BYTES, Descriptor, Opcode
from kvant.hw.soc.parameters import TopParameters
from kvant.hw.soc.weight_layout import pack_weights, stored_interleave

MEMORY_BYTES = 1 << 16
TOKENS, INPUTS, OUTPUTS = 3, 100, 30
X, Y, WEIGHTS = 0x1000, 0x2000, 0x4000
"""Addresses; the ring begins at 0."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE")
    given = parser.parse_args()
    chosen = config.load(None, given.fields)
    p = TopParameters(chosen.linear, chosen.soc)

    torch.manual_seed(given.seed)
    w = quantize_weights(torch.randn(OUTPUTS, INPUTS), p.linear.group, chosen.coefficients, name="w")
    x = torch.randn(TOKENS, INPUTS).half()
    groups = quantize_int8(x, p.linear.group)
    y = multiply(groups.q, groups.scale, w)

    interleave = stored_interleave(p.linear, INPUTS)
    packed = pack_weights(p, w.codes.numpy(), w.scale.numpy(), w.coefficient.numpy(), interleave=interleave)
    x_stride, y_stride = (ceil_div(size, p.soc.port_bytes) * p.soc.port_bytes for size in (2 * INPUTS, 4 * OUTPUTS))
    input_groups, tiles = ceil_div(INPUTS, p.linear.group), ceil_div(OUTPUTS, p.linear.cols)
    job = Descriptor(
        opcode=Opcode.LINEAR,
        tokens=TOKENS,
        groups=input_groups,
        tail=INPUTS - (input_groups - 1) * p.linear.group,
        tiles=tiles,
        last_cols=OUTPUTS - (tiles - 1) * p.linear.cols,
        interleave=interleave,
        weights=WEIGHTS,
        weight_bytes=len(packed),
        x=X,
        x_stride=x_stride,
        y=Y,
        y_stride=y_stride,
    )

    memory = bytearray(MEMORY_BYTES)
    for place, descriptor in enumerate((job, Descriptor(opcode=Opcode.END))):
        memory[place * DESCRIPTOR_BYTES : (place + 1) * DESCRIPTOR_BYTES] = descriptor.encode()
    memory[WEIGHTS : WEIGHTS + len(packed)] = packed
    for row in range(TOKENS):
        raw = x[row].numpy().tobytes()
        memory[X + row * x_stride : X + row * x_stride + len(raw)] = raw
    _write(given.folder / "image.hex", memory)
    for row in range(TOKENS):
        raw = y[row].numpy().tobytes()
        memory[Y + row * y_stride : Y + row * y_stride + len(raw)] = raw
    _write(given.folder / "after.hex", memory)
    print(f"{TOKENS} x {INPUTS} activations times {INPUTS} x {OUTPUTS} weights, seed {given.seed}")


def _write(path: Path, memory: bytes) -> None:
    words = [memory[at : at + 16][::-1].hex() for at in range(0, len(memory), 16)]
    path.write_text("\n".join(words) + "\n")


if __name__ == "__main__":
    main()
