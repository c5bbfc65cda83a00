"""What may change between the two halves of an interrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clew.recipe.keys import KEYS, shown
from clew.recipe.schema import Recipe

_FREE = ("name", "checkpoint.keep")
_FREE_TABLES = ("runtime.", "cluster.", "tracking.")


def differences(old: Recipe, new: Recipe) -> list[str]:
    """Lines that name the keys in which a continued run's recipe differs and may not; empty: it may go on.

    May change: ``runtime.*``, ``cluster.*``, ``tracking.*``, ``checkpoint.keep``, ``name``, and a larger
    ``training.steps``.
    """
    before, after = dict(_flat(old.model_dump())), dict(_flat(new.model_dump()))
    lines = []
    for key, value in before.items():
        if value == after[key] or key in _FREE or key.startswith(_FREE_TABLES):
            continue
        if key != "training.steps":
            lines.append(f"{key}: {shown(value)} -> {shown(after[key])}")
        elif after[key] < value:
            lines.append(f"{key}: {value} -> {after[key]} (it may grow, not shrink)")
    return lines


def _flat(tables: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if KEYS[prefix + key].field is None:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
