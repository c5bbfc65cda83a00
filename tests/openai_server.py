"""A small OpenAI-compatible server around the transformers engine, independent of ``clew.serving``.

It renders a conversation with the model folder's own chat template, whole, at every request, and computes it from its
beginning: the reference that clients and pages are tested against.
"""

from __future__ import annotations

import base64
import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from PIL import Image

from clew.agent.ledger import Trajectory, Turn
from clew.envs.base import Task
from clew.policy.adapter import Adapter
from clew.policy.model import VisionLanguageModel, load_model
from clew.policy.paths import resolve_model_path
from clew.policy.vision import FeatureCache
from clew.recipe import load_recipe
from clew.rollout.engine import Sampling
from clew.rollout.transformers_engine import TransformersEngine

Hook = Callable[[int, dict[str, Any]], Response | None]


class ReferenceServer:
    """``base`` and its adapters, over chat completions.

    Attributes:
        url: where it listens.
        asked: the bodies of all chat requests.
        ledgers: the token ids of the conversations that were answered.
        hook: called with (number of the request, body); what it returns is the answer instead.
        key: the bearer token it wants, if any.
    """

    def __init__(
        self, vlm: VisionLanguageModel, name: str = "base", adapters: Mapping[str, Adapter] | None = None
    ) -> None:
        self.vlm, self.name, self.adapters = vlm, name, dict(adapters or {})
        self.url = ""
        self.key: str | None = None
        self.asked: list[dict[str, Any]] = []
        self.ledgers: list[list[int]] = []
        self.hook: Hook = lambda number, body: None
        self._engine = TransformersEngine(vlm, FeatureCache(vlm.model.model.visual, vlm.patcher))
        self._loaded: str | None = None
        self._lock = threading.Lock()

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(self._models)
        app.post("/v1/chat/completions")(self._chat)
        return app

    def _models(self, request: Request) -> Response:
        if (refusal := self._unauthorised(request)) is not None:
            return refusal
        ids = [self.name, *(f"{self.name}:{adapter}" for adapter in self.adapters)]
        return JSONResponse({"object": "list", "data": [{"id": i, "object": "model"} for i in ids]})

    def _chat(self, request: Request, body: dict[str, Any]) -> Response:
        with self._lock:
            if (refusal := self._unauthorised(request)) is not None:
                return refusal
            self.asked.append(body)
            if (instead := self.hook(len(self.asked), body)) is not None:
                return instead
            base, _, adapter = body["model"].partition(":")
            if base != self.name or (adapter and adapter not in self.adapters):
                return error(404, f"there is no model {body['model']}", "model_not_found")
            return self._answer(adapter or None, body)

    def _unauthorised(self, request: Request) -> Response | None:
        wanted = f"Bearer {self.key}"
        return error(401, "no such key") if self.key and request.headers.get("authorization") != wanted else None

    def _answer(self, adapter: str | None, body: dict[str, Any]) -> Response:
        if adapter != self._loaded:
            self._engine.load_adapter(self.adapters[adapter] if adapter else None)
            self._loaded = adapter
        trajectory = self._ledger(body["messages"])
        self.ledgers.append(trajectory.token_ids)
        sampling = Sampling(body["temperature"], body["max_tokens"])
        self._engine.release()
        (completion,) = self._engine.sample([trajectory], sampling, [body["seed"] % 2**64])
        text = self.vlm.tokenizer.decode(completion.ids[: len(completion.ids) - completion.ended])
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        choice["finish_reason"] = "stop" if completion.ended else "length"
        usage = {"prompt_tokens": len(trajectory.token_ids), "completion_tokens": len(completion.ids)}
        return JSONResponse({"object": "chat.completion", "model": body["model"], "choices": [choice], "usage": usage})

    def _ledger(self, messages: list[dict[str, Any]]) -> Trajectory:
        """The whole conversation by Hugging Face's own template and image processor."""
        rendered = self.vlm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        parts = [part for m in messages if m["role"] == "user" for part in m["content"]]
        frames = [_frame(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]
        trajectory = Trajectory(Task("chat", 0, "chat"), 0)
        grids = self.vlm.patcher.processor(images=frames, return_tensors="pt")["image_grid_thw"].tolist()
        before, *rest = rendered.split("<|image_pad|>")
        text = before
        for (t, h, w), after in zip(grids, rest, strict=True):
            text += "<|image_pad|>" * (t * h * w // self.vlm.merge_size**2) + after
        trajectory.token_ids = self.vlm.tokenizer(text, add_special_tokens=False)["input_ids"]
        trajectory.grids = [tuple(grid) for grid in grids]
        trajectory.turns = [Turn("", frame) for frame in frames]
        return trajectory


def error(status: int, message: str, code: str | None = None, **headers: str) -> Response:
    """An error as OpenAI's API words it."""
    content = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(content, status, headers={name.replace("_", "-"): value for name, value in headers.items()})


def _frame(url: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))))


def noise_adapter(vlm: VisionLanguageModel, scale: float = 0.1) -> Adapter:
    """An adapter that nobody trained: it changes what the model does, for good or bad."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for name, module in vlm.model.model.language_model.named_modules():
        if name.endswith("_proj"):
            rows, cols = module.weight.shape
            key = f"base_model.model.model.language_model.{name}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(2, cols, generator=random)
            tensors[f"{key}B.weight"] = scale * torch.randn(rows, 2, generator=random)
    return Adapter("noise", tensors, {"r": 2, "lora_alpha": 2})


@contextlib.contextmanager
def warm_start_server() -> Iterator[ReferenceServer]:
    """The model that comes with the package, and ``noise`` on top of it."""
    vlm = load_model(resolve_model_path(load_recipe("laptop", ()).model))
    server = ReferenceServer(vlm, "warm-start", {"noise": noise_adapter(vlm)})
    with listening(server.app()) as server.url:
        yield server


@contextlib.contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Serves an app on a free port of this machine; yields its address."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    (socket,) = server.servers[0].sockets
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
