"""`kvant diff`: the first value in which two archives differ."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import numpy as np

CYCLE = "cycle"
"""An array ``NAME.cycle`` holds the clock cycle of each entry (first axis) of ``NAME`` and of every ``NAME.FIELD``."""


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""

    @app.command()
    def diff(
        a: Annotated[Path, typer.Argument(metavar="A.npz", help="First archive.", show_default=False)],
        b: Annotated[Path, typer.Argument(metavar="B.npz", help="Second archive.", show_default=False)],
        ignore: Annotated[
            list[str] | None, typer.Option("--ignore", metavar="NAME", help="Array to leave out; repeatable.")
        ] = None,
    ) -> None:
        """Show the first value in which two archives differ, bit for bit; exit code 1 if there is one."""
        from kvant.errors import InputError
        from kvant.tensors import read_npz

        left, right = read_npz(a), read_npz(b)
        for name in ignore or ():
            if name not in left and name not in right:
                raise InputError(f"--ignore {name}: neither archive has this array")
            left.pop(name, None)
            right.pop(name, None)
        difference = first_difference(left, right)
        if difference is not None:
            typer.echo(difference)
            raise typer.Exit(1)
        typer.echo(f"equal: {len(left)} array{'s' if len(left) != 1 else ''}")


def first_difference(a: "dict[str, np.ndarray]", b: "dict[str, np.ndarray]") -> str | None:
    """One line on the first difference, in the order of *a*; None if there is none.

    Every bit counts: dtypes, shapes, the sign of zero, the payload of a NaN. Texts of different storage width are
    equal if they read the same. Arrays of cycles are compared behind all others, for a run that is late only because
    its values differ should not be reported as late.
    """
    for name in sorted([*a, *(name for name in b if name not in a)], key=_is_cycle):
        if name not in b:
            return f"{name}: only in A, {_kind(a[name])}"
        if name not in a:
            return f"{name}: only in B, {_kind(b[name])}"
        if difference := _compare(name, a, b):
            return difference
    return None


def _is_cycle(name: str) -> bool:
    return name.rpartition(".")[2] == CYCLE


def _kind(array: "np.ndarray") -> str:
    return f"{array.dtype} [{', '.join(map(str, array.shape))}]"


def _compare(name: str, a: "dict[str, np.ndarray]", b: "dict[str, np.ndarray]") -> str | None:
    import numpy as np

    left, right = a[name], b[name]
    is_text = left.dtype.kind == right.dtype.kind and left.dtype.kind in "US"
    if left.shape != right.shape or (left.dtype != right.dtype and not is_text):
        return f"{name}: A is {_kind(left)}, B is {_kind(right)}"
    if is_text:
        differs = np.atleast_1d(left != right).ravel()
    else:
        bits = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (left, right)]
        differs = (bits[0] != bits[1]).reshape(left.size, left.dtype.itemsize).any(axis=1)
    if not differs.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(differs.argmax()), left.shape))
    place = f"{name}[{', '.join(map(str, index))}]" if index else name
    text = f"{place}: A {_value(left[index])}, B {_value(right[index])}"
    cycles = [_cycle(name, index, arrays) for arrays in (a, b)]
    if None not in cycles:
        text += f", cycle {cycles[0]}" if cycles[0] == cycles[1] else f", cycle A {cycles[0]}, B {cycles[1]}"
    return f"{text} ({int(differs.sum())} of {left.size} values differ)"


def _value(value: "np.generic") -> str:
    """A value, of a floating-point number its bits as well."""
    if value.dtype.kind == "f":
        bits = int.from_bytes(value.tobytes(), sys.byteorder)  # a single value is always in the machine's order
        return f"{value!s} (0x{bits:0{2 * value.itemsize}x})"
    return repr(value.item())


def _cycle(name: str, index: tuple[int, ...], arrays: "dict[str, np.ndarray]") -> int | None:
    """Cycle of an entry, where the archive holds cycles of its array."""
    for stream in (name, name.rpartition(".")[0]):
        cycles = arrays.get(f"{stream}.{CYCLE}")
        if index and not _is_cycle(name) and cycles is not None and cycles.ndim == 1 and index[0] < cycles.size:
            return int(cycles[index[0]])
    return None
