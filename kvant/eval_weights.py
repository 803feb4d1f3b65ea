"""The part of ``kvant eval`` that compares number formats of weights, format by format: a model is large."""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvant.commands.eval import Finished, Row
from kvant.errors import InputError

if TYPE_CHECKING:
    from kvant.golden.models.checkpoint import Checkpoint
    from kvant.golden.models.evaluate import Window

UNQUANTISED = "fp32"
"""Name that stands for weights as they are."""

SEARCH = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Factors of the full-range scale that ``--scale-search`` tries."""

PAPERS = (
    UNQUANTISED, "mant", "mant_bisection", "mant_outliers", "int4", "int4_channel", "int4_tensor", "int4_asymmetric",
    "nf4", "ant", "ant_channel", "olive", "olive_channel", "gobo", "mokey_tensor", "bitmod", "mxfp4", "nvfp4", "int8",
)  # fmt: skip
"""What `--preset papers` compares."""


@dataclass(frozen=True)
class Setting:
    """What all weight formats of a comparison have in common.

    Parameters
    ----------
    group : int
        G of weights and activations.
    int8_activations : bool
        Inputs of linear layers are INT8 groups, else float32.
    search : bool
        Scales are searched.
    """

    group: int
    int8_activations: bool
    search: bool

    @property
    def described(self) -> str:
        """In words, for the protocol."""
        inputs = "INT8 groups" if self.int8_activations else "float32"
        scales = "searched" if self.search else "full range"
        return f"groups of {self.group}, scales {scales}, by weight error, inputs of linear layers in {inputs}"


def names() -> list[str]:
    """All weight formats."""
    from kvant.golden.formats.mant import FORMATS

    return [UNQUANTISED, *FORMATS]


def chosen(formats: str | None, activations: str | None, preset: str | None) -> list[str]:
    """Weight formats that options ask for; none where they do not."""
    if activations not in (None, "int8"):
        raise InputError(f"--activations {activations!r}: legal is int8")
    if formats is None:
        return list(PAPERS) if preset else [UNQUANTISED] if activations else []
    wanted = list(dict.fromkeys(name.strip() for name in formats.split(",")))
    for name in wanted:
        if name not in names():
            raise InputError(f"--weight-formats {name!r}: legal are {', '.join(names())}")
    return wanted


def rows(
    checkpoint: "Checkpoint", pieces: "Sequence[Window]", formats: Sequence[str], setting: Setting, output: Path | None
) -> list[Row]:
    """Figures of every format, with all windows of a text; caches are exact.

    With *output*, what is finished is kept beside it for a later run.
    """
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from kvant.golden.formats.mant import FORMATS
    from kvant.golden.linear.threads import independent_threads
    from kvant.golden.models.evaluate import Losses, reference_states, window_losses
    from kvant.golden.models.llama import Llama
    from kvant.golden.models.weight_formats import in_format, int8_inputs

    reference = Llama(checkpoint)
    finished = Finished(output, _job(checkpoint, pieces, setting), ".weights")
    columns = (TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn())
    found = []
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        weights = len(checkpoint.linear_weights)
        task = progress.add_task("weights", total=len(formats) * weights)
        with independent_threads() as run:
            expected = run(lambda piece: reference_states(reference, piece), pieces)

        def measured(name: str) -> tuple[float, Losses]:
            """Bits and losses of a format, whose weights are let go before the next one's are made."""
            model, bits = reference, 32.0
            if name != UNQUANTISED:
                factors = SEARCH if setting.search else (1.0,)
                step = partial(progress.advance, task)
                model, bits = in_format(model, FORMATS[name], group=setting.group, scale_factors=factors, step=step)
            if setting.int8_activations:
                model = model.rounding(int8_inputs(setting.group))

            def work(number: int) -> Losses:
                return window_losses(reference, {name: model}, pieces[number], expected_states=expected[number])[name]

            with independent_threads() as run:
                return bits, sum(run(work, range(len(pieces))), Losses())

        for name in formats:
            progress.update(task, description=name)
            if (known := finished.get(name)) is not None:
                progress.advance(task, weights)
                bits, losses = finished.bits(name), known[name]
            else:
                bits, losses = measured(name)
                finished.keep(name, {name: losses}, bits)
            found.append(Row(f"w:{name}" + (" a:int8" if setting.int8_activations else ""), bits, bits, losses))
    finished.remove()
    return found


def _job(checkpoint: "Checkpoint", pieces: "Sequence[Window]", setting: Setting) -> str:
    """A digest of everything the figures of a format depend on."""
    state = hashlib.sha256(f"{checkpoint.sha256()} {astuple(setting)}".encode())
    for piece in pieces:
        state.update(f"{piece.first} {piece.tokens.tolist()}".encode())
    return state.hexdigest()
