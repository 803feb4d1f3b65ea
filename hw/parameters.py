"""Base of all parameter classes: validated once, immutable, errors of one line."""

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator


class ParameterError(ValueError):
    """A parameter outside its legal range; the text is one line that names it, its value and what is legal."""


def is_integer(value: object, least: int, most: int | None = None) -> bool:
    """Whether *value* is an integer, and no bool, from *least* to *most* (None: without end)."""
    return type(value) is int and least <= value and (most is None or value <= most)


def check_integer(name: str, value: object, least: int, most: int | None = None, *, note: str = "") -> int:
    """*value*, if `is_integer` holds; for components with few parameters, which have no `Parameters` class.

    Raises
    ------
    ParameterError
        Otherwise; *note* follows the legal range.
    """
    if not is_integer(value, least, most):
        legal = f"an integer from {least}" + ("" if most is None else f" to {most}")
        raise ParameterError(f"{name} = {value!r}: legal is {legal}{note}")
    return value


def _legal(schema: dict) -> str:
    """What a field's JSON schema allows, in words."""
    options = schema.get("anyOf", [schema])
    words = []
    for option in options:
        kind = option.get("type")
        if kind == "null":
            words.append("none")
        elif "const" in option:
            words.append(repr(option["const"]))
        elif "enum" in option:
            words.append("one of " + ", ".join(repr(value) for value in option["enum"]))
        elif kind == "integer" and "minimum" in option and "maximum" in option:
            words.append(f"an integer from {option['minimum']} to {option['maximum']}")
        elif kind == "boolean":
            words.append("true or false")
        else:
            words.append(kind or "see the documentation")
    return " or ".join(words)


class Parameters(BaseModel):
    """Immutable, strict (no bool for an int, no string for a number), unknown names refused.

    Raises
    ------
    ParameterError
        At construction, for the first field that is not legal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, **values):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ParameterError(self._one_line(error.errors()[0])) from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool(cls, value: object, info: ValidationInfo) -> object:
        """True equals 1, and a choice among integers would take it."""
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ParameterError("not an integer")
        return value

    @classmethod
    def legal(cls, name: str) -> str:
        """The legal values of field *name*, in words."""
        return _legal(cls.model_json_schema()["properties"][name])

    @classmethod
    def _one_line(cls, error: dict) -> str:
        if not error["loc"]:  # raised by a validator over several fields, whose message is complete
            return str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
        name = str(error["loc"][0])
        if error["type"] == "extra_forbidden":
            return f"{name} = {error['input']!r}: unknown parameter; legal names: {', '.join(cls.model_fields)}"
        if error["type"] == "missing":
            return f"{name}: missing; legal: {cls.legal(name)}"
        return f"{name} = {error['input']!r}: legal is {cls.legal(name)}"
