"""``RUN/report.html``: one file that shows a run to a reader who was not there, and who may doubt it."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from clew.checkpoint import write_file_atomic
from clew.errors import UserError
from clew.report import charts, episodes, figures, story
from clew.report.progress import duration
from clew.report.reader import SAMPLED, Run, Score, number

_PARTS = ("recipe.toml", "metrics.jsonl", "timing.jsonl", "summary.json", "eval", "replays", "adapters", "checkpoints",
          "report.html", ".lock")  # fmt: skip
_TEMPLATES = Path(__file__).parent / "templates"


def write_report(run_dir: Path) -> Path:
    """Writes ``run_dir/report.html`` from what the run directory holds, finished or not.

    The page is self-contained: no network, styles, script, charts and frames inside. Whatever comes from the
    run (tokens, answers, recipe) is escaped, and a content security policy allows no script but its own.

    Args:
        run_dir: a run directory; any of its files may be missing, which the page then says.

    Returns:
        The path of the report. It replaces an older one in a single step.

    Raises:
        UserError: ``run_dir`` is no directory, or holds other things.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is no run directory: give the folder that `clew train` wrote (--run DIR)")
    others = sorted(entry.name for entry in run_dir.iterdir())
    if others and not any((run_dir / name).exists() for name in _PARTS):
        raise UserError(
            f"{run_dir} holds other things ({', '.join(others[:3])}) and nothing of a run: "
            "give the folder that `clew train` wrote"
        )
    page = render(Run.read(run_dir))
    target = run_dir / "report.html"
    write_file_atomic(target, page.encode("utf-8", "replace"))  # a folder's name may hold bytes that are no text
    return target


def render(run: Run) -> str:
    """The page as text."""
    told = story.tell(run)
    before, after = episodes.replays_for(run, told)
    script = (_TEMPLATES / "script.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    confirmed = (told.best[0], told.confirmed) if told.best and told.confirmed else None
    heldout = figures.heldout_chart(run, confirmed)
    sight = story.sight_rows(run, told)
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(draw=charts.draw, whisker=charts.whisker, points=charts.points_json)
    environment.filters.update(percent=charts.percent, interval=figures.interval, b64=_b64)
    return environment.get_template("report.html").render(
        name=run.summary.get("recipe") or run.recipe.get("name") or run.path.resolve().name,
        run_name=run.path.resolve().name,
        style=Markup((_TEMPLATES / "style.css").read_text("utf-8")),  # our own files: trusted
        script=Markup(script),
        script_digest=digest,
        story=told,
        headline=story.headline(told),
        lead=story.lead(told),
        cards=_cards(told),
        limits=story.limits(run, told),
        paired=story.paired(run, told),
        animation=episodes.side_by_side(before, after, told),
        heldout=heldout,
        charts=figures.training_charts(run),
        thinned=figures.thinned(run),
        score_table=story.score_rows(run, told),
        lengths=story.length_rows(run, told),
        sight=sight,
        sight_sentence=story.sight_sentence(sight) if sight else "",
        episodes=_episodes(told, before, after),
        compared=bool(told.best and told.baseline and told.best[0] != told.baseline[0]),
        stops=_stop_reasons(run, told),
        cost=_cost_rows(run.summary.get("cost")),
        facts=_facts(run),
        recipe=run.recipe_text,
        problems=list(dict.fromkeys(run.problems)),
    )


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _cards(told: story.Story) -> list[tuple[str, Score, str, str]]:
    """The headline's scores: (name, score, remark, colour class)."""
    cards: list[tuple[str, Score, str, str]] = []
    if told.baseline:
        name = "Before training" if told.baseline[0] == 0 else "First evaluation"
        cards.append((name, told.baseline[1], f"held out, step {told.baseline[0]}", "before"))
    if told.best and told.evaluations > 1:
        remark = f"held out, step {told.best[0]}, best of {told.evaluations}"
        cards.append(("Best evaluation", told.best[1], remark, "after"))
    if told.confirmed:
        cards.append(("Confirmed", told.confirmed, "same adapter, fresh sampling seeds", "confirmed"))
    if told.unseen:
        cards.append((f"Unseen {told.noun}", told.unseen, "never trained or evaluated on", "confirmed"))
    return cards


def _episodes(told: story.Story, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[episodes.Episode]:
    """Episodes of the best step, or of the baseline where only those were kept."""
    if after and told.best:
        return episodes.chosen(after, told.best[0], told.noun)
    if before and told.baseline:
        return episodes.chosen(before, told.baseline[0], told.noun)
    return []


def _stop_reasons(run: Run, told: story.Story) -> list[tuple[str, int, int]]:
    """Why held-out episodes ended: (reason, count before, count at the best step)."""
    counts = []
    for chosen in (told.baseline, told.best):
        found = run.find(chosen[0], run.heldout, SAMPLED) if chosen else None
        counts.append(Counter(str(e.get("stop_reason", "?")) for e in found.episodes) if found else Counter())
    before, after = counts
    reasons = sorted({*before, *after}, key=lambda r: (-after[r], -before[r], r))
    return [(reason, before[reason], after[reason]) for reason in reasons]


def _cost_rows(cost: object) -> list[tuple[str, str, str]]:
    """(what, figure, formula with its assumptions)."""
    if not isinstance(cost, Mapping):
        return []
    rows = []
    for name, key, unit in (
        ("Device hours", "device_hours", "h"),
        ("Price", "price", str(cost.get("currency", ""))),
        ("Energy", "energy_kwh", "kWh"),
    ):
        value = number(cost.get(key))
        formula = str(cost.get(f"{key}_formula") or cost.get(f"{key.removesuffix('_kwh')}_formula") or "")
        if value is not None or formula:
            figure = f"{charts.plain(value)} {unit}".strip() if value is not None else "\u2013"
            rows.append((name, figure, formula))
    return rows


def _facts(run: Run) -> list[tuple[str, str]]:
    """What was run, on what, and what went by without effect."""
    rows: list[tuple[str, Any]] = [
        ("Device", run.summary.get("device")),
        ("Model", run.setting("model", "path")),
        ("Environment", run.setting("environment", "id")),
        ("Algorithm", run.setting("algorithm", "advantage")),
        ("Trajectories a group", run.setting("algorithm", "group_size")),
        ("Rollout engine", run.setting("rollout", "engine")),
        ("Runtime", run.setting("runtime", "kind")),
        ("Seed", run.setting("training", "seed")),
        ("Steps", run.summary.get("steps", run.metrics[-1]["step"] if run.metrics else None)),
        ("Trajectories", run.summary.get("trajectories")),
        ("Tokens", run.summary.get("tokens")),
    ]
    wall = number(run.summary.get("wall_s"))
    rows.append(("Wall clock", duration(wall) if wall is not None else None))
    trained = [m for m in run.metrics if m.get("step")]
    if any("train/updates" in m for m in trained):
        rows.append(("Steps without an update", sum(m.get("train/updates") == 0 for m in trained)))
        skipped = sum(number(m.get("train/skipped_nonfinite")) or 0 for m in trained)
        rows.append(("Updates skipped, not finite", int(skipped)))
    gaps = [gap for m in trained if (gap := number(m.get("policy/logprob_gap_max"))) is not None]
    if gaps:
        rows.append(("Largest log-probability gap", f"{charts.plain(max(gaps))} nats"))
    memory = [rss for t in run.timing if (rss := number(t.get("rss_bytes"))) is not None]
    if memory:
        rows.append(("Most memory", f"{max(memory) / 2**30:.2f} GiB"))
    versions = [m["policy/version"] for m in run.metrics if m.get("policy/version")]
    if versions:
        rows.append(("Last policy version", versions[-1]))
    return [(name, f"{v:,}" if isinstance(v, int) and name != "Seed" else str(v)) for name, v in rows if v is not None]
