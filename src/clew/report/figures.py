"""Which curves a report shows, and from which keys of ``metrics.jsonl`` and ``timing.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clew.report.charts import Chart, Point, Scale, Series, percent, thin
from clew.report.reader import Run, Score, number

_Spec = tuple[str, str, Scale, tuple[tuple[str, str], ...], str]
# title, unit, scale of the axis, ((key, name of the line), ...), how to read it
_TRAINING: tuple[_Spec, ...] = (
    ("Training solve rate", "", "whole", (("train/solve_rate", "solved"),),
     "Other mazes at every step, so it moves more than the held-out curve."),
    ("Training reward", "a trajectory", "plain", (("train/reward_mean", "reward"),),
     "Mean over the step's trajectories; not the solve rate."),
    ("Entropy", "nats a token", "plain", (("policy/entropy", "entropy"),),
     "Near 0 the policy no longer explores."),
    ("KL, old to new policy", "nats a token", "plain",
     (("policy/kl", "one step"), ("policy/kl_base", "from the base")), "How far updates move the policy."),
    ("Log-probability gap", "nats", "plain",
     (("policy/logprob_gap_max", "largest"), ("policy/logprob_gap_mean", "mean")),
     "Engine against trainer on the same tokens; should be rounding only."),
    ("Clip fraction", "", "percent", (("policy/clip_fraction", "clipped"),),
     "Tokens with a ratio out of range."),
    ("Answer length", "tokens an answer", "plain", (("rollout/answer_tokens_mean", "tokens"),), ""),
    ("Answers cut or repeating", "", "percent",
     (("rollout/cut_ratio", "cut"), ("rollout/repetition", "repeating")),
     "Cut at the token limit; near 100 % the reward is silently 0."),
    ("Turns an episode", "turns", "plain", (("rollout/turns_mean", "turns"),), ""),
    ("Gradient norm", "", "plain", (("train/grad_norm", "norm"),), ""),
)  # fmt: skip
_TIMES: tuple[_Spec, ...] = (
    ("Seconds a step", "s", "plain",
     (("step_s", "all"), ("rollout_s", "rollout"), ("train_s", "training")),
     "All includes evaluation and saving."),
)  # fmt: skip


def heldout_chart(run: Run, confirmed: tuple[int, Score] | None) -> Chart:
    """Held-out solve rate by step with its 95 % band, reference policies and the confirmed result.

    Where evaluation files are missing the fractions of ``metrics.jsonl`` are drawn, without a band.
    """
    curve = run.curve()
    points: list[Point] = [(e.step or 0, e.score.rate) for e in curve]
    band = [(e.step or 0, *e.score.ci95) for e in curve if e.score.ci95]
    texts = [(float(e.step or 0), f"step {e.step}: {score_text(e.score)}") for e in curve]
    note = ""
    if not curve:
        points = _points(run.metrics, "eval/all/pass_at_1")
        texts = [(s, f"step {s:g}: {percent(v)}") for s, v in points]
        note = "Drawn from metrics.jsonl; the counts are missing, so there is no interval."
    references = [(e.mode, e.score.rate) for e in run.references if e.suite == run.heldout]
    flag = None
    if confirmed and confirmed[1].ci95:
        flag = (confirmed[0], confirmed[1].rate, *confirmed[1].ci95)
    series = [Series("solved", points, "a", dots=len(points) <= 60)]
    return Chart(
        "Held-out solve rate",
        "",
        series,
        band,
        references,
        flag,
        readouts=texts,
        note=note,
        scale="whole",
    )


def training_charts(run: Run) -> list[Chart]:
    """Small charts of training; those without any value are left out."""
    made = [_chart(run.metrics, *spec) for spec in _TRAINING]
    made.insert(2, _equal_groups(run.metrics))
    made += [_chart(run.timing, *spec) for spec in _TIMES]
    return [chart for chart in made if not chart.empty]


def thinned(run: Run) -> int | None:
    """How many steps one drawn point stands for, if more than one."""
    most = max(len(run.metrics), len(run.timing))
    width = -(-most // 400)
    return width if width > 1 else None


def score_text(score: Score) -> str:
    """``62/64 = 96.9 % (89.3-99.1 %)``."""
    text = f"{score.solved}/{score.total} = {percent(score.rate)}"
    return f"{text} ({interval(score)})" if score.ci95 else text


def interval(score: Score) -> str:
    """The 95 % interval in per cent, or a dash."""
    if score.ci95 is None:
        return "\u2013"
    return f"{100 * score.ci95[0]:.1f}\u2013{100 * score.ci95[1]:.1f}\u202f%"


def _chart(
    rows: Sequence[Mapping[str, Any]],
    title: str,
    unit: str,
    scale: Scale,
    lines: tuple[tuple[str, str], ...],
    note: str,
) -> Chart:
    series = [Series(name, thin(_points(rows, key)), css) for (key, name), css in zip(lines, "abc", strict=False)]
    return Chart(title, unit, [s for s in series if s.points], scale=scale, note=note)


def _equal_groups(rows: Sequence[Mapping[str, Any]]) -> Chart:
    points: list[Point] = []
    for row in rows:
        equal, used = number(row.get("train/groups_equal")), number(row.get("train/groups_used"))
        if equal is not None and used is not None and equal + used > 0:
            points.append((float(row["step"]), equal / (equal + used)))
    note = "All trajectories of the maze got the same reward: nothing to learn from it."
    return Chart("Groups without a signal", "", [Series("equal", thin(points))], scale="whole", note=note)


def _points(rows: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    found = [(float(row["step"]), number(row.get(key))) for row in rows]
    return [(step, value) for step, value in found if value is not None]
