"""Configuration of a design: presets, a TOML file and overrides, composed into the parameter classes of the blocks.

Later layers win: the preset ``default``, the chosen preset, the file, the overrides. The fields are flat; every
block takes those it needs.
"""

import difflib
import functools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvant.errors import InputError
from kvant.hw.attention.parameters import AttentionParameters
from kvant.hw.kvcache.parameters import TABLE_ENTRIES, THRESHOLD_LIMIT, CacheParameters
from kvant.hw.linear.parameters import LinearParameters
from kvant.hw.numeric.codes import LINEAR
from kvant.hw.parameters import ParameterError, Parameters
from kvant.hw.pq.parameters import PqParameters
from kvant.hw.soc.parameters import SocParameters

DEFAULT_PRESET = "default"

PRESET_FOLDER = Path(__file__).parent / "presets"

OWN_FIELDS = {
    "preset": "Configuration to start from; a field of the file or an override replaces its value.",
    "coefficients": "Table of M-ANT coefficient bytes to choose from, in any order.",
    "thresholds": "Limits of the normalised second moment between neighbouring table entries, for blocks that choose "
    "in hardware. They belong to their table: coefficients without thresholds stand for a table that has none.",
}
"""Fields of the configuration itself, with their descriptions; all others belong to a parameter class."""


SECTIONS: dict[str, type[Parameters]] = {
    "linear": LinearParameters,
    "cache": CacheParameters,
    "pq": PqParameters,
    "soc": SocParameters,
    "attention": AttentionParameters,
}
"""Parameter classes that make up a configuration; a field belongs to each class that has it."""


@dataclass(frozen=True)
class Config:
    """A validated configuration.

    Attributes
    ----------
    preset : str
        Preset it started from.
    linear : LinearParameters
        Parameters of the linear path.
    cache : CacheParameters
        Parameters of the cache blocks and of the memory port.
    pq : PqParameters
        Parameters of the product-quantised cache.
    soc : SocParameters
        Parameters of the top around the engines.
    attention : AttentionParameters
        Parameters of attention over M-ANT and INT8 caches.
    table : tuple of int
        Coefficient table as written down; see `coefficients`.
    thresholds : tuple of int, or None
        One fewer than coefficients, non-descending, unsigned 16 bits. None: the table has no thresholds.
    stated : frozenset of str
        Fields that the user set, in a file or by an override.
    """

    preset: str
    linear: LinearParameters
    cache: CacheParameters
    pq: PqParameters
    soc: SocParameters
    attention: AttentionParameters
    table: tuple[int, ...]
    thresholds: tuple[int, ...] | None
    stated: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def coefficients(self) -> tuple[int, ...]:
        """Coefficient table, 1 to 16 bytes of 0..max_coefficient or 255.

        Raises
        ------
        InputError
            If the preset's table has a coefficient that is larger than the `max_coefficient` that was chosen. A
            design alone does not need the table (tables are written at run time), so only its use is refused.
        """
        _check_table(self.table, self.linear.max_coefficient)
        return self.table

    def as_dict(self) -> dict:
        """All fields, flat and in documented order, as JSON and TOML can hold them (an absent value is None)."""
        values = {"preset": self.preset}
        for section in SECTIONS:
            values |= getattr(self, section).model_dump()
        values["coefficients"] = list(self.table)
        values["thresholds"] = None if self.thresholds is None else list(self.thresholds)
        return values


def field_names() -> list[str]:
    """All fields of a configuration."""
    names = dict.fromkeys(name for section in SECTIONS.values() for name in section.model_fields)
    return ["preset", *names, *list(OWN_FIELDS)[1:]]


def presets() -> list[str]:
    """Names of the presets."""
    names = sorted(file.stem for file in PRESET_FOLDER.glob("*.toml"))
    return [DEFAULT_PRESET, *(name for name in names if name != DEFAULT_PRESET)]


@functools.cache
def preset_values(name: str) -> Mapping[str, object]:
    """What the preset *name* itself sets."""
    if name not in presets():
        raise InputError(f"preset = {_shown(name)}: legal is one of {', '.join(presets())}")
    return tomllib.loads((PRESET_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def load(
    path: str | Path | None = None,
    overrides: Iterable[str] | None = (),
    *,
    arrays: Mapping[str, object] | None = None,
) -> Config:
    """Compose a configuration.

    Parameters
    ----------
    path : str or Path, optional
        TOML file, or the name of a preset. None: the preset ``default``.
    overrides : iterable of str
        ``FIELD=VALUE``, the value as in TOML (``64``, ``true``, ``[0, 5, 255]``); a bare word is a string. None, which
        the command line passes where no override is given, stands for none.
    arrays : dict, optional
        Fields that a user gave as 0-d arrays among the tensors; they win over everything else.

    Raises
    ------
    InputError
        For the first thing that is not legal, naming field, value and legal range.
    """
    layers = []
    if path is not None:
        layers.append(_file_layer(path))
    layers.append(("--set", parse_overrides(overrides or ())))
    if arrays:
        layers.append(("array", arrays))
    return compose(layers)


def stated_fields(path: str | Path | None, overrides: Iterable[str] | None = ()) -> frozenset[str]:
    """Fields that a user sets in a file and by overrides, whether or not they make a configuration together."""
    named = frozenset() if path is None else frozenset(_file_layer(path)[1])
    return named | frozenset(parse_overrides(overrides or ()))


def compose(layers: Sequence[tuple[str, Mapping[str, object]]]) -> Config:
    """Compose a configuration from *layers* of (where it comes from, fields); later layers win.

    Raises
    ------
    InputError
        For the first field that is not legal; the text starts with where the field comes from.
    """
    for source, values in layers:
        for name, value in values.items():
            _check_name(source, name, value)
    chosen = [(source, values["preset"]) for source, values in layers if "preset" in values]
    source, preset = chosen[-1] if chosen else ("preset", DEFAULT_PRESET)
    if not isinstance(preset, str) or preset not in presets():
        raise InputError(f"{source}: preset = {_shown(preset)}: legal is one of {', '.join(presets())}")
    bases = [(f"preset {name}", preset_values(name)) for name in dict.fromkeys((DEFAULT_PRESET, preset))]

    merged: dict[str, object] = {}
    origin: dict[str, str] = {}
    for source, values in [*bases, *layers]:
        if "coefficients" in values and "thresholds" not in values and values["coefficients"] != merged["coefficients"]:
            merged.pop("thresholds", None)
        merged |= values
        origin |= dict.fromkeys(values, source)

    sections = {name: _section(kind, merged, origin) for name, kind in SECTIONS.items()}
    linear = sections["linear"]
    try:
        table = _integers("coefficients", merged["coefficients"], TABLE_ENTRIES)
        if not origin["coefficients"].startswith("preset "):
            _check_table(table, linear.max_coefficient)
    except InputError as error:
        raise InputError(f"{origin['coefficients']}: {error}") from None
    try:
        thresholds = _thresholds(merged.get("thresholds"), len(table))
    except InputError as error:
        raise InputError(f"{origin['thresholds']}: {error}") from None
    stated = frozenset(name for _, values in layers for name in values)
    return Config(preset, table=table, thresholds=thresholds, stated=stated, **sections)


def parse_overrides(overrides: Iterable[str]) -> dict[str, object]:
    """Fields of ``FIELD=VALUE`` texts; the last value of a field wins.

    Raises
    ------
    InputError
        If a text is not of that form or its value is neither TOML nor a bare word.
    """
    values = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not name or not value:
            raise InputError(f"--set {_shown(text)}: legal is FIELD=VALUE, for instance rows=8")
        if re.fullmatch(r"(?!(true|false|inf|nan)$)[A-Za-z][\w.-]*", value):
            values[name] = value
            continue
        try:
            parsed = tomllib.loads(f"value = {value}")
        except (ValueError, RecursionError):  # an integer of thousands of digits is a plain ValueError
            parsed = {}
        if list(parsed) != ["value"]:
            raise InputError(f"--set {name}: {_shown(value)} is no value of TOML (a number, true, [1, 2]) nor a word")
        values[name] = parsed["value"]
    return values


def legal(name: str) -> str:
    """Legal values of the field *name*, in words."""
    if name == "preset":
        return "one of " + ", ".join(repr(preset) for preset in presets())
    if name == "coefficients":
        return f"1 to {TABLE_ENTRIES} integers, each from 0 to max_coefficient or {LINEAR}"
    if name == "thresholds":
        return f"one integer fewer than coefficients, each from 0 to {THRESHOLD_LIMIT}, none below the one before it"
    return next(section.legal(name) for section in SECTIONS.values() if name in section.model_fields)


def _file_layer(path: str | Path) -> tuple[str, Mapping[str, object]]:
    if str(path) in presets() and not Path(path).exists():
        return "--config", {"preset": str(path)}
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"--config {path}: no such file, and no preset; presets: {', '.join(presets())}") from None
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}") from None
    except ValueError:
        raise InputError(f"--config {path}: not a text file in UTF-8; legal is a TOML file") from None
    try:
        return str(path), tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not TOML: {error}") from None


def _check_name(source: str, name: str, value: object):
    if name in field_names():
        return
    close = difflib.get_close_matches(name, field_names(), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise InputError(
        f"{source}: {name} = {_shown(value)}: unknown field{hint}; legal names: {', '.join(field_names())}"
    )


def _section(kind: type[Parameters], merged: Mapping[str, object], origin: Mapping[str, str]) -> Parameters:
    values = {name: _none_from_word(kind, name, merged[name]) for name in kind.model_fields if name in merged}
    try:
        return kind(**values)
    except ParameterError as error:
        named = str(error).partition(" ")[0]
        raise InputError(f"{origin[named]}: {error}" if named in origin else str(error)) from None


def _none_from_word(kind: type[Parameters], name: str, value: object) -> object:
    """TOML has no null: the word "none" stands for it where a field may be absent."""
    optional = kind.model_fields[name].default is None
    return None if optional and value == "none" else value


def _integers(name: str, value: object, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= limit:
        raise InputError(f"{name} = {_shown(value)}: legal is {legal(name)}")
    for index, entry in enumerate(value):
        if type(entry) is not int:  # bool is an int to isinstance
            raise InputError(f"{name}[{index}] = {_shown(entry)}: legal is {legal(name)}")
    return tuple(value)


def _check_table(table: Sequence[int], max_coefficient: int):
    for index, entry in enumerate(table):
        if entry != LINEAR and not 0 <= entry <= max_coefficient:
            raise InputError(
                f"coefficients[{index}] = {entry}: legal is an integer from 0 to max_coefficient = {max_coefficient}, "
                f"or {LINEAR}"
            )


def _thresholds(value: object, entries: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    if value in ([], ()) and entries == 1:
        return ()
    thresholds = _integers("thresholds", value, TABLE_ENTRIES)
    if len(thresholds) != entries - 1:
        raise InputError(
            f"thresholds has {len(thresholds)} entries: legal is {entries - 1}, "
            f"one fewer than the {entries} coefficients"
        )
    floor = 0
    for index, entry in enumerate(thresholds):
        if not floor <= entry <= THRESHOLD_LIMIT:
            note = " (the one before it)" if index else ""
            raise InputError(
                f"thresholds[{index}] = {entry}: legal is an integer from {floor}{note} to {THRESHOLD_LIMIT}"
            )
        floor = entry
    return thresholds


def _shown(value: object) -> str:
    """*value* for a message: on one line, and short."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
