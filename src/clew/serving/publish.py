"""Publishing adapters in S3: nothing is ever overwritten, and what is not wholly there is not seen.

The configuration is written last, and servers take an adapter without one for absent. So a publisher may be killed at
any moment: running it again completes what it began.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from clew.checkpoint.durable import MANIFEST
from clew.errors import UserError
from clew.serving.names import S3Place, check_adapter_name
from clew.serving.s3 import error_code, list_files, reported, s3_client
from clew.serving.store import CARD, CONFIG, WEIGHTS, BrokenAdapter, StorageTrouble, check_files, check_sizes

_ORDER = (WEIGHTS, CARD, MANIFEST, CONFIG)
_TRIES = 3


def check_place(place: S3Place) -> None:
    """Asks S3 for the place, so that what is wrong with it is said before anything takes time.

    Raises:
        UserError: boto3 is missing, or S3 can't be asked.
    """
    client = s3_client()
    try:
        with reported(place, "read"):
            client.list_objects_v2(Bucket=place.bucket, Prefix=place.key(""), MaxKeys=1)
    except StorageTrouble as error:
        raise UserError(f"--to {place.uri}: {error}") from None


def publish(folder: Path, place: S3Place) -> bool:
    """Uploads an adapter's folder to ``PLACE/NAME``, where NAME is the folder's own; False if all was there before.

    Every file goes up with its SHA-256, which S3 compares with what arrives, and only if nothing has its key. What was
    there before is compared byte for byte by its hash. Of an adapter that is wholly there, weights and configuration
    count: its card may say less than a later one would.

    Raises:
        UserError: the name means another adapter there, the folder holds none, or S3 can't be written.
    """
    name = check_adapter_name(folder.name)
    client = s3_client()
    try:
        check_sizes({file: (folder / file).stat().st_size for file in _ORDER}, name)
        check_files(folder, name)
        digests = {file: _sha256(folder / file) for file in _ORDER}
        there = list_files(client, place, name)
        whole = CONFIG in there
        needed = (WEIGHTS, CONFIG) if whole else _ORDER
        for file in needed:
            if file not in there:
                _put(client, place, name, folder / file, digests[file])
            _compare(client, place, name, file, digests[file], (folder / file).stat().st_size)
    except (StorageTrouble, BrokenAdapter) as error:
        raise UserError(
            f"{error}; nothing that was published before is lost: mend that and run the same command again"
        ) from error
    return not there.keys() >= set(needed)


def _put(client: Any, place: S3Place, name: str, path: Path, digest: bytes) -> None:
    from botocore.exceptions import ClientError

    for attempt in range(_TRIES):
        with reported(place, "write"), path.open("rb") as body:
            try:
                client.put_object(
                    Bucket=place.bucket,
                    Key=place.key(name, path.name),
                    Body=body,
                    IfNoneMatch="*",
                    ChecksumAlgorithm="SHA256",
                    ChecksumSHA256=base64.b64encode(digest).decode(),
                )
                return
            except ClientError as error:
                if error_code(error) in ("PreconditionFailed", "412"):
                    return  # another publisher was faster, or our own first try did arrive: it is compared now
                if error_code(error) != "ConditionalRequestConflict" or attempt == _TRIES - 1:
                    raise


def _compare(client: Any, place: S3Place, name: str, file: str, digest: bytes, size: int) -> None:
    key = place.key(name, file)
    with reported(place, "read"):
        head = client.head_object(Bucket=place.bucket, Key=key, ChecksumMode="ENABLED")
        stored = head.get("ChecksumSHA256", "")
        if head["ContentLength"] == size and (not stored or "-" in stored):  # uploaded by other means, or in parts
            own = hashlib.sha256()
            for chunk in client.get_object(Bucket=place.bucket, Key=key)["Body"].iter_chunks(1 << 20):
                own.update(chunk)
            stored = base64.b64encode(own.digest()).decode()
    if head["ContentLength"] != size or stored != base64.b64encode(digest).decode():
        raise UserError(
            f"{place.uri}/{name} holds another {file} already, and what is published never changes: publish to another "
            f"prefix, or delete {place.uri}/{name}/ if nobody serves it"
        )


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
