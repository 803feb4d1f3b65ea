"""Pictures of the demo: levels over weights, errors side by side, activity of the array."""

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
    names = list(activity)
    for row, name in enumerate(names):
        axes.broken_barh(runs(activity[name]), (row - 0.34, 0.68), color=HIGHLIGHT if row == 0 else PLAIN)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1 + max(max(cycles) for cycles in activity.values()))
    axes.set_title(f"One token through the array: use {100 * use:.1f} %", loc="left", fontsize=11)
    axes.set_xlabel("clock cycle")
    axes.tick_params(axis="y", length=0)


def runs(cycles: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers in ascending *cycles*, as (first, length)."""
    cycles = np.asarray(cycles)
    breaks = np.flatnonzero(np.diff(cycles) != 1) + 1
    return [(int(part[0]), len(part)) for part in np.split(cycles, breaks) if len(part)]
