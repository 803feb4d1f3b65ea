"""Product quantisation in the demo: real keys, values and queries through the simulated RTL."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvant.cache_demo import HEAD, LAYER, PREFILL, SINKS
from kvant.errors import InputError

if TYPE_CHECKING:
    from kvant.config import Config
    from kvant.sim.pq.attention import Tables

RECENT = 64
"""Newest tokens that stay INT8."""

SEED = 0
"""Of the k-means."""


@dataclass(frozen=True)
class PqDemo:
    """What the demo shows of product quantisation.

    Attributes
    ----------
    bits : float
        Bits per element of a code.
    key_error, value_error, output_error : float
        Root of squared error over squared rows: of the coded tokens that gave no mean and no samples, and of the
        outputs against float64 attention over the original rows.
    scores, exact_scores : f32 [T_coded]
        Scores of the first query, centred keys, divided by the root of the head size: of the RTL, and exact.
    out, exact : f32, f64 [B, d]
        Outputs of the RTL, and float64 attention over the original rows.
    values : int
        Numbers that were compared with the golden model.
    arrays : dict
        What went in and came out.
    """

    bits: float
    key_error: float
    value_error: float
    output_error: float
    scores: np.ndarray
    exact_scores: np.ndarray
    out: np.ndarray
    exact: np.ndarray
    values: int
    arrays: dict[str, np.ndarray]


def pq_config(chosen: "Config", head_dim: int) -> "Config":
    """*chosen* for the demo's rows.

    Raises
    ------
    InputError
        No product-quantised cache can be built of it.
    """
    from kvant import config
    from kvant.hw.parameters import ParameterError

    fields = {name: value for name, value in chosen.as_dict().items() if value is not None}
    fields |= {"head_dim": head_dim, "heads": 1, "sinks": SINKS, "recent": RECENT, "capacity": 256, "centred": True}
    chosen = config.compose([("demo", fields)])
    try:
        chosen.pq.check_pq()
    except ParameterError as error:
        raise InputError(str(error)) from None
    return chosen


def skip_reason(chosen: "Config") -> str | None:
    """Why no product-quantised cache can be built of a configuration, in one line; None if one can."""
    try:
        pq_config(chosen, real_tensors()[0].shape[1])
    except InputError as error:
        return str(error)
    return None


def real_tensors() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values f16 [T, d] of the head shown, and f16 [B, d] queries of its last token."""
    from kvant.golden.models import slice as model_slice

    attention = model_slice.load().attention[LAYER]
    tokens = attention.keys.shape[1]
    per_head = len(attention.queries) // len(attention.keys)
    queries = attention.queries[HEAD * per_head : (HEAD + 1) * per_head, -1]
    return attention.keys[HEAD, :tokens].copy(), attention.values[HEAD, :tokens].copy(), queries.copy()


def train(chosen: "Config") -> "Tables":
    """Codebooks from the other heads of the layer and the first call of the head shown, whose keys give the mean."""
    import torch

    from kvant.golden.models import slice as model_slice
    from kvant.golden.pq.train import train_codebooks
    from kvant.sim.pq.attention import Tables

    p = chosen.pq
    attention = model_slice.load().attention[LAYER]
    others = [head for head in range(len(attention.keys)) if head != HEAD]
    mean = attention.keys[HEAD, SINKS:PREFILL].astype(np.float32).mean(0).astype(np.float16)
    books = []
    for rows, centre in ((attention.keys, torch.from_numpy(mean)), (attention.values, None)):
        samples = np.concatenate([rows[others].reshape(-1, p.head_dim), rows[HEAD, SINKS:PREFILL]])
        options = {"subspace": p.subspace, "nbits": p.nbits, "mean": centre, "seed": SEED}
        books.append(train_codebooks(torch.from_numpy(samples), **options))
    return Tables(
        tuple(book.entries.numpy() for book in books), tuple(np.float16(book.scale.numpy()) for book in books), mean
    )


def run_pq(chosen: "Config", simulator: str) -> PqDemo:
    """The demo's tensors through the RTL, compared bit for bit with the golden model.

    Raises
    ------
    InputError
        See `pq_config`.
    ComparisonError
        If an output of the RTL differs from the golden model.
    """
    from kvant.pq import golden_outputs
    from kvant.sim.pq import attention as sim
    from kvant.simulated import compare

    k, v, q = real_tensors()
    chosen = pq_config(chosen, k.shape[1])
    p, tables = chosen.pq, train(chosen)
    result = sim.run(p, k, v, q, tables, simulator=simulator)
    values = compare(golden_outputs(p, k, v, q, tables), result)
    coded = slice(SINKS, len(k) - RECENT)
    mean = tables.mean.astype(np.float64)
    keys, rows, queries = (x.astype(np.float64) for x in (k - tables.mean, v, q))
    exact_scores = queries @ keys.T / np.sqrt(p.head_dim)
    weights = np.exp(exact_scores - exact_scores.max(1, keepdims=True))
    exact = weights @ rows / weights.sum(1, keepdims=True)
    held_out = slice(PREFILL, coded.stop)
    # A score counts the scales of query and codebook.
    scale = float(tables.scales[0]) * np.abs(queries[0]).max() / 127 / np.sqrt(p.head_dim)
    decoded = [_decoded(result[f"{name}_codes"], tables, store) for store, name in enumerate(("k", "v"))]
    return PqDemo(
        bits=p.nbits / p.subspace,
        key_error=_error(decoded[0][held_out] + mean, k[held_out]),
        value_error=_error(decoded[1][held_out], v[held_out]),
        output_error=_error(result["out"], exact),
        scores=(result["scores"][0, coded] * scale).astype(np.float32),
        exact_scores=exact_scores[0, coded].astype(np.float32),
        out=result["out"],
        exact=exact,
        values=values,
        arrays={"k": k, "v": v, "q": q, **result},
    )


def _decoded(codes: np.ndarray, tables: "Tables", store: int) -> np.ndarray:
    entries = tables.entries[store][np.arange(codes.shape[1]), codes]
    return entries.reshape(len(codes), -1).astype(np.float64) * float(tables.scales[store])


def _error(held: np.ndarray, exact: np.ndarray) -> float:
    exact = exact.astype(np.float64)
    return float(np.linalg.norm(held - exact) / np.linalg.norm(exact))


def write_tensors(folder: Path, demo: PqDemo) -> None:
    """Keep what went in and came out."""
    np.savez_compressed(folder / "pq.npz", **demo.arrays)
