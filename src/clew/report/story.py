"""What a run showed, in numbers and in plain sentences, with the limits of the claim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clew.report.charts import percent
from clew.report.reader import CONFIRM, SAMPLED, Run, Score, number


@dataclass(frozen=True)
class Row:
    """One line of a table of scores. ``kind`` is ``reference``, ``before``, ``after`` or ``confirmed``."""

    name: str
    score: Score
    kind: str


@dataclass(frozen=True)
class Story:
    """The result of a run; each part is None where it is not known (yet)."""

    noun: str
    baseline: tuple[int, Score] | None
    best: tuple[int, Score] | None
    confirmed: Score | None
    unseen: Score | None
    final: tuple[int, Score] | None
    evaluations: int
    finished: bool
    steps_done: int
    steps_planned: int | None

    @property
    def quoted(self) -> Score | None:
        """The number to quote: the confirmed one, else the best."""
        return self.confirmed or (self.best[1] if self.best else None)


def tell(run: Run) -> Story:
    """Gathers the result, from the summary where it has it, else from the evaluation files."""
    curve = run.curve()
    environment = f"{run.setting('environment', 'id')} {run.heldout}"
    best = max(curve, key=lambda e: e.score.rate, default=None)  # the earliest among equals
    steps = int(run.metrics[-1]["step"]) if run.metrics else 0
    planned = run.setting("training", "steps")
    confirmed = run.summary.get("best_confirmed")
    last = curve[-1] if len(curve) > 1 else None
    planned_steps = planned if isinstance(planned, int) else None
    baseline_step = _step_of(run, "baseline", curve[0] if curve else None)
    best_part = _step_of(run, "best", best)
    confirm = run.score(confirmed)
    if confirm is None and best_part and (found := run.find(best_part[0], run.heldout, CONFIRM)):
        confirm = found.score
    return Story(
        noun="mazes" if "maze" in environment.lower() or "None" in environment else "tasks",
        baseline=baseline_step,
        best=best_part,
        confirmed=confirm,
        unseen=run.score(confirmed, "unseen_"),
        final=_step_of(run, "final", last),
        evaluations=len(curve),
        finished=bool(run.summary) and (planned_steps is None or steps >= planned_steps or not run.metrics),
        steps_done=steps,
        steps_planned=planned_steps,
    )


def headline(story: Story) -> str:
    """The result in one line, no better than it is."""
    if story.baseline is None or story.quoted is None:
        return "No evaluation yet"
    (_, before), after = story.baseline, story.quoted
    if story.evaluations < 2 and story.confirmed is None:
        return f"{before.solved} of {before.total} held-out {story.noun} solved before training"
    change = f"{before.solved} to {after.solved} of {after.total} held-out {story.noun}"
    if before.total != after.total:
        change = f"{percent(before.rate)} to {percent(after.rate)} of held-out {story.noun}"
    if before.below(after):
        return f"From {change} solved"
    if after.below(before):
        return f"Worse than before: {change} solved"
    return f"No clear change: {change} solved"


def lead(story: Story) -> list[str]:
    """The result in a few sentences."""
    if story.baseline is None or story.best is None:
        return ["This run has not been evaluated yet, so nothing can be said about what was learned."]
    step0, before = story.baseline
    step1, best = story.best
    when = "Before training" if step0 == 0 else f"At step {step0}, the first evaluation,"
    out = [f"{when} the agent solved {_in_words(before, f' held-out {story.noun}')}."]
    if story.evaluations < 2 and step0 == step1:
        return [*out, "There is no evaluation after training yet."]
    out.append(
        f"The best of {story.evaluations} evaluations, at step {step1}, solved {_in_words(best)}. "
        f"Best-of-many flatters: the luckiest evaluation is picked along with the most skilled."
    )
    if step0 == step1:
        out.append("No evaluation after training was better than the one before it.")
    if story.confirmed:
        out.append(
            f"Played again with fresh sampling seeds, the same adapter solved {_in_words(story.confirmed)}: "
            f"this is the number to quote."
        )
    else:
        out.append("The best result has not been played again with fresh seeds, so take it as too high.")
    if story.unseen:
        out.append(
            f"On {story.unseen.total} unseen {story.noun}, never used in training or in any earlier "
            f"evaluation, it solved {_in_words(story.unseen)}."
        )
    else:
        out.append(f"It has not been tried on unseen {story.noun}.")
    return out


def limits(run: Run, story: Story) -> list[str]:
    """What the result does not show. Written for a reader who doubts it."""
    out: list[str] = []
    if not story.finished:
        planned = f" of {story.steps_planned}" if story.steps_planned else ""
        out.append(f"The run is not finished: {story.steps_done}{planned} steps are done. All figures may change.")
    seed = run.setting("training", "seed")
    seed_text = f" (seed {seed})" if seed is not None else ""
    out.append(
        f"This is one training run{seed_text}. How much another seed would differ is not known from here; "
        f"intervals cover the draw of {story.noun} and sampling, not training."
    )
    if story.evaluations > 1 and story.best:
        total = story.best[1].total
        again = f"The confirmation samples new answers, yet on the same {story.noun}. " if story.confirmed else ""
        out.append(
            f"The step was chosen by looking at {story.evaluations} evaluations of the same {total} "
            f"{story.noun}. {again}Only {story.noun} never evaluated before are free of that choice."
        )
    if story.quoted and story.quoted.ci95:
        low, high = story.quoted.ci95
        out.append(
            f"With {story.quoted.total} {story.noun} the 95 % interval still spans {100 * low:.1f} to "
            f"{100 * high:.1f} %. Two results whose intervals overlap should not be ranked; "
            f'"clearly" on this page means that they do not overlap.'
        )
    temperature = run.setting("rollout", "temperature")
    heat = f" at temperature {temperature:g}" if number(temperature) is not None else ""
    out.append(f"One sampled attempt a {story.noun[:-1]}{heat}. Greedy decoding may solve more or fewer.")
    if sentence := _greedy_before(run, story):
        out.append(sentence)
    out += [sentence for policy in ("no-turn-back", "oracle") if (sentence := _against(run, story, policy))]
    out.append(_sight_limit(run, story))
    out.append(
        f"Unseen {story.noun} come from the same generator as those trained on. Nothing here says how the "
        f"agent does in another environment."
    )
    return out


def score_rows(run: Run, story: Story) -> list[tuple[str, list[Row]]]:
    """The evaluation table: for each suite the reference policies, then each mode before and after."""
    suites = sorted({e.suite for e in (*run.evaluations, *run.references)}, key=lambda s: (s != run.heldout, s))
    modes = sorted({e.mode for e in run.evaluations}, key=lambda m: (m != SAMPLED, m != CONFIRM, m))
    shown_apart = ("blank", "swapped") if sight_rows(run, story) else ()
    before = story.baseline[0] if story.baseline else None
    best = story.best[0] if story.best else None
    final = story.final[0] if story.final else None
    table = []
    for suite in suites:
        refs = sorted((e for e in run.references if e.suite == suite), key=lambda e: e.score.rate)
        rows = [Row(e.mode, e.score, "reference") for e in refs]
        for mode in modes:
            for step, word in ((before, "before"), (best, "best"), (final, "last")):
                if step is None or (word != "before" and step == before) or (word == "last" and step == best):
                    continue
                if mode in shown_apart and (suite, step) == (run.heldout, best):
                    continue
                found = run.find(step, suite, mode)
                if found:
                    kind = "before" if word == "before" else "confirmed" if mode == CONFIRM else "after"
                    name = "sampled, fresh seeds" if mode == CONFIRM else mode
                    rows.append(Row(f"{name}, {word} (step {step})", found.score, kind))
        if rows:
            table.append((suite, rows))
    return table


def length_rows(run: Run, story: Story) -> list[tuple[int, Score | None, Score | None]]:
    """By shortest path: (moves, score before, score of the best step) on the held-out suite."""
    parts: list[dict[int, tuple[int, int]]] = []
    for chosen in (story.baseline, story.best):
        found = run.find(chosen[0], run.heldout, SAMPLED) if chosen else None
        parts.append(found.by_path_length if found else {})
    before, after = parts
    return [(n, run.score(_pair(before.get(n))), run.score(_pair(after.get(n)))) for n in sorted({*before, *after})]


def sight_rows(run: Run, story: Story) -> list[tuple[str, str, Score]]:
    """The sight test: (condition, what it means, score), from the summary or the best step's evaluations."""
    meaning = (
        ("normal", SAMPLED, "the true frames"),
        ("blank", "blank", "every frame replaced by an empty one"),
        ("swapped", "swapped", "frames of another episode shown instead"),
    )
    sight = run.summary.get("sight")
    rows = []
    for name, mode, text in meaning:
        score = run.score(sight.get(name)) if isinstance(sight, Mapping) else None
        if score is None and story.best and (found := run.find(story.best[0], run.heldout, mode)):
            score = found.score
        if score:
            rows.append((name, text, score))
    return rows if len(rows) > 1 else []


def sight_sentence(rows: list[tuple[str, str, Score]]) -> str:
    """Whether the sight test shows that the agent uses its eyes."""
    scores = {name: score for name, _, score in rows}
    normal = scores.get("normal")
    others = [(n, s) for n, s in scores.items() if n != "normal"]
    if normal is None or not others:
        return "Not complete."
    if all(s.below(normal) for _, s in others):
        return "Without the true frames the agent solves clearly fewer: it uses what it sees."
    same = " and ".join(f"{n} frames" for n, s in others if not s.below(normal))
    return f"With {same} the agent does not solve clearly fewer: this test does not show that it looks."


def paired(run: Run, story: Story) -> dict[str, int] | None:
    """The same tasks before and at the best step: counts of won, lost, both, neither; None if unknown."""
    if not story.baseline or not story.best or story.baseline[0] == story.best[0]:
        return None
    first = run.find(story.baseline[0], run.heldout, SAMPLED)
    second = run.find(story.best[0], run.heldout, SAMPLED)
    if not first or not second:
        return None
    old, new = first.successes(), second.successes()
    common = [k for k in old if k in new]
    if not common:
        return None
    names = {(False, True): "won", (True, False): "lost", (True, True): "both", (False, False): "neither"}
    counts = dict.fromkeys(names.values(), 0)
    for key in common:
        counts[names[old[key], new[key]]] += 1
    return counts


def _step_of(run: Run, key: str, fallback: Any) -> tuple[int, Score] | None:
    entry = run.summary.get(key)
    score = run.score(entry)
    if score is not None and isinstance(entry, Mapping) and isinstance(entry.get("step"), int):
        return entry["step"], score
    return (fallback.step or 0, fallback.score) if fallback else None


def _pair(counts: tuple[int, int] | None) -> dict[str, int] | None:
    return {"solved": counts[0], "total": counts[1]} if counts else None


def _greedy_before(run: Run, story: Story) -> str | None:
    """Says so where the agent could do before training, greedily, what training made it do when it samples."""
    greedy = run.find(0, run.heldout, "greedy")
    if greedy is None or story.quoted is None or greedy.score.below(story.quoted):
        return None
    return (
        f"Greedy decoding solved {greedy.score.solved} of {greedy.score.total} before training already: what was "
        "learned here is to do reliably what the model could do, not to plan anew."
    )


def _in_words(score: Score, what: str = "") -> str:
    return f"{score.solved} of {score.total}{what} ({percent(score.rate)})"


def _against(run: Run, story: Story, policy: str) -> str | None:
    """How the result stands to a reference policy that does not look (no-turn-back) or knows all (oracle)."""
    found = next((e for e in run.references if e.suite == run.heldout and e.mode == policy), None)
    if found is None or story.quoted is None:
        return None
    if policy == "oracle":
        if found.score.solved == found.score.total:
            return None
        return (
            f"Not all {story.noun} can be solved within the turn limit: an oracle solves "
            f"{found.score.solved} of {found.score.total}."
        )
    what = "A random walk that merely never turns back solves"
    verdict = (
        "the agent is clearly better"
        if found.score.below(story.quoted)
        else "the agent is not clearly better than that"
    )
    return f"{what} {_in_words(found.score)}; {verdict}."


def _sight_limit(run: Run, story: Story) -> str:
    rows = sight_rows(run, story)
    if not rows:
        return "There is no sight test: whether the agent uses the frames is not shown."
    sentence = sight_sentence(rows)
    return f"Sight test: {sentence[0].lower()}{sentence[1:]}"
