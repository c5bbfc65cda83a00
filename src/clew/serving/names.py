"""Names of adapters and of places in S3: strict, because they come from requests and become paths and keys."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clew.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
# What S3 keeps for itself; directory, table and access-point buckets speak other protocols.
_KEPT_FIRST = ("xn--", "sthree-", "amzn-s3-demo-")
_KEPT_LAST = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_MAX_PREFIX = 768  # bytes; a key, with the adapter's name and a file's, has 1024


@dataclass(frozen=True)
class S3Place:
    """A bucket and a prefix in it, without slashes at its ends."""

    bucket: str
    prefix: str

    @property
    def uri(self) -> str:
        """``s3://bucket/prefix``."""
        return f"s3://{self.bucket}/{self.prefix}"

    def key(self, *parts: str) -> str:
        """The key of something below the prefix."""
        return "/".join((self.prefix, *parts))


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may be called so: at most 128 of ``A-Z a-z 0-9 . _ -``, no ``..``."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def check_adapter_name(name: str) -> str:
    """Returns the name if an adapter may be called so (see ``is_adapter_name``).

    Raises:
        UserError: it may not.
    """
    if not is_adapter_name(name):
        raise UserError(
            f"{_shown(name)} can't be an adapter's name: use at most 128 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit, without '..'"
        )
    return name


def parse_s3(uri: str) -> S3Place:
    """The bucket and the prefix of ``s3://bucket/prefix``.

    Raises:
        UserError: it is none that AWS allows, or has no prefix.
    """
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.removesuffix("/")
    if scheme != "s3" or not bucket or not prefix:
        raise UserError(f"{_shown(uri)} is no place in S3: give s3://bucket/prefix")
    odd = ".." in bucket or re.fullmatch(r"[0-9]+(\.[0-9]+){3}", bucket)
    if not _BUCKET.fullmatch(bucket) or odd or bucket.startswith(_KEPT_FIRST) or bucket.endswith(_KEPT_LAST):
        raise UserError(
            f"{_shown(uri)}: {_shown(bucket)} is no name of a general-purpose bucket: 3 to 63 of a-z, 0-9, '.' and '-' "
            "(no address, no reserved beginning or end)"
        )
    if len(prefix) > _MAX_PREFIX or not all(_PART.fullmatch(part) and ".." not in part for part in prefix.split("/")):
        raise UserError(
            f"{_shown(uri)}: the prefix must be parts of letters, digits, '.', '_' and '-' with one '/' between them, "
            f"each beginning with a letter or digit, {_MAX_PREFIX} characters at most"
        )
    return S3Place(bucket, prefix)


def _shown(text: str) -> str:
    """What a message shows of a text from elsewhere: printable, on one line, not long."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")
