"""The pages: every `clew` call in them is possible, every link leads somewhere, every file they name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from docs_commands import blocks, calls, calls_of, fault

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_call_is_possible(page: Path) -> None:
    assert not [f"clew {' '.join(call)}: {wrong}" for call in calls(page) if (wrong := fault(call)) is not None]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("clew train laptop training.steps=50 --run x", None),
        ("kubectl exec $HEAD -- clew export RUN --step best --to $PLACE | tail", None),
        ("FLAG=1 clew train laptop && clew eval --run RUN", None),
        ("clew eval --run DIR | --model PATH [--adapter PATH] [key.path=value ...]", None),
        ("clew trian laptop", "clew has no command trian"),
        ("clew train laptop && clew report RUN --html", "clew report has no option --html"),
        ("clew cluster plan laptop training.step=1", "clew cluster plan: a recipe has no key training.step "),
        ("clew cluster draw", "clew cluster has no command draw"),
    ],
)
def test_a_wrong_call_is_found(line: str, expected: str | None) -> None:
    wrong = [text for call in calls_of(line) if (text := fault(call)) is not None]
    assert list(calls_of(line)) and (
        not wrong if expected is None else len(wrong) == 1 and wrong[0].startswith(expected)
    )


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), f"{target} is not there"
        assert not anchor or anchor in anchors(there), f"{target}: {there.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"(?<![\w/.])((?:src|docs|tests|scripts|examples|benchmarks)/[\w./-]*\w)", text)
    assert not [name for name in named if not (ROOT / name).exists()]
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.M)) <= made


def test_the_walk_through_says_what_can_be_rehearsed() -> None:
    found = [block.kind for block in blocks(ROOT / "docs/hyperpod.md") if block.kind]
    assert set(found) == {"sh values", "sh rehearse", "sh aws"} and found.count("sh rehearse") >= 4


def test_what_fails_in_the_rehearsal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import rehearse_hyperpod

    page = tmp_path / "page.md"
    page.write_text(
        "## 1\n```sh values\nexport X=1\n```\n```sh rehearse\ntest $X = 1\ntest $X = 2\n```\n"
        "## 2\n```sh aws\nclew report --html\n```\n```sh aws\nfor\n```\n```sh aws\nfalse\n```\n"
    )
    monkeypatch.setattr(rehearse_hyperpod, "PAGE", page)
    rehearsal = rehearse_hyperpod.Rehearsal(tmp_path)
    rehearse_hyperpod.follow(rehearsal)
    verdicts = [verdict.partition(":")[0] for _, _, verdict, _ in rehearsal.rows]
    assert verdicts == ["ok", "FAILED", "FAILED", "FAILED", "not run"] and rehearsal.failed


@pytest.mark.slow
def test_the_rehearsal() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/rehearse_hyperpod.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "published to a local S3 server, and fetched" in done.stdout
