"""``kvant quantize``: the linear weights of a model to M-ANT and the tables of its caches, into one checked file."""

import fnmatch
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvant import __version__
from kvant.commands.model import ModelArgument
from kvant.errors import InputError
from kvant.options import ConfigOption, SetOption

if TYPE_CHECKING:
    import torch

    from kvant.config import Config
    from kvant.golden.kvcache.calibration import CacheTables
    from kvant.golden.linear.weights import QuantizedWeights
    from kvant.golden.models.checkpoint import Checkpoint, TensorInfo
    from kvant.golden.pq.calibration import ModelCodebooks

SCALE_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Scales tried by ``--scale-search``, as factors of ``absmax / M``."""

BUILTIN_TEXT = "builtin"
"""Name of the calibration text that every Python carries: the language reference behind its help()."""

WINDOW = 512
"""Tokens of a calibration window."""

SINKS = 4
"""First tokens of a sequence that model presets keep INT8 in the caches."""

Objective = Literal["full", "diagonal", "weight"]


@dataclass(frozen=True)
class Recipe:
    """How weights are quantised.

    Parameters
    ----------
    group : int
        Elements of a group along K, G.
    coefficients : tuple of int
        Table to choose from.
    objective : str
        ``full``: least output error, with ``X_g^T X_g``; ``diagonal``: with its diagonal; ``weight``: least weight
        error.
    scale_factors : tuple of float
        Scales tried, as factors of ``absmax / M``.
    outlier_groups : float or None
        Groups whose largest magnitude exceeds this many times their root mean square stay INT8.
    text : str or None
        Calibration text: a path or `BUILTIN_TEXT`; None calibrates nothing, then the objective is ``weight``.
    tokens : int
        Tokens of the text used.
    window : int or None
        Tokens of one window of it; None: `WINDOW`, or the model's context where that is shorter.
    sinks : int
        First tokens of a window that the tables of the caches leave out.
    statistic : str
        Second moment that chooses coefficients in the caches.
    codebooks : tuple of str
        Kinds of codebooks trained for product-quantised caches, as ``key_2x8``.
    maps : bool
        Fit tables and codebooks behind maps of keys and values, which the host applies.
    """

    group: int
    coefficients: tuple[int, ...]
    objective: Objective = "weight"
    scale_factors: tuple[float, ...] = (1.0,)
    outlier_groups: float | None = None
    text: str | None = None
    tokens: int = 16384
    window: int | None = None
    sinks: int = SINKS
    statistic: Literal["variance", "moment"] = "variance"
    codebooks: tuple[str, ...] = ()
    maps: bool = True


@dataclass(frozen=True)
class TensorReport:
    """What became of one weight.

    Parameters
    ----------
    info : TensorInfo
        The weight.
    weights : QuantizedWeights
        Its codes.
    weight_loss : float
        Squared error over the weight's own square.
    output_loss : float or None
        The same with both weighted by the calibration's second moments.
    resumed : bool
        Taken from an interrupted run.
    """

    info: "TensorInfo"
    weights: "QuantizedWeights"
    weight_loss: float
    output_loss: float | None
    resumed: bool


@dataclass(frozen=True)
class Workspace:
    """Side folder of a run: finished tensors, kept when the run is interrupted.

    Parameters
    ----------
    folder : Path
        Beside the output file.
    job : dict
        Everything the tensors depend on. A folder left by another job is emptied.
    """

    folder: Path
    job: dict

    def __post_init__(self):
        stamp = self.folder / "job.json"
        text = json.dumps(self.job, sort_keys=True, indent=1)
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != text:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            stamp.write_text(text, encoding="utf-8")

    def path(self, number: int) -> Path:
        """File of a tensor, by its place in the job."""
        return self.folder / f"{number:05d}.safetensors"

    def load(self, number: int, name: str) -> "QuantizedWeights | None":
        """A finished tensor, or None; what cannot be read counts as not finished."""
        from kvant import packed

        try:
            return packed.load(self.path(number)).tensors.get(name)
        except InputError:
            return None

    def save(self, number: int, name: str, weights: "QuantizedWeights") -> None:
        """Keep a finished tensor."""
        from kvant import packed

        packed.save(self.path(number), {name: weights}, {}, {})

    def remove(self) -> None:
        """Give the folder back."""
        shutil.rmtree(self.folder, ignore_errors=True)


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command()(quantize)


def quantize(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write (safetensors).")],
    config: ConfigOption = None,
    set_: SetOption = None,
    group: Annotated[int | None, typer.Option(help="Elements of a group along K; overrides the configuration.")] = None,
    coefficients: Annotated[
        str | None, typer.Option(metavar="A,A,...", help="Table of coefficients; overrides the configuration.")
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Calibrate on a text file, or on 'builtin', a text every Python carries."),
    ] = None,
    weight_error: Annotated[bool, typer.Option("--weight-error", help="No calibration: least weight error.")] = False,
    objective: Annotated[
        Objective | None,
        typer.Option(help="What the search minimises.", show_default="full with a calibration text, else weight"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the calibration text used.")] = Recipe.tokens,
    window: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a calibration window.", show_default=f"{WINDOW}, or the model's context"),
    ] = None,
    scale_search: Annotated[bool, typer.Option("--scale-search", help="Try smaller scales too.")] = False,
    outlier_groups: Annotated[
        float | None,
        typer.Option(metavar="X", help="Keep groups INT8 whose largest magnitude exceeds X times their RMS."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Weights to quantise, as in '*.q_proj.weight'; repeatable."),
    ] = None,
    sinks: Annotated[
        int, typer.Option(min=0, max=256, help="First tokens that the caches' tables leave out: INT8 sinks.")
    ] = SINKS,
    cache_only: Annotated[
        bool, typer.Option("--cache-only", help="No weights: only what the caches need. Needs --calibrate.")
    ] = False,
    codebooks: Annotated[
        str | None,
        typer.Option(
            metavar="KIND,...",
            help="Train codebooks for product-quantised caches: 'key_2x8' has 2 dimensions a sub-space, 8 bits a code. "
            "Needs --calibrate.",
        ),
    ] = None,
    maps: Annotated[
        bool,
        typer.Option(
            "--maps/--no-maps",
            help="Fit tables and codebooks of keys and values behind linear maps, which the host applies.",
        ),
    ] = Recipe.maps,
) -> None:
    """Quantise the linear weights of MODEL to M-ANT, and with a calibration text fit the tables of its caches.

    GPTQ, AWQ and GGUF weights are dequantised and fitted anew; the loss of every tensor is printed. An interrupted run
    continues where it stopped when started again with the same options.
    """
    from kvant.golden.models.checkpoint import open_model

    if calibrate is not None and weight_error:
        raise InputError("--calibrate and --weight-error: legal is one of them")
    if cache_only and (calibrate is None or only):
        raise InputError("--cache-only: needs --calibrate TEXT, and takes no --only")
    if codebooks is not None and calibrate is None:
        raise InputError(f"--codebooks {codebooks}: needs --calibrate TEXT")
    if calibrate is None and objective not in (None, "weight"):
        raise InputError(f"--objective {objective}: needs --calibrate TEXT")
    if outlier_groups is not None and not (math.isfinite(outlier_groups) and outlier_groups > 0):
        raise InputError(f"--outlier-groups = {outlier_groups}: legal is a finite number above 0")
    settings = _settings(config, set_, group, coefficients)
    recipe = Recipe(
        group=settings.linear.group,
        coefficients=settings.coefficients,
        objective=objective or ("full" if calibrate else "weight"),
        scale_factors=SCALE_FACTORS if scale_search else (1.0,),
        outlier_groups=outlier_groups,
        text=calibrate,
        tokens=tokens,
        window=window,
        sinks=sinks,
        statistic=settings.cache.statistic,
        codebooks=tuple(kind.strip() for kind in codebooks.split(",")) if codebooks is not None else (),
        maps=maps,
    )
    _check_output(output, model)
    checkpoint = open_model(model)
    codebook_calibrator(recipe, checkpoint)  # refuses what it cannot train, before the work
    chosen = [] if cache_only else choose_tensors(checkpoint, only or [])
    _run(checkpoint, chosen, recipe, output)


def _settings(
    config: Path | None, overrides: list[str] | None, group: int | None, coefficients: str | None
) -> "Config":
    """The configuration, with the options that name a field of it directly as the last overrides."""
    from kvant import config as configuration

    overrides = list(overrides or [])
    if group is not None:
        overrides.append(f"group={group}")
    if coefficients is not None:
        overrides.append(f"coefficients=[{coefficients}]")
    return configuration.load(config, overrides)


def _check_output(output: Path, model: str) -> None:
    """Refuse what could not be written at the end, hours later."""
    if output.is_dir():
        raise InputError(f"{output}: is a folder; legal is a file to write")
    if not output.absolute().parent.is_dir():
        raise InputError(f"{output}: its folder {output.absolute().parent} does not exist")
    if not os.access(output.absolute().parent, os.W_OK):
        raise InputError(f"{output}: its folder {output.absolute().parent} cannot be written")
    source = Path(model)
    inside = [source] if source.is_file() else list(source.glob("*.safetensors")) if source.is_dir() else []
    if output.exists() and any(output.samefile(file) for file in inside):
        raise InputError(f"{output}: is a file of the model itself")


def choose_tensors(checkpoint: "Checkpoint", patterns: Sequence[str]) -> "list[TensorInfo]":
    """The weights to quantise: all linear weights, or those among them and the output projection that match.

    Raises
    ------
    InputError
        A pattern that matches nothing, or a model without linear weights.
    """
    if not patterns:
        if not checkpoint.linear_weights:
            raise InputError(f"{checkpoint.path}: has no linear weight (2-D, named *.weight, no embedding, no norm)")
        return checkpoint.linear_weights
    legal = [info for info in checkpoint.tensors.values() if info.role in ("linear", "head")]
    for pattern in patterns:
        if not fnmatch.filter([info.name for info in legal], pattern):
            example = legal[0].name if legal else "none, the model has no linear weight"
            raise InputError(f"--only {pattern!r}: matches no linear weight; one of them is {example}")
    return [info for info in legal if any(fnmatch.fnmatchcase(info.name, pattern) for pattern in patterns)]


def calibration_text(text: str) -> str:
    """The text of a path, or the built-in one.

    Raises
    ------
    InputError
        A file that is missing or is not UTF-8.
    """
    if text == BUILTIN_TEXT:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        return Path(text).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--calibrate {text}: {error.strerror}; legal is a text file or {BUILTIN_TEXT!r}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--calibrate {text}: not UTF-8 at byte {error.start}") from None


def quantize_tensors(
    checkpoint: "Checkpoint",
    chosen: "Sequence[TensorInfo]",
    recipe: Recipe,
    moments: dict | None = None,
    workspace: Workspace | None = None,
) -> Iterator[TensorReport]:
    """Quantise weights one by one.

    Parameters
    ----------
    checkpoint : Checkpoint
        Where they come from.
    chosen : sequence of TensorInfo
        Which.
    recipe : Recipe
        How.
    moments : dict of str to tensor, optional
        Second moments by name, full or diagonal; weights without one are searched by weight error.
    workspace : Workspace, optional
        Keeps and gives finished tensors.

    Yields
    ------
    TensorReport
    """
    from kvant.golden.linear.search import quantize_weights
    from kvant.golden.models.calibration import output_energy

    for number, info in enumerate(chosen):
        w = checkpoint.weight(info.name)
        moment = (moments or {}).get(info.name)
        found = workspace.load(number, info.name) if workspace else None
        weights = found or quantize_weights(
            w,
            recipe.group,
            recipe.coefficients,
            second_moment=None if recipe.objective == "weight" else moment,
            scale_factors=recipe.scale_factors,
            outlier_groups=recipe.outlier_groups,
            name=info.name,
        )
        if workspace and found is None:
            workspace.save(number, info.name, weights)
        error = w - weights.dequantize()
        output_loss = None
        if moment is not None:
            output_loss = _ratio(output_energy(error, moment, recipe.group), output_energy(w, moment, recipe.group))
        weight_loss = _ratio(float(error.double().square().sum()), float(w.double().square().sum()))
        yield TensorReport(info, weights, weight_loss, output_loss, found is not None)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _run(checkpoint: "Checkpoint", chosen: "list[TensorInfo]", recipe: Recipe, output: Path) -> None:
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kvant import packed

    columns = (TextColumn("{task.description:11}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    configuration, windows = _configuration(checkpoint, recipe)
    source = {"name": checkpoint.path.name, "sha256": checkpoint.sha256()}
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        names = [info.name for info in chosen]
        job = {"configuration": configuration, "source": source, "tensors": names, "layout": packed.VERSION}
        workspace = Workspace(output.with_name(output.name + ".partial"), job)
        try:
            moments, cache, codebooks = None, None, None
            if windows is not None:
                moments, cache, codebooks = _calibrate(checkpoint, windows, recipe, names, workspace, progress)
            started = time.perf_counter()
            task = progress.add_task("quantise", total=len(chosen))
            reports = []
            width = max((len(name) for name in names), default=0)
            for report in quantize_tensors(checkpoint, chosen, recipe, moments, workspace):
                reports.append(report)
                typer.echo(f"{report.info.name:{width}}  {_described(report)}")
                progress.advance(task)
            seconds = time.perf_counter() - started
            tensors = {report.info.name: report.weights for report in reports}
            packed.save(output, tensors, configuration, source, cache, codebooks)
        except KeyboardInterrupt:
            typer.echo(f"stopped; {workspace.folder} keeps what is finished for the next run", err=True)
            raise
        workspace.remove()
    if reports:
        typer.echo(_summary(reports, seconds))
    if windows is not None:
        typer.echo(_cache_summary(cache, recipe))
    if codebooks is not None:
        typer.echo(_codebook_summary(codebooks))
    typer.echo(f"written: {output}")


def _configuration(checkpoint: "Checkpoint", recipe: Recipe):
    """Configuration as stored in the file, and the calibration windows."""
    from kvant.golden.models import calibration

    windows, described = None, None
    if recipe.text is not None:
        window = recipe.window or min(WINDOW, checkpoint.config.context)
        text = calibration_text(recipe.text)
        windows = calibration.calibration_windows(checkpoint, text, recipe.tokens, window)
        described = {
            "text": recipe.text if recipe.text == BUILTIN_TEXT else Path(recipe.text).name,
            "sha256": calibration.digest(windows),
            "tokens": sum(len(window) for window in windows),
            "window": window,
        }
    configuration = {
        "kvant": __version__,
        "group": recipe.group,
        "coefficients": list(recipe.coefficients),
        "objective": recipe.objective,
        "scale_factors": list(recipe.scale_factors),
        "outlier_groups": recipe.outlier_groups,
        "sinks": recipe.sinks,
        "statistic": recipe.statistic,
        "codebooks": list(recipe.codebooks),
        "maps": recipe.maps,
        "calibration": described,
    }
    return configuration, windows


def output_projection(checkpoint: "Checkpoint") -> "Callable[[int], torch.Tensor]":
    """Gives the output projection of a layer's attention by its number."""
    return lambda layer: checkpoint.weight(f"model.layers.{layer}.self_attn.o_proj.weight")


def codebook_calibrator(recipe: Recipe, checkpoint: "Checkpoint"):
    """What trains the codebooks of a recipe, or None.

    Raises
    ------
    InputError
        A kind that does not exist or does not fit the model.
    """
    from kvant.golden.errors import TensorError
    from kvant.golden.pq.calibration import CodebookCalibrator

    if not recipe.codebooks:
        return None
    try:
        calibrator = CodebookCalibrator(
            recipe.codebooks,
            sinks=recipe.sinks,
            maps=recipe.maps,
            output=output_projection(checkpoint),
        )
        calibrator.check(checkpoint.config.head_dim)
    except TensorError as error:
        raise InputError(f"--codebooks: {error}") from None
    return calibrator


def _calibrate(
    checkpoint, windows, recipe: Recipe, names: Sequence[str], workspace: Workspace, progress
) -> "tuple[dict | None, CacheTables | None, ModelCodebooks | None]":
    """Second moments for the weights *names*, tables and codebooks for the caches, from one run of the text.

    Taken from an interrupted run if it came so far.

    No moments without names, no tables where the windows hold no group of a cache.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save_file

    from kvant import packed
    from kvant.golden.kvcache.calibration import CacheCalibrator
    from kvant.golden.models.calibration import Moments, observe_layers

    moments_path, cache_path = (workspace.folder / f"{name}.safetensors" for name in ("moments", "caches"))
    try:
        found = packed.load(cache_path)
        return load_file(moments_path) or None, found.cache, found.codebooks
    except (SafetensorError, OSError, InputError):  # not there, or cut off by the interrupt
        pass
    task = progress.add_task("calibrate", total=checkpoint.config.layers)
    advance: Callable[[int, int], None] = lambda done, _: progress.update(task, completed=done)  # noqa: E731
    moments = Moments(recipe.group, diagonal=recipe.objective == "diagonal", names=names)
    caches = CacheCalibrator(
        group=recipe.group,
        sinks=recipe.sinks,
        statistic=recipe.statistic,
        maps=recipe.maps,
        output=output_projection(checkpoint),
    )
    codebooks = codebook_calibrator(recipe, checkpoint)
    # where only the tables are wanted, windows that are too short for them are refused
    long_enough = not names or max(len(window) for window in windows) >= max(recipe.group, recipe.sinks + 1)

    class Both:
        """Observer for moments and caches."""

        def __init__(self):
            self.moments, self.caches = moments.observer(), caches.observer()

        def __call__(self, name, value) -> None:
            self.moments(name, value)
            self.caches(name, value)

    for _, observers in observe_layers(checkpoint, windows, Both, advance):
        moments.add(observer.moments for observer in observers)
        if long_enough:
            caches.add(observer.caches for observer in observers)
        if codebooks is not None:
            codebooks.add(observer.caches for observer in observers)
    found = moments.result(sum(len(window) for window in windows)).moments
    tables = caches.result() if long_enough else None
    books = None if codebooks is None else codebooks.result()
    packed.save(cache_path, {}, {}, {}, tables, books)
    part = moments_path.with_suffix(".part")
    save_file({name: moment.clone() for name, moment in found.items()}, part)
    os.replace(part, moments_path)
    return found or None, tables, books


def _cache_summary(cache: "CacheTables | None", recipe: Recipe) -> str:
    if cache is None:
        return f"no tables for caches: no calibration window holds a group of {recipe.group} tokens behind the sinks"
    text = f"tables for the caches of {len(cache.key_mean)} layers: {', '.join(cache.tables)}"
    return text + _described_maps(cache.key_map is not None)


def _codebook_summary(codebooks: "ModelCodebooks") -> str:
    sizes = [f"{kind} ({book.entries.nbytes + book.scale.nbytes:,} bytes)" for kind, book in codebooks.books.items()]
    text = f"codebooks of {len(codebooks.key_mean)} layers: {', '.join(sizes)}"
    return text + _described_maps(bool(codebooks.transforms))


def _described_maps(present: bool) -> str:
    return "; keys and values pass through maps first" if present else ""


def _described(report: TensorReport) -> str:
    text = f"{report.info.stored:11}  weight error {report.weight_loss:.3e}"
    if report.output_loss is not None:
        text += f"  output error {report.output_loss:.3e}"
    if report.weights.int8 is not None:
        from kvant.golden.numeric.codes import INT8

        text += f"  {int((report.weights.coefficient == INT8).sum())} INT8 groups"
    return text + ("  (resumed)" if report.resumed else "")


def _summary(reports: Sequence[TensorReport], seconds: float) -> str:
    from kvant import packed

    elements = sum(math.prod(report.weights.shape) for report in reports)
    sizes = packed.total_bytes(report.weights for report in reports)
    total = sum(sizes.values())
    parts = " + ".join(f"{count:,} {part}" for part, count in sizes.items() if count)
    lines = [
        f"{len(reports)} weights, {elements:,} elements in {seconds:.1f} s",
        f"{total:,} bytes = {parts}; {8 * total / elements:.3f} bits per weight",
        f"mean relative squared error of the weights {_mean(report.weight_loss for report in reports):.3e}",
    ]
    if all(report.output_loss is not None for report in reports):
        lines[-1] += f", of the outputs {_mean(report.output_loss for report in reports):.3e}"
    return "\n".join(lines)


def _mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)
