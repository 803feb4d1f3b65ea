"""Writes the configuration reference, ``docs/configuration.md``, from the parameter classes themselves.

``python -m kvant.reference docs/configuration.md`` (``make reference``) brings the page up to date.
"""

import sys
from pathlib import Path

from kvant import config

INTRODUCTION = """\
# Configuration

<!-- Written by `make reference` from the parameter classes; a test holds it up to date. -->

A design is a set of flat fields. They come from four layers, of which later ones win: the preset `default`, the
preset that was chosen, the TOML file given as `--config`, and the overrides `--set FIELD=VALUE`.

```toml
# design.toml
preset = "paper"
rows = 16
cols = 4
```

```console
$ kvant generate linear --config design.toml --set group=32 -o build
$ kvant generate linear --config paper -o build        # a preset by its name
```

The value of an override is written as in TOML; a bare word is a string (`--set adder=kogge_stone`). A field that may
be absent takes the word `none`. A value outside the legal range is refused in one line with exit code 2; no value is
ever changed silently.
"""

HEADINGS = {
    "linear": "The linear path",
    "cache": "Caches of keys and values",
    "pq": "Product quantisation",
    "soc": "The accelerator's top",
    "attention": "Attention",
}

NOTES = {
    "linear": "Fields of `linear`: the array, its group accumulators and the buffers around them.",
    "cache": "Fields of `variance`, `kcache` and `vcache`, which also take `group`, `max_coefficient` and `adder` from "
    "above. They have no effect on `linear`, which has `rows * cols` lanes.",
    "pq": "Fields of `pq`, which also takes `group`, `lanes`, `head_dim`, `heads`, `sinks`, `centred`, `capacity` "
    "(here the coded tokens whose scores are buffered) and `port_bits` from above.",
    "soc": "Fields of `top`, which also takes those of `linear`, `port_bits` from above, and with `attention` those of "
    "`kcache`, `vcache` and `attention`.",
    "attention": "Fields of `attention`, which also takes `group`, `rows`, `cols`, `max_coefficient`, `quant_lanes`, "
    "`multiplier`, `adder`, `head_dim`, `lanes`, `sinks`, `capacity` and `port_bits` from above; the caches in "
    "front of it take all fields of `kcache`, `vcache` and `pq`.",
}


def configuration_page() -> str:
    """The page, in Markdown."""
    parts = [INTRODUCTION, "## Preset and coefficient table\n", _own_table()]
    shown = set()  # a field that several sections share belongs to the first one
    for name, section in config.SECTIONS.items():
        rows = [
            (field, _shown(info.default), section.legal(field), info.description)
            for field, info in section.model_fields.items()
            if field not in shown
        ]
        shown.update(section.model_fields)
        parts += [f"## {HEADINGS[name]}\n", NOTES[name] + "\n", _table(rows)]
    parts.append("## Presets\n")
    for name in config.presets():
        text = (config.PRESET_FOLDER / f"{name}.toml").read_text(encoding="utf-8").rstrip()
        parts += [f"### {name}\n", f"```toml\n{text}\n```\n"]
    return "\n".join(parts)


def _own_table() -> str:
    default = config.load().as_dict()
    return _table((name, _shown(default[name]), config.legal(name), text) for name, text in config.OWN_FIELDS.items())


def _table(rows) -> str:
    lines = ["| field | default | legal | meaning |", "|---|---|---|---|"]
    lines += ["| " + " | ".join((f"`{field}`", default, legal, text)) + " |" for field, default, legal, text in rows]
    return "\n".join(lines) + "\n"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "`" + " ".join(map(str, value)) + "`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "none" if value is None else f"`{value}`"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(configuration_page(), encoding="utf-8")
