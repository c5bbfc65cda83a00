"""The client asks as OpenAI's API wants to be asked, again where that may help, and says what is wrong where not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clew.errors import UserError
from clew.rollout.engine import Sampling, uniforms
from clew.serving import client as module
from clew.serving.client import Answer, ChatClient, Refused, Unreachable, base_url, wire_seed
from clew.serving.keys import read_api_key

GREEDY = Sampling(0.0, 8)
TALK = [{"role": "user", "content": [{"type": "text", "text": "Go!"}]}]
KEY = "not-to-be-shown-123"


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return False

    def set(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(module.threading, "Event", lambda: clock)
    return clock


def completion(text: str = "up", reason: str = "stop", **more: Any) -> httpx2.Response:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return httpx2.Response(200, json={"object": "chat.completion", "choices": [choice], **more})


def failing(status: int, message: str = "no", code: str | None = None, **headers: str) -> httpx2.Response:
    content = {"error": {"message": message, "type": "x", "param": None, "code": code}}
    return httpx2.Response(status, json=content, headers=headers)


def talking(
    answers: Iterator[Any] | Callable[[httpx2.Request], httpx2.Response], key: str | None = None, **options: Any
) -> ChatClient:
    def handle(request: httpx2.Request) -> httpx2.Response:
        found = answers(request) if callable(answers) else next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    return ChatClient("http://test", key, transport=httpx2.MockTransport(handle), **options)


def ask(client: ChatClient) -> Answer:
    return client.complete("base:one", TALK, GREEDY, 7)


# --- what is asked ---------------------------------------------------------------------------------------


def test_requests_are_openais() -> None:
    """The body fits the types of OpenAI's own package, and the key travels as the bearer token alone."""
    types = pytest.importorskip("openai.types.chat.completion_create_params")
    from pydantic import TypeAdapter

    seen: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return completion(usage={"prompt_tokens": 11})

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [
        {"role": "user", "content": [image, *TALK[0]["content"]]},
        {"role": "assistant", "content": "up"},
        *TALK,
    ]
    client = talking(answer, KEY)
    assert client.complete("base:one", messages, Sampling(0.7, 8), 2**64 - 5) == Answer("up", True, 11)
    (request,) = seen
    body = json.loads(request.content)
    assert str(request.url) == "http://test/v1/chat/completions"
    assert request.headers["Authorization"] == f"Bearer {KEY}" and KEY not in request.content.decode()
    TypeAdapter(types.CompletionCreateParamsNonStreaming).validate_python(body)
    expected = {"model": "base:one", "messages": messages, "temperature": 0.7, "max_tokens": 8, "seed": -5}
    assert body == expected


@given(st.integers(0, 2**64 - 1))
def test_a_seed_fits_and_comes_back(seed: int) -> None:
    """It is a signed 64-bit integer, and the server that takes it modulo 2**64 draws the same numbers."""
    sent = wire_seed(seed)
    assert -(2**63) <= sent < 2**63
    back = np.array([sent % 2**64], np.uint64)
    assert uniforms(back, 3) == uniforms(np.array([seed], np.uint64), 3)


@pytest.mark.parametrize("url", ["http://a:8000", "http://a:8000/", "http://a:8000/v1", "http://a:8000/v1/"])
def test_addresses(url: str) -> None:
    assert base_url(url) == "http://a:8000"


@pytest.mark.parametrize("url", ["", "a:8000", "ftp://a", "http://", "http://u:p@a", "http://a/?k=1", "file:///x"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UserError, match="--url") as caught:
        ChatClient(url)
    assert "u:p" not in str(caught.value)


# --- what may go wrong -----------------------------------------------------------------------------------


def test_a_busy_server_is_asked_again(clock: Clock) -> None:
    answers = [failing(503, **{"Retry-After": "3"}), failing(429), httpx2.ConnectError("refused"), completion("down")]
    assert ask(talking(iter(answers))).text == "down"
    assert clock.waits == [3.0, 0.5, 1.0], "what the server asks for, else longer each time"


def test_patience_ends_once_for_all(clock: Clock) -> None:
    """A server that is gone costs its patience once; whoever asks it later tries once."""
    tries = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        tries.append(clock.now)
        raise httpx2.ConnectError("refused")

    client = talking(answer, patience_s=20.0)
    with pytest.raises(Unreachable, match=r"http://test gives no answer \(refused\)"):
        ask(client)
    assert clock.now == pytest.approx(20.0) and len(tries) > 4
    before = len(tries)
    with pytest.raises(Unreachable):
        ask(client)
    assert clock.now == pytest.approx(20.0) and len(tries) == before + 1


def test_an_answer_restores_patience(clock: Clock) -> None:
    trouble = [failing(503)] * 4
    client = talking(iter([*trouble, completion(), *trouble, completion()]), patience_s=5.0)
    assert ask(client).text == ask(client).text == "up"
    assert clock.now > 5.0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_a_refusal_is_final(status: int, clock: Clock) -> None:
    with pytest.raises(Refused) as caught:
        ask(talking(iter([failing(status, "the adapter one is broken", "bad_adapter")])))
    assert caught.value.status == status and not clock.waits
    if status in (401, 403):
        assert "wants an API key: set CLEW_API_KEY" in str(caught.value)
    else:
        assert "the adapter one is broken" in str(caught.value) and caught.value.code == "bad_adapter"


def test_a_key_is_never_shown(clock: Clock) -> None:
    for status in (401, 404, 503):
        client = talking(lambda _, status=status: failing(status, f"bad key {KEY}\x1b[31m"), KEY, patience_s=1.0)
        with pytest.raises((Refused, Unreachable)) as caught:
            ask(client)
        assert KEY not in str(caught.value) and "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        httpx2.Response(200, text="<html>"),
        httpx2.Response(200, json=[]),
        httpx2.Response(200, json={"choices": []}),
        httpx2.Response(200, json={"choices": [{"message": None, "finish_reason": "stop"}]}),
        completion(reason="tool_calls"),
    ],
)
def test_what_is_no_completion(answer: httpx2.Response) -> None:
    with pytest.raises(Refused, match="http://test"):
        ask(talking(iter([answer])))


def test_a_cut_answer_and_an_empty_one() -> None:
    assert ask(talking(iter([completion("up up", "length")]))) == Answer("up up", False, None)
    assert ask(talking(iter([httpx2.Response(200, json=json.loads(completion("").content))]))).text == ""


# --- keys ------------------------------------------------------------------------------------------------


def test_where_a_key_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLEW_API_KEY", raising=False)
    assert read_api_key(None) is None
    monkeypatch.setenv("CLEW_API_KEY", "of-the-environment")
    assert read_api_key(None) == "of-the-environment"
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert read_api_key(file) == KEY
    for content in ("", "two words", "a\nb", "schl\u00fcssel"):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="holds no key") as caught:
            read_api_key(file)
        assert not content or content not in str(caught.value)
    with pytest.raises(UserError, match="can't be read"):
        read_api_key(tmp_path / "absent")
