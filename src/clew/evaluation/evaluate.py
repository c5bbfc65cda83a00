"""Evaluation: a suite played once, counted honestly, written to the run directory."""

from __future__ import annotations

import base64
import io
import itertools
import json
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from clew.agent.ledger import StopReason, Trajectory
from clew.checkpoint.durable import write_file_atomic
from clew.envs.base import ImageEnv, Suite, Task
from clew.envs.navigators import REFERENCES, missing_reference
from clew.envs.registry import make_env
from clew.envs.suites import file_stem
from clew.errors import UserError
from clew.evaluation.wilson import wilson_interval
from clew.rollout.engine import Sampling
from clew.rollout.episodes import FrameFilter, Limits
from clew.rollout.rollouts import Plays

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What one evaluation found.

    Attributes:
        suite, mode: e.g. ``heldout``, ``sampled`` (mode of a reference row: the reference's name).
        step: the training step evaluated, None for a reference.
        episodes: one record a task (seed, content_hash, path_length, success, reward, stop_reason, turns, actions).
        trajectories: the token records, where a model played.
    """

    suite: str
    mode: str
    step: int | None
    episodes: list[dict[str, Any]]
    trajectories: Sequence[Trajectory] = ()

    @property
    def solved(self) -> int:
        return sum(e["success"] for e in self.episodes)

    @property
    def total(self) -> int:
        return len(self.episodes)

    @property
    def solve_rate(self) -> float:
        return self.solved / self.total

    @property
    def ci95(self) -> tuple[float, float]:
        return wilson_interval(self.solved, self.total)

    def by_path_length(self) -> dict[str, dict[str, int]]:
        """Solved and total for each shortest-path length."""
        table: dict[str, dict[str, int]] = {}
        for episode in sorted(self.episodes, key=lambda e: e["path_length"] or 0):
            row = table.setdefault(str(episode["path_length"]), {"solved": 0, "total": 0})
            row["solved"] += int(episode["success"])
            row["total"] += 1
        return table

    def brief(self) -> dict[str, Any]:
        """The counts, for the summary."""
        return {
            "suite": self.suite,
            "mode": self.mode,
            "step": self.step,
            "solved": self.solved,
            "total": self.total,
            "ci95": list(self.ci95),
        }

    def record(self) -> dict[str, Any]:
        """The content of SUITE.MODE.json."""
        return {
            **self.brief(),
            "solve_rate": self.solve_rate,
            "by_path_length": self.by_path_length(),
            "episodes": self.episodes,
        }


def evaluate(
    rollouts: Plays,
    make_env: Callable[[], ImageEnv],
    suite: Suite,
    mode: str,
    step: int,
    sampling: Sampling,
    limits: Limits,
    seed_parts: tuple[int | str, ...],
    see: FrameFilter | None = None,
    batch: int = 128,
) -> Result:
    """Plays every task of a suite once.

    An episode that infrastructure ended counts as not solved: leaving it out would let a crash raise the rate.

    Args:
        seed_parts: what the draws derive from; a fresh value gives fresh draws on the same mazes.
        batch: episodes played at a time.
    """
    trajectories: list[Trajectory] = []
    for first in range(0, len(suite.tasks), batch):
        attempts = [(task, 0) for task in suite.tasks[first : first + batch]]
        trajectories += rollouts.play(make_env, attempts, sampling, limits, seed_parts, see)
        rollouts.release()
    return Result(suite.name, mode, step, [_episode(t) for t in trajectories], trajectories)


def _outcome(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "seed": trajectory.task.seed,
        "content_hash": trajectory.task.content_hash,
        "path_length": trajectory.path_length,
        "success": trajectory.success,
        "reward": trajectory.reward,
        "stop_reason": str(trajectory.stop_reason),
    }


def _episode(trajectory: Trajectory) -> dict[str, Any]:
    answered = [t for t in trajectory.turns if t.answered]
    return {
        **_outcome(trajectory),
        "turns": len(answered),
        "actions": [t.action or t.answer for t in answered],
    }


WALKS = 16


def reference(suite: Suite, policy: str, seed: int) -> Result:
    """Plays a suite with a policy that has no model (a key of ``REFERENCES``).

    A policy that draws walks every maze ``WALKS`` times: one walk through 64 mazes would say little about it.

    Raises:
        UserError: the environment does not give what the policy needs.
    """
    env = make_env(suite.env_id, **suite.env_kwargs)
    try:
        env.reset(suite.tasks[0].seed)
        if (reason := missing_reference(env, policy)) is not None:
            raise UserError(f"the reference policy {policy} can't play the suite {suite.name}: {reason}")
        return Result(suite.name, policy, None, _walks(env, suite, policy, seed))
    finally:
        env.close()


def _walks(env: ImageEnv, suite: Suite, policy: str, seed: int) -> list[dict[str, Any]]:
    return [
        _walk(env, task, policy, f"{seed}/{policy}/{task.content_hash}/{walk}")
        for task, walk in itertools.product(suite.tasks, range(1 if policy == "oracle" else WALKS))
    ]


def _walk(env: ImageEnv, task: Task, policy: str, seed: str, *, again: bool = True) -> dict[str, Any]:
    """One episode of a reference; an environment that raises is tried once more, then counted as crashed."""
    navigate, rng = REFERENCES[policy](), random.Random(seed)
    actions: list[str] = []
    reward, success, length = 0.0, False, None
    try:
        _, info = env.reset(task.seed)
        if info["content_hash"] != task.content_hash:
            raise UserError(f"{task} made content {info['content_hash']}: its settings are not those of its list")
        length = info["path_length"]
        terminated = truncated = False
        while not (terminated or truncated):
            answer = navigate(env, rng)
            _, gained, terminated, truncated, step_info = env.step(answer)
            actions.append(step_info.get("action") or answer)
            reward += gained
            success = step_info["success"]
        reason = StopReason.SUCCESS if success else StopReason.WRONG_END if terminated else StopReason.TURN_CAP
    except UserError:
        raise
    except Exception:  # an environment may raise anything; the walk, not the run, is what it costs
        log.warning("%s seed %d raised in a walk of %s", task.env_id, task.seed, policy, exc_info=True)
        if again:
            return _walk(env, task, policy, seed, again=False)
        reason, success = StopReason.ENV_CRASHED, False
    return {
        "seed": task.seed,
        "content_hash": task.content_hash,
        "path_length": length,
        "success": success,
        "reward": reward,
        "stop_reason": str(reason),
        "turns": len(actions),
        "actions": actions,
    }


# --- the sight test --------------------------------------------------------------------------------------


def blank_frames(frame: np.ndarray, trajectory: Trajectory) -> np.ndarray:
    """Hides everything: a mid-grey frame of the same size."""
    return np.full_like(frame, 128)


class SwappedFrames:
    """Shows another maze: the agent walks its own maze and sees a walker that plays its answers in the next one."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        hashes = [task.content_hash for task in suite.tasks]
        self._other = dict(zip(hashes, [*suite.tasks[1:], suite.tasks[0]], strict=True))
        self._shadows: dict[int, _Shadow] = {}
        self._open: list[ImageEnv] = []

    def __call__(self, frame: np.ndarray, trajectory: Trajectory) -> np.ndarray:
        if not trajectory.turns:
            env = make_env(self._suite.env_id, **self._suite.env_kwargs)
            self._open.append(env)
            observation, _ = env.reset(self._other[trajectory.task.content_hash].seed)
            shadow = self._shadows[id(trajectory)] = _Shadow(env, observation.image)
        else:
            shadow = self._shadows[id(trajectory)]
            shadow.follow(trajectory.turns[-1].answer)
        return shadow.frame

    def close(self) -> None:
        """Closes the walkers' environments; whoever plays calls it, in its own process, when a batch is over."""
        self._shadows.clear()
        while self._open:
            self._open.pop().close()


@dataclass
class _Shadow:
    """Another task, played by the answers that the agent gives in its own; it stays where it ends."""

    env: ImageEnv
    frame: np.ndarray
    over: bool = False

    def follow(self, answer: str) -> None:
        if self.over:
            return
        try:
            observation, _, terminated, truncated, _ = self.env.step(answer)
        except Exception:  # whatever it is, it is not the fault of the episode that is played
            log.warning("%s, whose frames are shown in place of another task's, raised", self.env.env_id, exc_info=True)
            self.over = True
            return
        self.frame, self.over = observation.image, terminated or truncated


# --- files -----------------------------------------------------------------------------------------------


def write_result(run_dir: Path, result: Result, tokenizer: Any = None) -> None:
    """Writes RUN/eval/.../SUITE.MODE.json and, given a tokenizer, the replays of its episodes."""
    folder = "references" if result.step is None else f"step-{result.step:06d}"
    name = f"{file_stem(result.suite)}.{result.mode}"
    path = run_dir / "eval" / folder / f"{name}.json"
    write_file_atomic(path, json.dumps(result.record(), indent=1) + "\n")
    if tokenizer is not None:
        lines = [json.dumps(replay(t, tokenizer)) for t in result.trajectories]
        path = run_dir / "replays" / folder / f"{name}.jsonl"
        write_file_atomic(path, "\n".join(lines) + "\n")


def replay(trajectory: Trajectory, tokenizer: Any) -> dict[str, Any]:
    """An episode with its frames (PNG, base64) and every token with its mask and log-probability."""
    return {
        **_outcome(trajectory),
        "policy_version": trajectory.policy_version,
        "turns": [
            {"frame": png_base64(t.frame), "text": t.text, "answer": t.answer, "feedback": t.feedback}
            for t in trajectory.turns
        ],
        "final_frame": None if trajectory.final_frame is None else png_base64(trajectory.final_frame),
        "tokens": _tokens(trajectory, tokenizer),
    }


def _tokens(trajectory: Trajectory, tokenizer: Any) -> list[dict[str, Any]]:
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    entries: list[dict[str, Any]] = []
    run = 0
    for token, sampled, logprob in zip(trajectory.token_ids, trajectory.sampled, trajectory.logprobs, strict=True):
        if token == image_id:
            run += 1
            continue
        if run:
            entries.append({"t": f"<|image_pad|> x {run}", "m": 0, "lp": None})
            run = 0
        entries.append(
            {"t": tokenizer.decode([token]), "m": int(sampled), "lp": round(logprob, 6) if sampled else None}
        )
    return entries


def png_base64(frame: np.ndarray) -> str:
    """A uint8 RGB frame [height, width, 3] as a PNG file, in base64."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()
