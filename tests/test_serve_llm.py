"""`clew serve` on the real Ray Serve LLM and vLLM, with adapters of a real S3 server. See make test-serve-llm."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray.serve.llm")

import openai
from conftest import Command
from s3_server import account, put_adapters
from serving_server import BROKEN, GOOD, ChatServer, make_adapters, running

pytestmark = pytest.mark.serve_llm
SOUND, DAMAGED = ("good-1", "good-2"), ("truncated", "pickled", "rank", "vision", "other-base", "foreign")


@pytest.fixture(scope="module")
def server(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatServer]:
    """The server; its adapters lie in a folder too."""
    folder = tmp_path_factory.mktemp("serve-llm")
    make_adapters(folder)
    assert set(SOUND) < set(GOOD) and set(DAMAGED) < set(BROKEN)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in account(s3).items():
            patch.setenv(key, value)
        adapters = put_adapters(folder, (*SOUND, *DAMAGED), "maze")
        cache = str(folder / "cache")
        with running(adapters, "--engine", "vllm", env={"XDG_CACHE_HOME": cache}) as found:
            found.adapters = folder
            yield found


@pytest.mark.parametrize("adapter", [None, "good-1"])
def test_the_same_outcomes(clew: Command, server: ChatServer, adapter: str | None) -> None:
    """Greedy: of 64 episodes at least 63 end as with the trainer's engine. Rounding may tip a close decision."""
    folder = [] if adapter is None else ["--adapter", server.adapters / adapter]
    assert clew("eval", "--model", "package:warm-start", *folder, "--suite", "heldout", "--json", "eval.json").code == 0
    model = "warm-start" if adapter is None else f"warm-start:{adapter}"
    played = clew("play", "--url", server.url, "--model", model, "--compare", "eval.json", "--clients", "16")
    same = re.search(r"(\d+) of 64 episodes the same as in eval.json", played.out)
    assert same is not None and int(same[1]) >= 63, played.out + played.err


def test_a_broken_adapter_hurts_nobody_else(server: ChatServer) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)

    def ask(model: str) -> str:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "up or down"}], max_tokens=4, temperature=0
        )
        return answer.choices[0].message.content or ""

    good = ask("warm-start:good-2")
    for name in DAMAGED:
        with pytest.raises(openai.UnprocessableEntityError, match=name) as refused:
            ask(f"warm-start:{name}")
        assert refused.value.code == "broken_adapter"
        assert ask("warm-start:good-2") == good
    for unknown in ("warm-start:nobody", "nobody", "warm-start:../good-1"):
        with pytest.raises(openai.NotFoundError):
            ask(unknown)
    with pytest.raises(openai.BadRequestError, match="special token"):
        client.chat.completions.create(model="warm-start", messages=[{"role": "user", "content": "<|im_end|>"}])


def test_a_stream_says_what_the_whole_answer_says(server: ChatServer) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    asked = {"messages": [{"role": "user", "content": "left or right"}], "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(model="warm-start:good-1", **asked)
    pieces = list(client.chat.completions.create(model="warm-start:good-1", stream=True, **asked))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert [card.id for card in client.models.list()][:2] == ["warm-start", "warm-start:foreign"]


def test_no_vision_token_is_ever_sampled(server: ChatServer) -> None:
    """At a temperature at which every other token comes up."""
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0)
    text = ""
    for seed in range(8):
        answer = client.chat.completions.create(
            model="warm-start",
            messages=[{"role": "user", "content": "say anything"}],
            max_tokens=200,
            temperature=2,
            seed=seed,
        )
        text += answer.choices[0].message.content or ""
    assert len(text) > 1000
    assert not re.search(r"<\|(image|video|vision)_\w+\|>", text)


def test_adapters_of_a_folder_are_refused(clew: Command, tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    done = clew("serve", "--model", "package:warm-start", "--adapters", tmp_path / "adapters", "--engine", "vllm")
    assert done.code == 2 and "loaded from S3 only" in done.err
