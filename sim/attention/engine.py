"""The attention engine in a simulator: contents of caches and queries in, outputs out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvant.hw.attention.cache_reader import word_port
from kvant.hw.attention.command import KeyFormat
from kvant.hw.attention.engine import AttentionEngine, attention_command, query_port, row_port
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.linear.parameters import ceil_div
from kvant.sim.attention.contents import Contents, Int8Rows, MantKeys, TimeKeys, key_bytes, value_bytes, value_rows
from kvant.sim.errors import SimulationError
from kvant.sim.simulate import simulate
from kvant.sim.streams import Stimulus, Trace
from kvant.sim.words import pack_words, struct_word

STATUS = ("nonfinite", "error", "busy", "busy_cycles")
FP16_BITS = 16
KEY_FORMATS = {MantKeys: KeyFormat.MANT, Int8Rows: KeyFormat.INT8, TimeKeys: KeyFormat.MANT_TIME}
"""What a command calls the keys of a cache."""

FP16_NAN = 0x7E00


@dataclass(frozen=True)
class Attend:
    """A command: queries of one KV head over its cache.

    Attributes
    ----------
    contents : Contents
    queries : f16 [n, d]
    first, end : sequence of int, optional
        Each query sees the keys ``first <= t < end``; all by default.
    slope : f16 [n], optional
        Of position biases; 0 by default.
    head : int
    """

    contents: Contents
    queries: np.ndarray
    first: Sequence[int] | None = None
    end: Sequence[int] | None = None
    slope: np.ndarray | None = None
    head: int = 0
    limits: list[tuple[int, int, int]] = field(init=False)
    """Of each query `first`, `end` and the bits of `slope`."""

    def __post_init__(self):
        count = len(self.queries)
        first = [0] * count if self.first is None else self.first
        end = [self.contents.tokens] * count if self.end is None else self.end
        slope = np.zeros(count, np.float16) if self.slope is None else np.asarray(self.slope, np.float16)
        bits = slope.view(np.uint16).tolist()
        limits = [(int(a), int(b), s) for a, b, s in zip(first, end, bits, strict=True)]
        if len(limits) != count:
            raise SimulationError(f"limits of {len(limits)} queries: legal are those of {count}")
        object.__setattr__(self, "limits", limits)


def stimulus(p: AttentionParameters, attends: Sequence[Attend]) -> Stimulus:
    """The transfers of commands."""
    commands, rows = [], {"data": [], "user": [], "last": []}
    queries: dict[str, list[int]] = {"data": [], "user": []}
    keys, values = bytearray(), bytearray()
    layout = attention_command(p)
    for attend in attends:
        contents = attend.contents
        commands.append(
            struct_word(
                layout,
                {
                    "queries": len(attend.queries),
                    "tokens": contents.tokens,
                    "sinks": contents.sinks,
                    "key_format": KEY_FORMATS[type(contents.keys)].value,
                    "int8_values": isinstance(contents.values, Int8Rows),
                    "head": attend.head,
                },
            )
        )
        for name, part in _query_words(p, attend).items():
            queries[name] += part
        keys += key_bytes(p, contents)
        values += value_bytes(contents)
        for name, part in _row_words(p, contents).items():
            rows[name] += part
    return Stimulus(
        inputs={
            "cmd": {"data": commands},
            "q": queries,
            "keys": {"data": _port_words(p, keys)},
            "values": {"data": _port_words(p, values)},
            "rows": rows,
        },
        expect={"out": sum(len(attend.queries) for attend in attends) * p.head_dim},
        status=STATUS,
    )


def _port_words(p: AttentionParameters, text: bytes) -> list[int]:
    size = word_port(p).size // 8
    return [int.from_bytes(text[start : start + size], "little") for start in range(0, len(text), size)]


def _query_words(p: AttentionParameters, attend: Attend) -> dict[str, list[int]]:
    """Transfers of `q`. Lanes past a row's end, and `user` after a row's first transfer, hold what must not count."""
    lanes = p.x_lanes
    transfers = ceil_div(p.head_dim, lanes)
    elements = np.ascontiguousarray(attend.queries, np.float16).view(np.uint16)
    elements = np.pad(elements, ((0, 0), (0, transfers * lanes - p.head_dim)), constant_values=FP16_NAN)
    layout = query_port(p)["user"].shape
    users = []
    for first, end, slope in attend.limits:
        user = struct_word(layout, {"first": first, "end": end, "slope": slope})
        users += [user] + [user ^ ((1 << layout.size) - 1)] * (transfers - 1)
    return {"data": pack_words(elements.reshape(-1, lanes), FP16_BITS), "user": users}


def _row_words(p: AttentionParameters, contents: Contents) -> dict[str, list[int]]:
    """Transfers of `rows`. Lanes past a row's end hold what must not count."""
    elements, scales = value_rows(p, contents)
    fill = ((0, 0), (0, p.row_transfers * p.lanes - p.head_dim))
    elements = np.pad(elements, fill, constant_values=77).reshape(-1, p.lanes)
    scales = np.pad(np.ascontiguousarray(scales).view(np.uint16), fill, constant_values=FP16_NAN).reshape(-1, p.lanes)
    count = len(elements) // p.row_transfers
    scale_name = "scale" if "scale" in dict(iter(row_port(p))) else "user"
    return {
        "data": pack_words(elements, 8),
        scale_name: pack_words(scales, FP16_BITS),
        "last": ([0] * (p.row_transfers - 1) + [1]) * count,
    }


def play(p: AttentionParameters, attends: Sequence[Attend], *, name: str = "attention", **options) -> Trace:
    """Commands through the simulated RTL; *options* are those of `kvant.sim.simulate.simulate`."""
    options = {"design_key": ("attention", p)} | options
    return simulate(lambda: AttentionEngine(p), name, stimulus(p, attends), **options)


def run(p: AttentionParameters, attends: Sequence[Attend], **options) -> dict[str, np.ndarray]:
    """Commands through the simulated RTL.

    Parameters
    ----------
    p : AttentionParameters
    attends : sequence of Attend
        Each of up to `AttentionParameters.queries` queries.
    options
        See `play`.

    Returns
    -------
    dict
        ``out`` f32 [N, d] and ``empty`` i64 [N] of the queries of all commands; 0-d i64 ``cycles`` from the first input
        transfer to the last output transfer, ``busy_cycles``, ``nonfinite``, ``error``.
    """
    return collect(p, play(p, attends, **options))


def collect(p: AttentionParameters, trace: Trace) -> dict[str, np.ndarray]:
    """The tensors of a trace.

    Raises
    ------
    SimulationError
        When queries do not end where `last` says so, or differ in their flag.
    """
    out = trace.transfers["out"]
    bits = np.array(out["data"], np.uint32).reshape(-1, p.head_dim)
    empty = np.array(out["user"], np.int64).reshape(bits.shape)
    last = np.array(out["last"], np.int64).reshape(bits.shape)
    if (last != (np.arange(p.head_dim) == p.head_dim - 1)).any() or (empty != empty[:, :1]).any():
        raise SimulationError("stream out: queries are mixed up")
    first = min(cycles[0] for name, cycles in trace.cycles.items() if name != "out" and cycles)
    numbers = {"cycles": trace.cycles["out"][-1] - first + 1}
    numbers |= {name: trace.status[name] for name in ("busy_cycles", "nonfinite", "error")}
    return {"out": bits.view(np.float32), "empty": empty[:, 0]} | {
        name: np.array(value, np.int64) for name, value in numbers.items()
    }


def expected(out: np.ndarray, empty: np.ndarray) -> dict[str, dict[str, list[int]]]:
    """The transfers of the output stream that carry f32 [N, d] and bool [N]: the inverse of `collect`."""
    ends = np.zeros(out.shape, np.int64)
    ends[:, -1] = 1
    return {
        "out": {
            "data": np.ascontiguousarray(out).view(np.uint32).reshape(-1).tolist(),
            "user": np.repeat(empty.astype(np.int64), out.shape[1]).tolist(),
            "last": ends.reshape(-1).tolist(),
        }
    }
