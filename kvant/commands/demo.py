"""``kvant demo``: weights, keys and values of a real model through the generated RTL, compared, drawn, summarised."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvant.errors import InputError
from kvant.options import ConfigOption, SetOption, Simulator, SimulatorOption

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from kvant.cache_demo import CacheDemo
    from kvant.config import Config
    from kvant.golden.linear.weights import QuantizedWeights
    from kvant.golden.models.slice import Tile
    from kvant.pq_demo import PqDemo
    from kvant.sentence_demo import Sentence
    from kvant.sim.streams import Trace

TILE = "L20_q_proj"
"""Tile of the committed slice: query projection of a late layer."""

CALIBRATION_TOKENS = 32
"""Tokens of the tile whose activations calibrate the weights; the others are multiplied, so errors are held out."""

SCALE_FACTORS = (1.0, 0.95, 0.9, 0.85)
"""Scales that the search of every format tries, relative to the one that reaches the largest weight."""

FORMATS = {"mant": "M-ANT", "nf4": "NF4", "mxfp4": "MXFP4", "int4": "INT4"}
"""Formats side by side, with the names they are known by."""

TOP = "linear"
"""Top module; the name that ``kvant simulate linear`` uses too, so that it finds the compiled simulator again."""

SHOWN_TYPES = 4
"""Types of the coefficient table that the picture shows."""


@dataclass(frozen=True)
class FormatError:
    """Relative errors of the product with weights of one format, and what it stores per weight.

    `plain` is without calibration and scale search, `searched` with both.
    """

    label: str
    bits: float
    plain: float
    searched: float


@dataclass(frozen=True)
class Run:
    """A product that the RTL computed.

    `arrays` are its tensors as `kvant.sim.linear.engine.collect` returns them.
    """

    tokens: int
    arrays: "dict[str, np.ndarray]"
    trace: "Trace"
    use: float


@dataclass(frozen=True)
class Part:
    """A part of the demo behind the linear path.

    `table` is shown, `write` leaves tensors and the file *picture* in a folder; `values` numbers of the RTL were held
    against the golden model.
    """

    table: "Table"
    picture: str
    values: int
    write: Callable[[Path], None]


def register(app: typer.Typer):
    """Add the command to *app*."""

    @app.command()
    def demo(
        out: Annotated[
            Path, typer.Option("--out", "-o", help="Folder for the design, the tensors and the picture.")
        ] = (Path("out/demo")),
        config_path: ConfigOption = None,
        overrides: SetOption = None,
        simulator: SimulatorOption = Simulator.VERILATOR,
    ):
        """Real weights, keys and values through the RTL, compared bit for bit with the golden model and summarised."""
        from rich.console import Console

        from kvant import config

        chosen = config.load(config_path, overrides)
        with complete_or_absent(out) as folder:
            run_demo(chosen, folder, simulator.value, out, Console())


def run_demo(chosen: "Config", folder: Path, simulator: str, shown_folder: Path, console: "Console"):
    """Run all steps and leave the files in *folder*; progress and results go to *console*.

    *shown_folder* is where the files will lie in the end.

    Raises
    ------
    ComparisonError
        If an output of the RTL differs from the golden model.
    """
    from rich.markup import escape

    from kvant.golden.models import slice as model_slice
    from kvant.linear import weight_arrays

    step = _Steps(console)
    p = chosen.linear

    with step("Weights and activations of SmolLM2-135M-Instruct") as say:
        tile = model_slice.load().tiles[TILE]
        calibration, x = tile.activations[:CALIBRATION_TOKENS], tile.activations[CALIBRATION_TOKENS:]
        say(f"{tile.name}: {_times(tile.weight.shape)}, {len(x)} tokens, {len(calibration)} more to calibrate")

    with step("Quantised to M-ANT, and to the formats it competes with") as say:
        weights = quantise(tile, calibration, chosen)
        errors = [format_error(key, tile, calibration, x, chosen) for key in FORMATS]
        errors.sort(key=lambda error: error.searched)
        say(f"{weights.bits_per_element:.3f} bits a weight, groups of {p.group}")

    with step("Verilog generated") as say:
        say(generate(p, folder))

    arrays = {"x": x, **weight_arrays(weights)}
    with step(f"Simulated on {simulator}: {len(x)} tokens (prefill)") as say:
        prefill = simulate(p, arrays, simulator)
        say(f"{int(prefill.arrays['cycles'])} cycles, array use {prefill.use:.3f}")
    with step(f"Simulated on {simulator}: one token (decode)") as say:
        decode = simulate(p, arrays | {"x": x[:1]}, simulator)
        say(f"{int(decode.arrays['cycles'])} cycles, array use {decode.use:.3f}")

    with step("Compared with the golden model") as say:
        values = compare(weights, x, prefill) + compare(weights, x[:1], decode)
        say(f"{values} values, every bit equal")

    parts = [part for run in (_run_caches, _run_pq) if (part := run(chosen, simulator, step)) is not None]
    sentence = _run_sentence(chosen, step)

    with step("Files written") as say:
        _write_tensors(folder, arrays, prefill)
        draw(folder / "demo.png", tile, weights, chosen, errors, decode)
        for part in parts:
            part.write(folder)
        say(", ".join(sorted(file.name for file in folder.iterdir())))

    rtl_error = relative_error(prefill.arrays["y"], tile.weight, x)
    console.print()
    console.print(_format_table(errors, rtl_error))
    console.print(_run_table(p, (prefill, decode), simulator))
    for part in parts:
        console.print(part.table)
    pictures = [str(shown_folder / picture) for picture in ("demo.png", *(part.picture for part in parts))]
    values += sum(part.values for part in parts)
    console.print(
        f"The RTL equals the golden model in every bit of {values} values. "
        f"Picture{'s' * (len(pictures) > 1)}: {', '.join(pictures)}. {step.seconds:.0f} s.",
        soft_wrap=True,
        highlight=False,
        style="bold",
    )
    if sentence is not None:
        console.print(
            f"SmolLM2-135M-Instruct in the RTL, M-ANT weights and caches, in {sentence.tokens} tokens: "
            f"{sentence.prompt}[bold]{escape(sentence.text)}[/bold]",
            soft_wrap=True,
            highlight=False,
        )


def _run_caches(chosen: "Config", simulator: str, step: "_Steps") -> "Part | None":
    """Keys and values through the caches, or one line that says why not."""
    from kvant import cache_demo

    reason = cache_demo.skip_reason(chosen)
    if reason is not None:
        with step("Keys and values") as say:
            say(f"skipped, {reason}")
        return None
    with step(f"Keys and values of layer {cache_demo.LAYER} on {simulator}, compared with the golden model") as say:
        done: list[str] = []
        caches = cache_demo.run_caches(chosen, simulator, done.append)
        stalls = sum(run.stalls for run in caches.runs)
        say(f"{'; '.join(done)}: {len(caches.keys)} tokens each, every bit equal, {stalls} stall cycles")

    def write(folder: Path):
        cache_demo.write_tensors(folder, caches)
        draw_caches(folder / "cache.png", caches)

    return Part(_cache_table(caches), "cache.png", sum(run.values for run in caches.runs), write)


def _run_pq(chosen: "Config", simulator: str, step: "_Steps") -> "Part | None":
    """Keys, values and queries through the product-quantised cache, or one line that says why not."""
    from kvant import pq_demo

    reason = pq_demo.skip_reason(chosen)
    if reason is not None:
        with step("Product quantisation") as say:
            say(f"skipped, {reason}")
        return None
    with step(f"Product quantisation of the same rows on {simulator}, compared with the golden model") as say:
        quantised = pq_demo.run_pq(chosen, simulator)
        say(f"codes, scores and outputs of {len(quantised.out)} queries, every bit equal")

    def write(folder: Path):
        pq_demo.write_tensors(folder, quantised)
        draw_pq(folder / "pq.png", quantised)

    return Part(_pq_table(quantised), "pq.png", quantised.values, write)


def _run_sentence(chosen: "Config", step: "_Steps") -> "Sentence | None":
    """A sentence of the whole model, or one line that says why not."""
    from kvant import sentence_demo

    with step("A sentence of the whole model: linear layers and attention in the compiled RTL") as say:
        reason = sentence_demo.skip_reason(chosen)
        if reason is None:
            try:
                sentence = sentence_demo.decode(chosen, lambda *_: None)
            except InputError as error:
                reason = str(error)
        if reason is not None:
            say(f"skipped, {reason}")
            return None
        say(f"{sentence.tokens} tokens, {sentence.cycles:,} cycles, {sentence.attention_cycles:,} of them in attention")
    return sentence


def quantise(tile: "Tile", calibration: "np.ndarray", chosen: "Config") -> "QuantizedWeights":
    """The tile's weights in M-ANT groups, by least output error on *calibration* (f16 [tokens, K])."""
    from kvant.golden.linear.objective import diagonal_moment
    from kvant.golden.linear.search import quantize_weights

    return quantize_weights(
        tile.weight,
        chosen.linear.group,
        chosen.coefficients,
        second_moment=diagonal_moment(calibration),
        scale_factors=SCALE_FACTORS,
        name=tile.name,
    )


def format_error(key: str, tile: "Tile", calibration: "np.ndarray", x: "np.ndarray", chosen: "Config") -> FormatError:
    """Errors of the product of *x* (f16 [tokens, K]) with the tile's weights in the format *key*."""
    from kvant.golden.formats.mant import FORMATS as GOLDEN_FORMATS
    from kvant.golden.formats.mant import Mant
    from kvant.golden.linear.objective import diagonal_moment

    group = chosen.linear.group
    number_format = Mant(chosen.coefficients) if key == "mant" else GOLDEN_FORMATS[key]
    plain = number_format.quantize(tile.weight, group)
    moment = diagonal_moment(calibration)
    searched = number_format.quantize(tile.weight, group, second_moment=moment, scale_factors=SCALE_FACTORS)
    inputs = _int8_values(x, group)
    plain_error, searched_error = (
        relative_error(inputs @ stored.values.double().numpy().T, tile.weight, x) for stored in (plain, searched)
    )
    return FormatError(FORMATS[key], searched.bits, plain_error, searched_error)


def relative_error(y: "np.ndarray", weight: "np.ndarray", x: "np.ndarray") -> float:
    """Root of the squared error of *y* over the squared product ``x @ weight.T`` of the original tensors."""
    import numpy as np

    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    return float(np.linalg.norm(y - exact) / np.linalg.norm(exact))


def generate(p, folder: Path) -> str:
    """Write the Verilog of the linear path; returns what was written, in words."""
    from kvant.hw.emit import emit
    from kvant.hw.linear.engine import LinearEngine

    design = emit(LinearEngine(p), TOP)
    (folder / f"{TOP}.sv").write_text(design.verilog, encoding="utf-8")
    lines = design.verilog.splitlines()
    modules = sum(line.startswith("module ") for line in lines)
    return f"{p.rows} x {p.cols} lanes, {modules} modules, {len(lines)} lines"


def simulate(p, arrays: "dict[str, np.ndarray]", simulator: str) -> Run:
    """Multiply *arrays* in the simulated RTL."""
    from kvant.sim.linear import engine

    tokens, inputs = arrays["x"].shape
    result, trace = engine.play(p, arrays, name=TOP, simulator=simulator, design_key=p)
    use = tokens * inputs * len(arrays["w_codes"]) / (int(result["cycles"]) * p.lanes)
    return Run(tokens, result, trace, use)


def compare(weights: "QuantizedWeights", x: "np.ndarray", run: Run) -> int:
    """Hold a run against the golden model bit for bit; returns how many values were compared.

    Raises
    ------
    ComparisonError
        Naming the first value that differs.
    """
    from kvant.golden.linear.engine import multiply
    from kvant.golden.numeric.int8 import quantize_int8
    from kvant.simulated import compare

    groups = quantize_int8(x, weights.group)
    golden = {"x_q": groups.q, "x_scale": groups.scale, "y": multiply(groups.q, groups.scale, weights)}
    return compare({name: tensor.numpy() for name, tensor in golden.items()}, run.arrays)


def draw(
    path: Path, tile: "Tile", weights: "QuantizedWeights", chosen: "Config", errors: list[FormatError], decode: Run
):
    """Write the picture."""
    import numpy as np

    from kvant import plots
    from kvant.golden.numeric.codes import LINEAR, levels

    outputs, inputs = tile.weight.shape
    group = chosen.linear.group
    whole = inputs // group * group
    groups = tile.weight[:, :whole].reshape(outputs, -1, group) if whole else tile.weight[:, None, :]
    largest = np.abs(groups).max(-1, keepdims=True)
    table = sorted(set(chosen.coefficients))
    picks = np.linspace(0, len(table) - 1, min(SHOWN_TYPES, len(table))).round().astype(int)
    shown = {}
    for coefficient in (table[index] for index in picks):
        share = float((weights.coefficient == coefficient).double().mean())
        magnitudes = levels(coefficient).double().numpy()
        label = "linear" if coefficient == LINEAR else f"a = {coefficient}"
        shown[f"{label}, {100 * share:.0f} % of groups"] = (
            np.concatenate([-magnitudes[::-1], magnitudes]) / magnitudes[-1]
        )
    streams = {
        "weights in": "w",
        "activations in": "x",
        "INT8 activations": "xq",
        "outputs": "y",
    }
    first = min(decode.trace.cycles[stream][0] for stream in streams.values())
    plots.demo_figure(
        path,
        title=f"{tile.name}, {_times(tile.weight.shape)}, in M-ANT groups of {group}",
        normalised=(groups / np.where(largest == 0, 1, largest)),
        levels=shown,
        errors={f"{error.label}\n{error.bits:g} bits": error.searched for error in errors},
        highlighted=FORMATS["mant"],
        activity={label: np.array(decode.trace.cycles[stream]) - first for label, stream in streams.items()},
        use=decode.use,
    )


def draw_pq(path: Path, quantised: "PqDemo"):
    """Write the picture of product quantisation."""
    from kvant import cache_demo, plots

    plots.pq_figure(
        path,
        title=f"Product-quantised attention, layer {cache_demo.LAYER}, {quantised.bits:g} bits an element",
        scores=quantised.scores,
        exact_scores=quantised.exact_scores,
        out=quantised.out[0],
        exact=quantised.exact[0],
    )


def draw_caches(path: Path, caches: "CacheDemo"):
    """Write the picture of the caches."""
    import numpy as np

    from kvant import cache_demo, plots

    values = caches.runs[-1]
    spread = np.abs(caches.values.astype(np.float32)).std(0)
    channel = int(np.argsort(spread)[len(spread) // 2])
    streams = {"rows in": "v", "codes out": "codes", "scales and coefficients out": "meta"}
    first = min(caches.trace.cycles["v"])
    errors = {f"{run.label}: M-ANT, RTL": (run.bits, run.error) for run in caches.runs} | caches.integers
    plots.cache_figure(
        path,
        title=f"Keys and values of SmolLM2-135M-Instruct, layer {cache_demo.LAYER}, head {cache_demo.HEAD}",
        channel=f"Channel {channel} of the values, windows of {caches.group} tokens",
        original=caches.values[:, channel].astype(np.float32),
        held=values.rows[:, channel],
        group=caches.group,
        errors=dict(sorted(errors.items())),
        activity={label: np.array(caches.trace.cycles[stream]) - first for label, stream in streams.items()},
        stalls=values.stalls,
    )


def _int8_values(x: "np.ndarray", group: int) -> "np.ndarray":
    """Activations as the hardware sees them: INT8 groups, as float64 [tokens, K]."""
    from kvant.golden.numeric.int8 import quantize_int8

    groups = quantize_int8(x, group)
    scale = groups.scale.double().repeat_interleave(group, -1)[:, : x.shape[1]]
    return (groups.q.double() * scale).numpy()


def _write_tensors(folder: Path, arrays: "dict[str, np.ndarray]", run: Run):
    """Keep what went in and what came out, so that ``kvant simulate linear`` can repeat the run."""
    import numpy as np

    np.savez_compressed(folder / "in.npz", **arrays)
    np.savez_compressed(folder / "out.npz", **run.arrays)


def _format_table(errors: list[FormatError], rtl_error: float) -> "Table":
    from rich.table import Table

    table = Table(title="Error of the product against fp32", title_justify="left")
    for heading in ("weights", "bits", "least weight error", "calibrated"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    for error in errors:
        table.add_row(error.label, f"{error.bits:.3f}", f"{100 * error.plain:.2f} %", f"{100 * error.searched:.2f} %")
    table.add_row("M-ANT, from the RTL", "", "", f"{100 * rtl_error:.2f} %", style="bold")
    table.caption = "INT8 activations in all rows, of other tokens than those that calibrate"
    table.caption_justify = "left"
    return table


def _run_table(p, runs: tuple[Run, ...], simulator: str) -> "Table":
    from rich.table import Table

    table = Table(title=f"{p.rows} x {p.cols} lanes on {simulator}", title_justify="left")
    for heading in ("", *(f"{run.tokens} token{'s' * (run.tokens > 1)}" for run in runs)):
        table.add_column(heading, justify="right" if heading else "left")
    rows: dict[str, Callable[[Run], str]] = {
        "cycles": lambda run: str(int(run.arrays["cycles"])),
        "cycles with a lane at work": lambda run: str(int(run.arrays["busy_cycles"])),
        "array use": lambda run: f"{100 * run.use:.1f} %",
        "products per cycle": lambda run: f"{run.use * p.lanes:.1f}",
    }
    for name, value in rows.items():
        table.add_row(name, *map(value, runs))
    return table


def _cache_table(caches: "CacheDemo") -> "Table":
    from rich.table import Table

    from kvant import cache_demo

    table = Table(title=f"Caches of {len(caches.keys)} tokens, layer {cache_demo.LAYER}", title_justify="left")
    for heading in ("cache", "bits", "error", "cycles per row", "stall cycles"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for run in caches.runs:
        cells = (f"{run.bits:.2f}", f"{100 * run.error:.1f} %", f"{run.cycles_per_row:.2f}", str(run.stalls))
        table.add_row(f"{run.label}: M-ANT, from the RTL", *cells, style="bold")
    for label, (bits, error) in caches.integers.items():
        table.add_row(label, f"{bits:.2f}", f"{100 * error:.1f} %", "", "")
    table.caption = (
        f"Bits of a full page; the caches keep {cache_demo.SINKS} sinks and the open window as INT8. Tables come from "
        f"the other heads of the layer, mean and floors from the first {cache_demo.PREFILL} tokens, a prefill that "
        "passes twice along time."
    )
    table.caption_justify = "left"
    return table


def _pq_table(quantised: "PqDemo") -> "Table":
    from rich.table import Table

    from kvant import cache_demo, pq_demo

    tokens = len(quantised.arrays["k"])
    table = Table(title=f"Product quantisation of {tokens} tokens, layer {cache_demo.LAYER}", title_justify="left")
    for heading in ("from the RTL", "bits", "error"):
        table.add_column(heading, justify="left" if heading == "from the RTL" else "right")
    for name, error in (("keys", quantised.key_error), ("values", quantised.value_error)):
        table.add_row(f"{name}, coded", f"{quantised.bits:.2f}", f"{100 * error:.1f} %")
    label = f"outputs of {len(quantised.out)} query heads against float64 attention"
    table.add_row(label, "", f"{100 * quantised.output_error:.1f} %")
    table.caption = (
        f"{cache_demo.SINKS} sinks and the newest {pq_demo.RECENT} tokens stay INT8. Codebooks come from the other "
        f"heads of the layer and the first {cache_demo.PREFILL} tokens; errors are those of the coded tokens behind "
        "them."
    )
    table.caption_justify = "left"
    return table


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


class _Steps:
    """Numbered lines with the time each took; a spinner while one runs."""

    def __init__(self, console):
        self._console = console
        self._start = time.monotonic()
        self._count = 0

    @property
    def seconds(self) -> float:
        """Seconds since the first step."""
        return time.monotonic() - self._start

    @contextmanager
    def __call__(self, title: str):
        self._count += 1
        start = time.monotonic()
        results: list[str] = []
        with self._console.status(title):
            yield results.append
        took = time.monotonic() - start
        self._console.print(
            f"{self._count}. {title}: {' '.join(results)} [dim]({took:.1f} s)[/dim]", soft_wrap=True, highlight=False
        )


@contextmanager
def complete_or_absent(out: Path):
    """A folder whose files move to *out* when all is done: a run that fails leaves what was there."""
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out))
    try:
        yield folder
        for file in folder.iterdir():
            os.replace(file, out / file.name)
    finally:
        shutil.rmtree(folder)
