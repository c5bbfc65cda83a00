"""``clew export``: an adapter of a run copied to a folder, or published in S3."""

from __future__ import annotations

import tempfile
from pathlib import Path

from clew.runtime.adapters import copy_adapter


def run_export(run: Path, step: str, to: str) -> None:
    """Copies or publishes an adapter and prints where it is.

    Raises:
        UserError: there is no such adapter, or it can't be put there.
    """
    if "://" not in to:
        print(f"adapter: {copy_adapter(run, step, Path(to))}")
        return
    from clew.serving.names import parse_s3
    from clew.serving.publish import check_place, publish

    place = parse_s3(to)
    check_place(place)
    from clew.runtime.publishing import make_publishable

    with tempfile.TemporaryDirectory(prefix="clew-export-") as folder:
        ready = make_publishable(run, step, Path(folder))
        name = ready.folder.name
        new = publish(ready.folder, place)
    print(f"{'published' if new else 'published before, unchanged'}: {place.uri}/{name}")
    print(f"served as: {ready.base}:{name}")
