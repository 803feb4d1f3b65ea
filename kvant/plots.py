"""Pictures of the demo: levels over weights, errors side by side, activity of the array; what the caches hold."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

HIGHLIGHT = "#0b6e99"
PLAIN = "#9aa5b1"
INK = "#1f2933"


def demo_figure(
    path: Path,
    *,
    title: str,
    normalised: np.ndarray,
    levels: Mapping[str, np.ndarray],
    errors: Mapping[str, float],
    highlighted: str,
    activity: Mapping[str, Sequence[int]],
    use: float,
):
    """Draw the picture of the demo as a PNG.

    Parameters
    ----------
    path : Path
        File to write.
    title : str
        What was multiplied.
    normalised : ndarray
        Weights, each over the largest magnitude of its group.
    levels : mapping
        Of each type shown, by its label, the values of its codes over the largest one, in any order.
    errors : mapping
        Error of the product of each format, by its label, as a fraction.
    highlighted : str
        Beginning of the label of the format drawn in colour.
    activity : mapping
        Of each stream, by its label, the cycles in which it transferred; the first one listed is drawn on top.
    use : float
        Multiply-accumulates over lanes and cycles of the run whose activity is drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK}
    with pyplot.rc_context({**style, "axes.spines.top": False, "axes.spines.right": False}):
        figure = pyplot.figure(figsize=(12, 8), layout="constrained")
        figure.suptitle(title, fontsize=13, fontweight="bold")
        top, bottom = figure.subfigures(2, 1, height_ratios=(1.9, 1))
        left, right = top.subfigures(1, 2, width_ratios=(1.35, 1))
        _draw_levels(left, normalised, levels)
        _draw_errors(right.subplots(), errors, highlighted)
        _draw_activity(bottom.subplots(), activity, use)
        figure.savefig(path, dpi=110, metadata={"Software": None})
        pyplot.close(figure)


def _draw_levels(figure, normalised: np.ndarray, levels: Mapping[str, np.ndarray]):
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.2, 1))
    upper.set_title("The 16 levels of some types, over the weights they have to fit", loc="left", fontsize=11)
    for row, values in enumerate(levels.values()):
        upper.axhline(row, color="#e4e7eb", linewidth=1, zorder=0)
        upper.plot(values, np.full(len(values), row), "|", color=HIGHLIGHT, markersize=13, markeredgewidth=1.6)
    upper.set_yticks(range(len(levels)), levels)
    upper.set_ylim(-0.6, len(levels) - 0.4)
    upper.tick_params(axis="x", labelbottom=False, length=0)
    upper.spines[["left", "bottom"]].set_visible(False)
    upper.tick_params(axis="y", length=0)
    lower.hist(normalised.ravel(), bins=np.linspace(-1, 1, 121), density=True, color=PLAIN)
    lower.set_xlabel("weight / largest magnitude of its group")
    lower.set_ylabel("density")
    lower.set_xlim(-1.03, 1.03)


def _draw_errors(axes, errors: Mapping[str, float], highlighted: str):
    names = list(errors)[::-1]
    values = [100 * errors[name] for name in names]
    axes.barh(
        names, values, color=[HIGHLIGHT if name.startswith(highlighted) else PLAIN for name in names], height=0.62
    )
    for row, value in enumerate(values):
        axes.text(value, row, f" {value:.2f} %", va="center")
    axes.set_xlim(0, 1.22 * max(values))
    axes.set_title("Error of the product against fp32, calibrated", loc="left", fontsize=11)
    axes.set_xlabel("root of squared error over squared output, in percent")
    axes.tick_params(axis="y", length=0)


def _draw_activity(axes, activity: Mapping[str, Sequence[int]], use: float):
    _draw_streams(axes, activity)
    axes.set_title(f"One token through the array: use {100 * use:.1f} %", loc="left", fontsize=11)


def cache_figure(
    path: Path,
    *,
    title: str,
    channel: str,
    original: np.ndarray,
    held: np.ndarray,
    group: int,
    errors: Mapping[str, tuple[float, float]],
    activity: Mapping[str, Sequence[int]],
    stalls: int,
):
    """Draw the picture of the caches as a PNG.

    Parameters
    ----------
    path : Path
        File to write.
    title, channel : str
        What was cached; the channel that is drawn.
    original, held : ndarray [T]
        The channel, and what the cache holds of it.
    group : int
        Tokens of a window; those behind the last full one are INT8.
    errors : mapping
        Of each cache, by its label, bits and error as a fraction. Labels that end in ``RTL`` are drawn in colour.
    activity : mapping
        Of each stream, by its label, the cycles in which it transferred.
    stalls : int
        Cycles in which a row waited.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK}
    with pyplot.rc_context({**style, "axes.spines.top": False, "axes.spines.right": False}):
        figure = pyplot.figure(figsize=(12, 9), layout="constrained")
        figure.suptitle(title, fontsize=13, fontweight="bold")
        top, middle, bottom = figure.subfigures(3, 1, height_ratios=(1, 1.1, 0.8))
        _draw_channel(top.subplots(), channel, original, held, group)
        _draw_cache_errors(middle.subplots(), errors)
        axes = bottom.subplots()
        _draw_streams(axes, activity)
        axes.set_title(
            f"Rows in, blocks out: a window is requantised while the next one fills; {stalls} stall cycles",
            loc="left",
            fontsize=11,
        )
        figure.savefig(path, dpi=110, metadata={"Software": None})
        pyplot.close(figure)


def pq_figure(
    path: Path, *, title: str, scores: np.ndarray, exact_scores: np.ndarray, out: np.ndarray, exact: np.ndarray
):
    """Draw the picture of product quantisation as a PNG.

    Parameters
    ----------
    path : Path
        File to write.
    title : str
        What was coded.
    scores, exact_scores : ndarray [T]
        Of one query, from look-up tables and exact.
    out, exact : ndarray [d]
        Its output, and that of float64 attention over the original rows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"font.size": 10, "axes.edgecolor": INK, "text.color": INK, "axes.labelcolor": INK}
    with pyplot.rc_context({**style, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), width_ratios=(1, 1.6), layout="constrained")
        figure.suptitle(title, fontsize=13, fontweight="bold")
        ends = min(scores.min(), exact_scores.min()), max(scores.max(), exact_scores.max())
        left.plot(ends, ends, color=PLAIN, linewidth=1)
        left.plot(exact_scores, scores, ".", color=HIGHLIGHT)
        left.set_xlabel("exact score of a coded key")
        left.set_ylabel("score from the tables, RTL")
        left.set_title("Scores", loc="left", fontsize=11)
        right.plot(exact, color=PLAIN, linewidth=2.2, label="float64 attention, original rows")
        right.step(range(len(out)), out, where="mid", color=HIGHLIGHT, linewidth=1, label="RTL")
        right.set_xlim(-1, len(out))
        right.set_xlabel("channel")
        right.set_title("Output of the query", loc="left", fontsize=11)
        right.legend(ncols=2, loc="best", frameon=False)
        figure.savefig(path, dpi=110, metadata={"Software": None})
        pyplot.close(figure)


def _draw_channel(axes, channel: str, original: np.ndarray, held: np.ndarray, group: int):
    full = len(original) // group * group
    for start in range(0, full, 2 * group):
        axes.axvspan(start, start + group, color="#f1f4f7", zorder=0)
    axes.plot(original, color=PLAIN, linewidth=2.2, label="fp16")
    axes.step(range(full), held[:full], where="mid", color=HIGHLIGHT, linewidth=1, label="4-bit windows")
    axes.step(range(full, len(held)), held[full:], where="mid", color="#c2410c", linewidth=1, label="open window, INT8")
    axes.set_xlim(0, len(original))
    axes.set_xlabel("token")
    axes.set_title(channel, loc="left", fontsize=11)
    axes.legend(ncols=3, loc="upper right", frameon=False)


def _draw_cache_errors(axes, errors: Mapping[str, tuple[float, float]]):
    names = list(errors)[::-1]
    values = [100 * errors[name][1] for name in names]
    colours = [HIGHLIGHT if name.endswith("RTL") else PLAIN for name in names]
    axes.barh([f"{name}, {errors[name][0]:.2f} bits" for name in names], values, color=colours, height=0.62)
    for row, value in enumerate(values):
        axes.text(value, row, f" {value:.1f} %", va="center")
    axes.set_xlim(0, 1.15 * max(values))
    axes.set_title("Error of what the cache holds", loc="left", fontsize=11)
    axes.set_xlabel("root of squared error over squared rows, in percent")
    axes.tick_params(axis="y", length=0)


def _draw_streams(axes, activity: Mapping[str, Sequence[int]]):
    names = list(activity)
    for row, name in enumerate(names):
        axes.broken_barh(runs(activity[name]), (row - 0.34, 0.68), color=HIGHLIGHT if row == 0 else PLAIN)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1 + max(max(cycles) for cycles in activity.values() if len(cycles)))
    axes.set_xlabel("clock cycle")
    axes.tick_params(axis="y", length=0)


def runs(cycles: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers in ascending *cycles*, as (first, length)."""
    cycles = np.asarray(cycles)
    breaks = np.flatnonzero(np.diff(cycles) != 1) + 1
    return [(int(part[0]), len(part)) for part in np.split(cycles, breaks) if len(part)]


def context_figure(
    path: Path, curves: Mapping[str, Mapping[int, tuple[float, float]]], *, port_bytes: int, queries: int
):
    """Draw cycles of a command of attention over the length of the context, beside what its bytes take at the port.

    Parameters
    ----------
    path : Path
        PNG to write.
    curves : mapping
        Of each format, by tokens, cycles and bytes of a command.
    port_bytes : int
        Bytes of a word of the port.
    queries : int
        Queries of a command.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = pyplot.figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for name, points in curves.items():
            tokens = sorted(points)
            (line,) = axes.plot(tokens, [points[t][0] for t in tokens], marker="o", label=f"{name}, cycles of the RTL")
            bound = [points[t][1] / port_bytes for t in tokens]
            axes.plot(tokens, bound, linestyle=":", color=line.get_color(), label=f"{name}, words of the port")
        axes.set(xscale="log", yscale="log", xlabel="tokens of the context", ylabel="cycles")
        axes.set_title(f"A command of {queries} queries of one KV head", fontweight="bold", color=INK)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=110, metadata={"Software": None})
        pyplot.close(figure)
