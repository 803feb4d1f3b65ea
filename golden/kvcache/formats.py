"""Cache formats by name: what `kvant eval` compares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from kvant.golden.errors import TensorError
from kvant.golden.formats import baselines
from kvant.golden.formats.base import GroupFormat
from kvant.golden.formats.bitmod import BITMOD
from kvant.golden.formats.mant_groups import MANT_GROUPS
from kvant.golden.formats.mokey import MOKEY
from kvant.golden.formats.olive import OLIVE
from kvant.golden.kvcache.attention import CachedAttention, Exact, Footprint, Int8Head, MantHead, MantTime, Store
from kvant.golden.kvcache.baselines import GroupedStore
from kvant.golden.kvcache.calibration import KINDS, CacheTables
from kvant.golden.kvcache.integer import IntegerAttention
from kvant.golden.kvcache.kvquant import KeyLevels, TokenLevels
from kvant.golden.kvcache.maps import MAP_BITS, MappedAttention
from kvant.golden.kvcache.static_integer import StaticInteger
from kvant.golden.numeric.tensors import group_count
from kvant.golden.pq.attention import FloatPqAttention, Pq, PqAttention
from kvant.golden.pq.calibration import Kind, ModelCodebooks


@dataclass(frozen=True)
class CacheSettings:
    """What all formats of a comparison have in common.

    Parameters
    ----------
    group : int
        G, and the tokens of a window along time.
    sinks : int
        First tokens, which stay INT8 (in fp32, fp16 and int8 caches they are nothing special).
    prefill : int or None
        Tokens of the first call, which fix the INT8 scales of caches along time beside their floors; None: all.
    tables : CacheTables, optional
        For the formats that need calibration.
    recent : int
        Newest tokens that product-quantised caches keep INT8.
    codebooks : ModelCodebooks, optional
        For the product-quantised formats.
    """

    group: int = 64
    sinks: int = 4
    prefill: int | None = 1
    tables: CacheTables | None = None
    recent: int = 64
    codebooks: ModelCodebooks | None = None

    @classmethod
    def of(
        cls,
        tables: CacheTables | None,
        codebooks: ModelCodebooks | None,
        *,
        group: int | None = None,
        sinks: int | None = None,
        **options,
    ) -> Self:
        """Settings whose *group* and *sinks*, where not given, are those of the tables or codebooks."""
        group = group or (tables.group if tables else cls.group)
        sinks = sinks if sinks is not None else getattr(tables or codebooks, "sinks", cls.sinks)
        return cls(group=group, sinks=sinks, tables=tables, codebooks=codebooks, **options)

    def calibrated(self) -> CacheTables:
        """The tables.

        Raises
        ------
        TensorError
            There are none, or they are of another group.
        """
        if self.tables is None:
            raise TensorError("tables: missing; M-ANT caches need those of `kvant quantize --calibrate`")
        if self.tables.group != self.group:
            raise TensorError(f"group = {self.group}: the tables were fitted for {self.tables.group}")
        return self.tables

    def trained(self, kinds: Sequence[str]) -> ModelCodebooks:
        """The codebooks, with these kinds among them.

        Raises
        ------
        TensorError
            There are none, or not all of them.
        """
        if self.codebooks is None:
            raise TensorError("codebooks: missing; product-quantised caches need those of `kvant quantize --codebooks`")
        for kind in kinds:
            self.codebooks.layers(kind)
        return self.codebooks


Pair = tuple[Store, Store]
"""Stores of keys and of values."""


@dataclass(frozen=True)
class CacheFormat:
    """A way to cache keys and values.

    Parameters
    ----------
    name : str
    description : str
    stores : callable
        Makes the stores from the settings.
    calibrated : bool
        Needs tables.
    integer : bool
        Attention runs in the integer chain, else in float32 over the values that the cache holds.
    codebooks : tuple of str
        Kinds of codebooks needed. Where keys or values are product-quantised, attention is theirs.
    mapped : bool
        Only behind the maps of the tables. (A calibrated format is behind them whenever there are any.)
    """

    name: str
    description: str
    stores: Callable[[CacheSettings], Pair]
    calibrated: bool = False
    integer: bool = False
    codebooks: tuple[str, ...] = ()
    mapped: bool = False

    def maps(self, settings: CacheSettings) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Maps f16 [L, H, d, d] of keys and of values ahead of the stores, where these do not have their own.

        Raises
        ------
        TensorError
            There are none, and the format is nothing without.
        """
        if not self.calibrated:
            return None
        tables = settings.calibrated()
        if tables.key_map is not None:
            return tables.key_map, tables.value_map
        if self.mapped:
            raise TensorError("maps: missing in the tables; `kvant quantize --calibrate` makes them, unless --no-maps")
        return None

    def attention(self, settings: CacheSettings) -> CachedAttention | IntegerAttention | PqAttention | FloatPqAttention:
        """The attention strategy of a model with this cache."""
        keys, values = self.stores(settings)
        if isinstance(keys, Pq) or isinstance(values, Pq):
            return PqAttention(keys, values) if self.integer else FloatPqAttention(keys, values)
        attention = IntegerAttention(keys, values) if self.integer else CachedAttention(keys, values)
        maps = self.maps(settings)
        return attention if maps is None else MappedAttention(attention, *maps)

    def footprint(self, settings: CacheSettings, head_dim: int) -> tuple[Footprint, Footprint]:
        """What keys and values take."""
        found = tuple(store.footprint(head_dim) for store in self.stores(settings))
        if self.maps(settings) is not None:
            found = tuple(replace(each, sequence=each.sequence + MAP_BITS * head_dim) for each in found)
        return found


def mant_store(settings: CacheSettings, kind: str) -> Store:
    """The M-ANT store of a kind, see `kvant.golden.kvcache.calibration.KINDS`."""
    tables, options = settings.calibrated(), KINDS[kind]
    mean = tables.key_mean if options.rows == "keys" else None
    if not options.along_time:
        return MantHead(settings.group, tables.layers(kind), mean, settings.sinks)
    return MantTime(
        settings.group,
        tables.layers(kind),
        mean,
        tables.key_floor if options.rows == "keys" else tables.value_floor,
        settings.sinks,
        options.offset,
        options.shared_coefficient,
        settings.prefill,
    )


def _mant(name: str, description: str, keys: str, values: str, *, integer: bool = False) -> CacheFormat:
    def stores(settings: CacheSettings) -> Pair:
        return mant_store(settings, keys), mant_store(settings, values)

    return CacheFormat(name, description, stores, calibrated=True, integer=integer)


def pq_store(books: ModelCodebooks, kind: str, group: int, sinks: int, recent: int) -> Pq:
    """The product-quantised store of a kind, behind its map if it has one."""
    return Pq(
        books.layers(kind),
        group,
        books.mean(kind),
        sinks,
        recent,
        books.transforms.get(kind),
        Kind.of(kind).sharing(*books.key_mean.shape[:2]),
    )


def _pq(name: str, description: str, keys: str, values: str, *, integer: bool = True) -> CacheFormat:
    def stores(settings: CacheSettings) -> Pair:
        books = settings.trained((keys, values))
        options = settings.group, settings.sinks, settings.recent
        return tuple(pq_store(books, kind, *options) for kind in (keys, values))

    return CacheFormat(name, description, stores, integer=integer, codebooks=(keys, values))


def _behind_maps(format_: CacheFormat) -> CacheFormat:
    """A format that needs no tables behind the maps of M-ANT's."""
    description = f"{format_.description}; behind the maps of the tables"
    return replace(format_, name=f"{format_.name}_mapped", description=description, calibrated=True, mapped=True)


def _along_head(format_: GroupFormat) -> CacheFormat:
    def stores(settings: CacheSettings) -> Pair:
        store = GroupedStore(format_, settings.group, False, Int8Head(settings.group), settings.sinks)
        return store, store

    return CacheFormat(format_.name, f"{format_.name}, groups along the head", stores)


def _time_store(format_: GroupFormat, settings: CacheSettings) -> GroupedStore:
    size = format_.group_size(settings.group)
    window = group_count(settings.group, size) * size  # whole groups, also of a format with a size of its own
    return GroupedStore(format_, settings.group, True, Int8Head(settings.group), settings.sinks, window)


def _along_time(format_: GroupFormat, description: str | None = None) -> CacheFormat:
    def stores(settings: CacheSettings) -> Pair:
        store = _time_store(format_, settings)
        return store, store

    return CacheFormat(f"{format_.name}_time", description or f"{format_.name}, groups along time, window INT8", stores)


def _kivi(name: str, format_: GroupFormat) -> CacheFormat:
    def stores(settings: CacheSettings) -> Pair:
        keys = replace(_time_store(format_, settings), fresh=Exact(16))
        return keys, replace(keys, along_time=False)

    bits = format_.code_bits
    description = f"asymmetric INT{bits}, keys along time, values along the head, window fp16"
    return CacheFormat(name, description, stores)


def _static(bits: int, per_channel: bool) -> CacheFormat:
    def stores(settings: CacheSettings) -> Pair:
        tables = settings.calibrated()
        # floors of keys are those of centred keys; these are not centred
        peaks = tables.key_mean.float().abs() + tables.key_floor.float(), tables.value_floor.float()
        fresh = Int8Head(settings.group)
        return tuple(StaticInteger(bits, peak, per_channel, fresh, settings.sinks) for peak in peaks)

    name, what = ("channel", "channel of a head") if per_channel else ("tensor", "layer")
    return CacheFormat(f"int{bits}_{name}", f"INT{bits}, a calibrated scale per {what}", stores, calibrated=True)


def _kvquant(name: str, description: str, outliers: float) -> CacheFormat:
    kind = "key_1x4"

    def stores(settings: CacheSettings) -> Pair:
        books = settings.trained((kind,))
        if kind in books.transforms:
            raise TensorError(f"codebooks {kind!r}: trained behind a map; {name} needs those of --no-maps")
        heads = books.key_mean.shape[1]
        keys = KeyLevels(pq_store(books, kind, settings.group, settings.sinks, 0), heads, outliers)
        return keys, TokenLevels(Int8Head(settings.group), heads, settings.sinks, outliers)

    return CacheFormat(name, description, stores, codebooks=(kind,))


CACHE_FORMATS: dict[str, CacheFormat] = {
    f.name: f
    for f in (
        CacheFormat("fp32", "nothing quantised", lambda _: (Exact(), Exact())),
        CacheFormat("fp16", "keys and values in fp16", lambda _: (Exact(16), Exact(16))),
        CacheFormat("int8", "INT8 groups along the head", lambda s: (Int8Head(s.group), Int8Head(s.group))),
        *(
            _along_head(format_)
            for format_ in (
                baselines.INT4,
                baselines.INT4_ASYMMETRIC,
                baselines.INT8_ASYMMETRIC,
                baselines.NF4,
                baselines.ANT,
                baselines.POT4,
                baselines.FLINT4,
                OLIVE,
                MOKEY,
                BITMOD,
                baselines.MXFP4,
                baselines.NVFP4,
                MANT_GROUPS,
            )
        ),
        *(_along_time(f) for f in (baselines.INT8, baselines.INT8_ASYMMETRIC, baselines.INT4)),
        _along_time(baselines.INT4_ASYMMETRIC, "asymmetric INT4 along time, window INT8"),
        *(_along_time(f) for f in (baselines.NF4, baselines.ANT, OLIVE, MOKEY, BITMOD, baselines.MXFP4, MANT_GROUPS)),
        *(_static(bits, per_channel) for bits in (8, 4) for per_channel in (True, False)),
        _kivi("kivi", baselines.INT4_ASYMMETRIC),
        _kivi("kivi2", baselines.INT2_ASYMMETRIC),
        _kvquant("kvquant", "KVQuant, levels per channel of keys, NF4 per token of values", 0.0),
        _kvquant("kvquant_outliers", "the same, 1 % of a token's elements in fp16", 0.01),
        _mant("mant_head", "M-ANT, keys along the head, values along time", "key_head", "value_time"),
        _mant("mant_time", "M-ANT along time, keys with offset and one coefficient", "key_time", "value_time"),
        _mant("mant_time_offset", "the same options for values too", "key_time", "value_time_offset"),
        _mant("mant_time_integer", "mant_time in integers", "key_time", "value_time", integer=True),
        _pq("pq4", "product-quantised, 2 dimensions x 8 bits", "key_2x8", "value_2x8"),
        _pq("pq4_2", "product-quantised, keys 2 x 8 bits, values 4 x 8", "key_2x8", "value_4x8"),
        _pq("pq2", "product-quantised, 4 dimensions x 8 bits", "key_4x8", "value_4x8"),
        _pq("pq4_layer", "pq4, one codebook per layer", "key_2x8_layer", "value_2x8_layer"),
        _pq("pq4_model", "pq4, one codebook of keys and one of values", "key_2x8_model", "value_2x8_model"),
        _pq("pq4_float", "pq4 with a float32 softmax", "key_2x8", "value_2x8", integer=False),
        _pq("pq4_2_float", "pq4_2 with a float32 softmax", "key_2x8", "value_4x8", integer=False),
        _pq("pq2_float", "pq2 with a float32 softmax", "key_4x8", "value_4x8", integer=False),
    )
}
"""All cache formats, the reference's own first."""

CACHE_FORMATS |= {
    f"{name}_mapped": _behind_maps(CACHE_FORMATS[name])
    for name in ("int8", "int4_asymmetric", "nf4", "int4_asymmetric_time", "kivi")
}
