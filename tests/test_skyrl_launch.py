"""Starting a SkyRL run, and the dry run; neither SkyRL nor GPUs are needed."""

from __future__ import annotations

import os
import shlex
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from clew.envs.visgym import fork, pool
from clew.errors import UserError
from clew.recipe import Recipe, load_recipe
from clew.runtime.skyrl import launch
from clew.runtime.skyrl.translate import translate

RUN = Path("/shared/runs/hyperpod-seed0")


def hyperpod(*overrides: str) -> Recipe:
    return load_recipe("hyperpod", ["runtime.kind=skyrl", *overrides])


def test_dry_run_prints_every_option_and_what_has_none(clew: Any, tmp_path: Path) -> None:
    outcome = clew("train", "hyperpod", "runtime.kind=skyrl", "--dry-run")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    words = [shlex.split(line)[0] for line in lines if not line.startswith("#")]
    assert words == sorted(words)
    given = dict(word.split("=", 1) for word in words)
    assert given.keys() == translate(hyperpod(), RUN, "m").overrides.keys()
    assert given["trainer.ckpt_path"] == f"{RUN}/checkpoints"
    assert given["trainer.policy.model.path"].endswith("/mixed_qwen3vl")
    comments = "\n".join(line for line in lines if line.startswith("#"))
    assert "clew prepare hyperpod" in comments and "rollout.deadline_s" in comments
    assert "# valid" in comments or "# not validated: SkyRL is not installed here" in comments
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"


def test_dry_run_is_for_skyrl(clew: Any) -> None:
    outcome = clew("train", "laptop", "--dry-run")
    assert outcome.code == 2 and "runtime.kind=skyrl" in outcome.err and len(outcome.err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_gpus_a_real_run_is_one_clear_line(clew: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    outcome = clew("train", "hyperpod", "runtime.kind=skyrl", "--run", tmp_path / "run")
    assert outcome.code == 2 and len(outcome.err.splitlines()) == 1
    assert "needs 6 CUDA devices, and there are 0" in outcome.err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What would be started: the step that each start goes on from. Of this machine nothing is asked."""
    steps: list[int] = []
    for name in ("_check_devices", "check_parts", "validate"):
        monkeypatch.setattr(launch, name, lambda *_: None)
    monkeypatch.setattr(launch, "located", lambda recipe: recipe)
    monkeypatch.setattr(launch, "_loadable", lambda recipe: "m")
    monkeypatch.setattr(launch, "_train", lambda *given: steps.append(given[4]))
    return steps


def one_step_done(run: Path, step: int) -> None:
    policy = run / "checkpoints" / f"global_step_{step}" / "policy"
    policy.mkdir(parents=True)
    for kind in ("model", "optim", "extra_state"):
        torch.save({}, policy / f"{kind}_world_size_1_rank_0.pt")
    for name in ("data.pt", "trainer_state.pt"):
        torch.save({}, policy.parent / name)


def test_more_steps_do_not_go_on(tmp_path: Path, started: list[int]) -> None:
    """They are other rows, which SkyRL would shuffle anew under the position in the old ones."""
    run, console = tmp_path / "run", Console(file=StringIO())
    one = ("runtime.nodes=1", "runtime.workers_per_node=1", "runtime.engines=1", "runtime.shared_dir=/")

    def start(steps: int) -> None:
        launch.launch_skyrl(hyperpod(*one, f"training.steps={steps}"), run, False, console)

    start(20)
    start(30)  # nothing was trained: the rows are written anew
    one_step_done(run, 10)
    start(30)
    for _ in range(2):
        with pytest.raises(UserError, match=r"^training\.steps: 30 -> 40: .*--run, or start again with --fresh$"):
            start(40)
    assert started == [0, 0, 10]
    one_step_done(run, 30)
    start(30)
    assert started == [0, 0, 10]
    said = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "this run is finished" in said and "training.steps" not in said


def test_skyrls_processes_are_told_where_visgym_is(
    tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEW_VISGYM", "/another")  # set: what launch does to it is undone
    monkeypatch.setattr(fork, "configured", None)
    monkeypatch.setattr(pool, "processes", 2)
    monkeypatch.chdir(tmp_path)
    recipe = hyperpod("runtime.shared_dir=/", "runtime.visgym_path=v", "runtime.env_processes=5")
    launch.launch_skyrl(recipe, tmp_path / "run", False, Console(file=StringIO()))
    assert os.environ["CLEW_VISGYM"] == str(tmp_path / "v") and (fork.configured, pool.processes) == ("v", 5)


def test_runs_of_two_runtimes_do_not_mix(clew: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "exports").mkdir(parents=True)
    (run / "recipe.toml").write_text(load_recipe("laptop").to_toml())
    outcome = clew("train", "laptop", "--run", run)
    assert outcome.code == 2 and "SkyRL" in outcome.err
    (run / "exports").rmdir()
    (run / "adapters").mkdir()
    (run / "recipe.toml").write_text(hyperpod().to_toml())
    outcome = clew("train", "hyperpod", "runtime.kind=skyrl", "--run", run)
    assert outcome.code == 2 and "another runtime" in outcome.err
