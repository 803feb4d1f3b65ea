"""File format of quantised weights and of the tables of caches: one safetensors file, checked when it is read.

For every weight NAME of N outputs and K inputs in groups of G along K:

================== =============== ==================================================================================
tensor             type            contents
================== =============== ==================================================================================
NAME.codes         u8 [N, K/2]     two codes a byte, the earlier element in the low nibble; K/2 rounds up
NAME.scale         f16 [N, K/G]    scale of each group; K/G rounds up
NAME.coefficient   u8 [N, K/G]     coefficient byte of each group: 0..127, 254 (INT8 group), 255 (linear)
NAME.int8          i8 [groups, G]  only if there are INT8 groups: their elements, in the order of NAME.coefficient
================== =============== ==================================================================================

For the caches of a model of L layers with H KV heads of d elements, if they were calibrated:

======================= =============== ==============================================================================
tensor                  type            contents
======================= =============== ==============================================================================
cache.key_mean          f16 [L, H, d]   mean of the keys after RoPE and their map, subtracted before they are cached
cache.key_floor         f16 [L, H, d]   least magnitude that the INT8 scale of a channel of centred keys holds
cache.value_floor       f16 [L, H, d]   the same for values
cache.key_map           f16 [L,H,d,d]   only where there are maps: A, see the codebooks below
cache.value_map         f16 [L,H,d,d]   the same for values
cache.KIND.coefficients u8 [L, C]       table of coefficients; KIND as in `kvant.golden.kvcache.calibration.KINDS`
cache.KIND.thresholds   u16 [L, C-1]    thresholds between its entries, non-descending
======================= =============== ==============================================================================

For product-quantised caches, if codebooks were trained; KIND as in `kvant.golden.pq.calibration.Kind`:

======================= ============================ =================================================================
tensor                  type                         contents
======================= ============================ =================================================================
pq.key_mean             f16 [L, H, d]                mean of the keys after RoPE; it, or ``fp16(A mean)`` where there
                                                     is a map, is subtracted before they are coded
pq.KIND.entries         i8 [L, H, M, 2^nbits, d/M]   centroids of every layer, head and sub-space
pq.KIND.scale           f16 [L, H]                   what an entry is multiplied by
pq.KIND.transform       f16 [L, H, d, d]             only where there is a map: A. The host gives the cache ``A k`` for
                                                     a key after RoPE and ``A^-T q`` for a query, or ``A v`` for a value
                                                     and takes ``A^-1 y`` for an output y
======================= ============================ =================================================================

The metadata entry ``kvant`` is a JSON object: ``format`` and ``version`` of this layout, ``configuration``, ``source``
(file name and SHA-256 of the model's weights), ``tensors`` (shape, group, loss and the SHA-256 of each stored tensor),
``cache`` (group, sinks, statistic and the SHA-256 of each stored tensor; absent without tables of caches), ``pq``
(sinks and the SHA-256 of each stored tensor; absent without codebooks), and ``sha256`` over all of this. Same contents,
same bytes.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvant.errors import InputError
from kvant.files import replaced
from kvant.golden.errors import TensorError

if TYPE_CHECKING:
    import torch

    from kvant.golden.kvcache.calibration import CacheTables
    from kvant.golden.linear.weights import QuantizedWeights
    from kvant.golden.models.checkpoint import Checkpoint
    from kvant.golden.pq.calibration import ModelCodebooks

FORMAT = "kvant-mant-weights"
VERSION = 1
"""Raised when a reader of the former version would misread a file."""

_KEY = "kvant"
_PARTS = {"codes": "U8", "scale": "F16", "coefficient": "U8", "int8": "I8"}
_CACHE = "cache"
_CACHE_VECTORS = ("key_mean", "key_floor", "value_floor")
_CACHE_MAPS = ("key_map", "value_map")
_CACHE_PARTS = {"coefficients": "U8", "thresholds": "U16"} | dict.fromkeys((*_CACHE_VECTORS, *_CACHE_MAPS), "F16")
_PQ = "pq"
_PQ_PARTS = {"entries": "I8", "scale": "F16", "key_mean": "F16", "transform": "F16"}


@dataclass(frozen=True)
class PackedModel:
    """Contents of a file.

    Parameters
    ----------
    tensors : dict of str to QuantizedWeights
        By name of the weight.
    configuration : dict
        How they were made.
    source : dict
        ``name`` and ``sha256`` of the model they were made from.
    cache : CacheTables or None
        What calibration found for the caches.
    codebooks : ModelCodebooks or None
        Those of product-quantised caches.
    """

    tensors: dict[str, "QuantizedWeights"]
    configuration: dict
    source: dict
    cache: "CacheTables | None" = None
    codebooks: "ModelCodebooks | None" = None

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of codes, scales, coefficients and INT8 side planes, as stored."""
        return total_bytes(self.tensors.values())

    def check_source(self, model) -> None:
        """Refuse to be used with another model than the one the weights were made from.

        Raises
        ------
        InputError
            A weight that *model*, a `Checkpoint`, does not have in this shape, or other contents of its files.
        """
        for name, weights in self.tensors.items():
            shape = model.tensors[name].shape if name in model.tensors else "absent"
            if shape != weights.shape:
                raise InputError(f"{name}: packed as {list(weights.shape)}, in {model.path.name} it is {shape}")
        for part, found in ((_CACHE, self.cache), (_PQ, self.codebooks)):
            if found is None:
                continue
            shape, expected = tuple(found.key_mean.shape), model.config
            expected = (expected.layers, expected.kv_heads, expected.head_dim)
            if shape != expected:
                raise InputError(f"{part}.key_mean: shape {shape}; {model.path.name} has {expected} (layers, heads, d)")
        if (digest := model.sha256()) != self.source["sha256"]:
            raise InputError(
                f"{model.path.name}: SHA-256 {digest[:16]}... is not that of the model the weights were made from, "
                f"{self.source['name']} {self.source['sha256'][:16]}..."
            )


def _planes(weights: "QuantizedWeights") -> dict[str, "torch.Tensor"]:
    """The stored tensors of one weight."""
    from kvant.golden.numeric.codes import INT8
    from kvant.golden.numeric.packing import pack_nibbles
    from kvant.golden.numeric.tensors import to_groups

    planes = {"codes": pack_nibbles(weights.codes), "scale": weights.scale, "coefficient": weights.coefficient}
    marked = weights.coefficient == INT8
    if bool(marked.any()):
        planes["int8"] = to_groups(weights.int8, weights.group)[marked]
    return {part: plane.contiguous() for part, plane in planes.items()}


def total_bytes(tensors: Iterable["QuantizedWeights"]) -> dict[str, int]:
    """Bytes of codes, scales, coefficients and INT8 side planes of weights: what a file holds beside its header."""
    total = dict.fromkeys(_PARTS, 0)
    for weights in tensors:
        for part, plane in _planes(weights).items():
            total[part] += plane.nbytes
    return total


def _cache_planes(cache: "CacheTables") -> dict[str, "torch.Tensor"]:
    """The stored tensors of the caches' tables, by their names behind ``cache.``."""
    import torch

    maps = () if cache.key_map is None else _CACHE_MAPS
    planes = {name: getattr(cache, name) for name in (*_CACHE_VECTORS, *maps)}
    for kind, tables in cache.tables.items():
        planes[f"{kind}.coefficients"] = tables.coefficients
        planes[f"{kind}.thresholds"] = tables.thresholds.to(torch.uint16)
    return {name: plane.contiguous() for name, plane in planes.items()}


def _pq_planes(codebooks: "ModelCodebooks") -> dict[str, "torch.Tensor"]:
    """The stored tensors of codebooks, by their names behind ``pq.``."""
    planes = {"key_mean": codebooks.key_mean}
    for kind, book in codebooks.books.items():
        planes |= {f"{kind}.entries": book.entries, f"{kind}.scale": book.scale}
    planes |= {f"{kind}.transform": matrix for kind, matrix in codebooks.transforms.items()}
    return {name: plane.contiguous() for name, plane in planes.items()}


def save(
    path: Path,
    tensors: Mapping[str, "QuantizedWeights"],
    configuration: dict,
    source: dict,
    cache: "CacheTables | None" = None,
    codebooks: "ModelCodebooks | None" = None,
) -> None:
    """Write a file whole: it is built beside *path* and renamed.

    Parameters
    ----------
    path : Path
        File to write or replace.
    tensors : mapping of str to QuantizedWeights
        Weights by name.
    configuration, source : dict
        What JSON can hold; see `PackedModel`.
    cache : CacheTables, optional
        What calibration found for the caches.
    codebooks : ModelCodebooks, optional
        Those of product-quantised caches.
    """
    from safetensors.torch import save_file

    planes, described = {}, {}
    for name, weights in tensors.items():
        digests = {}
        for part, plane in _planes(weights).items():
            planes[f"{name}.{part}"] = plane
            digests[part] = _digest(plane)
        described[name] = {
            "shape": list(weights.shape),
            "group": weights.group,
            "loss": weights.loss,
            "sha256": digests,
        }
    header = {
        "format": FORMAT,
        "version": VERSION,
        "configuration": configuration,
        "source": source,
        "tensors": described,
    }
    if cache is not None:
        stored = _cache_planes(cache)
        planes |= {f"{_CACHE}.{name}": plane for name, plane in stored.items()}
        header[_CACHE] = {
            "group": cache.group,
            "sinks": cache.sinks,
            "statistic": {kind: tables.statistic for kind, tables in cache.tables.items()},
            "sha256": {name: _digest(plane) for name, plane in stored.items()},
        }
    if codebooks is not None:
        stored = _pq_planes(codebooks)
        planes |= {f"{_PQ}.{name}": plane for name, plane in stored.items()}
        digests = {name: _digest(plane) for name, plane in stored.items()}
        header[_PQ] = {"sinks": codebooks.sinks, "sha256": digests}
    # One metadata entry, because safetensors writes several in an order that changes from run to run.
    metadata = {_KEY: _canonical(header | {"sha256": _header_digest(header)})}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary:
        save_file(planes, temporary, metadata)


def load(path: Path) -> PackedModel:
    """Read a file and check every byte of it.

    Raises
    ------
    InputError
        In one line: missing, truncated, not of this format or version, damaged, without a part of a tensor, or with
        parts that do not fit each other.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, file.metadata())
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no mapping
            planes = {name: file.get_tensor(name) for name in kinds}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: truncated or not a safetensors file ({reason})") from None

    def take(name: str, part: str, digest: str, legal: Mapping[str, str], needed_by: str) -> "torch.Tensor":
        """A tensor of the file, checked."""
        if name not in planes:
            raise InputError(f"{path}: {name} is missing; without it {needed_by} has no value")
        if part not in legal or kinds[name] != legal[part]:
            raise InputError(f"{path}: {name} has type {kinds[name]}; legal is {legal.get(part, 'no such part')}")
        plane = planes.pop(name)
        if _digest(plane) != digest:
            raise InputError(f"{path}: {name} is damaged, its contents do not match their SHA-256")
        return plane

    tensors, cache, codebooks = {}, None, None
    try:
        for name, entry in header["tensors"].items():
            parts = {
                part: take(f"{name}.{part}", part, digest, _PARTS, name) for part, digest in entry["sha256"].items()
            }
            for part in ("codes", "scale", "coefficient"):
                if part not in parts:
                    raise InputError(f"{path}: {name}.{part} is missing; without it {name} has no value")
            tensors[name] = _unpack(name, entry, parts)
        if (entry := header.get(_CACHE)) is not None:
            parts = {
                name: take(f"{_CACHE}.{name}", name.rpartition(".")[2], digest, _CACHE_PARTS, "the cache")
                for name, digest in entry["sha256"].items()
            }
            cache = _unpack_cache(entry, parts)
        if (entry := header.get(_PQ)) is not None:
            parts = {
                name: take(f"{_PQ}.{name}", name.rpartition(".")[2], digest, _PQ_PARTS, "the cache")
                for name, digest in entry["sha256"].items()
            }
            codebooks = _unpack_codebooks(entry, parts)
    except TensorError as error:
        raise InputError(f"{path}: {error}") from None
    if planes:
        raise InputError(f"{path}: {min(planes)} belongs to no weight of the file")
    return PackedModel(tensors, header["configuration"], header["source"], cache, codebooks)


def load_for(model: "Checkpoint", path: Path | None, option: str) -> PackedModel | None:
    """The file that a command line names for a model; None without a path.

    Raises
    ------
    InputError
        Naming *option*: a file that cannot be read, or that was made from another model.
    """
    if path is None:
        return None
    found = load(path)
    try:
        found.check_source(model)
    except InputError as error:
        raise InputError(f"{option} {path}: {error}") from None
    return found


def _header(path: Path, metadata: dict[str, str] | None) -> dict:
    """The checked description of the file."""
    try:
        header = json.loads((metadata or {})[_KEY])
        format_, version = header["format"], header["version"]
    except (KeyError, ValueError, TypeError):
        raise InputError(f"{path}: not a file of quantised weights; `kvant quantize` writes them") from None
    if format_ != FORMAT:
        raise InputError(f"{path}: format {format_!r}; legal is {FORMAT!r}")
    if version != VERSION:
        raise InputError(f"{path}: format version {version}; this program reads version {VERSION}")
    digest = header.pop("sha256", None)
    if digest != _header_digest(header):
        raise InputError(f"{path}: description is damaged, it does not match its SHA-256")
    return header


def _unpack(name: str, entry: dict, parts: dict[str, "torch.Tensor"]) -> "QuantizedWeights":
    import torch

    from kvant.golden.linear.weights import QuantizedWeights
    from kvant.golden.numeric.codes import INT8
    from kvant.golden.numeric.packing import unpack_nibbles
    from kvant.golden.numeric.tensors import check_shape, from_groups, group_count

    (outputs, inputs), group = entry["shape"], entry["group"]
    check_shape(parts["codes"], f"{name}.codes", (outputs, group_count(inputs, 2)))
    check_shape(parts["coefficient"], f"{name}.coefficient", (outputs, group_count(inputs, group)))
    marked = parts["coefficient"] == INT8
    int8 = None
    if bool(marked.any()):
        if "int8" not in parts:
            raise TensorError(f"{name}.int8 is missing; its {int(marked.sum())} INT8 groups have no value")
        check_shape(parts["int8"], f"{name}.int8", (int(marked.sum()), group))
        int8 = torch.zeros(*marked.shape, group, dtype=torch.int8)
        int8[marked] = parts["int8"]
        int8 = from_groups(int8, inputs)
    elif "int8" in parts:
        raise TensorError(f"{name}.int8: present, but no coefficient is {INT8}")
    return QuantizedWeights(
        codes=unpack_nibbles(parts["codes"], inputs),
        scale=parts["scale"],
        coefficient=parts["coefficient"],
        int8=int8,
        group=group,
        loss=entry["loss"],
        name=name,
    )


def _unpack_cache(entry: dict, parts: dict[str, "torch.Tensor"]) -> "CacheTables":
    from kvant.golden.kvcache.calibration import KINDS, CacheTables
    from kvant.golden.kvcache.choice import Tables
    from kvant.golden.numeric.tensors import check_shape

    wanted = [
        *_CACHE_VECTORS,
        *(f"{kind}.{part}" for kind in entry["statistic"] for part in ("coefficients", "thresholds")),
    ]
    for name in wanted:
        if name not in parts:
            raise TensorError(f"{_CACHE}.{name} is missing; without it the cache has no value")
    shape = tuple(parts["key_mean"].shape)
    for name in _CACHE_VECTORS:
        check_shape(parts[name], f"{_CACHE}.{name}", shape)
        if not bool(parts[name].isfinite().all()) or (name.endswith("floor") and bool((parts[name] < 0).any())):
            raise TensorError(f"{_CACHE}.{name}: legal are finite values, in a floor of at least 0")
    maps = {name: parts[name] for name in _CACHE_MAPS if name in parts}
    if len(maps) == 1:
        raise TensorError(f"{_CACHE}: {min(maps)} without the other map; legal are both or none")
    for name, matrix in maps.items():
        _check_maps(matrix, f"{_CACHE}.{name}", shape)
    tables = {}
    for kind, statistic in entry["statistic"].items():
        if kind not in KINDS:
            raise TensorError(f"{_CACHE}.{kind}: unknown; legal are {', '.join(KINDS)}")
        coefficients, thresholds = parts[f"{kind}.coefficients"], parts[f"{kind}.thresholds"]
        if coefficients.ndim != 2 or len(coefficients) != shape[0]:
            raise TensorError(
                f"{_CACHE}.{kind}.coefficients: shape {tuple(coefficients.shape)}; legal is ({shape[0]}, C)"
            )
        tables[kind] = Tables.of(coefficients.numpy(), thresholds.numpy(), statistic)
    vectors = (parts[name] for name in _CACHE_VECTORS)
    return CacheTables(entry["group"], entry["sinks"], *vectors, tables=tables, **maps)


def _check_maps(matrix: "torch.Tensor", name: str, shape: tuple[int, ...]) -> None:
    """Refuse what is no map of vectors of *shape* [L, H, d]."""
    import torch

    from kvant.golden.numeric.tensors import check_shape

    check_shape(matrix, name, (*shape, shape[-1]))
    if not bool(matrix.isfinite().all()) or bool((torch.linalg.det(matrix.double()) == 0).any()):
        raise TensorError(f"{name}: legal are finite values that can be inverted")


def _unpack_codebooks(entry: dict, parts: dict[str, "torch.Tensor"]) -> "ModelCodebooks":
    from kvant.golden.numeric.tensors import check_shape
    from kvant.golden.pq.calibration import Kind, ModelCodebooks
    from kvant.golden.pq.codebook import Codebook

    kinds = sorted({name.rpartition(".")[0] for name in parts} - {""})
    for name in ("key_mean", *(f"{kind}.{part}" for kind in kinds for part in ("entries", "scale"))):
        if name not in parts:
            raise TensorError(f"{_PQ}.{name} is missing; without it the cache has no value")
    mean, books, transforms = parts["key_mean"], {}, {}
    if not bool(mean.isfinite().all()):
        raise TensorError(f"{_PQ}.key_mean: legal are finite values")
    for kind in kinds:
        name = f"{_PQ}.{kind}"
        book = Codebook.of(parts[f"{kind}.entries"], parts[f"{kind}.scale"], name)
        partition, wanted = book.partition, Kind.of(kind)
        if (partition.dimensions, partition.nbits) != (wanted.subspace, wanted.nbits):
            raise TensorError(
                f"{name}.entries: {partition.dimensions} dimensions, {partition.nbits} bits; legal is {kind}"
            )
        check_shape(book.scale, f"{name}.scale", tuple(mean.shape[:-1]))
        books[kind] = book
        if (matrix := parts.get(f"{kind}.transform")) is not None:
            _check_maps(matrix, f"{name}.transform", tuple(mean.shape))
            transforms[kind] = matrix
    return ModelCodebooks(entry["sinks"], mean, books, transforms)


def _canonical(value: dict) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _header_digest(header: dict) -> str:
    return hashlib.sha256(_canonical(header).encode()).hexdigest()


def _digest(plane: "torch.Tensor") -> str:
    """SHA-256 of type, shape and bytes of a tensor."""
    state = hashlib.sha256(f"{plane.dtype} {list(plane.shape)}".encode())
    state.update(plane.contiguous().numpy().tobytes())
    return state.hexdigest()
