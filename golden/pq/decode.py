"""Attention of single queries over a product-quantised cache, in the very numbers of the hardware.

Coded keys are looked up, the INT8 rows (sinks, then the recent window) are multiplied; every key gets a base-2
logarithm against one common reference, every weight is an integer of 24 bits; weights of coded tokens go through bins,
those of rows into block-floating sums. Source: docs/numerics.md, "Product quantisation" and "Softmax".
"""

from typing import NamedTuple

import torch

from kvant.golden.attention.int8_rows import row_logarithms, weighted_rows
from kvant.golden.attention.normalize import coded_values, normalize
from kvant.golden.attention.softmax import bin_shift, logarithms, reference, score_factor, weights
from kvant.golden.errors import TensorError
from kvant.golden.pq.cache import PqCache
from kvant.golden.pq.scores import quantize_query, read_out, value_bins


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


def decode_attention(q, keys: PqCache, values: PqCache) -> Decoded:
    """Attention of queries that meet all T tokens, bit for bit as the hardware gives it.

    Parameters
    ----------
    q : f16 [..., B, d]
        NaN counts as 0 and an infinity as 65504 of its sign; each query becomes one INT8 group over the head.
    keys, values : PqCache
        Of the same tokens, with the same sinks and recent window.

    Raises
    ------
    TensorError
        When keys and values hold different tokens.
    """
    history = keys.history
    if values.history != history or values.codes.shape[-2] != keys.codes.shape[-2] or keys.group != values.group:
        raise TensorError(f"values: coded tokens {values.history} in groups of {values.group}; legal are those of keys")
    queries = quantize_query(q)
    head_dim = queries.q.shape[-1]
    leading = tuple(queries.q.shape[:-2])
    key_book, value_book = keys.codebook.match(leading, "q"), values.codebook.match(leading, "q")
    scores = keys.scores(queries.q)
    factor = score_factor(queries.scale[..., None], key_book.scale[..., None, None], head_dim)
    z_coded = logarithms(scores[..., history], factor)
    (key_rows, key_scale), (value_rows, value_scale) = map(_int8_rows, (keys, values))
    z_rows = row_logarithms(queries.q, queries.scale, key_rows, key_scale, group=keys.group)
    largest = torch.maximum(reference(z_coded), reference(z_rows))
    coded_weights, row_weights = weights(z_coded, largest), weights(z_rows, largest)
    total = coded_weights.sum(-1)
    coded = rows = None
    if coded_weights.shape[-1]:
        shift = bin_shift(total)
        bins = value_bins(coded_weights, values.codes[..., history, :], value_book.partition.centroids)
        sums = read_out(bins >> shift[..., None, None], value_book)
        coded = coded_values(sums, value_book.scale[..., None], shift)
    if row_weights.shape[-1]:
        rows = weighted_rows(row_weights, value_rows, value_scale, group=values.group).values()
    return Decoded(normalize(total + row_weights.sum(-1), coded=coded, rows=rows), scores, queries.nonfinite)


def _int8_rows(cache: PqCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that stay INT8, i8 [..., N, d], and their scales: sinks, then the recent window."""
    return torch.cat((cache.sink, cache.recent), -2), torch.cat((cache.sink_scale, cache.recent_scale), -2)
