"""Attention of single queries over a product-quantised cache, in the very numbers of the hardware.

Coded keys are looked up, the INT8 rows (sinks, then the recent window) are multiplied; every key gets a base-2
logarithm against one common reference, every weight is an integer of 24 bits; weights of coded tokens go through bins,
those of rows into block-floating sums. Or codes are decoded: their centroids are INT8 rows like the others, in front of
them. Source: docs/numerics.md, "Product quantisation" and "Softmax".
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from kvant.golden.attention.int8_rows import row_logarithms, weighted_rows
from kvant.golden.attention.normalize import coded_values, normalize
from kvant.golden.attention.softmax import bin_shift, logarithms, reference, score_factor, weights
from kvant.golden.errors import TensorError
from kvant.golden.numeric.tensors import group_count
from kvant.golden.pq.cache import PqCache
from kvant.golden.pq.codebook import Codebook
from kvant.golden.pq.scores import quantize_query, read_out, value_bins

MODES = ("table", "decode")
"""What becomes of codes: look-ups in tables and additions to bins, or INT8 rows."""


class Decoded(NamedTuple):
    """What a query batch gives.

    Attributes
    ----------
    out : f32 [..., B, d]
    scores : i64 [..., B, T]
        Of coded tokens; 0 for sinks and recent ones.
    nonfinite : bool
        A query had a NaN or an infinity.
    """

    out: torch.Tensor
    scores: torch.Tensor
    nonfinite: bool


def decode_attention(q, keys: PqCache, values: PqCache, *, mode: str = "table") -> Decoded:
    """Attention of queries that meet all T tokens, bit for bit as the hardware gives it.

    Parameters
    ----------
    q : f16 [..., B, d]
        NaN counts as 0 and an infinity as 65504 of its sign; each query becomes one INT8 group over the head.
    keys, values : PqCache
        Of the same tokens, with the same sinks and recent window.
    mode : str
        "table": coded keys are looked up, their weights go through bins. "decode": coded tokens are INT8 rows in front
        of the sinks, the scale of their codebook the scale of each of their groups. Scores are the same.

    Raises
    ------
    TensorError
        When keys and values hold different tokens; for another mode.
    """
    if mode not in MODES:
        raise TensorError(f"mode = {mode!r}: legal is one of {', '.join(MODES)}")
    history = keys.history
    if values.history != history or values.codes.shape[-2] != keys.codes.shape[-2] or keys.group != values.group:
        raise TensorError(f"values: coded tokens {values.history} in groups of {values.group}; legal are those of keys")
    queries = quantize_query(q)
    head_dim = queries.q.shape[-1]
    leading = tuple(queries.q.shape[:-2])
    key_book, value_book = keys.codebook.match(leading, "q"), values.codebook.match(leading, "q")
    scores = keys.scores(queries.q)
    rows = [_int8_rows(cache) for cache in (keys, values)]
    tabled = mode == "table"
    if not tabled:
        rows = [
            tuple(torch.cat(parts, -2) for parts in zip(_decoded_rows(cache, book), own, strict=True))
            for cache, book, own in zip((keys, values), (key_book, value_book), rows, strict=True)
        ]
    (key_rows, key_scale), (value_rows, value_scale) = rows
    factor = score_factor(queries.scale[..., None], key_book.scale[..., None, None], head_dim)
    z_coded = logarithms(scores[..., history if tabled else slice(0)], factor)
    z_rows = row_logarithms(queries.q, queries.scale, key_rows, key_scale, group=keys.group)
    largest = torch.maximum(reference(z_coded), reference(z_rows))
    coded_weights, row_weights = weights(z_coded, largest), weights(z_rows, largest)
    total = coded_weights.sum(-1)
    coded = summed = None
    if coded_weights.shape[-1]:
        shift = bin_shift(total)
        bins = value_bins(coded_weights, values.codes[..., history, :], value_book.partition.centroids)
        sums = read_out(bins >> shift[..., None, None], value_book)
        coded = coded_values(sums, value_book.scale[..., None], shift)
    if row_weights.shape[-1]:
        summed = weighted_rows(row_weights, value_rows, value_scale, group=values.group).values()
    return Decoded(normalize(total + row_weights.sum(-1), coded=coded, rows=summed), scores, queries.nonfinite)


def _decoded_rows(cache: PqCache, codebook: Codebook) -> tuple[torch.Tensor, torch.Tensor]:
    """Coded tokens as INT8 rows, i8 [..., N, d], and their scales: the entries that the codes name."""
    codes = cache.codes[..., cache.history, :]
    *leading, tokens, subspaces = codes.shape
    head_dim = subspaces * codebook.partition.dimensions
    scale = codebook.scale[..., None, None].expand(*leading, tokens, group_count(head_dim, cache.group))
    if not tokens:
        return torch.zeros((*leading, 0, head_dim), dtype=torch.int8), scale
    return replace(codebook, scale=torch.ones_like(codebook.scale)).decode(codes).to(torch.int8), scale


def _int8_rows(cache: PqCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that stay INT8, i8 [..., N, d], and their scales: sinks, then the recent window."""
    return torch.cat((cache.sink, cache.recent), -2), torch.cat((cache.sink_scale, cache.recent_scale), -2)
