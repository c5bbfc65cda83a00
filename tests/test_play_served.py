"""What `clew serve` serves solves what the evaluation said it solves, and the page beside it shows it."""

from __future__ import annotations

import json

import httpx2
import pytest

pytest.importorskip("ray")

from conftest import Command
from serving_server import ChatServer

FEW = "evaluation.size=8"


@pytest.mark.parametrize(("adapter", "options"), [(None, []), ("good-1", []), ("good-1", ["--sampled"])])
def test_the_same_episodes(clew: Command, chat_server: ChatServer, adapter: str | None, options: list[str]) -> None:
    """Greedy and sampled, the base model and an adapter: every episode ends the same way by the same moves."""
    folder = [] if adapter is None else ["--adapter", chat_server.adapters / adapter]
    said = clew("eval", "--model", "package:warm-start", *folder, "--suite", "heldout", "--json", "eval.json", FEW)
    assert said.code == 0, said.err
    model = "warm-start" if adapter is None else f"warm-start:{adapter}"
    played = clew("play", "--url", chat_server.url, "--model", model, "--compare", "eval.json", *options, FEW)
    assert played.code == 0 and "8 of 8 episodes the same as in eval.json" in played.out, played.out + played.err


def test_a_broken_adapter_is_one_line(clew: Command, chat_server: ChatServer) -> None:
    for name in ("dora", "truncated"):
        outcome = clew("play", "--url", chat_server.url, "--model", f"warm-start:{name}", "evaluation.size=1")
        assert outcome.code == 2 and outcome.err.count("\n") == 1
        assert (
            f"clew: error: --model warm-start:{name}: " in outcome.err and str(chat_server.adapters) not in outcome.err
        )


def test_the_page_beside_it(chat_server: ChatServer) -> None:
    with httpx2.Client(base_url=f"http://127.0.0.1:{chat_server.port}", trust_env=False, timeout=60) as client:
        page = client.get("/watch", follow_redirects=True)
        assert page.url.path == "/watch/" and "player.js" in page.text
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert {"warm-start", "warm-start:good-1"} <= set(client.get("/watch/api/models").json()["models"])
        walk = {"suite": "heldout", "index": 3, "model": "warm-start"}
        with client.stream("POST", "/watch/api/walk", json=walk) as response:
            events = [json.loads(line) for line in response.iter_lines()]
        assert [events[0]["event"], events[-1]["event"]] == ["start", "end"] and events[-1]["solved"]
