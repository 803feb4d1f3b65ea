"""Make the committed piece of SmolLM2: ``python -m kvant.golden.models.make_slice``, from the repository's root.

The text is the repository's own licence, so nothing but the fetched model is needed. Weights come out the same
everywhere; activations, keys, values and queries may differ in the last fp16 bit between machines, because a float32
matrix product is not summed in the same order everywhere.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from kvant.golden.models import slice as model_slice
from kvant.golden.models.checkpoint import open_model
from kvant.golden.models.llama import Llama
from kvant.golden.models.tokenizer import encode, load_tokenizer

LAYERS = (5, 20)
PROJECTIONS = {"q_proj": "self_attn.q_proj", "down_proj": "mlp.down_proj"}
ROWS = 128
TOKENS = 256
ACTIVATIONS = 64
QUERIES = 32


def make(model: str, text: str) -> dict[str, np.ndarray]:
    """Arrays of the piece, from the first `TOKENS` tokens of *text* run through *model*."""
    checkpoint = open_model(model)
    tokens = encode(load_tokenizer(checkpoint), text)[:TOKENS]
    seen: dict[str, torch.Tensor] = {}
    Llama(checkpoint).logits(torch.tensor([tokens]), lambda name, value: seen.update({name: value[0]}))
    arrays = {"tokens": np.array(tokens, dtype=np.int32)}
    for number in LAYERS:
        for short, projection in PROJECTIONS.items():
            name = f"model.layers.{number}.{projection}.weight"
            arrays[f"L{number}_{short}_name"] = np.array(name)
            arrays[f"L{number}_{short}_w"] = checkpoint.weight(name)[:ROWS].numpy()
            arrays[f"L{number}_{short}_x"] = seen[name][-ACTIVATIONS:].half().numpy()
        base = f"model.layers.{number}"
        arrays[f"L{number}_keys"] = seen[f"{base}.keys"].half().numpy()
        arrays[f"L{number}_values"] = seen[f"{base}.values"].half().numpy()
        arrays[f"L{number}_queries"] = seen[f"{base}.queries"][:, -QUERIES:].half().numpy()
    return arrays


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="model to take the piece from")
    parser.add_argument("--text", type=Path, default=Path("LICENSE"), help="text to run through it")
    parser.add_argument("-o", "--output", type=Path, default=model_slice.PATH)
    arguments = parser.parse_args()
    arrays = make(arguments.model, arguments.text.read_text(encoding="utf-8"))
    np.savez_compressed(arguments.output, **arrays)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")
    for name, array in arrays.items():
        print(f"  {name:18} {array.dtype} {list(array.shape)}")


if __name__ == "__main__":
    main()
