"""The reference page of the recipe, made from the classes so that it can't go stale."""

from __future__ import annotations

from clew.recipe.keys import KEYS, allowed, shown

_INTRODUCTION = """\
# The recipe

<!-- Made by clew.recipe.recipe_reference_markdown(); a test compares. -->

One TOML file describes a whole run. Unknown keys are errors. Every key can be overridden on the command line:
`clew train laptop training.steps=50`.
"""
_HEADER = "| key | default | allowed | meaning |\n|---|---|---|---|\n"


def recipe_reference_markdown() -> str:
    """The text of docs/recipe.md: one section a table, one row a key."""
    sections = {"": f"\n{_HEADER}"}
    for key, (table, field) in KEYS.items():
        parent, _, name = key.rpartition(".")
        if field is None:
            sections[key] = f"\n## [{key}]\n\n{table.__doc__}\n\n{_HEADER}"
        else:
            default = "required" if field.is_required() else shown(field.default)
            sections[parent] += f"| `{name}` | {default} | {allowed(field)} | {field.description} |\n"
    return _INTRODUCTION + "".join(sections.values())
