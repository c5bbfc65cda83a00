"""What a hostile user found: foreign folders stay untouched, damage and foreign weights are named, not used."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Command

from clew.checkpoint import write_directory
from clew.errors import UserError
from clew.evaluation.evaluate import Result
from clew.policy.fit import refuse_other_weights
from clew.policy.paths import base_fingerprint
from clew.runtime.adapters import copy_adapter
from clew.training.finish import _read_best
from clew.training.run_state import RunState, read_jsonl


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def result(step: int, solved: int) -> Result:
    return Result("heldout", "sampled", step, [{"success": i < solved} for i in range(8)])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with one exported adapter (its files are not read here)."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text("")
    facts = {"base_sha256": "0" * 64, "base_model": "elsewhere"}
    write_directory(run / "adapters" / "step-000001", lambda f: (f / "weights").write_bytes(b"abc"), facts)  # type: ignore[func-returns-value, arg-type]
    return run


def test_the_best_trained_step_counts_as_best_even_below_the_baseline() -> None:
    # What is best is exported, and the end of a run needs that export.
    state = RunState.__new__(RunState)
    state.evaluations = {}
    assert not state.record_evaluation(result(0, 7))
    assert [state.record_evaluation(result(step, solved)) for step, solved in ((10, 3), (20, 3), (30, 5), (40, 4))] == [
        True,
        False,
        True,
        False,
    ]
    assert state.best_step == 30


@pytest.mark.parametrize("place", ["full", "run", "run/adapters/step-000001", "run/adapters/mine"])
def test_an_export_never_touches_a_folder_that_holds_something(run_dir: Path, place: str) -> None:
    to = run_dir.parent / place
    if place == "full":
        to.mkdir()
        (to / "thesis.txt").write_text("years of work")
    before = files_below(run_dir.parent)
    with pytest.raises(UserError, match="--to"):
        copy_adapter(run_dir, "1", to)
    assert files_below(run_dir.parent) == before


def test_an_export_to_a_new_folder_is_the_adapter(run_dir: Path) -> None:
    to = copy_adapter(run_dir, "1", run_dir.parent / "served")
    assert files_below(to) == files_below(run_dir / "adapters" / "step-000001")


def test_a_flipped_byte_in_the_best_adapter_is_named(run_dir: Path) -> None:
    folder = run_dir / "adapters" / "step-000001"
    (folder / "weights").write_bytes(b"abd")
    with pytest.raises(UserError, match="weights has a wrong sha256"):
        _read_best(folder)


def test_an_adapter_of_another_base_of_the_same_shape_is_refused(run_dir: Path, tmp_path: Path) -> None:
    base: Any = SimpleNamespace(path=str(tmp_path / "base"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError, match=r"another SHA-256.*elsewhere"):
        refuse_other_weights(run_dir / "adapters" / "step-000001", "--adapter", base)
    facts = {"base_sha256": base_fingerprint(base.path), "base_model": base.path}
    own = write_directory(tmp_path / "own", lambda f: None, facts)
    refuse_other_weights(own, "--adapter", base)
    refuse_other_weights(tmp_path / "base", "--adapter", base)  # from elsewhere, without a manifest: nothing to check


@pytest.mark.parametrize("line", ["no json", "[1]", '{"other": 1}', "\udcff"])
def test_a_damaged_line_is_named_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps({"step": 1}).encode()
    path.write_bytes(whole + b"\n" + line.encode("utf-8", "surrogateescape") + b"\n" + whole + b"\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2"):
        read_jsonl(path, "step")


def test_sft_does_not_take_a_foreign_folder_for_its_work(clew: Command, tmp_path: Path) -> None:
    foreign = tmp_path / "model.work"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    outcome = clew("sft", "laptop", "--out", tmp_path / "model")
    assert outcome.code == 2
    assert "model.work" in outcome.err and len(outcome.err.splitlines()) == 1
    assert files_below(foreign) == {"thesis.txt": b"years of work"}
