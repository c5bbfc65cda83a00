"""The training loop on a real, tiny recipe: the same bits twice, and after an interruption."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny

from clew.errors import UserError
from clew.policy.adapter import read_adapter
from clew.recipe import Recipe, parse_recipe
from clew.rollout.rollouts import LocalRollouts
from clew.training.grpo import Interrupted, train
from clew.training.learner import Learner

RECIPE = """
name = "test"
[model]
path = "{model}"
[model.lora]
rank = 4
alpha = 8
dropout = 0.2
[environment]
size = 3
min_path = 1
max_path = 3
max_turns = 5
[rollout]
temperature = 0.9
max_new_tokens = 8
max_tokens = 400
[algorithm]
group_size = 4
[training]
steps = 2
prompts_per_step = 3
learning_rate = 0.02
minibatches = 2
tokens_per_microbatch = 1000
[evaluation]
suites = ["heldout", "braided"]
size = 4
interval = 1
confirm_size = 4
[checkpoint]
interval = 1
export_interval = 1
"""

KEYS = {
    "train": "solve_rate solved episodes reward_mean loss grad_norm learning_rate updates groups_used "
    "groups_equal skipped_nonfinite",
    "policy": "entropy kl clip_fraction ratio_max logprob_gap_mean logprob_gap_max version",
    "rollout": "turns_mean tokens_sampled tokens_total answer_tokens_mean cut_ratio repetition",
    "advantages": "mean std max",
}

WORDS = re.compile("up|down|left|right")


def lenient(answer: str) -> str | None:
    """The first direction that an answer names: an untrained model then walks, and sometimes arrives."""
    found = WORDS.search(answer)
    return found[0] if found else None


@pytest.fixture(autouse=True)
def lenient_mazes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clew.envs.maze_env.parse_action", lenient)


def recipe(**overrides: Any) -> Recipe:
    text = RECIPE.format(model=tiny.tiny_folder())
    settings = [f"{key}={value}" for key, value in overrides.items()]
    return parse_recipe(text, source="test.toml", name="test", overrides=settings)


class Log:
    def __init__(self, stop_after: int | None = None) -> None:
        self.results: list[Any] = []
        self.steps: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.stop_after = stop_after

    def run(self, made: Recipe, folder: Path) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        learner = Learner(made)
        return train(
            made,
            folder,
            learner,
            LocalRollouts.of(learner.vlm, learner.features),
            on_result=self.results.append,
            on_step=lambda metrics, timing: self.steps.append(metrics),
            on_note=self.notes.append,
            should_stop=lambda: len(self.steps) + 1 == self.stop_after,
        )


def bits(folder: Path) -> dict[str, bytes]:
    """All that must repeat: metrics, evaluations, replays, adapters, checkpoints; not the clock's half."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("timing.jsonl", "summary.json")
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Log]:
    folder, log = tmp_path_factory.mktemp("finished"), Log()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clew.envs.maze_env.parse_action", lenient)
        summary = log.run(recipe(), folder)
    return folder, summary, log


def test_a_run_leaves_what_it_promises(finished: tuple[Path, dict[str, Any], Log]) -> None:
    folder, summary, log = finished
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1:] == log.steps
    assert all("eval/all/pass_at_1" in line and "eval/heldout/sampled/solve_rate" in line for line in lines)
    promised = [f"{part}/{key}" for part, keys in KEYS.items() for key in keys.split()]
    assert all(key in line for line in lines[1:] for key in promised)
    assert sum(line["train/updates"] for line in lines[1:]) > 0, "the recipe should give some signal"
    assert all(line["train/episodes"] == 12 for line in lines[1:])
    assert lines[1]["policy/version"].startswith("step-000000-") != lines[2]["policy/version"]
    names = {path.name for path in (folder / "eval/step-000002").iterdir()}
    assert {"heldout.sampled.json", "heldout.greedy.json", "braided.sampled.json"} <= names
    adapters = [read_adapter(folder / "adapters" / f"step-00000{step}") for step in (1, 2)]
    assert adapters[0].content_hash != adapters[1].content_hash
    assert lines[2]["policy/version"].endswith(adapters[0].content_hash[:8])
    assert summary["steps"] == 2 and summary["trajectories"] == 24
    assert summary["best"]["step"] in (1, 2) and summary["final"]["step"] == 2 and summary["baseline"]["step"] == 0
    assert set(summary["sight"]) == {"normal", "blank", "swapped"}
    for step in (1, 2):  # held-out mazes are never played in training
        assert (folder / "checkpoints" / f"step-00000{step}" / "manifest.json").is_file()
    assert json.loads((folder / "summary.json").read_text()) == summary


def test_the_same_run_gives_the_same_bits(finished: tuple[Path, dict[str, Any], Log], tmp_path: Path) -> None:
    Log().run(recipe(), tmp_path)
    first, second = bits(finished[0]), bits(tmp_path)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_an_interrupted_run_gives_the_same_bits(finished: tuple[Path, dict[str, Any], Log], tmp_path: Path) -> None:
    """Stopped after a step, with dropout in the adapter and a torn last line in the metrics."""
    with pytest.raises(Interrupted, match="1"):
        Log(stop_after=1).run(recipe(), tmp_path)
    assert not (tmp_path / "summary.json").exists()
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 2, "half": ')  # killed while it wrote
    log = Log()
    log.run(recipe(), tmp_path)
    assert [line["step"] for line in log.steps] == [2]
    first, second = bits(finished[0]), bits(tmp_path)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_a_run_killed_after_its_export_gives_the_same_bits(
    finished: tuple[Path, dict[str, Any], Log], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter is exported before its checkpoint is saved: dying in between must not block the run."""

    def die(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("clew.training.run_state.RunState.save", die)
        with pytest.raises(KeyboardInterrupt):
            Log().run(recipe(), tmp_path)
    assert (tmp_path / "adapters/step-000001").is_dir() and not (tmp_path / "checkpoints/step-000001").exists()
    Log().run(recipe(), tmp_path)
    first, second = bits(finished[0]), bits(tmp_path)
    assert [name for name in first if first[name] != second[name]] == []


def test_another_seed_is_another_run(finished: tuple[Path, dict[str, Any], Log], tmp_path: Path) -> None:
    made = recipe(
        **{
            "training.seed": 1,
            "training.steps": 1,
            "evaluation.sight": "false",
            "evaluation.suites": '["heldout"]',
        }
    )
    Log().run(made, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    other = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    assert lines[1]["policy/version"] != other[1]["policy/version"]
    assert lines[1]["rollout/tokens_total"] != other[1]["rollout/tokens_total"]


def test_a_step_without_signal_is_a_counted_no_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clew.envs.maze_env.parse_action", lambda answer: None)  # nobody ever moves
    made = recipe(**{"evaluation.sight": "false", "evaluation.references": "false", "evaluation.suites": '["heldout"]'})
    log = Log()
    summary = log.run(made, tmp_path)
    assert [(m["train/updates"], m["train/groups_used"], m["train/groups_equal"]) for m in log.steps] == [(0, 0, 3)] * 2
    assert all(m["train/learning_rate"] == 0.02 for m in log.steps)
    one, two = (read_adapter(tmp_path / "adapters" / f"step-00000{step}") for step in (1, 2))
    assert one.content_hash == two.content_hash
    assert "NO EFFECT" in (tmp_path / "adapters/step-000002/README.md").read_text()
    assert summary["final"]["solved"] == 0


def test_a_checkpoint_of_another_base_model_is_refused(
    finished: tuple[Path, dict[str, Any], Log], tmp_path: Path
) -> None:
    import shutil

    folder, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(finished[0], folder)
    shutil.copytree(tiny.tiny_folder(), model)
    other = tiny.load_model(model)
    other.model.lm_head.weight.data += 1
    other.model.save_pretrained(model)
    text = RECIPE.format(model=model)
    with pytest.raises(UserError, match=r"model\.path.*base model"):
        Log().run(parse_recipe(text, source="test.toml", overrides=["training.steps=3"]), folder)
    with pytest.raises(UserError, match=r"adapter"):
        Log().run(recipe(**{"training.steps": 3, "model.lora.rank": 8}), folder)
