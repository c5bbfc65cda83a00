"""What a run remembers: it goes on in the world that it began in, and in no other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny

from clew.checkpoint import CheckpointStore
from clew.envs.visgym import configure
from clew.errors import UserError
from clew.recipe import load_recipe
from clew.training.learner import STATE
from clew.training.run_state import RunState

STANDIN = Path(__file__).parent / "standin_visgym"


class Weightless:
    """A policy that has nothing to save but what the run gives it."""

    def save(self, store: CheckpointStore, step: int, state: str, facts: dict[str, Any]) -> None:
        store.save(step, lambda folder: (folder / STATE).write_text(state), facts)

    def restore(self, folder: Path) -> None:
        pass


def test_a_run_goes_on_in_its_own_world_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture and the instructions of seed 0 stand for it: another VisGym, the same mazes, another prompt."""
    world, data = tmp_path / "tests" / "fork", tmp_path / "tests" / "data"
    shutil.copytree(STANDIN, world)
    shutil.copytree(STANDIN.parent / "data", data)  # where the stand-in looks for its mazes
    overrides = [f"model.path={tiny.tiny_folder()}", "environment.id=visgym:maze_2d/easy", "environment.goal=stop"]
    recipe = load_recipe("laptop", overrides)

    def begun(path: Path, run_dir: Path) -> RunState:
        configure(str(path), 1)
        state = RunState(recipe, run_dir, Weightless())  # type: ignore[arg-type]
        state.restore()
        return state

    try:
        state = begun(STANDIN, tmp_path / "run")
        state.step, state.position = 3, 48
        state.save()
        assert begun(world, tmp_path / "run").position == 48, "another folder of the same version"
        code = world / "gymnasium" / "mazes.py"
        code.write_text(code.read_text().replace("maze of", "labyrinth of"))
        other = tmp_path / "tests" / "other"  # whose process is not running yet
        world.rename(other)
        with pytest.raises(UserError, match=r"environment\.id: visgym:maze_2d/easy shows another picture or other"):
            begun(other, tmp_path / "run")
    finally:
        configure(None, 2)
