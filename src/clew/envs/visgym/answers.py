"""Reads the action out of an answer: VisGym's agents write a Python tuple, bare or between tags."""

from __future__ import annotations

import ast
import re

_TAG = re.compile(r"<(/?)(answer|action)>")
_OPENING = re.compile(r"\(\s*['\"]")  # an action begins with its name, a string
_CLOSING = {")": "(", "]": "[", "}": "{"}
_LONGEST = 2000  # characters of an action
_MOST = 200  # places in an answer at which an action may begin: beyond, it is noise


def find_action(answer: str) -> str | None:
    """The one action that an answer names: ``('move', 0)``, bare or within ``<answer>`` or ``<action>``.

    Brackets may nest and strings may hold brackets: ``('place', (1, (2, 3)))``, ``('say', ":-)")``. Where there are
    tags, what stands outside them does not count. The outer brackets may be missing where nothing else is written.

    Returns:
        The text of the tuple, or None where the answer names none or several different ones.
    """
    found: dict[str, str] = {}  # by value: one action may be written in several ways
    for text in _tagged(answer) or [answer]:
        bare = text.strip()  # in brackets only where it holds no action as it stands: it may be one that is quoted
        for action in _tuples(text) or (_tuples(f"({bare})") if bare[:1] in ("'", '"') else []):
            found.setdefault(repr(ast.literal_eval(action)), action)
    return next(iter(found.values())) if len(found) == 1 else None


def _tagged(answer: str) -> list[str]:
    """What stands between tags, read in one pass: a long answer must not take long."""
    found: list[str] = []
    opened: re.Match[str] | None = None
    for tag in _TAG.finditer(answer):
        if opened is None:
            opened = None if tag[1] else tag
        elif tag[1] and tag[2] == opened[2]:
            found.append(answer[opened.end() : tag.start()])
            opened = None
    return found


def _tuples(text: str) -> list[str]:
    found, position = [], 0
    for _ in range(_MOST):
        if (opening := _OPENING.search(text, position)) is None:
            break
        start = opening.start()
        end = _end(text, start)
        if end is not None and _is_action(text[start:end]):
            found.append(text[start:end])
            position = end
        else:
            position = start + 1
    return found


def _end(text: str, start: int) -> int | None:
    """Where the bracket that opens at ``start`` closes, quotes and nested brackets respected."""
    stack: list[str] = []
    quote = ""
    position, last = start, min(len(text), start + _LONGEST)
    while position < last:
        letter = text[position]
        if quote:
            if letter == "\\":
                position += 1
            elif letter == quote:
                quote = ""
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            stack.append(letter)
        elif letter in _CLOSING:
            if stack.pop() != _CLOSING[letter]:
                return None
            if not stack:
                return position + 1
        position += 1
    return None


def _is_action(text: str) -> bool:
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # all that literal_eval documents
        return False
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], str)
