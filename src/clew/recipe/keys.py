"""The keys a recipe knows: dotted names, what each accepts, and the one that a misspelt key meant."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types as bounds
from pydantic.fields import FieldInfo

from clew.recipe.schema import Recipe
from clew.recipe.values import INT_MAX, Allowed, Table

_KINDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
}


class Entry(NamedTuple):
    """A table, or a key of one (then ``field`` says what it holds)."""

    table: type[Table]
    field: FieldInfo | None


def _walk(table: type[Table], prefix: str = "") -> Iterator[tuple[str, Entry]]:
    for name, field in table.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Table):
            yield prefix + name, Entry(inner, None)
            yield from _walk(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, Entry(table, field)


KEYS: dict[str, Entry] = dict(_walk(Recipe))
"""Every table and key by its dotted name, in the order of the classes."""


def is_open(key: str) -> bool:
    """Whether a dotted name lies below a key that holds a table of the user's own words."""
    entry = KEYS.get(key.rpartition(".")[0])
    return entry is not None and entry.field is not None and get_origin(entry.field.annotation) is dict


def allowed(field: FieldInfo) -> str:
    """What a field accepts, in words: its type and its bounds."""
    for item in field.metadata:
        if isinstance(item, Allowed):
            return item.text
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):  # only ever `X | None`
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        *most, last = (f'"{choice}"' for choice in get_args(kind))
        return f"{', '.join(most)} or {last}"
    limits = []
    for item in field.metadata:
        match item:
            case bounds.Ge(ge=limit):
                limits.append(f">= {limit}")
            case bounds.Gt(gt=limit):
                limits.append(f"> {limit}")
            case bounds.Le(le=limit) if limit != INT_MAX:
                limits.append(f"<= {limit}")
            case bounds.Lt(lt=limit):
                limits.append(f"< {limit}")
            case bounds.MinLen():
                limits.append("that is not empty")
    return " ".join([_KINDS[kind], " and ".join(limits)]).rstrip()


def nearest(key: str) -> str:
    """The known key that an unknown dotted key most likely meant.

    The name counts most, initials included (lr); the table decides between names about as close.
    """
    table, _, name = key.rpartition(".")

    def closeness(known: str) -> float:
        known_table, _, known_name = known.rpartition(".")
        initials = "".join(word[0] for word in known_name.split("_"))
        return _alike(name, known_name) + (name == initials) + 0.2 * _alike(table, known_table)

    return max(KEYS, key=closeness)


def _alike(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def shown(value: Any) -> str:
    """A value as TOML writes it, more or less, cut where it is long; None is a key left out."""
    if value is None:
        return "left out"
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError) as error:  # more digits or a deeper nest than Python prints
        return f"a value that cannot be printed ({error})"
    return text if len(text) <= 80 else f"{text[:77]}..."
