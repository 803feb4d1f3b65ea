"""Arrays that the block `attention` takes, checked against each other and the configuration."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvant import cache_arrays
from kvant.config import Config
from kvant.errors import InputError
from kvant.hw.parameters import ParameterError
from kvant.tensors import ArraySpec, check_arrays, scalar

FORMATS = {"format_k": ("mant", "mant_time", "int8", "pq"), "format_v": ("mant", "int8", "pq")}
"""Formats of keys and of values; "pq" of both or of neither."""

NUMBER_ARRAYS = [*cache_arrays.NUMBER_ARRAYS, ArraySpec("recent", "integer")]
"""Fields of the configuration that may be given as arrays."""

TABLE_ARRAYS = {
    "coeffs_k": ArraySpec("coeffs_k", "uint8", ("Hkv", "C")),
    "thresholds_k": ArraySpec("thresholds_k", "uint16", ("Hkv", "C-1")),
    "coeffs_v": ArraySpec("coeffs_v", "uint8", ("Hkv", "C_v")),
    "thresholds_v": ArraySpec("thresholds_v", "uint16", ("Hkv", "C_v-1")),
    "mean": ArraySpec("mean", "float16", ("Hkv", "d")),
    "floor": ArraySpec("floor", "float16", ("Hkv", "d")),
    "codebook_k": ArraySpec("codebook_k", "int8", ("Hkv", "M", "N", "d/M")),
    "codebook_k_scale": ArraySpec("codebook_k_scale", "float16", ("Hkv", "1")),
    "codebook_v": ArraySpec("codebook_v", "int8", ("Hkv", "M_v", "N_v", "d/M_v")),
    "codebook_v_scale": ArraySpec("codebook_v_scale", "float16", ("Hkv", "1")),
}
"""Optional arrays of a KV head each."""

WITHOUT_EFFECT = {
    "coeffs_k": ("format_k", ("mant", "mant_time")),
    "thresholds_k": ("format_k", ("mant", "mant_time")),
    "coeffs_v": ("format_v", ("mant",)),
    "thresholds_v": ("format_v", ("mant",)),
    "floor": ("format_v", ("mant",)),
    "codebook_k": ("format_k", ("pq",)),
    "codebook_k_scale": ("format_k", ("pq",)),
    "codebook_v": ("format_v", ("pq",)),
    "codebook_v_scale": ("format_v", ("pq",)),
}
"""Of an array the format, and what it has to be for the array to mean something."""


@dataclass(frozen=True)
class Case:
    """A user's tensors, checked.

    Attributes
    ----------
    chosen : Config
    q : f16 [Tq, Hq, d]
    k, v : f16 [Hkv, T, d]
    formats : (str, str)
        Of keys and of values.
    arrays : dict
        Those of `TABLE_ARRAYS` that were given.
    tables : (list, list)
        Of keys and of values the table of every KV head; None where the format has none.
    """

    chosen: Config
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    formats: tuple[str, str]
    arrays: Mapping[str, np.ndarray]
    tables: tuple[list[cache_arrays.Table | None], list[cache_arrays.Table | None]]

    @property
    def heads(self) -> int:
        """KV heads."""
        return len(self.k)

    @property
    def tokens(self) -> int:
        return self.k.shape[1]

    def queries(self) -> np.ndarray:
        """f16 [Hkv, Tq * Hq/Hkv, d]: of every KV head its queries, those of a token together."""
        tokens, heads, d = self.q.shape
        grouped = self.q.reshape(tokens, self.heads, heads // self.heads, d)
        return np.ascontiguousarray(grouped.transpose(1, 0, 2, 3)).reshape(self.heads, -1, d)

    def ends(self) -> np.ndarray:
        """i64 [Tq * Hq/Hkv]: of every query of a KV head the number of keys that it sees."""
        tokens, heads, _ = self.q.shape
        seen = np.maximum(self.tokens - tokens + 1 + np.arange(tokens), 0)
        return np.repeat(seen, heads // self.heads)

    def in_order(self, rows: np.ndarray) -> np.ndarray:
        """[Hkv, Tq * Hq/Hkv, d] as [Tq, Hq, d]: the inverse of `queries`."""
        tokens, heads, d = self.q.shape
        grouped = rows.reshape(self.heads, tokens, heads // self.heads, d)
        return np.ascontiguousarray(grouped.transpose(1, 0, 2, 3)).reshape(tokens, heads, d)

    def head_arrays(self, head: int, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Those of the arrays called *names* that were given, of one head."""
        return {name: self.arrays[name][head] for name in names if name in self.arrays}


def check_case(arrays: dict[str, np.ndarray], path: Path | None, overrides: Iterable[str]) -> Case:
    """The tensors of a user and the configuration that holds for them.

    Raises
    ------
    InputError
        For the first thing that is not legal.
    """
    q_dims = ("Tq", "Hq", "d") if "q" in arrays and arrays["q"].ndim == 3 else ("Hq", "d")
    codebooks = [spec for name, spec in TABLE_ARRAYS.items() if name.startswith("codebook")]
    specs = [
        ArraySpec("k", "float16", ("Hkv", "T", "d"), required=True),
        ArraySpec("v", "float16", ("Hkv", "T", "d"), required=True),
        ArraySpec("q", "float16", q_dims, required=True),
        ArraySpec("format_k", "str", required=True),
        ArraySpec("format_v", "str", required=True),
        *(spec for spec in TABLE_ARRAYS.values() if spec not in codebooks),
        *(_without_length(spec) for spec in codebooks),
        *NUMBER_ARRAYS,
    ]
    for suffix in ("_k", "_v"):
        _check_both(arrays, f"coeffs{suffix}", f"thresholds{suffix}")
        _check_both(arrays, f"codebook{suffix}", f"codebook{suffix}_scale")
    lengths = check_arrays(arrays, specs, group=1)
    formats = _formats(arrays)
    for name, (which, legal) in WITHOUT_EFFECT.items():
        if name in arrays and str(arrays[which]) not in legal:
            raise InputError(f"array {name}: no effect with {which} = {arrays[which]}; legal with {' or '.join(legal)}")
    heads, kv_heads = lengths["Hq"], lengths["Hkv"]
    if heads % kv_heads:
        raise InputError(f"array q: Hq = {heads} query heads; legal are the multiples of Hkv = {kv_heads}")
    chosen = _configuration(arrays, path, overrides, formats, lengths["d"])
    given = {name: arrays[name] for name in TABLE_ARRAYS if name in arrays}
    for name, least in (("mean", None), ("floor", 0)):
        for head, vector in enumerate(given.get(name, ())):
            cache_arrays.check_finite({f"{name}[{head}]": vector}, f"{name}[{head}]", least=least)
    if formats[0] != "pq" and lengths["T"] > chosen.attention.tokens:
        raise InputError(f"array k: {lengths['T']} tokens; legal is 1 to capacity = {chosen.attention.tokens}")
    q = arrays["q"].reshape(-1, heads, lengths["d"])
    tables = tuple(
        _choice_tables(given, chosen, suffix, kv_heads) if kind in ("mant", "mant_time") else [None] * kv_heads
        for suffix, kind in zip(("_k", "_v"), formats, strict=True)
    )
    return Case(chosen, q, arrays["k"], arrays["v"], formats, given, tables)


def _without_length(spec: ArraySpec) -> ArraySpec:
    """Codebooks: the product of sub-spaces and dimensions is checked where they are used."""
    return ArraySpec(spec.name, spec.dtype, tuple(dim.replace("d/M", "D") for dim in spec.dims))


def _check_both(arrays: Mapping[str, np.ndarray], first: str, second: str) -> None:
    for name, other in ((first, second), (second, first)):
        if name in arrays and other not in arrays:
            raise InputError(f"array {name}: given without {other}; legal are both or none")


def _formats(arrays: Mapping[str, np.ndarray]) -> tuple[str, str]:
    """The formats of keys and values, or a refusal."""
    formats = tuple(str(arrays[name]) for name in ("format_k", "format_v"))
    for name, value in zip(("format_k", "format_v"), formats, strict=True):
        if value not in FORMATS[name]:
            raise InputError(f"{name} = {value!r}: legal is one of {', '.join(FORMATS[name])}")
    if (formats[0] == "pq") != (formats[1] == "pq"):
        raise InputError(f"format_v = {formats[1]!r} with format_k = {formats[0]!r}: legal is pq for both or for none")
    return formats


def _configuration(
    arrays: dict[str, np.ndarray], path: Path | None, overrides: Iterable[str], formats: tuple[str, str], head_dim: int
) -> Config:
    """The configuration with what the arrays say of it."""
    more: dict[str, object] = {"head_dim": head_dim}
    if (recent := scalar(arrays, "recent")) is not None:
        more["recent"] = recent
    if "mean" in arrays:
        more["centred"] = True
    if formats[0] == "mant_time":
        more["time_keys"] = True
    chosen = cache_arrays.load(arrays, path, overrides, **more)
    try:
        if formats[0] == "pq":
            chosen.pq.check_pq()
        else:
            chosen.cache.check_cache()
            chosen.attention.check_attention()
    except ParameterError as error:
        raise InputError(str(error)) from None
    return chosen


def _choice_tables(
    arrays: Mapping[str, np.ndarray], chosen: Config, suffix: str, heads: int
) -> list[cache_arrays.Table]:
    """Of every KV head the table of keys ("_k") or values ("_v")."""
    if f"coeffs{suffix}" not in arrays:
        return [cache_arrays.choice_table({}, chosen)] * heads
    tables = []
    for head in range(heads):
        given = {name: arrays[f"{name}{suffix}"][head] for name in ("coeffs", "thresholds")}
        try:
            tables.append(cache_arrays.choice_table(given, chosen))
        except InputError as error:
            raise InputError(f"KV head {head}, arrays coeffs{suffix} and thresholds{suffix}: {error}") from None
    return tables
