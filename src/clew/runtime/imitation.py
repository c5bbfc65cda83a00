"""``clew sft``: the warm start from nothing, as a model folder with a card that says how it came to be."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from rich.console import Console

from clew import __version__
from clew.checkpoint import (
    CheckpointStore,
    RunLock,
    append_jsonl,
    clean_staging,
    truncate_jsonl,
    write_directory,
    write_file_atomic,
)
from clew.console import say
from clew.envs.base import ImageEnv
from clew.envs.navigators import missing_reference
from clew.envs.registry import make_env
from clew.errors import UserError
from clew.evaluation.evaluate import Result
from clew.evaluation.suites import RecipeSuites, environment_settings
from clew.policy.model import VisionLanguageModel, load_model
from clew.policy.paths import base_fingerprint, resolve_device
from clew.recipe import Recipe
from clew.report.progress import duration
from clew.runtime.evaluation import make_evaluator
from clew.runtime.process import check_parts, cores, prepare_process
from clew.runtime.run_directory import RECIPE, check_run_dir, refuse_changed_recipe
from clew.training.run_state import read_jsonl
from clew.training.sft import SftProgress, new_model, train_sft

FACTS, PROGRESS = "sft.json", "metrics.jsonl"
SAMPLING_SEEDS = (0, 1, 2, 3, 4)
_SAY_EVERY = 25  # steps


def run_sft(recipe: Recipe, out: Path, console: Console, command: str) -> dict[str, Any]:
    """Trains the tiny model by imitation and writes it to ``out``; returns the facts of its card.

    What is needed to go on after an interruption lies in ``OUT.work`` until ``out`` is whole.

    Args:
        command: how to make the same again, for the card.

    Raises:
        UserError: bad input, or ``out`` holds something else.
    """
    if out.exists():
        return _show_finished(recipe, out, console)
    prepare_process(recipe)
    check_parts(recipe)
    work = work_folder(out)
    check_run_dir(work, "--out: its work folder")  # which is deleted at the end
    with contextlib.closing(_demonstrated(recipe)) as env, RunLock(work):
        clean_staging(work)
        refuse_changed_recipe(recipe, work, f"choose another --out, or remove {work}")
        write_file_atomic(work / RECIPE, recipe.to_toml())
        if not (work / "init").is_dir():
            write_directory(work / "init", lambda folder: new_model(folder, recipe.sft, env), {})
        vlm = load_model(work / "init", device=resolve_device(recipe))
        _train(recipe, vlm, env, work, console)
        facts = _measure(recipe, vlm, work, console, command)
        write_directory(out, lambda folder: _write_model(vlm, work / "init", folder, facts), {})
    shutil.rmtree(work)
    say(console, f"model folder: {out} (give it as model.path)")
    return facts


def work_folder(out: Path) -> Path:
    """Where the unfinished work on a model folder lies: beside it."""
    return Path(f"{os.path.abspath(out)}.work")


def _demonstrated(recipe: Recipe) -> ImageEnv:
    """The environment of the demonstrations.

    Raises:
        UserError: no demonstration fits into ``sft.episode_turns``, or the environment knows no solutions.
    """
    # The navigator's own cap: only the agent has to arrive within environment.max_turns.
    settings = {**environment_settings(recipe), "max_turns": recipe.sft.episode_turns}
    try:
        env = make_env(recipe.environment.id, **settings)
    except UserError as error:
        raise UserError(f"sft.episode_turns = {recipe.sft.episode_turns}: {error}; raise it") from error
    try:
        env.reset(0)
        for reference in ("oracle", "random"):
            if (reason := missing_reference(env, reference)) is not None:
                raise UserError(f"environment.id: nothing can demonstrate {env.env_id} ({reason})")
    except BaseException:
        env.close()
        raise
    return env


def _train(recipe: Recipe, vlm: VisionLanguageModel, env: ImageEnv, work: Path, console: Console) -> None:
    held_out = RecipeSuites(recipe).held_out()
    store = CheckpointStore(work / "checkpoints", keep=1)
    latest = store.latest()
    first = latest[0] if latest else 0
    truncate_jsonl(work / PROGRESS, lambda line: line["step"] <= first)
    steps = recipe.sft.steps
    say(
        console,
        f"imitation: {steps} steps of {recipe.sft.frames_per_step} frames, after step {first}, in {work}",
    )
    recent: list[SftProgress] = []

    def report(progress: SftProgress) -> None:
        if not math.isfinite(progress.loss):
            raise UserError(
                f"the loss of step {progress.step} is {progress.loss}: lower sft.muon_learning_rate or "
                "sft.adamw_learning_rate, and choose another --out"
            )
        line = {
            "loss": progress.loss,
            "answer_probability": progress.answer_probability,
            "seconds": progress.seconds,
        }
        append_jsonl(work / PROGRESS, {"step": progress.step, **line})
        recent.append(progress)
        if progress.step % _SAY_EVERY == 0 or progress.step == steps:
            seconds = fmean(p.seconds for p in recent)
            say(
                console,
                f"step {progress.step}/{steps}  loss {fmean(p.loss for p in recent):.4f} nats a token  "
                f"p(answer) {fmean(p.answer_probability for p in recent):.3f}  {seconds:.2f} s a step  "
                f"{duration(seconds * (steps - progress.step))} left",
            )
            recent.clear()

    train_sft(vlm, env, recipe.sft, held_out, store, report)


def _measure(recipe: Recipe, vlm: VisionLanguageModel, work: Path, console: Console, command: str) -> dict[str, Any]:
    """Plays the held-out set, sampled with several seeds and greedily; returns all the facts of the card."""
    began = time.monotonic()
    suite = recipe.evaluation.suites[0]
    sampled: list[Result] = []
    for seed in SAMPLING_SEEDS:
        # What `clew train` with this training.seed sees before training.
        training = recipe.training.model_copy(update={"seed": seed})
        evaluator = make_evaluator(recipe.model_copy(update={"training": training}), vlm, None, lambda result: None)
        sampled.append(evaluator.regular(0))
        say(console, f"{suite}, sampling seed {seed}: {sampled[-1].solved}/{sampled[-1].total}")
    only_main = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"suites": (suite,)})})
    greedy = make_evaluator(only_main, vlm, None, lambda result: None).thorough(0)[0]
    say(console, f"{suite}, greedy: {greedy.solved}/{greedy.total}")
    lines = read_jsonl(work / PROGRESS, "loss", "answer_probability", "seconds")
    return {
        "command": command,
        "recipe": recipe.name,
        "seeds": {"weights and demonstrations": recipe.sft.seed, "sampling": list(SAMPLING_SEEDS)},
        "sft": recipe.sft.model_dump(mode="json"),
        "environment": recipe.environment.model_dump(mode="json"),
        "parameters": sum(p.numel() for p in vlm.model.parameters()),
        "last_steps": {
            "loss": fmean(line["loss"] for line in lines[-_SAY_EVERY:]),
            "answer_probability": fmean(line["answer_probability"] for line in lines[-_SAY_EVERY:]),
        },
        "evaluation": {
            "suite": suite,
            "temperature": recipe.rollout.temperature,
            "sampled": [{"seed": s, **_counts(r)} for s, r in zip(SAMPLING_SEEDS, sampled, strict=True)],
            "sampled_mean_solved": fmean(r.solved for r in sampled),
            "greedy": _counts(greedy),
        },
        "time": {
            "training_s": sum(line["seconds"] for line in lines),
            "evaluation_s": time.monotonic() - began,
            "threads": torch.get_num_threads(),
            "cores": cores(),
        },
        "versions": {
            "clew": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _counts(result: Result) -> dict[str, Any]:
    return {"solved": result.solved, "total": result.total, "ci95": list(result.ci95)}


def _write_model(vlm: VisionLanguageModel, init: Path, folder: Path, facts: dict[str, Any]) -> None:
    shutil.copytree(init, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json", "*.safetensors"))
    vlm.model.save_pretrained(folder)
    facts["weights_sha256"] = base_fingerprint(str(folder))
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(model_card(facts), encoding="utf-8")


def model_card(facts: dict[str, Any]) -> str:
    """The card of an imitated model, in the form that model hubs read."""
    sft, evaluation, seconds = facts["sft"], facts["evaluation"], facts["time"]
    total = evaluation["greedy"]["total"]
    counts = ", ".join(f"{row['solved']}/{total}" for row in evaluation["sampled"])
    answer = facts["last_steps"]["answer_probability"]
    seeds = ", ".join(str(row["seed"]) for row in evaluation["sampled"])
    rows = {
        "made by": f"`{facts['command']}`",
        "seed of weights and demonstrations": sft["seed"],
        "weights SHA-256": f"`{facts['weights_sha256']}`",
        "steps": f"{sft['steps']}, of which the last {sft['episode_steps']} on whole fallible episodes",
        f"held-out mazes solved, sampled at temperature {evaluation['temperature']:g}": (
            f"{counts} (seeds {seeds}; mean {evaluation['sampled_mean_solved']:.1f})"
        ),
        "held-out mazes solved, greedy": f"{evaluation['greedy']['solved']}/{total}",
        "probability of a demonstrated answer": f"{answer:.3f} (last steps)",
        "time": (
            f"{duration(seconds['training_s'])} of training with {seconds['threads']} threads, "
            f"{duration(seconds['evaluation_s'])} of evaluation"
        ),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: transformers
tags: [qwen3_vl, imitation, vision-language, clew]
license: apache-2.0
---
# A small Qwen3-VL that walks mazes, not too well

The warm start of Clew's `{facts["recipe"]}` recipe: the Qwen3-VL architecture with
{facts["parameters"] / 1e6:.2f} million parameters, trained from random weights by imitation of a navigator
that errs in {sft["random_moves"]:.0%} of its turns. Reinforcement learning starts from here.

| fact | value |
|---|---|
{table}

It is an ordinary Hugging Face folder: `AutoModelForImageTextToText` and `AutoProcessor` (which needs
torchvision) load it. Every maze of the evaluation suites was kept out of its demonstrations, by content.
All settings are in `{FACTS}`.
"""


def _show_finished(recipe: Recipe, out: Path, console: Console) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads((out / FACTS).read_text(encoding="utf-8"))
        tables = {"sft": recipe.sft, "environment": recipe.environment}
        # A key that came after the model was made has its default there.
        same = all(type(table).model_validate(facts[name]) == table for name, table in tables.items())
        evaluation = facts["evaluation"]
    except (OSError, ValueError, KeyError, TypeError) as error:  # pydantic's ValidationError is a ValueError
        raise UserError(f"--out {out} exists and holds no model of clew sft: choose another folder") from error
    if not same:
        raise UserError(f"--out {out} holds a model made with other settings: choose another folder or remove it")
    mean, greedy = evaluation["sampled_mean_solved"], evaluation["greedy"]
    seeds = len(evaluation["sampled"])
    say(
        console,
        f"{out} is finished; solved of {greedy['total']}: {mean:.1f} sampled (mean of {seeds} seeds), "
        f"{greedy['solved']} greedy",
    )
    return facts
