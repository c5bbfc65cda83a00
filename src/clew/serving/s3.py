"""Adapters in S3: listed by their configuration, downloaded once into a private folder, never believed twice."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clew.checkpoint import clean_staging
from clew.checkpoint.staging import discard, fsync_path, staging_path
from clew.errors import UserError
from clew.serving.names import S3Place, is_adapter_name
from clew.serving.store import CONFIG, LIMITS, BrokenAdapter, StorageTrouble, check_files, check_sizes, unknown

_SOURCE = ".source.json"  # beside the downloaded files: the ETags and sizes they had
_TRIES = 3
_CHUNK = 1 << 20
_DENIED = {"403", "401", "AccessDenied", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken"}
_DENIED |= {"SignatureDoesNotMatch", "TokenRefreshRequired", "RequestTimeTooSkewed", "Forbidden"}


def s3_client() -> Any:
    """A client with timeouts; credentials, region and endpoint are found the AWS way (``AWS_...``, roles, profiles).

    Raises:
        UserError: boto3 is missing, or the AWS settings can't be used.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise UserError('s3://... needs boto3: pip install "clew[aws]"') from error
    retries: Any = {"mode": "standard", "total_max_attempts": _TRIES}
    try:
        # A session of its own: the default one is shared by all threads and keeps the first credentials it found.
        return boto3.session.Session().client("s3", config=Config(connect_timeout=5, read_timeout=20, retries=retries))
    except (BotoCoreError, ValueError) as error:  # a profile that isn't there, an endpoint that is no URL
        raise UserError(
            f"AWS's settings can't be used ({type(error).__name__}): see AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL"
        ) from None


@contextlib.contextmanager
def reported(place: S3Place, doing: str) -> Iterator[None]:
    """Turns what goes wrong with S3 into ``StorageTrouble``. S3's own texts may quote a request and are left out.

    Args:
        doing: "read" or "write".
    """
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from botocore.exceptions import ConnectionError as Unconnected
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ClientError as error:
        code = error_code(error)
        if code == "NoSuchBucket":
            raise StorageTrouble(f"S3 has no bucket {place.bucket}") from None
        if code in _DENIED:
            raise StorageTrouble(
                f"S3 does not allow to {doing} {place.uri} ({code}): are the credentials valid?"
            ) from None
        raise StorageTrouble(f"S3 failed to {doing} {place.uri} ({code})") from None
    except (Unconnected, HTTPClientError, HTTPError) as error:
        raise StorageTrouble(f"S3 can't be reached to {doing} {place.uri} ({type(error).__name__})") from None
    except BotoCoreError as error:  # no credentials, or a role that can't be assumed
        raise StorageTrouble(f"S3 can't be asked to {doing} {place.uri} ({type(error).__name__})") from None


def error_code(error: Any) -> str:
    """S3's code of a botocore ``ClientError``: a word, or the HTTP status where the answer has no body."""
    return str(error.response.get("Error", {}).get("Code", "unknown"))[:64]


def list_files(client: Any, place: S3Place, name: str) -> dict[str, dict[str, Any]]:
    """What lies in an adapter's folder: file name -> ``{"etag", "size"}``. Folders in it are left out.

    Raises:
        StorageTrouble: S3 can't be read.
    """
    folder = place.key(name) + "/"
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=folder, Delimiter="/")
    with reported(place, "read"):
        return {
            entry["Key"].removeprefix(folder): {"etag": entry["ETag"], "size": entry["Size"]}
            for page in pages
            for entry in page.get("Contents", ())
        }


class S3Store:
    """Adapters below a prefix in S3. A name means the same bytes for ever; other bytes under it are refused."""

    def __init__(self, place: S3Place, cache: Path) -> None:
        """Makes a folder in ``cache`` that nobody else can read; it is kept, so the next process downloads nothing.

        Raises:
            UserError: boto3 is missing, or the folder can't be made or is another user's.
        """
        self.place, self._client = place, s3_client()
        self._cache = Path(os.path.abspath(cache)) / f"s3-{hashlib.sha256(place.uri.encode()).hexdigest()[:16]}"
        try:
            self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._cache.is_symlink() or self._cache.stat().st_uid != os.getuid():
                raise UserError(f"{self._cache} is another user's, or a link: name another folder for downloads")
            self._cache.chmod(0o700)
        except OSError as error:
            raise UserError(
                f"{self._cache} can't be made ({error.strerror}): name another folder for downloads"
            ) from error
        clean_staging(self._cache)

    def names(self) -> list[str]:
        """See ``AdapterStore``. One request for a thousand files."""
        start, found = self.place.key(""), []
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.place.bucket, Prefix=start)
        with reported(self.place, "read"):
            for key in (entry["Key"] for page in pages for entry in page.get("Contents", ())):
                name, _, file = key.removeprefix(start).partition("/")
                if file == CONFIG and is_adapter_name(name):
                    found.append(name)
        return sorted(found)

    def fetch(self, name: str) -> Path:
        """See ``AdapterStore``. Threads and processes that ask at once wait for one download."""
        if not is_adapter_name(name):
            raise unknown(name)
        listed = list_files(self._client, self.place, name)
        check_sizes({file: entry["size"] for file, entry in listed.items()}, name)
        wanted = {file: entry for file, entry in listed.items() if file in LIMITS}
        folder = self._cache / name
        try:
            with self._locked(name):
                if not _intact(folder):
                    if folder.is_dir():
                        shutil.rmtree(folder)
                    self._download(name, wanted, folder)
                elif (folder / _SOURCE).read_text() != _record(wanted):
                    raise BrokenAdapter(
                        f"adapter {name} was changed in S3 after it had been loaded; adapters are immutable: "
                        "publish it under a new name"
                    )
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = "its disk is full" if full else error.strerror or type(error).__name__
            raise StorageTrouble(f"adapter {name} can't be kept where it is downloaded to ({why})") from error
        check_files(folder, name)
        return folder

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        # flock excludes threads too, as each opens the file for itself.
        with (self._cache / f".lock-{name}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _download(self, name: str, wanted: dict[str, dict[str, Any]], folder: Path) -> None:
        staging = staging_path(folder)
        staging.mkdir(mode=0o700)
        try:
            for file, entry in wanted.items():
                self._download_file(name, file, entry, staging / file)
                fsync_path(staging / file)
            (staging / _SOURCE).write_text(_record(wanted))
            fsync_path(staging / _SOURCE)
            os.rename(staging, folder)
        except BaseException:
            discard(staging)
            raise

    def _download_file(self, name: str, file: str, entry: dict[str, Any], to: Path) -> None:
        """One file of exactly the version and size that was listed; S3's checksum, if it has one, is checked too."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        for attempt in range(_TRIES):
            with reported(self.place, "read"):
                try:
                    answer = self._client.get_object(
                        Bucket=self.place.bucket,
                        Key=self.place.key(name, file),
                        IfMatch=entry["etag"],
                        ChecksumMode="ENABLED",
                    )
                    if answer["ContentLength"] != entry["size"]:
                        raise BrokenAdapter(f"adapter {name}: {file} has another size than its listing says")
                    with to.open("wb") as out:
                        for chunk in answer["Body"].iter_chunks(_CHUNK):
                            out.write(chunk)
                    return
                except ClientError as error:
                    if error_code(error) in ("PreconditionFailed", "412", "NoSuchKey", "404"):
                        raise BrokenAdapter(f"adapter {name} was changed in S3 while it was being loaded") from None
                    raise  # botocore has tried again already
                except (BotoCoreError, HTTPError):  # cut off in the middle, or a wrong checksum
                    if attempt == _TRIES - 1:
                        raise


def _intact(folder: Path) -> bool:
    """Whether all that was downloaded is there still: what tidies a cache up may have taken some of it."""
    try:
        listed = json.loads((folder / _SOURCE).read_text())
        return all((folder / file).stat().st_size == entry["size"] for file, entry in listed.items())
    except (FileNotFoundError, ValueError):
        return False


def _record(listed: dict[str, dict[str, Any]]) -> str:
    return json.dumps(listed, sort_keys=True)
