"""The product-quantised cache of keys or values as attention reads it: codes, the newest rows, the sinks.

The newest ``recent`` tokens and the first ``sinks`` stay INT8 groups along the head; their rows of codes and scores are
0. A token's code is that of its row as it arrived, so it does not depend on when it leaves the recent window, nor in
which batch it is encoded. Source: docs/numerics.md, "Product quantisation".
"""

import math
from dataclasses import dataclass

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.rows import centred, channel_vector, check_sinks
from kvant.golden.kvcache.spatial import int8_rows
from kvant.golden.numeric.int8 import int8_groups
from kvant.golden.numeric.tensors import as_tensor, check_group, from_groups, to_groups
from kvant.golden.pq.codebook import Codebook
from kvant.golden.pq.encode import encode
from kvant.golden.pq.scores import lookup_table, quantize_query, read_out, table_scores, value_bins


@dataclass(frozen=True)
class PqCache:
    """T cached tokens.

    Attributes
    ----------
    codes : u8 [..., T, M]
        0 in the rows of sinks and recent tokens.
    recent : i8 [..., R, d]
        The newest ``R = min(recent, T - min(sinks, T))`` rows.
    recent_scale : f16 [..., R, ceil(d/G)]
    sink : i8 [..., min(sinks, T), d]
    sink_scale : f16 [..., min(sinks, T), ceil(d/G)]
    codebook : Codebook
    nonfinite : bool
        A NaN or an infinity was met.
    group : int
        G of the INT8 rows.
    """

    codes: torch.Tensor
    recent: torch.Tensor
    recent_scale: torch.Tensor
    sink: torch.Tensor
    sink_scale: torch.Tensor
    codebook: Codebook
    nonfinite: bool
    group: int

    @property
    def history(self) -> slice:
        """Tokens that are coded."""
        return slice(self.sink.shape[-2], self.codes.shape[-2] - self.recent.shape[-2])

    def dequantize(self) -> torch.Tensor:
        """The rows as the cache holds them (a mean that was subtracted stays so), f32 [..., T, d]."""
        rows = self.codebook.decode(self.codes)
        for part, q, scale in (
            (slice(0, self.history.start), self.sink, self.sink_scale),
            (slice(self.history.stop, None), self.recent, self.recent_scale),
        ):
            if q.shape[-2]:
                rows[..., part, :] = int8_rows(q, scale, self.group)
        return rows

    def scores(self, q) -> torch.Tensor:
        """Scores i64 [..., B, T] of INT8 queries i8 [..., B, d] with the coded tokens, 0 elsewhere."""
        q = as_tensor(q, "q", (torch.int8,))
        scores = table_scores(lookup_table(q, self.codebook), self.codes)
        scores[..., : self.history.start] = 0
        scores[..., self.history.stop :] = 0
        return scores

    def mix(self, weights) -> torch.Tensor:
        """Coded values weighted by integers [..., B, T]: i64 [..., B, d], in units of the codebook's scale.

        Weights of sinks and recent tokens count nothing here: those rows are mixed as INT8.
        """
        history = self.history
        shape = (*weights.shape[:-1], self.codes.shape[-1], self.codebook.partition.centroids)
        if history.start >= history.stop:
            return read_out(torch.zeros(shape, dtype=torch.int64), self.codebook)
        bins = value_bins(weights[..., history], self.codes[..., history, :], shape[-1])
        return read_out(bins, self.codebook)


def reference_attention(q, keys: PqCache, values: PqCache) -> torch.Tensor:
    """Attention in float64 over what the caches hold: what hardware is measured against.

    Parameters
    ----------
    q : f16 [..., B, d]
        B queries, all of which see all T tokens; each becomes one INT8 group over the head. Scores are divided by
        the root of d.
    keys, values : PqCache
        Of the same tokens.

    Returns
    -------
    f64 [..., B, d]
    """
    groups = quantize_query(q)
    queries = groups.q.to(torch.float64) * groups.scale.to(torch.float64)[..., None]
    scores = queries @ keys.dequantize().to(torch.float64).mT / math.sqrt(queries.shape[-1])
    return scores.softmax(-1) @ values.dequantize().to(torch.float64)


def check_recent(recent: int) -> int:
    """The length of the recent window, or a refusal."""
    if isinstance(recent, bool) or not isinstance(recent, int) or recent < 0:
        raise TensorError(f"recent = {recent!r}: legal is an integer from 0")
    return recent


def fresh_rows(x: torch.Tensor, group: int, mean) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 groups along the head, i8 [..., T, d] and f16 [..., T, ceil(d/G)], of fp16 rows, as in `pq_cache`."""
    rows = centred(x, None if mean is None else channel_vector(mean, "mean", x))
    q, scale = int8_groups(to_groups(rows, group))
    return from_groups(q, x.shape[-1]), scale


def pq_cache(
    x, codebook: Codebook, *, group: int = 64, mean=None, sinks: int = 0, recent: int = 0, name: str = "x"
) -> PqCache:
    """Cache rows of keys or values.

    Parameters
    ----------
    x : f16 [..., T, d]
        Rows of one sequence; leading axes are heads. NaN counts as 0 and an infinity as 65504 of its sign.
    codebook : Codebook
        For all heads, or with the leading axes of *x* (or the last of them).
    group : int
        G of INT8 rows.
    mean : f16 [d] or [..., d], optional
        Subtracted from every row, sinks and recent ones included.
    sinks, recent : int
        First and newest rows that stay INT8; a row that is both is a sink.
    name : str
        What error messages call *x*.
    """
    x = as_tensor(x, name, (torch.float16,))
    check_group(group), check_sinks(sinks), check_recent(recent)
    codes = encode(x, codebook, mean=mean, name=name)
    tokens = x.shape[-2]
    sinks = min(sinks, tokens)
    history = max(sinks, tokens - recent)
    q, scale = fresh_rows(x, group, mean)
    codes[..., :sinks, :] = 0
    codes[..., history:, :] = 0
    return PqCache(
        codes=codes,
        recent=q[..., history:, :].clone(),
        recent_scale=scale[..., history:, :].clone(),
        sink=q[..., :sinks, :].clone(),
        sink_scale=scale[..., :sinks, :].clone(),
        codebook=codebook,
        nonfinite=bool((~torch.isfinite(x)).any()),
        group=group,
    )
