"""``kvant run``: a model decodes greedily, its linear layers and attention in the compiled RTL."""

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvant import __version__
from kvant.commands.model import ModelArgument
from kvant.errors import ComparisonError, InputError
from kvant.options import ConfigOption, SetOption

if TYPE_CHECKING:
    import numpy as np

    from kvant import packed
    from kvant.config import Config
    from kvant.golden.kvcache.formats import CacheSettings
    from kvant.golden.linear.weights import QuantizedWeights
    from kvant.golden.models.checkpoint import Checkpoint
    from kvant.golden.models.generate import AttentionBackend, Decoder, Step
    from kvant.run_attention import AttentionPlan

DEFAULT_CACHE = "fp32"
PLACES = ("rtl", "golden")
"""Where attention may be asked to run."""

CLOCK_MHZ = 100.0
"""Clock for which the summary says what the cycles mean."""

_LINEAR = ("q/k/v", "o", "mlp", "head")

Report = Callable[[str, int, int], None]
"""Told of a step of the preparation, the parts done and the parts in all."""


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    app.command("run")(run)


def run(
    model: ModelArgument,
    prompt: Annotated[str, typer.Option(help="Text of the user.", show_default=False)],
    tokens: Annotated[int, typer.Option(help="Tokens decoded at most.")] = 16,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    rows: Annotated[int | None, typer.Option(help="As --set rows=N.", show_default="configuration")] = None,
    cols: Annotated[int | None, typer.Option(help="As --set cols=N.", show_default="configuration")] = None,
    config_path: ConfigOption = None,
    overrides: SetOption = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Weights from `kvant quantize`.", show_default="quantised once by weight error, cached"),
    ] = None,
    cache: Annotated[
        str, typer.Option(metavar="FORMAT", help="Cache format: mant, or one of `kvant eval --formats list`.")
    ] = DEFAULT_CACHE,
    attention: Annotated[
        str, typer.Option(metavar="WHERE", help="rtl, where it has the cache's format, or golden.")
    ] = PLACES[0],
    tables: Annotated[
        Path | None, typer.Option(help="Tables and codebooks of the cache, from `kvant quantize`.")
    ] = None,
    recent: Annotated[int, typer.Option(min=0, help="Newest tokens that product-quantised caches keep INT8.")] = 64,
    trace: Annotated[Path | None, typer.Option(metavar="FILE.npz", help="Write every tensor of every layer.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Decode in the golden model too; every tensor must be equal.")
    ] = False,
    stall: Annotated[float, typer.Option(help="Probability of a pause of every stream in every cycle.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the pauses.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of the compiled model.")] = 1,
) -> None:
    """Decode greedily from a prompt: linear layers and attention over quantised caches in the compiled RTL."""
    from kvant import config, packed
    from kvant.golden.kvcache.formats import CacheSettings
    from kvant.golden.models.checkpoint import open_model
    from kvant.golden.models.tokenizer import load_tokenizer
    from kvant.run_attention import plan_attention
    from kvant.tensors import check_target

    if attention not in PLACES:
        raise InputError(f"--attention {attention}: legal is {' or '.join(PLACES)}")
    sizes = [f"{name}={value}" for name, value in (("rows", rows), ("cols", cols)) if value is not None]
    chosen = config.load(config_path, [*(overrides or []), *sizes])
    if trace is not None:
        if trace.suffix != ".npz":
            raise InputError(f"--trace {trace}: legal is a file that ends in .npz")
        check_target(trace)
    checkpoint = open_model(model)
    prompt_tokens = encode_prompt(checkpoint, prompt, raw, tokens)
    found = packed.load_for(checkpoint, tables, "--tables")
    cache_tables, codebooks = (None, None) if found is None else (found.cache, found.codebooks)
    settings = CacheSettings.of(
        cache_tables,
        codebooks,
        group=None if cache_tables else chosen.linear.group,
        prefill=len(prompt_tokens),  # the first call
        recent=recent,
    )
    plan = plan_attention(
        cache,
        settings,
        chosen,
        checkpoint.config,
        tokens=len(prompt_tokens) + tokens,
        in_rtl=attention == "rtl",
    )
    given = packed.load_for(checkpoint, weights, "--weights")
    with _progress() as report:
        quantised = model_weights(checkpoint, chosen, given, report)
        decoder = rtl_decoder(checkpoint, chosen, quantised, plan, report, threads=threads, stall=stall, seed=seed)
    golden = golden_decoder(checkpoint, quantised, plan.golden()) if check else None
    try:
        steps = _decode(decoder, golden, load_tokenizer(checkpoint), prompt_tokens, tokens, trace)
    finally:
        decoder.close()
    typer.echo("\n" + summary(chosen, decoder, steps, plan, settings))
    if check:
        typer.echo(f"Golden model: the same {len(steps)} tokens, every tensor of every layer equal in every bit.")


def encode_prompt(checkpoint: "Checkpoint", prompt: str, raw: bool, count: int) -> list[int]:
    """Token numbers of a prompt, in the model's chat template unless *raw*.

    Raises
    ------
    InputError
        An empty prompt, no tokens wanted, a model without template, or no room for *count* tokens behind it.
    """
    from kvant.golden.errors import TensorError
    from kvant.golden.models.chat import chat_prompt
    from kvant.golden.models.tokenizer import encode, load_tokenizer

    if not prompt:
        raise InputError("--prompt: empty; legal is a text of one character or more")
    if count < 1:
        raise InputError(f"--tokens {count}: legal is 1 or more")
    try:
        text = prompt if raw else chat_prompt(checkpoint, prompt)
    except TensorError as error:
        raise InputError(f"{error}: --raw") from None
    numbers = encode(load_tokenizer(checkpoint), text)
    if not numbers:
        raise InputError("--prompt: holds no token of the model's vocabulary")
    context = checkpoint.config.context
    if len(numbers) + count > context:
        raise InputError(
            f"--tokens {count}: with {len(numbers)} of the prompt more than the model's context; "
            f"legal is up to {max(context - len(numbers), 0)}"
        )
    return numbers


def model_weights(
    checkpoint: "Checkpoint", chosen: "Config", given: "packed.PackedModel | None", report: Report
) -> "dict[str, QuantizedWeights]":
    """Quantised weights of all linear layers, in the order of the model.

    Those that *given* lacks are quantised by least weight error and kept in the user's cache.

    Raises
    ------
    InputError
        Weights in groups of another size, or INT8 groups that the array is not built for.
    """
    from kvant.golden.linear.search import quantize_weights
    from kvant.golden.models.generate import multiplied_weights

    p = chosen.linear
    tensors = dict(given.tensors) if given is not None else {}
    names = multiplied_weights(checkpoint)
    missing = [name for name in names if name not in tensors]
    path = _cached_weights(checkpoint, chosen, missing)
    if missing and (kept := _kept_weights(path, missing)) is not None:
        tensors |= kept
    elif missing:
        made = {}
        for number, name in enumerate(missing):
            report("quantise", number, len(missing))
            made[name] = quantize_weights(checkpoint.weight(name), p.group, chosen.coefficients, name=name)
        report("quantise", len(missing), len(missing))
        _keep_weights(path, made, checkpoint, chosen)
        tensors |= made
    for name in names:
        if tensors[name].group != p.group:
            raise InputError(
                f"{name}: quantised in groups of {tensors[name].group}; legal is {p.group}, as the array is built for "
                f"(--set group={tensors[name].group})"
            )
        if tensors[name].int8 is not None and not p.int8_groups:
            raise InputError(f"{name}: has INT8 groups; legal only with int8_groups = true")
    return {name: tensors[name] for name in names}


def _cached_weights(checkpoint: "Checkpoint", chosen: "Config", names: list[str]) -> Path:
    from kvant import packed
    from kvant.sim.toolchain import cache_folder

    key = repr((__version__, packed.VERSION, checkpoint.sha256(), chosen.linear.group, chosen.coefficients, names))
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    return cache_folder() / "weights" / f"{checkpoint.path.stem}-{digest}.safetensors"


def _kept_weights(path: Path, names: list[str]) -> "dict[str, QuantizedWeights] | None":
    from kvant import packed

    if not path.exists():
        return None
    try:
        tensors = packed.load(path).tensors
    except InputError:  # damaged: it is made anew
        return None
    return tensors if set(tensors) == set(names) else None


def _keep_weights(
    path: Path, tensors: "dict[str, QuantizedWeights]", checkpoint: "Checkpoint", chosen: "Config"
) -> None:
    from kvant import packed

    configuration = {"group": chosen.linear.group, "coefficients": list(chosen.coefficients), "objective": "weight"}
    source = {"name": checkpoint.path.name, "sha256": checkpoint.sha256()}
    packed.save(path, tensors, configuration, source)


def rtl_decoder(
    checkpoint: "Checkpoint",
    chosen: "Config",
    weights: "dict[str, QuantizedWeights]",
    attention: "AttentionPlan",
    report: Report,
    *,
    threads: int = 1,
    stall: float = 0.0,
    seed: int = 0,
) -> "Decoder":
    """A decoder whose linear layers, and attention where the plan has it there, run in the compiled RTL.

    Raises
    ------
    ParameterError
        A layer that does not fit the array's buffers: before anything is built.
    """
    from kvant.golden.models.generate import Decoder
    from kvant.hw.linear.jobs import plan
    from kvant.sim.compiled.layers import CompiledLayers
    from kvant.sim.compiled.linear import CompiledLinear

    for outputs, inputs in {record.shape for record in weights.values()}:
        plan(chosen.linear, tokens=1, inputs=inputs, outputs=outputs)
    options = {"threads": threads, "stall": stall, "seed": seed, "progress": report}

    def attend() -> "AttentionBackend":
        return attention.golden() if attention.rtl is None else attention.rtl(**options)

    engine = None
    with ThreadPoolExecutor(1) as pool:  # generating and translating leave a core for the other designs
        attending = pool.submit(attend)
        try:
            engine = CompiledLinear(chosen.linear, **options)
            layers = CompiledLayers(engine, weights, lambda done, total: report("load", done, total))
            return Decoder(checkpoint, layers, attending.result())
        except BaseException:
            if engine is not None:
                engine.close()
            attending.add_done_callback(_close_backend)
            raise


def _close_backend(made: "Future[AttentionBackend]") -> None:
    """Free what was made for nothing."""
    if not made.cancelled() and made.exception() is None:
        made.result().close()


def golden_decoder(
    checkpoint: "Checkpoint", weights: "dict[str, QuantizedWeights]", attention: "AttentionBackend"
) -> "Decoder":
    """The same with the golden model's linear layers."""
    from kvant.golden.models.generate import Decoder, GoldenLinear

    return Decoder(checkpoint, GoldenLinear(weights), attention)


@contextmanager
def _progress() -> Iterator[Report]:
    """Bars on the terminal; without one, a line for each step of the preparation."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=total)
                if not console.is_terminal:
                    typer.echo(f"{step} ...", err=True)
            progress.update(tasks[step], completed=done, total=total)

        yield report


def _decode(
    decoder: "Decoder", golden: "Decoder | None", tokenizer, prompt: list[int], count: int, trace_path: Path | None
) -> "list[Step]":
    """Print tokens as they come; returns the steps."""
    from kvant.golden.models.chat import stop_tokens
    from kvant.golden.models.trace import Trace
    from kvant.tensors import write_npz

    stop = stop_tokens(decoder.checkpoint)
    record = Trace() if golden is not None or trace_path is not None else None
    other = Trace()
    reference = None if golden is None else golden.generate(prompt, count, stop, other)
    kept: dict[str, np.ndarray] = {}
    steps, shown = [], ""
    for step in decoder.generate(prompt, count, stop, record):
        steps.append(step)
        if reference is not None:
            next(reference)
        if record is not None:
            arrays = record.take_step()
            if reference is not None:
                _compare(arrays, other.take_step())
            if trace_path is not None:
                kept |= arrays
        text = tokenizer.decode([s.token for s in steps if s.token not in stop])
        if not text.endswith("\ufffd"):  # a character whose bytes are not all there yet
            typer.echo(text[len(shown) :], nl=False)
            sys.stdout.flush()
            shown = text
    typer.echo()
    if trace_path is not None:
        write_npz(trace_path, kept)
    return steps


def _compare(rtl: "dict[str, np.ndarray]", golden: "dict[str, np.ndarray]") -> None:
    from kvant.commands.diff import first_difference

    if difference := first_difference(rtl, golden):
        raise ComparisonError(f"{difference}; A is the RTL, B the golden model")


def summary(
    chosen: "Config", decoder: "Decoder", steps: "list[Step]", plan: "AttentionPlan", settings: "CacheSettings"
) -> str:
    """What ran where, and what it took: one paragraph and a table, times by part."""
    p = chosen.linear
    first, rest = steps[0], steps[1:]
    shown = rest or steps
    position, heading = decoder.position, "a decoded token" if rest else "prefill"
    where = {"attention": decoder.backend.where, "host": "host"}
    attention = f"attention and cache ({plan.name})"
    lines = [
        f"{first.tokens} tokens of prompt, {len(steps)} decoded. In RTL: every linear layer, the output projection "
        f"included, on {p.rows} x {p.cols} lanes, G = {p.group} (Verilog compiled by Verilator)"
        + (f"; {attention}: {plan.built}." if plan.built else f". In the {decoder.backend.where}: {attention}."),
        "On the host, in float32: embedding, norms, rotary positions, "
        + ("maps of keys, queries, values and outputs, " if plan.mapped else "")
        + "SiLU, residual sums, choice of the token. Activations, queries, keys and values round to fp16 at the port.",
        "",
        f"{heading:18} {'where':13} {'cycles':>12} {'bytes':>13} {'seconds':>9}",
    ]
    cycles, sizes, seconds = (_mean(shown, name) for name in ("cycles", "memory_bytes", "seconds"))
    for part in (*_LINEAR, "attention", "host"):
        counted = f"{cycles[part]:12,.0f} {sizes[part]:13,.0f}" if cycles[part] else f"{'':12} {'':13}"
        lines.append(f"{part:18} {where.get(part, decoder.linear.where):13} {counted} {seconds[part]:9.3f}")
    total = seconds.total()
    lines.append(f"{'all':32} {cycles.total():12,.0f} {sizes.total():13,.0f} {total:9.3f}")
    linear_cycles = sum(cycles[part] for part in _LINEAR)
    work = sum(step.tokens for step in shown) / len(shown)
    use = work * _products(decoder) / (linear_cycles * p.lanes)
    simulated_seconds = sum(seconds[part] for part in cycles if cycles[part])
    lines += [
        "",
        f"time to first token {first.seconds.total():.2f} s ({first.cycles.total():,} cycles)"
        + (f", then {total:.3f} s a token: {1 / total:.3f} tokens/s" if rest else ""),
        f"simulated {cycles.total() / simulated_seconds:,.0f} cycles/s"
        + (f"; array use {use:.3f} in linear layers" if rest else "")
        + (
            f"; hardware at {CLOCK_MHZ:.0f} MHz with memory at the ports' width, one part after the other: "
            f"{CLOCK_MHZ * 1e6 / cycles.total():.1f} tokens/s"
            if rest
            else ""
        ),
        f"cache at {position} tokens: {_cache_bytes(decoder, plan.name, settings, position):,} bytes",
    ]
    return "\n".join(lines)


def _mean(steps: "list[Step]", name: str) -> Counter:
    total: Counter = Counter()
    for step in steps:
        total.update(getattr(step, name))
    return Counter({part: value / len(steps) for part, value in total.items()})


def _products(decoder: "Decoder") -> int:
    """Multiplications of a token in all linear layers."""
    from kvant.golden.models.generate import multiplied_weights

    tensors = decoder.checkpoint.tensors
    return sum(tensors[name].shape[0] * tensors[name].shape[1] for name in multiplied_weights(decoder.checkpoint))


def _cache_bytes(decoder: "Decoder", cache: str, settings: "CacheSettings", tokens: int) -> int:
    from kvant.golden.kvcache.formats import CACHE_FORMATS

    shape = decoder.config
    keys, values = CACHE_FORMATS[cache].footprint(settings, shape.head_dim)
    elements = shape.layers * shape.kv_heads * shape.head_dim * tokens
    return round(elements * (keys.at(tokens) + values.at(tokens)) / 8)
