"""Attention over M-ANT and INT8 caches in compiled RTL: caches of every layer, one engine that reads them."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvant.golden.kvcache.attention import Int8Head, MantHead, MantTime, by_kv_head, to_port
from kvant.golden.models.engines import check_engine_stores
from kvant.golden.models.generate import AttentionBackend, Mixed
from kvant.hw.attention.engine import AttentionEngine, attention_command, query_port
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import CacheParameters, ceil_div
from kvant.sim.attention.contents import Contents, Int8Rows, key_bytes, value_bytes, value_rows
from kvant.sim.attention.engine import KEY_FORMATS
from kvant.sim.compiled.build import Progress
from kvant.sim.compiled.caches import CompiledKeys, CompiledRows, CompiledValues, check_error, span
from kvant.sim.compiled.model import CompiledModel, records
from kvant.sim.compiled.transfers import lanes_of, numbers, words
from kvant.sim.errors import SimulationError
from kvant.sim.kvcache.spatial import KeyTables
from kvant.sim.simulate import cached_design
from kvant.sim.words import struct_word


class CompiledEngine:
    """The attention engine, compiled.

    Parameters
    ----------
    p : AttentionParameters
    options
        See `kvant.sim.compiled.model.CompiledModel`.
    """

    def __init__(self, p: AttentionParameters, **options):
        self.p = p.check_attention()
        design = cached_design(lambda: AttentionEngine(p), "attention", ("attention", p))
        self.model = CompiledModel(design, **options)
        self._command_bits = attention_command(p).size
        self._limit_bits = query_port(p)["user"].shape.size

    def close(self) -> None:
        """Free the model."""
        self.model.close()

    def attend(
        self, contents: Sequence[Contents], queries: np.ndarray, ends: Sequence[int]
    ) -> tuple[np.ndarray, int, int]:
        """Queries of all heads over their caches, in commands of up to `AttentionParameters.queries`.

        Parameters
        ----------
        contents : sequence of Contents
            Of H heads.
        queries : f16 [H, B, d]
        ends : sequence of int
            Query b sees the keys ``t < ends[b]``.

        Returns
        -------
        tuple
            Outputs f32 [H, B, d], cycles, bytes read from the caches.
        """
        p, model, moved = self.p, self.model, 0
        outputs = []
        for head, held in enumerate(contents):
            keys, values = (words(text, p.port_bits // 8) for text in (key_bytes(p, held), value_bytes(held)))
            rows = self._rows(held)
            for first in range(0, queries.shape[1], p.queries):
                part = queries[head, first : first + p.queries]
                model.send("cmd", {"data": self._command(held, len(part), head)})
                model.send("q", self._queries(part, ends[first : first + len(part)]))
                model.send("keys", {"data": keys})
                model.send("values", {"data": values})
                model.send("rows", rows)
                outputs.append(model.receive("out", part.size))
                moved += keys.size + values.size + self._row_bytes(held)
        counts = model.run()
        check_error(model, "the attention engine")
        for fields in outputs:
            last = fields["last"].reshape(-1, p.head_dim)
            if (last != (np.arange(p.head_dim) == p.head_dim - 1)).any():
                raise SimulationError("stream out: queries are mixed up")
        out = np.concatenate([fields["data"] for fields in outputs]).view(np.float32).reshape(queries.shape)
        return out, span(counts), moved

    def _command(self, held: Contents, queries: int, head: int) -> np.ndarray:
        fields = {
            "queries": queries,
            "tokens": held.tokens,
            "sinks": held.sinks,
            "key_format": KEY_FORMATS[type(held.keys)].value,
            "int8_values": int(isinstance(held.values, Int8Rows)),
            "head": head,
        }
        return records([struct_word(attention_command(self.p), fields)], self._command_bits)

    def _queries(self, queries: np.ndarray, ends: Sequence[int]) -> dict[str, np.ndarray]:
        """Transfers of queries f16 [n, d] that see the keys from 0 to their ends."""
        p = self.p
        data = lanes_of(queries, p.x_lanes)
        size = self.model.record_bytes("q")
        layout = query_port(p)["user"].shape
        limits = [struct_word(layout, {"first": 0, "end": int(end), "slope": 0}) for end in ends]
        users = records(limits, self._limit_bits).repeat(ceil_div(p.head_dim, p.x_lanes), 0)
        data = np.ascontiguousarray(np.pad(data, ((0, 0), (0, size - data.shape[1]))))
        return {"data": data, "user": np.ascontiguousarray(users)}

    def _rows(self, held: Contents) -> dict[str, np.ndarray]:
        """Transfers of the INT8 rows of values."""
        p = self.p
        elements, scales = value_rows(p, held)
        last = np.tile(np.arange(p.row_transfers) == p.row_transfers - 1, len(elements))
        return {
            "data": lanes_of(np.ascontiguousarray(elements), p.lanes),
            "user": lanes_of(np.ascontiguousarray(scales), p.lanes),
            "last": numbers(last, 1),
        }

    def _row_bytes(self, held: Contents) -> int:
        """Bytes of INT8 rows of values in memory: elements, scales of groups, or those of the channels once."""
        values, p = held.values, self.p
        grouped = values if isinstance(values, Int8Rows) else values.sinks
        size = grouped.q.size + 2 * grouped.scale.size
        return size if isinstance(values, Int8Rows) else size + values.staged.size + 2 * p.head_dim


class CompiledAttention(AttentionBackend):
    """Attention of a model over M-ANT and INT8 caches, in the RTL.

    Every layer has caches of its own, each with all KV heads of the layer: so the designs are as small as a layer,
    whatever the model's depth, and compiled once. One engine, which keeps nothing between commands, serves all layers.

    Parameters
    ----------
    keys, values : MantHead or Int8Head, MantTime or Int8Head
        The caches, see `kvant.golden.models.engines.EngineAttention`.
    layers : int
    p : AttentionParameters
    cache : CacheParameters
        Of the KV heads of a layer.
    stall, seed, threads, progress
        See `kvant.sim.compiled.model.CompiledModel`.

    Raises
    ------
    TensorError
        Caches that the engine does not read.
    ParameterError
        Parameters of which no engine or cache can be built.
    """

    where = "RTL"

    def __init__(
        self,
        keys: MantHead | Int8Head,
        values: MantTime | Int8Head,
        *,
        layers: int,
        p: AttentionParameters,
        cache: CacheParameters,
        stall: float | Mapping[str, float] = 0.0,
        seed: int = 0,
        threads: int = 1,
        progress: Progress | None = None,
    ):
        check_engine_stores(keys, values)
        options = {"stall": stall, "seed": seed, "progress": progress}
        self._engine = CompiledEngine(p, threads=threads, **options)
        self._tokens = [0] * layers
        self._caches = []
        try:
            for layer in range(layers):
                self._caches.append((_key_cache(cache, keys, layer, options), None))
                self._caches[-1] = (self._caches[-1][0], _value_cache(cache, values, layer, options))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free all models."""
        self._engine.close()
        for pair in self._caches:
            for cache in pair:
                if cache is not None:
                    cache.close()

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Mixed:
        pair, known = self._caches[layer], self._tokens[layer]
        appended = [cache.append(to_port(x).numpy()) for cache, x in zip(pair, (keys, values), strict=True)]
        heads, count = keys.shape[:2]
        self._tokens[layer] = tokens = known + count
        contents = [Contents(tokens, *(cache.contents(head) for cache in pair)) for head in range(heads)]
        # The query heads of a token go together: a command has whole tokens where it can.
        grouped = by_kv_head(to_port(queries), heads).transpose(1, 2)  # [Hkv, n, R, d]
        ends = np.repeat(known + 1 + np.arange(count), grouped.shape[2])
        out, cycles, moved = self._engine.attend(contents, grouped.flatten(1, 2).numpy(), ends)
        mixed = torch.from_numpy(out).reshape(grouped.shape).transpose(1, 2).reshape(queries.shape)
        return Mixed(mixed, cycles + sum(one.cycles for one in appended), moved + sum(one.written for one in appended))


def _key_cache(
    p: CacheParameters, store: MantHead | Int8Head, layer: int, options: dict
) -> CompiledKeys | CompiledRows:
    if isinstance(store, Int8Head):
        return CompiledRows(p, **options)
    table = store.tables[layer]
    pair = table.coefficients.tolist(), table.thresholds.tolist()
    means = [None] * p.heads if store.mean is None else list(store.mean[layer].numpy())
    p = p.model_copy(update={"centred": store.mean is not None, "statistic": table.statistic})
    return CompiledKeys(p, [KeyTables(*pair, mean) for mean in means], **options)


def _value_cache(
    p: CacheParameters, store: MantTime | Int8Head, layer: int, options: dict
) -> CompiledValues | CompiledRows:
    if isinstance(store, Int8Head):
        return CompiledRows(p, **options)
    table = store.tables[layer]
    tables = {"coeffs": table.coefficients.numpy(), "thresholds": table.thresholds.numpy()}
    floors = [{}] * p.heads if store.floor is None else [{"floor": floor} for floor in store.floor[layer].numpy()]
    p = p.model_copy(update={"centred": False, "statistic": table.statistic})
    return CompiledValues(p, [tables | floor for floor in floors], **options)
