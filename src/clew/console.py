"""Lines on the console."""

from __future__ import annotations

from rich.console import Console


def say(console: Console, text: str) -> None:
    """Prints a line as it stands: nothing in it is markup, nothing is coloured by itself, and it is not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
