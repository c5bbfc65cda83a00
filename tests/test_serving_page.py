"""The page's requests: a walk is the evaluation's episode, told turn by turn, and nothing else can be asked for."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

pytest.importorskip("fastapi", reason="fastapi comes with clew[ray]")

import openai_server
from fastapi import FastAPI
from openai_server import ReferenceServer

from clew.envs.registry import make_env
from clew.evaluation.suites import RecipeSuites
from clew.recipe import load_recipe
from clew.serving.page import FILES, page_app

RECIPE = load_recipe("laptop", ["evaluation.size=8"])
SUITE = RecipeSuites(RECIPE).suite("heldout")
WALK: dict[str, Any] = {"suite": "heldout", "index": 1, "model": "warm-start"}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[ReferenceServer, str]]:
    with openai_server.warm_start_server() as server:
        outer = FastAPI()
        outer.mount("/watch", page_app(RECIPE, server.url))
        with openai_server.listening(outer) as url:
            yield server, url


@pytest.fixture
def server(shared: tuple[ReferenceServer, str]) -> ReferenceServer:
    shared[0].asked, shared[0].hook, shared[0].key = [], lambda number, body: None, None
    return shared[0]


@pytest.fixture
def page(server: ReferenceServer, shared: tuple[ReferenceServer, str]) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"{shared[1]}/watch/", trust_env=False, timeout=60) as client:
        yield client


def events(page: httpx2.Client, **changes: Any) -> list[dict[str, Any]]:
    response = page.post("api/walk", json={**WALK, **changes})
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson", response.text
    return [json.loads(line) for line in response.text.splitlines()]


def pixels(png: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_walk_is_an_episode(page: httpx2.Client, mode: str) -> None:
    """Its answers, played again in an environment of one's own, give its frames, its feedback and its end."""
    start, *turns, end = events(page, mode=mode)
    env = make_env(SUITE.env_id, **SUITE.env_kwargs)
    observation, info = env.reset(SUITE.tasks[1].seed)
    assert start["event"] == "start" and end["event"] == "end" and {t["event"] for t in turns} == {"turn"}
    assert (start["max_turns"], start["path_length"]) == (15, info["path_length"])
    picture = page.get("api/maze", params={"suite": "heldout", "index": 1}).json()
    assert picture["frame"] == start["frame"] and picture["prompt"] == env.prompt
    assert np.array_equal(pixels(start["frame"]), observation.image)
    for turn in turns:
        observation, _, terminated, truncated, info = env.step(turn["answer"])
        assert np.array_equal(pixels(turn["frame"]), observation.image)
        assert (turn["action"], turn["feedback"]) == (info["action"], info["feedback"])
    assert terminated or truncated
    assert end["solved"] is info["success"]
    assert end["words"] == ("Solved" if info["success"] else "Not solved: all turns used")


def test_draws_repeat_and_differ(page: httpx2.Client) -> None:
    one, same, other = (events(page, mode="sampled", attempt=n) for n in (0, 0, 1))
    assert one == same != other


def test_turns_come_as_they_are_played(page: httpx2.Client, server: ReferenceServer) -> None:
    """The second answer is held back until the first turn has been read."""
    go_on = threading.Event()
    server.hook = lambda number, body: None if number == 1 or go_on.wait(30) else openai_server.error(400, "late")
    with page.stream("POST", "api/walk", json=WALK) as response:
        lines = response.iter_lines()
        assert [json.loads(next(lines))["event"] for _ in range(2)] == ["start", "turn"]
        go_on.set()
        assert json.loads(list(lines)[-1])["event"] == "end"


def test_who_leaves_ends_the_walk(page: httpx2.Client, server: ReferenceServer) -> None:
    go_on, left = threading.Event(), threading.Event()

    def hook(number: int, body: dict[str, Any]) -> None:
        if number == 2:
            left.set()
            assert go_on.wait(30)

    server.hook = hook
    with page.stream("POST", "api/walk", json={**WALK, "model": "warm-start:noise"}) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines))["event"] == "start" and left.wait(30)
    go_on.set()
    assert events(page)[-1]["event"] == "end"  # meanwhile the other has found out
    assert sum(body["model"] == "warm-start:noise" for body in server.asked) <= 3


def test_walks_at_a_time_are_bounded(page: httpx2.Client, server: ReferenceServer) -> None:
    go_on = threading.Event()
    server.hook = lambda number, body: openai_server.error(422, "enough") if go_on.wait(30) else None
    with contextlib.ExitStack() as walks:
        begun = [walks.enter_context(page.stream("POST", "api/walk", json=WALK)).iter_lines() for _ in range(8)]
        assert {json.loads(next(lines))["event"] for lines in begun} == {"start"}
        refused = page.post("api/walk", json=WALK)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        go_on.set()
        assert {json.loads(list(lines)[-1])["event"] for lines in begun} == {"error"}
    server.hook = lambda number, body: None
    assert events(page)[-1]["event"] == "end", "their places are free again"


def test_what_fails_on_the_way_is_told(page: httpx2.Client, server: ReferenceServer) -> None:
    server.hook = lambda number, body: openai_server.error(422, "adapter noise is broken") if number > 2 else None
    *_, last = events(page, model="warm-start:noise")
    assert last["event"] == "error" and "adapter noise is broken" in last["message"]


# --- limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"suite": "nosuch"}, 404),
        ({"suite": "unseen"}, 404),
        ({"suite": "../../etc"}, 404),
        ({"suite": "s" * 201}, 422),
        ({"index": 8}, 422),
        ({"index": -1}, 422),
        ({"index": "1"}, 422),
        ({"index": True}, 422),
        ({"model": "warm-start:absent"}, 404),
        ({"model": ""}, 422),
        ({"model": "x" * 301}, 422),
        ({"mode": "other"}, 422),
        ({"attempt": 10_000}, 422),
        ({"extra": 1}, 422),
        ({"suite": "x" * 5000}, 413),
    ],
)
def test_what_is_refused(page: httpx2.Client, server: ReferenceServer, changes: dict[str, Any], status: int) -> None:
    response = page.post("api/walk", json={**WALK, **changes})
    assert response.status_code == status and list(response.json()) == ["error"], response.text
    assert not server.asked


@settings(max_examples=20)
@given(body=st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_body_gets_an_answer(shared: tuple[ReferenceServer, str], body: bytes | str) -> None:
    headers = {"content-type": "application/json"}
    response = httpx2.post(f"{shared[1]}/watch/api/walk", content=body, headers=headers, trust_env=False)
    assert response.status_code in (400, 422)


@pytest.mark.parametrize(
    "path", ["../page.py", "%2e%2e/page.py", "..%2fpage.py", "api/../../page.py", "/etc/passwd", "x"]
)
def test_only_the_pages_files_are_served(page: httpx2.Client, path: str) -> None:
    assert page.get(path).status_code == 404


def test_every_answer_carries_the_headers(page: httpx2.Client) -> None:
    for path in ["", *(file.name for file in FILES.iterdir()), "api/setup", "api/models", "api/maze", "nothing"]:
        headers = page.get(path).headers
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    html = (FILES / "index.html").read_text()
    assert "style=" not in html and "<script>" not in html and "http:" not in html and "https:" not in html
    beside = httpx2.get(str(page.base_url).rstrip("/"), follow_redirects=True, trust_env=False)
    assert beside.status_code == 200 and str(beside.url).endswith("/watch/")


# --- keys ------------------------------------------------------------------------------------------------


def test_the_key_is_the_visitors(page: httpx2.Client, server: ReferenceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has none of its own, not even where its process has one in the environment."""
    server.key = "of-the-visitor-0123456789"
    monkeypatch.setenv("CLEW_API_KEY", server.key)
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": f"Basic {server.key}"}):
        assert page.get("api/models", headers=headers).status_code == 401
        assert page.post("api/walk", json=WALK, headers=headers).json() == {"error": "the server wants an API key"}
    allowed = {"Authorization": f"Bearer {server.key}"}
    assert page.get("api/models", headers=allowed).json() == {"models": ["warm-start", "warm-start:noise"]}
    assert '"end"' in page.post("api/walk", json=WALK, headers=allowed).text.splitlines()[-1]


def test_no_server_behind_it() -> None:
    with openai_server.listening(page_app(RECIPE, "http://127.0.0.1:9")) as url:
        assert httpx2.get(f"{url}/", trust_env=False).status_code == 200
        response = httpx2.get(f"{url}/api/models", trust_env=False)
        assert (response.status_code, response.json()) == (502, {"error": "the model server gives no answer"})
