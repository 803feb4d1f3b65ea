"""Tiny random models, written as a user would find them: a Hugging Face folder and a GGUF of the same weights."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 80,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


def random_tensors(config: dict = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of a Llama with *config*, by their Hugging Face names."""
    random = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=random)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape, generator=random) / shape[1] ** 0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=random)
    tensors["model.norm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=random)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = torch.randn(config["vocab_size"], hidden, generator=random)
    return tensors


def byte_vocabulary() -> dict[str, int]:
    """All bytes as tokens of a byte-level vocabulary, and a few merges' results behind them."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "th", "the", "Ġthe", "<|end|>"]
    tokens += [f"<unused{number}>" for number in range(CONFIG["vocab_size"] - len(tokens))]
    return {token: number for number, token in enumerate(tokens)}


MERGES = ["t h", "th e", "Ġ the"]


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], config: dict = CONFIG) -> Path:
    """A Hugging Face folder with one safetensors file and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer = Tokenizer(models.BPE(byte_vocabulary(), [tuple(merge.split()) for merge in MERGES]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Name of a tensor in a GGUF."""
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top:
        return top[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def interleave_rotary_rows(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp's converter leaves them: element j of the two halves of a head become neighbours."""
    rows = w.reshape(heads, 2, -1, w.shape[1])
    return torch.stack((rows[:, 0], rows[:, 1]), dim=2).reshape(w.shape)


def write_gguf(path: Path, tensors: dict[str, torch.Tensor], types: dict | None = None, config: dict = CONFIG) -> Path:
    """A GGUF of architecture llama; *types* gives the type of tensors that are not F32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocabulary = byte_vocabulary()
    writer.add_token_list(list(vocabulary))
    writer.add_token_types([3 if token == "<|end|>" else 1 for token in vocabulary])
    writer.add_token_merges(MERGES)
    for name, tensor in tensors.items():
        values = tensor
        if name.endswith("q_proj.weight"):
            values = interleave_rotary_rows(values, config["num_attention_heads"])
        elif name.endswith("k_proj.weight"):
            values = interleave_rotary_rows(values, config["num_key_value_heads"])
        array = values.numpy().astype(np.float32)
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
