"""Attention over product-quantised caches of several heads, head by head through the block `pq`."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvant.attention_arrays import Case
from kvant.errors import InputError
from kvant.pq import BLOCK as PQ
from kvant.simulated import shape_arrays

_NAMES = ("mean", "codebook_k", "codebook_k_scale", "codebook_v", "codebook_v_scale")


def attend(
    case: Case, *, path: Path | None, overrides: Iterable[str], waves: Path | None, check: bool, **options
) -> dict[str, np.ndarray]:
    """Outputs of all queries, and the caches as they are read.

    A query that sees fewer than all tokens meets the cache of those tokens. Waves are those of the first run.

    Parameters
    ----------
    case : Case
    path, overrides
        The configuration of *case*.
    waves, check, options
        As `kvant.pq.PqBlock.simulate` takes them.

    Returns
    -------
    dict
        As `kvant.attention.AttentionBlock.simulate`, the queries in the order of `Case.queries`.

    Raises
    ------
    InputError
        For queries that see different tokens of a cache with a recent window.
    """
    from kvant.golden.pq.scores import quantize_query

    queries, ends, p = case.queries(), case.ends(), case.chosen.pq
    lengths = sorted(set(ends.tolist()) - {0}, reverse=True)
    if len(lengths) > 1 and p.recent:
        raise InputError(
            f"array q: {len(case.q)} tokens with recent = {p.recent}: legal with pq is one token, or recent = 0, for "
            "a key is coded, or recent, for all queries alike"
        )
    numbers = {name: np.array(getattr(p, name)) for name in ("group", "sinks", "recent")}
    out, runs = np.zeros(queries.shape, np.float32), []
    used: dict[str, list[np.ndarray]] = {"k_used": [], "v_used": []}
    for head in range(case.heads):
        tables = case.head_arrays(head, _NAMES)
        for length in lengths:
            seen = ends == length
            rows = {"k": case.k[head, :length], "v": case.v[head, :length], "q": queries[head, seen]}
            run = PQ.simulate(
                rows | numbers | tables,
                path=path,
                overrides=overrides,
                waves=None if runs else waves,
                check=check,
                **options,
            )
            tables |= {name: run[name] for name in _NAMES if name in run}  # trained on all tokens: those are the first
            out[head, seen] = run["out"]
            runs.append(run)
        for store, x in (("k", case.k[head]), ("v", case.v[head])):
            used[f"{store}_used"].append(_used(p, x, store, tables))
    groups = quantize_query(queries)
    totals = {name: sum(int(run[name]) for run in runs) for name in ("cycles", "busy_cycles")}
    totals |= {name: max(int(run[name]) for run in runs) for name in ("nonfinite", "error")}
    return (
        {"out": out, "q_used": (groups.q * groups.scale.float()[..., None]).numpy()}
        | {name: np.stack(values) for name, values in used.items()}
        | {name: np.array(value, np.int64) for name, value in totals.items()}
        | shape_arrays(p.group, p.lanes)
    )


def _used(p, x: np.ndarray, store: str, tables: dict[str, np.ndarray]) -> np.ndarray:
    """Rows f32 [T, d] as a cache of these tables holds them."""
    from kvant.golden.pq.cache import pq_cache
    from kvant.golden.pq.codebook import Codebook

    book = Codebook.of(tables[f"codebook_{store}"], tables[f"codebook_{store}_scale"].reshape(()))
    mean = tables.get("mean") if store == "k" else None
    cache = pq_cache(x, book, group=p.group, mean=mean, sinks=p.sinks, recent=p.recent)
    return cache.dequantize().float().numpy()
