"""Everything a run must remember to go on as if it had never stopped."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

from clew.checkpoint import CheckpointStore, truncate_jsonl
from clew.envs.registry import make_env
from clew.envs.suites import fingerprint
from clew.errors import UserError
from clew.evaluation.evaluate import Result
from clew.evaluation.suites import environment_settings
from clew.policy.paths import base_fingerprint, resolve_model_path
from clew.recipe import Recipe
from clew.training.learner import STATE
from clew.training.policy import Policy

log = logging.getLogger(__name__)


class RunState:
    """Step, data position and evaluations so far, saved beside the policy and its optimizer.

    No random-number state is kept because there is none: every draw derives from (seed, step, task, ...).

    Attributes:
        step: training steps done.
        position: where the stream of training tasks goes on.
        evaluations: for each evaluated step, the counts of the held-out set (sampled).
        session: how many times the run was started before.
    """

    def __init__(self, recipe: Recipe, run_dir: Path, policy: Policy) -> None:
        self.recipe, self.run_dir, self.policy = recipe, run_dir, policy
        self.store = CheckpointStore(run_dir / "checkpoints", recipe.checkpoint.keep)
        self.base_sha256 = base_fingerprint(resolve_model_path(recipe.model))
        with contextlib.closing(make_env(recipe.environment.id, **environment_settings(recipe))) as env:
            self.world_sha256 = fingerprint(env)
        self.step = self.position = 0
        self.evaluations: dict[int, dict[str, Any]] = {}
        self.session = next_session(run_dir)

    def restore(self) -> None:
        """Goes back to the newest whole checkpoint, if there is one, and drops metrics of later steps.

        Raises:
            UserError: the checkpoint belongs to another base model or LoRA configuration, or the environment has become
                another one.
        """
        if (latest := self.store.latest()) is not None:
            _, folder = latest
            kept = json.loads((folder / STATE).read_text())
            if kept["base_sha256"] != self.base_sha256:
                raise UserError(
                    f"model.path: {self.recipe.model.path} is not the base model that {self.run_dir} was trained from "
                    "(its weights have another SHA-256); put the old weights back or train with --fresh"
                )
            if kept.get("world_sha256", self.world_sha256) != self.world_sha256:
                raise UserError(
                    f"environment.id: {self.recipe.environment.id} shows another picture or other instructions for "
                    f"seed 0 than when {self.run_dir} began; take the version it was trained with or train with --fresh"
                )
            self.policy.restore(folder)
            self.step, self.position = kept["step"], kept["position"]
            self.evaluations = {int(step): brief for step, brief in kept["evaluations"].items()}
        metrics = self.run_dir / "metrics.jsonl"
        known = {line["step"] for line in read_jsonl(metrics, "step")}
        truncate_jsonl(metrics, lambda line: line["step"] <= self.step and latest is not None)
        if lost := len(set(range(1, self.step + 1)) - known):
            log.warning("%s lacks %d of the %d steps done: totals and curves leave them out", metrics, lost, self.step)

    def record_evaluation(self, result: Result) -> bool:
        """Remembers a held-out result; True if its step is the best so far (see ``best_step``)."""
        assert result.step is not None
        self.evaluations[result.step] = result.brief()
        return result.step == self.best_step

    @property
    def best_step(self) -> int | None:
        """The evaluated step (after the first update) that solved most; the earliest of equals."""
        trained = {step: e["solved"] for step, e in self.evaluations.items() if step > 0}
        return min(trained, key=lambda step: (-trained[step], step)) if trained else None

    def save(self) -> None:
        """Saves the state as the checkpoint of the current step; whole or not at all."""
        kept = {
            "step": self.step,
            "position": self.position,
            "evaluations": self.evaluations,
            "base_sha256": self.base_sha256,
            "world_sha256": self.world_sha256,
        }
        facts = {"base_sha256": self.base_sha256}
        self.policy.save(self.store, self.step, json.dumps(kept, indent=1) + "\n", facts)


def next_session(run_dir: Path) -> int:
    """The number of a start of this run that begins now, from 1; starts that finished no step don't count."""
    return 1 + max(
        (line["session"] for line in read_jsonl(run_dir / "timing.jsonl", "session", "elapsed_s")), default=0
    )


def read_jsonl(path: Path, *keys: str) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file (a torn last line is left out; no file is no line).

    Raises:
        UserError: a line is no JSON object, or has not all of ``keys``.
    """
    if not path.exists():
        return []
    objects = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            objects.append(json.loads(line))
            _ = [objects[-1][key] for key in keys]
        except (ValueError, TypeError, KeyError) as error:
            wanted = f" with {', '.join(keys)}" if keys else ""
            raise UserError(f"{path} line {number} is no JSON object{wanted}; remove that line") from error
    return objects
