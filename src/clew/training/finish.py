"""After the last step: the best step is confirmed, sight is tested, and the run is summed up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from clew.checkpoint import DamagedCheckpoint, verify, write_file_atomic
from clew.errors import UserError
from clew.evaluation.evaluate import Result
from clew.evaluation.evaluator import Evaluator
from clew.policy.adapter import Adapter, StoredAdapter
from clew.recipe import Recipe
from clew.report.cost import cost
from clew.rollout.rollouts import Rollouts
from clew.training.run_state import RunState, read_jsonl


def finish(
    recipe: Recipe,
    run_dir: Path,
    evaluator: Evaluator,
    rollouts: Rollouts,
    final: Adapter | StoredAdapter,
    state: RunState,
    session_began: float,
) -> dict[str, Any]:
    """Confirms, tests and sums up; writes summary.json last and returns it."""
    best = state.best_step
    assert best is not None, "the last step is always evaluated"
    rollouts.load(final if best == state.step else _read_best(run_dir / "adapters" / f"step-{best:06d}"))
    again, unseen = evaluator.confirm(best)
    sight = evaluator.sight(best) if recipe.evaluation.sight else {}
    lines = read_jsonl(run_dir / "metrics.jsonl", "step")
    trained = [line for line in lines if line["step"] > 0]
    wall_s = _wall_seconds(run_dir, state.session, time.monotonic() - session_began)
    summary = {
        "recipe": recipe.name,
        "seed": recipe.training.seed,
        "baseline": _counts(state.evaluations.get(0)),
        "best": _counts(state.evaluations[best]),
        "best_confirmed": {
            "solved": again.solved,
            "total": again.total,
            "ci95": list(again.ci95),
            "unseen_solved": unseen.solved,
            "unseen_total": unseen.total,
            "unseen_ci95": list(unseen.ci95),
        },
        "final": _counts(state.evaluations[state.step]),
        "references": _read_all(run_dir / "eval" / "references"),
        "suites": [
            row
            for folder in sorted((run_dir / "eval").glob("step-*"))
            for row in _read_all(folder)
            if row["mode"] in ("sampled", "greedy") and row["step"] in (0, state.step)
        ],
        "sight": {"normal": _pair(again), **{name: _pair(result) for name, result in sight.items()}} if sight else None,
        "steps": state.step,
        "trajectories": sum(line["train/episodes"] for line in trained),
        "tokens": sum(line["rollout/tokens_total"] for line in trained),
        "wall_s": wall_s,
        "device": rollouts.device,
        "cost": cost(
            wall_s,
            rollouts.devices,
            recipe.cost.device_hour_price,
            recipe.cost.currency,
            recipe.cost.device_watts,
        ),
    }
    write_file_atomic(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def _wall_seconds(run_dir: Path, session: int, this_session: float) -> float:
    """Seconds of all sessions of this run together; of an interrupted one, up to its last finished step."""
    elapsed: dict[int, float] = {}
    for line in read_jsonl(run_dir / "timing.jsonl", "session", "elapsed_s"):
        elapsed[line["session"]] = max(elapsed.get(line["session"], 0.0), line["elapsed_s"])
    elapsed[session] = this_session
    return sum(elapsed.values())


def _counts(brief: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if brief is None else {k: brief[k] for k in ("step", "solved", "total", "ci95")}


def _pair(result: Result) -> dict[str, int]:
    return {"solved": result.solved, "total": result.total}


def _read_all(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(folder.glob("*.json")):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            rows.append({k: found[k] for k in ("suite", "mode", "step", "solved", "total", "ci95")})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is damaged ({type(error).__name__}): restore it from a copy, or remove it to go on without it"
            ) from error
    return rows


def _read_best(folder: Path) -> StoredAdapter:
    try:
        facts = verify(folder).facts
    except DamagedCheckpoint as damage:
        wrong = "; ".join(damage.problems[:3])
        raise UserError(
            f"{folder}, the adapter of the best step, is damaged ({wrong}), and the run can't be finished without it: "
            "restore it from a copy, or start again with --fresh"
        ) from damage
    return StoredAdapter(facts["adapter"], folder)
