"""Which checkpoints are found, skipped and retired."""

import logging
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clew.checkpoint import CheckpointStore, DamagedCheckpoint, durable, store, verify
from clew.errors import UserError


def payload(step: int) -> bytes:
    return f"weights of {step} ".encode() * 50


def write(step: int):
    return lambda folder: (folder / "state.pt").write_bytes(payload(step))


def filled(root: Path, keep: int | None, *steps: int) -> CheckpointStore:
    made = CheckpointStore(root, None)
    for step in steps:
        made.save(step, write(step), {})
    return CheckpointStore(root, keep)


def flip(root: Path, step: int) -> None:
    path = root / f"step-{step:06d}" / "state.pt"
    raw = path.read_bytes()
    path.write_bytes(b"W" + raw[1:])


def partial(root: Path, step: int) -> None:
    folder = root / f"step-{step:06d}"
    folder.mkdir()
    (folder / "state.pt").write_bytes(b"half")


def test_an_empty_or_absent_store(tmp_path):
    made = CheckpointStore(tmp_path / "checkpoints", 2)
    assert made.latest() is None and made.steps() == []
    assert os.listdir(tmp_path) == []  # looking changes nothing
    with pytest.raises(UserError, match=r"no checkpoint of step 20 .* there are: none"):
        made.load(20)
    with pytest.raises(UserError, match=r"checkpoint\.keep is 0"):
        CheckpointStore(tmp_path, 0)


def test_save_and_load(tmp_path):
    made = CheckpointStore(tmp_path / "run" / "checkpoints", None)
    path = made.save(20, write(20), {"policy": "a", "best": None})
    assert path == tmp_path / "run" / "checkpoints" / "step-000020"
    made.save(1_000_000, write(1), {})
    made.save(999_999, write(1), {})
    (made.root / "step-000020.damaged-1").mkdir()
    (made.root / "step-last").mkdir()
    (made.root / "step-000030").write_text("a file")
    assert made.steps() == [20, 999_999, 1_000_000]  # by number, not by name
    assert made.latest() == (1_000_000, made.root / "step-1000000")
    assert made.load(20) == (path, {"policy": "a", "best": None, "step": 20})
    assert (path / "state.pt").read_bytes() == payload(20)


def test_damaged_ones_are_skipped_and_named(tmp_path, caplog):
    made = filled(tmp_path, None, 20, 40, 60, 80)
    partial(tmp_path, 100)
    flip(tmp_path, 80)
    os.truncate(tmp_path / "step-000060" / "state.pt", 3)
    with caplog.at_level(logging.WARNING, "clew.checkpoint"):
        assert made.latest() == (40, tmp_path / "step-000040")
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 3
    text = caplog.text
    assert "step-000100 is damaged: manifest.json is missing" in text
    assert "step-000080 is damaged: state.pt has a wrong sha256" in text
    assert "step-000060 is damaged: state.pt has 3 bytes instead of 700" in text
    with pytest.raises(DamagedCheckpoint, match=r"step-000080 .*state\.pt"):
        made.load(80)
    flip(tmp_path, 40)
    flip(tmp_path, 20)
    assert made.latest() is None


def test_damage_after_the_first_look_is_seen(tmp_path):
    made = filled(tmp_path, None, 20, 40)
    assert made.latest() == (40, tmp_path / "step-000040")
    flip(tmp_path, 40)
    assert made.latest() == (20, tmp_path / "step-000020")
    (tmp_path / "step-000020" / "state.pt").unlink()
    assert made.latest() is None


def test_a_renamed_checkpoint_is_not_another_step(tmp_path):
    made = filled(tmp_path, None, 20)
    os.rename(tmp_path / "step-000020", tmp_path / "step-000040")
    assert made.latest() is None
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json says step 20"):
        made.load(40)


def test_a_damaged_newest_is_written_anew_by_the_run_that_goes_on(tmp_path):
    made = filled(tmp_path, 2, 20, 40)
    flip(tmp_path, 40)
    assert made.latest() == (20, tmp_path / "step-000020")
    made.save(40, write(40), {})
    assert made.latest() == (40, tmp_path / "step-000040") and made.steps() == [20, 40]
    made.save(40, write(40), {})  # the same again
    with pytest.raises(UserError, match="already holds other content"):
        made.save(40, write(41), {})


# --- retention ----------------------------------------------------------------------------------------------


def test_the_newest_whole_ones_stay(tmp_path):
    made = CheckpointStore(tmp_path, 2)
    seen = []
    for step in range(1, 6):
        made.save(step, write(step), {})
        seen.append(made.steps())
    assert seen == [[1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert sorted(os.listdir(tmp_path)) == ["step-000004", "step-000005"]
    everything = CheckpointStore(tmp_path / "all", None)
    for step in range(1, 6):
        everything.save(step, write(step), {})
    assert everything.steps() == [1, 2, 3, 4, 5]


def test_partial_ones_neither_count_nor_push_out_a_whole_one(tmp_path):
    """SkyRL's report: a partial newest counted, and retention deleted the last whole one."""
    made = filled(tmp_path, 1, 20)
    partial(tmp_path, 40)
    partial(tmp_path, 60)
    made.save(30, write(30), {})
    assert made.steps() == [30, 40, 60] and made.latest() == (30, tmp_path / "step-000030")
    assert (tmp_path / "step-000060" / "state.pt").read_bytes() == b"half"  # not ours to delete
    two = filled(tmp_path / "two", 2, 20, 40, 60)
    flip(tmp_path / "two", 60)
    os.truncate(tmp_path / "two" / "step-000040" / "state.pt", 0)
    two.save(80, write(80), {})
    assert two.steps() == [20, 40, 60, 80]  # 20 is the second newest whole one


def test_an_older_step_saved_later_does_not_delete_itself_or_the_newest(tmp_path):
    made = filled(tmp_path, 1, 40)
    made.save(20, write(20), {})
    assert made.latest() == (40, tmp_path / "step-000040")


def test_protected_steps_stay(tmp_path):
    made = CheckpointStore(tmp_path, 1)
    for step in (20, 40, 60, 80):
        made.save(step, write(step), {}, protected={40})
    assert made.steps() == [40, 80]
    made.save(100, write(100), {}, protected=[80])
    assert made.steps() == [80, 100]


def test_a_failed_save_retires_nothing(tmp_path):
    made = filled(tmp_path, 1, 20)

    def fails(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="step-000040: the disk is full"):
        made.save(40, fails, {})
    assert os.listdir(tmp_path) == ["step-000020"]
    verify(tmp_path / "step-000020")


def test_an_old_one_that_cannot_be_deleted_does_not_stop_training(tmp_path, monkeypatch, caplog):
    made = filled(tmp_path, 1, 20)

    def refuses(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(store, "remove", refuses)
    made.save(40, write(40), {})
    assert made.latest() == (40, tmp_path / "step-000040")
    assert "old checkpoint" in caplog.text and "Permission denied" in caplog.text


def test_retention_does_not_hash_everything_again(tmp_path, monkeypatch):
    hashed = []
    real = durable._sha256
    monkeypatch.setattr(durable, "_sha256", lambda path: (hashed.append(path.parent.name[:11]), real(path))[1])
    made = CheckpointStore(tmp_path, 3)
    for step in range(1, 9):
        made.save(step, write(step), {})
    assert len(hashed) == 8 * 2  # once while saving, once as saved
    made.latest()
    made.load(8)
    assert len(hashed) == 8 * 2
    del hashed[:]
    CheckpointStore(tmp_path, 3).latest()
    assert hashed == ["step-000008"]  # a new process looks for itself


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keep=st.integers(1, 4),
    actions=st.lists(st.sampled_from(["save", "save", "save", "flip", "cut", "partial"]), max_size=14),
    protect=st.sets(st.integers(1, 14), max_size=2),
)
def test_retention_against_a_model(tmp_path, keep, actions, protect):
    root = tmp_path / f"example-{len(list(tmp_path.iterdir()))}"
    made = CheckpointStore(root, keep)
    whole: set[int] = set()
    broken: set[int] = set()
    for step, action in enumerate(actions, 1):
        if action == "save":
            made.save(step, write(step), {}, protected=protect)
            whole.add(step)
            newest = sorted(whole)[-keep:]
            whole = {s for s in whole if s in newest or s in protect}
        elif action == "partial":
            root.mkdir(exist_ok=True)
            partial(root, step)
            broken.add(step)
        elif whole:
            victim = max(whole)
            flip(root, victim) if action == "flip" else os.truncate(root / f"step-{victim:06d}" / "state.pt", 1)
            whole.remove(victim)
            broken.add(victim)
        assert made.steps() == sorted(whole | broken)
        expected = (max(whole), root / f"step-{max(whole):06d}") if whole else None
        assert made.latest() == expected
        assert CheckpointStore(root, None).latest() == expected
