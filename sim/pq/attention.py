"""Product-quantised attention in a simulator: rows and queries in; codes, scores and outputs out.

The bench is the memory: the codes that a query batch reads are the words that the design wrote before.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvant.hw.kvcache.layouts import Table
from kvant.hw.pq.attention import PqAttention
from kvant.hw.pq.code_path import code_output
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.pq.query_stage import attend_command
from kvant.hw.pq.ring_layouts import row_input
from kvant.sim.kvcache.tables import channel_writes, table_write
from kvant.sim.pq.layout import code_words, codebook_words, frames_of, read_codes
from kvant.sim.simulate import simulate
from kvant.sim.streams import Stimulus, Trace
from kvant.sim.words import pack_words, struct_word, unpack_words

KEYS, VALUES = 0, 1
"""Stores of a head."""

STATUS = ("nonfinite", "error", "full", "busy", "busy_cycles")


@dataclass(frozen=True)
class Row:
    """A key or a value at the port."""

    values: np.ndarray  # f16 [d]
    store: int
    head: int = 0
    start: bool = False
    flush: bool = False


@dataclass(frozen=True)
class Tables:
    """Codebooks of a head by store, i8 [M, 2^nbits, d/M] with an f16 scale; f16 [d] mean where keys are centred."""

    entries: tuple[np.ndarray, np.ndarray]
    scales: tuple[np.float16, np.float16]
    mean: np.ndarray | None = None


@dataclass(frozen=True)
class Attend:
    """A batch of queries, f16 [n, d], of one head; `history` tokens are read from memory. `values`: mix them, too.

    `decode`: read the history as INT8 rows, without scores.
    """

    queries: np.ndarray
    history: int
    head: int = 0
    values: bool = True
    decode: bool = False


@dataclass(frozen=True)
class Batch:
    """Rows that are coded together: the history index of the first, and how many."""

    store: int
    head: int
    first: int
    count: int


def sequence(k: np.ndarray, v: np.ndarray | None, *, head: int = 0) -> list[Row]:
    """The rows of a sequence k, v f16 [T, d], in turn; all but the recent ones are coded after the last."""
    stores = [k] if v is None else [k, v]
    ends = {"start": 0, "flush": len(k) - 1}
    return [
        Row(x[t], store, head, **{name: t == end for name, end in ends.items()})
        for t in range(len(k))
        for store, x in enumerate(stores)
    ]


def history_of(p: PqParameters, tokens: int) -> int:
    """Coded tokens of a sequence of *tokens* after a flush."""
    return max(0, tokens - p.sinks - p.recent)


def batches(p: PqParameters, rows: Iterable[Row]) -> list[Batch]:
    """What is coded, in the order in which it is."""
    tokens: dict[tuple[int, int], int] = {}
    begun: dict[tuple[int, int], int] = {}
    done = []
    for row in rows:
        place = row.head, row.store
        if row.start:
            tokens[place] = begun[place] = 0
        tokens[place] += 1
        ready = history_of(p, tokens[place])
        while ready - begun[place] >= p.batch_tokens:
            done.append(Batch(row.store, row.head, begun[place], p.batch_tokens))
            begun[place] += p.batch_tokens
        if row.flush and ready > begun[place]:
            done.append(Batch(row.store, row.head, begun[place], ready - begun[place]))
            begun[place] = ready - ready % p.chunk_tokens
    return done


def batch_words(p: PqParameters, count: int) -> int:
    """Words of the port that the codes of *count* tokens take."""
    return -(-frames_of(p, count) * p.frame_bits // p.port_bits)


def row_words(p: PqParameters, rows: Sequence[Row]) -> dict[str, list[int]]:
    """Transfers of `x`. Lanes past a row's end, and `user` after a row's first transfer, hold what must not count."""
    fill = -p.head_dim % p.lanes
    elements = np.stack([np.asarray(row.values, np.float16) for row in rows]).view(np.uint16)
    elements = np.pad(elements, ((0, 0), (0, fill)), constant_values=0x7E00).reshape(-1, p.lanes)
    user_layout = row_input(p)["user"].shape
    users = []
    for row in rows:
        user = {"start": int(row.start), "flush": int(row.flush), "store": row.store, "head": row.head}
        word = struct_word(user_layout, user)
        users += [word] + [word ^ ((1 << user_layout.size) - 1)] * (p.row_transfers - 1)
    return {"data": pack_words(elements, 16), "user": users}


def query_words(p: PqParameters, queries: np.ndarray) -> list[int]:
    """Transfers of `q` for queries f16 [n, d]."""
    elements = np.ascontiguousarray(queries, np.float16).view(np.uint16)
    elements = np.pad(elements, ((0, 0), (0, -p.head_dim % p.lanes)), constant_values=0x7E00)
    return pack_words(elements.reshape(-1, p.lanes), 16)


def table_writes(tables: Mapping[int, Tables]) -> list[int]:
    """Transfers of `cfg`."""
    writes = []
    for head, table in tables.items():
        bits = np.array(table.scales, np.float16).view(np.uint16).tolist()
        for kind, value in zip((Table.CODEBOOK_K, Table.CODEBOOK_V), bits, strict=True):
            writes.append(table_write(kind, head, 0, value))
        if table.mean is not None:
            writes += channel_writes(Table.MEAN, head, table.mean)
    return writes


def stimulus(
    p: PqParameters,
    rows: Sequence[Row],
    attends: Sequence[Attend],
    tables: Mapping[int, Tables],
    *,
    codes: Sequence[np.ndarray] | None = None,
) -> Stimulus:
    """Tables, then rows, then queries.

    Parameters
    ----------
    p : PqParameters
    rows, attends
    tables : dict
        Of each head.
    codes : sequence of u8 [count, M], optional
        Codes of the `batches`: they are then played to the queries, instead of the words that the design writes.
    """
    books = {
        (head, store): codebook_words(p, table.entries[store]) for head, table in tables.items() for store in (0, 1)
    }
    coded = batches(p, rows)
    memory, number, words = {}, 0, []
    for index, batch in enumerate(coded):
        base = batch.first // p.chunk_tokens * p.chunk_words
        for k in range(batch_words(p, batch.count)):
            memory[batch.head, batch.store, base + k] = number
            number += 1
        if codes is not None:
            words += code_words(p, codes[index])
    codebooks, reads = ([], []), []
    for attend in attends:
        if attend.history:
            for store in (KEYS, VALUES) if attend.values else (KEYS,):
                codebooks[store].extend(books[attend.head, store])
                reads += [memory[attend.head, store, k] for k in range(batch_words(p, attend.history))]
    inputs = {
        "cfg": {"data": table_writes(tables)},
        "x": row_words(p, rows),
        "encode_codebook": {"data": [word for batch in coded for word in books[batch.head, batch.store]]},
        "cmd": {"data": [_command(p, attend) for attend in attends]},
        "q": {"data": [word for attend in attends for word in query_words(p, attend.queries)]},
        "codebook_k": {"data": codebooks[KEYS]},
        "codebook_v": {"data": codebooks[VALUES]},
    }
    echo = {"history": ("codes", reads)}
    if codes is not None:
        inputs["history"], echo = {"data": [words[k] for k in reads]}, {}
    outputs = sum(len(attend.queries) for attend in attends if attend.values)
    return Stimulus(
        inputs=inputs,
        expect={
            "codes": number,
            "scores": sum(frames_of(p, attend.history) for attend in attends if not attend.decode),
            "out": outputs * p.head_dim,
        },
        status=STATUS,
        after={"x": ("cfg", len(inputs["cfg"]["data"])), "cmd": ("x", len(inputs["x"]["data"]))},
        echo=echo,
    )


def run(
    p: PqParameters,
    k: np.ndarray,
    v: np.ndarray | None,
    q: np.ndarray,
    tables: Tables,
    *,
    mode: str = "table",
    name: str = "pq",
    **options,
) -> dict[str, np.ndarray]:
    """One sequence of one head through the simulated RTL, then its queries.

    Parameters
    ----------
    p : PqParameters
    k, v : f16 [T, d]
        Without v there are neither codes of values nor outputs.
    q : f16 [B, d]
    tables : Tables
    mode : str
        "table" or "decode". In the latter the scores come from commands for scores alone, by tables, behind the others.
    name, options
        See `kvant.sim.simulate.simulate`.

    Returns
    -------
    dict
        ``k_codes``, ``v_codes`` u8 [T, M], ``scores`` i64 [B, T], ``out`` f32 [B, d]; 0-d i64 ``cycles`` from the
        first transfer of a row to the last of an output, ``busy_cycles`` (of all commands), ``nonfinite``, ``error``.
    """
    rows, history = sequence(k, v), history_of(p, len(k))
    attends = [
        Attend(q[first : first + p.q_parallel], history, values=values, decode=decode)
        for values, decode in _kinds(mode, values=v is not None)
        for first in range(0, len(q), p.q_parallel)
    ]
    play = stimulus(p, rows, attends, {0: tables})
    trace = simulate(lambda: PqAttention(p), name, play, design_key=("pq", p), **options)
    arrays = {"k_codes": _stored_codes(p, trace, rows, KEYS, len(k), history)}
    if v is not None:
        arrays["v_codes"] = _stored_codes(p, trace, rows, VALUES, len(k), history)
        arrays["out"] = np.array(trace.transfers["out"]["data"], np.uint32).view(np.float32).reshape(len(q), -1)
    arrays["scores"] = scores_of(p, trace, attends, len(k))
    results = ("codes", "out") if any(attend.decode for attend in attends) else ("codes", "scores", "out")
    ends = [cycles[-1] for name, cycles in trace.cycles.items() if name in results and cycles]
    ends.append(trace.cycles["x"][-1])  # without coded tokens and values nothing comes out
    numbers = {"cycles": max(ends) - trace.cycles["x"][0] + 1}
    numbers |= {name: trace.status[name] for name in ("busy_cycles", "nonfinite", "error")}
    return arrays | {name: np.array(value, np.int64) for name, value in numbers.items()}


def _kinds(mode: str, *, values: bool) -> list[tuple[bool, bool]]:
    """Whether to mix values, and to decode, in the commands of a batch."""
    if mode == "decode" and values:
        return [(True, True), (False, False)]
    return [(values, False)]


def _command(p: PqParameters, attend: Attend) -> int:
    fields = {
        "history": attend.history,
        "count": len(attend.queries),
        "head": attend.head,
        "values": attend.values,
        "decode": attend.decode,
    }
    return struct_word(attend_command(p), {name: int(value) for name, value in fields.items()})


def _stored_codes(
    p: PqParameters, trace: Trace, rows: Sequence[Row], store: int, tokens: int, history: int
) -> np.ndarray:
    """Codes u8 [tokens, M] of head 0 as they stand in memory; rows that are not coded are 0."""
    user_layout = code_output(p)["user"].shape
    fields = dict(iter(user_layout))
    memory = {}
    for word, user in zip(*(trace.transfers["codes"][name] for name in ("data", "user")), strict=True):
        values = {name: user >> field.offset & ((1 << field.width) - 1) for name, field in fields.items()}
        if values["head"] == 0 and values["store"] == store:
            memory[values["address"]] = word
    codes = np.zeros((tokens, p.subspaces), np.uint8)
    if history:
        words = [memory[k] for k in range(batch_words(p, history))]
        codes[p.sinks : p.sinks + history] = read_codes(p, words, history)
    return codes


def scores_of(p: PqParameters, trace: Trace, attends: Sequence[Attend], tokens: int) -> np.ndarray:
    """Scores i64 [B, tokens] of all commands that have some, 0 for tokens that are not coded."""
    lanes = unpack_words(trace.transfers["scores"]["data"], p.frame * p.q_parallel, p.score_width, signed=True)
    lanes = lanes.reshape(-1, p.frame, p.q_parallel)
    scores, first = [], 0
    for attend in (each for each in attends if not each.decode):
        frames = frames_of(p, attend.history)
        mine = lanes[first : first + frames].reshape(-1, p.q_parallel)[: attend.history]
        first += frames
        padded = np.zeros((len(attend.queries), tokens), np.int64)
        padded[:, p.sinks : p.sinks + attend.history] = mine.T[: len(attend.queries)]
        scores.append(padded)
    return np.concatenate(scores)


def expected(
    p: PqParameters,
    coded: Sequence[Batch],
    codes: Sequence[np.ndarray],
    arrays: Mapping[str, np.ndarray],
    history: int,
) -> dict[str, dict[str, list[int]]]:
    """Transfers of the output streams for one batch of queries of head 0: the inverse of what `run` reads.

    Parameters
    ----------
    p : PqParameters
    coded, codes
        As in `stimulus`.
    arrays : dict
        ``scores`` i64 [B, T], ``out`` f32 [B, d], as `run` gives them.
    history : int
    """
    user_layout = code_output(p)["user"].shape
    words = {"data": [], "user": [], "last": []}
    for batch, mine in zip(coded, codes, strict=True):
        data, base = code_words(p, mine), batch.first // p.chunk_tokens * p.chunk_words
        words["data"] += data
        words["user"] += [
            struct_word(user_layout, {"address": base + k, "store": batch.store, "head": batch.head})
            for k in range(len(data))
        ]
        words["last"] += [0] * (len(data) - 1) + [1]
    scores = arrays["scores"][:, p.sinks : p.sinks + history]
    frames = frames_of(p, history)
    lanes = np.zeros((frames * p.frame, p.q_parallel), np.int64)
    lanes[:history] = scores.T
    bits = np.ascontiguousarray(arrays["out"]).view(np.uint32)
    ends = np.zeros(bits.shape, np.int64)
    ends[:, -1] = 1
    return {
        "codes": words,
        "scores": {"data": pack_words(lanes.reshape(frames, -1), p.score_width) if frames else []},
        "out": {"data": bits.reshape(-1).tolist(), "last": ends.reshape(-1).tolist()},
    }
