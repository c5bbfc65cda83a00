"""`clew serve`, started as a user starts it, asked by OpenAI's own client."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import socket
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import openai
import pytest
import tiny
import torch
from conftest import Command, finish_clew, start_clew
from PIL import Image
from processes import descendants, listening
from serving_server import BROKEN, GOOD, WARM_START, ChatServer, running

from clew.agent.ledger import Trajectory
from clew.envs.registry import make_env
from clew.envs.suites import training_tasks
from clew.evaluation.suites import environment_settings
from clew.policy.adapter import read_adapter
from clew.policy.model import VisionLanguageModel, load_model
from clew.recipe import load_recipe
from clew.rollout.engine import Sampling, derive_seed
from clew.rollout.episodes import Limits, Player, play
from clew.rollout.transformers_engine import TransformersEngine

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import bad_requests
import raw_requests

torch.set_num_threads(1)
BASE = "warm-start"
RECIPE = load_recipe("laptop")


@pytest.fixture(scope="module")
def client(chat_server: ChatServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=chat_server.url, api_key="none", max_retries=0, timeout=120)


@cache
def vlm() -> VisionLanguageModel:
    return load_model(WARM_START)


def trainer(adapters: Path, name: str) -> TransformersEngine:
    """The trainer's engine, with an adapter or without."""
    engine = TransformersEngine(vlm(), tiny.feature_cache(vlm()))
    if name:
        engine.load_adapter(read_adapter(adapters / name))
    return engine


def episodes(engine: TransformersEngine, temperature: float) -> list[Trajectory]:
    settings = environment_settings(RECIPE)

    def new_env() -> Any:
        return make_env(RECIPE.environment.id, **settings)

    tasks = [task for _, task in itertools.islice(training_tasks(new_env(), frozenset(), 0), 2)]
    return play(
        engine,
        Player(vlm().template, vlm().patcher),
        new_env,
        [(task, 0) for task in tasks],
        Sampling(temperature, 12),
        Limits(4000),
        ("serve",),
    )


def image(frame: np.ndarray) -> dict[str, Any]:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def user(frame: np.ndarray, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [image(frame), {"type": "text", "text": text}]}


def ask(client: openai.OpenAI, model: str, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model=model, messages=messages, **{"max_tokens": 12, **options})


def test_models(client: openai.OpenAI, chat_server: ChatServer) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == BASE and {f"{BASE}:{name}" for name in GOOD} < set(names)
    assert f"{BASE}:pickled" in names, "its configuration is there: what is wrong with it is said when it is asked for"


@pytest.mark.parametrize("adapter", ["", "good-1"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_server_answers_as_the_trainers_engine(
    client: openai.OpenAI, chat_server: ChatServer, adapter: str, temperature: float
) -> None:
    """Whole episodes of the trainer, asked again turn by turn: same prompt length, text, tokens, log-probabilities."""
    model = f"{BASE}:{adapter}" if adapter else BASE
    prompt = make_env(RECIPE.environment.id, **environment_settings(RECIPE)).prompt
    said = set()
    for trajectory in episodes(trainer(chat_server.adapters, adapter), temperature):
        messages: list[Any] = []
        for n, turn in enumerate(trajectory.turns[:6]):
            text = turn.text if n else f"{prompt}\n{turn.text}" if turn.text else prompt
            messages.append(user(turn.frame, text))
            seed = derive_seed("serve", trajectory.task.content_hash, 0, n + 1)
            answer = ask(client, model, messages, temperature=temperature, seed=seed, logprobs=True)
            choice = answer.choices[0]
            assert answer.usage.prompt_tokens == turn.start
            assert answer.usage.completion_tokens == turn.end - turn.start
            assert choice.message.content == turn.answer
            logprobs = [entry.logprob for entry in choice.logprobs.content]
            np.testing.assert_allclose(logprobs, trajectory.logprobs[turn.start :][: len(logprobs)], atol=1e-4)
            assert choice.finish_reason == ("stop" if turn.end - turn.start == len(logprobs) + 1 else "length")
            messages.append({"role": "assistant", "content": turn.answer})
            said.add(turn.answer)
    assert len(said) > 1


def test_streams(client: openai.OpenAI) -> None:
    messages = [user(tiny.noise(1, 96, 96), "Which way?")]
    for model in (BASE, f"{BASE}:good-2"):
        whole = ask(client, model, messages, seed=3)
        chunks = list(ask(client, model, messages, seed=3, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert len(chunks) > 4, "it should come piece by piece"
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_what_is_not_there(client: openai.OpenAI) -> None:
    for model in ("gpt", f"{BASE}:nobody", f"{BASE}:../good-1", f"{BASE}:good-1/../good-2"):
        with pytest.raises(openai.NotFoundError):
            ask(client, model, [{"role": "user", "content": "x"}])


def test_broken_adapters_are_named_and_hurt_nobody(client: openai.OpenAI, chat_server: ChatServer) -> None:
    """Each is refused, again and again, while others answer as before and keep their places."""
    messages = [user(tiny.noise(2, 96, 96), "Which way?")]
    good = [BASE, f"{BASE}:good-1", f"{BASE}:good-2"]

    def answer(model: str) -> tuple[str, float]:
        choice = ask(client, model, messages, temperature=0, logprobs=True).choices[0]
        return choice.message.content, round(choice.logprobs.content[0].logprob, 4)

    before = [answer(model) for model in good]
    assert len(set(before)) == 3

    def refused(name: str) -> str:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, f"{BASE}:{name}", messages)
        assert caught.value.status_code == 422
        return str(caught.value.body["message"])  # type: ignore[index]

    with ThreadPoolExecutor(6) as pool:
        said = dict(zip(BROKEN * 2, pool.map(refused, BROKEN * 2), strict=True))
        assert list(pool.map(answer, good * 4)) == before * 4
    for name, message in said.items():
        assert name in message and "/" not in message, "no path of this machine, nor of the one that trained it"
    assert len(set(said.values())) == len(BROKEN)
    words = {"vision": "outside the language model", "foreign": "another model", "not-finite": "not finite"}
    words |= {"pickled": "never loaded", "dora": "use_dora", "rank": "rank 5", "other-base": "another model"}
    assert all(word in said[name] for name, word in words.items())


def test_adapters_come_and_go_under_load(client: openai.OpenAI, chat_server: ChatServer) -> None:
    """Five adapters with room for two, asked at once, some of them streaming: each says what it says alone."""
    trajectory = tiny.conversation(vlm(), [])
    tiny.show(vlm(), trajectory, tiny.noise(5, 96, 96), "Which way?")
    messages = [user(tiny.noise(5, 96, 96), "Look at it.\nWhich way?")]
    expected = {}
    for name in GOOD:
        (completion,) = trainer(chat_server.adapters, name).sample([trajectory], Sampling(0.0, 40), [0])
        expected[name] = vlm().tokenizer.decode(completion.ids[:-1] if completion.ended else completion.ids)
    assert len(set(expected.values())) > 2

    def answer(number: int) -> tuple[str, str]:
        name, options = GOOD[number * 3 % 5], {"temperature": 0, "max_tokens": 40}
        if number % 2:
            return name, ask(client, f"{BASE}:{name}", messages, **options).choices[0].message.content
        chunks = ask(client, f"{BASE}:{name}", messages, stream=True, **options)
        return name, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(10) as pool:
        for name, text in pool.map(answer, range(40)):
            assert text == expected[name]


def test_clients_that_leave_give_their_places_back(client: openai.OpenAI, chat_server: ChatServer) -> None:
    """More long answers than there are places, all given up: the next client is served."""
    body = {"model": BASE, "messages": [{"role": "user", "content": "hello"}], "temperature": 2, "stream": True}
    data = raw_requests.http(json.dumps(body).encode())
    for _ in range(3):
        connections = [socket.create_connection(("127.0.0.1", chat_server.port)) for _ in range(100)]
        for connection in connections:
            connection.sendall(data)
        connections[0].recv(100)
        for connection in connections:
            connection.close()
    patient = client.with_options(max_retries=20)
    assert ask(patient, BASE, [{"role": "user", "content": "x"}]).choices


def test_bad_requests(client: openai.OpenAI, chat_server: ChatServer) -> None:
    """A few hundred of benchmarks/serving.py's ten thousand: 4xx or closed, and good ones answered as ever."""
    messages = [user(tiny.noise(3, 96, 96), "Which way?")]

    def good() -> tuple[str, float]:
        answer = ask(client, f"{BASE}:good-1", messages, temperature=0, logprobs=True)
        return answer.choices[0].message.content, round(answer.choices[0].logprobs.content[0].logprob, 3)

    reference, lock = good(), threading.Lock()
    stream = iter(bad_requests.Stream(BASE, seed=int(os.environ.get("CLEW_TEST_SEED", "1")), slow=False))
    outcomes: Counter[str] = Counter()

    def work(number: int) -> None:
        with lock:
            request = next(stream)
        outcome = raw_requests.send("127.0.0.1", chat_server.port, request)
        assert outcome in ("closed", "left") or outcome.startswith("4"), (request.kind, outcome, request.parts[0][:200])
        outcomes[outcome] += 1
        if number % 20 == 0:
            assert good() == reference

    with ThreadPoolExecutor(7) as pool:
        half_a_head = raw_requests.BadRequest("slow", [b"POST /v1/chat/completions HTTP/1.1\r\nHo"])
        slow = pool.submit(raw_requests.send, "127.0.0.1", chat_server.port, half_a_head)
        list(pool.map(work, range(400)))
        assert slow.result() == "closed", "the guard's protocol is not in force"
    assert outcomes["400"] > 150 and outcomes["404"] > 20 and outcomes["closed"] > 20
    assert chat_server.process.poll() is None


def test_nobody_else_can_speak_to_its_ray(chat_server: ChatServer) -> None:
    """Ports are open to this machine only, or to nobody without the token: what comes in there is unpickled."""
    local, remote = 0, 0
    for only_here, port in listening([chat_server.process.pid, *descendants(chat_server.process.pid)]):
        if only_here:
            local += 1
            continue
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            for metadata in ((), (("authorization", "Bearer x"),)):
                with pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", metadata=metadata, timeout=20)
                assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        remote += 1
    assert local > 5 and remote == 3  # the API, the engine and the page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["--model", "package:warmstart"], "it has package:warm-start"),
        (["--model", "package:warm-start", "--adapters", "nowhere"], "--adapters nowhere"),
        (["--model", "package:warm-start", "--adapters", "s3://x"], "s3://bucket/prefix"),
        (["--model", "package:warm-start", "--name", "a:b"], "--name a:b"),
        (["--model", "package:warm-start", "--engine", "magic"], "--engine magic"),
        (["--model", "package:warm-start", "--host", "203.0.113.7"], "--host 203.0.113.7"),
        (["--model", "package:warm-start", "--api-key-file", "nokey"], "--api-key-file nokey"),
        (["--model", "."], "can't be loaded as a Hugging Face model folder"),
    ],
)
def test_bad_options_are_refused_at_once(clew: Command, arguments: list[str], message: str) -> None:
    Path("nokey").write_text("short")
    outcome = clew("serve", *arguments)
    assert outcome.code == 2 and message in outcome.err and "Traceback" not in outcome.err


def test_a_port_that_is_taken_is_not_shared(clew: Command, chat_server: ChatServer) -> None:
    outcome = clew("serve", "--model", "package:warm-start", "--port", str(chat_server.port))
    assert outcome.code == 2 and f"--port {chat_server.port}" in outcome.err


@pytest.mark.slow
def test_a_key_is_asked_for_and_kept_to_itself(chat_server: ChatServer, tmp_path: Path) -> None:
    """A second server, with a key: nothing without it, and it is in no log of Ray's."""
    key = "0123456789abcdef-not-a-real-key"
    (tmp_path / "key").write_text(key + "\n")
    with running(chat_server.adapters, "--api-key-file", str(tmp_path / "key")) as server:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0).models.list()
        right = openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)
        assert ask(right, BASE, [{"role": "user", "content": "x"}]).choices
        logs = Path("/tmp/ray/session_latest").resolve()
        assert logs.is_dir()
        holding = [f for f in logs.rglob("*") if f.is_file() and not f.is_symlink() and key.encode() in f.read_bytes()]
        assert not holding


@pytest.mark.slow
def test_a_skyrl_export_is_served(chat_server: ChatServer, tmp_path: Path) -> None:
    """An export that holds an adapter stands for its base model and itself."""
    export = tmp_path / "exports" / "global_step_7" / "policy"
    export.mkdir(parents=True)
    for file in (chat_server.adapters / "good-1").iterdir():
        (export / file.name).write_bytes(file.read_bytes())
    (export / "config.json").write_bytes((WARM_START / "config.json").read_bytes())
    process = start_clew("serve", "--model", export, "--port", "0")
    assert process.stdout is not None
    said = [line for line in itertools.takewhile(lambda line: not line.startswith("try:"), process.stdout)]
    process.terminate()
    assert finish_clew(process, 60).code == 0
    assert any(f"{WARM_START.name}:policy" in line for line in said), said
