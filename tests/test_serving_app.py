"""The API's answers and refusals, with a generator that says what the test wants."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import tiny
from fastapi.testclient import TestClient
from PIL import Image

from clew.errors import UserError
from clew.policy.model import load_processor
from clew.rollout.vllm_options import FORBIDDEN_KEY
from clew.serving.answers import Answers
from clew.serving.app import build_app
from clew.serving.engine import Generation, Progress
from clew.serving.errors import ApiError
from clew.serving.limits import Limits
from clew.serving.llm import llm_config, refuse_folder
from clew.serving.models import Models
from clew.serving.prompt import PromptBuilder
from clew.serving.store import StorageTrouble

ASK = {"model": "base", "messages": [{"role": "user", "content": "hello"}]}


class Store:
    """Adapters by name only; ``trouble`` makes it fail."""

    def __init__(self, *names: str) -> None:
        self.listed, self.trouble, self.looks = list(names), False, 0

    def names(self) -> list[str]:
        self.looks += 1
        if self.trouble:
            raise StorageTrouble("S3 is away")
        return sorted(self.listed)

    def fetch(self, name: str) -> Path:
        raise AssertionError("the API loads nothing itself")


class Speaker:
    """Says words one by one, or what ``script`` holds."""

    def __init__(self, tokenizer: Any) -> None:
        self.ids = tokenizer("up down left", add_special_tokens=False)["input_ids"]
        self.asked: list[Generation] = []
        self.script: list[Any] = []
        self.closed = threading.Event()

    async def __call__(self, asked: Generation) -> AsyncGenerator[Progress]:
        self.asked.append(asked)
        try:
            for one in self.script or self.whole(asked):
                if isinstance(one, BaseException):
                    raise one
                if one is None:
                    await asyncio.sleep(60)
                yield one
        finally:
            self.closed.set()

    def whole(self, asked: Generation) -> list[Progress]:
        n, logprobs = len(self.ids), [-0.5] * len(self.ids)
        if not asked.stream:
            return [Progress(self.ids, logprobs, n + 1, "stop")]
        parts = [Progress([token], [-0.5], i + 1, None) for i, token in enumerate(self.ids)]
        return [*parts, Progress([], [], n + 1, "stop")]


class Served:
    """A client of the application, and what is behind it."""

    def __init__(self) -> None:
        self.processor = load_processor(tiny.tiny_folder())
        self.tokenizer = self.processor.template.tokenizer
        self.speaker, self.store, self.healthy = Speaker(self.tokenizer), Store("a-1", "b"), True
        self.client = TestClient(self.make(Limits(request_s=1.0)), raise_server_exceptions=False)

    def make(self, limits: Limits) -> Any:
        async def ping() -> None:
            if not self.healthy:
                raise RuntimeError("dead")

        answers = Answers(PromptBuilder(self.processor, limits), self.speaker, limits)
        return build_app(Models("base", self.store), answers, limits, ping)

    def ask(self, **changes: Any) -> Any:
        return self.client.post("/v1/chat/completions", json={**ASK, **changes})

    def stream(self, **changes: Any) -> list[Any]:
        answer = self.ask(stream=True, **changes)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture
def served() -> Served:
    return Served()


def test_the_names_that_are_served(served: Served) -> None:
    listed = served.client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["base", "base:a-1", "base:b"]
    assert served.client.get("/v1/models/base:b").json()["parent"] == "base"
    for model in ("base:c", "other", "base:", ":b", "base:b:b", "base:../b", "", "BASE", "base:a-1 "):
        answer = served.ask(model=model)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert not served.speaker.asked, "what is not there must not reach the engine"
    assert served.store.looks == 1, "nor the store each time"
    served.ask(model="base:a-1")
    assert served.speaker.asked[-1].adapter == "a-1"


def test_a_store_that_is_away_hurts_adapters_only(served: Served) -> None:
    served.store.trouble = True
    assert served.ask().status_code == 200
    answer = served.ask(model="base:b")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "S3 is away")
    assert "retry-after" in answer.headers


def test_a_store_that_goes_away_hurts_no_adapter_it_had(served: Served) -> None:
    """It may be loaded; what was never seen has to wait for the store."""

    async def ask() -> None:
        models = Models("base", served.store)
        assert await models.resolve("base:b") == "b"
        served.store.trouble = True
        for seconds in (10, 1000):
            models._looked -= seconds
            assert await models.resolve("base:b") == "b"
            with pytest.raises(ApiError, match="S3 is away"):
                await models.resolve("base:c")
        looks = served.store.looks
        with pytest.raises(ApiError, match="S3 is away"):
            await models.adapters()
        assert served.store.looks == looks, "it is not asked for each request"

    asyncio.run(ask())


def test_nobody_waits_for_a_slow_store_to_say_what_it_said_before(served: Served) -> None:
    """Of all who ask for an adapter that was there, one looks again."""
    entered, go = threading.Event(), threading.Event()

    def slow() -> list[str]:
        entered.set()
        go.wait(60)
        return ["b"]

    async def ask() -> None:
        models = Models("base", served.store)
        assert await models.resolve("base:b") == "b"
        served.store.names = slow  # type: ignore[method-assign]
        models._looked -= 1000
        first = asyncio.create_task(models.resolve("base:b"))
        await asyncio.to_thread(entered.wait, 60)
        assert await models.resolve("base:b") == "b" and not first.done()
        go.set()
        assert await first == "b"

    asyncio.run(ask())


def test_an_answer_in_one_piece(served: Served) -> None:
    answer = served.ask(logprobs=True, seed=-1, temperature=0, max_tokens=20).json()
    (choice,) = answer["choices"]
    text = served.tokenizer.decode(served.speaker.ids)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == text
    n = len(served.speaker.ids) + 1
    asked = served.speaker.asked[-1]
    prompt = len(asked.prompt.token_ids)
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": n, "total_tokens": prompt + n}
    assert (asked.seed, asked.sampling.temperature, asked.sampling.max_new_tokens) == (2**64 - 1, 0.0, 20)
    served.ask()
    assert served.speaker.asked[-1].sampling.temperature == 1.0
    assert served.speaker.asked[-1].sampling.max_new_tokens == 4096 - prompt


def test_a_stream_adds_up_to_the_answer(served: Served) -> None:
    events = served.stream(stream_options={"include_usage": True}, logprobs=True)
    whole = served.ask(logprobs=True).json()
    assert events[-1] == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    pieces = [choice for event in events[:-1] for choice in event["choices"]]
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole["choices"][0]["message"]["content"]
    tokens = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
    assert tokens == whole["choices"][0]["logprobs"]["content"]
    assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert events[-2]["usage"] == whole["usage"] and events[-2]["choices"] == []
    assert len({event["id"] for event in events[:-1]}) == 1
    assert "usage" not in served.stream()[-2]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_has_its_status(served: Served, stream: bool) -> None:
    served.speaker.script = [Progress([], [], 0, None, (422, "adapter a-1 is broken", "broken_adapter"))]
    answer = served.ask(model="base:a-1", stream=stream)
    assert answer.status_code == 422
    expected = {"message": "adapter a-1 is broken", "type": "invalid_request_error", "param": "model"}
    assert answer.json()["error"] == {**expected, "code": "broken_adapter"}
    served.speaker.script = [RuntimeError("/home/me/secret")]
    answer = served.ask(stream=stream)
    assert answer.status_code == 503 and "secret" not in answer.text


def test_an_error_in_the_middle_of_a_stream_is_an_event(served: Served) -> None:
    served.speaker.script = [Progress(served.speaker.ids[:1], [-1.0], 1, None), RuntimeError("/home/me/secret")]
    events = served.stream()
    assert events[-1]["error"]["code"] == "unavailable" and "secret" not in json.dumps(events)


def test_an_answer_has_a_time_limit(served: Served) -> None:
    served.speaker.script = [None]
    answer = served.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
    assert served.speaker.closed.wait(5), "the engine must hear that nobody waits"


def test_what_a_request_holds_is_given_back(served: Served) -> None:
    """Room for the images of one request at a time: whatever becomes of each, the next one finds it free."""
    out = io.BytesIO()
    Image.fromarray(tiny.noise(1)).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    app = served.make(Limits(held_bytes=64 * 64 * 3, request_s=1.0))
    body = json.dumps({**ASK, "messages": messages, "stream": True}).encode()

    async def ask(breaks_at: str) -> int:
        """The status of a stream whose client goes at a message."""
        status = 0
        news = asyncio.Queue[Any]()
        news.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: Any) -> None:
            nonlocal status
            if message["type"] == breaks_at:
                raise OSError("gone")
            status = message.get("status", status)

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
        with contextlib.suppress(OSError, ExceptionGroup):
            await app(scope | {"headers": [(b"content-type", b"application/json")]}, news.get, send)
        return status

    for _ in range(3):
        for breaks_at in ("http.response.start", "http.response.body"):
            asyncio.run(ask(breaks_at))
        assert asyncio.run(ask("never")) == 200
    two = json.dumps({**ASK, "messages": messages * 2}).encode()
    client = TestClient(app)
    answer = client.post("/v1/chat/completions", content=two, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")


def test_health_and_what_is_not_there(served: Served) -> None:
    assert served.client.get("/health").json() == {"status": "ok"}
    served.healthy = False
    assert served.client.get("/health").status_code == 503
    for answer in (served.client.get("/v1/nothing"), served.client.get("/openapi.json"), served.client.get("/docs")):
        assert answer.status_code == 404 and answer.json()["error"]["type"] == "not_found_error"
    assert served.client.get("/v1/chat/completions").status_code == 405
    plain = served.client.post("/v1/chat/completions", content=json.dumps(ASK), headers={"content-type": "text/plain"})
    assert plain.status_code == 415, "a page of another site may send text/plain without asking"


def test_the_configuration_of_serve_llm() -> None:
    """Adapters come from S3, with room for their rank; sampling is as it is asked for, and vision tokens are masked."""
    processor = load_processor(tiny.tiny_folder())
    config = llm_config("base", processor, "s3://bucket/adapters", 3, 4096, True, Limits())
    assert config["model_loading_config"] == {"model_id": "base", "model_source": processor.path}
    assert config["lora_config"]["dynamic_lora_loading_path"] == "s3://bucket/adapters"
    engine = config["engine_kwargs"]
    assert (engine["enable_lora"], engine["max_lora_rank"], engine["max_loras"]) == (True, Limits().lora_rank, 3)
    assert (engine["max_model_len"], engine["generation_config"]) == (4096, "vllm")
    assert engine["additional_config"] == {FORBIDDEN_KEY: processor.forbidden_ids}
    assert config["deployment_config"]["num_replicas"] == 1
    assert llm_config("base", processor, None, 3, 4096, True, Limits(), 2)["deployment_config"]["num_replicas"] == 2
    assert "lora_config" not in llm_config("base", processor, None, 3, 4096, True, Limits())
    refuse_folder("s3://bucket/adapters")
    refuse_folder(None)
    with pytest.raises(UserError, match="S3 only"):
        refuse_folder("adapters")
