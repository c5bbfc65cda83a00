"""Reads a run directory for the report; what is missing or damaged becomes a sentence, never a failure."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clew.envs.suites import file_stem

SAMPLED = "sampled"
CONFIRM = "sampled-confirm"


@dataclass(frozen=True)
class Score:
    """``solved`` of ``total`` episodes, with the Wilson 95 % interval as fractions where it is known."""

    solved: int
    total: int
    ci95: tuple[float, float] | None = None

    @property
    def rate(self) -> float:
        """Fraction solved (0 for an empty set)."""
        return self.solved / self.total if self.total else 0.0

    def below(self, other: Score) -> bool:
        """Whether this interval lies wholly under the other's (False where one is unknown)."""
        return self.ci95 is not None and other.ci95 is not None and self.ci95[1] < other.ci95[0]


@dataclass(frozen=True)
class Evaluation:
    """One file of ``eval/``: a suite played in a mode at a step (None for a reference policy)."""

    step: int | None
    suite: str
    mode: str
    score: Score
    by_path_length: dict[int, tuple[int, int]]
    episodes: tuple[Mapping[str, Any], ...]

    def successes(self) -> dict[str, bool]:
        """Task identity (content hash, else seed) -> whether its episode was a success."""
        return {task_key(e): bool(e.get("success")) for e in self.episodes}


@dataclass
class Run:
    """Everything a run directory holds, as far as it is there.

    Attributes:
        problems: one sentence for each thing that is missing or unreadable, for the reader of the report.
    """

    path: Path
    recipe_text: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    timing: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    references: list[Evaluation] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Run:
        """Reads everything but the replays, which are large and read when asked for."""
        run = cls(path)
        run._read_recipe()
        run.metrics = run._read_steps("metrics.jsonl", "no training step has finished")
        run.timing = run._read_steps("timing.jsonl", "no times are known")
        run._read_evaluations()
        if (path / "summary.json").is_file():
            run.summary = run._read_object(path / "summary.json") or {}
        else:
            run.problems.append("summary.json is not there: the run has not finished.")
        return run

    def setting(self, table: str, key: str) -> Any:
        """A value of the recipe, or None."""
        part = self.recipe.get(table)
        return part.get(key) if isinstance(part, dict) else None

    @property
    def heldout(self) -> str | None:
        """The held-out suite: ``heldout`` if there is one, else the suite sampled at the most steps."""
        names = [e.suite for e in self.evaluations if e.mode == SAMPLED]
        if not names or "heldout" in names:
            return "heldout" if names else None
        return max(sorted(set(names)), key=names.count)

    def curve(self, suite: str | None = None) -> list[Evaluation]:
        """Sampled evaluations of a suite (the held-out one by default), by step."""
        suite = suite or self.heldout
        found = [e for e in self.evaluations if e.suite == suite and e.mode == SAMPLED and e.step is not None]
        return sorted(found, key=lambda e: e.step or 0)

    def find(self, step: int | None, suite: str | None, mode: str) -> Evaluation | None:
        """The evaluation of this step, suite and mode, if there is one."""
        wanted = (step, suite, mode)
        return next((e for e in self.evaluations if (e.step, e.suite, e.mode) == wanted), None)

    def score(self, entry: object, prefix: str = "") -> Score | None:
        """A score from an object with ``solved`` and ``total`` (keys may carry a prefix), or None.

        A Wilson interval depends on the counts alone, so an object without one borrows it from any
        evaluation that has the same counts.
        """
        score = _score(entry, prefix)
        if score is None or score.ci95 is not None:
            return score
        known: list[Score | None] = [e.score for e in (*self.evaluations, *self.references)]
        rows = self.summary.get("suites")
        known += [_score(row) for row in rows] if isinstance(rows, list) else []
        same = (k for k in known if k and k.ci95 and (k.solved, k.total) == (score.solved, score.total))
        return next(same, score)

    def replays(self, step: int | None, suite: str | None, mode: str = SAMPLED) -> list[dict[str, Any]]:
        """The recorded episodes of one evaluation, in the order of the suite; empty if there are none."""
        if step is None or suite is None:
            return []
        path = self.path / "replays" / f"step-{step:06d}" / f"{file_stem(suite)}.{mode}.jsonl"
        if not path.is_file():
            self.problems.append(f"{path.relative_to(self.path)} is not there: its episodes can't be shown.")
            return []
        return list(self._lines(path))

    def _read_recipe(self) -> None:
        path = self.path / "recipe.toml"
        if not path.is_file():
            self.problems.append("recipe.toml is not there: settings are unknown.")
            return
        self.recipe_text = path.read_text("utf-8", errors="replace")
        try:
            self.recipe = tomllib.loads(self.recipe_text)
        except tomllib.TOMLDecodeError as error:
            self.problems.append(f"recipe.toml can't be read: {error}.")

    def _read_steps(self, name: str, meaning: str) -> list[dict[str, Any]]:
        path = self.path / name
        if not path.is_file():
            self.problems.append(f"{name} is not there: {meaning}.")
            return []
        rows = {row["step"]: row for row in self._lines(path) if isinstance(row.get("step"), int)}
        return [rows[step] for step in sorted(rows)]

    def _read_evaluations(self) -> None:
        for path in sorted((self.path / "eval").glob("*/*.json")):
            raw = self._read_object(path)
            if raw is None:
                continue
            evaluation = _evaluation(raw)
            if evaluation is None:
                self.problems.append(f"{path.relative_to(self.path)} holds no counts and is left out.")
            elif path.parent.name == "references":
                self.references.append(evaluation)
            else:
                self.evaluations.append(evaluation)
        if not self.evaluations:
            self.problems.append("eval/ holds no evaluation yet.")
        elif not self.references:
            self.problems.append("eval/references/ holds nothing: there is no random policy to compare with.")

    def _read_object(self, path: Path) -> dict[str, Any] | None:
        try:
            value = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            self.problems.append(f"{path.relative_to(self.path)} can't be read and is left out ({error}).")
            return None
        if not isinstance(value, dict):
            self.problems.append(f"{path.relative_to(self.path)} is not an object and is left out.")
            return None
        return value

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        bad = 0
        with path.open("r", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    value = json.loads(line)
                except ValueError:
                    value = None
                if isinstance(value, dict):
                    yield value
                elif line.strip():
                    bad += 1
        if bad:
            noun = "line" if bad == 1 else "lines"
            self.problems.append(f"{path.relative_to(self.path)}: {bad} damaged {noun} left out.")


def task_key(entry: Mapping[str, Any]) -> str:
    """What tells a task from another: its content hash, or its seed where no hash was kept."""
    return str(entry.get("content_hash") or entry.get("seed"))


def number(value: object) -> float | None:
    """The value as a finite float, or None."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _score(entry: object, prefix: str = "") -> Score | None:
    if not isinstance(entry, Mapping):
        return None
    solved, total = number(entry.get(f"{prefix}solved")), number(entry.get(f"{prefix}total"))
    if solved is None or total is None or not 0 <= solved <= total:
        return None
    ci = entry.get(f"{prefix}ci95")
    ends = [number(v) for v in ci] if isinstance(ci, list | tuple) else []
    both = len(ends) == 2 and ends[0] is not None and ends[1] is not None
    return Score(int(solved), int(total), (ends[0], ends[1]) if both else None)  # type: ignore[arg-type]


def _evaluation(raw: Mapping[str, Any]) -> Evaluation | None:
    score = _score(raw)
    if score is None:
        return None
    lengths: dict[int, tuple[int, int]] = {}
    given = raw.get("by_path_length")
    for key, value in given.items() if isinstance(given, Mapping) else ():
        part = _score(value)
        if part is not None and str(key).isdigit():
            lengths[int(key)] = (part.solved, part.total)
    episodes = raw.get("episodes")
    kept = tuple(e for e in episodes if isinstance(e, Mapping)) if isinstance(episodes, list) else ()
    step = raw.get("step")
    return Evaluation(
        step if isinstance(step, int) else None,
        str(raw.get("suite", "?")),
        str(raw.get("mode", "?")),
        score,
        dict(sorted(lengths.items())),
        kept,
    )
