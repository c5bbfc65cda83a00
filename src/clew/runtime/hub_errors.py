"""What goes wrong between this machine and the hub, in one line each that names the recipe's key.

Texts of the library are not passed on: they hold addresses that are signed.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub.errors import (
    DisabledRepoError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of httpx or httpx2, as this release of the library has it
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from clew.checkpoint.staging import write_error
from clew.errors import UserError

_KEPT = "then run the same command again (files that are complete are kept)"


class WrongContent(OSError):
    """A file arrived with its full size and not with its hash; the argument is its path in the repository."""


def passing(error: Exception) -> bool:
    """Whether the same request may well succeed in a moment."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    if isinstance(error, LocalEntryNotFoundError | FileMetadataError | OfflineModeIsEnabled):
        return False  # (the library has tried the first again by itself)
    # The library's own type for a body of the wrong size is OSError without a number.
    return isinstance(error, HTTPError | WrongContent | ConnectionError | TimeoutError | RuntimeError) or (
        type(error) is OSError and error.errno is None
    )


def short(error: Exception) -> str:
    """What happened, in a few words."""
    if isinstance(error, HfHubHTTPError):
        return f"the hub answers {error.response.status_code}"
    if isinstance(error, WrongContent):
        return "it arrived damaged"
    return f"the connection failed ({_reason(error)})"


def explain(error: Exception, repository: str, revision: str, place: Path, endpoint: str) -> UserError | None:
    """The one-line error for the user; None if it is no matter of the hub, the network or the disk.

    Args:
        repository, revision: what was asked for.
        place: the folder that was written to.
        endpoint: address of the hub.
    """
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # "not here, and the hub could not be asked"
    host = urlsplit(endpoint).hostname or endpoint
    if isinstance(error, OfflineModeIsEnabled):
        text = f"model.path: {repository} is not here yet and HF_HUB_OFFLINE forbids to download it; unset that"
    elif isinstance(error, HFValidationError):
        text = f"model.path: {repository} can't be a hub repository: write owner/name, or the path of a folder"
    elif isinstance(error, GatedRepoError):
        text = (
            f"model.path: {repository} is gated: ask for access on its page at {host}, then set HF_TOKEN to a token "
            "of the account that was given it"
        )
    elif isinstance(error, RepositoryNotFoundError):
        text = (
            f"model.path: {host} shows no repository {repository}: check the name; if it is private, set HF_TOKEN to "
            "a token that may read it"
        )
    elif isinstance(error, DisabledRepoError):
        text = f"model.path: {repository} was disabled by {host}; choose another model"
    elif isinstance(error, RevisionNotFoundError):
        text = (
            f"model.revision: {repository} has no revision {revision} (any more): name a commit, tag or branch of it "
            f"(what earlier ones were kept to is in {place})"
        )
    elif isinstance(error, HfHubHTTPError):
        text = _explain_status(error.response.status_code, host, repository)
    elif isinstance(error, FileMetadataError):
        text = f"model.path: {host} does not answer as a hub does; check HF_ENDPOINT and the proxy"
    elif isinstance(error, WrongContent):
        text = f"model.path: {error} of {repository} arrives damaged every time: check network and disk, {_KEPT}"
    elif (disk := write_error(error, place, place)) is not None:
        return disk
    elif passing(error):
        text = f"model.path: {host} can't be reached ({_reason(error)}): check the network, {_KEPT}"
    else:
        return None
    return UserError(text)


def _explain_status(status: int, host: str, repository: str) -> str:
    if status in (401, 403):
        return (
            f"model.path: {host} refuses {repository} ({status}): set HF_TOKEN to a valid token whose account may "
            "read it"
        )
    return f"model.path: {host} answers {status} for {repository}: wait a moment, {_KEPT}"


def _reason(error: BaseException) -> str:
    """The system's words for it where there are any, else the kind of error."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.strerror:
            return link.strerror
        link = link.__cause__ or link.__context__
    return type(error).__name__
