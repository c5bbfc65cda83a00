"""The HTML report: whole, self-contained, escaped, and honest about what is missing."""

from __future__ import annotations

import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_fixture import HOSTILE, make_run

from clew.errors import UserError
from clew.report import story
from clew.report.html import render, write_report
from clew.report.reader import Run

VOID = {"meta", "link", "img", "br", "source", "input", "hr"}


class Page(HTMLParser):
    """Collects tags and text, and checks that every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(whole: Path) -> Page:
    return Page(write_report(whole).read_text("utf-8"))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run, to damage."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def rewrite(path: Path, change) -> None:  # type: ignore[no-untyped-def]
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_every_part_is_there(whole: Path, page: Page) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    best, confirmed = summary["best"], summary["best_confirmed"]
    assert f"best of 16 evaluations, at step {best['step']}, solved {best['solved']} of 64" in page.text.lower()
    assert f"the same adapter solved {confirmed['solved']} of 64" in page.text
    assert f"it solved {confirmed['unseen_solved']} of 64" in page.text
    assert "Best-of-many flatters" in page.text and "Wilson 95 % interval" in page.text
    titles = (
        "What this does not show",
        "Held-out solve rate",
        "Training reward",
        "Entropy",
        "Clip fraction",
        "KL, old to new policy",
        "Log-probability gap",
        "Answer length",
        "Answers cut or repeating",
        "Seconds a step",
        "By length of the shortest path",
        "Does it look?",
        "First maze failed",
        "assumed 65 W a device",
        "learning_rate = 3e-4",
    )
    for title in titles:
        assert title in page.text, title
    for label in ("random", "no-turn-back", "oracle"):
        assert any(label in (a.get("aria-label") or "") for a in page.named("svg"))
    assert "Not finished" not in page.text and "missing or incomplete" not in page.text


def test_is_one_file_without_network(whole: Path, page: Page) -> None:
    text = (whole / "report.html").read_text("utf-8")
    assert len(text.encode()) < 6_000_000
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp", text)
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "object", "base")
        for key in ("src", "srcset", "href"):
            value = attrs.get(key)
            assert value is None or value.startswith(("data:image/", "#")), (tag, value)
    policy = next(a["content"] for a in page.named("meta") if a.get("http-equiv"))
    assert policy and policy.startswith("default-src 'none'")
    assert [p for p in whole.iterdir() if p.suffix == ".part"] == []


def test_is_accessible(page: Page) -> None:
    assert all(attrs.get("alt") for attrs in page.named("img"))
    assert all(attrs.get("aria-label") or attrs.get("aria-hidden") for attrs in page.named("svg"))
    assert all(attrs.get("scope") for attrs in page.named("th"))
    assert dict(page.tags)["html"]["lang"] == "en"


def test_hover_values_are_the_evaluations_own(whole: Path, page: Page) -> None:
    figure = next(a for a in page.named("figure") if a.get("class") == "curve wide")
    points = json.loads(figure["data-points"] or "")
    assert len(points) == 16
    for step, text in points:
        found = json.loads((whole / f"eval/step-{int(step):06d}/heldout.sampled.json").read_text())
        assert f"step {int(step)}: {found['solved']}/64 = {100 * found['solve_rate']:.1f}" in text


def test_hostile_text_stays_text(copy: Path) -> None:
    (copy / "recipe.toml").write_text(f'name = "{HOSTILE}"\n[environment]\nid = "{HOSTILE}"\n')

    def poison(value) -> None:  # type: ignore[no-untyped-def]
        value["recipe"] = value["device"] = value["cost"]["price_formula"] = HOSTILE

    rewrite(copy / "summary.json", poison)
    reference = copy / "eval/references/heldout.random.json"
    rewrite(reference, lambda v: v.update(mode=HOSTILE))
    best = json.loads((copy / "summary.json").read_text())["best"]["step"]
    rewrite(copy / f"eval/step-{best:06d}/heldout.sampled.json",
            lambda v: v["episodes"][0].update(stop_reason=HOSTILE))  # fmt: skip
    path = copy / f"replays/step-{best:06d}/heldout.sampled.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["stop_reason"] = line["policy_version"] = HOSTILE
        line["turns"][0] |= {"answer": HOSTILE, "feedback": HOSTILE, "frame": '"><script>alert(1)</script>'}
        line["tokens"][0]["t"] = line["tokens"][3]["t"] = HOSTILE
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_report(copy).read_text("utf-8")
    page = Page(text)
    assert "<img src=x" not in text
    assert len(page.named("script")) == 1
    assert not any(key.startswith("on") for _, attrs in page.tags for key in attrs)
    assert page.text.count(HOSTILE) > 10
    assert "frame unreadable" in page.text


def test_an_empty_directory_says_so(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path).read_text("utf-8"))
    for words in ("No evaluation yet", "Not finished", "summary.json is not there",
                  "metrics.jsonl is not there", "no replays to show", "no sight test"):  # fmt: skip
        assert words in page.text, words


def test_no_directory_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run directory"):
        write_report(tmp_path / "nothing")


@pytest.mark.parametrize(
    "missing",
    ["summary.json", "recipe.toml", "metrics.jsonl", "timing.jsonl", "eval", "eval/references", "replays"],
)
def test_any_part_may_be_missing(copy: Path, missing: str) -> None:
    target = copy / missing
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink()
    page = Page(write_report(copy).read_text("utf-8"))
    assert missing.split("/")[-1] in page.text
    assert "missing or incomplete" in page.text


def test_a_run_in_progress(copy: Path) -> None:
    (copy / "summary.json").unlink()
    for path in (copy / "eval").glob("step-*"):
        if path.name > "step-000050":
            shutil.rmtree(path)
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)[:54]
    (copy / "metrics.jsonl").write_text("".join(lines) + '{"step": 54, "train/solv')
    (copy / "eval/step-000050/heldout.greedy.json").write_text('{"step": 50, "solved"')
    page = Page(write_report(copy).read_text("utf-8"))
    assert "53 of 150 steps are done" in page.text
    assert "metrics.jsonl: 1 damaged line left out" in page.text
    assert "heldout.greedy.json can't be read" in page.text
    assert "has not been played again with fresh seeds" in page.text


def test_only_the_evaluation_before_training(copy: Path) -> None:
    (copy / "summary.json").unlink()
    (copy / "metrics.jsonl").unlink()
    for path in (copy / "eval").glob("step-*"):
        if path.name != "step-000000":
            shutil.rmtree(path)
    page = Page(write_report(copy).read_text("utf-8"))
    assert "held-out mazes solved before training" in page.text
    assert "There is no evaluation after training yet" in page.text


def test_steps_without_numbers_do_not_break_curves(copy: Path) -> None:
    rows = [{"step": s, "policy/entropy": v, "train/solve_rate": None} for s, v in
            enumerate((math.nan, 1.0, math.inf, 0.5), 1)]  # fmt: skip
    (copy / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    page = Page(write_report(copy).read_text("utf-8"))
    assert any("entropy goes from 1.00 at step 2 to 0.500 at step 4" in (a.get("aria-label") or "")
               for a in page.named("svg"))  # fmt: skip


def test_a_long_run_stays_small(copy: Path) -> None:
    rows = [{"step": s, "policy/entropy": 1 / s, "train/solve_rate": 0.5} for s in range(1, 4_001)]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tokens = [{"t": f"word{i} ", "m": 1, "lp": -0.1} for i in range(10_000)]
    for path in (copy / "replays").glob("*/heldout.sampled.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line | {"tokens": tokens}) + "\n" for line in lines[:2]))
    text = write_report(copy).read_text("utf-8")
    assert len(text.encode()) < 6_000_000
    assert "mean of 10 steps" in text and "6000 tokens left out here" in text


def verdict(before: tuple[int, list[float]], after: tuple[int, list[float]]) -> str:
    run = Run(Path())
    scores = [{"step": s, "solved": n, "total": 64, "ci95": ci} for s, (n, ci) in ((0, before), (9, after))]
    run.summary = {"baseline": scores[0], "best": scores[1], "best_confirmed": scores[1]}
    return story.headline(story.tell(run))


def test_the_headline_claims_only_what_intervals_allow() -> None:
    assert verdict((10, [0.1, 0.25]), (50, [0.7, 0.9])) == "From 10 to 50 of 64 held-out mazes solved"
    assert verdict((10, [0.1, 0.25]), (15, [0.2, 0.35])).startswith("No clear change")
    assert verdict((50, [0.7, 0.9]), (10, [0.1, 0.25])).startswith("Worse than before")


def test_a_blind_agent_is_called_blind(whole: Path) -> None:
    run = Run.read(whole)
    normal = run.summary["sight"]["normal"]
    run.summary["sight"]["blank"] = dict(normal)
    page = Page(render(run))
    assert "With blank frames the agent does not solve clearly fewer" in page.text


def test_pairs_are_counted_on_the_same_mazes(whole: Path) -> None:
    run = Run.read(whole)
    told = story.tell(run)
    counts = story.paired(run, told)
    assert counts is not None and told.baseline and told.best
    assert counts["won"] + counts["both"] == told.best[1].solved
    assert counts["lost"] + counts["both"] == told.baseline[1].solved
    assert sum(counts.values()) == 64
