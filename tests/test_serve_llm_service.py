"""The application of the rendered ray-service.yaml, deployed as KubeRay does, on a real Ray with Serve LLM and vLLM."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray.serve.llm")

import openai
import yaml
from manifests import hyperpod, objects
from ray_head import RayHead, free_ports
from s3_server import account, put_adapters
from serving_server import WARM_START, make_adapters

from clew.serving.limits import GUARDED, KEY_VARIABLE

pytestmark = pytest.mark.serve_llm
KEY = "0123456789abcdef0123456789abcdef"
NAME = "mixed_qwen3vl"


def deploy(head: RayHead, config: dict[str, Any]) -> None:
    """Gives Ray's dashboard a configuration and waits until it is served: what KubeRay does with ``serveConfigV2``."""
    url = f"{head.address}/api/serve/applications/"
    put = urllib.request.Request(url, json.dumps(config).encode(), {"Content-Type": "application/json"}, method="PUT")
    urllib.request.urlopen(put, timeout=120).close()
    until = time.monotonic() + 400
    while True:
        with urllib.request.urlopen(url, timeout=60) as answer:
            (application,) = json.load(answer)["applications"].values()
        if application["status"] == "RUNNING":
            return
        assert application["status"] != "DEPLOY_FAILED" and time.monotonic() < until, application
        time.sleep(1)


@pytest.fixture(scope="module")
def url(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the service is. Of the manifest it has all but the model, the bucket, the GPU and the address."""
    folder = tmp_path_factory.mktemp("service")
    make_adapters(folder)
    (port,) = free_ports(1)
    config = yaml.safe_load(objects(hyperpod())["ray-service.yaml"]["spec"]["serveConfigV2"])
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    with pytest.MonkeyPatch.context() as patch:
        environment = {**account(s3), **GUARDED, KEY_VARIABLE: KEY, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        for key, value in environment.items():
            patch.setenv(key, value)
        adapters = put_adapters(folder, ("good-1", "good-2", "truncated", "pickled"), "service")
        arguments = config["applications"][0]["args"]
        assert arguments["engines"] == 2
        arguments |= {"model": str(WARM_START), "adapters": adapters, "device": "cpu"}
        head = RayHead(cpus=8)
        try:
            deploy(head, config)
            yield f"http://127.0.0.1:{port}"
        finally:
            head.close()


def test_it_is_served_as_clew_serves(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    assert [card.id for card in client.models.list()][:2] == [NAME, f"{NAME}:good-1"]

    def ask(model: str, **options: Any) -> str:
        messages = [{"role": "user", "content": "up or down"}]
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0, **options)
        return answer.choices[0].message.content or ""

    base, good = ask(NAME), ask(f"{NAME}:good-1")
    assert base != good
    for broken in ("truncated", "pickled"):
        with pytest.raises(openai.UnprocessableEntityError, match=broken):
            ask(f"{NAME}:{broken}")
        assert ask(f"{NAME}:good-1") == good
    with pytest.raises(openai.NotFoundError):
        ask(f"{NAME}:nobody")
    with pytest.raises(openai.BadRequestError, match="special token"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "<|im_end|>"}])


def test_its_door_is_guarded(url: str) -> None:
    """KubeRay's probe passes without the key, nothing else does."""
    with urllib.request.urlopen(f"{url}/-/healthz", timeout=30) as answer:
        assert answer.read() == b"success"
    for key in ("none", KEY[:-1]):
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0).models.list()


def test_what_the_manifest_gets_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clew.errors import UserError
    from clew.serving.service import chat

    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"{KEY_VARIABLE} is not set"):
        chat({"model": str(WARM_START), "name": "x"})
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(ValueError, match="modle"):
        chat({"modle": "/x", "name": "x"})
    with pytest.raises(UserError, match="S3 only"):
        chat({"model": str(WARM_START), "name": "x", "adapters": str(tmp_path)})
