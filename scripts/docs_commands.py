"""The commands in the project's pages: fenced blocks, the `clew` calls in them, and whether these are possible."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```", re.M | re.S)
_ENDS = {"&&", "||", "|", ";", "&", ")"}


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        heading: of the section it is in.
        kind: the words behind the fence (``sh rehearse``, ``toml``, nothing).
        text: what is in it, without continuation lines.
    """

    heading: str
    kind: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    headings = [(match.start(), match[1]) for match in re.finditer(r"^#+ (.+)$", _FENCE.sub(_blanked, text), re.M)]
    found = []
    for match in _FENCE.finditer(text):
        heading = next((title for start, title in reversed(headings) if start < match.start()), "")
        found.append(Block(heading, match[1].strip(), re.sub(r"\\\n\s*", "", match[2])))
    return found


def calls(page: Path) -> Iterator[list[str]]:
    """Arguments of every `clew` call of a page, in its blocks and in its sentences."""
    for block in blocks(page):
        if not block.kind or block.kind.startswith("sh"):
            for line in block.text.splitlines():
                yield from calls_of(line)
    for match in re.finditer(r"(?<!`)`(clew [^`]+)`(?!`)", _FENCE.sub("", page.read_text(encoding="utf-8"))):
        yield from calls_of(" ".join(match[1].split()))


def calls_of(line: str) -> Iterator[list[str]]:
    """Arguments of each `clew` in a command line; what a synopsis puts in brackets is taken as given."""
    try:
        words = shlex.split(re.sub(r"\[(?=[-A-Za-z])|\](?=\s|$)", "", line), comments=True)
    except ValueError:  # an apostrophe: prose
        return
    for at, word in enumerate(words):
        if word == "clew" and (at == 0 or words[at - 1] in _ENDS | {"--", "$", "nohup"} or "=" in words[at - 1]):
            rest = words[at + 1 :]
            yield rest[: next((n for n, other in enumerate(rest) if other in _ENDS), len(rest))]


def fault(arguments: list[str]) -> str | None:
    """What is wrong with a call: no such command, option or key of a recipe; None if nothing is.

    Values and files are not looked at, so placeholders are as good as any.
    """
    import typer.main

    from clew.cli.app import app
    from clew.recipe.keys import KEYS

    command: Any = typer.main.get_command(app)
    rest, name = list(arguments), "clew"
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        part = rest.pop(0)
        if part not in command.commands:
            return f"{name} has no command {part}"
        name, command = f"{name} {part}", command.commands[part]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in rest:
        option = word.split("=")[0]
        if option.startswith("-") and option not in options | {"--help", "--"}:
            return f"{name} has no option {option}"
        key = option if "=" in word and re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)+", option) else None
        if key is not None and key not in KEYS and key != "key.path":
            near = difflib.get_close_matches(key, KEYS, 1)
            return f"{name}: a recipe has no key {key}{f' (there is {near[0]})' if near else ''}"
    return None


def _blanked(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])
