"""Token ids to text as they come, so that the pieces put together are the text of all of them."""

from __future__ import annotations

from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are no whole letter yet


class Detokenizer:
    """Turns an answer's tokens into pieces of text; a piece never ends within a letter.

    Decoding begins a few tokens before the new ones, so that it costs the same at any length of the answer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._done = 0

    def add(self, ids: list[int], *, last: bool = False) -> str:
        """The text that these tokens add; what is no whole letter yet is kept back, unless they are the last."""
        self._ids += ids
        before = self._decode(self._start, self._done)
        now = self._decode(self._start, len(self._ids))
        if now.endswith(_UNFINISHED) and not last:
            return ""
        self._start, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end]) if end > start else ""
