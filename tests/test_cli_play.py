"""``clew play``: counts, files and comparisons, and one clear line where something is not as it should be."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="fastapi comes with clew[ray]")

import openai_server
from conftest import Command
from openai_server import ReferenceServer

from clew.evaluation.wilson import wilson_interval

FEW = "evaluation.size=3"


@pytest.fixture(scope="module")
def shared() -> Iterator[ReferenceServer]:
    with openai_server.warm_start_server() as server:
        yield server


@pytest.fixture
def server(shared: ReferenceServer, monkeypatch: pytest.MonkeyPatch) -> ReferenceServer:
    monkeypatch.delenv("CLEW_API_KEY", raising=False)
    shared.asked, shared.hook, shared.key = [], lambda number, body: None, None
    return shared


def test_what_it_prints_and_writes(clew: Command, server: ReferenceServer) -> None:
    """The record has the form of a run's, so that it can be held against itself; the pictures are whole episodes."""
    base = ["play", "--url", server.url, "--model", "warm-start"]
    played = clew(*base, "--sampled", "--step", "5", "--json", "a.json", "--gifs", "gifs", FEW)
    assert played.code == 0, played.err
    record = json.loads(Path("a.json").read_text())
    solved = record["solved"]
    assert (record["suite"], record["mode"], record["step"], record["total"]) == ("heldout", "sampled", 5, 3)
    assert record["ci95"] == list(wilson_interval(solved, 3)) and record["model"] == "warm-start"
    assert f"{solved}/3" in played.out and "episodes ended by: " in played.out
    gifs = sorted(Path("gifs").iterdir())
    assert [f"gif: {path}" in played.out for path in gifs] == [True] * 3
    for place, episode in enumerate(record["episodes"]):
        path = Path("gifs") / f"heldout-{place:03d}-{'solved' if episode['success'] else 'failed'}.gif"
        gif = Image.open(io.BytesIO(path.read_bytes()))
        assert gif.n_frames == episode["turns"] + 1  # type: ignore[attr-defined]

    again = clew(*base, "--sampled", "--step", "5", "--compare", "a.json", "evaluation.size=2")
    assert again.code == 0 and "2 of 2 episodes the same as in a.json (of the 3 in it)" in again.out
    other = clew(*base, "--sampled", "--step", "6", "--compare", "a.json", FEW)
    assert other.code == 1 and "of 3 episodes the same as in a.json\n" in other.out
    assert f"  seed {record['episodes'][0]['seed']}: here " in other.out


def test_a_key(clew: Command, server: ReferenceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "let-me-in-0123456789"
    play = ["play", "--url", server.url, "--model", "warm-start:noise", "evaluation.size=1"]
    refused = clew(*play)
    assert refused.code == 2 and "wants an API key: set CLEW_API_KEY" in refused.err
    Path("key").write_text("another-one-0123456789\n")
    refused = clew(*play, "--api-key-file", "key")
    assert refused.code == 2 and "refuses this API key" in refused.err and "another" not in refused.err
    monkeypatch.setenv("CLEW_API_KEY", server.key)
    allowed = clew(*play)
    assert allowed.code == 0 and server.key not in allowed.out + allowed.err


def test_what_is_wrong_is_said(clew: Command, server: ReferenceServer) -> None:
    def line(*options: str, url: str = server.url, model: str = "warm-start") -> str:
        outcome = clew("play", "--url", url, "--model", model, FEW, *options)
        assert outcome.code == 2 and outcome.err.count("\n") == 1, outcome
        return outcome.err

    assert "Connection refused): start a server there" in line(url="http://127.0.0.1:9")
    assert "no http address" in line(url="127.0.0.1:8000")
    assert "no OpenAI-compatible API" in line(url=f"{server.url}/elsewhere")
    assert "no such model; it has warm-start, warm-start:noise" in line(model="other:noise")
    asked = len(server.asked)
    assert "there are heldout" in line("--suite", "nosuch")
    Path("not.json").write_text("[]")
    Path("other.json").write_text('{"suite": "larger", "mode": "greedy", "episodes": []}')
    Path("foreign.json").write_text('{"suite": "heldout", "mode": "greedy", "episodes": []}')
    assert "absent.json can't be read" in line("--compare", "absent.json")
    assert "not.json is no evaluation" in line("--compare", "not.json")
    assert "is about larger greedy; this plays heldout greedy" in line("--compare", "other.json")
    assert "other [environment] settings" in line("--compare", "foreign.json")
    assert "--json . is a folder" in line("--json", ".")
    assert "--gifs not.json/episode.gif can't be written" in line("--gifs", "not.json")
    assert len(server.asked) == asked, "all of that is said before anything is played"
    assert "has no such adapter; it lists warm-start:noise" in line(model="warm-start:absent")
    assert "(see clew play --help)" in line("--nosuch")
    server.hook = lambda number, body: openai_server.error(422, "adapter noise is broken: no weights")
    assert "adapter noise is broken: no weights" in line(model="warm-start:noise")


def test_lost_episodes_are_no_result(clew: Command, server: ReferenceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from clew.cli import play as module
    from clew.serving.client import ChatClient

    monkeypatch.setattr(module, "ChatClient", lambda url, key: ChatClient(url, key, patience_s=0.1))
    server.hook = lambda number, body: openai_server.error(503, "gone") if number > 4 else None
    outcome = clew("play", "--url", server.url, "--model", "warm-start", FEW)
    assert outcome.code == 1 and "3 of 3 episodes were not played to their end" in outcome.out
