"""``kvant eval``: what cache formats cost a model, in perplexity and divergence, over windows of a text."""

import csv
import hashlib
import io
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.commands.model import ModelArgument
from kvant.errors import InputError

if TYPE_CHECKING:
    from kvant import packed
    from kvant.golden.kvcache.calibration import CacheTables
    from kvant.golden.kvcache.formats import CacheSettings
    from kvant.golden.models.checkpoint import Checkpoint
    from kvant.golden.models.evaluate import Losses, Window
    from kvant.golden.pq.calibration import ModelCodebooks

DEFAULT_FORMATS = ("fp32", "int8", "int4_asymmetric", "int4_asymmetric_time", "kivi")
"""Formats compared where none are named."""

CALIBRATED_FORMATS = ("mant_head", "mant_time", "mant_time_integer")
"""Further ones where there are tables."""

PAPERS_FORMATS = (
    "fp32", "int8", "int4", "int4_asymmetric", "nf4", "ant", "olive", "bitmod", "mxfp4", "nvfp4", "mant_search",
    "int4_asymmetric_time", "kivi",
)  # fmt: skip
"""Caches of `--preset papers` that need no calibration; calibrated and trained ones join as by default."""

QUICK_WINDOW = 256
"""Tokens of the window of `--quick`."""

WINDOW = 512
"""Tokens of a window of text."""

COLUMNS = ("format", "bits", "bits stored", "perplexity", "dnll", "+-", "KL", "+-")


@dataclass(frozen=True)
class Row:
    """Figures of one format.

    Parameters
    ----------
    name : str
    bits : float
        Bits per element of full windows, metadata of groups included; mean of keys and values.
    stored : float
        Bits per element of a cache as long as a window of the text, everything counted.
    losses : Losses
    """

    name: str
    bits: float
    stored: float
    losses: "Losses"

    def cells(self) -> list[str]:
        """In the order of `COLUMNS`."""
        (dnll, dnll_error), (kl, kl_error) = self.losses.dnll, self.losses.divergence
        figures = (
            f"{self.bits:.3f}",
            f"{self.stored:.3f}",
            f"{self.losses.perplexity:.3f}",
            f"{dnll:.4f}",
            f"{dnll_error:.4f}",
            f"{kl:.5f}",
            f"{kl_error:.5f}",
        )
        return [self.name, *figures]


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("eval")(evaluate)


def evaluate(
    model: ModelArgument,
    text: Annotated[Path | None, typer.Option(help="Text to predict (UTF-8).")] = None,
    token_windows: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", help="Token numbers i32 [windows, length] in place of a text.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Tables of the caches, from `kvant quantize --calibrate`.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a window.", show_default=f"{WINDOW}, or the model's context"),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens between the begins of windows.", show_default="a window")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, help="Windows used, from the first.", show_default="all")
    ] = None,
    bos: Annotated[
        int | None, typer.Option(min=0, help="Token number put before every window.", show_default="none")
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Cache formats, or 'list'.", show_default="the usual ones that can be"),
    ] = None,
    group: Annotated[
        int | None, typer.Option(min=8, help="Elements of a group.", show_default="that of the tables, or 64")
    ] = None,
    sinks: Annotated[
        int | None, typer.Option(min=0, help="First tokens that stay INT8.", show_default="as in the tables, or 4")
    ] = None,
    recent: Annotated[int, typer.Option(min=0, help="Newest tokens that product-quantised caches keep INT8.")] = 64,
    prefill: Annotated[
        int, typer.Option(min=0, help="Tokens of the first call, which fix INT8 scales; 0: all of a window.")
    ] = 1,
    weights: Annotated[
        Path | None, typer.Option(help="Quantised weights that all formats are measured with, the reference is not.")
    ] = None,
    weight_formats: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Number formats of weights, or 'list'.", show_default="none")
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(metavar="int8", help="Inputs of linear layers under the weight formats.", show_default="float32"),
    ] = None,
    scale_search: Annotated[
        bool, typer.Option(help="Weight formats search their scales: full range and 5, 10, 15, 20 % below it.")
    ] = False,
    preset: Annotated[
        str | None, typer.Option(metavar="papers", help="Formats of weights and caches that the two papers compare.")
    ] = None,
    quick: Annotated[bool, typer.Option(help=f"One window of {QUICK_WINDOW} tokens, unless said otherwise.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the table here too: .csv, .md or .json.")
    ] = None,
) -> None:
    """Compare cache formats in MODEL, or formats of weights, over windows of a text.

    Measured are perplexity, the loss above the unquantised model, and the KL divergence from it.

    With -o, an interrupted run continues where it stopped when started again with the same options.
    """
    from kvant import eval_weights, packed
    from kvant.golden.kvcache.formats import CacheSettings
    from kvant.golden.models.checkpoint import open_model

    if "list" in (formats, weight_formats):
        typer.echo(_listed() if formats == "list" else "\n".join(eval_weights.names()))
        return
    _check_output(output)
    if preset is not None and preset != "papers":
        raise InputError(f"--preset {preset!r}: legal is papers")
    weighed = eval_weights.chosen(weight_formats, activations, preset)
    if (text is None) == (token_windows is None):
        raise InputError("--text, --token-windows: legal is one of them")
    checkpoint = open_model(model)
    found = packed.load_for(checkpoint, tables, "--tables")
    cache, codebooks = _of_caches(found, tables)
    settings = CacheSettings.of(cache, codebooks, group=group, sinks=sinks, prefill=prefill or None, recent=recent)
    only_weights = formats is None and preset is None and weighed
    names = [] if only_weights else _format_names(formats, settings, PAPERS_FORMATS if preset else DEFAULT_FORMATS)
    length = window or min(QUICK_WINDOW if quick else WINDOW, checkpoint.config.context)
    pieces = _windows(checkpoint, text, token_windows, length, stride, bos)[: windows or (1 if quick else None)]
    longest = _longest(pieces, checkpoint.config.context)
    quantised = packed.load_for(checkpoint, weights, "--weights")
    begin = "no BOS, first token of a window not predicted" if bos is None else f"BOS {bos}"
    typer.echo(
        f"protocol: {len(pieces)} windows of up to {longest} tokens, stride {stride or 'a window'}, {begin}, "
        f"{sum(piece.counted for piece in pieces)} tokens counted, float32"
    )
    rows = []
    if names:
        first_call = "all of a window" if settings.prefill is None else f"{settings.prefill} token(s)"
        window_kept = f", product-quantised ones with {recent} recent" if any(_codebooks_of(names)) else ""
        typer.echo(f"caches: groups of {settings.group}, {settings.sinks} sinks, first call {first_call}{window_kept}")
        if found is not None:
            typer.echo(_described_tables(tables, found, longest))
        losses = _losses(checkpoint, pieces, names, settings, quantised, output)
        rows = [_row(name, settings, checkpoint, longest, losses[name]) for name in names]
    if weighed:
        setting = eval_weights.Setting(settings.group, activations == "int8", scale_search)
        typer.echo(f"weights: {setting.described}")
        rows += eval_weights.rows(checkpoint, pieces, weighed, setting, output)
    typer.echo(markdown(rows))
    if output is not None:
        _write(output, rows)


def _listed() -> str:
    """All cache formats, what they are and what they need."""
    from kvant.golden.kvcache.formats import CACHE_FORMATS

    width, lines = max(map(len, CACHE_FORMATS)) + 2, []
    for name, format_ in CACHE_FORMATS.items():
        needs = " (needs --tables)" if format_.calibrated else ""
        if format_.codebooks:
            needs = f" (needs --tables with codebooks {','.join(format_.codebooks)})"
        lines.append(f"{name:{width}}{format_.description}{needs}")
    return "\n".join(lines)


def _of_caches(
    found: "packed.PackedModel | None", tables: Path | None
) -> "tuple[CacheTables | None, ModelCodebooks | None]":
    """What a file of tables holds for caches."""
    if found is None:
        return None, None
    if found.cache is None and found.codebooks is None:
        raise InputError(f"--tables {tables}: holds no tables of caches; `kvant quantize --calibrate TEXT` fits them")
    return found.cache, found.codebooks


def _longest(pieces: "Sequence[Window]", context: int) -> int:
    """Tokens of the longest window, within the model's context."""
    longest = max(len(piece.tokens) for piece in pieces)
    if longest > context:
        raise InputError(f"window of {longest} tokens: legal is up to {context}, the model's context")
    return longest


def _check_output(output: Path | None) -> None:
    """Refuse before the work what could not be written behind it."""
    from kvant.tensors import check_target

    if output is None:
        return
    if output.suffix not in _WRITERS:
        raise InputError(f"-o {output}: suffix {output.suffix!r}; legal is one of {', '.join(_WRITERS)}")
    check_target(output)


def _format_names(formats: str | None, settings: "CacheSettings", default: Sequence[str]) -> list[str]:
    from kvant.golden.errors import TensorError
    from kvant.golden.kvcache.formats import CACHE_FORMATS

    if formats is None:
        trained = settings.codebooks.books if settings.codebooks else {}
        coded = [
            name
            for name, f in CACHE_FORMATS.items()
            if f.codebooks and f.integer and all(kind in trained for kind in f.codebooks)
        ]
        return [*default, *(CALIBRATED_FORMATS if settings.tables else ()), *coded]
    names = list(dict.fromkeys(name.strip() for name in formats.split(",")))
    for name in names:
        if name not in CACHE_FORMATS:
            raise InputError(f"--formats {name!r}: legal are {', '.join(CACHE_FORMATS)}")
        if CACHE_FORMATS[name].calibrated and settings.tables is None:
            raise InputError(f"--formats {name}: needs --tables; `kvant quantize MODEL --calibrate TEXT` fits them")
        if CACHE_FORMATS[name].mapped and settings.tables.key_map is None:
            raise InputError(f"--formats {name}: needs --tables with maps; `kvant quantize` made these with --no-maps")
        if kinds := CACHE_FORMATS[name].codebooks:
            try:
                settings.trained(kinds)
            except TensorError as error:
                raise InputError(
                    f"--formats {name}: needs --tables with codebooks {','.join(kinds)} ({error}); "
                    "`kvant quantize MODEL --calibrate TEXT --codebooks KINDS` trains them"
                ) from None
    return names


def _codebooks_of(names: Sequence[str]) -> list[str]:
    """Kinds of codebooks that formats need."""
    from kvant.golden.kvcache.formats import CACHE_FORMATS

    return [kind for name in names for kind in CACHE_FORMATS[name].codebooks]


def _windows(
    checkpoint: "Checkpoint",
    text: Path | None,
    token_windows: Path | None,
    window: int,
    stride: int | None,
    bos: int | None,
) -> "list[Window]":
    import numpy as np
    import torch

    from kvant.golden.models.evaluate import Window, cut_windows
    from kvant.golden.models.tokenizer import encode, load_tokenizer

    if text is not None:
        try:
            content = text.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"--text {text}: not UTF-8 at byte {error.start}") from None
        return cut_windows(encode(load_tokenizer(checkpoint), content), window, stride, bos)
    if stride is not None or bos is not None:
        raise InputError("--stride, --bos: legal with --text only; windows of token numbers are taken as they are")
    try:
        array = np.load(token_windows, allow_pickle=False)
    except ValueError as error:
        raise InputError(f"--token-windows {token_windows}: not a readable .npy array ({error})") from None
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.kind not in "iu":
        shape = getattr(array, "shape", None)
        raise InputError(f"--token-windows {token_windows}: shape {shape}; legal is an integer array [windows, length]")
    if array.shape[0] < 1 or array.shape[1] < 2:
        raise InputError(f"--token-windows {token_windows}: shape {array.shape}; legal is [1 or more, 2 or more]")
    return [Window(torch.from_numpy(row.astype(np.int64))) for row in array]


def _described_tables(path: Path, found: "packed.PackedModel", longest: int) -> str:
    """Where the tables come from; a warning where their windows were shorter than those now used."""
    calibration = found.configuration.get("calibration") or {}
    text = f"tables: {path.name}"
    if calibration:
        text += f", from {calibration['tokens']} tokens of {calibration['text']} in windows of {calibration['window']}"
        if calibration["window"] < longest:
            text += f"; calibrate with --window {longest}, scales and means should come from windows as long as the use"
    return text


def _losses(
    checkpoint: "Checkpoint",
    pieces: "Sequence[Window]",
    names: Sequence[str],
    settings: "CacheSettings",
    quantised: "packed.PackedModel | None",
    output: Path | None,
) -> "dict[str, Losses]":
    """Sums over all windows by format."""
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from kvant.golden.kvcache.formats import CACHE_FORMATS
    from kvant.golden.linear.threads import independent_threads
    from kvant.golden.models.evaluate import Losses, window_losses
    from kvant.golden.models.llama import Llama

    reference = Llama(checkpoint)
    base = reference
    if quantised is not None:
        if not quantised.tensors:
            raise InputError("--weights: the file holds no weights")
        base = Llama(checkpoint, {name: w.dequantize() for name, w in quantised.tensors.items()})
    models = {name: base.attending(CACHE_FORMATS[name].attention(settings)) for name in names}
    if "fp32" in models:
        models["fp32"] = base
    finished = Finished(output, _job(checkpoint, pieces, names, settings, quantised))
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("evaluate", total=len(pieces) * len(names))

        def work(number: int) -> dict[str, Losses]:
            if (known := finished.get(number)) is not None:
                progress.advance(task, len(names))
                return known
            found = window_losses(reference, models, pieces[number], lambda: progress.advance(task))
            finished.keep(number, found)
            return found

        try:
            with independent_threads() as run:
                results = run(work, range(len(pieces)))
        except KeyboardInterrupt:
            if output is not None:
                typer.echo(f"stopped; {finished.path} keeps what is finished for the next run", err=True)
            raise
    finished.remove()
    return {name: sum((result[name] for result in results), Losses()) for name in names}


def _job(checkpoint, pieces, names, settings: "CacheSettings", quantised) -> str:
    """A digest of everything the figures depend on."""
    state = hashlib.sha256(checkpoint.sha256().encode())
    for piece in pieces:
        state.update(f"{piece.first} {piece.tokens.tolist()}".encode())
    state.update(f"{names} {settings.group} {settings.sinks} {settings.prefill}".encode())
    if (cache := settings.tables) is not None:
        vectors = [cache.key_mean, cache.key_floor, cache.value_floor]
        vectors += [] if cache.key_map is None else [cache.key_map, cache.value_map]
        for tables in cache.tables.values():
            state.update(tables.statistic.encode())
            vectors += [tables.coefficients, tables.thresholds]
        for vector in vectors:
            state.update(vector.contiguous().numpy().tobytes())
    if (books := settings.codebooks) is not None:
        state.update(f"{settings.recent} {books.sinks} {sorted(books.books)}".encode())
        planes = [p for _, b in sorted(books.books.items()) for p in (b.entries, b.scale)]
        for vector in (books.key_mean, *planes, *(a for _, a in sorted(books.transforms.items()))):
            state.update(vector.contiguous().numpy().tobytes())
    for name, w in (quantised.tensors if quantised is not None else {}).items():
        state.update(f"{name} {w.group}".encode())
        for plane in (w.codes, w.scale, w.coefficient, *([] if w.int8 is None else [w.int8])):
            state.update(plane.contiguous().numpy().tobytes())
    return state.hexdigest()


class Finished:
    """Windows that are done, one JSON line each, beside the output file; of another job they are forgotten.

    Parameters
    ----------
    output : Path, optional
        Without one, nothing is kept.
    job : str
        Digest of everything the figures depend on.
    part : str
        Tells several jobs with one output file apart.
    """

    def __init__(self, output: Path | None, job: str, part: str = ""):
        self.path = None if output is None else output.with_name(f"{output.name}{part}.partial")
        self._known: dict[int | str, dict[str, Losses]] = {}
        self._bits: dict[int | str, float] = {}
        self._lock = threading.Lock()
        if self.path is None:
            return
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []
        kept = [line for line in lines[1:] if self._read(line)] if lines and lines[0] == job else []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(f"{line}\n" for line in (job, *kept)), encoding="utf-8")

    def _read(self, line: str) -> bool:
        """Takes what a line says; False for one that an interrupt cut off."""
        from kvant.golden.models.evaluate import Losses

        try:
            entry = json.loads(line)
            self._known[entry["window"]] = {name: Losses(**sums) for name, sums in entry["losses"].items()}
            self._bits[entry["window"]] = entry.get("bits", 0.0)
        except (ValueError, KeyError, TypeError):
            return False
        return True

    def get(self, key: int | str) -> "dict[str, Losses] | None":
        """Losses of a window, or of a format over all of them, if it is done."""
        return self._known.get(key)

    def bits(self, key: int | str) -> float:
        """What was kept as the bits of something that is done."""
        return self._bits[key]

    def keep(self, key: int | str, losses: "dict[str, Losses]", bits: float = 0.0) -> None:
        """A window, or a format, is done."""
        if self.path is None:
            return
        sums = {name: asdict(each) for name, each in losses.items()}
        line = json.dumps({"window": key, "losses": sums, "bits": bits})
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def remove(self) -> None:
        """All windows are done."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _row(name: str, settings: "CacheSettings", checkpoint: "Checkpoint", tokens: int, losses: "Losses") -> Row:
    from kvant.golden.kvcache.formats import CACHE_FORMATS

    keys, values = CACHE_FORMATS[name].footprint(settings, checkpoint.config.head_dim)
    return Row(name, (keys.history + values.history) / 2, (keys.at(tokens) + values.at(tokens)) / 2, losses)


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    cells = [list(COLUMNS), *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]

    def line(values: Sequence[str]) -> str:
        aligned = (v.ljust(w) if not i else v.rjust(w) for i, (v, w) in enumerate(zip(values, widths, strict=True)))
        return f"| {' | '.join(aligned)} |"

    rule = line(["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])])
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("format", "bits", "bits_stored", "perplexity", "dnll", "dnll_error", "kl", "kl_error"))
    writer.writerows(row.cells() for row in rows)
    return text.getvalue()


def _json(rows: Sequence[Row]) -> str:
    described = [{"format": row.name, "bits": row.bits, "bits_stored": row.stored} | asdict(row.losses) for row in rows]
    return json.dumps(described, indent=1) + "\n"


_WRITERS: dict[str, Callable[[Sequence[Row]], str]] = {
    ".csv": _csv,
    ".md": lambda rows: markdown(rows) + "\n",
    ".json": _json,
}


def _write(output: Path, rows: Sequence[Row]) -> None:
    from kvant.files import replaced

    output.parent.mkdir(parents=True, exist_ok=True)
    with replaced(output) as temporary:
        temporary.write_text(_WRITERS[output.suffix](rows), encoding="utf-8")
    typer.echo(f"written: {output}")
