"""Attention over product-quantised caches in compiled RTL: the block of every layer, its codes in host memory."""

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch

from kvant.golden.kvcache.attention import by_kv_head, to_port
from kvant.golden.models.engines import check_pq_stores, coded_tokens
from kvant.golden.models.generate import AttentionBackend, Mixed
from kvant.golden.pq.attention import Pq
from kvant.hw.emit import Design
from kvant.hw.pq.attention import PqAttention
from kvant.hw.pq.code_path import code_output
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.query_stage import attend_command
from kvant.hw.pq.ring_layouts import row_input
from kvant.sim.compiled.build import Progress
from kvant.sim.compiled.caches import TABLE_BITS, check_error, span
from kvant.sim.compiled.model import CompiledModel, records
from kvant.sim.compiled.transfers import bits, lanes_of
from kvant.sim.pq.attention import KEYS, VALUES, Tables, batch_words, table_writes
from kvant.sim.pq.layout import codebook_array
from kvant.sim.simulate import cached_design
from kvant.sim.words import struct_word

STORES = (KEYS, VALUES)


@cache
def pq_design(p: PqParameters) -> Design:
    """The block, emitted."""
    return cached_design(lambda: PqAttention(p), "pq", ("pq", p))


class CompiledPq:
    """The product-quantised caches of one layer, and attention over them.

    Rows of the newest tokens and of the sinks are inside; codes are written to memory here and served from it.

    Parameters
    ----------
    p : PqParameters
        With as many heads as the layer has.
    tables : sequence of Tables
        Of every head.
    options
        See `kvant.sim.compiled.model.CompiledModel`.
    """

    def __init__(self, p: PqParameters, tables: Sequence[Tables], **options):
        self.p, self.tokens = p, 0
        self.model = CompiledModel(pq_design(p), **options)
        self.model.discard("scores")
        self._books = [[codebook_array(p, table.entries[store]) for store in STORES] for table in tables]
        self._codes = np.zeros((p.heads, len(STORES), batch_words(p, p.tokens), p.port_bytes), np.uint8)
        self._user = {name: (field.offset, field.width) for name, field in code_output(p)["user"].shape}
        self._row_user = row_input(p)["user"].shape
        self._command = attend_command(p)
        self.model.send("cfg", {"data": records(table_writes(dict(enumerate(tables))), TABLE_BITS)})
        self.model.run()

    def close(self) -> None:
        """Free the model."""
        self.model.close()

    def _coded(self, tokens: int) -> int:
        p = self.p
        return coded_tokens(tokens, sinks=p.sinks, recent=p.recent, batch=p.batch_tokens)

    def append(self, k: np.ndarray, v: np.ndarray) -> tuple[int, int]:
        """Take a key and a value f16 [H, d] of one token; returns cycles and bytes of codebooks and codes."""
        p, model = self.p, self.model
        rows = np.stack((k, v), 1)  # [H, store, d]
        users = [
            struct_word(self._row_user, {"start": int(not self.tokens), "store": store, "head": head})
            for head in range(p.heads)
            for store in STORES
        ]
        model.send(
            "x",
            {
                "data": lanes_of(rows.reshape(-1, p.head_dim), p.lanes),
                "user": np.ascontiguousarray(records(users, self._row_user.size).repeat(p.row_transfers, 0)),
            },
        )
        before, self.tokens = self._coded(self.tokens), self.tokens + 1
        batch = self._coded(self.tokens) - before
        moved = 0
        codes = None
        if batch:
            for head in range(p.heads):
                for book in self._books[head]:
                    model.send("encode_codebook", {"data": book})
                    moved += book.size
            codes = model.receive("codes", p.heads * len(STORES) * batch_words(p, batch))
        cycles = span(model.run())
        if codes is not None:
            user = {name: bits(codes["user"], *place) for name, place in self._user.items()}
            self._codes[user["head"], user["store"], user["address"]] = codes["data"]
            moved += codes["data"].size
        return cycles, moved

    def attend(self, queries: np.ndarray) -> tuple[np.ndarray, int, int]:
        """Queries f16 [H, B, d] of the newest token; returns outputs f32 [H, B, d], cycles and bytes read."""
        p, model = self.p, self.model
        history = self._coded(self.tokens)
        decode = 0 < history <= p.decode_tokens
        outputs, moved = [], 0
        for head in range(p.heads):
            codes = [self._codes[head, store, : batch_words(p, history)] for store in STORES]
            for first in range(0, queries.shape[1], p.q_parallel):
                part = queries[head, first : first + p.q_parallel]
                fields = {"history": history, "count": len(part), "head": head, "values": 1, "decode": int(decode)}
                model.send("cmd", {"data": records([struct_word(self._command, fields)], self._command.size)})
                model.send("q", {"data": lanes_of(part, p.lanes)})
                if history:
                    for name, book, words_ in zip(("codebook_k", "codebook_v"), self._books[head], codes, strict=True):
                        model.send(name, {"data": book})
                        model.send("history", {"data": words_})
                        moved += book.size + words_.size
                outputs.append(model.receive("out", part.size)["data"])
        cycles = span(model.run())
        check_error(model, "the product-quantised block")
        return np.concatenate(outputs).view(np.float32).reshape(queries.shape), cycles, moved


class CompiledPqAttention(AttentionBackend):
    """Attention of a model over product-quantised caches, in the RTL.

    Every layer has a block of its own. Maps of keys, values, queries and outputs are applied here, as the golden model
    does it. Rows enter token by token, for a query meets the newest rows as INT8.

    Parameters
    ----------
    keys, values : Pq
        The caches, see `kvant.golden.models.engines.PqEngineAttention`.
    layers : int
    p : PqParameters
        Of the KV heads of a layer.
    stall, seed, threads, progress
        See `kvant.sim.compiled.model.CompiledModel`.

    Raises
    ------
    TensorError
        Caches that the block does not hold.
    ParameterError
        Parameters of which no block can be built.
    """

    where = "RTL"

    def __init__(
        self,
        keys: Pq,
        values: Pq,
        *,
        layers: int,
        p: PqParameters,
        stall: float | Mapping[str, float] = 0.0,
        seed: int = 0,
        threads: int = 1,
        progress: Progress | None = None,
    ):
        check_pq_stores(keys, values)
        self._stores = keys, values
        self._blocks: list[CompiledPq] = []
        options = {"stall": stall, "seed": seed, "threads": threads, "progress": progress}
        try:
            for layer in range(layers):
                self._blocks.append(CompiledPq(p, self._tables(p, layer), **options))
        except BaseException:
            self.close()
            raise

    def _tables(self, p: PqParameters, layer: int) -> list[Tables]:
        books = [store.codebooks[layer].match((p.heads,), "codebooks") for store in self._stores]
        mean = None if self._stores[0].mean is None else self._stores[0].mean[layer].numpy()
        return [
            Tables(
                tuple(book.at(head).entries.numpy() for book in books),
                tuple(book.at(head).scale.numpy() for book in books),
                None if mean is None else mean[head],
            )
            for head in range(p.heads)
        ]

    def close(self) -> None:
        """Free all models."""
        for block in self._blocks:
            block.close()

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Mixed:
        block = self._blocks[layer]
        rows = [store.enter(layer, x).numpy() for store, x in zip(self._stores, (keys, values), strict=True)]
        q = to_port(self._stores[0].meet(layer, by_kv_head(queries, len(keys)))).numpy()  # [Hkv, R, n, d]
        mixed = np.zeros(q.shape, np.float32)
        cycles = moved = 0
        for token in range(q.shape[2]):
            taken = block.append(*(x[:, token] for x in rows))
            mixed[:, :, token], *answered = block.attend(np.ascontiguousarray(q[:, :, token]))
            cycles, moved = cycles + taken[0] + answered[0], moved + taken[1] + answered[1]
        out = self._stores[1].leave(layer, torch.from_numpy(mixed))
        return Mixed(out.reshape(queries.shape), cycles, moved)
