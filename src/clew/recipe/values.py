"""What the tables of a recipe are made of: kinds of values, in types and in words."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

WARM_START = "package:warm-start"
"""The model.path of the checkpoint that is shipped in the package (assets/warm-start)."""

INT_MAX = 2**63 - 1
"""Largest whole number of TOML."""


@dataclass(frozen=True)
class Allowed:
    """What a field accepts, in words, where its type and bounds don't say it."""

    text: str


def _size(value: Any) -> tuple[int, int]:
    """[rows, cols], with an int n for [n, n]; booleans are not ints."""
    sides = (value, value) if isinstance(value, int) else value
    if not isinstance(sides, list | tuple) or len(sides) != 2:
        raise ValueError("not one or two whole numbers")
    if any(type(side) is not int or not 2 <= side <= INT_MAX for side in sides):
        raise ValueError("a side is no whole number >= 2")
    return (sides[0], sides[1])


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("not a list of names")
    if any(not isinstance(name, str) or not name for name in value) or len(set(value)) < len(value):
        raise ValueError("a name is empty, given twice or no string")
    return tuple(value)


class Arguments(dict[str, Any]):
    """Keyword arguments, as free as they stand in a recipe; nobody changes them, so a recipe can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))


def _arguments(value: dict[str, Any]) -> Arguments:
    try:
        json.dumps(value, allow_nan=False)  # they travel to other processes, and into the cards of models
    except TypeError as error:
        raise ValueError("a date or a time") from error
    return Arguments(value)


def _names_or_none(value: Any) -> tuple[str, ...] | None:
    return None if value is None else _names(value)


def _target(value: Any) -> str | tuple[str, ...]:
    return value if value == "all-linear" else _names(value)


def _model_path(value: str) -> str:
    if value.startswith("package:") and value != WARM_START:
        raise ValueError("not a checkpoint of the package")
    return value


def _single(value: float) -> float:
    if value and not 1e-37 <= abs(value) <= 1e38:
        raise ValueError("zero or infinite in single precision, in which the run computes")
    return value


Text = Annotated[str, Field(min_length=1)]
ModelPath = Annotated[Text, AfterValidator(_model_path), Allowed(f'a folder, or "{WARM_START}"')]
Positive = Annotated[int, Field(ge=1, le=INT_MAX)]
NonNegative = Annotated[int, Field(ge=0, le=INT_MAX)]
PositiveNumber = Annotated[float, Field(gt=0), AfterValidator(_single)]
NonNegativeNumber = Annotated[float, Field(ge=0), AfterValidator(_single)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Size = Annotated[tuple[int, int], BeforeValidator(_size), Allowed("[rows, cols] or one whole number, each side >= 2")]
Names = Annotated[tuple[str, ...], BeforeValidator(_names), Allowed("a list of one or more different names")]
OptionalNames = Annotated[
    tuple[str, ...] | None,
    BeforeValidator(_names_or_none),
    Allowed("a list of one or more different names"),
]
Keywords = Annotated[
    dict[str, Any],
    AfterValidator(_arguments),
    Allowed("a table of strings, finite numbers, true or false, and lists or tables of them"),
]
Target = Annotated[
    Literal["all-linear"] | tuple[str, ...],
    BeforeValidator(_target),
    Allowed('"all-linear" or a list of one or more different module name suffixes'),
]


class Table(BaseModel):
    """One table: immutable, strictly typed, without unknown keys, nan or inf."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
