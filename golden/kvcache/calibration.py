"""Calibration of a cache from text: key means, floors, coefficient tables and their thresholds.

A table is fitted to the statistic that hardware computes, so that the squared error of all groups, at the coefficient
that the table gives them, is least. The groups are sorted into bins of equal population by their statistic; dynamic
programming cuts the bins into at most C segments and gives each the coefficient with the least error. The
best coefficient is no monotone function of the statistic, so neither is the table.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvant.golden.errors import TensorError
from kvant.golden.kvcache.attention import to_port
from kvant.golden.kvcache.choice import (
    STATISTICS,
    THRESHOLD_LIMIT,
    GroupStatistics,
    Tables,
    choose,
    choose_shared,
    group_statistics,
)
from kvant.golden.kvcache.maps import apply, balanced_map, covariance, output_gram, score_metric
from kvant.golden.kvcache.rows import centred, check_sinks
from kvant.golden.kvcache.temporal import stage_rows
from kvant.golden.linear.threads import independent_threads
from kvant.golden.numeric.codes import (
    LARGEST_COEFFICIENT,
    LINEAR,
    TABLE_SIZE,
    decode,
    encode_int8,
    level_table,
    requantized_scale,
)
from kvant.golden.numeric.int8 import int8_groups
from kvant.golden.numeric.rounding import FP16_MAX, fp16
from kvant.golden.numeric.tensors import check_group, to_groups

ALL_COEFFICIENTS = (*range(LARGEST_COEFFICIENT + 1), LINEAR)
"""Every coefficient there is."""

USUAL_COEFFICIENTS = (*range(0, 125, 5), LINEAR)
"""Those that M-ANT's authors search (HPCA 2025, section IV), and the linear type."""

RATIOS = 1024
"""Bins of ``|q| / m`` in the histograms that errors are taken from."""


FLOOR_QUANTILE = 1.0
"""Quantile of the windows' largest magnitudes that becomes the floor of a channel."""

FLOOR_MARGIN = 1.0
"""What the quantile is multiplied with."""

BINS = 512
"""Most bins of the statistic, of about equal population."""

LEAST_POPULATION = 16
"""Fewest statistics in a bin: with few groups, the error of finer bins is noise."""


@dataclass(frozen=True)
class Kind:
    """One way to cache keys or values, with a table of its own.

    Attributes
    ----------
    rows : str
        ``keys`` or ``values``.
    along_time : bool
        Groups run along time, not along the head.
    offset, shared_coefficient : bool
        Options of a cache along time.
    """

    rows: str
    along_time: bool
    offset: bool = False
    shared_coefficient: bool = False


KINDS = {
    "key_head": Kind("keys", along_time=False),
    "key_time": Kind("keys", along_time=True, offset=True, shared_coefficient=True),
    "value_time": Kind("values", along_time=True),
    "value_time_offset": Kind("values", along_time=True, offset=True, shared_coefficient=True),
}
"""What tables are fitted for, by name. Keys are centred in all of them."""


@dataclass(frozen=True)
class CacheTables:
    """What calibration found for the caches of a model of L layers with H KV heads of d elements.

    Attributes
    ----------
    group : int
        G.
    sinks : int
        First tokens of a sequence that took no part.
    key_mean : f16 [L, H, d]
        Mean of every channel of the keys after RoPE, behind their map.
    key_floor, value_floor : f16 [L, H, d]
        Magnitude that the INT8 scale of a channel has to hold, of centred keys and of values, behind their maps.
    tables : dict of str to Tables
        By name of the kind, see `KINDS`; coefficients u8 [L, C], thresholds i64 [L, C-1].
    key_map, value_map : f16 [L, H, d, d], optional
        Maps that keys and values take before they are cached, both or none; see `kvant.golden.kvcache.maps`.
    """

    group: int
    sinks: int
    key_mean: torch.Tensor
    key_floor: torch.Tensor
    value_floor: torch.Tensor
    tables: dict[str, Tables]
    key_map: torch.Tensor | None = None
    value_map: torch.Tensor | None = None

    def layers(self, kind: str) -> tuple[Tables, ...]:
        """The tables of a kind, by layer.

        Raises
        ------
        TensorError
            A kind that was not calibrated.
        """
        if kind not in self.tables:
            raise TensorError(f"table {kind!r}: not calibrated; there are {', '.join(self.tables)}")
        found = self.tables[kind]
        return tuple(Tables(*pair, found.statistic) for pair in zip(found.coefficients, found.thresholds, strict=True))


class Groups(NamedTuple):
    """Groups of one kind of cache.

    Attributes
    ----------
    q : i16 [..., n]
        INT8 elements, the offset taken out; 0 in the places of sinks.
    weight : f32 [...]
        What the squared error of an element of the group counts, in units of ``q``.
    statistics : GroupStatistics
    """

    q: torch.Tensor
    weight: torch.Tensor
    statistics: GroupStatistics


def groups_of_head(rows: torch.Tensor, *, group: int, mean: torch.Tensor | None, sinks: int) -> Groups:
    """Groups along the head [H, T - sinks, d/G] of f16 rows [H, T, d]; the elements of a short last group are left out.

    Its statistic is normalised, so a table fitted to full groups serves it too.
    """
    d = rows.shape[-1]
    x = centred(rows, None if mean is None else mean[..., None, :])[..., sinks:, :]
    q, scale = int8_groups(to_groups(x[..., : max(d // group * group, min(d, group))], group))
    n = min(d, group)
    return _groups(q[..., :n], scale.float(), group_statistics(q[..., :n]), offset=False)


def groups_of_time(
    rows: torch.Tensor, *, group: int, mean: torch.Tensor | None, floor: torch.Tensor | None, sinks: int, offset: bool
) -> Groups:
    """Groups along time [H, W, d] of the full windows of f16 rows [H, T, d], staged as a one-token prefill leaves them.

    Without a floor all rows are the prefill.
    """
    staged = stage_rows(rows, rows.shape[-2] if floor is None else 1, group=group, mean=mean, floor=floor, sinks=sinks)
    windows = rows.shape[-2] // group
    q = staged.q[..., : windows * group, :].unflatten(-2, (windows, group)).transpose(-1, -2).contiguous()
    statistics = group_statistics(q, offset=offset)
    scale = staged.scale.float()[..., None, :].expand(statistics.peak.shape)
    return _groups(q, scale, statistics, offset=offset)


def _groups(q: torch.Tensor, scale: torch.Tensor, statistics: GroupStatistics, *, offset: bool) -> Groups:
    q = q.to(torch.int16)
    if offset:
        q = q - statistics.offset[..., None].to(torch.int16)
    return Groups(q, scale.square(), statistics)


def normalised(statistics: GroupStatistics, statistic: str) -> torch.Tensor:
    """``floor(statistic * 2^16 / (n*m)^2)`` i64 [...], 0 for m = 0: a group passes T exactly when it is at least T."""
    limit = (statistics.count * statistics.peak) ** 2
    return (statistics.of(statistic) << 16) // limit.clamp(min=1)


def shared_statistic(value: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """The statistic that decides for all groups along the last axis, i64 [...]; -1 where none is alive.

    ``2 * P_k >= D`` of `choose_shared` holds exactly when the ``ceil(D/2)``-th largest statistic passes ``T_k``.
    """
    ordered = torch.where(alive, value, -1).sort(-1, descending=True).values
    place = (alive.sum(-1, keepdim=True) + 1) // 2 - 1
    return torch.where(place < 0, -1, ordered.gather(-1, place.clamp(min=0)))[..., 0]


def error_table(candidates: Sequence[int]) -> torch.Tensor:
    """Squared distance of ``(r + 0.5) / RATIOS`` to the nearest level over M, f64 [RATIOS, candidates]."""
    grid = level_table_of(candidates)
    x = (torch.arange(RATIOS, dtype=torch.float64) + 0.5) / RATIOS
    return (x[:, None, None] - grid).square().amin(-1)


def level_table_of(candidates: Sequence[int]) -> torch.Tensor:
    """Levels over the largest one, f64 [candidates, 8]."""
    pieces = [candidates[first : first + TABLE_SIZE] for first in range(0, len(candidates), TABLE_SIZE)]
    grid = torch.cat([level_table(piece) for piece in pieces]).to(torch.float64)
    return grid / grid[:, -1:]


class Histogram:
    """Elements of groups, by the statistic that chooses for them and by ``|q| / m``.

    Parameters
    ----------
    edges : i64 [B]
        Ascending; bin b holds the statistics from ``edges[b]`` to ``edges[b + 1] - 1``.
    """

    def __init__(self, edges: torch.Tensor):
        self.edges = edges
        self.weights = torch.zeros(len(edges), RATIOS, dtype=torch.float64)

    def add(self, groups: Groups, value: torch.Tensor) -> None:
        """Count groups whose statistics are *value*, of their shape."""
        peak = groups.statistics.peak.float()
        alive = peak > 0
        bins = torch.bucketize(value.contiguous(), self.edges, right=True).sub_(1).clamp_(min=0)
        magnitude = groups.q.abs().to(torch.float32) * (RATIOS / peak.clamp(min=1))[..., None]
        place = magnitude.to(torch.int32).clamp_(max=RATIOS - 1) + (bins * RATIOS).to(torch.int32)[..., None]
        weight = (groups.weight * peak.square() * alive)[..., None].expand(groups.q.shape)
        self.weights += torch.bincount(
            place.reshape(-1), weight.reshape(-1).to(torch.float64), minlength=self.weights.numel()
        ).view_as(self.weights)

    def errors(self, candidates: Sequence[int]) -> torch.Tensor:
        """Squared error of each bin at each coefficient, f64 [B, candidates]."""
        return self.weights @ error_table(candidates)


def bin_edges(value: torch.Tensor, bins: int) -> torch.Tensor:
    """Distinct lower edges of at most *bins* bins of about equal population, i64 [B], the first is 0."""
    ordered = value.reshape(-1).sort().values
    places = torch.linspace(0, len(ordered) - 1, bins + 1)[:-1].long()
    edges = ordered[places].clamp(0, THRESHOLD_LIMIT)
    edges[0] = 0
    return edges.unique()


def fit_table(
    edges: torch.Tensor, errors: torch.Tensor, candidates: Sequence[int], size: int = TABLE_SIZE
) -> tuple[list[int], list[int]]:
    """The table with the least error.

    Parameters
    ----------
    edges : i64 [B]
        Lower edges of the bins.
    errors : f64 [B, A]
        Error of each bin at each candidate.
    candidates : sequence of int
        A coefficients.
    size : int
        Entries of the table, C.

    Returns
    -------
    coefficients, thresholds : list of int
        C and C - 1. A table that needs fewer entries repeats its last one behind thresholds of 65535.
    """
    bins, count = errors.shape
    best = torch.full((size, count), torch.inf, dtype=torch.float64)
    best[0] = errors[0]
    opened = torch.zeros(bins, size, count, dtype=torch.bool)  # a segment begins at this bin
    origin = torch.zeros(bins, size, dtype=torch.long)  # coefficient of the segment before it
    for b in range(1, bins):
        least, where = best[:-1].min(-1)
        other = torch.cat((torch.full((1,), torch.inf, dtype=torch.float64), least))[:, None]
        origin[b, 1:] = where
        opened[b] = other < best
        best = torch.minimum(best, other) + errors[b]
    segment, a = divmod(int(best.argmin()), count)
    coefficients, thresholds = [candidates[a]], []
    for b in range(bins - 1, 0, -1):
        if opened[b, segment, a]:
            thresholds.append(int(edges[b]))
            a = int(origin[b, segment])
            segment -= 1
            coefficients.append(candidates[a])
    coefficients.reverse(), thresholds.reverse()
    short = size - len(coefficients)
    return coefficients + coefficients[-1:] * short, thresholds + [THRESHOLD_LIMIT] * short


def fit_kind(
    groups: Sequence[Groups], shared_coefficient: bool, statistic: str, candidates: Sequence[int] = ALL_COEFFICIENTS
) -> tuple[list[int], list[int]]:
    """The table of a layer with the least squared error over groups from many texts; see `fit_table`.

    A layer without any group that is not all zero gets the linear type for everything.
    """
    chosen_by, counted = [], []
    for part in groups:
        value, alive = normalised(part.statistics, statistic), part.statistics.peak > 0
        if shared_coefficient:
            value = shared_statistic(value, alive)
            chosen_by.append(value[value >= 0])
            counted.append(value[..., None].expand(alive.shape))
        else:
            chosen_by.append(value[alive])
            counted.append(value)
    values = torch.cat([value.reshape(-1) for value in chosen_by])
    if not values.numel():
        return [LINEAR] * TABLE_SIZE, [THRESHOLD_LIMIT] * (TABLE_SIZE - 1)
    histogram = Histogram(bin_edges(values, min(BINS, -(-values.numel() // LEAST_POPULATION))))
    for part, value in zip(groups, counted, strict=True):
        histogram.add(part, value)
    return fit_table(histogram.edges, histogram.errors(candidates), candidates)


class KeysAndValues:
    """Observer of a layer on one window of text: keeps keys and values as the caches' port takes them."""

    def __init__(self):
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def __call__(self, name: str, value: torch.Tensor) -> None:
        part = name.rpartition(".")[2]
        if part in ("keys", "values"):
            setattr(self, part, value[0].clamp(-FP16_MAX, FP16_MAX).to(torch.float16))


class Activations(KeysAndValues):
    """Observer of a layer on one window of text that keeps its queries, f32 [Hq, T, d], too."""

    def __init__(self):
        super().__init__()
        self.queries: torch.Tensor | None = None

    def __call__(self, name: str, value: torch.Tensor) -> None:
        super().__call__(name, value)
        if name.endswith(".queries"):
            self.queries = value[0]


class CacheCalibrator:
    """Fits the tables of a model, layer by layer, from what `observe_layers` shows.

    Parameters
    ----------
    group : int
        G.
    sinks : int
        First tokens of every window that are left out, as they will be INT8 sinks.
    statistic : str
        Second moment that will choose, one of `STATISTICS`.
    floor_quantile : float
        Of the largest magnitudes of a channel in each window, the quantile that becomes its floor; 1: the largest.
    floor_margin : float
        The floor is this times that quantile.
    candidates : sequence of int
        Coefficients that a table may hold.
    kinds : sequence of str
        Tables wanted, of `KINDS`.
    maps : bool
        Find maps ahead of the caches, from observers that keep queries; else vectors are cached as they are.
    output : callable, optional
        Gives the output projection f32 [hidden, Hq * d] of a layer's number, which weighs errors for the maps; default
        identity.
    """

    def __init__(
        self,
        *,
        group: int,
        sinks: int = 4,
        statistic: str = "variance",
        floor_quantile: float = FLOOR_QUANTILE,
        floor_margin: float = FLOOR_MARGIN,
        candidates: Sequence[int] = ALL_COEFFICIENTS,
        kinds: Sequence[str] = tuple(KINDS),
        maps: bool = False,
        output: Callable[[int], torch.Tensor] | None = None,
    ):
        self._group, self._sinks = check_group(group), check_sinks(sinks)
        if statistic not in STATISTICS:
            raise TensorError(f"statistic = {statistic!r}: legal is one of {', '.join(map(repr, STATISTICS))}")
        self._statistic, self._candidates, self._kinds = statistic, tuple(candidates), tuple(kinds)
        self._floor_quantile, self._floor_margin = floor_quantile, floor_margin
        self._maps, self._output = maps, output
        self._found: list[dict[str, torch.Tensor]] = []
        self._tables: dict[str, list[tuple[list[int], list[int]]]] = {kind: [] for kind in self._kinds}

    @staticmethod
    def observer() -> Activations:
        """An observer of one layer on one window."""
        return Activations()

    def add(self, observers: Iterable[KeysAndValues]) -> None:
        """Fit the next layer.

        Raises
        ------
        TensorError
            When no window of the text holds a full window of the cache.
        """
        observers = list(observers)
        rows = {part: [getattr(observer, part) for observer in observers] for part in ("keys", "values")}
        if all(x.shape[-2] < max(self._group, self._sinks + 1) for x in rows["keys"]):
            longest = max(x.shape[-2] for x in rows["keys"])
            raise TensorError(
                f"calibration windows of {longest} tokens: legal is at least group = {self._group} and more than "
                f"sinks = {self._sinks}"
            )
        maps = self._find_maps(observers, rows) if self._maps else {}
        for part, matrix in maps.items():
            rows[part] = [to_port(apply(matrix, x)) for x in rows[part]]
        late = [x[:, self._sinks :].float() for x in rows["keys"]]
        count = sum(x.shape[-2] for x in late)
        mean = fp16(sum(x.sum(-2, dtype=torch.float64) for x in late) / count)
        found = {
            "key_mean": mean,
            "key_floor": self._floor(rows["keys"], mean),
            "value_floor": self._floor(rows["values"]),
        }
        if maps:
            found |= {"key_map": maps["keys"], "value_map": maps["values"]}
        self._found.append(found)
        with independent_threads() as run:
            for name in self._kinds:
                kind = KINDS[name]
                least = self._group if kind.along_time else self._sinks + 1
                long_enough = [x for x in rows[kind.rows] if x.shape[-2] >= least]
                groups = run(lambda x, kind=kind: self._groups(x, kind, found), long_enough)
                self._tables[name].append(fit_kind(groups, kind.shared_coefficient, self._statistic, self._candidates))

    def _find_maps(
        self, observers: Sequence[Activations], rows: dict[str, list[torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Maps f16 [H, d, d] of the layer's keys and values.

        A group along time meets what a channel does within a window: keys, which have an offset, without its mean.
        """
        (kv_heads, _, dim), heads = rows["keys"][0].shape, observers[0].queries.shape[0]
        gram = None if self._output is None else output_gram(self._output(len(self._found)), heads)
        metrics = {"values": torch.eye(dim, dtype=torch.float64).expand(kv_heads, dim, dim)}
        if gram is not None:
            metrics["values"] = gram.unflatten(0, (kv_heads, -1)).sum(1, dtype=torch.float64)

        def cost(observer: Activations) -> torch.Tensor:
            text = observer.queries, observer.keys, observer.values
            return score_metric(*text, gram, sinks=self._sinks, window=self._group)

        def spread(part: str, x: torch.Tensor) -> torch.Tensor:
            rows = x[:, self._sinks :]
            size = min(self._group, rows.shape[1])
            windows = rows[:, : rows.shape[1] // size * size].unflatten(1, (-1, size))
            if part == "keys":
                return covariance(windows).mean(1)
            windows = windows.flatten(1, 2).double()
            return windows.mT @ windows / windows.shape[1]

        def find(job: tuple[str, int]) -> torch.Tensor:
            part, head = job
            return balanced_map(metrics[part][head], spreads[part][head])

        spreads = {}
        with independent_threads() as run:
            metrics["keys"] = sum(run(cost, observers))
            for part in metrics:
                long_enough = [x for x in rows[part] if x.shape[1] > self._sinks]
                spreads[part] = sum(run(lambda x, part=part: spread(part, x), long_enough)) / len(long_enough)
            jobs = [(part, head) for part in metrics for head in range(kv_heads)]
            found = torch.stack(run(find, jobs)).unflatten(0, (len(metrics), kv_heads))
        return dict(zip(metrics, found, strict=True))

    def _floor(self, rows: Sequence[torch.Tensor], mean: torch.Tensor | None = None) -> torch.Tensor:
        """Floor f16 [H, d] of a layer."""
        centre = None if mean is None else mean[:, None]
        peaks = [centred(x, centre)[:, self._sinks :].float().abs().amax(-2) for x in rows if x.shape[-2] > self._sinks]
        floor = torch.stack(peaks).quantile(self._floor_quantile, dim=0) * self._floor_margin
        return floor.clamp(max=FP16_MAX).to(torch.float16)

    def _groups(self, x: torch.Tensor, kind: Kind, found: dict[str, torch.Tensor]) -> Groups:
        mean = found["key_mean"] if kind.rows == "keys" else None
        if not kind.along_time:
            return groups_of_head(x, group=self._group, mean=mean, sinks=self._sinks)
        floor = found["key_floor" if kind.rows == "keys" else "value_floor"]
        return groups_of_time(x, group=self._group, mean=mean, floor=floor, sinks=self._sinks, offset=kind.offset)

    def result(self) -> CacheTables:
        """Tables of the layers added so far."""
        stacked = {name: torch.stack([layer[name] for layer in self._found]) for name in self._found[0]}
        tables = {
            name: Tables.of([c for c, _ in layers], [t for _, t in layers], self._statistic)
            for name, layers in self._tables.items()
        }
        return CacheTables(self._group, self._sinks, **stacked, tables=tables)


def candidate_errors(
    rows: torch.Tensor,
    kind: Kind,
    *,
    group: int,
    mean: torch.Tensor | None = None,
    floor: torch.Tensor | None = None,
    sinks: int = 0,
    candidates: Sequence[int] = ALL_COEFFICIENTS,
) -> tuple[GroupStatistics, torch.Tensor]:
    """What each coefficient would cost each group, quantised exactly as the cache does it.

    Parameters
    ----------
    rows : f16 [H, T, d]
    kind : Kind
    group, mean, floor, sinks
        As in `groups_of_head` and `groups_of_time`.
    candidates : sequence of int
        A coefficients.

    Returns
    -------
    statistics : GroupStatistics
        Of groups [H, T - sinks, d/G] or [H, W, d].
    errors : f64 [..., A]
        Squared error against the (centred) fp16 rows, or with `shared_coefficient` its sum over the channels of a
        window, [H, W, A]. The places of sinks count nothing.
    """
    x = centred(rows, None if mean is None else mean[:, None]).float()
    if kind.along_time:
        found = groups_of_time(rows, group=group, mean=mean, floor=floor, sinks=sinks, offset=kind.offset)
        exact = x[:, : x.shape[1] // group * group].unflatten(1, (-1, group)).transpose(-1, -2)
        counts = (torch.arange(exact.shape[1] * group) >= sinks).view(-1, 1, group)
    else:
        found = groups_of_head(rows, group=group, mean=mean, sinks=sinks)
        exact = to_groups(x, group)[:, sinks:, : found.q.shape[-2], : found.q.shape[-1]]
        counts = torch.ones(1, dtype=torch.bool)
    statistics, scale8 = found.statistics, found.weight.sqrt()  # weights are squares of fp16 numbers: exact
    exact = (exact - (scale8 * statistics.offset)[..., None]).masked_fill(~counts, 0)
    errors = []
    for a in candidates:
        scale = requantized_scale(scale8, statistics.peak, a)
        codes = encode_int8(found.q, statistics.peak.to(torch.int16), a).masked_fill_((scale == 0)[..., None], 0)
        error = (decode(codes, a) * scale.float()[..., None]).masked_fill_(~counts, 0) - exact
        errors.append(error.square().sum((-1, -2) if kind.shared_coefficient else -1, dtype=torch.float64))
    return statistics, torch.stack(errors, dim=-1)


def choice_error(
    statistics: GroupStatistics, errors: torch.Tensor, kind: Kind, tables: Tables, candidates: Sequence[int]
) -> tuple[float, float]:
    """Squared error at the coefficients that *tables* choose, all among the candidates, and the least possible one."""
    coefficient = choose_shared(statistics, tables)[..., 0] if kind.shared_coefficient else choose(statistics, tables)
    place = torch.zeros(256, dtype=torch.long)
    place[torch.tensor(candidates)] = torch.arange(len(candidates))
    chosen = errors.gather(-1, place[coefficient.long()][..., None])
    return float(chosen.sum()), float(errors.amin(-1).sum())
