"""The key that requests carry: a client's, and a server's."""

from __future__ import annotations

import os
import re
from pathlib import Path

from clew.errors import UserError
from clew.serving.limits import KEY_VARIABLE

_KEY_LENGTH = 16


def read_api_key(file: Path | None) -> str | None:
    """The API key in a file, or in the environment variable ``CLEW_API_KEY``; None where that is empty or not set.

    Raises:
        UserError: the file can't be read, or what is there can't be a key.
    """
    if file is None:
        source, found = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
        if not found:
            return None
    else:
        source = f"--api-key-file {file}"
        try:
            found = file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise UserError(f"{source} can't be read ({error}): name a file that holds the key alone") from error
    key = found.strip()
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise UserError(f"{source} holds no key: it must be one line of printable ASCII without spaces")
    return key


def read_server_key(file: Path | None) -> str | None:
    """The same for a server.

    Raises:
        UserError: see ``read_api_key``; or the key can be guessed.
    """
    key = read_api_key(file)
    if key is not None and len(key) < _KEY_LENGTH:
        source = KEY_VARIABLE if file is None else f"--api-key-file {file}"
        raise UserError(
            f"{source}: a server's key has at least {_KEY_LENGTH} signs, so that nobody guesses it; make one: "
            "openssl rand -hex 32"
        )
    return key
