"""Attention of a decoding model: which caches have an engine in the RTL, what it is built of, and its golden model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvant.errors import InputError
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import BLOCK_GROUPS, CacheParameters, ceil_div
from kvant.hw.numeric.codes import LINEAR
from kvant.hw.pq.parameters import PqParameters

if TYPE_CHECKING:
    from kvant.config import Config
    from kvant.golden.kvcache.formats import CacheSettings
    from kvant.golden.models.config import ModelConfig
    from kvant.golden.models.generate import AttentionBackend

ALIASES = {"mant": "mant_head"}
"""Other names of cache formats: M-ANT as the engine reads it."""

ENGINE_FORMATS = ("mant_head", "int8")
"""Formats of the attention engine; product-quantised ones have a block of their own."""

COMMAND_TOKENS = 4
"""Query tokens of a command in a prefill, where the configuration does not say how many queries it has."""

DECODED_TOKENS = 256
"""Longest history that is read as INT8 rows, where the configuration does not say: about where tables catch up."""

LEAST_WINDOWS = 8
"""Fewest windows that caches are built for, so that short runs share a design."""


@dataclass(frozen=True)
class AttentionPlan:
    """Where a model attends, and with what.

    Attributes
    ----------
    name : str
        The cache format.
    built : str
        What the RTL is built of, in words; empty where attention is the golden model's.
    golden : callable
        Makes the golden model's attention, anew at every call: that of the engine where there is one.
    rtl : callable or None
        Makes that of the RTL; takes the options of `kvant.sim.compiled.model.CompiledModel`.
    mapped : bool
        Keys, queries, values and outputs pass through maps on the host.
    """

    name: str
    built: str
    golden: "Callable[[], AttentionBackend]"
    rtl: "Callable[..., AttentionBackend] | None" = None
    mapped: bool = False


def plan_attention(
    name: str, settings: "CacheSettings", chosen: "Config", shape: "ModelConfig", *, tokens: int, in_rtl: bool = True
) -> AttentionPlan:
    """How a model attends over the cache *name* of up to *tokens* tokens.

    Raises
    ------
    InputError
        An unknown format, one that needs tables that are not there, a capacity below *tokens*.
    ParameterError
        A model or configuration of which no engine can be built.
    """
    from kvant.golden.errors import TensorError
    from kvant.golden.kvcache.formats import CACHE_FORMATS
    from kvant.golden.models.generate import GoldenAttention

    name = ALIASES.get(name, name)
    if name not in CACHE_FORMATS:
        raise InputError(f"--cache {name!r}: legal are {', '.join([*ALIASES, *CACHE_FORMATS])}")
    format_ = CACHE_FORMATS[name]
    try:
        keys, values = format_.stores(settings)
        attention = format_.attention(settings)
    except TensorError as error:
        raise InputError(f"--cache {name}: needs --tables ({error})") from None
    maps = format_.maps(settings)
    if name in ENGINE_FORMATS:
        plan = _engine_plan(name, (keys, values), chosen, shape, tokens, in_rtl)
        return plan if maps is None else _behind_maps(plan, maps)
    if format_.codebooks and format_.integer and keys.codebooks[0].partition == values.codebooks[0].partition:
        plan = _pq_plan(name, (keys, values), chosen, shape, tokens, in_rtl)
        return replace(plan, mapped=any(store.transform is not None for store in (keys, values)))
    return AttentionPlan(name, "", lambda: GoldenAttention(attention), mapped=maps is not None)


def _behind_maps(plan: AttentionPlan, maps) -> AttentionPlan:
    """The same attention behind maps f16 [L, H, d, d] of keys and values, which the host applies."""
    from kvant.golden.models.engines import MappedBackend

    def behind(make):
        return None if make is None else lambda **options: MappedBackend(make(**options), *maps)

    return replace(plan, golden=behind(plan.golden), rtl=behind(plan.rtl), mapped=True)


def _engine_plan(name: str, stores, chosen: "Config", shape: "ModelConfig", tokens: int, in_rtl: bool) -> AttentionPlan:
    from kvant.golden.models.engines import EngineAttention

    p, cache = engine_parameters(chosen, stores, shape, tokens)

    def golden():
        return EngineAttention(*stores, planes=p.weight_planes)

    def rtl(**options):
        from kvant.sim.compiled.attention import CompiledAttention

        return CompiledAttention(*stores, layers=shape.layers, p=p, cache=cache, **options)

    built = (
        f"caches of {shape.kv_heads} KV heads a layer and one engine of {p.rows} x {p.cols} lanes, {p.queries} queries "
        f"a command, capacity {p.tokens}"
    )
    return AttentionPlan(name, built, golden, rtl) if in_rtl else AttentionPlan(name, "", golden)


def _pq_plan(name: str, stores, chosen: "Config", shape: "ModelConfig", tokens: int, in_rtl: bool) -> AttentionPlan:
    from kvant.golden.models.engines import PqEngineAttention

    p = pq_parameters(chosen, stores, shape, tokens)

    def golden():
        return PqEngineAttention(*stores, batch=p.batch_tokens, decode_tokens=p.decode_tokens)

    def rtl(**options):
        from kvant.sim.compiled.pq import CompiledPqAttention

        return CompiledPqAttention(*stores, layers=shape.layers, p=p, **options)

    built = (
        f"a block of {shape.kv_heads} KV heads a layer, {p.lanes} lanes, {p.q_parallel} queries a command, batches of "
        f"{p.batch_tokens}, histories up to {p.decode_tokens} decoded, capacity {p.tokens}"
    )
    return AttentionPlan(name, built, golden, rtl) if in_rtl else AttentionPlan(name, "", golden)


def engine_parameters(
    chosen: "Config", stores, shape: "ModelConfig", tokens: int
) -> tuple[AttentionParameters, CacheParameters]:
    """The engine, and the caches of a layer: the configuration with what model and caches ask for.

    The engine's array is that of the linear path, or the largest one below it that reads a cache. A field that the user
    has set stays as it is.

    Raises
    ------
    InputError
        A capacity below *tokens*.
    ParameterError
        When there is no such engine.
    """
    asked = chosen.attention
    group, sinks = stores[0].group, max(getattr(store, "sinks", 0) for store in stores)
    tables = [entry for store in stores for table in getattr(store, "tables", ()) for entry in table.coefficients]
    largest = max((int(entry) for entry in tables if entry != LINEAR), default=0)
    head_groups = ceil_div(shape.head_dim, group)
    block = min(BLOCK_GROUPS, group * head_groups)
    cols = [n for n in range(1, asked.cols + 1) if block % (n * head_groups) == 0]
    rows = min(asked.rows, asked.port_bits // 8, group)
    grouped = shape.heads // shape.kv_heads
    fields = {
        "group": group,
        "head_dim": shape.head_dim,
        "sinks": sinks,
        "capacity": _capacity(chosen, group, tokens),
        "max_coefficient": max(asked.max_coefficient, largest),
    }
    array = {
        "rows": 1 << (rows.bit_length() - 1),
        "cols": cols[-1] if cols else asked.cols,
        "queries": asked.queries if "queries" in chosen.stated else min(64, COMMAND_TOKENS * grouped),
        "quant_lanes": None,
    }
    p = AttentionParameters(**asked.model_dump() | fields | array).check_attention()
    plain = {"heads": shape.kv_heads, "offset": False, "shared_coeff": False, "evict": False}
    return p, CacheParameters(**chosen.cache.model_dump() | fields | plain).check_cache()


def pq_parameters(chosen: "Config", stores, shape: "ModelConfig", tokens: int) -> PqParameters:
    """The product-quantised block of a layer: the configuration with what model and caches ask for.

    Raises
    ------
    InputError
        A capacity below *tokens*.
    ParameterError
        When there is no such block.
    """
    keys, _ = stores
    partition = keys.codebooks[0].partition
    capacity = _capacity(chosen, keys.group, tokens)
    fields = {
        "head_dim": shape.head_dim,
        "heads": shape.kv_heads,
        "group": keys.group,
        "sinks": keys.sinks,
        "recent": keys.recent,
        "centred": keys.mean is not None,
        "capacity": capacity,
        "subspace": partition.dimensions,
        "nbits": partition.nbits,
    }
    if "q_parallel" not in chosen.stated:
        fields["q_parallel"] = min(64, shape.heads // shape.kv_heads)
    if "decode_tokens" not in chosen.stated:
        fields["decode_tokens"] = min(DECODED_TOKENS, capacity)
    return PqParameters(**chosen.pq.model_dump() | fields).check_pq()


def _capacity(chosen: "Config", group: int, tokens: int) -> int:
    """Tokens of a cache: the configuration's, or a power of two of windows."""
    stated = chosen.cache.capacity if "capacity" in chosen.stated else None
    if stated is None:
        return group * max(LEAST_WINDOWS, 1 << (ceil_div(tokens, group) - 1).bit_length())
    if stated < tokens:
        raise InputError(f"capacity = {stated}: legal is {tokens} or more, the tokens of prompt and answer")
    return stated
