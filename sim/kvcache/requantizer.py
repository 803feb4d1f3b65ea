"""The cache along time in a simulator: rows of one sequence or of several, and what the hardware made of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvant.hw.kvcache.layouts import PageAddress, Table
from kvant.hw.kvcache.packer import BlockPacker
from kvant.hw.kvcache.page import PageLayout
from kvant.hw.kvcache.parameters import CacheParameters
from kvant.hw.kvcache.requantizer import Requantizer
from kvant.sim.errors import SimulationError
from kvant.sim.kvcache.page_writes import StoredGroup, page_writes
from kvant.sim.kvcache.pages import Page, PageMemory
from kvant.sim.kvcache.tables import channel_writes, choice_writes
from kvant.sim.simulate import simulate
from kvant.sim.streams import Stimulus, Trace
from kvant.sim.words import pack_words, unpack_words

STATUS = ("nonfinite", "error", "full", "saturated", "stall_cycles", "busy_cycles")
"""Plain outputs that every simulation reads at its end."""

FP16_BITS = 16
FP16_NAN = 0x7FFF

START, SCAN, HEAD_AT, HEAD_BITS = 1, 2, 2, 8
"""Bits of a row's ``user``, and place and width of its head there."""


@dataclass(frozen=True)
class Row:
    """A row at the port.

    Attributes
    ----------
    head : int
    elements : f16 [d]
    scan, start : bool
        It belongs to the first pass of a prefill; it is the first of a sequence.
    """

    head: int
    elements: np.ndarray
    scan: bool = False
    start: bool = False


def sequence_rows(v: np.ndarray, prefill: int, head: int = 0) -> list[Row]:
    """The rows of a sequence f16 [T, d] in the order of the port: those of the prefill twice, first to be scanned."""
    scan = [Row(head, row, scan=True, start=not number) for number, row in enumerate(v[:prefill])]
    return scan + [Row(head, row) for row in v]


def row_transfers(p: CacheParameters, rows: Iterable[Row]) -> dict[str, list[int]]:
    """Fields of the port's transfers. Surplus lanes, and `user` after the first transfer, hold what must not count."""
    data, user = [], []
    for row in rows:
        elements = np.full(p.row_transfers * p.lanes, FP16_NAN, np.uint16)
        elements[: p.head_dim] = np.ascontiguousarray(row.elements).view(np.uint16)
        data += pack_words(elements.reshape(-1, p.lanes), FP16_BITS)
        first = START * row.start | SCAN * row.scan | row.head << HEAD_AT
        user += [first, *[first ^ (1 << HEAD_AT + HEAD_BITS) - 1] * (p.row_transfers - 1)]
    return {"data": data, "user": user}


def table_writes(p: CacheParameters, arrays: Mapping[str, np.ndarray], *, heads: Iterable[int]) -> list[int]:
    """Transfers of the table port that give *heads* the tables among *arrays*.

    ``coeffs``, ``thresholds``; floors f16 [d] are 0 if not given; ``mean`` f16 [d] where the cache takes one out.
    """
    floor = arrays.get("floor", np.zeros(p.head_dim, np.float16))
    writes = []
    for head in heads:
        writes += choice_writes(head, arrays["coeffs"], arrays["thresholds"])
        writes += channel_writes(Table.FLOOR, head, floor)
        if p.centred:
            writes += channel_writes(Table.MEAN, head, arrays["mean"])
    return writes


@dataclass(frozen=True)
class Window:
    """A window as the memory holds it.

    Attributes
    ----------
    head, slot : int
        Its page.
    page : Page
    """

    head: int
    slot: int
    page: Page


def window_writes(p: CacheParameters, windows: int) -> dict[str, int]:
    """Transfers of the page ports that *windows* windows take."""
    layout = PageLayout(p, p.head_dim)
    word_bits = BlockPacker.word_bits_along_time(p)
    return {
        "codes": windows * p.head_dim * layout.code_words(word_bits),
        "meta": windows * (layout.blocks * layout.block_meta_words + 1),
    }


def written_windows(p: CacheParameters, trace: Trace) -> list[Window]:
    """The windows of a trace in the order in which they were written, each read from memory when it was complete.

    Raises
    ------
    SimulationError
        When the writes of a window go to several pages, or do not end with it.
    """
    memory = PageMemory(PageLayout(p, p.head_dim), p.heads, p.windows)
    windows = []
    for codes, meta in zip(_pages(trace.transfers["codes"]), _pages(trace.transfers["meta"]), strict=True):
        owners = {(where.head, where.page, where.timestamp) for where in _addresses([*codes["user"], *meta["user"]])}
        if len(owners) != 1:
            raise SimulationError(f"window {len(windows)}: written to pages {sorted(owners)} (head, slot, timestamp)")
        head, slot, timestamp = owners.pop()
        memory.apply(codes)
        memory.apply(meta)
        page = memory.read(head, slot)
        if page.timestamp != timestamp:
            raise SimulationError(
                f"window {len(windows)}: timestamp {page.timestamp} in memory, {timestamp} at the port"
            )
        windows.append(Window(head, slot, page))
    return windows


def _addresses(users: Iterable[int]):
    return [PageAddress().from_bits(user) for user in users]


def _pages(transfers: Mapping[str, Sequence[int]]) -> list[dict[str, list[int]]]:
    """Transfers cut behind each that is the last of its page."""
    pages, begin = [], 0
    for place, last in enumerate(transfers["last"]):
        if last:
            pages.append({name: list(values[begin : place + 1]) for name, values in transfers.items()})
            begin = place + 1
    if begin != len(transfers["last"]):
        raise SimulationError(f"page {len(pages)}: {len(transfers['last']) - begin} writes without an end")
    return pages


def sink_rows(p: CacheParameters, trace: Trace) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Of every head the sink rows i8 [n, d] and their scales f16 [n, ceil(d/G)].

    Raises
    ------
    SimulationError
        When a row's transfers do not have one head and end with `last`.
    """
    transfers = trace.transfers["sink"]
    count = len(transfers["data"]) // p.row_transfers
    data = unpack_words(transfers["data"], p.lanes, 8, signed=True).astype(np.int8)
    user = np.array(transfers["user"], np.int64).reshape(count, p.row_transfers)
    last = np.array(transfers["last"], np.int64).reshape(count, p.row_transfers)
    if (user >> 16 != user[:, :1] >> 16).any() or (last != (np.arange(p.row_transfers) == p.row_transfers - 1)).any():
        raise SimulationError("stream sink: rows are mixed up")
    rows = data.reshape(count, p.row_transfers * p.lanes)[:, : p.head_dim]
    scales = (user[:, :: p.group_transfers] & 0xFFFF).astype(np.uint16).view(np.float16)
    heads = user[:, 0] >> 16
    return {head: (rows[heads == head], scales[heads == head]) for head in range(p.heads)}


def staged_rows(p: CacheParameters, trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Answers to the requests for staged rows: elements i8 [n, d] and scales f16 [n, d]."""
    transfers = trace.transfers["staged"]
    count = len(transfers["data"]) // p.row_transfers
    data = unpack_words(transfers["data"], p.lanes, 8, signed=True).astype(np.int8)
    scales = unpack_words(transfers["user"], p.lanes, 16).astype(np.uint16).view(np.float16)
    shape = (count, p.row_transfers * p.lanes)
    return data.reshape(shape)[:, : p.head_dim], scales.reshape(shape)[:, : p.head_dim]


def peek_requests(requests: Iterable[tuple[int, int]]) -> dict[str, list[int]]:
    """Transfers of the port of requests for staged rows (head, row)."""
    return {"data": [row | head << 16 for head, row in requests]}


def rows_stimulus(
    p: CacheParameters,
    rows: Sequence[Row],
    tables: Sequence[int],
    *,
    windows: int,
    sinks: int,
    peeks: Sequence[tuple[int, int]] = (),
) -> Stimulus:
    """Tables, then rows, then requests for staged rows (head, row); *windows* and *sinks* (rows) come out."""
    transfers = row_transfers(p, rows)
    return Stimulus(
        inputs={"cfg": {"data": tables}, "v": transfers, "peek": peek_requests(peeks)},
        expect={
            "sink": sinks * p.row_transfers,
            "staged": len(peeks) * p.row_transfers,
            **window_writes(p, windows),
        },
        status=STATUS,
        after={"v": ("cfg", len(tables)), "peek": ("v", len(transfers["data"]))},
    )


def stimulus(p: CacheParameters, arrays: Mapping[str, np.ndarray]) -> Stimulus:
    """One sequence: tables, rows, and the reading of the open window once they are taken."""
    v, prefill = arrays["v"], int(arrays["calls"][0])
    tables = table_writes(p, arrays, heads=[0])
    staged = max(1, len(v) % p.group)  # the scales come along with a row, of an empty window too
    return rows_stimulus(
        p,
        sequence_rows(v, prefill),
        tables,
        windows=len(v) // p.group,
        sinks=min(p.sinks, len(v)),
        peeks=[(0, row) for row in range(staged)],
    )


def expected(p: CacheParameters, results: Sequence[Mapping[str, np.ndarray]]) -> dict[str, dict[str, list[int]]]:
    """The transfers of the output streams for sequences of equal length, one a head, whose rows take turns.

    Parameters
    ----------
    p : CacheParameters
    results : sequence of dict
        Of every head the tensors that `run` gives. The rows of open windows are asked for head by head.
    """
    layout = PageLayout(p, p.head_dim)
    word_bits = BlockPacker.word_bits_along_time(p)
    groups = []
    for number in range(len(results[0]["scale"])):
        for head, result in enumerate(results):
            codes = result["codes"][number * p.group : (number + 1) * p.group]
            scale = result["scale"][number].view(np.uint16)
            coefficient = np.broadcast_to(result["coeff"][number], p.head_dim)
            for channel in range(p.head_dim):
                groups.append(
                    StoredGroup(
                        codes=codes[:, channel],
                        scale=int(scale[channel]),
                        coefficient=int(coefficient[channel]),
                        page=number % p.windows,
                        head=head,
                        timestamp=number * p.group,
                        place=channel,
                        page_end=channel == p.head_dim - 1,
                        flush=False,
                        offset=int(result["offset"][number, channel]),
                    )
                )
    writes = page_writes(layout, word_bits, groups)
    ends = [0] * (p.row_transfers - 1) + [1]
    sink: dict[str, list[int]] = {"data": [], "user": [], "last": []}
    for row in range(len(results[0]["sink"])):
        for head, result in enumerate(results):
            sink["data"] += pack_words(_lanes(p, result["sink"][row]), 8)
            scales = np.repeat(result["sink_scale"][row].view(np.uint16), p.group_transfers)[: p.row_transfers]
            sink["user"] += [int(scale) | head << FP16_BITS for scale in scales]
            sink["last"] += ends
    staged: dict[str, list[int]] = {"data": [], "user": [], "last": []}
    for result in results:
        scales = pack_words(_lanes(p, result["staged_scale"].view(np.uint16)), FP16_BITS)
        for row in result["staged"]:
            staged["data"] += pack_words(_lanes(p, row), 8)
            staged["user"] += scales
            staged["last"] += ends
    return {"codes": writes.codes, "meta": writes.meta, "sink": sink, "staged": staged}


def _lanes(p: CacheParameters, row: np.ndarray) -> np.ndarray:
    """A row [d] as its transfers [row_transfers, lanes], 0 in surplus lanes."""
    return np.pad(row, (0, p.row_transfers * p.lanes - p.head_dim)).reshape(-1, p.lanes)


def play(
    p: CacheParameters, arrays: Mapping[str, np.ndarray], *, name: str = "vcache", **options
) -> tuple[dict[str, np.ndarray], Trace]:
    """As `run`, with the trace; *options* are those of `kvant.sim.simulate.simulate`."""
    trace = simulate(lambda: Requantizer(p), name, stimulus(p, arrays), **options)
    return collect(p, len(arrays["v"]), trace), trace


def run(
    p: CacheParameters,
    arrays: Mapping[str, np.ndarray],
    *,
    name: str = "vcache",
    simulator: str = "verilator",
    stall: float = 0.0,
    seed: int = 0,
    waves=None,
) -> dict[str, np.ndarray]:
    """Cache a sequence in the simulated RTL.

    Parameters
    ----------
    p : CacheParameters
        With one head.
    arrays : dict
        ``v`` f16 [T, d], ``calls`` (the first is the prefill), ``coeffs`` u8 [C], ``thresholds`` [C-1], and, where
        they are wanted, ``floor`` and ``mean`` f16 [d].
    name, simulator, stall, seed, waves
        See `kvant.sim.simulate.simulate`.

    Returns
    -------
    dict
        For W = T // G windows: ``codes`` u8 [W*G, d], ``scale`` f16 [W, d], ``coeff`` u8 [W, d] or [W, 1],
        ``offset`` i8 [W, d], all from memory; ``staged`` i8 [T - W*G, d], ``staged_scale`` f16 [d]; ``sink`` i8
        [min(sinks, T), d], ``sink_scale`` f16 [., ceil(d/G)]; 0-d i64: ``saturated``, ``stall_cycles``, ``cycles``
        from the first row's first transfer to the last output, ``busy_cycles``, ``nonfinite``, ``error``.
    """
    return play(p, arrays, name=name, simulator=simulator, stall=stall, seed=seed, waves=waves, design_key=p)[0]


def collect(p: CacheParameters, tokens: int, trace: Trace) -> dict[str, np.ndarray]:
    """The tensors of one sequence of *tokens* rows in a trace.

    Raises
    ------
    SimulationError
        When the windows are not those of the sequence, in order.
    """
    windows = written_windows(p, trace)
    for number, window in enumerate(windows):
        if (window.slot, window.page.timestamp) != (number % p.windows, number * p.group):
            raise SimulationError(
                f"window {number}: page {window.slot}, timestamp {window.page.timestamp}; "
                f"right are {number % p.windows}, {number * p.group}"
            )
    count, d = len(windows), p.head_dim

    def stack(name: str, shape: tuple[int, ...], dtype) -> np.ndarray:
        return np.array([getattr(window.page, name) for window in windows], dtype).reshape(count, *shape)

    staged, staged_scale = staged_rows(p, trace)
    sink, sink_scale = sink_rows(p, trace)[0]
    outputs = ("codes", "meta", "sink", "staged")
    last = max(trace.cycles[name][-1] for name in outputs if trace.cycles[name])
    numbers = {"cycles": last - trace.cycles["v"][0] + 1, **trace.status}
    del numbers["full"]
    return {
        "codes": stack("codes", (d, p.group), np.uint8).transpose(0, 2, 1).reshape(count * p.group, d),
        "scale": stack("scale", (d,), np.float16),
        "coeff": stack("coefficient", (1 if p.shared_coeff else d,), np.uint8),
        "offset": stack("offset", (d,), np.int8),
        "staged": staged[: tokens % p.group],
        "staged_scale": staged_scale[0],
        "sink": sink,
        "sink_scale": sink_scale,
    } | {name: np.array(value, np.int64) for name, value in numbers.items()}
