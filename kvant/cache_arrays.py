"""Arrays that the cache blocks share: tables of coefficients, means, numbers that replace the configuration."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvant import config
from kvant.config import Config
from kvant.errors import InputError
from kvant.hw.numeric.codes import LINEAR
from kvant.tensors import ArraySpec, scalar

TABLE_ARRAYS = [ArraySpec("coeffs", "uint8", ("C",)), ArraySpec("thresholds", "uint16", ("C-1",))]
"""A table of coefficients; both or none."""

NUMBER_ARRAYS = [ArraySpec("group", "integer"), ArraySpec("sinks", "integer"), ArraySpec("statistic", "str")]
"""Fields of the configuration that may be given as arrays."""


@dataclass(frozen=True)
class Table:
    """Coefficients and one threshold fewer, ascending or equal."""

    coefficients: tuple[int, ...]
    thresholds: tuple[int, ...]


def text(arrays: Mapping[str, np.ndarray], name: str) -> str | None:
    """The text of an optional 0-d array.

    Raises
    ------
    InputError
        It is none.
    """
    if name not in arrays:
        return None
    if arrays[name].dtype.kind != "U" or arrays[name].ndim:
        raise InputError(f"array {name}: {arrays[name].dtype} {arrays[name].shape}; legal is a 0-d str")
    return str(arrays[name])


def load(arrays: dict[str, np.ndarray], path: str | Path | None, overrides: Iterable[str], **more: object) -> Config:
    """The configuration, with what *arrays* say of it and with the fields *more*."""
    fields = {name: scalar(arrays, name) for name in ("group", "sinks")} | {"statistic": text(arrays, "statistic")}
    given = {name: value for name, value in fields.items() if value is not None}
    return config.load(path, overrides, arrays=given | more)


def check_together(arrays: Mapping[str, np.ndarray]) -> None:
    """Refuse a table without thresholds, or thresholds without a table."""
    for name, other in (("coeffs", "thresholds"), ("thresholds", "coeffs")):
        if name in arrays and other not in arrays:
            raise InputError(f"array {name}: given without {other}; legal are both or none")


def choice_table(arrays: Mapping[str, np.ndarray], chosen: Config) -> Table:
    """The table among *arrays*, or that of the configuration.

    Raises
    ------
    InputError
        For more than 16 coefficients, one that is none, thresholds that descend, or a configuration without them.
    """
    if "coeffs" not in arrays:
        if chosen.thresholds is None:
            raise InputError("thresholds = none: legal is a table with thresholds, in the configuration or as arrays")
        return Table(tuple(chosen.coefficients), tuple(chosen.thresholds))
    table, limits = arrays["coeffs"].tolist(), arrays["thresholds"].tolist()
    if len(table) > config.TABLE_ENTRIES:
        raise InputError(f"array coeffs: {len(table)} coefficients; legal is 1 to {config.TABLE_ENTRIES}")
    most = chosen.cache.max_coefficient
    for index, entry in enumerate(table):
        if entry > most and entry != LINEAR:
            raise InputError(f"coeffs[{index}] = {entry}: legal is 0 to {most} (max_coefficient), or {LINEAR}")
    for index, (before, entry) in enumerate(itertools.pairwise(limits), start=1):
        if entry < before:
            raise InputError(f"thresholds[{index}] = {entry}: legal is {before} (the one before it) to 65535")
    return Table(tuple(table), tuple(limits))


def bench_table(chosen: Config) -> Table:
    """The configuration's table, with thresholds spread evenly where it has none."""
    coefficients, thresholds = chosen.coefficients, chosen.thresholds
    if thresholds is None:
        thresholds = tuple(range(400, 400 + 1100 * (len(coefficients) - 1), 1100))
    return Table(tuple(coefficients), tuple(thresholds))


def check_finite(arrays: Mapping[str, np.ndarray], name: str, *, least: float | None = None) -> None:
    """Refuse an optional fp16 vector with an element that is not finite, or below *least*."""
    if name not in arrays:
        return
    values = arrays[name].astype(np.float64)
    bad = ~np.isfinite(values)
    if least is not None:
        bad |= values < least
    for index in np.flatnonzero(bad)[:1]:
        bound = "" if least is None else f" of at least {least:g}"
        raise InputError(f"{name}[{index}] = {values[index]}: legal is a finite value{bound}")


def check_cache(chosen: Config) -> None:
    """Refuse a configuration that no cache can be built of."""
    from kvant.hw.parameters import ParameterError

    try:
        chosen.cache.check_cache()
    except ParameterError as error:
        raise InputError(str(error)) from None
