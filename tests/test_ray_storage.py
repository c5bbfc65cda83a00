"""Shared storage that is full, closed or away for a moment: tried again, then said clearly, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from test_checkpoint_disk import needs_mount, tmpfs

from clew.checkpoint import CheckpointStore, verify
from clew.checkpoint.patience import with_patience
from clew.errors import StorageError, UserError
from clew.policy.adapter import read_adapter
from clew.recipe import Recipe, load_recipe
from clew.runtime.policy_workers import PolicyWorker, RayPolicy

CARD = {
    "base_model": "b",
    "base_sha256": "0" * 64,
    "step": 1,
    "recipe": "laptop",
    "seed": 0,
    "environment": {},
    "evaluation": None,
}


def test_pauses_double_and_end_with_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pauses, notes = [0.0], [], []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)

    def refuse() -> None:
        raise StorageError("cannot write X: the disk is full")

    with pytest.raises(StorageError, match="disk is full"):
        with_patience(refuse, 60, notes.append)
    assert pauses == [0.5, 1, 2, 4, 8, 15, 15] and len(notes) == 7
    assert notes[0] == "cannot write X: the disk is full (trying again in 0.5 s)"
    with pytest.raises(StorageError):
        with_patience(refuse, 0, notes.append)
    assert len(notes) == 7

    answers = iter([StorageError("away"), StorageError("away"), None])

    def recover() -> str:
        if (error := next(answers)) is not None:
            raise error
        return "written"

    assert with_patience(recover, 60, notes.append) == "written"

    def wrong() -> None:
        raise UserError("not a matter of patience")

    with pytest.raises(UserError, match="patience"):
        with_patience(wrong, 60, notes.append)
    assert len(notes) == 9


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe("laptop", ["runtime.kind=ray", "runtime.threads=1", "runtime.storage_patience_s=2"])


@pytest.fixture(scope="module")
def worker(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ray.actor.ActorHandle]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    made = ray.remote(PolicyWorker).options(num_cpus=0.01).remote(recipe, 0, 1, "cpu", "gloo", 1)
    marker = tmp_path_factory.mktemp("run") / "recipe.toml"
    with pytest.raises(UserError, match=r"--run .* is not visible on machine"):
        RayPolicy([made], recipe, marker.parent, 1, lambda: None, print).start(marker)
    marker.touch()
    RayPolicy([made], recipe, marker.parent, 1, lambda: None, print).start(marker)
    yield made
    ray.shutdown()


def test_an_adapter_is_published_once_storage_is_back(
    worker: ray.actor.ActorHandle, recipe: Recipe, tmp_path: Path
) -> None:
    root, notes = tmp_path / "shared" / "sync", []
    policy = RayPolicy([worker], recipe, root, 1, lambda: None, notes.append)
    (tmp_path / "shared").touch()  # no folder can be made below a file

    def come_back() -> None:
        time.sleep(1.2)
        (tmp_path / "shared").unlink()

    back = threading.Thread(target=come_back)
    back.start()
    version = policy.publish(0)
    back.join()
    assert len(notes) == 2 and all("trying again" in note and str(root) in note for note in notes)
    assert verify(version.folder).facts["adapter"] == version.name == version.folder.name
    assert version.name.startswith("step-000000-a1-")
    assert read_adapter(version.folder).content_hash[:8] == version.name[-8:]
    assert policy.publish(0) == version, "the same version again is the same folder"


@needs_mount
def test_a_full_disk_ends_in_one_line_and_loses_nothing(
    worker: ray.actor.ActorHandle, recipe: Recipe, tmp_path: Path
) -> None:
    notes: list[str] = []
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        policy = RayPolicy([worker], recipe, disk / "sync", 1, lambda: None, notes.append)
        store = CheckpointStore(disk / "checkpoints", keep=3)
        version = policy.publish(0)
        policy.save(store, 1, "{}", {})
        with (disk / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:  # somebody else's data
                ballast.write(bytes(4096))
        for write in (
            lambda: policy.publish(1),
            lambda: policy.save(store, 2, "{}", {}),
            lambda: policy.export(disk / "adapters" / "step-000001", CARD),
        ):
            with pytest.raises(StorageError, match="the disk is full") as refusal:
                write()
            assert "\n" not in str(refusal.value) and "nothing that was saved is lost" in str(refusal.value)
        assert notes and all("trying again" in note for note in notes)
        verify(version.folder)
        assert store.latest() is not None and store.latest()[0] == 1  # type: ignore[index]
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        policy.save(store, 2, "{}", {})
        policy.export(disk / "adapters" / "step-000001", CARD)
        assert CheckpointStore(disk / "checkpoints", keep=3).latest()[0] == 2  # type: ignore[index]
        verify(policy.publish(1).folder)
