"""Checkpoints of a sharded policy: resumed on any number of ranks, whole or absent whatever dies or fills up."""

from __future__ import annotations

import functools
import json
import shutil
import signal
from pathlib import Path

import pytest
import ranks_work as work
import tiny
from ranks_helper import ends, together
from ranks_work import Batch, Run
from test_checkpoint_disk import needs_mount, tmpfs
from test_sharded_policy import TOLERANCE, apart
from test_training_update import samples
from torch.distributed.checkpoint import FileSystemReader

from clew.checkpoint import CheckpointStore, read_manifest
from clew.errors import StorageError, UserError
from clew.policy.paths import base_fingerprint
from clew.recipe import Recipe
from clew.training.learner import Learner
from clew.training.ranks import ALONE

LIFE = 60.0  # seconds; a rank that waits for a dead one would take ranks_helper.HANG_S


@functools.cache
def made() -> Recipe:
    return work.recipe(tiny.tiny_folder(), "training.minibatches=2", "training.weight_decay=0.1")


@functools.cache
def batches() -> list[Batch]:
    """What three steps learn from."""
    return [samples(), samples((0, 4)), samples((1, 2, 3, 5, 6, 8, 9))]


def run(size: int, run_dir: Path, until: int) -> Run:
    """The run on so many ranks; one is the local runtime. All ranks must tell the same."""
    run_dir.mkdir(exist_ok=True)
    if size == 1:
        return work.train(ALONE, made(), run_dir, batches(), until)
    first, *others = together(size, work.train, made(), run_dir, batches(), until)
    for other in others:
        assert (other.restored, other.adapter.name, other.metrics) == (
            first.restored,
            first.adapter.name,
            first.metrics,
        )
    return first


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(1, tmp_path_factory.mktemp("uninterrupted"), 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Run]]:
    """Run directories with a checkpoint of step 2, by the number of ranks that saved it. Not to be changed."""
    folders = {size: tmp_path_factory.mktemp(f"saved-{size}") for size in (1, 2)}
    return {size: (folder, run(size, folder, 2)) for size, folder in folders.items()}


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:06d}"


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(
    before: int, after: int, saved: dict[int, tuple[Path, Run]], uninterrupted: Run, tmp_path: Path
) -> None:
    folder, stopped = saved[before]
    shutil.copytree(folder, tmp_path / "run")
    resumed = run(after, tmp_path / "run", 3)
    evaluations = {step: {"suite": "heldout", "solved": step, "total": 9} for step in (1, 2)}
    assert resumed.restored == (2, 1014, evaluations, stopped.adapter.content_hash)
    assert len(resumed.metrics) == 1 and resumed.metrics[0]["train/updates"] == 2
    assert apart(resumed.adapter.tensors, uninterrupted.adapter.tensors) <= TOLERANCE
    for key, value in uninterrupted.metrics[2].items():
        # The last of six updates, on weights that differ in their last bits already.
        assert resumed.metrics[0][key] == pytest.approx(value, rel=10 * TOLERANCE, abs=2e-6), key
    assert resumed.metrics[0]["train/learning_rate"] == uninterrupted.metrics[2]["train/learning_rate"] > 0
    moved = apart(resumed.adapter.tensors, stopped.adapter.tensors)
    assert moved > 100 * TOLERANCE, "the step should matter"


def test_what_is_saved_does_not_depend_on_the_number_of_ranks(saved: dict[int, tuple[Path, Run]]) -> None:
    """Data position, evaluations and facts byte for byte; names, shapes and dtypes of the tensors."""
    one, two = (checkpoint(folder, 2) for folder, _ in saved.values())
    assert (one / "state.json").read_bytes() == (two / "state.json").read_bytes()
    assert json.loads((two / "state.json").read_text())["position"] == 1014
    assert read_manifest(one).facts == read_manifest(two).facts
    kinds = []
    for folder in (one, two):
        metadata = FileSystemReader(folder / "policy").read_metadata().state_dict_metadata
        kinds.append({key: (getattr(m, "size", None), getattr(m, "properties", None)) for key, m in metadata.items()})
    assert kinds[0] == kinds[1]
    assert len(list((two / "policy").glob("*.distcp"))) == 2, "each rank writes its own shards"


@pytest.mark.parametrize("size", [1, 2])
def test_the_adapter_alone_is_stored(size: int, saved: dict[int, tuple[Path, Run]]) -> None:
    """And two states of Adam; the base is named by its hash."""
    folder, done = saved[size]
    metadata = FileSystemReader(checkpoint(folder, 2) / "policy").read_metadata().state_dict_metadata
    tensors = {key: m for key, m in metadata.items() if hasattr(m, "size")}
    assert all(".lora_A." in key or ".lora_B." in key for key in tensors)
    assert sum(m.size.numel() for key, m in tensors.items() if key.startswith("adapter.")) == sum(
        tensor.numel() for tensor in done.adapter.tensors.values()
    )
    states = [m for key, m in tensors.items() if key.startswith("optimizer.") and m.size.numel() > 1]
    assert sum(m.size.numel() for m in states) == 2 * sum(t.numel() for t in done.adapter.tensors.values())
    lora = sum(t.nbytes for t in done.adapter.tensors.values())
    base = sum(p.nbytes for p in tiny.shared_tiny().model.parameters())
    stored = sum(path.stat().st_size for path in checkpoint(folder, 2).rglob("*") if path.is_file())
    overhead = 4096 * len(tensors) * size  # torch's archive around each shard
    assert 3 * lora < stored < 3 * lora + overhead < base
    facts = read_manifest(checkpoint(folder, 2)).facts
    assert facts == {"base_sha256": base_fingerprint(str(tiny.tiny_folder())), "step": 2}


def test_the_same_state_gives_the_same_bytes(saved: dict[int, tuple[Path, Run]], tmp_path: Path) -> None:
    """In another process, whose strings hash otherwise."""
    (again,) = together(1, work.train, made(), tmp_path, batches(), 2)
    folder, first = saved[1]
    assert again.adapter.content_hash == first.adapter.content_hash
    old, new = (
        {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        for root in (checkpoint(folder, 2), checkpoint(tmp_path, 2))
    )
    assert old == new and Path("policy/.metadata") in old


def test_another_adapter_is_refused_on_every_rank(saved: dict[int, tuple[Path, Run]]) -> None:
    other = work.recipe(tiny.tiny_folder(), "model.lora.rank=8")
    found = ends(2, work.train, other, saved[2][0], batches(), 3)
    assert all(end.error and "use its own recipe" in end.error for end in found)


# --- deaths and full disks -------------------------------------------------------------------------------


def restored_hash(root: Path, step: int) -> str:
    """Hash of the adapter in a checkpoint, loaded without ranks."""
    store = CheckpointStore(root, None)
    learner = Learner(made())
    learner.restore(store.load(step)[0])
    return learner.publish(step).content_hash


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        (1, "clew.training.learner._Writer.write_data"),  # before its shards
        (1, "os.fsync"),  # with its shards written, not yet acknowledged
        (0, "clew.training.learner._Writer.finish"),  # all shards are there, what lists them is not
        (0, "clew.checkpoint.durable._write_synced"),  # all but the manifest is there
    ],
    ids=["before its shards", "after its shards", "before the list of shards", "before the manifest"],
)
def test_a_rank_killed_while_it_saves_leaves_no_checkpoint(victim: int, place: str, tmp_path: Path) -> None:
    found = ends(2, work.save_and_die, made(), tmp_path / "checkpoints", victim, place)
    assert found[victim].code == -signal.SIGKILL
    survivor = found[1 - victim]
    if place.endswith("_write_synced"):
        assert survivor.error is None, "its part was done"
    else:
        assert survivor.error is not None and "RuntimeError" in survivor.error and "it hung" not in survivor.error
    store = CheckpointStore(tmp_path / "checkpoints", None)
    assert store.steps() == [1]
    assert (latest := store.latest()) is not None and latest[0] == 1
    learner = Learner(made())
    fresh = learner.publish(0).content_hash
    assert restored_hash(store.root, 1) == fresh
    # What lies half-written is in nobody's way, and goes.
    litter = [path for path in store.root.iterdir() if path.name.startswith(".tmp-")]
    assert bool(litter) == (victim == 0)
    learner.save(store, 2, "{}", work.FACTS)
    assert [path.name for path in sorted(store.root.iterdir())] == ["step-000001", "step-000002"]


@pytest.mark.parametrize(("size", "limited"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_without_room_gives_one_clear_error(size: int, limited: int, tmp_path: Path) -> None:
    """Rank 0 has a ``StorageError`` that the run can wait out or end with; nobody hangs; the next save works."""
    root = tmp_path / "checkpoints"
    found = together(size, work.save_where_it_does_not_fit, made(), root, limited, LIFE)
    error = found[0][0]
    assert type(error) is StorageError and "\n" not in str(error)
    assert str(error).startswith(f"cannot write {root / 'step-000002'}: the largest allowed file size is reached")
    assert all(isinstance(failure, OSError | UserError) for failure, *_ in found)
    assert found[0][1] == ["step-000001"], "nothing half-written stays"
    assert restored_hash(root, 2) == found[0][2] != restored_hash(root, 1)


@needs_mount
def test_a_full_disk_gives_one_clear_error(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=4m") as disk:
        root = disk / "checkpoints"
        found = together(2, work.save_where_it_does_not_fit, made(), root, None, LIFE)
        error = found[0][0]
        assert type(error) is StorageError
        assert str(error).startswith(f"cannot write {root / 'step-000002'}: the disk is full")
        assert found[0][1] == ["step-000001"]
        assert restored_hash(root, 2) == found[0][2] != restored_hash(root, 1)


def test_a_place_that_cannot_be_made_holds_up_nobody(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("a file")
    failure, other = together(2, work.save_where_a_file_lies, made(), root)
    assert failure is not None and "a part of this path is a file" in failure and other is None
    assert CheckpointStore(root, None).load(1)
