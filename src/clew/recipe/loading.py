"""From a recipe's name or file, and overrides, to a checked ``Recipe``; bad input becomes one clear line."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from clew.errors import UserError
from clew.recipe.keys import KEYS, allowed, is_open, nearest, shown
from clew.recipe.schema import Recipe


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Loads a recipe by the name it is shipped under, or from a TOML file.

    Args:
        name_or_path: ``laptop``, or a path (recognised by ``.toml``, a separator, or a file of that name).
        overrides: ``key.path=value`` with a TOML value; a bare string needs no quotes; the last one wins.

    Raises:
        UserError: unknown recipe, unreadable file, invalid TOML, unknown key, bad value, conflicting values.
    """
    if name_or_path in shipped_recipes():
        text = files("clew").joinpath("recipes", f"{name_or_path}.toml").read_text("utf-8")
        return parse_recipe(text, source=f"the recipe {name_or_path}", name=name_or_path, overrides=overrides)
    path = Path(name_or_path)
    try:
        text = path.read_bytes().decode("utf-8-sig")  # some editors write a byte order mark
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise _error(f"{path} is not UTF-8 text (byte {error.start + 1}): save it as UTF-8") from error
        raise _error(_no_such_recipe(name_or_path)) from error  # (a path with a NUL byte is a ValueError)
    except IsADirectoryError as error:
        raise _error(f"{path} is a folder: name a TOML file, e.g. {path / 'recipe.toml'}") from error
    except OSError as error:
        raise _error(f"cannot read the recipe {path}: {error.strerror}") from error
    return parse_recipe(text, source=str(path), name=path.stem, overrides=overrides)


def shipped_recipes() -> tuple[str, ...]:
    """Names of the recipes in the package, sorted."""
    folder = files("clew").joinpath("recipes")
    return tuple(sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".toml")))


def parse_recipe(text: str, *, source: str, name: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """Parses and checks a recipe's TOML text.

    Args:
        text: TOML.
        source: what errors call the place the text came from.
        name: the recipe's name where the text gives none.
        overrides: as for ``load_recipe``.
    """
    data = _parse_toml(text, source)
    settings = [_parse_override(override) for override in overrides]
    origins = _Origins(source, {setting.key: setting.text for setting in settings})
    data.setdefault("name", name)
    for key, entry in KEYS.items():  # empty tables, so that errors name the missing key and not its table
        if entry.field is None:
            parent = _table_at(data, key.split(".")[:-1], origins)
            parent.setdefault(key.split(".")[-1], {})
    for setting in settings:
        *tables, leaf = setting.key.split(".")
        _table_at(data, tables, origins)[leaf] = setting.value
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise _explain(error, origins) from error


class _Setting(NamedTuple):
    key: str
    value: Any
    text: str


class _Origins(NamedTuple):
    """Where values came from: the file, or the override (by its dotted key)."""

    source: str
    overrides: Mapping[str, str]

    def of(self, *keys: str) -> str:
        texts = [f'"{self.overrides[key]}"' for key in keys if key in self.overrides]
        return f" (from the override {' and '.join(texts)})" if texts else f" (in {self.source})"


def _error(message: str) -> UserError:
    """A UserError of one printable line, whatever the input held."""
    return UserError("".join(char if char.isprintable() else repr(char)[1:-1] for char in message))


def _no_such_recipe(name: str) -> str:
    known = shipped_recipes()
    nearest_name = difflib.get_close_matches(Path(name).stem, known, n=1, cutoff=0.0)[0]
    hint = f'the nearest shipped one is "{nearest_name}" (all: {", ".join(known)})'
    if name.endswith(".toml") or "/" in name or "\\" in name:
        return f"the recipe file {name} does not exist: check the path, or name a shipped recipe; {hint}"
    return f'there is no recipe "{name}": {hint}, or give the path of a TOML file'


def _parse_toml(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise _error(f"{source} is not a recipe: its TOML is nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, or Python's own limit on digits
        last = len(text.splitlines()) or 1
        reason = str(error).replace("at end of document", f"at line {last}, the end of the file")
        raise _error(f"{source} is not valid TOML: {reason}") from error


def _parse_override(text: str) -> _Setting:
    if any("\ud800" <= char <= "\udfff" for char in text):  # bytes of the command line that are no text
        raise _error(f'the override "{text}" is not UTF-8 text')
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not key or not raw:
        raise _error(f'the override "{text}" is not of the form key.path=value, e.g. training.steps=100')
    if is_open(key):
        return _Setting(key, _parse_value(raw), text)
    if key not in KEYS:
        raise _error(f'unknown key {key}: the nearest known is {nearest(key)} (from the override "{text}")')
    if KEYS[key].field is None:
        example = next(name for name, entry in KEYS.items() if name.startswith(f"{key}.") and entry.field)
        raise _error(f'{key} is a table: set one of its keys, e.g. {example} (from the override "{text}")')
    return _Setting(key, _parse_value(raw), text)


def _parse_value(raw: str) -> Any:
    """A TOML value, or the text itself where it is none (a bare string)."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    return parsed["value"] if len(parsed) == 1 else raw  # more than one: a line break smuggled in other keys


def _table_at(data: dict[str, Any], path: Sequence[str], origins: _Origins) -> dict[str, Any]:
    node = data
    for depth, part in enumerate(path, start=1):
        inner = node.setdefault(part, {})
        if not isinstance(inner, dict):
            raise _not_a_table(".".join(path[:depth]), inner, origins)
        node = inner
    return node


def _not_a_table(key: str, value: Any, origins: _Origins) -> UserError:
    return _error(f"{key} must be a table, [{key}], got {shown(value)}{origins.of(key)}")


def _explain(error: ValidationError, origins: _Origins) -> UserError:
    """One line for the first error. Unknown keys come first: a misspelt key is also a missing one."""
    details = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    return _error(_sentence(details[0], origins))


def _sentence(detail: ErrorDetails, origins: _Origins) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "conflict":
        return f"{detail['ctx']['message']}{origins.of(*detail['ctx']['keys'])}"
    if detail["type"] == "extra_forbidden":
        kind = "table" if isinstance(detail["input"], dict) else "key"
        return f"unknown {kind} {key}: the nearest known is {nearest(key)}{origins.of(key)}"
    field = KEYS[key].field
    if field is None:
        return str(_not_a_table(key, detail["input"], origins))
    if detail["type"] == "missing":
        return f"{key} is missing: give {allowed(field)}{origins.of(key)}"
    return f"{key} must be {allowed(field)}, got {shown(detail['input'])}{origins.of(key)}"
