"""Durable storage: a saved directory is whole or absent, and one process at a time writes a run."""

from clew.checkpoint.durable import (
    DamagedCheckpoint,
    FileRecord,
    Manifest,
    append_jsonl,
    clean_staging,
    read_manifest,
    truncate_jsonl,
    verify,
    write_directory,
    write_file_atomic,
)
from clew.checkpoint.lock import RunLock
from clew.checkpoint.store import CheckpointStore

__all__ = [
    "CheckpointStore",
    "DamagedCheckpoint",
    "FileRecord",
    "Manifest",
    "RunLock",
    "append_jsonl",
    "clean_staging",
    "read_manifest",
    "truncate_jsonl",
    "verify",
    "write_directory",
    "write_file_atomic",
]
