"""Every metric that a run on Ray shows to Prometheus: its name there, its unit, and what it is made of.

Names are in base units (seconds, bytes, ratios from 0 to 1, nats); counters end in ``_total``. Ray puts ``ray_`` before
each name, and every series carries the label ``run``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from clew.agent.ledger import StopReason

RAY = "ray_"
"""What Ray puts before the names of an application's metrics."""


@dataclass(frozen=True)
class Metric:
    """One metric of Prometheus.

    Attributes:
        name: without Ray's prefix.
        kind: a counter adds up what each step brings, from the start of the process; a gauge shows the last step.
        help: one line, with the unit where the name does not say it.
        keys: what of ``metrics.jsonl``, or of ``timing.jsonl`` under ``timing/``, it shows, and the labels that tell
            these apart. Empty: the runtime sets it.
        labels: names of the labels that the runtime gives, where ``keys`` is empty.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    keys: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        """The name that Prometheus knows it by."""
        return RAY + self.name

    @property
    def label_names(self) -> tuple[str, ...]:
        """All labels that tell its series apart."""
        first: Mapping[str, str] = next(iter(self.keys.values()), {})
        return ("run", *first, *self.labels)


def _gauge(name: str, help: str, key: str) -> Metric:
    return Metric(name, "gauge", help, {key: {}})


def _counter(name: str, help: str, key: str) -> Metric:
    return Metric(name, "counter", help, {key: {}})


def _by(label: str, prefix: str, values: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Keys that one label tells apart: value of the label -> rest of the key."""
    return {prefix + rest: {label: value} for value, rest in values.items()}


STEP = Metric("clew_step", "gauge", "Number of the last finished training step.")
STEP_TIMESTAMP = Metric(
    "clew_step_timestamp_seconds",
    "gauge",
    "When the last training step (or the evaluation before it) ended, Unix time.",
)
STORAGE_FREE = Metric("clew_storage_free_bytes", "gauge", "Free space of the file system that holds the run directory.")
STORAGE_SIZE = Metric("clew_storage_size_bytes", "gauge", "Size of the file system that holds the run directory.")
QUEUE = Metric(
    "clew_engine_queue_episodes",
    "gauge",
    "Episodes of the current batch: waiting for an engine, or being played by one.",
    labels=("state",),
)
EVAL = Metric(
    "clew_eval_solve_rate", "gauge", "Share of a suite's tasks solved, by suite and mode.", labels=("suite", "mode")
)
SOLVE_RATE = _gauge("clew_train_solve_rate", "Share of the step's episodes that reached the goal.", "train/solve_rate")
PASS_AT_1 = _gauge("clew_eval_pass_at_1", "Share of the held-out tasks solved, sampled.", "eval/all/pass_at_1")
REWARD = _gauge("clew_train_reward", "Mean reward of the step's episodes.", "train/reward_mean")
ENTROPY = _gauge("clew_policy_entropy_nats", "Mean entropy of the policy, a sampled token.", "policy/entropy")
KL = Metric(
    "clew_policy_kl_nats",
    "gauge",
    "Mean divergence a sampled token, from the policy that played (step) or from the base model (base).",
    _by("reference", "policy/", {"step": "kl", "base": "kl_base"}),
)
LOGPROB_GAP = Metric(
    "clew_policy_logprob_gap_nats",
    "gauge",
    "Absolute difference between engine's and trainer's log-probability of a sampled token.",
    _by("statistic", "policy/logprob_gap_", {"mean": "mean", "max": "max"}),
)
LOSS = _gauge("clew_train_loss", "Loss of the policy, mean of the step's updates.", "train/loss")
GRAD_NORM = _gauge("clew_train_gradient_norm", "Norm of the gradient before it is clipped.", "train/grad_norm")
CLIPPED = _gauge("clew_policy_clipped_ratio", "Share of tokens whose ratio was clipped.", "policy/clip_fraction")
GROUPS = Metric(
    "clew_groups",
    "gauge",
    "Groups of the step whose rewards differ (signal) or are all equal (none): the latter teach nothing.",
    _by("signal", "train/groups_", {"some": "used", "none": "equal"}),
)
ADVANTAGE = Metric(
    "clew_advantage",
    "gauge",
    "Advantages of the groups with signal: mean, standard deviation, largest absolute value.",
    _by("statistic", "advantages/", {"mean": "mean", "std": "std", "max": "max"}),
)
STEP_SECONDS = _gauge("clew_step_seconds", "Duration of the last training step.", "timing/step_s")
PHASE_SECONDS = Metric(
    "clew_phase_seconds",
    "gauge",
    "Duration of a part of the last training step: rollout, train, sync of the adapter, evaluation, checkpoint.",
    _by(
        "phase",
        "timing/",
        {
            "rollout": "rollout_s",
            "train": "train_s",
            "sync": "sync_s",
            "evaluation": "eval_s",
            "checkpoint": "checkpoint_s",
        },
    ),
)
TOKENS_RATE = _gauge("clew_tokens_per_second", "Tokens of the step over rollout and update.", "timing/tokens_per_s")
MEMORY = _gauge("clew_driver_peak_memory_bytes", "Largest resident memory of the driver so far.", "timing/rss_bytes")
EPISODES = Metric(
    "clew_episodes_total",
    "counter",
    "Training episodes, by the reason why they ended.",
    _by("reason", "rollout/stop/", {reason: reason for reason in StopReason}),
)
TOKENS = _counter("clew_tokens_total", "Tokens of training episodes: prompts, images, answers.", "rollout/tokens_total")
SAMPLED = _counter("clew_sampled_tokens_total", "Tokens sampled in training episodes.", "rollout/tokens_sampled")

METRICS: tuple[Metric, ...] = (
    STEP,
    STEP_TIMESTAMP,
    STORAGE_FREE,
    STORAGE_SIZE,
    QUEUE,
    EVAL,
    SOLVE_RATE,
    PASS_AT_1,
    REWARD,
    ENTROPY,
    KL,
    LOGPROB_GAP,
    LOSS,
    GRAD_NORM,
    CLIPPED,
    GROUPS,
    ADVANTAGE,
    STEP_SECONDS,
    PHASE_SECONDS,
    TOKENS_RATE,
    MEMORY,
    EPISODES,
    TOKENS,
    SAMPLED,
    _gauge("clew_policy_importance_ratio_max", "Largest ratio of new to old probability.", "policy/ratio_max"),
    _gauge("clew_train_learning_rate", "Learning rate of the step.", "train/learning_rate"),
    _gauge("clew_rollout_turns", "Mean number of turns an episode.", "rollout/turns_mean"),
    _gauge("clew_rollout_answer_tokens", "Mean number of tokens an answer.", "rollout/answer_tokens_mean"),
    _gauge("clew_rollout_cut_ratio", "Share of episodes that a token cap ended.", "rollout/cut_ratio"),
    _gauge("clew_rollout_repetition_ratio", "Share of tokens that repeat the one before.", "rollout/repetition"),
    _gauge("clew_trajectories_per_second", "Episodes over rollout and update.", "timing/trajectories_per_s"),
    _gauge("clew_session", "How often the run was started or continued.", "timing/session"),
    _gauge("clew_session_seconds", "Time since it was started or continued.", "timing/elapsed_s"),
    _counter("clew_counted_episodes_total", "Training episodes that count (no failed machinery).", "train/episodes"),
    _counter("clew_solved_episodes_total", "Training episodes that reached the goal.", "train/solved"),
    _counter("clew_optimizer_updates_total", "Updates of the weights.", "train/updates"),
    _counter("clew_skipped_updates_total", "Updates left out: not finite.", "train/skipped_nonfinite"),
)

_BY_KEY = {key: (metric, labels) for metric in METRICS for key, labels in metric.keys.items()}


def find(key: str) -> tuple[Metric, Mapping[str, str]] | None:
    """The metric that shows a key of ``metrics.jsonl``, or of ``timing.jsonl`` under ``timing/``, and its labels."""
    if key.startswith("eval/") and key.endswith("/solve_rate"):
        suite, _, mode = key.removeprefix("eval/").removesuffix("/solve_rate").rpartition("/")
        return EVAL, {"suite": suite, "mode": mode}
    return _BY_KEY.get(key)


def shown(values: Mapping[str, float]) -> Iterator[tuple[Metric, Mapping[str, str], float]]:
    """What Prometheus is to see of a step."""
    for key, value in values.items():
        if (found := find(key)) is not None:
            yield *found, value
